"""torch's face of the engine: an Optimizer whose `step` is the engine's update."""

import contextlib
import hashlib
import json
import math
import os
import re
import sys
import weakref
from collections import defaultdict
from operator import is_
from typing import Any, Callable, Mapping, Optional

import torch

from .activations import ActivationStore
from .buffers import BUFFER_CHARACTERS_MAX, COMMIT_CHARACTERS_MAX, BufferText, SavedBuffers, kept_buffers, matching_buffers, take_saved
from .engine import Engine, logger
from .errors import NOT_COPIED, ArgumentError, NonFiniteError, in_a_step
from .hooks import Walk
from .library import BACKWARD, StepReport
from .units import Member, Units, opaque_types

_OPAQUE_TEXT_MAX = 64 << 10
UPDATES = "sluice_updates"  # in a state_dict
_SKIPS = 3  # in a row that have a warning
_LR_ALONE = ("only the lr of a group can change; an lr of 0 freezes the group's parameters for as long as it is set. Make the groups that "
             "the whole training needs before offload()")
_FIXED = ("betas", "eps", "weight_decay", "momentum")
# The engine's, for comparison with those of a checkpoint.
_DEFAULTS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 1.0, "clip_epsilon": 0.0}
_UNWRITTEN = ("optimizer.clip_epsilon",)  # by older versions: such a checkpoint does not say what they were


def _digest(opaque: "dict[str, list[Any]]") -> str:
    return hashlib.sha256(json.dumps(opaque, sort_keys=True).encode()).hexdigest()


def _rates_of(optimizer: torch.optim.Optimizer) -> "list[float]":
    return [float(group["lr"]) for group in optimizer.param_groups]


def _of_schedulers(optimizer: torch.optim.Optimizer, group: "dict[str, Any]") -> "dict[str, Any]":
    """The entries of a group that are no hyperparameters, such as the initial_lr of schedulers."""
    return {key: value for key, value in group.items() if key not in optimizer.defaults and key not in ("params", "param_names")}


def _hyperparameters_of(section: "dict[str, Any]") -> "dict[str, float]":
    """The numbers of the config's `optimizer` that change the update, by the names of their keys."""
    numbers = {f"optimizer.{key}": float(section.get(key, default)) for key, default in _DEFAULTS.items()}
    for i, group in enumerate(section.get("groups", [])):
        numbers |= {f"optimizer.groups[{i}].{key}": float(group[key]) for key in ("learning_rate_factor", "weight_decay") if key in group}
    return numbers


def _has_text(value: Any) -> bool:
    """Whether JSON can hold what a program keeps in a param_group. Anything else stays the program's."""
    try:
        json.dumps(value, default=float)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


class _Groups:
    """Which of the config's groups a parameter is in: the first of which a pattern is its name. '*' is any characters, '?' one."""

    def __init__(self, groups: "list[dict[str, Any]]") -> None:
        self._names: "dict[str, int]" = {}  # patterns without either, of which a given torch optimizer makes one per parameter
        self._patterns: "list[tuple[re.Pattern[str], int]]" = []
        for i, group in enumerate(groups):
            for pattern in group["tensors"]:
                if "*" not in pattern and "?" not in pattern:
                    self._names.setdefault(pattern, i)
                    continue
                translated = "".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern)
                self._patterns.append((re.compile(translated, re.DOTALL), i))

    def place_of(self, member: Member) -> int:
        """Counts from 1; 0 is the group of all others."""
        found = self._names.get(member.name, sys.maxsize)
        for pattern, i in self._patterns:
            if i >= found:
                break
            if pattern.fullmatch(member.name):
                return i + 1
        return 0 if found == sys.maxsize else found + 1


class _NoState(defaultdict[Any, Any]):
    """The `state` of an optimizer whose moments are the engine's. It is empty, for which torch.distributed.checkpoint.state_dict asks before
    it gives all parameters gradients of 0, sets all rates to 0 and takes a step, to have one made."""

    def __bool__(self) -> bool:
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise ArgumentError("torch.distributed.checkpoint.state_dict cannot read or set an offloaded model's moments, which are not in the "
                                "optimizer's state; optimizer.save(folder) keeps all of a training's state, and "
                                "optimizer.load_checkpoint(folder) or offload(restore=...) goes back to it. get_model_state_dict(model) "
                                "has the parameters alone")
        return len(self) > 0


