#!/usr/bin/env python3
"""usage: python/tests/cures.py [TRAP ...]

Runs the tests of each trap of cures.json against a copy of the package, which have to pass, takes the cure out of the copy,
and expects each of them to fail. Prints one line per trap. Exits with 1 if a test has passed without its cure, has not passed
with it, or has not run, and with 2 for a trap that the table does not have. The library is that of the installed package, or
the one that SLUICE_LIBRARY names. A cure in the engine is one of tests/mutation/mutants.json, which tools/mutate.py takes out;
such a row names it.
`test_cures.py` sees to it that the cures and the tests of the table exist.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from sluice_offload import library

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent / "sluice_offload"
PASSED, FAILED = 0, 1  # pytest's return codes; 2 to 5 say that a test has not run


def table():
    return json.loads((HERE / "cures.json").read_text(encoding="utf-8"))


def places(row):
    """Each place of the package from which the cure is taken: one, or several that cure the same."""
    return row.get("places", [row])


def faults(row):
    """Returns what is wrong with the trap's tests, in words: each has to pass with the cure and to fail without it."""
    if not row["tests"]:
        return ["has no tests"]
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "sluice_offload"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "SLUICE_LIBRARY": library.path()}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]

        def status(test):
            return subprocess.run([*command, test], cwd=HERE, env=environment, stdout=subprocess.DEVNULL, check=False).returncode

        found = [f"{test} ends with {code} with its cure" for test in row["tests"] if (code := status(test)) != PASSED]
        if found:
            return found
        for place in places(row):
            text = (copy / place["file"]).read_text(encoding="utf-8")
            if text.count(place["cure"]) != 1:
                return [f"{place['file']} does not have the cure once"]
            (copy / place["file"]).write_text(text.replace(place["cure"], place["without"]), encoding="utf-8")
        return [f"{test} {'PASSES' if code == PASSED else f'ends with {code}'} without its cure"
                for test in row["tests"] if (code := status(test)) != FAILED]


def main():
    wanted = sys.argv[1:]
    rows = table()
    unknown = set(wanted) - {row["trap"] for row in rows}
    if unknown or not rows:
        print(f"cures.json has no trap {', '.join(sorted(unknown))}; it has {', '.join(sorted({row['trap'] for row in rows}))}", file=sys.stderr)
        return 2
    failed = False
    for row in rows:
        if wanted and row["trap"] not in wanted:
            continue
        if "mutant" in row:
            print(f"{row['trap']:6s} in the engine: tools/mutate.py --only {row['mutant']}  {row['what']}", flush=True)
            continue
        wrong = faults(row)
        print(f"{row['trap']:6s} {'; '.join(wrong) if wrong else 'fails without its cure'}  {row['what']}", flush=True)
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
