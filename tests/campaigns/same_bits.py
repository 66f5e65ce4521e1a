#!/usr/bin/env python3
"""Do two builds of Sluice compute the same bits? Trains twelve configurations with each and compares state_sha256.

    same_bits.py --sluice NEW/tools/sluice --against OLD/tools/sluice

The twelve differ in placement, policy, precision, optimizer, batch order, activations and ranks (one to three, by mpirun). A change that is not meant
to change results runs this against the commit before it. Exits with 1 where a hash differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile

MODEL = {"layers": 3, "heads": 2, "embedding": 64, "context": 32, "vocabulary": 256, "tied_head": True}
BASE = {
    "model": MODEL,
    "data": {"file": "text.txt"},
    "batch": {"sequences": 2, "micro_batches": 2},
    "optimizer": {"learning_rate": 3e-3, "minimum_learning_rate": 3e-4, "warmup_steps": 4, "weight_decay": 0.1, "clip_norm": 1.0},
    "storage": {"paths": ["storage"], "block_elements": 4096},
    "memory": {"device": "4MiB", "host": "4MiB"},
    "run": {"steps": 8, "seed": 7, "threads": 2, "device": "host"},
}
NVME = {"placement": {"parameters": "nvme", "optimizer": "nvme"}}
HOST = {"placement": {"parameters": "host", "optimizer": "host"}}
# name, ranks, what differs from BASE
CONFIGS = [
    ("in memory, bf16", 1, HOST),
    ("all on nvme, deferred", 1, NVME | {"optimizer": {"overlap": "deferred"}}),
    ("all on nvme, speculative", 1, NVME | {"optimizer": {"overlap": "speculative"}}),
    ("all on nvme, eager, no clipping", 1, NVME | {"optimizer": {"overlap": "eager", "clip_norm": 0}}),
    ("serial, fp32", 1, NVME | {"optimizer": {"overlap": "serial"}, "precision": {"parameters": "fp32"}}),
    ("fp16, loss scale", 1, {"precision": {"parameters": "fp16", "gradients": "fp16"}}),
    ("lion, untied head", 1, NVME | {"optimizer": {"type": "lion"}, "model": {"tied_head": False}}),
    ("gradients and activations on nvme", 1, {"placement": {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme"}, "activations": "nvme"}),
    ("state on the device", 1, {"placement": {"parameters": "device", "optimizer": "device"}}),
    ("two ranks, stage 3, nvme", 2, NVME | {"sharding": {"stage": 3}}),
    ("two ranks, stage 1, fp32", 2, {"placement": {"parameters": "device", "optimizer": "host"}, "sharding": {"stage": 1}, "precision": {"parameters": "fp32"}}),
    ("three ranks, stage 2", 3, {"sharding": {"stage": 2}}),
]
RANKS_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                     "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}


def merged(base, change):
    made = dict(base)
    for key, value in change.items():
        made[key] = merged(base.get(key, {}), value) if isinstance(value, dict) else value
    return made


def hash_of(sluice, ranks, change, folder, settings=()):
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(merged(BASE, change), file)
    command = [os.path.abspath(sluice), "train", "config.json", "--quiet", "--json", "run.json"]
    for setting in settings:
        command += ["--set", setting]
    if ranks > 1:
        command = ["mpirun", "-n", str(ranks), *command]
    done = subprocess.run(command, cwd=folder, env=dict(os.environ, **RANKS_ENVIRONMENT), capture_output=True, text=True,
                          timeout=300, check=False)
    if done.returncode != 0:
        return f"exit code {done.returncode}: {done.stderr.strip()[:300]}"
    with open(os.path.join(folder, "run.json"), encoding="utf-8") as file:
        return find_hash(json.load(file))


def find_hash(report):
    if isinstance(report, dict):
        for key, value in report.items():
            found = value if key == "state_sha256" else find_hash(value)
            if found:
                return found
    return None


def write_text(path):
    words = random.Random(5).choices("a block lay on storage until its step came and went again with new gradients".split(), k=6000)
    with open(path, "w", encoding="ascii") as file:
        file.write(" ".join(words))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", required=True, help="the command to be judged")
    parser.add_argument("--against", required=True, help="the command whose bits are right")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
                        help="for the judged command alone: a key that the other one does not know, such as run.matmul=openblas")
    options = parser.parse_args()
    differ = 0
    for name, ranks, change in CONFIGS:
        with tempfile.TemporaryDirectory(prefix="sluice-bits-") as folder:
            os.mkdir(os.path.join(folder, "storage"))
            write_text(os.path.join(folder, "text.txt"))
            old = hash_of(options.against, ranks, change, folder)
            new = hash_of(options.sluice, ranks, change, folder, options.settings)
        same = old == new and len(old or "") == 64
        differ += not same
        print(f"{'same' if same else 'DIFFERENT'}  {name}: {new}" + ("" if same else f" instead of {old}"), flush=True)
    print(f"{len(CONFIGS) - differ} of {len(CONFIGS)} the same")
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
