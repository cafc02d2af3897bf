"""Do the errors of attention's backward pass add up in W_Q and W_K, or wander? Weights held still.

    python benchmarks/gradient_drift.py --config RUN --checkpoint RUN/checkpoints/STEP \\
        --layers 1 --batches 256 --kinds none compensated low_order_o consistent_sum

A run that moves its weights cannot tell a bias from a random walk. Here the weights of a checkpoint
stay as they are; the global batches that training would have used next go forward and backward,
and no optimizer step is made. In the chosen layers, for every head h and kind of numerics,

    T_t = true dQ^T x          float64, the head's share of the gradient of W_Q in batch t
    E_t = (dQ - true dQ)^T x   what the kind's dQ adds to it

with x the input of the QKV projection, on the very q, k, v, dO of the run; both over the tokens of
the batch, as the trainer's gradients are. The same with dK for W_K. What is made of them:

    relative    RMS |E| / RMS |T|
    coherence   mean <E_s, E_t> over pairs s != t, over mean |E|^2: 0 for a walk, 1 for a pure bias.
                With coherence c, what n steps add up is more bias than walk when c n > 1.
                _se by the jackknife over 16 groups of batches: wide enough for a test of zero,
                the right one far from it
    walk_       an exact test of zero: the coherence between groups if every group had a random
                sign. _sd: its scatter then, what could be seen; _z: the one found over that (11 at
                most); _p: share of all sign patterns that reach it
    ahead       mean cosine of E_t with the sum of all E before it; above 0 if there is a bias
    cross       mean <E_s, T_t> over pairs s != t, over RMS |E| RMS |T|: an error along the mean
                gradient is a change of the learning rate; cross_same: the same with s = t
    line        mean cos^2 of pairs: 1 if all errors share one line, whatever their signs; 1 over
                the number of dims that they fill otherwise. Measured on a random projection, whose
                floor (1 / dims, `floor`) has been taken off
    rank_one    largest squared singular value of E_t over |E_t|^2; rank_one_of_mean: of their sum
    growth      -<E, W> / |E| |W|, mean over batches and _se. A step subtracts the gradient: above 0
                it makes the head's W_Q (W_K), and with it all its logits, larger

`true` has the same of T itself, for scale. Kinds are those of the kernel (of its emulation on the
CPU), vendor kernels by name, and two controls: `rounded` is the true dQ rounded once to its 16
bits, which no kernel escapes; `trainer` is the gradient that the trainer itself made: numerics of
its configuration, and the rounding of its weight-gradient product.

One process. Held at a time: q, k, v, dO, x of the chosen layers for a whole global batch. RUN is a
run directory or a configuration file (a run of an experiment keeps its variant); ``--set`` changes
keys (micro_batch_size, where data lies).
Batches that a run left out after a loss spike are not left out here. A sequence that comes twice (a
new epoch) makes errors repeat that are no bias: `repeated_sequences` counts them. Writes
docs/results/gradient_drift.json, every minute and at the end, so that a machine that is lost takes
little with it; ``--keep`` adds to the runs of an earlier result. ``--seconds`` ends at the batch
after which there is no time for another, start-up included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
import drift_statistics
import drift_table
import machine
import torch
from drift_run import Refusal, configuration, opened, step_of, variant_of
from drift_statistics import FEWEST, GROUPS, SKETCH, TRUE, Side
from drift_table import SIDES

from megatron_patch.experiments import probing, variants

if TYPE_CHECKING:
    from megatron_patch.data.loader import Loaders
    from megatron_patch.stability.observe import Seen, Site
    from megatron_patch.training.session import Session

ROUNDED, TRAINER = "rounded", "trainer"
KINDS = ("none", "compensated", "low_order_o", "consistent_sum", ROUNDED, TRAINER)
SAY_EVERY = 20.0
"""Seconds between lines of progress."""
WRITE_EVERY = 60.0
"""Seconds between results of the batches until then."""


def runners(kinds: Sequence[str], device: torch.device) -> dict[str, probing.Runner]:
    """How to compute every kind that is computed again: the kernel, or on the CPU its emulation.

    Raises:
        Refusal: an unknown kind.
    """
    table = probing.backends(device)
    prefix = "stable_flash " if device.type == "cuda" else "emulated "
    ours = [name for name in table if name.startswith(prefix)]
    known = {name.removeprefix(prefix): table[name] for name in ours}
    known |= {name: run for name, run in table.items() if " " not in name}
    allowed = [*known, ROUNDED, TRAINER]
    if wrong := [kind for kind in kinds if kind not in allowed]:
        raise Refusal(
            f"--kinds {' '.join(wrong)}: not on {device.type}; choose from {', '.join(allowed)}"
        )
    return {kind: known[kind] for kind in kinds if kind in known}


class Layer:
    """What is kept of one layer: the tensors of a batch, and the statistics of W_Q and W_K."""

    def __init__(self, site: Site, kinds: Sequence[str], sketch: torch.Tensor | None) -> None:
        """``sketch``: the projection, if another layer has made it."""
        self.site, self.kinds = site, list(kinds)
        attention: Any = site.attention
        self.linear = attention.linear_qkv
        weights = drift_statistics.heads_of(self.linear.weight, attention)
        size = weights[0][0].numel()
        sketch = drift_statistics.projection(size, weights[0].device) if sketch is None else sketch
        self.sketch = sketch
        self.sides = {s: Side(w, kinds, sketch) for s, w in zip(SIDES, weights, strict=True)}
        self.inputs: list[torch.Tensor] = []
        self.calls: list[tuple[Seen, torch.Tensor]] = []
        self._handle = self.linear.register_forward_pre_hook(self._before)

    def close(self) -> None:
        """Take the hook off."""
        self._handle.remove()

    def _before(self, module: Any, args: tuple[Any, ...]) -> None:
        # As `Observer` counts: a recomputed layer's first pass has no gradients.
        if torch.is_grad_enabled():
            self.inputs.append(args[0].detach())

    def finish(self, table: Mapping[str, probing.Runner], tokens: torch.Tensor) -> None:
        """Gradients of the batch that has gone through, per token of loss, into the statistics."""
        sums: dict[str, dict[str, torch.Tensor]] = {side: {} for side in SIDES}
        for x, (seen, dout) in zip(self.inputs, self.calls, strict=True):
            tensors = drift_statistics.tensors_of(seen, dout)
            true = drift_statistics.true_gradients(tensors)
            _collect(sums, TRUE, true, x)
            for kind in self.kinds:
                if kind == ROUNDED:
                    found: Any = [t.to(tensors.q.dtype) for t in true]
                elif kind in table:
                    result = table[kind](tensors)
                    found = [result.dq, result.dk]
                else:
                    continue
                # Subtracted before the sum over tokens, as what is looked for is small beside it.
                error = tuple(a.double() - t for a, t in zip(found, true, strict=True))
                _collect(sums, kind, error, x)
        self.inputs, self.calls = [], []
        whole = drift_statistics.heads_of(self.linear.weight.main_grad, self.site.attention)
        for side, gradient in zip(SIDES, whole, strict=True):
            scaled = {kind: total / tokens for kind, total in sums[side].items()}
            truth = scaled.pop(TRUE)
            if TRAINER in self.kinds:
                scaled[TRAINER] = gradient - truth
            self.sides[side].add(truth, scaled)


def _collect(
    sums: dict[str, dict[str, torch.Tensor]], kind: str, pair: Sequence[torch.Tensor],
    x: torch.Tensor,
) -> None:  # fmt: skip
    """Add a micro-batch's (dQ, dK) times x."""
    for side, gradient in zip(SIDES, pair, strict=True):
        share = drift_statistics.by_head(gradient, x)
        sums[side][kind] = sums[side][kind] + share if kind in sums[side] else share


