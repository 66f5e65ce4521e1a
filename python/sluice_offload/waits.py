"""Hooks of modules whose parameters an update under way still writes (overlap="forward" of sluice_offload.optim)."""

import weakref
from typing import Any, Callable, Optional

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
