"""The example script for users runs as written, on two CPU processes."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_patch_your_script(warm_python: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [warm_python, *torchrun, "-m", "patch_your_script"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    how = {"env": environment, "cwd": ROOT / "examples", "capture_output": True, "text": True}
    done = subprocess.run(words, timeout=120, **how)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d: loss on rank 0 ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.3
    assert "layers that run flux: 2; calls: {'all_gather_gemm/reference': 10, " in done.stdout
