"""Models and helpers for the tests: tiny, random, of torch alone."""

import copy
import json

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from sluice_offload.optimizer import OffloadOptimizer
from sluice_offload.storage import _can_swap

torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: run with the wheels alone, in `tools/test.sh --slow`; another test sees most of what it sees")


def pytest_collection_modifyitems(items):
    if _can_swap():
        return
    for item in items:
        if "swap" in getattr(getattr(item, "callspec", None), "params", {}).values():
            item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} has no _swap_data_ptr_"))


class Block(nn.Module):
    """A transformer block with MultiheadAttention, whose out_proj is never called."""

    def __init__(self, width, hidden=None):
        super().__init__()
        hidden = hidden or 4 * width
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Tiny(nn.Module):
    """A language model with a head that is tied to the embedding, and a position table of the root's own."""

    def __init__(self, width=32, layers=3, vocabulary=61, length=12, tied=True, block=Block):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        # Uneven sizes: in a small window, units come back to other places.
        self.blocks = nn.ModuleList(block(width, (32, 128, 64, 96)[i % 4]) for i in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens) + self.positions[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step, rows=4, length=12, vocabulary=61):
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def config(tmp_path):
    """All state on NVMe, budgets of a small part of it, AdamW of fp32 with clipping."""
    return {"placement": {"parameters": "nvme", "optimizer": "nvme"},
            "memory": {"device": "400KiB", "host": "4MiB"},
            "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0, "weight_decay": 0.01, "beta2": 0.999,
                          "overlap": "serial"},
            "storage": {"paths": [str(tmp_path)]}}


def tiny(seed=0, **options):
    torch.manual_seed(seed)
    return Tiny(**options)


def adamw(model, config):
    """torch's AdamW with the hyperparameters of `config`."""
    optimizer = config["optimizer"]
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    other = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": optimizer["weight_decay"]},
                              {"params": other, "weight_decay": 0.0}], lr=optimizer["learning_rate"], betas=(0.9, 0.999))


def train(model, optimizer, steps, clip_norm=0.0, first=0, micro_batches=1):
    """Losses and gradient norms. `clip_norm`: torch clips to it; the engine does it by itself."""
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(micro_batches):
            loss = model(*batch(step * micro_batches + micro)) / micro_batches
            loss.backward()
            losses.append(loss.item())
        if clip_norm:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        if not clip_norm and hasattr(optimizer, "gradient_norm"):
            norms.append(optimizer.gradient_norm)
    return losses, norms


def worst(one, other):
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def hidden(tensor):
    """Whether a parameter, or a buffer of a unit, shows poison. A parameter refuses to be read."""
    if isinstance(tensor, nn.Parameter):
        with pytest.raises(sluice.ArgumentError, match="an offloaded model has no values of it"):
            tensor.isnan()
    with torch._C.DisableTorchFunctionSubclass():
        return bool((tensor.detach().contiguous().view(torch.uint8) == 255).all())


def without_keys(name, values):
    """`values` of a parameter, without the keys' part of a bias of attention. That cancels in the softmax: its gradient is rounding alone,
    which Adam makes as large as any."""
    if not name.endswith(("in_proj_bias", "c_attn.bias")):
        return values
    queries, _, rest = values.chunk(3)
    return torch.cat([queries, rest])


def state_bytes(model, ranks=1):
    """A rank's part of parameters, gradients, masters and moments, in any type of parameters; of frozen ones, their own bytes."""
    return sum(16 * p.numel() if p.requires_grad else p.nbytes for p in model.parameters()) // ranks


def budgeted(config, model, device, host, ranks=1):
    """Gives `config` budgets in KiB, of a quarter of a rank's state at most."""
    state = state_bytes(model, ranks)
    assert 4 * ((device + host) << 10) <= state, f"the state has {state >> 10} KiB"
    config["memory"] = {"device": f"{device}KiB", "host": f"{host}KiB"}
    return config


def moves_as_planned(optimizer, micro_batches=1):
    """The last step's bytes are the plan's, none of them is 0, and it went the way that the one before taught."""
    report = optimizer.report
    read, written = optimizer._engine.predicted_traffic(micro_batches)
    assert report.schedule_changes == 0
    assert report.nvme_read_bytes == read > 0, (report.nvme_read_bytes, read)
    assert report.nvme_write_bytes == written > 0, (report.nvme_write_bytes, written)


def watch_steps(monkeypatch, micro_batches):
    """Returns a list to which each later step adds whether its bytes were the plan's and not 0. The plan for several micro-batches has each
    unit once per pass; that for 1 is what the step before has taught, whatever it consisted of."""
    planned, step = [], OffloadOptimizer.step

    def watched(self, closure=None):
        result, report = step(self, closure), self.report
        expected = self._engine.predicted_traffic(micro_batches)
        planned.append(report.schedule_changes == 0 and min(expected) > 0
                       and (report.nvme_read_bytes, report.nvme_write_bytes) == expected)
        return result
    monkeypatch.setattr(OffloadOptimizer, "step", watched)
    return planned
