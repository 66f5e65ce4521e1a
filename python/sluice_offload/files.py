"""Models in safetensors files without ever having one in memory as a whole: saving an offloaded model tensor by tensor, and
building one whose parameters come from files as the engine asks for them."""

import contextlib
import ctypes as C
import errno
import json
import os
import pathlib
import struct
from typing import Any, Callable, Iterator, Optional

import torch
from torch import nn

from .errors import ArgumentError, RanksError, StorageError, in_a_step, remedy_of
from .processes import World
from .state import SAFETENSORS, SafetensorsValues
from .units import Member, names_of_members

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MEETING_BYTES = 32 << 20  # that rank 0 keeps until it writes: with fewer, ranks meet more often; more take more memory
_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}


def _entries(model: nn.Module) -> "list[Any]":
    """Name, type, shape and a function that reads, for each tensor of the state_dict: tied ones once."""
    offloaded = getattr(model, "_sluice", None)
    if offloaded is None:
        raise ArgumentError(f"this {type(model).__name__} is not offloaded; torch's own state_dict() has its parameters")
    offloaded.walk.end_idle_step()
    if offloaded.walk.active is not None:
        raise in_a_step("the parameters cannot be read")
    model._sluice_given()  # type: ignore[operator]
    engine = offloaded.engine
    found: "list[Any]" = []
    taken = set()  # places of buffers that units have: outside of steps their memory is poison
    for unit in offloaded.gatherer.units.units:
        for member in unit.members:
            taken.update((id(owner), attribute) for owner, attribute in member.owners)
            if _is_unsaved(member):
                continue
            found.append((member.name, engine.dtype_of(member), tuple(member.parameter.shape),
                          lambda member=member: engine.read(member)))
    for prefix, module in model.named_modules():
        for name, empty in module._parameters.items():
            if empty is not None and empty.numel() == 0:  # no unit has it
                found.append((f"{prefix}.{name}" if prefix else name, empty.dtype, tuple(empty.shape), empty.detach))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and (id(module), name) not in taken:
                found.append((f"{prefix}.{name}" if prefix else name, buffer.dtype, tuple(buffer.shape),
                              lambda buffer=buffer: buffer.detach().cpu()))
    return found


def _is_unsaved(member: Member) -> bool:
    """A buffer that no state_dict has."""
    return all(attribute in owner._non_persistent_buffers_set for owner, attribute in member.owners)


def named_values(model: nn.Module) -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors of an offloaded model's state_dict with their names, each read when its turn comes: parameters in the order
    of units, then buffers. A tied parameter comes once, with its first name. Between steps; with several ranks, on all of
    them together."""
    for name, _, _, read in _entries(model):
        yield name, read()


def save_safetensors(model: nn.Module, folder: "str | os.PathLike[str]", max_shard_bytes: int = 5 << 30) -> "list[str]":
    """Writes an offloaded model's state_dict into `folder`, as transformers names and reads it: model.safetensors, or several
    files of at most `max_shard_bytes` with an index; a larger tensor has a file of its own. One tensor at a time is in memory;
    on rank 0 of several, up to 32 MiB of smaller ones are. They appear when all are written, and an older model in `folder` vanishes then; until then both need room. A folder that a
    crash leaves has the older model, the new one, or, between the names of several files, no index, and is refused. With several
    ranks, all call it, and rank 0 writes. Returns the files' paths."""
    entries = _entries(model)
    for name, dtype, _, _ in entries:
        if dtype not in _NAMES:
            raise ArgumentError(f"{name} is of {dtype}, for which safetensors has no name; nothing was written. Make it a buffer "
                                "with persistent=False, or save the model with torch.save(model.state_dict(), ...)")
    shards: "list[list[Any]]" = [[]]
    size = 0
    for entry in entries:
        bytes_ = _bytes(entry)
        if shards[-1] and size + bytes_ > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += bytes_
    names = [_SINGLE] if len(shards) == 1 else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    target = pathlib.Path(folder)
    files = [NewFile(target / name) for name in names]

    def end() -> None:
        if len(shards) > 1 and (target / _INDEX).exists():  # else it would name files of two models for a moment
            with _named(target / _INDEX):
                (target / _INDEX).unlink()
                _sync_folder(target)
        for file in files:
            file.appear()
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(_bytes(entry) for entry in entries)},
                     "weight_map": {entry[0]: name for name, shard in zip(names, shards) for entry in shard}}
            replace_file(target / _INDEX, lambda file: file.write(json.dumps(index, indent=2).encode()))
        for old in [target / _INDEX, target / _SINGLE, *target.glob("model-*-of-*.safetensors"), *target.glob("model*.safetensors.new")]:
            if old.name not in names and not (old.name == _INDEX and len(shards) > 1):
                old.unlink(missing_ok=True)

    world = model._sluice.engine.world  # type: ignore[union-attr]
    _on_first_rank(world, lambda: target.mkdir(parents=True, exist_ok=True))
    try:
        for file, shard in zip(files, shards):
            _write(file, shard, world)
        _on_first_rank(world, end)
    finally:
        for file in files:
            file.abandon()
    return [str(target / name) for name in names]


