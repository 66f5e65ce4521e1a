#!/usr/bin/env python3
"""The cost of a trace per step: `sluice train` with everything on storage, with and without --trace.

    tests/bench/trace_slowdown.py --sluice BINARY --cost BINARY --data TEXT --path DIR [--pairs 20] [--steps 12]

Two answers. By counting: the records of a step, from the trace, times what one costs (trace_cost, in turn with the runs), and
the processor time of the thread that writes them, from the end of the trace; all of it as if nothing else ran beside it, so it is
the most that a step can be slowed down. By the clock: steps traced over steps untraced in interleaved pairs, beside
untraced over untraced. Noise of a shared machine is a hundred times what is counted, so the clock can only contradict.
A benchmark: it asserts nothing.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile

SETTINGS = {"model.layers": 6, "model.heads": 6, "model.embedding": 192, "model.context": 128, "batch.sequences": 8,
            "placement.parameters": "nvme", "placement.optimizer": "nvme", "memory.device": "6MiB", "memory.host": "9MiB"}


def run(options, folder, trace):
    """Median seconds of a step, the first one left out."""
    result, config = os.path.join(folder, "run.json"), os.path.join(folder, "config.json")
    with open(config, "w", encoding="utf-8") as file:
        file.write("{}")
    command = [options.sluice, "train", config, "--data", options.data, "--quiet", "--steps", str(options.steps), "--json", result]
    for key, value in {**SETTINGS, "storage.paths": json.dumps([folder])}.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command + (["--trace", trace] if trace else []), check=True)
    with open(result, encoding="utf-8") as file:
        return statistics.median(step["time_s"] for step in json.load(file)["steps"][1:])


def counted(options, folder, trace):
    """Figures of one traced run: records per step, and seconds of the writing thread per second of the run."""
    out = os.path.join(folder, "trace.json")
    subprocess.run([options.sluice, "trace", "export", trace, "--json", out], check=True)
    with open(out, encoding="utf-8") as file:
        rank = json.load(file)["ranks"][0]
    begin, end = rank["steps"][1]["begin_ns"], rank["steps"][-1]["end_ns"]
    inside = sum(begin <= record["end_ns"] < end for record in rank["records"])
    whole_s = (max(record["end_ns"] for record in rank["records"]) - min(record["begin_ns"] for record in rank["records"])) * 1e-9
    with open(trace, "rb") as file:
        drainer_ns = int(re.findall(rb'"drainer_ns": (\d+)', file.read())[-1])
    return inside / (len(rank["steps"]) - 1), drainer_ns * 1e-9 / whole_s


def record_ns(options, folder):
    text = subprocess.run([options.cost, os.path.join(folder, "cost.trace"), "1", "0.1"], check=True, capture_output=True, text=True).stdout
    return float(re.search(r"(?:tsc|clock_gettime)\s+([\d.]+) ns a record", text)[1])


def spread(values):
    ordered = sorted(values)
    return f"{statistics.median(ordered):.4g} [{ordered[len(ordered) // 4]:.4g}, {ordered[len(ordered) * 3 // 4]:.4g}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--sluice", "--cost", "--data", "--path"):
        parser.add_argument(name, required=True)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    columns = {name: [] for name in ("records a step", "ns a record", "recording, % of a step", "writing, % of a step",
                                     "both, % of a step", "traced over untraced", "untraced over untraced")}
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        trace = os.path.join(folder, "run.trace")
        for pair in range(options.pairs):
            seconds = {}
            for is_traced in (True, False) if pair % 2 else (False, True):
                seconds[is_traced] = run(options, folder, trace if is_traced else None)
            records, writing = counted(options, folder, trace)
            cost_ns = record_ns(options, folder)
            recording = 100 * records * cost_ns * 1e-9 / seconds[True]
            row = (records, cost_ns, recording, 100 * writing, recording + 100 * writing, seconds[True] / seconds[False],
                   run(options, folder, None) / seconds[False])
            for name, value in zip(columns, row):
                columns[name].append(value)
    print(f"load {os.getloadavg()[0]:.1f}, {options.pairs} pairs of {options.steps} steps; medians and quartiles")
    for name, values in columns.items():
        print(f"{name:<26}{spread(values)}")


if __name__ == "__main__":
    main()
