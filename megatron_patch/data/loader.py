"""Batches for training and evaluation, in an order that is a function of seed and step alone.

Sample ``step * global_batch_size + j`` is sequence j of the global batch of ``step`` (under
``training.batch_size_rampup``: `BatchSizes.first_sample` + j), whatever the data-parallel size:
micro-batch m of rank r takes the ``micro_batch_size`` samples from
``j = (m * dp_size + r) * micro_batch_size``. Every rank that needs tokens reads its own; there is
no sampler state, no index cache and no communication.

Legend: b micro-batch size, s tokens of a sequence, t tokens of packed documents on this rank.
"""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_patch.context_parallel.layout import shard
from megatron_patch.context_parallel.packed import packed_index, padded_cu_seqlens
from megatron_patch.data.errors import DataError
from megatron_patch.data.indexed import TokenFile
from megatron_patch.data.order import Ring, derive
from megatron_patch.data.position import Order, Position, Source
from megatron_patch.data.progress import human
from megatron_patch.data.reader import Batch, Reader
from megatron_patch.parallel.setup import Layout
from megatron_patch.schema.data import DatasetConfig
from megatron_patch.schema.effective import data_seed, masks_ends
from megatron_patch.schema.run import RunConfig

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
_EVALUATION_SEED = 0


def needs_data(pp_rank: int, pp_size: int, *, documents: bool = False) -> bool:
    """Whether a pipeline stage reads batches: the first embeds tokens, the last compares labels,
    and under ``documents`` (``data.document_attention``) every stage has to know where they end."""
    return documents or pp_rank in (0, pp_size - 1)


@dataclass(frozen=True, slots=True)
class _Part:
    """One dataset's share of one split."""

    file: TokenFile
    source: Source
    ring: Ring

    @classmethod
    def of(cls, file: TokenFile, source: Source) -> _Part:
        return cls(file, source, Ring(source.tokens, source.length, source.key))

    def read(self, index: int, out: torch.Tensor) -> None:
        """Sample ``index`` and the token after it into ``out`` [s + 1], int64."""
        start, wanted = self.ring.start(index), len(out)
        head = min(wanted, self.ring.tokens - start)
        first = self.source.first
        out[:head] = torch.from_numpy(self.file.read(first + start, head))
        if head < wanted:
            out[head:] = torch.from_numpy(self.file.read(first, wanted - head))


@dataclass(frozen=True, slots=True)
class _Mixture:
    """One split: the order of its samples and its parts."""

    order: Order
    parts: list[_Part]

    def read(self, k: int, out: torch.Tensor) -> None:
        dataset, index = self.order.locate(k)
        self.parts[dataset].read(index, out)


