"""Whether a job fits its GPUs, by the planner, before anything is submitted."""

from __future__ import annotations

from megatron_patch.launcher.render import Job
from megatron_patch.launcher.submit import LaunchError


def check_fit(job: Job) -> str | None:
    """One line about the memory of the fullest GPU; None for a run that uses none.

    Without ``cluster.gpu`` the largest GPU that the planner knows is taken: what does not fit that
    one fits nowhere, and less is not refused.

    Raises:
        LaunchError: it does not fit; the text names layouts that would.
        ConfigError: the layout is impossible, memory aside.
    """
    run = job.run
    if run.training.device != "cuda":
        return None
    from megatron_patch.planner import report, search
    from megatron_patch.planner.hardware import GIB, GPUS, gpu_named
    from megatron_patch.planner.plan import Machine, make_plan, vocabulary_of

    largest = max(GPUS.values(), key=lambda gpu: gpu.memory)
    gpu = largest if run.cluster.gpu is None else gpu_named(run.cluster.gpu)
    vocabulary = vocabulary_of(run, None)
    machine = Machine(gpu, job.nodes, run.cluster.ranks)
    plan = make_plan(run, machine, vocabulary)
    if not plan.fits:
        found = search.alternatives(run, machine, vocabulary)
        elsewhere = [] if found else search.more_nodes(run, machine, vocabulary)
        raise LaunchError(
            f"{report.refusal(plan, found, elsewhere)}\n"
            "(launch --no-plan submits it all the same; docs/planning.md says how well this is "
            "known)"
        )
    known = run.cluster.gpu is not None
    note = "" if known else "; cluster.gpu is not set, so the largest known GPU was assumed"
    return (
        f"plan: {plan.worst.total / GIB:.1f} of {gpu.memory:g} GiB on the fullest {gpu.name}, "
        f"estimated{note}"
    )
