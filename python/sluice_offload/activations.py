"""Activations on storage (`activations: "nvme"`): what autograd keeps for backward while the model's forward runs goes to a
file, and comes back before backward needs it. With checkpointing that is what the checkpoints keep, their inputs.

- The newest tensors stay in memory, since backward begins with them. Each older one is written when a newer one comes, on a
  thread, from a copy. So the bytes follow from shapes alone: of the tensors of a forward, all but the newest `KEPT` are
  written once, and read once per backward.
- Backward takes them in the reverse order. Each one that is taken starts the reads of those before it.
- Parameters are not kept here: autograd's views of them show the engine's memory.
- A tensor that is written is a copy, which stays right when the program changes the tensor in place later. One that stays in
  memory is the program's own, so backward refuses it then, as torch does without hooks.

Thread rule: one thread at a time, not always the same; reads and writes run on threads of their own.
"""

import concurrent.futures
import ctypes as C
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import warnings
import weakref
import zlib
from typing import Any, Callable, MutableMapping, Optional, Sequence

import torch

from .errors import ArgumentError, ConfigError, OutOfMemoryError, StorageError, remedy_of
from .units import is_dense

KEPT = 2            # the newest, in memory
AHEAD = 2           # read before they are taken
WRITES_AT_ONCE = 2  # older ones wait for the drive
PAGE = 4096         # of direct transfers
_VERIFY_EVERY = {"full": 1, "sample": 8, "off": 0}


def take_folders(config: "MutableMapping[str, Any]") -> "list[str]":
    """Takes `activations` out of a config, for the engine keeps those of programs that tell it of them. Returns the folders that
    torch's go to, none if they stay in memory."""
    home = config.pop("activations", "keep")
    if home == "recompute":
        raise ArgumentError('activations is "recompute": the program says what is computed again, by torch.utils.checkpoint or, in '
                            'transformers, gradient_checkpointing_enable(); activations is then "keep", or "nvme" for what '
                            "the checkpoints keep")
    if home not in ("keep", "host", "nvme"):
        raise ConfigError(f'activations is {home!r}; it has to be "keep", "host" or "nvme"')
    if home != "nvme":  # torch's own memory is host memory
        return []
    folders = [os.fspath(path) for path in config.get("storage", {}).get("paths") or []]
    if not folders:
        raise ConfigError('activations is "nvme", but storage.paths names no folder')
    return folders


def rounded(nbytes: int) -> int:
    """The bytes that a tensor takes in the file."""
    return -(-nbytes // PAGE) * PAGE


def _room(nbytes: int) -> torch.Tensor:
    """Whole pages, which go back to the system with the tensor: in a heap, copies between other tensors would leave gaps."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has limits of its own
    except OSError as error:
        raise OutOfMemoryError(f"cannot take {nbytes} bytes of memory for a tensor on its way between backward and storage: "
                               f"{error.strerror}; free memory, or lower the batch") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _bytes(memory: torch.Tensor) -> Any:
    return (C.c_char * memory.numel()).from_address(memory.data_ptr())


def _open_without_name(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # such as NFS and overlays over it
            raise
    descriptor, path = tempfile.mkstemp(prefix=".sluice-activations-", dir=folder)
    os.unlink(path)
    return descriptor


class _File:
    """A file without a name in `folder`, and which parts of it are in use. `after` is what a program can do behind a failure. The
    descriptor is closed with the object, if close() was not called."""

    def __init__(self, folder: str, after: str) -> None:
        self.folder, self.after = folder, after
        self.end = self.used_bytes = self.used_bytes_max = 0
        self._free: "dict[int, list[int]]" = {}  # offsets by size
        try:
            self.descriptor = _open_without_name(folder)
        except OSError as error:
            raise StorageError(f"cannot make a file for activations in {folder}: {error.strerror}; {remedy_of(error)}") from error
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self.close.atexit = False  # the system closes it then
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)
        except OSError:
            pass  # such as tmpfs, which has no direct transfers

    def take(self, nbytes: int) -> int:
        self.used_bytes += nbytes
        self.used_bytes_max = max(self.used_bytes_max, self.used_bytes)
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        self.end += nbytes
        return self.end - nbytes

    def give(self, offset: int, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self._free.setdefault(nbytes, []).append(offset)
        if self.used_bytes == 0:  # places of sizes that never come again would make the file grow with every batch's length
            self.end = 0
            self._free.clear()

    def transfer(self, call: "Callable[..., int]", word: str, memory: torch.Tensor, offset: int) -> None:
        view = memoryview(_bytes(memory)).cast("B")
        done = 0
        while done < len(view):
            try:
                count = call(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise StorageError(f"{word} activations in a file of {self.folder}, [{offset}, +{len(view)}): "
                                   f"{error.strerror}; {remedy_of(error)}; {self.after}") from error
            if count == 0 or (count % PAGE and done + count < len(view)):
                raise StorageError(f"{word} activations in a file of {self.folder}, [{offset}, +{len(view)}): only {done + count} "
                                   f"bytes went through; check the drive; {self.after}")
            done += count


class _Saved:
    """A tensor that autograd keeps. Its memory and its part of the file are given back with it."""

    def __init__(self, store: "ActivationStore", number: int, tensor: torch.Tensor) -> None:
        self.store, self.number = store, number
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.nbytes = tensor.numel() * tensor.itemsize
        self.memory: Optional[torch.Tensor] = None  # until it is written
        self.file: Optional[_File] = None
        self.offset = 0
        self.write: "Optional[concurrent.futures.Future[int]]" = None  # gives the checksum
        self.read: "Optional[concurrent.futures.Future[torch.Tensor]]" = None
        memory = _room(rounded(self.nbytes))
        memory[:self.nbytes].view(self.dtype).copy_(torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset()))
        self.memory = memory

    def place(self) -> str:
        return f"a file of {self.file.folder if self.file else 'no folder'}, [{self.offset}, +{rounded(self.nbytes)})"

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(memory[:self.nbytes].view(self.dtype), self.shape, self.stride)

    def __del__(self) -> None:
        self.store._give_back(self)


class _InMemory:
    """A tensor that stays where it is. Not the tensor itself, which knows its graph: the graph would keep itself alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation: a "
                               f"{self._tensor.dtype} tensor of shape {list(self._tensor.shape)} is at version "
                               f"{self._tensor._version}, and was at {self._version} when it was saved; change a copy of it (clone())")
        return self._tensor


