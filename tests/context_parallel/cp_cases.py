"""Cases of context-parallel attention: inputs, the float64 truth, the uncut run, the verdict.

Shape legend: s tokens of the whole sequence (or pack), b batch, h query heads, kv key/value heads,
d, dv head dims.

The rule of the verdict: against float64, the error of the cut run is at most 1.1 times (RMS) and
1.5 times (largest) that of the uncut run of the same backend, plus `FLOOR` of the truth's RMS: sums
in another order differ by a few roundings of the accumulation type, however small the uncut error.
The largest error is the mean of the 16 largest: which single element of a hundred thousand meets
the worst roundings is luck, and in every cut it is another one: over seeds, maxima lie above the
uncut run's as often as below, and now and then far above. A row that is wrong, or one element by
more than 16 times the bound, shows in that mean as well as in the maximum.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from oracle import oracle_attention

from megatron_patch.context_parallel.layout import shard, unshard
from megatron_patch.context_parallel.packed import padded_cu_seqlens, shard_packed, unshard_packed
from stable_attention.reference import reference_attention

RMS_RATIO, MAX_RATIO, LARGEST = 1.1, 1.5, 16
WIRE_RATIO = 1.5  # every share of dK and dV is rounded once more on a BF16 wire
FLOOR = {torch.float32: 4e-7, torch.bfloat16: 2e-4, torch.float16: 5e-5}
GRADS = ("out", "dq", "dk", "dv")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem and one way to cut it."""

    size: int
    mode: str
    layout: str = "sbhd"
    backend: str = "reference"
    dtype: str = "fp32"
    s: int = 32
    b: int = 2
    h: int = 4
    kv: int = 2
    d: int = 16
    dv: int = 16
    causal: bool = True
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: bool = False
    dropout_p: float = 0.0
    lengths: tuple[int, ...] = (13, 0, 7, 1, 21)
    tail: int = 8
    """Tokens after the last document of a pack."""
    gradient_wire: str = "fp32"
    o_lo: str = "bf16"
    stabilizer: str = "compensated"
    v_mean: float = 0.0
    """Mean of V: a large one makes delta large, and its error with it."""
    seed: int = 0

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default and f.name not in ("size", "mode")
        ]
        return f"cp{self.size}-{self.mode} " + " ".join(changed)

    @property
    def thd(self) -> bool:
        return self.layout == "thd"

    def documents(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """(cu_seqlens, cu_seqlens_padded)."""
        return padded_cu_seqlens(self.lengths, self.size, device)

    def attention(self) -> dict[str, Any]:
        """Keywords every implementation takes."""
        return {
            "layout": self.layout,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p,
        }


@dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    sinks: torch.Tensor | None


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """The whole sequence, from the case's seed; the same on every rank."""
    g = torch.Generator().manual_seed(1000 + case.seed)
    tokens = case.s
    if case.thd:
        tokens = int(case.documents()[1][-1]) + case.tail
    lead = (tokens,) if case.thd else (tokens, case.b)

    def draw(heads: int, d: int) -> torch.Tensor:
        x = torch.randn(*lead, heads, d, generator=g, dtype=torch.float64)
        return x.to(DTYPES[case.dtype]).to(device)

    q, k, v = draw(case.h, case.d), draw(case.kv, case.d), draw(case.kv, case.dv)
    v, dout = v + case.v_mean, draw(case.h, case.dv)
    sinks = None
    if case.sinks:
        sinks = torch.randn(case.h, generator=g, dtype=torch.float64).float().to(device)
    return Inputs(q, k, v, dout, sinks)


def _gradients(out: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor) -> dict:
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype), allow_unused=True)
    names = ("dq", "dk", "dv", "dsinks")
    return {"out": out.detach(), **dict(zip(names, grads, strict=False))}


def truth(case: Case, given: Inputs) -> dict[str, torch.Tensor]:
    """Everything in float64, by the formula."""
    return _uncut(case, given, oracle=True)


def uncut(case: Case, given: Inputs) -> dict[str, torch.Tensor]:
    """The same backend on the whole sequence."""
    return _uncut(case, given, oracle=False)


