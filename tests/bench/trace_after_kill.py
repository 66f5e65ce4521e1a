#!/usr/bin/env python3
"""How much of a run that is killed its trace lacks: `sluice train --trace` killed (kill -9) in the middle of one long step,
again and again, and how long before the kill the last record of the trace ends.

    tests/bench/trace_after_kill.py --sluice BINARY --data TEXT --path DIR [--kills 20]

A benchmark: it asserts nothing.
"""

import argparse
import csv
import os
import random
import statistics
import subprocess
import tempfile
import time

SETTINGS = {"model.layers": 2, "model.heads": 2, "model.embedding": 64, "model.context": 32, "batch.sequences": 2,
            "batch.micro_batches": 65536, "placement.parameters": "nvme", "placement.optimizer": "nvme",
            "storage.block_elements": 4096}


def lacking_ms(options, folder, seconds):
    trace, table, config = (os.path.join(folder, name) for name in ("run.trace", "run.csv", "config.json"))
    with open(config, "w", encoding="utf-8") as file:
        file.write("{}")
    command = [options.sluice, "train", config, "--data", options.data, "--quiet", "--trace", trace]
    for key, value in {**SETTINGS, "storage.paths": f'["{folder}"]'}.items():
        command += ["--set", f"{key}={value}"]
    with subprocess.Popen(command) as process:
        time.sleep(seconds)
        process.kill()
        killed_ns = time.monotonic_ns()
    subprocess.run([options.sluice, "trace", "export", trace, "--csv", table], check=True)
    with open(table, newline="", encoding="utf-8") as file:
        return (killed_ns - max(int(row["end_ns"]) for row in csv.DictReader(file))) * 1e-6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        times = [lacking_ms(options, folder, random.uniform(0.8, 1.6)) for _ in range(options.kills)]
    print(f"{len(times)} kills: the trace ends before the kill by {statistics.median(times):.1f} ms in the median, {max(times):.1f} ms at most")


if __name__ == "__main__":
    main()
