"""Replace core attention in a launcher that builds its specs out of reach.

    with patched_core_attention("stable_flash"):
        pretrain(...)        # Megatron-LM, say

Megatron-Core's GPT layer specs ask a provider which core attention to use; for the time of the
block the local and the Transformer Engine provider answer with ours. That covers dense, MLA, MoE
and multi-token-prediction layers of GPT models; hybrid, heterogeneous and T5 specs name their class
directly and need `replace_core_attention`, which is to be preferred wherever a spec can be reached.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from megatron_patch.attention.core import core_attention_spec
from megatron_patch.runtime.environment import core_version

log = logging.getLogger(__name__)

SUPPORTED = (Version("0.19"), Version("0.20"))
_PROVIDERS = (
    ("megatron.core.models.backends", "LocalSpecProvider"),
    ("megatron.core.extensions.transformer_engine_spec_provider", "TESpecProvider"),
)


@contextlib.contextmanager
def patched_core_attention(backend: str, **options: Any) -> Iterator[None]:
    """Make GPT specs built inside the block use ``backend``; undone at its end, also nested.

    Args:
        backend, options: as for `core_attention_spec`.

    Raises:
        ValueError: an unknown backend or option.
        RuntimeError: a Megatron-Core whose providers this does not know.
    """
    new = core_attention_spec(backend, **options)
    providers = [_provider(module, name) for module, name in _PROVIDERS]
    with contextlib.ExitStack() as undo:
        for provider in providers:
            undo.callback(setattr, provider, "core_attention", provider.core_attention)
            provider.core_attention = lambda self: new
            log.info("patched %s.core_attention: %s", provider.__qualname__, backend)
        yield


def _provider(module: str, name: str) -> Any:
    version = Version(core_version())
    if not SUPPORTED[0] <= Version(version.base_version) < SUPPORTED[1]:
        raise RuntimeError(
            f"megatron-core {version} is not {SUPPORTED[0]}.x, for which this patch is known to be "
            "right; use replace_core_attention on the spec instead"
        )
    found = getattr(__import__(module, fromlist=[name]), name, None)
    method = getattr(found, "core_attention", None)
    if method is None or list(inspect.signature(method).parameters) != ["self"]:
        raise RuntimeError(
            f"{module}.{name}.core_attention(self) does not exist in megatron-core {version}; use "
            "replace_core_attention on the spec instead"
        )
    return found
