"""Fifty steps of AdamW with clipping against torch in memory, for models of torch alone whose modules are used in other ways than
once each: budgets are a quarter of the state at most, and from the second step on the bytes that move are the plan's."""

import copy

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import adamw, budgeted, moves_as_planned, train, without_keys, worst

WIDTH = 64


class Looped(nn.Module):
    """Each step goes through the same blocks three times."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(61, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
                                    for _ in range(10))
        self.head = nn.Linear(WIDTH, 61)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for _ in range(3):
            for block in self.blocks:
                x = x + 0.3 * block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Attentive(nn.Module):
    """torch's attention, whose out_proj is never called, beside a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(61, WIDTH)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(9))
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 61)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for attention in self.attentions:
            x = x + attention(x, x, x, need_weights=False)[0]
        return nn.functional.cross_entropy(self.head(self.recurrent(x)[0]).flatten(0, 1), labels.flatten())


class Gated(nn.Module):
    """A block with buffers, which reads the weight of a part that it never calls."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        h = self.norm(x.transpose(1, 2)).transpose(1, 2)
        gate = torch.sigmoid(nn.functional.linear(h, self.gate.weight, self.gate.bias))
        return x + self.scale * self.down(self.up(h) * gate)


class Read(nn.Module):
    """The root has a parameter of its own, which its forward reads behind the blocks, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(61, WIDTH)
        self.positions = nn.Parameter(torch.randn(12, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Gated() for _ in range(8))
        self.head = nn.Linear(WIDTH, 61)

    def forward(self, tokens, labels):
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x * torch.cos(self.positions)).flatten(0, 1), labels.flatten())


# Each with its budgets for device and host in KiB.
CASES = {"a loop over shared blocks": (Looped, 180, 480), "MultiheadAttention and GRU": (Attentive, 220, 480),
         "buffers, and weights of others": (Read, 320, 480)}


@pytest.mark.parametrize("name", CASES)
def test_fifty_steps_are_torchs(config, name):
    make, device, host = CASES[name]
    torch.manual_seed(0)
    reference = make()
    budgeted(config, reference, device, host)
    model, start = copy.deepcopy(reference), copy.deepcopy(reference.state_dict())
    losses, norms = train(reference, adamw(reference, config), 50, clip_norm=1.0)
    optimizer = sluice.offload(model, config)
    actual, actual_norms = [], []
    for step in range(50):
        loss, norm = train(model, optimizer, 1, first=step)
        actual, actual_norms = actual + loss, actual_norms + norm
        if step > 0:
            moves_as_planned(optimizer)
    moved = apart = 0.0
    expected = reference.state_dict()
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            apart += without_keys(key, value - expected[key]).double().norm().item() ** 2
            moved += without_keys(key, expected[key] - start[key]).double().norm().item() ** 2
    print(f"{name}: state {16 * sum(p.numel() for p in model.parameters()) >> 10} KiB, budgets {device + host} KiB, worst relative "
          f"loss {worst(actual, losses):.1e}, norm {worst(actual_norms, norms):.1e}, weights {(apart / moved) ** 0.5:.1e}; "
          f"{optimizer.report.nvme_read_bytes} bytes read and {optimizer.report.nvme_write_bytes} written per step")
    assert worst(actual, losses) <= 2e-6
    assert (apart / moved) ** 0.5 <= 1e-5
    optimizer.close()
