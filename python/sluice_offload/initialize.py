"""DeepSpeed's face: `initialize` and the engine that it returns.

    engine, optimizer, loader, scheduler = sluice_offload.initialize(model=model, config="ds_config.json")
    loss = engine(batch); engine.backward(loss); engine.step()
"""

import base64
import io
import json
import logging
import os
import pathlib
from typing import Any, Iterable, Mapping, Optional

import torch
from torch import nn

from .deepspeed import add_keys, convert_buffers, leave_checkpoints, read_any_config
from .described import describe
from .engine import Config, names_type
from .errors import ArgumentError
from .files import replace_file
from .offload import offload
from .optimizer import OffloadOptimizer
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
    options: `units`, `values`, `buffers`, `storage`, `resume`, `device` of offload(). The `buffers` keep their type.
    Raises what offload() raises; the model is as before then.
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
    settings, is_deepspeed = read_any_config(given, auto)
    add_keys(settings, sluice or {}, "initialize(): sluice=")
    if is_deepspeed:
        leave_checkpoints(settings)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer([p for p in model.parameters() if p.requires_grad] if model_parameters is None
                              else model_parameters)
    elif optimizer is None and model_parameters is not None:
        units = _units_of(model, settings, options)
        _take_groups(settings, model, model_parameters, is_deepspeed, units)
    has_schedule = names_schedule(settings, is_deepspeed)
    if has_schedule and (optimizer is not None or lr_scheduler is not None):
        raise ArgumentError("the config has a schedule of the learning rate, which is for the config's own optimizer, and "
                            f"{'optimizer' if lr_scheduler is None else 'lr_scheduler'}= is given, too; leave one of them out")
    if hasattr(lr_scheduler, "step"):
        require_rates_alone(lr_scheduler)
    ours = offload(model, settings, optimizer=optimizer, **options)
    rates = [group["lr"] for group in ours.param_groups]
    if is_deepspeed:
        convert_buffers(model, settings)
    if lr_scheduler is None:
        scheduler: Any = ConfigSchedule(ours, settings) if has_schedule else None
    elif callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        scheduler = lr_scheduler(ours)
    else:
        scheduler = lr_scheduler
        rebind_scheduler(scheduler, ours)
    if ours.resumed_step is not None:  # a new scheduler begins with the rates of its first step
        for group, rate in zip(ours.param_groups, rates):
            group["lr"] = rate
    engine = OffloadEngine(model, ours, scheduler, settings)
    loader = None
    if training_data is not None:
        sampler = None
        if engine.world_size > 1:  # each rank has its part of the data
            sampler = torch.utils.data.DistributedSampler(training_data, engine.world_size, engine.global_rank)
        loader = torch.utils.data.DataLoader(training_data, batch_size=engine.train_micro_batch_size_per_gpu(),
                                             shuffle=sampler is None, sampler=sampler, collate_fn=collate_fn)
    engine.training_dataloader = loader
    return engine, ours, loader, scheduler


def _units_of(model: nn.Module, settings: "dict[str, Any]", options: "dict[str, Any]",
              ) -> Optional[Units]:
    """Those that offload() will find with these options. None for a model that it will refuse."""
    if hasattr(model, "_sluice"):
        return None
    kinds = {key: tuple(options[key]) for key in ("units", "announced", "local")
             if options.get(key) is not None}
    options.update(kinds)  # an iterator can be read only once
    return find_units(model, keeps_types=not names_type(settings), **kinds)


