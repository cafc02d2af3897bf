"""``megatron-patch launch``."""

from __future__ import annotations

import argparse

from megatron_patch.cli.common import Subparsers, add_config, load

DESCRIPTION = """\
Render the batch script of a run and submit it to Slurm: every check of the configuration, then the
planner (a layout that cannot fit is refused, with those that would: 'megatron-patch plan'), then
sbatch --test-only, then sbatch. The rendered script, its parts and the resolved configuration stay
in <run_dir>/launch. The same command continues a run that was stopped; a run that has a job already
is refused.

  megatron-patch launch --config run.yaml --nodes 2 --dry-run
  megatron-patch launch --config run.yaml --nodes 2 --set cluster.partition=batch

Everything about the cluster is in the section cluster: 'megatron-patch config help cluster'.
"""


def add_parser(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser("launch", help="submit a run to Slurm", description=DESCRIPTION)
    add_config(parser)
    parser.add_argument("--nodes", metavar="N", type=int, required=True, help="number of nodes")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script; write and submit nothing"
    )
    parser.add_argument(
        "--no-plan", action="store_true", help="submit what the planner says does not fit"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, render, submit."""
    import sys

    loaded = load(args.config, args.overrides, for_job=True)
    from megatron_patch.launcher import fit, render, submit

    job = submit.build_job(loaded, args.nodes)
    memory = None if args.no_plan else fit.check_fit(job)
    if memory is not None:
        print(memory, file=sys.stderr)
    if args.dry_run:
        print(render.rank_map(job), file=sys.stderr)
        sys.stdout.write(render.render(job))
        return 0
    job_id = submit.submit(job, loaded)
    print(f"job {job_id}: {render.rank_map(job)}")
    print(f"script {job.launch_dir / 'job.sbatch'}, logs {job.run_dir / 'logs'}")
    return 0
