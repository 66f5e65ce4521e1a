#!/usr/bin/env python3
"""Lets system calls on the files of a durable store and of checkpoints fail, one in each run.

    state_faults.py --sluice build/release/tools/sluice --faults build/release/tests/campaigns/libstate_faults.so --count 0     # 0: all

A case is one command with one fault in one call: EIO, ENOSPC, EINTR, EMFILE, or a transfer of half of the bytes. The calls are open, opendir, read, pread, pwrite,
fsync, fdatasync, ftruncate, fallocate, mkdir, mkdtemp, linkat, symlink, rename and unlink. The commands make a store, open one and commit to it, save
checkpoints, load one, export a store and import it. A command ends with the state of an undisturbed one, or with an error that names the folder of the
files. After an error the same command runs again, without a fault: it has to end with the state of an undisturbed one, whatever the fault left behind.
The state is found by a run that goes on from it. It may have a step to compute only where a checkpoint failed and the command said so.
"""

import errno
import json
import os
import subprocess

import campaign
from same_bits import merged, write_text

FAULTS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR, "EMFILE": errno.EMFILE, "half": 0}
INTERRUPTED = ("read", "pread", "pwrite", "fsync", "fallocate")  # calls that a signal may interrupt, or that may move less
TRANSFERS = ("read", "pread", "pwrite")
OPENINGS = ("open", "opendir")  # calls that need a descriptor
TIMEOUT_S = 120
CONFIG = {
    "model": {"layers": 2, "heads": 2, "embedding": 64, "context": 32, "vocabulary": 256},
    "data": {"file": "text.txt"},
    "batch": {"sequences": 2, "micro_batches": 1},
    "optimizer": {"learning_rate": 3e-3, "minimum_learning_rate": 3e-3, "warmup_steps": 0, "overlap": "deferred"},
    "placement": {"parameters": "nvme", "optimizer": "nvme"},
    "storage": {"block_elements": 65536, "backend": "sync"},
    "run": {"seed": 7, "threads": 1, "device": "host"},
}
STATE = {"storage": {"state": {"name": "run"}}}


class Command:
    """A command, what runs before it, and the folder on whose files its calls fail."""

    def __init__(self, name, folder, steps, before, words, config):
        self.name, self.folder, self.steps, self.before, self.words, self.config = name, folder, steps, before, words, config


def train(steps, *options):
    return ["train", "config.json", "--quiet", "--resume", "--json", "run.json", "--steps", str(steps), *options]


def commands():
    kept = ("--checkpoint", "kept", "--checkpoint-every", "1", "--keep", "2")
    export = ["state", "export", "config.json", "kept"]
    return [Command("create a store", "storage", 2, [], train(2), STATE),
            Command("open a store", "storage", 4, [train(2)], train(4), STATE),
            Command("save", "kept", 3, [], train(3, *kept), {}),
            Command("load", "kept", 4, [train(3, *kept)], train(4, "--checkpoint", "kept"), {}),
            Command("export", "kept", 2, [train(2)], export, STATE),
            Command("import", "storage", 2, [train(2), export, ["state", "remove", "config.json"]], ["state", "import", "config.json", "kept"], STATE)]


def prepare(folder, command):
    for name in ("storage", "kept"):
        os.mkdir(os.path.join(folder, name))
    write_text(os.path.join(folder, "text.txt"))
    config = merged(merged(CONFIG, {"storage": {"paths": [os.path.join(folder, "storage")]}}), command.config)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)


def words_of(options, folder, words):
    """All paths absolute, as the library compares them."""
    return [os.path.abspath(options.sluice), *(os.path.join(folder, "kept") if word == "kept" else word for word in words)]


def run(options, folder, words, environment=None):
    return subprocess.run(words_of(options, folder, words), cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True,
                          timeout=TIMEOUT_S, check=False)


def run_before(options, folder, command):
    prepare(folder, command)
    for words in command.before:
        done = run(options, folder, words)
        if done.returncode != 0:
            raise RuntimeError(f"{command.name}: {words}: {done.stderr}")


def faults(options, folder, command, **settings):
    environment = {"LD_PRELOAD": os.path.abspath(options.faults), "SLUICE_FAULT_FOLDER": os.path.join(folder, command.folder)}
    return environment | {f"SLUICE_FAULT_{name.upper()}": str(value) for name, value in settings.items()}


