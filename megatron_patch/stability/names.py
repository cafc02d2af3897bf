"""Names of what is measured, and the numbers derived from them. No torch: readers import it."""

from __future__ import annotations

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
}
"""Per layer and query head. NaN where not measured."""

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

EXACT_DELTA = ("stable_flash/compensated", "fa4/compensated")
"""How meta.json names attention (backend/stabilizer[_projected][/backward]) begins where the
low-order part of O is in delta: the guard has nothing to switch to."""

LEVELS = ("ok", "watch", "danger")


def level_name(code: float) -> str:
    """ok, watch or danger."""
    return LEVELS[int(code)]
