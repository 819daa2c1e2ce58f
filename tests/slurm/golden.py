"""The committed scripts in slurm/: which there are, and ``python -m tests.slurm.golden`` writes them anew."""

from pathlib import Path
from typing import get_args

from megatron_flux.cli.slurm import JobOptions, script
from megatron_flux.slurm.job import Mode

FOLDER = Path(__file__).parents[2] / "slurm"
LINKS = {
    "nvlink": ("nvlink-h100", "gpt3-175b"),
    "pcie": ("pcie-a100", "gpt3-175b"),
    "host": ("host-l40s", "llama2-70b"),  # GPUs of 48 GB are too small for both variants of GPT-3
}
"""Profile and job by the folder's name."""


def expected() -> dict[Path, str]:
    """Every script's text by its file."""
    found = {}
    for link, (profile, job) in LINKS.items():
        for mode in get_args(Mode):
            _, text = script(JobOptions(profile=profile, job=job, mode=mode))
            found[FOLDER / link / f"{job}-{mode}.sbatch"] = text
    return found


if __name__ == "__main__":
    for file, text in expected().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
