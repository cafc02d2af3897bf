"""Captures: q, k, v, O and dO of named layers at named steps, for `megatron-patch probe` and tests.

One file per step, layer and tensor-parallel rank, written by the first data-parallel rank:
``<run_dir>/captures/step_00001234.layer_005.tp_0.pt`` (``.danger.pt`` where the verdict asked for
it), readable with torch.load(weights_only=True). Under context parallelism the sequence is put
together first. Saving waits for the device; it happens at the steps that were asked for, and once
each at the first signs that ``capture_at`` names. A file that cannot be
written is logged and left out: its sign starts a capture again after a resume, and none before.

Shape legend: s tokens of the whole sequence, b sequences, h query heads, kv key/value heads saved
here, d, dv head dims.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_patch.context_parallel import layout
from megatron_patch.runtime.files import replacing
from megatron_patch.runtime.records import BestEffort
from megatron_patch.schema.stability import StabilityConfig
from megatron_patch.stability.groups import Groups
from megatron_patch.stability.names import LEVELS, error_to_signal
from megatron_patch.stability.observe import ObservationRequest, Seen
from megatron_patch.stability.sampling import gather
from megatron_patch.stability.warning import Verdict
from megatron_patch.stability.weights import exact_norms

log = logging.getLogger(__name__)

FORMAT = 4
BEFORE: dict[int, dict[str, Any]]
BEFORE = {2: {"norms_exact": False, "variant": None}, 3: {"variant": None}}
"""Read too: what such a file does not hold. The spectral norms of format 2 are lower bounds;
neither names variants."""
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WORST_LAYERS, WORST_HEADS = 2, 4
"""Saved at a sign: the layers, and of each the heads, with the largest error of delta over its
signal."""
SEQUENCES = 1
"""Of the first micro-batch that are saved."""
ZIP = b"PK\x03\x04"
"""What a file that torch saved begins with."""


class CaptureError(ValueError):
    """A file that is no capture, or one that contradicts itself; the text names it."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureFile:
    """One captured attention call, and its file."""

    step: int
    layer: int
    """0-based."""
    layer_name: str
    micro_batch: int
    dp_rank: int
    heads: list[int]
    """Numbers of the query heads over the whole layer."""
    kv_heads: list[int]
    head_to_kv: list[int]
    """For each query head its position in k and v."""
    q: torch.Tensor  # [s, b, h, d]
    k: torch.Tensor  # [s, b, kv, d]
    v: torch.Tensor  # [s, b, kv, dv]
    out: torch.Tensor  # [s, b, h, dv]
    dout: torch.Tensor  # [s, b, h, dv]
    sinks: torch.Tensor | None  # [h]
    wq_norm: torch.Tensor | None  # float32 [h]
    wk_norm: torch.Tensor | None  # float32 [h]
    norms_exact: bool
    """Whether the norms are the largest singular values, or only lower bounds of them."""
    scale: float
    causal: bool
    window: list[int] | None
    dropout_p: float
    layout: str = "sbhd"
    backend: str
    stabilizer: str
    variant: str | None = ""
    """What an experiment had changed of the backend, by name; empty: nothing. None: the file is of
    a format that does not tell."""
    precision: str
    run_name: str
    trigger: str
    """What started it: ``step`` (a step named beforehand), or the first signs seen in its record,
    of ``watch``, ``danger``, ``grad_norm``, joined by ``-``."""

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises OSError: it could not be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        names = (f.name for f in fields(self))
        try:
            with replacing(path, "wb") as out:
                torch.save({"format": FORMAT} | {n: getattr(self, n) for n in names}, out)
        except RuntimeError as error:
            # torch's own, of an archive that does not add up, over that of the write that failed.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    @classmethod
    def load(cls, path: Path | str) -> CaptureFile:
        """Read a file that anybody may have written: nothing of it is used before it is checked.

        Raises:
            CaptureError: not a capture, or fields of other types, or shapes that do not fit.
            OSError: the file cannot be read.
        """
        with Path(path).open("rb") as file:
            begins = file.read(len(ZIP))
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for what is not its own or was cut off
            why = f"is damaged or cut off ({type(error).__name__})"
            if begins != ZIP:
                why = "begins as none does" if begins else "is empty"
            raise CaptureError(f"{path} is not a capture: the file {why}") from None
        found = content.pop("format", None) if isinstance(content, dict) else None
        if type(found) is not int or found not in (*BEFORE, FORMAT):
            read = " or ".join(map(str, (FORMAT, *reversed(BEFORE))))
            raise CaptureError(f"{path} is not a capture of format {read}")
        content = BEFORE.get(found, {}) | content
        names = {f.name for f in fields(cls)}
        differs = (("lacks", names - set(content)), ("has", set(content) - names))
        odd = [f"{what} {', '.join(sorted(map(str, keys)))}" for what, keys in differs if keys]
        if odd:
            text = f"{path} is not a capture of format {found}: it {' and '.join(odd)}"
            raise CaptureError(text)
        for wrong in chain(_wrong_types(content), _wrong_shapes(content)):
            raise CaptureError(f"{path}: {wrong}; the file was changed or damaged: capture again")
        return cls(**content)


