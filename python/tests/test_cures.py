"""The table of traps and cures (cures.json) speaks of lines and tests that there are; cures.py takes the cures out."""

import json
import pathlib
import re

import cures
import pytest


def test_every_trap_has_a_row():
    assert {int(trap) for row in cures.table() for trap in row["trap"].split(",")} == set(range(1, 44))


@pytest.mark.parametrize("row", cures.table(), ids=lambda row: row["what"])
def test_a_cure_and_its_tests_exist(row):
    if "mutant" in row:
        mutants = json.loads((cures.HERE.parents[1] / "tests/mutation/mutants.json").read_text(encoding="utf-8"))
        (mutant,) = [mutant for mutant in mutants if mutant["name"] == row["mutant"]]
        assert not {"reason", "survives"} & set(mutant)
        return
    for place in cures.places(row):
        assert (cures.PACKAGE / place["file"]).read_text(encoding="utf-8").count(place["cure"]) == 1
        assert place["without"] != place["cure"]
    for test in row["tests"]:
        file, name = test.split("::")
        assert f"def {name}(" in (pathlib.Path(cures.HERE) / file).read_text(encoding="utf-8")


def test_the_page_has_a_row_for_each_test_and_no_other():
    page = (cures.HERE.parents[1] / "docs/results/pytorch.md").read_text(encoding="utf-8")
    section = page.split("\n## Traps\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| .* \| `(test_\w+)` \| .* \|$", section, re.MULTILINE) + re.findall(r"mutant `(\w+)`", section)
    assert sorted(named) == sorted(name for row in cures.table() for name in (
        [row["mutant"]] if "mutant" in row else [test.split("::")[1] for test in row["tests"]]))


@pytest.mark.slow
def test_what_has_not_run_proves_nothing(monkeypatch, tmp_path):
    """With a package of one line and a test of it, which take no torch."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("cured = True\n", encoding="utf-8")
    (tmp_path / "test_it.py").write_text("import sluice_offload\n\n\ndef test_cured():\n    assert sluice_offload.cured\n",
                                         encoding="utf-8")
    monkeypatch.setattr(cures, "HERE", tmp_path)
    monkeypatch.setattr(cures, "PACKAGE", package)
    row = {"trap": "3", "file": "__init__.py", "cure": "True", "without": "False", "tests": ["test_it.py::test_cured"]}
    assert cures.faults(row) == []
    assert cures.faults({**row, "tests": ["test_it.py::test_absent"]}) == ["test_it.py::test_absent ends with 4 with its cure"]
    assert cures.faults({**row, "tests": []}) == ["has no tests"]
    assert cures.faults({**row, "without": "((("}) == ["test_it.py::test_cured ends with 4 without its cure"]
    assert cures.faults({**row, "without": "True  # as before"}) == ["test_it.py::test_cured PASSES without its cure"]
    assert cures.faults({**row, "cure": "a line that has gone"}) == ["__init__.py does not have the cure once"]
    monkeypatch.undo()
    monkeypatch.setattr(cures.sys, "argv", ["cures.py", "no such trap"])
    assert cures.main() == 2
