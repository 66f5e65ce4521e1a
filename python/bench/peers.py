#!/usr/bin/env python3
"""usage: python/bench/peers.py [--pairs N] [--path FOLDER] [--tokens N] [--python PYTHON] [--command SLUICE] [optimizer | whole | hidden | trainer ...]

Compares with DeepSpeed, on the CPU. Each side is a process of its own that makes its steps when it is told to, in turns;
the others wait meanwhile. Each ratio is the median over N pairs (10) with its 10th and 90th percentile.

  optimizer  the update alone of 16 million bf16 parameters without clipping, with state in host memory and on NVMe:
             sluice_offload.optim against ZeRO-Offload (stage 2), the bare DeepSpeedCPUAdam, ZeRO-3 with the optimizer on NVMe,
             and torch's fused AdamW; for the last and the bare one the time has the gradients' conversion to fp32
             (grad.float(), which allocates), the update of fp32 masters, and their copy to bf16
  whole      a step of a GPT-2 in bf16 with everything on NVMe: sluice_offload.offload against ZeRO-Infinity, on torch's compute
  hidden     the same with more tokens, against torch's fused AdamW of bf16 in memory; DeepSpeed is not needed
  trainer    a step of the same GPT-2 by sluice_offload.offload against `sluice train` (--command), which computes by itself, with
             everything on NVMe

In the cases of whole steps a side makes 4 in its turn, and their time ends when the last update has drained: Sluice's step()
returns before that, and what is left of the update would run beside the other side's steps. The trainer's time is the median
of the last two of the 4 steps of a run.

DeepSpeed is in an environment of its own (--python), which needs torch, deepspeed, ninja and libaio-dev; its first use
compiles. Each case takes two minutes on a quiet machine, and up to 1 GB of storage. Figures of a machine that does
something else are worth nothing.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ELEMENTS, COUNT = 1 << 20, 16
WARM_UP = 2
STEPS = 4  # of a turn, where steps are whole
HOST, DEVICE = "512MiB", "192MiB"
WIDTH = int(os.environ.get("PEERS_WIDTH", "512"))  # of the GPT-2; a small one tries the program, and says nothing


# --- What a worker builds: a function that makes the steps of a turn and returns the seconds of one.

def parameters_of(torch):
    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(1024, ELEMENTS // 1024)) for _ in range(COUNT))

        def forward(self, x):
            return sum((p * p).sum() for p in self.all) * x

    return Many().bfloat16()


def timed(call):
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


def timed_steps(train, drain=lambda: None):
    """Seconds per step of STEPS consecutive ones, until nothing of them is under way."""
    def steps():
        for _ in range(STEPS):
            train()
        drain()
    return lambda: timed(steps) / STEPS


def sluice_update(home, path):
    import torch
    import sluice_offload as sluice
    model = parameters_of(torch)
    optimizer = sluice.optim.AdamW(model.parameters(), lr=1e-4, config={
        "placement": {"optimizer": home}, "memory": {"host": "1GiB" if home == "host" else "64MiB"}, "storage": {"paths": [path]},
        "run": {"threads": torch.get_num_threads()}})
    x = torch.ones((), dtype=torch.bfloat16)

    def step():
        model(x).backward()
        seconds = timed(optimizer.step)
        optimizer.zero_grad()
        return seconds
    return step


def masters_update(make):
    """An optimizer over fp32 masters, whose values go to the bf16 parameters."""
    import torch
    model = parameters_of(torch)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = make(masters)
    x = torch.ones((), dtype=torch.bfloat16)

    def update():
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)

    def step():
        model(x).backward()
        seconds = timed(update)
        model.zero_grad()
        return seconds
    return step


def fused():
    import torch
    return masters_update(lambda masters: torch.optim.AdamW(masters, lr=1e-4, fused=True))


def bare_deepspeed():
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return masters_update(lambda masters: DeepSpeedCPUAdam(masters, lr=1e-4, adamw_mode=True))


AIO = {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True}


def deepspeed_engine(model, zero, clip_norm, bf16=True, adam=None, aio=None):
    import deepspeed
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": bf16}, "gradient_clipping": clip_norm,
              "optimizer": {"type": "AdamW", "params": adam or {"lr": 1e-4}}, "zero_optimization": zero, "aio": aio or AIO}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def deepspeed_update(home, path):
    import torch
    place = {"device": "cpu"} if home == "host" else {"device": "nvme", "nvme_path": path, "buffer_count": 4}
    engine = deepspeed_engine(parameters_of(torch), {"stage": 2 if home == "host" else 3, "offload_optimizer": place,
                                                    "sub_group_size": 4 * ELEMENTS, "stage3_param_persistence_threshold": 0}, 0.0)
    x = torch.ones((), dtype=torch.bfloat16)

    def step():
        engine.backward(engine(x))
        return timed(engine.step)
    return step


def gpt2():
    """A GPT-2: layer norms before attention and a wide layer of GELU, positions that are learned, a head that is tied."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            rows, length, _ = x.shape
            parts = self.attention(self.norms[0](x)).view(rows, length, 3, WIDTH // 64, 64).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
            return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Model(nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(8192, WIDTH), nn.Embedding(256, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(8))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 8192, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))[:, :-1]
            return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    torch.manual_seed(0)
    return Model().bfloat16()