def _wrong_types(content: Mapping[str, Any]) -> Iterator[str]:
    for names, fits, expected in RULES:
        for name in names.split():
            found = content[name]
            if not fits(found):
                shown = repr(found) if len(repr(found)) <= 60 else f"{found!r:.60}..."
                if isinstance(found, torch.Tensor):
                    shown = f"a tensor {list(found.shape)} of {found.dtype}"
                yield f"{name} is {shown}, expected {expected}"


def _wrong_shapes(content: Mapping[str, Any]) -> Iterator[str]:
    """Of fields of the right types."""
    s, b, h, d = content["q"].shape
    kv, dv = content["k"].shape[2], content["v"].shape[3]
    shapes: dict[str, tuple[int, ...]]
    shapes = {"k": (s, b, kv, d), "v": (s, b, kv, dv), "out": (s, b, h, dv), "dout": (s, b, h, dv)}
    shapes |= {n: (h,) for n in ("sinks", "wq_norm", "wk_norm") if content[n] is not None}
    start = "tensors and head lists of the capture do not fit together: "
    for name, expected in shapes.items():
        found = tuple(content[name].shape)
        if found != expected:
            yield f"{start}{name} has shape {list(found)}, expected {list(expected)} beside q and v"
    for name, count in (("heads", h), ("kv_heads", kv), ("head_to_kv", h)):
        if len(content[name]) != count:
            yield f"{start}{name} has {len(content[name])} entries for {count} heads"
    if beyond := [i for i in content["head_to_kv"] if i >= kv]:
        yield f"{start}head_to_kv names head {beyond[0]} of k and v, which have {kv}"


def _is_count(x: Any) -> bool:
    return type(x) is int and x >= 0


def _is_tensor(x: Any, dims: int) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.layout == torch.strided
        and x.device.type == "cpu"  # a meta tensor has a shape and nothing in it
        and x.dim() == dims
        and x.is_floating_point()
        and x.element_size() > 1  # 8 bits have no arithmetic
        and x.numel() > 0
    )


# type(), not isinstance(): True is no number.
RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("step layer micro_batch dp_rank", _is_count, "a whole number from 0"),
    ("layer_name backend stabilizer precision run_name trigger",
     lambda x: isinstance(x, str), "text"),
    ("variant", lambda x: x is None or isinstance(x, str), "text or None"),
    ("heads kv_heads head_to_kv", lambda x: isinstance(x, list) and all(map(_is_count, x)),
     "a list of whole numbers from 0"),
    ("q k v out dout", lambda x: _is_tensor(x, 4),
     "a tensor of 4 dimensions, floating, of 16 bits or more, not empty"),
    ("sinks wq_norm wk_norm", lambda x: x is None or _is_tensor(x, 1),
     "a floating tensor [heads] or None"),
    ("causal norms_exact", lambda x: isinstance(x, bool), "True or False"),
    ("scale", lambda x: type(x) in (int, float) and 0 < x <= sys.float_info.max,
     "a finite number above 0"),
    ("dropout_p", lambda x: type(x) in (int, float) and 0 <= x <= 1, "a number from 0 to 1"),
    ("window", lambda x: x is None or (isinstance(x, list) and [type(i) for i in x] == [int, int]
                                       and all(abs(i) < 2**31 for i in x)),
     "None or two whole numbers [left, right] of 32 bits, -1 for no limit"),
    ("layout", lambda x: isinstance(x, str) and x == "sbhd", "'sbhd'"),
)  # fmt: skip
"""Fields, what each must be, and the same in words."""


