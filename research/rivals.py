"""Two published monitors of training, computed live beside ours in a run of an experiment.

`Entropy`, arXiv 2606.28116: the spectral entropy of the first-order change of a head's QK product,

    Delta2 = dW_Q W_K^T + W_Q dW_K^T = [dW_Q, W_Q] [W_K, dW_K]^T,

dW from one observation to the next, p_i = sigma_i^2 / sum sigma^2. The squares of its singular
values are the eigenvalues of the product of two Gram matrices [2d, 2d]; no [c, c] matrix is formed.

`Alignment`, arXiv 2510.04202: the cosine of a layer's inputs with the principal singular vector,
on the input's side, of the weight they meet. It warns where the signs of these cosines, which a
healthy layer has in equal numbers, come to be all the same.

Neither paper gives a threshold; research/analysis/rivals.py chooses them. The first process of a
run measures the model it holds; both need whole weights (no tensor or pipeline parallelism). They
observe between the steps of the telemetry, each at its own: step_seconds of metrics.csv then has
the cost of each. An error ends its monitor, never the run.

``<run_dir>/rivals/``: entropy.csv, alignment.csv; head -1 is a whole matrix.

Shape legend: h heads, d head dim, c hidden size, n matrices, t sampled tokens.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_patch.runtime.files import write_whole
from megatron_patch.runtime.watcher import Action, ResumePoint, StepResult, Watcher
from megatron_patch.stability.observe import Site
from megatron_patch.stability.weights import split_qkv

TOKENS = 4096  # of the first micro-batch
FIRST, LATER = 64, 4  # power iterations of the first observation and of later ones
MATRICES = ("q", "k", "v", "proj", "fc1", "fc2")
SIGNS = tuple(f"{name}_{what}" for name in MATRICES for what in ("positive", "cosine"))
Rows = list[tuple[int, int, list[float]]]
"""(layer, head, values)."""


class Rival(Watcher):
    """One monitor: when it looks, its file, and that it never ends a run.

    `look` measures on the device and never waits for it; what it leaves in `found` is copied to the
    host, where `rows` makes lines of it in a thread.

    Args:
        layers: transformer layers, by their core attention.
        interval: steps between observations.
        phase: of them: steps with this remainder.
        folder: ``<run_dir>/rivals``.
        say: takes a line for people.
    """

    name: str
    columns: tuple[str, ...]
    inputs: tuple[str, ...]
    """Matrices with whose inputs `look` is called."""

    def __init__(
        self,
        layers: dict[Site, Any],
        *,
        interval: int,
        phase: int,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._interval, self._phase, self._say = interval, phase, say
        self.file = folder / f"{self.name}.csv"
        self.found: dict[int, torch.Tensor] = {}
        """Of the step, by layer."""
        self._off, self._handles, self._seen = False, [], set()  # type: ignore[var-annotated]
        self._pool, self._writing = ThreadPoolExecutor(1), None  # type: ignore[var-annotated]
        self._modules = [
            (site, name, module)
            for site, layer in layers.items()
            for name in self.inputs
            if (module := _linear(layer, name)) is not None
        ]

    def look(self, site: Site, name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
        """Take in that ``weight`` [rows, c] of the matrix ``name`` is about to meet x [..., c]."""
        raise NotImplementedError

    def rows(self, found: dict[int, np.ndarray]) -> Rows:
        """Lines of the file, from `found`."""
        raise NotImplementedError

    def forget(self) -> None:
        """The run goes on from elsewhere: what was kept of the last observation is void."""
        raise NotImplementedError

    # Hooks of the trainer. Weights are read where they are used, in the forward pass: there they
    # are whole, whenever the optimizer gathers them.

    def load_state(self, at: ResumePoint) -> None:
        """Lines of steps that will be repeated are taken out."""
        with self._careful():
            self._finish()
            self._unhook()
            self.forget()
            self.file.parent.mkdir(exist_ok=True)
            head = ",".join(("step", "layer", "head", *self.columns))
            lines = self.file.read_text().splitlines()[1:] if self.file.exists() else []
            kept = [line for line in lines if int(line.partition(",")[0]) <= at.step]
            write_whole(self.file, "\n".join([head, *kept, ""]))

    def before_step(self, step: int) -> None:
        """Put hooks on the layers in observed steps."""
        if self._off or step % self._interval != self._phase:
            return
        with self._careful():
            self._finish()
            self.found, self._seen = {}, set()
            for site, name, module in self._modules:
                hook = functools.partial(self._called, site, name)
                self._handles.append(module.register_forward_pre_hook(hook))

    def _called(self, site: Site, name: str, module: Any, args: Any) -> None:
        key = site.layer, name
        if self._off or key in self._seen or not torch.is_grad_enabled():
            return  # later micro-batches; recompute of activations
        with self._careful(), torch.no_grad():
            self._seen.add(key)
            self.look(site, name, module.weight.detach(), args[0].detach())

    def after_step(self, step: int, result: StepResult) -> list[Action]:
        """Take the hooks off; a thread waits for the copies and writes."""
        if self._handles and not self._off:
            self._unhook()
            with self._careful():
                copies = {n: x.to("cpu", non_blocking=True) for n, x in self.found.items()}
                event = torch.cuda.Event() if torch.cuda.is_initialized() else None
                if event is not None:
                    event.record()
                self._writing = self._pool.submit(self._write, step, copies, event)
        return []

    def before_save(self) -> None:
        """Lines of the steps before a checkpoint are in the file."""
        with self._careful():
            self._finish()

    def close(self) -> None:
        """Write what is under way."""
        self._unhook()
        self.before_save()
        self._pool.shutdown()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _write(self, step: int, copies: dict[int, torch.Tensor], event: Any) -> None:
        if event is not None:
            event.synchronize()
        rows = self.rows({layer: x.numpy() for layer, x in copies.items()})
        with self.file.open("a") as file:
            for layer, head, values in rows:
                cells = ("" if np.isnan(v) else f"{v:.6g}" for v in values)
                file.write(",".join([f"{step},{layer},{head}", *cells]) + "\n")

    def _finish(self) -> None:
        """Wait for the thread; raises what it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @contextlib.contextmanager
    def _careful(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._off, self.found = True, {}
            text = "".join(traceback.format_exception(error))
            self._say(f"rival {self.name} has failed and is off; the run goes on\n{text}")


def _linear(layer: Any, name: str) -> Any:
    """The module of a layer that holds a matrix; None where there is none (experts)."""
    inside = layer.mlp if name.startswith("fc") else layer.self_attention
    return getattr(inside, f"linear_{name}", None)


class Entropy(Rival):
    """Spectral entropy of Delta2 by head: nats, and the norm of Delta2 over that of W_Q W_K^T."""

    name, columns, inputs = "entropy", ("entropy", "change"), ("qkv",)

    def forget(self) -> None:
        """The first observation after a resume has no change to show."""
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def look(self, site: Site, name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
        """Float64 [2, h, 2d, 2d]: Gram matrices of both factors."""
        now = tuple(w.double() for w in _qk(site))
        before = self._before.get(site.layer)
        self._before[site.layer] = now[0].float(), now[1].float()
        if before is not None:
            q, k = (w.double() for w in before)
            self.found[site.layer] = torch.stack([_gram(now[0] - q, q), _gram(k, now[1] - k)])

    def rows(self, found: dict[int, np.ndarray]) -> Rows:
        """Of every head."""
        lines: Rows = []
        for layer, (first, second) in found.items():
            figures = zip(*(x.tolist() for x in delta2(first, second)), strict=True)
            lines += [(layer, head, list(both)) for head, both in enumerate(figures)]
        return lines


def _qk(site: Site) -> tuple[torch.Tensor, torch.Tensor]:
    """(W_Q, W_K), both [h, d, c]."""
    found = split_qkv(site.attention)
    if found is None:
        raise ValueError(f"{site.name}: no fused QKV projection that can be read")
    w_q, w_k = found
    return w_q, w_k.repeat_interleave(w_q.shape[0] // w_k.shape[0], 0)


def _gram(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of the rows of both [h, d, c]: [h, 2d, 2d]."""
    both = torch.cat([a, b], 1)
    return both @ both.mT


def delta2(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(entropy [h] in nats, norm of Delta2 over that of W_Q W_K^T [h]).

    Args:
        first: Gram matrices [h, 2d, 2d] of [dW_Q, W_Q].
        second: the same of [W_K, dW_K].
    """
    d = first.shape[-1] // 2
    squares = _squares(first, second)
    total = squares.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = squares / total
        entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1)
        entropy[total[:, 0] == 0] = np.nan
        # |W_Q W_K^T|^2 is the trace of the product of their Gram matrices.
        product = np.einsum("hij,hji->h", first[:, d:, d:], second[:, :d, :d])
        return entropy, np.sqrt(total[:, 0] / product)


def _squares(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Squared singular values of A^T B from the Gram matrices of A and B: the eigenvalues of their
    product, as those of R^T G_B R with R R^T = G_A."""
    values, vectors = np.linalg.eigh(first)
    root = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]
    return np.maximum(np.linalg.eigvalsh(root.transpose(0, 2, 1) @ second @ root), 0)


class Alignment(Rival):
    """Share of positive cosines of inputs and principal singular vectors, and the mean cosine.

    Of W_Q and W_K by head, and of the layer's whole matrices. Inputs are a sample of `TOKENS`.
    """

    name, columns, inputs = "alignment", SIGNS, ("qkv", "proj", "fc1", "fc2")

    def forget(self) -> None:
        """Vectors begin anew: positive and negative may change places."""
        self._vectors: dict[tuple[int, str], torch.Tensor] = {}

    def look(self, site: Site, name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
        """Float32 [h + 1, 12]: `SIGNS` by head, those of whole matrices last."""
        if name != "qkv":
            self._measure(site, name, slice(-1, None), weight[None], x)
            return
        w_q, w_k = _qk(site)
        heads, d, c = w_q.shape
        groups = site.attention.num_query_groups_per_partition
        w_v = weight.view(groups, heads // groups + 2, d, c)[:, -1]
        size = heads + 1, len(SIGNS)
        self.found[site.layer] = torch.full(size, torch.nan, device=x.device)
        for name, w in (("q", w_q), ("k", w_k)):
            self._measure(site, name, slice(0, heads), w, x)
        for name, w in (("q", w_q), ("k", w_k), ("v", w_v)):
            self._measure(site, name, slice(-1, None), w.reshape(1, -1, c), x)

    def _measure(
        self, site: Site, name: str, lines: slice, w: torch.Tensor, x: torch.Tensor
    ) -> None:
        """Fill two columns of some lines, a line a matrix of w [n, rows, c]."""
        key = site.layer, f"{name} {len(w)}"
        vector = self._vectors[key] = principal(w.float(), self._vectors.get(key))
        tokens = x.reshape(-1, x.shape[-1])
        tokens = tokens[:: max(1, tokens.shape[0] // TOKENS)].float()
        cosines = tokens @ vector.T / tokens.norm(dim=1, keepdim=True)  # [t, n]
        place = SIGNS.index(f"{name}_positive")
        self.found[site.layer][lines, place] = (cosines > 0).float().mean(0)
        self.found[site.layer][lines, place + 1] = cosines.mean(0)

    def rows(self, found: dict[int, np.ndarray]) -> Rows:
        """Of every head, and of the layer."""
        return [
            (layer, head if head < len(table) - 1 else -1, line.tolist())
            for layer, table in found.items()
            for head, line in enumerate(table)
        ]


def principal(w: torch.Tensor, vector: torch.Tensor | None) -> torch.Tensor:
    """Principal right singular vectors [n, c] of w [n, rows, c], from those of the last call."""
    steps = FIRST if vector is None else LATER
    if vector is None:
        places = torch.arange(w.shape[2], dtype=torch.float32, device=w.device)
        vector = torch.cos(places * 1.7 + 0.3).expand(w.shape[0], -1)
    x = vector[..., None]
    for _ in range(steps):
        x = w.mT @ (w @ x)
        x = x / x.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return x[..., 0]


def install(interval: int) -> None:
    """Let both watch every run that this process trains, each ``interval`` steps.

    Raises:
        ValueError: an interval that leaves no steps between those of the telemetry.
    """
    if interval < 4:
        raise ValueError(f"rivals: {interval}: must be at least 4 steps, or 0 for none")
    from megatron_patch.training.trainer import Trainer

    original = Trainer._watch

    def watch(self: Trainer) -> None:
        original(self)
        try:
            self.session.watchers += _both(self, interval)
        except Exception as error:
            self.monitor.say(f"rivals cannot watch this model; the run goes on: {error}")

    Trainer._watch = watch  # type: ignore[method-assign]


def _both(trainer: Any, interval: int) -> list[Rival]:
    """Both, in the first process of a run whose layers are whole."""
    layout = trainer.layout
    if layout.tp_size > 1 or layout.pp_size > 1:
        raise ValueError("its layers are split over GPUs")
    if not layout.print_rank:
        return []
    watched = trainer.stability.attention.watched
    layers = {
        site: watched.roots[0].get_submodule(site.name.rsplit(".", 2)[0]) for site in watched.sites
    }
    common = {"interval": interval, "folder": trainer.run_dir / "rivals"}
    common |= {"say": trainer.monitor.say}
    return [
        Entropy(layers, phase=interval // 2, **common),
        Alignment(layers, phase=3 * interval // 4, **common),
    ]
