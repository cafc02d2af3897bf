"""Changes of core attention that no configuration key expresses, for attribution experiments.

A variant wraps one backend's function inside the process that trains a cell; nothing of it can be
reached from a training configuration. Each says what it computes and which configuration it starts
from, so that a cell differs from its control in one thing.

Shape legend: s tokens, b batch, h query heads, kv_heads key/value heads, d head dim (sbhd).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron_patch.attention.backends.call import AttentionCall, Result
    from megatron_patch.schema.run import RunConfig

    Function = Callable[[AttentionCall], Result]


class VariantError(ValueError):
    """A variant that is not known, or does not fit the configuration."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One change."""

    meaning: str
    """What is computed, one line, for tables."""
    wrap: Callable[[Function], Function] | None
    """From the backend's function to the changed one; None: unchanged."""
    backends: tuple[str, ...] = ("stable_flash", "sdpa_flash", "sdpa_cudnn", "reference")
    """Values of ``attention.backend`` it can be applied to."""
    stabilizer: str | None = None
    """The ``attention.stabilizer`` it starts from, where that matters."""

    def unmet(self, run: RunConfig) -> list[str]:
        """Why the variant does not fit a configuration; empty if it does."""
        found = []
        attention = run.attention
        if self.wrap is not None and attention.backend not in self.backends:
            found.append(
                f"attention.backend is {attention.backend!r}; it changes "
                f"{' or '.join(self.backends)}"
            )
        if self.stabilizer is not None and attention.stabilizer != self.stabilizer:
            found.append(
                f"attention.stabilizer is {attention.stabilizer!r}; it starts from "
                f"{self.stabilizer!r}, so that the control differs in one thing"
            )
        if self.wrap is not None and run.model.attention_dropout > 0:
            found.append("model.attention_dropout must be 0")
        return found


def _options(**options: Any) -> Callable[[Function], Function]:
    """A variant that is a setting of `stable_attention` outside its named stabilizers."""

    def wrap(run: Function) -> Function:
        def changed(call: AttentionCall) -> Result:
            return run(
                dataclasses.replace(call, options=dataclasses.replace(call.options, **options))
            )

        return changed

    return wrap


def center_keys(run: Function) -> Function:
    """K - mean over tokens, per sequence and head.

    The scores of a row all move by the same amount, so the softmax is what it was (but for the
    rounding of the shifted K to 16 bits); what changes is dQ = dS K, in which an error e of delta
    is multiplied by P K. The mean is a constant of the backward pass: dK of the shifted K is dK of
    K. The kernel's largest logits are those of the shifted K, no figure to put beside another
    run's: an observer gets none, and computes its own.
    """

    def changed(call: AttentionCall) -> Result:
        import torch

        with torch.no_grad():
            mean = call.k.float().mean(0, keepdim=True)
        result = run(dataclasses.replace(call, k=_minus(call.k, mean)))
        if call.observed is not None:
            call.observed.pop("max_logits", None)
        return result

    return changed


def center_values(run: Function) -> Function:
    """V - c and O + c, with c the mean of O over tokens, per sequence and query head.

    Rows of P sum to one, so O is what it was. The O that is stored in 16 bits and read back for
    delta is O - c, which is small where a sink makes all rows alike. c comes from a first pass
    without gradients and is a constant of the backward pass. Needs as many key/value heads as
    query heads. O - c is rounded to 16 bits before c is added.
    """

    def changed(call: AttentionCall) -> Result:
        import torch

        if call.q.shape[2] != call.v.shape[2]:
            raise ValueError(
                f"v_centered with {call.q.shape[2]} query and {call.v.shape[2]} value heads: it "
                "needs as many of both (remove model.num_query_groups)"
            )
        with torch.no_grad():
            first = run(dataclasses.replace(call, want_max_logits=False, observed=None))[0]
            mean = first.float().mean(0, keepdim=True)
        held: dict[str, torch.Tensor] | None = None if call.observed is None else {}
        out, top = run(dataclasses.replace(call, v=_minus(call.v, mean), observed=held))
        if call.observed is not None and held and "max_logits" in held:
            # The low-order part is that of O - c, which an observer would add to O.
            call.observed["max_logits"] = held["max_logits"]
        return (out.float() + mean).to(out.dtype), top

    return changed


def _minus(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return (x.float() - mean).to(x.dtype)


def float32_attention(run: Function) -> Function:
    """Attention in float32 from the same BF16 q, k, v: products of split P and dS.

    O is rounded to 16 bits for the output projection only; the backward reads it in float32. On
    the CPU the blockwise reference does the same.
    """

    def changed(call: AttentionCall) -> Result:
        if call.q.device.type != "cuda":
            return run(call)
        from split_products import split_product_attention

        options = call.options
        if max(options.window_left, options.window_right) > 0 or call.sinks is not None:
            raise ValueError(
                "fp32_attention is full attention without window or sinks: remove them from the "
                "model"
            )
        out = split_product_attention(
            call.q,
            call.k,
            call.v,
            layout=options.layout,
            causal=options.causal,
            scale=options.scale,
        )
        return out, None

    return changed


_OURS = ("stable_flash",)
VARIANTS: dict[str, Variant] = {
    "plain": Variant("the backend as it is", None),
    "low_order_o": Variant(
        "O's low-order part kept for delta (BF16), O divided by the sum of unrounded P",
        _options(stabilizer="low_order_o"),
        _OURS,
        "none",
    ),
    "consistent_sum": Variant(
        "O divided by the sum of the rounded P, delta from the 16-bit O",
        _options(stabilizer="consistent_sum"),
        _OURS,
        "none",
    ),
    "fp32_o": Variant(
        "delta from the float32 O, O divided by the sum of unrounded P",
        _options(stabilizer="low_order_o", o_lo="fp32"),
        _OURS,
        "none",
    ),
    "fp32_o_consistent_sum": Variant(
        "delta from the float32 O, O divided by the sum of the rounded P",
        _options(stabilizer="compensated", o_lo="fp32"),
        _OURS,
        "none",
    ),
    "k_centered": Variant("K minus its mean over tokens", center_keys),
    "v_centered": Variant("V minus the mean of O over tokens, added back to O", center_values),
    "fp32_attention": Variant("attention in float32", float32_attention, ("reference",)),
}


def install(name: str, run: RunConfig) -> None:
    """Change the configured backend's function for the rest of this process.

    Raises:
        VariantError: no such variant, or it does not fit the configuration.
    """
    from megatron_patch.attention.backends import BACKENDS

    if name not in VARIANTS:
        raise VariantError(f"variant {name!r} is not known; there are {', '.join(VARIANTS)}")
    variant = VARIANTS[name]
    unmet = variant.unmet(run)
    if unmet:
        raise VariantError(f"variant {name!r} does not fit: {'; '.join(unmet)}")
    if variant.wrap is None:
        return
    row = BACKENDS[run.attention.backend]
    assert row.run is not None  # those of `Variant.backends` have one
    changed = functools.wraps(row.run)(variant.wrap(row.run))
    changed.variant = name  # type: ignore[attr-defined]  # captures name it: stability.observe
    BACKENDS[row.name] = dataclasses.replace(row, run=changed)
