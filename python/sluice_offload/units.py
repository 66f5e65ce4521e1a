"""Which parameters form a unit, and which modules need it. Pure: looks at modules and shapes, a model on the meta device
included.

- A unit is what computation needs together: the whole subtree of each instance of the classes `units`. Every other module
  that owns parameters, itself or in a ParameterList or ParameterDict, is a unit of those.
- A parameter that a second module owns too (tied weights) belongs to the first one's unit; the second module uses that unit.
- Frozen and trained parameters of one module are two units, used together. Frozen ones of another type than the trained ones,
  such as quantized weights, and buffers that are named are a third: `opaque`, of which every bit is kept.
- Tensors without elements belong to no unit, and stay where they are.
- Trained parameters may be of fp32 and bf16 in one model. The engine's parameters then are of fp32, and those of bf16 are `rounded`
  where computation sees them (storage.py). A config that names a type for all parameters makes them one.
- A module that owns parameters and contains other units cannot lend its own for as long as it runs, for those inside need
  leases meanwhile: it is `held`, its parameters are copied (storage.py).
"""

import bisect
import dataclasses
import fnmatch
from typing import Any, Iterable, Iterator, Optional, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import ArgumentError

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIXED = {torch.float32, torch.bfloat16}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Transformer,
               nn.TransformerEncoder, nn.TransformerDecoder)

# Also where a class of a program's own wraps their forward.
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of _NormBase, from which BatchNorm and InstanceNorm are made


@dataclasses.dataclass
class Member:
    """A parameter of a unit, or a buffer: `owners` are the places (module, attribute) where it is found; the first is its
    own, at each other one stands a parameter of its own over the same memory, if it is trained."""
    name: str
    parameter: torch.Tensor
    owners: "list[tuple[nn.Module, str]]"
    is_opaque: bool = False
    rounded: Optional[torch.dtype] = None  # the type that computation sees, where it is not the engine's
    tensor: int = -1
    offset: int = 0  # in elements of the engine's parameters, in its unit

    def at(self, owner: nn.Module) -> "dict[str, torch.Tensor]":
        """Where `owner` keeps it."""
        return owner._parameters if isinstance(self.parameter, nn.Parameter) else owner._buffers  # type: ignore[return-value]


@dataclasses.dataclass
class Unit:
    index: int
    name: str
    is_frozen: bool
    members: "list[Member]" = dataclasses.field(default_factory=list)
    is_held: bool = False
    is_opaque: bool = False
    is_announced: bool = False
    is_local: bool = False  # with several processes, of this one alone

    @property
    def rounded(self) -> "list[Member]":
        """The members whose type is not the engine's."""
        return [member for member in self.members if member.rounded is not None]


@dataclasses.dataclass
class Site:
    """A module whose forward needs units."""
    module: nn.Module
    name: str
    units: "list[Unit]" = dataclasses.field(default_factory=list)
    first_node: int = 0  # autograd's count of nodes when its forward began
    failure_before: Optional[BaseException] = None  # that was being handled then
    values: "list[torch.Tensor]" = dataclasses.field(default_factory=list)  # of its units, as modules hold them
    kept: "list[dict[str, Any]]" = dataclasses.field(default_factory=list)  # where its modules keep what the program assigns
    versions: "list[int]" = dataclasses.field(default_factory=list)  # of its parameters, when its forward began
    weights: Any = None  # its module's own, where others read them (reads.py)


@dataclasses.dataclass
class Units:
    units: "list[Unit]"
    sites: "list[Site]"
    # How many leases computation holds at a time: those of one module, and of what it reads of others. With more, an unexpected
    # order might find no room in the engine's window beside the leases of modules that are over.
    leases: int

    @property
    def are_mixed(self) -> bool:
        """Whether trained parameters keep several types."""
        return any(unit.rounded for unit in self.units)

    def announced_in(self, module: nn.Module) -> "list[int]":
        """The announced units of a module."""
        return [unit.index for site in self.sites if site.module is module for unit in site.units if unit.is_announced]


def is_of_torch(module: nn.Module) -> bool:
    """A module of torch's own, or of a class that inherits its forward, which reads the weights of those inside without calling them, as
    MultiheadAttention does."""
    if isinstance(module, _CONTAINERS):
        return False
    if isinstance(module, _READERS):
        return True
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.nn.modules."):
            return kind is not nn.Module and type(module).forward is kind.forward
    return False


