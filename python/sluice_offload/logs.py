"""Figures of each step for loggers, such as Weights & Biases, MLflow and TensorBoard."""

import math
import time
from typing import Any, Callable

from torch.utils.hooks import RemovableHandle

from .optimizer import OffloadOptimizer

NANOSECOND = 1e-9


def log_steps(optimizer: OffloadOptimizer, log: "Callable[..., Any]") -> RemovableHandle:
    """Calls `log(figures, step=number)` behind every step of an offloaded model: `log_steps(optimizer, wandb.log)` is a hook for
    Weights & Biases. `figures` maps names to numbers. Learning rate, gradient norm, the time since the step before, and bytes
    from and to storage have the names that `sluice train --tensorboard` gives them. So have the loss, tokens per second,
    operations per second and MFU, where optimizer.show() was told what they are made of. The command has no train/skipped,
    train/loss_scale and speed/stall_s. A number that does not exist is left out: the norm of a skipped step, the first
    step's time. `step` counts updates and skipped steps, and goes up at every call. Each process calls its own `log`. The
    handle's remove() ends it."""
    last = {"report": optimizer.report, "at": None, "step": 0}

    def tell(*_: Any) -> None:
        report = optimizer.report
        if report is None or report is last["report"]:
            return  # there were no gradients
        now = time.monotonic()
        figures = {"train/learning_rate": optimizer.rates()[0], "train/skipped": float(report.is_skipped != 0),
                   "train/loss_scale": report.loss_scale, "speed/stall_s": report.stall_ns * NANOSECOND,
                   "traffic/nvme_read_bytes": report.nvme_read_bytes, "traffic/nvme_write_bytes": report.nvme_write_bytes}
        if math.isfinite(report.gradient_norm):
            figures["train/gradient_norm"] = report.gradient_norm
        if last["at"] is not None:
            figures["speed/step_s"] = now - last["at"]
        figures |= _told(optimizer, figures.get("speed/step_s", 0))
        # The report's own number counts updates, so that a skipped step and the one behind it share theirs.
        last.update(report=report, at=now, step=max(last["step"] + 1, report.step))
        log(figures, step=last["step"])

    return optimizer.register_step_post_hook(tell)


def _told(optimizer: OffloadOptimizer, seconds: float) -> "dict[str, float]":
    """The figures of a step of `seconds` that are made of what show() was told; 0 seconds where they are not known."""
    told, loss = optimizer._engine.figures, optimizer._engine.last_loss
    figures = {"train/loss": loss} if math.isfinite(loss) else {}
    if seconds > 0 and told.tokens > 0:
        figures["speed/tokens_per_s"] = told.tokens / seconds
        if told.flops_per_token > 0:
            figures["speed/flops_per_s"] = told.flops_per_token * told.tokens / seconds
            if told.peak_flops > 0:
                figures["speed/mfu"] = figures["speed/flops_per_s"] / told.peak_flops
    return figures
