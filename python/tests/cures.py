#!/usr/bin/env python3
"""usage: python/tests/cures.py [TRAP ...]

Takes the cure of each trap of cures.json out of a copy of the package, runs the trap's tests against it, and expects each of
them to fail. Prints one line per trap, and exits with 1 if a test has passed without its cure. SLUICE_LIBRARY names
libsluice.so. `test_cures.py` sees to it that the cures and the tests of the table exist.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent / "sluice_offload"


def table():
    return json.loads((HERE / "cures.json").read_text(encoding="utf-8"))


def passes_without(row):
    """The tests that pass although the cure is out."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "sluice_offload"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        text = (copy / row["file"]).read_text(encoding="utf-8")
        (copy / row["file"]).write_text(text.replace(row["cure"], row["without"]), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        return [test for test in row["tests"]
                if subprocess.run([*command, test], cwd=HERE, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 0]


def main():
    wanted = sys.argv[1:]
    failed = False
    for row in table():
        if wanted and row["trap"] not in wanted:
            continue
        passed = passes_without(row)
        print(f"{row['trap']:6s} {'PASSES without its cure: ' + ', '.join(passed) if passed else 'fails without its cure'}  {row['what']}",
              flush=True)
        failed |= bool(passed)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
