"""Refused arguments, their errors, and that nothing is trained before."""

from pathlib import Path

import pytest

from megatron_flux.run.__main__ import main
from tests.megatron_lm.conftest import LAYOUT, SCRIPT, Run
from tests.megatron_lm.stand_in import write_tree


def test_arguments_that_do_not_go_with_flux(run_forked: Run) -> None:
    result = run_forked("-m", "megatron_flux.run", SCRIPT, *LAYOUT, "--tp-comm-overlap", "--flux")
    assert result.code == 1
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("megatron_flux.megatron_lm.start.MegatronArgumentsError: flux is on, but --tp-comm-overlap")
    assert "lm loss" not in result.out


def test_a_tree_that_lacks_a_function_is_refused_by_name(run_forked: Run, tmp_path: Path) -> None:
    arguments = write_tree(tmp_path) / "megatron" / "training" / "arguments.py"
    arguments.write_text(arguments.read_text().replace("def validate_args", "def check_args"))
    result = run_forked("-m", "megatron_flux.run", SCRIPT, *LAYOUT, "--flux", folder=tmp_path)
    assert result.code == 1
    assert "megatron.training.arguments.validate_args is missing" in result.err


def test_run_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["nothing.py"])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("megatron-flux: error: 'nothing.py' is not a file")
    assert "usage: python -m megatron_flux.run SCRIPT" in printed


def test_the_script_sees_what_python_would_give_it(run_forked: Run, tree: Path) -> None:
    elsewhere = tree.parent
    words = ("-m", "megatron_flux.run", f"{tree.name}/{SCRIPT}", "--flux")
    line = run_forked(*words, folder=elsewhere).out.splitlines()[0]
    assert line == f"argv {tree.name}/{SCRIPT} path {tree}"
