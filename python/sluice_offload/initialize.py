"""DeepSpeed's face: `initialize` and the engine that it returns.

    engine, optimizer, loader, scheduler = sluice_offload.initialize(model=model, config="ds_config.json")
    loss = engine(batch); engine.backward(loss); engine.step()
"""

import base64
import io
import json
import logging
import math
import os
import pathlib
from typing import Any, Iterable, Mapping, Optional

import torch
from torch import nn

from .deepspeed import ResolvedConfig, add_keys, leave_checkpoints, read_any_config
from .described import describe
from .engine import Config, config_of_text, names_type
from .errors import ArgumentError
from .files import replace_file
from .offload import offload
from .optimizer import OffloadOptimizer
from .processes import rank_and_size
from .program_keys import engine_part
from .schedule import ConfigSchedule, names_schedule
from .schedulers import packed, rebind_scheduler, require_rates_alone, unpacked
from .units import Units, find_units

logger = logging.getLogger("sluice_offload")
_LATEST = "latest"


def initialize(args: Any = None, model: Optional[nn.Module] = None, optimizer: Any = None, model_parameters: Any = None,
               training_data: Any = None, lr_scheduler: Any = None, collate_fn: Any = None,
               config: "Config | str | os.PathLike[str] | None" = None, *, mpu: Any = None, dist_init_required: Any = None,
               config_params: "Config | str | os.PathLike[str] | None" = None, auto: "Mapping[str, Any] | None" = None,
               sluice: "Mapping[str, Any] | None" = None, **options: Any) -> "tuple[OffloadEngine, OffloadOptimizer, Any, Any]":
    """DeepSpeed's `initialize` over `offload`: returns the engine, its optimizer, a loader of `training_data` and the
    scheduler, the last two None where there are none.

    config: a dictionary or file of DeepSpeed's (docs/deepspeed.md) or of Sluice's; also args.deepspeed_config.
    optimizer: a new torch optimizer, or a function of parameters that makes one; by default the config's.
    model_parameters: all that require a gradient, or param_groups of them, for the config's optimizer.
    lr_scheduler: a scheduler of `optimizer`, or a function of an optimizer; by default the config's.
    auto: what "auto" in a DeepSpeed config stands for, by the names of `sluice config import`'s options: {"batch": 4}.
    sluice: keys of Sluice's config beside a DeepSpeed config, which has none for them: {"memory": {"device": "2GiB"}}. They are
        added to a config of Sluice's as well. A key that is there has to mean the same.
    options: those of offload(), such as `units`, `values`, `buffers`, `storage`, `restore`, `resume`, `accept_changes` and `device`,
        but for `lr`. With `restore` and `resume`, counts and schedule go on as well.
    Raises what offload() raises; the model is as before then. Where the function `lr_scheduler` raises, or the scheduler takes no state
    of that of the checkpoint, which both need the optimizer of the offloaded model, the model cannot be used any more.
    """
    if model is None:
        raise ArgumentError("initialize(): model= is missing")
    if mpu is not None:
        raise ArgumentError("initialize(): mpu= is for tensor and pipeline parallelism; Sluice's ranks share data alone")
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ArgumentError("initialize(): config= is missing: a dictionary, or the path of a file")
    if "lr" in options:
        raise ArgumentError("initialize() takes no lr: write optimizer.learning_rate, or optimizer.params.lr in a DeepSpeed config")
    settings, resolved = read_any_config(given, auto, has_optimizer=optimizer is not None)
    add_keys(settings, sluice or {}, "initialize(): sluice=")
    settings = config_of_text(json.dumps(settings).encode(), "config")  # offload() sees a part of it alone
    if resolved is not None:
        leave_checkpoints(settings)
        _warn_of_monitors(resolved.monitors())
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad] if model_parameters is None
                              else model_parameters)
    elif optimizer is None and model_parameters is not None:
        units = _units_of(model, settings, options)
        _take_groups(settings, model, model_parameters, resolved, units)
    has_schedule = names_schedule(settings, resolved)
    if has_schedule and (optimizer is not None or lr_scheduler is not None):
        raise ArgumentError("the config has a schedule of the learning rate, which is for the config's own optimizer, and "
                            f"{'optimizer' if lr_scheduler is None else 'lr_scheduler'}= is given, too; leave one of them out")
    if hasattr(lr_scheduler, "step"):
        require_rates_alone(lr_scheduler)
    loader = None if training_data is None else _loader(
        training_data, options.get("process_group"), batch_size=_micro_batch(settings), collate_fn=collate_fn,
        drop_last=resolved is not None and resolved.is_on("dataloader_drop_last"))
    ours = offload(model, engine_part(settings), optimizer=optimizer, **options)
    try:
        rates = [group["lr"] for group in ours.param_groups]
        is_deepspeeds = resolved is not None and resolved.has_scheduler
        scheduler = ConfigSchedule(ours, settings, is_deepspeeds) if has_schedule else _take_scheduler(lr_scheduler, ours)
        goes_on = ours.resumed_step is not None or options.get("restore") is not None
        if goes_on:  # a new scheduler begins with the rates of its first step
            for group, rate in zip(ours.param_groups, rates):
                group["lr"] = rate
        engine = OffloadEngine(model, ours, scheduler, settings)
        if goes_on:
            engine._take(ours.application)
    except BaseException:
        ours.close()
        raise
    if resolved is not None:
        engine._casts_inputs = engine.fp16_enabled() and resolved.is_on("fp16.auto_cast")
    engine.training_dataloader = loader
    return engine, ours, loader, scheduler


