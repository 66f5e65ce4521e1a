"""One engine of the C interface, in Python's words: configs as dictionaries, units as units.py has them, numbers and
bytes. Knows nothing of hooks or autograd.

Thread rule: one thread at a time; the library refuses a second one. In a forked child every call raises ForkedError.
"""

import atexit
import contextlib
import copy
import ctypes as C
import json
import math
import logging
import os
import weakref
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import torch

from . import gpus
from . import library as lib
from .errors import NOT_COPIED, ArgumentError, ConfigError, RanksError, SluiceError
from .gpus import CPU, Place, missing_settings
from .processes import World, share_of_cores
from .structures import bytes_of, copy_values, flat_of, model_of, order_of
from .units import Member, Unit, Units, common_dtype

logger = logging.getLogger("sluice_offload")

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}

# An interrupt (Ctrl-C) waits for a drive no longer than that.
_POLL_MS = 100

Config = Mapping[str, Any]


def read_config(config: "Config | str | os.PathLike[str]") -> "dict[str, Any]":
    """A config as a dictionary, from one, or from the path of a file of JSON with comments. Raises ConfigError with line and
    column where `sluice train` would refuse the file."""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, bytes, os.PathLike)):
        raise ConfigError(f"the config is of the type {type(config).__name__}; give a dictionary, or the path of a JSON file. {{}} has the "
                          "default of every key")
    with open(config, "rb") as file:
        text = file.read()
    found: Any = None
    with contextlib.suppress(ValueError):  # JSON with comments, or none: the library says where
        found = json.loads(text)
    if isinstance(found, dict):
        require_no_deepspeed(found)
    return config_of_text(text, os.fspath(config))


def config_of_text(text: bytes, name: str) -> "dict[str, Any]":
    """The dictionary of a config file's text; messages call the file `name`. The C++ library reads it, as for `sluice train`."""
    if b"\0" in text:
        raise ConfigError(f"{name} has a NUL byte; a config is text")
    plain = C.c_char_p()
    lib.library().read_config(text, os.fsencode(name), C.byref(plain))
    assert plain.value is not None
    return dict(json.loads(plain.value))


# Sections that a config of DeepSpeed has and one of Sluice has not.
_DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "aio"}


def require_no_deepspeed(settings: "Mapping[str, Any]") -> None:
    """Raises ConfigError for a config of DeepSpeed where one of Sluice is needed."""
    found = sorted(_DEEPSPEED_KEYS & set(settings))
    if found:
        raise ConfigError(f"{found[0]} is a key of DeepSpeed, and this needs a config of Sluice: sluice_offload.initialize() takes "
                          "DeepSpeed's, and `sluice config import FILE` turns it into one of Sluice")


def require_no_store(settings: "Mapping[str, Any]", call: str) -> None:
    """Refuses a durable store where a framework goes on from checkpoints of its own, which such a store cannot take."""
    found: Any = settings
    for key in ("storage", "state", "name"):
        found = found.get(key) if isinstance(found, Mapping) else None
    if found:
        raise ArgumentError(f"{call}: storage.state.name is \"{found}\", a durable store, which goes on from its own commits, and not from "
                            "the checkpoints that this saves; leave storage.state out of the config")


