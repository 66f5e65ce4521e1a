"""Waits in modules whose parameters an update under way still writes (overlap="forward" of sluice_offload.optim). Modules live longer
than optimizers that a program drops, and keep none of them alive."""

import weakref
from collections import OrderedDict
from typing import Any, Callable, Optional

import torch
from torch import nn

from .errors import ArgumentError


class Waits:
    """Waits for updates when its module begins its forward, or its values are asked for, and when the module is copied. Without an
    optimizer, as in copies of the module, it waits for nothing."""

    def __init__(self, optimizer: Any = None, module: Optional[nn.Module] = None,
                 call: "Optional[Callable[[Any, nn.Module], None]]" = None) -> None:
        """`call`: what waits, with the optimizer and the module; by default for all updates."""
        self._optimizer, self._module = (None if known is None else weakref.ref(known) for known in (optimizer, module))
        self._call = call or (lambda optimizer, _: optimizer.synchronize())

    def _optimizer_or_none(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    @torch._disable_dynamo
    def __call__(self, module: nn.Module, *_: Any) -> None:
        optimizer = self._optimizer_or_none()
        if optimizer is not None:
            self._call(optimizer, module)

    def __deepcopy__(self, memo: "dict[int, Any]") -> "Waits":
        """A module's own parameters are copied before its hooks, and perhaps before their update has ended."""
        optimizer, module = self._optimizer_or_none(), None if self._module is None else self._module()
        if optimizer is not None and module is not None:
            optimizer.synchronize()
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in memo:
                    memo[id(parameter)].data.copy_(parameter.data)
        return Waits()

    def __reduce__(self) -> Any:
        if self._optimizer_or_none() is None:
            return Waits, ()
        raise ArgumentError("a model whose optimizer has overlap=\"forward\" cannot be pickled, for its hooks belong to the optimizer; "
                            "save its state_dict()")


class Parameters(dict[str, Any]):
    """In the place of a module's `_parameters`. A read of one as an attribute of the module waits for the module's own, whichever module
    reads it. To go through all of them, as zero_grad() does, waits for none. Copies are plain dictionaries."""

    def __init__(self, parameters: "dict[str, Any]") -> None:
        super().__init__(parameters)
        self._optimizers: "weakref.WeakSet[Any]" = weakref.WeakSet()  # that wait here
        self._writers: "weakref.WeakSet[Any]" = weakref.WeakSet()     # those of them that may be writing parameters
        self.is_pending = False  # there are some; a bool, for torch.compile looks at it

    def __getitem__(self, name: str) -> Any:
        if self.is_pending:
            self._wait()
        return super().__getitem__(name)

    def begin(self, optimizer: Any) -> None:
        """From now on `optimizer` may be writing them."""
        self._writers.add(optimizer)
        self.is_pending = True

    def end(self, optimizer: Any) -> bool:
        """It is not, any more. Returns whether it might have been."""
        was_writing = optimizer in self._writers
        self._writers.discard(optimizer)
        self.is_pending = len(self._writers) > 0
        return was_writing

    @torch._disable_dynamo
    def _wait(self) -> None:
        for optimizer in list(self._writers):
            optimizer.wait_for_read(self)
        self.is_pending = len(self._writers) > 0

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)

    @staticmethod
    def wait_in(module: nn.Module, optimizer: Any) -> "Optional[Parameters]":
        """From now on `optimizer.wait_for_read()` is called where one of `module`'s own parameters is read behind begin(). Returns what is
        in their place."""
        own = module.__dict__.get("_parameters")
        if type(own) in (dict, OrderedDict):
            own = module.__dict__["_parameters"] = Parameters(own)
        if not isinstance(own, Parameters):
            return None
        own._optimizers.add(optimizer)
        return own

    @staticmethod
    def end_in(module: nn.Module, optimizer: Any) -> None:
        own = module.__dict__.get("_parameters")
        if isinstance(own, Parameters):
            own.end(optimizer)
            own._optimizers.discard(optimizer)
            if not own._optimizers:
                module.__dict__["_parameters"] = dict(own.items())
