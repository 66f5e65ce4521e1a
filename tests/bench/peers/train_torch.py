#!/usr/bin/env python3
"""End to end: the same GPT-2 trained by PyTorch in memory and by `sluice train`, in interleaved rounds.

    python3 tests/bench/peers/train_torch.py --sluice build/release/tools/sluice --environment DIR --path DIR [--rounds N]

Each round runs PyTorch (torch_gpt.py), Sluice with all state in memory, with parameters in host memory and the optimizer's
state on storage, and with everything on storage: same shapes, batch, AdamW, clipping and numbers of threads. Each round
begins with another of them. A run's step is the median of its steps without the first two. Prints a table in Markdown:
seconds a step with quartiles over the rounds, the ratio to PyTorch within a round, processor seconds and bytes of storage
a step, and peak memory beside what `sluice plan` says. Sluice's runs of one shape must end in the same state: a bit that
differs ends the script.

--environment is a Python environment with torch. Run by hand, on an idle machine; asserts nothing of times.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
WARM_UP_STEPS = 2
SHAPES = {  # layers, heads, width, sequences in a batch
    "2.7M": (6, 6, 192, 8),
    "25M": (8, 8, 512, 8),
    "114M": (16, 12, 768, 4),
}
CONTEXT, VOCABULARY = 128, 256
PLACEMENTS = {
    "Sluice, all in memory": {"parameters": "device", "optimizer": "host"},
    "Sluice, parameters in RAM": {"parameters": "host", "optimizer": "nvme"},
    "Sluice, all on storage": {"parameters": "nvme", "optimizer": "nvme"},
}


def run_torch(options, shape, dtype, folder):
    layers, heads, width, sequences = SHAPES[shape]
    command = [os.path.join(options.environment, "bin", "python"), HERE / "torch_gpt.py", "--steps", options.steps,
               "--threads", options.threads, "--data", os.path.join(folder, "text"), "--dtype", dtype, "--layers", layers,
               "--heads", heads, "--width", width, "--context", CONTEXT, "--vocabulary", VOCABULARY, "--batch", sequences]
    run = json.loads(subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE).stdout)
    return {"step_s": statistics.median(run["time_s"][WARM_UP_STEPS:]), "cpu_s": statistics.median(run["cpu_s"][WARM_UP_STEPS:]),
            "bytes": 0, "peak": run["peak_rss_bytes"], "planned": None, "parameters": run["parameters"]}


def run_sluice(options, shape, dtype, folder, placement):
    layers, heads, width, sequences = SHAPES[shape]
    config = {
        "model": {"layers": layers, "heads": heads, "embedding": width, "context": CONTEXT, "vocabulary": VOCABULARY,
                  "tied_head": True},
        "data": {"file": os.path.join(folder, "text"), "validation_fraction": 0.001},
        "batch": {"sequences": sequences},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0},
        "precision": {"parameters": dtype, "gradients": dtype},
        "memory": {"device": options.memory, "host": options.memory},
        "placement": placement,
        "storage": {"paths": [folder]},
        "run": {"steps": options.steps, "seed": 1, "threads": options.threads, "device": "host"},
    }
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    report = os.path.join(folder, "run.json")
    begin = os.times()
    subprocess.run([options.sluice, "train", file.name, "--quiet", "--json", report], check=True)
    end = os.times()
    with open(report, encoding="utf-8") as file:
        run = json.load(file)
    steps = run["steps"][WARM_UP_STEPS:]
    moved = sum(step["nvme_read_bytes"] + step["nvme_write_bytes"] for step in steps) / len(steps)
    # The whole process, with its start and the hash at the end: an upper bound of what the steps take.
    cpu_s = (end.children_user + end.children_system - begin.children_user - begin.children_system) / len(run["steps"])
    planned = run["device_pool_bytes"] + run["host_pool_bytes"] + run["activation_bytes"] + (64 << 20)
    return {"step_s": statistics.median(step["time_s"] for step in steps), "cpu_s": cpu_s, "bytes": moved,
            "peak": run["peak_rss_bytes"], "planned": planned, "state": run["state_sha256"]}


def spread(values, digits):
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def mib(count):
    return "" if count is None else f"{count / (1 << 20):.0f}"


def measure(options, shape, dtype, folder):
    sides = {"PyTorch, in memory": lambda: run_torch(options, shape, dtype, folder)}
    for name, placement in PLACEMENTS.items():
        sides[name] = lambda placement=placement: run_sluice(options, shape, dtype, folder, placement)
    figures = {name: [] for name in sides}
    names = list(sides)
    for turn in range(options.rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            figures[name].append(sides[name]())
        print("  " + ", ".join(f"{name} {runs[-1]['step_s']:.3f} s" for name, runs in figures.items()), file=sys.stderr, flush=True)
    states = {run["state"] for runs in figures.values() for run in runs if "state" in run}
    if len(states) != 1:
        sys.exit(f"the runs of {shape}, {dtype}, end in {len(states)} states: {states}")
    peers = figures["PyTorch, in memory"]
    for name, runs in figures.items():
        ratios = [run["step_s"] / peer["step_s"] for run, peer in zip(runs, peers)]
        print(f"| {shape}, {dtype} | {name} | {spread([run['step_s'] for run in runs], 3)} | {spread(ratios, 2)} | "
              f"{statistics.median(run['cpu_s'] for run in runs):.2f} | {mib(runs[0]['bytes'])} | "
              f"{mib(max(run['peak'] for run in runs))} | {mib(runs[0]['planned'])} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["2.7M", "25M"])
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--memory", default="3GiB", help="budget of device and of host")
    options = parser.parse_args()
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than {WARM_UP_STEPS}")
    print(f"{options.rounds} rounds of {options.steps} steps, {options.threads} threads, load {os.getloadavg()[0]:.1f} at the beginning\n")
    print("| shape | training | step s, median [quartiles] | times PyTorch's, within a round | CPU s a step | MiB of storage a "
          "step | peak MiB | planned MiB |\n|---|---|---|---|---|---|---|---|")
    random.seed(1)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        with open(os.path.join(folder, "text"), "w", encoding="ascii") as file:
            file.write(" ".join(random.choice(("in", "the", "beginning", "was", "a", "block")) for _ in range(400_000)))
        for shape in options.shapes:
            for dtype in options.dtypes:
                measure(options, shape, dtype, folder)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
