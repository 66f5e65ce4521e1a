#!/usr/bin/env python3
"""usage: python/bench/cost.py [--pairs N] [--path FOLDER] [calls | wakes | step | optimizer ...]

Measures, on one thread of torch, the cost of the package for PyTorch:

  calls      CPU time of the calling thread for each use of a unit and for each gradient: two models of equal units with
             few and with many parameters, offloaded and plain, in interleaved pairs. Counts; no bytes move.
  wakes      what the calling thread asks of the kernel for each use of a unit, counted by strace and right under any load:
             wake-ups of other threads, waits for them, and all system calls. Beside it the functions of Python and of C
             that a use calls, counted by the interpreter.
  step       the time of 5 consecutive steps, offloaded to host memory and to NVMe, against torch.optim.AdamW(fused=True)
             in memory. The time ends when the last update has drained: step() returns before that, and what is left of the
             update would run beside the other side's steps. So one tail in 5 has no next step to hide behind.
  optimizer  the time of sluice_offload.optim.AdamW's step with state in host memory and on NVMe, against
             torch.optim.AdamW(fused=True). In bf16 torch's update is of fp32 masters, and their copy to the parameters.

Each ratio is the median over N pairs (20) with its 10th and 90th percentile. The load average stands beside; figures of a
machine that does something else are worth nothing.
"""

import argparse
import copy
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import torch
from torch import nn

import sluice_offload as sluice

UNITS, WIDTH, FEW, MANY = 24, 16, 1, 17
WARM_UP = 3
STEPS = 5  # that are timed together
USE_US_MAX, GRADIENT_US_MAX = 60, 8


class Chain(nn.Module):
    """A unit of `count` small matrices."""

    def __init__(self, count, width):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width) * 0.005) for _ in range(count))

    def forward(self, x):
        for weight in self.weights:
            x = x + x @ weight
        return x


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def config(path, home, device="1GiB"):
    return {"placement": {"parameters": home, "optimizer": "host" if home == "device" else home},
            "memory": {"device": device, "host": "4GiB"}, "storage": {"paths": [path]}, "optimizer": {"clip_norm": 0}}


def pass_of(model, x):
    """Forward and backward; returns the calling thread's CPU time."""
    begin = time.thread_time()
    model(x).square().mean().backward()
    return time.thread_time() - begin


def spread(values):
    ordered = sorted(values)
    return statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def say(name, values, unit="", bound=None):
    median, low, high = spread(values)
    words = ""
    if bound is not None:
        words = " meets" if high <= bound else " misses" if low > bound else " does not decide"
        words += f" the bound of {bound} {unit}"
    print(f"{name:58s} {median:9.3f} {unit:3s} [{low:.3f}, {high:.3f}]{words}")


class Pair:
    """A model of units of `count` parameters, offloaded and plain."""

    def __init__(self, path, count):
        torch.manual_seed(0)
        self.plain = nn.Sequential(*(Chain(count, WIDTH) for _ in range(UNITS)))
        self.model = copy.deepcopy(self.plain)
        self.optimizer = sluice.offload(self.model, config(path, "device"), units=[Chain])

    def extra(self, x):
        """The calling thread's microseconds of a pass beyond those of torch alone: the median of five."""
        seen = []
        for _ in range(5):
            ours = pass_of(self.model, x)
            self.optimizer.step()
            theirs = pass_of(self.plain, x)
            self.plain.zero_grad()
            seen.append(1e6 * (ours - theirs))
        return statistics.median(seen)


def calls(path, pairs):
    x = torch.randn(1, WIDTH)
    folders = [os.path.join(path, name) for name in ("few", "many")]
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
    few, many = Pair(folders[0], FEW), Pair(folders[1], MANY)
    both = [(few.extra(x), many.extra(x)) for _ in range(WARM_UP + pairs)][WARM_UP:]
    uses = few.optimizer._walk.uses
    gradient = [(of_many - of_few) / (UNITS * (MANY - FEW)) for of_few, of_many in both]
    per_gradient = statistics.median(gradient)
    say("CPU time of a gradient's hook", gradient, "us", GRADIENT_US_MAX)
    say("CPU time of a unit's use", [(of_few - per_gradient * UNITS * FEW) / uses for of_few, _ in both], "us", USE_US_MAX)
    for pair in (few, many):
        pair.optimizer.close()


def wakes(path, pairs):
    if shutil.which("strace") is None:
        print("wakes: SKIPPED, for there is no strace")
        return
    x = torch.randn(1, WIDTH)
    for home in ("device", "host", "nvme"):
        model = nn.Sequential(*(Chain(FEW, WIDTH) for _ in range(UNITS)))
        folder = os.path.join(path, home)
        os.makedirs(folder, exist_ok=True)
        optimizer = sluice.offload(model, config(folder, home, "64MiB"), units=[Chain])

        def compute():
            model(x).square().mean().backward()

        def settle():
            optimizer.step()
            optimizer._engine.drain()
        for _ in range(WARM_UP):
            compute()
            uses = optimizer._walk.uses
            settle()
        calls = count_system_calls(os.path.join(path, "strace"), settle, compute, pairs)
        settle()
        functions = count_functions(compute)
        settle()
        words = ", ".join(f"{calls[kind] / uses:.2f} {kind}" for kind in ("wake-ups", "waits", "system calls"))
        print(f"parameters in {home}: of a use {words}; {functions / uses:.0f} functions")
        optimizer.close()


