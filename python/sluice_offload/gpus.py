"""The GPU that a tensor is on, whether the library can use it, and torch's stream there."""

import ctypes as C
from typing import Optional

import torch

from . import library as lib


def gpu_of(tensor: torch.Tensor) -> Optional[int]:
    """The number of the GPU that has the tensor's memory; None if the CPU's memory has it."""
    return int(tensor.device.index) if tensor.device.type == "cuda" else None


def why_not(gpu: int) -> str:
    """Why this library cannot use the GPU of that number; empty if it can."""
    why = C.c_char_p()
    lib.library().why_no_gpu(gpu, C.byref(why))
    return (why.value or b"").decode(errors="replace")


def current_stream(gpu: int) -> int:
    """torch's current stream of that GPU, as the address that CUDA knows it by."""
    return int(torch.cuda.current_stream(gpu).cuda_stream)
