"""Who talks to whom: sizes of the parallel groups, and the link each of them crosses.

Ranks are numbered tp, cp, (ep,) dp, pp, as Megatron-Core orders them: tensor-parallel neighbors are
adjacent, pipeline neighbors farthest apart; nodes are filled in that order.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patch.schema.run import RunConfig

NODE, NETWORK = "NVLink", "network"


@dataclass(frozen=True, slots=True)
class Group:
    """The groups along one axis: ``size`` ranks, neighbors ``stride`` ranks apart."""

    axis: str
    size: int
    stride: int
    gpus_per_node: int

    @property
    def in_node(self) -> int:
        """Members that share a node."""
        if self.stride >= self.gpus_per_node:
            return 1
        return min(self.size, max(1, self.gpus_per_node // self.stride))

    @property
    def link(self) -> str:
        """Where its traffic goes: inside a node, or over the network."""
        return NODE if self.size == 1 or self.in_node == self.size else NETWORK


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and groups of one job."""

    nodes: int
    gpus_per_node: int
    tp: int
    cp: int
    pp: int
    vp: int
    dp: int
    ep: int
    etp: int
    edp: int

    @property
    def world(self) -> int:
        return self.nodes * self.gpus_per_node

    def group(self, axis: str) -> Group:
        """The group along ``axis``: tp, cp, dp, dp_cp, pp, etp, ep, edp."""
        tp, cp, dp, etp, ep = self.tp, self.cp, self.dp, self.etp, self.ep
        strides = {
            "tp": (tp, 1), "cp": (cp, tp), "dp": (dp, tp * cp), "dp_cp": (dp * cp, tp),
            "pp": (self.pp, tp * cp * dp), "etp": (etp, 1), "ep": (ep, etp),
            "edp": (self.edp, etp * ep),
        }  # fmt: skip
        return Group(axis, *strides[axis], self.gpus_per_node)

    def describe(self) -> str:
        """``TP8 x CP2 x PP4 x DP16``, and the expert groups where there are any."""
        parts = [f"{n}{v}" for n, v in (("TP", self.tp), ("CP", self.cp), ("PP", self.pp))]
        text = " x ".join([*parts, f"DP{self.dp}"])
        if self.vp > 1:
            text += f", {self.vp} virtual stages"
        if self.ep > 1 or self.etp != self.tp:
            text += f", experts ETP{self.etp} x EP{self.ep} x EDP{self.edp}"
        return text


def layout_of(run: RunConfig, nodes: int, gpus_per_node: int) -> Layout:
    """The layout of ``run`` on that many GPUs, which `world_size_problems` must have accepted."""
    p = run.parallel
    world = nodes * gpus_per_node
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    pp, vp = p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size or 1
    etp, ep = p.expert_tensor_parallel_size or tp, p.expert_model_parallel_size
    dp, edp = world // (tp * cp * pp), world // (etp * ep * pp)
    return Layout(nodes, gpus_per_node, tp=tp, cp=cp, pp=pp, vp=vp, dp=dp, ep=ep, etp=etp, edp=edp)


def micro_batches(run: RunConfig, layout: Layout) -> int:
    """Micro-batches of one step on each data-parallel rank."""
    return run.training.global_batch_size // (run.training.micro_batch_size * layout.dp)
