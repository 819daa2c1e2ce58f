"""``bench layer`` on layers of experts over TransformerEngine's own Python, with and without delayed wgrad."""

from pathlib import Path
from typing import Any
from unittest import mock

from megatron_flux.bench.cases import Workload
from megatron_flux.train.presets import EXPERTS
from tests.distributed import te_stand_in, test_bench_fp8
from tests.distributed.megatron_world import splits_on_the_host
from tests.distributed.pool import WorkerPool

pytestmark = te_stand_in.needed

VARIANTS = ("te", "te_again", "flux_te", "no_communication")
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 32, "kv_channels": 32}
SIZES |= {"num_moe_experts": 8, "moe_router_topk": 2}
SMALL = {
    "experts": EXPERTS["qwen3-30b-a3b"].shape.model_copy(update=SIZES),
    "shared": EXPERTS["qwen2-57b-a14b"].shape.model_copy(update=SIZES | {"moe_shared_expert_intermediate_size": 96}),
}
WORKLOADS = tuple(
    Workload(model=model, seq=32, micro_batch=2, layers=2, delay_wgrad=delayed)
    for model, delayed in (("experts", True), ("shared", False))
)


def run(out: Path) -> Any:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as AllToAll

    presets = {name: EXPERTS["mixtral-8x7b"]._replace(shape=shape) for name, shape in SMALL.items()}
    layout = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    with (
        mock.patch.dict(EXPERTS, presets),
        mock.patch.object(AllToAll, "_maybe_dtoh_and_synchronize", splits_on_the_host),
    ):
        return test_bench_fp8.run(out, "", (), VARIANTS, layout=layout, workloads=WORKLOADS)


def test_variants_agree(te_world2: WorkerPool, tmp_path: Path) -> None:
    summary = te_world2.run(run, tmp_path)[0]
    assert summary["skipped"] == []
    ran = [(row["model"], row["delay_wgrad"], row["arm"]) for row in summary["rows"]]
    assert ran == [(work.model, work.delay_wgrad, name) for work in WORKLOADS for name in VARIANTS]
    zero = dict.fromkeys(("y", "dx", "wgrad"), 0.0)
    for row in summary["rows"]:
        agreement, shared = row["agreement"], row["model"] == "shared"
        if row["arm"] == "te_again":
            assert agreement == {"with": "te", **zero, "ok": True}
        if row["arm"] == "flux_te":
            assert agreement["ok"]
            assert max(agreement[name] for name in zero) < 1e-5
        if row["arm"] in ("flux_te", "no_communication"):
            backend = "reference" if row["arm"] == "flux_te" else "no_communication"
            assert row["flux_layers"] == (8 if shared else 4)
            calls = {"all_gather": 4 if shared else 2}
            calls |= dict.fromkeys(("all_gather_gemm", "gemm_reduce_scatter"), row["flux_layers"])
            assert row["flux_calls_per_step"] == {f"{op}/{backend}": n for op, n in calls.items()}
