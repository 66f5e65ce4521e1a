"""Activations on storage (`activations: "nvme"`): what autograd keeps for backward while the model's forward runs goes to a
file, and comes back before backward needs it. With checkpointing that is what the checkpoints keep, their inputs. From a GPU,
`activations: "host"` takes the same tensors to host memory.

- The newest tensors stay in memory, since backward begins with them. Each older one is written when a newer one comes, on a
  thread, from a copy. So the bytes follow from shapes alone: of the tensors of a forward, all but the newest `KEPT` are
  written once, and read once per backward.
- Backward takes them in the reverse order. Each one that is taken starts the reads of those before it.
- Parameters are not kept here: autograd's views of them show the engine's memory.
- A tensor that is written is a copy, which stays right when the program changes the tensor in place later. One that stays in
  memory is the program's own, so backward refuses it then, as torch does without hooks.
- A tensor of a GPU is copied when it has become an older one, and is the program's own until `LEAVING` later ones have come: only
  then its memory can be taken again, so that computation need not wait for the copy.

Thread rule: one thread at a time, not always the same; reads and writes run on threads of their own.
"""

import concurrent.futures
import copy
import os
import threading
import warnings
import weakref
import zlib
from typing import Any, Callable, MutableMapping, Optional, Sequence

import torch

from .errors import ArgumentError, ConfigError, StorageError
from .gpu_copies import GpuCopies, Landing, Room
from .gpus import CPU
from .page_file import PAGE, PageFile, bytes_of_memory, new_memory, rounded
from .units import is_dense

KEPT = 2            # the newest, in memory
AHEAD = 2           # read before they are taken
WRITES_AT_ONCE = 2  # older ones wait for the drive
LEAVING = 2         # copies out of a GPU that may be under way
_VERIFY_EVERY = {"full": 1, "sample": 8, "off": 0}


def take_home(config: "MutableMapping[str, Any]", is_on_gpu: bool) -> "Optional[list[str]]":
    """Takes `activations` out of a config, for the engine keeps those of programs that tell it of them. Returns the folders that
    torch's go to; no folders for host memory; None if they stay where torch computes."""
    home = config.pop("activations", "keep")
    if home == "recompute":
        raise ArgumentError('activations is "recompute": the program says what is computed again, by torch.utils.checkpoint or, in '
                            'transformers, gradient_checkpointing_enable(); activations is then "keep", or "host" or "nvme" for '
                            "what the checkpoints keep")
    if home not in ("keep", "host", "nvme"):
        raise ConfigError(f'activations is {home!r}; it has to be "keep", "host" or "nvme"')
    if home == "host" and is_on_gpu:
        return []
    if home != "nvme":  # the memory of a CPU is host memory
        return None
    folders = [os.fspath(path) for path in config.get("storage", {}).get("paths") or []]
    if not folders:
        raise ConfigError('activations is "nvme", but storage.paths names no folder')
    return folders


class _InMemory:
    """A tensor that stays where it is. Not the tensor itself, which knows its graph: the graph would keep itself alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def flat(self) -> torch.Tensor:
        return _flat(self._tensor)

    def change(self) -> str:
        """The error of a tensor that the program has changed since; empty if it has not."""
        if self._tensor._version == self._version:
            return ""
        return ("one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{self._tensor.dtype} tensor of shape {list(self._tensor.shape)} is at version {self._tensor._version}, and was at "
                f"{self._version} when it was saved; change a copy of it (clone())")

    def tensor(self) -> torch.Tensor:
        change = self.change()
        if change:
            raise RuntimeError(change)
        return self._tensor


def _turned(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """The same memory, read as conjugate or negative numbers, or if it was so before, as plain ones."""
    tensor = tensor.conj() if is_conj else tensor
    return torch._neg_view(tensor) if is_neg else tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, in the order of its memory."""
    tensor = _turned(tensor, tensor.is_conj(), tensor.is_neg())
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


