"""Experts behind a router: units that steps announce on the way, and read then alone."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice_offload as sluice
from conftest import batch, worst
from sluice_offload.units import find_units

WIDTH, EXPERTS = 32, 8


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    """Sends each row of the batch to two experts, and all rows to few."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.announce, self.skips = None, False
        self.ways = []

    def forward(self, x):
        weights, chosen = torch.topk(self.router(x.mean(dim=(0, 1))).softmax(-1), 2)
        self.ways.append(chosen.tolist())
        if self.announce is not None:
            self.announce(*(self.experts[i] for i in [*chosen.tolist(), (chosen[0].item() + 1) % EXPERTS]))
        if self.skips:
            return x
        return x + sum(weight * self.experts[i](x) for weight, i in zip(weights, chosen.tolist()))


class Mixture(nn.Module):
    def __init__(self, checkpoints=False):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(61, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 61)
        self.checkpoints = checkpoints

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.checkpoints == "reentrant") if self.checkpoints else layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def train_torch(model, steps, fills=True):
    """Losses. With `fills`, as the engine has it, the gradient of an expert that is not used is zero. Otherwise the expert has
    none, and torch leaves it as it is."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.01},
                                   {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}], lr=1e-3)
    losses = []
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if fills and p.grad is None else p.grad
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("checkpoints", [False, "kept", "reentrant"])
@pytest.mark.parametrize("announces", [False, True])
def test_only_announced_experts_are_read(config, checkpoints, announces):
    reference = Mixture(checkpoints)
    model, other = copy.deepcopy(reference), copy.deepcopy(reference)
    expected = train_torch(reference, 8)
    config["memory"] = {"device": "400KiB", "host": "4MiB"}
    optimizer = sluice.offload(model, config, units=[nn.Linear], announced=[Expert])
    for layer in model.layers:
        layer.announce = optimizer.announce if announces else None
    losses = []
    for step in range(8):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert step == 0 or optimizer.report.schedule_changes == 0
    assert worst(losses, expected) <= 2e-6
    assert [layer.ways for layer in model.layers] == [layer.ways for layer in reference.layers]
    read = optimizer.report.nvme_read_bytes
    with torch.no_grad():
        assert worst([model(*batch(9)).item()], [reference(*batch(9)).item()]) <= 2e-6
    (model(*batch(10)) * float("nan")).backward()
    optimizer.zero_grad()  # abandons what was announced
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        assert (value - state[name]).abs().max() <= 2e-5, name
    optimizer.close()
    # Without announcements, a step expects the experts of the one before.
    every = sluice.offload(other, config, units=[Expert, nn.Linear])
    changes = 0
    for step in range(8):
        other(*batch(step)).backward()
        every.step()
        changes += every.report.schedule_changes if step else 0
    assert changes > 0 or len({tuple(way) for layer in reference.layers for way in layer.ways}) <= len(reference.layers)
    expert_bytes = 4 * sum(p.numel() for p in model.layers[0].experts[0].parameters())
    spare = (2 + 8 * announces) * expert_bytes  # both windows keep other units over the turn; what is announced in vain is read
    assert read <= every.report.nvme_read_bytes + spare, (read, every.report.nvme_read_bytes)
    every.close()


def test_when_they_are_announced(config):
    """In forward one by one, unless the program names them; in backward all at its beginning, in the order of their use. A use
    that does not come is passed by."""
    model = Mixture()
    optimizer = sluice.offload(model, config, units=[nn.Linear], announced=[Expert])
    engine, names = optimizer._engine, {unit.index: unit.name for unit in optimizer._walk.units.units}
    announce, calls = engine.announce, []

    def spied(units, which):
        calls.append((which, [names[unit] for unit in units]))
        return announce(units, which)
    engine.announce = spied
    for names_them in (False, True):
        calls.clear()
        for layer in model.layers:
            layer.announce, layer.ways = optimizer.announce if names_them else None, []
        model(*batch(1)).backward()
        used = [f"layers.{i}.experts.{expert}" for i, layer in enumerate(model.layers) for expert in layer.ways[0]]
        assert calls[-1] == (1, used[::-1]) and [which for which, _ in calls] == [0] * (2 if names_them else 4) + [1]
        assert [unit for which, units in calls for unit in units if which == 0 and unit in used] == used
        optimizer.step()
    for layer in model.layers:
        layer.skips = True
    loss = model(*batch(2))
    loss.backward()
    optimizer.step()
    assert optimizer.report.step == 3 and torch.isfinite(loss)
    optimizer.close()


def test_announced_units_may_be_named_twice():
    units = find_units(Mixture(), [Expert], announced=(kind for kind in [Expert]))
    assert sum(unit.is_announced for unit in units.units) == 2 * EXPERTS


def test_local_units_of_one_process_are_announced_ones(config):
    torch_model, model = Mixture(), Mixture()
    losses = train_torch(torch_model, 3)
    optimizer = sluice.offload(model, config, units=[nn.Linear], local=[Expert])
    assert sum(unit.is_local for unit in optimizer._walk.units.units) == 2 * EXPERTS
    found = []
    for step in range(3):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert worst(found, losses) <= 2e-6
    with pytest.raises(sluice.ArgumentError, match="local=.'Specialist'. names no module"):
        find_units(Mixture(), [nn.Linear], local=["Specialist"])


def test_what_cannot_be_announced_is_refused(config):
    with pytest.raises(sluice.ArgumentError, match="is in a unit that is fetched as one"):
        sluice.offload(Mixture(), config, units=[Layer], announced=[Expert])
    with pytest.raises(sluice.ArgumentError, match="names no module"):
        sluice.offload(Mixture(), config, units=[nn.Linear], announced=["Specialist"])
    model = Mixture()
    optimizer = sluice.offload(model, config, units=[nn.Linear], announced=["Expert"])
    with pytest.raises(sluice.ArgumentError, match="behind its router"):
        optimizer.announce(model.layers[0].experts[0])
    model.layers[0].announce = lambda *_: optimizer.announce(model.head)
    with pytest.raises(sluice.ArgumentError, match="this Linear is no announced unit"):
        model(*batch(0))
    optimizer.close()


def test_a_forward_alone_ends_as_the_error_says(config):
    """Values cannot be read behind a forward that has announced units, and step() ends the step, with gradients or without."""
    model = Mixture()
    optimizer = sluice.offload(model, config, units=[nn.Linear], announced=[Expert])
    before = model.state_dict()
    for has_gradients in (False, True):
        loss = model(*batch(0))
        if has_gradients:
            loss.backward()
        with pytest.raises(sluice.ArgumentError, match=r"step\(\) ends it, with an update if.*zero_grad\(\) in front of it drops"):
            model.state_dict()
        optimizer.zero_grad()
        optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.close()
