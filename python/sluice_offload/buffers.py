"""Buffers that stay torch's, such as the running means of BatchNorm. The engine does not have them, so the text beside its state keeps
them in checkpoints and commits."""

import base64
import logging
from typing import Any, Iterator, Mapping, Optional

import torch
from torch import nn

from .errors import ArgumentError
from .state import SafetensorsValues
from .units import Units, names_of_members

logger = logging.getLogger("sluice_offload")

COMMIT_CHARACTERS_MAX = 1 << 20    # of the text of a commit, by the C interface
BUFFER_CHARACTERS_MAX = 96 << 20   # of a checkpoint's, for buffers of 72 MiB: it is in memory several times while it is written
_ENTRY_CHARACTERS = 64             # of type, shape and punctuation, and some more
_SMALL_BYTES = 64 << 10


def kept_buffers(model: nn.Module, units: Optional[Units] = None) -> "dict[str, torch.Tensor]":
    """The buffers that a state_dict has, by name, without those of `units`."""
    moved = set() if units is None else {name for _, named in names_of_members(model, units) for name in named}
    found: "dict[str, torch.Tensor]" = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{prefix}.{name}" if prefix else name
            if buffer is not None and name not in module._non_persistent_buffers_set and full not in moved:
                found[full] = buffer
    return found


class SavedBuffers(Mapping[str, torch.Tensor]):
    """Buffers of a checkpoint's or commit's text, by name. Each is decoded when it is asked for."""

    def __init__(self, entries: "Mapping[str, Any]") -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape, bits = self._entries[name]
        data, kind = bytearray(base64.b64decode(bits)), getattr(torch, dtype)
        return torch.frombuffer(data, dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind, device="cpu")

    def __iter__(self) -> "Iterator[str]":
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape_of(self, name: str) -> "tuple[int, ...]":
        return tuple(self._entries[name][1])


class BufferText:
    """Makes the text that keeps a model's buffers. Buffers that a text cannot keep are left out, which is said once."""

    def __init__(self, model: nn.Module, units: Units) -> None:
        self._model, self._units = model, units
        self._has_warned = False

    def entries(self, room: int) -> "dict[str, list[Any]]":
        """Returns type, shape and bits in base64, as SavedBuffers reads them. Empty if that would take more than `room` characters."""
        kept = {name: buffer.detach() for name, buffer in kept_buffers(self._model, self._units).items() if not buffer.is_meta}
        plain = {name: buffer for name, buffer in kept.items() if buffer.layout == torch.strided and not buffer.is_quantized}
        if len(plain) < len(kept):
            self._warn(f"buffers {', '.join(sorted(set(kept) - set(plain))[:3])} are sparse or quantized, which checkpoints of Sluice cannot "
                       "keep")
        size = sum(_ENTRY_CHARACTERS + len(name) + (buffer.nbytes + 2) // 3 * 4 for name, buffer in plain.items())
        if plain and size > room:
            self._warn(f"the model's buffers would take {size} characters of the text beside the state, which has room for {room}")
            return {}
        return {name: [str(buffer.dtype).removeprefix("torch."), list(buffer.shape), base64.b64encode(bits).decode()]
                for (name, buffer), bits in zip(plain.items(), _bits_of(list(plain.values())))}

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            logger.warning("%s: a training that goes on keeps those that the program makes. Save them yourself, from model.named_buffers(), "
                           "or make them with persistent=False if they never change", message)
        self._has_warned = True


def _bits_of(buffers: "list[torch.Tensor]") -> "list[Any]":
    """The bytes of each. Small ones of a device come together, since each copy from a GPU waits for it."""
    flat = [buffer.reshape(-1).contiguous().view(torch.uint8) for buffer in buffers]
    small = [i for i, bits in enumerate(flat) if bits.numel() <= _SMALL_BYTES]
    for device in {flat[i].device for i in small}:
        there = [i for i in small if flat[i].device == device]
        for i, bits in zip(there, torch.cat([flat[i] for i in there]).cpu().split([flat[i].numel() for i in there])):
            flat[i] = bits
    return [bits.cpu().numpy() for bits in flat]


def matching_buffers(model: nn.Module, values: "Mapping[str, torch.Tensor]", units: Optional[Units] = None) -> "dict[str, torch.Tensor]":
    """The model's buffers that `values` has. Raises ArgumentError where one has another shape."""
    found = {name: buffer for name, buffer in kept_buffers(model, units).items() if name in values}
    for name, buffer in found.items():
        shape = values.shape_of(name) if isinstance(values, (SafetensorsValues, SavedBuffers)) else tuple(values[name].shape)
        if shape != tuple(buffer.shape):
            raise ArgumentError(f"buffer {name} has shape {shape} in the {_place_of(values)}, but {tuple(buffer.shape)} in the model; "
                                "no buffer was changed")
    return found


def _place_of(values: "Mapping[str, torch.Tensor]") -> str:
    return "checkpoint" if isinstance(values, SavedBuffers) else "file"


def take_buffers(model: nn.Module, values: "Mapping[str, torch.Tensor]", units: Optional[Units] = None) -> None:
    """Gives the model's buffers their values, by name. Says which ones `values` lacks. Raises ArgumentError where one has another
    shape, before any has changed."""
    found = matching_buffers(model, values, units)
    with torch.no_grad():
        for name, buffer in found.items():
            if not buffer.is_meta:
                buffer.copy_(values[name])  # from a file: one is in memory at a time
    missing = sorted(name for name, buffer in kept_buffers(model, units).items() if not buffer.is_meta and name not in found)
    if missing:
        logger.warning("buffers %s keep their values, since the %s has none for them", ", ".join(missing[:3]) +
                       (" and others" if len(missing) > 3 else ""), _place_of(values))


def take_saved(model: nn.Module, saved: SavedBuffers, units: Units) -> None:
    """Gives the model's buffers those of a checkpoint or commit. Says which ones it lacks."""
    if saved or kept_buffers(model, units):
        take_buffers(model, saved, units)


def make_buffers(model: nn.Module, values: object, units: Units, device: torch.device) -> None:
    """Makes the buffers that are on the meta device, on `device`, where a state_dict has them and the mapping `values`, too. Says which
    ones cannot be made."""
    known = values if isinstance(values, Mapping) else {}
    moved = {name for _, named in names_of_members(model, units) for name in named}
    kept = kept_buffers(model, units)
    made: "dict[int, torch.Tensor]" = {}  # modules may share one
    missing = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{prefix}.{name}" if prefix else name
            if buffer is None or not buffer.is_meta or full in moved:
                continue
            if id(buffer) not in made and full in kept and full in known:
                made[id(buffer)] = torch.empty_like(buffer, device=device).copy_(known[full])
            if id(buffer) in made:
                module._buffers[name] = made[id(buffer)]
            else:
                missing.append(full)
    if missing:
        logger.warning("buffers %s are on the meta device, and values= has none for them: computation that reads them will fail. "
                       "Build the model under sluice_offload.meta_parameters(), which leaves buffers as they are",
                       ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else ""))
