"""Parameters whose unit is not lent. They have a type, a shape and a device, but no values: their memory shows poison (storage.py).
Where a forward computes with one, as a module does that reads another's weight, its unit is lent (reads.py); elsewhere it is refused.

A parameter gets this class while its unit is hidden, and torch's own while it is shown, so that nothing stands between torch and
parameters that are lent. Tensors that autograd has saved come back to C++ alone, and have no such class.
"""

import copy
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

# These ask for no values, as do all that begin with "is_" or "_is_".
_NO_VALUES = frozenset((
    "__get__", "__set__", "__delete__", "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset",
    "get_device", "untyped_storage", "storage", "_typed_storage", "storage_type", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "__repr__", "__format__", "__len__", "__hash__", "__dir__",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "empty_like",
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "result_type", "has_names", "dim_order",
    "_has_compatible_shallow_copy_type"))
# These make views, or copies, as their arguments want.
_VIEWS = frozenset((
    "detach", "t", "transpose", "permute", "view", "view_as", "flatten", "squeeze", "unsqueeze", "expand", "expand_as", "narrow",
    "select", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "reshape", "reshape_as", "ravel", "unflatten", "diagonal", "real",
    "as_strided", "unfold", "broadcast_to", "positive", "atleast_1d", "atleast_2d", "atleast_3d", "__getitem__", "__iter__", "split",
    "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind"))
_VIEW_ATTRIBUTES = frozenset(("data", "T", "mT", "H", "mH"))
_LIKE = frozenset(("to", "type_as", "view_as", "expand_as", "reshape_as"))  # ask their second argument for its type or shape alone
_GRADIENTS = (torch.autograd.backward, torch.autograd.grad)
_CONVERSIONS = frozenset(("to", "cpu", "cuda", "type", "float", "half", "bfloat16", "double", "contiguous"))


class _Place:
    """The unit of a parameter, which may stand in several places."""

    def __init__(self, walk: "Walk", unit: Unit, site: Site, name: str) -> None:
        self.walk, self.unit, self.site, self.name = weakref.ref(walk), unit, site, name
        self.memory = {storage._cdata for storage in walk.storages[unit.index].places()}

    def is_ready(self) -> bool:
        """Whether it has values, and backward will have them, too, for what is computed with them now."""
        walk = self.walk()
        if walk is None or not (walk.is_lent(self.unit.index) or self.unit.index in walk.gathered):
            return False
        return walk.has_read(self.unit)

    def __reduce__(self) -> Any:
        raise NOT_COPIED


