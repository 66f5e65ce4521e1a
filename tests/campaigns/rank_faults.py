#!/usr/bin/env python3
"""Stops or kills one rank of `sluice train` at random instants, in every phase, and looks at what becomes of the run.

    rank_faults.py --sluice build/release/tools/sluice --signal STOP --count 100
    rank_faults.py --sluice build/release/tools/sluice --signal KILL --count 100

The whole run ends by itself, says which rank it has missed or what it has waited for, and leaves no process, no file in /dev/shm and none
in the storage folder. Case N aims at phase N modulo 6; which one was hit, the trace of another rank says, or the files of the run. (Phases
and ways to fail that a rank chooses itself are those of tests/engine/ranks/rank_faults.py.)
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import campaign
import mpi_runs

TIMEOUT_S = 5  # that ranks wait for each other: what a loaded machine may need
STEPS_OF_SAVED_RUNS = 2
ATTEMPTS = 8  # a run may have ended when its signal comes
POLL_S = 0.0005


def prepare(folder, target):
    os.mkdir(os.path.join(folder, "storage"))
    os.mkdir(os.path.join(folder, "out"))
    words = random.Random("text")
    with open(os.path.join(folder, "text.txt"), "w", encoding="utf-8") as file:
        file.write(" ".join(words.choice(("light", "darkness", "earth", "void", "deep", "face", "waters")) for _ in range(9000)))
    # Signals that aim at the update want runs with much of it, and nothing else beside it; those that aim at computation, likewise.
    of_update, of_computation = target == "update", target in ("forward", "backward")
    config = {"model": {"layers": 3, "heads": 2, "embedding": 256 if of_update else 128, "context": 4 if of_update else 32,
                        "vocabulary": 256},
              "data": {"file": "text.txt"}, "batch": {"sequences": 1 if of_update else 24 if of_computation else 2},
              "optimizer": {"overlap": "serial" if of_update else "auto"},
              "memory": {"device": "8MiB", "host": "8MiB"}, "placement": {"parameters": "nvme", "optimizer": "nvme"},
              "storage": {"paths": ["storage"]}, "sharding": {"timeout": TIMEOUT_S, "keep_gathered": "0"},
              "run": {"steps": 1000000, "threads": 1}}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)


class Run:
    """One training, for a signal in `target`: of few steps and with a model that is saved, if that is where it ends."""

    def __init__(self, options, folder, ranks, target):
        is_short = target in ("save", "end")
        prepare(folder, target)
        self.folder, self.sluice = folder, os.path.abspath(options.sluice)
        command = [self.sluice, "train", "config.json", "--quiet", "--trace", os.path.join("out", "trace")]
        if is_short:
            command += ["--steps", str(STEPS_OF_SAVED_RUNS), "--save", os.path.join("out", "model")]
        self.begin_ns = time.monotonic_ns()
        self.mpi = mpi_runs.MpiRun(options.mpirun, ranks, command, folder)

    def models(self):
        """{name: bytes} of the model and of what is to become it."""
        found = {}
        for name in os.listdir(os.path.join(self.folder, "out")):
            with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
                if "model" in name:
                    found[name] = os.stat(os.path.join(self.folder, "out", name)).st_size
        return found

    def is_saving(self):
        models = self.models()
        return "model" in models or any(models.values())

    def records(self, rank):
        """The records of a rank's trace, whole or cut; none where there is no trace yet."""
        exported = os.path.join(self.folder, "exported.json")
        name = "trace" if rank == 0 else f"trace.rank{rank}"
        done = subprocess.run([self.sluice, "trace", "export", os.path.join("out", name), "--json", exported], cwd=self.folder,
                              capture_output=True, check=False, timeout=mpi_runs.PATIENCE_S)
        if done.returncode != 0:
            return []
        with open(exported, encoding="utf-8") as file:
            return json.load(file)["ranks"][0]["records"]


def phase_of(records, instant_ns):
    """The phase that a rank was in; it waits where the others do. A step that has failed has no record of its own."""
    begun = [record for record in records if record["begin_ns"] <= instant_ns]
    steps = [record for record in begun if record["kind"] == "step"]
    if not steps and not any(record["kind"] == "compute" for record in begun):
        return "start"
    last = max(steps, key=lambda record: record["begin_ns"], default={"begin_ns": 0, "end_ns": 0})
    here = [record for record in begun if record["begin_ns"] >= last["begin_ns" if last["end_ns"] > instant_ns else "end_ns"]]
    if any(record["kind"] == "finish" for record in here):
        return "update"
    return "backward" if any(record["kind"] == "compute" and record["detail"] == 1 for record in here) else "forward"


def start_time_s(options):
    """From mpirun's start to the first step, as long as it takes on this machine today."""
    with tempfile.TemporaryDirectory(prefix="sluice-rank-faults-") as folder:
        run = Run(options, folder, 3, "end")
        if not run.mpi.wait() or run.mpi.process.returncode != 0:
            sys.exit(f"a run that nobody disturbs fails:\n{run.mpi.output}")
        return (min(record["begin_ns"] for record in run.records(0) if record["kind"] == "step") - run.begin_ns) * 1e-9