def _on_first_rank(world: Optional[World], body: "Callable[[], Any]", failure: Optional[Exception] = None) -> None:
    """World.on_first_rank(), also for one process."""
    if world is not None:
        world.on_first_rank(body, failure)
    elif failure is not None:
        raise failure
    else:
        body()


def _bytes(entry: Any) -> int:
    _, dtype, shape, _ = entry
    return int(torch.Size(shape).numel() * dtype.itemsize)


def _write(file: "NewFile", entries: "list[Any]", world: Optional[World]) -> None:
    """All ranks read each entry, and one writes it. The others wait for it behind some, not in the next one's read: how long a drive
    takes for bytes or for a sync has no limit."""
    header: "dict[str, Any]" = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        name, dtype, shape, _ = entry
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [at, at + _bytes(entry)]}
        at += _bytes(entry)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    _on_first_rank(world, lambda: file.write(struct.pack("<Q", len(text)) + text))
    for part in _parts(entries, 0 if world is None else _MEETING_BYTES):
        _write_part(file, [entry[3] for entry in part], world)
    _on_first_rank(world, file.complete)


def _parts(entries: "list[Any]", bytes_max: int) -> "Iterator[list[Any]]":
    """Entries of at most so many bytes together, or one."""
    part: "list[Any]" = []
    size = 0
    for entry in entries:
        if part and size + _bytes(entry) > bytes_max:
            yield part
            part, size = [], 0
        part.append(entry)
        size += _bytes(entry)
    if part:
        yield part


def _write_part(file: "NewFile", reads: "list[Callable[[], torch.Tensor]]", world: Optional[World]) -> None:
    failure: Optional[Exception] = None
    found: "list[torch.Tensor]" = []
    for read in reads:  # to the last, which the other ranks read, too
        try:
            values = read()
            if world is None or world.rank == 0:
                found.append(values.contiguous())
        except RanksError:  # all of them fail
            raise
        except Exception as error:  # pylint: disable=broad-except  # the other ranks have to hear of any
            failure = failure or error

    def write() -> None:
        for whole in found:
            if whole.numel() != 0:
                file.write((C.c_char * whole.nbytes).from_address(whole.data_ptr()))
    _on_first_rank(world, write, failure)


@contextlib.contextmanager
def _named(path: pathlib.Path) -> "Iterator[None]":
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write \"{path}\": {error.strerror}; {remedy_of(error)}") from error