def file_name(step: int, layer: int, tp_rank: int, trigger: str = "step") -> str:
    """Of one capture; what started it is in the name unless it was the step itself."""
    suffix = "" if trigger == "step" else f".{trigger}"
    return f"step_{step:08d}.layer_{layer:03d}.tp_{tp_rank}{suffix}.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to save of one step: query heads by layer, both counted over the whole model."""

    trigger: str
    heads: dict[int, tuple[int, ...]]
    """Empty heads of a layer: all."""


def worst(signal: np.ndarray, *, layers: int, heads: int) -> dict[int, tuple[int, ...]]:
    """Layers and their heads with the largest ``signal`` [L, H]; {} where nothing is finite.

    ``heads`` 0 asks for all (an empty tuple). Ties go to the lower number: all ranks find the same.
    """
    known = np.where(np.isfinite(signal), signal, -np.inf)
    best = known.max(1)
    order = [int(i) for i in np.argsort(-best, kind="stable") if np.isfinite(best[i])]
    found = {}
    for layer in order[:layers]:
        ranked = np.argsort(-known[layer], kind="stable")[: heads or None]
        found[layer] = tuple(sorted(int(i) for i in ranked)) if heads else ()
    return found


class Capturer:
    """Saves what ``stability.capture_*`` names.

    Args:
        options: of the monitor.
        groups: coordinates of this rank.
        folder: ``<run_dir>/captures``.
        name: of the run.
        per_kv_head: query heads to a key/value head. Ranks of a tensor-parallel group larger than
            the number of key/value heads hold copies of them, so their numbers follow from the
            query heads'.
    """

    def __init__(
        self, options: StabilityConfig, groups: Groups, folder: Path, *, name: str, per_kv_head: int
    ) -> None:
        self._options, self._groups, self._folder = options, groups, folder
        self._name, self._per_kv_head = name, per_kv_head
        self.saved: list[Path] = []
        self.triggered: set[str] = set()
        """Signs that have started a capture: a resumed run does not take them again."""
        # Logged by this rank itself: of other ranks than the first only errors are shown.
        self._best_effort = BestEffort(folder.name, report=log.error)
        self._next: Wanted | None = None

    def close(self) -> None:
        """No capture follows: log how many are missing."""
        self._best_effort.close()

    def see(self, verdict: Verdict, by_head: Mapping[str, np.ndarray]) -> str | None:
        """Capture the next step at the first sign of each kind; the same call on all ranks.

        Returns a line for people, where there is nothing to capture.
        """
        # Danger without a watch before it is the first sign of both.
        signs = [sign for sign in LEVELS[1 : verdict.code + 1] if sign in self._options.capture_at]
        new = [sign for sign in signs if sign not in self.triggered]
        if not new:
            return None
        self.triggered |= set(new)
        kinds = ("used_error_rms", "delta_error_rms")
        signals = [error_to_signal(by_head[name], by_head["kappa"]) for name in kinds]
        signal = next((x for x in signals if np.isfinite(x).any()), signals[0])
        heads = worst(signal, layers=WORST_LAYERS, heads=WORST_HEADS)
        if not heads:
            return f"no capture at {'-'.join(new)}: no head of the model was measured"
        self._next = Wanted(trigger="-".join(new), heads=heads)
        return None

    def request(self, step: int) -> ObservationRequest | None:
        """What to look at in ``step``; None if nothing is captured there by this rank."""
        options = self._options
        wanted, self._next = self._next, None
        if step in options.capture_steps:
            named = dict.fromkeys(options.capture_layers, tuple(options.capture_heads))
            # A layer that both ask for is saved as named beforehand.
            wanted = Wanted(
                trigger="step" if wanted is None else wanted.trigger,
                heads=(wanted.heads if wanted is not None else {}) | named,
            )
        if wanted is None or not wanted.heads or self._groups.dp_rank != 0:
            return None
        return ObservationRequest(
            micro_batch=0,
            layers=frozenset(wanted.heads),
            callback=lambda seen, dout: self._take(step, wanted, seen, dout),
        )

    def _take(self, step: int, wanted: Wanted, seen: Seen, dout: torch.Tensor) -> None:
        """Collective over the context-parallel group, whose first rank writes, and of those first
        ranks over the tensor-parallel group."""
        if not _fits_a_file(seen, step):
            return
        b = min(SEQUENCES, seen.q.shape[1])
        h, kv = seen.q.shape[2], seen.k.shape[2]
        first = self._groups.tp_rank * h
        # Before anybody leaves: ranks that save nothing may hold rows of another rank's heads.
        norms = exact_norms(seen.site) if seen.geometry.rank == 0 else None
        asked = wanted.heads[seen.site.layer]
        heads = [i for i in range(h) if not asked or first + i in asked]
        if not heads:
            return  # on other tensor-parallel ranks; the same on all ranks of this group
        kept = sorted({i // (h // kv) for i in heads})
        group = seen.geometry.group

        def whole(x: torch.Tensor, which: list[int]) -> torch.Tensor:
            part = x[:, :b, torch.tensor(which, device=x.device)]
            return layout.unshard(gather(part, group), dim=0).contiguous().cpu()

        tensors: dict[str, Any] = {"q": whole(seen.q, heads), "out": whole(seen.out, heads)}
        tensors |= {"dout": whole(dout, heads), "k": whole(seen.k, kept), "v": whole(seen.v, kept)}
        if seen.geometry.rank != 0:
            return

        def of_heads(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.detach().float().cpu()[heads].clone()

        window = seen.geometry.window
        path = self._folder / file_name(step, seen.site.layer, self._groups.tp_rank, wanted.trigger)
        found = CaptureFile(
            step=step,
            layer=seen.site.layer,
            layer_name=seen.site.name,
            micro_batch=0,
            dp_rank=self._groups.dp_rank,
            heads=[first + i for i in heads],
            kv_heads=[(first + i * (h // kv)) // self._per_kv_head for i in kept],
            head_to_kv=[kept.index(i // (h // kv)) for i in heads],
            sinks=of_heads(seen.sinks),
            wq_norm=of_heads(None if norms is None else norms[0]),
            wk_norm=of_heads(None if norms is None else norms[1]),
            norms_exact=True,
            scale=seen.geometry.scale,
            causal=seen.geometry.causal,
            window=None if window is None else list(window),
            dropout_p=seen.dropout_p,
            backend=seen.site.backend,
            stabilizer=seen.site.stabilizer,
            variant=seen.site.variant,
            precision=PRECISIONS.get(seen.q.dtype, str(seen.q.dtype)),
            run_name=self._name,
            trigger=wanted.trigger,
            **tensors,
        )
        # Inside the backward pass of one rank: the others would wait for it for ever.
        if self._best_effort.attempt(lambda: found.save(path)):
            self.saved.append(path)


def _fits_a_file(seen: Seen, step: int) -> bool:
    """Whether `probe` can judge what a file holds of a call; logs why not."""
    why = ""
    if seen.softcap:
        why = "its logits go through a softcap, of which a capture does not tell"
    elif seen.changed:
        why = "what it returned was changed in place"
    elif (queries := seen.q.shape[0]) != (keys := seen.k.shape[0]):
        why = f"it has {queries} queries and {keys} keys, a capture as many of both"
    if why:
        log.warning("layer %d is not captured at step %d: %s", seen.site.layer, step, why)
    return not why


def triggers_in(folder: Path) -> set[str]:
    """What started the captures that are there: a resumed run does not take them again."""
    names = (path.name.split(".") for path in folder.glob("step_*.pt"))
    return {name for parts in names if len(parts) == 5 for name in parts[3].split("-")}
