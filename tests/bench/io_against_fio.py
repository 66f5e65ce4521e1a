#!/usr/bin/env python3
"""`sluice bench io` against fio's io_uring engine on one drive, in interleaved pairs.

    tests/bench/io_against_fio.py --sluice BINARY --path DIR [--pairs 30] [--size 1GiB] [--backend uring] [--against fio]

With --against NAME the other side is Sluice's own backend of that name instead (threads, uring, sync).

A shared drive drifts by a factor of two within minutes, so rates of different minutes say nothing: each pair
measures one right after the other, in alternating order, and the ratio within the pair is what counts. First each
chooses its best request size (1 or 4 MiB) and depth (4, 16, 32), in a phase of its own. Both use O_DIRECT, files
that have been written before, and buffers on huge pages (fio by GLIBC_TUNABLES=glibc.malloc.hugetlb=1; without
that it runs at about half). Needs fio. A benchmark, no test: it asserts nothing.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import tempfile

PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}
SETTINGS = list(itertools.product((1, 4), (4, 16, 32)))  # MiB, depth


class Sluice:
    def __init__(self, options, folder, backend):
        self.options, self.folder, self.backend = options, folder, backend

    def measure(self, pattern, setting):
        """Bytes per second and processor seconds a GiB."""
        result = os.path.join(self.folder, "sluice.json")
        subprocess.run([self.options.sluice, "bench", "io", "--path", self.folder, "--size", self.options.size,
                        "--pattern", pattern, "--request", f"{setting[0]}MiB", "--depth", str(setting[1]),
                        "--rounds", "1", "--backend", self.backend, "--json", result],
                       check=True, stdout=subprocess.DEVNULL)
        with open(result, encoding="utf-8") as file:
            case = json.load(file)["cases"][0]
        return case["bytes_per_second"], case["cpu_seconds_per_gib"]


class Fio:
    def __init__(self, options, folder):
        self.options, self.file = options, os.path.join(folder, "fio.data")
        self.measure("write", (4, 16))  # lays the file out

    def measure(self, pattern, setting):
        done = subprocess.run(
            ["fio", "--name=pair", "--ioengine=io_uring", "--direct=1", f"--filename={self.file}",
             f"--size={self.options.size.replace('iB', '')}", f"--rw={PATTERNS[pattern]}", "--rwmixread=50",
             f"--bs={setting[0]}M", f"--iodepth={setting[1]}", "--overwrite=1", "--fallocate=none",
             "--thread", "--output-format=json"],
            check=True, capture_output=True, env=dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1"))
        job = json.loads(done.stdout)["jobs"][0]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        seconds = max(job["read"]["runtime"], job["write"]["runtime"]) * 1e-3
        processor = (job["usr_cpu"] + job["sys_cpu"]) * 1e-2 * job["job_runtime"] * 1e-3
        return moved / seconds, processor / (moved / 2**30)


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def lower_bound(ratios):
    """The lower bound of the median, at 95 %, by bootstrap."""
    generator = random.Random(1)
    medians = [quantile(generator.choices(ratios, k=len(ratios)), 0.5) for _ in range(2000)]
    return quantile(medians, 0.05)


def choose(contender, pattern):
    """The setting with the best median of three, over all settings in turn."""
    rates = {setting: [] for setting in SETTINGS}
    for _ in range(3):
        for setting in SETTINGS:
            rates[setting].append(contender.measure(pattern, setting)[0])
    return max(rates, key=lambda setting: quantile(rates[setting], 0.5))


def compare(pattern, ours, theirs, pairs):
    settings = {contender: choose(contender, pattern) for contender in (ours, theirs)}
    rates, processor = {ours: [], theirs: []}, {ours: [], theirs: []}
    for pair in range(pairs):
        order = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
        for contender in order:
            rate, seconds = contender.measure(pattern, settings[contender])
            rates[contender].append(rate)
            processor[contender].append(seconds)
    ratios = [own / other for own, other in zip(rates[ours], rates[theirs])]
    row = [pattern]
    for contender in (ours, theirs):
        row.append(f"{quantile(rates[contender], 0.5) * 1e-9:.2f} "
                   f"[{quantile(rates[contender], 0.1) * 1e-9:.2f}, {quantile(rates[contender], 0.9) * 1e-9:.2f}] "
                   f"({settings[contender][0]} MiB x {settings[contender][1]})")
    row.append(f"{quantile(ratios, 0.5):.2f}, lower bound {lower_bound(ratios):.2f} "
               f"[{quantile(ratios, 0.1):.2f}, {quantile(ratios, 0.9):.2f}]")
    row.append(" / ".join(f"{quantile(processor[contender], 0.5):.4f}" for contender in (ours, theirs)))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--backend", default="uring")
    parser.add_argument("--against", default="fio")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} at the beginning, {os.cpu_count()} processors, {options.pairs} pairs, "
          f"{options.size}, backend {options.backend} against {options.against}")
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        ours = Sluice(options, folder, options.backend)
        theirs = Fio(options, folder) if options.against == "fio" else Sluice(options, folder, options.against)
        print(f"| pattern | Sluice GB/s, median [10 %, 90 %] (setting) | {options.against} GB/s | "
              "ratio within a pair | CPU s/GiB |")
        print("|---|---|---|---|---|")
        for pattern in PATTERNS:
            print("| " + " | ".join(compare(pattern, ours, theirs, options.pairs)) + " |", flush=True)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
