#!/usr/bin/env python3
"""How long it takes to make page-locked host memory, which is most of what offload() does at its beginning: touching the pages by 1, 4
and 16 threads, and locking them (cudaHostRegister) in one piece, in eight, and in eight by eight threads.

    page_locking.py [GIB]          8 GiB by default

Needs PyTorch with CUDA. Exits with 77 without a GPU.
"""

import ctypes
import sys
import threading
import time

import torch

PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, MADV_HUGEPAGE, HUGE_PAGE = 3, 0x22, 14, 2 << 20


def seconds_of(calls):
    """The time until every call has returned, each on a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def loaded_runtime():
    torch.zeros(1, device="cuda")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        path = next(line.split()[-1] for line in maps if "libcudart" in line)
    runtime = ctypes.CDLL(path)
    runtime.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    runtime.cudaHostUnregister.argtypes = [ctypes.c_void_p]
    return runtime


def measure(libc, runtime, size_bytes, touching, pieces, locking):
    mapped = libc.mmap(None, size_bytes + HUGE_PAGE, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, 0)
    begin = -(-mapped // HUGE_PAGE) * HUGE_PAGE
    libc.madvise(begin, size_bytes, MADV_HUGEPAGE)
    touch_s = seconds_of([lambda i=i: libc.memset(begin + i * (size_bytes // touching), 0, size_bytes // touching) for i in range(touching)])
    piece = size_bytes // pieces

    def lock(thread):
        for i in range(thread, pieces, locking):
            status = runtime.cudaHostRegister(begin + i * piece, piece, 1)
            if status != 0:
                sys.exit(f"cudaHostRegister of {piece} bytes: error {status}")

    lock_s = seconds_of([lambda thread=thread: lock(thread) for thread in range(locking)])
    for i in range(pieces):
        runtime.cudaHostUnregister(begin + i * piece)
    libc.munmap(mapped, size_bytes + HUGE_PAGE)
    print(f"{size_bytes >> 30} GiB: touched by {touching:2} threads in {touch_s:.3f} s, locked in {pieces} pieces by {locking} threads in "
          f"{lock_s:.3f} s", flush=True)


def main():
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is false")
        return 77
    size_bytes = int(sys.argv[1] if len(sys.argv) > 1 else 8) << 30
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    runtime = loaded_runtime()
    for touching in (1, 4, 16):
        for pieces, locking in ((1, 1), (8, 1), (8, 8)):
            measure(libc, runtime, size_bytes, touching, pieces, locking)
    return 0


if __name__ == "__main__":
    sys.exit(main())
