"""A GPU's part played by the CPU, for machines without one. The library that SLUICE_LIBRARY names (libsluice_fake_gpu.so of a build
with tests) has a stand-in for the CUDA runtime, whose GPU memory is the host's. So torch computes on the CPU over the addresses that
the engine takes for a GPU's: everything runs but CUDA itself and torch's kernels.

As a plugin of pytest (-p fake_gpu) it lets every offload() of a test compute "on the GPU"."""

import ctypes
import functools
import os
import sys

import torch

import sluice_offload  # noqa: F401  (its modules are looked up below)
from sluice_offload import gpus
from sluice_offload.engine import Engine


@functools.cache
def _library():
    library = ctypes.CDLL(os.environ["SLUICE_LIBRARY"])
    library.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
    return library


@functools.cache
def stream():
    """A stream of the stand-in, which has no default stream."""
    made = ctypes.c_void_p()
    not_blocking = 1
    assert _library().cudaStreamCreateWithPriority(ctypes.byref(made), not_blocking, 0) == 0
    return made.value


_acquire = Engine._acquire_on_gpu


def _acquire_and_wait(self, unit, which, on):
    """torch's work on the CPU is on no stream, so it waits here for the transfers that the stream waits for."""
    lease = _acquire(self, unit, which, on)
    assert _library().cudaStreamSynchronize(on) == 0
    return lease


def patches():
    """(object, attribute, its value under the stand-in)"""
    return [(sys.modules["sluice_offload.offload"], "place_of", lambda tensors, device: gpus.Place(torch.device("cpu"), 0)),
            (gpus, "current_stream", lambda gpu: stream()), (gpus, "free_bytes", lambda gpu: 1 << 30),
            (Engine, "_acquire_on_gpu", _acquire_and_wait)]


def pytest_configure(config):
    for where, name, value in patches():
        setattr(where, name, value)
