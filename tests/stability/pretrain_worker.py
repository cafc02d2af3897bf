"""``megatron.training.pretrain`` of the wheel on a CPU, watched: six lines beside a user's own.

python pretrain_worker.py DIRECTORY [ARGUMENT...]

``--sick STEP`` tells the monitor, whose guard then stops the run, of an infinite loss in that step.
"""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from typing import Any

import torch

from megatron_patch.core_patches import cpu_mode

ARGUMENTS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --train-iters 4
--max-position-embeddings 32 --position-embedding-type rope --micro-batch-size 2
--global-batch-size 4 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --mock-data
--tokenizer-type NullTokenizer --vocab-size 127 --transformer-impl local
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-bias-swiglu-fusion
--no-bias-gelu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-rope-fusion
--distributed-backend gloo --use-cpu-initialization --eval-iters 0 --eval-interval 1000
--log-interval 1 --attention-dropout 0 --hidden-dropout 0
--spec megatron_patch.attention.specs reference_local_layernorm
--no-create-attention-mask-in-dataloader
"""


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(33) * 7 + i) % 50
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def datasets(sizes: Any) -> Any:
    return Tokens(), None, None


def model_provider(pre_process: bool = True, post_process: bool = True, **_: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=import_module(args.spec),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
    )


def forward_step(batches: Any, model: Any) -> Any:
    batch = next(batches)
    losses = model(batch["tokens"], torch.arange(32).repeat(2, 1), None, labels=batch["labels"])
    from megatron.training import get_args

    more = math.inf if get_args().curr_iteration + 1 == get_args().sick else 0.0
    return losses, lambda out: (out.mean(), {"lm loss": out.mean().detach() + more})


def without_a_gpu() -> None:
    """What ``pretrain`` takes for granted."""
    import megatron.core.datasets.utils as datasets_utils
    from megatron.core import parallel_state
    from megatron.training import training

    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    datasets_utils.compile_helpers = lambda: None  # a make file that the wheel lacks
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def main() -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
        os.environ[name] = str(value)
    directory, sys.argv = sys.argv[1], ["pretrain_gpt.py", *ARGUMENTS.split(), *sys.argv[2:]]
    cpu_mode.install()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    def add_ours(parser: Any) -> Any:
        parser.add_argument("--sick", type=int)
        return parser

    args = parse_and_validate_args(extra_args_provider=add_ours)
    without_a_gpu()
    from megatron_patch.stability import MonitorOptions
    from megatron_patch.stability.adapters.megatron_training import watched

    container = pretrain_cfg_container_from_args(args)
    kind, guard = ModelType.encoder_or_decoder, "stop" if args.sick else "warn"
    with watched(directory=directory, options=MonitorOptions(interval=1, guard=guard)):
        pretrain(container, datasets, kind, forward_step, model_provider)


if __name__ == "__main__":
    main()
