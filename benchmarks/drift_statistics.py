"""Gradients of W_Q and W_K by head, the true ones in float64; and whether a series of errors of
them, one a batch, has a mean, or could be the steps of a random walk.

`Side` takes, batch by batch, the true gradient T_t of one projection and the errors E_t that
implementations make of it, and keeps sums; nothing that it keeps grows with the matrices times the
number of batches. What is made of them at the end is said in gradient_drift.py.

Shape legend: h heads; d head dim, c hidden size, one head's matrix is [d, c]; n batches; g groups
of batches (batch t is in group t mod `GROUPS`); k dims of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from drift_table import SIDES as SIDES

from megatron_patch.experiments import probing
from stable_attention import probes

if TYPE_CHECKING:
    from megatron_patch.stability.observe import Seen

GROUPS = 16
"""Groups of batches: left out in turn by the jackknife, and given random signs (2^15 ways)."""
SKETCH = 512
"""Dims that matrices are projected to, at random, to compare every batch with every other."""
SEED = 20251004
RANK_EVERY = 8
"""Singular values are looked at in every so many batches."""
TRUE = "true"
Pair = tuple[torch.Tensor, torch.Tensor]
"""Of dQ and of dK, or of W_Q and of W_K."""
BLOCK_BYTES: int | None = None
"""Float64 scores of one block of the truth; None: as `probes` has it."""
FEWEST = 4
"""Batches below which no standard error means anything."""


def true_gradients(x: probing.Tensors) -> Pair:
    """dQ and dK of ``x`` in float64, [b, h, s, d]."""
    given = {"causal": x.causal, "window": x.window, "scale": x.scale}
    return probes.true_gradients(x.q, x.k, x.v, x.dout, layout="bhsd", budget=BLOCK_BYTES, **given)


def by_head(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """gradient^T x over all tokens, [h, d, c], of gradient [b, h, s, d] and x [s, b, c].

    Float64, which TF32 leaves alone: a mean far below the scatter of single tokens is looked for,
    and float32 would round the sum of 65,536 of them.
    """
    b, h, s, d = gradient.shape
    rows = gradient.double().permute(1, 3, 2, 0).reshape(h * d, s * b)
    return (rows @ x.double().flatten(0, 1)).view(h, d, -1)


def tensors_of(seen: Seen, dout: torch.Tensor) -> probing.Tensors:
    """sbhd of a call -> bhsd."""
    q, k, v, do = (x.permute(1, 2, 0, 3).contiguous() for x in (seen.q, seen.k, seen.v, dout))
    geometry = seen.geometry
    return probing.Tensors(q, k, v, do, geometry.scale, geometry.causal, geometry.window)


def heads_of(fused: torch.Tensor, attention: Any) -> Pair:
    """(W_Q, W_K) [h, d, c] of core's fused QKV weight, or of its gradient; as many keys as queries.

    Core's rows: per head its query, its key, its value.
    """
    heads = attention.num_attention_heads_per_partition
    blocks = fused.detach().double().view(heads, 3, -1, fused.shape[1])
    return blocks[:, 0], blocks[:, 1]


def projection(size: int, device: torch.device) -> torch.Tensor:
    """Gaussian [size, k], the same every time: <x P, y P> is <x, y> on average."""
    gen = torch.Generator().manual_seed(SEED)
    drawn = torch.randn(size, SKETCH, generator=gen, dtype=torch.float32)
    return drawn.to(device).double() / math.sqrt(SKETCH)


class Series:
    """Running sums over matrices [h, d, c], float64, one a batch."""

    def __init__(self, weight: torch.Tensor, sketch: torch.Tensor) -> None:
        """``weight`` [h, d, c]: the heads' own weights; ``sketch`` from `projection`."""
        flat = weight.flatten(1)
        self._direction = flat / flat.norm(dim=1, keepdim=True)
        self._sketch = sketch
        self.sums = weight.new_zeros(GROUPS, *flat.shape)
        self.total = torch.zeros_like(flat)
        self.squares: list[torch.Tensor] = []
        self.sketches: list[torch.Tensor] = []
        self.growth: list[torch.Tensor] = []
        self.ahead: list[torch.Tensor] = []
        self.rank_one: list[torch.Tensor] = []

    def add(self, matrix: torch.Tensor) -> None:
        """The next batch's matrix [h, d, c]."""
        t, e = len(self.squares), matrix.flatten(1)
        size = e.norm(dim=1)
        self.squares.append(size.square())
        self.sketches.append(e @ self._sketch)
        self.growth.append(-(e * self._direction).sum(1) / size)
        if t:
            self.ahead.append((e * self.total).sum(1) / size / self.total.norm(dim=1))
        if t % RANK_EVERY == 0:
            self.rank_one.append(top_share(matrix))
        self.total += e
        self.sums[t % GROUPS] += e


