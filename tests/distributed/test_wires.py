"""Wire formats of a layer's calls: that of activations in forward, that of gradients in backward."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from megatron_flux.comm import links
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.chunked import ChunkedBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.tuner import keys, tuner
from megatron_flux.ops.tuner.cache import load
from tests.distributed.megatron_world import flux, gpt_model, loss_and_gradients, megatron
from tests.distributed.pool import on_ranks
from tests.distributed.twins import turns_take

FORWARD = ("all_gather_gemm", "gemm_reduce_scatter", "all_gather")
"""And the gather of x for wgrad; dgrad's calls have their weight transposed."""


@contextlib.contextmanager
def tuner_over_host(cache: Path) -> Iterator[Counter[str]]:
    """Counts what the chunked backends run, as ``chunked_int8 dgrad`` and so on."""
    ran: Counter[str] = Counter()

    def counted(operator: str) -> None:
        stock = getattr(ChunkedBackend, operator)

        def run(self: ChunkedBackend, call: OperatorCall, **options: int | None) -> object:
            ran[f"{self.name} {'dgrad' if call.transposed else operator}"] += 1
            return stock(self, call, **options)

        patch.setattr(ChunkedBackend, operator, run)

    with pytest.MonkeyPatch.context() as patch:
        for operator in FORWARD:
            counted(operator)
        patch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(cache))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(keys, "by_chunks", lambda *_: True)
        turns_take(lambda _, candidate: 1.0 / (candidate + 1), patch)
        try:
            yield ran
        finally:
            links.want(links.Wanted())


@on_ranks("world2")
def test_the_wires_of_forward_and_of_gradients(tmp_path: Path) -> None:
    """One process, one tuner and one file for all: whatever was decided for one wire serves no other."""
    cache = tmp_path / "tuned.json"
    with megatron(tp=dist.get_world_size()), tuner_over_host(cache) as ran:
        model = gpt_model("gpt3", num_layers=1)

        def results(keep: bool | None = False, **given: str) -> tuple[list[torch.Tensor], Counter[str]]:
            for _ in range(100):
                ran.clear()
                turns = registry._tuned.tuner.turns()
                with flux(FluxConfig(strict=True, link="host", keep_gathered=keep, **given)):
                    loss, gradients = loss_and_gradients(model)
                if registry._tuned.tuner.turns() == turns:
                    break
            return [loss, *gradients.values()], ran.copy()

        exact, ran_exact = results(backend="tuned")
        assert {name.split()[0] for name in ran_exact} == {"chunked"}
        for forward, dgrad in (("exact", "int8"), ("int8", "exact"), ("exact", "exact")):
            found, seen = results(backend="tuned", wire=forward, grad_wire=dgrad)
            names = ["chunked" if wire == "exact" else f"chunked_{wire}" for wire in (forward, dgrad)]
            expected = {f"{names[0]} {operator}": ran_exact[f"chunked {operator}"] for operator in FORWARD}
            assert seen == expected | {f"{names[1]} dgrad": ran_exact["chunked dgrad"]}
            assert min(seen.values()) >= 2
            by_name, _ = results(forward=names[0], dgrad=names[1], wgrad=names[0])
            assert all(torch.equal(one, other) for one, other in zip(found, by_name, strict=True))
            kept, seen = results(keep=None, backend="tuned", wire=forward, grad_wire=dgrad)
            assert seen == {name: n for name, n in expected.items() if "all_gather" not in name.split()} | {
                f"{names[1]} dgrad": ran_exact["chunked dgrad"]
            }
            assert all(torch.equal(one, other) for one, other in zip(kept, found, strict=True))
            assert torch.equal(found[0], exact[0]) == (forward == "exact")
            off = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
            assert (max(off) > 0) == ((forward, dgrad) != ("exact", "exact"))
            assert max(off) < 0.04
        # The environment says it as well, and an option is more than the environment.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEGATRON_FLUX_WIRE", "int8")
            _, seen = results(backend="tuned", grad_wire="exact")
            assert {name.split()[0] for name in seen if "dgrad" not in name} == {"chunked_int8"}
            assert [name for name in seen if "dgrad" in name] == ["chunked dgrad"]
        tuner._writer().submit(lambda: None).result()
        dist.barrier()
        kept = load(cache)
        for wire, answers in {"": "chunked", " wire=int8": "chunked_int8"}.items():
            ours = {answer["backend"] for key, answer in kept.items() if f" host{wire} | " in key}
            assert ours == {answers}
