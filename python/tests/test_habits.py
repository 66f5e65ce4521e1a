"""Habits of training loops that meet an offloaded model: forwards that write to parameters, reading between forward and backward,
models that ran compiled before, evaluation beside training, models that are dropped."""

import copy
import gc
import json
import pathlib
import re
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import sluice_offload as sluice
from conftest import Block, batch, tiny, train
from sluice_offload.errors import _WORDS, error_of
from sluice_offload.units import find_units


class Normed(nn.Module):
    """Normalizes its own weight in forward."""

    def __init__(self, width=48):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(nn.functional.normalize(self.weight, dim=1))
        return nn.functional.linear(x, self.weight).tanh()


class Codebook(nn.Module):
    """A frozen parameter that moves with the inputs, as in vector quantization."""

    def __init__(self, width=48):
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        with torch.no_grad():
            self.codes.lerp_(x.mean(0), 0.1)
        return self.linear(x) + self.codes


@pytest.mark.parametrize("made", [Normed, Codebook])
@pytest.mark.parametrize("place", ["nvme", "host", "device"])
@pytest.mark.parametrize("storage", ["swap", "poke", "copy"])
def test_a_forward_that_writes_to_its_parameters_is_refused_in_every_place(config, made, place, storage):
    config["placement"] = {"parameters": place, "optimizer": "nvme"}
    model = nn.Sequential(made(), made())
    optimizer = sluice.offload(model, config, storage=storage)
    with pytest.raises(sluice.ArgumentError, match="0.(weight|codes) was changed in its module's forward"):
        model(torch.randn(4, 48))
    with torch.no_grad(), pytest.raises(sluice.ArgumentError, match="in a buffer"):
        model(torch.randn(4, 48))
    optimizer.close()


def test_what_only_has_had_a_forward_can_be_read_and_saved(config, tmp_path):
    """And the graph of that forward trains behind it, with the bits of a training in which nothing is read."""
    reference, model = tiny(), tiny()
    theirs, ours = (sluice.offload(net, copy.deepcopy(config), units=[Block]) for net in (reference, model))
    for step in range(3):
        loss = model(*batch(step))
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in reference.state_dict().items())
        ours.save(tmp_path / "run")
        loss.backward()
        ours.step()
        ours.zero_grad()
        assert [loss.item()] == train(reference, theirs, 1, first=step)[0]
    model(*batch(9)).backward()
    with pytest.raises(sluice.ArgumentError, match=r"optimizer\.zero_grad\(\) in front of it drops"):
        model.state_dict()
    ours.zero_grad()
    model.state_dict()
    ours.close()
    theirs.close()


def test_a_graph_from_before_other_values_is_refused(config, tmp_path):
    """As in torch, whose load_state_dict() writes to what the graph has saved."""
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    saved = optimizer.save(tmp_path / "run")
    values = {name: value + 1 for name, value in model.state_dict().items()}
    for change in (lambda: model.load_state_dict(values), lambda: optimizer.load_checkpoint(saved)):
        loss = model(*batch(0))
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
    assert train(model, optimizer, 1)[0] == [pytest.approx(tiny()(*batch(0)).item(), rel=1e-6)]
    optimizer.close()


def test_activations_on_the_drive_outlast_a_reading(config):
    config["activations"] = "nvme"
    reference, model = tiny(), tiny()
    theirs, ours = (sluice.offload(net, copy.deepcopy(config), units=[Block]) for net in (reference, model))
    for step in range(2):
        loss = model(*batch(step))
        model.state_dict()
        loss.backward()
        ours.step()
        assert [loss.item()] == train(reference, theirs, 1, first=step)[0]
    ours.close()
    theirs.close()


def test_a_discriminator_that_is_frozen_for_the_generator_can_be_saved(config):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 1)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    logits = model(batch(0)[0])
    assert not logits.requires_grad
    before = model.state_dict()
    for parameter in trained:
        parameter.requires_grad_(True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optimizer, 1, first=1)
    optimizer.close()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        return self.second(self.first(x).relu())


# torch 2.6 ends the process where it compiles again behind torch._dynamo.reset(), once a compiled module has been collected.
COMPILED = []


