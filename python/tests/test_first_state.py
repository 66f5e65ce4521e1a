"""torch.distributed.checkpoint asks for the state of an optimizer that has made no update. Its helper makes a step with zeros where it
finds none: here it finds one, and training goes on as if it had not asked."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint

from conftest import batch, tiny
from sluice_offload import optim
from test_optim import place, step_of  # noqa: F401

KINDS = {"AdamW": {"lr": 1e-3, "weight_decay": 0.1}, "Lion": {"lr": 1e-4}, "Adagrad": {"lr": 1e-2}, "SGD": {"lr": 1e-2, "momentum": 0.9},
         "SGD-plain": {"lr": 1e-2}}


def states_of(optimizer):
    return list(optimizer.state_dict()["state"].values())


def are_equal(one, other):
    return len(one) == len(other) > 0 and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other))


@pytest.mark.parametrize("when", ["new", "behind backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, state", [*((kind, "fp32") for kind in KINDS), ("AdamW", "bf16"), ("AdamW", "8bit")])
def test_asking_before_the_first_update_changes_no_bit(place, kind, dtype, state, when):  # noqa: F811
    config = place()
    config["optimizer"] = {"state": state}
    models = [tiny(width=64).to(dtype) for _ in range(2)]
    asked, other = (getattr(optim, kind.split("-")[0])(model.parameters(), config=config, **KINDS[kind]) for model in models)
    if when == "behind backward":
        models[0](*batch(9)).backward()
    updated = asked.report.updated_elements
    saved = [checkpoint.get_optimizer_state_dict(models[0], asked) for _ in range(2)]
    assert asked.report.updated_elements == updated == 0 and asked.param_groups[0]["lr"] == KINDS[kind]["lr"]
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters()))
    for one in saved:
        assert list(one["state"]) == [name for name, _ in models[0].named_parameters()]
        for name, parameter in models[0].named_parameters():
            entry = one["state"][name]
            assert all((parameter if key == "master" else torch.zeros_like(value)).eq(value).all() for key, value in entry.items())
    if when == "behind backward":
        assert all(p.grad is not None for p in models[0].parameters())  # they are the program's
        asked.zero_grad()
    else:
        asked.add_param_group({"params": [nn.Parameter(torch.ones(3))]})  # as long as there was no step
        assert len(states_of(asked)) == len(saved[0]["state"]) + 1  # what was asked for stays there
    for i in range(4):
        assert step_of(models[0], asked, i) == step_of(models[1], other, i)
    assert are_equal(states_of(asked)[:len(saved[0]["state"])], states_of(other))
    asked.close()
    other.close()


def test_a_state_of_no_update_loads(place):  # noqa: F811
    """As torchtitan saves the first step: into another of ours, and into torch's."""
    models = [tiny() for _ in range(3)]
    ours, again, theirs = (kind.AdamW(model.parameters(), lr=1e-3, foreach=False, **more) for kind, model, more in
                           zip((optim, optim, torch.optim), models, ({"config": place()}, {"config": place()}, {})))
    saved = checkpoint.get_optimizer_state_dict(models[0], ours)
    checkpoint.set_optimizer_state_dict(models[1], again, saved)
    checkpoint.set_optimizer_state_dict(models[2], theirs, saved)
    reference = tiny()
    by_torch = torch.optim.AdamW(reference.parameters(), lr=1e-3, foreach=False)
    for i in range(3):
        assert step_of(models[0], ours, i) == step_of(models[1], again, i)
        assert step_of(models[2], theirs, i) == step_of(reference, by_torch, i)
    assert are_equal(states_of(ours), states_of(again)) and are_equal(states_of(theirs), states_of(by_torch))
    ours.close()
    again.close()


def test_others_find_no_state(place):  # noqa: F811
    """accelerate's prepare() and Lightning copy what they find. Emptied, it is empty again."""
    model = tiny()
    ours = optim.AdamW(model.parameters(), config=place())
    assert not ours.state and len(ours.state) == 0 and ours.state_dict()["state"] == {}
    checkpoint.get_optimizer_state_dict(model, ours)
    assert ours.state and len(ours.state) == len(list(model.parameters()))
    ours.state = {}
    assert not ours.state and len(ours.state) == 0 and ours.state_dict()["state"] == {}
    ours.close()
