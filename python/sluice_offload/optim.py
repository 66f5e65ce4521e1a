"""torch's optimizers with their state in host memory or on NVMe:

    optimizer = sluice_offload.optim.AdamW(model.parameters(), lr=1e-4, config=config)

torch keeps parameters and gradients; the engine keeps moments, and exact fp32 masters beside 16-bit parameters, where `config`
says. Everything else is as with torch.optim's class of the same name. Further arguments of every class:

config: a dictionary or a JSON file. `placement.optimizer`, `memory.host`, `storage`, `run.threads`, `optimizer.state` and
    `optimizer.rounding_seed` are used.
gradients: "step": step() uses p.grad, as ever. "backward": each gradient is used as soon as it has come, and p.grad is
    None; with clip_norm, the gradients are kept until step().
clip_norm: the bound that step() clips the gradients' norm to, as torch.nn.utils.clip_grad_norm_ does, but without a pass over
    them: the update multiplies. `gradient_norm` is the norm of the last step.
overlap: "forward": step() returns before parameters are written, and each module's forward waits for its own. Needs `modules`.
modules: the model, for overlap="forward".
shard: of several processes with equal parameters, as under DistributedDataParallel, each keeps the state of one N-th, updates
    that, and sends it to the others. By default where torch.distributed has several processes and no parameter is a DTensor.
    False: each keeps all.
process_group: the processes to shard over; by default all.
"""

from typing import Any, Mapping, Optional

from torch import nn

from . import library as lib
from .detached_base import DetachedOptimizer
from .engine import Config
from .errors import ArgumentError

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]


class Adam(DetachedOptimizer):
    """torch.optim.Adam: decay is a part of the gradient."""

    _type = "adam"
    _kinds = {"exp_avg": lib.EXP_AVG, "exp_avg_sq": lib.EXP_AVG_SQ}
    _is_decoupled = False

    def __init__(self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0, amsgrad: bool = False, *, foreach: Optional[bool] = None,
                 maximize: bool = False, capturable: bool = False, differentiable: bool = False,
                 fused: Optional[bool] = None, decoupled_weight_decay: bool = False,
                 config: "Config | str | None" = None, gradients: str = "step", clip_norm: Optional[float] = None,
                 overlap: Optional[str] = None, modules: Optional[nn.Module] = None, shard: Optional[bool] = None,
                 process_group: Any = None) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
                    "maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable,
                    "fused": fused, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, defaults, config, gradients, clip_norm, overlap, modules, shard, process_group)

    def _check_group(self, group: "dict[str, Any]") -> None:
        super()._check_group(group)
        if bool(group.get("decoupled_weight_decay", self._is_decoupled)) != self._is_decoupled:
            raise ArgumentError("decoupled_weight_decay=True, as in a state_dict() of AdamW, is AdamW: use sluice_offload.optim.AdamW"
                                if not self._is_decoupled else
                                "decoupled_weight_decay=False, as in a state_dict() of Adam, is Adam, whose decay is in the gradient: use "
                                "sluice_offload.optim.Adam. To go on with AdamW, set it to True in the state_dict's param_groups")

    def _hyperparameters(self, group: "dict[str, Any]", step: int) -> "dict[str, float]":
        beta1, beta2 = group["betas"]
        return {"learning_rate": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2),
                "epsilon": float(group["eps"]), "weight_decay": float(group["weight_decay"])}


class AdamW(Adam):
    """torch.optim.AdamW."""

    _type = "adamw"
    _is_decoupled = True

    def __init__(self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
                 foreach: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
                 fused: Optional[bool] = None, config: "Config | str | None" = None, gradients: str = "step",
                 clip_norm: Optional[float] = None, overlap: Optional[str] = None, modules: Optional[nn.Module] = None,
                 shard: Optional[bool] = None, process_group: Any = None) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize,
                         capturable=capturable, differentiable=differentiable, fused=fused, decoupled_weight_decay=True,
                         config=config, gradients=gradients, clip_norm=clip_norm, overlap=overlap, modules=modules, shard=shard,
                         process_group=process_group)


