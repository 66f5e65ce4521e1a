#!/usr/bin/env python3
"""DeepSpeed's asynchronous I/O (libaio, `aio_handle`) against `sluice bench io` on one drive, in interleaved pairs.

    python tests/bench/peers/aio.py --sluice build/release/tools/sluice --path DIR [--pairs N] [--size-mib N]

Needs an environment of its own with torch and deepspeed, libaio's headers, and a compiler, since the operator is built at
its first use. Run by hand, on an idle machine; asserts nothing.

DeepSpeed moves one tensor of the whole size with one call, cut into blocks (1 or 4 MiB) at a queue depth (4, 16, 32) by one
thread, as its swapper does. The tensor is one of its own page-locked ones: fresh memory, on the pages that malloc gives.
With --fragmented the tensor's pages are taken from a heap that has been shredded before: what a long-lived process has.
Sluice reads and writes a file of the same size through its own buffers and checks every page that it reads. Both use
O_DIRECT and files that have been written before. Each chooses its best setting first, in a phase of its own.
"""

import argparse
import ctypes
import itertools
import json
import mmap
import os
import statistics
import subprocess
import tempfile
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: E402

SETTINGS = list(itertools.product((1, 4), (4, 16, 32)))  # MiB, depth


def fragmented_tensor(size_bytes):
    """A tensor on single 4 KiB pages in an order that memory does not have: every page is faulted in at random."""
    memory = mmap.mmap(-1, size_bytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    pages = torch.randperm(size_bytes // 4096, generator=torch.Generator().manual_seed(1)) * 4096
    tensor[pages] = 1
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size_bytes)) != 0:
        raise OSError(ctypes.get_errno(), "mlock; raise the limit of locked memory (ulimit -l)")
    return tensor


class DeepSpeed:
    name = "DeepSpeed"

    def __init__(self, folder, size_bytes, fragmented):
        self.file, self.size_bytes = os.path.join(folder, "deepspeed.data"), size_bytes
        module = AsyncIOBuilder().load()
        self.handles = {(mib, depth): module.aio_handle(mib << 20, depth, False, True, 1)
                        for mib, depth in SETTINGS}
        first = self.handles[SETTINGS[0]]
        self.tensor = (fragmented_tensor(size_bytes) if fragmented else
                       first.new_cpu_locked_tensor(size_bytes, torch.empty(0, dtype=torch.uint8)))
        self.tensor.fill_(7)
        with open(self.file, "wb"):
            pass
        first.sync_pwrite(self.tensor, self.file, 0)

    def measure(self, pattern, setting):
        handle = self.handles[setting]
        begin = time.perf_counter()
        if pattern == "read":
            handle.sync_pread(self.tensor, self.file, 0)
        else:
            handle.sync_pwrite(self.tensor, self.file, 0)
        return self.size_bytes / (time.perf_counter() - begin)


class Sluice:
    name = "Sluice"

    def __init__(self, binary, folder, size_bytes):
        self.binary, self.folder, self.size_bytes = binary, folder, size_bytes

    def measure(self, pattern, setting):
        result = os.path.join(self.folder, "sluice.json")
        subprocess.run([self.binary, "bench", "io", "--path", self.folder, "--size", f"{self.size_bytes >> 20}MiB",
                        "--pattern", pattern, "--request", f"{setting[0]}MiB", "--depth", str(setting[1]),
                        "--rounds", "1", "--json", result], check=True, stdout=subprocess.DEVNULL)
        with open(result, encoding="utf-8") as file:
            return json.load(file)["cases"][0]["bytes_per_second"]


def choose(contender, pattern):
    rates = {setting: [contender.measure(pattern, setting) for _ in range(2)] for setting in SETTINGS}
    return max(rates, key=lambda setting: statistics.median(rates[setting]))


def compare(pattern, contenders, pairs):
    settings = [choose(contender, pattern) for contender in contenders]
    rates = [[], []]
    for pair in range(pairs):
        for i in ((0, 1) if pair % 2 == 0 else (1, 0)):
            rates[i].append(contenders[i].measure(pattern, settings[i]))
    ratios = sorted(own / other for own, other in zip(*rates))
    row = [pattern]
    for contender_rates, setting in zip(rates, settings):
        row.append(f"{statistics.median(contender_rates) * 1e-9:.2f} ({setting[0]} MiB x {setting[1]})")
    row.append(f"{statistics.median(ratios):.2f} [{ratios[len(ratios) // 10]:.2f}, {ratios[len(ratios) * 9 // 10]:.2f}]")
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--fragmented", action="store_true")
    options = parser.parse_args()
    size_bytes = options.size_mib << 20
    print(f"load {os.getloadavg()[0]:.1f} at the beginning, {options.pairs} pairs, {options.size_mib} MiB, "
          f"{'fragmented' if options.fragmented else 'fresh'} memory")
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        contenders = (Sluice(options.sluice, folder, size_bytes), DeepSpeed(folder, size_bytes, options.fragmented))
        print("| pattern | Sluice GB/s (setting) | DeepSpeed GB/s | ratio within a pair [10 %, 90 %] |\n|---|---|---|---|")
        for pattern in ("read", "write"):
            print("| " + " | ".join(compare(pattern, contenders, options.pairs)) + " |", flush=True)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
