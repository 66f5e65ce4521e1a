"""Schedulers beside an offloaded model, and buffers that stay torch's: both have to go on where a training is resumed."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import sluice_offload as sluice
from conftest import Block, batch, tiny
from sluice_offload.schedulers import packed, unpacked


class Wrapping:
    """A scheduler of a program that holds another one."""

    def __init__(self, inner):
        self.optimizer, self.after = inner.optimizer, inner

    def step(self):
        self.after.step()


MAKERS = {
    "sequential": lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.7)], [3]),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.1, total_iters=2), schedules.ExponentialLR(o, 0.9)]),
    "wrapping": lambda o: Wrapping(schedules.ExponentialLR(o, 0.5)),
    "multi": lambda o: schedules.MultiStepLR(o, [2, 5], 0.5),
}


@pytest.fixture
def plain(config):
    del config["optimizer"]
    return config


def rates(optimizer, scheduler, steps):
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_schedulers_in_schedulers_move_the_offloaded_rates(plain, name):
    reference, model = tiny(), tiny()
    theirs, given = (torch.optim.AdamW(net.parameters(), lr=1e-3) for net in (reference, model))
    expected, scheduler = MAKERS[name](theirs), MAKERS[name](given)
    engine, ours, _, same = sluice.initialize(model=model, optimizer=given, lr_scheduler=scheduler, config=plain, units=[Block])
    assert same is scheduler
    assert rates(ours, scheduler, 7) == pytest.approx(rates(theirs, expected, 7), rel=1e-12)
    assert len(set(rates(ours, scheduler, 2))) > 0 and ours.param_groups[0]["lr"] != 1e-3
    engine.destroy()


def test_a_scheduler_of_betas_is_refused(plain):
    model = tiny()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = schedules.OneCycleLR(given, 2e-3, total_steps=5)
    with pytest.raises(sluice.ArgumentError, match="OneCycleLR also moves betas or momentum.*cycle_momentum=False"):
        sluice.rebind_scheduler(scheduler, given)
    with pytest.raises(sluice.ArgumentError, match="cycle_momentum=False"):
        sluice.initialize(model=model, optimizer=given, lr_scheduler=scheduler, config=plain, units=[Block])
    assert not hasattr(model, "_sluice")


@pytest.mark.parametrize("name", ["sequential", "multi"])
@pytest.mark.parametrize("is_durable", [False, True])
def test_schedulers_go_on_where_they_were(config, tmp_path, name, is_durable):
    if is_durable:
        config["storage"]["state"] = {"name": "run"}

    def make(seed):
        return sluice.initialize(model=tiny(seed), config=config, units=[Block], lr_scheduler=MAKERS[name], resume=is_durable)[0]

    def run(engine, steps):
        found = []
        for step in range(steps):
            engine.backward(engine(*batch(engine.global_steps)))
            engine.step()
            found.append(engine.get_lr()[0])
        return found
    whole = run(make_whole(config, name), 8)
    engine = make(0)
    assert run(engine, 4) == whole[:4]
    if not is_durable:
        engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    engine = make(1)
    if not is_durable:
        engine.load_checkpoint(tmp_path / "saved")
    assert engine.global_steps == 4
    assert run(engine, 4) == pytest.approx(whole[4:], rel=1e-12)
    engine.destroy()


def make_whole(config, name):
    whole = copy.deepcopy(config)
    whole["storage"].pop("state", None)
    return sluice.initialize(model=tiny(), config=whole, units=[Block], lr_scheduler=MAKERS[name])[0]


def test_states_with_odd_keys_come_back():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    state = schedules.MultiStepLR(optimizer, [2, 2, 5]).state_dict()
    assert unpacked(packed(state)) == state and type(unpacked(packed(state))["milestones"]) is type(state["milestones"])
    assert packed({"rate": torch.tensor(0.5)}) == {"rate": 0.5}
    with pytest.raises(sluice.ArgumentError, match="has a object"):
        packed({"odd": object()})


class Normed(nn.Module):
    """With running means, which stay torch's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def normed(seed=0):
    torch.manual_seed(seed)
    return Normed()


def trained(engine, steps):
    for step in range(steps):
        engine.backward(engine(torch.randn(8, 32, generator=torch.Generator().manual_seed(step))).square().mean())
        engine.step()


@pytest.mark.parametrize("is_durable", [False, True])
def test_running_means_go_on(config, tmp_path, is_durable):
    if is_durable:
        config["storage"]["state"] = {"name": "run"}

    def make(seed):
        return sluice.initialize(model=normed(seed), config=config, resume=is_durable)[0]
    engine = make(0)
    trained(engine, 3)
    expected = {name: value.clone() for name, value in engine.module_state_dict().items()}
    if not is_durable:
        engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    engine = make(1)
    if not is_durable:
        engine.load_checkpoint(tmp_path / "saved")
    actual = engine.module_state_dict()
    assert any("running_mean" in name for name in actual)
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())
    engine.destroy()


