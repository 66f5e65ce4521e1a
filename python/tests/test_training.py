"""Offloaded training against torch in memory."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice_offload as sluice
from conftest import Block, Tiny, adamw, batch, budgeted, moves_as_planned, tiny, train, without_keys, worst

# Uses in a step of Tiny: seven modules with parameters, forward and backward, the head over the embedding's.
USES = 14


def difference(model, reference, start):
    """||W - W_reference|| / ||W_reference - W_start||, over all tensors together but the keys' biases."""
    moved = apart = 0.0
    for name, value in model.state_dict().items():
        apart += without_keys(name, value - reference[name]).double().norm().item() ** 2
        moved += without_keys(name, reference[name] - start[name]).double().norm().item() ** 2
    return (apart / moved) ** 0.5


@pytest.mark.parametrize("storage", ["swap", "poke", "copy"])
def test_fifty_steps_are_torchs(config, storage):
    reference = tiny(width=128, layers=8)
    budgeted(config, reference, 1344, 1344)
    model, start = copy.deepcopy(reference), copy.deepcopy(reference.state_dict())
    losses, norms = train(reference, adamw(reference, config), 50, clip_norm=1.0)
    optimizer = sluice.offload(model, config, units=[Block], storage=storage)
    actual = []
    for step in range(50):
        loss, norm = train(model, optimizer, 1, first=step)
        actual.append((loss[0], norm[0]))
        if step > 0:
            moves_as_planned(optimizer)
    loss_difference = worst([loss for loss, _ in actual], losses)
    weight_difference = difference(model, reference.state_dict(), start)
    print(f"{storage}: worst relative loss {loss_difference:.1e}, weights {weight_difference:.1e}, "
          f"{optimizer.report.nvme_read_bytes} bytes read and {optimizer.report.nvme_write_bytes} written per step")
    assert loss_difference <= 2e-6
    assert worst([norm for _, norm in actual], norms) <= 2e-6
    assert weight_difference <= 1e-5
    assert optimizer._walk.uses == 2 * (8 + 4)
    optimizer.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [1.0, 0])
def test_placements_and_policies_give_the_same_bits(config, dtype, clip):
    """Updates that begin in backward for good are for steps without clipping."""
    expected = None
    config["precision"] = {"parameters": dtype}
    config["optimizer"]["clip_norm"] = clip
    for placement in ("nvme", "host", "device"):
        for overlap in ("serial", "deferred", "auto", "speculative") if clip else ("serial", "eager"):
            settings = copy.deepcopy(config)
            settings["optimizer"]["overlap"] = overlap
            settings["placement"] = {"parameters": placement, "optimizer": placement if placement != "device" else "host"}
            settings["memory"] = {"device": "4MiB", "host": "16MiB"}
            model = tiny()
            optimizer = sluice.offload(model, settings, units=[Block])
            losses, _ = train(model, optimizer, 6)
            bits = (losses, {name: value.tolist() for name, value in model.state_dict().items()})
            assert optimizer.report.clip_factor == 1 or clip
            optimizer.close()
            expected = expected or bits
            assert bits == expected, (placement, overlap)


