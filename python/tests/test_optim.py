"""sluice_offload.optim against torch.optim, in one process: torch has parameters and gradients, the engine the state."""

import copy
import inspect
import io
import logging
import math
import re
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import sluice_offload as sluice
from conftest import batch, tiny, worst
from sluice_offload import detached_base, optim, optim_state
from sluice_offload.shares import ProcessGroup

# Rounding alone decides the direction in which the bias of attention's keys goes: softmax does not see it.
UNSEEN = "attention.in_proj_bias"

# A step has read so many bytes at most for the next one.
AHEAD = 16 * 32 * 1024


@pytest.fixture
def place(tmp_path):
    """All state that is not small on NVMe, under a budget of a quarter of it, in blocks of 32 KiB."""
    def make(tier="nvme", host="240KiB"):
        return {"placement": {"optimizer": tier}, "memory": {"host": host},
                "storage": {"paths": [str(tmp_path)], "block_elements": 4096}}
    return make


def groups(model, **second):
    """Matrices, and everything else with hyperparameters of its own."""
    return [{"params": [p for p in model.parameters() if p.dim() >= 2]},
            {"params": [p for p in model.parameters() if p.dim() < 2], **second}]


def step_of(model, optimizer, i, clip=1.0):
    loss = model(*batch(i))
    loss.backward()
    if i % 4 == 2:  # torch's rule: without a gradient, not touched
        model.blocks[1].mlp[1].weight.grad = None
        model.norm.bias.grad = None
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_same_way(model, reference, start, bound=1e-5):
    """All elements together, but the ones that only rounding moves."""
    difference = way = 0.0
    width = model.positions.shape[1]
    for (name, p), q, p0 in zip(model.named_parameters(), reference.parameters(), start.parameters(), strict=True):
        p, q, p0 = p.detach().double().clone(), q.detach().double().clone(), p0.detach().double()
        if UNSEEN in name:
            for x in (p, q):
                x[width:2 * width] = p0[width:2 * width]
        difference += (p - q).square().sum().item()
        way += (q - p0).square().sum().item()
    assert way > 0 and math.sqrt(difference) <= bound * math.sqrt(way)


