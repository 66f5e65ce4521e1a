"""A torch optimizer as a description: its class, hyperparameters and groups, for an engine that does its work."""

from typing import Any, Optional

import torch
from torch import nn

from .errors import ArgumentError
from .units import Units

_TYPES = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.Adagrad: "adagrad", torch.optim.SGD: "sgd"}
# The engine has none of these.
_OFF = ("amsgrad", "maximize", "differentiable", "nesterov", "dampening", "lr_decay", "initial_accumulator_value")
# The keys of the config that a description fills in.
KEYS = ("type", "beta1", "beta2", "epsilon", "momentum", "weight_decay", "groups", "learning_rate")


def describe(optimizer: torch.optim.Optimizer, model: nn.Module,
             units: Optional[Units] = None) -> "dict[str, Any]":
    """The config's `optimizer` section that does what `optimizer`, made over `model`'s parameters and not used yet, would.
    Its groups become `groups`, in their order. `units`: the model's, whose names the engine knows;
    without them, a parameter that stands in several places may have another name here."""
    name = type(optimizer).__name__
    if type(optimizer) not in _TYPES:
        remedy = ("for Lion, leave optimizer= out and write {\"optimizer\": {\"type\": \"lion\"}} in the config" if "lion" in name.lower()
                  else "give one of them")
        raise ArgumentError(f"optimizer={name}: Sluice does the work of torch.optim's AdamW, Adam, Adagrad and SGD; {remedy}")
    _check(optimizer, name)
    if _has_begun(optimizer):
        raise ArgumentError(f"this {name} has made steps already, and its moments would be lost; give a new one")
    first = optimizer.param_groups[0]
    kind = "adamw" if first.get("decoupled_weight_decay") else _TYPES[type(optimizer)]
    section: "dict[str, Any]" = {"type": kind, "groups": _groups(optimizer, model, name, units)}
    if "betas" in first:
        section["beta1"], section["beta2"] = (float(beta) for beta in first["betas"])
    if "eps" in first:
        section["epsilon"] = float(first["eps"])
    if "momentum" in first:
        section["momentum"] = float(first["momentum"])
    return section


def _has_begun(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there is a state that would be lost. torch makes Adagrad's in the constructor: step
    and sums of zero."""
    if type(optimizer) is not torch.optim.Adagrad:
        return bool(optimizer.state)
    values = (value for state in optimizer.state.values() for value in state.values())
    return any(not value.is_meta and bool((value != 0).any()) for value in values)


def _check(optimizer: torch.optim.Optimizer, name: str) -> None:
    first = optimizer.param_groups[0]
    start = optimizer.defaults.get("initial_accumulator_value")  # torch heeds no group's own
    if start:
        raise ArgumentError(f"{name}: initial_accumulator_value={start} has no counterpart in "
                            "Sluice, whose sums begin with 0; leave it out")
    for i, group in enumerate(optimizer.param_groups):
        for key in _OFF:
            if group.get(key):
                raise ArgumentError(f"{name}: {key}={group[key]} of group {i} has no counterpart in Sluice; leave it out")
        for key in ("betas", "eps", "momentum", "decoupled_weight_decay"):
            if group.get(key) != first.get(key):
                raise ArgumentError(f"{name}: {key} is {group[key]} in group {i}, but {first[key]} in group 0; groups may "
                                    "differ in lr and weight_decay alone")


def _names(model: nn.Module, units: Optional[Units]) -> "dict[int, str]":
    """The name of each parameter, by its id. Units look at lists of parameters before they look at
    the modules beside them, so a parameter that is in both has another name there than torch's
    first."""
    names = {id(parameter): full for full, parameter in model.named_parameters()}
    for unit in [] if units is None else units.units:
        names.update((id(member.parameter), member.name) for member in unit.members)
    return names


def _groups(optimizer: torch.optim.Optimizer, model: nn.Module, name: str,
            units: Optional[Units]) -> "list[dict[str, Any]]":
    names = _names(model, units)
    missing = {names[id(parameter)]: None for parameter in model.parameters()
               if parameter.requires_grad and parameter.numel() > 0}
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        found = []
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ArgumentError(f"{name}: a parameter of group {i}, of shape {tuple(parameter.shape)}, is none of the "
                                    "model's")
            if parameter.requires_grad and parameter.numel() > 0:
                found.append(names[id(parameter)])
                missing.pop(names[id(parameter)], None)
        if not found:
            raise ArgumentError(f"{name}: group {i} has no parameter that requires a gradient; leave it out")
        groups.append({"tensors": found, "weight_decay": float(group.get("weight_decay", 0))})
    if missing:
        raise ArgumentError(f"{name} has no group for {', '.join(list(missing)[:3])}{' and others' if len(missing) > 3 else ''}"
                            f" ({len(missing)} of the model's parameters that require a gradient); add them, or call "
                            "requires_grad_(False) on what shall stay as it is")
    return groups


def take_over(settings: "dict[str, Any]", optimizer: torch.optim.Optimizer, model: nn.Module,
              units: Units) -> None:
    """Writes the description into a config that says nothing of an optimizer itself."""
    section = settings.setdefault("optimizer", {})
    both = [key for key in KEYS if key in section]
    if both:
        raise ArgumentError(f"the config says optimizer.{both[0]}, and a {type(optimizer).__name__} is given, too; leave one "
                            "of them out")
    section.update(describe(optimizer, model, units))
