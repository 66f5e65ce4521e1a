#!/usr/bin/env python3
"""Ends runs by a signal at random instants, in every phase, and looks at what is left.

    kill.py --sluice build/release/tools/sluice --faults build/release/tests/campaigns/liboutput_faults.so --signal KILL --count 300
    kill.py ... --signal TERM --count 300

kill -9: every file that was there before is still there, or whole; rows have been written up to the last step; nothing is in the storage
folder; what temporary files are left are named by the next run, which ends with the right bits. SIGTERM: exit code 130, and model,
figures and trace of the steps so far, with the bits of a run of so many steps; before the first step, everything as it was.

Case N aims at phase N modulo 6. In start, forward, backward and update that is by time, and the trace says what was hit; in save and end the signal
comes with one of the calls on the files.
"""

import os
import random
import signal
import statistics
import subprocess
import tempfile
import time

import campaign
import run_files

STEPS_OF_SAVED_RUNS = 3
SILENT = ("--save", "--json", "--csv", "--json-lines")  # without the trace, whose writes are counted by time


class Reference:
    """Facts of runs without a signal: how long their phases take, which calls they make, and the states that they end
    in."""

    def __init__(self, options):
        self.sluice, self.library = options.sluice, options.faults
        self.hashes = {}
        with tempfile.TemporaryDirectory(prefix="sluice-kill-") as folder:
            run_files.prepare(folder)
            self.calls = run_files.counted_calls(run_files.train(self.sluice, STEPS_OF_SAVED_RUNS, SILENT), self.library, folder)
            begin = time.monotonic_ns()
            subprocess.run(run_files.train(self.sluice, 6), cwd=folder, check=True, timeout=run_files.TIMEOUT_S)
            steps = steps_of_trace(self.sluice, folder)
            self.start_s = (min(step["begin"] for step in steps.values()) - begin) * 1e-9
            whole = [step for number, step in sorted(steps.items()) if {"forward", "backward"} <= set(step)][1:]
            self.step_s = statistics.median((step["end"] - step["begin"]) * 1e-9 for step in whole)
            self.forward_share = statistics.median((step["forward"] - step["begin"]) / (step["end"] - step["begin"]) for step in whole)
            self.backward_share = statistics.median((step["backward"] - step["begin"]) / (step["end"] - step["begin"]) for step in whole)
        model = [(number, call) for number, (call, name) in enumerate(self.calls, 1) if name.startswith("model")]
        # Behind the trial of the name: from the file's first call to its rename, and what comes then.
        opened = [number for number, call in model if call.startswith("open")]
        renamed = next(number for number, call in model if call == "rename")
        self.save_calls = range(opened[1], renamed + 1)
        self.end_calls = range(renamed + 1, len(self.calls) + 1)

    def hash_of(self, steps):
        if steps not in self.hashes:
            with tempfile.TemporaryDirectory(prefix="sluice-kill-") as folder:
                run_files.prepare(folder)
                subprocess.run(run_files.train(self.sluice, steps, ("--json",)), cwd=folder, check=True, timeout=run_files.TIMEOUT_S)
                self.hashes[steps] = run_files.json.loads(run_files.read(folder, "--json"))["state_sha256"]
        return self.hashes[steps]


def steps_of_trace(sluice, folder):
    """{step: {"begin", "forward", "backward", "end"}} in monotonic nanoseconds, as far as the trace has them."""
    exported = os.path.join(folder, "trace.json")
    done = subprocess.run([os.path.abspath(sluice), "trace", "export", os.path.join("out", run_files.OUTPUTS["--trace"]), "--json", exported],
                          cwd=folder, capture_output=True, timeout=run_files.TIMEOUT_S, check=False)
    if done.returncode != 0:
        return {}
    with open(exported, encoding="utf-8") as file:
        records = run_files.json.load(file)["ranks"][0]["records"]
    steps = {}
    for record in records:
        if record["kind"] == "step":
            steps.setdefault(record["step"], {}).update(begin=record["begin_ns"], end=record["end_ns"])
    for record in records:
        if record["kind"] == "compute" and record["detail"] in (0, 1) and record["step"] in steps:
            step, name = steps[record["step"]], ("forward", "backward")[record["detail"]]
            step[name] = max(step.get(name, 0), record["end_ns"])
    return steps


def phase_at(reference, sluice, folder, instant_ns):
    """The phase that the run was in. The trace of a killed run lacks the last milliseconds; the earlier steps tell the
    phase there."""
    if run_files.read(folder, "--trace") == run_files.OLD:
        return "start"
    steps = steps_of_trace(sluice, folder)
    begun = [number for number, step in steps.items() if step["begin"] <= instant_ns]
    if not begun:
        return "start"
    here = steps[max(begun)]
    if {"forward", "backward"} <= set(here) and instant_ns < here["end"] and here["backward"] < here["end"]:
        forward, backward, length = (here[name] - here["begin"] for name in ("forward", "backward", "end"))
    else:
        whole = [step for number, step in steps.items() if number < max(steps) and {"forward", "backward"} <= set(step)]
        if whole:
            forward, backward, length = (statistics.median(step[name] - step["begin"] for step in whole) for name in ("forward", "backward", "end"))
        else:
            length = reference.step_s * 1e9
            forward, backward = length * reference.forward_share, length * reference.backward_share
    passed = instant_ns - here["begin"]
    passed -= length if passed > length else 0  # of the next step, whose beginning is missing
    return "forward" if passed < forward else "backward" if passed < backward else "update"