CASES = {
    "AdamW": ({"lr": 2e-3, "weight_decay": 0.1}, {"weight_decay": 0.0, "betas": (0.8, 0.95), "lr": 1e-3}),
    "AdamW-maximize": ({"lr": 1e-4, "maximize": True}, {}),
    "Adam": ({"lr": 1e-3, "weight_decay": 0.01}, {"eps": 1e-6}),
    "SGD": ({"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01}, {"momentum": 0.0}),
    "Adagrad": ({"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.01}, {"lr": 3e-3}),
}


@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_as_torch(case, place):
    """With groups, a schedule, clipping and missing gradients; all bytes are the plan's, within a quarter of the state."""
    options, second = CASES[case]
    name = case.split("-")[0]
    start = tiny(width=64, layers=6)
    reference, model = copy.deepcopy(start), copy.deepcopy(start)
    theirs = getattr(torch.optim, name)(groups(reference, **second), **options)
    budget = "240KiB" if "Adam" in name else "120KiB"  # with one moment the state is half as large
    ours = getattr(optim, name)(groups(model, **second), **options, config=place(host=budget))
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, [lambda k: 1 / (1 + 0.1 * k), lambda k: 0.9 ** k])
                 for o in (theirs, ours)]
    expected, actual = [], []
    before = ours.report
    assert before.host_bytes <= int(budget[:-3]) << 10
    assert 4 * (int(budget[:-3]) << 10) <= before.host_bytes + before.nvme_bytes
    for i in range(50):
        expected.append(step_of(reference, theirs, i))
        actual.append(step_of(model, ours, i))
        for schedule in schedules:
            schedule.step()
        ours._engine.wait_all()
        report = ours.report
        read, written = report.nvme_read_bytes - before.nvme_read_bytes, report.nvme_write_bytes - before.nvme_write_bytes
        if i % 4 == 2:  # parameters without a gradient
            assert 0 < written < report.pass_bytes and read > 0
        elif i > 0:
            assert written == report.pass_bytes > 0 and abs(read - written) <= AHEAD and read > 0
        before = report
    assert worst(actual, expected) <= 2e-6
    assert_same_way(model, reference, start)
    ours.close()


def test_bytes_are_the_plans(place):
    """A step reads and writes each record once; what is read ahead for the next one comes on top, once."""
    model = tiny(width=64)
    ours = optim.AdamW(model.parameters(), config=place())
    writes = []
    for i in range(6):
        step_of(model, ours, 4 * i)
        ours._engine.wait_all()
        writes.append(ours.report.nvme_write_bytes)
    one = ours.report.pass_bytes
    assert one == ours.report.nvme_bytes > 0
    assert writes == [one * (i + 1) for i in range(6)]
    assert 5 * one <= ours.report.nvme_read_bytes <= 5 * one + AHEAD
    ours.close()


def test_lion_as_the_paper_has_it(place):
    start = tiny(width=64)
    reference, model = copy.deepcopy(start), copy.deepcopy(start)
    ours = optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1, config=place())
    momenta = {p: torch.zeros_like(p) for p in reference.parameters()}
    for i in range(10):
        reference(*batch(i)).backward()
        for p, q in zip(reference.parameters(), model.parameters()):
            q.grad = p.grad.clone()  # signs are sharp: the same gradient for both
            with torch.no_grad():
                direction = torch.sign(0.9 * momenta[p] + (1 - 0.9) * p.grad)
                p.mul_(1 - 1e-4 * 0.1).sub_(1e-4 * direction)
                momenta[p].mul_(0.99).add_((1 - 0.99) * p.grad)
            p.grad = None
        ours.step()
    for p, q in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.state[q]["exp_avg"], momenta[p], rtol=1e-5, atol=1e-8)
    ours.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_have_exact_masters(dtype, place):
    """The same bits wherever the state is; masters equal those of torch's AdamW in fp32 that sees the same gradients."""
    start = tiny(width=64).to(dtype)
    models = [copy.deepcopy(start) for _ in range(2)]
    optimizers = [optim.AdamW(model.parameters(), lr=1e-3, config=place(*where))
                  for model, where in zip(models, [("nvme", "240KiB"), ("host", "8MiB")])]
    masters = [p.detach().float().requires_grad_() for p in start.parameters()]
    oracle = torch.optim.AdamW(masters, lr=1e-3)
    for i in range(15):
        for model in models:
            model(*batch(i)).backward()
        for p, q, master in zip(*(model.parameters() for model in models), masters):
            assert torch.equal(p.grad, q.grad)
            master.grad = p.grad.float()
        for optimizer in [*optimizers, oracle]:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(*(model.parameters() for model in models)):
            assert torch.equal(p, q)
    for p, master in zip(models[0].parameters(), masters):
        kept = optimizers[0].state[p]["master"]
        assert kept.dtype == torch.float32
        torch.testing.assert_close(kept, master.detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(kept.to(dtype), p.detach(), rtol=0.01, atol=1e-6)
    assert optimizers[0].report.adopted_elements == 0
    # Masters are part of the state_dict: training goes on with the same bits elsewhere.
    models.append(copy.deepcopy(models[0]))
    optimizers.append(optim.AdamW(models[2].parameters(), config=place("host", "8MiB")))
    optimizers[2].load_state_dict(optimizers[0].state_dict())
    for i in range(15, 20):
        for model, optimizer in ((models[0], optimizers[0]), (models[2], optimizers[2])):
            model(*batch(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(models[0].parameters(), models[2].parameters()):
        assert torch.equal(p, q) and torch.equal(optimizers[0].state[p]["master"], optimizers[2].state[q]["master"])
    for optimizer in optimizers:
        optimizer.close()


def test_parameters_that_the_program_changes_become_masters(place):
    p = nn.Parameter(torch.linspace(-1, 1, 20000).to(torch.bfloat16))
    ours = optim.AdamW([p], lr=1e-2, weight_decay=0, config=place())
    for i in range(3):
        p.grad = torch.ones_like(p)
        ours.step()
    before = ours.state[p]["master"]
    with torch.no_grad():
        p[100:110] = 0.5
    assert ours.state[p]["master"][100:110].eq(0.5).all()
    p.grad = torch.zeros_like(p)
    ours.state[p]["exp_avg"] = torch.zeros(20000)
    ours.step()
    after = ours.state[p]["master"]
    assert ours.report.adopted_elements == 10
    assert after[100:110].eq(0.5).all()
    assert torch.equal(after[110:], before[110:]) and torch.equal(after[:100], before[:100])
    # Other memory for the same parameter is noticed too, and an fp32 parameter is its own master.
    q = nn.Parameter(torch.zeros(20000))
    other = optim.SGD([q], lr=1.0, config=place())
    q.data = torch.full((20000,), 3.0)
    q.grad = torch.ones(20000)
    other.step()
    assert q.eq(2).all()
    ours.close()
    other.close()


def test_state_dicts_go_to_torch_and_back(place):
    start = tiny(width=64)
    model, reference = copy.deepcopy(start), copy.deepcopy(start)
    ours = optim.AdamW(groups(model, lr=5e-4), lr=1e-3, config=place())
    theirs = torch.optim.AdamW(groups(reference, lr=5e-4), lr=1e-3)
    for i in range(5):
        step_of(model, ours, i)
        step_of(reference, theirs, i)
    saved = ours.state_dict()
    # torch 2.6 does not know the second key yet, and leaves it alone.
    assert saved["param_groups"][0].keys() == theirs.state_dict()["param_groups"][0].keys() | {"decoupled_weight_decay"}
    assert saved["state"].keys() == theirs.state_dict()["state"].keys()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    # Ours into torch's, torch's into ours, and ours into ours, which goes on with the same bits.
    to_torch, from_torch, again = copy.deepcopy(model), copy.deepcopy(reference), copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(groups(to_torch)), optim.AdamW(groups(from_torch), config=place()),
                  optim.AdamW(groups(again), config=place("host", "8MiB"))]
    optimizers[0].load_state_dict(saved)
    optimizers[1].load_state_dict(theirs.state_dict())
    optimizers[2].load_state_dict(torch.load(file))
    assert [group["lr"] for group in optimizers[2].param_groups] == [1e-3, 5e-4]
    for i in range(5, 10):
        losses = [step_of(m, o, i) for m, o in zip([model, reference, to_torch, from_torch, again],
                                                  [ours, theirs, *optimizers])]
        assert worst(losses, [losses[1]] * 5) <= 2e-6
        assert losses[0] == losses[4]
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(p, q)
    assert_same_way(to_torch, reference, start)
    assert_same_way(from_torch, reference, start)
    with pytest.raises(ValueError, match="param_groups of"):
        ours.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    with pytest.raises(sluice.ArgumentError, match="momentum_buffer"):
        ours.load_state_dict({**saved, "state": {0: {"momentum_buffer": torch.zeros(1)}}})
    for optimizer in (ours, optimizers[1], optimizers[2]):
        optimizer.close()


def test_a_default_device_is_the_programs(place):
    """As torch.set_default_device() sets it."""
    model = tiny(width=64)
    ours = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, config=place())
    step_of(model, ours, 0)
    before = copy.deepcopy(ours.state_dict())
    with torch.device("meta"):
        saved = ours.state_dict()
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"])
               for a, b in zip(saved["state"].values(), before["state"].values(), strict=True))
    with torch.device("meta"):
        ours.load_state_dict({**saved, "state": {key: {**entry, "momentum_buffer": None} for key, entry in saved["state"].items()}})
    assert not any(entry["momentum_buffer"].any() for entry in ours.state_dict()["state"].values())
    ours.close()
    ours = optim.AdamW(model.parameters(), lr=1e-2, config=place())
    model(*batch(1)).backward()
    with torch.device("meta"):
        ours.step()
        saved = ours.state_dict()
        ours.load_state_dict(saved)
    assert all(entry["step"].item() == 1 for entry in saved["state"].values())
    ours.close()


