"""Looking at one core-attention call of a step: its tensors going forward, dO coming back.

Hooks stand on the core-attention modules during observed steps only; other steps run without
them. A module's n-th call *with gradients* belongs to micro-batch n: activation recompute runs its
first pass without gradients, and evaluation has none. dO arrives through a hook on the node that
made the module's output, dK and dV through hooks on the tensors that attention received, whichever
backend computes them.

`Watched` says what of a model is observed: `watched_chunks` finds it in Megatron-Core's models, the
adapters in others.

Shape legend: s tokens of this rank, b micro-batch, h query heads and kv key/value heads of this
tensor-parallel rank, d, dv head dims.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.capabilities import OURS
from megatron_patch.context_parallel.packed import documents_of
from megatron_patch.parallel.buffers import unwrap
from megatron_patch.stability import compiled
from megatron_patch.stability.numbering import layer_of, layers_in, whole_name
from megatron_patch.stability.sampling import Geometry
from stable_attention.eager import batched, recorded
from stable_attention.ops import under_autocast

log = logging.getLogger(__name__)
_CAUSAL = (AttnMaskType.causal, AttnMaskType.causal_bottom_right, AttnMaskType.padding_causal)
_CORE_NAMES = {row.module[1]: row.name for row in BACKENDS.values() if row.module}


def attention_name(backend: str, stabilizer: str, backward: str) -> str:
    """Backend, stabilizer and a borrowed backward, as meta.json names attention."""
    return "/".join([backend, stabilizer] + [backward] * (backward not in OURS))


@dataclass(frozen=True, slots=True)
class Site:
    """One core-attention module of this rank."""

    module: torch.nn.Module
    layer: int
    """0-based over the whole model; multi-token-prediction layers follow the decoder's."""
    name: str
    attention: torch.nn.Module
    """The module around it, which holds the projections."""
    read: Callable[[Site, Any, Any, torch.Tensor], Seen | None] | None = None
    """Makes a `Seen` of (site, args, kwargs, output) of a call; None: as Megatron-Core calls."""
    order: str = "sbhd"
    """Of the output's axes, of which the last two may be one."""
    inputs_order: str = "sbhd"
    """Of those of k and v."""
    hooked: bool = True
    """Whether hooks on the module see its calls; else somebody tells `Observer.called` of them."""
    library: str = ""
    """Stabilizer of ``stable_attention``, where the module is of another program and calls it."""

    @property
    def backend(self) -> str:
        """Backend by name, as of now: the guard may exchange it."""
        if self.library:
            return "stable_flash"
        found = getattr(self.module, "backend_name", None)
        return found or _CORE_NAMES.get(type(self.module).__name__, type(self.module).__name__)

    @property
    def stabilizer(self) -> str:
        """Numerics by name; empty where the backend has no choice."""
        if self.library:
            return self.library
        row = BACKENDS.get(self.backend)
        if row is None or not row.stabilizers:
            return ""
        module: Any = self.module
        return str(module.options.get("stabilizer", "compensated"))

    @property
    def numerics(self) -> str:
        """Both and a borrowed backward, as meta.json has them."""
        options = getattr(self.module, "options", {})
        return attention_name(self.backend, self.stabilizer, options.get("backward", "own"))

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
    softcap: bool = False
    """Whether logits go through a tanh."""
    inputs: Any = None
    """(k, v) of the graph, on which hooks can stand, while the call returns; None afterwards."""
    version: int | None = None
    """Of ``out`` when the call returned."""

    @property
    def changed(self) -> bool:
        """Whether ``out`` has been changed in place since: no backward pass of this call reads it,
        and it is no output of attention any more."""
        return self.version not in (None, self.out._version)


