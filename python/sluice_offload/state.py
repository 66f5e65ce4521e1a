"""Parameters outside of a step: `state_dict`, `gathered`, and reading values from safetensors files."""

import contextlib
import ctypes as C
import errno
import json
import math
import os
import resource
import stat
import struct
import weakref
from functools import partial
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence

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


class _Given:
    """Values that state_dict() has given out: copies, where torch gives the parameters' own memory, so that a write is lost. It is an error at
    the next forward of the model, whose hook this is, and at the next read of its values."""

    def __init__(self) -> None:
        # By tensor. The alias has no memory, and the values' version, also when the program has dropped them.
        self._given: "dict[int, list[tuple[weakref.ref[torch.Tensor], torch.Tensor, int]]]" = {}
        self._names: "dict[int, str]" = {}

    def __len__(self) -> int:
        return len(self._given)

    def add(self, member: Member, values: torch.Tensor) -> None:
        if values.is_inference():  # counts no writes
            return
        alias = values.detach()
        alias.data = values.new_empty(0)
        self._names[member.tensor] = member.name
        self._given.setdefault(member.tensor, []).append((weakref.ref(values), alias, values._version))

    def check(self, tensors: "Iterable[int]") -> None:
        """Raises ArgumentError, once, where one of these was written to. Those that the program has dropped are asked no more."""
        for tensor in tensors:
            alive = []
            for one in self._given.get(tensor, ()):
                values, alias, version = one
                if alias._version != version:
                    self._given.clear()
                    raise ArgumentError(f"{self._names[tensor]} of a state_dict() was written to. These are copies, and an offloaded model "
                                        "goes on with its own values. Give it new ones by model.load_state_dict(state); to change copies "
                                        "alone, write to clones of what state_dict() returns")
                if values() is not None:
                    alive.append(one)
            if alive:
                self._given[tensor] = alive
            else:
                self._given.pop(tensor, None)

    def load(self, tensors: "Iterable[int]") -> None:
        """The program has given the model other values of these, such as those that it had written."""
        for tensor in self._given.keys() & set(tensors):
            self._given[tensor] = [(values, alias, alias._version) for values, alias, _ in self._given[tensor]]

    @torch._disable_dynamo
    def __call__(self, *_: Any) -> None:
        if self._given:
            self.check(list(self._given))


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
    given = _Given()
    for key, owner in owners.items():
        owner._register_state_dict_hook(_reader(members[key], shared, engine, given))
        object.__setattr__(owner, "_load_from_state_dict", _loader(owner, members[key], engine, given))
    model.register_forward_pre_hook(given)
    object.__setattr__(model, "_sluice_given", given)
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


def _reader(members: "dict[str, Member]", shared: "dict[int, Any]", engine: Engine, given: _Given) -> Any:
    """Tied weights are one tensor under all of their names, as in torch's own state_dict(), of which files have one copy. `shared`:
    by their tensors, the values that were read last, and at which of the engine's changes."""
    def values_of(member: Member, state: "dict[str, Any]") -> torch.Tensor:
        if member.tensor not in shared:
            return fresh(member)
        last, change = shared[member.tensor]
        known: "torch.Tensor | None" = last() if change == engine.changes else None
        if known is not None and any(value is known for value in state.values()):
            if engine.world is not None:  # ranks read equally often, whatever hooks of the program have done to one's values
                engine.read(member)
            return known
        values = fresh(member)
        shared[member.tensor] = (weakref.ref(values), engine.changes)
        return values

    def fresh(member: Member) -> torch.Tensor:
        values = engine.read(member)
        if engine.place.is_cpu_memory:  # else cpu() makes copies in torch, and none here, and a program may write to these
            given.add(member, values)
        return values

    def read(module: nn.Module, state: "dict[str, Any]", prefix: str, metadata: Any) -> None:
        if given:
            given.check([member.tensor for member in members.values()])
        for attribute, member in members.items():
            if prefix + attribute in state:
                state[prefix + attribute] = values_of(member, state)
    return read