@pytest.mark.parametrize("tier,count", [("host", 300), ("nvme", 40000)])
def test_a_momentum_that_is_zero_for_a_while_is_left_alone(place, tier, count):
    """As in torch, also through a checkpoint that is made in between."""
    parameters = [nn.Parameter(torch.linspace(-1, 1, count)) for _ in range(2)]
    theirs = torch.optim.SGD(parameters[:1], lr=1.0, momentum=0.9)
    ours = optim.SGD(parameters[1:], lr=1.0, momentum=0.9, config=place(tier, "1MiB"))
    for step, (momentum, gradient) in enumerate(((0.9, 1.0), (0, 10.0), (0, float("inf")), (0, 1.0), (0.9, 0.0))):
        for p, optimizer in zip(parameters, (theirs, ours)):
            optimizer.param_groups[0]["momentum"] = momentum
            p.grad = torch.full((count,), gradient)
            optimizer.step()
            if gradient == float("inf"):
                p.data.zero_()
        if step == 2:
            saved = ours.state_dict()
            ours.close()
            ours = optim.SGD(parameters[1:], lr=1.0, config=place(tier, "1MiB"))
            ours.load_state_dict(saved)
            assert ours.state[parameters[1]]["momentum_buffer"].eq(1).all()
    assert parameters[0].isfinite().all() and torch.equal(*parameters)
    ours.close()


def test_whether_a_state_has_a_key_reads_nothing(place, monkeypatch):
    """Reading moves the whole tensor, and is a call of all ranks where the state is sharded."""
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    ours = optim.AdamW([p], config=place())
    monkeypatch.setattr(ours._engine, "read", lambda *_: pytest.fail("has read"))
    assert [key in ours.state[p] for key in ("step", "exp_avg", "master", "max_exp_avg_sq")] == [True, True, True, False]
    ours.state[p].check({"step": 0, **dict.fromkeys(("exp_avg", "exp_avg_sq", "master"))})
    ours.close()


@pytest.mark.parametrize("plain_steps", [0, 3])
def test_a_momentum_that_begins_later(place, plain_steps):
    """A scheduler such as OneCycleLR brings it. torch's buffer then begins with the gradient of that step."""
    start = tiny(width=64)
    reference, model = copy.deepcopy(start), copy.deepcopy(start)
    theirs, ours = torch.optim.SGD(reference.parameters(), lr=1e-2), optim.SGD(model.parameters(), lr=1e-2, config=place())
    for step in range(6):
        for trained, optimizer in ((reference, theirs), (model, ours)):
            if step == plain_steps:
                optimizer.param_groups[0]["momentum"] = 0.9
            trained(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_way(model, reference, start)
    saved = ours.state_dict()
    other = optim.SGD(copy.deepcopy(model).parameters(), lr=1e-2, config=place())
    other.load_state_dict(saved)
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"])
               for a, b in zip(saved["state"].values(), other.state_dict()["state"].values(), strict=True))
    ours.close()
    other.close()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion"])
def test_the_state_is_empty_before_the_first_update_as_torchs(place, kind, monkeypatch):
    """Helpers that copy all of it, as accelerate's prepare() and Lightning, copy nothing, and setting that writes nothing."""
    p, frozen = nn.Parameter(torch.ones(20000, dtype=torch.bfloat16)), nn.Parameter(torch.ones(5), requires_grad=False)
    ours = getattr(optim, kind)([frozen, p], config=place())
    monkeypatch.setattr(ours._engine, "read", lambda *_: pytest.fail("has read"))
    monkeypatch.setattr(ours._engine, "write", lambda *_: pytest.fail("has written"))

    def is_empty():
        return (not ours.state and len(ours.state) == 0 and not list(ours.state.items()) and p not in ours.state
                and ours.state.get(p) is None and ours.state_dict()["state"] == {})
    assert is_empty()
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.state = defaultdict(dict)
    ours.state[p] = {}
    assert is_empty()
    monkeypatch.undo()
    assert "master" in ours.state[p] and ours.state[p]["master"].eq(1).all()  # but who asks is told
    ours.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    ours.param_groups[0]["lr"] = -1.0
    p.grad = torch.ones_like(p)
    with pytest.raises(sluice.ArgumentError, match="learning rate"):
        ours.step()
    assert is_empty()
    ours.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    ours.param_groups[0]["lr"] = 1e-3
    ours.step()
    assert p in ours.state and len(ours.state) == len(ours.state_dict()["state"]) == 4
    ours.state = {}
    assert is_empty() and ours.state[p]["master"].eq(p).all()
    ours.state[p]["master"] = torch.zeros(20000)
    assert len(ours.state) == 4 and ours.state.get(p) is ours.state[p]
    ours.close()