class _Saved:
    """A tensor that autograd keeps. Its memory and its part of the file are given back with it."""

    def __init__(self, store: "ActivationStore", number: int, tensor: torch.Tensor) -> None:
        self.store, self.number = store, number
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()
        self.nbytes = tensor.numel() * tensor.itemsize
        self.memory: Optional[torch.Tensor] = None  # of a CPU, until it is written
        self.on_gpu: Optional[_InMemory] = None     # of a GPU, until its copy is made
        self.stream: Any = None                     # of the GPU on which the tensor was made
        self.ready: Any = None                      # the event behind what has made it
        self.copied: Any = None                     # the event behind its copy
        self.change = ""                            # why backward cannot have it
        self.room: Optional[Room] = None            # its home, if that is host memory
        self.file: Optional[PageFile] = None
        self.offset = 0
        self.taken = 0                              # so often by a backward
        self.write: "Optional[concurrent.futures.Future[int]]" = None  # gives the checksum
        self.read: "Optional[concurrent.futures.Future[torch.Tensor | Landing]]" = None
        gpu = store.gpu
        if gpu is None:
            memory = new_memory(rounded(self.nbytes))
            memory[:self.nbytes].copy_(_flat(tensor))
            self.memory = memory
        else:
            self.stream = gpu.current_stream()
            self.on_gpu, self.ready = _InMemory(tensor), self.stream.record_event()

    def place(self) -> str:
        return f"a file of {self.file.folder if self.file else 'no folder'}, [{self.offset}, +{rounded(self.nbytes)})"

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        plain = torch.as_strided(memory[:self.nbytes].view(self.dtype), self.shape, self.stride)
        return _turned(plain, self.is_conj, self.is_neg)

    def __del__(self) -> None:
        self.store._give_back(self)


