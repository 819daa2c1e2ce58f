"""The committed scripts in slurm/: which there are, and ``python -m tests.slurm.golden`` writes them anew."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from megatron_flux.cli.slurm import JobOptions, script
from megatron_flux.slurm.job import Mode

FOLDER = Path(__file__).parents[2] / "slurm"
LINKS = {"nvlink": "nvlink-h100", "pcie": "pcie-a100", "host": "host-l40s"}
JOBS = ("gpt3-175b", "llama2-70b")
FITS = [(link, job) for link in LINKS for job in JOBS if (link, job) != ("host", "gpt3-175b")]
"""GPUs of 48 GB are too small for both variants of GPT-3."""


def expected() -> dict[Path, str]:
    """Every script's text by its file."""
    found = {}
    for link, job in FITS:
        for mode in get_args(Mode):
            _, text = script(JobOptions(profile=LINKS[link], job=job, mode=mode))
            found[FOLDER / link / f"{job}-{mode}.sbatch"] = text
    return found


if __name__ == "__main__":
    for file, text in expected().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