def _uncut(case: Case, given: Inputs, *, oracle: bool) -> dict[str, torch.Tensor]:
    wide = torch.float64 if oracle else DTYPES[case.dtype]
    leaves = [x.to(wide).detach().requires_grad_() for x in (given.q, given.k, given.v)]
    sinks = None
    if given.sinks is not None:
        wide = torch.float64 if oracle else torch.float32
        sinks = given.sinks.to(wide).clone().requires_grad_()
    options = case.attention()
    if case.dropout_p:
        options["dropout_seed"] = 77
    if case.thd:
        real, padded = case.documents(str(given.q.device))
        options |= {"cu_seqlens_q": real, "cu_seqlens_k": real}
        options |= {"cu_seqlens_q_padded": padded, "cu_seqlens_k_padded": padded}
    with_sinks = [*leaves] + ([] if sinks is None else [sinks])
    if oracle:
        result = oracle_attention(*leaves, sinks=sinks, **options)
        out, top = result.out, result.max_logits
    elif case.backend == "reference":
        out, top = reference_attention(*leaves, sinks=sinks, return_max_logits=True, **options)
    else:
        from stable_attention.api import stable_attention

        out, top = stable_attention(
            *leaves, sinks=sinks, return_max_logits=True, o_lo=case.o_lo,
            stabilizer=case.stabilizer, **options,
        )  # fmt: skip
    return _gradients(out, with_sinks, given.dout) | {"max_logits": top.detach()}


