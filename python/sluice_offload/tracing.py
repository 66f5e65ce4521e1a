"""Traces of this process, which the command `sluice trace` reads (docs/tracing.md)."""

import contextlib
import ctypes as C
import logging
import os
from typing import Iterator

from . import library as lib
from .errors import SluiceError
from .processes import count_processes, own_rank

logger = logging.getLogger("sluice_offload")


@contextlib.contextmanager
def trace(path: "str | os.PathLike[str]") -> "Iterator[None]":
    """Records each transfer, update, computation and wait of all engines and optimizers of this process in the file `path`,
    for `sluice trace`. Call offload() inside of it, so that the engine describes itself in the file, and close the optimizer
    inside, too. Records do not say which engine or optimizer they are of: units and blocks can only be told apart where one of
    them is alone in the trace. An older file is replaced at once. With several processes, the first writes `path`, and rank N `path`.rankN. One trace at a time."""
    rank, ranks = own_rank(), count_processes()
    own = os.fspath(path) if rank == 0 else f"{os.fspath(path)}.rank{rank}"
    library = lib.library()
    library.trace_start(os.fsencode(own), rank, ranks)
    result = lib.TraceResult()
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        try:
            library.trace_stop(C.byref(result))
        except SluiceError as failure:
            if not has_failed:
                raise
            logger.error("%s", failure)  # the program's own exception is raised
    if result.lost:
        logger.warning("%s lacks %d of %d records, which came faster than the file could be written", own, result.lost,
                       result.lost + result.records)
