"""The image for jobs has supported versions. No engine builds it here."""

import re
from pathlib import Path

from packaging.version import Version

from megatron_flux.patch.megatron_core import SUPPORTED_MEGATRON_CORE, SUPPORTED_TORCH
from megatron_flux.patch.te_seam import SUPPORTED_TE

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "slurm" / "Dockerfile").read_text().replace("\\\n", " ")


def test_the_versions_are_supported() -> None:
    versions = dict(re.findall(r"^ARG ([A-Z_]+)=([\d.]+)$", TEXT, re.MULTILINE))
    assert SUPPORTED_TORCH.contains(versions["TORCH"])
    assert SUPPORTED_MEGATRON_CORE.contains(versions["MEGATRON_CORE"])
    assert SUPPORTED_TE.contains(versions["TRANSFORMER_ENGINE"])
    assert str(Version(versions["CUDA"]).major) == versions["CUDA_MAJOR"]
