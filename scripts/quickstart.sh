#!/usr/bin/env bash
# Train a small GPT on text this machine already has: quickstart.sh [BIN_DIR]
# Data and run go under the working directory; without BIN_DIR, commands are those of PATH.
# Prepares data, trains to half, stops as a time limit would, resumes from the checkpoint, draws the run.
set -euo pipefail

bin=${1:+$1/}
home=$(dirname "$0")/..
config=$home/configs/quickstart.yaml
started=$SECONDS

run_dir=runs/quickstart
number=2
while [[ -e $run_dir ]]; do
  # A finished or half-done run is somebody's result; never train over it.
  run_dir=runs/quickstart_$number
  number=$((number + 1))
done

settings=(--set "run_dir=$run_dir")
if "${bin}python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "a GPU is here: BF16 with the stable_flash kernel"
  settings+=(--set training.device=cuda --set training.precision=bf16)
  settings+=(--set attention.backend=stable_flash)
else
  echo "no GPU here: FP32 on the CPU with the reference attention"
fi

say() {
  printf '\n== %s\n' "$*"
}

if [[ ! -e data/quickstart/stdlib.manifest.json ]]; then
  say "1/4 prepare data: the Python standard library's sources, a tokenizer trained on them"
  "${bin}megatron-patch" prepare-data --corpus python-stdlib --tokenizer huggingface \
    --train-bpe 4096 --tokenizer-path data/quickstart/tokenizer.json --out data/quickstart/stdlib
else
  say "1/4 data is prepared already"
fi

say "2/4 train to step 100 and stop"
"${bin}megatron-patch" train --config "$config" "${settings[@]}" --set training.exit_at_step=100

say "3/4 resume from the checkpoint and finish"
"${bin}megatron-patch" train --config "$config" "${settings[@]}"

say "4/4 draw the run"
"${bin}megatron-patch" report "$run_dir" --png "$run_dir/quickstart.png"

"${bin}python" "$home/scripts/quickstart_verdict.py" "$run_dir"
printf 'took %d s without installing\n' "$((SECONDS - started))"
