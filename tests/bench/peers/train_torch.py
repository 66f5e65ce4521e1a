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
    "tiny": (2, 2, 64, 2),  # tries the program, and says nothing
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


def peer_words(options, shape, dtype, folder, program):
    """The command that trains the shape with a program of torch_gpt.py's options."""
    layers, heads, width, sequences = SHAPES[shape]
    return [str(word) for word in (
        os.path.join(options.environment, "bin", "python"), HERE / program, "--steps", options.steps, "--threads", options.threads,
        "--data", os.path.join(folder, "text"), "--dtype", dtype, "--layers", layers, "--heads", heads, "--width", width,
        "--context", CONTEXT, "--vocabulary", VOCABULARY, "--batch", sequences)]


def figures_of(run):
    """Returns the figures of the report that a program of a peer has made."""
    middle = {name: statistics.median(run[name][WARM_UP_STEPS:]) for name in ("time_s", "cpu_s", "bytes") if name in run}
    return {"step_s": middle["time_s"], "cpu_s": middle["cpu_s"], "bytes": middle.get("bytes", 0), "peak": run["peak_rss_bytes"],
            "planned": None}


def run_torch(options, shape, dtype, folder):
    command = peer_words(options, shape, dtype, folder, "torch_gpt.py")
    return figures_of(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def run_sluice(options, shape, dtype, folder, placement, memory=None):
    layers, heads, width, sequences = SHAPES[shape]
    config = {
        "model": {"layers": layers, "heads": heads, "embedding": width, "context": CONTEXT, "vocabulary": VOCABULARY,
                  "tied_head": True},
        "data": {"file": os.path.join(folder, "text"), "validation_fraction": 0.001},
        "batch": {"sequences": sequences},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0},
        "precision": {"parameters": dtype, "gradients": dtype},
        "memory": memory or {"device": options.memory, "host": options.memory},
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


def sides_of(options, shape, dtype, folder):
    """Returns the runs of a round by name, as functions of the figures so far. The first one is the peer."""
    sides = {"PyTorch, in memory": lambda figures: run_torch(options, shape, dtype, folder)}
    for name, placement in PLACEMENTS.items():
        sides[name] = lambda figures, placement=placement: run_sluice(options, shape, dtype, folder, placement)
    return sides


def measure(options, shape, dtype, sides, ratio):
    """Prints the rows of a shape. ratio(own, peer): of two runs' seconds."""
    figures = {name: [] for name in sides}
    names = list(sides)
    for turn in range(options.rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            figures[name].append(sides[name](figures))
        print("  " + ", ".join(f"{name} {runs[-1]['step_s']:.3f} s" for name, runs in figures.items()), file=sys.stderr, flush=True)
    states = {run["state"] for runs in figures.values() for run in runs if "state" in run}
    if len(states) != 1:
        sys.exit(f"the runs of {shape}, {dtype}, end in {len(states)} states: {states}")
    for name, runs in figures.items():
        ratios = [ratio(run["step_s"], peer["step_s"]) for run, peer in zip(runs, figures[names[0]])]
        print(f"| {shape}, {dtype} | {name} | {spread([run['step_s'] for run in runs], 3)} | {spread(ratios, 2)} | "
              f"{statistics.median(run['cpu_s'] for run in runs):.2f} | {mib(runs[0]['bytes'])} | "
              f"{mib(max(run['peak'] for run in runs))} | {mib(runs[0]['planned'])} |", flush=True)


def options_of(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["2.7M", "25M"])
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--memory", default="3GiB", help="budget of device and of host")
    return parser


def run(parser, options, ratio_words, ratio, make_sides):
    """make_sides(options, shape, dtype, folder): as sides_of()."""
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than {WARM_UP_STEPS}")
    print(f"{options.rounds} rounds of {options.steps} steps, {options.threads} threads, load {os.getloadavg()[0]:.1f} at the beginning\n")
    print(f"| shape | training | step s, median [quartiles] | {ratio_words}, within a round | CPU s a step | MiB of storage a "
          "step | peak MiB | planned MiB |\n|---|---|---|---|---|---|---|---|")
    random.seed(1)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        with open(os.path.join(folder, "text"), "w", encoding="ascii") as file:
            file.write(" ".join(random.choice(("in", "the", "beginning", "was", "a", "block")) for _ in range(400_000)))
        for shape in options.shapes:
            for dtype in options.dtypes:
                measure(options, shape, dtype, make_sides(options, shape, dtype, folder), ratio)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


def main():
    parser = options_of(__doc__)
    run(parser, parser.parse_args(), "times PyTorch's", lambda own, peer: own / peer, sides_of)


if __name__ == "__main__":
    main()
