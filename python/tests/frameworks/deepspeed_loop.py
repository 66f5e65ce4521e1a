"""usage: deepspeed_loop.py deepspeed|sluice_offload FOLDER

A program for DeepSpeed, which differs from one of Sluice's in the import alone. Prints
its losses, norms and learning rates as JSON."""

import importlib
import json
import os
import pathlib
import sys

import torch
from torch import nn

CONFIG = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
          "steps_per_print": 1000, "wall_clock_breakdown": False,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
          "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
STEPS, WIDTH, VOCABULARY = 12, 32, 61


class Model(nn.Module):
    """A language model of torch's own layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def main():
    name, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    deepspeed = importlib.import_module(name)
    path = pathlib.Path(folder) / "ds_config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=str(path))
    losses, norms, rates = [], [], []
    for i in range(2 * STEPS):
        loss = engine(torch.randint(VOCABULARY, (4, 13), generator=torch.Generator().manual_seed(1000 + i)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if i % 2:
            norms.append(float(engine.get_global_grad_norm()))
            rates.append(engine.get_lr()[0])
    json.dump({"losses": losses, "norms": norms, "rates": rates, "steps": engine.global_steps}, answers)
    answers.flush()
    os._exit(0)  # DeepSpeed leaves a process group behind


if __name__ == "__main__":
    main()
