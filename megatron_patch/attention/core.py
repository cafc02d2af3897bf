"""`CoreAttention`: the core-attention module that Megatron-Core builds and calls.

Shape legend (Megatron's letters): sq, sk lengths; b batch; np query heads and ng key/value heads of
this tensor-parallel rank; hn, hv head dims of query/key and value; t packed tokens.

Megatron-Core's contract, kept here: the constructor has no side effects (multi-latent attention
constructs core attention twice and drops the first); head counts come from the tensors, because
``config`` may be a modified copy; v arrives as a strided view of the fused QKV output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from megatron_patch.attention import registry
from megatron_patch.attention.backends import BACKENDS, context_parallel
from megatron_patch.attention.backends.call import AttentionCall, ContextParallel, Result
from megatron_patch.attention.backends.row import LayerRequirements
from megatron_patch.context_parallel.api import check as check_context_parallel
from stable_attention.problem import Options
from stable_attention.stabilizers import KNOWN, STABILIZERS

log = logging.getLogger(__name__)

# Options of context parallelism, whatever the backend.
CP_OPTIONS = ("gradient_wire", "head_groups")
# Of `Options`, what a spec may say and the layer does not: settings of backends with stabilizers.
NUMERICS = ("stabilizer", "o_lo", "beta", "eps", "backward", "allow_broken")
_CAUSAL = (AttnMaskType.causal, AttnMaskType.causal_bottom_right, AttnMaskType.padding_causal)


def core_attention_spec(backend: str, **options: Any) -> Any:
    """What to put into a spec's ``core_attention`` for a backend.

    Args:
        backend: a name of `BACKENDS`.
        options: settings of the backend (``stable_flash``: stabilizer, o_lo, beta, eps,
            backward, allow_broken; ``fa4``: stabilizer, o_lo; ``sage_int8``: see
            `stable_attention.int8.settings`) and, where it is ours, of context parallelism
            (gradient_wire, head_groups: see `context_parallel_attention`).

    Returns:
        A `ModuleSpec` of `CoreAttention`, or Megatron-Core's own class for ``mcore_local``, ``te``.

    Raises ValueError: an unknown backend, options it does not have, or values they do not take.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    row = BACKENDS[backend]
    allowed = row.own_options + (NUMERICS if row.stabilizers else ())
    allowed += CP_OPTIONS if row.chunk_primitives else ()
    unknown = sorted(name for name in options if name not in allowed)
    if unknown:
        takes = f"only {', '.join(allowed)}" if allowed else "no options"
        raise ValueError(f"backend {backend!r} takes {takes}; got {', '.join(unknown)}")
    # Here, where they are written: a layer that is built asks tables which know no other names.
    given = Options.of(**{name: value for name, value in options.items() if name in NUMERICS})
    if given.o_lo != "bf16" and not KNOWN[given.stabilizer].keeps_o_lo:
        keep = ", ".join(name for name, known in STABILIZERS.items() if known.keeps_o_lo)
        raise ValueError(
            f"o_lo {given.o_lo!r} has no effect: stabilizer {given.stabilizer!r} keeps none; "
            f"leave it out, or use {keep}"
        )
    if row.module is not None:
        module, name = row.module
        return getattr(importlib.import_module(module), name)
    return ModuleSpec(module=CoreAttention, params={"backend": backend, "options": options})


