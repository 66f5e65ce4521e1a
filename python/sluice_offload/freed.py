"""Memory that has been freed and is still resident.

The C library keeps freed memory that lies between what is in use, and its pages stay with the process: the weights of a model
that offload() has taken, and what each module's backward leaves, which takes other free places in the next step. It gives such
pages back when it is asked to (malloc_trim).
"""

import ctypes as C
import os
import time

GROWTH = 64 << 20  # bytes: giving back takes a few milliseconds, and so does taking as much again
INTERVAL_S = 0.002  # between two looks: each takes 5 us, a good part of what a small unit costs, and memory does not grow far in this time


def resident() -> int:
    """This process's resident memory in bytes; 0 where the system does not say. Source: /proc/self/statm (proc(5))."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(os.read(file, 128).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(file)


class _Counts(C.Structure):
    """struct mallinfo2 (mallinfo(3)); `fordblks` is what is free, in bytes."""

    _fields_ = [(name, C.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                                                "fordblks", "keepcost")]


class FreedMemory:
    """Gives it back whenever the process has grown. Where the C library is another than GNU's, it does nothing."""

    def __init__(self) -> None:
        library = C.CDLL(None)
        self._trim, self._count = getattr(library, "malloc_trim", None), getattr(library, "mallinfo2", None)  # since 2.33
        if self._count is not None:
            self._count.restype = _Counts
        self._floor = 0      # resident memory at the last time, or less
        self._lowest = -1    # that it ever was; -1: not looked yet
        self._used = 0       # in use at the last time
        self._due = 0.0      # when to look again
        self._give_back()

    def _give_back(self) -> None:
        counts = _Counts() if self._count is None else self._count()
        if self._trim is not None and (self._count is None or counts.fordblks >= GROWTH):
            self._trim(C.c_size_t(0))
        self._floor = resident()
        self._lowest = self._floor if self._lowest < 0 else min(self._lowest, self._floor)
        self._used = counts.uordblks + counts.hblkhd

    def look(self) -> None:
        """Gives it back if resident memory has grown by GROWTH since the last time, and as much is free: else it is in use."""
        time_s = time.monotonic()
        if time_s >= self._due:
            self._due = time_s + INTERVAL_S
            self._look()

    def _look(self) -> None:
        now = resident()
        self._floor, self._lowest = min(self._floor, now), min(self._lowest, now)
        if now > self._floor + GROWTH:
            self._give_back()

    def look_closer(self) -> None:
        """Also gives it back if what was in use the last time has been freed since, such as the copies of a state_dict(). Takes a
        millisecond where there is such memory."""
        self._look()
        if self._count is not None and self._floor > self._lowest + GROWTH:
            counts = self._count()
            if counts.uordblks + counts.hblkhd + GROWTH <= self._used:
                self._give_back()