def seen_call(
    site: Site,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    **more: Any,
) -> Seen:
    """A call whose q, k, v have axes in ``site.inputs_order`` and the output in ``site.order``.

    ``more``: ``dropout_p``, ``sinks``, ``softcap`` of `Seen`; scale default: 1 / sqrt(head dim).
    """
    sizes = [[x.shape[site.inputs_order.index(axis)] for axis in "sbhd"] for x in (q, k, v)]
    # Autocast rounds them inside the call: what is compared with O is attention of those.
    used = under_autocast(q, k, v) if output.element_size() == 2 else (q, k, v)
    three = [to_sbhd(x.detach(), site.inputs_order, n) for x, n in zip(used, sizes, strict=True)]
    geometry = Geometry(scale=scale or sizes[0][3] ** -0.5, causal=causal, window=window)
    return Seen(
        site=site, q=three[0], k=three[1], v=three[2], inputs=(k, v), low=None, max_logits=None,
        out=to_sbhd(output.detach(), site.order, [*sizes[0][:3], sizes[2][3]]),
        geometry=geometry, **({"dropout_p": 0.0, "sinks": None} | more),
    )  # fmt: skip


Callback = Callable[[Seen, torch.Tensor], None]
"""Called in the backward pass with dO [s, b, h, dv]."""
InputCallback = Callable[[Seen, str, torch.Tensor], None]
"""Called there with ``k`` or ``v`` and its gradient, [s, b, kv, d or dv]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationRequest:
    """Which call of a step somebody wants to see."""

    micro_batch: int
    layers: frozenset[int] | None
    """None: all."""
    callback: Callback
    inputs: InputCallback | None = None

    def wants(self, site: Site, call: int) -> bool:
        """Whether this is the call."""
        return call == self.micro_batch and (self.layers is None or site.layer in self.layers)


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
                sites.append(Site(module, layer, whole_name(name, layer), around))
    return sites


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What of a model is observed."""

    sites: list[Site]
    layers: int
    """Of the whole model, those without attention included."""
    heads: int
    """Query heads of the whole model."""
    kv_heads: int
    layer_of: Callable[[torch.nn.Module, str], int | None]
    """Layer of a parameter, by its module and name; None outside the layers."""
    chunks: Sequence[Any]
    """Wrapped model chunks, whose gradients are measured; roots: the models inside, in order."""
    roots: Sequence[torch.nn.Module]


def watched_chunks(chunks: Sequence[Any]) -> Watched:
    """Of Megatron-Core's model chunks, wrapped or not.

    Raises ValueError: they are of another library.
    """
    roots = [unwrap(chunk) for chunk in chunks]
    config: Any = getattr(roots[0], "config", None)
    if not (hasattr(config, "num_layers") and hasattr(config, "num_query_groups")):
        raise ValueError(
            f"{type(roots[0]).__name__} is no model of Megatron-Core; name its attention modules "
            "with megatron_patch.stability.adapters.torch_loop.watch, or use the adapter of its "
            "library (docs/integrations.md)"
        )
    layers = int(config.num_layers)
    return Watched(
        sites=find_sites(roots, decoder_layers=layers),
        layers=layers + int(getattr(config, "mtp_num_layers", None) or 0),
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_query_groups or config.num_attention_heads),
        layer_of=functools.partial(layer_of, decoder_layers=layers),
        chunks=list(chunks),
        roots=roots,
    )


def watched_modules(
    model: torch.nn.Module,
    found: dict[str, torch.nn.Module],
    *,
    heads: int,
    kv_heads: int | None,
    **options: Any,
) -> Watched:
    """Of a model that is not Megatron-Core's: modules by their whole names, at least one.

    Args:
        model: wrapped or not; its gradients are whole on every rank.
        found: attention modules, each with its layer's number in its name.
        heads, kv_heads: query and key/value heads.
        options: of every `Site`.
    """
    layers = layers_in(found)
    # Of modules of one block, the first one's.
    prefixes = {prefix: layer for layer, prefix in reversed(layers.values())}

    def layer_of(_: torch.nn.Module, name: str) -> int | None:
        return next((n for prefix, n in prefixes.items() if name.startswith(prefix)), None)

    return Watched(
        sites=[Site(m, layers[name][0], name, m, **options) for name, m in found.items()],
        layers=1 + max(layer for layer, _ in layers.values()),
        heads=heads,
        kv_heads=kv_heads or heads,
        layer_of=layer_of,
        chunks=[model],
        roots=[unwrap(model)],
    )


