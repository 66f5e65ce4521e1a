"""Trained parameters of fp32 and bf16 in one model: each keeps its type, and has an fp32 master with the bits of the scalar
definition under every placement and policy."""

import copy
import functools
import json

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, batch, hidden, moves_as_planned, tiny, train, worst
from sluice_offload import plans
from sluice_offload.library import EXP_AVG, EXP_AVG_SQ, MASTER
from test_masters import STEPS, oracle  # noqa: F401


class Norm(nn.LayerNorm):
    """Computes in its parameters' type, and gives back the type of what it was given."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Mixed(Block):
    """Matrices of bf16, norms of fp32."""

    def __init__(self, width, hidden=None):
        super().__init__(width, hidden)
        self.norm, self.mlp[0] = Norm(width), Norm(width)


def mixed(**options):
    model = tiny(block=Mixed, **options)
    model.norm = Norm(model.norm.normalized_shape)
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, Norm):
            module.float()
            with torch.no_grad():  # no numbers of bf16
                module.weight.add_(torch.linspace(-1e-3, 1e-3, module.weight.numel()))
    return model


def types(model):
    return {name: p.dtype for name, p in model.named_parameters()}


PLACES = [("nvme", "serial"), ("nvme", "deferred"), ("host", "speculative"), ("device", "auto")]


@pytest.fixture
def settings(config):
    def make(placement, overlap, clip_norm=0.7):
        return config | {"optimizer": {"learning_rate": 1e-3, "clip_norm": clip_norm, "weight_decay": 0.01, "overlap": overlap},
                         "placement": {"parameters": placement, "optimizer": "host" if placement == "device" else placement},
                         "memory": {"device": "4MiB", "host": "16MiB"}}
    return make


@pytest.mark.parametrize("placement, overlap, gradients", [(*place, "fp32") for place in PLACES] + [("nvme", "serial", "bf16")])
def test_masters_are_the_oracles_and_parameters_their_roundings(settings, oracle, placement, overlap, gradients):  # noqa: F811
    start = mixed(tied=False)
    model = copy.deepcopy(start)
    seen = {name: [] for name, _ in start.named_parameters()}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen[name].append((p.grad.dtype, p.grad.float().flatten())))
    precision = {"precision": {"gradients": gradients}} if gradients == "bf16" else {}
    optimizer = sluice.offload(model, settings(placement, overlap) | precision, units=[Mixed])
    assert types(model) == types(start)
    assert all(hidden(p) for p in model.parameters()), "outside of a lease nothing can be read"
    factors = []
    for step in range(STEPS):
        model(*batch(step)).backward()
        optimizer.step()
        factors.append(optimizer.report.clip_factor)
        optimizer.zero_grad()
    assert min(factors) < 1
    engine, units = optimizer._engine, optimizer._walk.units
    values = model.state_dict()
    for member in (member for unit in units.units for member in unit.members):
        first = dict(start.named_parameters())[member.name]
        assert all(dtype == first.dtype for dtype, _ in seen[member.name]), "backward computes in the parameter's type"
        decay = 0.01 if first.dim() >= 2 else 0.0
        given = [gradient.bfloat16().float() if precision else gradient for _, gradient in seen[member.name]]
        expected = oracle(first.detach().float().flatten(), given, factors, 1e-3, decay).view(first.shape)
        actual = engine.read(member, MASTER)
        assert torch.equal(actual.view(torch.int32), expected.view(torch.int32)), member.name
        assert values[member.name].dtype == first.dtype
        assert torch.equal(values[member.name], expected.to(first.dtype)), member.name
    optimizer.close()


def test_losses_are_torchs_with_masters(settings):
    """Against torch: fp32 masters, a model that is rounded from them before each forward, and torch's AdamW on the masters."""
    model, reference = mixed(tied=False), mixed(tied=False)
    masters = [nn.Parameter(p.detach().float()) for p in reference.parameters()]
    adamw = torch.optim.AdamW([{"params": [m for m in masters if m.dim() >= 2], "weight_decay": 0.01},
                               {"params": [m for m in masters if m.dim() < 2], "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95))
    optimizer = sluice.offload(model, settings("nvme", "serial"), units=[Mixed])
    losses, expected = [], []
    for step in range(12):
        losses.append(train(model, optimizer, 1, first=step)[0][0])
        loss = reference(*batch(step))
        loss.backward()
        expected.append(loss.item())
        for master, p in zip(masters, reference.parameters()):
            master.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 0.7)
        adamw.step()
        with torch.no_grad():
            for master, p in zip(masters, reference.parameters()):
                p.copy_(master)
        if step >= 2:
            moves_as_planned(optimizer)
    assert worst(losses, expected) < 1e-3  # bf16: a weight on the edge may round the other way
    difference = way = 0.0
    members = {member.name: member for unit in optimizer._walk.units.units for member in unit.members}
    for (name, start), master in zip(mixed(tied=False).named_parameters(), masters):
        if "attention.in_proj_bias" in name:  # rounding alone moves the bias of keys
            continue
        actual = optimizer._engine.read(members[name], MASTER)
        difference += (actual - master.detach()).double().square().sum().item()
        way += (master.detach() - start.detach().float()).double().square().sum().item()
    assert 0 < difference ** 0.5 <= 0.02 * way ** 0.5
    optimizer.close()


def test_computation_sees_the_roundings_of_the_masters(settings):
    """In forward and in backward, of the step that has just been made; outside of a lease it sees NaN alone."""
    model = mixed(tied=False)
    optimizer = sluice.offload(model, settings("nvme", "deferred"), units=[Mixed])
    members = [member for unit in optimizer._walk.units.units for member in unit.members]
    parameters = dict(model.named_parameters())
    expected, seen = {}, {"forward": 0, "backward": 0}

    def look(name, when):
        for inner, p in model.get_submodule(name).named_parameters():
            assert torch.equal(p.detach(), expected[f"{name}.{inner}"]), (when, name, inner)
            seen[when] += 1

    # Before the engine's own hook releases the unit, and behind the one that lends it for backward.
    def forward(name, module, args, output):
        look(name, "forward")

    def watch(name, module, args, output):
        output.register_hook(lambda gradient: look(name, "backward"))

    for name, module in model.named_modules():
        if isinstance(module, Mixed):
            module.register_forward_hook(functools.partial(forward, name), prepend=True)
            module.register_forward_hook(functools.partial(watch, name))
    for step in range(STEPS):
        assert all(hidden(p) for p in parameters.values())
        for member in members:
            master = optimizer._engine.read(member, MASTER)
            bits = master.view(torch.int32)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536  # ties to even
            dtype = parameters[member.name].dtype
            expected[member.name] = (nearest.view(torch.float32) if dtype == torch.bfloat16 else master).to(dtype)
        train(model, optimizer, 1, first=step)
    assert seen["forward"] == seen["backward"] == STEPS * sum("blocks." in name for name in parameters)
    optimizer.close()


def states(optimizer):
    members = [member for unit in optimizer._walk.units.units for member in unit.members]
    return {(member.name, kind): optimizer._engine.read(member, kind) for member in members for kind in (MASTER, EXP_AVG, EXP_AVG_SQ)}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("storage", ["swap", "copy"])
@pytest.mark.parametrize("tied", [True, False])
def test_placement_changes_no_bit(settings, tied, storage):
    found = []
    for placement, overlap in PLACES:
        model = mixed(tied=tied)
        optimizer = sluice.offload(model, settings(placement, overlap), units=[Mixed], storage=storage)
        losses, norms = train(model, optimizer, 4, micro_batches=2)
        found.append((losses, norms, states(optimizer)))
        optimizer.close()
    for losses, norms, state in found[1:]:
        assert losses == found[0][0] and norms == found[0][1] and equal(state, found[0][2])


def test_checkpoint_and_readers_keep_types_and_bits(settings, tmp_path):
    straight = mixed()
    optimizer = sluice.offload(straight, settings("nvme", "deferred"), units=[Mixed])
    train(straight, optimizer, 2)
    folder = optimizer.save(tmp_path / "saved")
    with sluice.gathered(straight):
        shown = {name: p.detach().clone() for name, p in straight.named_parameters()}
    values = straight.state_dict()
    assert all(torch.equal(shown[name], values[name]) and shown[name].dtype == values[name].dtype for name in shown)
    sluice.save_safetensors(straight, tmp_path / "values")
    written = sluice.open_safetensors(tmp_path / "values")
    assert {"embedding.weight", "norm.weight"} <= set(written) < set(shown) | set(values)
    assert all(torch.equal(written[name], values[name]) and written[name].dtype == values[name].dtype for name in written)
    train(straight, optimizer, 2, first=2)
    expected = states(optimizer)
    optimizer.close()

    other = mixed(seed=1)
    again = sluice.offload(other, settings("host", "serial"), units=[Mixed], restore=folder)
    train(other, again, 2, first=2)
    assert equal(states(again), expected)
    other.load_state_dict(values)
    assert all(torch.equal(value, values[name]) and value.dtype == values[name].dtype for name, value in other.state_dict().items())
    with pytest.raises(sluice.ArgumentError, match="convert or move"):
        other.float()
    with pytest.raises(sluice.ArgumentError, match="convert or move"):
        other.bfloat16()
    again.close()


def test_state_goes_on_in_fp32_and_back(settings, tmp_path):
    """A checkpoint has masters, which a model of fp32 alone takes over as they are; one of bf16 alone refuses them."""
    model, other = mixed(), mixed(seed=1)
    optimizer = sluice.offload(model, settings("nvme", "serial"), units=[Mixed])
    train(model, optimizer, 2)
    folder = optimizer.save(tmp_path / "saved")
    expected = states(optimizer)
    optimizer.close()
    with pytest.raises(sluice.ConfigError, match='"precision" is fp32, but the config asks for bf16'):
        sluice.offload(other, settings("host", "serial") | {"precision": {"parameters": "bf16"}}, units=[Mixed], restore=folder)
    again = sluice.offload(other, settings("host", "serial") | {"precision": {"parameters": "fp32"}}, units=[Mixed], restore=folder)
    assert set(types(other).values()) == {torch.float32}
    assert equal(states(again), expected)
    back = again.save(tmp_path / "back")
    again.close()
    third = mixed(seed=2)
    last = sluice.offload(third, settings("nvme", "serial"), units=[Mixed], restore=back)
    assert types(third) == types(model) and equal(states(last), expected)
    last.close()


def test_a_durable_store_and_activations_keep_bits(settings, tmp_path):
    """Parts of two runs, whose activations go to storage, have the bits of one run that keeps them in memory."""
    def run(first, last, seed=0, **more):
        given = settings("nvme", "deferred") | more
        if more:
            given["storage"] = {"paths": [str(tmp_path)], "state": {"name": "run"}}
        model = mixed(seed=seed)
        optimizer = sluice.offload(model, given, units=[Mixed], resume=first > 0)
        assert (optimizer.resumed_step or 0) == first
        losses, _ = train(model, optimizer, last - first, first=first)
        assert not more or optimizer.activations.written_bytes > 0
        found = states(optimizer)
        optimizer.close()
        return losses, found

    losses, expected = run(0, 4)
    begun, _ = run(0, 2, activations="nvme")
    ended, found = run(2, 4, seed=1, activations="nvme")
    assert begun + ended == losses and equal(found, expected)


def test_a_type_that_the_config_names_is_that_of_all(settings):
    model = mixed()
    optimizer = sluice.offload(model, settings("host", "serial") | {"precision": {"parameters": "bf16"}}, units=[Mixed])
    assert set(types(model).values()) == {torch.bfloat16}
    optimizer.close()


def test_frozen_parameters_keep_their_types_beside_both(settings):
    model, reference = mixed(), mixed()
    for each in (model, reference):
        each.blocks[0].requires_grad_(False)
    optimizer = sluice.offload(model, settings("nvme", "serial"), units=[Mixed])
    train(model, optimizer, 3)
    values = model.state_dict()
    for name, p in reference.named_parameters():
        assert values[name].dtype == p.dtype
        assert torch.equal(values[name], p) == name.startswith("blocks.0."), name
    optimizer.close()


def test_a_type_that_does_not_fit_is_refused(settings):
    model = mixed()
    model.norm.half()
    with pytest.raises(sluice.ArgumentError, match="float16.*precision.parameters has to name one"):
        sluice.offload(model, settings("host", "serial"), units=[Mixed])


def test_a_parameter_beyond_its_type_is_an_error(settings):
    model = mixed()
    optimizer = sluice.offload(model, settings("host", "serial"), units=[Mixed])
    largest = torch.finfo(torch.float32).max  # finite, but rounds to infinity in bf16
    model.blocks[1].load_state_dict({**model.blocks[1].state_dict(), "mlp.3.bias": torch.full((32,), largest)})
    with pytest.raises(sluice.NonFiniteError, match='unit "blocks.1" has a parameter that is no finite'):
        model(*batch(0))
    optimizer.close()


def test_the_plan_says_what_the_copies_take(settings, tmp_path):
    kept = json.loads(json.dumps(settings("nvme", "serial")))
    lines = plans.describe(mixed(), kept)
    trained = sum(p.numel() for p in mixed().parameters() if p.dtype == torch.bfloat16)
    assert any(line.startswith(f"{trained:,} parameters of bf16 beside others of fp32: the engine keeps all as fp32") for line in lines), lines
