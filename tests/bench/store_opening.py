#!/usr/bin/env python3
"""Measures how long a second job on a durable store takes to be refused, and how long a store takes to open after kill -9 of the job that had it.

    store_opening.py --sluice build/release/tools/sluice --path /var/tmp --count 20

Both are times from the start of the process: to its end with the name of the first job, and to the line that says from which step it goes on.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time

CONFIG = {
    "model": {"layers": 2, "heads": 2, "embedding": 64, "context": 32, "vocabulary": 256},
    "data": {"file": "text.txt"},
    "batch": {"sequences": 2, "micro_batches": 1},
    "optimizer": {"learning_rate": 3e-3, "minimum_learning_rate": 3e-3, "warmup_steps": 0},
    "placement": {"parameters": "nvme", "optimizer": "nvme"},
    "storage": {"paths": ["storage"], "state": {"name": "run"}},
    "run": {"seed": 7, "threads": 1, "device": "host", "steps": 1000000},
}
BEGUN = "going on after step"


def start(options, folder):
    """(a job that trains, seconds until it has said where it begins)"""
    begin = time.monotonic()
    job = subprocess.Popen([os.path.abspath(options.sluice), "train", "config.json", "--resume"], cwd=folder, stdout=subprocess.PIPE, text=True)
    for line in job.stdout:
        if BEGUN in line or "beginning anew" in line:
            return job, time.monotonic() - begin
    raise RuntimeError(f"the job ended with {job.wait()}")


def refused_s(options, folder):
    begin = time.monotonic()
    done = subprocess.run([os.path.abspath(options.sluice), "train", "config.json", "--resume"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 2 or "is in use by process" not in done.stderr:
        raise RuntimeError(f"not refused: {done.returncode} {done.stderr}")
    return time.monotonic() - begin


def row(what, seconds):
    ranks = statistics.quantiles(seconds, n=10, method="inclusive")
    print(f"{what}: {statistics.median(seconds):.3f} s [{ranks[0]:.3f}, {ranks[-1]:.3f}], longest {max(seconds):.3f} s of {len(seconds)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--path", default="/var/tmp")
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    refused, opened = [], []
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        os.mkdir(os.path.join(folder, "storage"))
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(CONFIG, file)
        with open(os.path.join(folder, "text.txt"), "w", encoding="ascii") as file:
            file.write(" ".join(random.Random(5).choices("a block lay on storage until its step came".split(), k=4000)))
        job, _ = start(options, folder)
        for _ in range(options.count):
            refused.append(refused_s(options, folder))
            job.kill()
            job.wait()
            job, seconds = start(options, folder)
            opened.append(seconds)
        job.kill()
        job.wait()
    row("second job refused", refused)
    row("opened after kill -9", opened)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
