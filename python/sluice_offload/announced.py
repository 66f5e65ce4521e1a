"""Units that are in no order of uses, such as the experts of a router: a step announces the ones that it will use, on the way,
and the engine reads those and no others."""

import collections
from typing import TYPE_CHECKING, Iterable

import torch

from .errors import ArgumentError
from .library import BACKWARD, FORWARD

if TYPE_CHECKING:
    from .hooks import Walk


class Announcements:
    """The uses that have been announced and have not come, in the order in which the engine expects them. Forward announces what
    optimizer.announce() names, and otherwise each unit when it is needed. Backward announces what forward has used, in the
    reverse order. A use in which nothing computes is passed by."""

    def __init__(self, walk: "Walk") -> None:
        self._walk = walk
        self._coming: "collections.deque[tuple[int, int]]" = collections.deque()
        self._used: "list[int]" = []  # in forward, for backward

    def announce(self, units: "Iterable[int]", which: int) -> None:
        wanted = [unit for unit in dict.fromkeys(units) if (unit, which) not in self._coming]
        if wanted:
            self._announce(wanted, which)

    def _announce(self, units: "list[int]", which: int) -> None:
        self._coming.extend((unit, which) for unit in self._walk.engine.announce(units, which))

    def approach(self, unit: int, which: int) -> None:
        """The unit is acquired next. Uses that come before it are passed by."""
        self.announce([unit], which)
        self._pass_by_until((unit, which))

    def approach_other(self, unit: int, which: int) -> None:
        """A unit that is not announced is acquired next."""

    def take(self, unit: int, which: int) -> None:
        """The unit has been acquired. An interrupt comes before that: the engine still expects the unit then."""
        self._coming.popleft()
        if which == FORWARD and torch.is_grad_enabled():
            self._used.append(unit)

    def backward_begins(self) -> None:
        used, self._used = self._used[::-1], []
        self.announce(used, BACKWARD)

    def backward_ends(self) -> None:
        pass

    def end(self) -> None:
        """Passes by what has been announced in vain."""
        self._pass_by_all()
        self._used.clear()

    def _pass_by_until(self, use: "tuple[int, int]") -> None:
        while self._coming[0] != use:
            self._pass_by_next()

    def _pass_by_all(self) -> None:
        while self._coming:
            self._pass_by_next()

    def _pass_by_next(self) -> None:
        self._walk.pass_by(*self._coming[0])
        self._coming.popleft()

    def forget(self) -> None:
        self._coming.clear()
        self._used.clear()


class SharedAnnouncements(Announcements):
    """The same with several ranks. They announce at the same places, and each uses what any of them has announced, in the order of
    the model, if only by passing it by: the gradient of a rank that has computed nothing is zero. Gradients are added over the
    ranks in the order of their uses, so in backward a use is passed by at the place where another rank computes: before the unit
    that forward has used in front of it."""

    def __init__(self, walk: "Walk") -> None:
        super().__init__(walk)
        self._log: "list[tuple[int, bool]]" = []    # uses of forward, and whether the unit is an announced one
        self._backward: "list[tuple[int, bool]]" = []  # of those, the ones that backward has still to come to, in its order

    def announce(self, units: "Iterable[int]", which: int) -> None:
        if which == BACKWARD:
            raise ArgumentError("announce() in a part of forward that a checkpoint computes again: with several processes, announced "
                                "units cannot be inside of checkpoints, since the processes would announce at different places")
        self._pass_by_all()
        self._announce(list(dict.fromkeys(units)), which)

    def approach(self, unit: int, which: int) -> None:
        if (unit, which) not in self._coming:
            name = self._walk.units.units[unit].name
            raise ArgumentError(f"unit \"{name}\" is used without an announcement, or too late: with several processes, forward calls "
                                "optimizer.announce(*modules) behind its router, on every process at the same places, and then uses "
                                "the modules before any other, in the order in which the model has them, outside of checkpoints")
        self._pass_by_until((unit, which))

    def approach_other(self, unit: int, which: int) -> None:
        if which != BACKWARD:
            self._pass_by_all()  # on every rank before this unit, so that all have the same log
        if which == FORWARD and torch.is_grad_enabled():
            self._log.append((unit, False))
        if which != BACKWARD or (unit, False) not in self._backward:
            return
        place = self._backward.index((unit, False))
        left = sum(is_announced for _, is_announced in self._backward[place:])
        del self._backward[:place + 1]
        while len(self._coming) > left:
            self._pass_by_next()

    def take(self, unit: int, which: int) -> None:
        self._coming.popleft()
        self._note(unit, which)

    def _pass_by_next(self) -> None:
        unit, which = self._coming[0]
        super()._pass_by_next()
        self._note(unit, which)

    def _note(self, unit: int, which: int) -> None:
        if which == FORWARD and torch.is_grad_enabled():
            self._log.append((unit, True))

    def backward_begins(self) -> None:
        with torch.enable_grad():  # what is left belongs to forward
            self._pass_by_all()
        self._backward, self._log = self._log[::-1], []
        for unit, is_announced in self._backward:  # one by one: the engine puts the units of one announcement in the model's order
            if is_announced:
                self._announce([unit], BACKWARD)

    def backward_ends(self) -> None:
        self._pass_by_all()
        self._backward.clear()

    def end(self) -> None:
        super().end()
        self._log.clear()
        self._backward.clear()

    def forget(self) -> None:
        super().forget()
        self._log.clear()
        self._backward.clear()


class DividedAnnouncements(Announcements):
    """With several ranks, where each has units of its own (offload(local=...)). Those have an order of their own, of which no other
    rank hears; the other announced units are those of all ranks."""

    def __init__(self, walk: "Walk") -> None:
        super().__init__(walk)
        units = walk.units.units
        self._is_own = [unit.is_local for unit in units]
        self._parts = [Announcements(walk)]
        if any(unit.is_announced and not unit.is_local for unit in units):
            self._parts.append(SharedAnnouncements(walk))

    def _part(self, unit: int) -> Announcements:
        return self._parts[0 if self._is_own[unit] else 1]

    def announce(self, units: "Iterable[int]", which: int) -> None:
        given = list(units)
        own = [unit for unit in given if self._is_own[unit]]
        if own and len(own) < len(given):
            raise ArgumentError("announce(): some of these modules are of this process alone (offload(local=...)), others of all; announce "
                                "the two kinds in calls of their own, since all processes take part in those of the second")
        for part in self._parts[:1] if own else self._parts[1:]:
            part.announce(given, which)

    def approach(self, unit: int, which: int) -> None:
        self._part(unit).approach(unit, which)

    def approach_other(self, unit: int, which: int) -> None:
        for part in self._parts:
            part.approach_other(unit, which)

    def take(self, unit: int, which: int) -> None:
        self._part(unit).take(unit, which)

    def backward_begins(self) -> None:
        for part in self._parts:
            part.backward_begins()

    def backward_ends(self) -> None:
        for part in self._parts:
            part.backward_ends()

    def end(self) -> None:
        for part in self._parts:
            part.end()

    def forget(self) -> None:
        for part in self._parts:
            part.forget()