class Side:
    """W_Q or W_K of one layer: the true gradients and the errors of every kind."""

    def __init__(self, weight: torch.Tensor, kinds: Sequence[str], sketch: torch.Tensor) -> None:
        """``weight`` [h, d, c] float64; ``kinds`` without `TRUE`."""
        self.shape = tuple(weight.shape)
        self.series = {kind: Series(weight, sketch) for kind in (TRUE, *kinds)}
        self.own: dict[str, list[torch.Tensor]] = {kind: [] for kind in kinds}

    def add(self, true: torch.Tensor, errors: Mapping[str, torch.Tensor]) -> None:
        """A batch's true gradient and its errors by kind, all [h, d, c] float64."""
        self.series[TRUE].add(true)
        for kind, error in errors.items():
            self.series[kind].add(error)
            self.own[kind].append((error * true).sum((1, 2)))

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """Figures by kind, a dict a head; None where there is none."""
        return {kind: _by_head(self._figures(kind)) for kind in self.series}

    def _figures(self, kind: str) -> dict[str, torch.Tensor]:
        one, true = self.series[kind], self.series[TRUE]
        squares, true_squares = (torch.stack(x.squares).cpu() for x in (one, true))
        gram = _gram(one.sums, one.sums)
        found = {
            "rms": squares.mean(0).sqrt(),
            "relative": (squares.sum(0) / true_squares.sum(0)).sqrt(),
        }
        estimate = jackknife(gram, squares, squares, squares)
        found |= dict(zip(("coherence", "coherence_se"), estimate, strict=True))
        names = ("walk_sd", "walk_z", "walk_p")
        found |= dict(zip(names, random_signs(gram, squares), strict=True))
        if kind != TRUE:
            own = torch.stack(self.own[kind]).cpu()
            estimate = jackknife(_gram(one.sums, true.sums), own, squares, true_squares)
            found |= dict(zip(("cross", "cross_se"), estimate, strict=True))
            found["cross_same"] = own.mean(0) / (squares.mean(0) * true_squares.mean(0)).sqrt()
        for name in ("ahead", "growth"):
            found |= mean_and_error(name, torch.stack(getattr(one, name)).cpu())
        found["line"] = line(torch.stack(one.sketches).cpu())
        found["rank_one"] = torch.stack(one.rank_one).cpu().mean(0)
        found["rank_one_of_mean"] = top_share(one.total.view(self.shape)).cpu()
        return found