def wait_for_rows(folder, rows, process):
    """Until the CSV file has so many rows."""
    deadline = time.monotonic() + run_files.TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        text = run_files.read(folder, "--csv")
        if text is not None and text != run_files.OLD and text.count(b"\n") > rows:
            return
        time.sleep(0.0005)


def run_until_signal(case, reference, target, number):
    """Starts a run and ends it in `target`. Returns (exit code, stderr, phase), or None for one that hangs."""
    by_call = target in ("save", "end")
    environment = dict(os.environ)
    if by_call:
        call = case.random.choice(reference.save_calls if target == "save" else reference.end_calls)
        environment = run_files.faults(reference.library, case.folder, at=call, signal=int(number))
    command = run_files.train(reference.sluice, STEPS_OF_SAVED_RUNS if by_call else 1000000, SILENT if by_call else tuple(run_files.OUTPUTS))
    process = subprocess.Popen(command, cwd=case.folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if target == "start":
        time.sleep(case.random.uniform(0, 0.7 * reference.start_s))
    elif not by_call:
        wait_for_rows(case.folder, case.random.randint(1, 4), process)
        # Near the phase's beginning: a busy machine wakes this process late.
        low, high = {"forward": (0, reference.forward_share / 2), "backward": (reference.forward_share, reference.backward_share),
                     "update": (reference.backward_share, (1 + reference.backward_share) / 2)}[target]
        time.sleep(case.random.uniform(low, high) * reference.step_s)
    instant_ns = time.monotonic_ns()
    if not by_call:
        process.send_signal(number)
    try:
        _, stderr = process.communicate(timeout=run_files.TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    phase = target if by_call else phase_at(reference, reference.sluice, case.folder, instant_ns)
    return process.returncode, stderr.decode(), phase


def after_kill(case, reference):
    """Checks that a killed run leaves only what it may, and that the next one is all right."""
    left = run_files.leftovers(case.folder)
    done = subprocess.run(run_files.train(reference.sluice, 2), cwd=case.folder, capture_output=True, text=True, timeout=run_files.TIMEOUT_S,
                          check=False)
    if done.returncode != 0:
        return "next run fails", done.stderr
    if run_files.json.loads(run_files.read(case.folder, "--json"))["state_sha256"] != reference.hash_of(2):
        return "silent", "the next run has other bits"
    unnamed = [name for name in left if name not in done.stderr]
    if unnamed:
        return "silent", f"nobody names {unnamed}"
    return ("named", ", ".join(left)) if left else ("nothing left", "")


def after_term(code, stderr, states, case, reference):
    left = run_files.leftovers(case.folder)
    if left:
        return "left behind", ", ".join(left)
    if code == -signal.SIGTERM or "nothing was written" in stderr:
        touched = [option for option, state in states.items() if state not in ("old", "unused")]
        return ("touched", ", ".join(touched)) if touched else ("nothing left", f"exit code {code}")
    if code not in (0, 130):
        return "crash", f"exit code {code}: {stderr}"
    figures = run_files.json.loads(run_files.read(case.folder, "--json"))
    steps = len(figures["steps"])
    if any(states[option] != steps for option in ("--json", "--csv", "--json-lines")) or states["--save"] != "whole":
        return "silent", f"{states}"
    if figures["state_sha256"] != reference.hash_of(steps):
        return "silent", f"other bits after {steps} steps"
    return "saved", f"{steps} steps, exit code {code}"


def make_case_of(options):
    reference = Reference(options)
    number = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM}[options.signal]

    def make_case(case):
        run_files.prepare(case.folder)
        target = campaign.PHASES[case.number % len(campaign.PHASES)]
        ended = run_until_signal(case, reference, target, number)
        if ended is None:
            return campaign.Outcome(target, "hang")
        code, stderr, phase = ended
        if os.listdir(os.path.join(case.folder, "storage")):
            return campaign.Outcome(phase, "left behind", "files in the storage folder")
        try:
            states = {option: run_files.state_of(reference.sluice, case.folder, option) for option in run_files.OUTPUTS}
        except ValueError as error:
            return campaign.Outcome(phase, "torn", str(error))
        if "gone" in states.values():
            return campaign.Outcome(phase, "lost", str(states))
        if number == signal.SIGKILL and code != -signal.SIGKILL:
            return campaign.Outcome(phase, "missed", f"exit code {code}: {stderr}")
        if target in ("save", "end"):
            states["--trace"] = "unused"
        result, note = after_kill(case, reference) if number == signal.SIGKILL else after_term(code, stderr, states, case, reference)
        return campaign.Outcome(phase, result, note)

    return make_case


def main():
    parser = campaign.parser(__doc__)
    parser.add_argument("--faults", required=True, help="liboutput_faults.so of the same build")
    parser.add_argument("--signal", choices=("KILL", "TERM"), required=True)
    options = parser.parse_args()
    return campaign.run(options, make_case_of(options), f"kill-{options.signal}")


if __name__ == "__main__":
    raise SystemExit(main())
