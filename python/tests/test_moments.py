"""Moments in fewer bits (`optimizer.state`), and units that steps do not use (`optimizer.untouched`)."""

import math

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, batch, moves_as_planned, tiny, train, worst
from test_announced import Expert, Mixture, train_torch
from test_resume import states

# At rest, for a parameter in bf16: itself, the rest of its master, and two moments.
BYTES = {"fp32": 12, "bf16": 8, "8bit": 6 + 2 * 4 / 256}


def trained(config, state, steps=4):
    """Losses, moments, and the bytes that a step has written for each parameter."""
    model = tiny(width=64).to(torch.bfloat16)
    config["optimizer"]["state"] = state
    optimizer = sluice.offload(model, config, units=[Block])
    losses, _ = train(model, optimizer, steps)
    moves_as_planned(optimizer)
    found, written = states(optimizer), optimizer.report.nvme_write_bytes / sum(p.numel() for p in model.parameters())
    optimizer.close()
    return losses, found, written


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_fewer_bits_train_as_well_and_take_fewer_bytes(config, state):
    """Pages of 4 KiB round the bytes up; the blocks here are small."""
    losses, found, written = trained(config, state)
    expected, exact, written_fp32 = trained(config, "fp32")
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] == expected[0] and worst(losses, expected) <= 0.05
    assert BYTES[state] <= written <= 1.1 * BYTES[state]
    assert written / written_fp32 == pytest.approx(BYTES[state] / BYTES["fp32"], rel=0.1)
    assert not all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))
    again = trained(config, state)
    assert losses == again[0] and all(torch.equal(one, other) for one, other in zip(found, again[1], strict=True))


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_checkpoints_hold_moments_of_any_kind(config, tmp_path, state):
    """Checkpoints have fp32 moments, which encode to the same again."""
    config["optimizer"]["state"] = state
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 2)
    saved = optimizer.save(tmp_path / "run")
    expected, state_then = train(model, optimizer, 2, first=2)[0], states(optimizer)
    optimizer.close()
    other = tiny(seed=5)
    restored = sluice.offload(other, config, units=[Block], restore=saved)
    assert train(other, restored, 2, first=2)[0] == expected
    for one, two in zip(states(restored), state_then, strict=True):
        assert torch.equal(one, two)
    restored.close()


def test_what_does_not_go_together_is_refused(config):
    """A value that is none, and a durable store whose moments are others."""
    for key, value in (("state", "4bit"), ("untouched", "sometimes"), ("lazy_max", 0)):
        wrong = {**config, "optimizer": {**config["optimizer"], key: value}}
        with pytest.raises(sluice.ConfigError, match=f"optimizer.{key}"):
            sluice.offload(tiny(), wrong, units=[Block])
    config["storage"]["state"] = {"name": "run", "commit_every": 1}
    config["optimizer"]["state"] = "8bit"
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block], resume=True)
    train(model, optimizer, 1)
    optimizer.close()
    config["optimizer"]["state"] = "bf16"
    with pytest.raises(sluice.SluiceError, match="optimizer.state was 8bit and is bf16"):
        sluice.offload(tiny(), config, units=[Block], resume=True)
    config["optimizer"]["state"] = "8bit"
    resumed = sluice.offload(tiny(), config, units=[Block], resume=True)
    assert resumed.resumed_step == 1
    resumed.close()


def routed(config, untouched, steps=8):
    """Losses, parameters, and bytes written in all steps."""
    config["optimizer"]["untouched"] = untouched
    model = Mixture()
    optimizer = sluice.offload(model, config, units=[nn.Linear], announced=[Expert])
    losses, written = [], 0
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        written += optimizer.report.nvme_write_bytes
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    return losses, parameters, written


def test_untouched_experts(config):
    """"skip" does what torch does, and "lazy" has the bits of "update"; both write less."""
    losses, parameters, written = routed(config, "update")
    assert worst(losses, train_torch(Mixture(), 8)) <= 2e-6
    lazy_losses, lazy, lazy_written = routed(config, "lazy")
    assert lazy_losses == losses and lazy.keys() == parameters.keys()
    assert all(torch.equal(lazy[name], value) for name, value in parameters.items())
    reference = Mixture()
    skip_losses, skip, skip_written = routed(config, "skip")
    assert worst(skip_losses, train_torch(reference, 8, fills=False)) <= 2e-6
    for name, value in reference.state_dict().items():
        assert (value - skip[name]).abs().max() <= 2e-5, name
    assert any(not torch.equal(skip[name], value) for name, value in parameters.items())
    assert skip_written < 0.8 * written and lazy_written < written


def optimized(state, place, folder, dtype, restored_at=None, make=sluice.optim.AdamW):
    """Parameters after six steps of sluice.optim.AdamW, and the bytes of its state for each parameter."""
    torch.manual_seed(3)
    model = nn.Linear(700, 300).to(dtype)
    config = {"placement": {"optimizer": place}, "memory": {"host": "64MiB"}, "storage": {"paths": [str(folder)]},
              "optimizer": {"state": state, "rounding_seed": 5}}
    optimizer = make(model.parameters(), lr=1e-2, config=config)
    for step in range(6):
        if step == restored_at:
            saved = optimizer.state_dict()
            optimizer.close()
            optimizer = make(model.parameters(), lr=1e-2, config=config)
            optimizer.load_state_dict(saved)
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    report = optimizer.report
    size = (report.nvme_bytes if place == "nvme" else report.host_bytes) / sum(p.numel() for p in model.parameters())
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()], size


@pytest.mark.parametrize("dtype, kept", [(torch.float32, 0), (torch.bfloat16, 4)])
@pytest.mark.parametrize("state, moments", [("bf16", 4), ("8bit", 2 + 2 * 4 / 256)])
def test_the_optimizer_alone_takes_them(state, moments, dtype, kept, tmp_path):
    in_memory, size = optimized(state, "host", tmp_path, dtype)
    assert size == pytest.approx(kept + moments, rel=0.05)
    on_storage, size = optimized(state, "nvme", tmp_path, dtype)
    assert size == pytest.approx(kept + moments, rel=0.05)
    restored, _ = optimized(state, "nvme", tmp_path, dtype, restored_at=3)
    exact, _ = optimized("fp32", "host", tmp_path, dtype)
    for one, two, three, four in zip(in_memory, on_storage, restored, exact):
        assert torch.equal(one, two) and torch.equal(one, three)
        assert not torch.equal(one, four) and (one - four).abs().max() < 0.1


def momentum(parameters, **arguments):
    return sluice.optim.SGD(parameters, momentum=0.9, **arguments)


@pytest.mark.parametrize("make", [sluice.optim.Lion, momentum])
@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_an_optimizer_without_bias_correction_goes_on(state, make, tmp_path):
    """The random bits of the rounding follow the step, which torch's SGD does not save."""
    whole, _ = optimized(state, "host", tmp_path, torch.bfloat16, make=make)
    restored, _ = optimized(state, "nvme", tmp_path, torch.bfloat16, restored_at=3, make=make)
    assert all(torch.equal(one, two) for one, two in zip(whole, restored))
