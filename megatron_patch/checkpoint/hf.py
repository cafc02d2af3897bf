"""Hugging Face models into checkpoints a run can start from, and checkpoints into their models.

Both build the whole model on one CPU rank, without drawing weights: what is exported may have been
saved on any tensor, pipeline or expert layout, and what is imported loads on any. Memory: the model
in its own type, and one file of at most `SHARD` bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_patch.checkpoint import content, hf_config, hf_weights, inspect, writer
from megatron_patch.checkpoint.directory import DIRECTORY
from megatron_patch.checkpoint.errors import (
    BadCheckpoint,
    CheckpointError,
    MismatchError,
    causes,
    gone,
    no_checkpoint,
)
from megatron_patch.checkpoint.inspect import RequestError
from megatron_patch.checkpoint.safe_metadata import read_metadata
from megatron_patch.checkpoint.store import CheckpointStore, Found
from megatron_patch.checkpoint.train_state import TrainState
from megatron_patch.core_patches.activation import core_fuses
from megatron_patch.data import tokenizers
from megatron_patch.data.errors import DataError
from megatron_patch.data.position import Position
from megatron_patch.schema import effective, render
from megatron_patch.schema.attention import AttentionConfig
from megatron_patch.schema.data import DataConfig, TokenizerConfig
from megatron_patch.schema.model import ModelConfig
from megatron_patch.schema.parallel import ParallelConfig
from megatron_patch.schema.problem import Problem
from megatron_patch.schema.run import RunConfig
from megatron_patch.schema.training import OptimizerConfig, TrainingConfig

SHARD = 5 * 10**9
"""Bytes of one file, as transformers writes them."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import made."""

    path: Path
    tree: dict[str, Any]
    """The sections of a configuration that start from it; defaults are left out."""
    notes: list[str]


def _refuse_place(out: Path) -> None:
    """Nothing is written over what is there, nor into a checkpoint: one file more damages it."""
    if (out.is_dir() and any(out.iterdir())) or out.is_file():
        raise RequestError(f"--out {out} is there already; name a new directory")
    whole = Path(os.path.realpath(out))
    inside = next((p for p in (whole, *whole.parents) if DIRECTORY.fullmatch(p.name)), None)
    if inside is not None:
        raise RequestError(
            f"--out {out}: {inside} is, or has the name of, a checkpoint, which a file more would "
            "make a damaged one; name a directory elsewhere"
        )


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Full, read-only and failing disks end in a RequestError; reading reports its own."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch's writer, which cannot finish an archive after that, says what it expected.
        cause = next((c for c in causes(error) if isinstance(c, OSError | SafetensorError)), None)
        if cause is None:
            raise
        raise RequestError(
            f"--out {out} cannot be written ({getattr(cause, 'strerror', None) or cause}): put it "
            "right, remove what is there, and run the same command again"
        ) from None


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """This process as the only rank of a job in CPU mode."""
    from megatron_patch.core_patches import cpu_mode

    cpu_mode.install()
    from megatron.core import parallel_state, tensor_parallel

    store = torch.distributed.HashStore()
    try:
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        cpu_mode.uninstall()


def _whole_model(run: RunConfig, *, vocab_size: int) -> torch.nn.Module:
    """All of the model, its weights not drawn."""
    from megatron_patch.model.build import build_model

    (chunk,) = build_model(run, vocab_size=vocab_size, initialize=False).chunks
    return chunk.bfloat16() if run.training.precision == "bf16" else chunk


def _run_of(model: ModelConfig, tokenizer: TokenizerConfig, precision: Any) -> RunConfig:
    return RunConfig(
        name="conversion",
        model=replace(model, layer_spec="local"),
        training=TrainingConfig(
            train_steps=1, global_batch_size=1, micro_batch_size=1, device="cpu",
            precision=precision,
        ),
        optimizer=OptimizerConfig(lr=1.0),
        data=DataConfig(tokenizer=tokenizer),
        attention=AttentionConfig(backend="reference"),
        parallel=ParallelConfig(use_distributed_optimizer=False),
    )  # fmt: skip


def _parts(model: torch.nn.Module) -> content.Parts:
    return content.Parts([model], None, None, distributed_optimizer=False)


# ------------------------------------------------------------------------------------- import


