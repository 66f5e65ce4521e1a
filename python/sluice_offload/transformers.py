"""The Trainer of transformers with an offloaded model:

    from sluice_offload.transformers import Trainer
    trainer = Trainer(model=model, args=args, train_dataset=data, sluice={"placement": ...})

The optimizer, its decay, learning rate and clipping follow `args`, as in transformers. Logs have the gradient's norm of their
own step; checkpoints hold all of the state, and resume_from_checkpoint goes on with the same bits. Without this class a
transformers.Trainer works too, with optimizers=(offload(...), scheduler), but cannot resume.
"""

import os
from typing import Any, Optional, Sequence

import torch
import transformers

from .engine import Config, read_config
from .errors import ArgumentError
from .offload import offload
from .optimizer import OffloadOptimizer

_STATE = "sluice"  # in each checkpoint's folder


class Trainer(transformers.Trainer):
    """transformers.Trainer. sluice: the config, or its file; sluice_units, sluice_buffers: `units` and
    `buffers` of offload()."""

    def __init__(self, *args: Any, sluice: "Config | str | os.PathLike[str]",
                 sluice_units: "Sequence[type | str] | None" = None, sluice_buffers: "Sequence[str]" = (), **kwargs: Any) -> None:
        self._sluice_config = read_config(sluice)
        self._sluice_options: "dict[str, Any]" = {"units": sluice_units, "buffers": sluice_buffers}
        self._sluice: Optional[OffloadOptimizer] = None
        self._sluice_restore: Optional[str] = None
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self._sluice is not None:
            return self.optimizer
        given = super().create_optimizer(model)
        if isinstance(given, OffloadOptimizer):
            self._sluice = given
            return given
        given.param_groups[:] = [group for group in given.param_groups if group["params"]]
        settings = dict(self._sluice_config)
        section = settings["optimizer"] = dict(settings.get("optimizer", {}))
        if float(section.get("clip_norm", self.args.max_grad_norm or 0)) != float(self.args.max_grad_norm or 0):
            raise ArgumentError(f"optimizer.clip_norm is {section['clip_norm']}, but args.max_grad_norm is "
                                f"{self.args.max_grad_norm}; leave optimizer.clip_norm out")
        section["clip_norm"] = float(self.args.max_grad_norm or 0)
        section.setdefault("clip_epsilon", 1e-6)  # as in torch
        self._sluice = offload(self.model, settings, optimizer=given, restore=self._sluice_restore, **self._sluice_options)
        self.optimizer = self._sluice
        return self.optimizer

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
