"""Buffers that stay torch's, such as the running means of BatchNorm. The engine's checkpoints do not have them, so a program that restores a
model takes them from elsewhere."""

import logging
from typing import Mapping, Optional

import torch
from torch import nn

from .errors import ArgumentError
from .state import SafetensorsValues
from .units import Units, names_of_members

logger = logging.getLogger("sluice_offload")


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


def matching_buffers(model: nn.Module, values: "Mapping[str, torch.Tensor]", units: Optional[Units] = None) -> "dict[str, torch.Tensor]":
    """The model's buffers that `values` has. Raises ArgumentError where one has another shape."""
    found = {name: buffer for name, buffer in kept_buffers(model, units).items() if name in values}
    for name, buffer in found.items():
        shape = values.shape_of(name) if isinstance(values, SafetensorsValues) else tuple(values[name].shape)
        if shape != tuple(buffer.shape):
            raise ArgumentError(f"buffer {name} has shape {shape} in the file, but {tuple(buffer.shape)} in the model; "
                                "no buffer was changed")
    return found


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
        logger.warning("buffers %s keep their values, since the file has none for them", ", ".join(missing[:3]) +
                       (" and others" if len(missing) > 3 else ""))


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
