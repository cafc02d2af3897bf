"""What Megatron-Core's optimizers need around ``sharded_state_dict`` and ``load_state_dict``.

Core 0.19.2 finds Adam's step counter in one tensor a parameter (PyTorch's AdamW) or one integer a
parameter group (Apex, Transformer Engine), and decides by what is *installed*, not by what runs.
With PyTorch's AdamW that goes wrong in these ways, each covered by a test:

* an optimizer that has not stepped has no state, and ``DistributedOptimizer.state_dict`` asserts;
* ``fully_reshardable`` looks for a saved ``step`` tensor that it never saves: ``KeyError: 'step'``;
* ``dp_reshardable`` puts the step of the *new* process back over the loaded one;
* after a load all parameters share one step tensor, which then counts once for every parameter;
* a part without parameters on this rank (the experts' part, on a pipeline stage without experts)
  never has state, and ``DistributedOptimizer.state_dict`` asserts.

So the step travels as one integer of ours, and is put where the running kernel looks for it. The
hyperparameters of the groups stay those of the configuration: a checkpoint restores state, not
settings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron_patch.checkpoint.errors import CheckpointError
from megatron_patch.core_patches.replace import patched


def parts(optimizer: Any) -> list[Any]:
    """The Megatron optimizers inside ``optimizer`` that own parameters."""
    chained = getattr(optimizer, "chained_optimizers", None)
    found = [optimizer] if chained is None else list(chained)
    return [part for part in found if getattr(part, "optimizer", None) is not None]


def read_step(optimizer: Any) -> int:
    """Updates done, wherever the kernel counts them; 0 before the first.

    Raises ValueError: parameters disagree, which no Megatron optimizer supports.
    """
    steps = set()
    for part in parts(optimizer):
        inner = part.optimizer
        for state in inner.state.values():
            if "step" in state:
                steps.add(int(state["step"]))
        for group in inner.param_groups:
            if "step" in group and group["params"]:
                steps.add(int(group["step"]))
    if len(steps) > 1:
        raise ValueError(f"the optimizer's step differs between parameters: {sorted(steps)}")
    return steps.pop() if steps else 0


def write_step(optimizer: Any, step: int) -> None:
    """Set the number of updates done, with a tensor of its own for every parameter that has one."""
    for part in parts(optimizer):
        inner = part.optimizer
        if _is_muon(inner):  # it counts none
            for group in inner.param_groups:
                group.pop("step", None)
            continue
        per_parameter = isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))
        for group in inner.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                if per_parameter and parameter in inner.state:
                    device = parameter.device if on_device else torch.device("cpu")
                    counter = torch.tensor(float(step), dtype=torch.float32, device=device)
                    inner.state[parameter]["step"] = counter
            if per_parameter:
                group.pop("step", None)  # core's copy; PyTorch does not know it
            elif isinstance(group.get("step"), torch.Tensor):
                group["step"] = torch.full_like(group["step"], step)
            else:
                group["step"] = step


def ensure_state(optimizer: Any) -> None:
    """Give a fresh optimizer zero moments, so that there is something to load into.

    Nothing is stepped: weights, decay and counters stay as they are.
    """
    for part in parts(optimizer):
        inner = part.optimizer
        if _is_muon(inner):
            for group in inner.param_groups:
                inner._init_group(group, skip_non_grad_params=False)
        if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            continue  # core allocates for the fused kernels
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if state:
                    continue
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _is_muon(inner: Any) -> bool:
    """Whether it is a torch optimizer with momentum instead of Adam's moments."""
    return "momentum" in inner.defaults


@contextmanager
def settings_of_empty_parts(optimizer: Any) -> Iterator[None]:
    """Let sharded parts without parameters here give their settings, with the others' step."""
    step = read_step(optimizer)
    empty = [
        part
        for part in parts(optimizer)
        if _is_sharded(part)
        and _is_empty(part)
        and isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))
    ]
    with patched(*((part, "state_dict", partial(_settings, part, step)) for part in empty)):
        yield


def _is_empty(part: Any) -> bool:
    """Whether a part owns no parameters on this rank."""
    return not any(group["params"] for group in part.optimizer.param_groups)


def _settings(part: Any, step: int) -> dict[str, Any]:
    """What core's ``state_dict`` would say of a part without parameters."""
    settings = {k: v for k, v in part.optimizer.state_dict().items() if k != "state"}
    for group in settings["param_groups"]:
        del group["params"]
        group["step"] = step
    return {"optimizer": settings}


