"""The table of traps and cures (cures.json) speaks of lines and tests that there are; cures.py takes the cures out."""

import pathlib

import cures
import pytest


@pytest.mark.parametrize("row", cures.table(), ids=lambda row: f"{row['trap']} {row['file']}")
def test_a_cure_and_its_tests_exist(row):
    text = (cures.PACKAGE / row["file"]).read_text(encoding="utf-8")
    assert text.count(row["cure"]) == 1
    assert row["without"] != row["cure"]
    for test in row["tests"]:
        file, name = test.split("::")
        assert f"def {name}(" in (pathlib.Path(cures.HERE) / file).read_text(encoding="utf-8")