class Lion(DetachedOptimizer):
    """Lion (Chen et al. 2023), with decoupled decay. torch has none."""

    _type = "lion"
    _kinds = {"exp_avg": lib.EXP_AVG}
    _has_step = False

    def __init__(self, params: Any, lr: Any = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0, *,
                 maximize: bool = False, config: "Config | str | None" = None, gradients: str = "step",
                 clip_norm: Optional[float] = None, overlap: Optional[str] = None, modules: Optional[nn.Module] = None,
                 shard: Optional[bool] = None, process_group: Any = None) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, config, gradients, clip_norm, overlap, modules, shard, process_group)

    def _hyperparameters(self, group: "dict[str, Any]", step: int) -> "dict[str, float]":
        beta1, beta2 = group["betas"]
        return {"learning_rate": float(group["lr"]), "beta1": float(beta1), "beta2": float(beta2), "epsilon": 1e-8,
                "weight_decay": float(group["weight_decay"])}


class Adagrad(DetachedOptimizer):
    """torch.optim.Adagrad."""

    _type = "adagrad"
    _kinds = {"sum": lib.EXP_AVG_SQ}

    def __init__(self, params: Any, lr: Any = 1e-2, lr_decay: float = 0, weight_decay: float = 0,
                 initial_accumulator_value: float = 0, eps: float = 1e-10, foreach: Optional[bool] = None, *,
                 maximize: bool = False, differentiable: bool = False, fused: Optional[bool] = None,
                 config: "Config | str | None" = None, gradients: str = "step", clip_norm: Optional[float] = None,
                 overlap: Optional[str] = None, modules: Optional[nn.Module] = None, shard: Optional[bool] = None,
                 process_group: Any = None) -> None:
        if initial_accumulator_value:
            raise ArgumentError("Adagrad's state begins with zeros; initial_accumulator_value has to be 0")
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
                    "initial_accumulator_value": initial_accumulator_value, "foreach": foreach, "maximize": maximize,
                    "differentiable": differentiable, "fused": fused}
        super().__init__(params, defaults, config, gradients, clip_norm, overlap, modules, shard, process_group)

    def _hyperparameters(self, group: "dict[str, Any]", step: int) -> "dict[str, float]":
        rate = float(group["lr"]) / (1 + (step - 1) * float(group["lr_decay"]))
        return {"learning_rate": rate, "epsilon": float(group["eps"]), "weight_decay": float(group["weight_decay"])}


class SGD(DetachedOptimizer):
    """torch.optim.SGD without dampening and Nesterov's momentum."""

    _type = "sgd"
    _kinds = {"momentum_buffer": lib.EXP_AVG}
    _has_step = False

    def __init__(self, params: Any, lr: Any = 1e-3, momentum: float = 0, dampening: float = 0, weight_decay: float = 0,
                 nesterov: bool = False, *, maximize: bool = False, foreach: Optional[bool] = None,
                 differentiable: bool = False, fused: Optional[bool] = None, config: "Config | str | None" = None,
                 gradients: str = "step", clip_norm: Optional[float] = None, overlap: Optional[str] = None,
                 modules: Optional[nn.Module] = None, shard: Optional[bool] = None, process_group: Any = None) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
                    "nesterov": nesterov, "maximize": maximize, "foreach": foreach, "differentiable": differentiable,
                    "fused": fused}
        super().__init__(params, defaults, config, gradients, clip_norm, overlap, modules, shard, process_group)

    def _moments(self, group: "dict[str, Any]") -> "Mapping[str, int]":
        return self._kinds if group["momentum"] else {}

    def _hyperparameters(self, group: "dict[str, Any]", step: int) -> "dict[str, float]":
        return {"learning_rate": float(group["lr"]), "momentum": float(group["momentum"]),
                "weight_decay": float(group["weight_decay"])}