@pytest.mark.parametrize("options", [{}, {"gradients": "backward", "clip_norm": 1.0}, {"overlap": "forward"}],
                         ids=["step", "backward", "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_of_torch_go_into_a_new_optimizer(place, dtype, options):
    """torch.distributed.checkpoint makes a step without gradients and rate where there is no state yet, and loads into what is there then."""
    model, again = tiny(width=64).to(dtype), tiny(width=64).to(dtype)
    ours, other = (optim.AdamW(m.parameters(), lr=1e-3, config=place(), **options, **({"modules": m} if "overlap" in options else {}))
                   for m in (model, again))
    for i in range(3):
        step_of(model, ours, i, clip=0)
    saved = get_optimizer_state_dict(model, ours)
    before = [p.detach().clone() for p in again.parameters()]
    target = get_optimizer_state_dict(again, other)
    assert target["state"].keys() == saved["state"].keys()
    assert all(torch.equal(p, q) for p, q in zip(before, again.parameters()))
    for name, entry in saved["state"].items():  # as checkpoint.load() does
        for key, value in entry.items():
            target["state"][name][key].copy_(value)
    set_optimizer_state_dict(again, other, target)
    again.load_state_dict(model.state_dict())
    for i in range(3, 6):
        assert step_of(model, ours, i, clip=0) == step_of(again, other, i, clip=0)
    for one, two in zip(ours.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
    for optimizer in (ours, other):
        optimizer.close()


def test_reading_the_state_changes_nothing(place):
    model = tiny(width=64)
    ours = optim.AdamW(model.parameters(), config=place())
    step_of(model, ours, 0)
    before = ours.state_dict()
    saved = get_optimizer_state_dict(model, ours)
    set_optimizer_state_dict(model, ours, saved)
    after = ours.state_dict()
    for key, entry in before["state"].items():
        assert entry["step"] == after["state"][key]["step"] == 1
        assert torch.equal(entry["exp_avg"], after["state"][key]["exp_avg"])
        assert torch.equal(entry["exp_avg_sq"], after["state"][key]["exp_avg_sq"])
    p = model.positions
    ours.state[p]["exp_avg"] = torch.full_like(p, 7)
    assert ours.state[p]["exp_avg"].eq(7).all()
    ours.state[p] = {"step": torch.tensor(4.0), "exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
    assert ours.state[p]["step"] == 4 and ours.state[p]["exp_avg"].eq(1).all()
    for q, entry in ours.state.items():  # as Lightning moves a state to a device
        ours.state[q] = type(entry)({key: value.to("cpu") for key, value in entry.items()})
    assert ours.state[p]["step"] == 4 and ours.state[p]["exp_avg"].eq(1).all()
    with pytest.raises(sluice.ArgumentError, match=r"'exp_avg_sq' in the state of param_groups.0..params.0. is -1 at element 0"):
        ours.state[p]["exp_avg_sq"] = -torch.ones_like(p)
    assert ours.state[p]["exp_avg_sq"].eq(1).all()
    with pytest.raises(sluice.ArgumentError, match="not taken away"):
        ours.state.clear()
    ours.close()


def test_another_mapping_replaces_the_state_as_in_torch(place):
    """Programs begin anew by it, and some go back to an earlier state."""
    ours_of, theirs_of = tiny(width=64), tiny(width=64)
    ours, theirs = optim.AdamW(ours_of.parameters(), config=place()), torch.optim.AdamW(theirs_of.parameters())
    start = copy.deepcopy(ours_of)
    pairs = ((ours_of, ours), (theirs_of, theirs))
    for i in range(6):
        if i == 2:
            kept = [{p: {key: value.clone() for key, value in entry.items()} for p, entry in optimizer.state.items()}
                    for _, optimizer in pairs]
        if i == 3:
            ours.state, theirs.state = defaultdict(dict), defaultdict(dict)
            assert not ours.state and all(ours.state[p]["step"] == 0 and not ours.state[p]["exp_avg"].any() for p in ours_of.parameters())
        if i == 5:
            (ours.state, theirs.state) = kept
            assert ours.state[ours_of.positions]["step"] == 2
        for model, optimizer in pairs:
            step_of(model, optimizer, 1 + i % 2)
    assert_same_way(ours_of, theirs_of, start)
    before = ours.state[ours_of.positions]["exp_avg"]
    for wrong, word in ((None, "mapping"), ({torch.ones(1): {}}, "1 of the 1 keys"),
                        ({ours_of.positions: {}, ours_of.norm.bias: {"max_exp_avg_sq": 1}}, "max_exp_avg_sq"),
                        ({ours_of.positions: {}, ours_of.norm.bias: {"exp_avg": torch.ones(7)}}, "exp_avg.*has shape .7,.*, but"),
                        ({ours_of.positions: {}, ours_of.norm.bias: {"exp_avg": 1.0}}, "exp_avg.* is of float; it has to be a tensor"),
                        ({ours_of.positions: {}, ours_of.norm.bias: {"step": math.nan}}, "nan as its step"),
                        ({ours_of.positions: {}, ours_of.norm.bias: []}, "not list")):
        with pytest.raises(sluice.ArgumentError, match=word):
            ours.state = wrong
    assert torch.equal(before, ours.state[ours_of.positions]["exp_avg"]) and before.any()
    ours.close()


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_the_whole_signature_of_torch(name, place):
    """Each argument works as in torch, means nothing, or is refused with words."""
    refused = {"amsgrad": True, "capturable": True, "differentiable": True, "nesterov": True, "dampening": 0.1,
               "initial_accumulator_value": 0.1, "decoupled_weight_decay": True}
    given = {"lr": torch.tensor(1e-3), "betas": (0.5, 0.6), "eps": 1e-6, "weight_decay": 0.5, "maximize": True,
             "foreach": True, "fused": True, "momentum": 0.5, "lr_decay": 0.5}
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    ours = inspect.signature(getattr(optim, name)).parameters
    for argument in theirs:
        if argument == "params":
            continue
        assert ours[argument].default == theirs[argument].default and ours[argument].kind == theirs[argument].kind
        p, q = (nn.Parameter(torch.linspace(-1, 1, 100)) for _ in range(2))
        if argument in refused:
            with pytest.raises(sluice.ArgumentError):
                getattr(optim, name)([p], **{argument: refused[argument]}, config=place())
            continue
        options = {argument: given[argument]}
        mine = getattr(optim, name)([p], **options, config=place())
        other = getattr(torch.optim, name)([q], **({} if argument in ("foreach", "fused") else options))
        for i in range(3):
            p.grad = torch.linspace(1, -2, 100) + i
            q.grad = p.grad.clone()
            mine.step()
            other.step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        mine.close()


def test_a_grad_scaler_scales_and_skips(place):
    p, q = (nn.Parameter(torch.linspace(-1, 1, 100)) for _ in range(2))
    ours, theirs = optim.AdamW([p], config=place()), torch.optim.AdamW([q])
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0 ** 8) for _ in range(2)]
    for i in range(5):
        for x, optimizer, scaler in ((p, ours, scalers[0]), (q, theirs, scalers[1])):
            factor = torch.tensor(math.inf if i == 2 else 1.0 + i)
            scaler.scale((x.square().sum() * factor)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([x], 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0 ** 7
    assert ours.state[p]["step"] == theirs.state[q]["step"] == 4
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    ours.close()


def test_closures_layouts_and_empty_parameters(place):
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 32, 3)
    with torch.no_grad():
        conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    reference = copy.deepcopy(conv)
    empty, scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.5))
    ours = optim.AdamW([*conv.parameters(), empty, scalar], config=place())
    theirs = torch.optim.AdamW(reference.parameters())
    x = torch.randn(2, 16, 8, 8)
    for _ in range(3):
        losses = []
        for model, optimizer in ((conv, ours), (reference, theirs)):
            def closure(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss
            empty.grad, scalar.grad = torch.empty(0, 3), torch.tensor(1.0)
            losses.append(optimizer.step(closure).item())
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    assert not conv.weight.is_contiguous()
    torch.testing.assert_close(conv.weight, reference.weight, rtol=1e-5, atol=1e-6)
    assert scalar.item() == 1.5  # the closure's zero_grad came first
    ours.close()


def test_autograd_notices_the_update(place):
    """As in torch, a graph that holds the old values cannot be used after step()."""
    p = nn.Parameter(torch.ones(100))
    ours = optim.SGD([p], config=place())
    loss = p.square().sum()
    loss.backward(retain_graph=True)
    ours.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    ours.close()


def test_a_tensor_that_is_not_finite_is_named(place, caplog):
    p = nn.Parameter(torch.ones(100))
    ours = optim.AdamW([("the.weight", p)], config=place())
    p.grad = torch.full((100,), math.nan)
    with caplog.at_level(logging.WARNING, "sluice_offload"):
        ours.step()
    assert "\"the.weight\" with an infinity or a NaN" in caplog.text
    assert p.isnan().all()
    ours.close()


def test_what_is_refused(place):
    def refused(words, call):
        with pytest.raises(sluice.ArgumentError, match=words):
            call()
    p = nn.Parameter(torch.ones(10))
    refused("gradients='now'", lambda: optim.AdamW([p], gradients="now"))
    refused("belong together", lambda: optim.AdamW([p], overlap="forward"))
    refused("are arguments", lambda: optim.AdamW([p], config={"optimizer": {"beta1": 0.5}}))
    refused("are arguments", lambda: optim.AdamW([p], config={"optimizer": {"type": "lion"}}))
    refused("float64", lambda: optim.AdamW([nn.Parameter(torch.ones(10, dtype=torch.float64))]))
    refused("init_process_group", lambda: optim.AdamW([p], shard=True))
    refused("init_process_group", lambda: optim.AdamW([p], process_group=object()))
    refused("shards over none", lambda: optim.AdamW([p], process_group=object(), shard=False))
    with pytest.raises(sluice.ConfigError, match="device"):
        optim.AdamW([p], config=place("device"))
    with pytest.raises(sluice.OutOfMemoryError, match="need 9[0-9]* KiB"):
        optim.AdamW([nn.Parameter(torch.ones(20000))], config=place("nvme", "64KiB"))
    ours = optim.AdamW([p], config=place())
    ours.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 1.0})
    assert len(ours._shares) == 2
    p.grad = torch.ones(10)
    ours.step()
    refused("after the first step", lambda: ours.add_param_group({"params": [nn.Parameter(torch.ones(3))]}))
    refused("copied nor pickled", lambda: copy.deepcopy(ours))
    ours.param_groups[0]["amsgrad"] = True
    refused("amsgrad", ours.step)
    ours.param_groups[0]["amsgrad"] = False
    ours.param_groups[0]["lr"] = -1.0
    refused("learning rate", ours.step)
    ours.param_groups[0]["lr"] = 1e-3
    assert ours.state[p]["step"] == 1
    p.grad = torch.sparse_coo_tensor([[1]], [1.0], (10,))
    refused("sparse", ours.step)
    p.grad = None
    p.data = torch.ones(11)
    p.grad = torch.ones(11)
    refused("make a new optimizer", ours.step)
    p.data, p.grad = torch.ones(10), None
    ours.close()


