"""Looking at one core-attention call of a step: its tensors going forward, dO coming back.

Hooks stand on the core-attention modules during observed steps only; other steps run without
them. A module's n-th call *with gradients* belongs to micro-batch n: activation recompute runs its
first pass without gradients, and evaluation has none. The gradient arrives through a hook on the
node that made the module's output, whichever backend computes it.

Shape legend: s tokens of this rank, b micro-batch, h query heads and kv key/value heads of this
tensor-parallel rank, d, dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.stability.sampling import Geometry

_CAUSAL = (AttnMaskType.causal, AttnMaskType.causal_bottom_right, AttnMaskType.padding_causal)
_CORE_NAMES = {row.module[1]: row.name for row in BACKENDS.values() if row.module}


@dataclass(frozen=True, slots=True)
class Site:
    """One core-attention module of this rank."""

    module: torch.nn.Module
    layer: int
    """0-based over the whole model; multi-token-prediction layers follow the decoder's."""
    name: str
    attention: torch.nn.Module
    """The module around it, which holds the projections."""

    @property
    def backend(self) -> str:
        """Backend by name, as of now: the guard may exchange it."""
        found = getattr(self.module, "backend_name", None)
        return found or _CORE_NAMES.get(type(self.module).__name__, type(self.module).__name__)

    @property
    def stabilizer(self) -> str:
        """Numerics by name; empty where the backend has no choice."""
        row = BACKENDS.get(self.backend)
        if row is None or not row.stabilizers:
            return ""
        module: Any = self.module
        return str(module.options.get("stabilizer", "compensated"))

    @property
    def exact_delta(self) -> bool:
        """Whether its backward does not build delta from a stored 16-bit O."""
        row = BACKENDS.get(self.backend)
        return row is not None and row.exact_delta

    @property
    def variant(self) -> str:
        """What an experiment has put in the place of the backend's function, by name; empty if
        nothing. No configuration tells of it: the function that the module calls has the name as
        its attribute ``variant``."""
        return str(getattr(getattr(self.module, "_run", None), "variant", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One call: detached tensors that share the storage of the graph's."""

    site: Site
    q: torch.Tensor  # [s, b, h, d]
    k: torch.Tensor  # [s, b, kv, d]
    v: torch.Tensor  # [s, b, kv, dv]
    out: torch.Tensor  # [s, b, h, dv]
    low: torch.Tensor | None
    max_logits: torch.Tensor | None
    sinks: torch.Tensor | None
    geometry: Geometry
    dropout_p: float


Callback = Callable[[Seen, torch.Tensor], None]
"""Called in the backward pass with dO [s, b, h, dv]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Which call of a step somebody wants to see."""

    micro_batch: int
    layers: frozenset[int] | None
    """None: all."""
    callback: Callback

    def wants(self, site: Site, call: int) -> bool:
        """Whether this is the call."""
        return call == self.micro_batch and (self.layers is None or site.layer in self.layers)


def layer_of(root: torch.nn.Module, name: str, *, decoder_layers: int) -> int | None:
    """Layer index of a module or parameter name inside a GPTModel; None outside the layers."""
    parts = name.split(".")
    if len(parts) < 3 or parts[1] != "layers" or not parts[2].isdigit():
        return None
    if parts[0] == "mtp":
        return decoder_layers + int(parts[2])
    if parts[0] != "decoder":
        return None
    # Numbers count over the whole model, positions in the list over this pipeline chunk.
    return int(root.get_submodule(".".join(parts[:3])).layer_number) - 1  # type: ignore[arg-type]


def find_sites(roots: Sequence[torch.nn.Module], *, decoder_layers: int) -> list[Site]:
    """Every core attention of the GPTModels of this rank."""
    sites = []
    for root in roots:
        for name, module in root.named_modules():
            if not name.endswith(".core_attention"):
                continue
            layer = layer_of(root, name, decoder_layers=decoder_layers)
            if layer is not None:
                around = root.get_submodule(name.rpartition(".")[0])
                sites.append(Site(module, layer, name, around))
    return sites


class Observer:
    """Hooks on the sites for one step at a time.

    Args:
        sites: from `find_sites`.
        cp_group: process group the sequence is split over, None if it is whole.
    """

    def __init__(self, sites: Sequence[Site], *, cp_group: Any = None) -> None:
        self.sites = list(sites)
        self._cp_group = cp_group
        self._requests: list[Request] = []
        self._calls: dict[int, int] = {}
        self._handles: list[Any] = []

    def arm(self, requests: Sequence[Request]) -> None:
        """Watch from now on until `disarm`; nothing to watch costs nothing."""
        self.disarm()
        self._requests, self._calls = list(requests), {}
        for site in self.sites if requests else []:
            self._handles.append(
                site.module.register_forward_pre_hook(self._before(site), with_kwargs=True)
            )
            self._handles.append(
                site.module.register_forward_hook(self._after(site), with_kwargs=True)
            )

    def disarm(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._requests = [], []
        for site in self.sites:
            if getattr(site.module, "observed", None) is not None:
                site.module.observed = None  # type: ignore[assignment]

    def _wanted(self, site: Site) -> list[Request]:
        if not torch.is_grad_enabled():
            return []
        call = self._calls.get(id(site.module), 0)
        return [r for r in self._requests if r.wants(site, call)]

    def _before(self, site: Site) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if hasattr(module, "observed") and self._wanted(site) and not _packed(args, kwargs):
                module.observed = {}

        return hook

    def _after(self, site: Site) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            wanted = self._wanted(site)
            self._calls[id(site.module)] = self._calls.get(id(site.module), 0) + 1
            if not wanted or not output.requires_grad or _packed(args, kwargs):
                return
            seen = self._seen(site, args, kwargs, output)
            for request in wanted:
                # Of the node, not of the tensor: these run after those of the tensor, one of which
                # brings back q, k and v where the up-projections of multi-latent attention are
                # recomputed (mla_up_proj). Until then their storage is empty.
                hook = _on_gradient(request.callback, seen, output.output_nr)
                output.grad_fn.register_prehook(hook)  # type: ignore[union-attr]

        return hook

    def _seen(self, site: Site, args: Any, kwargs: Any, output: torch.Tensor) -> Seen:
        module: Any = site.module
        q, k, v = (
            (args[i] if len(args) > i else kwargs[name]).detach()
            for i, name in enumerate(("query", "key", "value"))
        )
        observed = getattr(module, "observed", None) or {}
        if hasattr(module, "observed"):
            module.observed = None
        mask = kwargs.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
        sinks = getattr(module, "softmax_offset", None)
        # Detached: a hook that held the very tensor it stands on would never be freed.
        out = output.detach().reshape(*q.shape[:3], v.shape[-1])
        return Seen(
            site=site,
            q=q,
            k=k,
            v=v,
            out=out,
            low=observed.get("low"),
            max_logits=observed.get("max_logits"),
            sinks=None if sinks is None else sinks.detach(),
            geometry=Geometry(
                scale=_scale(module, q.shape[-1]),
                causal=mask in _CAUSAL,
                window=_window(module),
                group=self._cp_group,
            ),
            dropout_p=_dropout(module),
        )


def _on_gradient(
    callback: Callback, seen: Seen, number: int
) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
    """Calls back with the gradient of output ``number`` of a node of the graph."""

    def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if gradient is None:  # another output of the node alone was used
            return
        with torch.no_grad():
            callback(seen, gradient.detach().reshape(seen.out.shape))

    return hook


def _packed(args: Any, kwargs: Any) -> bool:
    """Packed sequences (thd) are not observed; the trainer does not produce them."""
    params = args[6] if len(args) > 6 else kwargs.get("packed_seq_params")
    return params is not None and getattr(params, "qkv_format", None) == "thd"


def _scale(module: Any, head_dim: int) -> float:
    scale = getattr(module, "softmax_scale", None)
    if scale is None:
        return float(head_dim) ** -0.5
    if type(module).__name__ == "DotProductAttention" and (
        module.config.apply_query_key_layer_scaling
    ):
        return float(scale) * module.layer_number  # core divides here and multiplies in its softmax
    return float(scale)


def _window(module: Any) -> tuple[int, int] | None:
    if hasattr(module, "observed"):
        window: tuple[int, int] | None = module.window
        return window
    config = module.config
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, module.layer_number
    ):
        return None
    return int(config.window_size[0]), int(config.window_size[1])


def _dropout(module: Any) -> float:
    if not module.training:
        return 0.0
    own = getattr(module, "dropout_p", None)
    return float(module.config.attention_dropout if own is None else own)
