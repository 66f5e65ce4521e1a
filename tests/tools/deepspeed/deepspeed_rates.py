#!/usr/bin/env python3
"""Writes deepspeed_rates.json: learning rates that DeepSpeed's own schedulers give to the updates of a run.

    pip download --no-deps --no-binary :all: deepspeed==0.19.8; tar xf deepspeed-0.19.8.tar.gz
    tests/tools/deepspeed/deepspeed_rates.py deepspeed-0.19.8

Runs deepspeed/runtime/lr_schedules.py as it is, with a stand-in for the three names that it takes from torch. As
DeepSpeed's engine does, each update sees the optimizer's rate, and the scheduler moves behind it.
"""

import importlib.util
import json
import logging
import pathlib
import sys
import types

UPDATES = 10_000
SCHEDULES = {
    "warmup": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 100}},
    "warmup_default": {"type": "WarmupLR", "params": {}},
    "warmup_start": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4, "warmup_num_steps": 77}},
    "warmup_linear": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6, "warmup_num_steps": 500, "warmup_type": "linear"}},
    "warmup_of_one": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
    "decay": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9000, "warmup_max_lr": 2e-5, "warmup_num_steps": 300}},
    "decay_default": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10000}},
    "decay_linear": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9999, "warmup_min_lr": 1e-5, "warmup_max_lr": 2e-4,
                                                         "warmup_num_steps": 123, "warmup_type": "linear"}},
    "decay_too_short": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 100}},
    "cosine": {"type": "WarmupCosineLR", "params": {"total_num_steps": 8000, "warmup_num_steps": 200}},
    "cosine_ratios": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10000, "warmup_num_steps": 333, "warmup_min_ratio": 0.1,
                                                           "cos_min_ratio": 0.05}},
    "cosine_linear": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000, "warmup_num_steps": 2, "warmup_min_ratio": 0.25,
                                                           "cos_min_ratio": 0, "warmup_type": "linear"}},
    "cycle": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_momentum": False}},
    "cycle_uneven": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 701,
                                                    "cycle_second_step_size": 1999, "decay_step_size": 50, "decay_lr_rate": 0.01,
                                                    "cycle_momentum": False}},
    "cycle_stairs": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 1000,
                                                    "cycle_first_stair_count": 7, "cycle_second_step_size": 3000,
                                                    "cycle_second_stair_count": 10, "cycle_momentum": False}},
    "range": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-6, "lr_range_test_step_size": 300,
                                                "lr_range_test_step_rate": 5}},
    "range_stairs": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 333, "lr_range_test_step_rate": 0.5,
                                                       "lr_range_test_staircase": True}},
}
OPTIMIZER_RATE = 2.5e-4


class Optimizer:
    """The parts of torch.optim.Optimizer that a scheduler needs."""

    def __init__(self):
        self.param_groups = [{"lr": OPTIMIZER_RATE, "betas": (0.9, 0.999)}]
        self.defaults = {"betas": (0.9, 0.999)}


def schedulers(source):
    torch, deepspeed = types.ModuleType("torch"), types.ModuleType("deepspeed")
    optim, utils = types.ModuleType("torch.optim"), types.ModuleType("deepspeed.utils")
    optim.Optimizer = Optimizer
    torch.optim, torch.is_tensor, torch.tensor = optim, lambda value: False, None
    utils.logger = logging.getLogger("deepspeed")
    utils.logger.setLevel(logging.ERROR)
    sys.modules |= {"torch": torch, "torch.optim": optim, "deepspeed": deepspeed, "deepspeed.utils": utils}
    path = pathlib.Path(source) / "deepspeed/runtime/lr_schedules.py"
    spec = importlib.util.spec_from_file_location("lr_schedules", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rates_of(module, schedule):
    optimizer = Optimizer()
    scheduler = getattr(module, schedule["type"])(optimizer, **schedule["params"])
    rates = []
    for _ in range(UPDATES):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


def is_kept(update, rates):
    """A few hundred of the updates: the first ones, every 97th, and those at whose place the rate turns."""
    if update < 20 or update % 97 == 0 or update > UPDATES - 3:
        return True
    before, after = rates[update] - rates[update - 1], rates[update + 1] - rates[update]
    return before * after < 0 or (before == 0) != (after == 0) and update % 5 == 0


def main():
    module = schedulers(sys.argv[1])
    cases = []
    for name, schedule in SCHEDULES.items():
        rates = rates_of(module, schedule)
        cases.append({"name": name, "scheduler": schedule,
                      "rates": {update: rates[update] for update in range(UPDATES) if is_kept(update, rates)}})
    target = pathlib.Path(__file__).with_suffix(".json")
    target.write_text(json.dumps({"deepspeed": "0.19.8", "optimizer_rate": OPTIMIZER_RATE, "updates": UPDATES, "cases": cases},
                                 separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
