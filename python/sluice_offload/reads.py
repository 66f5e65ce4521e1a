"""Weights that a module reads of another one without calling it: that of the output embedding, which fused heads read, such as
those of TRL and Liger, and those of the layers below peft's adapters. A read in a forward lends the weight's unit, as a call of its
module would at that place, and backward through what was computed from then on does so, too. A unit that another module takes
away meanwhile is not lent again: the value is for use at once. Elsewhere, as between steps, a read shows poison (storage.py).
"""

import dataclasses
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Iterator, Optional

import torch
from torch import nn

from .units import Site, Unit

if TYPE_CHECKING:
    from .hooks import Running, Walk

_graph_task = torch._C._current_graph_task_id  # -1 outside of backward
_next_node = torch._C._autograd._get_sequence_nr  # autograd's count of this thread's nodes


def _is_adapter(module: nn.Module) -> bool:
    return any(kind.__name__ == "BaseTunerLayer" for kind in type(module).__mro__)  # of peft


def _output_embedding(module: nn.Module) -> "Iterator[nn.Module]":
    """That of a model of transformers, and those that stand for it within a wrapper of peft's."""
    get = getattr(module, "get_output_embeddings", None)
    try:
        head = get() if callable(get) else None
    except (AttributeError, NotImplementedError):  # a model that has none
        return
    shape = getattr(getattr(head, "weight", None), "shape", None)
    for part in head.modules() if isinstance(head, nn.Module) else ():
        weight = part._parameters.get("weight")
        if weight is not None and weight.shape == shape:
            yield part


def _read_by_others(model: nn.Module) -> "Iterator[nn.Module]":
    for module in model.modules():
        yield from _output_embedding(module)
        if _is_adapter(module):
            yield module.get_base_layer()  # type: ignore[operator]


class Weights(dict[str, Any]):
    """In the place of the `_parameters` of such a module. Copies are plain dictionaries."""

    def __init__(self, site: Site, reads: "Reads") -> None:
        super().__init__(site.module._parameters)
        self.site, self._reads = site, weakref.ref(reads)
        self.is_running = False  # the module's own forward; a bool, for torch.compile looks at it

    def __getitem__(self, name: str) -> Any:
        if not self.is_running:
            self._lend()
        return super().__getitem__(name)

    @torch._disable_dynamo
    def _lend(self) -> None:
        reads = self._reads()
        if reads is not None:
            reads.read(self.site)

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)


@dataclasses.dataclass
class _Read:
    site: Site  # what is lent for it
    of: Site    # whose weight it is
    reader: "Optional[Running]"  # the site that reads, or None: the model itself
    first_node: int = dataclasses.field(default_factory=_next_node)
    end: int = sys.maxsize  # the count at its next read
    inside: "list[tuple[int, int]]" = dataclasses.field(default_factory=list)  # autograd's counts where sites began and ended since


class Reads:
    """Those of a model's forward that is under way."""

    def __init__(self, walk: "Walk") -> None:
        self._walk = walk
        self._open: "list[_Read]" = []
        sites = {id(site.module): site for site in walk.units.sites}
        for module in _read_by_others(walk.model):
            site = sites.get(id(module))  # None: it is within a unit
            if site is not None and site.weights is None:
                site.weights = module.__dict__["_parameters"] = Weights(site, self)

    def __bool__(self) -> bool:
        return bool(self._open)

    def forget(self) -> None:
        self._open.clear()
        for site in self._walk.units.sites:
            if site.weights is not None:
                site.weights.is_running = False

    def read(self, site: Site) -> None:
        """A module reads a weight of `site`, and may keep a view of it."""
        self.lend(site)
        self._walk.watch_units(site.units)

    def _reader(self) -> "tuple[bool, Optional[Running]]":
        """Whether a module computes, and which; None is the model itself."""
        walk, task = self._walk, _graph_task()
        reader = walk.innermost()
        is_forward = walk.depth > 0 if task == -1 else reader is not None and reader.task == task
        return walk.active is not None and is_forward and walk.is_own_thread(), reader

    def has_read(self, unit: Unit) -> bool:
        """Whether backward will lend the unit for what the module computes with it from now on. True where no module computes."""
        computes, reader = self._reader()
        if not computes or (reader is not None and any(unit is own for own in reader.site.units)):
            return True
        last = next((read for read in self._open[::-1] if read.reader is reader), None)
        return last is not None and any(unit is one for one in last.site.units)

    def lend(self, site: Site) -> None:
        """A module reads a weight of `site`."""
        walk, task = self._walk, _graph_task()
        computes, reader = self._reader()
        if not computes:
            return
        kept = reader.site.units if reader is not None and reader.has_leases else []  # of which the reader needs the values, too
        others = [unit for unit in site.units if all(unit is not one for one in kept)]
        if not others or (kept and len(kept) + len(others) > walk.leases):
            return
        lent = Site(site.module, site.name, [*kept, *others]) if kept else site
        last = next((read for read in self._open[::-1] if read.reader is reader), None)
        if last is None or last.of is not site:
            if last is not None:  # what it has read may be used on, as long as that is lent
                still = [unit for unit in last.site.units if walk.is_lent(unit.index) and all(unit is not one for one in lent.units)]
                if still and len(still) + len(lent.units) <= walk.leases:
                    lent = Site(site.module, site.name, [*still, *lent.units])
                last.end = _next_node()
            self._open.append(_Read(lent, site, reader))
        else:
            lent = last.site
        if task != -1:
            walk.lend_backward(lent)
        elif not all(walk.is_lent(unit.index) for unit in lent.units):
            walk.lend_together(lent.units, walk.active)

    def is_for_call(self, site: Site) -> bool:
        """Whether the read was for no value but for a call of the module itself, which comes now, as where `weight.dtype` is asked for
        before. The call then has the read's lease."""
        last = self._open[-1] if self._open else None
        if last is None or last.site is not site or last.first_node != _next_node() or not self._walk.is_newest(site):
            return False
        self._open.pop()
        return True

    def has_run(self, ended: "Running", first_node: int) -> None:
        self._open = [read for read in self._open if read.reader is not ended]
        for read in self._open:
            if read.first_node <= first_node:
                read.inside.append((first_node, _next_node()))

    def watch(self, reader: "Optional[Running]", outputs: "list[torch.Tensor]") -> None:
        """Has backward lend what `reader` has read, wherever it comes to what was computed from then on outside of sites."""
        for read in self._open:
            if read.reader is reader:
                self._walk.watch_nodes(read.site, outputs, read.first_node, read.inside, read.end)
