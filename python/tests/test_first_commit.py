"""The first commit of a store: a process that dies right behind it loses nothing."""

import copy
import json
import logging

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, tiny, train
from test_resume import Kept, assert_kept, kept_of

STORE = {"name": "run-7"}


def crash(optimizer):
    """As a kill does: without a commit."""
    optimizer._engine.destroy()


def with_store(config, **settings):
    config = copy.deepcopy(config)
    config["storage"]["state"] = {**STORE, **settings}
    return config


def normed(value, wide=8):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    model[1].running_mean.fill_(value)
    model.register_buffer("wide", torch.full((wide,), value))
    return model


def test_a_checkpoint_begins_a_store(config, tmp_path):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    optimizer.param_groups[0]["lr"] = 7e-4
    optimizer.param_groups[0]["initial_lr"] = 5e-4
    train(model, optimizer, 2)
    folder = optimizer.save(tmp_path / "kept", application=json.dumps({"batch": 1200}))
    optimizer.close()
    config = with_store(config, commit_every=50)
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block], restore=folder)
    assert optimizer.committed_step == 2
    train(model, optimizer, 3, first=2)
    crash(optimizer)
    model = tiny(seed=4)
    optimizer = sluice.offload(model, config, units=[Block], resume=True)
    assert (optimizer.resumed_step, optimizer.application) == (2, json.dumps({"batch": 1200}))
    assert optimizer.param_groups[0]["lr"] == 7e-4 and optimizer.param_groups[0]["initial_lr"] == 5e-4
    optimizer.close()


def test_buffers_of_a_checkpoint_that_begins_a_store(config, tmp_path):
    there = Kept(3.0)
    optimizer = sluice.offload(there, config)
    expected = kept_of(there)
    folder = optimizer.save(tmp_path / "kept")
    optimizer.close()
    crash(sluice.offload(Kept(1.0), with_store(config), restore=folder))
    model = Kept(2.0)
    sluice.offload(model, with_store(config), resume=True).close()
    assert_kept(model, expected)


@pytest.mark.parametrize("on_meta", [False, True])
def test_buffers_of_the_values(config, on_meta, caplog):
    """The next start may have no values any more."""
    config = with_store(config)
    expected = kept_of(Kept(3.0))
    values = {name: tensor.clone() for name, tensor in Kept(3.0).state_dict().items()}
    with torch.device("meta" if on_meta else "cpu"):
        model = Kept(1.0)
    optimizer = sluice.offload(model, config, values=values, resume=True)
    assert optimizer.committed_step == 0
    assert_kept(model, expected)
    optimizer.param_groups[0]["lr"] = 5.0  # of no step yet
    crash(optimizer)
    model = Kept(2.0)
    caplog.clear()
    optimizer = sluice.offload(model, config, resume=True)
    assert_kept(model, expected)
    assert optimizer.resumed_step == 0 and optimizer.param_groups[0]["lr"] == config["optimizer"]["learning_rate"] and not caplog.records
    optimizer.close()


def test_the_rates_of_the_first_start(config):
    config["optimizer"] = {"clip_norm": 1.0, "overlap": "serial"}

    def start(rate):
        model = tiny()
        given = torch.optim.AdamW(model.parameters(), lr=2e-4)
        torch.optim.lr_scheduler.LambdaLR(given, lambda step: rate)
        return sluice.offload(model, with_store(config), units=[Block], optimizer=given, resume=True)
    crash(start(0.5))
    optimizer = start(1.0)
    assert optimizer.param_groups[0]["lr"] == 1e-4 and optimizer.resumed_step == 0
    optimizer.close()


def test_a_text_without_room_for_its_buffers(config, tmp_path, caplog):
    """A checkpoint's text has room for more buffers than a commit's."""
    there = normed(3.0, 1 << 20)
    optimizer = sluice.offload(there, config)
    optimizer.param_groups[0]["lr"] = 7e-4
    folder = optimizer.save(tmp_path / "kept", application="batch 3")
    optimizer.close()
    crash(sluice.offload(normed(1.0, 1 << 20), with_store(config), restore=folder))
    caplog.clear()
    optimizer = sluice.offload(normed(2.0, 1 << 20), with_store(config), resume=True)
    assert optimizer.application == "batch 3" and optimizer.param_groups[0]["lr"] == 7e-4
    assert "buffers 1.num_batches_tracked, 1.running_mean, 1.running_var and others keep their values" in caplog.text
    optimizer.close()


def test_buffers_without_room_are_said_once(config, caplog):
    caplog.set_level(logging.WARNING)
    model = normed(1.0)
    values = {name: tensor.clone() for name, tensor in normed(3.0, 1 << 20).state_dict().items()}
    model.wide = torch.zeros(1 << 20)
    optimizer = sluice.offload(model, with_store(config), values=values, resume=True)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert caplog.text.count("characters of the text beside the state") == 1
    optimizer.close()


def test_a_commit_without_a_text(config, caplog, monkeypatch):
    """As older versions made the first ones."""
    config = with_store(config)
    monkeypatch.setattr(sluice.optimizer.OffloadOptimizer, "keep_first_text", lambda *_: None)
    values = {name: tensor.clone() for name, tensor in normed(3.0).state_dict().items()}
    crash(sluice.offload(normed(1.0), config, values=values, resume=True))
    model = normed(2.0)
    optimizer = sluice.offload(model, config, values=values, resume=True)
    assert optimizer.resumed_step == 0 and model[1].running_mean.tolist() == 8 * [3.0] and not caplog.records
    monkeypatch.setattr(sluice.optimizer.OffloadOptimizer, "_text", lambda *_: "")
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.close()
    caplog.clear()
    optimizer = sluice.offload(normed(2.0), config, values=values, resume=True)
    assert "the store's commit of step 1 has no text beside its state: learning rates, application and buffers are the program's" in caplog.text
    optimizer.close()