def is_memory(path: "str | os.PathLike[str]") -> bool:
    """Whether a folder is in memory (tmpfs), and not on a drive."""
    with contextlib.suppress(OSError), open("/proc/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        places = [line.split(" ")[1:3] for line in mounts]
        real = os.path.realpath(path)
        over = [(place, kind) for place, kind in places if real == place or real.startswith(place.rstrip("/") + "/")]
        return max(over, key=lambda entry: len(entry[0]), default=("", ""))[1] in ("tmpfs", "ramfs")
    return False


def warn_of_memory(config: "Mapping[str, Any]") -> None:
    """Logs a warning for each storage path that is memory: state there takes what the budgets save."""
    for path in config.get("storage", {}).get("paths", []):
        if isinstance(path, str) and is_memory(path):
            logger.warning("storage.paths: %s is memory (tmpfs), not a drive, so state there takes memory beyond the budgets; name a "
                           "folder on a drive", path)


def names_type(config: "Mapping[str, Any]") -> bool:
    """Whether the config says which type all parameters have."""
    precision = config.get("precision")
    return isinstance(precision, Mapping) and "parameters" in precision


def complete_config(config: "dict[str, Any]", units: Units, processes: int = 1, place: Place = CPU) -> "dict[str, Any]":
    """Fills in what a torch program means where the config says nothing: the model's own type; gradients of the same;
    an update that waits for the end of backward where an early one could be wrong, since torch does not say beforehand how
    many backward passes a step has; half of the cores, since torch computes on the others, or on a GPU all but one, shared by the
    `processes` of this host that train; half of a GPU's free memory."""
    precision = config.setdefault("precision", {})
    if "parameters" not in precision:
        dtype = common_dtype(units)
        if dtype not in _NAMES:
            raise ArgumentError(f"the model is of {dtype}; parameters have to be of fp32, bf16 or fp16")
        precision["parameters"] = _NAMES[dtype]
    precision.setdefault("gradients", precision["parameters"])
    optimizer = config.setdefault("optimizer", {})
    if optimizer.get("overlap", "auto") == "auto" and optimizer.get("clip_norm") == 0:
        optimizer["overlap"] = "deferred"
    cores = share_of_cores(processes)
    ours = cores // 2 if place.gpu is None else cores - 1
    config.setdefault("run", {}).setdefault("threads", max(1, ours))
    if place.gpu is not None and "device" not in config.setdefault("memory", {}):
        half = gpus.free_bytes(place.gpu) // 2
        config["memory"]["device"] = str(half)
        logger.info("memory.device is %.2f GiB, half of what %s has free; the config may name it", half / 2**30, place.device)
    return config


def _shape_text(shape: "list[int]", is_opaque: bool) -> str:
    return f"shape {shape}{', in opaque words' if is_opaque else ''}"


def _close_at_exit(reference: "weakref.ref[Engine]") -> None:
    engine = reference()
    if engine is None:
        return
    try:
        engine.require_alone()
    except ArgumentError:  # a daemon thread goes on until Python stops it
        engine.is_left = True
    engine.destroy()


class Engine:
    """Owns the handle. `close` ends it with every update home; `destroy`, which also runs at the interpreter's exit, ends
    it as it is."""

    _all: "weakref.WeakSet[Engine]" = weakref.WeakSet()  # of this process

    @classmethod
    def has_open(cls) -> bool:
        """Whether the process has an engine that is not closed."""
        return any(engine.is_open for engine in cls._all)

    def __init__(self, config: "dict[str, Any]", units: Units, world: Optional[World] = None, place: Place = CPU) -> None:
        self._lib = lib.library()
        self.place, self._gpu = place, place.gpu
        self._handle, self._ranks = C.c_void_p(), C.c_void_p()
        self._lease = lib.Lease()
        self._lease_pointer = C.byref(self._lease)
        self.world = world
        self._pid = os.getpid()
        self.changes = 0  # so many times the parameters may have changed
        self._last_saved: "Optional[str]" = None  # that replace_state() has waited for, and saved() will return
        self.end_idle_step: "Callable[[bool], None]" = lambda changes: None  # of the walk; before values are read or replaced
        self.require_own_values: "Callable[[], None]" = lambda: None  # of the walk; raises where another thread computes with what is lent
        self.is_left = False  # to the end of the process
        self._norm_group: "Optional[tuple[Any, Any, int]]" = None  # what C calls lives here
        self._norm_failure: "Optional[BaseException]" = None
        self._config, self._units = json.dumps(config).encode(), units
        self.figures = lib.Figures(loss=math.nan)  # as show() was told them
        self.last_loss = math.nan  # of the last step, where show() was told it
        self._is_shown = config.get("run", {}).get("status", "auto") != "off"
        self._create()
        Engine._all.add(self)
        atexit.register(_close_at_exit, weakref.ref(self))
        self.dtype, self.gradient_dtype = (_TYPES[config["precision"][kind]] for kind in ("parameters", "gradients"))
        self._parameters: "dict[int, int]" = {}
        for unit in units.units:
            info = lib.UnitInfo()
            self._lib.unit_describe(self._handle, unit.index, C.byref(info))
            self._parameters[unit.index] = info.parameter_bytes
            for i, member in enumerate(unit.members):
                member.tensor = info.first_tensor + i
                place = lib.TensorInfo()
                self._lib.tensor_describe(self._handle, member.tensor, C.byref(place))
                member.offset = place.offset_elements
        self.log_notes()

    def _create(self) -> None:
        self._report = lib.StepReport()
        self._last_report: "Optional[lib.StepReport]" = None
        keep: "list[Any]" = []
        model = model_of(self._units, keep)
        if self._gpu is not None:
            ranks = None if self.world is None else C.byref(self._gpu_ranks(self.world))
            self._lib.engine_create_on_gpu(self._config, C.byref(model), self._gpu, ranks, C.byref(self._handle))
        elif self.world is None:
            self._lib.engine_create(self._config, C.byref(model), C.byref(self._handle))
        else:
            try:
                self._connect(self.world)
                self._lib.engine_create_ranked(self._config, C.byref(model), self._ranks, C.byref(self._handle))
            except BaseException:
                self._leave()
                raise
        if self._norm_group is not None:
            self._join_norm_group()
        self.show()

    def show(self, **figures: float) -> None:
        """Shows the training in `sluice top`, with these figures of lib.Figures beside those given before."""
        new = lib.Figures.from_buffer_copy(self.figures)
        for name, value in figures.items():
            setattr(new, name, value)
        if self._is_shown:
            self._lib.show_status(self._handle, C.byref(new))
        self.figures = new

    def set_norm_group(self, add: "Callable[[torch.Tensor], None]", elsewhere: "Sequence[Member]") -> None:
        """Each step's norm is that of a group: `add` adds a tensor of int64 over it, in place. `elsewhere`: parameters that
        another member counts."""
        def call(_context: Any, sums: Any, count: int) -> int:
            try:
                add(torch.frombuffer((C.c_int64 * count).from_address(C.addressof(sums.contents)), dtype=torch.int64))
                return 0
            except BaseException as error:  # raised by _norm_group_failures(), on the other side of the C call
                self._norm_failure = error
                return 1
        self._norm_group = (lib.Sums(call), order_of([member.tensor for member in elsewhere]), len(elsewhere))
        self._join_norm_group()

    def _join_norm_group(self) -> None:
        assert self._norm_group is not None
        call, elsewhere, count = self._norm_group
        self._lib.set_norm_group(self._handle, call, None, elsewhere, count)

    def _connect(self, world: World) -> None:
        self._lib.ranks_create(world.address().encode(), world.rank, world.size, C.byref(self._ranks))
        endpoint = C.c_char_p()
        self._lib.ranks_endpoint(self._ranks, C.byref(endpoint))
        own = endpoint.value or b""
        endpoints = (C.c_char_p * world.size)(*(text.encode() for text in world.exchange(own.decode())))
        self._lib.ranks_connect(self._ranks, self._config, endpoints)

    def _gpu_ranks(self, world: World) -> lib.GpuRanks:
        """The first rank's text, by which NCCL brings all together."""
        # NCCL reads them at its first call: connections are made at once, and operations that are enqueued meet no other rank.
        for name in ("NCCL_RUNTIME_CONNECT", "NCCL_LOCAL_REGISTER"):
            os.environ.setdefault(name, "0")
        missing = missing_settings(os.environ)
        if missing and world.rank == 0:
            logger.warning("several GPUs: start the program with %s in its environment, as in \"%s torchrun ...\"; otherwise the ranks may "
                           "wait for each other until sharding.timeout when CUDA loads a kernel", " and ".join(missing), " ".join(missing))
        own, failure = C.c_char_p(), ""
        if world.rank == 0:
            try:
                self._lib.gpu_ranks_id(C.byref(own))
            except SluiceError as error:
                failure = str(error)
        found, failure = world.exchange([(own.value or b"").decode(), failure])[0]
        if failure:
            raise RanksError(f"rank 0 cannot begin to connect the GPUs: {failure}")
        return lib.GpuRanks(found.encode(), world.rank, world.size)

    def _leave(self) -> None:
        ranks, self._ranks = self._ranks, C.c_void_p()
        if ranks:
            self._lib.destroy_ranks(ranks)

    def __reduce__(self) -> Any:
        raise NOT_COPIED

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()

    def parameter_bytes(self, unit: Unit) -> int:
        return int(self._parameters[unit.index])

    def initialize(self, values: "Callable[[Member], torch.Tensor]", units: Units) -> None:
        """Sets every parameter from `values`, asked for once or more for each, in no order."""
        self._fill(values, units, lambda fill: self._lib.initialize(self._handle, fill, None))

    def open_or_create(self, values: "Callable[[Member], torch.Tensor]", units: Units, accept_changes: bool) -> "Optional[str]":
        """Goes on from the durable store's last commit, and returns the text that it has of the application; or makes the
        store from `values`, as initialize() does, and returns None. `accept_changes`: also with other numbers in the config."""
        is_new = C.c_int()
        self._fill(values, units,
                   lambda fill: self._lib.open_or_create(self._handle, fill, None, accept_changes, C.byref(is_new)))
        return None if is_new.value else self._application_text()

    def replace(self, values: "Callable[[Member], torch.Tensor]", members: "Sequence[Member]") -> None:
        """Gives parameters other values, between two steps; moments stay. All ranks name the same ones."""
        self.end_idle_step(True)
        tensors = order_of([member.tensor for member in members])
        self._fill(values, self._units,
                   lambda fill: self._lib.replace_values(self._handle, tensors, len(members), fill, None))

    def committed_step(self) -> "Optional[int]":
        """The last step whose commit is durable; None without a durable store, or a commit."""
        step, has_one = C.c_uint64(), C.c_int()
        self._lib.committed_step(self._handle, C.byref(step), C.byref(has_one))
        return int(step.value) if has_one.value else None

    def set_application(self, text: str) -> None:
        """Sets the text that commits keep, from the next finished step on."""
        self._lib.set_application(self._handle, text.encode())

    def commit_now(self) -> None:
        """Commits the last step."""
        self._lib.commit_now(self._handle)

    def _fill(self, values: "Callable[[Member], torch.Tensor]", units: Units, call: "Callable[[Any], Any]") -> None:
        self.changes += 1
        members = {member.tensor: member for unit in units.units for member in unit.members}
        failure: "list[BaseException]" = []
        last: "tuple[int, Optional[torch.Tensor]]" = (-1, None)

        def fill(_context: Any, tensor: int, first: int, target: Any, count: int) -> int:
            nonlocal last
            try:
                member = members[tensor]
                if last[0] != tensor:
                    last = (-1, None)
                    last = (tensor, (bytes_of if member.is_opaque else flat_of)(member, values(member)))
                assert last[1] is not None
                kind, dtype = (C.c_uint8, torch.uint8) if member.is_opaque else (C.c_float, torch.float32)
                view = torch.frombuffer((kind * count).from_address(C.addressof(target.contents)), dtype=dtype)
                copy_values(last[1][first:first + count], view)
                return 0
            except BaseException as error:  # raised below, on the other side of the C call
                failure.append(error)
                return 1

        try:
            call(lib.Values(fill))
        except Exception:
            if failure:
                raise failure[0]
            raise

    def save(self, root: "str | os.PathLike[str]", keep: int, application: str) -> str:
        """Writes a checkpoint into a folder of its own below `root`, and returns that one's path."""
        os.makedirs(root, exist_ok=True)
        self._lib.save(self._handle, os.fsencode(root), keep, application.encode())
        return self._saved_path()

    def begin_save(self, root: "str | os.PathLike[str]", keep: int, application: str) -> None:
        """The same, beside training."""
        os.makedirs(root, exist_ok=True)
        self._lib.begin_save(self._handle, os.fsencode(root), keep, application.encode())
        self._last_saved = None  # else saved() would return it, and wait for nothing

    def saved(self, waits: bool) -> Optional[str]:
        """The path of the checkpoint that begin_save() began, once: when it has appeared, or, with `waits`, after waiting."""
        path, self._last_saved = self._last_saved, None
        if path is not None:
            return path
        has_one = C.c_int()
        (self._lib.finish_save if waits else self._lib.poll_save)(self._handle, C.byref(has_one))
        return self._saved_path() if has_one.value else None

    def _saved_path(self) -> str:
        path = C.c_char_p()
        self._lib.saved_path(self._handle, C.byref(path))
        self.log_notes()
        assert path.value is not None
        return os.fsdecode(path.value)

    def restore(self, folder: "str | os.PathLike[str]", converts: bool) -> str:
        """Takes all of the state from a checkpoint, instead of initialize(), and returns the text that came with it."""
        self.changes += 1
        self._lib.restore(self._handle, os.fsencode(folder), converts)
        return self._application_text()

    def replace_state(self, folder: "str | os.PathLike[str]", converts: bool) -> str:
        """Takes all of the state from a checkpoint, instead of the one that there is, and returns the text that came with
        it. Units have other addresses from then on."""
        if not os.path.isfile(os.path.join(folder, "sluice_state.json")):
            raise ArgumentError(f"{os.fspath(folder)} is no checkpoint, for it has no sluice_state.json; the state is as before")
        self._require_same_model(folder, converts)
        self._last_saved = self.saved(waits=True)  # a save under way would end with this engine
        self.drain()
        self.destroy()
        self._create()
        try:
            return self.restore(folder, converts)
        except Exception:
            self.destroy()
            logger.error("the state from before is gone with the checkpoint that could not be read: %s", os.fspath(folder))
            raise

    def _require_same_model(self, folder: "str | os.PathLike[str]", converts: bool) -> None:
        """Before anything is changed. The engine sees what is wrong with a description that cannot be read."""
        own_settings, own = json.loads(self._config), self._described()
        try:
            with open(os.path.join(folder, "sluice_state.json"), encoding="utf-8") as file:
                description = json.load(file)
            saved = {tensor["name"]: [list(tensor["shape"]), bool(tensor["frozen"]), bool(tensor.get("opaque", False))]
                     for tensor in description["model"]}
            kinds = [description["optimizer"]["type"], description["precision"], description["optimizer"].get("state", "fp32")]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        optimizer = own_settings["optimizer"]
        own_kinds = [optimizer.get("type", "adamw"), own_settings["precision"]["parameters"], optimizer.get("state", "fp32")]
        for key, found, ours in zip(("optimizer.type", "precision.parameters", "optimizer.state"), kinds, own_kinds):
            if found != ours and not (converts and key != "optimizer.type"):
                remedy = ("convert=True takes the masters over exactly" if key != "optimizer.type" else "their moments mean different things; "
                          "the values alone can be given to the model before offload()")
                raise ArgumentError(f"{os.fspath(folder)} was saved with {key} {json.dumps(found)}, and this training has "
                                    f"{json.dumps(ours)}; {remedy}; the state is as before")
        for name, (shape, is_frozen, is_opaque) in own.items():
            found_shape, was_frozen, was_opaque = saved.pop(name, (None, False, False))
            if is_opaque and was_opaque and kinds[1] in _TYPES and _TYPES[kinds[1]].itemsize != self.dtype.itemsize:
                raise ArgumentError(f"{os.fspath(folder)} was saved with precision.parameters {json.dumps(kinds[1])}, and the words of "
                                    f"{name}, which is opaque, have another size then; the state is as before")
            if (found_shape, was_opaque) != (shape, is_opaque):
                there = "has none" if found_shape is None else f"has one of {_shape_text(found_shape, was_opaque)}"
                raise ArgumentError(f"{os.fspath(folder)} is of another model: this one has a {name} of {_shape_text(shape, is_opaque)}, "
                                    f"and the checkpoint {there}; the state is as before")
            if was_frozen != is_frozen and not converts:
                raise ArgumentError(f"{os.fspath(folder)} has {name} {'frozen' if was_frozen else 'trained'}, and "
                                    f"it is {'frozen' if is_frozen else 'trained'} here; convert=True starts with zero moments where a "
                                    "tensor was frozen; the state is as before")
        if saved:
            name, (shape, _, is_opaque) = next(iter(saved.items()))
            raise ArgumentError(f"{os.fspath(folder)} is of another model: it has a {name} of {_shape_text(shape, is_opaque)}, and this one has "
                                "none; the state is as before")

    def _described(self) -> "dict[str, list[Any]]":
        """Shape of each tensor, and whether it is frozen and opaque, by name, as a checkpoint has them: also those of other ranks alone."""
        size = self.dtype.itemsize
        own = {member.name: [[-(-member.parameter.nbytes // size)] if unit.is_opaque
                             else list(member.parameter.shape) or [1],  # a number is one of one element there
                             unit.is_frozen, unit.is_opaque]
               for unit in self._units.units for member in unit.members}
        if self.world is None or not any(unit.is_local for unit in self._units.units):
            return own
        return {name: tensor for of_rank in self.world.exchange(own) for name, tensor in of_rank.items()}

    def _application_text(self) -> str:
        text = C.c_char_p()
        self._lib.application_text(self._handle, C.byref(text))
        assert text.value is not None
        return text.value.decode()

    def begin_step(self, rate: float, group_rates: "Sequence[float]") -> None:
        rates = (C.c_double * len(group_rates))(*group_rates) if group_rates else None
        options = lib.StepOptions(rate, 1, rates, len(group_rates), 1)
        self.changes += 1
        self._lib.begin_step(self._handle, C.byref(options))

    def finish_step(self, rate: float, group_rates: "Sequence[float]") -> lib.StepReport:
        """The gradient is the sum over the backward passes, as torch's is."""
        if not rate >= 0:  # the C interface would take that for the rate of begin_step()
            raise ArgumentError(f"the learning rate is {rate}; it must be finite and not negative")
        rates = (C.c_double * len(group_rates))(*group_rates) if group_rates else None
        options = lib.FinishOptions(rate, 1, rates, len(group_rates), 0)
        self._last_report, self._report = self.last_report(), lib.StepReport()
        with self._norm_group_failures():
            self._lib.finish_step(self._handle, C.byref(options), C.byref(self._report))
        self.last_loss, self.figures.loss = float(self.figures.loss), math.nan  # of one step alone
        self.log_notes()
        return self._report

    def last_report(self) -> "Optional[lib.StepReport]":
        """The report of the last step that has one, also where an interrupt has kept it from the caller; None before the first."""
        return self._report if self._report.step or self._report.is_skipped else self._last_report

    def gradient_norm(self) -> float:
        """The norm of the gradients that have come so far, as finish_step() would report it now; NaN where one is not finite. All
        ranks ask."""
        norm = C.c_double()
        with self._norm_group_failures():
            self._lib.gradient_norm(self._handle, 1, C.byref(norm))
        return norm.value

    @contextlib.contextmanager
    def _norm_group_failures(self) -> "Iterator[None]":
        """Raises what the norm group's function has raised inside of a call, instead of the call's error."""
        try:
            yield
        except Exception as error:
            failure, self._norm_failure = self._norm_failure, None
            if failure is not None:
                raise failure from error
            raise

    def loss_scale(self) -> float:
        scale = C.c_double()
        self._lib.loss_scale(self._handle, C.byref(scale))
        return scale.value

    def abandon_step(self) -> None:
        self._lib.abandon_step(self._handle)

    def begin_inference(self) -> None:
        self._lib.begin_inference(self._handle)

    def end_inference(self) -> None:
        self._lib.end_inference(self._handle)

    def acquire(self, unit: int, which: int) -> "tuple[int, int, int]":
        """The addresses of its parameters and gradients (0 without), and the lease's id. On a GPU they are for work on torch's current
        stream."""
        if self._gpu is not None:
            return self._acquire_on_gpu(unit, which, gpus.current_stream(self._gpu))
        lease, call = self._lease, self._lib.raw_acquire
        status = call(self._handle, _POLL_MS, unit, which, self._lease_pointer)
        while status == lib.PENDING:  # between two calls, Python runs the handlers of signals
            status = call(self._handle, _POLL_MS, unit, which, self._lease_pointer)
        if status != 0:
            self._lib.fail(status)
        return lease.parameters, lease.gradients or 0, lease.id

    def _acquire_on_gpu(self, unit: int, which: int, stream: int) -> "tuple[int, int, int]":
        lease, call = self._lease, self._lib.raw_acquire_on_gpu
        status = call(self._handle, _POLL_MS, unit, which, stream, self._lease_pointer)
        while status == lib.PENDING:
            status = call(self._handle, _POLL_MS, unit, which, stream, self._lease_pointer)
        if status != 0:
            self._lib.fail(status)
        return lease.parameters, lease.gradients or 0, lease.id

    def announce(self, units: "Sequence[int]", which: int) -> "list[int]":
        """Says that the step will use these announced units, and returns the order in which they have to be acquired."""
        uses, count = (C.c_uint32 * len(self._units.units))(), C.c_uint32()
        self._lib.announce(self._handle, order_of(units), len(units), which, uses, C.byref(count))
        return list(uses[:count.value])

    def release(self, lease_id: int) -> None:
        """On a GPU, the lease ends behind the work on torch's current stream and on that of its acquire."""
        if self._gpu is not None:
            status = self._lib.raw_release_on_gpu(self._handle, lease_id, gpus.current_stream(self._gpu))
        else:
            status = self._lib.raw_release(self._handle, lease_id)
        if status != 0:
            self._lib.fail(status)

    def release_unknown(self, known: "set[int]") -> bool:
        """Whether the last lease was none of the `known` ones, and is ended now: one that an interrupt has kept from the caller."""
        if not self._lease.id or self._lease.id in known:
            return False
        try:
            self.release(self._lease.id)
        except ArgumentError:  # it has ended
            return False
        return True

    def drain(self) -> None:
        self._lib.drain(self._handle)

    def read(self, member: Member, kind: int = lib.PARAMETER) -> torch.Tensor:
        """A copy of a parameter, its fp32 master or a moment. Not while a step is active that has gradients."""
        self.end_idle_step(False)
        dtype = torch.float32 if kind != lib.PARAMETER else member.parameter.dtype if member.is_opaque else self.dtype
        values = torch.empty(member.parameter.shape, dtype=dtype, device="cpu")
        count = values.nbytes if member.is_opaque else values.numel()
        self._lib.read_state(self._handle, member.tensor, kind, 0, count, values.data_ptr())
        return values.to(self.dtype_of(member)) if kind == lib.PARAMETER else values

    def dtype_of(self, member: Member) -> torch.dtype:
        """The type of a parameter as computation sees it."""
        return member.parameter.dtype if member.is_opaque else member.rounded or self.dtype

    def applied_step(self) -> int:
        step = C.c_uint64()
        self._lib.applied_step(self._handle, C.byref(step))
        return step.value

    def predicted_traffic(self, micro_batches: int = 1) -> "tuple[int, int]":
        """Bytes that a step like the last one reads from storage and writes there, as planned."""
        traffic = lib.Traffic()
        self._lib.predicted_traffic(self._handle, micro_batches, C.byref(traffic))
        return traffic.nvme_read_bytes, traffic.nvme_write_bytes

    def log_notes(self) -> None:
        note = C.c_char_p()
        self._lib.next_note(self._handle, C.byref(note))
        while note.value is not None:
            logger.info("%s", note.value.decode(errors="replace"))
            self._lib.next_note(self._handle, C.byref(note))

    @property
    def is_open(self) -> bool:
        return bool(self._handle)

    def require_open(self) -> None:
        if not self.is_open:
            raise ArgumentError("the optimizer is closed, and its engine is gone; make a new one")

    def require_alone(self) -> None:
        """Raises ArgumentError where another thread is in a call, or computes with what is lent."""
        if self._handle and os.getpid() == self._pid:
            self.require_own_values()
            try:
                self.log_notes()
            except ArgumentError as error:
                raise ArgumentError("another thread is in a call of this model or its optimizer, such as save(); wait for it first") from error

    def close(self) -> None:
        """Where another thread is in a call, this is refused, and the engine stays."""
        if self._handle and os.getpid() == self._pid:
            try:
                self._lib.close(self._handle)
            except ArgumentError:
                raise
            except BaseException:
                self.destroy()
                raise
            self.destroy()

    def destroy(self) -> None:
        if self.is_left:
            return
        handle, self._handle = self._handle, C.c_void_p()
        if handle and os.getpid() == self._pid:
            self._lib.destroy(handle)
            self._leave()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.destroy()


def plan(config: "dict[str, Any]", units: Units, is_on_gpu: bool = False) -> "dict[str, Any]":
    """The plan of a run, without an engine: pools, budgets, bytes of a step; capi/sluice.h has its names."""
    keep: "list[Any]" = []
    made = C.c_char_p()
    (lib.library().plan_on_gpu if is_on_gpu else lib.library().plan)(json.dumps(config).encode(), C.byref(model_of(units, keep)), C.byref(made))
    assert made.value is not None
    return dict(json.loads(made.value))
