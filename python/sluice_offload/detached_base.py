"""The common base of the optimizers of `sluice_offload.optim`: a torch.optim.Optimizer whose moments and fp32 masters
live in host memory or on NVMe, while torch keeps parameters and gradients, in the CPU's memory or on a GPU."""

import contextlib
import copy
import functools
import math
import os
import threading
import weakref
from itertools import chain
from typing import Any, Callable, Mapping, Optional

import torch
import torch.distributed as dist
from torch import nn

from . import gpus, guards
from . import library as lib
from .detached import TYPES, Detached
from .engine import Config, logger, read_config, warn_of_memory
from .errors import OPTIMIZER_NOT_COPIED, ArgumentError, NonFiniteError, OutOfMemoryError, SluiceError
from .optim_state import Entry, States
from .optimizer import UPDATES
from .processes import count_processes, processes_of_launcher, require_member, share_of_cores
from .shares import ProcessGroup, Share, are_finite, is_distributed_tensor, local_of, sums_of_bits, total_norm
from .units import is_of_torch
from .waits import Parameters, Waits

GRADIENT_BYTES = 64 << 20  # of updates under way, in backward or over copies: enough for a drive to be busy
FROZEN_BYTES = 64 << 20  # of the state of frozen parameters; less is not worth a warning
_has_warned_of_launcher = False
_MEANINGLESS = ("amsgrad", "capturable", "differentiable", "nesterov", "dampening")


def _bunches(shares: "list[tuple[Share, dict[str, Any]]]") -> "list[list[tuple[Share, dict[str, Any]]]]":
    """Updates that begin together: those without copies, and then as many as copy GRADIENT_BYTES."""
    bunches, room = [[entry for entry in shares if not entry[0].copied_bytes()]], 0
    for entry in shares:
        if nbytes := entry[0].copied_bytes():
            if room < nbytes:
                bunches.append([])
                room = GRADIENT_BYTES
            bunches[-1].append(entry)
            room -= nbytes
    return [bunch for bunch in bunches if bunch]


