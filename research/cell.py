"""One run of an experiment inside its own process: the variant, then the trainer.

    python research/cell.py --config FILE --variant NAME --set KEY=VALUE ...

`run.py` starts it (under torchrun where a run has several GPUs).
"""

from __future__ import annotations

import argparse
import sys

import variants

from megatron_patch.cli import app
from megatron_patch.cli.common import add_overrides, load, report_error
from megatron_patch.runtime.lifeline import die_with_launcher


def main() -> int:
    """The trainer's exit code; 2 for a variant that does not fit the configuration."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", required=True)
    parser.add_argument("--variant", metavar="NAME", default="plain")
    parser.add_argument("--rivals", metavar="STEPS", type=int, default=0)
    add_overrides(parser)
    args = parser.parse_args()
    die_with_launcher()
    try:
        return train(args)
    except variants.VariantError as error:
        report_error(error)
        return 2
    except KeyboardInterrupt:
        return app.INTERRUPTED
    except Exception as error:
        code = app.exit_code(error)
        if code is None:
            raise
        report_error(error)
        return code


def train(args: argparse.Namespace) -> int:
    """Install the variant and train; the only place of research/ that calls the trainer."""
    loaded = load(args.config, args.overrides)
    variants.install(args.variant, loaded.config)
    if args.rivals:
        import rivals

        rivals.install(args.rivals)
    from megatron_patch.training import trainer

    return trainer.train(loaded)


if __name__ == "__main__":
    sys.exit(main())
