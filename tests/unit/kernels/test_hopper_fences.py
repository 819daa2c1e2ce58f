"""No path through a compiled warp-specialised kernel misses a fence between data and flag: see :mod:`tests.ptx`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ptx import Paths

ROOT = Path(__file__).parents[3]
KERNELS = {
    "by copy engine": ("ag_gemm", {"TP": 4}, {"loads": True}),
    "by copy engine, in pieces": ("ag_gemm", {"TP": 8, "KCH": 4, "EARLY": 1, "LATE": 1}, {"loads": True}),
    "pushed": ("ag_gemm", {"TP": 2, "PUSH": 1, "KCH": 2}, {"loads": True, "pushes": True}),
    "summed": ("gemm_rs", {"TP": 2}, {"stores": True}),
}
COMPILE = """
import json, sys
from tests.ptx import missing_fences
from tests.unit.kernels.compile_hopper import build
kernels = json.loads(sys.argv[1])
print(json.dumps({name: missing_fences(build(op, given).asm["ptx"], **kind) for name, (op, given, kind) in
                  kernels.items()}))
"""


def test_no_path_misses_a_fence() -> None:
    # A process of its own: other tests put triton into its interpreter, which compiles nothing.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(KERNELS)],
        capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {name: [] for name in KERNELS}


GUARDED = """
.visible .entry kernel(
	.param .u64 kernel_param_0
)
{
JTI0_0:
	.branchtargets
		$L__BB0_1,
		$L__BB0_3;
	brx.idx 	%r1, JTI0_0;
$L__BB0_1:                              // a loop
	poll %r1;
	@%p1 bra 	$L__BB0_1;
	fence; mov.u32 %r2, %r3;
	bra.uni 	$L__BB0_2;
$L__BB0_3:
	store %r2;
	ret;
$L__BB0_2:
	load %r2;
	@%p2 bra 	$L__BB0_1;
	store %r2;
$L__func_end0:
}
"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("", ""), False),
        (("fence; ", ""), True),
        (("@%p1 bra 	$L__BB0_1", "@%p1 bra 	$L__BB0_2"), True),  # one way round it
        (("@%p2 bra 	$L__BB0_1", "@%p2 bra 	$L__BB0_2"), False),
        (("load %r2", "store %r2"), False),
    ],
)
def test_paths_of_a_kernel(change: tuple[str, str], expected: bool) -> None:
    paths = Paths(GUARDED.replace(*change) if change[0] else GUARDED)
    assert paths.reaches(r"\bpoll\b", r"\bload\b", r"\bfence\b") is expected
    assert paths.count(r"\bstore\b") == 2 + (change[0] == "load %r2")
