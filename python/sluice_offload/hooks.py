"""The walk of a step through the model: torch's hooks acquire each unit before its module computes with it, forward and
backward, and release it after; gradients go to the engine as they come.

    model.forward        begins a step (or an inference, without gradients and outside of a step)
    site.forward         acquire, compute, release
    outputs' gradients   the backward of the module begins: acquire
    parameter's gradient copied into the lease's gradient, `p.grad` becomes None
    end of backward      releases what is left

Rules: the engine asks that before use i the lease of use i - leases has ended, so older leases are ended before each
acquire; a gradient that comes after that acquires anew. A module with units inside has a pinned unit, whose lease lasts as
long as the step or the inference. In backward nothing else ends a lease, unless the next unit finds no room beside it: the gradient that ends one
module's backward is mostly the one that begins the next one's. (With local units, a lease also ends with the last gradient
of its module: a rank may then wait for another's computation, which waits for the reduction of this unit.) Where torch's own code stands between two modules, the lease,
its place in the window and its place for gradients stay taken through that code. A gradient of another unit than the one whose
module computes waits in torch's memory until that one's lease ends. A module that runs inside of another's forward takes away the
other's lease, and the other gets one anew behind it. A view of a parameter that a module returns is given to the caller as a copy,
since the caller may use it when the lease has ended. Thread rule: one thread at a time, not
always the same.
"""

import contextlib
import sys
import threading
import warnings
import weakref
from functools import partial
from itertools import islice
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_map_only

from .activations import ActivationStore
from .announced import Announcements, DividedAnnouncements, SharedAnnouncements
from .engine import Engine
from .errors import NOT_COPIED, ArgumentError, OutOfMemoryError, SluiceError
from .freed import FreedMemory
from .guards import require_no_hooks_of_tied
from .library import BACKWARD, FORWARD, INFERENCE
from .reads import Reads
from .storage import UnitStorage
from .units import Member, Site, Unit, Units
from .unlent import GUARDED, without_values

_graph_task = torch._C._current_graph_task_id  # -1 outside of backward
_next_node = torch._C._autograd._get_sequence_nr  # autograd's count of this thread's nodes
_OF_MODULES = len(nn.Module().__dict__)  # attributes that every module has, in front of a program's own
_KEPT_MAX = 64  # of the last tensors in a list that a module keeps
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LEAVES = (torch.Tensor, *_PLAIN)


def _is_made_since(node: int, x: torch.Tensor) -> bool:
    return x.grad_fn is not None and x.grad_fn._sequence_nr() >= node


def _inside_of(x: Any) -> "list[Any]":
    """The contents of an object that torch's trees take for a leaf: elements of a set, values of a mapping, attributes."""
    if isinstance(x, _LEAVES):
        return []
    if isinstance(x, (set, frozenset, Mapping)):
        return list(x.values() if isinstance(x, Mapping) else x)
    return list(getattr(x, "__dict__", {}).values())


def _leaves_of(output: Any) -> "list[Any]":
    if isinstance(output, torch.Tensor):
        return [output]
    if type(output) is tuple and all([isinstance(x, _LEAVES) for x in output]):  # at a fifth of the time
        return list(output)
    leaves = tree_flatten(output)[0]
    if any(not isinstance(x, _LEAVES) for x in leaves):
        leaves += tree_flatten([_inside_of(x) for x in leaves])[0]
    return leaves


def _lies_in(x: Any, memory: "frozenset[int]") -> bool:
    """Whether it is a view of what lies there: a parameter itself says so when its values have gone (unlent.py)."""
    if not isinstance(x, torch.Tensor) or type(x) in GUARDED:
        return False
    try:
        return x.untyped_storage()._cdata in memory
    except RuntimeError:  # it has none, as sparse tensors
        return False


def _copy_of(view: torch.Tensor) -> torch.Tensor:
    """A copy through which gradients come. An expanded dimension stays one, and takes no memory."""
    one = view[tuple(slice(1) if stride == 0 else slice(None) for stride in view.stride())]
    return one.clone().expand(view.shape)


def _attributes(module: nn.Module, sites: "set[int]") -> "Iterator[dict[str, Any]]":
    """The attributes of a site and of the modules inside of it, up to other sites."""
    yield module.__dict__
    for child in module.children():
        if id(child) not in sites:
            yield from _attributes(child, sites)


class _Hook:
    """A hook of a module, which pickles and copies of it meet."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @torch._disable_dynamo  # torch.compile leaves it out of its graphs: its state differs at every call
    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> Any:
        raise NOT_COPIED


class _TakesGradient:
    """A hook of a parameter. torch keeps it where Python's collector does not look, so it does not keep the model."""

    __slots__ = ("walk", "_at")

    def __init__(self, walk: "Walk", at: int) -> None:
        self.walk, self._at = weakref.ref(walk), at

    def __call__(self, parameter: torch.Tensor) -> None:
        walk = self.walk()
        if walk is not None:
            walk._take_gradient(*walk._taken[self._at], parameter)


