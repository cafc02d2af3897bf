"""``megatron-patch plan|launch|preflight``: what a run needs, its Slurm job, and its nodes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patch.cli.common import Subparsers, add_config, as_path, load

if TYPE_CHECKING:
    from megatron_patch.planner.plan import Machine, Vocabulary
    from megatron_patch.schema.run import RunConfig

PLAN = """\
What a run will need, before it has a GPU: layout over nodes, parameters, memory of one GPU of every
pipeline stage, communication per link, an estimated step time, days to a token budget.

  megatron-patch plan --config configs/llama_8b_8k.yaml --gpu h100
  megatron-patch plan --config configs/nodes/llama_70b_8k_16n.yaml --nodes 16 --tokens 2T
  megatron-patch plan --config run.yaml --set parallel.tensor_model_parallel_size=4 --json

A layout that does not fit is refused with exit code 2 and the layouts that would, fastest first.
How it is computed, and how well it is known: docs/planning.md.
"""
LAUNCH = """\
Render the batch script of a run and submit it to Slurm: every check of the configuration, then the
planner (a layout that cannot fit is refused, with those that would: 'megatron-patch plan'), then
sbatch --test-only, then sbatch. The rendered script, its parts and the resolved configuration stay
in <run_dir>/launch. The same command continues a run that was stopped; a run that has a job already
is refused.

  megatron-patch launch --config run.yaml --nodes 2 --dry-run
  megatron-patch launch --config run.yaml --nodes 2 --set cluster.partition=batch

