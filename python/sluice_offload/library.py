"""libsluice.so by ctypes, which lets other Python threads run during every call. `Library` is the interface of capi/sluice.h
and capi/sluice_gpu.h function by function; a status that is not 0 becomes an exception."""

import ctypes as C
import os
import pathlib
from typing import Any, NoReturn

from .errors import SluiceError, error_of

ABI_VERSION = 3
FORWARD, BACKWARD, INFERENCE = 0, 1, 2
PARAMETER, MASTER, EXP_AVG, EXP_AVG_SQ = 0, 1, 2, 3
OPAQUE, ANNOUNCED, PINNED, LOCAL = 2, 4, 8, 16  # of Unit.is_frozen
PENDING = 16  # a status that is no failure
FP32, BF16, FP16 = 0, 1, 2
ALL_TENSORS = 0xffffffff


class Tensor(C.Structure):
    _fields_ = [("name", C.c_char_p), ("shape", C.POINTER(C.c_uint64)), ("dimensions", C.c_uint32),
                ("has_decay", C.c_int32)]


class Unit(C.Structure):
    _fields_ = [("name", C.c_char_p), ("tensors", C.POINTER(Tensor)), ("tensor_count", C.c_uint32),
                ("is_frozen", C.c_int32)]


class Model(C.Structure):
    _fields_ = [("units", C.POINTER(Unit)), ("unit_count", C.c_uint32), ("concurrent_leases", C.c_uint32),
                ("forward_order", C.POINTER(C.c_uint32)), ("backward_order", C.POINTER(C.c_uint32)),
                ("forward_count", C.c_uint32), ("backward_count", C.c_uint32)]


class StepOptions(C.Structure):
    _fields_ = [("learning_rate", C.c_double), ("gradient_divisor", C.c_double),
                ("group_learning_rates", C.POINTER(C.c_double)), ("group_count", C.c_uint32),
                ("micro_batches", C.c_uint32)]


class FinishOptions(C.Structure):
    _fields_ = [("learning_rate", C.c_double), ("gradient_divisor", C.c_double),
                ("group_learning_rates", C.POINTER(C.c_double)), ("group_count", C.c_uint32), ("reserved", C.c_uint32)]


class StepReport(C.Structure):
    """Figures of one step; capi/sluice.h describes each field."""
    _fields_ = [("step", C.c_uint64), ("gradient_norm", C.c_double), ("clip_factor", C.c_double),
                ("loss_scale", C.c_double), ("nvme_read_bytes", C.c_uint64), ("nvme_write_bytes", C.c_uint64),
                ("stall_ns", C.c_int64), ("optimizer_ns", C.c_int64), ("schedule_changes", C.c_uint32),
                ("is_skipped", C.c_int32)]

    def __repr__(self) -> str:
        return "StepReport(" + ", ".join(f"{name}={getattr(self, name)}" for name, _ in self._fields_) + ")"


class GpuRanks(C.Structure):
    _fields_ = [("id", C.c_char_p), ("rank", C.c_uint32), ("rank_count", C.c_uint32)]


class Figures(C.Structure):
    _fields_ = [("loss", C.c_double), ("tokens", C.c_uint64), ("steps", C.c_uint64), ("flops_per_token", C.c_double),
                ("peak_flops", C.c_double)]


class Lease(C.Structure):
    _fields_ = [("parameters", C.c_void_p), ("gradients", C.c_void_p), ("id", C.c_uint64)]


class UnitInfo(C.Structure):
    _fields_ = [("parameter_bytes", C.c_uint64), ("gradient_bytes", C.c_uint64), ("first_tensor", C.c_uint32),
                ("tensor_count", C.c_uint32)]


class TensorInfo(C.Structure):
    _fields_ = [("offset_elements", C.c_uint64), ("element_count", C.c_uint64), ("unit", C.c_uint32),
                ("reserved", C.c_uint32)]


class Traffic(C.Structure):
    _fields_ = [("nvme_read_bytes", C.c_uint64), ("nvme_write_bytes", C.c_uint64)]


class TraceResult(C.Structure):
    _fields_ = [("records", C.c_uint64), ("lost", C.c_uint64), ("file_bytes", C.c_uint64)]


class OptimizerTensor(C.Structure):
    _fields_ = [("name", C.c_char_p), ("element_count", C.c_uint64), ("parameter_type", C.c_int32),
                ("is_on_gpu", C.c_uint32)]


class Update(C.Structure):
    _fields_ = [("parameter", C.c_void_p), ("gradient", C.c_void_p), ("step", C.c_uint64), ("learning_rate", C.c_double),
                ("beta1", C.c_double), ("beta2", C.c_double), ("epsilon", C.c_double), ("weight_decay", C.c_double),
                ("momentum", C.c_double), ("gradient_scale", C.c_double), ("tensor", C.c_uint32),
                ("gradient_type", C.c_int32)]


