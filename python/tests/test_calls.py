"""Modules that call each other otherwise than a parent its children, tensors that leave a module otherwise than by its return value,
and modules whose class is partly torch's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import sluice_offload as sluice
from conftest import worst

WIDTH = 8


@pytest.fixture
def settings():
    return {"placement": {"parameters": "host", "optimizer": "host"}, "memory": {"device": "64MiB", "host": "256MiB"},
            "optimizer": {"clip_norm": 0, "overlap": "serial"}}


def losses(model, optimizer, loss_of):
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = loss_of(model, torch.randn(4, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def assert_trains_as_torch(settings, model, loss_of, **options):
    """Three steps have torch's losses, and end with its parameters."""
    offloaded = copy.deepcopy(model)
    ours = sluice.offload(offloaded, settings, optimizer=torch.optim.AdamW(offloaded.parameters(), lr=1e-2), **options)
    expected = losses(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_of)
    assert worst(losses(offloaded, ours, loss_of), expected) <= 2e-6
    for name, value in offloaded.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=2e-6, msg=name)
    ours.close()


def mean_square(model, x):
    return model(x).square().mean()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x, scale):
        return (x @ self.w) * scale


class GivesItsOwn(nn.Module):
    """Gives a parameter of its own to a module inside, as a learned mask or a position table."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.scale = nn.Linear(WIDTH, WIDTH), Scaled(), nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return self.inner(self.first(x) + self.shift, self.scale) + self.scale


class Around(nn.Module):
    """Computes before, between and behind calls of a module that it is given."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x, call):
        h = x @ self.w
        beside = h @ self.w
        return call(call(h) @ self.w + beside) @ self.w + h


class GivesModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.given, self.one, self.two = nn.Linear(WIDTH, WIDTH), Around(), Around()

    def forward(self, x):
        return self.two(self.one(x, self.given), lambda y: self.one(y, self.given))


class Checkpointed(GivesModules):
    is_reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.is_reentrant)


class CheckpointedReentrant(Checkpointed):
    is_reentrant = True


class Recursive(nn.Module):
    """Calls itself; with `inside` it contains a unit, too."""

    def __init__(self, inside=False):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.inside = nn.Linear(WIDTH, WIDTH) if inside else nn.Identity()

    def forward(self, x, depth=2):
        return self.inside(self(x, depth - 1) if depth else x) @ self.w


class Adapted(nn.Module):
    """Hooks of `base` call an adapter, before or behind it."""

    def __init__(self, is_before):
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_before = is_before

    def hooked(self):
        if self.is_before:
            self.base.register_forward_pre_hook(lambda module, args: (args[0] + self.adapter(args[0]),))
        else:
            self.base.register_forward_hook(lambda module, args, output: output + self.adapter(args[0]))
        return self

    def __deepcopy__(self, memo):
        other = Adapted(self.is_before)
        other.load_state_dict(self.state_dict())
        return other.hooked()

    def forward(self, x):
        return self.base(x)


@pytest.mark.parametrize("make", [
    GivesItsOwn, GivesModules, Checkpointed, CheckpointedReentrant, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Recursive()),
    lambda: Recursive(inside=True), lambda: Adapted(True).hooked(), lambda: Adapted(False).hooked()],
    ids=["own_parameter", "modules", "checkpoint", "reentrant", "recursion", "recursive_root", "pre_hook", "hook"])
def test_calls_across(settings, make):
    torch.manual_seed(0)
    assert_trains_as_torch(settings, make(), mean_square)


@pytest.mark.parametrize("make", [GivesModules, lambda: Recursive(inside=True), lambda: nn.Sequential(Recursive())],
                         ids=["modules", "recursive_root", "recursion"])
def test_evaluations_of_them(settings, make):
    def loss_of(model, x):
        with torch.no_grad():
            seen.append(model(x).square().mean().item())
        return model(x).square().mean()

    torch.manual_seed(0)
    seen = []
    assert_trains_as_torch(settings, make(), loss_of)
    assert worst(seen[:3], seen[3:]) <= 2e-6


def test_a_root_that_calls_itself_and_an_interrupt(settings):
    """The counts of calls that an interrupt leaves behind mean nothing."""
    torch.manual_seed(0)
    model = Recursive(inside=True)
    reference = copy.deepcopy(model)
    ours = sluice.offload(model, settings, lr=1e-2)
    ours._walk.depth, ours._walk._root_calls = 3, 2
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    assert ours._walk.active is None and ours._walk.depth == 0
    ours.close()


class CallsRoot(nn.Module):
    """Calls the whole model in its forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.root = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x):
        y = self.layer(x)
        y = y + self.root[0](y)
        return self.layer(y)


class CalledByItsHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), CallsRoot()
        self.head.root.append(self)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_a_module_called_alone_that_calls_the_root(settings):
    torch.manual_seed(0)
    model = CalledByItsHead()
    assert_trains_as_torch(settings, model, lambda model, x: model.head(x).square().mean(), units=[nn.Linear, CallsRoot])
    evaluated = copy.deepcopy(model)
    with torch.no_grad():
        expected = evaluated.head(torch.ones(2, WIDTH))
        optimizer = sluice.offload(evaluated, settings, units=[nn.Linear, CallsRoot])
        torch.testing.assert_close(evaluated.head(torch.ones(2, WIDTH)), expected)
    optimizer.close()


class Forces(nn.Module):
    """Computes gradients for its input also in evaluations, as models of atoms do."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def energy(self, x):
        return self.b(self.a(x).tanh()).sum()

    def forward(self, x):
        if torch.is_grad_enabled():
            return self.energy(x)
        with torch.enable_grad():
            positions = x.detach().requires_grad_()
            energy = self.energy(positions)
            return torch.autograd.grad(energy, positions)[0]