def _micro_batch(settings: "dict[str, Any]") -> int:
    batch = settings.get("batch", {})
    if "sequences" not in batch:
        raise ArgumentError("the config does not say how large a micro-batch is; write batch.sequences, or "
                            "train_micro_batch_size_per_gpu in a DeepSpeed file")
    return int(batch["sequences"])


def _warn_of_monitors(names: "list[str]") -> None:
    if names:
        listed = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
        logger.warning("the DeepSpeed config turns on %s, for which initialize() writes nothing; sluice_offload.log_steps(optimizer, log) "
                       "calls a function of yours, such as wandb.log, with the figures of each step, and sluice_offload.trace(path) "
                       "records times", listed)


def _loader(data: Any, group: Any, **options: Any) -> Any:
    """Batches of `data`, of which each rank of `group` has its part. One rank has DeepSpeed's order, too, which torch's generator does
    not change. Data that only come one after the other divide and shuffle themselves, as torch has it."""
    if isinstance(data, torch.utils.data.IterableDataset):
        return torch.utils.data.DataLoader(data, **options)
    rank, size = rank_and_size(group)
    sampler: "torch.utils.data.DistributedSampler[Any]" = torch.utils.data.DistributedSampler(data, size, rank)
    if not sampler.total_size:  # an epoch would have no step
        raise ArgumentError("initialize(): training_data= has no entries; give some, or leave it out")
    return torch.utils.data.DataLoader(data, sampler=sampler, **options)


def _take_scheduler(given: Any, optimizer: OffloadOptimizer) -> Any:
    """The program's own, for `optimizer`; None where it has none."""
    if callable(given) and not hasattr(given, "step"):
        return given(optimizer)
    if given is not None:
        rebind_scheduler(given, optimizer)
    return given


def _units_of(model: nn.Module, settings: "dict[str, Any]", options: "dict[str, Any]",
              ) -> Optional[Units]:
    """Those that offload() will find with these options. None for a model that it will refuse."""
    if hasattr(model, "_sluice"):
        return None
    kinds = {key: tuple(options[key]) for key in ("units", "announced", "local")
             if options.get(key) is not None}
    options.update(kinds)  # an iterator can be read only once
    return find_units(model, keeps_types=not names_type(settings), leases=options.get("leases"), **kinds)


