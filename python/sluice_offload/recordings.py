"""torch.compile records CUDA graphs with mode="reduce-overhead" and the like. A graph reads each parameter at the address that it had
at the recording, and the engine lends it at another one. So such a compilation of an offloaded model is refused: by offload()
where a part of the model has been compiled before, by torch.compile where it is compiled behind that, and where a function that was
compiled otherwise is the first to compute with one of its parameters, by what inductor begins with."""

import functools
import inspect
from typing import Any, Callable, Iterable, Optional

import torch
from torch import nn

from .errors import ArgumentError
from .guards import owners_of

_KEY = "triton.cudagraphs"
_installed = False


def _refusal(what: str) -> ArgumentError:
    return ArgumentError(f"{what} records CUDA graphs, which read a parameter where it was at the recording; the engine lends the parameters "
                         "of an offloaded model elsewhere at each use. Leave the mode out of torch.compile(), or take "
                         "mode=\"max-autotune-no-cudagraphs\"")


def refuse_recordings(model: nn.Module) -> None:
    """Raises ArgumentError where a part of `model` is compiled so, and sees to it that none will be while it is offloaded."""
    for name, module in model.named_modules():
        for compiled in (vars(module).get("_compiled_call_impl"), vars(module).get("forward")):  # the latter in torch's own wrapper, too
            if _keeps_addresses(compiled):
                raise _refusal(f"offload(): the torch.compile of {name or 'the model'} ({type(module).__name__})")
    _install()


def _keeps_addresses(compiled: Any) -> bool:
    """Whether this is a function of torch.compile that says so."""
    settings = getattr(compiled, "get_compiler_config", None)
    found = settings() if inspect.isfunction(settings) else None
    return isinstance(found, dict) and bool(found.get(_KEY))


def _are_offloaded(tensors: "Iterable[Any]") -> bool:
    return any(not owner.leaves_parameters for owner in owners_of(tensors))


def _recording_option(backend: Any = None, mode: Optional[str] = None, options: Any = None, **_: Any) -> Optional[str]:
    """The argument of torch.compile that asks for CUDA graphs."""
    if backend == "cudagraphs":
        return "backend=\"cudagraphs\""
    if backend not in (None, "inductor"):
        return None
    if mode not in (None, "default"):
        from torch._inductor import list_mode_options
        return f"mode=\"{mode}\"" if list_mode_options(mode).get(_KEY) else None
    return f"options={{\"{_KEY}\": True}}" if isinstance(options, dict) and options.get(_KEY) else None


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    original: "Callable[..., Any]" = torch.compile

    @functools.wraps(original)
    def compile_(model: Any = None, **arguments: Any) -> Any:
        module = getattr(model, "__self__", model)
        if isinstance(module, nn.Module) and _are_offloaded(module.parameters()):
            option = _recording_option(**arguments)
            if option is not None:
                raise _refusal(f"torch.compile of an offloaded {type(module).__name__}: {option}")
        return original(model, **arguments)

    torch.compile = compile_
    wrapper: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        _install_in_inductor(wrapper)


def _install_in_inductor(wrapper: Any) -> None:
    """Has each graph looked at before it is compiled. Its inputs are the parameters that it reads, or it has them."""
    original = wrapper.__call__

    @functools.wraps(original)
    def call(self: Any, graph: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        from torch._inductor import config
        if self.config.get(_KEY, config.triton.cudagraphs) and _are_offloaded([*inputs, *graph.parameters()]):
            raise _refusal("a compiled function that computes with an offloaded model")
        return original(self, graph, inputs, *rest, **more)

    wrapper.__call__ = call
