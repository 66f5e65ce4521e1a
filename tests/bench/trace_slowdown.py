#!/usr/bin/env python3
"""What a trace costs a step: `sluice train` with everything on storage, with and without --trace, in interleaved pairs.

    tests/bench/trace_slowdown.py --sluice BINARY --data TEXT --path DIR [--pairs 20] [--steps 12]

Of each run the median over its steps but the first; a shared machine drifts, so the ratios within a pair count. Each pair's
order alternates. A benchmark: it asserts nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

SETTINGS = {"model.layers": 6, "model.heads": 6, "model.embedding": 192, "model.context": 128, "batch.sequences": 8,
            "placement.parameters": "nvme", "placement.optimizer": "nvme", "memory.device": "6MiB", "memory.host": "9MiB"}


def run(options, folder, is_traced):
    result, config = os.path.join(folder, "run.json"), os.path.join(folder, "config.json")
    with open(config, "w", encoding="utf-8") as file:
        file.write("{}")
    command = [options.sluice, "train", config, "--data", options.data, "--quiet", "--steps", str(options.steps), "--json", result]
    for key, value in {**SETTINGS, "storage.paths": json.dumps([folder])}.items():
        command += ["--set", f"{key}={value}"]
    if is_traced:
        command += ["--trace", os.path.join(folder, "run.trace")]
    subprocess.run(command, check=True)
    with open(result, encoding="utf-8") as file:
        return statistics.median(step["time_s"] for step in json.load(file)["steps"][1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        ratios, same = [], []
        for pair in range(options.pairs):
            traced = {}
            for is_traced in (True, False) if pair % 2 else (False, True):
                traced[is_traced] = run(options, folder, is_traced)
            ratios.append(traced[True] / traced[False])
            same.append(run(options, folder, False) / traced[False])
    for name, values in (("traced over untraced", ratios), ("untraced over untraced", same)):
        ordered = sorted(values)
        print(f"{name}: {statistics.median(ordered):.4f} [{ordered[len(ordered) // 4]:.4f}, {ordered[len(ordered) * 3 // 4]:.4f}]")


if __name__ == "__main__":
    main()