def _groups(part: Any) -> list[dict[str, Any]]:
    """The settings of every parameter group, without parameters and step."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in part.optimizer.param_groups
    ]


def without_groups(optimizer: Any, request: dict[Any, Any]) -> None:
    """Take parameter groups out of what is asked for; `load` puts the optimizer's own there.

    Core merges lists of groups by their numbers. Where experts are spread over ranks they have
    groups, or an optimizer, of their own, so that the lists of a file may be shorter or longer.
    """
    owners = parts(optimizer)
    asked = [request] if len(owners) == 1 else [request[index] for index in range(len(owners))]
    for part, state in zip(owners, asked, strict=True):
        if not _is_sharded(part):
            state.get("optimizer", state).pop("param_groups", None)


def _is_sharded(part: Any) -> bool:
    """Whether it is a DistributedOptimizer, which holds slices of parameters."""
    return hasattr(part, "sharded_param_state_fully_reshardable")


def _use_own_step(part: Any, holder: dict[str, Any], step: int) -> None:
    """Put the step where core looks for it: the file may have it under another part's number."""
    state = holder.get("state")
    if isinstance(state, dict):
        state.pop("common_step", None)
        if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            state["common_step"] = torch.tensor(float(step), dtype=torch.float32)


def _use_own_groups(part: Any, loaded: dict[str, Any], step: int) -> None:
    """Replace the loaded parameter groups by the optimizer's own, with the loaded step.

    Groups are matched by settings in core, so a changed learning rate would otherwise make them
    unrecognizable; and with pipeline stages only the first rank's are saved at all.
    """
    # A DistributedOptimizer keeps its settings one level down, also where the writer had none: on
    # one rank the experts share the dense optimizer, spread over ranks they have their own.
    # A rank that holds no element of any parameter asked for none of their state.
    sharded = _is_sharded(part)
    if sharded:
        loaded.setdefault("param_state", {})
        loaded.setdefault("optimizer", {})
        loaded.setdefault("param_state_sharding_type", "fully_reshardable")
    holder = loaded["optimizer"] if sharded else loaded.get("optimizer", loaded)
    if not sharded:
        _use_own_step(part, holder, step)
    indices = [group["params"] for group in part.optimizer.state_dict()["param_groups"]]
    groups = copy.deepcopy(_groups(part))
    for group, parameters in zip(groups, indices, strict=True):
        group["params"] = parameters
        group["step"] = step
    holder["param_groups"] = groups


def _check_main(part: Any, model_param: Any, main: torch.Tensor) -> None:
    """Whether loaded main weights, rounded, are the weights that were loaded into the model.

    Or as near as a step whose QK-Clip has scaled both leaves them: it rounds weights once more.

    Raises CheckpointError: they are other elements'; training on would replace the model by noise.
    """
    span = part._get_model_param_range_map(model_param)["param"]
    weights = model_param.detach().view(-1)[span.start : span.end]
    rounded = main.detach().to(weights)
    kind = torch.finfo(weights.dtype)
    # Weights may hold a NaN, where training.check_finite lets one in; it is equal to itself here.
    if rounded.shape != weights.shape or not torch.allclose(
        rounded.float(), weights.float(), rtol=2 * kind.eps, atol=kind.tiny, equal_nan=True
    ):
        raise CheckpointError(
            "its optimizer state does not belong to its weights: Megatron-Core 0.19.2, used as it "
            "is by earlier versions of this program, saves values of the wrong elements with "
            "fully_reshardable and several communication buckets; start a new run from its weights "
            "with checkpoint.load_from and load_weights_only"
        )


@contextmanager
def _own_step(part: Any) -> Iterator[None]:
    """Let a DistributedOptimizer take moments from the checkpoint and steps from itself."""
    original = getattr(part, "_set_main_param_and_optimizer_states", None)
    if original is None:
        yield
        return

    def set_states(model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = part.model_param_group_index_map[model_param]
        main = part.optimizer.param_groups[group]["params"][order]
        own = part.optimizer.state.get(main, {}).get("step")
        _check_main(part, model_param, tensors["param"])
        original(model_param, tensors if own is None else {**tensors, "step": own})

    with patched((part, "_set_main_param_and_optimizer_states", set_states)):
        yield


def load(optimizer: Any, loaded: Any, step: int) -> None:
    """``optimizer.load_state_dict`` with the corrections above.

    ``loaded`` is its state dict as core returned it, ``step`` what `read_step` gave at the save.
    """
    owners = parts(optimizer)
    # Core numbers several optimizers; what a single one saved may stand beside the numbers.
    states = [loaded] if len(owners) == 1 else [
        # What a part without parameters asked for may be nothing, of a file that has nothing else.
        loaded.get(index, {}) if _is_empty(part) else loaded[index]
        for index, part in enumerate(owners)
    ]  # fmt: skip
    settings = [_groups(part) for part in owners]
    for part, state in zip(owners, states, strict=True):
        _use_own_groups(part, state, step)
        main = state.get("fp32_from_fp16_params")
        if isinstance(main, dict):  # the layer-wise optimizer numbers its groups
            state["fp32_from_fp16_params"] = [main[number] for number in sorted(main)]
        # FP32 DistributedOptimizers copy into views of leaf parameters.
        with torch.no_grad(), _own_step(part):
            part.load_state_dict(state)
    for part, groups in zip(owners, settings, strict=True):
        for group, own in zip(part.optimizer.param_groups, groups, strict=True):
            group.update(own)
    write_step(optimizer, step)