class Still:
    """A session whose weights stay: forward, backward, and what the chosen layers made of it."""

    def __init__(self, session: Session, layers: Sequence[int], kinds: Sequence[str]) -> None:
        from megatron_patch.stability.observe import Observer, find_sites
        from megatron_patch.training.finite import unwrap

        roots = [unwrap(chunk) for chunk in session.chunks]
        sites = find_sites(roots, decoder_layers=session.run.model.num_layers)
        by_number = {site.layer: site for site in sites}
        self.session = session
        self.layers: dict[int, Layer] = {}
        for number in layers:
            made = next(iter(self.layers.values()), None)
            sketch = None if made is None else made.sketch
            self.layers[number] = Layer(by_number[number], kinds, sketch)
        self._observer = Observer([layer.site for layer in self.layers.values()])

    def batch(self, batches: list[Any], table: Mapping[str, probing.Runner]) -> float:
        """One global batch; its mean token loss."""
        from megatron_patch.stability.observe import Request
        from megatron_patch.training import auxiliary
        from megatron_patch.training.step import run_schedule

        session = self.session
        auxiliary.clear(session)
        for chunk in session.chunks:
            chunk.zero_grad_buffer()
        session.optimizer.zero_grad()
        self._observer.arm(
            [
                Request(micro_batch=i, layers=frozenset([number]), callback=_keep(layer))
                for number, layer in self.layers.items()
                for i in range(session.micro_batches)
            ]
        )
        try:
            report = run_schedule(session, batches, forward_only=False)
        finally:
            self._observer.disarm()
        assert report is not None  # one pipeline stage
        for layer in self.layers.values():
            layer.finish(table, report[1].double())
        # Waits for the device: the clock of the progress line, and of --seconds, is right.
        loss, tokens = report.tolist()
        return loss / tokens


