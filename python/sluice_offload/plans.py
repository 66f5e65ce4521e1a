"""A plan for a model, from its modules on the meta device: `python -m sluice_offload plan`."""

import importlib
import os
import re
import sys
from fractions import Fraction
from typing import Any, Optional, Sequence

import torch
from torch import nn

from .activations import take_home
from .engine import complete_config, names_type, plan, require_no_deepspeed
from .errors import ArgumentError
from .units import Units, find_units, rounded_text


def model_of(where: str) -> nn.Module:
    """The model that `where` names, built on the meta device: MODULE:FUNCTION, called without arguments, or the folder or
    config.json of a model of transformers."""
    with torch.device("meta"):
        if os.path.exists(where):
            return _of_transformers(where)
        module, _, function = where.partition(":")
        if not function:
            raise ArgumentError(f"there is no file or folder {where}, and it is not MODULE:FUNCTION either")
        sys.path.insert(0, os.getcwd())
        try:
            made = getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError) as error:
            raise ArgumentError(f"{where}: {error}") from error
        finally:
            sys.path.remove(os.getcwd())
    if not isinstance(made, nn.Module):
        raise ArgumentError(f"{where} returns an object of type {type(made).__name__}, but has to return a model")
    return made


def _of_transformers(path: str) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ArgumentError(f"{path}: a model's config.json needs transformers: pip install transformers") from error
    config = transformers.AutoConfig.from_pretrained(path)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    model: nn.Module = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
    return model


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          **{letter + rest: 1 << power for letter, power in zip("kmgt", (10, 20, 30, 40)) for rest in ("", "ib")}}


_ANY_GPU = 1 << 60  # bytes: the budget of a GPU of unknown size is larger


def bytes_of(size: Any) -> Optional[int]:
    """The bytes of a size as configs write them, "2147483648" or "2GiB"; None for what is none."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", str(size), re.ASCII)
    if isinstance(size, (bool, float)) or parts is None or parts[2].lower() not in _UNITS:
        return None
    count = Fraction(parts[1]) * _UNITS[parts[2].lower()]
    return int(count) if count.denominator == 1 else None


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def describe(model: nn.Module, config: "dict[str, Any]", units: "Sequence[str] | None" = None,
             buffers: "Sequence[str]" = (), is_on_gpu: bool = False, leases: "int | None" = None) -> "list[str]":
    """The plan in lines. is_on_gpu: for computation on a GPU, whose memory is not the host's. Raises OutOfMemoryError, naming a budget that works, where the config's cannot."""
    require_no_deepspeed(config)
    found = find_units(model, units, buffers, keeps_types=not names_type(config), leases=leases)
    folders = take_home(config, is_on_gpu)
    planned = plan(complete_config(config, found), found, is_on_gpu)
    lines = _shape(found)
    if found.are_mixed:
        lines.append(rounded_text(found, config["precision"]["gradients"]))
    for tier in ("device", "host", "nvme"):
        budget = planned.get(f"{tier}_budget_bytes")
        of = f" of the budget of {_size(budget)}" if budget and budget < _ANY_GPU else ""
        lines.append(f"{tier}: {_size(planned[tier + '_bytes'])}{of}")
        lines += [f"  {_size(pool['size_bytes']):>11}  {pool['name']}" for pool in planned["pools"] if pool["tier"] == tier and pool["size_bytes"]]
    lines.append(f"a step reads {_size(planned['nvme_read_bytes'])} from storage and writes {_size(planned['nvme_write_bytes'])} "
                 f"there; blocks are updated \"{planned['policy']}\"")
    if folders is not None:
        lines.append(f"activations go to {'files in ' + ', '.join(folders) if folders else 'host memory'}, and are not counted here")
    return lines


def _shape(found: Units) -> "list[str]":
    trained = sum(m.parameter.numel() for unit in found.units if not unit.is_frozen for m in unit.members)
    frozen = sum(m.parameter.numel() for unit in found.units if unit.is_frozen for m in unit.members)
    largest = max(found.units, key=lambda unit: sum(m.parameter.numel() for m in unit.members))
    elements = sum(m.parameter.numel() for m in largest.members)
    held = sum(m.parameter.numel() for unit in found.units if unit.is_held for m in unit.members)
    lines = [f"{trained + frozen:,} parameters, {frozen:,} of them frozen, in {len(found.units)} units",
             f"the largest unit is {largest.name} with {elements:,} parameters; computation holds {found.leases} at a time"]
    if held:
        lines.append(f"{held:,} parameters belong to modules with units inside, and stay in device memory")
    return lines
