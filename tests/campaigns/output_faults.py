#!/usr/bin/env python3
"""Lets every n-th open, write, fsync, close and rename of all outputs fail once.

    output_faults.py --sluice build/release/tools/sluice --faults build/release/tests/campaigns/liboutput_faults.so --count 0      # 0: all

A case is one call of one command with one fault: ENOSPC, EIO, EINTR, or a write that writes one byte. Either the command ends well and all its files
are right and on the drive, or it ends with an error that names the file, every other file is right, and the failed one is as it was, or for files that grow, whole
up to a row. No temporary file stays, but where a whole file could not be renamed, which the message says. No command ends well, and says nothing,
where a write has failed.
"""

import dataclasses
import errno
import os
import subprocess
import tempfile

import campaign
import run_files

FAULTS = {"ENOSPC": {"errno": errno.ENOSPC}, "EIO": {"errno": errno.EIO}, "EINTR": {"errno": errno.EINTR}, "short": {}}
GROWING = ("--csv", "--json-lines")
STEPS = 2


class Command:
    """A command line, its outputs {option: file in out/}, and what they hold without a fault: {option: bytes}, once it has
    run so. `trace` is the one that it reads, once made: the same in all cases."""

    def __init__(self, name, words, outputs):
        self.name, self.words, self.outputs = name, words, outputs
        self.expected, self.trace = {}, None


def commands(sluice):
    sluice = os.path.abspath(sluice)
    train = {option: file for option, file in run_files.OUTPUTS.items() if option != "--trace"}
    exported = {"--chrome": "chrome.json", "--csv": "all.csv", "--json": "all.json"}

    def with_outputs(words, outputs):
        return [sluice, *words, *(word for option, file in outputs.items() for word in (option, os.path.join("out", file)))]

    one = [("plan", ["plan", "config.json"], {"--json": "plan.json"}),
           ("bench adam", ["bench", "adam", "--parameters", "1000", "--rounds", "1", "--threads", "1", "--quiet"], {"--json": "adam.json"}),
           ("bench io", ["bench", "io", "--path", "storage", "--size", "1MiB", "--request", "256KiB", "--depth", "4", "--rounds", "1"],
            {"--json": "io.json"}),
           ("trace html", ["trace", "html", "old.trace"], {"--output": "page.html"}),
           ("trace export", ["trace", "export", "old.trace"], exported),
           ("train", ["train", "config.json", "--quiet", "--steps", str(STEPS)], train),
           # How often the trace is written depends on time: calls beyond the last one make no fault.
           ("train with trace", ["train", "config.json", "--quiet", "--steps", str(STEPS)], run_files.OUTPUTS)]
    return [Command(name, with_outputs(words, outputs), outputs) for name, words, outputs in one]


def prepare(folder, command, sluice):
    config = dict(run_files.CONFIG, model={"layers": 2, "heads": 2, "embedding": 64, "context": 32})
    run_files.prepare(folder, config)
    if command.name.startswith("trace"):
        old = os.path.join(folder, "old.trace")
        if command.trace is None:
            subprocess.run([os.path.abspath(sluice), "train", "config.json", "--quiet", "--steps", "1", "--trace", old], cwd=folder, check=True,
                           timeout=run_files.TIMEOUT_S)
            with open(old, "rb") as file:
                command.trace = file.read()
        with open(old, "wb") as file:
            file.write(command.trace)
    for name in command.outputs.values():
        with open(os.path.join(folder, "out", name), "wb") as file:
            file.write(run_files.OLD)


def content(folder, name):
    with open(os.path.join(folder, "out", name), "rb") as file:
        return file.read()


def keys_of(value):
    """The names and lengths of a JSON document, without its figures: those of a measurement are new each time."""
    if isinstance(value, dict):
        return {key: keys_of(inner) for key, inner in value.items()}
    return [keys_of(inner) for inner in value] if isinstance(value, list) else type(value).__name__


