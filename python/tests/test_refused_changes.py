"""Changes that torch follows and the engine cannot: of an optimizer's groups, within modules of TorchScript, and of tensors over a
parameter's memory. Each is refused before it can make a training wrong, and the model is as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint

import sluice_offload as sluice
from conftest import Tiny, batch, tiny
from sluice_offload import guards

WIDTH = 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x)))


class Small(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3) if head is None else head

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def small_config(tmp_path):
    return {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "memory": {"device": "1MiB", "host": "8MiB"},
            "optimizer": {"clip_norm": 0}, "storage": {"paths": [str(tmp_path)]}}


def step(model, optimizer, i=0):
    torch.manual_seed(i)
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def values_of(model):
    return {name: values.clone() for name, values in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(values, other[name]) for name, values in one.items())


def in_two_groups(model):
    return torch.optim.AdamW([{"params": list(model.layers.parameters()), "lr": 1e-3},
                              {"params": list(model.head.parameters()), "lr": 1e-2}], weight_decay=0.01)


@pytest.fixture
def grouped(small_config):
    torch.manual_seed(0)
    model = Small()
    optimizer = sluice.offload(model, small_config, optimizer=in_two_groups(model))
    step(model, optimizer)
    yield model, optimizer
    optimizer.close()


def empty(groups, model):
    groups[1]["params"] = []


def clear(groups, model):
    groups[1]["params"].clear()


def keep_one_block(groups, model):
    groups[0]["params"] = list(model.layers[2].parameters())


def remove(groups, model):
    groups[0]["params"].pop(2)


def move(groups, model):
    groups[0]["params"].append(groups[1]["params"].pop(0))


def exchange(groups, model):
    groups[0]["params"][0], groups[1]["params"][0] = groups[1]["params"][0], groups[0]["params"][0]


def replace(groups, model):
    groups[1]["params"][1] = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("change", [empty, clear, keep_one_block, remove, move, exchange, replace, lambda groups, model: groups.reverse()])
def test_groups_that_hold_other_parameters_are_refused(grouped, change):
    model, optimizer = grouped
    before = values_of(model)
    change(optimizer.param_groups, model)
    with pytest.raises(sluice.ArgumentError, match=r"param_groups\[[01]\] holds .* only the lr of a group can change; .*lr of 0"):
        step(model, optimizer)
    optimizer.zero_grad()
    assert same(values_of(model), before)


@pytest.mark.parametrize("change", [lambda groups: groups.pop(), lambda groups: groups.pop(0), lambda groups: groups.append(dict(groups[0]))])
def test_another_number_of_groups_is_refused(grouped, change):
    model, optimizer = grouped
    change(optimizer.param_groups)
    with pytest.raises(sluice.ArgumentError, match=r"there are [13] param_groups, and offload\(\) made 2: only the lr of a group can change"):
        step(model, optimizer)


def test_groups_that_hold_the_same_stay_accepted(grouped):
    """As where a wrapper has made the lists or the groups anew, and where a state_dict was loaded."""
    model, optimizer = grouped
    for group in optimizer.param_groups:
        group["params"] = list(group["params"])
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    step(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.0
    before = values_of(model)
    step(model, optimizer)
    after = values_of(model)
    assert torch.equal(before["head.weight"], after["head.weight"]) and not torch.equal(before["layers.0.wide.weight"],
                                                                                       after["layers.0.wide.weight"])


def test_a_changed_hyperparameter_names_its_group(grouped):
    model, optimizer = grouped
    optimizer.param_groups[1]["weight_decay"] = 0.5
    with pytest.raises(sluice.ArgumentError, match=r"param_groups\[1\] says .*0\.5.*only the lr of a group can change"):
        step(model, optimizer)


def compiled(kind):
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    return torch.jit.script(head) if kind == "script" else torch.jit.trace(head, torch.ones(1, WIDTH))


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_torchscript_with_parameters_is_refused(small_config, kind, is_frozen):
    """Its forward runs in C++, where no hook lends its weights."""
    model = Small(compiled(kind))
    for parameter in model.head.parameters():
        parameter.requires_grad_(not is_frozen)
    before, x = values_of(model), torch.ones(2, WIDTH)
    expected = model(x)
    for units in (None, ["Layer"], [Layer, "Sequential"]):
        with pytest.raises(sluice.ArgumentError, match=r"head\.0 is a .*TorchScript.*; script or trace it after training, from state_dict\(\)"):
            sluice.offload(model, small_config, lr=1e-3, units=units)
        assert same(values_of(model), before) and torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_torchscript_without_parameters_is_none_of_the_engines(small_config):
    model = Small()
    model.layers.append(torch.jit.script(nn.ReLU()))
    optimizer = sluice.offload(model, small_config, lr=1e-2)
    losses = [step(model, optimizer) for _ in range(3)]
    assert losses[2] < losses[0]
    optimizer.close()


class NoHooks(nn.Linear):
    refuses = True

    def register_forward_pre_hook(self, *arguments, **options):
        if self.refuses:
            raise RuntimeError("no hooks here")
        return super().register_forward_pre_hook(*arguments, **options)


def looks_untouched(model, kinds):
    assert [type(parameter) for parameter in model.parameters()] == kinds
    assert not any(parameter._post_accumulate_grad_hooks or vars(parameter) for parameter in model.parameters())
    for module in model.modules():
        assert type(module._parameters) is dict
        assert not (module._forward_pre_hooks or module._forward_hooks or module._state_dict_hooks or module._load_state_dict_pre_hooks)
        assert not {"_apply", "_load_from_state_dict", "_sluice"} & set(vars(module))


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_behind_the_taking_over_gives_the_values_back(config, monkeypatch, late):
    model = tiny()
    model.head = NoHooks(32, 61, bias=False)
    model.head.weight = model.embedding.weight
    model.register_buffer("seen", torch.ones(3))
    reference, before, kinds, memory = copy.deepcopy(model), values_of(model), [type(p) for p in model.parameters()], model.norm.weight.data_ptr()
    with monkeypatch.context() as patch:
        if late:
            patch.setattr(NoHooks, "refuses", False)
            patch.setattr(guards, "guard_model", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError if late else RuntimeError):
            sluice.offload(model, config, units=["Block"])
    looks_untouched(model, kinds)
    assert model.head.weight is model.embedding.weight and model.norm.weight.data_ptr() == memory
    assert same(values_of(model), before)
    copy.deepcopy(model).to(torch.bfloat16)
    for trained in (model, reference):
        own = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained(*batch(0)).backward()
        own.step()
        own.zero_grad()
    assert same(values_of(model), values_of(reference)) and not same(values_of(model), before)
    monkeypatch.setattr(NoHooks, "refuses", False)
    optimizer = sluice.offload(model, config, units=["Block"])
    assert same(values_of(model), values_of(reference))
    optimizer.close()


def test_a_failure_leaves_a_meta_model_and_the_buffers(config, monkeypatch):
    values = values_of(tiny(tied=False)) | {"seen": torch.full((3,), 7.0), "made": torch.full((2,), 5.0)}
    with torch.device("meta"):
        model = Tiny(tied=False)
    model.register_buffer("seen", torch.ones(3))
    model.register_buffer("made", torch.ones(2, device="meta"))
    model.norm.weight.is_special = True
    parameter, buffer = model.norm.weight, model.seen
    with monkeypatch.context() as patch:
        patch.setattr(guards, "guard_model", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sluice.offload(model, config, units=["Block"], values=values)
    assert all(p.is_meta for p in model.parameters()) and model.norm.weight is parameter and parameter.is_special
    assert model.made.is_meta and model.seen is buffer and torch.equal(buffer, torch.ones(3))
    optimizer = sluice.offload(model, config, units=["Block"], values=values)
    assert same(values_of(model), values)
    optimizer.close()


class Aliased(Small):
    """Has a tensor over its head's weight, of its own or of another kind of memory."""

    def __init__(self, way, make):
        super().__init__()
        self.head.weight.requires_grad_(way != "frozen")
        alias = make(self.head.weight)
        if way == "buffer":
            self.register_buffer("alias", alias)
        else:
            self.alias = alias

    def forward(self, x):
        return super().forward(x) + x @ self.alias.t()