def _classes(model: nn.Module, units: "Sequence[type | str] | None") -> "tuple[set[str], tuple[type, ...], set[int]]":
    """Returns the three ways to name a unit's module: names of classes, classes, or its own id."""
    if units is None:
        return set(), (), set(_usual_units(model, _elements(model)))
    names = {unit for unit in units if isinstance(unit, str)}
    return names, tuple(unit for unit in units if isinstance(unit, type)), set()


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1


def _usual_units(module: nn.Module, total: int) -> "Iterator[int]":
    """The ids of units in `module`, where the program names none. `total`: elements of the model."""
    named = getattr(module, "_no_split_modules", None)
    for part in module.modules() if named else ():
        if type(part).__name__ in named:
            yield id(part)
    for child in module.children() if not named else ():
        if _is_list(module) and not _is_of_several(child, total):
            yield id(child)
        else:
            yield from _usual_units(child, total)


def _is_of_several(module: nn.Module, total: int) -> bool:
    """Whether units are to be found in a list's element: one that is most of the model, such as a backbone before its head, would
    take as much memory as the model."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or any(getattr(part, "_no_split_modules", None) for part in module.modules()):
        return True
    own = _elements(module)
    return 2 * own > total and any(_is_list(part) and 2 * _elements(part) > own for part in module.modules())


def _lists_of(module: nn.Module, prefix: str = "") -> "Iterator[tuple[str, nn.Module]]":
    """The lists and dictionaries of parameters that a module reads without calling them, with those inside of them, and the
    parametrizations that compute its weights, which may be views of their own parameters."""
    for name, child in module.named_children():
        if name == "parametrizations" and is_parametrized(module):
            yield from ((f"{prefix}{name}.{inner}" if inner else prefix + name, part) for inner, part in child.named_modules())
        elif isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield prefix + name, child
            yield from _lists_of(child, f"{prefix}{name}.")


def find_units(model: nn.Module, units: "Iterable[type | str] | None" = None, buffers: "Sequence[str]" = (),
               announced: "Iterable[type | str]" = (), keeps_types: bool = False, local: "Iterable[type | str]" = (),
               leases: Optional[int] = None) -> Units:
    """The units of `model`. `units`: classes of modules, or their names, each instance of which is one; by default those
    that the model itself names (`_no_split_modules`), else the children of its lists and sequences. `buffers`: patterns of
    the names of buffers that belong to units, too. `announced`: classes, or their names, of which each instance is a unit that
    steps announce; `local`: of those, the ones that each process has for itself. `keeps_types`: trained parameters of fp32 and bf16
    keep their types. `leases`: how many a module may use at once, with those of whose modules it reads parameters."""
    units = None if units is None else tuple(units)
    announced, local = tuple(announced), tuple(local)
    names, classes, ids = _classes(model, units)
    announced_names, announced_classes, _ = _classes(model, (*announced, *local))
    local_names, local_classes, _ = _classes(model, local)
    found = _Finder(model, buffers, keeps_types)
    inside: "set[int]" = set()
    matched = False
    for name, module in model.named_modules():
        is_announced = type(module).__name__ in announced_names or isinstance(module, announced_classes)
        if id(module) in inside:
            if is_announced:
                raise ArgumentError(f"announced={[*announced, *local]!r}: {name} is in a unit that is fetched as one; choose smaller "
                                    "units, which do not contain it")
            continue
        is_unit = type(module).__name__ in names or isinstance(module, classes) or id(module) in ids
        is_unit = is_unit and module is not model and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        matched = matched or is_unit
        if is_announced:
            inside.update(id(child) for child in module.modules())
            is_local = type(module).__name__ in local_names or isinstance(module, local_classes)
            found.add(name, module, list(module.named_modules()), is_announced=True, is_local=is_local)
            continue
        if is_unit:
            inside.update(id(child) for child in module.modules())
            found.add(name, module, list(module.named_modules()))
        elif is_of_torch(module):
            inside.update(id(child) for child in module.modules())
            found.add(name, module, list(module.named_modules()))
        else:
            lists = list(_lists_of(module))
            inside.update(id(child) for _, child in lists)
            found.add(name, module, [("", module), *lists])
    for unit in units or ():
        named = [module for module in model.modules() if unit == type(module).__name__ or (isinstance(unit, type) and isinstance(module, unit))]
        if named == [model]:
            raise ArgumentError(f"units={list(units or ())!r}: {type(model).__name__} is the class of the model itself, which cannot be a unit; "
                                "choose classes of modules inside of it")
    if units is not None and not matched:
        raise ArgumentError(f"units={list(units)!r} names no module of the model; its modules are of the classes "
                            f"{sorted({type(module).__name__ for module in model.modules()})}")
    if announced and not any(unit.is_announced for unit in found.units):
        raise ArgumentError(f"announced={list(announced)!r} names no module of the model with parameters")
    if local and not any(unit.is_local for unit in found.units):
        raise ArgumentError(f"local={list(local)!r} names no module of the model with parameters")
    found.check_buffers(model)
    result = found.result(model, leases)
    _check_memory([member for unit in result.units for member in unit.members])
    _check_aliases(model, [member for unit in result.units for member in unit.members])
    if not result.units:
        raise ArgumentError(f"{type(model).__name__} has no parameters")
    if all(unit.is_frozen for unit in result.units):
        raise ArgumentError(f"no parameter of {type(model).__name__} requires a gradient; there is nothing to train")
    return result


class _Finder:
    def __init__(self, model: nn.Module, buffers: "Sequence[str]", keeps_types: bool) -> None:
        self.units: "list[Unit]" = []
        self.sites: "list[Site]" = []
        self.owner: "dict[int, tuple[Unit, Member]]" = {}
        self.buffers = {pattern: False for pattern in buffers}  # whether it names one
        trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad and parameter.numel() > 0}
        self.is_mixed = keeps_types and trained == _MIXED
        # The engine's, unless the config names it.
        self.dtype = torch.float32 if self.is_mixed else trained.pop() if len(trained) == 1 else None

    def add(self, name: str, module: nn.Module, members: "Iterable[tuple[str, nn.Module]]", is_announced: bool = False,
            is_local: bool = False) -> None:
        first = len(self.units)
        site = Site(module, name or type(module).__name__)
        own: "dict[str, Unit]" = {}
        for prefix, owner in members:
            place = ".".join(part for part in (name, prefix) if part)
            _check_forward(place, owner)
            tensors: "list[tuple[str, torch.Tensor | None]]" = [*owner._parameters.items(), *self._named_buffers(place, owner)]
            for attribute, tensor in tensors:
                if tensor is not None and tensor.numel() > 0:  # without elements there is nothing to move or to update
                    self._add_tensor(site, own, place, owner, attribute, tensor)
        for unit in self.units[first:]:
            unit.is_announced, unit.is_local = is_announced, is_local
        if site.units:
            self.sites.append(site)

    def _add_tensor(self, site: Site, own: "dict[str, Unit]", place: str, owner: nn.Module, attribute: str,
                    tensor: torch.Tensor) -> None:
        full = f"{place}.{attribute}" if place else attribute
        _check(full, tensor)
        if isinstance(owner, torch.jit.ScriptModule):
            raise ArgumentError(f"{place or 'the model'} is a {owner.original_name} of TorchScript, whose forward reads {attribute} where no hook "
                                "lends it; script or trace it after training, from state_dict()")
        known = self.owner.get(id(tensor))
        if known is not None:
            if not any(place[0] is owner and place[1] == attribute for place in known[1].owners):
                known[1].owners.append((owner, attribute))
            if known[0] not in site.units:
                site.units.append(known[0])
            return
        rounded = tensor.dtype if self.is_mixed and tensor.requires_grad and tensor.dtype != self.dtype else None
        kind = "" if tensor.requires_grad else ".opaque" if self._is_opaque(tensor) else ".frozen"
        if kind not in own:
            own[kind] = Unit(len(self.units), site.name + kind, kind != "", is_opaque=kind == ".opaque")
            self.units.append(own[kind])
            site.units.append(own[kind])
        member = Member(full, tensor, [(owner, attribute)], own[kind].is_opaque, rounded)
        own[kind].members.append(member)
        self.owner[id(tensor)] = (own[kind], member)

    def _is_opaque(self, tensor: torch.Tensor) -> bool:
        return (not isinstance(tensor, nn.Parameter) or tensor.dtype not in _TYPES
                or (self.dtype is not None and tensor.dtype != self.dtype))

    def _named_buffers(self, place: str, owner: nn.Module) -> "list[tuple[str, torch.Tensor | None]]":
        found: "list[tuple[str, torch.Tensor | None]]" = []
        for attribute, buffer in owner._buffers.items():
            full = f"{place}.{attribute}" if place else attribute
            matching = [pattern for pattern in self.buffers if fnmatch.fnmatchcase(full, pattern)]
            self.buffers.update((pattern, True) for pattern in matching)
            if matching and attribute in _STATISTICS and isinstance(owner, _NormBase) and owner.track_running_stats:
                if full not in matching:
                    continue  # "*" means what may move
                raise ArgumentError(f"buffers=[{full!r}] is written in the forward of {type(owner).__name__}, and buffers that move with units "
                                    "are read, never written; leave it out, so that it stays in memory, where it is updated")
            if matching:
                found.append((attribute, buffer))
        return found

    def check_buffers(self, model: nn.Module) -> None:
        for pattern, names_one in self.buffers.items():
            if not names_one:
                names = [name for name, _ in model.named_buffers()]
                raise ArgumentError(f"buffers: {pattern!r} names no buffer; the model has {names[:6]}"
                                    f"{' and others' if len(names) > 6 else ''}")

    def result(self, model: nn.Module, leases: Optional[int]) -> Units:
        sites = {id(site.module) for site in self.sites}
        for site in self.sites:
            contains = any(id(child) in sites for child in site.module.modules() if child is not site.module)
            for unit in site.units if contains else ():
                unit.is_held = True
        # Numbered anew, without gaps; the parameters' names, which are unique, name frozen twins apart.
        return Units(self.units, self.sites, self._leases(model, leases))

    def _leases(self, model: nn.Module, given: Optional[int]) -> int:
        most = max(self.sites, key=lambda site: len(site.units), default=None)
        own = 1 if most is None else len(most.units)
        if given is None:  # the encoders of DeBERTa and SEW-D have this method, for all of whose layers it reads one embedding
            readers = {id(layer) for module in model.modules() if hasattr(module, "get_rel_embedding") for layer in module.modules()}
            given = max((len(site.units) + (id(site.module) in readers) for site in self.sites), default=1)
        elif isinstance(given, bool) or not isinstance(given, int) or given < own:
            least = f"{most.name or 'the model'} has parameters in {own}" if most is not None and own > 1 else "it is 1 at least"
            raise ArgumentError(f"leases={given!r}: give the number of units that a module may use at once; {least}")
        return min(given, max(own, len(self.units)))


def _check_forward(place: str, module: nn.Module) -> None:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise ArgumentError(f"{place or type(module).__name__} has max_norm={module.max_norm}: its forward changes the rows that it "
                            "uses, behind the optimizer's back, where the engine does not see it. Leave max_norm out, and "
                            "multiply the rows that were looked up (of an EmbeddingBag: before they are pooled) by max_norm / norm "
                            "where their norm is larger than max_norm")


def _check(name: str, parameter: torch.Tensor) -> None:
    what = f"{'parameter' if isinstance(parameter, nn.Parameter) else 'buffer'} {name}"
    if is_traceable_wrapper_subclass(parameter):
        raise ArgumentError(f"{what} is a {type(parameter).__name__}, which keeps its values in other tensors; quantize with a "
                            "module that has plain parameters or buffers")
    if parameter.requires_grad and not parameter.dtype.is_floating_point:
        raise ArgumentError(f"{what} is of {parameter.dtype} and requires a gradient; only floating-point parameters can be "
                            "trained. Freeze it by requires_grad_(False), which keeps its bits, or keep its real and imaginary "
                            "parts as a parameter of one more dimension (torch.view_as_real)")
    if parameter.device.type not in ("cpu", "cuda", "meta"):
        raise ArgumentError(f"{what} is on {parameter.device}; Sluice computes on the CPU and on NVIDIA GPUs: move the model to the CPU, "
                            "and give offload() device=")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is all elements of a range of memory, in any order of its dimensions."""
    extents = sorted((stride, extent) for extent, stride in zip(tensor.shape, tensor.stride()) if extent > 1)
    expected = 1
    for stride, extent in extents:
        if stride != expected:
            return False
        expected *= extent
    return tensor.numel() > 0