def test_gradients_of_inputs_in_an_evaluation(settings):
    def loss_of(model, x):
        with torch.no_grad():
            seen.append(model(x).square().sum().item())
        return model(x).square()

    torch.manual_seed(0)
    seen = []
    assert_trains_as_torch(settings, Forces(), loss_of)
    assert worst(seen[:3], seen[3:]) <= 2e-5


def test_gradients_of_parameters_in_an_evaluation(settings):
    class Backward(Forces):
        def forward(self, x):
            with torch.enable_grad():
                energy = self.energy(x)
                if not self.training:
                    energy.backward()
                return energy

    model = Backward()
    ours = sluice.offload(model, settings, lr=1e-2)
    model.eval()
    with pytest.raises(sluice.ArgumentError, match="got a gradient inside of an evaluation.*autograd.grad"), torch.no_grad():
        model(torch.randn(4, WIDTH))
    ours.zero_grad()
    model.train()
    assert losses(model, ours, lambda model, x: model(x).square())[-1] < float("inf")
    ours.close()


class Descends(nn.Module):
    """Computes gradients in its forward, with values of its own before and behind."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x, call):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            step = torch.autograd.grad(call(inner @ self.w).tanh().sum(), inner)[0]
        return (x + step) @ self.w


class DescendsThrough(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.other, self.descends = other, Descends()

    def forward(self, x):
        return self.descends(x, self.other)


def test_gradients_inside_of_a_forward(settings):
    torch.manual_seed(0)
    assert_trains_as_torch(settings, DescendsThrough(nn.Tanh()), mean_square)
    model = DescendsThrough(nn.Linear(WIDTH, WIDTH))
    model.descends.other = model.other
    del model.other
    model.forward = lambda x: model.descends(x, model.descends.other)
    expected = model(torch.ones(1, WIDTH))
    ours = sluice.offload(model, settings, lr=1e-2)
    assert torch.equal(model(torch.ones(1, WIDTH)), expected), "the remedy of the message works"
    ours.close()
    model = DescendsThrough(nn.Linear(WIDTH, WIDTH))
    ours = sluice.offload(model, settings, lr=1e-2)
    with pytest.raises(sluice.ArgumentError, match="\"descends\".*\"other\".*attribute"):
        model(torch.ones(1, WIDTH))
    ours.close()


class KeepsLoss(nn.Module):
    """Keeps a loss of its own in an attribute, as routers do."""

    def __init__(self, into=None):
        super().__init__()
        self.a, self.gate, self.into = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), into

    def forward(self, x):
        y = self.a(x)
        loss = self.gate(x).square().mean()
        if self.into == "list":
            self.losses = [1, loss]
        elif self.into == "dictionary":
            self.losses = {"gate": loss}
        else:
            self.losses = loss
        return y

    def taken(self):
        return {"list": lambda: self.losses[1], "dictionary": lambda: self.losses["gate"]}.get(self.into, lambda: self.losses)()


@pytest.mark.parametrize("into", [None, "list", "dictionary"])
def test_losses_that_modules_keep(settings, into):
    torch.manual_seed(0)
    model = nn.Sequential(KeepsLoss(into), KeepsLoss(into))
    assert_trains_as_torch(settings, model, lambda model, x: model(x).square().mean() + sum(module.taken() for module in model),
                           units=[KeepsLoss])


def test_losses_that_leave_otherwise(settings):
    """The error says what to do."""
    elsewhere = []

    class Leaks(KeepsLoss):
        def forward(self, x):
            y = self.a(x)
            elsewhere.append(self.gate(x).square().mean())
            return y

    model = nn.Sequential(Leaks(), Leaks())
    ours = sluice.offload(model, settings, lr=1e-2)
    (model(torch.ones(1, WIDTH)).sum() + elsewhere[1]).backward()
    with pytest.raises(sluice.NonFiniteError, match="leaves a unit's forward by another object .return it"):
        ours.step()
    ours.close()


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


class View(nn.Module):
    def forward(self, x):
        return x.view(x.shape)


class Parametrized(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self, "w", by)

    def forward(self, x):
        return self.two(self.one(x)) @ self.w

    def __deepcopy__(self, memo):
        other = Parametrized(copy.deepcopy(self.parametrizations.w[0]))
        other.load_state_dict(self.state_dict())
        return other


@pytest.mark.parametrize("by", [Symmetric, View])
def test_a_parametrized_module_is_none_of_torch(settings, by):
    torch.manual_seed(0)
    model = Parametrized(by())
    assert sorted(unit.name for unit in sluice.find_units(model).units) == ["ParametrizedParametrized", "one", "two"]
    assert_trains_as_torch(settings, model, mean_square)


def test_data_parallel_is_no_unit(settings):
    torch.manual_seed(0)
    model = nn.DataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    assert [unit.name for unit in sluice.find_units(model).units] == ["module.0", "module.1"]
    assert_trains_as_torch(settings, model, mean_square)


class OwnAttention(nn.MultiheadAttention):
    pass


class WrappedAttention(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("attention", [OwnAttention, WrappedAttention])
def test_classes_that_inherit_from_torch(settings, attention):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.attention = nn.Linear(WIDTH, WIDTH), attention(WIDTH, 2, batch_first=True, bias=False)

        def forward(self, x):
            h = self.before(x)
            return self.attention(h, h, h)[0]

    torch.manual_seed(0)
    model = Attends()
    assert [unit.name for unit in sluice.find_units(model).units] == ["before", "attention"]
    assert_trains_as_torch(settings, model, mean_square)
