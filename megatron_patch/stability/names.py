"""Names of what is measured, and the numbers derived from them. No torch: readers import it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

HEAD_METRICS = {
    "max_logit": "largest scaled, masked logit of the observed micro-batches",
    "delta_error_mean": "mean of e over RMS(delta); e: what a plain 16-bit O gets wrong in delta",
    "delta_error_rms": "RMS of e over RMS(delta)",
    "delta_error_sign": "mean sign of e, -1..1",
    "used_error_mean": "the same mean for the O that delta was really built from",
    "used_error_rms": "the same RMS for the O that delta was really built from",
    "kappa": "RMS(delta) over RMS under P of (dP - delta)",
    "growth_noise": "RMS of the used e x the row's mean logit over RMS of what would be the true "
    "derivative by a factor on the row's logits: above 1 the error decides whether they grow",
    "common_logit": "scaled q . mean of K, mean over rows: the part of the logits that all keys "
    "share, and a softmax without sink logits does not see",
    "entropy": "entropy of a row of P, nats, mean",
    "first_token_mass": "attention mass on the first token, mean",
    "top_mass": "largest probability of a row, mean",
    "delta_rms": "RMS(delta), absolute: the unit of the errors",
    "wq_norm": "spectral norm of the head's slice of W_Q",
    "wk_norm": "spectral norm of the slice of W_K the head attends with",
    "dk_sum": "size of the sum of dK over the keys, exactly zero, over the rounding of dK: how far "
    "the run's own gradients are from exact ones",
    "dv_sum": "size of the sum of dV less that of dO, likewise over the rounding of dV",
}
"""Per layer and query head. NaN where not measured. New ones stand at the end: records of versions
before them are read, and continued without them."""

LAYER_METRICS = {"grad_norm": "norm of the gradients of the layer's parameters, before clipping"}

SCALARS = {
    "loss_mean": "mean token loss over the steps since the last record",
    "loss_max": "largest loss of one of them",
    "grad_norm_mean": "mean gradient norm over the steps since the last record",
    "grad_norm_max": "largest gradient norm of one of them",
    "lr": "learning rate of the last of them",
    "grad_norm_rest": "norm of the gradients outside the layers (embedding, output, last norm)",
    "spike_score": "how far the largest gradient norm lies above the recent ones, in deviations",
    "level": "verdict: 0 ok, 1 watch, 2 danger",
    "switched": "step after which the guard switched the stabilizer, 0 if it did not",
    "rows": "query rows sampled per head of a layer, over all ranks",
}

LEVELS = ("ok", "watch", "danger")


def coherence(mean: np.ndarray, rms: np.ndarray) -> np.ndarray:
    """|mean| / RMS of the error: 1 when all rows of a head err alike, 1 / sqrt(rows) if they do
    not know of each other."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rms > 0, np.abs(mean) / rms, np.nan)


def common_share(common: np.ndarray, largest_logit: np.ndarray) -> np.ndarray:
    """How much of a head's largest logit all keys share, -1 to 1; NaN where there are no logits.

    A common part that is larger than the largest logit (which then is what is left of it) is all.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(common / np.maximum(np.abs(largest_logit), np.abs(common)))


def bias_to_signal(mean: np.ndarray, kappa: np.ndarray) -> np.ndarray:
    """|mean| x kappa: the coherent error of delta over RMS_P(dP - delta), which it disturbs."""
    return np.asarray(np.abs(mean) * kappa)


def error_to_signal(rms: np.ndarray, kappa: np.ndarray) -> np.ndarray:
    """RMS x kappa: the whole error of delta, coherent or not, over the same signal."""
    return np.asarray(rms * kappa)


# Of these the smallest head is the one to look at; of the others the largest (by size).
SMALLEST = ("entropy",)


def largest(values: np.ndarray) -> np.ndarray:
    """Of [layers, heads], the head with the largest value in each layer; 0 where all are NaN."""
    return np.asarray(np.where(np.isnan(values), -np.inf, values).argmax(axis=1))


def worst(name: str, values: np.ndarray) -> np.ndarray:
    """Of a head metric [layers, heads], the head to look at in each layer: [layers], NaN if none.

    The smallest entropy, the error mean that is largest in size (with its sign), else the largest.
    """
    if name in SMALLEST:
        size = -values
    else:
        signed = (values < 0).any(axis=1, keepdims=True)
        size = np.where(signed, np.abs(values), values)
    heads = largest(size)
    found = np.take_along_axis(values, heads[:, None], axis=1)[:, 0].astype(np.float32)
    return np.where(np.isfinite(values).any(axis=1), found, np.float32(np.nan))


def shown(
    scalars: Mapping[str, float], layers: Mapping[str, np.ndarray], heads: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Finite values of a record by full name, the worst head of each layer."""
    found = {f"stability/{n}": v for n, v in scalars.items() if math.isfinite(v)}
    worst_heads = {name: worst(name, values) for name, values in heads.items()}
    for name, values in ({**layers} | worst_heads).items():
        for layer, value in enumerate(values):
            if math.isfinite(value):
                found[f"stability/{name}/layer_{layer:03d}"] = float(value)
    return found


def summary(scalars: Mapping[str, float], heads: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The same of the worst head of the model, for a table of steps; level and spike score.

    Args:
        scalars: as `shown` returns them.
        heads: of the same record.
    """
    tables = {name: heads[name] for name in ("max_logit", "delta_error_rms", "kappa")}
    tables["coherence"] = coherence(heads["delta_error_mean"], heads["delta_error_rms"])
    known = {name: np.nanmax(table) for name, table in tables.items() if np.isfinite(table).any()}
    found = {f"stability/{name}": float(value) for name, value in known.items()}
    logged = ("stability/level", "stability/spike_score")
    return {name: scalars[name] for name in logged if name in scalars} | found