class ActivationStore:
    """Keeps tensors for autograd: `hooks()` is a context in which it does. `is_ours` says of a storage that it shows the engine's
    memory. `timeout_s`: so long a drive may take for what is waited for; 0: any time. `can_abandon`: whether a step can be abandoned
    behind a failure; not where other processes go on with it."""

    def __init__(self, folders: "Sequence[str]", verify: str, timeout_s: float, can_abandon: bool,
                 is_ours: "Callable[[torch.UntypedStorage], bool]") -> None:
        after = "optimizer.zero_grad() abandons the step" if can_abandon else "all processes have to begin anew"
        self._files = [_File(folder, after) for folder in folders]
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
        self._writes: "list[tuple[concurrent.futures.Future[int], str]]" = []  # with their places
        self.read_bytes = self.written_bytes = 0
        self.contexts = 0  # made by hooks()
        self._contexts_seen = 0  # of them, at the end of the step before
        self._has_warned = False

    @property
    def used_bytes_max(self) -> int:
        """The most that lay in files at a time."""
        return sum(file.used_bytes_max for file in self._files)

    def hooks(self) -> Any:
        """A context for a forward. The model's own forward is in one by itself."""
        self.contexts += 1
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def check_use(self) -> None:
        """Says once that a step that ends has kept nothing on storage, since the program calls parts of the model."""
        if self.contexts == self._contexts_seen and not self._has_warned:
            self._has_warned = True
            warnings.warn('activations is "nvme", but this step did not call the model\'s own forward, so that its activations stayed '
                          "in memory; call the model itself, or its parts inside of `with optimizer.activations.hooks():`",
                          stacklevel=4)
        self._contexts_seen = self.contexts

    def close(self) -> None:
        """Waits for transfers that are under way, unless one was given up: its thread and its file stay until it ends."""
        self._threads.shutdown(wait=not self._is_stuck, cancel_futures=True)
        if not self._is_stuck:
            for file in self._files:
                file.close()

    def _gave_up(self, word: str, place: str) -> StorageError:
        self._is_stuck = True
        return StorageError(f"{word} activations in {place}: the drive has not answered for {self._timeout_s:g} s; look at it (dmesg), "
                            "and raise storage.timeout only if it is really that slow")

    def _pack(self, tensor: torch.Tensor) -> "_Saved | _InMemory":
        is_kept = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided \
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
            self._write(older)
        return saved

    def _write(self, saved: _Saved) -> None:
        while len(self._writes) >= WRITES_AT_ONCE:
            write, place = self._writes[0]
            if not concurrent.futures.wait([write], self._timeout_s).done:
                raise self._gave_up("cannot write", place)
            self._writes.pop(0)  # a failure is the reader's, if the tensor is ever wanted
        with self._lock:
            memory, saved.memory = saved.memory, None
            assert memory is not None
            file = saved.file = self._files[saved.number % len(self._files)]
            saved.offset = file.take(memory.numel())
            self.written_bytes += memory.numel()
        sums = self._verify_every != 0 and saved.number % self._verify_every == 0
        saved.write = self._threads.submit(_write, file, memory, saved.offset, sums)
        self._writes.append((saved.write, saved.place()))

    def _begin_read(self, saved: _Saved) -> None:
        if saved.memory is None and saved.read is None:
            assert saved.file is not None and saved.write is not None
            self.read_bytes += rounded(saved.nbytes)
            saved.read = self._threads.submit(_read, saved.file, rounded(saved.nbytes), saved.offset, saved.write)

    def _unpack(self, saved: "_Saved | _InMemory") -> torch.Tensor:
        if isinstance(saved, _InMemory):
            return saved.tensor()
        with self._lock:
            self._begin_read(saved)
            before = (self._alive.get(number) for number in range(saved.number - 1, max(-1, saved.number - 1 - 4 * AHEAD), -1))
            for other in [other for other in before if other is not None][:AHEAD]:
                self._begin_read(other)
            read, saved.read = saved.read, None
        if read is None:
            assert saved.memory is not None
            return saved.tensor(saved.memory)
        if not concurrent.futures.wait([read], self._timeout_s).done:
            saved.read = read  # still under way
            raise self._gave_up("cannot read", saved.place())
        return saved.tensor(read.result())

    def _give_back(self, saved: _Saved) -> None:
        if saved.file is None or os.getpid() != self._pid:
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


def _write(file: _File, memory: torch.Tensor, offset: int, sums: bool) -> int:
    total = zlib.crc32(_bytes(memory)) if sums else -1
    file.transfer(os.pwritev, "cannot write", memory, offset)
    return total


def _read(file: _File, nbytes: int, offset: int, write: "concurrent.futures.Future[int]") -> torch.Tensor:
    expected = write.result()
    memory = _room(nbytes)
    file.transfer(os.preadv, "cannot read", memory, offset)
    if expected >= 0 and zlib.crc32(_bytes(memory)) != expected:
        raise StorageError(f"activations in a file of {file.folder}, [{offset}, +{nbytes}), have come back with other bytes than were "
                           "written; check the drive")
    return memory
