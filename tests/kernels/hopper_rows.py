"""The backward of sm_90 on the CPU: a stand-in for its main kernel, what surrounds it interpreted.

The stand-in writes what `hopper.backward` says of its kernel: float32 sums of dQ, row sums of the
rounded dS and ranks in tiles of queries, dK and dV. Members of the suite for projection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from attention_cases import Case
from error_rule import check_case

from stable_attention.hopper.plan import reach

CUT = 2.0**-18
"""What delta lacks here, as after the forward pass of a GPU, whose sums lose bits on the way."""
ORDER = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}


class MainKernel:
    """Called as `hopper.backward.backward_kernel` is launched; one sequence length."""

    pre_run_hooks = ()

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.problem: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._run

    def _run(self, *positional: Any, **named: Any) -> None:
        a = dict(zip(self._names, positional, strict=False)) | named
        p, bm = self.problem, a["BM"]
        q, k, v, do, dk, dv = (
            None if a[f"{x}_desc"] is None else a[f"{x}_desc"].base.permute(ORDER[p.layout])
            for x in ("q", "k", "v", "do", "dk", "dv")
        )
        kg, vg = (x.repeat_interleave(p.group, 1).double() for x in (k, v))

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(p.batch, p.heads, -1)

        planes = a["shift_desc"].base.view(-1, 2, bm).double()
        rest = planes[:, 1] * (planes[:, 1, :1] < 1e30)
        shift = rows(planes[:, 0])[..., : p.sq, None]
        delta = rows(a["delta_desc"].base)[..., : p.sq, None].double() * (1 - CUT)
        x = q.double() @ kg.mT * a["unit"] - shift - rows(rest)[..., : p.sq, None]
        left, right = reach(p)
        distance = torch.arange(p.sk) - torch.arange(p.sq)[:, None] - (p.sk - p.sq)
        seen = (distance <= right) & (-distance <= left)
        x = x.masked_fill(~seen, -torch.inf)
        weights = x.exp2()
        ds = (weights * (do.double() @ vg.mT - delta)).to(q.dtype).double()
        size = ds.to(q.dtype).abs().view(torch.int16).int() >> 7
        rank = (size << 23) | torch.arange(p.sk, dtype=torch.int32)
        # Tiles of queries that see no key are left as they are.
        tiles = torch.nn.functional.pad(seen.any(-1), (0, -p.sq % bm)).view(-1, bm).any(-1)
        rows(a["turns"]).copy_(tiles)
        met = tiles.repeat_interleave(bm)[: p.sq]
        rows(a["excess_desc"].base)[..., : p.sq] = ds.sum(-1).float().where(met, torch.nan)
        rows(a["rank_ptr"])[..., : p.sq] += rank.amax(-1)
        sums = a["sum_desc"].base.view(p.batch, p.heads, -1, p.d)
        sums[:, :, : p.sq] = (ds @ kg).float().where(met[:, None], torch.nan)
        dks, dvs = ds.mT @ q.double(), weights.to(q.dtype).double().mT @ do.double()
        dks, dvs = (x.unflatten(1, (-1, p.group)).sum(2) for x in (dks, dvs))
        if a["part_ptr"] is None:
            dk.copy_(dks * p.scale)
            dv.copy_(dvs)
            return
        parts = a["part_ptr"].zero_().view(2, p.batch, p.kv_heads, a["SPLITS"], -1, p.d)
        parts[0, :, :, 0, : p.sk], parts[1, :, :, 0, : p.sk] = dks.float(), dvs.float()


@contextlib.contextmanager
def on_hopper() -> Iterator[None]:
    """Whatever the interpreter is given goes through `hopper.launch.backward` within."""
    from dataclasses import replace

    from stable_attention import dispatch
    from stable_attention.hopper import launch

    kernel, sets = launch.backward_kernel, dispatch.KERNEL_SETS
    stand_in = MainKernel(kernel.arg_names)

    def backward(problem: Any, *tensors: torch.Tensor, **named: Any) -> Any:
        stand_in.problem = problem
        return launch.backward(problem, *tensors, **named)

    try:
        launch.backward_kernel = stand_in
        dispatch.KERNEL_SETS = (replace(sets[-1], backward=backward),)
        yield
    finally:
        launch.backward_kernel, dispatch.KERNEL_SETS = kernel, sets


LINE = "b=2 sq=70 sk=70 causal=1 hq=4 hk=2 d=128 sinks=learned dlse=1"


def problems() -> list[str]:
    with on_hopper():
        return check_case(Case.parse(f"{LINE} stabilizer=compensated_projected")).problems
