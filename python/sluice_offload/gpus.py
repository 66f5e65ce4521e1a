"""GPUs: the one that a tensor is on, whether the library can use it, torch's stream there, and the place where computation is.

`Place` is the CPU or one GPU. It makes tensors over memory that the engine owns.
"""

import ctypes as C
import zlib
from typing import Iterable, Mapping, Optional

import torch

from . import library as lib
from .errors import ArgumentError


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


def free_bytes(gpu: int) -> int:
    """The memory of that GPU that no program has taken. Memory that torch's allocator keeps for later counts as taken."""
    return int(torch.cuda.mem_get_info(gpu)[0])


# CUDA reads these at its first call. Loading code waits for the GPU, which may be waiting for another rank's work; and streams that
# share a hardware queue wait for each other.
CUDA_SETTINGS = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def missing_settings(environment: "Mapping[str, str]") -> "list[str]":
    """The settings that several ranks on GPUs need and that are not in the environment. Another number of connections is the user's."""
    return [f"{name}={value}" for name, value in CUDA_SETTINGS.items()
            if environment.get(name, "").upper() != value and not (name == "CUDA_DEVICE_MAX_CONNECTIONS" and name in environment)]


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over memory that something else owns."""
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


class Place:
    """Where computation sees the parameters. `device`: of torch's tensors there. `gpu`: the GPU's number; None for the CPU."""

    def __init__(self, device: torch.device, gpu: Optional[int] = None) -> None:
        self.device, self.gpu = device, gpu

    @property
    def is_cpu_memory(self) -> bool:
        return self.device.type == "cpu"

    def tensor_at(self, address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A flat tensor over memory that something else owns."""
        if self.is_cpu_memory:
            return torch.frombuffer((C.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)
        storage = storage_at(address, count * dtype.itemsize, self.device)
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, (count,), (1,))

    def digest(self, storage: torch.UntypedStorage, digest: int) -> int:
        """Adds the bytes that a storage shows to a checksum."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (storage.nbytes(),), (1,)).cpu()
        return zlib.crc32((C.c_char * flat.numel()).from_address(flat.data_ptr()), digest)


CPU = Place(torch.device("cpu"))


def place_on(device: torch.device) -> Place:
    """The place for computation on `device`. Raises ArgumentError for one that Sluice cannot use."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ArgumentError(f"device {device}: parameters can be on the CPU or on an NVIDIA GPU")
    count = torch.cuda.device_count()
    gpu = torch.cuda.current_device() if device.index is None and count else device.index or 0
    why = why_not(gpu) if gpu < count else f"torch sees {count} GPUs"
    if why:
        raise ArgumentError(f"device cuda:{gpu} cannot be used: {why}")
    return Place(torch.device("cuda", gpu), gpu)


def place_of(tensors: "Iterable[tuple[str, torch.Tensor]]", device: "torch.device | str | int | None") -> Place:
    """The place for computation with the named `tensors`: `device`, or, where that is None, where they are. Raises ArgumentError where
    they are in several places."""
    if device is not None:
        return place_on(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
    first: "Optional[tuple[str, torch.Tensor]]" = None
    for name, tensor in tensors:
        if tensor.is_meta:
            continue
        if first is None:
            first = (name, tensor)
        elif tensor.device != first[1].device:
            raise ArgumentError(f"{first[0]} is on {first[1].device}, {name} on {tensor.device}; say where to compute: "
                                f"offload(..., device=\"{tensor.device if tensor.device.type != 'cpu' else first[1].device}\")")
    return CPU if first is None else place_on(first[1].device)