WRONG = {"shape": (r"'exp_avg' .*params.1. has shape .7,., but the parameter has .3,", torch.zeros(7)),
         "kind": ("momentum_buffer", None), "entry": ("not Tensor", None),
         "negative": (r"'exp_avg_sq' .*params.1. is -1 at element 1; .*at least 0", torch.tensor([math.nan, -1.0, -2.0])),
         "negative-infinite": (r"'exp_avg_sq' .*params.1. is -inf at element 0; .*at least 0", torch.tensor([-math.inf, math.inf, 1.0])),
         "negative-8": (r"'exp_avg_sq' .*params.1. is -0.5 at element 2; .*at least 0", torch.tensor([0.0, 1.0, -0.5]).to(torch.float8_e4m3fn)),
         "meta": (r"'exp_avg' .*params.1. is a tensor on the meta device", torch.empty(3, device="meta")),
         "sparse": (r"'exp_avg' .*params.1. is a tensor torch.sparse_coo", torch.eye(3)[0].to_sparse()),
         "complex": (r"'exp_avg' .*params.1. is a tensor .*torch.complex64; it has to be dense, of real", torch.ones(3, dtype=torch.complex64))}


@pytest.mark.parametrize("assigns", [False, True], ids=["load", "assign"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_dict_that_is_refused_changes_nothing(place, wrong, assigns):
    parameters = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))]
    ours = optim.AdamW(parameters, lr=1e-3, config=place())
    theirs = (torch.optim.SGD if wrong == "kind" else torch.optim.AdamW)(
        [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))], lr=77.0, **({"momentum": 0.9} if wrong == "kind" else {}))
    for optimizer in (ours, theirs):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p) * (1 if optimizer is ours else 2)
        optimizer.step()
    given = theirs.state_dict()
    words, values = WRONG[wrong]
    if values is not None:
        given["state"][1]["exp_avg_sq" if "negative" in wrong else "exp_avg"] = values
    if wrong == "entry":
        given["state"][1] = torch.zeros(3)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(sluice.ArgumentError, match=words):
        if assigns:
            ours.state = dict(zip(parameters, given["state"].values()))
        else:
            ours.load_state_dict(given)
    after = ours.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        assert all(torch.equal(after["state"][key][name], value) for name, value in entry.items())
    ours.close()


