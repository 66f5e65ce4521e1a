#!/usr/bin/env python3
"""Is one build of Sluice as fast as another? Runs both in interleaved pairs and prints ratios.

    tests/bench/build_pairs.py --new build/release/tools/sluice --old OLD/tools/sluice --data text.txt
    tests/bench/build_pairs.py --new NEW --old OLD --only adam --pairs 40

Four workloads: `bench step` (drive-bound, compute-bound and adam-bound steps), `bench adam`, `bench io`, and training with
configs/quickstart.json. Each pair runs both builds, in turn first and second. A ratio is the time of the new build over that of the
old one in the same pair, so below 1 is faster. Printed are the median and the 10th and 90th percentile over the pairs, with the
verdict for the bound: "met" if all of that interval is at most the bound, "missed" if all of it is beyond, otherwise "not decided".
Beside them stand the machine and its load. Exits with 1 when a bound is missed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WARM_UP_STEPS = 5


def run(command, report):
    """The JSON that the command writes."""
    subprocess.run([*command, "--json", report], check=True, stdout=subprocess.DEVNULL)
    with open(report, encoding="utf-8") as file:
        return json.load(file)


def bench_step(sluice, options, report):
    command = [sluice, "bench", "step", "--policy", "deferred", "--steps", "6", "--parameters", "20000000", "--path", options.path]
    for regime in ("drive-bound", "compute-bound", "adam-bound"):
        command += ["--regime", regime]
    return {f"step, {regime['regime']}": regime["policies"][0]["step_s"]["median"]
            for regime in run(command, report)["regimes"]}


def bench_adam(sluice, _options, report):
    document = run([sluice, "bench", "adam", "--parameters", "20000000", "--rounds", "5", "--threads", "1", "--quiet"], report)
    return {f"adam, {row['state']}": 1 / row["parameters_per_s"]["median"] for row in document["results"]}


def bench_io(sluice, options, report):
    document = run([sluice, "bench", "io", "--path", options.path, "--size", "256MiB", "--request", "1MiB", "--depth", "16",
                    "--rounds", "3"], report)
    best = document["best"]
    found = {f"io, {pattern}": 1 / best[pattern]["bytes_per_second"] for pattern in ("read", "write", "mixed")}
    return found | {f"io, {pattern}, processor time": best[pattern]["cpu_seconds_per_gib"] for pattern in ("read", "write")}


def quickstart(sluice, options, report):
    if not options.data:
        sys.exit("build_pairs.py: the quickstart needs --data FILE, any text of 100 KB and more (or leave it out with --only)")
    command = [sluice, "train", os.path.join(ROOT, "configs/quickstart.json"), "--quiet", "--data", options.data, "--steps", "25"]
    for setting in options.settings if sluice == options.new else []:
        command += ["--set", setting]
    steps = run(command, report)["steps"]
    return {"quickstart, a step": statistics.median(step["time_s"] for step in steps[WARM_UP_STEPS:])}


WORKLOADS = {"step": bench_step, "adam": bench_adam, "io": bench_io, "quickstart": quickstart}


def measure(workload, options, pairs):
    ratios = {}
    for pair in range(pairs):
        found = {}
        order = (options.new, options.old) if pair % 2 else (options.old, options.new)
        for sluice in order:
            with tempfile.TemporaryDirectory(prefix="sluice-pairs-") as folder:
                found[sluice] = workload(sluice, options, os.path.join(folder, "report.json"))
        for name, seconds in found[options.new].items():
            ratios.setdefault(name, []).append(seconds / found[options.old][name])
    return ratios


def verdict(low, high, bound):
    if high <= bound:
        return "met"
    return "missed" if low > bound else "not decided"


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    return f"{os.cpu_count()} x {model}; load average {' '.join(f'{load:.2f}' for load in os.getloadavg())}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", required=True, help="the command to be judged")
    parser.add_argument("--old", required=True, help="the command that it is compared with")
    parser.add_argument("--only", action="append", choices=sorted(WORKLOADS), help="a workload (may be repeated; default: all)")
    parser.add_argument("--pairs", type=int, help="of each workload; default: 20, of quickstart 10")
    parser.add_argument("--bound", type=float, default=1.05, help="a ratio beyond it is slower")
    parser.add_argument("--data", help="a text for the quickstart")
    parser.add_argument("--path", default="/var/tmp", help="a folder on the drive")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
                        help="for the new build's quickstart alone, such as run.matmul=openblas")
    options = parser.parse_args()
    print(f"before: {machine()}", flush=True)
    missed = False
    for name in options.only or WORKLOADS:
        pairs = options.pairs or (10 if name == "quickstart" else 20)
        for row, ratios in measure(WORKLOADS[name], options, pairs).items():
            deciles = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
            found = verdict(deciles[0], deciles[-1], options.bound)
            missed |= found == "missed"
            print(f"{row:<32}{statistics.median(ratios):>7.3f}  [{deciles[0]:.3f}, {deciles[-1]:.3f}]  {len(ratios)} pairs  "
                  f"{found} ({options.bound})", flush=True)
    print(f"after: {machine()}")
    sys.exit(missed)


if __name__ == "__main__":
    main()
