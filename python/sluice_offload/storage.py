"""The memory behind a unit's parameters. Autograd keeps views of weights, such as the `weight.t()` of a linear layer, so the
address cannot change by giving the parameter other data: the views would go on reading the old address, which belongs to
another unit by then. Each unit therefore has one storage for good, whose *contents* move. Three ways, the first that this
torch has:

- swap: the storage's data pointer is exchanged by torch's own `_swap_data_ptr_`;
- poke: the same by writing the pointer's word in the storage object, found and verified here;
- copy: the storage is a fixed range of addresses, into which the unit is copied for each use.

Parameters that the engine keeps in a wider type than computation sees are copied, too, and rounded on the way.

Outside of a lease a storage shows poison, bytes of 0xFF, which are NaN in every type, so that a weight that is read there is
noticed. On the CPU these are read-only pages. On a GPU they are a tensor as large as the largest unit.
"""

import ctypes as C
import errno
import mmap
import os
from typing import Callable, Optional, Sequence

import torch
from torch import nn

from .errors import ArgumentError, NonFiniteError, SluiceError
from .gpus import CPU, Place, storage_at
from .unlent import UnlentParameter

_CHUNK_BYTES = 2 << 20
_FINE_BYTES = 8 << 30  # of regions whose poison is mapped in chunks of that size
_BOUNDS_MAX = 512  # numbers on a GPU that wait for a check
_ADDRESSES_MAX = 256  # of one unit; copies for gathered() have many
_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 0x10, 0x20, 0x4000
_FAILED = C.c_void_p(-1).value

_libc = C.CDLL(None, use_errno=True)
_libc.mmap.restype = C.c_void_p
_libc.mmap.argtypes = [C.c_void_p, C.c_size_t, C.c_int, C.c_int, C.c_int, C.c_long]
_libc.munmap.argtypes = [C.c_void_p, C.c_size_t]


def _map(address: Optional[int], nbytes: int, protection: int, flags: int, file: int = -1) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, file, 0)
    if mapped == _FAILED:
        code = C.get_errno()
        remedy = "; where there is memory, the limit of mappings may be too low: sysctl vm.max_map_count" if code == errno.ENOMEM else ""
        raise SluiceError(f"cannot map {nbytes} bytes: {os.strerror(code)}{remedy}")
    return int(mapped)


