"""Checkpoints between local layers and Transformer Engine's, whose FP8 scales are objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from megatron_patch.checkpoint import content
from megatron_patch.checkpoint.errors import MismatchError

pytestmark = pytest.mark.usefixtures("rank")
SCALES = "decoder.layers.self_attention.linear_qkv._extra_state"


def an_object(key: str) -> ShardedObject:
    return ShardedObject(key, None, (1,), (0,))


def test_scales_of_layers_that_have_none_now_are_left_over():
    index = SimpleNamespace(state_dict_metadata={f"{SCALES}/shard_0_1": None})
    content.check_fit([[]], index, skip="never")
    index.state_dict_metadata["decoder.other/shard_0_1"] = None
    with pytest.raises(MismatchError, match=r"decoder\.other.*not in the model") as error:
        content.check_fit([[]], index, skip="never")
    assert "carry_over" not in str(error.value)


def test_another_optimizer_is_told_from_another_model():
    index = SimpleNamespace(state_dict_metadata={"optimizer.state.momentum_buffer.decoder.x": None})
    with pytest.raises(MismatchError, match="leave optimizer out of"):
        content.check_fit([[]], index, skip="never")


def test_scales_that_the_checkpoint_lacks_are_not_asked_for():
    """And others are: `set_extra_state(None)` leaves a layer as it is."""
    scales, other = an_object(SCALES), an_object("decoder.other")
    request = {"model": {"a": scales, "b": other}, "optimizer": [scales]}
    content.ask_for_what_is_saved(request, SimpleNamespace(state_dict_metadata={}))
    assert isinstance(request["model"]["a"], LocalNonpersistentObject)
    assert request["model"]["a"].unwrap() is None and request["model"]["b"] is other
    request = {"model": {"a": scales}}
    saved = SimpleNamespace(state_dict_metadata={scales.unique_key: None})
    content.ask_for_what_is_saved(request, saved)
    assert request["model"]["a"] is scales


@pytest.mark.parametrize("prefix", ["", "optimizer.state.exp_avg."])
def test_the_norm_before_experts_goes_by_the_name_it_was_saved_under(prefix):
    """Local layers save it as part of the first linear layer, Transformer Engine's do not."""
    names = [f"{prefix}decoder.layers.{x}weight" for x in content.NORM_OF_EXPERTS]
    for asked, saved in (names, names[::-1]):
        data = torch.ones(4)
        norm = ShardedTensor.from_rank_offsets(asked, data, replica_id=0)
        other = ShardedTensor.from_rank_offsets("decoder.final_layernorm.weight", torch.ones(4))
        request = {"model": {"norm": norm, "other": other}}
        content.ask_for_what_is_saved(request, SimpleNamespace(state_dict_metadata={saved: None}))
        assert request["model"]["norm"].key == saved and request["model"]["norm"].data is data
        assert request["model"]["other"].key == other.key
        request = {"model": {"norm": norm}}
        content.ask_for_what_is_saved(request, SimpleNamespace(state_dict_metadata={asked: None}))
        assert request["model"]["norm"].key == asked
