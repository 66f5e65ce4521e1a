#!/usr/bin/env python3
"""Training steps of DeepSpeed ZeRO-3 with its optimizer state on NVMe, on its CPU accelerator. step.py runs it.

    step_deepspeed.py --parameters N --units N --path DIR --steps N --json FILE

Writes {"version": ..., "step_s": [seconds of each step]}; two steps before them are not counted. The model computes nothing:
a unit's forward looks at one of its parameters, its backward hands over a constant gradient. So a step is what offloading
costs: optimizer state read, updated and written back, and the gradients' way. As it runs best: reads and writes pipelined,
buffers for more units than are ever under way, one unit at a time; bf16 parameters stay in memory; gradients are clipped.
"""

import argparse
import json
import os
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "1"),
                    ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29517")):
    os.environ.setdefault(name, value)

import torch  # noqa: E402
import deepspeed  # noqa: E402

WARM_STEPS = 2


class Touch(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(weight)
        return x + weight[0]

    @staticmethod
    def backward(context, gradient):
        (weight,) = context.saved_tensors
        return gradient, torch.full_like(weight, 1e-3)


class Unit(torch.nn.Module):
    def __init__(self, parameters):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(parameters, dtype=torch.bfloat16))

    def forward(self, x):
        return Touch.apply(x, self.weight)


def config_of(options):
    unit = -(-options.parameters // options.units)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": unit,  # one unit at a time, as large as its buffers
            "offload_optimizer": {"device": "nvme", "nvme_path": options.path, "pin_memory": False,
                                  "buffer_count": 20, "pipeline_read": True, "pipeline_write": True},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False,
                "overlap_events": True},
    }
    return config


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--units", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    unit = -(-options.parameters // options.units)
    with deepspeed.zero.Init(config_dict_or_path=config_of(options)):
        model = torch.nn.Sequential(*(Unit(unit) for _ in range(options.units)))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(options))
    times = []
    for _ in range(options.steps + WARM_STEPS):
        begin = time.perf_counter()
        loss = engine(torch.zeros(1, dtype=torch.bfloat16)).sum()
        engine.backward(loss)
        engine.step()
        times.append(time.perf_counter() - begin)
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump({"version": deepspeed.__version__, "step_s": times[WARM_STEPS:]}, file)


if __name__ == "__main__":
    main()