class Region:
    """Addresses of `nbytes`, which show poison or, after `fill`, memory of their own. Never given back while the process
    lives: tensors over them have no owner."""

    _poison_file: Optional[int] = None
    _poison_bytes = 0
    _all_bytes = 0  # of all regions

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Linux gives a process 65530 mappings: 8 GiB take 4096, and each doubling 2048 more.
        self._chunk_bytes = min(self.nbytes, _CHUNK_BYTES << ((Region._all_bytes + self.nbytes) // _FINE_BYTES).bit_length())
        self.address = _map(None, self.nbytes, 0, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE)
        try:
            self.show_poison()
        except BaseException:
            _libc.munmap(self.address, self.nbytes)
            raise
        Region._all_bytes += self.nbytes

    @classmethod
    def _poison(cls, nbytes: int) -> int:
        if cls._poison_file is None:
            cls._poison_file = os.memfd_create("sluice-poison")
        while cls._poison_bytes < nbytes:
            cls._poison_bytes += os.write(cls._poison_file, b"\xff" * _CHUNK_BYTES)
        return cls._poison_file

    def show_poison(self) -> None:
        """One file, mapped over and over: poison takes 2 MiB, and for large models at most one byte in 2000."""
        file = self._poison(self._chunk_bytes)
        for begin in range(0, self.nbytes, self._chunk_bytes):
            _map(self.address + begin, min(self._chunk_bytes, self.nbytes - begin), _PROT_READ, _MAP_SHARED | _MAP_FIXED, file)

    def open(self) -> None:
        """Gives it memory of its own, which may be written."""
        _map(self.address, self.nbytes, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED)

    def fill(self, source: int, nbytes: int) -> None:
        self.open()
        C.memmove(self.address, source, nbytes)


class GpuPoison:
    """Poison of `nbytes` in a GPU's memory."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
        self.address = self._memory.data_ptr()


class UnitStorage:
    """One storage for good. `attach` makes it show what lies at an address, `detach` poison; `show` and `hide` do so for parameters."""

    parameters: "Sequence[torch.Tensor]" = ()
    when_shown: "Optional[Callable[[int], None]]" = None  # is told each address that show() shows

    def __init__(self, nbytes: int, poison: "Region | GpuPoison", place: Place = CPU) -> None:
        self.nbytes = nbytes
        self.poison = poison
        self.place = place
        self.storage = storage_at(poison.address, nbytes, place.device)

    def attach(self, address: int) -> None:
        raise NotImplementedError

    def detach(self) -> None:
        self.attach(self.poison.address)

    def guard(self, parameters: "list[torch.Tensor]") -> None:
        """`parameters`, which lie here, have the class of those without values (unlent.py) while the storage shows poison, as now."""
        self.parameters = parameters
        self.hide()

    def show(self, address: int) -> None:
        self.attach(address)
        self.unwatch()
        if self.when_shown is not None:
            self.when_shown(address)

    def watch(self) -> None:
        """No forward of their own module computes with them now: views that others make of them are watched (unlent.py)."""
        for parameter in self.parameters:
            parameter.__class__ = UnlentParameter

    def unwatch(self) -> None:
        for parameter in self.parameters:
            parameter.__class__ = nn.Parameter

    def hide(self) -> None:
        self.detach()
        self.watch()

    def check(self) -> None:
        """Raises NonFiniteError where an attach since the last check has shown a number that is not finite."""

    def places(self) -> "list[torch.UntypedStorage]":
        """Tensors of the unit lie over these."""
        return [self.storage]

    def place_of(self, rounded: Optional[torch.dtype]) -> torch.UntypedStorage:
        """Where a parameter lies that computation sees in this type, or in the engine's."""
        assert rounded is None
        return self.storage

    def digest(self) -> int:
        """A checksum of the bytes that it shows."""
        digest = 0
        for storage in self.places():
            digest = self.place.digest(storage, digest)
        return digest


class SwapStorage(UnitStorage):
    """Keeps a storage for each address that the unit has had, which are few: to swap with it twice shows poison again, and
    leaves it as it was."""

    def __init__(self, nbytes: int, poison: "Region | GpuPoison", place: Place = CPU) -> None:
        super().__init__(nbytes, poison, place)
        self._others: "dict[int, torch.UntypedStorage]" = {}
        self._other: Optional[torch.UntypedStorage] = None  # has poison's address while this one has its own

    def attach(self, address: int) -> None:
        self.detach()
        other = self._others.get(address)
        if other is None:
            if len(self._others) >= _ADDRESSES_MAX:
                self._others.clear()
            other = self._others[address] = storage_at(address, self.nbytes, self.place.device)
        self._other = other  # before the call, behind which an interrupt may come
        self.storage._swap_data_ptr_(other)

    def detach(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            self.storage._swap_data_ptr_(other)


class PokeStorage(UnitStorage):
    _word: Optional[int] = None

    def __init__(self, nbytes: int, poison: "Region | GpuPoison", place: Place = CPU) -> None:
        super().__init__(nbytes, poison, place)
        if PokeStorage._word is None:
            PokeStorage._word = _pointer_word()
        self._pointer = C.c_uint64.from_address(self.storage._cdata + 8 * PokeStorage._word)

    def attach(self, address: int) -> None:
        self._pointer.value = address


class CopyStorage(UnitStorage):
    """Needs nothing of torch but tensors over given memory; costs a copy for each use, and memory for a unit as long as it
    is attached."""

    def __init__(self, nbytes: int) -> None:
        self._region = region = Region(nbytes)
        self._memory = (C.c_char * nbytes).from_address(region.address)
        self.nbytes, self.poison, self.place = nbytes, region, CPU
        self.storage = torch.frombuffer(self._memory, dtype=torch.uint8).untyped_storage()

    def attach(self, address: int) -> None:
        self._region.fill(address, self.nbytes)

    def open(self) -> int:
        """Gives it memory of its own, and returns the address."""
        self._region.open()
        return self._region.address

    def detach(self) -> None:
        self._region.show_poison()


class GpuCopyStorage(UnitStorage):
    """Shows memory of torch's own on a GPU, as long as it is attached. `shown`: a storage over poison."""

    def __init__(self, shown: UnitStorage) -> None:
        self.nbytes, self.poison, self.place, self.storage = shown.nbytes, shown.poison, shown.place, shown.storage
        self._shown = shown
        self._memory: Optional[torch.Tensor] = None

    def open(self) -> int:
        """Gives it memory of its own, and returns the address."""
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.place.device)
        self._shown.attach(self._memory.data_ptr())
        return self._memory.data_ptr()

    def detach(self) -> None:
        self._shown.detach()
        self._memory = None  # torch's allocator gives it to later work of the same stream


class MixedStorage(UnitStorage):
    """A unit that the engine keeps in fp32, of which computation sees some parameters in 16 bits: those are copied into a place of
    their own, and rounded to the nearest number, ties to even, as torch rounds. (In a model of bf16 alone the engine rounds ties away from zero.)
    `copy`: where they go. `ranges`: begin and end of these parameters, in elements. `name`: the unit's, for messages."""

    def __init__(self, exact: UnitStorage, copy: "CopyStorage | GpuCopyStorage", rounded: torch.dtype, ranges: "Sequence[tuple[int, int]]",
                 name: str) -> None:
        self.nbytes, self.poison, self.place, self.storage = exact.nbytes, exact.poison, exact.place, exact.storage
        self._exact, self._copy, self._rounded, self._name, self._ranges = exact, copy, rounded, name, ranges
        self._count = exact.nbytes // torch.float32.itemsize
        self._bounds: "list[torch.Tensor]" = []  # on a GPU, of what was shown and not checked yet

    def attach(self, address: int) -> None:
        """Raises NonFiniteError where a finite number becomes infinite, which the engine, whose parameters are of fp32, does not see.
        On a GPU, check() does: to look at once would wait for the GPU."""
        source = self.place.tensor_at(address, torch.float32, self._count)
        target = self.place.tensor_at(self._copy.open(), self._rounded, self._count)
        for begin, end in self._ranges:
            part = target[begin:end].copy_(source[begin:end])
            self._bounds += part.aminmax()
        if self.place.is_cpu_memory or len(self._bounds) >= _BOUNDS_MAX:
            self.check()
        self._exact.attach(address)

    def check(self) -> None:
        bounds, self._bounds = self._bounds, []
        if bounds and not torch.stack(bounds).isfinite().all():
            self.detach()
            raise NonFiniteError(f"unit \"{self._name}\" has a parameter that is no finite number of {self._rounded}; lower the learning "
                                 "rate, or train it in fp32")

    def detach(self) -> None:
        self._exact.detach()
        self._copy.detach()

    def places(self) -> "list[torch.UntypedStorage]":
        return [self.storage, self._copy.storage]

    def place_of(self, rounded: Optional[torch.dtype]) -> torch.UntypedStorage:
        return self.storage if rounded is None else self._copy.storage


def _pointer_word() -> int:
    """Which 8-byte word of torch's storage object is its data pointer: the one that holds a known address, and that,
    changed, changes what the storage says. Raises unless there is exactly one."""
    buffers = [C.create_string_buffer(64), C.create_string_buffer(64)]
    first, second = (C.addressof(buffer) for buffer in buffers)
    storage = storage_at(first, 64, CPU.device)
    words = [C.c_uint64.from_address(storage._cdata + 8 * i) for i in range(8)]
    found = [i for i, word in enumerate(words) if word.value == first]
    if len(found) != 1:
        raise SluiceError(f"torch {torch.__version__} keeps a storage's pointer in {len(found)} places; storage=\"copy\" "
                          "works without it")
    words[found[0]].value = second
    is_it = storage.data_ptr() == second
    words[found[0]].value = first
    if not is_it or storage.data_ptr() != first:
        raise SluiceError(f"torch {torch.__version__} keeps a storage's pointer where it cannot be found; "
                          "storage=\"copy\" works without it")
    return found[0]


def _can_swap() -> bool:
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        return False
    buffers = [C.create_string_buffer(64), C.create_string_buffer(64)]
    storage = storage_at(C.addressof(buffers[0]), 64, CPU.device)
    view = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    storage._swap_data_ptr_(storage_at(C.addressof(buffers[1]), 64, CPU.device))
    return bool(view.data_ptr() == C.addressof(buffers[1]))


def _can_poke() -> bool:
    try:
        _pointer_word()
    except (SluiceError, AttributeError):
        return False
    return True


def best_way() -> str:
    """The best of "swap", "poke" and "copy" that this torch has."""
    if not hasattr(torch._C, "_construct_storage_from_data_pointer"):
        return "copy"
    return "swap" if _can_swap() else "poke" if _can_poke() else "copy"


class Storages:
    """Makes the storages of units of at most `largest_bytes`, in `way` or in the best one that this torch has."""

    def __init__(self, way: Optional[str], largest_bytes: int, place: Place) -> None:
        self._place = place
        self.way = way or best_way()
        if self.way not in ("swap", "poke", "copy"):
            raise ArgumentError(f"storage={way!r}; it has to be \"swap\", \"poke\" or \"copy\"")
        if self.way == "copy":
            if not place.is_cpu_memory:
                raise ArgumentError(f"storage=\"copy\" is for the CPU, and the parameters are on {place.device}; the best way of torch "
                                    f"{torch.__version__} is {best_way()!r}")
            return
        if not (_can_swap() if self.way == "swap" else _can_poke()):
            raise ArgumentError(f"storage={way!r}, which torch {torch.__version__} does not have; its best way is {best_way()!r}")
        self._poison = Region(largest_bytes) if place.is_cpu_memory else GpuPoison(largest_bytes, place.device)

    def make(self, nbytes: int) -> UnitStorage:
        if self.way == "copy":
            return CopyStorage(nbytes)
        return (SwapStorage if self.way == "swap" else PokeStorage)(nbytes, self._poison, self._place)

    def make_mixed(self, nbytes: int, rounded: torch.dtype, ranges: "Sequence[tuple[int, int]]", name: str) -> UnitStorage:
        """For a unit of fp32 with parameters in `ranges` that computation sees in the type `rounded`."""
        copy_bytes = nbytes // torch.float32.itemsize * rounded.itemsize
        copy = CopyStorage(copy_bytes) if self._place.is_cpu_memory else GpuCopyStorage(self.make(copy_bytes))
        return MixedStorage(self.make(nbytes), copy, rounded, ranges, name)
