"""Fine-tune Llama-3.2-1B with Megatron-Bridge and flux.

torchrun --nproc-per-node 2 examples/bridge/sft.py CHECKPOINT, a Megatron checkpoint of the model.
"""

import sys

import megatron_flux

megatron_flux.patch()  # the only line for flux; megatron_flux.FluxConfig(...) holds its options

from megatron.bridge.recipes.llama import llama32_1b_sft_config  # noqa: E402
from megatron.bridge.training.finetune import finetune  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402

if __name__ == "__main__":
    config = llama32_1b_sft_config()
    config.model.tensor_model_parallel_size = 2
    config.model.sequence_parallel = True
    config.train.train_iters = 20
    config.checkpoint.pretrained_checkpoint = sys.argv[1]
    finetune(config=config, forward_step_func=forward_step)
    print(megatron_flux.report())
