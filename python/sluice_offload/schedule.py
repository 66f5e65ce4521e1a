"""The learning rates that a config asks for (`optimizer.schedule`), as a scheduler. The C++ library computes them."""

import ctypes as C
import json
from typing import Any, Optional

from . import library as lib
from .deepspeed import ResolvedConfig
from .errors import ArgumentError
from .optimizer import OffloadOptimizer

SCHEDULE_KEYS = ("schedule", "warmup_steps", "schedule_steps", "warmup", "warmup_start", "one_cycle", "range_test",
                 "minimum_learning_rate", "schedule_count")
_AT_A_TIME = 256


class ConfigSchedule:
    """Has the face of torch's schedulers. `step()` belongs behind each `optimizer.step()`. `is_deepspeeds`: the scheduler is that of a
    DeepSpeed config, and step(n) means what it means there: the rate behind n + 1 updates, since DeepSpeed counts them from -1."""

    def __init__(self, optimizer: OffloadOptimizer, config: "dict[str, Any]", is_deepspeeds: bool = False) -> None:
        self.optimizer = optimizer
        self._is_deepspeeds = is_deepspeeds
        self._config = json.dumps(config).encode()
        self._rates: "list[float]" = []
        self._first = 0
        self.last_epoch = 0  # updates that there have been; torch's name
        self._set()

    def rate(self, update: int) -> float:
        """The learning rate of an update, counted from 0, before the factors of groups."""
        if not self._first <= update < self._first + len(self._rates):
            rates = (C.c_double * _AT_A_TIME)()
            lib.library().learning_rates(self._config, update, _AT_A_TIME, rates)
            self._rates, self._first = list(rates), update
        return self._rates[update - self._first]

    def _set(self) -> None:
        for group, factor in zip(self.optimizer.param_groups, self.optimizer.factors):
            group["lr"] = self.rate(self.last_epoch) * factor

    def __repr__(self) -> str:
        return f"ConfigSchedule({self._rates})"

    def step(self, epoch: Optional[int] = None) -> None:
        if epoch is None:
            self.go_to(self.last_epoch + 1)
        else:
            self.go_to(epoch + 1 if self._is_deepspeeds else epoch)

    def go_to(self, updates: int) -> None:
        """Sets the rate behind so many updates."""
        self.last_epoch = updates
        self._set()

    def get_last_lr(self) -> "list[float]":
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> "dict[str, Any]":
        return {"last_epoch": self.last_epoch, **({"last_batch_iteration": self.last_epoch - 1} if self._is_deepspeeds else {})}

    def load_state_dict(self, state_dict: "dict[str, Any]") -> None:
        """Takes a state of DeepSpeed's, too, which has last_batch_iteration alone."""
        if "last_epoch" not in state_dict and "last_batch_iteration" in state_dict:
            self.go_to(int(state_dict["last_batch_iteration"]) + 1)
        else:
            self.go_to(int(state_dict["last_epoch"]))


def names_schedule(config: "dict[str, Any]", resolved: "Optional[ResolvedConfig]") -> bool:
    """Whether the config has a schedule, and one whose rates are known. `resolved`: the config came from one of DeepSpeed's, for which
    the importer writes a constant schedule where the file has none."""
    section = config.get("optimizer", {})
    named = {key for key in SCHEDULE_KEYS if key in section}
    shape = section.get("schedule", "cosine")
    if resolved is not None and not resolved.has_scheduler:
        named -= {"minimum_learning_rate"}  # the end of a cosine, which only `sluice train` takes for granted
        if shape == "constant" and not section.get("warmup_steps"):
            return False
    if not named:
        return False
    if shape in ("cosine", "linear") and "schedule_steps" not in section and "steps" not in config.get("run", {}):
        raise ArgumentError(f"optimizer.schedule is \"{shape}\" (the default is \"cosine\"), which ends at some update; write "
                            "optimizer.schedule_steps, or \"constant\"")
    first = (C.c_double * 1)()
    lib.library().learning_rates(json.dumps(config).encode(), 0, 1, first)  # or an error
    return True
