"""Which parameters form a unit, and which modules need it. Pure: looks at modules and shapes, a model on the meta device
included.

- A unit is what computation needs together: the whole subtree of each instance of the classes `units`. Every other module
  that owns parameters is a unit of those.
- A parameter that a second module owns too (tied weights) belongs to the first one's unit; the second module uses that unit.
- Frozen and trained parameters of one module are two units, used together.
- A module that owns parameters and contains other units cannot lend its own for as long as it runs, for those inside need
  leases meanwhile: it is `held`, its parameters are copied (storage.py).
"""

import dataclasses
from typing import Iterable, Sequence

import torch
from torch import nn

from .errors import ArgumentError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Transformer,
               nn.TransformerEncoder, nn.TransformerDecoder)


@dataclasses.dataclass
class Member:
    """A parameter of a unit: `owners` are the places (module, attribute) where it is found; the first is its own, at
    each other one stands a parameter of its own over the same memory."""
    name: str
    parameter: nn.Parameter
    owners: "list[tuple[nn.Module, str]]"
    tensor: int = -1
    offset: int = 0  # in elements of its unit


@dataclasses.dataclass
class Unit:
    index: int
    name: str
    is_frozen: bool
    members: "list[Member]" = dataclasses.field(default_factory=list)
    is_held: bool = False


@dataclasses.dataclass
class Site:
    """A module whose forward needs units."""
    module: nn.Module
    name: str
    units: "list[Unit]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Units:
    units: "list[Unit]"
    sites: "list[Site]"

    @property
    def leases(self) -> int:
        """How many leases computation holds at a time: those of one module. With more, an unexpected order might find
        no room in the engine's window beside the leases of modules that are over."""
        return max(len(site.units) for site in self.sites)


def is_of_torch(module: nn.Module) -> bool:
    """A module of torch's own that reads the weights of those inside without calling them, as MultiheadAttention does."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)


def _classes(model: nn.Module, units: "Sequence[type | str] | None") -> "tuple[set[str], tuple[type, ...], set[int]]":
    """Returns the three ways to name a unit's module: names of classes, classes, or its own id."""
    if units is None:
        units = getattr(model, "_no_split_modules", None) or None
    if units is not None:
        names = {unit for unit in units if isinstance(unit, str)}
        return names, tuple(unit for unit in units if isinstance(unit, type)), set()
    children = {id(child) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))
                and len(module) > 1 for child in module}
    return set(), (), children


def find_units(model: nn.Module, units: "Sequence[type | str] | None" = None) -> Units:
    """The units of `model`. `units`: classes of modules, or their names, each instance of which is one; by default those
    that the model itself names (`_no_split_modules`), else the children of its lists and sequences."""
    names, classes, ids = _classes(model, units)
    found = _Finder(model)
    inside: "set[int]" = set()
    matched = False
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        is_unit = type(module).__name__ in names or isinstance(module, classes) or id(module) in ids
        if is_unit and module is not model and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            matched = True
            inside.update(id(child) for child in module.modules())
            found.add(name, module, list(module.named_modules()))
        elif is_of_torch(module):
            inside.update(id(child) for child in module.modules())
            found.add(name, module, list(module.named_modules()))
        else:
            found.add(name, module, [("", module)])
    if units is not None and not matched:
        raise ArgumentError(f"units={list(units)!r} names no module of the model; its modules are of the classes "
                            f"{sorted({type(module).__name__ for module in model.modules()})}")
    result = found.result()
    if not result.units:
        raise ArgumentError(f"{type(model).__name__} has no parameters")
    if all(unit.is_frozen for unit in result.units):
        raise ArgumentError(f"no parameter of {type(model).__name__} requires a gradient; there is nothing to train")
    return result


class _Finder:
    def __init__(self, model: nn.Module) -> None:
        self.units: "list[Unit]" = []
        self.sites: "list[Site]" = []
        self.owner: "dict[int, tuple[Unit, Member]]" = {}

    def add(self, name: str, module: nn.Module, members: "Iterable[tuple[str, nn.Module]]") -> None:
        site = Site(module, name or type(module).__name__)
        own: "dict[bool, Unit]" = {}
        for prefix, owner in members:
            for attribute, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                _check(name, attribute, parameter)
                known = self.owner.get(id(parameter))
                if known is not None:
                    known[1].owners.append((owner, attribute))
                    if known[0] not in site.units:
                        site.units.append(known[0])
                    continue
                frozen = not parameter.requires_grad
                if frozen not in own:
                    own[frozen] = Unit(len(self.units), site.name + (".frozen" if frozen else ""), frozen)
                    self.units.append(own[frozen])
                    site.units.append(own[frozen])
                full = ".".join(part for part in (name, prefix, attribute) if part)
                member = Member(full, parameter, [(owner, attribute)])
                own[frozen].members.append(member)
                self.owner[id(parameter)] = (own[frozen], member)
        if site.units:
            self.sites.append(site)

    def result(self) -> Units:
        sites = {id(site.module) for site in self.sites}
        for site in self.sites:
            contains = any(id(child) in sites for child in site.module.modules() if child is not site.module)
            for unit in site.units if contains else ():
                unit.is_held = True
        # Numbered anew, without gaps; the parameters' names, which are unique, name frozen twins apart.
        return Units(self.units, self.sites)


def _check(name: str, attribute: str, parameter: nn.Parameter) -> None:
    what = f"parameter {name + '.' if name else ''}{attribute}"
    if parameter.numel() == 0:
        raise ArgumentError(f"{what} has shape {tuple(parameter.shape)}: a tensor without elements cannot be offloaded")
    if not parameter.dtype.is_floating_point:
        raise ArgumentError(f"{what} is of {parameter.dtype}; parameters have to be of fp32, bf16 or fp16")
    if parameter.device.type not in ("cpu", "meta"):
        raise ArgumentError(f"{what} is on {parameter.device}; this version computes on the CPU: offload the model there")


def common_dtype(units: Units) -> torch.dtype:
    """The type of all parameters. Raises ArgumentError where they differ, naming one of each."""
    first = units.units[0].members[0]
    for unit in units.units:
        for member in unit.members:
            if member.parameter.dtype != first.parameter.dtype:
                raise ArgumentError(f"{first.name} is of {first.parameter.dtype}, {member.name} of "
                                    f"{member.parameter.dtype}; all have to be of one type, or the config's "
                                    "precision.parameters has to name one")
    return first.parameter.dtype
