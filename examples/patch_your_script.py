"""Switch flux on in a script of your own: ``torchrun --nproc-per-node 2 examples/patch_your_script.py``."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megatron_flux
from megatron_flux.train.shims import cpu_shims

GPUS = torch.cuda.is_available()
dist.init_process_group("nccl" if GPUS else "gloo")
rank, tp = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if GPUS else torch.device("cpu")
if GPUS:
    torch.cuda.set_device(device)

megatron_flux.patch()  # the only line that you add; megatron_flux.unpatch() puts the stock methods back

with cpu_shims():  # lets megatron-core run without GPUs; does nothing where there are some
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        **{"num_layers": 1, "hidden_size": 512, "num_attention_heads": 8, "tensor_model_parallel_size": tp},
        **{"sequence_parallel": True, "params_dtype": torch.bfloat16, "use_cpu_initialization": not GPUS},
    )
    options = {"config": config, "bias": False, "skip_bias_add": False, "init_method": config.init_method}
    fc1 = ColumnParallelLinear(512, 2048, gather_output=False, **options).to(device)
    fc2 = RowParallelLinear(2048, 512, input_is_parallel=True, **options).to(device)
    optimizer = torch.optim.Adam([*fc1.parameters(), *fc2.parameters()], lr=1e-3)

    torch.manual_seed(rank)
    x = torch.randn(256 // tp, 1, 512, dtype=torch.bfloat16, device=device)  # this rank's part of the sequence
    for step in range(1, 6):
        loss = (fc2(torch.relu(fc1(x)[0]))[0] - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss on rank 0 {loss.item():.4f}")

if rank == 0:
    report = megatron_flux.report()
    print(f"layers that run flux: {report['active_layers']}; calls: {report['calls']}; stock: {report['fallbacks']}")
dist.destroy_process_group()