class Loaders:
    """The data of a run, as one rank sees it; made by ``build_loaders``."""

    def __init__(
        self,
        run: RunConfig,
        layout: Layout,
        *,
        mixtures: dict[Split, _Mixture],
        absent: dict[Split, str],
    ) -> None:
        training, dp_size = run.training, layout.dp_size
        per_pass = training.micro_batch_size * dp_size
        if training.global_batch_size % per_pass:
            raise DataError(
                f"training.global_batch_size {training.global_batch_size} is not a multiple of "
                f"micro_batch_size {training.micro_batch_size} x data-parallel size {dp_size}"
            )
        self.micro_batches = training.global_batch_size // per_pass
        """Micro-batches of a full global batch on this rank."""
        self._per_pass, self._sizes = per_pass, training.batch_sizes
        self._run, self._layout = run, layout
        self._mixtures, self._absent = mixtures, absent
        self._plain = mixtures["train"].order  # of a run that begins with these datasets

    def has(self, split: Split) -> bool:
        """Whether the configuration gives this split any data."""
        return split in self._mixtures

    def micro_batches_of(self, batch: int) -> int:
        """Micro-batches on this rank of a global batch of training."""
        return self._sizes.size(batch) // self._per_pass

    def iterate(
        self,
        split: Split,
        *,
        start_step: int = 0,
        batch_of: Callable[[int], int] = lambda step: step - 1,
    ) -> Reader:
        """This rank's micro-batches from step ``start_step`` on, step after step, endless.

        Each is a dict of CPU tensors (pinned when training on CUDA): ``tokens``, ``labels``,
        ``position_ids`` int64 [b, s / cp], ``loss_mask`` float32 [b, s / cp]; of packed documents
        see `pack`. Evaluation passes
        start at step 0 and therefore see the same sequences every time. ``batch_of`` gives the
        global batch of a step counted from 1, for runs that leave batches out. Close the iterator
        (or drop it) to end its reader threads.

        Raises DataError: the split has no data, or a token file changed while it was used.
        """
        if split not in self._mixtures:
            raise DataError(
                f"there is no {split} data ({self._absent[split]}): give it a share in data.split "
                f"or datasets in data.{split}; available: {', '.join(self._mixtures)}"
            )
        ends, growing = [0], threading.Lock()  # micro-batches before step start_step + index

        def read(at: int) -> Batch:
            if split != "train" or len(self._sizes.levels) == 1:
                steps, micro = divmod(at, self.micro_batches)
            else:
                with growing:
                    while ends[-1] <= at:
                        batch = batch_of(start_step + len(ends))
                        ends.append(ends[-1] + self.micro_batches_of(batch))
                    steps = bisect_right(ends, at) - 1
                    micro = at - ends[steps]
            return self.batch(split, batch_of(start_step + steps + 1), micro)

        cuda = self._run.training.device == "cuda" and torch.cuda.is_available()
        return Reader(
            read,
            workers=self._run.data.num_workers,
            name=f"data-{split}",
            device=torch.cuda.current_device() if cuda else None,
        )

    def samples(self, split: Split, batch: int) -> list[dict[str, int | str]]:
        """What a global batch consists of: position in the order, file, window, first token."""
        mixture, bound = self._mixtures[split], self._first_sample
        found: list[dict[str, int | str]] = []
        for k in range(bound(split, batch), bound(split, batch + 1)):
            dataset, index = mixture.order.locate(k)
            part = mixture.parts[dataset]
            first = part.source.first + part.ring.start(index)
            file = part.file.path.name
            found.append({"sample": k, "file": file, "window": index, "first_token": first})
        return found

    def _first_sample(self, split: Split, batch: int) -> int:
        if split == "train":
            return self._sizes.first_sample(batch)
        return batch * self._run.training.global_batch_size

    def batch(self, split: Split, step: int, micro: int) -> Batch:
        """Micro-batch ``micro`` of global batch ``step`` on this rank; see ``iterate``."""
        training = self._run.training
        b, s = training.micro_batch_size, self._run.model.seq_length
        pass_ = micro * self._layout.dp_size + self._layout.dp_rank
        first = self._first_sample(split, step) + pass_ * b
        rows = torch.empty(b, s + 1, dtype=torch.int64)
        for row in range(b):
            self._mixtures[split].read(first + row, rows[row])
        return self._finish(rows, self._mixtures[split].parts[0].file.manifest.tokenizer.eod_id)

    @property
    def fingerprint(self) -> str:
        """Hash of everything the training order depends on, as ``<run_dir>/data.sha256`` has it.

        Equal fingerprints mean that step n reads the same sequences in the same order; weights
        written otherwise and data prepared again may give other ones, `identities` do not.
        """
        weights = [str(d.weight) for d in _datasets(self._run, "train")]
        files = [[part.file.manifest.sha256] for part in self._mixtures["train"].parts]
        return self._hash("train", weights, files)

    @property
    def identities(self) -> dict[str, str]:
        """A hash for each split that has data: equal if and only if its sequences are, in order."""
        found: dict[str, str] = {}
        for split, mixture in self._mixtures.items():
            shares = [str(share) for share in mixture.order.blend.shares()]
            manifests = [part.file.manifest for part in mixture.parts]
            files = [[m.bin.sha256, m.dtype, m.tokenizer.sha256] for m in manifests]
            found[split] = self._hash(split, shares, files)
        return found

    def _hash(self, split: Split, weights: list[str], files: list[list[str]]) -> str:
        run, parts = self._run, self._mixtures[split].parts
        rings = [
            [*file, p.source.first, p.ring.tokens] for file, p in zip(files, parts, strict=True)
        ]
        size, length = run.training.global_batch_size, run.model.seq_length
        tree: list[Any] = [_seed(run, split), length, size, weights, rings]
        if split == "train" and run.training.batch_size_rampup:
            tree.append({"rampup": run.training.batch_size_rampup})
        if split == "train" and self._order.inherited != self._plain.inherited:
            tree.append(self._order.inherited)
        return hashlib.sha256(json.dumps(tree).encode()).hexdigest()

    @property
    def _order(self) -> Order:
        return self._mixtures["train"].order

    @property
    def tokenizer(self) -> str:
        """SHA-256 of the tokenizer that made the training data, by its manifests."""
        return self._order.tokenizer

    def position(self, batch: int) -> dict[str, Any]:
        """For the checkpoint: samples taken of each dataset before global batch ``batch``."""
        return self._order.at(batch).as_dict()

    def resume(self, saved: dict[str, Any] | None) -> None:
        """Take over the order of this run's own checkpoint, as `position` recorded it.

        Earlier versions knew one order only, and recorded None.

        Raises ValueError: it is of other datasets, or damaged.
        """
        if saved is not None:
            self._follow(self._plain.resumed(Position.from_dict(saved)))

    def start_from(self, position: Position, batch: int) -> list[str]:
        """Go on, from global batch ``batch``, after what another run took by its ``position``.

        Returns a line for every dataset.
        """
        order = self._plain.continued(position, batch)
        self._follow(order)
        return order.fates(position)

    def _follow(self, order: Order) -> None:
        files = [part.file for part in self._mixtures["train"].parts]
        parts = [_Part.of(f, source) for f, source in zip(files, order.sources, strict=True)]
        self._mixtures["train"] = _Mixture(order, parts)

    def describe(self) -> list[str]:
        """Lines for the start-up log: tokens of each split, and the epochs the run makes."""
        training, s = self._run.training, self._run.model.seq_length
        lines = []
        for split, mixture in self._mixtures.items():
            total = sum(part.ring.tokens for part in mixture.parts)
            line = f"data {split}: {human(total)} tokens in {len(mixture.parts)} dataset(s)"
            if split == "test" and not training.eval_test:
                lines.append(f"{line}; held out: no run reads it")
                continue
            samples = training.eval_steps * training.global_batch_size
            if split == "train":
                samples = self._sizes.first_sample(training.train_steps)
            what = "the run reads" if split == "train" else "an evaluation reads"
            lines.append(f"{line}; {what} {human(samples * s)}")
            counts = mixture.order.blend.counts(samples)
            for part, count in zip(mixture.parts, counts, strict=True):
                epochs = count / part.ring.windows
                note = ""
                if epochs > 1 and split == "train":
                    note = " (shorter than the run: repeats, reshuffled every epoch)"
                elif epochs > 1:
                    note = " (shorter than an evaluation: some sequences count more than once)"
                lines.append(
                    f"data {split}:   {part.file.path.name}: {human(part.ring.tokens)} tokens, "
                    f"{count / max(samples, 1):.1%} of samples, {epochs:.3g} epochs{note}"
                )
        lines += [f"data {split}: none ({why})" for split, why in self._absent.items()]
        data = self._run.data
        if not data.blend and data.split != type(data)().split:
            # Not refused: it may come from a base file, where it cannot be taken away.
            lines.append(f"data.split {data.split}: not used, data.train names whole datasets")
        if data.document_attention:
            lines.append(
                "data: attention, positions and loss stop at ends of documents; FLOPs and MFU "
                "count attention over whole sequences"
            )
            if self._layout.cp_size > 1:
                lines.append(
                    "warning: packed over context-parallel ranks: attention is not observed"
                )
        elif data.eod_mask_loss:
            lines.append("data: end-of-document tokens carry no loss")
        if data.reset_position_ids:
            lines.append("data: positions restart after every end of document")
        return lines

    def close(self) -> None:
        """Close the token files; iterators must have ended."""
        files = {id(p.file): p.file for m in self._mixtures.values() for p in m.parts}
        for file in files.values():
            file.close()

    def _finish(self, rows: torch.Tensor, eod: int | None) -> Batch:
        """Rows [b, s + 1] to a batch."""
        data = self._run.data
        if data.document_attention:
            assert eod is not None, "checked by build_loaders"
            split = self._run.parallel.tensor_model_parallel_size
            return self._pinned(pack(rows, eod, self._layout, multiple=UNIT * split))
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        b, s = tokens.shape
        loss_mask = torch.ones(b, s, dtype=torch.float32)
        position_ids = torch.arange(s).repeat(b, 1)
        if data.eod_mask_loss or data.reset_position_ids:
            assert eod is not None, "checked by build_loaders"
            ends = torch.eq(tokens, eod)
            if data.eod_mask_loss:
                loss_mask[ends] = 0.0
            if data.reset_position_ids:
                # The first position of the document each token is in: one past the last end.
                starts = torch.zeros_like(tokens)
                starts[:, 1:] = torch.where(ends[:, :-1], position_ids[:, 1:], 0)
                position_ids = position_ids - starts.cummax(dim=1).values
        batch = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
        }
        # Cut last: masks and positions are properties of the whole sequence. And before pinning: a
        # cut made later would be copied to the GPU from pageable memory, which waits for the GPU.
        rank, size = self._layout.cp_rank, self._layout.cp_size
        batch = {n: shard(t, rank=rank, size=size, dim=1) for n, t in batch.items()}
        return self._pinned(batch)

    def _pinned(self, batch: Batch) -> Batch:
        if self._run.training.device == "cuda" and torch.cuda.is_available():
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch


