"""Copies of tensors between one GPU and pinned host memory, beside computation.

- Copies out of the GPU and copies into it run on a stream each. Events order them with torch's own streams, so that the program's
  thread waits for none of them.
- Pinned memory is kept for the next tensor that it suits, since pinning takes longer than copying. At most a quarter more is pinned
  than was in use at a time.

Thread rule: any thread; the objects that a call is given belong to one thread at a time.
"""

import collections
import concurrent.futures
import functools
import threading
import weakref
from typing import Any, Optional

import torch

from .errors import OutOfMemoryError
from .page_file import new_memory


PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU
ROOMIER = 4  # a room may have up to so many times the bytes of its tensor, since the sizes of batches vary


class Room:
    """Pinned host memory, `whole`, of which one tensor has the first bytes, `memory`. `uses` holds the event behind the last copy that
    is under way, if any."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = self.memory = whole
        self.uses: "list[Any]" = []

    def used_until(self, event: Any) -> None:
        self.uses[:] = [event]

    def wait(self) -> None:
        """Waits until no copy uses the memory."""
        for event in self.uses:
            event.synchronize()


def _end(unpin: Any, memory: torch.Tensor, uses: "list[Any]") -> None:
    for event in uses:
        event.synchronize()
    unpin(memory)


def _forget_failure(device: torch.device) -> None:
    """CUDA keeps a call's failure for the thread's next question, which would be that of torch's next kernel. So a kernel asks."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        pass


class Landing:
    """Memory of the GPU for a tensor that comes back. `done` is the event behind its copy."""

    def __init__(self, memory: torch.Tensor, stream: Any, began: Any) -> None:
        self.memory, self.stream, self.began = memory, stream, began
        self.done: Any = None


class GpuCopies:
    """The copies of one GPU, `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.RLock()  # again by the same thread, where a tensor dies in the middle of something
        self._free: "collections.OrderedDict[int, list[Room]]" = collections.OrderedDict()  # by size, the longest unused first
        self._pinned = self._used = self._used_max = 0  # bytes of rooms; a room is in use from take() to give()
        self._out, self._back = self._new_stream(), self._new_stream()

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def _new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    # A thread's first GPU is number 0. The guards keep calls on any thread, and the streams that torch sets behind them, from making
    # a context there, which takes some hundred MB.

    def _copy(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def _pin(self, memory: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE)
            if int(code) != 0:
                _forget_failure(self.device)
                raise OutOfMemoryError(f"cannot pin {memory.numel()} bytes of host memory for activations: {code}; lower the batch, or "
                                       'set activations to "keep"')

    @staticmethod  # what unpins must not keep the rooms alive
    def _unpin(device: torch.device, memory: torch.Tensor) -> None:
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())) != 0:
                _forget_failure(device)

    def take(self, nbytes: int) -> Room:
        """A room for so many bytes, which copies may still be using."""
        dropped = []
        with self._lock:
            suitable = [size for size, rooms in self._free.items() if rooms and nbytes <= size <= ROOMIER * nbytes]
            size = min(suitable, default=nbytes)
            self._used += size
            self._used_max = max(self._used, self._used_max)
            if suitable:
                room = self._free[size].pop()
                room.memory = room.whole[:nbytes]
                return room
            while self._free and self._pinned + nbytes > self._used_max * 5 // 4:
                size, rooms = next(iter(self._free.items()))
                if rooms:
                    dropped.append(rooms.pop())
                    self._pinned -= size
                else:
                    del self._free[size]
            self._pinned += nbytes
        dropped.clear()  # outside of the lock: it waits for copies
        try:
            room = Room(new_memory(nbytes))
            self._pin(room.whole)
        except BaseException:
            with self._lock:
                self._used -= nbytes
                self._pinned -= nbytes
            raise
        unpin = functools.partial(self._unpin, self.device)
        weakref.finalize(room, _end, unpin, room.whole, room.uses).atexit = False  # the system unpins it then
        return room

    def give(self, room: Room) -> None:
        with self._lock:
            size = room.whole.numel()
            self._used -= size
            self._free.setdefault(size, []).append(room)
            self._free.move_to_end(size)

    def close(self) -> None:
        """Unpins what is free."""
        with self._lock:
            free, self._free = self._free, collections.OrderedDict()
            self._pinned -= sum(size * len(rooms) for size, rooms in free.items())
        free.clear()

    def copy_out(self, source: torch.Tensor, ready: Any, room: Room) -> Any:
        """Begins to copy `source`, flat bytes of the GPU that are there behind the event `ready`. Returns the event behind the copy;
        `source` has to live and to stay the same until then."""
        for event in [ready, *room.uses]:
            self._out.wait_event(event)
        self._copy(room.memory[:source.numel()], source, self._out)
        done = self._out.record_event()
        room.used_until(done)
        return done

    def release(self, tensor: torch.Tensor, stream: Any, done: Any) -> None:
        """Lets a tensor of `stream` go whose copy ends with the event `done`: what computes next may take its memory."""
        current = self.current_stream()
        current.wait_event(done)
        if stream != current:
            self._hold(tensor, self._out)

    def landing(self, nbytes: int) -> Landing:
        """Memory for a copy into the GPU, as the program's thread takes it from torch: work before it may still use it."""
        stream = self.current_stream()
        return Landing(torch.empty(nbytes, dtype=torch.uint8, device=self.device), stream, stream.record_event())

    def copy_back(self, room: Room, landing: Landing) -> None:
        """Begins to copy from a room, in which the bytes are or will be when its last use has ended."""
        for event in [landing.began, *room.uses]:
            self._back.wait_event(event)
        self._copy(landing.memory, room.memory[:landing.memory.numel()], self._back)
        landing.done = self._back.record_event()
        room.used_until(landing.done)

    def landed(self, landing: Landing) -> torch.Tensor:
        """The bytes that have come back, for work that the current stream does from here on."""
        current = self.current_stream()
        current.wait_event(landing.done)
        if landing.stream != current:
            self._hold(landing.memory, current)
        return landing.memory

    def unwanted(self, read: "concurrent.futures.Future[Any]") -> None:
        """Gives memory back that no backward will ask for, and in which a copy may be under way."""
        landing = None if read.cancelled() or read.exception() is not None else read.result()
        if isinstance(landing, Landing):
            self._hold(landing.memory, self._back)

    def _hold(self, memory: torch.Tensor, stream: Any) -> None:
        """Memory that goes back to torch's allocator is free behind what `stream` does now."""
        memory.record_stream(stream)