def _keep(layer: Layer) -> Callable[[Seen, torch.Tensor], None]:
    return lambda seen, dout: layer.calls.append((seen, dout))


class _Progress:
    """A line now and then, and whether there is time for another batch."""

    def __init__(self, wanted: int, began: float, seconds: float | None) -> None:
        self.wanted, self.seconds = wanted, seconds
        self._began, self._times = began, [time.monotonic()]
        self._said = self._times[0]

    def over(self) -> bool:
        """Called after every batch."""
        now = time.monotonic()
        self._times.append(now)
        done = len(self._times) - 1
        # The first batch compiles.
        each = (now - self._times[min(1, done - 1)]) / max(1, done - 1)
        if now - self._said >= SAY_EVERY or done == 1:
            self._said = now
            left = (self.wanted - done) * each
            print(
                f"batch {done} of {self.wanted}, {each:.2f} s each, about {left / 60:.1f} min left",
                flush=True,
            )
        margin = each if done > 1 else 0.0
        return self.seconds is not None and now + margin - self._began > self.seconds


def measure(
    session: Session,
    loaders: Loaders,
    *,
    first: int,
    layers: Sequence[int],
    kinds: Sequence[str],
    table: Mapping[str, probing.Runner],
    batches: int,
    over: Callable[[], bool] = lambda: False,
    write: Callable[[dict[int, dict[str, Any]]], object] = lambda facts: None,
) -> dict[int, dict[str, Any]]:
    """Up to ``batches`` global batches from number ``first`` (0-based) on; facts by layer.

    ``table`` says how every kind but `ROUNDED` and `TRAINER` is computed; ``over`` is asked after
    every batch whether it was the last one; ``write`` gets the facts so far every `WRITE_EVERY`.

    Raises:
        Refusal: fewer than `FEWEST` batches were done.
    """
    from megatron_patch.training.step import fetch

    still = Still(session, layers, kinds)
    reader = loaders.iterate("train", start_step=first)
    losses: list[float] = []
    written = time.monotonic()
    try:
        while len(losses) < batches:
            losses.append(still.batch(fetch(session, reader), table))
            if over():
                break
            due = time.monotonic() - written >= WRITE_EVERY
            if due and FEWEST <= len(losses) < batches:
                write(_facts(still, loaders, first, losses))
                written = time.monotonic()
    finally:
        reader.close()  # type: ignore[attr-defined]
        for layer in still.layers.values():
            layer.close()
    if len(losses) < FEWEST:
        raise Refusal(
            f"--seconds: only {len(losses)} batches were done, {FEWEST} are needed; give more time"
        )
    return _facts(still, loaders, first, losses)


