"""``training.deterministic``: the same bits from the same layout and software.

Covers PyTorch's kernels, cuBLAS, NCCL's choice of algorithm and Transformer Engine; the attention
backend is checked against its entry in the capability table.
"""

from __future__ import annotations

import os

import torch

from megatron_patch.schema.problem import ConfigError, Problem
from megatron_patch.schema.training import TrainingConfig

NCCL_ALGORITHMS = ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain")
"""Values of NCCL_ALGO that fix the order of a reduction (Megatron-LM accepts the same)."""
_REQUIRED = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": NCCL_ALGORITHMS,
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


def enforce(options: TrainingConfig) -> None:
    """Switch everything to repeatable algorithms, before CUDA and NCCL start.

    Variables that are not set get the first accepted value.

    Raises ConfigError: a variable of the environment is set to something not repeatable.
    """
    if not options.deterministic:
        return
    text = "true, but the environment sets {}={}; unset it, or use one of {}"
    problems = [
        Problem("training.deterministic", text.format(name, value, ", ".join(accepted)))
        for name, accepted in _REQUIRED.items()
        if (value := os.environ.setdefault(name, accepted[0])) not in accepted
    ]
    if problems:
        raise ConfigError(problems)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is for finding bugs, not for repeatability, and costs bandwidth.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def line(options: TrainingConfig) -> str:
    """The start-up line about it."""
    if options.deterministic:
        return "deterministic: yes; a resume on the same layout and software repeats every bit"
    if options.device == "cpu":
        return "deterministic: not enforced (training.deterministic: false)"
    text = "deterministic: no; a resume agrees to rounding, not bitwise "
    return text + "(training.deterministic: true does)"
