"""scripts/seams.py says in CI whether a release has moved what flux does anew."""

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "seams.py"


def main(release: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    spec = importlib.util.spec_from_file_location("seams_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(release)])
    return int(module.main())


@pytest.mark.parametrize(
    ("wheel", "code"),
    [
        ("megatron_core-0.19.9-cp312-cp312-linux.whl", 0),  # older than the newest: read when it came out
        ("megatron_core-0.20.0rc1-cp312-cp312-linux.whl", 1),  # known only as a source tree
        ("megatron_core-0.20.3-cp312-cp312-linux.whl", 1),
        ("megatron_core-0.97.0-cp312-cp312-linux.whl", 1),
        ("transformer_engine-2.19.0-py3-none-any.whl", 0),
        ("transformer_engine-2.20.9-py3-none-any.whl", 1),  # newer than the release whose digests are known
        ("of-somebody.whl", 1),
    ],
)
def test_moved_code_fails_unless_the_release_is_older(
    wheel: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / wheel
    with zipfile.ZipFile(release, "w") as archive:
        for name in ("megatron/core/tensor_parallel/layers.py", "transformer_engine/pytorch/module/linear.py"):
            archive.writestr(name, "class RowParallelLinear:\n    def forward(self, moved):\n        pass\n")
    assert main(release, monkeypatch) == code