class ActivationStore:
    """Keeps tensors for autograd, in files of `folders`; from a GPU, in host memory where there are none. `hooks()` is a context in
    which it does. `is_ours` says of a storage that it shows the engine's memory. `timeout_s`: so long a drive may take for what is
    waited for; 0: any time. `can_abandon`: whether a step can be abandoned behind a failure; not where other processes go on with
    it. `gpu`: the copies of the GPU whose tensors it keeps; None for those of the CPU."""

    def __init__(self, folders: "Sequence[str]", verify: str, timeout_s: float, can_abandon: bool,
                 is_ours: "Callable[[torch.UntypedStorage], bool]", gpu: Optional[GpuCopies] = None) -> None:
        self.gpu = gpu
        self._device = CPU.device if gpu is None else gpu.device
        after = "optimizer.zero_grad() abandons the step" if can_abandon else "all processes have to begin anew"
        self._files = [PageFile(folder, after) for folder in folders]
        self._timeout_s = timeout_s or None
        self._is_stuck = False
        self._is_ours = is_ours
        self._verify_every = _VERIFY_EVERY[verify]
        self._threads = concurrent.futures.ThreadPoolExecutor(AHEAD + 1 + WRITES_AT_ONCE, "sluice activations")
        self._lock = threading.RLock()  # again by the same thread, where a tensor dies in the middle of something
        self._pid = os.getpid()
        self._alive: "weakref.WeakValueDictionary[int, _Saved]" = weakref.WeakValueDictionary()
        self._next = 0
        self._newest: "list[int]" = []
        self._leaving: "list[int]" = []
        self._writes: "list[tuple[concurrent.futures.Future[int], str]]" = []  # with their places
        self.read_bytes = self.written_bytes = 0
        self._host_bytes = self._host_bytes_max = 0
        self.contexts = 0  # made by hooks()
        self._contexts_seen = 0  # of them, at the end of the step before
        self._has_warned = False

    @property
    def used_bytes_max(self) -> int:
        """The most that lay in files, or in host memory, at a time."""
        return sum(file.used_bytes_max for file in self._files) + self._host_bytes_max

    def hooks(self) -> Any:
        """A context for a forward. The model's own forward is in one by itself."""
        self.contexts += 1
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def check_use(self) -> None:
        """Says once that a step that ends has kept nothing elsewhere, since the program calls parts of the model."""
        if self.contexts == self._contexts_seen and not self._has_warned:
            self._has_warned = True
            home, stayed = ("nvme", "in memory") if self._files else ("host", "on the GPU")
            warnings.warn(f'activations is "{home}", but this step did not call the model\'s own forward, so that its activations '
                          f"stayed {stayed}; call the model itself, or its parts inside of `with optimizer.activations.hooks():`",
                          stacklevel=4)
        self._contexts_seen = self.contexts

    def close(self) -> None:
        """Waits for transfers that are under way, unless one was given up: its thread and its file stay until it ends."""
        self._threads.shutdown(wait=not self._is_stuck, cancel_futures=True)
        if not self._is_stuck:
            for file in self._files:
                file.close()
        if self.gpu is not None:
            self.gpu.close()

    def _gave_up(self, word: str, place: str) -> StorageError:
        self._is_stuck = True
        return StorageError(f"{word} activations in {place}: the drive has not answered for {self._timeout_s:g} s; look at it (dmesg), "
                            "and raise storage.timeout only if it is really that slow")

    def _pack(self, tensor: torch.Tensor) -> "_Saved | _InMemory":
        is_kept = type(tensor) is torch.Tensor and tensor.device == self._device and tensor.layout == torch.strided \
            and tensor.numel() * tensor.itemsize >= PAGE and is_dense(tensor) and not self._is_ours(tensor.untyped_storage())
        if not is_kept:
            return _InMemory(tensor)
        with self._lock:
            saved = _Saved(self, self._next, tensor.detach())
            self._alive[saved.number] = saved
            self._next += 1
            self._newest.append(saved.number)
            older = self._alive.get(self._newest.pop(0)) if len(self._newest) > KEPT else None
        if older is not None:
            self._leave(older)
        return saved

    def _leave(self, saved: _Saved) -> None:
        """Begins what takes an older tensor out of the memory where torch computes."""
        nbytes = rounded(saved.nbytes)
        self.written_bytes += nbytes
        if self.gpu is None:
            assert saved.memory is not None
            self._write(saved, saved.memory)
            return
        room = self._leave_gpu(self.gpu, saved, nbytes)
        if self._files:
            self._write(saved, room)
        else:
            saved.room = room
            self._host_bytes += nbytes
            self._host_bytes_max = max(self._host_bytes_max, self._host_bytes)

    def _leave_gpu(self, gpu: GpuCopies, saved: _Saved, nbytes: int) -> Room:
        assert saved.on_gpu is not None
        room = gpu.take(nbytes)
        saved.copied = gpu.copy_out(saved.on_gpu.flat(), saved.ready, room)
        with self._lock:
            self._leaving.append(saved.number)
            gone = self._alive.get(self._leaving.pop(0)) if len(self._leaving) > LEAVING else None
        if gone is not None and gone.on_gpu is not None:
            gpu.release(gone.on_gpu.flat(), gone.stream, gone.copied)
            gone.change, gone.on_gpu = gone.on_gpu.change(), None
        return room

    def _write(self, saved: _Saved, source: "torch.Tensor | Room") -> None:
        while len(self._writes) >= WRITES_AT_ONCE:
            write, place = self._writes[0]
            if not concurrent.futures.wait([write], self._timeout_s).done:
                raise self._gave_up("cannot write", place)
            self._writes.pop(0)  # a failure is the reader's, if the tensor is ever wanted
        with self._lock:
            saved.memory = None
            file = saved.file = self._files[saved.number % len(self._files)]
            saved.offset = file.take(rounded(saved.nbytes))
        sums = self._verify_every != 0 and saved.number % self._verify_every == 0
        saved.write = self._submit(_write, file, source, saved.offset, sums, self.gpu)
        self._writes.append((saved.write, saved.place()))

    def _begin_read(self, saved: _Saved) -> None:
        if saved.read is not None or saved.memory is not None or saved.on_gpu is not None:
            return
        self.read_bytes += rounded(saved.nbytes)
        landing = None if self.gpu is None else self.gpu.landing(saved.nbytes)
        if saved.room is not None:
            assert self.gpu is not None and landing is not None
            self.gpu.copy_back(saved.room, landing)
            saved.read = concurrent.futures.Future()
            saved.read.set_result(landing)
            return
        assert saved.file is not None and saved.write is not None
        saved.read = self._submit(_read, saved.file, rounded(saved.nbytes), saved.offset,
                                  saved.write, self.gpu, landing)

    def _submit(self, call: "Callable[..., Any]", *arguments: Any,
                ) -> "concurrent.futures.Future[Any]":
        future = self._threads.submit(call, *arguments)
        future.add_done_callback(_forget_frames)
        return future

    def _unpack(self, saved: "_Saved | _InMemory") -> torch.Tensor:
        if isinstance(saved, _InMemory):
            return saved.tensor()
        if saved.change:
            raise RuntimeError(saved.change)
        with self._lock:
            self._begin_read(saved)
            before = (self._alive.get(number) for number in range(saved.number - 1, max(-1, saved.number - 1 - 4 * AHEAD), -1))
            # An operation that keeps several takes the oldest first, so that one before may have been taken already.
            for other in [other for other in before if other is not None and other.taken <= saved.taken][:AHEAD]:
                self._begin_read(other)
            saved.taken += 1
            read, saved.read = saved.read, None
        if read is None:
            if saved.on_gpu is not None:
                return saved.on_gpu.tensor()
            assert saved.memory is not None
            return saved.tensor(saved.memory)
        if not concurrent.futures.wait([read], self._timeout_s).done:
            saved.read = read  # still under way
            raise self._gave_up("cannot read", saved.place())
        back = _result(read)
        return saved.tensor(self.gpu.landed(back) if isinstance(back, Landing) and self.gpu is not None else back)

    def _give_back(self, saved: _Saved) -> None:
        if os.getpid() != self._pid:
            return
        if saved.read is not None and self.gpu is not None:
            saved.read.add_done_callback(self.gpu.unwanted)
        if saved.room is not None and self.gpu is not None:
            self.gpu.give(saved.room)
            self._host_bytes -= rounded(saved.nbytes)
        if saved.file is None:
            return
        last = saved.read or saved.write
        file, offset, nbytes = saved.file, saved.offset, rounded(saved.nbytes)

        def give(_: Any) -> None:
            with self._lock:
                file.give(offset, nbytes)
        if last is None:  # an interrupt came before the write began
            give(None)
        else:
            last.add_done_callback(give)  # no transfer may be under way when another tensor takes the place


