# ruff: noqa
"""The package before and after a change, in one process: same operands, same weights, in turns.

    torchrun --nproc-per-node N compare_packages.py OUT

``before`` is the older package under the name megatron_flux_old. Rounds alternate the packages, each first in every other round; a time is
the slowest rank's. Writes OUT/summary.json and OUT/rounds.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

PACKAGES = {"before": "megatron_flux_old", "after": "megatron_flux"}
CUDA = torch.cuda.is_available()


def say(*words):
    if dist.get_rank() == 0:
        print(f"{time.time() - START:6.1f}", *words, flush=True)


def sync():
    if CUDA:
        torch.cuda.synchronize()


def slowest(values):
    t = torch.tensor(values, dtype=torch.float64, device="cuda" if CUDA else "cpu")
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.tolist()


def burst(call, calls):
    """ms per call on the device, us per call to enqueue."""
    sync()
    dist.barrier()
    sync()
    if CUDA:
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        a.record()
        t = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - t
        b.record()
        sync()
        ms = a.elapsed_time(b) / calls
    else:
        t = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - t
        ms = host * 1e3 / calls
    return slowest([ms, host * 1e6 / calls])


def host_burst(call, calls):
    """us per call to enqueue ``calls`` calls on an idle device."""
    sync()
    dist.barrier()
    sync()
    t = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - t
    sync()
    return slowest([host * 1e6 / calls])[0]


def turns(arms, measure, rounds, seconds=None):
    found = {name: [] for name in arms}
    end = time.monotonic() + seconds if seconds else None
    for i in range(rounds):
        if end and slowest([float(time.monotonic() > end)])[0]:
            break
        order = list(arms)
        if i % 2:
            order.reverse()
        gc.collect()
        gc.disable()
        for name in order:
            found[name].append(measure(name))
        gc.enable()
    return found


def quart(values):
    v = sorted(values)
    q = statistics.quantiles(v, n=4) if len(v) > 1 else [v[0]] * 3
    return [round(x, 5) for x in q]


def pack(kind, case, found, column, unit, out):
    before, after = ([r if column is None else r[column] for r in found[n]] for n in PACKAGES)
    ratios = [a / b for a, b in zip(after, before, strict=True)]
    row = {
        "kind": kind,
        **case,
        "unit": unit,
        "rounds": len(ratios),
        "before": quart(before),
        "after": quart(after),
        "after_over_before": quart(ratios),
    }
    out["rows"].append(row)
    say(kind, case, unit, "before", row["before"][1], "after", row["after"][1], "ratio", row["after_over_before"])
    if dist.get_rank() == 0:
        with (OUT / "rounds.jsonl").open("a") as f:
            f.write(json.dumps({"kind": kind, **case, "unit": unit, "before": before, "after": after}) + "\n")


def operators(args, out, packages):
    from megatron_flux_old.bench.shapes import MODELS, layer_cases

    tp = dist.get_world_size()
    dtype = torch.bfloat16 if CUDA else torch.float32
    for model in args.models.split(","):
        for direction in ("forward", "dgrad"):
            for c in layer_cases(model, MODELS[model], args.tokens, direction, tp):
                ag = c.op == "all_gather_gemm"
                x = torch.randn(c.m // tp if ag else c.m, c.k, device=DEVICE).to(dtype)
                w = torch.randn(*((c.k, c.n) if c.transposed else (c.n, c.k)), device=DEVICE).to(dtype) * 0.02
                calls = {
                    name: (
                        lambda f=getattr(p.ops, c.op): f(
                            x, w, dist.group.WORLD, transposed=c.transposed, backend=args.backend
                        )
                    )
                    for name, p in packages.items()
                }
                case = {
                    "op": c.op,
                    "model": model,
                    "layer": c.layer,
                    "direction": direction,
                    "m": c.m,
                    "n": c.n,
                    "k": c.k,
                }
                ys = {}
                for name, call in calls.items():
                    for _ in range(3):
                        ys[name] = call()
                sync()
                same = torch.equal(ys["before"], ys["after"])
                same = not slowest([float(not same)])[0]
                ref = packages["after"].ops.__dict__[c.op](
                    x, w, dist.group.WORLD, transposed=c.transposed, backend="reference"
                )
                err = ((ys["after"].float() - ref.float()).norm() / ref.float().norm()).item()
                case |= {"bit_equal": same, "error_to_reference": round(slowest([err])[0], 6)}
                del ys, ref
                found = turns(calls, lambda n: burst(calls[n], args.burst), args.rounds)
                pack("operator", case, found, 0, "ms", out)
                host = turns(calls, lambda n: host_burst(calls[n], 20), args.rounds)
                pack("host", case, host, None, "us", out)
                if CUDA:
                    torch.cuda.empty_cache()


def layers(args, out, packages):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_flux_old.bench import layer_blocks
    from megatron_flux_old.bench.layer_config import Workload
    from megatron_flux_old.train.wgrad_standin import gradient_accumulation_fusion

    from megatron_flux_old.train.cpu_shims import cpu_shims

    shims = cpu_shims()
    shims.__enter__()
    tp = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    for spec in args.layers.split(","):
        model, seq, micro, count = spec.split(":")
        workload = Workload(model=model, seq=int(seq), micro_batch=int(micro), layers=int(count))
        for kind in args.specs.split(","):
            torch.manual_seed(1)
            model_parallel_cuda_manual_seed(1)
            with gradient_accumulation_fusion():
                block = layer_blocks.build(kind, workload, tp, torch.device(DEVICE))
                weights = layer_blocks.prepare_gradients(block)
                g = torch.Generator(device=DEVICE).manual_seed(100 + dist.get_rank())
                shape = (workload.seq // tp, workload.micro_batch, workload.sizes.hidden)
                dtype = layer_blocks.dtype_of(torch.device(DEVICE))
                x = torch.randn(shape, generator=g, device=DEVICE, dtype=dtype).requires_grad_()
                dy = torch.randn(shape, generator=g, device=DEVICE, dtype=dtype) * 1e-2

                def step():
                    x.grad = None
                    y = block(hidden_states=x, attention_mask=None)
                    y.backward(dy)
                    return y.detach(), x.grad

                def active(name):
                    p = packages[name]
                    return p.patched(p.FluxConfig(backend=args.backend))

                seen = {}
                for name in packages:
                    for p in weights.values():
                        p.main_grad.zero_()
                    with active(name):
                        step()
                        for p in weights.values():
                            p.main_grad.zero_()
                        y, dx = step()
                        text = str(packages[name].report())
                    sync()
                    seen[name] = [y.clone(), dx.clone(), *[w.main_grad.clone() for w in list(weights.values())[:8]]]
                    say("report", name, text[:300].replace("\n", " | "))
                same = all(torch.equal(a, b) for a, b in zip(seen["before"], seen["after"], strict=True))
                worst = max(
                    ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)).item()
                    for a, b in zip(seen["before"], seen["after"], strict=True)
                )
                del seen
                case = {
                    "model": model,
                    "seq": workload.seq,
                    "micro_batch": workload.micro_batch,
                    "layers": workload.layers,
                    "spec": kind,
                    "bit_equal": not slowest([float(not same)])[0],
                    "difference": slowest([worst])[0],
                }

                def measure(name):
                    with active(name):
                        step()
                        ms, host = burst(step, 2)
                    return ms / workload.layers, host / workload.layers

                found = turns(dict.fromkeys(packages), measure, args.layer_rounds, args.layer_seconds)
                pack("layer", case, found, 0, "ms", out)
                pack("layer_host", case, found, 1, "us", out)
                del block, weights, x, dy
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()


START = time.time()
parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--tokens", type=int, default=8192)
parser.add_argument("--rounds", type=int, default=31)
parser.add_argument("--burst", type=int, default=6)
parser.add_argument("--layer-rounds", type=int, default=25)
parser.add_argument("--layer-seconds", type=float, default=60)
parser.add_argument("--models", default="gpt3-175b,llama-70b")
parser.add_argument("--layers", default="gpt3-175b:2048:1:2,gpt3-175b:2048:4:2,llama-70b:4096:2:2")
parser.add_argument("--specs", default="te")
parser.add_argument("--parts", default="operators,layers")
parser.add_argument("--backend", default="fused")
args = parser.parse_args()
OUT = args.out
DEVICE = f"cuda:{os.environ['LOCAL_RANK']}" if CUDA else "cpu"
if CUDA:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if CUDA else "gloo", **({"device_id": torch.device(DEVICE)} if CUDA else {}))
OUT.mkdir(parents=True, exist_ok=True)
packages = {name: importlib.import_module(module) for name, module in PACKAGES.items()}
out = {
    "tp": dist.get_world_size(),
    "device": torch.cuda.get_device_name() if CUDA else "cpu",
    "backend": args.backend,
    "versions": {"torch": torch.__version__},
    "arguments": {k: str(v) for k, v in vars(args).items() if k != "out"},
    "environment": {
        k: os.environ.get(k)
        for k in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
    },
    "rows": [],
}
try:
    for part in args.parts.split(","):
        {"operators": operators, "layers": layers}[part](args, out, packages)
finally:
    if dist.get_rank() == 0:
        (OUT / "summary.json").write_text(json.dumps(out, indent=1))
sync()
dist.barrier()
say("done")
dist.destroy_process_group()
