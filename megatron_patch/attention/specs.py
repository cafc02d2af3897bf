"""Ready specs for programs that take a spec by name, and a wrapper for those that take a function.

Megatron-LM's ``--spec MODULE NAME`` looks ``NAME`` up in the module and never calls it, so these
are objects, one for each backend and kind of layer:

    --spec megatron_patch.attention.specs stable_flash_local_rmsnorm

Names are ``<backend>_<layers>`` with layers ``local_layernorm``, ``local_rmsnorm`` and, where
Transformer Engine is installed, ``te`` and ``te_qk_layernorm``; docs/integrations.md says what such
a spec leaves out. Megatron-Bridge takes a function instead: `with_backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.attention.core import core_attention_spec
from megatron_patch.attention.replace import replace_core_attention

_LAYERS: dict[str, Callable[[], Any]] = {
    "local_layernorm": functools.partial(get_gpt_layer_local_spec, normalization="LayerNorm"),
    "local_rmsnorm": functools.partial(get_gpt_layer_local_spec, normalization="RMSNorm"),
}
if HAVE_TE:
    _LAYERS["te"] = get_gpt_layer_with_transformer_engine_spec
    _LAYERS["te_qk_layernorm"] = functools.partial(
        get_gpt_layer_with_transformer_engine_spec, qk_layernorm=True
    )

SPECS = {
    f"{backend}_{layers}": replace_core_attention(build(), core_attention_spec(backend))[0]
    for backend in BACKENDS
    for layers, build in _LAYERS.items()
}
"""Every ready spec by name; each is a `ModuleSpec` and an attribute of this module."""

globals().update(SPECS)


def with_backend(
    layer_spec: Callable[..., Any], backend: str, **options: Any
) -> Callable[..., Any]:
    """Wrap a spec function (config, ...) -> spec so that its core attention is ``backend``.

    Args:
        layer_spec: for example Megatron-Bridge's ``default_layer_spec``; its signature is kept.
        backend: a name of `backends.BACKENDS`.
        options: as for `core_attention_spec`.

    Returns a function to assign to ``provider.transformer_layer_spec``. It has to be a function:
    Bridge calls what it is given when it builds multi-token prediction, and a `ModuleSpec` is
    callable too.
    """
    new = core_attention_spec(backend, **options)

    @functools.wraps(layer_spec)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replace_core_attention(layer_spec(*args, **kwargs), new)[0]

    return replaced