def import_model(
    source: Path,
    root: Path,
    *,
    seq_length: int | None = None,
    key: bytes | None = None,
    check: Callable[[RunConfig], Iterable[Problem]] = lambda run: (),
) -> Imported:
    """Make the checkpoint of a Hugging Face folder in the new store ``root``.

    Args:
        source: folder with config.json, safetensors files and, if there is one, tokenizer.json.
        root: directory of the checkpoint; must not exist, or be empty.
        seq_length: tokens of a training sequence; None: as many as config.json has positions.
        key: signs the manifest.
        check: what is wrong with a model.

    Raises RequestError: something of it cannot be imported, with field, value and remedy.
    """
    values = _config_json(source)
    model, vocab, unread = hf_config.read(values, seq_length=seq_length)
    family = str(values["model_type"])
    files = hf_weights.Files(source)
    types = files.types()
    if not types <= {"F32", "BF16", "F16"}:
        raise RequestError(f"{source}: weights of type {', '.join(sorted(types))}; dequantize them "
                           "in transformers first")  # fmt: skip
    precision = "bf16" if types == {"BF16"} else "fp32"
    tokenizer, ids, sha256 = _tokenizer(source, values, vocab)
    padded = -(-vocab // 128) * 128
    model = replace(model, make_vocab_size_divisible_by=_divisor(ids, padded))
    run = _run_of(model, tokenizer, precision)
    if wrong := list(check(run)):
        raise RequestError(
            f"{source / 'config.json'} makes a model that is none:\n  "
            + "\n  ".join(f"{p.path}: {p.message}" for p in wrong)
        )
    _refuse_place(root)
    store = CheckpointStore(root, keep_last=None, hmac_key=key)
    with _one_rank():
        whole = _whole_model(run, vocab_size=ids)
        hf_weights.fill(whole, model, family, files, vocab)
        run_state = {
            "progress": TrainState().as_dict(),
            "config": render.dump(
                {"name": source.resolve().name, "model": asdict(model),
                 "data": {"tokenizer": asdict(tokenizer)}}
            ),
            "extra": {"data": Position(0, 0, 1, (), (), (), (), sha256).as_dict()},
        }  # fmt: skip
        info = {"weights_only": True, "precision": precision, "vocabulary": vocab}
        path = _commit(store, whole, run_state, info)
    notes = [f"{family}, {precision}, {len(files.names):,} tensors"]
    if unread:
        notes.append(f"fields of config.json that are not read: {', '.join(unread)}")
    if padded > vocab:
        notes.append(f"vocabulary: {vocab:,} rows padded to {padded:,} by their mean")
    if "F16" in types or len(types) > 1:
        notes.append(f"{', '.join(sorted(types))} weights are held as float32, which is exact")
    return Imported(path, _fitting(path, model, tokenizer), notes)


def _config_json(source: Path) -> dict[str, Any]:
    try:
        values = json.loads((source / "config.json").read_bytes())
    except OSError as error:
        raise RequestError(
            f"{source / 'config.json'} cannot be read ({error.strerror}); name the folder of a "
            "Hugging Face model on this machine"
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{source / 'config.json'} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError(f"{source / 'config.json'} is no JSON object")
    return values


def _tokenizer(
    source: Path, values: dict[str, Any], vocab: int
) -> tuple[TokenizerConfig, int, str]:
    """The tokenizer beside the model, its ids and hash; bare ids where there is none."""
    file = source / "tokenizer.json"
    eos = values.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    eos = eos if isinstance(eos, int) and 0 <= eos < vocab else None
    if not file.is_file():
        return TokenizerConfig(kind="none", vocab_size=vocab, eod_id=eos), vocab, ""
    config = TokenizerConfig(kind="huggingface", path=str(file.resolve()))
    try:
        found = tokenizers.build(config)
    except DataError:
        config = replace(config, eod_id=eos)
        try:
            found = tokenizers.build(config)
        except DataError as error:
            raise RequestError(str(error)) from None
    if found.vocab_size > vocab:
        text = f"has {found.vocab_size:,} ids and config.json vocab_size {vocab:,}: not a pair"
        raise RequestError(f"{file} {text}")
    return config, found.vocab_size, found.sha256


def _divisor(ids: int, padded: int) -> int:
    """``make_vocab_size_divisible_by`` under which ``ids`` tokens make ``padded`` rows."""
    steps = (128, *(n for n in range(2, padded + 1) if padded % n == 0))
    return next(step for step in steps if -(-ids // step) * step == padded)


def _commit(
    store: CheckpointStore, model: torch.nn.Module, run: dict[str, Any], info: dict[str, Any]
) -> Path:
    state = content.model_state(_parts(model), content.core_metadata("fully_reshardable"))
    attempt = store.begin(0)
    with _writing(store.root):
        plan = writer.plan(state | {"run": run}, attempt.path)
        plan.stage(copy=False)
        plan.write()
        digests = store.hash_files(attempt, plan.names)
        digests |= store.hash_files(attempt, plan.finish([plan.results], attempt.path))
        return store.commit(attempt, digests, info)


def _fitting(path: Path, model: ModelConfig, tokenizer: TokenizerConfig) -> dict[str, Any]:
    load: dict[str, Any] = {"load_from": str(path.resolve()), "load_weights_only": True}
    if tokenizer.kind == "none":
        load["intended_changes"] = ["data.tokenizer"]
    data = {"tokenizer": _changed(tokenizer)}
    return {"model": _changed(model), "data": data, "checkpoint": load}


def _changed(section: Any) -> dict[str, Any]:
    """What differs from the defaults of a dataclass."""
    whole = asdict(section)
    return {
        field.name: {k: v for k, v in value.items() if v is not None}
        if isinstance(value := whole[field.name], dict)
        else value
        for field in fields(section)
        if whole[field.name] != field.default
    }


# ------------------------------------------------------------------------------------- export


def export_model(
    source: Path, out: Path, *, vocab_size: int | None = None, key: bytes | None = None,
    shard: int = SHARD,
) -> list[str]:  # fmt: skip
    """Write the Hugging Face folder of a checkpoint; lines about it.

    Args:
        source: a checkpoint, or a run directory or store (its newest good one is taken).
        out: the new folder; must not exist, or be empty.
        vocab_size: rows of the embedding to write; None: those imported, else the tokenizer's ids.
        key: of signed checkpoints.
        shard: bytes of one file.

    Raises:
        RequestError: no family computes this model, or what is asked for cannot be done.
        CheckpointError: there is no good checkpoint.
    """
    _refuse_place(out)
    found = _find(source, key)
    try:
        with _one_rank():
            return _export(found, out, vocab_size, shard)
    except (OSError, CheckpointError):
        if reason := gone(found.path):
            raise no_checkpoint(reason, passing=False) from None
        raise


def load_whole(found: Found) -> tuple[torch.nn.Module, Any, RunConfig]:
    """The model of a verified checkpoint of any layout, its index, and the run that wrote it.

    Inside `_one_rank`.

    Raises RequestError: another version wrote it, with keys that are none here.
    """
    sizes = {name: digest.size for name, digest in found.manifest.files.items()}
    index = read_metadata(found.path, sizes)
    recorded = dict(content.read({}, found.path, index)["run"])
    run, unknown = effective.recorded(yaml.safe_load(str(recorded["config"])) or {})
    foreign = [name for name in unknown if name.startswith("model.")]
    if foreign or not isinstance(run.model, ModelConfig):
        what = ", ".join(foreign) or "no section model"
        raise RequestError(f"{found.path}: its configuration has {what}: not of this version")
    precision = found.manifest.info.get("precision") or run.training.precision
    # One id a row: the padding was settled by the run, on whatever layout it had.
    exact = replace(run.model, make_vocab_size_divisible_by=1)
    alone = _run_of(exact, run.data.tokenizer, precision)
    whole = _whole_model(alone, vocab_size=_table_rows(index))
    request = content.model_state(_parts(whole), content.core_metadata("fully_reshardable"))
    try:
        asked = [content.describe(request)]
        content.check_fit(asked, index, skip=content.NOT_MODEL.pattern)
    except MismatchError as error:
        raise MismatchError(f"{found.path.name}: {error}") from None
    whole.load_state_dict(content.read(request, found.path, index)["model"], strict=True)
    return whole, index, run


def _table_rows(index: Any) -> int:
    return int(index.state_dict_metadata["embedding.word_embeddings.weight"].size[0])


def _export(found: Found, out: Path, vocab_size: int | None, shard: int) -> list[str]:
    whole, index, run = load_whole(found)
    model, info, tokenizer = run.model, found.manifest.info, run.data.tokenizer
    imported = bool(info.get("weights_only"))  # its configuration has no section training
    if model.activation == "gelu" and not imported and run.training.compile_fusions:
        # Core's fused GELU is the tanh form.
        model = replace(model, activation="gelu_tanh" if core_fuses(run) else "gelu")
    precision = info.get("precision") or run.training.precision
    rows = _table_rows(index)
    ids = _rows(tokenizer, rows, vocab_size, info.get("vocabulary"))
    values = hf_config.write(model, vocab_size=ids, precision=precision)
    family = str(values["model_type"])
    text = json.dumps(values | _end_of_document(tokenizer), indent=2)
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        where = hf_weights.write(out, hf_weights.pieces(whole, model, family, ids), shard=shard)
        (out / "config.json").write_text(text + "\n", encoding="utf-8")
        copied = _copy_tokenizer(tokenizer, out)
    count = len(set(where.values()))
    what = f"{family}, {precision}, {len(where):,} tensors in {count} file(s)"
    lines = [f"{what}, from step {found.manifest.step:,}"]
    if rows > ids:
        lines.append(f"vocabulary: {rows - ids:,} padded rows of {rows:,} left out")
    return lines + copied


def _find(source: Path, key: bytes | None) -> Found:
    """The checkpoint that is meant, verified."""
    root, only = inspect.resolve(source)
    store = CheckpointStore(root, keep_last=None, hmac_key=key)
    if only is None:
        found = store.find(own=False)
        if found is None:
            raise no_checkpoint(f"there is no checkpoint in {root}", passing=False)
        return found
    try:
        return store.check(root / only)
    except BadCheckpoint as bad:
        text = gone(root / only) or f"{root / only}: {bad.reason}"
        raise no_checkpoint(text, passing=bad.passing) from None


def _rows(tokenizer: TokenizerConfig, table: int, asked: int | None, imported: int | None) -> int:
    """Rows of the vocabulary to write: as asked for, as imported, or as the tokenizer has ids."""
    ids = asked if asked is not None else imported
    if ids is None:
        try:
            ids = tokenizers.build(tokenizer).vocab_size
        except DataError as error:
            raise RequestError(
                f"how many of the {table:,} rows of the embedding are tokens is not known "
                f"({error}): put the tokenizer back, or give --vocab-size"
            ) from None
    if not 1 <= ids <= table:
        raise RequestError(f"--vocab-size {ids:,}: the embedding has {table:,} rows")
    if asked is not None:
        with contextlib.suppress(DataError):  # without the tokenizer, the number is all there is
            needed = tokenizers.build(tokenizer).vocab_size
            if asked < needed <= table:
                raise RequestError(
                    f"--vocab-size {asked:,}: the tokenizer has {needed:,} ids, whose rows would "
                    f"be left out; give {needed:,} to {table:,}, or leave it out"
                )
    return ids


def _end_of_document(tokenizer: TokenizerConfig) -> dict[str, Any]:
    """The ids that begin and end a text: families have defaults of their own, of other tokens."""
    end = tokenizer.eod_id
    with contextlib.suppress(DataError):
        end = tokenizers.build(tokenizer).eod_id
    return {"bos_token_id": None, "eos_token_id": end}


def _copy_tokenizer(tokenizer: TokenizerConfig, out: Path) -> list[str]:
    """The files of a Hugging Face tokenizer, and of one that is none a line."""
    if tokenizer.kind != "huggingface" or tokenizer.path is None:
        return [f"no tokenizer file: {tokenizer.kind} has none that transformers reads"]
    path = Path(tokenizer.path)
    if not path.is_file():
        return [f"no tokenizer file: {path} is not there"]
    shutil.copyfile(path, out / "tokenizer.json")
    for name in TOKENIZER_FILES[1:]:
        if (path.parent / name).is_file():
            shutil.copyfile(path.parent / name, out / name)
    config = out / "tokenizer_config.json"
    if not config.exists():
        text = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config.write_text(json.dumps(text) + "\n", encoding="utf-8")
    return [f"tokenizer: {os.path.relpath(path)}"]
