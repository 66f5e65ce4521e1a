"""The Trainer of transformers with an offloaded model:

    from sluice_offload.transformers import Trainer
    trainer = Trainer(model=model, args=args, train_dataset=data, sluice={"placement": ...})  # or "ds_config.json"

The model computes where `args` say, on the CPU or a GPU, and stays on the CPU or the meta device until it is offloaded: it may be
larger than the GPU. The optimizer, its decay, learning rate and clipping follow `args`, as in transformers. Logs have the
gradient's norm of their own step; checkpoints hold all of the state, and resume_from_checkpoint goes on with the same bits, and
with the checkpoint's learning rates. Without this class a transformers.Trainer works too, with optimizers=(offload(...),
scheduler), but cannot resume.
"""

import copy
import inspect
import itertools
import os
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
import torch.distributed as dist
import transformers
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .deepspeed import DeepspeedConfig, add_keys, find_config, leave_checkpoints
from .described import KEYS
from .engine import Config, logger, require_no_store
from .errors import ArgumentError
from .files import load_safetensors
from .offload import offload
from .optimizer import OffloadOptimizer
from .program_keys import engine_part
from .schedule import ConfigSchedule
from .schedulers import rebind_scheduler, require_rates_alone

_NEEDED = "5.3"  # of transformers: the first whose create_optimizer() takes the model
_STATE = "sluice"  # in each checkpoint's folder
# The names, in messages about a DeepSpeed config, of the values that come from TrainingArguments.
_NAMES = {"batch": "args.per_device_train_batch_size", "micro_batches": "args.gradient_accumulation_steps",
          "lr": "args.learning_rate", "betas": "[args.adam_beta1, args.adam_beta2]", "eps": "args.adam_epsilon",
          "weight_decay": "args.weight_decay", "clip_norm": "args.max_grad_norm", "precision": "the type by args.bf16 and args.fp16",
          "steps": "the number of steps by args", "warmup_steps": "args.warmup_steps"}


def _require_new_enough(trainer: type) -> None:
    if "model" not in inspect.signature(trainer.create_optimizer).parameters:  # type: ignore[attr-defined]
        raise ImportError(f"sluice_offload.transformers needs transformers {_NEEDED} or newer, and {transformers.__version__} is "
                          f"installed: pip install \"transformers>={_NEEDED}\". With older ones, give transformers.Trainer "
                          "optimizers=(sluice_offload.offload(...), scheduler), which trains, and cannot resume")


_require_new_enough(transformers.Trainer)


def auto_values(args: "transformers.TrainingArguments", steps: Optional[int], model_config: Any) -> "dict[str, Any]":
    """The values for which "auto" in a DeepSpeed config stands, and with which the others have to agree, as in transformers."""
    values: "dict[str, Any]" = {
        "batch": args.per_device_train_batch_size, "micro_batches": args.gradient_accumulation_steps,
        "lr": float(args.learning_rate), "betas": [args.adam_beta1, args.adam_beta2], "eps": args.adam_epsilon,
        "weight_decay": float(args.weight_decay), "clip_norm": float(args.max_grad_norm or 0), "names": _NAMES,
        "precision": "bf16" if args.bf16 or args.bf16_full_eval else "fp16" if args.fp16 or args.fp16_full_eval else "fp32"}
    if steps is not None and steps > 0:
        values |= {"steps": steps, "warmup_steps": max(1, args.get_warmup_steps(steps))}
    for part in (model_config, getattr(model_config, "text_config", None)):
        size = getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or [0])
        if size:
            return values | {"hidden_size": int(size)}
    return values


def _inner(optimizer: Any) -> Any:
    """An optimizer without the wrapper that accelerate puts around it."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _keep_counts(model: Any) -> "Callable[[], None]":
    """From offload() on, tied weights are two parameters, which num_parameters() would count twice. Returns a function, to be called
    then, that has it answer as now."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft's
    if not isinstance(inner, transformers.PreTrainedModel):
        return lambda: None
    counts = {key: inner.num_parameters(*key) for key in itertools.product((False, True), repeat=2)}

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return counts[bool(only_trainable), bool(exclude_embeddings)]
    return lambda: setattr(inner, "num_parameters", num_parameters)


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a callback's method."""


def _save_together(callback: Any, device: torch.device) -> None:
    """SIGTERM comes to each process at a time of its own, and all of them save together: behind each update they agree on it."""
    save = callback.on_step_end

    def on_step_end(*args: Any, **kwargs: Any) -> None:
        has_come = torch.tensor(int(callback.jit_manager.is_checkpoint_requested), device=device)
        dist.all_reduce(has_come, dist.ReduceOp.MAX)
        if has_come.item():
            callback.jit_manager.is_checkpoint_requested = True
            save(*args, **kwargs)
    for name, method in (("on_step_begin", _does_nothing), ("on_step_end", on_step_end), ("on_epoch_end", _does_nothing)):
        setattr(callback, name, method)


