"""Sluice for PyTorch: trains models whose parameters and optimizer state do not fit into memory.

    import sluice_offload as sluice
    optimizer = sluice.offload(model, config, units=[Block])

and the rest of the program as it was.
"""

from . import optim
from .errors import (ArgumentError, ConfigError, ForkedError, NonFiniteError, OutOfMemoryError, RanksError,
                     SluiceError, StorageError)
from .files import (from_pretrained, load_safetensors, meta_parameters, named_values, open_safetensors, save_pretrained,
                    save_safetensors)
from .initialize import OffloadEngine, initialize
from .logs import log_steps
from .offload import gathered, offload
from .optimizer import OffloadOptimizer
from .state import SafetensorsValues
from .tracing import trace
from .units import find_units

__version__ = "0.1.0"
__all__ = ["ArgumentError", "ConfigError", "ForkedError", "NonFiniteError", "OffloadEngine", "OffloadOptimizer",
           "OutOfMemoryError", "RanksError", "SafetensorsValues", "SluiceError", "StorageError", "find_units", "from_pretrained",
           "gathered", "initialize", "load_safetensors", "log_steps", "meta_parameters", "named_values", "offload", "open_safetensors",
           "optim", "save_pretrained", "save_safetensors", "trace"]
