"""The common part of kill.py and output_faults.py: small runs with every output, and whether the files that they leave
are whole."""

import csv
import json
import os
import random
import subprocess

CONFIG = {
    "model": {"layers": 3, "heads": 2, "embedding": 192, "context": 32},
    "data": {"file": "text.txt"},
    "batch": {"sequences": 2},
    # A step's learning rate does not depend on the number of steps: a run that ends early has the state of a shorter one.
    "optimizer": {"learning_rate": 3e-3, "minimum_learning_rate": 3e-3, "warmup_steps": 0, "overlap": "serial"},
    "placement": {"parameters": "nvme", "optimizer": "nvme"},
    "storage": {"paths": ["storage"], "block_elements": 65536},
    "run": {"seed": 7, "threads": 1, "device": "host"},
}
OLD = b"what was there before\n"
OUTPUTS = {"--save": "model", "--json": "run.json", "--csv": "run.csv", "--json-lines": "run.jsonl", "--trace": "run.trace"}
TIMEOUT_S = 120


def prepare(folder, config=None):
    """A config, a text, a storage folder, and in out/ an old file under the name of every output."""
    for name in ("storage", "out"):
        os.mkdir(os.path.join(folder, name))
    words = random.Random(5).choices("a block lay on storage until its step came and went again".split(), k=4000)
    with open(os.path.join(folder, "text.txt"), "w", encoding="ascii") as file:
        file.write(" ".join(words))
    with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
        json.dump(config or CONFIG, file)
    for name in OUTPUTS.values():
        with open(os.path.join(folder, "out", name), "wb") as file:
            file.write(OLD)


def train(sluice, steps, options=tuple(OUTPUTS)):
    """The command of a run with these outputs."""
    words = [os.path.abspath(sluice), "train", "config.json", "--quiet", "--steps", str(steps)]
    for option in options:
        words += [option, os.path.join("out", OUTPUTS[option])]
    return words


def faults(library, folder, **settings):
    """The environment under which calls on out/ are counted, and one of them goes wrong."""
    environment = dict(os.environ, LD_PRELOAD=os.path.abspath(library), SLUICE_FAULT_FOLDER=os.path.realpath(os.path.join(folder, "out")))
    environment.update({f"SLUICE_FAULT_{name.upper()}": str(value) for name, value in settings.items()})
    return environment


def counted_calls(command, library, folder):
    """[(call, file name)] of all calls of a run without a fault. Raises where the run fails."""
    log = os.path.join(folder, "calls")
    subprocess.run(command, cwd=folder, env=faults(library, folder, at=0, log=log), check=True, timeout=TIMEOUT_S, capture_output=True)
    calls = calls_of(log)
    os.unlink(log)
    return calls


def calls_of(log):
    """[(call, file name)] of a log that the library of faults has written."""
    if not os.path.exists(log):
        return []
    with open(log, encoding="utf-8") as file:
        calls = [line.rstrip("\n").split(" ", 1) for line in file]
    return [(call, os.path.basename(path)) for call, path in calls]


def read(folder, option):
    try:
        with open(os.path.join(folder, "out", OUTPUTS[option]), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def leftovers(folder):
    return sorted(name for name in os.listdir(os.path.join(folder, "out")) if name.endswith(".tmp"))


def steps_of_csv(text):
    rows = list(csv.reader(text.decode().splitlines()))
    if not text.endswith(b"\n") or rows[0][0] != "step" or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError("rows are cut")
    return [int(row[0]) for row in rows[1:]]


def steps_of_lines(text):
    if text and not text.endswith(b"\n"):
        raise ValueError("lines are cut")
    return [json.loads(line)["step"] for line in text.decode().splitlines()]


def model_is_whole(text):
    header_bytes = int.from_bytes(text[:8], "little")
    header = json.loads(text[8:8 + header_bytes])
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return len(text) == 8 + header_bytes + max(ends)


def state_of(sluice, folder, option):
    """"old", "gone", or the number of steps that the file has figures of ("whole" where it has none). Raises ValueError
    where it is cut or mixed."""
    text = read(folder, option)
    if text is None:
        return "gone"
    if text == OLD:
        return "old"
    if option == "--json":
        return len(json.loads(text)["steps"])
    if option in ("--csv", "--json-lines"):
        steps = steps_of_csv(text) if option == "--csv" else steps_of_lines(text)
        if steps != list(range(1, len(steps) + 1)):
            raise ValueError(f"{option} has the steps {steps}")
        return len(steps)
    if option == "--trace":
        done = subprocess.run([os.path.abspath(sluice), "trace", "summary", os.path.join("out", OUTPUTS[option])], cwd=folder,
                              capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode not in (0, 2):  # 2: it has no step yet
            raise ValueError(f"trace summary: {done.returncode}: {done.stderr}")
        return "whole"
    if not model_is_whole(text):
        raise ValueError("the model is cut")
    return "whole"