@pytest.mark.parametrize("make", [lambda p: p.data, lambda p: p.detach(), lambda p: p.detach()[1:], lambda p: p.detach().t()[3:, 1:].t(),
                                  lambda p: p.detach()[0].expand(3, WIDTH)])
@pytest.mark.parametrize("way", ["buffer", "attribute"])
def test_a_tensor_over_a_parameters_memory_is_refused(small_config, way, make):
    """In torch it follows the training."""
    model = Aliased(way, make)
    before = values_of(model)
    what = "buffer" if way == "buffer" else "tensor"
    with pytest.raises(sluice.ArgumentError, match=rf"the {what} alias lies over the memory of head\.weight.*compute it .* in forward.*clone\(\)"):
        sluice.offload(model, small_config, lr=1e-3)
    assert same(values_of(model), before)


@pytest.mark.parametrize("way, make", [("buffer", lambda p: p.detach().clone()), ("attribute", lambda p: p.detach().clone()),
                                       ("frozen", lambda p: p.data), ("attribute", lambda p: torch.empty(3, WIDTH, device="meta")),
                                       ("attribute", lambda p: torch.ones(3, WIDTH).to_sparse())])
def test_a_tensor_with_memory_of_its_own_is_none_of_the_engines(small_config, way, make):
    model = Aliased(way, make)
    sluice.offload(model, small_config, lr=1e-3).close()