def is_whole(folder, command, option, sluice):
    """Whether the file is one that a run without a fault leaves. Raises where it is neither that nor the old one."""
    text = content(folder, command.outputs[option])
    if text == run_files.OLD:
        return False
    if command.name.startswith("train"):
        return run_files.state_of(sluice, folder, option) in (STEPS, "whole")
    expected = command.expected[option]
    if command.trace is None:  # a measurement or an estimate
        is_right = keys_of(run_files.json.loads(text)) == keys_of(run_files.json.loads(expected))
    else:
        is_right = text == expected or (option in GROWING and text.endswith(b"\n") and expected.startswith(text))
    if not is_right:
        raise ValueError("other than without a fault")
    return option not in GROWING or text == expected


def kind_of(calls, number):
    """The name of call `number` of a log. "flush": an fsync, and the close behind it, in which a server says what it could not store."""
    call, name = calls[number - 1]
    is_flush = call == "fsync" or (call == "close" and number > 1 and calls[number - 2] == ("fsync", name))
    return "flush" if is_flush else call


def table_of(options):
    """Rows of campaign.FaultRow. Those of a run with a trace are what another run did."""
    table = []
    for command in commands(options.sluice):
        if options.command and command.name != options.command:
            continue
        with tempfile.TemporaryDirectory(prefix="sluice-faults-") as folder:
            prepare(folder, command, options.sluice)
            calls = run_files.counted_calls(command.words, options.faults, folder)
            command.expected = {option: content(folder, name) for option, name in command.outputs.items()}
        table += [campaign.FaultRow(command, number, kind_of(calls, number), name, fault) for fault in FAULTS
                  for number, (call, name) in enumerate(calls, 1) if call == "write" or fault in ("ENOSPC", "EIO")]
    return table


def judge(case, row, done):
    command, call, fault, failed = row.command, row.call, row.fault, []
    try:
        for option in command.outputs:
            whole = is_whole(case.folder, command, option, case.options.sluice)
            failed += [] if whole else [option]
            if not whole and option not in GROWING + ("--trace",) and content(case.folder, command.outputs[option]) != run_files.OLD:
                return "torn", option
    except (ValueError, OSError) as error:
        return "torn", f"{option}: {error}"
    left = [name for name in run_files.leftovers(case.folder) if name not in done.stderr]
    if left:
        return "left behind", ", ".join(left)
    if os.listdir(os.path.join(case.folder, "storage")):
        return "left behind", "files in the storage folder"
    if done.returncode == 0:
        is_told = any(f'{option} "out/{name}"' in done.stderr for option, name in command.outputs.items())  # rows are written again at the end
        is_lost = fault in ("ENOSPC", "EIO") and (call == "flush" or (call == "write" and not is_told))
        return ("silent", ", ".join(failed) or "the bytes may be lost") if failed or is_lost else ("same result", "")
    refused = "nothing" if len(failed) == len(command.outputs) else ", ".join(failed)
    named = [option for option, name in command.outputs.items() if f'{option} "out/{name}"' in done.stderr]
    if not named or any(option not in named for option in failed) and refused != "nothing":
        return "not named", done.stderr
    if fault == "ENOSPC" and done.returncode != 5:
        return "wrong exit code", f"{done.returncode}: {done.stderr}"
    return "named", done.stderr.strip().splitlines()[-1]


def main():
    options = campaign.fault_parser(__doc__, "liboutput_faults.so").parse_args()

    def make_case(case, row):
        prepare(case.folder, row.command, options.sluice)
        log = os.path.join(case.folder, "calls")
        environment = run_files.faults(options.faults, case.folder, at=row.number, log=log, **FAULTS[row.fault])
        try:
            done = subprocess.run(row.command.words, cwd=case.folder, env=environment, capture_output=True, text=True, timeout=run_files.TIMEOUT_S,
                                  check=False)
        except subprocess.TimeoutExpired:
            return campaign.Outcome(row.call, "hang", str(row))
        calls = run_files.calls_of(log)
        if len(calls) < row.number:
            result, note = ("sound" if done.returncode == 0 and "--trace" in row.command.outputs else "not struck"), "this run made fewer calls"
        elif done.returncode < 0:
            result, note = "crash", f"{done.returncode}: {done.stderr}"
        else:
            row = dataclasses.replace(row, call=kind_of(calls, row.number), name=calls[row.number - 1][1])
            result, note = judge(case, row, done)
        return campaign.Outcome(row.call, result, f"{row}: {note.strip()}")

    return campaign.run_faults(options, table_of(options), make_case, "output-faults")


if __name__ == "__main__":
    raise SystemExit(main())