def _take_groups(settings: "dict[str, Any]", model: nn.Module, parameters: "Iterable[Any]",
                 resolved: Optional[ResolvedConfig], units: Optional[Units]) -> None:
    """Takes decays and rates from the param_groups of model_parameters."""
    section = settings.setdefault("optimizer", {})
    entries = [entry[1] if isinstance(entry, tuple) else entry for entry in parameters]
    given = [dict(entry) for entry in entries if isinstance(entry, Mapping)] or [{"params": entries}]
    probe = torch.optim.AdamW([{"params": list(group["params"])} for group in given])
    described = describe(probe, model, units)  # or an error of coverage
    groups = [{"tensors": group["tensors"]} for group in described["groups"]]
    for group in given:
        unknown = set(group) - {"params", "lr", "weight_decay", "name"}
        if unknown:
            raise ArgumentError(f"model_parameters: of a group only lr and weight_decay can be given, not {sorted(unknown)}; the config's "
                                "optimizer has everything else, for all groups")
    if not any(set(group) & {"lr", "weight_decay"} for group in given):
        return
    has_rates = any("lr" in group for group in given)
    takes_rates = has_rates and _takes_rates(section, resolved)
    if has_rates and not takes_rates:
        logger.warning("model_parameters: the lr of a group has no effect, since the DeepSpeed config's scheduler gives all groups one "
                       "rate, as in DeepSpeed")
    for made, group in zip(groups, given):
        if "lr" in group and takes_rates:
            rate = float(section.get("learning_rate", 0))
            if rate <= 0:
                raise ArgumentError("model_parameters: a group has an lr of its own, so the config has to name the learning "
                                    "rate of the others: optimizer.learning_rate, or optimizer.params.lr in a DeepSpeed file")
            made["learning_rate_factor"] = float(group["lr"]) / rate
        if "weight_decay" in group or resolved is not None:
            made["weight_decay"] = float(group.get("weight_decay", section.get("weight_decay", 0)))
    section["groups"] = groups


def _takes_rates(section: "dict[str, Any]", resolved: Optional[ResolvedConfig]) -> bool:
    """Whether groups keep rates of their own. DeepSpeed multiplies them in WarmupCosineLR, and WarmupLR ends at them where
    it names no warmup_max_lr. All others replace them."""
    if resolved is None or not resolved.has_scheduler or section["schedule"] == "cosine":
        return True
    if section["schedule"] != "constant" or "scheduler.params.warmup_max_lr" in resolved.values:
        return False
    if section.get("warmup_start", 0) != 0:
        raise ArgumentError("model_parameters: a group has an lr of its own, and the scheduler a warmup_min_lr, from which DeepSpeed warms "
                            "up each group by another line; write warmup_min_lr 0, or leave the lr of the groups out")
    return True


