"""The table of traps and cures (cures.json) speaks of lines and tests that there are; cures.py takes the cures out."""

import json
import pathlib

import cures
import pytest


def test_every_trap_has_a_row():
    assert {int(trap) for row in cures.table() for trap in row["trap"].split(",")} == set(range(1, 23))


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


def test_what_has_not_run_proves_nothing(monkeypatch):
    row = next(row for row in cures.table() if row["trap"] == "3")
    absent = cures.faults({**row, "tests": ["test_traps.py::test_that_is_not_there"]})
    assert absent == ["test_traps.py::test_that_is_not_there ends with 4 with its cure"]
    assert cures.faults({**row, "tests": []}) == ["has no tests"]
    (broken,) = cures.faults({**row, "without": "                ((("})
    assert broken == f"{row['tests'][0]} ends with 4 without its cure"
    (harmless,) = cures.faults({**row, "without": row["cure"] + "  # as before"})
    assert harmless == f"{row['tests'][0]} PASSES without its cure"
    monkeypatch.setattr(cures.sys, "argv", ["cures.py", "no such trap"])
    assert cures.main() == 2