@pytest.mark.parametrize("name, gradient", [("AdamW", 1e25), ("AdamW", math.inf), ("AdamW", math.nan), ("Adagrad", 1e25), ("SGD", math.inf)])
def test_a_state_with_infinities_goes_on_as_in_torch(place, caplog, name, gradient):
    """Updates make them, as torch's do, and training goes on. So a checkpoint of either loads, and the next update warns of it."""
    options = {"lr": 1e-3, **({"momentum": 0.9} if name == "SGD" else {})}

    def make(library, values, **more):
        p = nn.Parameter(values.detach().clone())
        return p, getattr(library, name)([("the.weight", p)] if library is optim else [p], **options, **more)

    def step(p, optimizer, first):
        p.grad = torch.tensor([first, 1.0, -2.0, 3.0])
        optimizer.step()

    def state_of(optimizer):
        return optimizer.state_dict()["state"][0]

    def assert_equal(one, other):
        """Sums in another order may make an infinity where torch has a NaN."""
        for ours, theirs in ((one[0], other[0]), *((state_of(one[1])[key], value) for key, value in state_of(other[1]).items())):
            assert torch.equal(ours.isfinite(), theirs.isfinite())
            assert torch.allclose(ours[ours.isfinite()], theirs[ours.isfinite()], rtol=1e-6)
    pairs = [make(optim, torch.ones(4), config=place()), make(torch.optim, torch.ones(4))]
    for pair in pairs:
        step(*pair, gradient)
    assert_equal(*pairs)
    assert not all(value.isfinite().all() for value in state_of(pairs[0][1]).values())
    for p, saved in list(pairs):
        pairs.append(make(optim, p, config=place()))
        pairs[-1][1].load_state_dict(saved.state_dict())
        assert_equal(pairs[-1], (p, saved))
    for entry in pairs[0][1].state.values():
        for key, value in dict(entry).items():
            entry[key] = value
    for pair in pairs:
        caplog.clear()
        for _ in range(3):
            step(*pair, 1.0)
    assert "\"the.weight\" with an infinity or a NaN" in caplog.text  # of the last, which has been loaded
    for pair in pairs:
        assert_equal(pair, pairs[1])
    for _, optimizer in (pairs[0], *pairs[2:]):
        optimizer.close()


def test_moments_of_other_types_are_loaded(place):
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.bool):
        p = nn.Parameter(torch.ones(4))
        ours = optim.AdamW([p], config=place())
        ours.state[p] = {"step": 1, "exp_avg": torch.ones(4).to(dtype), "exp_avg_sq": torch.ones(4).to(dtype)}
        assert ours.state[p]["exp_avg"].eq(1).all() and ours.state[p]["exp_avg_sq"].eq(1).all()
        ours.close()


def test_a_state_is_looked_through_once(place, monkeypatch):
    """It may have tens of GB."""
    seen, original = [], optim_state.require_squares
    monkeypatch.setattr(optim_state, "require_squares", lambda values, words: seen.append(words) or original(values, words))
    p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    ours = optim.AdamW([p, q], config=place())
    p.grad = q.grad = torch.ones(4)
    ours.step()
    given = ours.state_dict()
    for give in (lambda: ours.load_state_dict(given), lambda: setattr(ours, "state", {p: given["state"][0], q: given["state"][1]}),
                 lambda: [ours.state.update({x: state}) for x, state in zip((p, q), given["state"].values())]):
        seen.clear()
        give()
        assert len(seen) == 2
    ours.close()


def test_the_norm_is_taken_as_clip_grad_norm_takes_it(place, monkeypatch):
    """torch's kernel for several tensors at a time, on a GPU, adds in another order."""
    asked, original = [], nn.utils.get_total_norm
    monkeypatch.setattr(nn.utils, "get_total_norm", lambda *args, **kwargs: asked.append((args[1:], kwargs)) or original(*args, **kwargs))
    p = nn.Parameter(torch.ones(16))
    ours = optim.AdamW([p], clip_norm=1.0, config=place())
    p.grad = torch.ones(16)
    ours.step()
    assert asked == [((), {})] and ours.gradient_norm == 4
    ours.close()


