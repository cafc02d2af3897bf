"""``megatron-patch plan``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patch.cli.common import Subparsers, add_config, as_path, load

if TYPE_CHECKING:
    from megatron_patch.planner.plan import Machine, Plan, Vocabulary
    from megatron_patch.planner.search import Alternative
    from megatron_patch.schema.run import RunConfig

DESCRIPTION = """\
What a run will need, before it has a GPU: layout over nodes, parameters, memory of one GPU of every
pipeline stage, communication per link, an estimated step time, days to a token budget.

  megatron-patch plan --config configs/llama_8b_8k.yaml --gpu h100
  megatron-patch plan --config configs/nodes/llama_70b_8k_16n.yaml --nodes 16 --tokens 2T
  megatron-patch plan --config run.yaml --set parallel.tensor_model_parallel_size=4 --json

A layout that does not fit is refused with exit code 2 and the layouts that would, fastest first.
How it is computed, and how well it is known: docs/planning.md.
"""
NUMBER = re.compile(r"([0-9]+(?:[.][0-9]*)?|[.][0-9]+)([KMBT]?)", re.IGNORECASE)
SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
REFUSED = 2


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="memory, communication and time of a run, without a GPU",
        description=DESCRIPTION,
    )
    add_config(parser)
    parser.add_argument("--nodes", metavar="N", type=int, default=1, help="nodes (default: 1)")
    parser.add_argument(
        "--gpus-per-node", metavar="N", type=int, help="default: cluster.gpus_per_node, else 8"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", default="h200", help="kind of GPU, e.g. h100, h200, a100"
    )
    parser.add_argument(
        "--tokens", metavar="N", help="token budget, e.g. 300B; default: training.train_steps"
    )
    parser.add_argument(
        "--vocab-size", metavar="N", type=int, help="token ids, where the tokenizer is not here"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", metavar="FILE", type=as_path, help="draw the memory of every stage into a PNG"
    )
    parser.set_defaults(run=run, only_prints=True)


def token_budget(text: str) -> float:
    """``300B`` -> 3e11.

    Raises:
        ConfigError: not a positive number with an optional K, M, B or T.
    """
    from megatron_patch.config import ConfigError
    from megatron_patch.schema.problem import Problem

    match = NUMBER.fullmatch(text.strip())
    value = float(match[1]) * SCALE[match[2].lower()] if match else 0.0
    if value <= 0:
        problem = f"{text!r} is not a number of tokens; write e.g. 300B, 2.5T or 100000000"
        raise ConfigError([Problem("--tokens", problem)])
    return value


def run(args: argparse.Namespace) -> int:
    """Check, plan, print; 2 when it does not fit."""
    config = load(args.config, args.overrides).config
    from megatron_patch.config import ConfigError
    from megatron_patch.planner import report
    from megatron_patch.planner.hardware import gpu_named
    from megatron_patch.planner.plan import Machine, make_plan, problems_of, vocabulary_of

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
    found, elsewhere = _others(plan, vocabulary)
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


def _others(plan: Plan, vocabulary: Vocabulary) -> tuple[list[Alternative], list[Alternative]]:
    """What fits these GPUs, or else more of them; nothing where the plan itself fits."""
    from megatron_patch.planner.search import alternatives, more_nodes

    if plan.fits:
        return [], []
    found = alternatives(plan.run, plan.machine, vocabulary)
    return found, [] if found else more_nodes(plan.run, plan.machine, vocabulary)


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