def aim(case, run, phase, victim):
    """Waits for an instant at which the run is likely to be in the phase. Returns the victim's process, or None when it has ended."""
    patience = time.monotonic() + mpi_runs.PATIENCE_S
    process = None

    def wait_until(has_come):
        nonlocal process
        while run.mpi.process.poll() is None and time.monotonic() < patience:
            process = process or run.mpi.process_of(victim)
            if process is not None and has_come():
                return
            time.sleep(POLL_S)

    if phase in ("save", "end"):
        wait_until(run.is_saving if phase == "save" else lambda: "model" in run.models())
        time.sleep(case.random.uniform(0, 0.01 if phase == "save" else 0.1))
    elif phase == "start":
        time.sleep(case.random.uniform(0, case.options.start_s))
        wait_until(lambda: True)
    else:  # the trace gets its name before the first step
        wait_until(lambda: os.path.exists(os.path.join(run.folder, "out", "trace")))
        time.sleep(case.random.uniform(0, 1))
    return process


def strike(process, number):
    """Whether it was there to be struck."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                return False
        os.kill(process, number)
        return True
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_alone(run, victim):
    """Whether the other ranks have come to their end, and not because of the victim."""
    deadline = time.monotonic() + mpi_runs.PATIENCE_S
    while run.mpi.process.poll() is None and time.monotonic() < deadline:
        ranks = run.mpi.ranks()
        if not ranks:
            return False
        if ranks == {victim}:
            time.sleep(2)  # mpirun ends a run that has failed
            return run.mpi.process.poll() is None and run.mpi.process_of(victim) is not None
        time.sleep(0.2)
    return False


def outcome_of(run, number, victim, process):
    """(result, note) of a run whose victim has been struck."""
    if number == signal.SIGSTOP and is_alone(run, victim):
        os.kill(process, signal.SIGCONT)
        if run.mpi.wait() and run.mpi.process.returncode == 0:
            return "same result", "stopped behind its last word: nobody but mpirun waits for it"
    ended = run.mpi.wait()
    text = run.mpi.output
    if not ended:
        return "hang", text[-300:]
    left = run.mpi.left([os.path.join(run.folder, "storage")])
    if left:
        return "leaves", "; ".join(left)
    if re.search(r"on signal (4|6|7|8|11)\b|check failed|terminate called", text):
        return "crash", text[-300:]
    says = (rf"ranks? ([\d, ]*, )?{victim}(,[\d, ]*)? ha(s|ve) not answered", r"[^\n]* has not ended within \d+ s")
    told = next((match.group(0) for words in says for match in [re.search(words, text)] if match), None)
    if told is None and number == signal.SIGKILL and re.search(rf"process rank {victim} with PID \d", text):
        told = f"mpirun: rank {victim} was killed"
    if told is None and number == signal.SIGKILL and re.search(rf"\[\[\d+,\d+\],{victim}\]\s+Exit code:\s+137", text):
        told = f"mpirun: rank {victim} ended with status 137"
    if told is None and number == signal.SIGKILL and run.mpi.process.returncode == 137 and re.search(r"1 process returned\s+a non-zero exit code", text):
        told = "mpirun: a process ended with status 137 before it had joined"
    if told is None or run.mpi.process.returncode == 0:
        return "silent", f"exit code {run.mpi.process.returncode}: {text[-300:]}"
    return "named", told + ("; then mpirun itself did not end" if run.mpi.is_launcher_stuck else "")


def make_case(case):
    number = getattr(signal, "SIG" + case.options.signal)
    target = campaign.PHASES[case.number % len(campaign.PHASES)]
    ranks = case.random.randint(2, 4)
    victim = case.random.randrange(ranks)
    for attempt in range(ATTEMPTS):
        folder = os.path.join(case.folder, str(attempt))
        os.mkdir(folder)
        run = Run(case.options, folder, ranks, target)
        process = aim(case, run, target, victim)
        saved = "model" in run.models()
        instant_ns = time.monotonic_ns()
        if process is not None and strike(process, number):
            break
        run.mpi.wait()
    else:
        return campaign.Outcome(target, "not hit", f"{ATTEMPTS} runs had ended by then")
    result, note = outcome_of(run, number, victim, process)
    phase = "end" if saved else target if target == "save" else phase_of(run.records((victim + 1) % ranks), instant_ns)
    return campaign.Outcome(phase, result, f"{case.options.signal} of rank {victim} of {ranks}: {note}")


def main():
    parser = campaign.parser(__doc__)
    parser.add_argument("--signal", choices=("STOP", "KILL"), required=True, help="what the rank gets")
    parser.add_argument("--mpirun", default=shutil.which("mpirun"), help="default: the one in PATH")
    options = parser.parse_args()
    if options.mpirun is None:
        print("there is no mpirun: skipped")
        sys.exit(77)
    options.start_s = start_time_s(options)
    sys.exit(campaign.run(options, make_case, f"rank_{options.signal.lower()}"))


if __name__ == "__main__":
    main()