def test_values_of_files_have_buffers_too(config, tmp_path, caplog):
    optimizer = sluice.offload(normed(), config)
    model = optimizer._walk.model
    model(torch.randn(8, 32))
    optimizer.step()
    sluice.save_safetensors(model, tmp_path / "saved")
    expected = model.state_dict()
    optimizer.close()
    with sluice.meta_parameters():
        other = normed(1)
    optimizer = sluice.offload(other, config, values=sluice.open_safetensors(tmp_path / "saved"))
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    optimizer.close()
    wrong = {**expected, "layers.1.1.running_mean": torch.zeros(1)}
    with pytest.raises(sluice.ArgumentError, match=r"buffer layers.1.1.running_mean has shape \(1,\) in the file, but \(32,\)"):
        sluice.offload(normed(), config, values=wrong)
    without = {name: value for name, value in expected.items() if "running" not in name}
    with caplog.at_level(logging.WARNING):
        sluice.offload(normed(), config, values=without).close()
    assert "keep their values, since the file has none" in caplog.text


def test_a_step_was_applied_only_where_it_was(config):
    config["batch"] = {"sequences": 4, "micro_batches": 2}
    engine = sluice.initialize(model=tiny(), config=config, units=[Block])[0]
    applied = []
    for is_boundary in (False, False, True, False):
        engine.set_gradient_accumulation_boundary(is_boundary)
        engine.backward(engine(*batch(0)))
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, False, True, False]
    engine.destroy()


def offloaded_of(plain, **options):
    """An offloaded model, and the torch optimizer that its rates came from."""
    model = tiny()
    others = [p for p in model.parameters() if p is not model.positions]
    given = torch.optim.AdamW([{"params": [model.positions], "lr": 2e-3}, {"params": others}], lr=1e-3)
    return model, sluice.offload(model, plain, units=[Block], optimizer=given, **options), given


def test_a_scheduler_that_moves_the_given_rates_is_refused(plain):
    """It would train nothing, with a rate that stays as it was."""
    model, optimizer, given = offloaded_of(plain)
    scheduler = schedules.ExponentialLR(given, 0.5)
    for step in range(2):  # nothing has moved yet
        model(*batch(step)).backward()
        optimizer.step()
    scheduler.step()
    model(*batch(2)).backward()
    words = r"AdamW that offload\(\) was given has the learning rate 0.001 and had 0.002 then.*is 0.002.*rebind_scheduler\("
    with pytest.raises(sluice.ArgumentError, match=words):
        optimizer.step()
    assert optimizer._engine.applied_step() == 2
    sluice.rebind_scheduler(scheduler, optimizer)
    optimizer.zero_grad()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 5e-4]  # the step that the scheduler has made counts
    assert rates(optimizer, scheduler, 2) == [5e-4, 2.5e-4] and given.param_groups[0]["lr"] == 1e-3
    optimizer.close()


def test_a_program_may_move_the_rates_itself(plain):
    """Also by copies of those of the torch optimizer, which may be gone."""
    model, optimizer, given = offloaded_of(plain)
    scheduler = schedules.ExponentialLR(given, 0.5)
    scheduler.step()
    for ours, theirs in zip(optimizer.param_groups, given.param_groups):
        ours["lr"] = theirs["lr"]
    optimizer.step()
    scheduler.step()
    del given, theirs
    with pytest.raises(sluice.ArgumentError, match="rebind_scheduler"):
        optimizer.step()
    del scheduler
    optimizer.step()
    optimizer.close()


def test_a_scheduler_that_is_made_behind_offload_sets_the_first_rate(plain, tmp_path):
    """With the keys that it keeps in groups; and where its state was loaded, the last rates of that count."""
    def made(**options):
        _, optimizer, given = offloaded_of(plain, **options)
        return optimizer, schedules.OneCycleLR(given, [0.2, 0.1], total_steps=9, cycle_momentum=False)
    optimizer, scheduler = made()
    sluice.rebind_scheduler(scheduler, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2 / 25, 0.1 / 25])
    found = rates(optimizer, scheduler, 3)
    folder, state = optimizer.save(tmp_path / "run"), scheduler.state_dict()
    expected = rates(optimizer, scheduler, 2)
    optimizer.close()
    optimizer, scheduler = made(restore=folder)
    scheduler.load_state_dict(state)
    sluice.rebind_scheduler(scheduler, optimizer)
    assert optimizer.param_groups[0]["lr"] == found[-1]
    assert rates(optimizer, scheduler, 2) == expected
    optimizer.close()


def test_the_optimizer_in_a_wrapper_takes_the_rates_too(plain):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer
    _, optimizer, given = offloaded_of(plain)
    scheduler = schedules.ExponentialLR(given, 0.5)
    scheduler.step()
    sluice.rebind_scheduler(scheduler, Wrapper(optimizer))
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer.close()
