"""An arm's forward and backward as one CUDA graph.

The step must allocate nothing outside torch's allocator, draw random numbers only from generators that a graph can
hold (Megatron's tracker is made that way when the run asks for graphs) and never wait for the GPU. An arm that breaks
one of these raises while it is captured, and the benchmark runs it without a graph and says so.
"""

from __future__ import annotations

import torch

from megatron_flux.bench.layer_arms import Step
from megatron_flux.ops.cuda_graphs import captured_calls

WARMUP_STEPS = 3


def capture(step: Step) -> Step:
    """Capture ``step`` and return what replays it. All ranks must call it; the GPU is idle before and after.

    The graph keeps the memory of its activations, output and gradient for as long as the result lives.
    """
    from megatron.core.tensor_parallel.random import get_all_rng_states

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # Workspaces of captured operators cannot be made during capture.
    with torch.cuda.stream(side), captured_calls():
        for _ in range(WARMUP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for state in get_all_rng_states().values():
        graph.register_generator_state(state)
    # thread_local: NCCL's watchdog thread may ask for events while this thread captures.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        result = step()
    torch.cuda.synchronize()

    def replay() -> tuple[torch.Tensor, torch.Tensor]:
        graph.replay()
        return result

    return replay
