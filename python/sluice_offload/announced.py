"""Units that are in no order of uses, such as the experts of a router: a step announces the ones that it will use, on the way,
and the engine reads those and no others."""

import collections
from typing import TYPE_CHECKING, Iterable

import torch

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
            self._coming.extend((unit, which) for unit in self._walk.engine.announce(wanted, which))

    def approach(self, unit: int, which: int) -> None:
        """The unit is acquired next. Uses that come before it are passed by."""
        self.announce([unit], which)
        while self._coming[0] != (unit, which):
            self._pass_by_next()

    def take(self, unit: int, which: int) -> None:
        """The unit has been acquired. An interrupt comes before that: the engine still expects the unit then."""
        self._coming.popleft()
        if which == FORWARD and torch.is_grad_enabled():
            self._used.append(unit)

    def backward_begins(self) -> None:
        used, self._used = self._used[::-1], []
        self.announce(used, BACKWARD)

    def end(self) -> None:
        """Passes by what has been announced in vain."""
        while self._coming:
            self._pass_by_next()
        self._used.clear()

    def _pass_by_next(self) -> None:
        self._walk.pass_by(*self._coming[0])
        self._coming.popleft()

    def forget(self) -> None:
        self._coming.clear()
        self._used.clear()