def _check_memory(members: "Sequence[Member]") -> None:
    """Raises where two parameters are two objects over the same memory: in torch an update of one is an update of both, but the
    engine would keep them apart. Frozen ones may be."""
    ranges = []
    for member in members:
        tensor = member.parameter
        if not tensor.is_meta and is_dense(tensor):
            begin = tensor.data_ptr()
            ranges.append((begin, begin + tensor.nbytes, member))
    ranges.sort(key=lambda entry: entry[:2])
    last: "Optional[tuple[int, int, Member]]" = None
    for entry in ranges:
        if last is not None and entry[0] < last[1] and (entry[2].parameter.requires_grad or last[2].parameter.requires_grad):
            raise ArgumentError(f"{last[2].name} and {entry[2].name} are two parameters over the same memory; tie them by assigning "
                                "one parameter to both places (b.weight = a.weight), or give each its own (clone())")
        if last is None or entry[1] > last[1]:
            last = entry


def _check_aliases(model: nn.Module, members: "Sequence[Member]") -> None:
    """Raises where a module has a buffer or a plain attribute over the memory of a trained parameter: in torch it follows the training,
    but the engine's parameters are elsewhere."""
    known = {id(member.parameter) for member in members}
    trained = sorted((*_range_of(member.parameter), member.name) for member in members  # these do not overlap
                     if member.parameter.requires_grad and not member.parameter.is_meta and is_dense(member.parameter))
    for prefix, module in model.named_modules():
        for what, name, tensor in _tensors_beside(module):
            if id(tensor) in known or nn.parameter.is_lazy(tensor) or is_traceable_wrapper_subclass(tensor):
                continue
            if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
                continue
            begin, end = _range_of(tensor)
            at = bisect.bisect_left(trained, (end,)) - 1
            if at >= 0 and trained[at][0] <= begin < trained[at][1] and end <= trained[at][1]:  # else it holds several parameters
                raise ArgumentError(f"the {what} {prefix + '.' if prefix else ''}{name} lies over the memory of {trained[at][2]}, and would not "
                                    "follow its training; compute it from the parameter in forward, or give it its own (clone())")