def count_functions(call):
    """Calls of functions of Python and C by this thread, as the interpreter sees them."""
    seen = 0

    def count(_frame, event, _argument):
        nonlocal seen
        seen += event in ("call", "c_call")
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def count_system_calls(file, settle, call, times):
    """System calls of this thread in `call`, by kind and per time. `settle` runs before each; a system call that nothing else makes
    marks in strace's file what lies between."""
    tracer = subprocess.Popen(["strace", "-q", "-o", file, "-p", str(threading.get_native_id())], stderr=subprocess.DEVNULL)
    try:
        while "TracerPid:\t0" in pathlib.Path("/proc/thread-self/status").read_text(encoding="utf-8"):
            if tracer.poll() is not None:
                raise SystemExit("strace cannot trace this process; run as root, or set kernel.yama.ptrace_scope to 0")
            time.sleep(0.01)
        for _ in range(times):
            settle()
            os.getppid()  # the mark
            call()
            os.getppid()
    finally:
        tracer.terminate()
        tracer.wait()
    counts = dict.fromkeys(("wake-ups", "waits", "system calls"), 0)
    is_inside = False
    for line in pathlib.Path(file).read_text(encoding="utf-8").splitlines():
        if line.startswith("getppid("):
            is_inside = not is_inside
        elif is_inside and not line.startswith(("---", "+++")):
            counts["system calls"] += 1
            counts["wake-ups"] += "FUTEX_WAKE" in line
            counts["waits"] += "FUTEX_WAIT" in line
    return {kind: count / times for kind, count in counts.items()}


def time_of_steps(model, optimizer, x, drain=lambda: None):
    """Seconds of STEPS consecutive steps, until nothing of them is under way."""
    begin = time.monotonic()
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    drain()
    return time.monotonic() - begin


def step(path, pairs):
    width, x = 512, torch.randn(256, 512)
    for home in ("host", "nvme"):
        torch.manual_seed(0)
        plain = nn.Sequential(*(Block(width) for _ in range(8)))
        model = copy.deepcopy(plain)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
        ours = sluice.offload(model, config(path, home, "64MiB"), units=[Block],
                              optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))
        # The first pair warms up.
        ratios = [time_of_steps(model, ours, x, ours._engine.drain) / time_of_steps(plain, theirs, x) for _ in range(1 + pairs)][1:]
        ours.close()
        say(f"{STEPS} steps with everything in {home}, of fused AdamW's in memory", ratios, "x", 1.1)


def optimizer(path, pairs):
    elements, count = 1 << 20, 16
    for dtype in (torch.float32, torch.bfloat16):
        for home in ("host", "nvme"):
            ratios = []
            torch.manual_seed(0)
            # Beside 16-bit parameters torch keeps no masters: the program of comparison updates fp32 ones and copies.
            masters = [nn.Parameter(torch.randn(elements)) for _ in range(count)]
            parameters = [nn.Parameter(p.detach().to(dtype)) for p in masters]
            copies = [p.detach().clone() for p in parameters]  # not `parameters`: a changed one becomes the new master
            theirs = torch.optim.AdamW(masters, lr=1e-4, fused=True)
            ours = sluice.optim.AdamW(parameters, lr=1e-4, config={
                "placement": {"optimizer": home}, "memory": {"host": "1GiB"}, "storage": {"paths": [path]},
                "run": {"threads": torch.get_num_threads()}})
            for pair in range(WARM_UP + pairs):
                for master, parameter in zip(masters, parameters):
                    parameter.grad = torch.randn(elements).to(dtype)
                    master.grad = parameter.grad.float()
                begin = time.monotonic()
                ours.step()
                middle = time.monotonic()
                theirs.step()
                if dtype != torch.float32:
                    for master, target in zip(masters, copies):
                        target.copy_(master.detach())
                end = time.monotonic()
                if pair >= WARM_UP:
                    ratios.append((middle - begin) / (end - middle))
            ours.close()
            say(f"optimizer's step, {str(dtype)[6:]}, state in {home}, of fused AdamW's", ratios, "x",
                1.05 if home == "host" else None)


CASES = {"calls": calls, "wakes": wakes, "step": step, "optimizer": optimizer}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="calls, wakes, step, optimizer; by default all")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--path", help="a folder on the drive; by default the one for temporary files")
    given = parser.parse_args()
    unknown = set(given.cases) - set(CASES)
    if unknown or given.pairs < 1:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}" if unknown else "--pairs must be at least 1")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}, {given.pairs} pairs")
    with tempfile.TemporaryDirectory(dir=given.path) as path:
        for name in given.cases or CASES:
            CASES[name](path, given.pairs)
    print(f"load average at the end {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