@pytest.mark.parametrize("kind, options, words", [
    ("AdamW", {"eps": 0.0}, "epsilon is 0, but must be in 1.2e-38"), ("AdamW", {"lr": -1}, "learning_rate is -1"),
    ("Adam", {"betas": (0.9, 1.0)}, "beta2 is 1, but must be in"), ("SGD", {"momentum": 1.0}, "momentum is 1, but must be in"),
    ("Adagrad", {"weight_decay": math.inf}, "weight_decay is inf"), ("Lion", {"lr": math.nan}, "learning_rate is nan")])
def test_hyperparameters_that_cannot_be_are_refused_at_once(place, kind, options, words):
    p = nn.Parameter(torch.ones(4))
    with pytest.raises(sluice.ArgumentError, match=re.escape(words)):
        getattr(optim, kind)([p], config=place(), **options)
    ours = getattr(optim, kind)([p], config=place())
    with pytest.raises(sluice.ArgumentError, match=re.escape(words)):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(4))], **options})
    ours.close()


def test_a_step_beyond_what_fp32_counts_is_kept(place):
    p = nn.Parameter(torch.ones(4))
    ours = optim.AdamW([p], config=place())
    p.grad = torch.ones(4)
    ours.step()
    for step in (1, (1 << 24) + 3):
        state = ours.state_dict()
        state["state"][0] = {**state["state"][0], "step": torch.tensor(float(step), dtype=torch.float64)}
        ours.load_state_dict(state)
        assert int(ours.state_dict()["state"][0]["step"]) == step
    theirs = torch.optim.AdamW([p])
    theirs.load_state_dict(ours.state_dict())
    theirs.step()
    ours.close()


def test_the_update_leaves_cores_to_torch(place, monkeypatch):
    """A container may use fewer than the host has."""
    monkeypatch.setattr(detached_base, "share_of_cores", lambda processes: 8 // processes)
    monkeypatch.setattr(detached_base, "processes_of_launcher", lambda: 1)
    model = nn.Linear(4, 4)
    for options, threads in (({}, 8), ({"gradients": "backward"}, 4), ({"overlap": "forward", "modules": model}, 4)):
        ours = optim.AdamW(model.parameters(), config=place(), **options)
        assert ours._with_threads(None)["run"]["threads"] == threads
        assert ours._with_threads(0)["run"]["threads"] == 7
        monkeypatch.setattr(detached_base, "processes_of_launcher", lambda: 4)
        assert ours._with_threads(0)["run"]["threads"] == 1
        monkeypatch.setattr(detached_base, "processes_of_launcher", lambda: 1)
        ours.close()


def test_loaded_hyperparameters_are_the_optimizers_own(place):
    """As torch copies them: a scheduler writes into an lr that is a tensor."""
    p = nn.Parameter(torch.zeros(4))
    ours = optim.SGD([p], lr=torch.tensor(1.0), config=place())
    saved = copy.deepcopy(ours.state_dict())
    ours.load_state_dict(saved)
    ours.param_groups[0]["lr"].fill_(5)
    assert saved["param_groups"][0]["lr"] == 1
    with pytest.raises(sluice.ArgumentError, match="nesterov"):
        ours.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "lr": 7.0, "nesterov": True}]})
    assert ours.param_groups[0]["lr"] == 5  # what is refused changes nothing
    ours.close()


@pytest.mark.parametrize("refused", [{"nesterov": True}, {}], ids=["setting", "memory"])
def test_a_group_that_is_refused_is_not_added(place, refused):
    p = nn.Parameter(torch.zeros(8))
    ours = optim.SGD([p], lr=1.0, momentum=0.5, config=place("host", "1MiB"))
    ours.state[p]["momentum_buffer"] = torch.ones(8)
    with pytest.raises(sluice.SluiceError):
        ours.add_param_group({"params": [nn.Parameter(torch.zeros(8 if refused else 1 << 20))], **refused})
    assert len(ours.param_groups) == 1
    p.grad = torch.ones(8)
    ours.step()
    assert p.eq(-1.5).all()
    ours.close()


def test_assigned_state_is_not_lost_to_parameters_that_are_added(place):
    parameters = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
    ours = optim.AdamW(parameters[:1], config=place())
    ours.state[parameters[0]] = {"step": 3, "exp_avg": torch.ones(8), "exp_avg_sq": torch.full((8,), 2.0)}
    ours.add_param_group({"params": parameters[1:]})
    assert {key: float(value.max()) for key, value in ours.state[parameters[0]].items()} == {"step": 3, "exp_avg": 1, "exp_avg_sq": 2}
    assert ours.state[parameters[1]]["step"] == 0 and ours.state[parameters[1]]["exp_avg"].eq(0).all()
    ours.close()


@pytest.mark.parametrize("gradients", ["step", "backward"])
def test_groups_that_a_program_replaces(place, gradients):
    """Both between the steps, and the parameters before the first one, as accelerate does for FSDP2."""
    old, p = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    ours = optim.SGD([old], lr=1.0, gradients=gradients, config=place())
    ours.param_groups[0]["params"] = [p]
    ours.state_dict()
    for lr, expected in ((1.0, -1.0), (100.0, -101.0)):
        ours.param_groups = [{**ours.param_groups[0], "lr": lr}]
        p.sum().backward()
        ours.step()
        ours.zero_grad()
        assert p.eq(expected).all()
    ours.param_groups[0]["params"] = [old]
    old.sum().backward()
    with pytest.raises(sluice.ArgumentError, match="params.0. of shape .4,. has been put there since .* make a new optimizer"):
        ours.step()
    ours.param_groups[0]["params"] = []
    p.sum().backward()
    ours.step()
    assert p.eq(-101).all()  # as in torch, what is in no group is left alone
    ours.close()


