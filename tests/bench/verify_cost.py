#!/usr/bin/env python3
"""The cost of storage.verify "full" over "off": `sluice train` with everything on storage, in interleaved pairs.

    tests/bench/verify_cost.py --sluice BINARY --data TEXT --path DIR [--pairs 20] [--steps 10]

A model whose step is storage more than computation (10.8 M parameters, two short sequences, the update by itself after
backward). Each run counts with the median over its steps of the optimizer pass's time. A shared machine drifts, so the
ratios within a pair count. A benchmark: it asserts nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

SETTINGS = {"model.layers": 6, "model.heads": 6, "model.embedding": 384, "model.context": 16, "batch.sequences": 2,
            "placement.parameters": "nvme", "placement.optimizer": "nvme", "optimizer.overlap": "serial",
            "optimizer.warmup_steps": 0, "storage.block_elements": 1 << 20, "memory.device": "64MiB"}


def run(options, folder, verify):
    """Seconds of the pass."""
    result = os.path.join(folder, "run.json")
    command = [options.sluice, "train", os.path.join(folder, "config.json"), "--data", options.data, "--quiet",
               "--steps", str(options.steps), "--json", result]
    settings = {**SETTINGS, "storage.verify": verify, "storage.paths": json.dumps([folder])}
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command, check=True)
    with open(result, encoding="utf-8") as file:
        steps = json.load(file)["steps"]
    return statistics.median(step["optimizer_s"] for step in steps[1:])


def spread(values):
    ordered = sorted(values)
    return f"{statistics.median(ordered):.4g} [{ordered[len(ordered) // 10]:.4g}, {ordered[len(ordered) * 9 // 10]:.4g}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} at the beginning, {options.pairs} pairs of {options.steps} steps")
    measured = {"full": [], "off": []}
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
            file.write("{}")
        for pair in range(options.pairs):
            for verify in (("full", "off") if pair % 2 == 0 else ("off", "full")):
                measured[verify].append(run(options, folder, verify))
    full, off = measured["full"], measured["off"]
    print(f"pass, s: full {spread(full)}, off {spread(off)}; within a pair ratio "
          f"{spread([a / b for a, b in zip(full, off)])}, difference {spread([a - b for a, b in zip(full, off)])}")
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