def _tensors_beside(module: nn.Module) -> "Iterator[tuple[str, str, torch.Tensor]]":
    """A module's buffers and plain attributes. Some attributes begin over a parameter, and are computed anew from it before they are
    read: `weight` from `weight_orig` by torch.nn.utils.spectral_norm, from `weight_raw` by programs of their own."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield "buffer", name, buffer
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor) and not any(parameter.startswith(f"{name}_") for parameter in module._parameters):
            yield "tensor", name, value


def _range_of(tensor: torch.Tensor) -> "tuple[int, int]":
    """The addresses from its first element to behind its last."""
    extent = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.itemsize


def names_of_members(model: nn.Module, units: Units) -> "list[tuple[Member, list[str]]]":
    """Each parameter with all names that it has in the model, its own first."""
    prefixes: "dict[int, list[str]]" = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefixes.setdefault(id(module), []).append(prefix + "." if prefix else "")
    return [(member, [prefix + attribute for owner, attribute in member.owners for prefix in prefixes[id(owner)]])
            for unit in units.units for member in unit.members]


def opaque_types(units: Units) -> "dict[str, list[Any]]":
    """Type and shape of each opaque tensor, by its name. The engine itself knows only how many words of bytes it has."""
    return {member.name: [str(member.parameter.dtype), list(member.parameter.shape)]
            for unit in units.units for member in unit.members if member.is_opaque}


def common_dtype(units: Units) -> torch.dtype:
    """The engine's type for all parameters but opaque ones. Raises ArgumentError where they differ, naming one of each."""
    if units.are_mixed:
        return torch.float32
    numbers = [unit for unit in units.units if not unit.is_opaque]
    first = numbers[0].members[0]
    for unit in numbers:
        for member in unit.members:
            if member.parameter.dtype != first.parameter.dtype:
                raise ArgumentError(f"{first.name} is of {first.parameter.dtype}, {member.name} of "
                                    f"{member.parameter.dtype}; all have to be of one type, or the trained ones of fp32 and "
                                    "bf16, or the config's precision.parameters has to name one for all of them")
    return first.parameter.dtype


def rounded_text(units: Units, gradients: str) -> str:
    """A line on the memory that trained parameters of fp32 and bf16 take."""
    counts = [sum(member.parameter.numel() for member in unit.rounded) for unit in units.units]
    return (f"{sum(counts):,} parameters of bf16 beside others of fp32: the engine keeps all as fp32, and gradients as "
            f"{gradients}; the bf16 values of units in use, at most {2 * max(counts):,} bytes each, come on top of the budgets")
