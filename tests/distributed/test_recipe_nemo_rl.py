"""examples/nemo-rl: its entry reaches the workers that build the model, by NeMo-RL's source."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed import recipes

SOURCE = recipes.source("nemo-rl") / "nemo_rl"
POLICY, GROUPS = "models/policy/lm_policy.py", "distributed/worker_groups.py"
WORKER = "models/policy/workers/megatron_policy_worker.py"
needs_source = pytest.mark.skipif(
    not SOURCE.is_dir(), reason=f"needs NeMo-RL's source in {SOURCE.parent}, which scripts/test.sh fetches from GitHub"
)


def entry() -> dict[str, Any]:
    text = (Path(__file__).parents[2] / "examples" / "nemo-rl" / "flux.yaml").read_text()
    return dict(yaml.safe_load(text)["policy"])


def method(path: str, owner: str, name: str = "__init__") -> ast.FunctionDef:
    classes = [n for n in ast.parse((SOURCE / path).read_text()).body if isinstance(n, ast.ClassDef)]
    (cls,) = (n for n in classes if n.name == owner)
    return next(n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name)


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == name)


@needs_source
def test_the_entry_is_handed_to_the_workers() -> None:
    policy = method(POLICY, "Policy")
    assigned = [n for n in ast.walk(policy) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "env_vars"]
    (of_megatron,) = (n for n in assigned if "megatron_cfg" in ast.unparse(n.value))
    given: dict[str, Any] = {"config": entry()}
    exec(compile(ast.Module([of_megatron], []), POLICY, "exec"), given)
    assert given["env_vars"] == {"MEGATRON_FLUX": "1"}
    groups = list(calls(policy, "RayWorkerGroup"))
    assert groups
    assert all(ast.unparse(k.value) == "env_vars or {}" for n in groups for k in n.keywords if k.arg == "env_vars")
    assert all("env_vars" in {k.arg for k in n.keywords} for n in groups)
    create = ast.unparse(method(GROUPS, "RayWorkerGroup", "_create_workers_from_bundle_indices"))
    assert "worker_env_vars = deepcopy(env_vars)" in create
    assert "runtime_env = {'env_vars': worker_env_vars" in create


@needs_source
def test_the_worker_builds_the_model_behind_its_process_group() -> None:
    """The line that gives flux options stands between them."""
    worker = method(WORKER, "MegatronPolicyWorkerImpl")
    (groups,) = calls(worker, "setup_distributed")
    builds = [n for name in ("handle_model_import", "setup_model_and_optimizer") for n in calls(worker, name)]
    assert len(builds) == 2
    assert all(groups.lineno < n.lineno for n in builds)
