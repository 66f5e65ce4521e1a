#!/usr/bin/env python3
"""usage: python/bench/memory.py [--path FOLDER] [--parameters BILLIONS] [--width N] [--device BUDGET] [--host BUDGET] [--steps N] [--in-memory]

Trains a model that is built on the meta device with all of its state on storage, and meters this process's resident memory:
it has to stay below what it was before the model, when torch alone had run a block, plus the two budgets, the copy of a unit's
gradients that torch makes, and 160 MiB. With --in-memory the model is built in memory, and resident memory has to stay below that
limit from offload() on. Says the bytes that each step has read and written beside the plan's, and ends with 1 if they differ or the
memory is more. By default 1.5 billion parameters in bf16, which have 18 GB of state, under budgets of 2 GiB together. It takes
minutes, and 30 GB of storage.
"""

import argparse
import contextlib
import sys
import tempfile
import time

import torch
from torch import nn

import sluice_offload as sluice
from sluice_offload.freed import resident
from sluice_offload.plans import bytes_of

ROOM = 160 << 20  # activations, threads, Python's objects, and the 64 MiB that freed.py lets the heap grow
WIDTH, TOKENS = 2048, 16


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def values_of(name):
    """The same small values in every run, without a file."""
    generator = torch.Generator().manual_seed(hash_of(name))
    shape = SHAPES[name]
    return torch.ones(shape) if "norm.weight" in name else torch.randn(shape, generator=generator) * 0.01


def hash_of(name):
    return sum(ord(letter) * 31 ** i for i, letter in enumerate(name)) % (1 << 31)


SHAPES = {}


def warm_up(width, x):
    """A block of torch alone, forward and backward: what torch keeps for itself from then on is not of the training."""
    block = Block(width).to(torch.bfloat16)
    block(x).float().square().mean().backward()


def peak():
    """This program's own: ru_maxrss of getrusage() may be that of the process that has started it."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path")
    parser.add_argument("--parameters", type=float, default=1.5, help="in billions")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--device", default="512MiB")
    parser.add_argument("--host", default="1536MiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--in-memory", action="store_true")
    given = parser.parse_args()
    sizes = {name: bytes_of(size) for name, size in (("--device", given.device), ("--host", given.host))}
    for name, size in sizes.items():
        if not size:
            parser.error(f"{name} is no size; write a number with a unit, such as \"64KiB\", \"10MiB\" or \"1.5GiB\"")
    torch.set_num_threads(1)
    width = given.width
    of_a_block = 8 * width * width + 7 * width
    count = max(2, -(-int(given.parameters * 1e9) // of_a_block))
    x = torch.randn(TOKENS, width).to(torch.bfloat16)
    warm_up(width, x)
    before = resident()
    with contextlib.nullcontext() if given.in_memory else sluice.meta_parameters():
        model = nn.Sequential(*(Block(width) for _ in range(count)))
    SHAPES.update({name: p.shape for name, p in model.named_parameters()})
    parameters = sum(p.numel() for p in model.parameters())
    state = 12 * parameters
    print(f"torch {torch.__version__}, {parameters:,} parameters in {count} units, {state / 1e9:.2f} GB of state, budgets {given.device} and "
          f"{given.host}", flush=True)
    with tempfile.TemporaryDirectory(dir=given.path) as path:
        config = {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "precision": {"parameters": "bf16"},
                  "memory": {"device": given.device, "host": given.host}, "storage": {"paths": [path]},
                  "optimizer": {"learning_rate": 1e-4, "clip_norm": 1.0, "overlap": "serial"}}
        optimizer = sluice.offload(model, config, units=[Block], values=None if given.in_memory else values_of)
        highest = resident() if given.in_memory else peak()
        print(f"resident before {before >> 20} MiB, behind filling {resident() >> 20} MiB, at most {peak() >> 20} MiB", flush=True)
        is_right = True
        for step in range(given.steps):
            begin = time.monotonic()
            loss = model(x).float().square().mean()
            loss.backward()
            highest = max(highest, resident()) if given.in_memory else peak()
            optimizer.step()
            optimizer.zero_grad()
            report = optimizer.report
            planned = optimizer._engine.predicted_traffic()
            moved = (report.nvme_read_bytes, report.nvme_write_bytes)
            print(f"step {step + 1}: loss {loss.item():.6f}, norm {report.gradient_norm:.6f}, read {moved[0]:,}, written {moved[1]:,} B, "
                  f"planned {planned[0]:,}, {planned[1]:,} B; resident at most {highest >> 20} MiB; {time.monotonic() - begin:.0f} s", flush=True)
            is_right &= step == 0 or (moved == planned and min(moved) > 0)
        budgets = sum(sizes.values())
        allowed = before + budgets + 2 * 2 * of_a_block + ROOM
        highest = max(highest, resident()) if given.in_memory else peak()
        fits = highest <= allowed
        print(f"peak {highest >> 20} MiB, allowed {allowed >> 20} MiB ({before >> 20} before, {budgets >> 20} of budgets, gradients of a unit, "
              f"{ROOM >> 20} for torch): {'kept' if fits else 'NOT KEPT'}; the state is {state / budgets:.1f} times the budgets; bytes "
              f"{'are the plan' + chr(39) + 's' if is_right else 'are NOT the plan' + chr(39) + 's'}")
        optimizer.close()
    return 0 if fits and is_right else 1


if __name__ == "__main__":
    sys.exit(main())
