"""`optimizer.state` of a detached optimizer: one entry per parameter, whose tensors are read when they are asked for and set when they
are assigned."""

import contextlib
import sys
from collections.abc import Collection, ItemsView, Mapping, MutableMapping
from typing import Any, Iterator

import torch

from . import library as lib
from .detached import Detached
from .errors import ArgumentError
from .shares import Share, local_of, require_squares


# Lightning moves every tensor of the state to the Trainer's device, in one process or in all, also in one that has failed alone.
_MOVERS = ("lightning.fabric.utilities.optimizer", "lightning_fabric.utilities.optimizer")


# torch.distributed.checkpoint's, which makes a step with gradients and an lr of zero where it finds no state.
_INITIALIZES = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")


def _is_count(value: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        return int(value) >= 0
    return False


class Entry(MutableMapping[str, Any]):
    """The state of one parameter under torch's names. `kinds`: those of its tensors, with what the engine calls each; `known`: those that
    it may get. Changing a tensor that was read changes nothing; assign it."""

    def __new__(cls, *arguments: Any) -> Any:
        """Helpers that go through mappings, as Lightning's, make another of the same class from a dictionary: it is one."""
        return dict(*arguments) if len(arguments) == 1 else super().__new__(cls)

    def __init__(self, share: Share, engine: Detached, kinds: "Mapping[str, int]", known: "Mapping[str, int]",
                 has_step: bool) -> None:
        self._share, self._engine, self._kinds, self._known, self._has_step = share, engine, dict(kinds), known, has_step
        if share.dtype != torch.float32:
            self._kinds["master"] = lib.MASTER
        self.steps = 0
        self.was_set = False  # by the program, other than by updates

    @property
    def has_begun(self) -> bool:
        """There is something in it that a new optimizer would not have."""
        return self.was_set or self.steps > 0

    def add_kinds(self, kinds: "Mapping[str, int]") -> None:
        """From now on, these are shown too: an optimizer whose momentum has been 0 gets one, which the engine has kept as zeros."""
        self._kinds.update(kinds)

    def __repr__(self) -> str:
        return f"Entry({', '.join(self)})"

    def __getitem__(self, key: str) -> Any:
        if key == "step" and self._has_step:
            exact = torch.float32 if self.steps <= 1 << 24 else torch.float64  # torch takes both
            return torch.tensor(float(self.steps), dtype=exact, device="cpu")
        if key == "master" and "master" in self._kinds:
            return self._share.whole(self._master())
        return self._share.whole(self._engine.read(self._share.index, self._kinds[key], self._share.count))

    def _master(self) -> torch.Tensor:
        """Where the program has changed the parameter since the last update, that is the master."""
        index, count = self._share.index, self._share.count
        given = self._engine.read(index, lib.PARAMETER, count)
        parameter = self._share.part(self._share.parameter).to("cpu", torch.float32)
        return torch.where(given == parameter, self._engine.read(index, lib.MASTER, count), parameter)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "step" and self._has_step:
            self.steps, self.was_set = int(value), True
            return
        if key not in self._kinds:
            raise ArgumentError(f"the state of {self._share.name} has no {key!r}; it has {', '.join(self)}")
        if value is not None:
            self._check_tensor(key, value)
        self._set_tensor(key, value)
        self.was_set = True

    def _set_tensor(self, key: str, value: Any) -> None:
        """None: a momentum that there is not yet."""
        part = torch.zeros(self._share.count, device="cpu") if value is None else self._share.part(value)
        self._engine.write(self._share.index, self._kinds[key], part)

    def __delitem__(self, key: str) -> None:
        raise ArgumentError(f"the state of {self._share.name} cannot be taken out of the optimizer")

    def __contains__(self, key: object) -> bool:
        """Reads nothing, unlike a mapping's own, which takes the value. So a rank may ask alone."""
        return key in self._kinds or (key == "step" and self._has_step)

    def __iter__(self) -> "Iterator[str]":
        if self._has_step:
            yield "step"
        yield from self._kinds

    def __len__(self) -> int:
        return len(self._kinds) + self._has_step

    def check(self, values: "Mapping[str, Any]") -> None:
        """Raises ArgumentError for what load() cannot set."""
        if not isinstance(values, Mapping):
            raise ArgumentError(f"the state of {self._share.name} is a mapping from names to tensors, not {type(values).__name__}")
        unknown = [key for key in values if key not in self and key not in self._known and key not in ("step", "master")]
        if unknown:
            raise ArgumentError(f"the state of {self._share.name} has {', '.join(map(repr, unknown))}, which this optimizer "
                                f"does not keep; it keeps {', '.join(self)}")
        for key, value in values.items():
            if key == "step":
                if self._has_step and not _is_count(value):
                    raise ArgumentError(f"the state of {self._share.name} has {value!r} as its step, which is a number of updates")
            elif value is not None and (key in self._kinds or key in self._known):
                self._check_tensor(key, value)

    def _check_tensor(self, key: str, value: Any) -> None:
        words = f"{key!r} in the state of {self._share.name}"
        self._share.check_like(value, words)
        if self._kinds.get(key, self._known.get(key)) == lib.EXP_AVG_SQ:
            require_squares(local_of(value), words)

    def load(self, values: "Mapping[str, Any]") -> None:
        """Sets all of it, which check() has seen. Missing values are as at the beginning; a missing master is the parameter."""
        if not values and not self.has_begun:
            return
        self.add_kinds({key: self._known[key] for key in values if key in self._known and values[key] is not None})
        self.steps = int(values.get("step", 0)) if self._has_step else 0
        for key in self._kinds:
            if key == "master":
                master = values.get(key)
                self._set_tensor(key, self._share.parameter.float() if master is None else master)
            else:
                self._set_tensor(key, values.get(key))
        self.was_set = len(values) > 0


class States(MutableMapping[Any, Any]):
    """The entries by parameter. Assigning to one sets it. As torch's, it is empty until there is an update or something is assigned, since
    helpers as accelerate's prepare() copy what is in it. But the entry of any parameter is there for those who ask. `taken`: the
    optimizer's, of parameters whose gradient is no longer in p.grad. `is_shown`: entries are there though none has begun, since
    torch.distributed.checkpoint has asked."""

    def __init__(self, taken: "Collection[int]", is_shown: bool = False) -> None:
        self._entries: "dict[Any, Entry]" = {}
        self._taken = taken
        self.is_shown = is_shown

    @property
    def has_begun(self) -> bool:
        return any(entry.has_begun for entry in self._entries.values())

    @property
    def _has_entries(self) -> bool:
        return self.is_shown or self.has_begun

    def __bool__(self) -> bool:
        """True also where gradients have been taken, and for torch.distributed.checkpoint: it would otherwise make a step, which counts, and
        leave an lr of 0 behind where that step is refused."""
        if not self._taken and not self._has_entries:
            asking = sys._getframe(1)
            self.is_shown = (asking.f_globals.get("__name__"), asking.f_code.co_name) == _INITIALIZES
        return len(self._taken) > 0 or self._has_entries

    def __len__(self) -> int:
        return len(self._entries) if self._has_entries else 0

    def __iter__(self) -> "Iterator[Any]":
        return iter(self._entries if self._has_entries else ())

    def __contains__(self, key: object) -> bool:
        return key in self._entries and self._has_entries

    def __getitem__(self, key: Any) -> Entry:
        return self._entries[key]

    def items(self) -> "ItemsView[Any, Any]":
        """None for those who would move the state, which lives in the engine: each read would be a copy, which a rank cannot make alone,
        and each copy would be written back."""
        return {}.items() if sys._getframe(1).f_globals.get("__name__") in _MOVERS else super().items()

    def get(self, key: Any, default: Any = None) -> Any:
        return self._entries[key] if key in self else default

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self._entries:
            raise ArgumentError("this tensor is not a parameter of the optimizer")
        if value is not self._entries[key]:
            self._entries[key].check(value)
            self._entries[key].load(value)

    def replace(self, values: Any) -> None:
        """As torch's optimizers when their state is another mapping: a parameter that it does not have begins anew."""
        if not isinstance(values, Mapping):
            raise ArgumentError(f"the optimizer's state is a mapping from parameters to their tensors, not {type(values).__name__}")
        others = [key for key in values if key not in self._entries]
        if others:
            raise ArgumentError(f"{len(others)} of the {len(values)} keys of the new state are not parameters of the optimizer")
        for parameter in values:  # all, before the first is changed
            self[parameter].check(values[parameter])
        self.is_shown = False
        for parameter, entry in self._entries.items():
            entry.load(values[parameter] if parameter in values else {})

    def add(self, parameter: torch.Tensor, entry: Entry) -> None:
        self._entries[parameter] = entry

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ArgumentError("the state lives in the engine: it can be read and assigned, not taken away; "
                            "optimizer.state = {} begins anew")

    __delitem__ = clear = pop = popitem = _refuse  # type: ignore[assignment]
