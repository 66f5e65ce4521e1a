"""Writes zero/module.a.weight as DeepSpeed's ds_to_universal does (with torch 2), another step and another shape:
make.py FOLDER"""

import os
import sys

import torch

folder = os.path.join(sys.argv[1], "zero", "module.a.weight")
os.makedirs(folder, exist_ok=True)
numbers = torch.arange(15, dtype=torch.float32).reshape(3, 5)
for name, values in (("fp32", numbers / 8 - 1), ("exp_avg", numbers * 0.5), ("exp_avg_sq", numbers * numbers)):
    torch.save({"param": values, "cat_dim": 0}, os.path.join(folder, name + ".pt"))
torch.save(torch.tensor(7.0), os.path.join(folder, "step.pt"))
torch.save(torch.tensor(8.0), os.path.join(sys.argv[1], "other_step.pt"))
torch.save({"param": numbers.reshape(5, 3), "cat_dim": 0}, os.path.join(sys.argv[1], "other_shape.pt"))