def _take_groups(settings: "dict[str, Any]", model: nn.Module, parameters: "Iterable[Any]",
                 is_deepspeed: bool, units: Optional[Units]) -> None:
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
    for made, group in zip(groups, given):
        if "lr" in group:
            rate = float(section.get("learning_rate", 0))
            if rate <= 0:
                raise ArgumentError("model_parameters: a group has an lr of its own, so the config has to name the learning "
                                    "rate of the others: optimizer.learning_rate, or optimizer.params.lr in a DeepSpeed file")
            made["learning_rate_factor"] = float(group["lr"]) / rate
        if "weight_decay" in group or is_deepspeed:
            made["weight_decay"] = float(group.get("weight_decay", section.get("weight_decay", 0)))
    section["groups"] = groups


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
        self._loss = 0.0  # of the step's micro-batches so far, for `sluice top`
        if optimizer.resumed_step is not None:
            self._take(optimizer.application)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    # --- The step.

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Adds the micro-batch's gradients. The loss is divided by the micro-batches of a step, and multiplied with the loss
        scale of fp16. Returns the loss as it was divided."""
        if scale_wrt_gas and self.gradient_accumulation_steps() > 1:
            loss = loss / self.gradient_accumulation_steps()
        (loss * self.optimizer.loss_scale if self.optimizer.scales_loss else loss).backward(retain_graph=retain_graph)
        self._loss += float(loss.detach())
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether step() updates, now."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From here on the program says when step() updates."""
        self._boundary = bool(is_boundary)

    def step(self) -> None:
        """At the end of each micro-batch. At a boundary it updates and moves the scheduler."""
        boundary = self.is_gradient_accumulation_boundary()
        self._was_applied = False
        if boundary:
            self._update()
        self.micro_steps += 1
        batch = self._batch.get("sequences")
        self.global_samples += (int(batch) if batch else 0) * self.world_size

    def _update(self) -> None:
        before = self.optimizer.report
        self.optimizer.show(loss=self._loss)
        self._loss = 0.0
        if self.optimizer._is_durable:  # the commit of this step is to find the counts behind it
            self.optimizer.application = self._text({}, steps=1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        report = self.optimizer.report
        if report is before:
            raise ArgumentError("step() without a backward() before it: there are no gradients")
        self._was_applied = not report.is_skipped  # type: ignore[union-attr]
        self.global_steps += 1
        if not self._was_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def was_step_applied(self) -> bool:
        """Whether the last step() updated; not where a gradient was not finite, or within accumulation."""
        return self._was_applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._loss = 0.0
        self.optimizer.zero_grad()

    # --- What programs ask.

    def gradient_accumulation_steps(self) -> int:
        return int(self._batch.get("micro_batches", 1))

    def train_micro_batch_size_per_gpu(self) -> int:
        if "sequences" not in self._batch:
            raise ArgumentError("the config does not say how large a micro-batch is; write batch.sequences, or "
                                "train_micro_batch_size_per_gpu in a DeepSpeed file")
        return int(self._batch["sequences"])

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.world_size

    def get_lr(self) -> "list[float]":
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def get_global_grad_norm(self) -> Optional[float]:
        """The norm of the last update's gradient before clipping; None before the first update."""
        return None if self.optimizer.report is None else self.optimizer.gradient_norm

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
        report = self.optimizer.report
        return 1.0 if report is None else float(report.loss_scale)

    @property
    def config(self) -> "dict[str, Any]":
        """Sluice's config of this training."""
        return self._settings

    # --- Saving.

    def module_state_dict(self) -> "dict[str, Any]":
        return self.module.state_dict()

    def _text(self, client: "Mapping[str, Any]", steps: int = 0) -> str:
        client_state = _as_text(dict(client))
        try:
            _from_text(client_state)
        except Exception as error:
            raise ArgumentError(f"client_state has to be of numbers, texts, lists, dictionaries and tensors: {error}") from error
        scheduler: Any = getattr(self.lr_scheduler, "state_dict", dict)()
        micro = self.micro_steps + steps
        batch = int(self._batch.get("sequences", 0))
        return json.dumps({"global_steps": self.global_steps + steps, "micro_steps": micro, "skipped_steps": self.skipped_steps,
                           "global_samples": micro * batch * self.world_size, "scheduler": packed(scheduler), "scheduler_steps": steps,
                           "client_state": client_state})

    def _take(self, text: str) -> "dict[str, Any]":
        """The counts, the scheduler and the client's state from a checkpoint's text; returns the last."""
        try:
            saved = json.loads(text)
            for name in ("global_steps", "micro_steps", "skipped_steps", "global_samples"):
                setattr(self, name, int(saved[name]))
            client = saved["client_state"]
        except (ValueError, KeyError, TypeError):
            logger.warning("the checkpoint is not of an engine of initialize(), so that its counts and client_state are empty")
            return {}
        if self.lr_scheduler is not None and saved["scheduler"]:
            self.lr_scheduler.load_state_dict(unpacked(saved["scheduler"]))
            for _ in range(saved["scheduler_steps"]):
                self.lr_scheduler.step()
        return _from_text(client)

    def save_checkpoint(self, save_dir: "str | os.PathLike[str]", tag: "str | int | None" = None,
                        client_state: "Optional[dict[str, Any]]" = None, save_latest: bool = True) -> bool:
        """Writes all of the training's state into save_dir/tag, by default global_stepN, and its name into save_dir/latest.
        The checkpoint appears whole or not at all."""
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
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


def _as_text(state: "dict[str, Any]") -> str:
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def _from_text(text: str) -> "dict[str, Any]":
    return dict(torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True))