def _facts(
    still: Still, loaders: Loaders, first: int, losses: list[float]
) -> dict[int, dict[str, Any]]:
    """What is known after the batches whose losses these are, by layer."""
    run = still.session.run
    samples = [x for b in range(len(losses)) for x in loaders.samples("train", first + b)]
    facts = {
        "first_batch": first,
        "batches": len(losses),
        "sequences": run.training.global_batch_size,
        "repeated_sequences": len(samples) - len({(x["file"], x["window"]) for x in samples}),
        "tokens": run.model.seq_length,
        "precision": run.training.precision,
        "loss_mean": statistics.mean(losses),
        "loss_sd": statistics.stdev(losses),
        "groups": GROUPS,
        "sketch": SKETCH,
        "floor": 1 / SKETCH,
    }
    found = {}
    for number, layer in still.layers.items():
        attention = {"backend": layer.site.backend, "stabilizer": layer.site.stabilizer}
        figures = {side: layer.sides[side].report() for side in SIDES}
        told = {"layer": number, "attention": attention, "kinds": layer.kinds}
        found[number] = facts | told | figures
    return found


def run_it(args: argparse.Namespace, began: float) -> int:
    """Everything after the command line."""
    kept = machine.kept_runs(machine.read_result(args.keep, "--keep")) if args.keep else {}

    def written(facts: Mapping[int, dict[str, Any]]) -> tuple[dict[str, Any], Path]:
        place = {"run": run.name, "step": step, "variant": variant, "batches_wanted": args.batches}
        new = {f"{run.name}, step {step:,}, layer {n}": place | one for n, one in facts.items()}
        figures = {"runs": kept | new, "seconds": time.monotonic() - began}
        return new, machine.write_result("gradient_drift", figures, args.out)

    with tempfile.TemporaryDirectory() as scratch:
        run = configuration(args, Path(scratch))
        table = runners(args.kinds, torch.device(run.training.device))
        variant = variant_of(args.config)
        variants.install(variant, run)
        with opened(run) as (session, loaders):
            step = step_of(args.checkpoint)
            found = measure(
                session,
                loaders,
                first=step,  # batches are counted from 0: the one after that of the last step
                layers=args.layers,
                kinds=args.kinds,
                table=table,
                batches=args.batches,
                over=_Progress(args.batches, began, args.seconds).over,
                write=written,
            )
    new, where = written(found)
    print(drift_table.figures(new))
    print(f"wrote {where} after {time.monotonic() - began:.0f} s")
    return 0


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="run directory, or its YAML")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of one step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="counted from 0")
    parser.add_argument("--batches", type=int, default=256, help="global batches")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), metavar="KIND")
    parser.add_argument("--seconds", type=float, help="stop in time for this, from the start on")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="an earlier result to add to")
    parser.add_argument("--out", type=Path, help="folder of the result; default docs/results")
    args = parser.parse_args()
    if args.batches < FEWEST:
        parser.error(f"--batches {args.batches}: at least {FEWEST}, for standard errors")
    args.layers, args.kinds = list(dict.fromkeys(args.layers)), list(dict.fromkeys(args.kinds))
    from megatron_patch.checkpoint.errors import CheckpointError
    from megatron_patch.config import ConfigError
    from megatron_patch.data.errors import DataError
    from megatron_patch.experiments.errors import ExperimentError

    try:
        return run_it(args, began)
    except (Refusal, ConfigError, DataError, CheckpointError, ExperimentError) as error:
        print(f"gradient_drift.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
