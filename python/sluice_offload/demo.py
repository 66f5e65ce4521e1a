"""`python -m sluice_offload train-demo`: trains a small transformer with its state on NVMe beside the same one in memory, and
compares their losses."""

import copy
import os
import tempfile
import time
from typing import Any, Optional

import torch
from torch import nn

from .errors import SluiceError
from .offload import offload

WIDTH, LAYERS, LENGTH, VOCABULARY, ROWS = 128, 8, 32, 96, 4
DEVICE_KIB, HOST_KIB = 1600, 2400
LOSS_DIFFERENCE_MAX = 2e-6  # in fp32; what is seen is 1e-7


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        y: torch.Tensor = x + self.mlp(self.last_norm(x))
        return y


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def _train(model: nn.Module, optimizer: Any, steps: int, clips: bool) -> "tuple[list[float], float]":
    losses = []
    begin = time.monotonic()
    for step in range(steps):
        # Counting upwards from somewhere is a rule that can be learned. A quarter of the tokens are noise, which cannot: the loss of a
        # model that knows everything would be rounding alone, and could not be compared.
        generator = torch.Generator().manual_seed(step)
        counted = (torch.randint(VOCABULARY, (ROWS, 1), generator=generator) + torch.arange(LENGTH + 1)) % VOCABULARY
        noise = torch.randint(VOCABULARY, counted.shape, generator=generator)
        loss = model(torch.where(torch.rand(counted.shape, generator=generator) < 0.25, noise, counted))
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, (time.monotonic() - begin) / steps


def _compare(folder: str, steps: int) -> int:
    torch.manual_seed(1)
    reference = _Model()
    model = copy.deepcopy(reference)
    state = 16 * sum(parameter.numel() for parameter in reference.parameters())
    expected, plain_seconds = _train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), steps, clips=True)
    optimizer = offload(model, {
        "placement": {"parameters": "nvme", "optimizer": "nvme"}, "storage": {"paths": [folder]},
        "memory": {"device": f"{DEVICE_KIB}KiB", "host": f"{HOST_KIB}KiB"},
        "optimizer": {"clip_norm": 1.0, "clip_epsilon": 1e-6}},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses, seconds = _train(model, optimizer, steps, clips=False)
    report = optimizer.report
    optimizer.close()
    for step in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        print(f"step {step + 1:4d}  loss {losses[step]:.6f}  in memory {expected[step]:.6f}")
    worst = max(abs(one - other) / other for one, other in zip(losses, expected))
    assert report is not None
    print(f"state {state / 2**20:.1f} MiB under budgets of {(DEVICE_KIB + HOST_KIB) / 1024:.1f} MiB; the last step read "
          f"{report.nvme_read_bytes / 2**20:.1f} MiB from storage and wrote {report.nvme_write_bytes / 2**20:.1f} MiB")
    print(f"{seconds * 1e3:.0f} ms per step, {plain_seconds * 1e3:.0f} in memory; worst relative difference of a loss {worst:.1e}")
    if worst > LOSS_DIFFERENCE_MAX:
        print(f"NO: that is more than {LOSS_DIFFERENCE_MAX:.0e}")
        return 1
    print("ok: the same training as in memory")
    return 0


def train_demo(path: Optional[str], steps: int) -> int:
    """Returns 0 where the losses agree."""
    if path is not None and not os.path.isdir(path):
        print(f"NO: {path} is no folder; name one on a drive, or leave --path out")
        return 1
    try:
        with tempfile.TemporaryDirectory(dir=path) as folder:
            return _compare(folder, steps)
    except OSError as error:
        print(f"NO: {error}; --path names another folder")
    except SluiceError as error:
        print(f"NO: {error}")
    return 1
