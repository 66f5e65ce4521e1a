#!/usr/bin/env python3
"""Kills runs over a durable store at random instants and goes on, often under another config: the bits are those of an
undisturbed run.

    durable_kills.py --sluice build/release/tools/sluice --shim build/release/tests/campaigns/libkill_shim.so --mpirun mpirun --count 100

Each case draws placement, policy, precision, ranks (1 to 4), ZeRO stage and commit_every. The run is killed with SIGKILL one to five times, and goes
on each time with --resume=required (the first time --resume) under a placement and policy drawn anew. state_sha256 at the end has to be that of an
uninterrupted run, and so have the losses, loss scales and skips of all steps. The hash covers parameters, masters, moments and updates. Both stores are
exported, and the manifests of the two checkpoints have to be equal: the checksums of all values, the loss scale with its hysteresis and its count of good
steps, and the application's texts of all ranks.

With --shim the runs use the backends "sync" and "threads", and each kill is counted by what a process was doing: writing a commit record, flushing, or
something else. A third of the kills is aimed: a process dies inside a record's write, which it has half done, or inside a flush.
"""

import json
import os
import signal
import struct
import subprocess
import time

import campaign
import mpi_runs
from same_bits import merged, write_text

STEPS = 14
MODEL = {"layers": 2, "heads": 2, "embedding": 64, "context": 32, "vocabulary": 256, "tied_head": True}
BASE = {
    "model": MODEL,
    "data": {"file": "text.txt"},
    "batch": {"sequences": 2, "micro_batches": 2, "order": "horizontal"},
    "optimizer": {"learning_rate": 3e-3, "minimum_learning_rate": 3e-4, "warmup_steps": 4, "weight_decay": 0.1, "clip_norm": 0},
    "storage": {"paths": ["a", "b"], "block_elements": 4096},
    "memory": {"device": "4MiB", "host": "5MiB"},
    "run": {"steps": STEPS, "seed": 7, "threads": 1, "device": "host"},
}
PLACEMENTS = [("nvme", "nvme"), ("host", "host"), ("nvme", "host"), ("host", "nvme"), ("device", "host"), ("device", "nvme"), ("device", "device")]


def changes_of(case, ranks, stage):
    """Settings that may differ from one life of the run to the next."""
    placements = PLACEMENTS if ranks == 1 else [("nvme", "nvme"), ("host", "host"), ("nvme", "host")] if stage == 3 else [("auto", "nvme"), ("auto", "host")]
    parameters, optimizer = case.random.choice(placements)
    return {"placement": {"parameters": parameters, "optimizer": optimizer},
            "optimizer": {"overlap": case.random.choice(["auto", "serial", "deferred", "eager", "speculative"])},
            "storage": {"paths": case.random.choice([["a", "b"], ["b", "a"]]), "verify": case.random.choice(["full", "sample", "off"]),
                        "state": {"name": "run", "commit_every": case.random.choice([1, 1, 2, 5])}}}


def command(case, config, ranks, name, *options):
    with open(os.path.join(case.folder, name), "w", encoding="utf-8") as file:
        json.dump(config, file)
    made = [os.path.abspath(case.options.sluice), "train", name, "--quiet", *options]
    return [case.options.mpirun, "-n", str(ranks), *made] if ranks > 1 else made


def manifest_of(case, name, store):
    """The manifest of the store's last commit as a checkpoint; or why there is none, as a text."""
    kept = f"{store}.kept"
    done = subprocess.run([os.path.abspath(case.options.sluice), "state", "export", name, kept, "--set", f"storage.state.name={store}"], cwd=case.folder,
                          capture_output=True, text=True, timeout=mpi_runs.PATIENCE_S, check=False)
    if done.returncode != 0:
        return done.stderr
    with open(os.path.join(case.folder, kept, "latest", "sluice_state.json"), encoding="utf-8") as file:
        return json.load(file)


def phases_of(case):
    """The shims' words, one entry per process: (flushes under way, records being written, whether the process has killed itself)."""
    found = []
    for name in os.listdir(case.folder):
        if name.startswith("phase."):
            with open(os.path.join(case.folder, name), "rb") as file:
                found.append(struct.unpack("<3I", file.read(12)))
    return found


def phase_of_kill(case):
    phases = phases_of(case)
    if not case.options.shim:
        return "not looked at"
    return "in a record" if any(records for _, records, _ in phases) else "in a flush" if any(flushes for flushes, _, _ in phases) else "elsewhere"


