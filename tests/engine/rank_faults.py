#!/usr/bin/env python3
"""One rank fails, in every phase and way: the whole run ends in time, says why, and leaves nothing.

    rank_faults.py PROGRAM MPIRUN

Runs rank_fault_program on three ranks that wait 2 s for each other. SLUICE_TEST_CASES_SCALE above 1 (tools/test.sh
--slow) means all cases; else one of each way and phase. SLUICE_TEST_SEED chooses the rank then.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time

RANKS = 3
TIMEOUT_S = 2
GRACE_S = 5
START_S = 5  # for mpirun, on a machine that is busy
PHASES = ("start", "forward", "backward", "reduce", "update")
ACTIONS = ("kill", "stop", "throw", "differ")


def survivors(mark):
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if mark in file.read() and process != str(os.getpid()):
                    found.append(process)
        except OSError:
            pass
    return found


def run_case(program, mpirun, rank, phase, action):
    name = f"rank {rank} {action} in {phase}"
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        mark = f"SLUICE_FAULT_MARK={folder}".encode()
        environment = dict(os.environ, SLUICE_FAULT_MARK=folder)
        begin = time.monotonic()
        run = subprocess.Popen([mpirun, "-n", str(RANKS), program, str(rank), phase, action, folder],
                               env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output = run.communicate(timeout=START_S + TIMEOUT_S + GRACE_S)[0].decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            run.kill()
            # What mpirun had started, or had forked and not yet, may hold the pipe open.
            for process in survivors(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), 9)
            output = run.communicate()[0].decode("utf-8", "replace")
            problems.append("it did not end in time")
        seconds = time.monotonic() - begin
        if run.returncode == 0:
            problems.append("its exit code is 0")
        time.sleep(0.2)
        left = survivors(mark)
        if left:
            problems.append(f"processes {left} are left")
            for process in left:
                os.kill(int(process), 9)
        if os.listdir(folder):
            problems.append(f"files {os.listdir(folder)} are left")
        # mpirun itself tells of a rank that was killed, and ends the rest: those say whom they were waiting for.
        told = {"kill": rf"told to end while ranks? ({rank}|\d, {rank}|{rank}, \d) ha(s|ve) not answered rank \d in \w+ of \"",
                "stop": rf"rank {rank} has not answered rank \d in \w+ of \"",
                "throw": rf"rank {rank}: the application has thrown",
                "differ": rf"differs between rank 0 and rank ({rank}|1, 2)"}[action]
        if not re.search(told, output):
            problems.append(f"its output lacks /{told}/")
    print(f"{name}: {seconds:.1f} s {'; '.join(problems) or 'ok'}", flush=True)
    if problems:
        print(output)
    return not problems


def main():
    program, mpirun = sys.argv[1:]
    seed = int(os.environ.get("SLUICE_TEST_SEED", "1"))
    is_slow = int(os.environ.get("SLUICE_TEST_CASES_SCALE", "1")) > 1
    cases = [(rank, phase, action) for phase in PHASES for action in ACTIONS for rank in range(RANKS)
             if action != "differ" or phase == "start"]
    if not is_slow:
        wanted = {("start", "differ"), ("forward", "kill"), ("backward", "stop"), ("reduce", "throw"),
                  ("update", "stop")}
        cases = [(rank, phase, action) for rank, phase, action in cases
                 if (phase, action) in wanted and rank == seed % RANKS]
    failed = [case for case in cases if not run_case(program, mpirun, *case)]
    print(f"{len(cases) - len(failed)} of {len(cases)} cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
