"""Optimizers of torch as descriptions: a state that the constructor makes, and names of groups."""

import copy
import re

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, batch, tiny, train, worst

ADAGRAD = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-8}


@pytest.fixture
def plain(config):
    """A config that leaves the optimizer to the program, but for clipping."""
    config["optimizer"] = {"clip_norm": 1.0, "clip_epsilon": 1e-6}
    return config


def test_a_new_adagrad_trains_as_torchs(plain):
    """torch fills its state in the constructor."""
    reference = tiny()
    model = copy.deepcopy(reference)
    theirs = torch.optim.Adagrad(reference.parameters(), **ADAGRAD)
    optimizer = sluice.offload(model, plain, units=[Block],
                               optimizer=torch.optim.Adagrad(model.parameters(), **ADAGRAD))
    expected, _ = train(reference, theirs, 6, clip_norm=1.0)
    actual, _ = train(model, optimizer, 6)
    assert worst(actual, expected) <= 2e-6
    values = model.state_dict()
    assert all(torch.allclose(values[name], value, atol=2e-5)
               for name, value in reference.state_dict().items()
               if not name.endswith("in_proj_bias"))  # a key's bias: its gradient is rounding alone
    optimizer.close()


def test_a_new_adagrad_of_a_program_of_deepspeeds_calls(plain):
    model = tiny()
    engine = sluice.initialize(model=model, config=plain, units=[Block],
                               optimizer=lambda parameters: torch.optim.Adagrad(parameters))[0]
    engine.backward(engine(*batch(0)))
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def test_a_new_adagrad_on_the_meta_device(plain):
    reference = tiny()
    with sluice.meta_parameters():
        model = tiny()
    optimizer = sluice.offload(model, plain, units=[Block], values=reference.state_dict(),
                               optimizer=torch.optim.Adagrad(model.parameters(), **ADAGRAD))
    assert train(model, optimizer, 1)[0] == [reference(*batch(0)).item()]
    optimizer.close()


@pytest.mark.parametrize("made", [torch.optim.Adagrad, torch.optim.AdamW])
def test_one_that_has_made_steps_is_refused(plain, made):
    model = tiny()
    given = made(model.parameters())
    train(model, given, 1)
    words = f"this {made.__name__} has made steps already.*give a new one"
    with pytest.raises(sluice.ArgumentError, match=words):
        sluice.offload(model, plain, optimizer=given)


@pytest.mark.parametrize("of_group", [{}, {"initial_accumulator_value": 0}])
def test_sums_that_begin_elsewhere_are_refused(plain, of_group):
    """torch's begin with the value of the constructor, whatever a group says."""
    model = tiny()
    given = torch.optim.Adagrad([{"params": list(model.parameters()), **of_group}],
                                initial_accumulator_value=0.1)
    words = "Adagrad: initial_accumulator_value=0.1.*begin with 0; leave it out"
    with pytest.raises(sluice.ArgumentError, match=words):
        sluice.offload(model, plain, optimizer=given)


class Listed(nn.Module):
    """A list of parameters with one that is another module's, too."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.scales = nn.ParameterList([self.second.weight, nn.Parameter(torch.ones(32))])

    def forward(self, x):
        x = self.second(self.first(x)).relu()
        return nn.functional.linear(x, self.scales[0]) * self.scales[1]


def listed():
    torch.manual_seed(0)
    return Listed()


def losses_of(model, optimizer):
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(5):
        loss = model(torch.randn(8, 32, generator=generator)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def groups_of(model):
    others = [parameter for parameter in model.parameters() if parameter is not model.second.weight]
    return [{"params": [model.second.weight], "weight_decay": 0.5, "lr": 1e-2}, {"params": others}]


def test_groups_with_a_parameter_of_two_names(plain):
    """torch calls it second.weight, but the units begin with the list."""
    reference, model = listed(), listed()
    plain["optimizer"]["clip_norm"] = 0
    theirs, given = (torch.optim.AdamW(groups_of(net), lr=1e-3, weight_decay=0.0)
                     for net in (reference, model))
    optimizer = sluice.offload(model, plain, optimizer=given)
    assert worst(losses_of(model, optimizer), losses_of(reference, theirs)) <= 2e-6
    optimizer.close()


def test_model_parameters_with_a_parameter_of_two_names(plain):
    plain["optimizer"].update(type="adamw", learning_rate=1e-3)
    model = listed()
    engine = sluice.initialize(model=model, config=plain, model_parameters=groups_of(model),
                               units=iter([nn.Linear]))[0]
    assert engine.get_lr() == pytest.approx([1e-2, 1e-3])
    assert engine.config["optimizer"]["groups"][0]["tensors"] == ["scales.0"]
    engine.destroy()


def test_groups_of_many_parameters(plain, monkeypatch):
    """Each parameter's group is found without a look at the names of all others. 2000 layers took minutes."""
    looked_at = []
    monkeypatch.setattr("sluice_offload.optimizer.re.fullmatch", lambda *a: looked_at.append(a) or re.compile(a[0], *a[2:]).fullmatch(a[1]))
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    biases = [p for p in model.parameters() if p.dim() == 1]
    weights = [p for p in model.parameters() if p.dim() == 2]
    given = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=1e-3)
    ours = sluice.offload(model, plain, optimizer=given)
    assert [group["params"] for group in ours.param_groups] == [biases, weights]
    assert len(looked_at) <= 100
    ours.close()


def test_the_first_group_that_names_a_parameter(plain):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    plain["optimizer"]["groups"] = [{"tensors": ["1.bias", "?.weight"], "weight_decay": 0.0}, {"tensors": ["0.weight", "2.bias"]},
                                    {"tensors": ["*.bias"], "weight_decay": 0.5}]
    ours = sluice.offload(model, plain)
    found = [[name for name, p in model.named_parameters() if any(p is q for q in group["params"])] for group in ours.param_groups]
    assert found == [["0.weight", "1.weight", "1.bias", "2.weight"], ["2.bias"], ["0.bias"]]
    ours.close()