def state_of(options, folder, command):
    """(step, hash) of the state that the command has left, found by a run over as many steps; the hash is that of its end."""
    if command.name == "export":  # else the run takes the store
        run(options, folder, ["state", "remove", "config.json"])
    words = train(command.steps, *(["--checkpoint", "kept"] if command.folder == "kept" else []))
    done = run(options, folder, words)
    if done.returncode != 0:
        return 0, f"exit {done.returncode}: {done.stderr}"
    with open(os.path.join(folder, "run.json"), encoding="utf-8") as file:
        report = json.load(file)
    return report["resumed_steps"], report["state_sha256"]


def may_strike(call, fault):
    if fault in ("EIO", "ENOSPC"):
        return True
    return call in {"EINTR": INTERRUPTED, "EMFILE": OPENINGS, "half": TRANSFERS}[fault]


def table_of(options):
    """[(row, what the undisturbed command leaves)]"""
    table = []
    for command in commands():
        if options.command and command.name != options.command:
            continue
        with campaign.tempfile.TemporaryDirectory(prefix="sluice-state-faults-") as made:
            folder = os.path.realpath(made)
            run_before(options, folder, command)
            log = os.path.join(folder, "calls")
            done = run(options, folder, command.words, faults(options, folder, command, at=0, log=log))
            if done.returncode != 0:
                raise RuntimeError(f"{command.name}: {done.stderr}")
            expected = state_of(options, folder, command)
            if expected[0] != command.steps:
                raise RuntimeError(f"{command.name}: {expected}")
            with open(log, encoding="utf-8") as file:
                calls = [line.rstrip("\n").split(" ", 1) for line in file]
        table += [(campaign.FaultRow(command, number, call, os.path.basename(path), fault), expected) for fault in FAULTS
                  for number, (call, path) in enumerate(calls, 1) if may_strike(call, fault)]
    return table


def judge(options, folder, row, expected, done):
    command = row.command
    if done.returncode < 0 or done.returncode >= 128:
        return "crash", f"{done.returncode}: {done.stderr}"
    if done.returncode != 0 and os.path.join(folder, command.folder) not in done.stderr:
        return "not named", done.stderr
    if done.returncode != 0 and row.fault == "EMFILE" and "ulimit -n" not in done.stderr:
        return "no remedy", done.stderr
    if done.returncode != 0:
        again = run(options, folder, command.words)
        if "there is a store" in again.stderr and "`sluice state remove`" in again.stderr:  # the last mark could not be made durable
            run(options, folder, ["state", "remove", "config.json"])
            again = run(options, folder, command.words)
        if again.returncode != 0:
            return "not again", f"{done.stderr} THEN {again.stderr}"
    found = state_of(options, folder, command)
    is_said = command.name in ("save", "load") and os.path.join(folder, "kept") in done.stdout + done.stderr  # a checkpoint that fails is a line
    if found[1] != expected[1] or (found[0] != expected[0] and not is_said):
        return "silent", f"{found} is not {expected}: {done.stderr}"
    return ("same result", "") if done.returncode == 0 else ("named", done.stderr.strip().splitlines()[-1])


def main():
    options = campaign.fault_parser(__doc__, "libstate_faults.so").parse_args()

    def make_case(case, entry):
        row, expected = entry
        folder = os.path.realpath(case.folder)
        run_before(options, folder, row.command)
        struck = os.path.join(folder, "struck")
        settings = {"at": row.number, "mark": struck} | ({"errno": FAULTS[row.fault]} if FAULTS[row.fault] else {})
        try:
            done = run(options, folder, row.command.words, faults(options, folder, row.command, **settings))
            if not os.path.exists(struck):
                return campaign.Outcome(row.command.name, "sound", f"{row}: this run made fewer calls")
            result, note = judge(options, folder, row, expected, done)
        except subprocess.TimeoutExpired:
            result, note = "hang", ""
        return campaign.Outcome(row.command.name, result, f"{row}: {note.strip()}")

    return campaign.run_faults(options, table_of(options), make_case, "state-faults")


if __name__ == "__main__":
    raise SystemExit(main())
