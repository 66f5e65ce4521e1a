#!/usr/bin/env python3
"""A rank of an example that fails says why and ends the others, without waiting for one of them.

    tests/examples/failing_rank_test.py PROGRAM MPIEXEC

PROGRAM is an example within failing_rank.cc. Rank 1 throws in the middle of a step, in which rank 0 never comes to its own
computation. If rank 1 waited for it first, nothing would end.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

TIMED_OUT = 124
LAUNCHES = {"example_experts": 60}  # in backward, where ranks meet in gradients; elsewhere one of the second or fourth step


def main():
    program, mpiexec = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        # A launcher that is killed leaves its ranks behind; timeout lets it end them first.
        done = subprocess.run(["timeout", "-k", "5", "60", mpiexec, "-n", "2", program, folder], check=False, capture_output=True,
                              text=True, env={**os.environ, "FAILING_LAUNCH": str(LAUNCHES.get(pathlib.Path(program).name, 8))})
    assert done.returncode not in (0, TIMED_OUT), f"the ranks ended with {done.returncode}: {done.stdout}{done.stderr}"
    assert "rank 1: this rank has no more to give\n" in done.stderr, done.stderr


if __name__ == "__main__":
    main()
