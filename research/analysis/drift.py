"""Do the errors of attention's backward pass add up in W_Q and W_K, or wander? Weights held still.

    python research/analysis/drift.py --config RUN --checkpoint RUN/checkpoints/STEP \\
        --layers 1 --batches 256 --kinds none compensated low_order_o consistent_sum

A run that moves its weights cannot tell a bias from a random walk. Here the weights of a checkpoint
stay as they are; the global batches that training would have used next go forward and backward,
and no optimizer step is made. In the chosen layers, for every head and kind of numerics,

    T_t = true dQ^T x          float64, the head's share of the gradient of W_Q in batch t
    E_t = (dQ - true dQ)^T x   what the kind's dQ adds to it

with x the input of the QKV projection, on the very q, k, v, dO of the run. The same with dK for
W_K. What is made of them:

    relative    RMS |E| / RMS |T|
    coherence   mean <E_s, E_t> over pairs s != t, over mean |E|^2: 0 for a walk, 1 for a pure
                bias. With coherence c, what n steps add up is more bias than walk when c n > 1
    walk_p      an exact test of zero: share of all sign patterns of 16 groups of batches whose
                coherence between groups reaches the one found; walk_sd: its scatter under them
    growth      -<E, W> / |E| |W|, mean over batches and _se: above 0 a descent step makes the
                head's W_Q (W_K) larger

`true` has the same of T itself. Kinds are those of the kernel (of its emulation on the CPU),
sdpa_flash and sdpa_cudnn, and two controls: `rounded` is the true dQ rounded once to its 16 bits,
`trainer` the gradient that the trainer itself made. One process. RUN is a run directory or a
configuration file (a run of an experiment keeps its variant); ``--set`` changes keys. Writes a
section of gradient_drift.json, every 32 batches and at the end. The results in that file have more
figures (jackknife errors, ranks, cross terms) of a longer script: see the report's first lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import shared
import torch
from captured import KINDS as EMULATED

from stable_attention import probes
from stable_attention.reference.emulators import emulate

ROUNDED, TRAINER = "rounded", "trainer"
KINDS = ("none", "compensated", "low_order_o", "consistent_sum", ROUNDED, TRAINER)
VENDORS = {"sdpa_flash": "FLASH_ATTENTION", "sdpa_cudnn": "CUDNN_ATTENTION"}
SIDES, TRUE = ("q", "k"), "true"
GROUPS, FEWEST, WRITE_EVERY = 16, 4, 32
"""Groups of batches that get random signs (2^15 ways); batches needed; between two results."""
VARIANT = "experiment.json"
"""Where an experiment says which variant it ran a run directory with."""
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Runner = Callable[[Tensors, float], Sequence[torch.Tensor]]


class Refusal(ValueError):
    """What cannot be measured; one line for the person who asked."""


def runners(kinds: Sequence[str], device: torch.device) -> dict[str, Runner]:
    """How every kind that is computed again makes (dQ, dK) of causal q, k, v, dO [b, h, s, d].

    Raises:
        Refusal: an unknown kind.
    """
    known = EMULATED | (VENDORS if device.type == "cuda" else {})
    if wrong := [kind for kind in kinds if kind not in (*known, ROUNDED, TRAINER)]:
        allowed = ", ".join((*known, ROUNDED, TRAINER))
        raise Refusal(f"--kinds {' '.join(wrong)}: not on {device.type}; choose from {allowed}")

    def emulated(kind: str) -> Runner:
        def run(x: Tensors, scale: float) -> Sequence[torch.Tensor]:
            n = x[0].shape[2]
            mask = torch.ones(n, n, dtype=torch.bool, device=x[0].device).tril()
            rounding = dataclasses.replace(EMULATED[kind], dtype=x[0].dtype)
            parts = []
            for h in range(x[0].shape[1]):
                one = (t[:, h : h + 1] for t in x)
                parts.append(emulate(*one, rounding=rounding, scale=scale, mask=mask))
            return [torch.cat([getattr(part, name) for part in parts], 1) for name in ("dq", "dk")]

        return run

    def kernel(kind: str) -> Runner:
        def run(x: Tensors, scale: float) -> Sequence[torch.Tensor]:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            from stable_attention import stable_attention

            q, k, v = (t.detach().requires_grad_() for t in x[:3])
            if kind in VENDORS:
                attend = torch.nn.functional.scaled_dot_product_attention
                with sdpa_kernel([getattr(SDPBackend, VENDORS[kind])]):
                    out = attend(q, k, v, is_causal=True, scale=scale)
                    return torch.autograd.grad(out, (q, k), x[3])
            how: Any = {"layout": "bhsd", "causal": True, "deterministic": True}
            out = stable_attention(q, k, v, scale=scale, stabilizer=kind, **how)
            return torch.autograd.grad(out, (q, k), x[3])

        return run

    make = kernel if device.type == "cuda" else emulated
    return {kind: make(kind) for kind in kinds if kind not in (ROUNDED, TRAINER)}


def refusals(run: Any, layers: Sequence[int]) -> Iterator[str]:
    """Why E would not be the error of this configuration's W_Q and W_K."""
    allowed: dict[str, tuple[Any, ...]] = {
        "model.layer_spec": ("local",),  # others fuse the norm into the projection
        # With others q and k are not linear functions of the projection's input.
        "model.position_embedding": ("learned_absolute", "none"),
        "model.qk_layernorm": (False,),
        "model.mla": (None,),
        # Or the float64 truth has no such thing.
        "model.softmax_type": ("vanilla",),
        "model.window": (None,),
        "model.num_query_groups": (None, run.model.num_attention_heads),
        "model.attention_dropout": (0.0,),
        "model.hidden_dropout": (0.0,),  # batches would differ in more than their tokens
    }
    for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
        allowed[f"parallel.{name}_parallel_size"] = (1,)  # one process has all heads
    for key, values in allowed.items():
        section, _, name = key.partition(".")
        if (value := getattr(getattr(run, section), name)) not in values:
            yield f"{key} is {value!r}, only {' or '.join(map(repr, values))} can be measured"
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        yield f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: start it without torchrun"
    if wrong := [layer for layer in layers if not 0 <= layer < run.model.num_layers]:
        yield f"--layers {wrong}: the model has layers 0 to {run.model.num_layers - 1}"


