#!/usr/bin/env python3
"""An example of the application's own parallelism takes the steps of one process, to a part in a million.

    tests/examples/parallel_test.py PROGRAM MPIEXEC

Runs the program alone, on two ranks and on four, and compares the norm, the clip factor and the loss scale of every step. Most steps
have to be clipped and one has to overflow, or the comparison would say nothing about the norm group.
"""

import re
import subprocess
import sys
import tempfile

LINE = re.compile(r"step +(\d+): norm (\S+), clipped by (\S+), loss scale (\S+?)(, skipped)?$")
STEPS = 12
TOLERANCE = 1e-6


def steps(command):
    with tempfile.TemporaryDirectory() as folder:
        # A launcher that is killed leaves its ranks behind; timeout lets it end them first.
        done = subprocess.run(["timeout", "-k", "5", "90", *command, folder], check=False, capture_output=True, text=True)
    output = done.stdout
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {output}{done.stderr}"
    found = [LINE.match(line) for line in output.splitlines()]
    assert len(found) == STEPS and all(found), output
    return [(int(m[1]), float(m[2]), float(m[3]), float(m[4]), bool(m[5])) for m in found]


def close(one, other):
    return one == other or abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) or one != one and other != other


def main():
    program, mpiexec = sys.argv[1:]
    alone = steps([program])
    clipped = sum(clip < 1 for _, _, clip, _, skipped in alone if not skipped)
    assert clipped >= STEPS * 3 // 4, f"{clipped} of {STEPS} steps are clipped"
    assert [number for number, *_, skipped in alone if skipped] == [5], alone
    assert alone[5][3] == alone[4][3] / 2, "the overflow halves the loss scale"
    for ranks in (2, 4):
        for own, other in zip(alone, steps([mpiexec, "-n", str(ranks), program]), strict=True):
            assert own[3:] == other[3:] and all(map(close, own[:3], other[:3])), f"alone: {own}; on {ranks} ranks: {other}"


if __name__ == "__main__":
    main()