def tokens_of(count):
    import torch
    return torch.randint(8192, (max(1, count // 256), 256), generator=torch.Generator().manual_seed(1))


def sluice_whole(path, tokens):
    import sluice_offload as sluice
    model, ids = gpt2(), tokens_of(tokens)
    optimizer = sluice.offload(model, {
        "placement": {"parameters": "nvme", "optimizer": "nvme"}, "memory": {"device": DEVICE, "host": HOST}, "storage": {"paths": [path]},
        "optimizer": {"clip_norm": 1.0}}, lr=1e-4)

    def train():
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return timed_steps(train, optimizer._engine.drain)


def deepspeed_whole(path, tokens):
    ids = tokens_of(tokens)
    place = {"device": "nvme", "nvme_path": path, "buffer_count": 4}
    engine = deepspeed_engine(gpt2(), {"stage": 3, "offload_optimizer": place,
                                       # a buffer for each of the 102 parameters; with too few it ends
                                       "offload_param": {"device": "nvme", "nvme_path": path, "buffer_count": 128,
                                                         "buffer_size": max(8192 * WIDTH, 1 << 20), "max_in_cpu": 1000000},
                                       "sub_group_size": 4 * ELEMENTS, "stage3_param_persistence_threshold": 0,
                                       # with more it asks for a parameter twice where forward turns to backward, and ends
                                       "stage3_prefetch_bucket_size": ELEMENTS}, 1.0)

    def train():
        engine.backward(engine(ids))
        engine.step()
    return timed_steps(train)


def torch_whole(tokens):
    import torch
    model, ids = gpt2(), tokens_of(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train():
        model(ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return timed_steps(train)


def trainer(path, tokens, command):
    import random
    data, config, said = (os.path.join(path, name) for name in ("tokens.bin", "config.json", "said.json"))
    draw = random.Random(1)
    with open(data, "wb") as file:
        file.write(b"".join(draw.randrange(8192).to_bytes(2, "little") for _ in range(100000)))
    with open(config, "w", encoding="utf-8") as file:
        json.dump({"model": {"layers": 8, "heads": WIDTH // 64, "embedding": WIDTH, "context": 256, "vocabulary": 8192, "tied_head": True},
                   "data": {"file": data, "format": "uint16"}, "batch": {"sequences": max(1, tokens // 256)},
                   "precision": {"parameters": "bf16"}, "placement": {"parameters": "nvme", "optimizer": "nvme"},
                   "memory": {"device": DEVICE, "host": HOST}, "storage": {"paths": [path]}, "optimizer": {"clip_norm": 1.0}}, file)

    def step():
        """The last two of four steps of a run."""
        subprocess.run([command, "train", config, "--steps", "4", "--json", said, "--quiet"], check=True)
        with open(said, encoding="utf-8") as file:
            return statistics.median(step["time_s"] for step in json.load(file)["steps"][-2:])
    return step


SIDES = {"sluice-host": lambda path, tokens: sluice_update("host", path), "sluice-nvme": lambda path, tokens: sluice_update("nvme", path),
         "deepspeed-host": lambda path, tokens: deepspeed_update("host", path),
         "deepspeed-nvme": lambda path, tokens: deepspeed_update("nvme", path),
         "deepspeed-adam": lambda path, tokens: bare_deepspeed(), "fused": lambda path, tokens: fused(),
         "sluice": sluice_whole, "deepspeed": deepspeed_whole, "torch": lambda path, tokens: torch_whole(tokens),
         "trainer": lambda path, tokens: trainer(path, tokens, os.environ["SLUICE_COMMAND"])}

# Each case has sides, and ratios with bounds: the first over the second is at most the bound.
CASES = {"optimizer": (["sluice-host", "deepspeed-host", "deepspeed-adam", "fused", "sluice-nvme", "deepspeed-nvme"],
                       [("sluice-host", "deepspeed-host", 1.0), ("sluice-host", "deepspeed-adam", 1.0), ("sluice-host", "fused", 1.05),
                        ("sluice-nvme", "deepspeed-nvme", 0.5)]),
         "whole": (["sluice", "deepspeed", "torch"], [("sluice", "deepspeed", 0.5), ("sluice", "torch", None)]),
         "hidden": (["sluice", "torch"], [("sluice", "torch", 1.1)]),
         "trainer": (["sluice", "trainer"], [("sluice", "trainer", None)])}


def work(name, path, tokens):
    """A worker: the steps of a turn for each line of its input."""
    import torch
    torch.set_num_threads(os.cpu_count() or 1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    step = SIDES[name](path, tokens)
    for _ in range(WARM_UP):
        step()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        print(f"{step():.6f}", file=answers, flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def deepspeed_variables(python):
    """The environment's variables for one process of DeepSpeed on the CPU. Its operators are compiled with the programs beside `python`."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
            "MASTER_PORT": str(free_port()), "PATH": os.path.dirname(python) + os.pathsep + os.environ["PATH"]}


def start(name, given, path):
    """Returns the worker and the file of what it prints, None where it is shown (--verbose). A pipe that is not read would fill."""
    environment = deepspeed_variables(given.python) if name.startswith("deepspeed") else {**os.environ, "SLUICE_COMMAND": given.command or ""}
    python = given.python if name.startswith("deepspeed") else sys.executable
    said = None if given.verbose else tempfile.TemporaryFile(mode="w+", errors="replace")
    worker = subprocess.Popen([python, __file__, "--worker", name, "--path", path, "--tokens", str(given.tokens)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=said, text=True, env=environment)
    if worker.stdout.readline() != "ready\n":
        died(name, "did not start", worker, said)
    return worker, said


def turn(name, worker, said):
    """Seconds of a step."""
    try:
        print("go", file=worker.stdin, flush=True)
        return float(worker.stdout.readline())
    except (OSError, ValueError):
        died(name, "ended in a step", worker, said)


def died(name, what, worker, said):
    worker.kill()
    worker.wait()
    text = ""
    if said is not None:
        said.seek(0)
        text = f":\n{said.read()[-2000:]}"
    sys.exit(f"peers.py: {name} {what}{text}")


def spread(values):
    ordered = sorted(values)
    return statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def compare(case, given, path):
    names, ratios = CASES[case]
    has = {"deepspeed": given.python, "trainer": given.command}
    wanted = [name for name in names if has.get(name.split("-")[0], "yes")]
    seconds = {name: [] for name in wanted}
    workers = {}
    try:
        for name in wanted:
            workers[name] = start(name, given, path)
        for _ in range(given.pairs):
            for name, (worker, said) in workers.items():
                seconds[name].append(turn(name, worker, said))
    finally:
        for worker, said in workers.values():
            if said is not None:
                said.close()
            worker.kill()
            worker.wait()
    for name in wanted:
        print(f"{case + ', ' + name:36s} {1e3 * spread(seconds[name])[0]:10.1f} ms")
    for one, other, bound in ratios:
        if other not in seconds:
            print(f"{case}, {one} of {other}: not compared, for --python or --command is missing")
            continue
        median, low, high = spread([a / b for a, b in zip(seconds[one], seconds[other])])
        words = "" if bound is None else f" {'meets' if high <= bound else 'misses' if low > bound else 'does not decide'} the bound of {bound} x"
        print(f"{case + ', ' + one + ' of ' + other:48s} {median:7.3f} x [{low:.3f}, {high:.3f}]{words}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="optimizer, whole, hidden, trainer; by default all")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--path", help="a folder on the drive; by default the one for temporary files")
    parser.add_argument("--python", help="the Python of an environment with DeepSpeed")
    parser.add_argument("--command", help="the command `sluice`")
    parser.add_argument("--tokens", type=int, help="of a step; by default 256, in the case hidden 4096")
    parser.add_argument("--verbose", action="store_true", help="show what the workers print")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.path, given.tokens)
        return 0
    unknown = set(given.cases) - set(CASES)
    if unknown or given.pairs < 1:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}" if unknown else "--pairs must be at least 1")
    print(f"load average {os.getloadavg()[0]:.1f}, {given.pairs} pairs, {os.cpu_count()} cores")
    tokens = given.tokens
    for case in given.cases or CASES:
        given.tokens = tokens or (4096 if case == "hidden" else 256)
        with tempfile.TemporaryDirectory(dir=given.path) as path:
            compare(case, given, path)
    print(f"load average at the end {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
