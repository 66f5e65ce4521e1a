"""Guards for the ways in which a torch program touches parameters that the engine owns by then. Each way is made to
work, or is refused with a message, instead of quietly doing nothing."""

import functools
import gc
import os
import weakref
from typing import Any, Callable, Iterable, Iterator, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import NOT_COPIED, ArgumentError
from .units import Units

_installed = False
_sharing: "weakref.WeakSet[Any]" = weakref.WeakSet()  # optimizers whose step() is a call of all ranks


class _Owner:
    """Which optimizer a parameter belongs to."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)

    def __reduce__(self) -> Any:
        if getattr(self.optimizer(), "leaves_parameters", True):  # in the model, whose copies belong to no optimizer
            return type(None), ()
        raise NOT_COPIED


def owners_of(parameters: "Iterable[Any]", role: str = "_sluice_owner") -> "Iterator[Any]":
    """The optimizers of those of `parameters` that are offloaded, each once; or those that have another role, below."""
    seen: "set[int]" = set()
    for parameter in parameters:
        if isinstance(parameter, torch.Tensor):
            known = getattr(parameter, role, None)
            owner = known.optimizer() if known is not None else None
            if owner is not None and id(owner) not in seen:
                seen.add(id(owner))
                yield owner


def owner_of(parameters: "Iterable[Any]") -> Any:
    """The first of them, or None."""
    return next(iter(owners_of(parameters)), None)


def own(parameters: "Iterable[torch.Tensor]", optimizer: Any, role: str = "_sluice_owner") -> None:
    """From now on `parameters` are known to be `optimizer`'s. Another one of sluice_offload.optim that had them, as where the cell of a
    notebook is run again, has them no longer."""
    listed = list(parameters)
    for other in list(owners_of(listed, role)):
        if other is not optimizer and other.leaves_parameters:
            other.answer_leaving()
    for parameter in listed:
        setattr(parameter, role, _Owner(optimizer))
    _install()


def read_gradients(parameters: "Iterable[torch.Tensor]", optimizer: Any) -> None:
    """From now on `optimizer` may be reading gradients of `parameters` until its synchronize(), though they stay torch's."""
    own(parameters, optimizer, "_sluice_reader")


def share(optimizer: Any) -> None:
    """From now on torch's Join, in which ranks without data answer for DistributedDataParallel alone, refuses parameters of `optimizer`, whose
    step() needs an answer of every rank, too."""
    if not _sharing:
        _install_in_join()
    _sharing.add(optimizer)


def _install_in_join() -> None:
    try:
        from torch.distributed.algorithms.join import Join  # pylint: disable=import-outside-toplevel
    except ImportError:  # a torch that was built without torch.distributed
        return
    original_enter: Any = Join.__enter__
    if hasattr(original_enter, "__wrapped__"):
        return

    @functools.wraps(original_enter)
    def enter(self: Any) -> Any:
        if getattr(self, "_enable", True) and not getattr(self, "_throw_on_early_termination", False):
            joined = {id(parameter) for module in getattr(self, "_joinables", ()) if isinstance(module, nn.Module)
                      for parameter in module.parameters()}
            for optimizer in _sharing:
                if any(id(parameter) in joined for group in optimizer.param_groups for parameter in group["params"]):
                    raise ArgumentError(f"Join: the state of sluice_offload.optim.{type(optimizer).__name__} is sharded over the ranks, so "
                                        "step() needs all of them, and a rank without data would not answer it. Give the optimizer "
                                        "shard=False; or give all ranks equally many batches, and Join throw_on_early_termination=True")
        return original_enter(self)

    Join.__enter__ = enter  # type: ignore[method-assign]


def require_not_offloaded(parameters: "Iterable[Any]") -> None:
    """Raises ArgumentError where some of `parameters` are an engine's, which alone can update them."""
    if any(not owner.leaves_parameters for owner in owners_of(parameters)):
        raise ArgumentError("these are parameters of a model that is offloaded, and its engine updates them; train with the optimizer that "
                            "offload() has returned")


