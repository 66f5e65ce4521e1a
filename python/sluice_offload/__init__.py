"""Sluice for PyTorch: trains models whose parameters and optimizer state do not fit into memory.

    import sluice_offload as sluice
    optimizer = sluice.offload(model, config, units=[Block])

and the rest of the program as it was.
"""

from .errors import (ArgumentError, ConfigError, ForkedError, NonFiniteError, OutOfMemoryError, RanksError,
                     SluiceError, StorageError)

_without_torch: "Exception | None" = None
try:
    import torch as _torch  # noqa: F401
except (ImportError, OSError) as _error:  # `python -m sluice_offload doctor` says so, and `flags` needs none
    _without_torch = _error
else:
    from . import optim
    from .files import (from_pretrained, load_safetensors, meta_parameters, named_values, open_safetensors, save_pretrained,
                        save_safetensors)
    from .initialize import OffloadEngine, initialize
    from .logs import log_steps
    from .offload import gathered, offload
    from .optimizer import OffloadOptimizer
    from .schedulers import rebind_scheduler
    from .state import SafetensorsValues
    from .tracing import trace
    from .units import find_units

__version__ = "0.1.0"
__all__ = ["ArgumentError", "ConfigError", "ForkedError", "NonFiniteError", "OffloadEngine", "OffloadOptimizer",
           "OutOfMemoryError", "RanksError", "SafetensorsValues", "SluiceError", "StorageError", "find_units", "from_pretrained",
           "gathered", "initialize", "load_safetensors", "log_steps", "meta_parameters", "named_values", "offload", "open_safetensors",
           "optim", "rebind_scheduler", "save_pretrained", "save_safetensors", "trace"]

# Other calls that programs make of DeepSpeed, and what stands for them here.
_OF_DEEPSPEED = {
    "init_distributed": "torch.distributed.init_process_group() before initialize() is enough, and so is torchrun alone",
    "zero": "build the model under sluice_offload.meta_parameters(), and give values= to offload() or initialize()",
    "add_config_arguments": "add --deepspeed_config to the program's own options; initialize(args=args) reads it",
    "checkpointing": "torch.utils.checkpoint, and \"activations\" in the config",
}


def __getattr__(name: str) -> object:
    if _without_torch is not None and name in __all__:
        raise ImportError(f"sluice_offload.{name} needs torch, which cannot be imported: {_without_torch}") from _without_torch
    hint = f"; instead: {_OF_DEEPSPEED[name]}" if name in _OF_DEEPSPEED else ""
    raise AttributeError(f"module 'sluice_offload' has no attribute '{name}'{hint}")
