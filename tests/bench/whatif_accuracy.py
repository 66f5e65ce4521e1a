#!/usr/bin/env python3
"""How far `sluice trace whatif` is off: traces of emulated steps (sluice bench step), predictions from each for other windows
and for half and double the drive's rate, and the steps that those settings really take.

    tests/bench/whatif_accuracy.py build/release/tools/sluice --path FOLDER

The regime compute-bound computes for twice as long as the drive takes, balanced for as long: so balanced at a rate is
compute-bound at twice the rate with the same computation.
"""

import argparse
import pathlib
import re
import statistics
import subprocess
import tempfile

WINDOWS = (1, 2, 3, 4)


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


class Runs:
    """Traces and mean steps, measured once for each setting. The mean is the trace's own, as in what is predicted from it."""

    def __init__(self, options, folder):
        self.options = options
        self.folder = pathlib.Path(folder)

    def measure(self, policy, regime, megabytes, window):
        name = self.folder / f"{policy}.{regime}.{megabytes}.{window}"
        trace = name.with_suffix(name.suffix + ".trace")
        run(self.options.sluice, "bench", "step", "--regime", regime, "--policy", policy, "--rate", f"{megabytes}MB", "--window", window,
            "--parameters", self.options.parameters, "--units", 8, "--steps", self.options.steps, "--path", self.options.path,
            "--trace", trace)
        return trace, float(re.search(r"mean step ([\d.]+) ms", run(self.options.sluice, "trace", "summary", trace))[1]) / 1e3

    def predict(self, trace, *settings):
        text = run(self.options.sluice, "trace", "whatif", trace, *(part for setting in settings for part in ("--set", setting)))
        error = re.search(r"an error of ([+-][\d.]+) %", text)[1]
        return float(re.search(r"predicted step ([\d.]+) ms", text)[1]) / 1e3, float(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sluice", type=pathlib.Path)
    parser.add_argument("--path", default="/var/tmp")
    parser.add_argument("--rate", type=int, default=200, help="MB/s of the balanced regime")
    parser.add_argument("--parameters", type=int, default=4_000_000)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        runs = Runs(options, folder)
        errors, model_errors = [], []
        print(f"{'policy':<10}{'from':<28}{'setting':<20}{'predicted s':>12}{'measured s':>12}{'off':>9}{'model':>9}")
        for policy in ("deferred", "eager"):
            slow = {w: runs.measure(policy, "balanced", options.rate, w) for w in WINDOWS}
            fast = {w: runs.measure(policy, "compute-bound", 2 * options.rate, w) for w in WINDOWS}
            cases = [(f"balanced, window {w}", slow[w][0], "nvme=2x", fast[w][1]) for w in WINDOWS]
            cases += [(f"compute-bound, window {w}", fast[w][0], "nvme=0.5x", slow[w][1]) for w in WINDOWS]
            for name, of in (("balanced", slow), ("compute-bound", fast)):
                cases += [(f"{name}, window 3", of[3][0], f"prefetch_window={w}", of[w][1]) for w in WINDOWS]
            for name, trace, setting, measured in cases:
                predicted, model_error = runs.predict(trace, setting)
                off = 100 * (predicted / measured - 1)
                errors.append(abs(off))
                model_errors.append(abs(model_error))
                print(f"{policy:<10}{name:<28}{setting:<20}{predicted:>12.3f}{measured:>12.3f}{off:>8.1f}%{model_error:>8.1f}%", flush=True)
        print(f"{len(errors)} predictions: off by {statistics.median(errors):.1f} % in the median, {max(errors):.1f} % at most, "
              f"{sum(error <= 10 for error in errors)} within 10 %; the model alone of the recorded step: {max(model_errors):.1f} % at most")


if __name__ == "__main__":
    main()
