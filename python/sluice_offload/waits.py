"""Waits in modules whose parameters an update under way still writes (overlap="forward" of sluice_offload.optim)."""

import weakref
from collections import OrderedDict
from typing import Any, Callable, Iterable, Optional

import torch
from torch import nn

from .errors import ArgumentError


class Waits:
    """Waits for updates when its module begins its forward, or its values are asked for, and when the module is copied. Copies of the
    module share the hook."""

    def __init__(self, optimizer: Any, module: nn.Module, call: "Optional[Callable[[nn.Module], None]]" = None) -> None:
        self._optimizer, self._module, self._call = optimizer, weakref.ref(module), call

    @torch._disable_dynamo
    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._call is None:
            self._optimizer.synchronize()
        else:
            self._call(module)

    def __deepcopy__(self, memo: "dict[int, Any]") -> "Waits":
        """A module's own parameters are copied before its hooks, and perhaps before their update has ended."""
        module = self._module()
        if module is not None:
            self._optimizer.synchronize()
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in memo:
                    memo[id(parameter)].data.copy_(parameter.data)
        return self

    def __reduce__(self) -> Any:
        raise ArgumentError("a model whose optimizer has overlap=\"forward\" cannot be pickled, for its hooks belong to the optimizer; "
                            "save its state_dict()")


class Parameters(dict[str, Any]):
    """In the place of a module's `_parameters`. A read of one as an attribute of the module waits for the module's own, whichever module
    reads it. To go through all of them, as zero_grad() does, waits for none. Copies are plain dictionaries."""

    def __init__(self, parameters: "dict[str, Any]") -> None:
        super().__init__(parameters)
        self.is_pending = False  # an update may be writing them
        self._waits: "list[Callable[[Iterable[Any]], None]]" = []

    def __getitem__(self, name: str) -> Any:
        if self.is_pending:
            self._wait()
        return super().__getitem__(name)

    @torch._disable_dynamo
    def _wait(self) -> None:
        for wait in self._waits:
            wait(self.values())
        self.is_pending = False

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)

    @staticmethod
    def wait_in(module: nn.Module, wait: "Callable[[Iterable[Any]], None]") -> "Optional[Parameters]":
        """From now on `wait` is called with `module`'s own parameters where one is read and is_pending. Returns what is in their place."""
        own = module.__dict__.get("_parameters")
        if type(own) in (dict, OrderedDict):
            own = module.__dict__["_parameters"] = Parameters(own)
        if not isinstance(own, Parameters):
            return None
        own._waits.append(wait)
        return own

    @staticmethod
    def end_in(module: nn.Module, wait: "Callable[[Iterable[Any]], None]") -> None:
        own = module.__dict__.get("_parameters")
        if isinstance(own, Parameters):
            own._waits = [other for other in own._waits if other != wait]
            if not own._waits:
                module.__dict__["_parameters"] = dict(own.items())
