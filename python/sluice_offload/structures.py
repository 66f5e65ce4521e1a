"""A model as C sees it: its units as structures, and values of tensors as flat memory."""

import ctypes as C
from typing import Any, Sequence

import torch

from . import library as lib
from .errors import ArgumentError
from .units import Member, Units

PIECE = 4 << 20  # elements that a GPU converts at a time


def order_of(order: "Sequence[int]") -> Any:
    return (C.c_uint32 * len(order))(*order)


def model_of(units: Units, keep: "list[Any]") -> lib.Model:
    """The structure for C; the arrays that it points to live as long as `keep`."""
    forward = [unit.index for site in units.sites for unit in site.units if not unit.is_announced]
    return lib.Model(_units(units, keep), len(units.units), units.leases, order_of(forward), order_of(forward[::-1]),
                     len(forward), len(forward))


def _units(units: Units, keep: "list[Any]") -> Any:
    made = []
    for unit in units.units:
        tensors = (lib.Tensor * len(unit.members))()
        for tensor, member in zip(tensors, unit.members):
            shape = (member.parameter.nbytes,) if unit.is_opaque else tuple(member.parameter.shape)
            extents = (C.c_uint64 * max(1, len(shape)))(*shape)
            tensor.name, tensor.shape, tensor.dimensions = member.name.encode(), extents, len(shape)
            # As `sluice train` has it: matrices decay, biases and norms do not.
            tensor.has_decay = int(len(shape) >= 2)
            keep.append(extents)
        keep.append(tensors)
        kind = lib.OPAQUE if unit.is_opaque else int(unit.is_frozen)
        kind |= lib.ANNOUNCED if unit.is_announced else lib.PINNED if unit.is_held else 0
        kind |= lib.LOCAL if unit.is_local else 0
        made.append(lib.Unit(unit.name.encode(), tensors, len(unit.members), kind))
    array = (lib.Unit * len(made))(*made)
    keep.append(array)
    return array


def bytes_of(member: Member, values: torch.Tensor) -> torch.Tensor:
    """The bytes of an opaque tensor."""
    _check_values(member, values)
    if values.dtype != member.parameter.dtype:
        raise ArgumentError(f"the values of {member.name} are of {values.dtype}, but it is of {member.parameter.dtype} and keeps "
                            "its bits")
    return values.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def flat_of(member: Member, values: torch.Tensor) -> torch.Tensor:
    """The values in one row. Plain ones stay where they are and as they are: a copy of a large tensor takes as much memory again."""
    _check_values(member, values)
    values = values.detach()
    is_plain = type(values) is torch.Tensor and values.layout == torch.strided and values.is_contiguous()
    return (values if is_plain else values.to("cpu", torch.float32)).reshape(-1)


def copy_values(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a few of a tensor's values to `target`, memory of the CPU. Torch would bring those of a GPU over in their own type and
    convert them here, through memory that it makes for that. The engine's memory is page-locked, and the GPU writes to it."""
    if values.device.type == "cpu":
        target.copy_(values)
        return
    for piece, place in zip(values.split(PIECE), target.split(PIECE)):
        place.copy_(piece.to(target.dtype))


def _check_values(member: Member, values: torch.Tensor) -> None:
    if tuple(values.shape) != tuple(member.parameter.shape):
        raise ArgumentError(f"the values of {member.name} have shape {tuple(values.shape)}, but the parameter has "
                            f"{tuple(member.parameter.shape)}")
    if values.is_meta:
        raise ArgumentError(f"{member.name} is on the meta device and has no values; give offload() values=")
