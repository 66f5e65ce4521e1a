"""Programs that give a parameter other memory, another type or another object between steps of sluice_offload.optim: to(),
load_state_dict(assign=True) and torch.utils.swap_tensors. torch's optimizers go on, or train what is not in the model any more; here
each is as there, or is refused before anything is updated."""

import copy

import pytest
import torch

import sluice_offload as sluice
from conftest import batch, tiny, worst
from sluice_offload import optim
from test_optim import place, step_of  # noqa: F401

RATE = 1e-3


def made(model, config, **options):
    return optim.AdamW(model.parameters(), lr=RATE, config=config, **options)


def by_torch(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False)


def losses(model, optimizer, steps, first=0):
    return [step_of(model, optimizer, i, clip=0) for i in range(first, first + steps)]


def values_of(model):
    return [p.detach().clone() for p in model.parameters()]


def are_equal(one, other):
    return len(one) == len(other) > 0 and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("gradients", ["step", "backward"])
def test_another_type_is_refused_and_the_state_goes_on_in_a_new_optimizer(place, gradients):  # noqa: F811
    model = tiny(width=64)
    ours = made(model, place(), gradients=gradients)
    losses(model, ours, 2)
    model.to(torch.bfloat16)
    before, saved = values_of(model), ours.state_dict()

    def step():
        model(*batch(2)).backward()
        ours.step()
    with pytest.raises(sluice.ArgumentError, match=r"was torch.float32 .* and is torch.bfloat16 .* now; make a new optimizer, and load"):
        step()
    assert are_equal(values_of(model), before) and ours.state_dict()["state"][0]["step"] == 2, "something was updated"
    ours.close()
    for p in model.parameters():
        p.grad = None
    again = made(model, place(), gradients=gradients)
    again.load_state_dict(saved)
    assert all(torch.equal(entry["master"], p.float()) for entry, p in zip(again.state.values(), model.parameters()))
    losses(model, again, 1, first=3)
    assert {float(entry["step"]) for entry in again.state.values()} == {3.0}
    again.close()


def test_there_and_back_is_as_in_torch(place):  # noqa: F811
    """to() rounds the values; the optimizer takes them."""
    model = tiny(width=64)
    reference = copy.deepcopy(model)
    ours, theirs = made(model, place()), by_torch(reference)
    found, expected = [], []
    for i in range(3):
        found += losses(model, ours, 2, first=2 * i)
        expected += losses(reference, theirs, 2, first=2 * i)
        for one in (model, reference):
            one.to(torch.float64 if i == 1 else torch.bfloat16).to(torch.float32)
    assert worst(found, expected) <= 2e-6
    ours.close()


def test_a_move_waits_for_updates_that_are_under_way(place):  # noqa: F811
    """It would copy what is half written, and the rest would be lost."""
    models = [tiny(width=64) for _ in range(2)]
    moved, other = (made(model, place(), overlap="forward", modules=model) for model in models)
    for i in range(3):
        for model, optimizer in zip(models, (moved, other)):
            model(*batch(i)).backward()
            optimizer.step()
        assert moved._keep and other._keep, "nothing is under way"
        models[0].to(torch.float64)
        assert not moved._keep
        models[0].to(torch.float32)  # exactly what it was
        for optimizer in (moved, other):
            optimizer.zero_grad()
    other.synchronize()
    assert are_equal(values_of(models[0]), values_of(models[1]))
    moved.close()
    other.close()


@pytest.mark.parametrize("gradients", ["step", "backward"])
def test_assigned_parameters_are_not_the_optimizers_as_in_torch(place, gradients):  # noqa: F811
    """Behind load_state_dict(assign=True) the model has other parameters. A new optimizer for them takes the state."""
    model, source = (tiny(seed, width=64, tied=False) for seed in range(2))  # assigned, a tied parameter would become two
    reference = copy.deepcopy(model)
    ours, theirs = made(model, place(), gradients=gradients), by_torch(reference)
    losses(model, ours, 2)
    losses(reference, theirs, 2)
    for one in (model, reference):
        one.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)
    assert not {id(p) for p in model.parameters()} & {id(p) for group in ours.param_groups for p in group["params"]}
    for one, optimizer in ((model, ours), (reference, theirs)):
        one(*batch(2)).backward()
        optimizer.step()
        assert are_equal(values_of(one), values_of(source)), type(optimizer)
        assert {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {2.0}
        one.zero_grad()
    saved = ours.state_dict()
    ours.close()
    again, fresh = made(model, place(), gradients=gradients), by_torch(reference)
    again.load_state_dict(saved)
    fresh.load_state_dict(theirs.state_dict())
    assert worst(losses(model, again, 4, first=3), losses(reference, fresh, 4, first=3)) <= 2e-6
    again.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_tensors_are_trained_where_they_are(place, dtype):  # noqa: F811
    """The parameter stays the same object, with the memory and the values of another tensor."""
    model, source = tiny(width=64).to(dtype), tiny(seed=1, width=64).to(dtype)
    reference = copy.deepcopy(model)
    ours, theirs = made(model, place()), by_torch(reference)
    losses(model, ours, 2)
    losses(reference, theirs, 2)
    expected = values_of(source)
    adopted = ours.report.adopted_elements
    for one in (model, reference):
        for p, q in zip(one.parameters(), copy.deepcopy(source).parameters()):
            torch.utils.swap_tensors(p, q)
        assert are_equal(values_of(one), expected)
    found = losses(model, ours, 3, first=2)
    assert not any(torch.equal(p, q) for p, q in zip(values_of(model), expected))
    if dtype == torch.float32:
        assert worst(found, losses(reference, theirs, 3, first=2)) <= 2e-6
    else:
        assert ours.report.adopted_elements > adopted, "the masters are those of the tensors that are gone"
    ours.close()