def configuration(args: Any, scratch: Path) -> Any:
    """The run's configuration, made to load the weights of the checkpoint and to leave no trace.

    Raises:
        ConfigError, Refusal: it cannot be loaded, or not be measured.
    """
    from megatron_patch.checkpoint.manifest import MANIFEST
    from megatron_patch.config import load

    if not (args.checkpoint / MANIFEST).is_file():
        raise Refusal(f"--checkpoint {args.checkpoint}: there is no {MANIFEST}; name one step's")
    path = args.config / "config.yaml" if args.config.is_dir() else args.config
    # What the run itself began with may be gone, and is not wanted.
    unset = ("load_from=null", "load_weights_only=false", "directory=null", "resume=auto")
    run = load(path, [*args.set, *(f"checkpoint.{key}" for key in unset)]).config
    if found := list(refusals(run, args.layers)):
        raise Refusal("; ".join(found))
    weights = {"load_from": str(args.checkpoint), "load_weights_only": True, "async_save": False}
    # Of no use to one process that makes no update; the latter's hooks wait for one.
    overlap = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    return dataclasses.replace(
        run,
        run_dir=str(scratch),
        checkpoint=dataclasses.replace(run.checkpoint, **weights),
        parallel=dataclasses.replace(run.parallel, **overlap),
    )