class OffloadEngine(nn.Module):
    """The model and its training, by DeepSpeed's names. `module` is the model, `optimizer` what offload() has returned."""

    def __init__(self, model: nn.Module, optimizer: OffloadOptimizer, scheduler: Any, settings: "dict[str, Any]") -> None:
        super().__init__()
        self.module = model
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self.training_dataloader: Any = None
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        world = optimizer._engine.world
        self.device = optimizer._engine.place.device
        self.local_rank, self.global_rank, self.world_size = \
            (0, 0, 1) if world is None else (world.local_rank, world.rank, world.size)
        self._settings = settings
        self._batch = settings.get("batch", {})
        self._boundary: Optional[bool] = None
        self._was_applied = False
        self._casts_inputs = False  # to fp16, in forward()
        self._since_update = 0  # micro-batches, which micro_steps does not tell where gradient_accumulation_steps has changed
        self._loss = 0.0  # of the step's micro-batches so far, for `sluice top`
        self._scale = _first_scale(settings) if optimizer.scales_loss else 1.0  # of the loss in the last backward()
        self._in_backward = False  # in backward(), not in a loss's own
        self._is_scaled = False  # the backward that runs began at a loss of scale()
        self._came_past = False  # a gradient of this step, in a backward that knows neither
        self._walk = optimizer._walk
        self._walk.notice_gradient = self._notice_gradient

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            self._is_scaled = False  # which a backward that raised has left
        return self.module(*(_half(args) if self._casts_inputs else args), **kwargs)

    # --- The step.

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Adds the micro-batch's gradients. The loss is divided by the micro-batches of a step, and multiplied with the loss
        scale of fp16. Returns the loss as it was divided."""
        if scale_wrt_gas and self.gradient_accumulation_steps() > 1:
            loss = loss / self.gradient_accumulation_steps()
        if self.optimizer.scales_loss:
            self._scale = self.optimizer.loss_scale
        self._in_backward = True
        try:
            (loss * self._scale if self.optimizer.scales_loss else loss).backward(retain_graph=retain_graph)
        finally:
            self._in_backward = False
        self._loss += float(loss.detach())
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss for a backward() of the program's own, engine.scale(loss).backward(): multiplied with the loss scale of fp16.
        Its gradient is divided by the micro-batches of a step, as in DeepSpeed."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise ArgumentError("scale() takes a loss: a tensor of one number, with a gradient")
        if self.optimizer.scales_loss:
            self._scale = self.optimizer.loss_scale
        scaled, number = loss * self._scale, float(loss.detach())

        def divide(gradient: torch.Tensor) -> torch.Tensor:
            if self._in_backward:  # which has divided
                return gradient
            self._is_scaled = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_scaled)  # behind backwards inside of this one, too
            self._loss += number / self.gradient_accumulation_steps()
            return gradient / self.gradient_accumulation_steps()
        scaled.register_hook(divide)
        return scaled

    def _end_scaled(self) -> None:
        self._is_scaled = False

    def _notice_gradient(self) -> None:
        """Sees which gradients come from a backward that neither backward() nor scale() began."""
        if not self._walk.has_gradients:  # the first of a step
            self._came_past = False
        self._came_past |= not (self._in_backward or self._is_scaled)

    def _require_own_backwards(self) -> None:
        """Raises where loss.backward() has made gradients that backward() would have divided or scaled. Otherwise both are equal."""
        count = self.gradient_accumulation_steps()
        if not self._came_past or not self._walk.has_gradients or (count == 1 and not self.optimizer.scales_loss):
            return
        missing = [f"divides the loss by the {count} micro-batches of a step"] if count > 1 else []
        if self.optimizer.scales_loss:
            missing.append(f"multiplies {'it' if missing else 'the loss'} with the loss scale, {self.optimizer.loss_scale:.10g}")
        raise ArgumentError(f"step(): this step has gradients of a loss.backward() without the engine, which {' and '.join(missing)}; call "
                            "engine.backward(loss) instead, or engine.scale(loss).backward(). engine.zero_grad() drops the gradients")

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether step() updates, now."""
        if self._boundary is not None:
            return self._boundary
        return (self._since_update + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From here on the program says when step() updates."""
        self._boundary = bool(is_boundary)

    def step(self) -> None:
        """At the end of each micro-batch. At a boundary it updates and moves the scheduler."""
        self._require_own_backwards()
        boundary = self.is_gradient_accumulation_boundary()
        self._was_applied = False
        if boundary:
            self._update()
        self._since_update = 0 if boundary else self._since_update + 1
        self.micro_steps += 1

    def _samples(self) -> int:
        """Those of an update, over all ranks, however often step() is called for it; 0 where the config does not say it."""
        return int(self._batch.get("sequences") or 0) * self.gradient_accumulation_steps() * self.world_size

    def _update(self) -> None:
        before = self.optimizer.report
        self.optimizer.show(loss=self._loss)
        self._loss = 0.0
        if self.optimizer._is_durable:  # the commit of this step is to find the counts behind it
            self.optimizer.application = self._text({}, steps=1)
        try:
            self.optimizer.step()
        except BaseException:
            self._since_update = 0  # the gradients are gone
            raise
        self.optimizer.zero_grad()
        report = self.optimizer.report
        if report is before:
            raise ArgumentError("step() without a backward() before it: there are no gradients")
        self._was_applied = not report.is_skipped  # type: ignore[union-attr]
        self.global_steps += 1
        self.global_samples += self._samples()
        if not self._was_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def was_step_applied(self) -> bool:
        """Whether the last step() updated; not where a gradient was not finite, or within accumulation."""
        return self._was_applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._since_update > 0:
            never = "" if self._boundary is not None else " A program that calls it in front of every micro-batch never gets an update, " \
                f"which needs {self.gradient_accumulation_steps()} of them."
            logger.warning("zero_grad(): the gradients of the step's %d micro-batches are gone, and it begins anew.%s It is not needed: "
                           "step() drops the gradients behind an update", self._since_update, never)
        self._loss = 0.0
        self._since_update = 0
        self.optimizer.zero_grad()

    # --- What programs ask.

    def gradient_accumulation_steps(self) -> int:
        return int(self._batch.get("micro_batches", 1))

    def train_micro_batch_size_per_gpu(self) -> int:
        return _micro_batch(self._settings)

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.world_size

    def get_lr(self) -> "list[float]":
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_global_grad_norm(self) -> Optional[float]:
        """The norm of the last update's gradient before clipping; inf where the step was skipped, since its gradient was not finite; None
        before the first update."""
        report = self.optimizer.report
        if report is None:
            return None
        return math.inf if report.is_skipped else self.optimizer.gradient_norm

    def gradient_clipping(self) -> float:
        return self.optimizer.clip_norm

    def zero_optimization_stage(self) -> int:
        return int(self._settings.get("sharding", {}).get("stage", 0))

    def bfloat16_enabled(self) -> bool:
        return self.optimizer._engine.dtype == torch.bfloat16

    def fp16_enabled(self) -> bool:
        return self.optimizer._engine.dtype == torch.float16

    @property
    def cur_scale(self) -> float:
        """The factor of the loss in the last backward(); before the first, that with which training begins."""
        return self._scale

    @property
    def config(self) -> "dict[str, Any]":
        """Sluice's config of this training."""
        return self._settings

    # --- Saving.

    def module_state_dict(self) -> "dict[str, Any]":
        return self.module.state_dict()

    def _text(self, client: "Mapping[str, Any]", steps: int = 0) -> str:
        client_state = _client_text(client)
        scheduler: Any = getattr(self.lr_scheduler, "state_dict", dict)()
        return json.dumps({"global_steps": self.global_steps + steps, "micro_steps": self.micro_steps + steps,
                           "skipped_steps": self.skipped_steps, "global_samples": self.global_samples + steps * self._samples(),
                           "scheduler": packed(scheduler), "scheduler_steps": steps, "loss_scale": self._scale,
                           "client_state": client_state})

    def _take(self, text: str) -> "dict[str, Any]":
        """The counts, the scheduler and the client's state from a checkpoint's text; returns the last."""
        self._since_update = 0
        try:
            saved = json.loads(text)
            for name in ("global_steps", "micro_steps", "skipped_steps", "global_samples"):
                setattr(self, name, int(saved[name]))
            client = saved["client_state"]
        except (ValueError, KeyError, TypeError):
            self._begin_at(self.optimizer._engine.applied_step())
            return {}
        self._scale = float(saved.get("loss_scale", self._scale))
        if self.lr_scheduler is not None and saved["scheduler"]:
            try:
                self.lr_scheduler.load_state_dict(unpacked(saved["scheduler"]))
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                raise ArgumentError(f"{type(self.lr_scheduler).__name__} cannot go on from the scheduler of the checkpoint, whose state has "
                                    f"{', '.join(saved['scheduler'])}: {error!r}; give the kind of scheduler with which it was "
                                    "saved") from error
            for _ in range(saved["scheduler_steps"]):
                self.lr_scheduler.step()
        return _from_text(client)

    def _begin_at(self, updates: int) -> None:
        """Goes on behind so many updates of another program, as in a universal checkpoint of DeepSpeed's."""
        self.global_steps, self.micro_steps = updates, updates * self.gradient_accumulation_steps()
        self.skipped_steps, self.global_samples = 0, updates * self._samples()
        if isinstance(self.lr_scheduler, ConfigSchedule):
            self.lr_scheduler.go_to(updates)
        scheduler = "" if self.lr_scheduler is None or isinstance(self.lr_scheduler, ConfigSchedule) else " The scheduler is as before."
        logger.warning("the checkpoint is not of an engine of initialize(), so that counts go on from its %d updates, and client_state is "
                       "empty.%s", updates, scheduler)

    def save_checkpoint(self, save_dir: "str | os.PathLike[str]", tag: "str | int | None" = None,
                        client_state: "Optional[dict[str, Any]]" = None, save_latest: bool = True) -> bool:
        """Writes all of the training's state into save_dir/tag, by default global_stepN, and its name into save_dir/latest.
        The checkpoint appears whole or not at all."""
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        if name == _LATEST:
            raise ArgumentError(f"save_checkpoint(): tag: \"{_LATEST}\" is the name of the file that names the last checkpoint")
        self.optimizer.save(os.path.join(save_dir, name), keep=1, application=self._text(client_state or {}))

        def write_latest() -> None:
            if not save_latest:
                return
            replace_file(pathlib.Path(save_dir) / _LATEST, lambda file: file.write(name.encode()))

        if self.optimizer._engine.world is None:
            write_latest()
        else:
            self.optimizer._engine.world.on_first_rank(write_latest)
        return True

    def load_checkpoint(self, load_dir: "str | os.PathLike[str]", tag: "str | int | None" = None,
                        load_module_strict: bool = True, load_optimizer_states: bool = True,
                        load_lr_scheduler_states: bool = True, load_module_only: bool = False,
                        ) -> "tuple[Optional[str], Optional[dict[str, Any]]]":
        """Goes on from a checkpoint, by default the one that load_dir/latest names: returns its path and its client_state,
        or (None, None) where there is no load_dir/latest. Between steps."""
        if load_module_only or not load_optimizer_states or not load_lr_scheduler_states:
            raise ArgumentError("load_checkpoint() takes all of a checkpoint; for its values alone make a new engine with "
                                "values=sluice_offload.SafetensorsValues(...)")
        if not load_module_strict:
            raise ArgumentError("load_checkpoint(): load_module_strict=False would leave parameters as they are that the checkpoint lacks, "
                                "and their moments. Leave it out; a new engine takes values of some parameters by "
                                "sluice_offload.load_safetensors(model, file, strict=False)")
        if tag is None:
            path = os.path.join(load_dir, _LATEST)
            if not os.path.isfile(path):
                logger.warning("%s is not there; nothing was loaded", path)
                return None, None
            with open(path, encoding="utf-8") as file:
                tag = file.read().strip()
        folder = os.path.join(load_dir, str(tag))
        self.optimizer.load_checkpoint(os.path.join(folder, _LATEST))
        return folder, self._take(self.optimizer.application)

    def destroy(self) -> None:
        """Brings the last update home and frees the engine's memory."""
        self.optimizer.close()


def _first_scale(settings: "dict[str, Any]") -> float:
    section = settings.get("precision", {}).get("loss_scale", {})
    return float(section.get("static", 0) or 2.0 ** section.get("initial_power", 16))


def _half(inputs: Any) -> Any:
    """`inputs` with their floating tensors as fp16."""
    if isinstance(inputs, torch.Tensor):
        return inputs.half() if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {name: _half(one) for name, one in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        halves = [_half(one) for one in inputs]
        return type(inputs)(*halves) if hasattr(inputs, "_fields") else type(inputs)(halves)  # a named tuple takes them one by one
    return inputs


def _client_text(client: "Mapping[str, Any]") -> str:
    """The program's own state, once it is known to come back."""
    state = dict(client)
    try:
        text = _as_text(state)
        _from_text(text)
        return text
    except Exception as error:
        for name, value in state.items():
            try:
                _from_text(_as_text({name: value}))
            except Exception:  # pylint: disable=broad-except  # torch's own words name no remedy that holds here
                raise ArgumentError(f"client_state has to be of numbers, texts, lists, dictionaries and tensors, and \"{name}\" is or has "
                                    f"another type: {type(value).__module__}.{type(value).__qualname__}") from None
        raise ArgumentError(f"client_state cannot be saved: {error}") from error


def _as_text(state: "dict[str, Any]") -> str:
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def _from_text(text: str) -> "dict[str, Any]":
    return dict(torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True))