def _of_original(method: "Callable[..., Any]") -> "Callable[..., Any]":
    """A method that goes on with the optimizer itself where it is called on Lightning's wrapper, which is of the same class: what the wrapper
    assigned to itself, the optimizer would not have."""
    @functools.wraps(method)
    def of_original(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(_original(self), *args, **kwargs)
    return of_original


def _original(optimizer: Any) -> Any:
    while isinstance(optimizer.__dict__.get("_optimizer"), DetachedOptimizer):
        optimizer = optimizer.__dict__["_optimizer"]
    return optimizer


def _gpu_of(shares: "list[Share]") -> Optional[int]:
    """The number of the one GPU that parameters are on; None if they are all in the CPU's memory."""
    found = {share.gpu: share.name for share in shares if share.gpu is not None}
    if len(found) > 1:
        raise ArgumentError("parameters are on several GPUs of one process: " +
                            ", ".join(f"{name} on cuda:{gpu}" for gpu, name in sorted(found.items())) +
                            "; make an optimizer for each, or let each process use one GPU")
    for gpu, name in found.items():
        why = gpus.why_not(gpu)
        if why:
            raise SluiceError(f"parameter {name} is on cuda:{gpu}, which Sluice cannot use: {why}")
        return gpu
    return None


class DetachedOptimizer(torch.optim.Optimizer):
    """Base class; see sluice_offload.optim. A subclass says its `_type`, the names of its moments, and what an update takes
    from a param_group."""

    leaves_parameters = True  # in the model, for guards.py
    how_to_clip = "give the optimizer clip_norm=, or clip with gradients=\"step\""  # for guards.py
    _type = ""
    _kinds: "Mapping[str, int]" = {}
    _has_step = True

    def __init__(self, params: Any, defaults: "dict[str, Any]", config: "Config | str | os.PathLike[str] | None",
                 gradients: str, clip_norm: Optional[float], overlap: Optional[str], modules: Optional[nn.Module],
                 shard: Optional[bool], process_group: Any) -> None:
        if gradients not in ("step", "backward"):
            raise ArgumentError(f"gradients={gradients!r}; it has to be \"step\" or \"backward\"")
        if overlap not in (None, "forward"):
            raise ArgumentError(f"overlap={overlap!r}; it has to be None or \"forward\"")
        if (overlap == "forward") != (modules is not None):
            raise ArgumentError("overlap=\"forward\" and modules=model belong together: the modules' forward waits for their "
                                "parameters")
        if modules is not None and not isinstance(modules, nn.Module):
            raise ArgumentError(f"modules is of {type(modules).__name__}; it has to be the model, an nn.Module")
        if clip_norm is not None and not 0 < clip_norm < math.inf:
            raise ArgumentError(f"clip_norm={clip_norm}; it has to be positive and finite, or None")
        self.clip_norm, self.gradient_norm = clip_norm, 0.0
        self._engine: Optional[Detached] = None
        self._has_stepped = self._has_loaded = False
        self._settings = self._complete(config)
        self._gradients, self._overlap = gradients, overlap
        self._keep: "dict[int, list[Any]]" = {}      # gradient and parameter of updates under way, by index
        self._kept_bytes = 0                         # of the gradients
        self._begun_elements = 0                     # of all updates of the engine
        self._counting = threading.RLock()  # a GPU's parameters come on another thread than the CPU's
        self._copies: "dict[int, tuple[torch.Tensor, torch.Tensor]]" = {}  # parameters that are not contiguous
        self._hooks: "list[Any]" = []                # handles of those on parameters
        self._module_hooks: "list[Any]" = []         # handles of those on modules, which copies of a model share
        self._of_module: "weakref.WeakKeyDictionary[nn.Module, list[int]]" = weakref.WeakKeyDictionary()  # whose forward waits for these
        self._read: "weakref.WeakKeyDictionary[nn.Module, Optional[Parameters]]" = weakref.WeakKeyDictionary()  # wait where one is read
        self._is_marked = False                      # they know that updates may be writing them
        self._called: "set[int]" = set()             # since the last step(), their modules' forward has run
        self._called_before: "set[int]" = set()      # in the step before it
        self._has_others = False                     # they may have to be waited for
        self._taken: "set[int]" = set()              # ids of the parameters whose gradient has come since the last step()
        self._held: "dict[int, tuple[torch.Tensor, Any]]" = {}  # gradients that wait for their norm, by id of their parameter
        self._grouped: "list[dict[str, Any]]" = []   # param_groups as they were when the next was made
        self._group_of_id: "dict[int, dict[str, Any]]" = {}
        self._shard, self._process_group = shard, process_group
        super().__init__(params, defaults)
        self._place({})
        if modules is not None:
            self._wait_in_forward(modules)
        self._own()

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes that a program sets through Lightning's wrapper, such as clip_norm, are the optimizer's. A step() that a scheduler wraps
        is not."""
        original = _original(self)
        is_its = original is not self and name in original.__dict__ and name not in self.__dict__ and name != "step"
        object.__setattr__(original if is_its else self, name, value)

    # Subclasses define these.

    def _hyperparameters(self, group: "dict[str, Any]", step: int) -> "dict[str, float]":
        """Fields of library.Update, for a parameter of `group` at its `step`."""
        raise NotImplementedError

    def _moments(self, group: "dict[str, Any]") -> "Mapping[str, int]":
        """The moments that state_dict() shows for parameters of `group`."""
        return self._kinds

    # Making it.

    def _complete(self, config: "Config | str | os.PathLike[str] | None") -> "dict[str, Any]":
        settings = read_config(config) if config is not None else {}
        optimizer = settings.setdefault("optimizer", {})
        others = sorted(key for key in optimizer if key not in ("type", "state", "rounding_seed"))
        if others or optimizer.get("type", self._type) != self._type:
            raise ArgumentError(f"the config's optimizer has {optimizer}, but the hyperparameters of {type(self).__name__} are "
                                "arguments, as in torch; leave them out of the config. Only \"state\" and \"rounding_seed\" "
                                "belong there")
        for section, key in (("placement", "parameters"), ("placement", "gradients"), ("memory", "device")):
            if key in settings.get(section, {}):
                logger.warning("%s.%s of the config has no effect here: parameters and gradients stay torch's, and only the "
                               "optimizer's state is placed; sluice_offload.offload() places all", section, key)
        warn_of_memory(settings)
        optimizer["type"] = self._type
        self._state = optimizer.get("state", "fp32")
        return settings

    def _with_threads(self, gpu: Optional[int]) -> "dict[str, Any]":
        """The config with the default of run.threads: this process's share of the host's cores, but half of them where torch computes on the
        others meanwhile, and all but one where that one launches the work of a GPU."""
        cores = share_of_cores(processes_of_launcher())
        is_overlapped = self._gradients == "backward" or self._overlap == "forward"
        threads = cores - 1 if gpu is not None else cores // 2 if is_overlapped else cores
        return {**self._settings, "run": {"threads": max(1, threads), **self._settings.get("run", {})}}

    def _find_group(self, shard: Optional[bool], process_group: Any) -> Optional[ProcessGroup]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        is_there = dist.is_available() and dist.is_initialized()
        if process_group is not None:
            if shard is False:
                raise ArgumentError("process_group names the processes to shard over, and shard=False shards over none; leave one of the two "
                                    "out")
            require_member(process_group, "process_group")
        if shard is False or (not is_there and shard is None):
            if shard is None:
                self._warn_of_launcher()
            return None
        if not is_there:
            raise ArgumentError("shard=True needs torch.distributed.init_process_group()")
        if any(map(is_distributed_tensor, parameters)):
            if shard or process_group is not None:
                raise ArgumentError("some parameters are DTensors, of which each process updates its own shard; leave shard "
                                    "and process_group out")
            return None
        group = ProcessGroup(process_group)
        if group.size == 1:
            return None
        if self._state != "fp32":
            raise ArgumentError(f"\"optimizer\": {{\"state\": \"{self._state}\"}} is not sharded over a process group, since its "
                                "bits would depend on the number of processes; use shard=False, or fp32 moments")
        if self._gradients == "backward":
            raise ArgumentError("gradients=\"backward\" takes gradients before they have been reduced over the process group; "
                                "use gradients=\"step\" or FSDP2; or shard=False, without DistributedDataParallel, where each process "
                                "trains a model of its own")
        if self._overlap == "forward":
            raise ArgumentError("overlap=\"forward\" does not work with a state that is sharded over processes, whose "
                                "parameters are gathered in step(); use shard=False")
        group.agree([(str(p.dtype), tuple(p.shape)) for p in parameters], "the parameters to shard")
        return group

    def _warn_of_launcher(self) -> None:
        """Once: each of several processes would keep all of the state, and none of them would say so."""
        global _has_warned_of_launcher
        processes = count_processes()
        if processes > 1 and not _has_warned_of_launcher:
            _has_warned_of_launcher = True
            logger.warning("the launcher has started %d processes, and torch.distributed is not initialized: this %s keeps all of the state in "
                           "each of them. To shard it, make the optimizer behind torch.distributed.init_process_group(); shard=False says that "
                           "each process keeps all", processes, type(self).__name__)

    def _place(self, assigned: "Mapping[torch.Tensor, Mapping[str, Any]]") -> None:
        """Gives all parameters of param_groups their place in an engine. `assigned`: state to begin with."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        guards.require_not_offloaded(parameters)
        self._group = self._find_group(self._shard, self._process_group)
        if self._overlap and any(map(is_distributed_tensor, parameters)):
            raise ArgumentError("overlap=\"forward\" does not work with DTensors: FSDP gathers them before the modules that "
                                "they belong to run; leave it out")
        if self._overlap and any(getattr(p, "_fsdp_flattened", False) for p in parameters):
            raise ArgumentError("overlap=\"forward\" does not work with FullyShardedDataParallel: it gathers parameters before the modules "
                                "that they belong to run; leave it out")
        self._make_engine()
        for p, values in assigned.items():
            self.state[p].load(values)

    def _own(self) -> None:
        """The last of what makes it: an optimizer that had these parameters loses them."""
        if self._group:
            guards.share(self)
        if self._gradients == "backward":
            self._take_in_backward()
        if self._overlap:
            guards.read_gradients((p for group in self.param_groups for p in group["params"]), self)

    def _place_replaced(self) -> None:
        """Tools that wrap a model, as FSDP2 and tensor parallelism, put other parameters into param_groups. They get a place as long as
        no state would be lost."""
        unknown = [(i, j, p) for i, group in enumerate(self.param_groups) for j, p in enumerate(group["params"])
                   if id(p) not in self._shares and id(p) not in self._without_state]
        if not unknown:
            return
        if self.state.has_begun:
            i, j, p = unknown[0]
            raise ArgumentError(f"param_groups[{i}].params[{j}] of shape {tuple(p.shape)} has been put there since the optimizer was made, "
                                "and behind a step() or loaded state: it has no place in the state. Prepare the model (FSDP, tensor "
                                "parallelism) before that, or make a new optimizer for its parameters")
        self._place({})
        self._own()

    def _make_engine(self) -> None:
        shares: "list[Share]" = []
        without: "dict[int, torch.Tensor]" = {}  # frozen, of a type that no update can write: quantized weights
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names", [])
            for j, p in enumerate(group["params"]):
                name = names[j] if names else f"param_groups[{i}].params[{j}]"
                local = local_of(p)
                if local.dtype not in TYPES or local.device.type not in ("cpu", "cuda"):
                    if not p.requires_grad:
                        without[id(p)] = p
                        continue
                    raise ArgumentError(f"parameter {name} is of {local.dtype} on {local.device}; this version updates fp32, "
                                        "bf16 and fp16 in the CPU's memory or on an NVIDIA GPU")
                shares.append(Share(p, len(shares), name, self._group))
        gpu = _gpu_of(shares)
        if self._engine is not None:
            self._engine.close()
        try:
            self._engine = Detached(self._with_threads(gpu), [(share.name, share.count, share.dtype, share.gpu is not None)
                                                              for share in shares], gpu)
        except OutOfMemoryError as error:
            frozen = [share.count for share in shares if not share.parameter.requires_grad]
            if frozen:
                raise OutOfMemoryError(f"{error}; {len(frozen)} of the {len(shares)} parameters, of {sum(frozen)} elements, are frozen. "
                                       "Those that stay so need no state: give the optimizer those with requires_grad") from error
            raise
        self._warn_of_frozen(shares)
        self._shares = {id(share.parameter): share for share in shares}
        self._without_state, self._begun_elements = without, 0
        self._of_module.clear()
        before = getattr(self, "_states", None)  # torch's own while the optimizer is made
        states = States(self._taken, isinstance(before, States) and before.is_shown)
        has_step = self._has_step or self._state == "bf16"  # its rounding goes on from there
        for group in self.param_groups:
            for p in group["params"]:
                if id(p) in without:
                    continue
                states.add(p, Entry(self._shares[id(p)], self._engine, self._moments(group), self._kinds, has_step))
        self.state = states

    def _warn_of_frozen(self, shares: "list[Share]") -> None:
        """torch's optimizers make the state of a parameter at its first gradient, so programs hand over frozen ones as well. The engine
        plans all places beforehand."""
        assert self._engine is not None
        report = self._engine.report()
        frozen = [share.count for share in shares if not share.parameter.requires_grad]
        taken = (report.host_bytes + report.nvme_bytes) * sum(frozen) // max(1, sum(share.count for share in shares))
        if taken >= FROZEN_BYTES:
            logger.warning("%d of the %d parameters are frozen, and about %.0f MiB of the state is theirs; give the optimizer only those with "
                           "requires_grad, unless others are unfrozen later", len(frozen), len(shares), taken / 2**20)

    @property
    def state(self) -> Any:
        return self._states

    @state.setter
    def state(self, values: Any) -> None:
        states = getattr(self, "_states", None)
        if isinstance(values, States) or not isinstance(states, States):
            self._states = values  # torch's own is empty, and the optimizer is not yet made
            return
        self.synchronize()
        states.replace(values)

    @_of_original
    def add_param_group(self, param_group: "dict[str, Any]") -> None:
        if self._has_stepped or self._has_loaded:
            raise ArgumentError("parameters cannot be added after the first step() or load_state_dict(): their place would have "
                                "to be planned beforehand. Give frozen ones to the constructor; without a gradient they are "
                                "not touched")
        super().add_param_group(param_group)
        assigned = {} if self._engine is None else {p: dict(entry) for p, entry in self.state.items() if entry.was_set}
        try:
            self._check_group(self.param_groups[-1])
            self._check_hyperparameters(self.param_groups[-1])
            self._require_once(self.param_groups[-1])
            if self._engine is not None:
                self._place(assigned)
                self._own()
        except Exception:
            self.param_groups.pop()
            if self._engine is not None and not self._engine.is_open:  # it has made room for one that could not be made
                self._place(assigned)
            raise

    def _require_once(self, group: "dict[str, Any]") -> None:
        """Parameters of which two entries would update one."""
        names = group.get("param_names", range(len(group["params"])))
        first: "dict[int, Any]" = {}
        for name, p in zip(names, group["params"]):
            if first.setdefault(id(p), name) != name:
                raise ArgumentError(f"a parameter of shape {tuple(p.shape)} is twice in one group, as params[{first[id(p)]!r}] and "
                                    f"params[{name!r}], and would be updated twice; list(dict.fromkeys(parameters)) has each once")

    def _check_group(self, group: "dict[str, Any]") -> None:
        refused = [key for key in _MEANINGLESS if group.get(key)]
        if refused:
            raise ArgumentError(f"{type(self).__name__} has no {', '.join(refused)}; give torch.optim's optimizer these "
                                "parameters, or leave it out")

    def _check_hyperparameters(self, group: "dict[str, Any]") -> None:
        """As the engine does in each step, behind forward and backward."""
        for name, value in self._hyperparameters(group, 1).items():
            if name in ("beta1", "beta2", "momentum"):
                is_right, words = 0 <= value < 1, "in [0, 1)"
            elif name == "epsilon":
                is_right, words = 1.2e-38 <= value <= 3.4e38, "in 1.2e-38..3.4e38, which fp32 has"
            else:
                is_right, words = 0 <= value < math.inf, "finite and not negative"
            if not is_right:
                raise ArgumentError(f"{type(self).__name__}: {name} is {value:g}, but must be {words}")

    # Steps.

    def _update(self, share: Share, group: "dict[str, Any]", scale: float) -> lib.Update:
        share.check()
        gradient = share.gradient()
        local = local_of(share.parameter).detach()
        if not local.is_contiguous():
            original, local = local, local.contiguous()
            self._copies[share.index] = (original, local)
        with self._counting:
            self._keep[share.index] = [gradient, local]
            self._kept_bytes += gradient.nbytes
        entry = self.state[share.parameter]
        entry.add_kinds(self._moments(group))
        entry.steps += 1
        self._has_stepped = True
        return lib.Update(parameter=local.data_ptr() + share.begin * local.itemsize,
                          gradient=gradient.data_ptr() + share.begin * gradient.itemsize,
                          gradient_type=TYPES[gradient.dtype], step=entry.steps, tensor=share.index,
                          gradient_scale=-scale if group.get("maximize") else scale,
                          **self._hyperparameters(group, entry.steps))

    def _begin(self, shares: "list[tuple[Share, dict[str, Any]]]", scale: float = 1.0) -> None:
        assert self._engine is not None
        steps, counted = [self.state[share.parameter].steps for share, _ in shares], self._begun_elements
        had_stepped = self._has_stepped
        self._mark()
        try:
            with self._counting:  # another thread may wait for what is kept, and drop it: it has to have begun
                self._engine.begin([self._update(share, group, scale) for share, group in shares])
                self._begun_elements += sum(share.count for share, _ in shares)
        except BaseException as error:
            if isinstance(error, Exception) or not self._has_begun_more(counted):
                for (share, _), before in zip(shares, steps):
                    self._forget(share.index)
                    self._copies.pop(share.index, None)
                    self.state[share.parameter].steps = before
                self._has_stepped = had_stepped
            raise
        for share, _ in shares:
            torch.autograd.graph.increment_version(local_of(share.parameter))

    def _has_begun_more(self, counted: int) -> bool:
        """Whether the engine has begun updates of more than `counted` elements: Ctrl-C may come before the call that begins them, and
        behind it. Waits for them."""
        assert self._engine is not None
        self._engine.wait()
        self._begun_elements = self._engine.report().updated_elements
        return self._begun_elements != counted

    def _finish(self, index: int) -> None:
        """The update of that tensor has been waited for."""
        original, values = self._copies.pop(index, (None, None))
        if original is not None:
            original.copy_(values)
        elif self._overlap == "forward":  # autograd refuses a graph that has read it since the update began
            torch.autograd.graph.increment_version(self._keep[index][1])
        self._forget(index)

    def _forget(self, index: int) -> None:
        with self._counting:
            if index in self._keep:
                self._kept_bytes -= self._keep.pop(index)[0].nbytes

    @_of_original
    @torch.no_grad()
    def synchronize(self) -> None:
        """Returns when every parameter has its new value. Only overlap="forward" and gradients="backward" ever need it."""
        with self._counting:
            if self._keep:
                assert self._engine is not None
                self._engine.wait()
                for index in list(self._keep):
                    self._finish(index)
                self._engine.log_notes()

    @torch.no_grad()
    def step(self, closure: "Optional[Callable[[], Any]]" = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._engine is not None
        if self._gradients == "backward":
            self._step_after_backward()
            # A parameter that was frozen when the hooks were made still has its gradient.
            is_all_taken = all(p.grad is None for group in self.param_groups for p in group["params"])
            if self.clip_norm is None and is_all_taken:
                self._begin_to_wait()
                return loss
        self.synchronize()
        self._engine.log_notes()  # of updates that the modules have waited for
        self._place_replaced()
        for p in self._without_state.values():
            if p.grad is not None:
                raise ArgumentError(f"a parameter of shape {tuple(p.shape)} has a gradient, but was frozen and of {p.dtype} on {p.device} "
                                    "when the optimizer was made, so it has no state. Convert it to fp32, bf16 or fp16, and make a new "
                                    "optimizer for it")
        shares = [(self._shares[id(p)], group) for group in self.param_groups for p in group["params"] if id(p) in self._shares]
        for group in self.param_groups:
            self._check_group(group)
        if self._group:
            self._group.agree_on_gradients([share for share, _ in shares])
            if not self._has_stepped:
                self._agree_on_values()
                self._group.warn_of_trainer()
        shares = [(share, group) for share, group in shares if share.parameter.grad is not None]
        for share, _ in shares:  # all, before the first is updated
            share.check()
            share.placed_gradient()
        scale = self._clip([share.parameter.grad for share, _ in shares])
        for bunch in [shares] if self._overlap == "forward" else _bunches(shares):
            self._begin(bunch, scale)
            if self._copies and self._overlap != "forward":
                self.synchronize()
        if self._gradients == "backward":
            for share, _ in shares:
                share.parameter.grad = None
        if self._overlap == "forward":
            self._begin_to_wait()
            return loss
        self.synchronize()
        if self._group:
            self._gather([share for share, _ in shares])
        self._engine.log_notes()
        return loss

    def _clip(self, gradients: "list[Any]") -> float:
        """Returns the factor for the gradients; in fp32 the same bits as torch's clip_grad_norm_, where torch clips."""
        if self.clip_norm is None or not gradients:
            return 1.0
        norm = total_norm(gradients)
        self.gradient_norm = float(norm)
        if not math.isfinite(self.gradient_norm):
            why = ("though each of these is finite: its square is beyond fp32, as in torch's clip_grad_norm_. Divide the loss"
                   if are_finite(gradients) else "so they cannot be clipped")
            raise NonFiniteError(f"the norm of the gradients is {self.gradient_norm}, {why}; nothing was updated. zero_grad() forgets them")
        return float(torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0))

    def _agree_on_values(self) -> None:
        """Before the first step: ranks that are not replicas would overwrite each other's parameters."""
        assert self._group is not None
        found = sums_of_bits([share.parameter for share in self._shares.values()])
        self._group.agree(found, "the values of parameters in the first step()")

    def _gather(self, shares: "list[Share]") -> None:
        assert self._group is not None
        flats, copies = [], []
        for share in shares:
            local = local_of(share.parameter).detach()
            flat = local.contiguous().view(-1)
            flats.append(flat)
            if not local.is_contiguous():
                copies.append((local, flat))
        self._group.gather(flats)
        for local, flat in copies:
            local.copy_(flat.view(local.shape))

    # gradients="backward"

    def _take_in_backward(self) -> None:
        self._step_supports_amp_scaling = True
        self._remove_hooks()
        take = guards.GradientHook(self)
        self._hooks = [p.register_post_accumulate_grad_hook(take) for group in self.param_groups for p in group["params"]
                         if p.requires_grad]
        guards.own((p for group in self.param_groups for p in group["params"]), self)

    def _group_of(self, p: torch.Tensor) -> "Optional[dict[str, Any]]":
        """The group that has it; None if none has it any more. Programs may replace groups between two steps."""
        with self._counting:
            if not self._taken or len(self._grouped) != len(self.param_groups) or any(
                    one is not other for one, other in zip(self._grouped, self.param_groups)):
                self._grouped = list(self.param_groups)
                self._group_of_id = {id(q): group for group in self.param_groups for q in group["params"]}
        return self._group_of_id.get(id(p))

    def take(self, p: torch.Tensor) -> None:
        """For guards.py: a parameter has its gradient."""
        share, group = self._shares.get(id(p)), self._group_of(p)
        if share is None or group is None:  # taken out of param_groups: as in torch, its gradient is not used
            return
        if id(p) in self._taken:
            p.grad = None  # or step() would use it, too
            raise ArgumentError(f"{share.name} has got a second gradient before step(); with gradients=\"backward\" the "
                                "first is used already, and the second is dropped. Accumulate with gradients=\"step\"")
        with torch.no_grad():
            self._wait_for([share.index])  # of the step before, with overlap="forward"
        if self.clip_norm is None:
            with torch.no_grad():
                self._begin([(share, group)])
        else:
            self._held[id(p)] = (p, p.grad)
        self._taken.add(id(p))
        p.grad = None
        with torch.no_grad(), self._counting:
            while self._kept_bytes > GRADIENT_BYTES and len(self._keep) > 1:  # the newest runs beside the backward that goes on
                self._wait_for(list(self._keep)[:1])

    def _remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _step_after_backward(self) -> None:
        scaler = [self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__]
        if scaler:  # behind unscale_(), grad_scale is None
            raise ArgumentError("a GradScaler has scaled gradients that gradients=\"backward\" has used already; use "
                                "gradients=\"step\" with it, or bf16 without it")
        self._require_not_written()
        if self._overlap != "forward":
            self.synchronize()
        self._taken.clear()
        for p, gradient in self._held.values():
            p.grad = gradient
        self._held.clear()
        assert self._engine is not None
        self._engine.log_notes()

    def _require_not_written(self) -> None:
        """Whatever writes p.grad behind the hook has a gradient of the same step."""
        written = [self._shares[id(p)].name for group in self.param_groups for p in group["params"]
                   if id(p) in self._taken and p.grad is not None]
        if written:
            does = "use both" if self.clip_norm is None else "drop one of them"
            raise ArgumentError(f"{written[0]}{f' and {len(written) - 1} others' if len(written) > 1 else ''}: p.grad has been written after "
                                f"backward() has brought the gradient of this step, and step() would {does}. With gradients=\"backward\" "
                                "nothing else may write it, such as DistributedDataParallel or an all-reduce of the program: use "
                                "gradients=\"step\". p.grad = None drops what was written")

    @torch.no_grad()
    def answer_clipping(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """For guards.py: answers clip_grad_norm_ with the norm of the gradients that wait for it. step() clips them."""
        if self.clip_norm is None or norm_type != 2 or max_norm not in (self.clip_norm, math.inf):
            wanted = "" if self.clip_norm is None else f", and wait for step(), which clips their norm of type 2 to clip_norm={self.clip_norm}"
            raise ArgumentError(f"clip_grad_norm_ with max_norm {max_norm} and norm_type {norm_type}: with gradients=\"backward\" the gradients "
                                f"have been taken in backward{wanted}; {self.how_to_clip}. transformers' Trainer asks for the norm in any "
                                "case: give the optimizer clip_norm=args.max_grad_norm")
        self._require_not_written()
        found = [self._held[id(p)][1] if id(p) in self._held else p.grad for group in self.param_groups for p in group["params"]]
        gradients = [gradient for gradient in found if gradient is not None]
        norm = total_norm(gradients) if gradients else torch.zeros(())
        if error_if_nonfinite and not math.isfinite(float(norm)):
            raise NonFiniteError("the norm of the gradients is not finite, so they cannot be clipped; optimizer.zero_grad() drops them, and "
                                 "error_if_nonfinite=False leaves them to step()")
        return norm

    def answer_zeroing(self, module: nn.Module) -> None:
        """For guards.py: module.zero_grad() was called, which forgets gradients that wait for their norm, too."""
        zeroed = {id(parameter) for parameter in module.parameters()}
        self._require_unused(zeroed)
        for key in zeroed & set(self._held):
            del self._held[key]
            self._taken.discard(key)

    def _require_unused(self, zeroed: "set[int]") -> None:
        """`zeroed`: ids of parameters whose gradients a program wants to be forgotten."""
        if self.clip_norm is not None:
            return
        used = next((share.name for key, share in self._shares.items() if key in zeroed and key in self._taken), None)
        if used is not None:
            raise ArgumentError(f"zero_grad() between backward() and step(): with gradients=\"backward\" the gradient of {used} has been "
                                "used already, so it cannot be dropped; step() ends this step. Use gradients=\"step\" where a step may "
                                "be dropped, or where the loss of another model goes through this one. With clip_norm=, gradients wait "
                                "for step(), too")

    @torch.no_grad()
    def answer_leaving(self) -> None:
        """For guards.py: another optimizer has these parameters from now on. Updates under way end before that, and it gets the gradients
        that wait for their norm, as in torch."""
        self.synchronize()
        for p, gradient in self._held.values():
            p.grad = gradient
        self._held.clear()
        self._taken.clear()

    def answer_wrapping(self, processes: Optional[int]) -> None:
        """For guards.py: the model was given to DistributedDataParallel, or runs in it, which needs the gradients that this takes."""
        raise ArgumentError("DistributedDataParallel around a model whose optimizer has gradients=\"backward\": the gradients "
                            "would be taken before their mean is there; use gradients=\"step\"")

    # overlap="forward"

    def _wait_in_forward(self, modules: nn.Module) -> None:
        for module in modules.modules():
            self._read[module] = Parameters.wait_in(module, self)
            wait = Waits(self, module, DetachedOptimizer._wait_for_module)
            self._module_hooks += [module.register_forward_pre_hook(wait, prepend=True),
                                   module.register_state_dict_pre_hook(Waits(self, module)),
                                   module.register_load_state_dict_pre_hook(Waits(self, module))]

    def _begin_to_wait(self) -> None:
        """A step has ended whose updates run on: modules that begin wait for them. This itself waits for parameters of others, such as
        a second model's, which have no such hooks."""
        if self._overlap == "forward":
            self._called_before, self._called, self._has_others = self._called, set(), True
            waited = {id(p) for module in self._read for p in module._parameters.values()}
            self._wait_for([share.index for key, share in self._shares.items() if key not in waited])

    @torch.no_grad()
    def _wait_for_module(self, module: nn.Module) -> None:
        """Waits for the parameters of a module that begins. The first one that begins also waits for parameters of modules that did not
        run in the step before, as those of a ParameterList or of a module whose weight others read."""
        own = self._of_module.get(module)
        if own is None:
            own = self._of_module[module] = [self._shares[id(p)].index for p in module.parameters(recurse=is_of_torch(module))
                                             if id(p) in self._shares]
        self._called.update(own)
        if not self._keep:
            self._end_marking(module)
            return
        if self._has_others:
            self._has_others = False
            self._wait_for([index for index in self._keep if index not in self._called_before])
        self._wait_for(own)
        self._end_marking(module)
        if not self._keep:
            assert self._engine is not None
            self._engine.log_notes()

    @torch.no_grad()
    def wait_for_read(self, parameters: Parameters) -> None:
        """For waits.py: waits for a module's own parameters, of which one is read, as by a module that runs before it."""
        self._is_marked = False
        self._wait_for([self._shares[id(p)].index for p in parameters.values() if id(p) in self._shares])
        parameters.end(self)

    def _mark(self) -> None:
        """Updates begin: from now on the modules' parameters wait where they are read."""
        if not self._is_marked:
            self._is_marked = True
            for parameters in self._read.values():
                if parameters is not None:
                    parameters.begin(self)

    def _end_marking(self, module: nn.Module) -> None:
        """A read of `module`'s own parameters needs no wait now. So what torch.compile makes of its forward has none in it."""
        parameters = self._read.get(module)
        if parameters is not None and parameters.is_pending and parameters.end(self):
            self._is_marked = False

    def _wait_for(self, indices: "list[int]") -> None:
        assert self._engine is not None
        with self._counting:
            for index in indices:
                if index in self._keep:
                    self._engine.wait(index)
                    self._finish(index)

    # The rest of torch's interface.

    @_of_original
    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:  # an update may be reading what would be set to zero
            self.synchronize()
        if self._gradients == "backward":
            self._require_unused({id(p) for group in self.param_groups for p in group["params"]})
            self._held.clear()
            if self.clip_norm is not None:
                self._taken.clear()
        super().zero_grad(set_to_none)

    @_of_original
    def state_dict(self) -> "dict[str, Any]":
        """torch's format, with all of the state in memory; `master` beside 16-bit parameters. As in torch, there is none before the first
        update. Where the state is sharded over a process group, or parameters are DTensors, every rank has to call it."""
        self.synchronize()
        self._place_replaced()
        result = super().state_dict()
        with self._group.together() if self._group and result["state"] else contextlib.nullcontext():
            result["state"] = {key: dict(entry) for key, entry in result["state"].items()}
        return result

    @_of_original
    @torch.no_grad()
    def load_state_dict(self, state_dict: "dict[str, Any]") -> None:
        """Takes what state_dict() gave, or torch's optimizer of the same name."""
        if UPDATES in state_dict:
            raise ArgumentError("this state_dict is of an optimizer that offload() has returned, and has no moments; "
                                "optimizer.save(folder) and offload(restore=...) keep all of that training's state")
        self.synchronize()
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved = copy.deepcopy(state_dict["param_groups"])  # the program goes on changing its own, such as an lr that is a tensor
        self._place_replaced()
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("loaded state dict has param_groups of "
                             f"{[len(group['params']) for group in saved]} parameters, the optimizer of "
                             f"{[len(group['params']) for group in self.param_groups]}")
        keys = chain.from_iterable(group["params"] for group in saved)
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        values = {p: state_dict["state"].get(key, {}) for key, p in zip(keys, parameters) if id(p) not in self._without_state}
        for other in saved:  # all is checked before anything is changed
            self._check_group(other)
        for p, given in values.items():
            self.state[p].check(given)
        for group, other in zip(self.param_groups, saved):
            group.update({key: value for key, value in other.items() if key not in ("params", "param_names")})
            for p in group["params"]:
                if p in values:
                    self.state[p].add_kinds(self._moments(group))
                    self.state[p].load(values[p])
        self._has_loaded = any(values.values())
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @property
    def report(self) -> lib.OptimizerReport:
        """Bytes moved and elements updated since the optimizer was made, and what its plan takes."""
        assert self._engine is not None
        return self._engine.report()

    @_of_original
    def close(self) -> None:
        """Finishes what is under way, and gives memory and storage back. The optimizer cannot be used any more; the parameters can be
        given to another one."""
        if self._engine is None:
            return
        try:
            self.synchronize()
            self._engine.close()
        finally:  # behind a failed transfer, too, which every call reports
            self._engine.destroy()  # stops what is under way
            self._keep.clear()
            self._copies.clear()
            self._held.clear()
            self._kept_bytes = 0
            self._remove_hooks()
            for hook in self._module_hooks:
                hook.remove()
            for module in self._read:
                Parameters.end_in(module, self)
            guards.disown((p for group in self.param_groups for p in group["params"]), self)

    def __del__(self) -> None:
        """Updates under way use tensors that this object keeps."""
        if getattr(self, "_keep", None):
            with contextlib.suppress(SluiceError):
                self.synchronize()

    def __reduce__(self) -> Any:
        raise OPTIMIZER_NOT_COPIED

    def __deepcopy__(self, memo: Any) -> Any:
        raise OPTIMIZER_NOT_COPIED
