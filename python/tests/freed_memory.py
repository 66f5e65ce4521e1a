"""The program of test_memory.py: raises where a process keeps memory that has been freed. Tensors are below 32 MiB, so that torch has
them from the heap. Resident memory, in MiB."""

import pathlib
import tempfile
import threading

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice_offload as sluice
from sluice_offload.freed import resident


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + 0.1 * torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


def highest_during(work):
    """The highest resident memory that is seen every few milliseconds."""
    seen, ended = [resident()], threading.Event()

    def look():
        while not ended.wait(0.005):
            seen.append(resident())
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
    return max(*seen, resident()) >> 20


def config(folder, **more):
    return {"placement": {"parameters": "host", "optimizer": "host"}, "memory": {"device": "32MiB", "host": "1GiB"},
            "storage": {"paths": [str(folder)]}, **more}


def forward_over_activations_on_storage(folder):
    """A block leaves 24 MiB, of which 8 go to storage: all of them would be 480."""
    model, x = Stack(256, 20), torch.randn(8192, 256)
    optimizer = sluice.offload(model, config(folder, activations="nvme"), units=[Block])
    for _ in range(2):
        before = resident() >> 20
        highest = highest_during(lambda: model(x))
        assert highest - before < 240, (before, highest)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def evaluation_inside_of_gathered(folder):
    """Copies of 200 MiB are freed behind it, and no step takes their place."""
    model, x = Stack(1024, 50).eval(), torch.randn(16, 1024)
    optimizer = sluice.offload(model, config(folder), units=[Block])

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return resident() >> 20
    step()
    before = step()
    with sluice.gathered(model), torch.no_grad():
        model(x)
        assert resident() >> 20 > before + 150
    after = [step() for _ in range(3)]
    assert after[-1] < before + 100, (before, after)
    optimizer.close()


def main():
    torch.set_num_threads(1)
    for case in (forward_over_activations_on_storage, evaluation_inside_of_gathered):
        with tempfile.TemporaryDirectory() as folder:
            case(pathlib.Path(folder))


if __name__ == "__main__":
    main()