def test_a_parameter_that_is_twice_in_a_group(place):
    p = nn.Parameter(torch.zeros(3))
    for make in (lambda: optim.SGD([p, p], config=place()), lambda: optim.SGD([("a", p), ("b", p)], config=place())):
        with pytest.warns(UserWarning, match="duplicate"), pytest.raises(sluice.ArgumentError, match="shape .3,. is twice in one group"):
            make()
    optim.SGD(list(dict.fromkeys([p, p])), config=place()).close()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float64])
def test_frozen_parameters_of_any_type(place, dtype):
    """They have no state, as in torch."""
    frozen, p = nn.Parameter(torch.ones(1 << 20, dtype=dtype), requires_grad=False), nn.Parameter(torch.zeros(8))
    ours = optim.SGD([frozen, p], lr=1.0, momentum=0.5, config=place("host", "1MiB"))
    for expected in (-1.0, -2.5):
        p.sum().backward()
        ours.step()
        ours.zero_grad()
        assert p.eq(expected).all() and frozen.eq(1).all()
    saved = ours.state_dict()
    assert set(saved["state"]) == {1}
    ours.load_state_dict(saved)
    assert ours.state[p]["momentum_buffer"].eq(1.5).all()
    if dtype == torch.float64:
        frozen.requires_grad_(True)
        frozen.grad = torch.ones_like(frozen)
        with pytest.raises(sluice.ArgumentError, match="frozen and of torch.float64 .*make a new optimizer"):
            ours.step()
    ours.close()


def test_state_of_frozen_parameters_that_does_not_fit_names_them(place):
    frozen, p = nn.Parameter(torch.ones(1 << 20), requires_grad=False), nn.Parameter(torch.zeros(8))
    with pytest.raises(sluice.OutOfMemoryError, match="1 of the 2 parameters, of 1048576 elements, are frozen.*with requires_grad"):
        optim.AdamW([frozen, p], config=place("host", "1MiB"))
    optim.AdamW([x for x in (frozen, p) if x.requires_grad], config=place("host", "1MiB")).close()


def test_state_of_frozen_parameters_is_told(place, caplog):
    frozen, p = nn.Parameter(torch.ones(9 << 20), requires_grad=False), nn.Parameter(torch.zeros(8))
    for parameters, expected in (([frozen, p], ["1 of the 2 parameters are frozen, and about 72 MiB of the state is theirs"]), ([p], [])):
        caplog.clear()
        with caplog.at_level("WARNING", "sluice_offload"):
            optim.AdamW(parameters, config=place("host", "256MiB")).close()
        told = [record.getMessage().partition(";")[0] for record in caplog.records if "frozen" in record.getMessage()]
        assert told == expected


def test_remedies_that_work(place):
    """Those that the messages name: of a checkpoint of the other Adam, and of a parameter that has become another."""
    p = nn.Parameter(torch.ones(8))
    both = [kind([p], config=place()) for kind in (optim.Adam, optim.AdamW)]
    for ours, other, named in zip(both, reversed(both), ("AdamW", "Adam")):
        saved = other.state_dict()
        with pytest.raises(sluice.ArgumentError, match=f"use sluice_offload.optim.{named}($|[^W])"):
            ours.load_state_dict(saved)
        other.load_state_dict(saved)
    saved["param_groups"][0]["decoupled_weight_decay"] = True
    both[1].load_state_dict(saved)
    p.grad = torch.ones(8)
    both[1].step()
    saved = both[1].state_dict()
    for changed, has_state in ((torch.ones(8, dtype=torch.bfloat16), True), (torch.ones(9), False)):
        p.data, p.grad = changed, torch.ones_like(changed)
        with pytest.raises(sluice.ArgumentError, match="make a new optimizer") as raised:
            both[1].step()
        assert ("state_dict" in str(raised.value)) == has_state != ("begins anew" in str(raised.value))
        made = optim.AdamW([p], config=place())
        if has_state:
            made.load_state_dict(saved)
            assert made.state[p]["step"] == 1 and made.state[p]["exp_avg"].all()
        made.step()
        made.close()
        p.data, p.grad = torch.ones(8), None
    for ours in both:
        ours.close()


def test_lightning_moves_nothing(place):
    """Its helper reads and writes every tensor of the state, at the end of each fit and behind an exception of one rank. It sees none."""
    p = nn.Parameter(torch.ones(10))
    ours = optim.AdamW([p], config=place())
    p.grad = torch.ones(10)
    ours.step()
    mover = {"__name__": "lightning.fabric.utilities.optimizer"}
    exec("def items_of(state):\n    return list(state.items())", mover)  # pylint: disable=exec-used
    assert mover["items_of"](ours.state) == []
    assert [key for key, _ in ours.state.items()] == [p] == list(ours.state)
    ours.close()


def test_an_interrupt_takes_a_meeting_back(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt
    group, store = object.__new__(ProcessGroup), torch.distributed.HashStore()
    group.rank, group.size, group._number, group._meetings, group._together = 0, 2, 1, 0, 0
    monkeypatch.setattr(ProcessGroup, "_store", lambda self: store)
    monkeypatch.setattr(ProcessGroup, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        group.meet()
    assert group._meetings == 0 and store.add("sluice_state/1/1", 0) == 0


def test_a_launcher_without_a_process_group_is_told_once(place, caplog, monkeypatch):
    monkeypatch.setattr(detached_base, "_has_warned_of_launcher", False)
    p = nn.Parameter(torch.ones(10))
    for processes, shard, lines in (("1", None, 0), ("2", False, 0), ("2", None, 1), ("2", None, 1)):
        monkeypatch.setenv("WORLD_SIZE", processes)
        with caplog.at_level(logging.WARNING, "sluice_offload"):
            optim.AdamW([p], config=place(), shard=shard).close()
        assert caplog.text.count("the launcher has started 2 processes, and torch.distributed is not initialized") == lines
