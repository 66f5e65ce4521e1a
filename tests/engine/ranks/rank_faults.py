#!/usr/bin/env python3
"""One rank fails, in every phase and way: the whole run ends, says why, and leaves nothing.

    rank_faults.py PROGRAM MPIRUN

Runs rank_fault_program on three ranks that wait 2 s for each other. SLUICE_TEST_CASES_SCALE above 1 (tools/test.sh
--slow) means all cases; else one of each way and phase. SLUICE_TEST_SEED chooses the rank then. Instants that no
program can choose are those of tests/campaigns/rank_faults.py.
"""

import os
import re
import sys
import tempfile

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "campaigns"))
import mpi_runs  # noqa: E402

RANKS = 3
PHASES = ("init", "start", "forward", "backward", "reduce", "update", "end")
ACTIONS = ("kill", "stop", "throw", "differ")
EVERY_RANK = {"init": "MPI_Init", "end": "MPI_Finalize"}  # to which all of them come


def words_of(rank, phase, action):
    """The text that the output must have. mpirun itself tells of a killed rank and ends the rest: those name the rank
    that they were waiting for, if that was in an operation."""
    if action == "throw":
        return rf"rank {rank}: the application has thrown"
    if action == "differ":
        return rf"differs between rank 0 and rank ({rank}|1, 2)"
    if phase in EVERY_RANK:
        return rf"process rank {rank} with PID" if action == "kill" else \
            rf"{EVERY_RANK[phase]}, which every rank calls, has not ended within 2 s"
    if action == "kill":
        return rf"told to end while ranks? ({rank}|\d, {rank}|{rank}, \d) ha(s|ve) not answered rank \d in \w+ of \""
    return rf"rank {rank} has not answered rank \d in \w+ of \""


def run_case(program, mpirun, rank, phase, action):
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        storage = os.path.join(folder, "storage")
        os.mkdir(storage)
        run = mpi_runs.MpiRun(mpirun, RANKS, [os.path.abspath(program), str(rank), phase, action, storage], folder)
        if not run.wait():
            problems.append("it did not end")
        if run.process.returncode == 0:
            problems.append("its exit code is 0")
        problems += [f"it leaves {left}" for left in run.left([storage])]
        words = words_of(rank, phase, action)
        if not re.search(words, run.output):
            problems.append(f"its output lacks /{words}/")
    print(f"rank {rank} {action} in {phase}: {'; '.join(problems) or 'ok'}", flush=True)
    if problems:
        print(run.output)
    return not problems


def main():
    program, mpirun = sys.argv[1:]
    seed = int(os.environ.get("SLUICE_TEST_SEED", "1"))
    is_slow = int(os.environ.get("SLUICE_TEST_CASES_SCALE", "1")) > 1
    cases = [(rank, phase, action) for phase in PHASES for action in ACTIONS for rank in range(RANKS)
             if action != "differ" or phase == "start"]
    if not is_slow:
        wanted = {("init", "stop"), ("start", "differ"), ("forward", "kill"), ("backward", "stop"), ("reduce", "throw"),
                  ("update", "stop"), ("end", "stop")}
        cases = [(rank, phase, action) for rank, phase, action in cases
                 if (phase, action) in wanted and rank == seed % RANKS]
    failed = [case for case in cases if not run_case(program, mpirun, *case)]
    print(f"{len(cases) - len(failed)} of {len(cases)} cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