def _loader(module: nn.Module, members: "dict[str, Member]", engine: Engine, given: _Given) -> Any:
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
            given.load(loaded)
    return load


def _room(member: Member) -> torch.Tensor:
    """Memory for values that torch loads: fp32, or the bits of an opaque tensor."""
    dtype = member.parameter.dtype if member.is_opaque else torch.float32
    room = torch.empty(member.parameter.shape, dtype=dtype, device="cpu")
    return nn.Parameter(room, requires_grad=False) if isinstance(member.parameter, nn.Parameter) else room


class _Copy:
    """A unit's values. Each tensor over them owns them, as long as it lives."""

    def __init__(self, unit: Unit, engine: Engine) -> None:
        size, device = engine.dtype.itemsize, engine.place.device
        packed = torch.zeros(engine.parameter_bytes(unit), dtype=torch.uint8, device="cpu")
        rounded: "dict[int, torch.Tensor]" = {}
        for member in unit.members:
            values = engine.read(member)
            if member.rounded is not None:
                rounded[member.tensor] = values.to(device)
                values = values.to(engine.dtype)  # the storage rounds again, and changes nothing
            C.memmove(packed.data_ptr() + member.offset * size, values.data_ptr(), values.nbytes)
        self.changes = engine.changes
        self.packed = packed.to(device)
        self.address = self.packed.data_ptr()
        self.tensors = {member.tensor: rounded[member.tensor] if member.rounded is not None else self._view(member, engine)
                        for member in unit.members}
        self._storages = [tensor.untyped_storage() for tensor in (self.packed, *rounded.values())]
        self._place = engine.place

    def _view(self, member: Member, engine: Engine) -> torch.Tensor:
        begin = member.offset * engine.dtype.itemsize
        dtype = engine.dtype_of(member)
        return self.packed[begin:begin + member.parameter.numel() * dtype.itemsize].view(dtype).view(member.parameter.shape)

    def digest(self) -> int:
        """A checksum of the values."""
        digest = 0
        for storage in self._storages:
            digest = self._place.digest(storage, digest)
        return digest