UNIT = 64
"""Tokens of a tensor-parallel rank that packs over context-parallel ranks are rounded up to: few
sizes, of which the device's allocator keeps its blocks."""


def pack(rows: torch.Tensor, eod: int, layout: Layout, *, multiple: int) -> Batch:
    """Rows [b, s + 1] to this rank's part of one row of packed documents.

    A document begins at the start of a row and behind every end-of-document token, which carries no
    loss: what follows it is of another document.

    Returns ``tokens``, ``labels``, ``position_ids``, ``loss_mask`` [1, t], ``cu_seqlens`` int32
    [documents + 1]. One rank has t = b s. Context-parallel ranks have ``cu_seqlens_padded`` too,
    each document padded to a multiple of twice their number, and t rounded up to ``multiple``.
    """
    tokens, labels = rows[:, :-1].flatten(), rows[:, 1:].flatten()
    ends = torch.eq(tokens, eod)
    begins = torch.zeros_like(rows[:, :-1], dtype=torch.bool)
    begins[:, 0] = True
    begins.view(-1)[1:] |= ends[:-1]
    starts = begins.view(-1).nonzero().view(-1)
    cu = torch.cat([starts, starts.new_tensor([tokens.numel()])])
    document = begins.view(-1).cumsum(0) - 1
    values = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": (~ends).float(),
        "position_ids": torch.arange(tokens.numel()) - starts[document],
    }
    batch = {"cu_seqlens": cu.int()}
    size = layout.cp_size
    if size > 1:
        _, padded = padded_cu_seqlens(cu.diff().tolist(), size)
        total = int(padded[-1]) + -int(padded[-1]) % (size * multiple)
        index = packed_index(padded, total, rank=layout.cp_rank, size=size)
        place = padded[:-1].long()[document] + values["position_ids"]
        for name, x in values.items():
            values[name] = x.new_zeros(total).index_copy_(0, place, x)[index]
        batch["cu_seqlens_padded"] = padded
    return batch | {name: x.unsqueeze(0) for name, x in values.items()}


