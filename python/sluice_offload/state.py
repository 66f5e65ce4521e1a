"""Parameters outside of a step: `state_dict`, `gathered`, and reading values from safetensors files."""

import contextlib
import ctypes as C
import json
import math
import os
import struct
import weakref
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from .engine import Engine
from .errors import ArgumentError, SluiceError
from .storage import UnitStorage
from .units import Member, Unit, Units, names_of_members

SAFETENSORS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I64": torch.int64,
               "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
# Types that not every torch has.
SAFETENSORS.update((name, getattr(torch, dtype)) for name, dtype in
                   (("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("U16", "uint16"), ("U32", "uint32"), ("U64", "uint64"))
                   if hasattr(torch, dtype))


def hook_state_dict(model: nn.Module, units: Units, engine: Engine) -> None:
    """`state_dict()` of the model, and of any module in it, reads parameters from the engine; `load_state_dict()` gives them
    to it, module by module."""
    members: "dict[int, dict[str, Member]]" = {}
    owners: "dict[int, nn.Module]" = {}
    for unit in units.units:
        for member in unit.members:
            for owner, attribute in member.owners:
                members.setdefault(id(owner), {})[attribute] = member
                owners[id(owner)] = owner
    shared: "dict[int, Any]" = {member.tensor: (lambda: None, 0) for member, named in names_of_members(model, units) if len(named) > 1}
    for key, owner in owners.items():
        owner._register_state_dict_hook(_reader(members[key], shared, engine))
        object.__setattr__(owner, "_load_from_state_dict", _loader(owner, members[key], engine))
    if any(unit.is_opaque for unit in units.units):
        model._register_load_state_dict_pre_hook(_type_check(names_of_members(model, units)))


def _type_check(names: "list[tuple[Member, list[str]]]") -> Any:
    """Refuses values of another type, which assign=True would put in an opaque tensor's place, before any module has loaded."""
    def check(state: "dict[str, Any]", prefix: str, metadata: "dict[str, Any]", *_: Any) -> None:
        for member, named in names if metadata.get("assign_to_params_buffers", False) else ():
            for name in named if member.is_opaque else ():
                given = state.get(prefix + name)
                if isinstance(given, torch.Tensor) and given.dtype != member.parameter.dtype:
                    raise ArgumentError(f"{name} is of {given.dtype} in the state_dict, but of {member.parameter.dtype} in the model, "
                                        "which keeps its bits; nothing was loaded. Give it in the model's type")
    return check


def _reader(members: "dict[str, Member]", shared: "dict[int, Any]", engine: Engine) -> Any:
    """Tied weights are one tensor under all of their names, as in torch's own state_dict(), of which files have one copy. `shared`:
    by their tensors, the values that were read last, and at which of the engine's changes."""
    def values_of(member: Member, state: "dict[str, Any]") -> torch.Tensor:
        if member.tensor not in shared:
            return engine.read(member)
        last, change = shared[member.tensor]
        known: "torch.Tensor | None" = last() if change == engine.changes else None
        if known is not None and any(value is known for value in state.values()):
            if engine.world is not None:  # ranks read equally often, whatever hooks of the program have done to one's values
                engine.read(member)
            return known
        values = engine.read(member)
        shared[member.tensor] = (weakref.ref(values), engine.changes)
        return values

    def read(module: nn.Module, state: "dict[str, Any]", prefix: str, metadata: Any) -> None:
        for attribute, member in members.items():
            if prefix + attribute in state:
                state[prefix + attribute] = values_of(member, state)
    return read


def _loader(module: nn.Module, members: "dict[str, Member]", engine: Engine) -> Any:
    """torch loads into fp32 parameters of this module alone, with its own checks and messages; the engine takes them from
    there."""
    original = module._load_from_state_dict

    def load(state: "dict[str, Any]", prefix: str, *arguments: Any) -> None:
        own = {name: member.at(module)[name] for name, member in members.items()}
        # Also for names that `state` lacks: hooks of the module may rename old ones on the way.
        rooms = {name: _room(member) for name, member in members.items()}
        versions = {name: room._version for name, room in rooms.items()}
        for name, member in members.items():
            member.at(module)[name] = rooms[name]
        try:
            original(state, prefix, *arguments)
            # torch leaves alone what it refuses, and says so at the end of load_state_dict(); with assign=True it puts others here.
            now = {name: member.at(module)[name] for name, member in members.items()}
            loaded = {members[name].tensor: tensor for name, tensor in now.items()
                      if tensor is not rooms[name] or rooms[name]._version != versions[name]}
        finally:
            for name, member in members.items():
                member.at(module)[name] = own[name]
        taken = [member for member in members.values() if member.tensor in loaded]
        if taken:
            engine.replace(lambda member: loaded[member.tensor], taken)  # type: ignore[arg-type, return-value]
    return load


def _room(member: Member) -> torch.Tensor:
    """Memory for values that torch loads: fp32, or the bits of an opaque tensor."""
    dtype = member.parameter.dtype if member.is_opaque else torch.float32
    room = torch.empty(member.parameter.shape, dtype=dtype, device="cpu")
    return nn.Parameter(room, requires_grad=False) if isinstance(member.parameter, nn.Parameter) else room


class Gatherer:
    """Makes units readable outside of steps, from copies."""

    def __init__(self, units: Units, engine: Engine, storages: "list[UnitStorage]", shown: "dict[int, int]",
                 is_lent: "Callable[[int], bool]") -> None:
        """`shown`: addresses of copies, by unit, to which the end of a lease goes back. `is_lent`: whether a unit shows its lease."""
        self.units, self._engine, self._storages, self._shown, self._is_lent = units, engine, storages, shown, is_lent
        self._copies: "dict[int, list[int]]" = {}  # by unit, addresses; the newest is shown

    def has(self, what: "nn.Module | Iterable[torch.Tensor]") -> bool:
        """Whether any of these is a tensor of a unit."""
        return bool(self._wanted(what))

    def _wanted(self, what: "nn.Module | Iterable[torch.Tensor] | None") -> "list[Unit]":
        if what is None:
            return self.units.units
        parameters = [*what.parameters(), *what.buffers()] if isinstance(what, nn.Module) else what
        ids = {id(parameter) for parameter in parameters}
        return [unit for unit in self.units.units if any(
            id(member.at(owner)[attribute]) in ids for member in unit.members for owner, attribute in member.owners)]

    @contextlib.contextmanager
    def gathered(self, what: "nn.Module | Iterable[torch.Tensor] | None") -> "Iterator[None]":
        units = self._wanted(what)
        if not units:
            raise ArgumentError("gathered(): none of these is a parameter of the offloaded model")
        copies = [self._copy(unit) for unit in units]
        try:
            for unit, copied in zip(units, copies):
                self._copies.setdefault(unit.index, []).append(copied.data_ptr())
                self._show(unit.index)
            sums = [self._storages[unit.index].digest() for unit in units]
            yield
            changed = [unit.name for unit, before in zip(units, sums) if self._storages[unit.index].digest() != before]
        finally:
            for unit, copied in zip(units, copies):
                others = self._copies.get(unit.index, [])
                if copied.data_ptr() in others:
                    others.remove(copied.data_ptr())
                self._show(unit.index)
        if changed:
            raise SluiceError(f"parameters of {', '.join(changed)} were changed inside of gathered(), which gives copies; "
                              "the engine's own are as before")

    def _show(self, index: int) -> None:
        """The unit's newest copy, which may be that of a gathered() around; without any, poison."""
        copies = self._copies.get(index)
        if copies:
            self._shown[index] = copies[-1]
        else:
            self._shown.pop(index, None)
        if self._is_lent(index):  # by a forward inside, whose step goes on
            return
        if copies:
            self._storages[index].show(copies[-1])
        else:
            self._storages[index].hide()

    def _copy(self, unit: Unit) -> torch.Tensor:
        size = self._engine.dtype.itemsize
        copied = torch.zeros(self._engine.parameter_bytes(unit), dtype=torch.uint8, device="cpu")
        for member in unit.members:
            values = self._engine.read(member)
            if member.rounded is not None:  # the storage rounds again, and changes nothing
                values = values.to(self._engine.dtype)
            C.memmove(copied.data_ptr() + member.offset * size, values.data_ptr(), values.nbytes)
        return copied.to(self._engine.place.device)


class SafetensorsValues(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, read one at a time, for `offload(values=...)`: a model on the meta device is
    filled without ever being in memory as a whole."""

    def __init__(self, *paths: "str | os.PathLike[str]") -> None:
        # The type is its name where torch has none such; a file may have such tensors, as long as nothing asks for them.
        self._places: "dict[str, tuple[str, int, int, torch.dtype | str, Sequence[int]]]" = {}
        for path in paths:
            self._add(path)

    def _add(self, path: "str | os.PathLike[str]") -> None:
        size = os.path.getsize(path)
        try:
            with open(path, "rb") as file:
                length, = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, size)))
            if not isinstance(header, dict):
                raise TypeError(f"the header is of {type(header).__name__}")
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    dtype, shape = SAFETENSORS.get(entry["dtype"], str(entry["dtype"])), list(entry["shape"])
                    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
                        raise ValueError(f"{name} has shape {shape} and data_offsets {[begin, end]}, which have to be whole numbers")
                    if not begin <= end <= size - 8 - length:
                        raise ValueError(f"{name} lies beyond the end of the file")
                    if isinstance(dtype, torch.dtype) and math.prod(shape) * dtype.itemsize != end - begin:
                        raise ValueError(f"{name} has {end - begin} bytes, which is not the size of {shape}")
                    self._places[name] = (os.fspath(path), 8 + length + begin, 8 + length + end, dtype, shape)
        except (KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
            raise ArgumentError(f"{os.fspath(path)} is not a safetensors file of tensors that torch has: {error!r}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        self.check_dtype(name)
        path, begin, end, dtype, shape = self._places[name]
        assert isinstance(dtype, torch.dtype)
        values = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            view = memoryview((C.c_char * (end - begin)).from_address(values.data_ptr()) if end != begin else b"").cast("B")
            while len(view) != 0:
                count = file.readinto(view)
                if not count:
                    raise SluiceError(f"{path} has become shorter: {name} ends beyond its end")
                view = view[count:]
        return values

    def shape_of(self, name: str) -> "tuple[int, ...]":
        """Without reading the tensor."""
        return tuple(self._places[name][4])

    def check_shape(self, name: str, shape: "Sequence[int]") -> None:
        """Raises ArgumentError where the tensor has another shape."""
        path, found = self._places[name][0], self.shape_of(name)
        if found != tuple(shape):
            raise ArgumentError(f"{name} has shape {found} in {path}, but {tuple(shape)} in the model; nothing was loaded")

    def check_dtype(self, name: str, wanted: "torch.dtype | None" = None) -> None:
        """Raises ArgumentError where torch has no such type, or the tensor is of another than `wanted`."""
        path, _, _, found, _ = self._places[name]
        if not isinstance(found, torch.dtype):
            raise ArgumentError(f"{name} is of {found} in {path}, a type that torch {torch.__version__} does not have; convert it to "
                                f"one of {', '.join(SAFETENSORS)}")
        if wanted not in (None, found):
            raise ArgumentError(f"{name} is of {found} in {path}, but of {wanted} in the model, which keeps its bits; nothing was "
                                "loaded. Save it in the model's type")

    def __iter__(self) -> "Iterator[str]":
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
