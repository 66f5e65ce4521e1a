"""gathered() inside of gathered(), of parts of an offloaded model, and of what contains one."""

import copy

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, batch, hidden, tiny


@pytest.fixture(params=["best", "copy"])
def pair(config, request):
    reference = tiny(tied=False)
    model = copy.deepcopy(reference)
    way = None if request.param == "best" else "copy"
    optimizer = sluice.offload(model, config, units=[Block], storage=way)
    yield reference, model
    optimizer.close()


def shows(module, reference):
    """Whether all parameters have their values; none of them has if they show poison."""
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    same = [type(one) is nn.Parameter and torch.equal(one, other) for one, other in pairs]
    assert all(same) or all(hidden(p) for p in module.parameters())
    return all(same)


def test_one_inside_of_another(pair):
    reference, model = pair
    with sluice.gathered(model):
        with sluice.gathered(model, model.norm), sluice.gathered(model, model.norm):
            assert shows(model, reference)
        assert shows(model, reference)
        with torch.no_grad():  # leases end where the copies are
            assert torch.equal(model(*batch(0)), reference(*batch(0)))
        assert shows(model, reference)
    assert not shows(model, reference)


def test_the_outer_one_still_sees_changes(pair):
    _, model = pair
    with pytest.raises(sluice.SluiceError, match="parameters of norm were changed"):
        with sluice.gathered(model):
            with sluice.gathered(model, model.norm):
                pass
            with torch.no_grad():
                model.norm.weight.add_(1)


def test_the_outer_one_may_end_first(pair):
    reference, model = pair
    outer, inner = sluice.gathered(model), sluice.gathered(model, model.blocks[1])
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert shows(model.blocks[1], reference.blocks[1]) and not shows(model.norm, reference.norm)
    inner.__exit__(None, None, None)
    assert not shows(model, reference)


def test_a_part_of_an_offloaded_model(pair):
    reference, model = pair
    for name in ("norm", "blocks", "blocks.1.mlp", "head"):
        with sluice.gathered(model.get_submodule(name)):
            assert shows(model.get_submodule(name), reference.get_submodule(name))
            assert hidden(model.positions), "other units stay where they are"
    with sluice.gathered(model.blocks, model.blocks[0].parameters()):
        assert shows(model.blocks[0], reference.blocks[0])
        assert not shows(model.blocks[1], reference.blocks[1])
    with sluice.gathered(model.blocks[0].mlp[2]):  # has no parameters
        assert not shows(model, reference)
    assert not shows(model, reference)


def test_a_module_that_contains_offloaded_ones(config):
    references = [tiny(tied=False), tiny(seed=1, tied=False)]
    models = copy.deepcopy(references)
    optimizers = [sluice.offload(model, config, units=[Block]) for model in models]
    whole = nn.ModuleDict({"one": models[0], "two": models[1], "plain": nn.Linear(2, 2)})
    with sluice.gathered(whole):
        assert all(shows(*both) for both in zip(models, references))
    with sluice.gathered(whole, whole["two"]):
        assert [shows(*both) for both in zip(models, references)] == [False, True]
    with sluice.gathered(whole, whole["plain"]), sluice.gathered(nn.Linear(2, 2)):
        assert not any(shows(*both) for both in zip(models, references))
    for optimizer in optimizers:
        optimizer.close()
