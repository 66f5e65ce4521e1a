"""Parameters whose unit is not lent. They have a type, a shape and a device, but no values: their memory shows poison (storage.py).
Where a forward computes with one, as a module does that reads another's weight, its unit is lent (reads.py); elsewhere it is refused.

A parameter gets this class while its unit is hidden, and torch's own while it is shown, so that nothing stands between torch and
parameters that are lent. Tensors that autograd has saved come back to C++ alone, and have no such class.
"""

import functools
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .errors import NOT_COPIED, ArgumentError
from .units import Site, Unit

if TYPE_CHECKING:
    from .hooks import Walk

_P = ParamSpec("_P")
_R = TypeVar("_R")

# These ask for no values, as do all that begin with "is_".
_NO_VALUES = frozenset((
    "__get__", "__set__", "__delete__", "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset",
    "data_ptr", "get_device", "untyped_storage", "storage", "_typed_storage", "storage_type", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "__repr__", "__format__", "__len__", "__hash__", "__dir__",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor", "empty_like",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "result_type", "has_names", "dim_order",
    "_has_compatible_shallow_copy_type"))
_VIEWS = frozenset(("detach", "t", "transpose", "permute", "view", "view_as", "flatten", "squeeze", "unsqueeze", "expand", "expand_as",
                    "narrow", "select", "movedim", "swapaxes", "adjoint"))
_VIEW_ATTRIBUTES = frozenset(("data", "T", "mT", "H", "mH"))
_CONVERSIONS = frozenset(("to", "cpu", "cuda", "type", "float", "half", "bfloat16", "double", "contiguous"))


class _Place:
    """The unit of a parameter, which may stand in several places."""

    def __init__(self, walk: "Walk", unit: Unit, site: Site, name: str) -> None:
        self.walk, self.unit, self.site, self.name = weakref.ref(walk), unit, site, name

    def is_shown(self) -> bool:
        walk = self.walk()
        return walk is not None and (walk.is_lent(self.unit.index) or self.unit.index in walk.gathered)

    def __reduce__(self) -> Any:
        raise NOT_COPIED


class _Unlent:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: "tuple[Any, ...]" = (), kwargs: "Optional[dict[str, Any]]" = None) -> Any:
        name = _name_of(func)
        if name in _NO_VALUES or (name.startswith("is_") and name != "is_nonzero"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _call(name, func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Any:
        raise NOT_COPIED

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NOT_COPIED


class UnlentParameter(_Unlent, nn.Parameter):
    """The class of a parameter whose unit is hidden."""


class _UnlentView(_Unlent, torch.Tensor):
    """A view of one, such as its transpose, which is used later."""


def without_values(call: "Callable[_P, _R]") -> "Callable[_P, _R]":
    """`call` looks at many parameters, and at the values of none: nothing stands between them and torch."""
    @functools.wraps(call)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._C.DisableTorchFunctionSubclass():
            return call(*args, **kwargs)
    return wrapped


def guard(walk: "Walk") -> None:
    """From now on the model's parameters have that class where they have no values."""
    for unit in walk.units.units:
        site = Site(unit.members[0].owners[0][0], unit.name, [unit])
        found: "dict[int, Any]" = {}
        for member in unit.members:
            place = _Place(walk, unit, site, member.name)
            for owner, attribute in member.owners:
                tensor = member.at(owner)[attribute]
                if type(tensor) is nn.Parameter:  # others have a class for a reason
                    tensor._sluice_place = place
                    found[id(tensor)] = tensor
        walk.storages[unit.index].guard(list(found.values()))


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return "detach" if name == "__get__" and getattr(func.__self__, "__name__", "") in _VIEW_ATTRIBUTES else name


@torch._disable_dynamo
def _call(name: str, func: Any, args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        first = args[0] if args else next(iter(kwargs.values()))
        if name in _VIEWS and isinstance(first, _Unlent):
            view = func(*args, **kwargs).as_subclass(_UnlentView)
            view._sluice_place = first._sluice_place
            return view
        if name in _CONVERSIONS and isinstance(first, UnlentParameter):
            probe = first.new_empty(0)
            converted = func(probe, *args[1:], **kwargs)
            if converted is probe or not isinstance(converted, torch.Tensor):
                return first if converted is probe else converted
        target = first if name.endswith("_") and not name.endswith("__") or name == "__setitem__" else kwargs.get("out")
        places = [x._sluice_place for x in tree_leaves((args, kwargs)) if hasattr(x, "_sluice_place")]
        _ask(name, [place for place in places if not place.is_shown()], isinstance(target, _Unlent))
        return func(*args, **kwargs)


def _ask(name: str, places: "list[_Place]", is_written: bool) -> None:
    """Has the units of `places` lent for a call of `name`, all together."""
    if not places:
        return
    first = places[0]
    walk = first.walk()
    units = list({place.unit.index: place.unit for place in places}.values())
    if walk is not None and not is_written:
        walk.lend_for_read(first.site if len(units) == 1 else Site(first.site.module, first.name, units))
    if is_written or not all(place.is_shown() for place in places):
        raise ArgumentError(_refusal(first, walk, name, is_written))


def _refusal(place: _Place, walk: "Optional[Walk]", name: str, is_written: bool) -> str:
    reader = None if walk is None else walk.innermost()
    is_within = walk is not None and walk.depth > 0
    where = "outside of the model's forward" if not is_within else "in the forward of the model" if reader is None else \
        f"in the forward of module \"{reader.site.name}\""
    if is_written:
        return (f"{name}() would change {place.name} {where}, where an offloaded model has no values of it; call "
                "model.load_state_dict() between steps, or change the model before offload()")
    found = f"{name}() reads {place.name} {where}, "
    if not is_within:
        return (found + "where an offloaded model has no values of it. Read it inside of `with sluice_offload.gathered(model):`, which also "
                "goes around methods beside forward, or of parts of units; a loss has to be computed in the model's forward")
    return (found + f"beside which there is no room for unit \"{place.unit.name}\". Name a module that contains both in offload(units=...), or "
            "assign the parameter to an attribute of the module that reads it before offload()")