class Gatherer:
    """Makes units readable outside of steps, from copies. While a unit is gathered and not lent, its parameters lie in the copy itself,
    so that what a program takes from them there, a view or an array, keeps the copy. The unit's own storage shows the copy, too, for views
    from before. A lease has the parameters back in that storage, as have all that are gathered once a step has begun, whose end
    looks for them there."""

    def __init__(self, units: Units, engine: Engine, storages: "list[UnitStorage]", shown: "dict[int, int]",
                 is_lent: "Callable[[int], bool]") -> None:
        """`shown`: addresses of copies, by unit, to which the end of a lease goes back. `is_lent`: whether a unit shows its lease."""
        self.units, self._engine, self._storages, self._shown, self._is_lent = units, engine, storages, shown, is_lent
        self._copies: "dict[int, list[_Copy]]" = {}  # by unit; the newest is shown
        # By unit that is gathered: its tensors, aliases of them where they lie otherwise, and their numbers.
        self._own: "dict[int, list[tuple[torch.Tensor, torch.Tensor, int]]]" = {}
        self._moved: "dict[int, _Copy]" = {}  # by unit, the copy in which its tensors lie now

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
        with torch.inference_mode(False):  # parameters are no tensors of inference
            copies = [_Copy(unit, self._engine) for unit in units]
        try:
            for unit, copied in zip(units, copies):
                self._copies.setdefault(unit.index, []).append(copied)
                self._show(unit)
            sums = [self._digests(unit.index, copied) for unit, copied in zip(units, copies)]
            yield
            changed = [unit.name for unit, copied, before in zip(units, copies, sums)
                       if any(None not in both and both[0] != both[1] for both in zip(self._digests(unit.index, copied), before))]
        finally:
            for unit, copied in zip(units, copies):
                others = self._copies.get(unit.index, [])
                if copied in others:
                    others.remove(copied)
                self._show(unit)
        if changed:
            raise SluiceError(f"parameters of {', '.join(changed)} were changed inside of gathered(), which gives copies; "
                              "the engine's own are as before")

    def _digests(self, index: int, copied: _Copy) -> "tuple[int, int | None]":
        """Checksums of a copy, and of what the unit's storage shows in memory of its own; None while that shows a lease."""
        addresses = {other.address for other in self._copies[index]}
        shown = 0
        for storage in self._storages[index].places():
            if storage.data_ptr() not in addresses:
                shown = self._engine.place.digest(storage, shown)
        return copied.digest(), None if self._is_lent(index) else shown

    def _show(self, unit: Unit) -> None:
        """The unit's newest copy, which may be that of a gathered() around; without any, poison."""
        index, storage = unit.index, self._storages[unit.index]
        copies = self._copies.get(index)
        if copies:
            self._shown[index] = copies[-1].address
            if index not in self._own:
                self._own[index] = self._tensors(unit)
                storage.when_shown = partial(self._follow, index)
        else:
            self._shown.pop(index, None)
            self._copies.pop(index, None)
            if index in self._own:
                self._move(index, None)
                del self._own[index]
            storage.when_shown = None
        if self._is_lent(index):  # by a forward inside, whose step goes on
            return
        if copies:
            storage.show(copies[-1].address)
        else:
            storage.hide()

    @staticmethod
    def _tensors(unit: Unit) -> "list[tuple[torch.Tensor, torch.Tensor, int]]":
        found: "dict[int, tuple[torch.Tensor, torch.Tensor, int]]" = {}
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            for member in unit.members:
                for owner, attribute in member.owners:
                    tensor = member.at(owner)[attribute]
                    found[id(tensor)] = (tensor, tensor.data, member.tensor)
        return list(found.values())

    def _follow(self, index: int, address: int) -> None:
        """Has the tensors of a gathered unit lie where its storage shows this address: in the copy, or in the storage for a lease."""
        for other, copied in list(self._moved.items()):
            if copied.changes != self._engine.changes:
                self._move(other, None)
        newest = self._copies[index][-1]
        self._move(index, newest if address == newest.address and newest.changes == self._engine.changes else None)

    def _move(self, index: int, to: "_Copy | None") -> None:
        """Has the unit's tensors lie in a copy, or in the unit's own storage. Their versions stay, for autograd."""
        at = self._moved.get(index)
        if at is to:
            return
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            for tensor, own, number in self._own[index]:
                old, new = (own if one is None else one.tensors[number] for one in (at, to))
                if tensor.untyped_storage()._cdata != old.untyped_storage()._cdata:  # the program has given it others, as step() will say
                    continue
                tensor.data = new
                place = getattr(tensor, "_sluice_place", None)
                if place is not None:  # still a parameter that is guarded outside
                    place.memory -= set() if at is None else {old.untyped_storage()._cdata}
                    place.memory |= {new.untyped_storage()._cdata}
        if to is None:
            del self._moved[index]
        else:
            self._moved[index] = to


