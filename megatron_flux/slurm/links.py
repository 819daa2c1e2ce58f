"""What flux runs with on a link, by the rules of :mod:`megatron_flux.ops` (``fused``, ``pipelined``, ``tuner``)."""

from __future__ import annotations

from megatron_flux.slurm.job import Resolved


def flux_on(resolved: Resolved) -> str:
    """One sentence for the reader of a script, about the backend that a flux arm uses there."""
    profile, job, run = resolved.profile, resolved.job, resolved.run
    if resolved.mode == "baseline":
        return "stock Megatron"
    if run.backend != "auto":
        untested = ", untested without NVLink" if profile.link == "pcie" and run.backend in ("fused", "tuned") else ""
        return f"backend {run.backend}, asked for by name{untested}"
    stock = "stock's collectives and GEMMs (backend reference)"
    if profile.device == "cpu":
        return f"{stock}: there is no GPU"
    if job.tp == 1:
        return "stock Megatron: tp 1 has no communication to hide"
    if profile.processes_per_node % job.tp:
        return f"{stock}: a tensor-parallel group of {job.tp} spans nodes of {profile.processes_per_node} GPUs"
    if job.tp not in (2, 4, 8):
        return f"{stock}: fused kernels take groups of 2, 4 or 8"
    if profile.link != "nvlink":
        return f"{stock}: no NVLink between a node's GPUs, and fused kernels have not been run over PCIe"
    return "for every call the fastest measured of stock, torch's async-TP and fused kernels (backend tuned)"


def tunes(resolved: Resolved) -> bool:
    """Whether any call of the job is tuned."""
    profile, run = resolved.profile, resolved.run
    if resolved.mode == "baseline" or run.device != "cuda":
        return False
    return run.backend == "tuned" or (run.backend == "auto" and profile.link == "nvlink")