def build_loaders(run: RunConfig, layout: Layout) -> Loaders:
    """The loaders of one rank; ``data.verify.verify_datasets`` must have passed before.

    Raises DataError: a manifest is unusable, a split is shorter than one sequence, the
    end-of-document id is needed and unknown, or the global batch does not divide.
    """
    files: dict[str, TokenFile] = {}
    problems: list[str] = []
    for split in SPLITS:
        for dataset in _datasets(run, split):
            if dataset.path in files:
                continue
            try:
                files[dataset.path] = TokenFile(dataset.path)
            except DataError as error:
                problems += error.problems
    if problems:
        raise DataError(list(dict.fromkeys(problems)))
    mixtures: dict[Split, _Mixture] = {}
    absent: dict[Split, str] = {}
    for split in SPLITS:
        parts, short = _parts(run, split, files)
        # Evaluation data that no one asked for may be missing; what was asked for may not.
        asked = {
            "train": True,
            "valid": run.training.eval_interval is not None,
            "test": run.training.eval_test,
        }
        if asked[split]:
            problems += short
        if parts and not short:
            mixtures[split] = _Mixture(_order(run, split, parts), parts)
        else:
            absent[split] = "; ".join(short) or "not configured"
    eods = {path: file.manifest.tokenizer.eod_id for path, file in files.items()}
    if (masks_ends(run) or run.data.reset_position_ids) and None in eods.values():
        problems.append(
            "data.eod_mask_loss, reset_position_ids and document_attention need the id of "
            "end-of-document, which the datasets' manifests do not name: prepare them with "
            "tokenizer.eod_id"
        )
    if problems:
        raise DataError(problems)
    return Loaders(run, layout, mixtures=mixtures, absent=absent)