def test_tensors_of_one_memory_that_do_not_overlap(small_config):
    model = Small()
    flat = torch.randn(9 * WIDTH)
    model.head.weight = nn.Parameter(flat[3 * WIDTH:6 * WIDTH].view(3, WIDTH))
    model.head.before, model.head.same = flat[:3 * WIDTH], model.head.weight
    model.head.register_buffer("behind", flat[6 * WIDTH:])
    model.flat = flat  # all of them
    sluice.offload(model, small_config, lr=1e-3).close()


def test_what_a_forward_computes_anew_may_begin_over_the_parameter(small_config):
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight_raw = nn.Parameter(torch.randn(3, WIDTH))
            self.weight = self.weight_raw.data

        def forward(self, x):
            self.weight = nn.functional.dropout(self.weight_raw, 0.5)
            return nn.functional.linear(x, self.weight)

    model = Small(Raw())
    optimizer = sluice.offload(model, small_config, lr=1e-3)
    step(model, optimizer)
    optimizer.close()


def test_what_a_hook_computes_anew_may_begin_over_the_parameter(small_config):
    """As torch.nn.utils.spectral_norm and weight_norm have it, of which the first sets `weight` to the values of weight_orig."""
    torch.manual_seed(0)
    model = Small()
    nn.utils.spectral_norm(model.head)
    nn.utils.spectral_norm(model.layers[0].wide)
    reference = copy.deepcopy(model)
    expected = [step(reference, torch.optim.SGD(reference.parameters(), lr=0.1), i) for i in range(3)]
    optimizer = sluice.offload(model, small_config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), units=["Layer"])
    assert [step(model, optimizer, i) for i in range(3)] == pytest.approx(expected, rel=1e-5)
    optimizer.close()


def test_torchs_distributed_checkpoint_asks_no_optimizer(grouped):
    """It would set the rates to 0 and take a step, to make a state that it can save."""
    model, optimizer = grouped
    before, groups = values_of(model), [dict(group) for group in optimizer.param_groups]
    calls = [lambda: checkpoint.get_state_dict(model, optimizer), lambda: checkpoint.get_optimizer_state_dict(model, optimizer),
             lambda: checkpoint.set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []})]
    for _ in range(2):
        for call in calls:
            with pytest.raises(sluice.ArgumentError, match=r"moments.*optimizer\.save\(folder\).*get_model_state_dict\(model\)"):
                call()
            assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in groups] == [1e-3, 1e-2]
            assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.load_state_dict(optimizer.state_dict())  # which has a state of its own
    assert same(checkpoint.get_model_state_dict(model), before)
    assert not optimizer.state and not optimizer.state_dict()["state"]
    step(model, optimizer)
    assert not same(values_of(model), before)


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(WIDTH), nn.SyncBatchNorm(WIDTH), nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)])
def test_running_statistics_do_not_move_with_units(small_config, norm):
    """A unit's buffers are read, never written."""
    model = Normed(norm)
    before = values_of(model)
    for name in ("running_mean", "num_batches_tracked"):
        with pytest.raises(sluice.ArgumentError, match=rf"buffers=.*layers\.0\.1\.{name}.* is written in the forward.*leave it out"):
            sluice.offload(model, small_config, lr=1e-3, buffers=[f"layers.0.1.{name}"])
        assert same(values_of(model), before)
    reference = copy.deepcopy(model)
    optimizer = sluice.offload(model, small_config, lr=1e-3, buffers=["*running*", "layers.0.1.*"])  # these mean what may move
    if not isinstance(norm, nn.InstanceNorm1d):  # which wants inputs of another shape
        step(reference, torch.optim.SGD(reference.parameters()))
        step(model, optimizer)
    assert torch.equal(model.layers[0][1].running_mean, reference.layers[0][1].running_mean)
    optimizer.close()


def test_buffers_of_a_norm_that_its_forward_does_not_write(small_config):
    model = Normed(nn.BatchNorm1d(WIDTH, track_running_stats=False))
    model.layers[0][1].register_buffer("scale", torch.ones(WIDTH))
    optimizer = sluice.offload(model, small_config, lr=1e-3, buffers=["*.scale"])
    step(model, optimizer)
    optimizer.close()


def test_an_average_of_tied_weights_goes_by_name(config):
    """As docs/pytorch.md says: an offloaded model has two parameters for them."""
    def averaged(model, optimizer):
        average = copy.deepcopy(tiny())
        for i in range(3):
            model(*batch(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with sluice.gathered(model), torch.no_grad():
                own = dict(model.named_parameters())
                for name, parameter in average.named_parameters():
                    parameter.lerp_(own[name], 0.5)
        return average.state_dict()
    reference, model = tiny(), tiny()
    config["optimizer"] = {"clip_norm": 0}
    expected = averaged(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    optimizer = sluice.offload(model, config, units=["Block"], optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found = averaged(model, optimizer)
    assert max((values - expected[name]).abs().max().item() for name, values in found.items()) <= 1e-5
    optimizer.close()
