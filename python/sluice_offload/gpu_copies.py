"""Copies of tensors between one GPU and pinned host memory, beside computation.

- Copies out of the GPU and copies into it run on a stream each. Events order them with torch's own streams, so that the program's
  thread waits for none of them.
- Pinned memory is kept for the next tensor of that size, since pinning takes longer than copying. At most as much is pinned as was
  in use at a time, and one tensor more.

Thread rule: any thread; the objects that a call is given belong to one thread at a time.
"""

import collections
import concurrent.futures
import threading
import weakref
from typing import Any, Optional

import torch

from .errors import OutOfMemoryError
from .page_file import new_memory


class Room:
    """Pinned host memory for one tensor. `uses` holds the event behind the last copy that is under way, if any."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
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
        self._out, self._back = self._new_stream(), self._new_stream()

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def _new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def _pin(self, memory: torch.Tensor) -> None:
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(code) != 0:
            raise OutOfMemoryError(f"cannot pin {memory.numel()} bytes of host memory for activations: {code}; lower the batch, or "
                                   'set activations to "keep"')

    @staticmethod  # what unpins must not keep the rooms alive
    def _unpin(memory: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def take(self, nbytes: int) -> Room:
        """A room of that size, which copies may still be using."""
        dropped = []
        with self._lock:
            rooms = self._free.get(nbytes)
            if rooms:
                return rooms.pop()
            missing = nbytes
            while self._free and missing > 0:
                size, rooms = next(iter(self._free.items()))
                if rooms:
                    dropped.append(rooms.pop())
                    missing -= size
                else:
                    del self._free[size]
        dropped.clear()  # outside of the lock: it waits for copies
        room = Room(new_memory(nbytes))
        self._pin(room.memory)
        weakref.finalize(room, _end, self._unpin, room.memory, room.uses).atexit = False  # the system unpins it then
        return room

    def give(self, room: Room) -> None:
        with self._lock:
            self._free.setdefault(room.memory.numel(), []).append(room)
            self._free.move_to_end(room.memory.numel())

    def close(self) -> None:
        """Unpins what is free."""
        with self._lock:
            free, self._free = self._free, collections.OrderedDict()
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
