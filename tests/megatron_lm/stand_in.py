"""A tree of the shape of Megatron-LM core_v0.16.1, as far as flux is concerned: a stand-in, as it is no package.

The functions that flux wraps or patches have Megatron-LM's names, modules, parameters and order of calls; around the
places that the patch set changes are the lines it expects. What they do is this file's own and tiny: two real
tensor-parallel linears of the installed megatron-core, trained for a few steps over gloo, with writers that print.
"""

from pathlib import Path

PACKAGE_INFO = """
MAJOR = 0
MINOR = 16
PATCH = 1
PRE_RELEASE = ''
"""

ARGUMENTS = '''
import argparse
import dataclasses
import json
import os
import sys


def add_megatron_arguments(parser: argparse.ArgumentParser):
    parser = _add_kitchen_quantization_arguments(parser)
    parser = _add_sft_args(parser)

    return parser

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    """Parse all arguments."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args()
    if args.yaml_cfg is not None:
        from .yaml_arguments import load_yaml
        args = load_yaml(args.yaml_cfg)
    args.rank = int(os.getenv('RANK', '0'))
    args.world_size = int(os.getenv('WORLD_SIZE', '1'))
    return args


def _add_kitchen_quantization_arguments(parser):
    parser.add_argument('--tensor-model-parallel-size', type=int, default=1)
    parser.add_argument('--sequence-parallel', action='store_true')
    parser.add_argument('--tp-comm-overlap', action='store_true')
    parser.add_argument('--cuda-graph-impl', default='none')
    parser.add_argument('--train-iters', type=int, default=3)
    parser.add_argument('--seq-length', type=int, default=8)
    parser.add_argument('--micro-batch-size', type=int, default=2)
    parser.add_argument('--skip-train', action='store_true')
    parser.add_argument('--log-interval', type=int, default=1)
    parser.add_argument('--tensorboard-log-interval', type=int, default=1)
    parser.add_argument('--yaml-cfg')
    return parser


def _add_sft_args(parser):
    parser.add_argument('--tiktoken-special-tokens')
    return parser


def validate_args(args, defaults={}):
    if args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
    if args.tiktoken_special_tokens:
        args.tokenizer_special_tokens = args.tiktoken_special_tokens

    # Print arguments.
    _print_args("arguments", args)

    return args


def _print_args(title, args):
    if args.rank == 0:
        sys.stdout.write(f'{title} {json.dumps(vars(args), default=str)}\\n')
'''

YAML_ARGUMENTS = """
import json
from types import SimpleNamespace


def load_yaml(yaml_path):
    with open(yaml_path) as f:
        return SimpleNamespace(yaml_cfg=yaml_path, **json.load(f))


def validate_yaml(args, defaults={}):
    return SimpleNamespace(**vars(args))
"""

GLOBAL_VARS = """
import json
import sys

_ARGS = None


def say(kind, row):
    # One write: the ranks share a pipe, and torchrun's are not buffered.
    sys.stdout.write(f'{kind} {json.dumps(row)}\\n')


class Writer:
    def add_scalar(self, name, value, iteration):
        say('tensorboard', [iteration, name, float(value)])


class Wandb:
    def log(self, row, iteration):
        say('wandb', [iteration, row])


class Timers:
    def log(self, names, normalizer, reset):
        pass


def set_args(args):
    global _ARGS
    _ARGS = args


def get_args():
    return _ARGS


def _last():
    return _ARGS.rank == _ARGS.world_size - 1


def get_tensorboard_writer():
    return Writer() if _last() else None


def get_wandb_writer():
    return Wandb() if _last() else None


def get_timers():
    return Timers()


def get_one_logger():
    return None
"""

INITIALIZE = """
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_args
from megatron.training.yaml_arguments import validate_yaml


def initialize_megatron():
    args = parse_args()
    args = validate_yaml(args) if args.yaml_cfg is not None else validate_args(args)
    set_args(args)
    dist.init_process_group('gloo')
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_model_parallel_size)
"""

TRAINING = '''
import torch
import torch.distributed as dist

from megatron.training.global_vars import (
    get_args, get_one_logger, get_tensorboard_writer, get_timers, get_wandb_writer
)
from megatron.training.initialize import initialize_megatron


def setup_model_and_optimizer(
    model_provider_func,
):
    """Setup model and optimizer."""
    args = get_args()
    timers = get_timers()
    one_logger = get_one_logger()
    model = model_provider_func(args)
    return model, torch.optim.SGD(model.parameters(), lr=0.001)


def training_log(
    loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, is_first_iteration=False
):
    args = get_args()
    timers = get_timers()
    timers_to_log, should_reset = [], True
    if iteration % args.log_interval == 0:
        writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
        if writer:
            writer.add_scalar('lm loss', loss_dict['lm loss'], iteration)
        if wandb_writer:
            wandb_writer.log({'lm loss': loss_dict['lm loss']}, iteration)
        timers.log(timers_to_log, normalizer=args.log_interval, reset=should_reset)

    return report_memory_flag


def pretrain(model_provider_func, forward_step_func):
    initialize_megatron()
    args = get_args()
    model, optimizer = setup_model_and_optimizer(model_provider_func)
    for iteration in range(1, args.train_iters + 1):
        optimizer.zero_grad()
        loss = forward_step_func(args, model, iteration)
        loss.backward()
        optimizer.step()
        training_log({'lm loss': loss.item()}, {}, 0.1, iteration, 1.0, False, is_first_iteration=iteration == 1)
    dist.destroy_process_group()
'''

SCRIPT = """
import sys

import torch

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.training import pretrain
from megatron_flux.train.shims import cpu_shims


class Model(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        config = TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True,
            tensor_model_parallel_size=args.tensor_model_parallel_size, sequence_parallel=args.sequence_parallel,
            gradient_accumulation_fusion=False,
        )
        kinds = dict(config=config, init_method=torch.nn.init.xavier_normal_, bias=False, skip_bias_add=False)
        self.fc1 = ColumnParallelLinear(16, 32, **kinds)
        self.fc2 = RowParallelLinear(32, 16, input_is_parallel=True, **kinds)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)[0]))[0]


def model_provider(args):
    torch.manual_seed(1)
    return Model(args)


def forward_step(args, model, iteration):
    torch.manual_seed(100 * iteration + args.rank)
    return model(torch.randn(4, 2, 16, requires_grad=True)).square().sum()


if __name__ == '__main__':
    sys.stdout.write(f'argv {sys.argv[0]} path {sys.path[0]}\\n')
    with cpu_shims():
        pretrain(model_provider, forward_step)
"""

FILES = {
    "megatron/core/package_info.py": PACKAGE_INFO,  # no __init__.py beside it: the installed megatron.core is imported
    "megatron/training/__init__.py": "",
    "megatron/training/arguments.py": ARGUMENTS,
    "megatron/training/global_vars.py": GLOBAL_VARS,
    "megatron/training/initialize.py": INITIALIZE,
    "megatron/training/training.py": TRAINING,
    "megatron/training/yaml_arguments.py": YAML_ARGUMENTS,
    "pretrain_tiny.py": SCRIPT,
}


def write_tree(folder: Path) -> Path:
    """Write the tree into ``folder`` and return it."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"))
    return folder