class OffloadOptimizer(torch.optim.Optimizer):
    """The optimizer that `offload` returns. Its `param_groups` are one of all other parameters, then the config's
    `optimizer.groups`; `lr` of each is read at every step; the config fixes everything else. `report` has the figures
    of the last step."""

    _step_supports_amp_scaling = True  # so that a GradScaler calls step(), which says what is wrong

    leaves_parameters = False  # in the model, for guards.py
    how_to_clip = "step() clips to optimizer.clip_norm of the config, and clip_grad_norm_() returns the norm"  # for guards.py

    def __init__(self, units: Units, engine: Engine, config: "dict[str, Any]", lr: float) -> None:
        self._engine = engine
        self._opaque = opaque_types(units)
        digest = _digest(self._opaque)  # in place of a long text, since commits have room for 1 MiB
        self._opaque_text: Any = self._opaque if len(json.dumps(self._opaque)) <= _OPAQUE_TEXT_MAX else digest
        self._walk: Optional[Walk] = None
        self.report: Optional[StepReport] = None
        self._updates_before = 0  # that its state had seen when it got its values
        # The text of the checkpoint or commit that training went on from; from then on, the text that the next commits
        # keep.
        self.application = ""
        self.resumed_step: Optional[int] = None  # of the durable store's commit, if training went on from one
        self._skips = 0  # steps in a row, where no scale moves by skipping them
        self._is_durable = bool(config.get("storage", {}).get("state", {}).get("name", ""))
        self.scales_loss = config["precision"].get("loss_scale", {}).get("static", 1) != 1
        self._has_moving_scale = config["precision"].get("loss_scale", {}).get("static", 1) == 0
        self._settings = {key: value for key, value in config["optimizer"].items() if key != "groups"}
        self.clip_norm = float(config["optimizer"].get("clip_norm", 1.0))
        patterns = config["optimizer"].get("groups", [])
        factors = [group.get("learning_rate_factor", 1.0) for group in [{}, *patterns]]
        self._hyperparameters = _hyperparameters_of(config["optimizer"])
        self._given: "Optional[weakref.ref[torch.optim.Optimizer]]" = None  # the torch optimizer that offload() was given
        self._given_rates: "list[float]" = []  # that one's, as they were when this one took them
        groups: "list[dict[str, Any]]" = [
            {"params": [], "lr": lr * factor} for factor in factors]
        places = _Groups(patterns)
        for unit in units.units:
            for member in unit.members:
                if not unit.is_frozen:
                    groups[places.place_of(member)]["params"].append(member.parameter)
        # torch refuses a first group without parameters; otherwise engine and torch count alike.
        self._has_rest = bool(groups[0]["params"])
        self.factors = factors if self._has_rest else factors[1:]  # of the config's learning rate, by group
        super().__init__(groups if self._has_rest else groups[1:], {"lr": lr})
        self.state = _NoState(dict)
        self._fixed = [self._others(group) for group in self.param_groups]
        self._own = [tuple(group["params"]) for group in self.param_groups]

    @staticmethod
    def _others(group: "dict[str, Any]") -> "dict[str, Any]":
        return {key: group[key] for key in _FIXED if key in group}

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nThe engine's optimizer: {json.dumps(self._settings)}; Sluice's defaults for the rest"

    def bind(self, walk: Walk) -> None:
        self._walk = walk
        first, self._buffers = getattr(self, "_buffers", None), BufferText(walk.model, walk.units)
        self._buffers._has_warned = first is not None and first._has_warned
        self._updates_before = self._engine.applied_step()

    def keep_first_text(self, model: torch.nn.Module, units: Units, values: Any = None) -> None:
        """Gives the first commit of a new store its text, for a start after a crash right behind it. Before the model has the buffers that
        the mapping `values` has."""
        self._buffers = BufferText(_filled(model, units, values if isinstance(values, Mapping) else {}), None)  # type: ignore[arg-type]
        self._engine.set_application(self._text(self.application, COMMIT_CHARACTERS_MAX))

    def keep_text_of(self, folder: "str | os.PathLike[str]", model: torch.nn.Module, units: Units) -> None:
        """The same for a store that begins with a checkpoint. The engine takes the checkpoint's text, unless there is none, or a commit has
        no room for it."""
        saved = self._text_in(folder)
        if not isinstance(saved, dict):
            self.keep_first_text(model, units)
            return
        text = json.dumps({key: value for key, value in saved.items() if key != "buffers"})
        if len(text) <= COMMIT_CHARACTERS_MAX:
            self._engine.set_application(text)

    def follow(self, given: torch.optim.Optimizer) -> None:
        """Takes the rates of the torch optimizer that offload() was given, and what schedulers keep in its groups."""
        for group, theirs in zip(self.param_groups, given.param_groups):
            group["lr"] = theirs["lr"]
            group.update(_of_schedulers(given, theirs))
        self._given, self._given_rates = weakref.ref(given), _rates_of(given)

    def follow_changes(self, last: "Optional[list[Any]]" = None) -> None:
        """Takes what a scheduler has set in the given optimizer since follow(): the scheduler sets this one's rates from now on.
        `last`: the scheduler's last rates, which those of the given one are not where its state_dict was loaded."""
        given = None if self._given is None else self._given()
        if given is None:
            return
        now = _rates_of(given)
        rates = now if last is None or len(last) != len(now) else [float(rate) for rate in last]
        for i, (group, theirs) in enumerate(zip(self.param_groups, given.param_groups)):
            if now[i] != self._given_rates[i]:
                group["lr"] = rates[i]
            for key, value in _of_schedulers(given, theirs).items():
                group.setdefault(key, value)
        self._given_rates = now

    def _require_followed(self) -> None:
        """Raises where something moves the rates of the given optimizer, as a scheduler that was made with it, and not these."""
        given = None if self._given is None else self._given()
        if given is None:
            return
        now = _rates_of(given)
        if now == self._given_rates:
            return
        for group, rate, before in zip(self.param_groups, now, self._given_rates):
            if rate not in (before, float(group["lr"])):
                raise ArgumentError(f"the {type(given).__name__} that offload() was given has the learning rate {rate} and had {before} "
                                    f"then: a scheduler moves it, and it trains nothing. This optimizer's is {float(group['lr'])}; "
                                    "sluice_offload.rebind_scheduler(scheduler, optimizer) has the scheduler set that")

    def rates(self) -> "tuple[float, list[float]]":
        """The learning rate, and those of the config's groups."""
        if len(self.param_groups) != len(self._own):
            raise ArgumentError(f"there are {len(self.param_groups)} param_groups, and offload() made {len(self._own)}: {_LR_ALONE}")
        rates = [float(group["lr"]) for group in self.param_groups]
        return (rates[0], rates[1:]) if self._has_rest else (rates[0], rates)

    def _require_own_groups(self) -> None:
        """Raises where a group is another than in offload(): the engine has the groups from then."""
        self.rates()  # which refuses another number of them
        for i, (group, own, fixed) in enumerate(zip(self.param_groups, self._own, self._fixed)):
            now = group["params"]
            if len(now) != len(own) or not all(map(is_, now, own)):  # `==` of lists would compare values
                raise ArgumentError(f"param_groups[{i}] holds {len(now)} parameters, and not the {len(own)} that offload() put there, which the "
                                    f"engine trains as that group: {_LR_ALONE}")
            if self._others(group) != fixed:
                raise ArgumentError(f"param_groups[{i}] says {self._others(group)}, but only the lr of a group can change; the "
                                    "config's optimizer.groups fixes the rest")

    @property
    def gradient_norm(self) -> float:
        """The norm of the last step, before clipping; 0 before the first. That of a step which is not over comes from
        torch.nn.utils.clip_grad_norm_."""
        return 0.0 if self.report is None else float(self.report.gradient_norm)

    @property
    def loss_scale(self) -> float:
        """The factor for the loss before its backward(), where the config has a precision.loss_scale; otherwise 1. It belongs
        to the step: read it after the forward."""
        if not self.scales_loss:
            return 1.0
        if self._walk is None or not self._walk.has_step():
            raise ArgumentError("loss_scale belongs to the step that a forward begins; read it behind the forward")
        return self._engine.loss_scale()

    @property
    def activations(self) -> Optional[ActivationStore]:
        """With `activations` on storage, or in host memory beside a GPU, what has gone there and back: written_bytes, read_bytes,
        used_bytes_max. Its hooks() is a context for programs that call parts of the model instead of the model."""
        return None if self._walk is None else self._walk.activations

    def announce(self, *modules: torch.nn.Module) -> None:
        """In the model's forward: the step will use these modules, whose classes offload(announced=...) has named, next and in this
        order. The engine begins to read them, beside computation. Modules that are announced and not used cost their reading."""
        assert self._walk is not None
        coming = self._walk.announcements
        if coming is None:
            raise ArgumentError("announce(): the model has no announced units; offload(announced=...) or local=... names the classes of "
                                "those")
        if self._walk.active is None:
            raise ArgumentError("announce() belongs into the forward of the offloaded model, behind its router")
        indices = []
        for module in modules:
            found = self._walk.units.announced_in(module)
            if not found:
                raise ArgumentError(f"announce(): this {type(module).__name__} is no announced unit; offload(announced=...) or local=... "
                                    "names the classes of those")
            indices += found
        is_backward = torch._C._current_graph_task_id() != -1  # a checkpoint computes a part of forward again
        coming.announce(indices, BACKWARD if is_backward else self._walk.active)

    def answer_clipping(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Answers clip_grad_norm_ for these parameters: nothing is clipped, since step() clips to the same bound. Returns the norm of
        the gradients that have come in this step, or without any that of the last step. All processes ask together."""
        if norm_type != 2:
            raise ArgumentError(f"clip_grad_norm_ with norm_type {norm_type}: the engine has the gradients of an offloaded model, and "
                                "knows and clips their norm of type 2")
        if max_norm not in (self.clip_norm, math.inf):
            raise ArgumentError(f"clip_grad_norm_ with max_norm {max_norm}: the engine has the gradients of an offloaded "
                                f"model and clips them itself, to optimizer.clip_norm, which is {self.clip_norm}; set it "
                                "in the config, and leave this call out or give it the same number")
        assert self._walk is not None
        norm = self._walk.gradient_norm()
        if error_if_nonfinite and norm is not None and not math.isfinite(norm):
            raise NonFiniteError("the norm of the gradients is not finite, so they cannot be clipped; optimizer.zero_grad() drops "
                                 "them, and error_if_nonfinite=False leaves them to step()")
        return torch.tensor(self.gradient_norm if norm is None else norm, device=self._engine.place.device)

    def answer_wrapping(self, processes: Optional[int]) -> None:
        """Answers DistributedDataParallel around the model, over so many processes; None: over those that a launcher knows. There
        is nothing to do, since the engine takes the mean over the same ones."""
        world = self._engine.world
        known = 1 if world is None else world.size
        if processes not in (None, known):
            raise ArgumentError(f"DistributedDataParallel over {processes} processes around a model that is offloaded on {known}: "
                                "the engine takes the mean gradient, over its own processes. Call "
                                "torch.distributed.init_process_group() before offload(), and leave process_group out")

    def show(self, *, loss: "float | torch.Tensor | None" = None, tokens: Optional[int] = None, steps: Optional[int] = None,
             flops_per_token: Optional[float] = None, peak_flops: Optional[float] = None) -> None:
        """Tells `sluice top` and log_steps() what only the program knows: the loss of the step that the next step() ends; the tokens of
        each step over all processes, and the number of steps at the end; the operations of the model's products per token, and
        the peak rate of all processes together, for TFLOP/s and MFU. The loss counts for one step, everything else until it is
        given again. Costs a few microseconds."""
        figures: "dict[str, float]" = {}
        for name, value in (("tokens", tokens), ("steps", steps)):
            if value is not None:
                if not 0 <= value < 1 << 64:
                    raise ArgumentError(f"show(): {name} is {value}; it has to be a whole number from 0 on")
                figures[name] = int(value)
        for name, number in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops), ("loss", loss)):
            if number is not None:
                figures[name] = float(number.detach() if isinstance(number, torch.Tensor) else number)
        self._engine.show(**figures)

    def _show_loss(self, loss: Any) -> None:
        """Takes the result of a closure for the loss, if it is a number."""
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            self._engine.show(loss=float(loss))

    @torch.no_grad()
    def step(self, closure: "Optional[Callable[[], Any]]" = None) -> Any:
        """The update, if there are gradients. The parameters that it makes are those of the next forward."""
        scaler = [self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__]
        if scaler:  # behind unscale_(), grad_scale is None
            raise ArgumentError("a GradScaler cannot see the gradients of an offloaded model, which the engine has; leave it out. bf16 "
                                "needs none, and for fp16 the engine scales: precision.loss_scale in the config, and "
                                "optimizer.loss_scale as the factor of the loss")
        self._engine.require_open()
        self._require_followed()
        loss = None
        self._opt_called = True  # what torch's schedulers ask for
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_own_groups()
        assert self._walk is not None
        if self._is_durable:
            self._engine.set_application(self._text(self.application, COMMIT_CHARACTERS_MAX))
        if loss is not None:
            self._show_loss(loss)
        try:
            report = self._walk.finish()
        finally:  # behind an interrupt, too, which may have come when the engine had updated
            self.report = self._engine.last_report()
        if report is not None:
            self._count_skips(bool(report.is_skipped))
        return loss

    def _updates(self) -> int:
        """The number of updates that the engine's state has seen."""
        report = self._engine.last_report()
        return self._updates_before if report is None else int(report.step)

    def _count_skips(self, is_skipped: bool) -> None:
        self._skips = self._skips + 1 if is_skipped and not self._has_moving_scale else 0
        if self._skips == _SKIPS:
            logger.warning("%d steps in a row were skipped, since their gradients were not finite (optimizer.non_finite is \"skip\"), and "
                           "nothing was trained in them. optimizer.non_finite \"stop\" names a parameter and the reasons", _SKIPS)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients that no step() has used are forgotten: the step is abandoned. So is one whose forward an interrupt has ended."""
        assert self._walk is not None
        is_interrupted = False
        if torch._C._current_graph_task_id() == -1:
            self._walk.stop_keeping()
            is_interrupted = self._walk.depth > 0
        if self._walk.has_gradients or self._walk.in_backward or is_interrupted:
            self._walk.abandon()
        self._walk.drop_gradients()

    def answer_zeroing(self, module: torch.nn.Module) -> None:
        """Answers module.zero_grad(): all gradients are forgotten, or none, since the engine adds them up by unit."""
        assert self._walk is not None
        zeroed = {id(parameter) for parameter in module.parameters()}
        if all(id(parameter) in zeroed for group in self.param_groups for parameter in group["params"]):
            self.zero_grad()
        elif self._walk.has_gradients:
            raise ArgumentError(f"zero_grad() of a {type(module).__name__}, which is a part of an offloaded model: the engine can "
                                "forget all gradients of a step, optimizer.zero_grad(), and not those of a part. Offload the parts "
                                "one by one, or call requires_grad_(False) on what shall get none from this backward()")

    def add_param_group(self, param_group: "dict[str, Any]") -> None:
        if self._walk is not None:
            raise ArgumentError("parameters cannot be added to an offloaded model; optimizer.groups of the config names "
                                "groups beforehand")
        super().add_param_group(param_group)

    def save(self, root: "str | os.PathLike[str]", keep: int = 0, application: str = "") -> str:
        """Writes all of the training's state, parameters included, as a checkpoint into a folder of its own below `root`, and
        returns its path. It appears whole or not at all. The newest `keep` checkpoints stay; 0: all. `application` is
        the text that the program needs to go on, such as a position in its data; offload(restore=...) gives it back.
        Between steps."""
        self._require_no_step("save")
        return self._engine.save(root, keep, self._text(application))

    def begin_save(self, root: "str | os.PathLike[str]", keep: int = 0, application: str = "") -> None:
        """Begins a checkpoint as save() writes it, and returns; training goes on beside it. It has the state of the last
        step to the bit. Needs {"memory": {"save_buffers": 2}} in the config. Between steps."""
        self._require_no_step("begin_save")
        self._engine.begin_save(root, keep, self._text(application))

    def poll_save(self) -> Optional[str]:
        """The path of the checkpoint of begin_save(), if it has appeared whole since; otherwise None. Each path comes once, here
        or from finish_save(). Polling itself finishes nothing: a later step, finish_save(), begin_save(), save(), close() or
        change of values does, so that a loop that only polls never ends, and a program that ends without close() or
        finish_save() loses the checkpoint. A save that has failed raises here, in finish_save(), begin_save() or the next step."""
        return self._engine.saved(waits=False)

    def finish_save(self) -> Optional[str]:
        """Waits for the save under way, and returns its path; None if there is none. Between steps."""
        self._require_no_step("finish_save")
        return self._engine.saved(waits=True)

    def _require_no_step(self, call: str, changes: bool = False) -> None:
        if self._walk is None:
            return
        self._walk.end_idle_step(changes)
        if self._walk.active is not None:
            raise in_a_step(f"{call}()")

    @property
    def committed_step(self) -> Optional[int]:
        """With a durable store, the last step whose commit is on the drive; otherwise None."""
        return self._engine.committed_step()

    def commit(self) -> None:
        """Commits the last step to the durable store, due or not; close() does that, too. Between steps."""
        self._require_no_step("commit")
        self._engine.commit_now()

    def _text(self, application: str, characters_max: int = BUFFER_CHARACTERS_MAX) -> str:
        """Returns the text that goes with a checkpoint or a commit. Buffers have the room that the rest leaves."""
        groups = [{key: value for key, value in group.items() if key != "params" and _has_text(value)} for group in self.param_groups]
        content = {"param_groups": groups, "application": application, "hyperparameters": self._hyperparameters,
                   **({"opaque": self._opaque_text} if self._opaque else {})}
        text = json.dumps(content, default=float)  # of tensors and of numpy's numbers
        buffers = self._buffers.entries(characters_max - len(text))
        return f'{text[:-1]}, "buffers": {json.dumps(buffers)}}}' if buffers else text

    def take_over(self, text: str) -> SavedBuffers:
        """Takes the learning rates of a checkpoint from the text that came with it, and returns the buffers. Other hyperparameters
        stay the program's, and where those of the checkpoint differ, a warning names them."""
        try:
            saved = json.loads(text)
            groups, application = saved["param_groups"], saved["application"]
        except (ValueError, KeyError, TypeError):
            saved, groups, application = {}, None, text  # written by another program than this package
        self._require_same_opaque(saved)
        self._require_same_groups(groups)
        for group, values in zip(self.param_groups, groups or []):
            group.update(values)
        self._warn_of_hyperparameters(saved.get("hyperparameters") if isinstance(saved, dict) else None)
        self.application = application
        self._opt_called = True  # schedulers that are stepped to this place need no step() before
        return _buffers_of(saved)

    def _warn_of_hyperparameters(self, then: Any) -> None:
        now, world = self._hyperparameters, self._engine.world
        if not isinstance(then, dict) or (world is not None and world.rank > 0):
            return
        then = {**{key: now[key] for key in _UNWRITTEN}, **then}
        changed = [f"{key} is {now.get(key, 'not set')} and was {then.get(key, 'not set')}" for key in {**then, **now}
                   if then.get(key) != now.get(key)]
        if changed:
            logger.warning("the checkpoint was saved with other hyperparameters, and training goes on with those of now: %s. The learning "
                           "rates in optimizer.param_groups are the checkpoint's", "; ".join(changed))

    def _require_same_opaque(self, saved: Any) -> None:
        """Raises ArgumentError where a checkpoint's text names another type or shape of an opaque tensor, whose bytes would mean
        other values here."""
        found = saved.get("opaque", {}) if isinstance(saved, dict) else {}
        if isinstance(found, str):
            if found != _digest(self._opaque):
                raise ArgumentError("the checkpoint has opaque tensors (quantized weights, buffers) of other types or shapes than the "
                                    "model, which keeps their bits; make the model as it was saved")
            return
        for name, (dtype, shape) in self._opaque.items():
            then = found.get(name, [dtype, shape])
            if then != [dtype, shape]:
                raise ArgumentError(f"the checkpoint has {name} as {then[0]} of shape {tuple(then[1])}, but the model as {dtype} of "
                                    f"shape {tuple(shape)}, and keeps its bits; make the model as it was saved")

    def _require_same_groups(self, saved: "Optional[list[Any]]") -> None:
        if saved is not None and len(saved) != len(self.param_groups):
            raise ArgumentError(f"the checkpoint has {len(saved)} param_groups, but the config's optimizer.groups make "
                                f"{len(self.param_groups)}; use the config that it was saved with")

    def _text_in(self, folder: "str | os.PathLike[str]") -> Any:
        """This process's text of a checkpoint, read; None where the engine says what is wrong with it, or another program wrote it."""
        try:
            with open(os.path.join(folder, "sluice_state.json"), encoding="utf-8") as file:
                texts = json.load(file)["application"]
            own = 0 if self._engine.world is None else self._engine.world.rank
            return json.loads(texts[own if own < len(texts) else 0])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return None

    def _check_text_of(self, folder: "str | os.PathLike[str]") -> None:
        """The same before anything is replaced, and for buffers of other shapes."""
        saved = self._text_in(folder)
        if saved is None:
            return
        self._require_same_opaque(saved)
        self._require_same_groups(saved.get("param_groups") if isinstance(saved, dict) else None)
        assert self._walk is not None
        matching_buffers(self._walk.model, _buffers_of(saved), self._walk.units)

    def state_dict(self) -> "dict[str, Any]":
        """The groups' learning rates, and the number of updates that the engine's state has seen. Moments are not in it."""
        self._engine.require_open()
        found = super().state_dict()
        found[UPDATES] = self._updates()
        return found

    def load_state_dict(self, state_dict: "dict[str, Any]") -> None:
        """Takes the groups' learning rates, as schedulers need them. Moments are not in it, so the engine has to have those of the
        same step. Raises ArgumentError if it has not, or if the dictionary has moments."""
        if state_dict.get("state"):
            raise ArgumentError("the moments of an offloaded model cannot be set from a state_dict; save() and "
                                "offload(restore=...) keep all of a training's state")
        made = self._updates()
        then = state_dict.get(UPDATES, made)
        if then != made:
            raise ArgumentError(f"this state_dict is of an optimizer that had made {then} updates, and "
                                f"this one has made {made}: the "
                                "moments of an offloaded model are not in a state_dict, and training would go on with others. "
                                "optimizer.save(folder) keeps all of a training's state, and optimizer.load_checkpoint(folder) or "
                                "offload(restore=...) goes back to it")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != UPDATES})
        self.state = _NoState(dict)

    def __reduce__(self) -> Any:
        raise NOT_COPIED

    def load_checkpoint(self, folder: "str | os.PathLike[str]", *, convert: bool = False) -> None:
        """Takes all of the state, learning rates included, from a checkpoint that save() has written, instead of what there
        is. `application` is its text then. `convert` takes one of another precision, with other moments or other frozen
        parameters, as in offload(). Between steps."""
        self._require_no_step("load_checkpoint", changes=True)
        if self._is_durable:
            raise ArgumentError("a durable store goes on from its own last commit, by resume=True; it cannot take a checkpoint")
        folder = os.path.realpath(folder)  # one checkpoint, also where a link such as `latest` is set anew meanwhile
        self._check_text_of(folder)
        text = self._engine.replace_state(folder, convert)
        self.report = None
        self._updates_before = self._engine.applied_step()
        assert self._walk is not None
        take_saved(self._walk.model, self.take_over(text), self._walk.units)

    def close(self) -> None:
        """Brings every update home and gives the engine's memory back. The model cannot be used any more. Refused while another thread
        uses the model or the optimizer."""
        self._engine.require_alone()
        try:
            if self._walk is not None:
                self._walk.abandon()
                if self._walk.activations is not None:
                    self._walk.activations.close()
        finally:
            self._engine.close()


# torch's schedulers patch step() to learn that it was called, and warn of an optimizer that they have not patched, such as one
# that takes the place of theirs.
OffloadOptimizer.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _filled(model: torch.nn.Module, units: Units, values: "Mapping[str, torch.Tensor]") -> torch.nn.Module:
    """A module that has the buffers of `model` under their names, with the values that take_buffers() will give them."""
    kept = kept_buffers(model, units)
    # Without room for all of them, a commit has none. Sparse ones are no part of it.
    fits = sum(buffer.nbytes for buffer in kept.values() if buffer.layout == torch.strided) <= COMMIT_CHARACTERS_MAX
    last = {id(buffer): name for name, buffer in kept.items() if fits and name in values}  # modules may share one
    filled = torch.nn.Module()
    for name, buffer in kept.items():
        is_plain = buffer.layout == torch.strided and not buffer.is_quantized
        filled._buffers[name] = values[last[id(buffer)]].to(buffer.dtype) if is_plain and id(buffer) in last else buffer
    return filled


def _buffers_of(saved: Any) -> SavedBuffers:
    """Those of a text that has been read; none where another program wrote it."""
    found = saved.get("buffers", {}) if isinstance(saved, dict) else {}
    return SavedBuffers(found if isinstance(found, dict) else {})