class CoreAttention(torch.nn.Module):
    """Softmax attention between Megatron-Core's QKV and output projections, by a named backend.

    Raises BackendError: (constructor) the backend cannot serve this layer; lists every reason.
    """

    softmax_offset: torch.Tensor | None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        backend: str = "stable_flash",
        options: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.config = config
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        # Only there where hierarchical_context_parallel_sizes is set.
        self.hierarchical = tuple(getattr(pg_collection, "hcp", None) or ())
        self.cp_comm_type = cp_comm_type or "p2p"
        self.softmax_scale = softmax_scale
        own = attention_dropout
        self.dropout_p = config.attention_dropout if own is None else own
        # apply_query_key_layer_scaling divides by the layer number before an fp16 softmax and
        # multiplies after it; with float32 scores both halves drop out.
        self.window = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, self.layer_number
        ):
            self.window = tuple(config.window_size)
        self.want_max_logits = bool(config.qk_clip or config.log_max_attention_logit)
        self.current_max_attn_logits: torch.Tensor | None = None
        # A dict while an observer watches (megatron_patch.stability): the backend fills it.
        self.observed: dict[str, torch.Tensor] | None = None
        self.backend_name = backend
        given = dict(options or {})
        self.cp_options = {name: given.pop(name) for name in CP_OPTIONS if name in given}
        self.options = given
        _reject_fp8(config)
        self.selection = registry.check(backend, self._requirements())
        self._run = _function(backend)
        self._split_options()
        self._check_context_parallel()
        self._make_softmax_offset()

    def _check_context_parallel(self) -> None:
        """The rules of heads and groups, before the first step rather than in it."""
        if self.config.context_parallel_size == 1:
            return
        facts = self._requirements()
        sizes = [group.size() for group in self.hierarchical] or None
        check_context_parallel(
            mode=self.cp_comm_type,
            size=self.config.context_parallel_size,
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            hierarchical_sizes=sizes,
        )

    def _requirements(self) -> LayerRequirements:
        config = self.config
        head_dim = v_head_dim = config.kv_channels
        mla = bool(config.multi_latent_attention)
        if mla:  # the first of the two constructions comes without k_channels and v_channels
            head_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
            v_head_dim = config.v_head_dim
        tp = self.tp_group.size()
        groups = config.num_attention_heads if mla else config.num_query_groups
        kind = "multi-latent attention" if mla else f"{self.attention_type}-attention"
        kind += f", window {list(self.window)}" if self.window else ""
        cp = config.context_parallel_size
        kind += f", context parallel {self.cp_comm_type}" if cp > 1 else ""
        return LayerRequirements(
            kind=kind,
            dtype="bf16" if config.bf16 else "fp16" if config.fp16 else "fp32",
            device="cuda" if torch.cuda.is_available() else "cpu",
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            heads=max(1, config.num_attention_heads // tp),
            kv_heads=max(1, groups // tp),
            window=self.window,
            sinks=config.softmax_type != "vanilla",
            dropout=self.dropout_p > 0,
            deterministic=bool(config.deterministic_mode),
            max_logits=self.want_max_logits,
            cp=cp,
            mla=mla,
            stabilizer=self.options.get("stabilizer", "compensated"),
            backward=self.options.get("backward", "auto"),
        )

    def _make_softmax_offset(self) -> None:
        """Sink logits [np], named as in Megatron-Core so that checkpoints stay interchangeable."""
        config = self.config
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        heads = config.num_attention_heads // self.tp_group.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        if config.softmax_type == "off-by-one":
            zeros = torch.zeros(heads, dtype=torch.float32, device=device)
            self.register_buffer("softmax_offset", zeros, persistent=False)
            return
        logits = torch.empty(heads, dtype=config.params_dtype, device=device)
        self.softmax_offset = torch.nn.Parameter(logits)
        # Core leaves this out: TP ranks > 0 then drop the gradient from norm and clipping.
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        if not config.perform_initialization:
            return
        if config.use_cpu_initialization:
            # As core's layers do: every rank draws all heads and keeps its own.
            every = torch.empty(config.num_attention_heads, dtype=torch.float32)
            config.init_method(every)
            first = heads * self.tp_group.rank()
            with torch.no_grad():
                logits.copy_(every[first : first + heads])
        else:
            with get_cuda_rng_tracker().fork():
                config.init_method(self.softmax_offset)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Attention of query [sq, b, np, hn] over key [sk, b, ng, hn] and value [sk, b, ng, hv].

        Returns [sq, b, np * hv]; for packed input ([t, np, hn] ...) [t, np * hv].

        Raises ValueError: an additive bias, an arbitrary mask, or arguments of another algorithm.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        _reject(attention_bias, unsupported)
        _check_mask(attention_mask, mask_type)
        packed = _packed(packed_seq_params)
        if packed and not BACKENDS[self.backend_name].thd:
            registry.check(self.backend_name, dataclasses.replace(self._requirements(), thd=True))
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        options = Options.of(
            layout="thd" if packed else "sbhd",
            causal=mask_type in _CAUSAL,
            window=self.window,
            scale=scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            deterministic=bool(self.config.deterministic_mode),
            **self.options,
        )
        call = AttentionCall(
            q=query,
            k=key,
            v=value,
            options=options,
            sinks=self.softmax_offset,
            packed=packed,
            want_max_logits=self.want_max_logits and self.training,
            cp=self._context_parallel(packed_seq_params),
            own=self.own,
            observed=self.observed,
        )
        with self._random_stream(options.dropout_p):
            if call.cp is None:
                out, max_logits = self._run(call)
            else:
                primitives = BACKENDS[self.backend_name].chunk_primitives
                assert primitives is not None  # the table says cp
                out, max_logits = context_parallel.run(call, primitives)
        if max_logits is not None and call.want_max_logits:
            self._remember(max_logits)
        return out.reshape(*out.shape[:-2], out.shape[-2] * out.shape[-1])

    def _context_parallel(self, params: Any) -> ContextParallel | None:
        """The ranks that share this call's sequence: the layer's, or the call's own."""
        group, hierarchical = self.cp_group, self.hierarchical
        own = None if params is None else getattr(params, "cp_group", None)
        size = None if params is None else getattr(params, "local_cp_size", None)
        if own is not None and own is not group:
            group, hierarchical = own, ()
        elif own is None and size is not None:
            if size > 1:
                raise ValueError(
                    f"packed_seq_params.local_cp_size is {int(size)} without a cp_group; give the "
                    "group of the ranks that share this sample, or local_cp_size 1 for none"
                )
            return None
        if group is None or group.size() == 1:
            return None
        if not BACKENDS[self.backend_name].cp:
            facts = dataclasses.replace(self._requirements(), cp=group.size())
            registry.check(self.backend_name, facts)
        return ContextParallel(
            group=group, mode=self.cp_comm_type, hierarchical=hierarchical or None,
            **self.cp_options,
        )  # fmt: skip

    def use(self, backend: str, **options: Any) -> None:
        """Serve all further calls by another backend, or by the same with other options.

        Raises BackendError: it cannot serve this layer; nothing has changed then.
        """
        before = self.backend_name, self.options
        self.backend_name, self.options = backend, dict(options)
        try:
            self.selection = registry.check(backend, self._requirements())
            self._run = _function(backend)
        except ValueError:
            self.backend_name, self.options = before
            raise
        self._split_options()

    def _split_options(self) -> None:
        """Move what only the backend understands out of what all calls parse, and warn."""
        row, config = BACKENDS[self.backend_name], self.config
        self.own = {name: x for name, x in self.options.items() if name in row.own_options}
        self.options = {name: x for name, x in self.options.items() if name not in self.own}
        if row.wants_qk_norm and not (config.qk_layernorm or getattr(config, "qk_l2_norm", False)):
            _warn_without_qk_norm(self.backend_name)

    def _random_stream(self, dropout_p: float) -> contextlib.AbstractContextManager[Any]:
        """The model-parallel random stream. Under sequence parallelism the block has forked it."""
        if dropout_p == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()

    def _remember(self, max_logits: torch.Tensor) -> None:
        """Running maximum over micro-batches, read and reset by Megatron-Core's qk_clip."""
        new = max_logits.detach().float()
        old = self.current_max_attn_logits
        self.current_max_attn_logits = new if old is None else torch.maximum(old, new)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Only learnable sinks, split over tensor-parallel ranks: as in Megatron-Core's modules."""
        if self.config.softmax_type != "learnable":
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"backend={self.backend_name}, layer={self.layer_number}, window={self.window}"


def _function(backend: str) -> Callable[[AttentionCall], Result]:
    run = BACKENDS[backend].run
    if run is None:
        raise ValueError(
            f"backend {backend!r} is a Megatron-Core module of its own; put "
            f"core_attention_spec({backend!r}) into the spec instead of CoreAttention"
        )
    return run


def _reject_fp8(config: Any) -> None:
    for option in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if getattr(config, option, False):
            raise ValueError(
                f"{option} is True; core attention here computes in BF16 or FP32. Set it to False "
                "(FP8 in the linear layers around it is unaffected)"
            )


def _reject(attention_bias: torch.Tensor | None, unsupported: dict[str, Any]) -> None:
    if attention_bias is not None:
        raise ValueError(
            f"attention_bias of shape {tuple(attention_bias.shape)} is given; additive biases are "
            "not supported. Use rotary or learned positions, or Megatron-Core's core attention"
        )
    given = sorted(name for name, value in unsupported.items() if value is not None)
    if given:
        raise ValueError(
            f"core attention was called with {', '.join(given)}, which belong to another "
            "algorithm; leave that layer as it is (replace_core_attention(only=...))"
        )


def _check_mask(mask: torch.Tensor | None, mask_type: AttnMaskType) -> None:
    if mask is None:
        return
    if mask_type in (AttnMaskType.arbitrary, AttnMaskType.padding, AttnMaskType.padding_causal):
        raise ValueError(
            f"attn_mask_type is {mask_type.name} with a mask of shape {tuple(mask.shape)}; "
            "supported are causal and no_mask. Pack the sequences (thd) instead of padding them"
        )
    _warn_mask_ignored(mask_type.name, tuple(mask.shape))


@functools.cache
def _warn_mask_ignored(mask_type: str, shape: tuple[int, ...]) -> None:
    log.warning(
        "attention_mask of shape %s is ignored: attn_mask_type %s says what is masked (Transformer "
        "Engine does the same). If it separates documents, pack them as thd; if not, do not create "
        "it (create_attention_mask: false)",
        shape,
        mask_type,
    )


@functools.cache
def _warn_without_qk_norm(backend: str) -> None:
    log.warning(
        "attention: %s without QK-norm: published runs of this method diverged so at 2.1M tokens a "
        "step and trained at 260K (arXiv 2603.02170). Set model.qk_layernorm: true, or use "
        "attention.backend: stable_flash",
        backend,
    )


def _packed(params: Any) -> dict[str, Any]:
    """The packed-sequence arguments of an `AttentionCall`; empty for sbhd input."""
    if params is None:
        return {}
    if params.qkv_format != "thd":
        if params.qkv_format in (None, "sbhd"):
            return {}
        raise ValueError(
            f"packed_seq_params.qkv_format is {params.qkv_format!r}; supported: 'thd', 'sbhd'"
        )
    # Newer fields of PackedSeqParams are read by getattr: their number grows with every release.
    return {
        "cu_seqlens_q": params.cu_seqlens_q,
        "cu_seqlens_k": params.cu_seqlens_kv,
        "cu_seqlens_q_padded": getattr(params, "cu_seqlens_q_padded", None),
        "cu_seqlens_k_padded": getattr(params, "cu_seqlens_kv_padded", None),
        "max_seqlen_q": _host_int(params.max_seqlen_q),
        "max_seqlen_k": _host_int(params.max_seqlen_kv),
    }


def _host_int(value: Any) -> int | None:
    """An int without stopping the GPU; a device tensor becomes None (the buffer's length)."""
    if isinstance(value, torch.Tensor):
        return int(value) if value.device.type == "cpu" else None
    return value
