"""Copies that a program keeps from gathered() and from state_dict(), which live as long as it holds them."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, adamw, batch, hidden, tiny, train, worst


def values_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def same(kept, values):
    return kept.keys() == values.keys() and all(np.array_equal(np.asarray(one), values[name].numpy()) for name, one in kept.items())


@pytest.fixture(params=["swap", "poke", "copy"])
def pair(config, request):
    reference = tiny()
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block], storage=request.param)
    yield reference, model, optimizer
    optimizer.close()


TAKES = {"data": lambda p: p.data, "detach": lambda p: p.detach(), "view": lambda p: p.detach().view(-1).view(p.shape),
         "numpy": lambda p: p.detach().numpy(), "array": lambda p: np.asarray(p.data)}


@pytest.mark.parametrize("take", TAKES)
def test_what_is_taken_in_gathered_is_kept(pair, take):
    reference, model, optimizer = pair
    with sluice.gathered(model):
        kept = {name: TAKES[take](p) for name, p in model.named_parameters(remove_duplicate=False)}
    expected = values_of(reference)
    noise = [torch.full((61, 32), 7.0) for _ in range(64)]  # takes memory that is free
    assert same(kept, expected)
    train(model, optimizer, 2)
    assert same(kept, expected) and len(noise) == 64
    assert all(hidden(p) for p in model.parameters())


def test_a_file_of_what_is_kept(pair, tmp_path):
    reference, model, _ = pair
    with sluice.gathered(model):
        kept = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
    torch.save(kept, tmp_path / "kept.pt")
    assert same(torch.load(tmp_path / "kept.pt"), values_of(reference))


def test_what_is_taken_around_a_forward_is_kept(pair):
    reference, model, optimizer = pair
    expected = values_of(reference)
    with sluice.gathered(model):
        before = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
        with torch.no_grad():
            assert torch.equal(model(*batch(0)), reference(*batch(0)))
        behind = {name: p.data for name, p in model.named_parameters(remove_duplicate=False)}
        model(*batch(0)).backward()
    assert same(before, expected) and same(behind, expected)
    optimizer.step()
    assert same(before, expected) and same(behind, expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_training_goes_on_around_gathered(config, pair, mode):
    reference, model, optimizer = pair
    theirs, kept = adamw(reference, config), []
    for step in range(4):
        expected = values_of(reference)
        loss = model(*batch(step))
        with mode(), sluice.gathered(model), sluice.gathered(model, model.norm):
            assert type(model.norm.weight) is nn.Parameter and not model.norm.weight.is_inference()
            kept.append(model.norm.weight.detach())
        assert np.allclose(kept[-1].numpy(), expected["norm.weight"].numpy(), atol=1e-6)
        loss.backward()
        other = reference(*batch(step))
        other.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for one in (theirs, optimizer):
            one.step()
            one.zero_grad()
        assert worst([loss.item()], [other.item()]) <= 2e-6
    assert len({float(one.sum()) for one in kept}) == 4


def test_steps_inside_of_gathered(config, pair):
    reference, model, optimizer = pair
    with sluice.gathered(model):
        kept = model.norm.weight.data
        actual, _ = train(model, optimizer, 3)
        with sluice.gathered(model, model.norm):
            newer = model.norm.weight.data
    assert (kept == 1).all() and not (newer == 1).any()
    expected, _ = train(reference, adamw(reference, config), 3, clip_norm=1.0)
    assert worst(actual, expected) <= 2e-6
    assert np.allclose(newer.numpy(), reference.norm.weight.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("way", ["swap", "copy"])
def test_every_type_is_kept(config, way):
    """Trained parameters of fp32 and bf16, of which the engine shows the latter elsewhere, frozen codes, and a buffer of a unit."""
    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.norm = nn.Linear(16, 16).bfloat16(), nn.LayerNorm(16)
            self.codes = nn.Parameter(torch.arange(64, dtype=torch.uint8), requires_grad=False)
            self.register_buffer("scales", torch.rand(8, dtype=torch.float64))

        def forward(self, x):
            return self.norm(self.wide(x.bfloat16()).float()) * self.scales.sum().float() + self.codes.sum()
    torch.manual_seed(0)
    model = nn.Sequential(Coded(), Coded())
    expected = {name: values.clone() for name, values in model.state_dict().items()}
    optimizer = sluice.offload(model, config, units=[Coded], buffers=["*.scales"], storage=way)
    named = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.inference_mode(), sluice.gathered(model):
        model(torch.ones(2, 16))
        kept = {name: values.data for name, values in named.items()}
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert kept.keys() == expected.keys()
    for name, values in kept.items():
        assert values.dtype == expected[name].dtype and torch.equal(values, expected[name]), name
        assert hidden(named[name]), name
    optimizer.close()


def test_kept_copies_are_freed_with_their_last_owner(pair):
    _, model, _ = pair
    with sluice.gathered(model):
        kept = model.norm.weight.data
        copies = weakref.WeakSet(one for several in model._sluice.gatherer._copies.values() for one in several)
        assert len(copies) > 4
    gc.collect()
    assert not copies and (kept == 1).all()
    assert torch._C._storage_Use_Count(kept.untyped_storage()._cdata) <= 2, "nobody else holds them"


def test_changes_are_seen_wherever_they_are_made(pair):
    _, model, _ = pair
    weight = model.blocks[1].norm.weight
    view = weight.unsqueeze(0)
    for write in (lambda: weight.data.mul_(2), lambda: weight.detach().numpy().fill(3), lambda: view.mul_(2)):
        with pytest.raises(sluice.SluiceError, match="parameters of blocks.1 were changed"):
            with torch.no_grad(), sluice.gathered(model):
                write()
        with sluice.gathered(model):
            assert (weight == 1).all()


def test_parameters_are_guarded_behind_gathered(pair):
    _, model, _ = pair
    weight, other = model.blocks[1].norm.weight, model.blocks[0].norm.weight
    with sluice.gathered(model, model.blocks[1]):
        with pytest.raises(sluice.ArgumentError, match="reads blocks.0.norm.weight"):
            weight + other
        assert (weight + torch.zeros(32) == 1).all()
    assert hidden(weight) and hidden(other)


def test_a_parameter_that_is_given_memory_in_gathered_is_noticed(pair):
    _, model, optimizer = pair
    with sluice.gathered(model):
        model.norm.weight.data = torch.zeros(32)
    with pytest.raises(sluice.ArgumentError, match="norm.weight is another tensor than in offload"):
        optimizer.step()


def uses(model, folder):
    """Calls behind a write into a state_dict(), each of which would go on with the old values."""
    return {"a training forward": lambda: model(*batch(0)), "an evaluation": lambda: torch.no_grad()(model)(*batch(0)),
            "another state_dict()": model.state_dict, "that of a module": model.norm.state_dict,
            "a file": lambda: sluice.save_safetensors(model, folder)}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_write_into_a_state_dict_is_an_error(config, tmp_path, keeps):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    for use in uses(model, tmp_path / "values").values():
        own = model.state_dict()
        own["norm.weight"].copy_(torch.zeros(32))
        if not keeps:  # as a function that loads what it is given
            del own
        with pytest.raises(sluice.ArgumentError, match=r"norm.weight of a state_dict\(\) was written to.*load_state_dict"):
            use()
        train(model, optimizer, 1)
        assert not (model.state_dict()["norm.weight"] == 0).any(), "it was a copy, and said so once"
    optimizer.close()


def test_a_state_dict_that_is_written_and_loaded(config):
    reference = tiny(tied=False)
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block])
    for net in (reference, model):
        own = net.state_dict()
        for round in range(2):
            for values in own.values():
                values.mul_(0.5).view(-1)[0] = round
            net.load_state_dict(own)
        net.norm.load_state_dict({name: values.add_(1) for name, values in net.norm.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(model(*batch(0)), reference(*batch(0)))
    own["head.weight"].zero_()
    with pytest.raises(sluice.ArgumentError, match="head.weight of a state_dict"):
        model(*batch(0))
    optimizer.close()


def test_files_take_the_place_of_what_was_written(config, tmp_path):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    sluice.save_safetensors(model, tmp_path / "values")
    own = model.state_dict()
    own["norm.weight"].zero_()
    sluice.load_safetensors(model, tmp_path / "values")
    assert (model.state_dict()["norm.weight"] == 1).all()
    optimizer.close()


def test_tied_values_of_a_state_dict(config):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    model.state_dict()["head.weight"].zero_()
    with pytest.raises(sluice.ArgumentError, match="embedding.weight of a state_dict"):
        model.state_dict()
    optimizer.close()


def test_a_state_dict_that_is_read_alone(config):
    """Steps ask it no more when the program has dropped it, and its memory is free then."""
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    given = model._sluice_given
    kept = model.state_dict()
    average = {name: values.clone() for name, values in kept.items()}
    for values in average.values():
        values.mul_(2)
    with torch.inference_mode():
        assert model.state_dict()["norm.weight"].is_inference()
    train(model, optimizer, 2)
    assert len(given) == len(set(kept)) - 1, "tied weights are one"
    dead = [weakref.ref(values) for values in kept.values()]
    del kept, values
    gc.collect()
    assert all(one() is None for one in dead)
    train(model, optimizer, 1)
    assert not given
    optimizer.close()
