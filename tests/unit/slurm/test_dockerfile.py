"""The image for jobs: supported versions, and a build that gets all that it copies. No engine builds it here."""

import re
from pathlib import Path

from packaging.version import Version

from megatron_flux.patch.megatron_core import SUPPORTED_MEGATRON_CORE, SUPPORTED_TORCH
from megatron_flux.patch.te_seam import SUPPORTED_TE

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "slurm" / "Dockerfile").read_text().replace("\\\n", " ")


def copied() -> set[str]:
    return {word for words in re.findall(r"^COPY (.*) \S+$", TEXT, re.MULTILINE) for word in words.split()}


def test_the_versions_are_supported() -> None:
    versions = dict(re.findall(r"^ARG ([A-Z_]+)=([\d.]+)$", TEXT, re.MULTILINE))
    assert SUPPORTED_TORCH.contains(versions["TORCH"])
    assert SUPPORTED_MEGATRON_CORE.contains(versions["MEGATRON_CORE"])
    assert SUPPORTED_TE.contains(versions["TRANSFORMER_ENGINE"])
    assert str(Version(versions["CUDA"]).major) == versions["CUDA_MAJOR"]


def test_the_builder_gets_what_is_copied_and_nothing_else() -> None:
    sent = (ROOT / "slurm" / "Dockerfile.dockerignore").read_text().splitlines()
    assert sent[1] == "*"
    assert {line[1:] for line in sent if line.startswith("!")} == copied()
    assert all((ROOT / name).exists() for name in copied())