@pytest.mark.parametrize("is_other", [False, True])
def test_a_model_that_ran_compiled_before_trains(config, is_other):
    """It, or another one of its class. torch would use graphs without hooks, and compute with no values."""
    model, x = Layers(), torch.randn(4, 48)
    compiled, before = torch.compile(model, backend="aot_eager"), model
    COMPILED.append(compiled)
    if is_other:
        before = Layers()
        before.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = torch.compile(before, backend="aot_eager")(x)
    torch.compile(before, backend="aot_eager")(x)
    optimizer = sluice.offload(model, config)
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)
    compiled(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.close()


def test_a_second_thread_is_refused_and_training_goes_on(config):
    model, reference = tiny(), tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    twin = sluice.offload(reference, copy.deepcopy(config), units=[Block])
    refused = []

    def evaluate():
        try:
            with torch.no_grad():
                model(*batch(5))
        except sluice.ArgumentError as error:
            refused.append(str(error))

    def beside(*_):
        if threading.current_thread() is not threading.main_thread():
            return  # of a thread that was not refused
        thread = threading.Thread(target=evaluate, daemon=True)
        thread.start()
        thread.join(60)
    inside = model.blocks[1].register_forward_hook(beside)
    losses, _ = train(model, optimizer, 2)
    inside.remove()
    assert len(refused) == 2 and all("one thread at a time" in text for text in refused)
    assert losses == train(reference, twin, 2)[0]
    beside()  # between steps any thread may
    assert len(refused) == 2
    assert train(model, optimizer, 2, first=2)[0] == train(reference, twin, 2, first=2)[0]
    optimizer.close()
    twin.close()


def test_a_cell_that_is_run_again_leaves_one_engine_behind(config):
    """A notebook names the old model and optimizer until the new ones are made, and Python's collector comes late."""
    alive = weakref.WeakSet()
    gc.disable()
    try:
        for _ in range(4):
            model = tiny(layers=1)
            optimizer = sluice.offload(model, config, units=[Block])
            model(*batch(0)).backward()
            alive.add(optimizer._engine)
            assert len(alive) <= 2
    finally:
        gc.enable()
    optimizer.close()
    with pytest.raises(sluice.ArgumentError, match="was offloaded, and its optimizer is closed.*make the model anew"):
        sluice.offload(model, config, units=[Block])


@pytest.mark.parametrize("closes", [True, False])
def test_a_model_that_is_dropped_is_collected(config, closes):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 2)
    if closes:
        optimizer.close()
    left = [weakref.ref(model), weakref.ref(optimizer._engine)]
    del model, optimizer
    gc.collect()
    assert [one() for one in left] == [None, None]


SCHEDULES = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda k: 1 / (1 + k)),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 20, 1e-5),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "linear": lambda o: schedules.LinearLR(o, 0.1, total_iters=5),
    "one cycle": lambda o: schedules.OneCycleLR(o, 1e-2, 20, cycle_momentum=False),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_with_a_durable_store_as_the_guide_says(config, name):
    config["storage"]["state"] = {"name": "run"}

    def rates(model, steps):
        optimizer = sluice.offload(model, copy.deepcopy(config), units=[Block], resume=True)
        first = optimizer.resumed_step or 0
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        scheduler = SCHEDULES[name](optimizer)
        for _ in range(first):
            scheduler.step()
        found = []
        for i in range(first, steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.application = json.dumps(i + 1)
            train(model, optimizer, 1, first=i)
            scheduler.step()
        optimizer.close()
        return found
    found = rates(tiny(), 3) + rates(tiny(), 8)
    plain = torch.optim.AdamW(tiny().parameters(), lr=1e-3)
    scheduler = SCHEDULES[name](plain)
    expected = []
    for _ in range(8):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    assert found == expected


def test_what_cannot_be_offloaded_is_named(config):
    model = tiny()
    with pytest.raises(sluice.ArgumentError, match="takes a model, a torch.nn.Module, and this is a generator"):
        sluice.offload(model.parameters(), config)
    with pytest.raises(sluice.ArgumentError, match="0.weight has no shape yet"):
        sluice.offload(nn.Sequential(nn.LazyLinear(4)), config)
    optimizer = sluice.offload(model.blocks, config)
    with pytest.raises(sluice.ArgumentError, match="blocks of this Tiny is offloaded already"):
        sluice.offload(model, config)
    with pytest.raises(sluice.ArgumentError, match="this Block is offloaded already"):
        sluice.offload(model.blocks[0], config)
    optimizer.close()


@pytest.mark.parametrize("theirs", ["engine/step/step_schedule.cc", "engine/step/step_terms.cc"])
def test_remedies_of_eager_updates_are_those_of_torch(theirs):
    """With the engine's own words, from its sources."""
    source = (pathlib.Path(__file__).parents[2] / theirs).read_text(encoding="utf-8")
    text = re.sub(r'"\s+"', "", source)  # as the compiler joins texts
    told = next(words for words in _WORDS if words in text)
    assert _WORDS[told] in str(error_of(2, f"acquire: {told} or so")) and told not in str(error_of(2, told))


def test_a_backbone_in_front_of_its_head_is_several_units():
    """As one it would take as much memory as the model. Classes that the backbone itself names count, too."""
    def names(model):
        return [unit.name for unit in find_units(model).units]
    backbone, head = tiny(), nn.Linear(61, 2)
    blocks = [f"0.blocks.{i}" for i in range(3)]
    assert names(nn.Sequential(backbone, head)) == ["0", "0.embedding", *blocks, "0.norm", "1"]
    assert names(nn.Sequential(nn.Sequential(backbone, nn.ReLU()), head))[2:5] == ["0." + name for name in blocks]
    assert names(nn.Sequential(head, nn.Linear(2, 90))) == ["0", "1"], "a large one that is no list of others"
    backbone._no_split_modules = ["Linear"]
    assert "0.blocks.1.mlp.1" in names(nn.Sequential(backbone, nn.Linear(61, 2000)))


def test_a_parameter_in_the_forward_of_another_module(config):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.middle = nn.Embedding(11, 8), nn.Linear(8, 8)

        def forward(self, tokens):
            return nn.functional.cross_entropy(self.middle(self.table(tokens)) @ self.table.weight.T, tokens)
    for units in (None, [Tied]):
        model = nn.Sequential(Tied())
        optimizer = sluice.offload(model, config, units=units)
        model(torch.arange(8)).backward()
        optimizer.step()
        assert optimizer._engine.applied_step() == 1
        optimizer.close()