class GradientHook:
    """Gives each gradient that has come to an optimizer of sluice_offload.optim, unless another one was made later."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)  # torch keeps hooks of parameters where Python's collector does not look

    def __call__(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is not None and owner_of([parameter]) is optimizer:
            optimizer.take(parameter)


def require_free(parameters: "Iterable[Any]") -> None:
    """Raises ArgumentError where an optimizer of sluice_offload.optim has hooks on the model of `parameters`. Takes away those that are
    left of earlier ones, which tied parameters could not have."""
    listed = list(parameters)
    if _kinds_of_optim(listed):
        gc.collect()  # one that the program has dropped may be in a cycle
    kinds = _kinds_of_optim(listed)
    if kinds:
        raise ArgumentError(f"offload(): sluice_offload.optim.{kinds[0]} has parameters of this model, with gradients=\"backward\" "
                            "or overlap=\"forward\"; call the close() of that optimizer first. Where the program has no name for it any more, "
                            "an exception has kept it, with the variables of its traceback: drop that, or run the cell of a notebook again")
    for parameter in listed:
        hooks = parameter._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, GradientHook)]:
            del hooks[key]


def _kinds_of_optim(parameters: "list[Any]") -> "list[str]":
    """No optimizer is left in a variable: this exception, which a notebook keeps in the place of an earlier one, must keep none."""
    return [type(other).__name__ for role in ("_sluice_owner", "_sluice_reader") for other in owners_of(parameters, role)
            if other.leaves_parameters]


def disown(parameters: "Iterable[torch.Tensor]", optimizer: Any) -> None:
    """Those of `parameters` that are `optimizer`'s belong to none any more."""
    _sharing.discard(optimizer)
    for parameter in parameters:
        for role in ("_sluice_owner", "_sluice_reader"):
            if next(owners_of([parameter], role), None) is optimizer:
                delattr(parameter, role)


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    register_optimizer_step_pre_hook(_check_optimizer)
    for name, guard in (("clip_grad_norm_", _clip_grad_norm_), ("clip_grad_value_", _clip_grad_value_),
                        ("clip_grads_with_norm_", _clip_grads_with_norm_)):  # the last since torch 2.6
        if hasattr(torch.nn.utils, name):
            _put_around(name, guard)
    original_zero = nn.Module.zero_grad

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        if not set_to_none:  # an update may be reading what would be set to zero
            for reader in owners_of(self.parameters(), "_sluice_reader"):
                reader.synchronize()
        original_zero(self, set_to_none)
        for owner in owners_of(self.parameters()):
            owner.answer_zeroing(self)

    zero_grad.__doc__ = original_zero.__doc__
    nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]
    original_apply = nn.Module._apply

    @functools.wraps(original_apply)
    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """to(), half() and the like. An update may be writing the values that they would copy."""
        for reader in owners_of(self.parameters(), "_sluice_reader"):
            reader.synchronize()
        return original_apply(self, *args, **kwargs)

    nn.Module._apply = _apply  # type: ignore[method-assign]
    wrapper: Any = torch.nn.parallel.DistributedDataParallel
    original_forward = wrapper.forward

    @functools.wraps(original_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A wrapper that was made before the optimizer writes the mean of gradients that the optimizer takes."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for owner in owners_of(self.parameters()):
                if owner.leaves_parameters:
                    owner.answer_wrapping(None)
        result = original_forward(self, *args, **kwargs)
        if getattr(self, "gradient_as_bucket_view", False) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Backward zeroes and reduces the buckets of parameters that this forward has not used, and so has not waited for: the gradient
            # that an update reads lies in there.
            for reader in owners_of(self.parameters(), "_sluice_reader"):
                reader.synchronize()
        return result

    wrapper.forward = forward
    # A __new__ that returns something else than a wrapper keeps Python from calling the wrapper's __init__.
    wrapper.__new__ = staticmethod(_wrap)


def _put_around(name: str, guard: "Callable[..., Any]") -> None:
    """From now on `guard` is called in the place of torch.nn.utils' function `name`, with the original one before its arguments. Programs
    may have imported the function by name, so the change is made within it: in the cell where torch's no_grad wrapper keeps it."""
    public = getattr(torch.nn.utils, name)
    cells = dict(zip(public.__code__.co_freevars, public.__closure__ or ())) if hasattr(public, "__code__") else {}
    if "func" in cells:
        cells["func"].cell_contents = functools.partial(guard, cells["func"].cell_contents)
        return
    guarded = functools.wraps(public)(functools.partial(guard, public))  # a torch that is built otherwise
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        if getattr(module, name, None) is public:
            setattr(module, name, guarded)


def _clip_grad_norm_(original: "Callable[..., Any]", parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    owner = owner_of(listed)
    if owner is None:
        return original(listed, max_norm, *args, **kwargs)
    _require_whole(owner, listed)
    return owner.answer_clipping(float(max_norm), *_norm_options(*args, **kwargs))


def _clip_grad_value_(original: "Callable[..., Any]", parameters: Any, *args: Any, **kwargs: Any) -> Any:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    owner = owner_of(listed)
    if owner is not None:
        raise ArgumentError("clip_grad_value_: the gradients of these parameters are not in p.grad, and would not be clipped; "
                            f"clip by the norm instead: {owner.how_to_clip}")
    return original(listed, *args, **kwargs)


def _clip_grads_with_norm_(original: "Callable[..., Any]", parameters: Any, *args: Any, **kwargs: Any) -> Any:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    owner = owner_of(listed)
    if owner is not None:
        raise ArgumentError("clip_grads_with_norm_: the gradients of these parameters are not in p.grad, and would not be clipped. "
                            f"Instead of it, {owner.how_to_clip}")
    return original(listed, *args, **kwargs)


def _require_whole(owner: Any, listed: "list[torch.Tensor]") -> None:
    """The engine clips all gradients of an optimizer by their norm, and no others."""
    if owner.leaves_parameters and owner.clip_norm is None:  # it refuses any call, and says what to do instead
        return
    given = {id(parameter) for parameter in listed}
    missing = sum(parameter.requires_grad and id(parameter) not in given
                  for group in owner.param_groups for parameter in group["params"])
    if missing:
        raise ArgumentError(f"clip_grad_norm_: {missing} trained parameters of the model are not in the list, but its gradients are "
                            "clipped by the norm of all of them; give all of model.parameters()")
    foreign = sum(parameter.grad is not None and owner_of([parameter]) is None for parameter in listed)
    if foreign or len({id(other) for other in owners_of(listed)}) > 1:
        raise ArgumentError("clip_grad_norm_: the list has parameters of several optimizers, and the gradients of one of them are not in "
                            "p.grad, so there is no norm of all; call it once for each optimizer. Parameters that came into the "
                            "model behind its optimizer, as by peft's get_peft_model, belong to none: add them before offload()")


def _norm_options(norm_type: Any = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> "tuple[float, bool]":
    """The rest of clip_grad_norm_'s arguments."""
    return float(norm_type), error_if_nonfinite


def _wrap(kind: Any, module: Optional[nn.Module] = None, *args: Any, **kwargs: Any) -> Any:
    """DistributedDataParallel of an offloaded model is the model itself, for the engine takes the mean over the processes."""
    owner = owner_of(module.parameters()) if isinstance(module, nn.Module) else None
    if owner is None:
        return object.__new__(kind)
    group = kwargs.get("process_group")
    owner.answer_wrapping(dist.get_world_size(group) if dist.is_initialized() else None)
    return module


def _check_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for owner in owners_of(group["params"]):
            if owner is not optimizer:
                frees = ", or call its close()" if owner.leaves_parameters else ""
                raise ArgumentError(f"{type(optimizer).__name__} holds parameters whose gradients the engine has: it would change "
                                    f"nothing. Use the {type(owner).__name__} that has them{frees}")


def require_no_hooks_of_tied(units: Units, is_own: "Callable[[Any], bool]" = lambda hook: False) -> None:
    """Raises ArgumentError where a trained parameter that stands in several places has hooks of the program: in torch they see the sum
    of the gradients of all places, here those of the first alone. `is_own`: whether a hook is the package's."""
    for unit in units.units:
        for member in [] if unit.is_frozen else unit.members:
            parameter = member.parameter
            others = [hook for hook in (parameter._post_accumulate_grad_hooks or {}).values() if not is_own(hook)]
            if len(member.owners) > 1 and (parameter._backward_hooks or others):
                raise ArgumentError(f"{member.name} has a hook and stands in {len(member.owners)} places of the model: offloaded, the "
                                    "hook would see the gradient of one of them instead of their sum. Remove the hook, or untie the "
                                    "parameter (clone() it in one place)")


class _GuardedApply:
    """Stands in the place of a module's _apply. Refuses to move or convert any part of the model, whose parameters are of `dtypes` on
    `device`; a move to where it is does nothing. Copies and pickles of the module meet it, and are refused."""

    def __init__(self, module: nn.Module, dtypes: "set[torch.dtype]", device: torch.device) -> None:
        self._module, self._dtypes, self._device = weakref.ref(module), dtypes, device

    def __call__(self, fn: Any, recurse: bool = True) -> Any:
        for dtype in self._dtypes:
            probe = torch.tensor(list(os.urandom(8)), dtype=torch.uint8).to(dtype).to(self._device)
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                where = "the CPU" if self._device.type == "cpu" else self._device
                raise ArgumentError(f"the parameters of an offloaded model are the engine's, of {dtype} on {where}; convert or move "
                                    f"the model (to {moved.dtype}, {moved.device}) before offload(), or give offload() device=")
            is_anew = moved is not probe and not torch.equal(moved.view(torch.uint8), probe.view(torch.uint8))  # "cpu:0" copies what is on "cpu"
            if is_anew or moved.is_shared() and moved.device.type == "cpu":
                raise ArgumentError("the parameters of an offloaded model are the engine's, in memory that is not the model's to make anew "
                                    "or to share with processes: call share_memory() or to_empty() before offload()")
        return self._module()

    def __reduce__(self) -> Any:
        raise NOT_COPIED


def guard_model(model: nn.Module, units: Units, dtypes: "set[torch.dtype]", device: torch.device) -> None:
    """Refuses to move, convert, copy or pickle any part of the model that has parameters of `units`. Others, such as metrics and losses,
    stay torch's."""
    owners = {id(owner) for unit in units.units for member in unit.members for owner, _ in member.owners}
    for module in model.modules():
        if not any(id(part) in owners for part in module.modules()):
            continue
        object.__setattr__(module, "_apply", _GuardedApply(module, dtypes, device))