class _Unlent:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: "tuple[Any, ...]" = (), kwargs: "Optional[dict[str, Any]]" = None) -> Any:
        name = _name_of(func)
        if name in _NO_VALUES or (name.startswith(("is_", "_is_")) and name != "is_nonzero"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _GRADIENTS:
            return _gradients(func, *args, **(kwargs or {}))
        return _call(name, func, args, kwargs or {})

    def as_subclass(self, cls: Any) -> Any:  # of which torch does not ask the class
        return _call("as_subclass", torch.Tensor.as_subclass, (self, cls), {})

    def __deepcopy__(self, memo: Any) -> Any:
        if _is_guarded(self):
            raise NOT_COPIED
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _is_guarded(self):
            raise NOT_COPIED
        return self.__reduce_ex__(protocol)


class UnlentParameter(_Unlent, nn.Parameter):
    """The class of a parameter whose unit is hidden."""


class _UnlentView(_Unlent, torch.Tensor):
    """A view of one, such as its transpose, which is used later."""


GUARDED = frozenset((nn.Parameter, UnlentParameter, _UnlentView))  # lent where they are read


def _is_guarded(tensor: Any) -> bool:
    """Not if it was given memory of its own, such as by `p.data = values` behind close(): it is torch's again from then on."""
    place = getattr(tensor, "_sluice_place", None)
    if place is None and not isinstance(tensor, UnlentParameter):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        if place is not None and tensor.untyped_storage()._cdata in place.memory:
            return True
        tensor.__class__, tensor._sluice_place = nn.Parameter, None
        return False


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


def _gradients(func: Any, outputs: Any, inputs: Any = None, **options: Any) -> Any:
    """backward and grad want the nodes of their inputs, and no values. Hooks that run in them may read parameters, so torch gets the
    nodes alone, and the classes stay."""
    nodes = []
    with torch._C.DisableTorchFunctionSubclass():
        if any(isinstance(x, _Unlent) for x in outputs):
            return _call(func.__name__, func, (outputs,), {"inputs": inputs, **options})
        if not all(getattr(x, "requires_grad", True) for x in inputs):
            return func(outputs, inputs=inputs, **options)  # which torch refuses
        for x in inputs:
            if isinstance(x, _Unlent) and func is torch.autograd.backward:
                x.retain_grad()
            nodes.append(torch.autograd.graph.get_gradient_edge(x) if isinstance(x, _Unlent) else x)
    if not options.get("materialize_grads", False):
        return func(outputs, inputs=nodes, **options)
    found = func(outputs, inputs=nodes, **{**options, "materialize_grads": False})  # torch makes zeros for tensors alone
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(torch.zeros_like(x, requires_grad=options["create_graph"]) if one is None else one
                     for one, x in zip(found, inputs, strict=True))


@torch._disable_dynamo
def _call(name: str, func: Any, args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        first = args[0] if args else next(iter(kwargs.values()))
        if name in _VIEWS and isinstance(first, _Unlent) and not (name == "__getitem__" and _is_copied_by(args[1])):
            found = _watched(func(*args, **kwargs), first)
            if found is not None:
                return found
        if name == "data_ptr":  # of a kernel that is called by addresses, in a forward; elsewhere of a program that looks what is the same
            walk = first._sluice_place.walk() if _is_guarded(first) else None
            if walk is not None and walk.depth > 0:
                walk.lend_for_read(first._sluice_place.site)
            return func(*args, **kwargs)
        if name in _LIKE and not isinstance(first, _Unlent):
            return func(*args, **kwargs)
        if name in _CONVERSIONS and isinstance(first, _Unlent):
            probe = first.new_empty(0)
            converted = func(probe, *args[1:], **kwargs)
            if converted is probe or not isinstance(converted, torch.Tensor):
                return first if converted is probe else converted
        target = first if name.endswith("_") and not name.endswith("__") or name == "__setitem__" else kwargs.get("out")
        read = (args[1:], kwargs) if name == "new_tensor" else (args, kwargs)  # the first one has the type alone
        places = [x._sluice_place for x in tree_leaves(read) if _is_guarded(x)]
        _ask(name, [place for place in places if not place.is_ready()], isinstance(target, _Unlent))
        return func(*args, **kwargs)


def _is_copied_by(index: Any) -> bool:
    return any(not isinstance(one, (int, slice, type(None), type(...))) for one in (index if isinstance(index, tuple) else (index,)))


def _watched(found: Any, of: Any) -> Any:
    """Views of `of`, as such that are used later; None if they are copies."""
    if not isinstance(found, torch.Tensor):
        views = [_watched(one, of) for one in found]
        if any(view is None for view in views):
            return None
        return type(found)(views) if isinstance(found, (list, tuple)) else iter(views)
    if found.untyped_storage()._cdata != of.untyped_storage()._cdata:
        return None
    if found is not of:
        found.__class__, found._sluice_place = _UnlentView, of._sluice_place  # no as_subclass(), which autograd takes for one more view
    return found


def _ask(name: str, places: "list[_Place]", is_written: bool) -> None:
    """Has the units of `places` lent for a call of `name`, all together."""
    if not places:
        return
    first = places[0]
    walk = first.walk()
    units = list({place.unit.index: place.unit for place in places}.values())
    if walk is not None and not is_written:
        walk.lend_for_read(first.site if len(units) == 1 else Site(first.site.module, first.name, units))
    if is_written or not all(place.is_ready() for place in places):
        raise ArgumentError(_refusal(first, walk, name, is_written, len(units)))


def _refusal(place: _Place, walk: "Optional[Walk]", name: str, is_written: bool, count: int) -> str:
    reader = None if walk is None else walk.innermost()
    is_within = walk is not None and walk.depth > 0
    where = "outside of the model's forward" if not is_within else "in the forward of the model" if reader is None else \
        f"in the forward of module \"{reader.site.name}\""
    if is_written:
        return (f"{name}() would change {place.name} {where}, where an offloaded model has no values of it; call "
                "model.load_state_dict() between steps, or change the model before offload()")
    if walk is None or not walk.engine.is_open:
        return f"{name}() reads {place.name}, whose optimizer is closed, and its values went with it; take model.state_dict() before that"
    found = f"{name}() reads {place.name} {where}, "
    if torch._C._current_graph_task_id() != -1:
        return (f"{name}() reads {place.name} in backward, outside of the forward of a module. Where a checkpoint computes that again, put "
                "it into a module of its own, and name its class in offload(units=...), or take the checkpoint away")
    if not is_within:
        return (found + "where an offloaded model has no values of it. Read it inside of `with sluice_offload.gathered(model):`, which also "
                "goes around methods beside forward, or of parts of units; a loss has to be computed in the model's forward")
    return (found + f"beside which there is no room for unit \"{place.unit.name}\". Give offload() leases={max(walk.leases + 1, count + len(reader.site.units if reader is not None else []))}, "
            "so that a module may use so many units at once, or name a module that contains both in units=")

