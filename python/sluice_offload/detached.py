"""The detached optimizer of the C interface, in Python's words: tensors by number, updates with the addresses of parameters
and gradients. Knows nothing of param_groups or ranks.

Thread rule: calls of several threads follow each other. In a forked child every call raises ForkedError.
"""

import atexit
import contextlib
import ctypes as C
import json
import logging
import os
import threading
import weakref
from typing import Any, Optional, Sequence

import torch

from . import gpus
from . import library as lib
from .errors import OPTIMIZER_NOT_COPIED

logger = logging.getLogger("sluice_offload")

TYPES = {torch.float32: lib.FP32, torch.bfloat16: lib.BF16, torch.float16: lib.FP16}


def _destroy_at_exit(reference: "weakref.ref[Detached]") -> None:
    detached = reference()
    if detached is not None:
        detached.destroy_at_exit()


class Detached:
    """Owns the handle. `tensors`: names, numbers of elements, types, and whether parameter and gradient are on the GPU number
    `gpu`."""

    def __init__(self, config: "dict[str, Any]", tensors: "Sequence[tuple[str, int, torch.dtype, bool]]",
                 gpu: Optional[int] = None) -> None:
        self._lib = lib.library()
        self._handle = C.c_void_p()
        self._is_left = False  # to the end of the process
        self._pid = os.getpid()
        described = (lib.OptimizerTensor * len(tensors))()
        for place, (name, count, dtype, is_on_gpu) in zip(described, tensors):
            place.name, place.element_count, place.parameter_type = name.encode(), count, TYPES[dtype]
            place.is_on_gpu = is_on_gpu
        self._gpu, self._using = gpu, threading.RLock()
        text = json.dumps(config).encode()
        if gpu is None:
            self._lib.optimizer_create(text, described, len(tensors), C.byref(self._handle))
        else:
            self._lib.optimizer_create_on_gpu(text, described, len(tensors), gpu, C.byref(self._handle))
        atexit.register(_destroy_at_exit, weakref.ref(self))
        self.log_notes()

    def __reduce__(self) -> Any:
        raise OPTIMIZER_NOT_COPIED

    @property
    def is_open(self) -> bool:
        return bool(self._handle)

    def _alone(self) -> "contextlib.AbstractContextManager[Any]":
        """The library takes one thread at a time; autograd runs hooks of a GPU's parameters on another thread than those of the CPU's,
        and programs run several backward passes. A forked child could wait for a lock that nothing releases; the library refuses it."""
        return self._using if os.getpid() == self._pid else contextlib.nullcontext()

    def begin(self, updates: "Sequence[lib.Update]") -> None:
        """On a GPU, gradients and parameters are read after the work of torch's current stream."""
        array = (lib.Update * len(updates))(*updates)
        with self._alone():
            if self._gpu is None:
                self._lib.optimizer_begin(self._handle, array, len(updates))
            else:
                self._lib.optimizer_begin_on_gpu(self._handle, array, len(updates), gpus.current_stream(self._gpu))

    def wait(self, tensor: int = lib.ALL_TENSORS) -> None:
        with self._alone():
            self._lib.optimizer_wait(self._handle, tensor)

    def wait_all(self) -> None:
        with self._alone():
            self._lib.optimizer_wait_all(self._handle)

    def read(self, tensor: int, kind: int, count: int) -> torch.Tensor:
        values = torch.empty(count, dtype=torch.float32, device="cpu")
        with self._alone():
            self._lib.optimizer_read(self._handle, tensor, kind, 0, count, values.data_ptr())
        return values

    def write(self, tensor: int, kind: int, values: torch.Tensor) -> None:
        flat = values.detach().to("cpu", torch.float32).contiguous().view(-1)
        with self._alone():
            self._lib.optimizer_write(self._handle, tensor, kind, 0, flat.numel(), flat.data_ptr())

    def report(self) -> lib.OptimizerReport:
        report = lib.OptimizerReport()
        with self._alone():
            self._lib.optimizer_describe(self._handle, C.byref(report))
        return report

    def log_notes(self) -> None:
        note = C.c_char_p()
        while True:
            with self._alone():
                self._lib.optimizer_note(self._handle, C.byref(note))
                if note.value is None:
                    return
                text = note.value.decode(errors="replace")
            logger.warning("%s", text)

    def close(self) -> None:
        if self._handle and os.getpid() == self._pid:
            try:
                self.wait_all()
            finally:
                self.destroy()

    def destroy_at_exit(self) -> None:
        """A daemon thread that is in a call goes on until Python stops it."""
        if self._using.acquire(blocking=False):
            self.destroy()
            self._using.release()
        else:
            self._is_left = True

    def destroy(self) -> None:
        if self._is_left:
            return
        handle, self._handle = self._handle, C.c_void_p()
        if handle and os.getpid() == self._pid:
            self._lib.destroy_optimizer(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.destroy()