class OptimizerReport(C.Structure):
    """The work of an optimizer since it was made, and the memory that it takes; capi/sluice.h describes each field."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)}" for name, _ in self._fields_ if name != "reserved")
        return f"OptimizerReport({fields})"

    _fields_ = [("nvme_read_bytes", C.c_uint64), ("nvme_write_bytes", C.c_uint64), ("updated_elements", C.c_uint64),
                ("adopted_elements", C.c_uint64), ("non_finite_blocks", C.c_uint64), ("host_bytes", C.c_uint64),
                ("nvme_bytes", C.c_uint64), ("pass_bytes", C.c_uint64), ("pending_tensors", C.c_uint32),
                ("reserved", C.c_uint32)]


Values = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_uint32, C.c_uint64, C.POINTER(C.c_float), C.c_uint64)
Sums = C.CFUNCTYPE(C.c_int, C.c_void_p, C.POINTER(C.c_uint64), C.c_uint64)

_ENGINE = C.c_void_p
_ARGUMENTS = {
    "engine_create": [C.c_char_p, C.POINTER(Model), C.POINTER(_ENGINE)],
    "engine_create_on_gpu": [C.c_char_p, C.POINTER(Model), C.c_int32, C.POINTER(GpuRanks), C.POINTER(_ENGINE)],
    "gpu_ranks_id": [C.POINTER(C.c_char_p)],
    "initialize": [_ENGINE, Values, C.c_void_p],
    "close": [_ENGINE],
    "drain": [_ENGINE],
    "begin_step": [_ENGINE, C.POINTER(StepOptions)],
    "finish_step": [_ENGINE, C.POINTER(FinishOptions), C.POINTER(StepReport)],
    "abandon_step": [_ENGINE],
    "gradient_norm": [_ENGINE, C.c_double, C.POINTER(C.c_double)],
    "show_status": [_ENGINE, C.POINTER(Figures)],
    "loss_scale": [_ENGINE, C.POINTER(C.c_double)],
    "begin_inference": [_ENGINE],
    "end_inference": [_ENGINE],
    "acquire_within": [_ENGINE, C.c_uint32, C.c_uint32, C.c_int32, C.POINTER(Lease)],
    "acquire_on_gpu": [_ENGINE, C.c_uint32, C.c_uint32, C.c_int32, C.c_void_p, C.POINTER(Lease)],
    "announce": [_ENGINE, C.POINTER(C.c_uint32), C.c_uint32, C.c_int32, C.POINTER(C.c_uint32), C.POINTER(C.c_uint32)],
    "release": [_ENGINE, C.c_uint64],
    "release_on_gpu": [_ENGINE, C.c_uint64, C.c_void_p],
    "read_state": [_ENGINE, C.c_uint32, C.c_int32, C.c_uint64, C.c_uint64, C.c_void_p],
    "applied_step": [_ENGINE, C.POINTER(C.c_uint64)],
    "unit_describe": [_ENGINE, C.c_uint32, C.POINTER(UnitInfo)],
    "tensor_describe": [_ENGINE, C.c_uint32, C.POINTER(TensorInfo)],
    "predicted_traffic": [_ENGINE, C.c_uint32, C.POINTER(Traffic)],
    "next_note": [_ENGINE, C.POINTER(C.c_char_p)],
    "save": [_ENGINE, C.c_char_p, C.c_uint32, C.c_char_p],
    "begin_save": [_ENGINE, C.c_char_p, C.c_uint32, C.c_char_p],
    "poll_save": [_ENGINE, C.POINTER(C.c_int)],
    "finish_save": [_ENGINE, C.POINTER(C.c_int)],
    "restore": [_ENGINE, C.c_char_p, C.c_int],
    "open_or_create": [_ENGINE, Values, C.c_void_p, C.c_int, C.POINTER(C.c_int)],
    "set_application": [_ENGINE, C.c_char_p],
    "commit_now": [_ENGINE],
    "committed_step": [_ENGINE, C.POINTER(C.c_uint64), C.POINTER(C.c_int)],
    "application_text": [_ENGINE, C.POINTER(C.c_char_p)],
    "saved_path": [_ENGINE, C.POINTER(C.c_char_p)],
    "optimizer_create": [C.c_char_p, C.POINTER(OptimizerTensor), C.c_uint32, C.POINTER(_ENGINE)],
    "optimizer_create_on_gpu": [C.c_char_p, C.POINTER(OptimizerTensor), C.c_uint32, C.c_int32, C.POINTER(_ENGINE)],
    "optimizer_begin": [_ENGINE, C.POINTER(Update), C.c_uint32],
    "optimizer_begin_on_gpu": [_ENGINE, C.POINTER(Update), C.c_uint32, C.c_void_p],
    "why_no_gpu": [C.c_int32, C.POINTER(C.c_char_p)],
    "optimizer_wait": [_ENGINE, C.c_uint32],
    "optimizer_wait_all": [_ENGINE],
    "optimizer_read": [_ENGINE, C.c_uint32, C.c_int32, C.c_uint64, C.c_uint64, C.c_void_p],
    "optimizer_write": [_ENGINE, C.c_uint32, C.c_int32, C.c_uint64, C.c_uint64, C.c_void_p],
    "optimizer_describe": [_ENGINE, C.POINTER(OptimizerReport)],
    "optimizer_note": [_ENGINE, C.POINTER(C.c_char_p)],
    "is_deepspeed": [C.c_char_p, C.POINTER(C.c_int)],
    "import_deepspeed": [C.c_char_p, C.c_char_p, C.c_char_p, C.POINTER(C.c_char_p)],
    "replace_values": [_ENGINE, C.POINTER(C.c_uint32), C.c_uint32, Values, C.c_void_p],
    "read_config": [C.c_char_p, C.c_char_p, C.POINTER(C.c_char_p)],
    "plan": [C.c_char_p, C.POINTER(Model), C.POINTER(C.c_char_p)],
    "plan_on_gpu": [C.c_char_p, C.POINTER(Model), C.POINTER(C.c_char_p)],
    "set_norm_group": [_ENGINE, Sums, C.c_void_p, C.POINTER(C.c_uint32), C.c_uint32],
    "trace_start": [C.c_char_p, C.c_uint32, C.c_uint32],
    "trace_stop": [C.POINTER(TraceResult)],
    "learning_rates": [C.c_char_p, C.c_uint64, C.c_uint64, C.POINTER(C.c_double)],
    "ranks_create": [C.c_char_p, C.c_uint32, C.c_uint32, C.POINTER(_ENGINE)],
    "ranks_endpoint": [_ENGINE, C.POINTER(C.c_char_p)],
    "ranks_connect": [_ENGINE, C.c_char_p, C.POINTER(C.c_char_p)],
    "engine_create_ranked": [C.c_char_p, C.POINTER(Model), _ENGINE, C.POINTER(_ENGINE)],
}


def path() -> str:
    """The path of the library."""
    given = os.environ.get("SLUICE_LIBRARY")
    if given:
        return given
    return str(pathlib.Path(__file__).with_name("libsluice.so"))


class Library:
    """The functions of capi/sluice.h without their prefix, as methods that raise."""

    def __init__(self) -> None:
        found = path()
        try:
            self._dll = C.CDLL(found)
        except OSError as error:
            raise SluiceError(f"cannot load {found}: {error}; the package is built by `pip wheel ./python` in Sluice's "
                              "source tree, and SLUICE_LIBRARY may name another libsluice.so. If another library is missing: "
                              "it is in the packages of tools/packages.txt, and a wheel of tools/wheel.sh holds it") from error
        if self._dll.sluice_abi_version() != ABI_VERSION:
            raise SluiceError(f"{found} has version {self._dll.sluice_abi_version()} of the C interface, but this package "
                              f"is made for {ABI_VERSION}; install both from one source tree")
        self._dll.sluice_last_error.restype = C.c_char_p
        self._dll.sluice_version.restype = C.c_char_p
        self._dll.sluice_engine_destroy.argtypes = [_ENGINE]
        self._dll.sluice_engine_destroy.restype = None
        self._dll.sluice_optimizer_destroy.argtypes = [_ENGINE]
        self._dll.sluice_optimizer_destroy.restype = None
        self._dll.sluice_ranks_destroy.argtypes = [_ENGINE]
        self._dll.sluice_ranks_destroy.restype = None
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._dll, "sluice_" + name)
            function.argtypes = arguments
            function.restype = C.c_int
            setattr(self, name, self._raising(function))

        # Without what _raising() adds, for calls at every use of a unit: the caller looks at the status.
        self.raw_acquire, self.raw_release = self._dll.sluice_acquire_within, self._dll.sluice_release
        self.raw_acquire_on_gpu, self.raw_release_on_gpu = self._dll.sluice_acquire_on_gpu, self._dll.sluice_release_on_gpu

    def fail(self, status: int) -> NoReturn:
        """Raises what a status that is not 0 means."""
        raise error_of(status, self._dll.sluice_last_error().decode(errors="replace"))

    def _raising(self, function: Any) -> Any:
        def call(*arguments: Any) -> None:
            status = function(*arguments)
            if status != 0:
                self.fail(status)
        return call

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def version(self) -> str:
        return str(self._dll.sluice_version().decode())

    def destroy(self, handle: C.c_void_p) -> None:
        self._dll.sluice_engine_destroy(handle)

    def destroy_ranks(self, handle: C.c_void_p) -> None:
        self._dll.sluice_ranks_destroy(handle)

    def destroy_optimizer(self, handle: C.c_void_p) -> None:
        self._dll.sluice_optimizer_destroy(handle)


_library: "Library | None" = None


def library() -> Library:
    """The library, loaded when it is first asked for."""
    global _library
    if _library is None:
        _library = Library()
    return _library