def cut(case: Case, x: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's part of a whole-sequence tensor."""
    if case.thd:
        padded = case.documents(str(x.device))[1]
        return shard_packed(x, padded, rank=rank, size=case.size)
    return shard(x, rank=rank, size=case.size, dim=0)


def join(case: Case, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole sequence from all ranks' parts."""
    if case.thd:
        return unshard_packed(parts, case.documents(str(parts[0].device))[1])
    return unshard(parts, dim=0)


def run_rank(case: Case, group: Any, hierarchical: Any, device: str = "cpu") -> dict:
    """One rank's call and its gradients, as CPU tensors."""
    import torch.distributed as dist

    from megatron_patch.context_parallel.api import bytes_sent, context_parallel_attention

    given = make_inputs(case, device)
    rank = dist.get_rank(group)
    leaves = [cut(case, x, rank).detach().requires_grad_() for x in (given.q, given.k, given.v)]
    options = case.attention()
    if case.thd:
        real, padded = case.documents(device)
        options |= {"cu_seqlens": real, "cu_seqlens_padded": padded}
    sinks = None if given.sinks is None else given.sinks.clone().requires_grad_()
    before = bytes_sent(group)
    out, top = context_parallel_attention(
        *leaves,
        group=group,
        mode=case.mode,
        hierarchical=hierarchical if case.mode == "a2a+p2p" else None,
        backend=case.backend,
        sinks=sinks,
        dropout_seed=77 if case.dropout_p else None,
        return_max_logits=True,
        gradient_wire=case.gradient_wire,
        o_lo=case.o_lo,
        stabilizer=case.stabilizer,
        **options,
    )
    everything = [*leaves] + ([] if sinks is None else [sinks])
    found = _gradients(out, everything, cut(case, given.dout, rank))
    found |= {"max_logits": top}
    found = {name: x.cpu() for name, x in found.items()}
    return found | {"sent": bytes_sent(group) - before}


def collect(case: Case, parts: list[dict]) -> dict[str, torch.Tensor]:
    """Whole-sequence results from every rank's; the sinks' shares are added."""
    whole = {name: join(case, [p[name] for p in parts]) for name in GRADS}
    if case.sinks:
        whole["dsinks"] = sum(p["dsinks"].double() for p in parts)
    for p in parts[1:]:
        assert torch.equal(p["max_logits"], parts[0]["max_logits"])
    return whole | {"max_logits": parts[0]["max_logits"]}


def _used(case: Case, x: torch.Tensor) -> torch.Tensor:
    """Rows of documents: what is elsewhere is checked apart."""
    if not case.thd:
        return x
    real, padded = (y.tolist() for y in case.documents())
    rows = [
        x[start : start + stop - begin]
        for begin, stop, start in zip(real[:-1], real[1:], padded[:-1], strict=True)
    ]
    return torch.cat(rows)


def _largest(error: torch.Tensor) -> float:
    """Mean of the `LARGEST` largest errors."""
    error = error.abs().flatten()
    return float(error.topk(min(LARGEST, error.numel())).values.mean()) if error.numel() else 0.0


def complaints(case: Case, found: dict, exact: dict, whole: dict) -> list[str]:
    """What is wrong with ``found``; empty if it passes."""
    wrong = []

    def rms(x: torch.Tensor) -> float:
        return float(x.pow(2).mean().sqrt())

    names = [*GRADS] + (["dsinks"] if case.sinks else [])
    for name in names:
        mine, theirs, true = (x[name].cpu().double() for x in (found, whole, exact))
        if not torch.isfinite(mine).all():
            wrong.append(f"{name} is not finite")
            continue
        if case.thd and name in GRADS:
            rows = torch.cat([_used(case, torch.arange(len(mine))[:, None])[:, 0]])
            rest = torch.ones(len(mine), dtype=torch.bool)
            rest[rows] = False
            if mine[rest].any():
                wrong.append(f"{name} is not zero where no document is")
            mine, theirs, true = (_used(case, x) for x in (mine, theirs, true))
        # Inputs are of size one, and so are the terms of a sum that may come out as zero.
        floor = FLOOR[DTYPES[case.dtype]] * max(rms(true), 0.25)
        if name == "dsinks":
            # A sum of delta, which sees the rounding of P: random, and another one in every cut.
            floor = (5e-3 if case.backend == "stable_flash" else 2e-6) * float(true.abs().max())
        ratio = WIRE_RATIO if case.gradient_wire == "bf16" else RMS_RATIO
        error, allowed = rms(mine - true), ratio * rms(theirs - true) + floor
        if error > allowed:
            wrong.append(f"RMS error of {name} is {error:.3g}, allowed {allowed:.3g}")
        ratio *= MAX_RATIO / RMS_RATIO
        error, allowed = _largest(mine - true), ratio * _largest(theirs - true) + 8 * floor
        if error > allowed:
            wrong.append(f"largest error of {name} is {error:.3g}, allowed {allowed:.3g}")
    if not torch.allclose(
        found["max_logits"].cpu().float(), exact["max_logits"].cpu().float(), rtol=2e-5, atol=2e-5
    ):
        wrong.append(f"max_logits {found['max_logits']} instead of {exact['max_logits']}")
    return wrong


def verdict(case: Case, found: dict) -> list[str]:
    """`complaints` against the truth and the uncut run of the case."""
    given = make_inputs(case)
    return complaints(case, found, truth(case, given), uncut(case, given))


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (5, 0)},
    "window of a chunk": {"window": (8, 0)},
    "window of one": {"window": (0, 0)},
    "two-sided window": {"causal": False, "window": (6, 3)},
    "right window": {"causal": False, "window": (-1, 2)},
    "sinks": {"sinks": True},
    "sinks, window, dropout": {"sinks": True, "window": (9, 0), "dropout_p": 0.2},
    "dropout": {"dropout_p": 0.3},
    "dropout, full": {"dropout_p": 0.3, "causal": False},
    "softcap": {"softcap": 2.0},
    "MLA": {"d": 24, "dv": 16, "kv": 4},
    "MQA": {"kv": 1},
    "12 heads on 3": {"h": 12, "kv": 3, "sinks": True},
    "bf16 wire": {"gradient_wire": "bf16", "dtype": "bf16"},
    "bf16": {"dtype": "bf16"},
}


def grid(size: int, **changes: Any) -> list[Case]:
    """Every mode and feature in both layouts on ``size`` ranks."""
    modes = ["p2p", "all_gather", "a2a"] + (["a2a+p2p"] if size > 2 else [])
    return [
        Case(**{"size": size, "mode": mode, "layout": layout, **feature, **changes})
        for mode in modes
        for layout in ("sbhd", "thd")
        for feature in FEATURES.values()
    ]