def _gram(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Inner products [h, g, g] of group sums [g, h, x], on the CPU."""
    return torch.einsum("ahx,bhx->hab", a, b).cpu()


def groups_of(batches: int) -> torch.Tensor:
    """Batches in every group: [g]."""
    return torch.bincount(torch.arange(batches) % GROUPS, minlength=GROUPS).double()


def jackknife(
    gram: torch.Tensor, own: torch.Tensor, a_squares: torch.Tensor, b_squares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(estimate, standard error) [h] of mean_{s != t} <A_s, B_t> / (RMS |A| RMS |B|).

    Unbiased in the numerator (a U-statistic). The error is the jackknife's with one group left out
    at a time, for groups of unequal size (Busing, Meijer and van der Leeden 1999).

    Args:
        gram: inner products of the group sums, [h, g, g].
        own: <A_t, B_t>, [n, h].
        a_squares: |A_t|^2, [n, h].
        b_squares: |B_t|^2, [n, h].
    """
    n = len(own)
    sizes = groups_of(n)
    there = sizes > 0
    member = torch.nn.functional.one_hot(torch.arange(n) % GROUPS, GROUPS).double()
    by_group = [member.T @ x for x in (own, a_squares, b_squares)]  # [g, h]

    def estimate(cross: torch.Tensor, sums: list[torch.Tensor], count: Any) -> torch.Tensor:
        same, a2, b2 = sums
        return (cross - same) / (count - 1) / (a2 * b2).sqrt()

    whole = [x.sum(0) for x in by_group]
    cross = gram.sum((1, 2))
    all_of_them = estimate(cross, whole, n)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    left = (cross[:, None] - gram.sum(1) - gram.sum(2) + diagonal).T[there]  # [g, h]
    rest = [(w - x)[there] for w, x in zip(whole, by_group, strict=True)]
    without = estimate(left, rest, (n - sizes[there])[:, None])
    ratio = (n / sizes[there])[:, None]
    pseudo = ratio * all_of_them - (ratio - 1) * without
    centre = (pseudo / ratio).sum(0)
    variance = ((pseudo - centre).square() / (ratio - 1)).mean(0)
    return all_of_them, variance.sqrt()


def random_signs(
    gram: torch.Tensor, squares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coherence between groups against what random signs of the group sums make of it.

    A walk's steps may as well have had the other sign, whatever directions they share; so this is
    an exact test, where the jackknife's error is a rough one: of a U-statistic whose mean is zero
    it counts the variance twice on average, and it vanishes with the mean where all errors share
    a line.

    Returns:
        [h] each: scatter of the coherence under random signs; the coherence found over that; share
        of all sign patterns that reach it (none of 2^15 is below 1 / 2^15).
    """
    sizes = groups_of(len(squares))
    there = sizes > 0
    off = gram[:, there][:, :, there]
    off = off - torch.diag_embed(off.diagonal(dim1=1, dim2=2))
    pairs = float(sizes.sum() ** 2 - sizes.square().sum())
    found = off.sum((1, 2))
    scatter = (2 * off.square().sum((1, 2))).sqrt()
    unit = pairs * squares.mean(0)
    count = int(there.sum())
    bits = torch.arange(2 ** (count - 1))[:, None] >> torch.arange(count)
    signs = 1.0 - 2.0 * (bits & 1).double()  # the last one is always +
    reached = []
    for one, value, spread in zip(off, found, scatter, strict=True):
        values = ((signs @ one) * signs).sum(1)
        # The pattern of all + is this very sum in another order of addition.
        share = (values >= value - 1e-9 * spread).double().mean()
        reached.append(share if bool(value.isfinite()) else share * math.nan)
    return scatter / unit, found / scatter, torch.stack(reached)


def mean_and_error(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean of [n, h] over batches and its standard error."""
    return {name: values.mean(0), f"{name}_se": values.std(0) / math.sqrt(len(values))}


def line(sketches: torch.Tensor) -> torch.Tensor:
    """Mean cos^2 over pairs of batches, [h]; 1 over the number of dims that errors fill evenly.

    From Gaussian sketches [n, h, k], whose cos^2 is about cos^2 + (1 - cos^2)^2 / k: their floor
    1 / k is taken off, which is right for orthogonal errors and for errors on one line, and wrong
    by less than 1 / 4k between.
    """
    n, _, k = sketches.shape
    unit = sketches / sketches.norm(dim=2, keepdim=True)
    cosines = torch.einsum("thk,shk->hts", unit, unit).square()
    raw = (cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(1)) / (n * (n - 1))
    return (raw - 1 / k) / (1 - 1 / k)


def top_share(matrix: torch.Tensor) -> torch.Tensor:
    """Largest squared singular value over the sum of them, of [h, d, c]: 1 for rank one; [h].

    From the Gram matrices [d, d]: in float64 the largest eigenvalue loses nothing by that.
    """
    gram = matrix @ matrix.mT
    trace = gram.diagonal(dim1=1, dim2=2).sum(1)
    # An eigenvalue solver raises on what is not finite.
    good = trace.isfinite() & (trace > 0)
    safe = torch.where(good[:, None, None], gram, torch.zeros_like(gram))
    share = torch.linalg.eigvalsh(safe)[:, -1] / trace
    return torch.where(good, share, torch.full_like(share, math.nan))


def _by_head(figures: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """{name: [h]} as one dict a head: six digits, None for what JSON cannot say."""
    heads = len(next(iter(figures.values())))
    rows = []
    for head in range(heads):
        values = {name: float(x[head]) for name, x in figures.items()}
        known = {n: float(f"{v:.6g}") if math.isfinite(v) else None for n, v in values.items()}
        rows.append({"head": head} | known)
    return rows
