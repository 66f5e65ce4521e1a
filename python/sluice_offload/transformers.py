"""The Trainer of transformers with an offloaded model:

    from sluice_offload.transformers import Trainer
    trainer = Trainer(model=model, args=args, train_dataset=data, sluice={"placement": ...})  # or "ds_config.json"

The model computes where `args` say, on the CPU or a GPU, and stays on the CPU or the meta device until it is offloaded: it may be
larger than the GPU. The optimizer, its decay, learning rate and clipping follow `args`, as in transformers. Logs have the gradient's norm of their
own step; checkpoints hold all of the state, and resume_from_checkpoint goes on with the same bits. Without this class a
transformers.Trainer works too, with optimizers=(offload(...), scheduler), but cannot resume.
"""

import copy
import os
from typing import Any, Mapping, Optional, Sequence

import torch
import transformers

from .deepspeed import DeepspeedConfig, add_keys, convert_buffers, find_config, leave_checkpoints
from .described import KEYS
from .engine import Config
from .errors import ArgumentError
from .offload import offload
from .optimizer import OffloadOptimizer
from .schedule import ConfigSchedule

_STATE = "sluice"  # in each checkpoint's folder
# The names, in messages about a DeepSpeed config, of the values that come from TrainingArguments.
_NAMES = {"batch": "args.per_device_train_batch_size", "micro_batches": "args.gradient_accumulation_steps",
          "lr": "args.learning_rate", "betas": "[args.adam_beta1, args.adam_beta2]", "eps": "args.adam_epsilon",
          "weight_decay": "args.weight_decay", "clip_norm": "args.max_grad_norm", "precision": "the type by args.bf16 and args.fp16",
          "steps": "the number of steps by args", "warmup_steps": "args.warmup_steps"}


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


class Trainer(transformers.Trainer):
    """transformers.Trainer. sluice: the config, or its file; also one for DeepSpeed, whose "auto" are what `args` say, and which
    must not contradict them (docs/deepspeed.md). sluice_keys: keys of Sluice for which DeepSpeed has none, such as
    {"memory": {"host": "8GiB"}}. sluice_units, sluice_buffers: `units` and `buffers` of offload()."""

    def __init__(self, *args: Any, sluice: "Config | str | os.PathLike[str] | None" = None, sluice_keys: "Mapping[str, Any] | None" = None,
                 sluice_units: "Sequence[type | str] | None" = None, sluice_buffers: "Sequence[str]" = (), **kwargs: Any) -> None:
        if sluice is None:
            raise ArgumentError("Trainer(): sluice= is missing: the config that says where the state lives, such as "
                                "{\"placement\": {\"optimizer\": \"nvme\"}, \"storage\": {\"paths\": [\"/nvme\"]}}")
        self._sluice_given = find_config(sluice)
        self._sluice_keys = sluice_keys or {}
        self._sluice_options: "dict[str, Any]" = {"units": sluice_units, "buffers": sluice_buffers}
        self._sluice_steps: Optional[int] = None  # of the whole training, where train() knows it
        self._sluice_schedule: "Optional[dict[str, Any]]" = None  # the config of a schedule that is not `args`'
        self._sluice: Optional[OffloadOptimizer] = None
        self._sluice_restore: Optional[str] = None
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise ArgumentError(f"this process sees {self.args.n_gpu} GPUs, over which transformers would divide each batch by "
                                f"DataParallel; start a process for each, as torchrun --nproc_per_node={self.args.n_gpu} does, or set "
                                "CUDA_VISIBLE_DEVICES to one of them")

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """transformers moves the model as a whole; offload() takes it from where it is. accelerate moves one that is evaluated
        before."""

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        self._sluice_steps = max_steps
        return super()._prepare_for_training(max_steps, *args, **kwargs)

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model, as for each train() of hyperparameter_search(): the one before gives its memory back."""
        before, self._sluice = self._sluice, None
        if before is not None:
            before.close()
        self._sluice_restore = None
        return super().call_model_init(trial)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self._sluice_steps = num_training_steps
        super().create_optimizer_and_scheduler(num_training_steps)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self._sluice is not None:
            return self.optimizer
        if isinstance(self.optimizer, OffloadOptimizer):
            self._sluice = self.optimizer
            if self._sluice_restore is not None:
                self._sluice.load_checkpoint(self._sluice_restore)
            return self.optimizer
        found = self._sluice_given
        if isinstance(found, DeepspeedConfig):
            settings, given = self._deepspeeds(found, model)
        else:
            settings, given = copy.deepcopy(found), self._torch_optimizer(model)
        add_keys(settings, self._sluice_keys, "Trainer(): sluice_keys=")
        section = settings.setdefault("optimizer", {})
        if float(section.get("clip_norm", self.args.max_grad_norm or 0)) != float(self.args.max_grad_norm or 0):
            raise ArgumentError(f"optimizer.clip_norm is {section['clip_norm']}, but args.max_grad_norm is "
                                f"{self.args.max_grad_norm}; leave optimizer.clip_norm out")
        section["clip_norm"] = float(self.args.max_grad_norm or 0)
        section.setdefault("clip_epsilon", 1e-6)  # as in torch
        self._sluice = offload(self.model, settings, optimizer=given, restore=self._sluice_restore, device=self.args.device,
                               **self._sluice_options)
        if isinstance(found, DeepspeedConfig):
            convert_buffers(self.model, settings)
        self.optimizer = self._sluice
        return self.optimizer

    def _torch_optimizer(self, model: Any) -> torch.optim.Optimizer:
        given = super().create_optimizer(model)
        given.param_groups[:] = [group for group in given.param_groups if group["params"]]
        return given

    def _deepspeeds(self, found: DeepspeedConfig, model: Any) -> "tuple[dict[str, Any], Any]":
        """The config that a DeepSpeed config stands for, and the optimizer that `args` make where it has none."""
        resolved = found.resolved(auto_values(self.args, self._sluice_steps, getattr(self.model, "config", None)))
        settings = resolved.config
        if settings["precision"]["parameters"] == "fp16":
            raise ArgumentError(f"{found.name}: fp16.enabled: this Trainer does not scale the loss; write bf16, or train with "
                                "sluice_offload.initialize()")
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

    def _save(self, output_dir: Optional[str] = None, state_dict: "Optional[dict[str, Any]]" = None) -> None:
        if self._sluice is not None and state_dict is None:
            state_dict = self.model.state_dict()  # all processes read it together, and the first one writes it
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._sluice is not None:
            self._sluice.save(os.path.join(output_dir, _STATE), keep=1)

    def _take_checkpoint(self, folder: str) -> None:
        """At once, or as soon as the model is offloaded."""
        path = os.path.join(folder, _STATE, "latest")
        if not os.path.isdir(path):
            raise ArgumentError(f"{folder} has no folder \"{_STATE}\": it was not saved by this Trainer, or with save_only_model")
        if self._sluice is None:
            self._sluice_restore = path
        else:
            self._sluice.load_checkpoint(path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._take_checkpoint(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._take_checkpoint(str(self.state.best_model_checkpoint))