class Trainer(transformers.Trainer):
    """transformers.Trainer. sluice: the config, or its file; also one for DeepSpeed, whose "auto" are what `args` say, and which
    must not contradict them (docs/deepspeed.md). sluice_keys: keys of Sluice for which DeepSpeed has none, such as
    {"memory": {"host": "8GiB"}}. sluice_units, sluice_buffers, sluice_leases: `units`, `buffers` and `leases` of offload()."""

    def __init__(self, *args: Any, sluice: "Config | str | os.PathLike[str] | None" = None, sluice_keys: "Mapping[str, Any] | None" = None,
                 sluice_units: "Sequence[type | str] | None" = None, sluice_buffers: "Sequence[str]" = (),
                 sluice_leases: Optional[int] = None, **kwargs: Any) -> None:
        if sluice is None:
            raise ArgumentError("Trainer(): sluice= is missing: the config that says where the state lives, such as "
                                "{\"placement\": {\"optimizer\": \"nvme\"}, \"storage\": {\"paths\": [\"/nvme\"]}}")
        self._sluice_given = find_config(sluice)
        self._sluice_keys = sluice_keys or {}
        self._sluice_options: "dict[str, Any]" = {"units": sluice_units, "buffers": sluice_buffers, "leases": sluice_leases}
        self._sluice_steps: Optional[int] = None  # of the whole training, where train() knows it
        self._sluice_schedule: "Optional[dict[str, Any]]" = None  # the config of a schedule that is not `args`'
        self._sluice: Optional[OffloadOptimizer] = None
        self._sluice_restore: Optional[str] = None
        self._sluice_weights: "Optional[dict[str, Any]]" = None  # while save_model() writes them
        self._sluice_stage = 3  # sharding.stage, as far as it is known
        for one in (self._sluice_given, self._sluice_keys):
            require_no_store({} if isinstance(one, DeepspeedConfig) else one, "Trainer()")
        super().__init__(*args, **kwargs)
        for callback in self.callback_handler.callbacks:  # that of args.enable_jit_checkpoint would save amid a step, too
            if getattr(callback, "jit_manager", None) is not None:
                setattr(callback, "on_pre_optimizer_step", _does_nothing)
                if self.args.world_size > 1:
                    _save_together(callback, self.args.device)
        if getattr(_inner(self.optimizer), "_is_durable", False):
            raise ArgumentError("Trainer(): the optimizer in optimizers= has a durable store, which goes on from its own commits and not "
                                "from the checkpoints of this Trainer; leave storage.state out of offload()'s config")
        if not isinstance(self._sluice_given, DeepspeedConfig):
            self._require_no_full_eval("fp32")
        if self.args.n_gpu > 1:
            raise ArgumentError(f"this process sees {self.args.n_gpu} GPUs, over which transformers would divide each batch by "
                                f"DataParallel; start a process for each, as torchrun --nproc_per_node={self.args.n_gpu} does, or set "
                                "CUDA_VISIBLE_DEVICES to one of them")

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """transformers moves the model as a whole; offload() takes it from where it is. accelerate moves one that is evaluated
        before."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._sluice_restore = None  # of a train() before that was refused
        return super().train(*args, **kwargs)

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        self._sluice_steps = max_steps
        return super()._prepare_for_training(max_steps, *args, **kwargs)

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model, as for each train() of hyperparameter_search(): the one before gives its memory back."""
        before, self._sluice = self._sluice, None
        if before is not None:
            before.close()
        return super().call_model_init(trial)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self._sluice_steps = num_training_steps
        super().create_optimizer_and_scheduler(num_training_steps)

    def _require_no_full_eval(self, precision: str) -> None:
        """Refuses evaluations for which transformers converts the model to another type than `precision`, that of its parameters."""
        for name in ("bf16", "fp16"):
            if getattr(self.args, f"{name}_full_eval") and name != precision:
                raise ArgumentError(f"args.{name}_full_eval is True: evaluations would convert the model to {name}, and an offloaded model "
                                    "keeps its type; leave it out. args.bf16 computes in bf16, in evaluations too")

    def _require_same_clipping(self, optimizer: OffloadOptimizer) -> None:
        bound = float(self.args.max_grad_norm or 0)
        if optimizer.clip_norm != bound:
            raise ArgumentError(f"the offloaded model's optimizer.clip_norm is {optimizer.clip_norm}, but args.max_grad_norm is "
                                f"{self.args.max_grad_norm}; give args.max_grad_norm={optimizer.clip_norm}, or give offload() a config "
                                f"with optimizer.clip_norm {bound}")

    def _take_offloaded(self, optimizer: OffloadOptimizer) -> torch.optim.Optimizer:
        """Goes on with an optimizer that the program, or another Trainer, has of offload()."""
        self._require_same_clipping(optimizer)
        if self.lr_scheduler is not None:
            rebind_scheduler(self.lr_scheduler, optimizer)
        self._sluice = optimizer
        if self._sluice_restore is not None:
            optimizer.load_checkpoint(self._sluice_restore)
        return self.optimizer

    def _require_new(self) -> None:
        """Raises for a model that is offloaded already, for Lion, which torch.optim does not have, and for schedulers of more than
        rates."""
        kind = type(self.model).__name__
        if hasattr(self.model, "_sluice"):
            raise ArgumentError(f"this {kind} is offloaded already, by another Trainer or by offload(). Trainer(..., optimizers=("
                                "first.optimizer, None)) goes on with its state, where first is that Trainer; a new model that takes "
                                "model.state_dict() begins with new moments")
        if self.lr_scheduler is not None:
            require_rates_alone(self.lr_scheduler)
        if isinstance(self._sluice_given, DeepspeedConfig):
            return
        names_lion = any(one.get("optimizer", {}).get("type") == "lion" for one in (self._sluice_given, self._sluice_keys))
        wanted = str(getattr(self.args.optim, "value", self.args.optim)) if self.optimizer is None else type(self.optimizer).__name__
        if names_lion or "lion" in wanted.lower():
            raise ArgumentError("Lion: this Trainer trains with the AdamW, Adam, Adagrad or SGD of args.optim or optimizers=. Offload the "
                                "model yourself, optimizer = sluice_offload.offload(model, {..., \"optimizer\": {\"type\": \"lion\", "
                                f"\"clip_norm\": {float(self.args.max_grad_norm or 0)}}}}}, lr={self.args.learning_rate}), and give the "
                                "Trainer optimizers=(optimizer, None)")

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self._sluice is not None:
            self._require_same_clipping(self._sluice)
            if self.optimizer is None:
                self.optimizer = self._sluice
                logger.warning("the Trainer has lost its optimizer, and takes the offloaded model's again: it goes on with its moments, "
                               "after %d updates. A new model begins with new ones", self._sluice._engine.applied_step())
            return self.optimizer
        if isinstance(_inner(self.optimizer), OffloadOptimizer):
            return self._take_offloaded(_inner(self.optimizer))
        self._require_new()
        before = self.optimizer
        try:
            self._offload_model(model)
        except BaseException:
            self.optimizer = before  # and no torch optimizer by the `args` of now, which the next train() would take
            raise
        return self.optimizer

    def _offload_model(self, model: Any) -> None:
        found = self._sluice_given
        if isinstance(found, DeepspeedConfig):
            settings, given = self._deepspeeds(found, model)
            settings = engine_part(settings)
        else:
            settings, given = copy.deepcopy(found), self._torch_optimizer(model)
        add_keys(settings, self._sluice_keys, "Trainer(): sluice_keys=")
        section = settings.setdefault("optimizer", {})
        if float(section.get("clip_norm", self.args.max_grad_norm or 0)) != float(self.args.max_grad_norm or 0):
            raise ArgumentError(f"optimizer.clip_norm is {section['clip_norm']}, but args.max_grad_norm is "
                                f"{self.args.max_grad_norm}; leave optimizer.clip_norm out")
        section["clip_norm"] = float(self.args.max_grad_norm or 0)
        section.setdefault("clip_epsilon", 1e-6)  # as in torch
        self._sluice_stage = int(settings.get("sharding", {}).get("stage", 3))
        keep_counts = _keep_counts(self.model)
        self._sluice = offload(self.model, settings, optimizer=given, restore=self._sluice_restore, device=self.args.device,
                               **self._sluice_options)
        keep_counts()
        self.optimizer = self._sluice
        if self.lr_scheduler is not None:  # of optimizers=, over the optimizer that was given there
            rebind_scheduler(self.lr_scheduler, self._sluice)

    def _torch_optimizer(self, model: Any) -> torch.optim.Optimizer:
        is_own = self.optimizer is None
        given = super().create_optimizer(model)
        if is_own:  # a scheduler of the program's counts the groups of its optimizer
            given.param_groups[:] = [group for group in given.param_groups if group["params"]]
        return given

    def _deepspeeds(self, found: DeepspeedConfig, model: Any) -> "tuple[dict[str, Any], Any]":
        """The config that a DeepSpeed config stands for, and the optimizer that `args` make where it has none."""
        resolved = found.resolved(auto_values(self.args, self._sluice_steps, getattr(self.model, "config", None)))
        settings = resolved.config
        if settings["precision"]["parameters"] == "fp16":
            raise ArgumentError(f"{found.name}: fp16.enabled: this Trainer does not scale the loss; write bf16, or train with "
                                "sluice_offload.initialize()")
        self._require_no_full_eval(settings["precision"]["parameters"])
        if settings["precision"]["parameters"] == "bf16":
            self.accelerator.native_amp = False  # DeepSpeed's bf16 is that of the parameters, without autocast
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # which an evaluation has put around the forward
        leave_checkpoints(settings)
        if resolved.has_scheduler:
            if self.lr_scheduler is not None:
                raise ArgumentError(f"{found.name} has a scheduler, and optimizers= has one, too; leave one of them out")
            self._sluice_schedule = copy.deepcopy(settings)
        if resolved.has_optimizer:
            return settings, self.optimizer
        settings["optimizer"] = {key: value for key, value in settings["optimizer"].items() if key not in KEYS}
        return settings, self._torch_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self._sluice_schedule is not None and self.lr_scheduler is None:
            assert self._sluice is not None
            self.lr_scheduler = ConfigSchedule(self._sluice, self._sluice_schedule)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sluice is not None:
            grad_norm = self._sluice.gradient_norm
        return super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def save_model(self, output_dir: Optional[str] = None, _internal_call: bool = False) -> None:
        """All processes read the model together, and the first one writes it. Older transformers call _save() on that one alone."""
        self._sluice_weights = None if self._sluice is None else self.model.state_dict()
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._sluice_weights = None

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: "Optional[list[str]]" = None,
                        **options: Any) -> Any:
        """Beside Seq2SeqTrainer: ranks that fetch the model together also generate equally long, as under DeepSpeed's ZeRO-3."""
        world = None if self._sluice is None else self._sluice._engine.world
        generates = isinstance(self, transformers.Seq2SeqTrainer) and self.args.predict_with_generate and not prediction_loss_only
        if world is not None and self._sluice_stage == 3 and generates:
            options = {"synced_gpus": True, **(options or getattr(self, "_gen_kwargs", {}))}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **options)

    def _save(self, output_dir: Optional[str] = None, state_dict: "Optional[dict[str, Any]]" = None) -> None:
        if self._sluice is not None and state_dict is None:
            state_dict = self.model.state_dict() if self._sluice_weights is None else self._sluice_weights
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._sluice is not None:
            self._sluice.save(os.path.join(output_dir, _STATE), keep=1)

    def _take_checkpoint(self, folder: str, files: "Sequence[str]" = ()) -> None:
        """At once, or as soon as the model is offloaded. `files`: those of transformers that have to be there."""
        path = os.path.join(folder, _STATE, "latest")
        anew = (f"or begin anew with the weights alone: give the Trainer the model that from_pretrained(\"{folder}\") returns, without "
                "resume_from_checkpoint")
        if not os.path.isdir(folder):
            parent = os.path.dirname(os.path.abspath(folder))
            newest = get_last_checkpoint(parent) if os.path.isdir(parent) else None
            raise ArgumentError(f"there is no folder {folder}; " + (f"the newest checkpoint in {parent} is {os.path.basename(newest)}"
                                                                   if newest else f"{parent} has no checkpoint"))
        if not os.path.isdir(path):
            raise ArgumentError(f"{folder} has no folder \"{_STATE}\" with the state: it was not saved by this Trainer, or with "
                                f"save_only_model. Go on from a checkpoint that has one, {anew}")
        for name in files:
            if not os.path.isfile(os.path.join(folder, name)):
                raise ArgumentError(f"{folder} has no {name}, without which the schedule of the learning rates would begin anew. Copy it "
                                    f"from where the checkpoint was saved, {anew}")
        if self._sluice is None:
            self._sluice_restore = path
        else:
            self._sluice.load_checkpoint(path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._take_checkpoint(resume_from_checkpoint, (OPTIMIZER_NAME, SCHEDULER_NAME))

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if not self.args.save_only_model or os.path.isdir(os.path.join(best, _STATE)):
            self._take_checkpoint(best)  # moments and step are the best one's, too
        elif any(os.path.isfile(os.path.join(best, name)) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
            load_safetensors(self.model, best)  # tensor by tensor, where transformers would read the file as a whole
        else:
            super()._load_best_model()
