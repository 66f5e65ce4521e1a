"""Schedulers of torch beside an offloaded model: they write to another optimizer than the one they were made with, and their state
goes into a checkpoint's text."""

import collections
from typing import Any, Iterator, Optional

import torch

from .errors import ArgumentError

_PAIRS, _COUNTER = "__pairs__", "__counter__"


def require_rates_alone(scheduler: Any) -> None:
    """Raises ArgumentError where `scheduler`, or one that it holds, would set more than rates."""
    for one in _with_inner(scheduler, set()):
        if getattr(one, "cycle_momentum", False):
            raise ArgumentError(f"{type(one).__name__} also moves betas or momentum, and only the lr of an offloaded model can change; "
                                "make it with cycle_momentum=False")


def rebind_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Has `scheduler`, and all schedulers that it holds, as SequentialLR and ChainedScheduler do, set the rates of `optimizer`, which
    offload() has made of the one that they were made with. Rates that they have set in that one since offload() come along. Raises
    ArgumentError where one would set more than rates."""
    require_rates_alone(scheduler)
    inner: Any = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):  # in the wrapper of a framework
        inner = inner.optimizer
    follow_changes = getattr(inner, "follow_changes", None)
    if follow_changes is not None:
        follow_changes(getattr(scheduler, "_last_lr", None))  # before the given optimizer goes with the last that holds it
    for one in list(_with_inner(scheduler, set())):
        one.optimizer = optimizer


def _with_inner(scheduler: Any, seen: "set[int]") -> "Iterator[Any]":
    if id(scheduler) in seen:
        return
    seen.add(id(scheduler))
    yield scheduler
    for value in list(vars(scheduler).values()):
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if hasattr(inner, "optimizer") and hasattr(inner, "step") and not isinstance(inner, torch.optim.Optimizer):
                yield from _with_inner(inner, seen)


def packed(state: Any) -> Any:
    """A scheduler's state as JSON can have it: dictionaries whose keys are not texts become lists of pairs. Functions, which LambdaLR
    leaves out, come from the program again."""
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    if isinstance(state, (list, tuple)):
        return [packed(value) for value in state]
    if isinstance(state, dict):
        if not isinstance(state, collections.Counter) and all(isinstance(key, str) for key in state):
            return {key: packed(value) for key, value in state.items()}
        kind = _COUNTER if isinstance(state, collections.Counter) else _PAIRS
        return {kind: [[packed(key), packed(value)] for key, value in state.items()]}
    number = _number(state)
    if number is None:
        raise ArgumentError(f"the scheduler's state_dict has a {type(state).__name__}, and may have numbers, texts, lists and "
                            "dictionaries alone")
    return number


def _number(value: Any) -> "Optional[int | float]":
    """The number in a tensor or in one of numpy's; None where there is none."""
    try:
        item = value.item()
    except (AttributeError, RuntimeError, ValueError):
        return None
    return item if isinstance(item, (int, float)) else None


def unpacked(state: Any) -> Any:
    """Undoes packed(), with lists for tuples."""
    if isinstance(state, list):
        return [unpacked(value) for value in state]
    if not isinstance(state, dict):
        return state
    for kind, make in ((_PAIRS, dict), (_COUNTER, collections.Counter)):
        if set(state) == {kind}:
            return make({unpacked(key): unpacked(value) for key, value in state[kind]})
    return {key: unpacked(value) for key, value in state.items()}