def run(case, words, patience_s, environment=None):
    """(exit code or None when it had to be killed or killed itself, what it said)"""
    log = open(os.path.join(case.folder, "log"), "w+", encoding="utf-8")
    for name in os.listdir(case.folder):
        if name.startswith("phase."):
            os.remove(os.path.join(case.folder, name))
    process = subprocess.Popen(words, cwd=case.folder, env={**os.environ, **mpi_runs.MPI_ENVIRONMENT, **(environment or {})}, stdout=log,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(patience_s)
        if any(has_killed for _, _, has_killed in phases_of(case)):
            kill_all(case.folder)  # the other ranks
            code = None
    except subprocess.TimeoutExpired:
        code = None
        kill_all(case.folder)
        process.kill()
        process.wait()
    log.seek(0)
    return code, log.read()


def kill_all(folder):
    """Every sluice process of the case, at once: mpirun would give the ranks time."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{process}/cwd") == folder and b"train" in mpi_runs.read_bytes(f"/proc/{process}/cmdline"):
                os.kill(int(process), signal.SIGKILL)
        except OSError:
            pass
    for _ in range(100):
        alive = [process for process in filter(str.isdigit, os.listdir("/proc")) if cwd_of(process) == folder]
        if not alive:
            return
        time.sleep(0.02)


def cwd_of(process):
    try:
        return os.readlink(f"/proc/{process}/cwd")
    except OSError:
        return None


def losses_of(case, name):
    with open(os.path.join(case.folder, name), encoding="utf-8") as file:
        report = json.load(file)
    return report["state_sha256"], {step["step"]: (step["loss"], step["loss_scale"], step["skipped"]) for step in report["steps"]}


def make_case(case):
    case.folder = os.path.realpath(case.folder)
    write_text(os.path.join(case.folder, "text.txt"))
    for path in ("a", "b"):
        os.mkdir(os.path.join(case.folder, path))
    ranks = case.random.choice([1, 1, 1, 2, 3, 4]) if case.options.mpirun else 1
    stage = case.random.choice([1, 2, 3])
    precision = case.random.choice(["bf16", "fp32", "fp16"])
    fixed = merged(BASE, {"precision": {"parameters": precision}, "sharding": {"stage": stage}})
    if precision == "fp16":
        fixed = merged(fixed, {"precision": {"loss_scale": {"static": 0, "initial_power": 18, "hysteresis": 1}}})
    if precision == "fp32":
        fixed = merged(fixed, {"memory": {"device": "8MiB", "host": "10MiB"}})

    def lives(config):  # eager goes without clipping and skipping alone
        return merged(config, {"optimizer": {"overlap": "auto"}}) if precision == "fp16" and config["optimizer"]["overlap"] == "eager" else config

    begin = time.monotonic()
    undisturbed = merged(fixed, {"optimizer": {"overlap": "serial"}, "storage": {"state": {"name": "whole"}}})
    code, said = run(case, command(case, undisturbed, ranks, "whole.json", "--json", "whole.out"), mpi_runs.PATIENCE_S)
    length_s = time.monotonic() - begin
    if code != 0:
        return campaign.Outcome("start", "broken case", said)
    expected, losses = losses_of(case, "whole.out")
    kills = case.random.randint(1, 5)
    phases = []
    for life in range(kills + 1):
        config = lives(merged(fixed, changes_of(case, ranks, stage)))
        environment = {}
        if case.options.shim:
            config = merged(config, {"storage": {"backend": case.random.choice(["sync", "threads"])}})
            environment = {"LD_PRELOAD": os.path.abspath(case.options.shim), "SLUICE_KILL_FOLDER": case.folder}
            if life < kills and case.random.randrange(3) == 0:
                kind = case.random.choice(["flush", "record"])
                environment |= {"SLUICE_KILL_IN": kind, "SLUICE_KILL_AT": str(case.random.randrange(20 if kind == "flush" else 10))}
        # The first lives are given part of the run's length; the last one all the time that it takes.
        patience_s = case.random.uniform(0.15, 1.0) * length_s if life < kills else mpi_runs.PATIENCE_S
        code, said = run(case, command(case, config, ranks, f"life{life}.json", "--resume", "--json", "run.out"), patience_s, environment)
        if code is None:
            if life == kills:
                return campaign.Outcome("hang", "hang", said)
            phases.append(phase_of_kill(case))
            continue
        if code != 0:
            return campaign.Outcome("resume", "crash", f"exit {code}, life {life}: {said}")
        break
    found, seen = losses_of(case, "run.out")
    counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in sorted(set(phases)))
    what = f"{ranks} ranks, stage {stage}, {precision}, killed {len(phases)} times ({counts})"
    if found != expected:
        return campaign.Outcome("end", "silent", f"{what}: {found} is not {expected}")
    wrong = [step for step, loss in seen.items() if losses[step] != loss]
    if wrong:
        return campaign.Outcome("end", "silent", f"{what}: losses or loss scales of steps {wrong} differ")
    whole, resumed = manifest_of(case, "whole.json", "whole"), manifest_of(case, "whole.json", "run")
    if isinstance(whole, str) or whole != resumed:
        return campaign.Outcome("end", "silent", f"{what}: manifests differ: {whole} and {resumed}")
    return campaign.Outcome(f"killed {len(phases)} times", "same result", what)


def main():
    options = campaign.parser(__doc__)
    options.add_argument("--mpirun", help="with it, some runs have several ranks")
    options.add_argument("--shim", help="the library kill_shim: with it, some kills are aimed, and all are counted by phase")
    raise SystemExit(campaign.run(options.parse_args(), make_case, "durable", phases=()))


if __name__ == "__main__":
    main()