@contextlib.contextmanager
def opened(run: Any) -> Iterator[tuple[Any, Any]]:
    """The trainer's own session with the weights of ``checkpoint.load_from``, and its data."""
    from megatron_patch.data.verify import verify_datasets
    from megatron_patch.parallel import setup
    from megatron_patch.training.process import prepare_process
    from megatron_patch.training.signals import StopFlags

    prepare_process(run)
    with contextlib.ExitStack() as stack:
        layout = setup.initialize(run)
        stack.callback(setup.destroy)
        # Imports Megatron, which must find CPU mode installed.
        from megatron_patch.checkpoint.megatron import Checkpointer
        from megatron_patch.data.loader import build_loaders
        from megatron_patch.training.session import build_session

        monitor: Any = types.SimpleNamespace(say=lambda text: print(text, file=sys.stderr))
        for text in verify_datasets(run):
            monitor.say(text)
        loaders = build_loaders(run, layout)
        stack.callback(loaders.close)
        session, _ = build_session(run, layout, loaders, stop=StopFlags(), monitor=monitor)
        Checkpointer(run, layout, session.chunks, session.optimizer, session.schedule).load()
        yield session, loaders


def by_head(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """gradient^T x over all tokens, [h, d, c], of gradient [b, h, s, d] and x [s, b, c]; float64:
    a mean far below the scatter of single tokens is looked for."""
    _, h, _, d = gradient.shape
    rows = gradient.double().permute(1, 3, 2, 0).reshape(h * d, -1)
    return (rows @ x.double().flatten(0, 1)).view(h, d, -1)


def heads_of(fused: torch.Tensor, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(W_Q, W_K) [h, d, c] of core's fused QKV weight, or gradient: per head query, key, value."""
    heads = attention.num_attention_heads_per_partition
    blocks = fused.detach().double().view(heads, 3, -1, fused.shape[1])
    return blocks[:, 0], blocks[:, 1]


class Series:
    """Running sums over matrices [h, d, c], one a batch, and what is made of them."""

    def __init__(self, weight: torch.Tensor) -> None:
        flat = weight.flatten(1)
        self._direction = flat / flat.norm(dim=1, keepdim=True)
        self.sums = weight.new_zeros(GROUPS, *flat.shape)
        self.squares: list[torch.Tensor] = []
        self.growth: list[torch.Tensor] = []

    def add(self, matrix: torch.Tensor) -> None:
        """The next batch's matrix."""
        e = matrix.flatten(1)
        size = e.norm(dim=1)
        self.growth.append(-(e * self._direction).sum(1) / size)
        self.sums[len(self.squares) % GROUPS] += e
        self.squares.append(size.square())

    def report(self, true: Series) -> list[dict[str, Any]]:
        """Figures, a dict a head; None for what is no number."""
        squares, of_true = torch.stack(self.squares), torch.stack(true.squares)
        n, total = len(squares), self.sums.sum(0)
        cross = total.square().sum(1) - squares.sum(0)
        growth = torch.stack(self.growth)
        found = {
            "rms": squares.mean(0).sqrt(),
            "relative": (squares.sum(0) / of_true.sum(0)).sqrt(),
            "coherence": cross / (n - 1) / squares.sum(0),
            "growth": growth.mean(0),
            "growth_se": growth.std(0) / math.sqrt(n),
        }
        found |= dict(zip(("walk_sd", "walk_p"), self._random_signs(squares), strict=True))
        names = found.keys()
        return [
            {"head": h} | {k: shared.finite(float(f"{float(found[k][h]):.6g}")) for k in names}
            for h in range(len(total))
        ]

    def _random_signs(self, squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter of the coherence between groups under random signs, and the share of patterns
        that reach the one found. A walk's steps may as well have had the other sign, whatever
        directions they share."""
        sizes = torch.bincount(torch.arange(len(squares)) % GROUPS).double()
        count = len(sizes)
        off = torch.einsum("ahx,bhx->hab", self.sums[:count], self.sums[:count]).cpu()
        off = off - torch.diag_embed(off.diagonal(dim1=1, dim2=2))
        scatter = (2 * off.square().sum((1, 2))).sqrt()
        bits = torch.arange(2 ** (count - 1))[:, None] >> torch.arange(count)
        signs = 1.0 - 2.0 * (bits & 1).double()  # the last one is always +
        reached = []
        for one, spread in zip(off, scatter, strict=True):
            values = ((signs @ one) * signs).sum(1)
            # The pattern of all + is this very sum in another order of addition.
            share = (values >= one.sum() - 1e-9 * spread).double().mean()
            reached.append(share.where(spread.isfinite(), torch.nan))
        pairs = sizes.sum() ** 2 - sizes.square().sum()
        return scatter / (pairs * squares.mean(0).cpu()), torch.stack(reached)


class Layer:
    """What is kept of one layer: the tensors of a batch, and the statistics of W_Q and W_K."""

    def __init__(self, site: Any, kinds: Sequence[str]) -> None:
        self.site, self.kinds = site, list(kinds)
        attention: Any = site.attention
        self.linear = attention.linear_qkv
        weights = heads_of(self.linear.weight, attention)
        self.series = {
            side: {kind: Series(weight) for kind in (TRUE, *kinds)}
            for side, weight in zip(SIDES, weights, strict=True)
        }
        self.inputs: list[torch.Tensor] = []
        self.calls: list[tuple[Any, torch.Tensor]] = []
        self.handle = self.linear.register_forward_pre_hook(self._before)

    def _before(self, module: Any, args: tuple[Any, ...]) -> None:
        # A recomputed layer's first pass has no gradients.
        if torch.is_grad_enabled():
            self.inputs.append(args[0].detach())

    def finish(self, table: Mapping[str, Runner], tokens: torch.Tensor) -> None:
        """Gradients of the batch that has gone through, per token of loss, into the statistics."""
        sums: dict[str, dict[str, torch.Tensor]] = {side: {} for side in SIDES}

        def collect(kind: str, pair: Sequence[torch.Tensor], x: torch.Tensor) -> None:
            for side, gradient in zip(SIDES, pair, strict=True):
                share = by_head(gradient, x)
                sums[side][kind] = sums[side][kind] + share if kind in sums[side] else share

        for x, (seen, dout) in zip(self.inputs, self.calls, strict=True):
            q, k, v, do = (
                t.permute(1, 2, 0, 3).contiguous() for t in (seen.q, seen.k, seen.v, dout)
            )
            tensors, scale = (q, k, v, do), seen.geometry.scale
            true = probes.true_gradients(*tensors, layout="bhsd", causal=True, scale=scale)
            collect(TRUE, true, x)
            for kind in self.kinds:
                if kind == TRAINER:
                    continue
                rounded = [t.to(tensors[0].dtype) for t in true]
                found = rounded if kind == ROUNDED else table[kind](tensors, scale)
                # Subtracted before the sum over tokens: what is looked for is small beside it.
                collect(kind, [a.double() - t for a, t in zip(found, true, strict=True)], x)
        self.inputs, self.calls = [], []
        whole = heads_of(self.linear.weight.main_grad, self.site.attention)
        for side, gradient in zip(SIDES, whole, strict=True):
            scaled = {kind: total / tokens for kind, total in sums[side].items()}
            if TRAINER in self.kinds:
                scaled[TRAINER] = gradient - scaled[TRUE]
            for kind, matrix in scaled.items():
                self.series[side][kind].add(matrix)

    def report(self) -> dict[str, Any]:
        """Figures by side and kind, a dict a head."""
        return {
            side: {kind: one.report(of[TRUE]) for kind, one in of.items()}
            for side, of in self.series.items()
        }


def measure(
    session: Any, loaders: Any, first: int, args: Any, write: Callable[[dict[int, Any]], object]
) -> dict[int, Any]:
    """``args.batches`` global batches from number ``first`` (0-based) on; facts by layer."""
    from megatron_patch.parallel.buffers import unwrap
    from megatron_patch.stability.observe import ObservationRequest, Observer, find_sites
    from megatron_patch.training import auxiliary
    from megatron_patch.training.step import fetch, run_schedule

    run = session.run
    roots = [unwrap(chunk) for chunk in session.chunks]
    sites = {s.layer: s for s in find_sites(roots, decoder_layers=run.model.num_layers)}
    layers = {number: Layer(sites[number], args.kinds) for number in args.layers}
    observer = Observer([layer.site for layer in layers.values()])
    table = runners(args.kinds, torch.device(run.training.device))
    reader: Any = loaders.iterate("train", start_step=first)
    losses: list[float] = []

    def keep(layer: Layer) -> Callable[[Any, torch.Tensor], None]:
        return lambda seen, dout: layer.calls.append((seen, dout))

    def facts() -> dict[int, Any]:
        samples = [x for b in range(len(losses)) for x in loaders.samples("train", first + b)]
        told = {
            "first_batch": first,
            "batches": len(losses),
            "sequences": run.training.global_batch_size,
            # A new epoch makes errors repeat that are no bias.
            "repeated_sequences": len(samples) - len({(x["file"], x["window"]) for x in samples}),
            "tokens": run.model.seq_length,
            "precision": run.training.precision,
            "loss_mean": statistics.mean(losses),
            "loss_sd": statistics.stdev(losses),
            "groups": GROUPS,
        }
        return {
            number: told
            | {"attention": {"backend": one.site.backend, "stabilizer": one.site.stabilizer}}
            | {"layer": number, "kinds": one.kinds}
            | one.report()
            for number, one in layers.items()
        }

    try:
        while len(losses) < args.batches:
            batches = fetch(session, reader)
            auxiliary.clear(session)
            for chunk in session.chunks:
                chunk.zero_grad_buffer()
            session.optimizer.zero_grad()
            observer.arm(
                [
                    ObservationRequest(
                        micro_batch=i, layers=frozenset([number]), callback=keep(layer)
                    )
                    for number, layer in layers.items()
                    for i in range(session.micro_batches)
                ]
            )
            try:
                report = run_schedule(session, batches, forward_only=False)
            finally:
                observer.disarm()
            for layer in layers.values():
                layer.finish(table, report[1].double())
            losses.append(float(report[0] / report[1]))
            print(f"batch {len(losses)} of {args.batches}", flush=True)
            if len(losses) % WRITE_EVERY == 0 and len(losses) < args.batches:
                write(facts())
    finally:
        reader.close()
        for layer in layers.values():
            layer.handle.remove()
    return facts()


def run_it(args: Any) -> int:
    """Everything after the command line."""
    from megatron_patch.checkpoint.manifest import MANIFEST

    told = args.config / VARIANT
    variant = str(json.loads(told.read_text())["variant"]) if told.is_file() else "plain"
    step = int(json.loads((args.checkpoint / MANIFEST).read_text())["step"])

    def written(facts: Mapping[int, dict[str, Any]]) -> Path:
        place = {"run": run.name, "step": step, "variant": variant, "batches_wanted": args.batches}
        new = {f"{run.name}, step {step:,}, layer {n}": place | one for n, one in facts.items()}
        return shared.add_runs("gradient_drift", args.section, new, args.out)

    with tempfile.TemporaryDirectory() as scratch:
        run = configuration(args, Path(scratch))
        runners(args.kinds, torch.device(run.training.device))  # refuses before anything is built
        if variant != "plain":
            sys.path.append(str(Path(__file__).resolve().parent.parent))
            import variants  # research/variants.py

            variants.install(variant, run)
        with opened(run) as (session, loaders):
            # Batches are counted from 0: the first is the one after that of the last step.
            found = measure(session, loaders, step, args, written)
    print(f"wrote {written(found)}")
    return 0


def main() -> int:
    parser = shared.arguments(__doc__)
    parser.add_argument("--config", type=Path, required=True, help="run directory, or its YAML")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of one step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="counted from 0")
    parser.add_argument("--batches", type=int, default=256, help="global batches")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), metavar="KIND")
    parser.add_argument("--section", default="failing", help="of gradient_drift.json")
    args = parser.parse_args()
    if args.batches < FEWEST:
        parser.error(f"--batches {args.batches}: at least {FEWEST}, for standard errors")
    args.layers, args.kinds = list(dict.fromkeys(args.layers)), list(dict.fromkeys(args.kinds))
    try:
        return run_it(args)
    except ValueError as error:  # what the product refuses is one, too
        print(f"drift.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