class NewFile:
    """A file that appears whole or not at all, and stays: its bytes and then its name are durable behind finish(). A quota or a
    network file system may refuse the bytes at the sync, or only when the file is closed. abandon() removes what has not been
    finished."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._made = path, path.with_name(path.name + ".new")
        self._file: Any = None

    def write(self, data: Any) -> None:
        with _named(self._path):
            if self._file is None:
                self._file = open(self._made, "wb")  # pylint: disable=consider-using-with  # finish() and abandon() close it
            self._file.write(data)

    def finish(self) -> None:
        self.complete()
        self.appear()

    def complete(self) -> None:
        """Makes the bytes durable."""
        with _named(self._path):
            self._file.flush()
            _sync(self._file.fileno())
            self._file.close()

    def appear(self) -> None:
        """Gives a complete file its name."""
        with _named(self._path):
            os.replace(self._made, self._path)
            _sync_folder(self._path.parent)
        self._file = None

    def abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._made.unlink(missing_ok=True)
        self._file = None


def replace_file(path: pathlib.Path, write: "Callable[[NewFile], Any]") -> None:
    """Writes a NewFile by one call."""
    file = NewFile(path)
    try:
        write(file)
        file.finish()
    finally:
        file.abandon()


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of a file system that has no sync
            raise


def _sync_folder(folder: pathlib.Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # it may be written and not read: it cannot be synced
        return
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def load_safetensors(model: nn.Module, source: "str | os.PathLike[str] | SafetensorsValues", strict: bool = True) -> "list[str]":
    """Gives an offloaded model the values of a safetensors file, or of a folder as save_safetensors() writes it, tensor by tensor.
    Moments and step stay. With `strict`, every parameter has to be there, a tied one by any of its names. Returns the names of
    those that are not. Between steps; with several ranks, all of them together."""
    offloaded = getattr(model, "_sluice", None)
    if offloaded is None:
        raise ArgumentError(f"this {type(model).__name__} is not offloaded; give the values to its load_state_dict()")
    values = source if isinstance(source, SafetensorsValues) else \
        SafetensorsValues(source) if os.path.isfile(source) else open_safetensors(source)
    names = names_of_members(model, offloaded.gatherer.units)
    found = {member.tensor: next((name for name in named if name in values), None) for member, named in names}
    missing = [member.name for member, _ in names if found[member.tensor] is None and not _is_unsaved(member)]
    if strict and missing:
        raise ArgumentError(f"the files have no {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}; nothing was "
                            "loaded. strict=False loads what they have")
    wanted = [member for member, _ in names if found[member.tensor] is not None]
    for member in wanted:
        values.check_shape(str(found[member.tensor]), member.parameter.shape)
        values.check_dtype(str(found[member.tensor]), member.parameter.dtype if member.is_opaque else None)
    taken = {name for _, named in names for name in named}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in values and name not in taken]
    for name, buffer in buffers:
        values.check_shape(name, buffer.shape)
        values.check_dtype(name)
    offloaded.engine.replace(lambda member: values[str(found[member.tensor])], wanted)
    model._sluice_given.load(member.tensor for member in wanted)  # type: ignore[union-attr, operator]
    with torch.no_grad():
        for name, buffer in buffers:
            buffer.copy_(values[name])
    return missing


def save_pretrained(model: nn.Module, folder: "str | os.PathLike[str]", max_shard_bytes: int = 5 << 30) -> None:
    """save_safetensors(), and the model's configuration as transformers' own save_pretrained() writes it, so that
    from_pretrained() of either finds all."""
    save_safetensors(model, folder, max_shard_bytes)
    for part in ("config", "generation_config"):
        settings = getattr(model, part, None)
        if settings is not None and hasattr(settings, "save_pretrained"):
            _on_first_rank(model._sluice.engine.world,  # type: ignore[union-attr]
                           lambda settings=settings: settings.save_pretrained(folder))


def open_safetensors(folder: "str | os.PathLike[str]") -> SafetensorsValues:
    """The tensors of a folder as save_safetensors() and transformers write it, for offload(values=...): of the files that it has now,
    also where others take their names or the folder is a link that is set anew."""
    root = pathlib.Path(os.path.realpath(folder))
    if (root / _SINGLE).is_file():
        return SafetensorsValues(root / _SINGLE)
    if not (root / _INDEX).is_file():
        raise ArgumentError(f"{root} has neither {_SINGLE} nor {_INDEX}")
    with open(root / _INDEX, encoding="utf-8") as file:
        before = os.fstat(file.fileno())
        try:
            paths = [root / name for name in sorted(set(json.load(file)["weight_map"].values()))]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"{root / _INDEX} is no index of safetensors files: {error!r}") from error
        values = SafetensorsValues(*paths)
        try:  # save_safetensors() removes the index before it replaces a file
            now: Optional[os.stat_result] = os.stat(root / _INDEX)
        except FileNotFoundError:
            now = None
    if now is None or (now.st_ino, now.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
        raise ArgumentError(f"{root} was saved anew while its files were opened, which may be of two models; open it again when it is whole")
    return values


@contextlib.contextmanager
def meta_parameters() -> "Iterator[None]":
    """Modules that are made inside of it have their parameters on the meta device, where they take no memory, and their
    buffers, which no file may have, on the CPU."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: Optional[nn.Parameter]) -> None:
        original(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def from_pretrained(kind: Any, folder: "str | os.PathLike[str]", **arguments: Any) -> "tuple[nn.Module, SafetensorsValues]":
    """A model of transformers without its values, and the values for offload(model, ..., values=values). `kind`: a class of
    models, or AutoModelForCausalLM and the like. `arguments` go to the configuration. Raises ArgumentError where a parameter
    is not in the files by its own name."""
    import transformers
    folder = os.path.realpath(folder)  # one model, also where a link is set anew meanwhile
    config = transformers.AutoConfig.from_pretrained(folder, **arguments)
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) else before)
    try:
        with meta_parameters():
            model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    finally:
        torch.set_default_dtype(before)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    values = open_safetensors(folder)
    missing = [name for name, _ in model.named_parameters() if name not in values]
    if missing:
        raise ArgumentError(f"{os.fspath(folder)} has no {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}; "
                            f"use {getattr(kind, '__name__', kind)}.from_pretrained(), which knows other names")
    return model, values