def _forget_frames(future: "concurrent.futures.Future[Any]") -> None:
    """A failure waits for its reader in the future. The frames of its traceback would keep the
    tensor that was to be moved."""
    failure = None if future.cancelled() else future.exception()
    while failure is not None:
        failure.__traceback__ = None
        failure = failure.__cause__ or failure.__context__


def _result(future: "concurrent.futures.Future[Any]") -> Any:
    """The future's own result. A failure is raised as an error of its own: the traceback of the
    future's would keep the program's frames, the loss in them, its graph, and so the future itself,
    and no collector sees into a graph."""
    failure = future.exception()
    if failure is not None:
        raise copy.copy(failure) from failure.__cause__
    return future.result()


def _write(file: PageFile, source: "torch.Tensor | Room", offset: int, sums: bool, gpu: Optional[GpuCopies]) -> int:
    try:
        if isinstance(source, Room):
            source.wait()
        memory = source.memory if isinstance(source, Room) else source
        total = zlib.crc32(bytes_of_memory(memory)) if sums else -1
        file.transfer(os.pwritev, "cannot write", memory, offset)
        return total
    finally:
        if isinstance(source, Room) and gpu is not None:
            gpu.give(source)


def _read_into(memory: torch.Tensor, file: PageFile, offset: int, expected: int) -> None:
    file.transfer(os.preadv, "cannot read", memory, offset)
    if expected >= 0 and zlib.crc32(bytes_of_memory(memory)) != expected:
        raise StorageError(f"activations in a file of {file.folder}, [{offset}, +{memory.numel()}), have come back with other bytes "
                           "than were written; check the drive")


def _read(file: PageFile, nbytes: int, offset: int, write: "concurrent.futures.Future[int]", gpu: Optional[GpuCopies],
          landing: Optional[Landing]) -> "torch.Tensor | Landing":
    """Reads, and begins to copy to the GPU, if it is for one."""
    expected = _result(write)
    if gpu is None or landing is None:
        memory = new_memory(nbytes)
        _read_into(memory, file, offset, expected)
        return memory
    room = gpu.take(nbytes)
    try:
        room.wait()
        _read_into(room.memory, file, offset, expected)
        gpu.copy_back(room, landing)
    finally:
        gpu.give(room)
    return landing