def _datasets(run: RunConfig, split: Split) -> list[DatasetConfig]:
    if run.data.blend:
        return run.data.blend if run.data.split[SPLITS.index(split)] > 0 else []
    return getattr(run.data, split)


def _seed(run: RunConfig, split: Split) -> int:
    return data_seed(run) if split == "train" else _EVALUATION_SEED


def _parts(
    run: RunConfig, split: Split, files: dict[str, TokenFile]
) -> tuple[list[_Part], list[str]]:
    """The parts of a split, and what is too short to be one."""
    length, parts, short = run.model.seq_length, [], []
    for number, dataset in enumerate(_datasets(run, split)):
        file = files[dataset.path]
        first, end = 0, file.tokens
        if run.data.blend:
            at = SPLITS.index(split)
            first, end = (
                file.cut(sum(run.data.split[:n]) / sum(run.data.split)) for n in (at, at + 1)
            )
        if end - first <= length:
            short.append(
                f"{file.path}: its {split} part has {end - first:,} tokens, one sequence takes "
                f"{length + 1:,} (model.seq_length + 1): use more data or a larger share in "
                "data.split (documents are never divided between splits)"
            )
            continue
        key = derive("sample order", _seed(run, split), split, number)
        name, sha256 = file.path.name, file.manifest.bin.sha256
        parts.append(_Part.of(file, Source(name, sha256, first, end - first, length, key)))
    return parts, short


def _order(run: RunConfig, split: Split, parts: list[_Part]) -> Order:
    return Order(
        tuple(part.source for part in parts),
        tuple(dataset.weight for dataset in _datasets(run, split)),
        run.training.global_batch_size,
        parts[0].file.manifest.tokenizer.sha256,
        rampup=tuple(run.training.batch_size_rampup or ()) if split == "train" else (),
    )