class _OtherThread(ArgumentError):
    """Raised before anything has begun, so that the hooks behind it leave everything as it is."""


def _computes(thread: int) -> bool:
    """Whether a thread is in a module's forward or in a backward."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code in (nn.Module._call_impl.__code__, torch.autograd.graph._engine_run_backward.__code__):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _BackwardBegins:
    """A hook on a module's outputs: the first gradient that comes in a backward pass begins the module's own. As
    register_multi_grad_hook(mode="any"), which takes five times as long."""

    __slots__ = ("_walk", "_site", "_task")

    def __init__(self, walk: "Walk", site: Site) -> None:
        self._walk, self._site, self._task = walk, site, -1

    def __call__(self, gradient: torch.Tensor) -> None:
        task = _graph_task()
        if task != self._task:
            self._task = task
            if torch.is_grad_enabled():
                self._walk.warn_of_double_backward()
            self._walk.lend_backward(self._site)


class _Held:
    """A lease on a unit."""

    __slots__ = ("id", "gradients", "use", "which", "written", "left")

    def __init__(self, lease_id: int, gradients: int, use: int, which: int) -> None:
        self.left = 0  # gradients of its module that have not come, where their end is the lease's
        self.id, self.gradients, self.use, self.which = lease_id, gradients, use, which
        self.written: "set[int]" = set()  # tensors whose gradient is no longer the zeros it began with


class Running:
    """A site in its forward."""

    __slots__ = ("site", "task", "before", "inside", "has_leases")

    def __init__(self, site: Site, task: int) -> None:
        self.site, self.task = site, task  # the backward that computes it again, or -1
        self.before = (site.first_node, site.failure_before, site.versions)  # of a call of the same site around this one
        self.inside: "list[tuple[int, int]]" = []  # autograd's counts of nodes where sites that it called began and ended
        self.has_leases = any(not unit.is_held for unit in site.units)


class Walk:
    """Hooks on every site of a model, and the state of its step. `rates` gives the learning rates of now."""

    def __init__(self, model: nn.Module, units: Units, engine: Engine, storages: "list[UnitStorage]",
                 rates: "Callable[[], tuple[float, list[float]]]", activations: Optional[ActivationStore] = None) -> None:
        self.model, self.units, self.engine, self.storages, self.rates = model, units, engine, storages, rates
        self.activations = activations
        self._freed = FreedMemory()
        self._keeping: Any = None           # the context in which autograd gives its tensors to `activations`
        self.leases = units.leases
        self.announcements = self._announcements()
        engine.end_idle_step = self.end_idle_step
        engine.require_own_values = self._require_own_values
        self._places: "dict[tuple[int, int], int]" = {}  # with local units: by site and unit, the places of trained parameters
        if isinstance(self.announcements, DividedAnnouncements):
            for site in units.sites:
                inside = {id(module) for module in site.module.modules()}
                for unit in site.units:
                    owners = [] if unit.is_frozen or unit.is_held else [o for member in unit.members for o, _ in member.owners]
                    self._places[(id(site), unit.index)] = sum(id(owner) in inside for owner in owners)
        self._memory = {id(site): frozenset(place._cdata for unit in site.units for place in storages[unit.index].places())
                        for site in units.sites}  # where the parameters of each site lie
        self.notice_gradient: "Optional[Callable[[], None]]" = None  # is told of each gradient before it is taken
        self.held: "dict[int, _Held]" = {}  # by unit, in order of use
        self._together: "set[int]" = set()  # units that have just been lent for the module for which another one is lent now
        self.kept: "dict[int, int]" = {}    # leases on pinned units, by unit, which last as long as this step or inference
        self.uses = 0
        self._running: "list[Running]" = []  # sites in their forward, the innermost last
        self._root_calls = 0                # of the model that are in their forward
        # Gradients that came while another unit's module computed with the lease that their own would have taken away.
        self._waiting: "list[tuple[Unit, Member, torch.Tensor]]" = []
        self.lent: "set[int]" = set()       # units whose module this step or inference has run
        self.active: Optional[int] = None   # FORWARD in a step, INFERENCE
        self._changing: Optional[int] = None  # the thread that begins or ends a step or an inference, or that was interrupted in that
        self.depth = 0
        self.has_gradients = False          # in this step
        self.was_idle = False               # the last step, which a read or a change of values has ended behind its forward
        self.in_backward = False
        self._failure_before: Optional[BaseException] = None
        self.gathered: "dict[int, int]" = {}  # by unit, the address of values that it shows outside of leases
        self._views: "dict[tuple[int, int], torch.Tensor]" = {}
        self._warned = engine.dtype != torch.float32  # of autocast
        self._warned_of_graph = False
        self._handles: "list[Any]" = []
        self._taken: "list[tuple[Unit, Member]]" = []  # by hook of a parameter
        self._thread = 0                    # in which the outermost module or the backward runs
        self._reads = Reads(self)           # before anything keeps the places of parameters
        # By unit: a module's write to these in its own forward would stay or be lost by placement.
        self._values = [[(member, member.at(owner)[attribute]) for member in unit.members for owner, attribute in member.owners
                         if not member.at(owner)[attribute].is_inference()] for unit in units.units]
        if "torch._dynamo" in sys.modules:  # graphs that were compiled for these classes have no hooks
            torch._dynamo.reset()
        # In every place: whether they are trained, and what shows when a program has put others there.
        self._parameters: "list[tuple[Member, bool, torch.Tensor, dict[str, Any], str, int]]" = []
        sites = {id(site.module) for site in units.sites}
        for site in units.sites:
            site.kept = list(_attributes(site.module, sites))
            site.values = [tensor for unit in site.units for _, tensor in self._values[unit.index]]
            self._watch(site)
        # After the hooks of the sites, of which the root may be one: the last to be prepended is the first to run.
        self._handles.append(model.register_forward_pre_hook(_Hook(self._root_begins), prepend=True))
        self._handles.append(model.register_forward_hook(_Hook(self._root_ends), always_call=True))
        for unit in units.units:
            for member in unit.members:
                for owner, attribute in member.owners:
                    places = member.at(owner)
                    tensor = places[attribute]
                    self._parameters.append((member, not unit.is_frozen, tensor, places, attribute, tensor.untyped_storage()._cdata))
                    if not unit.is_frozen:
                        self._watch_gradient(unit, member, tensor)

    def _announcements(self) -> "Optional[Announcements]":
        if not any(unit.is_announced for unit in self.units.units):
            return None
        if self.engine.world is None or self.engine.world.size == 1:
            return Announcements(self)
        return (DividedAnnouncements if any(unit.is_local for unit in self.units.units) else SharedAnnouncements)(self)

    def _watch(self, site: Site) -> None:
        begins, ends = _Hook(partial(self._site_begins, site)), _Hook(partial(self._site_ends, site))
        self._handles.append(site.module.register_forward_pre_hook(begins, prepend=True))
        self._handles.append(site.module.register_forward_hook(ends, always_call=True))

    def _watch_gradient(self, unit: Unit, member: Member, parameter: Any) -> None:
        self._handles.append(parameter.register_post_accumulate_grad_hook(_TakesGradient(self, len(self._taken))))
        self._taken.append((unit, member))

    # --- Steps and inferences.

    def _enter(self) -> None:
        """The outermost module that is called begins what it needs."""
        if self.depth == 0:
            self._recover()
            self._thread = threading.get_ident()
            self._failure_before = sys.exc_info()[1]
            self._begin(torch.is_grad_enabled())
        self.depth += 1

    def _require_own_thread(self) -> None:
        if (self.depth > 0 or self.in_backward) and self._thread != threading.get_ident() and self._thread in sys._current_frames():
            raise _OtherThread("another thread is in the forward or backward of this offloaded model, which one thread at a time may use; "
                               "evaluate between its steps, or put a lock around both. Where a backward() of that thread has raised an "
                               "exception, optimizer.zero_grad() ends it")

    def _require_own_values(self) -> None:
        """Raises where another thread is in a forward or a backward of the model, and not where one has left it by an exception."""
        if (self.depth > 0 or self.in_backward) and self._thread != threading.get_ident() and _computes(self._thread):
            raise _OtherThread("another thread is in the forward or backward of this offloaded model, and computes with memory of the engine; "
                               "wait for it first")

    def _leave(self) -> None:
        self.depth -= 1
        if self.depth > 0:
            return
        failure, before, self._failure_before = sys.exc_info()[1], self._failure_before, None
        if self.active == INFERENCE:
            self._end_inference()
        elif failure is not None and failure is not before and not self.has_gradients:
            self.abandon()  # a forward that raised is not a micro-batch

    @contextlib.contextmanager
    def _changes(self) -> "Iterator[None]":
        """Around a call that begins or ends a step or an inference. Behind an interrupt in it, which Python raises when the call has
        returned or before it, only the engine knows what is active: `_changing` stays."""
        self._changing = threading.get_ident()
        try:
            yield
        except SluiceError:
            self._changing = None
            raise
        self._changing = None

    def _settle(self) -> None:
        """Ends what the engine has behind such an interrupt."""
        thread = self._changing
        if thread is None or (thread != threading.get_ident() and thread in sys._current_frames()):
            return
        for index in (*self.held, *self.kept):
            self._hide(index)
        self.held.clear()  # the leases end with the step
        self.kept.clear()
        self._waiting.clear()
        if self.announcements is not None:
            self.announcements.forget()
        self.active, self.has_gradients = None, False
        for end in (self.engine.abandon_step, self.engine.end_inference):
            with contextlib.suppress(ArgumentError):  # there is none
                end()
        self._changing = None

    def _begin(self, trains: bool) -> None:
        if self.active is not None:  # an evaluation inside of a step uses its parameters, as one more forward pass
            return
        with self._changes():
            if trains:
                self.engine.begin_step(*self.rates())
                self.active, self.has_gradients = FORWARD, False
            else:
                self.engine.begin_inference()
                self.active = INFERENCE
        self.uses, self.was_idle = 0, False
        self.lent.clear()
        self._waiting.clear()

    def _end_inference(self) -> None:
        self._release_all()
        self._drop_kept()
        if self.announcements is not None:
            self.announcements.forget()
        with self._changes():
            self.active = None
            self.engine.end_inference()

    def _recover(self) -> None:
        """Closes the leases that an exception has left open without a hook hearing of it: one in backward, or an
        interrupt."""
        self.stop_keeping()
        self._settle()
        if self.in_backward and _graph_task() == -1:
            self._release_all()
        if self.active == INFERENCE:
            self._end_inference()

    @without_values
    def check_gradients(self) -> None:
        """Raises where torch's optimizer would use a gradient that the engine has not seen, or would leave a parameter alone that the
        engine updates."""
        require_no_hooks_of_tied(self.units, lambda hook: isinstance(hook, _TakesGradient) and hook.walk() is self)
        for member, is_trained, parameter, places, attribute, storage in self._parameters:
            if places.get(attribute) is not parameter or parameter.untyped_storage()._cdata != storage:
                raise ArgumentError(f"{member.name} is another tensor than in offload(), or has other memory, and the engine trains the "
                                    "one from then. Change values with model.load_state_dict(), or change the model before offload()")
            if parameter.requires_grad != is_trained:
                raise ArgumentError(f"{member.name} was {'trained' if is_trained else 'frozen'} in offload() and is not any more: which "
                                    "parameters are trained is fixed there. Take model.state_dict(), close the optimizer, make the model "
                                    "anew with that, and offload it, which begins with moments of zero; or train all from the beginning, "
                                    "with an lr and a weight_decay of 0 for the group of what rests. peft's get_peft_model() changes it, and "
                                    "belongs in front of offload()")
            if parameter.grad is not None:
                raise ArgumentError(f"{member.name} has a p.grad, which an offloaded model does not use: its gradients come from "
                                    "backward() alone. Assign none to p.grad, and train no parameter that was frozen in "
                                    "offload(); optimizer.zero_grad() removes it")

    @without_values
    def drop_gradients(self) -> None:
        """Those that torch has, from a backward that has failed or from the program: the next backward would add to them."""
        for _, _, parameter, *_ in self._parameters:
            parameter.grad = None

    def gradient_norm(self) -> "Optional[float]":
        """The norm of the gradients that this step has so far; None without any. Further ones may come."""
        if self.active != FORWARD or not self.has_gradients or self.in_backward:
            return None
        self._release_all()
        self._drop_kept()  # until a module uses them again
        return self.engine.gradient_norm()

    def finish(self) -> "Any | None":
        """The update, if there are gradients. Returns its report."""
        self._settle()
        if self.in_backward:
            raise SluiceError("the last backward() ended with an exception, so the step has some of its gradients; "
                              "optimizer.zero_grad() abandons it")
        self.check_gradients()
        if self.active is None:
            self.was_idle = False
            return None
        for storage in self.storages:
            storage.check()
        self._release_all()
        if not self.has_gradients:
            self.abandon()
            return None
        if self.announcements is not None:
            self.announcements.end()
        self._drop_kept()
        if self.activations is not None:
            self.activations.check_use()
        try:
            with self._changes():
                report = self.engine.finish_step(*self.rates())
                self.active, self.has_gradients = None, False
        except SluiceError as error:
            if not isinstance(error, ArgumentError) or error.__cause__ is not None:
                self.active, self.has_gradients = None, False
            raise  # the step goes on behind an ArgumentError; one with a cause comes from the norm group's sums
        except BaseException:
            self._settle()
            raise
        if not report.is_skipped:  # graphs that are kept have saved values from before, as torch's optimizers tell autograd
            for _, is_trained, parameter, *_ in self._parameters:
                if is_trained:
                    increment_version(parameter)
        return report

    def abandon(self) -> None:
        """Ends the step without an update, and forgets its gradients. Ends an inference that an interrupt has left."""
        self.stop_keeping()
        self.in_backward, self.depth = False, 0
        self._forget_running()
        self._settle()
        self._waiting.clear()
        if self.active == INFERENCE:
            self._end_inference()
        if self.active != FORWARD:
            return
        self._release_all()
        self._drop_kept()
        if self.announcements is not None:
            self.announcements.forget()
        with self._changes():
            self.active, self.has_gradients = None, False
            self.engine.abandon_step()

    def has_step(self) -> bool:
        """Whether a step or an inference is under way. One that was ended behind its forward begins anew, since its backward comes."""
        if self.active is None and self.was_idle:
            self._begin(True)
        return self.active is not None

    def end_idle_step(self, changes: bool = False) -> None:
        """Ends a step that has had forwards alone, as optimizer.step() would. A backward of its graph begins another; where values
        change now, autograd refuses it."""
        self._settle()
        if self.active == INFERENCE and self.depth == 0:  # an interrupt has come into its end
            self._end_inference()
        is_idle = self.active == FORWARD and self.depth == 0 and not self.has_gradients and not self.in_backward
        if not is_idle or self.announcements is not None:
            return
        self.abandon()
        self.was_idle = True
        for named in self._values if changes else ():
            for _, parameter in named:
                increment_version(parameter)

    # --- Leases.

    def _acquire(self, unit: Unit, which: int) -> int:
        """Returns the address of the parameters."""
        if self.active is None:  # backward of a graph whose step was abandoned
            self._begin(True)
        if self._waiting:
            self._take_waiting()
        self.lent.add(unit.index)
        coming = self.announcements
        if coming is not None:
            (coming.approach if unit.is_announced else coming.approach_other)(unit.index, which)
        self._release_older()
        try:
            parameters, gradients, lease_id = self.engine.acquire(unit.index, which)
        except OutOfMemoryError:
            others = [index for index in self.held if index not in self._together]
            if not others:
                raise
            for index in others:  # in the way; gradients that they still get wait in torch's memory
                self._release(index)
            parameters, gradients, lease_id = self.engine.acquire(unit.index, which)
        except SluiceError:
            raise
        except BaseException:  # an interrupt, with or without a lease
            if self.engine.release_unknown({held.id for held in self.held.values()} | set(self.kept.values())):
                self.uses += 1
                if coming is not None and unit.is_announced:
                    coming.take(unit.index, which)
            raise
        if coming is not None and unit.is_announced:
            coming.take(unit.index, which)
        self.held[unit.index] = _Held(lease_id, gradients, self.uses, which)
        self.uses += 1
        return parameters

    def _release_older(self) -> None:
        for index, held in list(self.held.items()) if self.held else ():
            if held.use <= self.uses - self.leases:
                self._release(index)

    def pass_by(self, unit: int, which: int) -> None:
        """A use of an announced unit in which nothing computes."""
        self._release_older()
        self.engine.release(self.engine.acquire(unit, which)[2])
        self.uses += 1

    def _release(self, index: int) -> None:
        if not self.units.units[index].is_held:
            self._hide(index)
        held = self.held.pop(index)  # behind _hide(), in which an interrupt may come
        self.engine.release(held.id)

    def _hide(self, index: int) -> None:
        """Ends that the unit shows its lease's memory."""
        self.storages[index].hide()
        if index in self.gathered:
            self.storages[index].show(self.gathered[index])

    def is_newest(self, site: Site) -> bool:
        """Whether nothing has been lent since the site's units were, for a forward of this step or inference."""
        found = [self.held.get(unit.index) for unit in site.units]
        uses = [held.use for held in found if held is not None and held.which != BACKWARD]
        return uses == list(range(self.uses - len(found), self.uses))

    def is_own_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def is_lent(self, index: int) -> bool:
        """Whether the unit shows a lease's memory."""
        return index in self.held or index in self.kept

    def _release_all(self) -> None:
        for index in list(self.held):
            self._release(index)

    def _lend(self, unit: Unit, which: int) -> None:
        """Makes the unit's parameters readable."""
        if unit.is_held:
            if unit.index not in self.kept:
                address = self._acquire(unit, FORWARD if which == BACKWARD else which)
                self.kept[unit.index] = self.held.pop(unit.index).id
                self.storages[unit.index].show(address)
            return
        if unit.index in self.held:
            self._release(unit.index)
        self.storages[unit.index].show(self._acquire(unit, which))

    def lend_together(self, units: "Sequence[Unit]", which: int) -> None:
        self._together.clear()
        for unit in units:
            self._lend(unit, which)
            self._together.add(unit.index)
        self._together.clear()

    def _drop_kept(self) -> None:
        for index in list(self.kept):
            self._hide(index)
            self.engine.release(self.kept.pop(index))

    def _is_lent_backward(self, unit: Unit) -> bool:
        """Or for an inference, in which a program computes gradients for its inputs."""
        if unit.is_held:
            return unit.index in self.kept
        return unit.index in self.held and self.held[unit.index].which in (BACKWARD, INFERENCE)

    def _enter_backward(self) -> None:
        if self.in_backward:
            return
        self.in_backward, self._thread = True, threading.get_ident()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        if self.active == FORWARD and self.announcements is not None:
            self.announcements.backward_begins()

    def lend_backward(self, site: Site) -> None:
        self._enter_backward()
        self._freed.look()
        if self._running:
            self._require_no_other(site)
        if all(map(self._is_lent_backward, site.units)):
            return
        # All of them anew, since a new lease ends those that are too old: another module's lease on a shared unit may be one. In
        # the order of the schedule that the engine expects, which is the reverse of forward's.
        self.lend_together(site.units[::-1], INFERENCE if self.active == INFERENCE else BACKWARD)
        for unit in site.units if self._places else ():
            if unit.index in self.held:
                self.held[unit.index].left = self._places.get((id(site), unit.index), 0)  # or none of a site for a read

    def _require_no_other(self, site: Site) -> None:
        """Raises where a module's forward has gradients computed through another module, whose lease would take away its own."""
        running = self._running[-1]
        if running.task != _graph_task() and running.has_leases and running.site is not site and any(not u.is_held for u in site.units):
            raise ArgumentError(f"the forward of module \"{running.site.name}\" has gradients computed through module \"{site.name}\", which "
                                "is not inside of it, so that both would need their values at a time. Assign the second one to an "
                                "attribute of the first one before offload(), or compute the gradients where the model is called")

    def _root_begins(self, module: nn.Module, args: Any) -> None:
        if _graph_task() != -1:
            return
        self._require_own_thread()
        if self.depth > 0 and self._is_nested():
            self._root_calls += 1
            self._enter()
            return
        self.depth, self._root_calls = 0, 1  # an interrupt may have kept them from getting there
        self._forget_running()
        self._enter()
        if self.activations is not None and self.active == FORWARD and torch.is_grad_enabled():
            keeping = self.activations.hooks()
            keeping.__enter__()  # raises where torch forbids such hooks
            self._keeping = keeping

    def _root_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if _graph_task() == -1 and not isinstance(sys.exc_info()[1], _OtherThread):
            self._root_calls -= 1
            if self._root_calls <= 0:
                self.stop_keeping()
            try:
                if self._root_calls <= 0 and self._reads:
                    self._watch_reads(output)
            finally:
                self._leave()
            self._freed.look_closer()

    def _is_nested(self) -> bool:
        """Whether the model is called in its own forward, or in that of a module of its that was called alone. Asks Python's stack,
        since an interrupt may have left counts behind."""
        running = {id(running.site.module) for running in self._running}
        calls, frame = 0, sys._getframe()
        while frame is not None and calls < 2:
            if frame.f_code is nn.Module._call_impl.__code__:
                module = frame.f_locals.get("self")
                calls += 2 if id(module) in running and module is not self.model else module is self.model
            frame = frame.f_back  # type: ignore[assignment]
        return calls >= 2

    def stop_keeping(self) -> None:
        """An interrupt leaves the forward's context open."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.__exit__(None, None, None)

    def _site_begins(self, site: Site, module: nn.Module, args: Any) -> None:
        """Leaves the inputs as they are, so that the module may change them in place as far as torch lets it."""
        task = _graph_task()
        if task != -1:  # computed again for backward, by a checkpoint
            self._runs(site, task)
            self.lend_backward(site)
            return
        self._require_own_thread()
        if self.depth == 0:
            self._forget_running()
        self._runs(site, task)
        self._enter()
        assert self.active is not None
        if not self._warned:
            self._warn_of_autocast()
        if site.weights is None or not self._reads.is_for_call(site):
            self.lend_together(site.units, self.active)
        for unit in site.units:
            if unit.index in self.kept or site.weights is not None:  # lent before
                self.storages[unit.index].unwatch()
        site.versions = [tensor._version for tensor in site.values]

    def lend_for_read(self, site: Site) -> None:
        """The module that runs computes with parameters of `site`. Lends them where there is room."""
        if len(site.units) <= self.leases:
            self._reads.read(site)

    def has_read(self, unit: Unit) -> bool:
        return self._reads.has_read(unit)

    def watch_units(self, units: "Sequence[Unit]") -> None:
        """Parameters of them that are lent, but not for a forward of their own module, may be taken away while a view of them is kept."""
        for unit in units:
            if not any(unit is one for running in self._running for one in running.site.units):
                self.storages[unit.index].watch()

    def innermost(self) -> "Optional[Running]":
        """The site whose forward runs, or computes again for backward."""
        return self._running[-1] if self._running else None

    def _forget_running(self) -> None:
        """An interrupt may have left some."""
        self._running.clear()
        self._reads.forget()

    def _runs(self, site: Site, task: int) -> None:
        self._running.append(Running(site, task))
        if site.weights is not None:
            site.weights.is_running = True
        site.first_node, site.failure_before = _next_node(), sys.exc_info()[1]

    def _has_run(self, site: Site) -> None:
        while self._running:  # an interrupt may have left some
            ended = self._running.pop()
            if ended.site.weights is not None:
                ended.site.weights.is_running = False
            if ended.site is site:
                if self._reads:
                    self._reads.has_run(ended, site.first_node)
                if self._running and self._running[-1].has_leases:
                    self._running[-1].inside.append((site.first_node, _next_node()))
                site.first_node, site.failure_before, site.versions = ended.before
                break

    def _resume(self) -> None:
        """Gives the module whose forward goes on what a module or a backward inside of it has taken away."""
        last = self._running[-1]
        if self.active is None:
            return
        if last.task != -1:
            self.lend_backward(last.site)
            return
        if not all(self.is_lent(unit.index) for unit in last.site.units):
            self.lend_together(last.site.units, self.active)  # all anew, as in backward

    def _warn_of_autocast(self) -> None:
        """Looks here and not where the model begins: transformers and accelerate turn it on in the model's forward."""
        if torch.is_autocast_enabled(self.engine.place.device.type):
            self._warned = True
            warnings.warn("autocast keeps a copy of every weight for backward, which is the memory that offload saves; "
                          "use parameters of bf16 without autocast", stacklevel=2)

    def warn_of_double_backward(self) -> None:
        """The graph that backward makes of itself keeps weights, which have no values when a second backward goes through it."""
        if not self._warned_of_graph:
            self._warned_of_graph = True
            warnings.warn("create_graph=True: a second backward, through the graph of these gradients, reads weights of an offloaded model "
                          "where they have no values, and gives NaN. sluice_offload.optim supports double backward", stacklevel=2)

    def _site_ends(self, site: Site, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(sys.exc_info()[1], _OtherThread):
            return None
        has_failed = sys.exc_info()[1] not in (None, site.failure_before)
        try:
            copied = self._end_site(site, output, has_failed)
        finally:
            self._has_run(site)
        if self._running and self._running[-1].task == _graph_task():
            with contextlib.suppress(SluiceError) if has_failed else contextlib.nullcontext():
                self._resume()
        return copied

    def _end_site(self, site: Site, output: Any, has_failed: bool) -> Any:
        """Returns the output that takes the place of the module's own, or None."""
        site.failure_before = None  # whose traceback holds the tensors of its frames
        if _graph_task() != -1:
            copied, leaves = (None, []) if has_failed else self._without_views(site, output)
            if torch.is_grad_enabled() and not has_failed:  # a reentrant one makes its graph now
                self._watch_outputs(site, leaves)
            return copied
        written = None if has_failed else self._written_in(site)
        try:
            copied, leaves = (None, []) if has_failed else self._without_views(site, output)
        finally:
            for unit in site.units:
                held = self.held.get(unit.index)
                if held is not None and held.which != BACKWARD:
                    self._release(unit.index)
            trains = self.active is not None and torch.is_grad_enabled() and not has_failed
            self._freed.look()
            self._leave()
        if written is not None:
            raise ArgumentError(f"{written} was changed in its module's forward, where an offloaded model lends values: the change would "
                                "stay in some places and be lost in others. Keep what changes there in a buffer, compute the changed "
                                "weight without writing it back, or change it between steps with load_state_dict()")
        if trains:
            self._watch_outputs(site, leaves)
        return copied

    def _without_views(self, site: Site, output: Any) -> "tuple[Any, list[Any]]":
        """Returns `output` with copies of the views of the site's parameters, or None where it has none, and its leaves."""
        memory, leaves = self._memory[id(site)], _leaves_of(output)
        if not any(_lies_in(x, memory) for x in leaves):
            return None, leaves
        def copies(value: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda x: _copy_of(x) if _lies_in(x, memory) else x, value)
        copied = copies(output)
        for x in tree_flatten(copied)[0]:  # such as a distribution or a dataclass
            if isinstance(x, (*_LEAVES, nn.Module)) or not hasattr(x, "__dict__"):
                continue
            vars(x).update({name: copies(value) for name, value in vars(x).items() if any(_lies_in(y, memory) for y in tree_flatten(value)[0])})
        leaves = _leaves_of(copied)
        if any(_lies_in(x, memory) for x in leaves):  # within an object that cannot be changed
            kind = next(type(x).__name__ for x in leaves if any(_lies_in(y, memory) for y in tree_flatten(_inside_of(x))[0]))
            raise ArgumentError(f"module \"{site.name}\" returns a view of its parameters within a {kind}, and an offloaded model has no "
                                "values of them when the module has run. Return view.clone(), or return tensors, tuples, lists or "
                                "dictionaries")
        return copied, leaves

    def _written_in(self, site: Site) -> "Optional[str]":
        """The name of a parameter that the module's forward has written to."""
        if [tensor._version for tensor in site.values] == site.versions:
            return None
        named = [named for unit in site.units for named in self._values[unit.index]]
        return next((member.name for (member, tensor), version in zip(named, site.versions) if tensor._version != version), None)

    def _watch_outputs(self, site: Site, leaves: "list[Any]") -> None:
        """Watches what the module has computed, of `leaves`. An input that it gives back is another's output, whose lease a second hook
        on it would end; one that was changed in place has a new node. A view that the program changes in place
        later gets another node, and leaves its hook behind: what it is a view of keeps its own."""
        found = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        has_outputs = bool(found)
        for attributes in site.kept:
            for value in islice(attributes.values(), _OF_MODULES, None):
                if isinstance(value, (torch.Tensor, list, tuple, dict)):
                    found += self._kept_in(value)
        if found:
            begins = _BackwardBegins(self, site)
            for x in found:
                if _is_made_since(site.first_node, x):
                    x.register_hook(begins)
                    if x._base is not None and _is_made_since(site.first_node, x._base):
                        x._base.register_hook(begins)
            if self._running and self._running[-1].inside:
                self._watch_between(self._running[-1], found)
            if self._reads:
                self._reads.watch(self.innermost(), found)
        if not has_outputs:
            self._require_known(site.name, leaves)

    def _watch_reads(self, output: Any) -> None:
        """The model's forward ends, which itself has read weights of its modules."""
        if self.active == FORWARD and torch.is_grad_enabled() and sys.exc_info()[1] in (None, self._failure_before):
            leaves = _leaves_of(output)
            found = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            self._reads.watch(None, found)
            if not found:
                self._require_known(type(self.model).__name__, leaves)
        self._reads.forget()

    @staticmethod
    def _require_known(name: str, leaves: "list[Any]") -> None:
        """`leaves`: what a module returns, without a tensor through which backward could come."""
        for x in leaves:
            if not isinstance(x, (torch.Tensor, *_PLAIN)):
                raise ArgumentError(f"module \"{name}\" returns a {type(x).__name__}, in which its tensors cannot be "
                                    "found; return tensors, tuples, lists or dictionaries, or register the class with "
                                    "torch.utils._pytree")

    @staticmethod
    def _kept_in(value: Any) -> "list[torch.Tensor]":
        """Tensors that a module keeps in an attribute, such as a loss of its own, from which backward may come to it."""
        values = [value] if isinstance(value, torch.Tensor) else list(value.values() if isinstance(value, dict) else value[-_KEPT_MAX:])
        return [x for x in values[-_KEPT_MAX:] if isinstance(x, torch.Tensor) and x.requires_grad]

    def _watch_between(self, running: Running, outputs: "list[torch.Tensor]") -> None:
        """Watches what the module has computed itself in front of the last module that it called, or between two of them: backward comes
        there from the called one, with that one's lease. Autograd goes through a graph in the reverse order of its making."""
        site, inside = running.site, running.inside
        self.watch_nodes(site, outputs, site.first_node, inside, inside[-1][0])

    def watch_nodes(self, site: Site, outputs: "list[torch.Tensor]", first_node: int, inside: "list[tuple[int, int]]",
                    before: int = sys.maxsize) -> None:
        """Lends backward the units of `site` at each node on the way to `outputs` that was made since `first_node` and before another,
        and not in one of the ranges `inside`."""
        def resume(*_: Any) -> None:
            self.lend_backward(site)

        seen: "set[Any]" = set()
        open_nodes = [x.grad_fn for x in outputs]
        while open_nodes:
            node = open_nodes.pop()
            if node is None or node in seen or hasattr(node, "variable") or node._sequence_nr() < first_node:
                continue
            seen.add(node)
            number = node._sequence_nr()
            if number < before and not any(begin <= number < end for begin, end in inside):
                node.register_prehook(resume)
            open_nodes += [following for following, _ in node.next_functions]

    def _take_gradient(self, unit: Unit, member: Member, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if self.notice_gradient is not None:
            self.notice_gradient()
        self._enter_backward()
        if unit.index not in self.lent:
            raise ArgumentError(f"{member.name} got a gradient in a step in which its module's forward has not run: the program read it "
                                "outside of that, where it has no values. Call the module that owns it, or name a module that contains "
                                "both it and what reads it in offload(units=...)")
        if self.active == INFERENCE:
            raise ArgumentError(f"{member.name} got a gradient inside of an evaluation (torch.no_grad() around the model), which has no "
                                "place for gradients of parameters. For gradients of inputs alone call torch.autograd.grad(outputs, "
                                "inputs); to train, call the model where gradients are enabled")
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.requires_grad:  # with create_graph=True it has a graph
            gradient = gradient.detach()
        held = self.held.get(unit.index)
        if held is None or held.which != BACKWARD:
            self._waiting.append((unit, member, gradient))
            parameter.grad = None
            if not self.held:
                self._take_waiting()
            self.has_gradients = True
            return
        self.has_gradients = True
        self._add_gradient(held, member, gradient)
        parameter.grad = None
        held.left -= 1
        if held.left == 0:
            self._release(unit.index)

    def _add_gradient(self, held: _Held, member: Member, gradient: torch.Tensor) -> None:
        target = self._views.get((held.gradients, member.tensor))
        if target is None:
            target = self._view(held.gradients, member)
        if member.tensor in held.written:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            held.written.add(member.tensor)

    def _take_waiting(self) -> None:
        """Gives the engine gradients of units whose module computes nothing now. Each lease takes those that came one behind another."""
        waiting, self._waiting = self._waiting, []
        last: Optional[Unit] = None
        for unit, member, gradient in waiting:
            if unit is not last:
                if last is not None:
                    self._release(last.index)
                if unit.index in self.held:
                    self._release(unit.index)
                self._acquire(unit, BACKWARD)
            self._add_gradient(self.held[unit.index], member, gradient)
            last = unit
        if last is not None:
            self._release(last.index)

    def _view(self, gradients: int, member: Member) -> torch.Tensor:
        """Makes a tensor over a gradient's memory. It is kept: there are few places where gradients wait."""
        dtype = self.engine.gradient_dtype
        flat = self.engine.place.tensor_at(gradients + member.offset * dtype.itemsize, dtype, member.parameter.numel())
        view = flat.view(member.parameter.shape)
        self._views[(gradients, member.tensor)] = view
        return view

    def _backward_ends(self) -> None:
        if self._waiting:
            self._take_waiting()
        self.in_backward = False
        self._release_all()
        if self._running and self._running[-1].task != _graph_task():  # a backward inside of a forward
            self._resume()
        if self.active == FORWARD and self.announcements is not None:
            self.announcements.backward_ends()

