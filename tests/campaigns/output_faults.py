#!/usr/bin/env python3
"""Lets every n-th open, write, fsync, close and rename of all outputs fail once.

    output_faults.py --sluice build/release/tools/sluice --faults build/release/tests/campaigns/liboutput_faults.so --count 0      # 0: all

A case is one call of one command with one fault: ENOSPC, EIO, EINTR, or a write that writes one byte. Either the command ends well and all its files
are right and on the drive, or it ends with an error that names the file, every other file is right, and the failed one is as it was, or for files that grow, whole
up to a row. No temporary file stays, but where a whole file could not be renamed, which the message says.
"""

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
    """A command line, its outputs {option: file in out/}, and what they hold without a fault."""

    def __init__(self, name, words, outputs):
        self.name, self.words, self.outputs = name, words, outputs


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
        subprocess.run([os.path.abspath(sluice), "train", "config.json", "--quiet", "--steps", "1", "--trace", "old.trace"], cwd=folder, check=True,
                       timeout=run_files.TIMEOUT_S)
    for name in command.outputs.values():
        with open(os.path.join(folder, "out", name), "wb") as file:
            file.write(run_files.OLD)


def content(folder, name):
    with open(os.path.join(folder, "out", name), "rb") as file:
        return file.read()


def is_whole(folder, command, option, sluice):
    """Whether the file is one that a run without a fault leaves, as far as a file can tell."""
    text = content(folder, command.outputs[option])
    if text == run_files.OLD:
        return False
    if command.name.startswith("train"):
        return run_files.state_of(sluice, folder, option) in (STEPS, "whole")
    if command.outputs[option].endswith(".json"):
        run_files.json.loads(text)
        return True
    return text.endswith(b"</html>\n") if option == "--output" else text.endswith(b"\n")


def table_of(options):
    """Rows of campaign.FaultRow. "flush": an fsync, and the close behind it, in which a server says what it could not store."""
    table = []
    for command in commands(options.sluice):
        if options.command and command.name != options.command:
            continue
        with tempfile.TemporaryDirectory(prefix="sluice-faults-") as folder:
            prepare(folder, command, options.sluice)
            calls = run_files.counted_calls(command.words, options.faults, folder)
        for fault in FAULTS:
            for number, (call, name) in enumerate(calls, 1):
                is_flush = call == "fsync" or (call == "close" and number > 1 and calls[number - 2] == ("fsync", name))
                is_flush = is_flush and "--trace" not in command.outputs  # there, the numbers are another run's
                if call == "write" or fault in ("ENOSPC", "EIO"):
                    table.append(campaign.FaultRow(command, number, "flush" if is_flush else call, name, fault))
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
        return ("silent", ", ".join(failed) or "the bytes may be lost") if failed or call == "flush" else ("same result", "")
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
        environment = run_files.faults(options.faults, case.folder, at=row.number, **FAULTS[row.fault])
        try:
            done = subprocess.run(row.command.words, cwd=case.folder, env=environment, capture_output=True, text=True, timeout=run_files.TIMEOUT_S,
                                  check=False)
        except subprocess.TimeoutExpired:
            return campaign.Outcome(row.call, "hang", str(row))
        if done.returncode < 0:
            result, note = "crash", f"{done.returncode}: {done.stderr}"
        else:
            result, note = judge(case, row, done)
        return campaign.Outcome(row.call, result, f"{row}: {note.strip()}")

    return campaign.run_faults(options, table_of(options), make_case, "output-faults")


if __name__ == "__main__":
    raise SystemExit(main())