Everything about the cluster is in the section cluster: 'megatron-patch config help cluster'.
"""
PREFLIGHT = """\
Ask a node whether it can train: number and health of its GPUs, their matrix rate and the bandwidth
between them, versions, clock, free disk, shared directory. The batch script runs it on every node
(--node), measures collectives with one process a GPU, and compares the answers on the first node
(--compare); by hand, without either, this machine is measured and judged alone.
Exit code 0: passed; 1: a node failed, the table and OUT/bad_nodes say which; 2: OUT cannot be used.
"""
NUMBER = re.compile(r"([0-9]+(?:[.][0-9]*)?|[.][0-9]+)([KMBT]?)", re.IGNORECASE)
SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
MAX_TOKENS = 1e18
"""Far more than there is text; the time for it is still a finite number."""
REFUSED = 2


def add_parser(commands: Subparsers) -> None:
    text = "memory, communication and time of a run, without a GPU"
    plan = commands.add_parser("plan", help=text, description=PLAN)
    add_config(plan)
    plan.add_argument("--nodes", metavar="N", type=int, default=1, help="nodes (default: 1)")
    text = "default: cluster.gpus_per_node, else 8"
    plan.add_argument("--gpus-per-node", metavar="N", type=int, help=text)
    text = "kind of GPU, e.g. h100, a100 (default: h200)"
    plan.add_argument("--gpu", metavar="NAME", default="h200", help=text)
    text = "token budget, e.g. 300B; default: training.train_steps"
    plan.add_argument("--tokens", metavar="N", help=text)
    text = "token ids, where the tokenizer is not here"
    plan.add_argument("--vocab-size", metavar="N", type=int, help=text)
    plan.add_argument("--json", action="store_true", help="print JSON")
    text = "draw the memory of every stage into a PNG"
    plan.add_argument("--plot", metavar="FILE", type=as_path, help=text)
    plan.set_defaults(run=run_plan, only_prints=True)

    launch = commands.add_parser("launch", help="submit a run to Slurm", description=LAUNCH)
    add_config(launch)
    launch.add_argument("--nodes", metavar="N", type=int, required=True, help="number of nodes")
    text = "print the script; write and submit nothing"
    launch.add_argument("--dry-run", action="store_true", help=text)
    text = "submit what the planner says does not fit"
    launch.add_argument("--no-plan", action="store_true", help=text)
    launch.set_defaults(run=run_launch)

    text = "ask nodes whether they can train, before training"
    preflight = commands.add_parser("preflight", help=text, description=PREFLIGHT)
    add_config(preflight)
    text = "shared directory for answers"
    preflight.add_argument("--out", metavar="DIR", type=as_path, required=True, help=text)
    which = preflight.add_mutually_exclusive_group()
    which.add_argument("--node", action="store_true", help="only measure this node")
    which.add_argument("--compare", action="store_true", help="only compare what nodes answered")
    text = "a node that must have answered"
    preflight.add_argument("--expect", metavar="NODE", action="append", default=[], help=text)
    preflight.set_defaults(run=run_preflight, parser=preflight)


def run_launch(args: argparse.Namespace) -> int:
    loaded = load(args.config, args.overrides, for_job=True)
    from megatron_patch.launcher import render, submit
    from megatron_patch.training.resume_rules import keep_recorded

    loaded = keep_recorded(loaded)  # what the job reads has every value written out
    job = submit.build_job(loaded, args.nodes)
    memory = None if args.no_plan else submit.check_fit(job)
    if memory is not None:
        print(memory, file=sys.stderr)
    if args.dry_run:
        print(render.rank_map(job), file=sys.stderr)
        sys.stdout.write(render.render(job))
        return 0
    for line in submit.unseen(job):
        text = "warning: as this machine sees it, the run ends at its start: "
        print(text + line, file=sys.stderr)
    job_id = submit.submit(job, loaded)
    print(f"job {job_id}: {render.rank_map(job)}")
    print(f"script {job.launch_dir / 'job.sbatch'}, logs {job.run_dir / 'logs'}")
    return 0


def run_preflight(args: argparse.Namespace) -> int:
    if args.node and args.expect:
        args.parser.error("--expect: --node only measures this node, --compare looks for others")
    loaded = load(args.config, args.overrides)
    from megatron_patch.launcher import preflight, verdict

    out = Path(args.out)
    if not args.compare:
        preflight.measure(loaded.config, out)
    return 0 if args.node else verdict.compare(loaded.config, out, args.expect)


def token_budget(text: str) -> float:
    """``300B`` -> 3e11.

    Raises ConfigError: not a positive number with an optional K, M, B or T, or beyond `MAX_TOKENS`.
    """
    from megatron_patch.schema.problem import ConfigError, Problem

    match = NUMBER.fullmatch(text.strip())
    value = float(match[1]) * SCALE[match[2].lower()] if match else 0.0
    if not 0 < value <= MAX_TOKENS:
        problem = (
            f"{text[:60]!r} is not a number of tokens up to {MAX_TOKENS:g}; write e.g. 300B, 2.5T "
            "or 100000000"
        )
        raise ConfigError([Problem("--tokens", problem)])
    return value


def run_plan(args: argparse.Namespace) -> int:
    """Check, plan, print; 2 when it does not fit."""
    config = load(args.config, args.overrides).config
    from megatron_patch.planner import report
    from megatron_patch.planner.hardware import gpu_named
    from megatron_patch.planner.plan import Machine, make_plan, problems_of, vocabulary_of
    from megatron_patch.planner.search import alternatives, more_nodes
    from megatron_patch.schema.problem import ConfigError

    per_node = args.gpus_per_node
    if per_node is None:
        per_node = config.cluster.gpus_per_node or 8
    machine = Machine(gpu_named(args.gpu), args.nodes, per_node)
    budget = None if args.tokens is None else token_budget(args.tokens)
    vocabulary = vocabulary_of(config, args.vocab_size)
    problems = list(problems_of(config, machine))
    if problems:
        raise ConfigError(problems, note=_what_fits(config, machine, vocabulary))
    plan = make_plan(config, machine, vocabulary)
    if budget is None:
        budget = float(config.training.train_steps * plan.speed.tokens_per_step)
    found = [] if plan.fits else alternatives(config, machine, vocabulary)
    elsewhere = [] if plan.fits or found else more_nodes(config, machine, vocabulary)
    if args.plot:
        report.draw(plan, Path(args.plot))
    if args.json:
        print(json.dumps(report.as_json(plan, budget, found or elsewhere), indent=1))
    else:
        print(report.text(plan, budget))
    if plan.fits:
        return 0
    print(f"megatron-patch: {report.refusal(plan, found, elsewhere)}", file=sys.stderr)
    return REFUSED


def _what_fits(config: RunConfig, machine: Machine, vocabulary: Vocabulary) -> str:
    """The layouts that would do, for a configuration that does not even divide."""
    from megatron_patch.planner.search import alternatives, more_nodes

    if machine.nodes < 1 or machine.gpus_per_node < 1:
        return ""
    found = alternatives(config, machine, vocabulary, most=3)
    where = "What would fit these GPUs:"
    if not found:
        found = more_nodes(config, machine, vocabulary)
        nodes = found[0].plan.machine.nodes if found else 0
        where = f"Nothing tried fits these {machine.world} GPUs; on {nodes} nodes would fit:"
    same = "the layout as it is"
    lines = [f"  {a.plan.layout.describe()}: {a.arguments or same}" for a in found]
    return "\n".join([where, *lines]) if lines else ""