class _KeptFile:
    """A file as it was when it was opened, whatever file has its name later. It stays open as long as the object lives. A process that has
    no descriptors to spare opens it again for each read, and so does one that the object was sent to; it has to be the same file then."""

    _kept = 0  # by all of this process

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: "Optional[int]" = None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            self._state = self._state_of(status)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if limit == resource.RLIM_INFINITY or _KeptFile._kept < limit // 4:  # the program needs some itself
                self._descriptor = descriptor
                _KeptFile._kept += 1
                weakref.finalize(self, _KeptFile._close, descriptor)
        finally:
            if self._descriptor is None:
                os.close(descriptor)

    @staticmethod
    def _state_of(status: os.stat_result) -> "tuple[int, int, int]":
        return status.st_ino, status.st_size, status.st_mtime_ns

    @staticmethod
    def _close(descriptor: int) -> None:
        _KeptFile._kept -= 1
        os.close(descriptor)

    @property
    def size(self) -> int:
        return self._state[1]

    def header(self) -> "tuple[int, bytearray]":
        """The length of the header as the file says, and as much of it as there is."""
        begin = bytearray(min(8, self.size))
        self.read(0, memoryview(begin), "its header")
        length, = struct.unpack("<Q", begin)
        text = bytearray(min(length, self.size - 8))
        self.read(8, memoryview(text), "its header")
        return length, text

    def read(self, begin: int, view: memoryview, what: str) -> None:
        """Fills `view` with the file's bytes from `begin` on. Without a position of the file, which forked workers would share."""
        descriptor = self._descriptor
        if descriptor is None:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(view) != 0:
                count = os.preadv(descriptor, [view], begin)
                if not count:
                    raise SluiceError(f"{self.path} has become shorter: {what} ends beyond its end")
                view, begin = view[count:], begin + count
            if self._state_of(os.fstat(descriptor)) != self._state:
                raise SluiceError(f"{self.path} was written anew after it was opened, so {what} may be of another model than what was read "
                                  "before; open the files again, and load all of the model. A network drive that changes times by itself needs a copy on a local one")
        finally:
            if self._descriptor is None:
                os.close(descriptor)

    def __deepcopy__(self, memo: Any) -> "_KeptFile":
        return self  # nothing of it changes

    def __getstate__(self) -> Any:  # for another process
        return {"path": self.path, "_state": self._state, "_descriptor": None}


class SafetensorsValues(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, read one at a time, for `offload(values=...)`: a model on the meta device is
    filled without ever being in memory as a whole. They are those of the files that have the paths now, also where a link such as
    `run/latest` shows others later, or other files take their names. A file that is written to meanwhile is an error at the next read."""

    def __init__(self, *paths: "str | os.PathLike[str]") -> None:
        # The type is its name where torch has none such; a file may have such tensors, as long as nothing asks for them.
        self._places: "dict[str, tuple[_KeptFile, int, int, torch.dtype | str, Sequence[int]]]" = {}
        folders: "dict[str, str]" = {}  # each resolved once, for all of its files
        for path in paths:
            folder, name = os.path.split(os.fspath(path))
            self._add(os.path.join(folders.setdefault(folder, os.path.realpath(folder)), name))

    def _add(self, path: str) -> None:
        file = _KeptFile(path)
        size = file.size
        try:
            length, text = file.header()
            header = json.loads(text)
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
                    self._places[name] = (file, 8 + length + begin, 8 + length + end, dtype, shape)
        except (KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
            raise ArgumentError(f"{path} is not a safetensors file of tensors that torch has: {error!r}") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        self.check_dtype(name)
        file, begin, end, dtype, shape = self._places[name]
        assert isinstance(dtype, torch.dtype)
        values = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        if end != begin:
            file.read(begin, memoryview((C.c_char * (end - begin)).from_address(values.data_ptr())).cast("B"), name)
        return values

    def shape_of(self, name: str) -> "tuple[int, ...]":
        """Without reading the tensor."""
        return tuple(self._places[name][4])

    def check_shape(self, name: str, shape: "Sequence[int]") -> None:
        """Raises ArgumentError where the tensor has another shape."""
        path, found = self._places[name][0].path, self.shape_of(name)
        if found != tuple(shape):
            raise ArgumentError(f"{name} has shape {found} in {path}, but {tuple(shape)} in the model; nothing was loaded")

    def check_dtype(self, name: str, wanted: "torch.dtype | None" = None) -> None:
        """Raises ArgumentError where torch has no such type, or the tensor is of another than `wanted`."""
        file, _, _, found, _ = self._places[name]
        if not isinstance(found, torch.dtype):
            raise ArgumentError(f"{name} is of {found} in {file.path}, a type that torch {torch.__version__} does not have; convert it to "
                                f"one of {', '.join(SAFETENSORS)}")
        if wanted not in (None, found):
            raise ArgumentError(f"{name} is of {found} in {file.path}, but of {wanted} in the model, which keeps its bits; nothing was "
                                "loaded. Save it in the model's type")

    def __iter__(self) -> "Iterator[str]":
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
