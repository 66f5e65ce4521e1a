"""Whole pages for activations: memory, and a file without a name that takes what lies there."""

import ctypes as C
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from typing import Any, Callable

import torch

from .errors import OutOfMemoryError, StorageError, remedy_of

PAGE = 4096  # of direct transfers


def rounded(nbytes: int) -> int:
    """The bytes that a tensor takes, in whole pages."""
    return -(-nbytes // PAGE) * PAGE


def new_memory(nbytes: int) -> torch.Tensor:
    """Whole pages, which go back to the system with the tensor: in a heap, copies between other tensors would leave gaps."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has limits of its own
    except OSError as error:
        raise OutOfMemoryError(f"cannot take {nbytes} bytes of memory for a tensor on its way between backward and storage: "
                               f"{error.strerror}; free memory, or lower the batch") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def bytes_of_memory(memory: torch.Tensor) -> Any:
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


class PageFile:
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
        view = memoryview(bytes_of_memory(memory)).cast("B")
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