class Observer:
    """Hooks on the sites for one step at a time.

    Args:
        sites: from `find_sites`.
        cp_group: process group the sequence is split over, None if it is whole.
    """

    def __init__(self, sites: Sequence[Site], *, cp_group: Any = None) -> None:
        self.sites = list(sites)
        self._cp_group = cp_group
        self._requests: list[ObservationRequest] = []
        self._calls: dict[int, int] = {}
        self._handles: list[Any] = []

    def arm(self, requests: Sequence[ObservationRequest]) -> None:
        """Watch from now on until `disarm`; nothing to watch costs nothing."""
        self.disarm()
        self._requests, self._calls = list(requests), {}
        if any(site.read for site in self.sites):
            compiled.look_for_hooks()
            if requests:
                compiled.hold(self)
        for site in [site for site in self.sites if site.hooked and requests]:
            self._handles += compiled.hooks(site.module) if site.read else []
            self._handles += [
                site.module.register_forward_pre_hook(self._before(site), with_kwargs=True),
                site.module.register_forward_hook(self._after(site), with_kwargs=True),
            ]

    def disarm(self, *, ended: bool = False) -> None:
        """Take all hooks off; ``ended``: the step is over, attention had to be called in it."""
        if ended and self._requests and self.sites and not self._calls:
            _warn_silent(self.sites[0].name)
        for handle in self._handles:
            handle.remove()
        self._handles, self._requests = [], []
        compiled.release(self)
        for site in self.sites:
            if getattr(site.module, "observed", None) is not None:
                site.module.observed = None  # type: ignore[assignment]

    def _wanted(self, site: Site) -> list[ObservationRequest]:
        if not recorded():
            return []
        call = self._calls.get(id(site.module), 0)
        return [r for r in self._requests if r.wants(site, call)]

    def _before(self, site: Site) -> Callable[..., None]:
        own: Any = site.module if hasattr(site.module, "observed") else None

        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if module is own and self._wanted(site) and self._sees(_packed(args, kwargs)):
                own.observed = {}

        return hook

    def _after(self, site: Site) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if module is site.module:  # a copy of it, made in an observed step, has this hook
                first = output[0] if isinstance(output, (tuple, list)) else output
                self.called(site, args, kwargs, first)

        return hook

    def called(self, site: Site, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        """The site's attention was called and returned ``output``; nothing without gradients."""
        if not self._requests or not recorded():
            return
        wanted = self._wanted(site)
        self._calls[id(site.module)] = self._calls.get(id(site.module), 0) + 1
        if not wanted or not getattr(output, "requires_grad", False):
            return
        seen = (site.read or self._core_call)(site, args, kwargs, output)
        if seen is not None:
            _add_hooks(wanted, seen, output)

    def _sees(self, packed: Any) -> bool:
        """Whether a call is observed: not that of packed documents over context-parallel ranks."""
        return packed is None or self._cp_group is None or self._cp_group.size() == 1

    def around(self, function: Any, sites: Sequence[Site]) -> Any:
        """``function(module, q, k, v, mask, *rest, **named)``, whose calls for sites are seen."""
        known, function = {site.module: site for site in sites}, compiled.traced(function)

        def observed(module: Any, *args: Any, **named: Any) -> Any:
            output = function(module, *args, **named)
            if module in known:
                self.called(known[module], args, named, output[0])
            return output

        return observed

    def _core_call(self, site: Site, args: Any, kwargs: Any, output: torch.Tensor) -> Seen | None:
        """A call as Megatron-Core makes it, packed documents as one sequence; None: not seen."""
        module: Any = site.module
        packed = _packed(args, kwargs)
        if not self._sees(packed):
            return None
        q, k, v = (
            args[i] if len(args) > i else kwargs[name]
            for i, name in enumerate(("query", "key", "value"))
        )
        inputs = k, v
        observed = dict(getattr(module, "observed", None) or {})
        if packed is not None:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
            if "low" in observed:
                observed["low"] = observed["low"].unsqueeze(1)
        if hasattr(module, "observed"):
            module.observed = None
        mask = kwargs.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
        sinks = getattr(module, "softmax_offset", None)
        return Seen(
            site=site, q=q.detach(), k=k.detach(), v=v.detach(), inputs=inputs,
            # Detached: a hook that held the very tensor it stands on would never be freed.
            out=output.detach().reshape(*q.shape[:3], v.shape[-1]),
            low=observed.get("low"), max_logits=observed.get("max_logits"),
            sinks=None if sinks is None else sinks.detach(), dropout_p=_dropout(module),
            geometry=Geometry(
                scale=_scale(module, q.shape[-1]),
                causal=mask in _CAUSAL,
                window=_window(module),
                group=self._cp_group,
                starts=None if packed is None else _starts(packed.cu_seqlens_q, q.shape[0]),
            ),
        )  # fmt: skip


def to_sbhd(x: torch.Tensor, order: str, shape: Sequence[int]) -> torch.Tensor:
    """``x`` with axes in ``order``, heads and head dim apart or flat, as ``shape`` [s, b, h, d]."""
    size = dict(zip("sbhd", shape, strict=True))
    return x.reshape([size[axis] for axis in order]).permute([order.index(axis) for axis in "sbhd"])


def _add_hooks(wanted: Sequence[ObservationRequest], seen: Seen, output: torch.Tensor) -> None:
    """Let the gradients of this call reach those who asked."""
    k, v = seen.inputs
    seen = replace(seen, inputs=None, version=seen.out._version)
    for request in wanted:
        # Of the node, not of the tensor: these run after those of the tensor, one of which
        # brings back q, k and v where the up-projections of multi-latent attention are
        # recomputed (mla_up_proj). Until then their storage is empty.
        hook = _on_gradient(request.callback, seen, output.output_nr)
        output.grad_fn.register_prehook(hook)  # type: ignore[union-attr]
        for name, x in (("k", k), ("v", v)):
            if request.inputs is not None and x.requires_grad:
                x.register_hook(_on_input_gradient(request.inputs, seen, name))


def _on_input_gradient(
    callback: InputCallback, seen: Seen, name: str
) -> Callable[[torch.Tensor], None]:
    """Calls back with the gradient of k or v."""
    shape = getattr(seen, name).shape

    def hook(gradient: torch.Tensor) -> None:
        if not batched(gradient):
            with torch.no_grad():
                callback(seen, name, to_sbhd(gradient.detach(), seen.site.inputs_order, shape))

    return hook


def _on_gradient(
    callback: Callback, seen: Seen, number: int
) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
    """Calls back with the gradient of output ``number`` of a node of the graph."""

    def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if gradient is None or batched(gradient):  # another output of the node alone was used
            return
        with torch.no_grad():
            callback(seen, to_sbhd(gradient.detach(), seen.site.order, seen.out.shape))

    return hook


@functools.cache
def _warn_silent(name: str) -> None:
    log.warning("no attention was called in an observed step, of %s and others: call modules, not "
                "their forward(); a model that torch.compile has traced before is not observed",
                name)  # fmt: skip


def _packed(args: Any, kwargs: Any) -> Any:
    """The PackedSeqParams of a call of packed documents (thd), else None."""
    params = args[6] if len(args) > 6 else kwargs.get("packed_seq_params")
    return params if getattr(params, "qkv_format", None) == "thd" else None


def _starts(cu: torch.Tensor, tokens: int) -> torch.Tensor:
    """First token of the document of each token."""
    return cu[documents_of(cu, torch.arange(tokens, device=cu.device))]


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