def test_bf16_masters_are_those_of_fp32_arithmetic(config):
    """The parameters are the masters, rounded: half away from zero, while torch rounds half to even."""
    config["precision"] = {"parameters": "bf16"}
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 3)
    engine, units = optimizer._engine, optimizer._walk.units
    for unit in units.units:
        for member in unit.members:
            rounded = ((engine.read(member, 1).view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
            assert torch.equal(rounded, engine.read(member))


class Partly(nn.Module):
    """Some of its parameters have no elements, as a layer of no features has."""

    def __init__(self):
        super().__init__()
        self.full, self.none, self.rows = nn.Linear(8, 8), nn.Linear(8, 0), nn.Parameter(torch.empty(0, 8))

    def forward(self, x):
        return (torch.cat([self.full(x), self.none(x)], dim=1).square().mean() + self.rows.sum()) * 30


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_without_elements(config, device, tmp_path):
    reference = Partly()
    start = copy.deepcopy(reference.state_dict())
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    with torch.device(device):
        model = Partly()
    config["optimizer"] = {"clip_norm": 1.0}
    ours = sluice.offload(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), values=start)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        expected, actual = reference(x), model(x)
        assert worst([actual.item()], [expected.item()]) <= 2e-6
        expected.backward()
        actual.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    sluice.save_safetensors(model, tmp_path / "saved")
    saved = sluice.open_safetensors(tmp_path / "saved")
    state = model.state_dict()
    assert list(state) == list(start)
    for name, value in reference.state_dict().items():
        assert state[name].shape == saved[name].shape == value.shape and state[name].device.type == "cpu", name
        assert torch.equal(state[name], saved[name]) and (state[name] - value).abs().sum() <= 2e-5, name
    assert not model.load_state_dict(start).missing_keys
    ours.close()


def test_micro_batches_that_nobody_announced(config):
    reference = tiny()
    model = copy.deepcopy(reference)
    losses, norms = train(reference, adamw(reference, config), 6, clip_norm=1.0, micro_batches=3)
    optimizer = sluice.offload(model, config, units=[Block])
    actual = train(model, optimizer, 6, micro_batches=3)
    assert worst(actual[0], losses) <= 2e-6
    assert worst(actual[1], norms) <= 2e-6
    assert optimizer.report.schedule_changes == 0


def test_eager_updates_need_one_backward_per_step(config):
    config["optimizer"].update(clip_norm=0, overlap="eager")
    torch.manual_seed(0)
    reference = nn.Sequential(*(Block(32) for _ in range(3)))
    reference[1].attention.requires_grad_(False)  # two units of one module
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block])
    theirs, losses = adamw(reference, config), ([], [])
    inputs = [torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    for x in inputs:
        for net, update, found in ((reference, theirs, losses[0]), (model, optimizer, losses[1])):
            loss = net(x).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            found.append(loss.item())
    assert worst(*losses) <= 2e-6
    model(inputs[0]).sum().backward()
    with pytest.raises(sluice.ArgumentError, match="after what the schedule calls its last backward use"):
        model(inputs[1])
    with contextlib.suppress(sluice.SluiceError):  # that the step was abandoned, if blocks had been updated
        optimizer.close()


def test_learning_rates_of_schedulers_and_groups(config):
    """A scheduler, a rate that is set between backward and step, and a group of its own."""
    config["optimizer"]["groups"] = [{"tensors": ["embedding.*"], "learning_rate_factor": 0.1}]
    reference = tiny(tied=False)
    model = copy.deepcopy(reference)
    embedding = [reference.embedding.weight]
    other = [p for p in reference.parameters() if p is not reference.embedding.weight]
    torchs = torch.optim.AdamW([
        {"params": [p for p in other if p.dim() >= 2]}, {"params": [p for p in other if p.dim() < 2], "weight_decay": 0.0},
        {"params": embedding, "lr": 1e-4}], lr=1e-3, weight_decay=0.01)
    ours = sluice.offload(model, config, units=[Block])
    assert [group["lr"] for group in ours.param_groups] == [1e-3, 1e-4]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (torchs, ours)]
    for step in range(5):
        for net, optimizer in ((reference, torchs), (model, ours)):
            net(*batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for optimizer, scheduler in zip((torchs, ours), schedulers):
            for group in optimizer.param_groups:
                group["lr"] *= 0.7  # between backward and step
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    expected = reference.state_dict()
    for name, value in model.state_dict().items():
        assert without_keys(name, value - expected[name]).abs().max() <= 2e-6, name


class Checkpointed(Tiny):
    reentrant = False

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens) + self.positions[:tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_checkpointing(config, kind):
    torch.manual_seed(0)
    reference = kind()
    model = copy.deepcopy(reference)
    losses, norms = train(reference, adamw(reference, config), 8, clip_norm=1.0)
    optimizer = sluice.offload(model, config, units=[Block])
    actual = train(model, optimizer, 8)
    assert worst(actual[0], losses) <= 2e-6
    assert worst(actual[1], norms) <= 2e-6
    assert optimizer.report.schedule_changes == 0
    assert optimizer._walk.uses == USES  # what is computed again is, under the lease of backward


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_checkpoints_around_several_units(config, kind):
    """Each lease ends where the next unit is computed again, before the backward of the one before."""
    torch.manual_seed(0)
    reference = kind()
    model = copy.deepcopy(reference)
    losses, norms = train(reference, adamw(reference, config), 6, clip_norm=1.0)
    optimizer = sluice.offload(model, config, units=[nn.Linear, nn.MultiheadAttention])
    actual = train(model, optimizer, 6)
    assert worst(actual[0], losses) <= 2e-6
    assert worst(actual[1], norms) <= 2e-6
    assert optimizer.report.schedule_changes == 0
    optimizer.close()


@pytest.mark.parametrize("handled", ["forward", "backward"])
def test_a_pass_inside_of_an_exception_handler(config, handled):
    """As a program does that tries a smaller batch again. The failure that is being handled is none of the pass."""
    torch.manual_seed(0)
    reference = Reentrant()
    model = copy.deepcopy(reference)
    losses, norms = train(reference, adamw(reference, config), 3, clip_norm=1.0)
    optimizer = sluice.offload(model, config, units=[nn.Linear, nn.MultiheadAttention])
    actual = []
    for step in range(3):
        def forward():
            actual.append(model(*batch(step)))
        for name, call in (("forward", forward), ("backward", lambda: actual[-1].backward())):
            if name != handled:
                call()
                continue
            try:
                raise MemoryError
            except MemoryError:
                call()
        actual[-1] = actual[-1].item()
        optimizer.step()
        assert abs(optimizer.gradient_norm / norms[step] - 1) <= 2e-6
    assert worst(actual, losses) <= 2e-6
    optimizer.close()


class Twice(Block):
    """Its inner checkpoints have backward passes of their own, so that one parameter's gradient comes in two parts."""

    def forward(self, x):
        for _ in range(2):
            x = x + checkpoint(self.mlp, x, use_reentrant=True)
        return x + self.attention(x, x, x, need_weights=False)[0] + self.norm(x)


def test_gradients_in_two_parts(config):
    torch.manual_seed(0)
    reference = Tiny(block=Twice)
    model = copy.deepcopy(reference)
    losses, norms = train(reference, adamw(reference, config), 8, clip_norm=1.0)
    optimizer = sluice.offload(model, config, units=[Twice])
    actual = train(model, optimizer, 8)
    assert worst(actual[0], losses) <= 2e-6
    assert worst(actual[1], norms) <= 2e-6


class Recurrent(nn.Module):
    """A loop over two shared blocks, a buffer, and outputs in a dictionary."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2))
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = nn.Linear(16, 61)

    def forward(self, tokens, labels):
        state = {"x": self.embedding(tokens)}
        for _ in range(3):
            for block in self.blocks:
                state = {"x": state["x"] + self.scale * block(state["x"])}
        return nn.functional.cross_entropy(self.head(state["x"]).flatten(0, 1), labels.flatten())


def test_blocks_in_a_loop(config):
    torch.manual_seed(0)
    reference = Recurrent()
    model = copy.deepcopy(reference)
    losses, _ = train(reference, adamw(reference, config), 8, clip_norm=1.0)
    optimizer = sluice.offload(model, config)
    first, _ = train(model, optimizer, 1)
    assert optimizer.report.schedule_changes > 0  # the order was learned
    rest, _ = train(model, optimizer, 7, first=1)
    assert optimizer.report.schedule_changes == 0
    assert worst(first + rest, losses) <= 2e-6


class Attentive(nn.Module):
    """Attention that is in no list: a unit of its own, whose out_proj is never called."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 61)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        x = self.recurrent(x + self.attention(x, x, x)[0])[0]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_modules_whose_parts_are_not_called(config):
    torch.manual_seed(0)
    reference = Attentive()
    model = copy.deepcopy(reference)
    losses, _ = train(reference, adamw(reference, config), 8, clip_norm=1.0)
    optimizer = sluice.offload(model, config)
    actual, _ = train(model, optimizer, 8)
    assert worst(actual, losses) <= 2e-6
    assert optimizer.report.schedule_changes == 0


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_change_their_rows_in_forward_are_refused(config, make):
    model = nn.Sequential(nn.Sequential(make(61, 16, max_norm=0.5)), nn.Linear(16, 61))
    with pytest.raises(sluice.ArgumentError, match=r"0\.0 has max_norm=0.5: .* Leave max_norm out"):
        sluice.offload(model, config, lr=1e-3)
    model[0][0].max_norm = None
    sluice.offload(model, config, lr=1e-3).close()


class LoRA(nn.Module):
    """A frozen matrix with a trained one of low rank beside it, in one module."""

    def __init__(self, width, _):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)
        for parameter in self.base.parameters():
            parameter.requires_grad_(False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def test_frozen_parameters_beside_trained_ones(config):
    torch.manual_seed(0)
    reference = Tiny(block=LoRA)
    for parameter in reference.embedding.parameters():
        parameter.requires_grad_(False)
    model = copy.deepcopy(reference)
    losses, _ = train(reference, adamw(reference, config), 8, clip_norm=1.0)
    optimizer = sluice.offload(model, config, units=[LoRA])
    actual, _ = train(model, optimizer, 8)
    assert worst(actual, losses) <= 2e-6
    assert optimizer.report.schedule_changes == 0
    before = reference.blocks[0].base.weight
    assert torch.equal(model.state_dict()["blocks.0.base.weight"], before)


def test_two_forwards_and_one_backward(config):
    reference = tiny()
    model = copy.deepcopy(reference)
    optimizers = adamw(reference, config), sluice.offload(model, config, units=[Block])
    losses = [[], []]
    for step in range(4):
        for i, (net, optimizer) in enumerate(zip((reference, model), optimizers)):
            loss = net(*batch(2 * step)) + net(*batch(2 * step + 1))
            loss.backward()
            losses[i].append(loss.item())
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert worst(losses[1], losses[0]) <= 2e-6


def test_evaluation_between_steps(config):
    reference = tiny()
    model = copy.deepcopy(reference)
    torchs, ours = adamw(reference, config), sluice.offload(model, config, units=[Block])
    for step in range(3):
        train(reference, torchs, 1, clip_norm=1.0, first=step)
        train(model, ours, 1, first=step)
        with torch.no_grad():
            for net in (reference, model):
                net.eval()
            logits = [net(batch(99)[0]) for net in (reference, model)]
            part = [net.blocks[1](torch.ones(1, 2, 32)) for net in (reference, model)]  # a module alone
            for net in (reference, model):
                net.train()
        for one, other in (logits, part):
            assert (one - other).abs().max() <= 1e-6 * one.abs().max()
    assert ours.report.schedule_changes == 0


def test_budgets_are_kept_and_a_small_one_is_named(config):
    config["memory"] = {"device": "8KiB", "host": "1MiB"}
    model = tiny()
    with pytest.raises(sluice.OutOfMemoryError, match="smallest that works"):
        sluice.offload(model, config, units=[Block])
    assert torch.isfinite(model(*batch(0)))  # it is as before
