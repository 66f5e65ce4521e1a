"""When the update of sluice_offload.optim runs: in step(), in backward, or into the next forward. Counted, not timed."""

import copy
import gc
import io
import math
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # before any optimizer is made
from torch.utils._python_dispatch import TorchDispatchMode

import sluice_offload as sluice
from conftest import batch, tiny, worst
from sluice_offload import detached_base, guards, optim
from sluice_offload.shares import total_norm
from test_optim import assert_same_way, place, step_of  # noqa: F401


def compare(make, place_of, steps=20):
    """Trains beside torch's AdamW without clipping; returns what came out."""
    start = tiny(width=64)
    reference, model = copy.deepcopy(start), copy.deepcopy(start)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    ours = make(model, place_of())
    losses = []
    for i in range(steps):
        pair = []
        for m, o in ((reference, theirs), (model, ours)):
            for part in range(2 if ours._gradients == "step" else 1):
                loss = m(*batch(2 * i + part))
                loss.backward()
            o.step()
            o.zero_grad()
            pair.append(loss.item())
        losses.append(pair)
    ours.synchronize()
    assert worst([pair[1] for pair in losses], [pair[0] for pair in losses]) <= 2e-6
    assert_same_way(model, reference, start)
    return model, ours


class Wide(nn.Module):
    """Layers of a quarter of a million parameters, and a first one whose backward takes long."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.5)
            return grad

    def __init__(self, layers=8, is_slow=True):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))
        self.is_slow = is_slow

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1 and self.is_slow:
                x = Wide.Slow.apply(x)
        return x


def test_step_updates_nothing_before_step_and_everything_in_it(place):  # noqa: F811
    model = Wide()
    ours = optim.AdamW(model.parameters(), lr=1e-3, config=place(host="2MiB"))
    for _ in range(3):
        before = ours.report.updated_elements
        model(torch.ones(4, 512)).sum().backward()
        assert ours.report.updated_elements == before
        ours.step()
        report = ours.report
        assert report.updated_elements - before == sum(p.numel() for p in model.parameters())
        assert report.pending_tensors == 0
        ours.zero_grad()
    ours.close()


def test_backward_is_as_torch(place):  # noqa: F811
    model, ours = compare(lambda m, c: optim.AdamW(m.parameters(), lr=1e-3, gradients="backward", config=c), place)
    assert all(p.grad is None for p in model.parameters())
    ours.close()


def test_half_of_the_update_is_made_before_backward_has_ended(place):  # noqa: F811
    model = Wide()
    ours = optim.AdamW(model.parameters(), lr=1e-3, gradients="backward", config=place(host="2MiB"))
    everything = sum(p.numel() for p in model.parameters())
    for _ in range(2):
        before = ours.report.updated_elements
        model(torch.ones(4, 512)).sum().backward()
        # The first layers' gradients are the last to come; six of eight layers were ready for half a second.
        assert ours.report.updated_elements - before >= everything / 2
        assert all(p.grad is None for p in model.parameters())
        ours.step()
        assert ours.report.updated_elements - before == everything
    ours.close()


def test_what_backward_forbids(place):  # noqa: F811
    model = tiny(width=64)
    ours = optim.AdamW(model.parameters(), gradients="backward", config=place())
    model(*batch(0)).backward()
    with pytest.raises(sluice.ArgumentError, match="clip_norm=, or clip with gradients=\"step\""):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(sluice.ArgumentError, match="second gradient before step"):
        model(*batch(1)).backward()
    ours.step()
    assert {int(entry["step"]) for entry in ours.state.values()} == {1} and all(p.grad is None for p in model.parameters())
    model.zero_grad()
    with pytest.raises(sluice.ArgumentError, match="holds parameters whose gradients the engine has"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(*batch(2))).backward()
    with pytest.raises(sluice.ArgumentError, match="GradScaler"):
        scaler.step(ours)
    ours.close()


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_written_behind_backward_is_refused(place, clip_norm):  # noqa: F811
    """Both would be used, or one would be lost."""
    p = nn.Parameter(torch.ones(4))
    ours = optim.SGD([("here", p)], lr=1.0, gradients="backward", clip_norm=clip_norm, config=place())
    p.sum().backward()
    p.grad = torch.ones(4)
    with pytest.raises(sluice.ArgumentError, match="here: p.grad has been written after backward.* p.grad = None drops"):
        ours.step()
    assert p.grad.eq(1).all()
    p.grad = None
    ours.step()
    expected = p.detach().clone()
    torch.testing.assert_close(expected, torch.full((4,), 0.5 if clip_norm else 0.0))
    p.sum().backward()
    ours.step()
    torch.testing.assert_close(p.detach(), expected - (0.5 if clip_norm else 1.0))
    ours.close()


def test_clipping_by_a_name_that_was_imported_before_is_refused(place):  # noqa: F811
    """Nothing would be clipped: p.grad is None. A remedy that is named works; what belongs to no optimizer is clipped as ever."""
    model, other = tiny(width=64), nn.Linear(2, 2)
    ours = optim.AdamW(model.parameters(), gradients="backward", config=place())
    model(*batch(0)).backward()
    for clip in (clip_grad_norm_, clip_grad_value_, getattr(nn.utils, "clip_grads_with_norm_", clip_grad_value_)):
        for given in (model.parameters(), model.blocks.parameters()):
            with pytest.raises(sluice.ArgumentError, match="give the optimizer clip_norm=, or clip with gradients=\"step\"") as raised:
                clip(given, 1.0, *([torch.tensor(1.0)] if "with_norm" in clip.__name__ else []))
            assert "config" not in str(raised.value) and "parameters()" not in str(raised.value)
    ours.step()
    (other(torch.ones(1, 2)).sum() * 100).backward()
    assert clip_grad_norm_(other.parameters(), 1.0) > 1
    assert other.bias.grad.norm() < 1
    clip_grad_value_(other.parameters(), 0.1)
    assert other.bias.grad.max() == pytest.approx(0.1)
    ours.close()


def test_the_norm_of_gradients_that_wait_for_it(place):  # noqa: F811
    """As transformers' Trainer asks for it, with its bound or with none."""
    model, other = tiny(width=64), nn.Linear(2, 2)
    reference = copy.deepcopy(model)
    ours = optim.SGD(model.parameters(), lr=1.0, gradients="backward", clip_norm=0.5, config=place())
    assert clip_grad_norm_(model.parameters(), math.inf) == 0
    for one in (model, reference):
        one(*batch(0)).backward()
    expected = clip_grad_norm_(reference.parameters(), 0.5)
    for bound in (0.5, math.inf):
        assert clip_grad_norm_(model.parameters(), bound) == expected > 0.5
    for given, options, words in ((model.parameters(), {"max_norm": 1.0}, "clip_norm=0.5; .*clip_norm=args.max_grad_norm"),
                                  (model.parameters(), {"max_norm": 0.5, "norm_type": 1}, "norm of type 2"),
                                  (model.blocks.parameters(), {"max_norm": 0.5}, "are not in the list")):
        with pytest.raises(sluice.ArgumentError, match=words):
            clip_grad_norm_(given, **options)
    other(torch.ones(1, 2)).sum().backward()
    with pytest.raises(sluice.ArgumentError, match="of several optimizers.*get_peft_model"):
        clip_grad_norm_([*model.parameters(), *other.parameters()], 0.5)
    before = reference.head.weight.detach().clone()
    ours.step()
    torch.testing.assert_close(model.head.weight.detach(), before - reference.head.weight.grad)
    (model(*batch(0)) * math.inf).backward()
    with pytest.raises(sluice.NonFiniteError):
        clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
    ours.zero_grad()
    ours.close()


def test_guards_of_a_torch_without_that_cell_are_in_the_modules(monkeypatch):
    def clip(parameters, bound):
        return "torch's"
    for module in (nn.utils, nn.utils.clip_grad):
        monkeypatch.setattr(module, "clip_grad_norm_", clip)
    guards._put_around("clip_grad_norm_", lambda original, parameters, bound: (original(parameters, bound), bound))
    assert nn.utils.clip_grad_norm_([], 3) == nn.utils.clip_grad.clip_grad_norm_([], 3) == ("torch's", 3)


def test_backward_trains_what_is_unfrozen_later(place):  # noqa: F811
    model = tiny(width=64)
    model.blocks.requires_grad_(False)
    theirs, start = copy.deepcopy(model), copy.deepcopy(model)
    ours = optim.AdamW(model.parameters(), lr=1e-3, gradients="backward", config=place())
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    for step in range(4):
        for trained, optimizer in ((model, ours), (theirs, reference)):
            trained.blocks.requires_grad_(step >= 2)
            trained(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_way(model, theirs, start, bound=1e-3)  # rounding moves elements whose gradient is almost 0
    ours.close()


def test_loaded_moments_are_not_lost_to_parameters_that_are_added(place):  # noqa: F811
    parameters = [nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))]
    ours = optim.AdamW(parameters[:1], config=place())
    parameters[0].grad = torch.ones(300)
    ours.step()
    state = ours.state_dict()
    ours.close()
    ours = optim.AdamW(parameters[:1], config=place())
    ours.load_state_dict(state)
    with pytest.raises(sluice.ArgumentError, match="after the first step.. or load_state_dict"):
        ours.add_param_group({"params": parameters[1:]})
    assert ours.state[parameters[0]]["exp_avg"].abs().min() > 0
    ours.close()


def test_held_gradients_are_not_lost_to_parameters_that_are_added(place):  # noqa: F811
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))]
    ours = optim.SGD(parameters[:1], lr=1.0, gradients="backward", clip_norm=100.0, config=place())
    parameters[0].sum().backward()
    ours.add_param_group({"params": parameters[1:]})
    parameters[1].sum().backward()
    ours.step()
    assert all(p.eq(-1).all() for p in parameters)
    ours.close()


def test_copies_of_a_model_are_not_kept(place):  # noqa: F811
    """Such as the best model so far. They have hooks in the place of its own, which wait for nothing and can be pickled."""
    model = tiny()
    ours = optim.AdamW(model.parameters(), lr=1e-3, overlap="forward", modules=model, config=place(host="2MiB"))
    step_of(model, ours, 0)
    copied = copy.deepcopy(model)
    copied(*batch(0))
    torch.save(copied, io.BytesIO())
    step_of(model, ours, 1)
    copied(*batch(0))
    copied.state_dict()
    assert ours._keep
    known = weakref.ref(copied)
    del copied
    gc.collect()
    assert known() is None
    ours.close()
    assert not any(module._forward_pre_hooks or module._state_dict_pre_hooks for module in model.modules())


@pytest.mark.parametrize("make", [lambda: Wide(is_slow=False), lambda: nn.Linear(512, 2048)], ids=["modules", "own"])
def test_copies_of_a_model_have_what_the_update_writes(place, make):  # noqa: F811
    """Parameters large enough for their update to end behind step(): those of modules in it, and those that the copied one owns."""
    reference = make()
    model = copy.deepcopy(reference)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    ours = optim.AdamW(model.parameters(), lr=1e-3, overlap="forward", modules=model, config=place(host="2MiB"))
    for _ in range(3):
        for net, optimizer in ((reference, theirs), (model, ours)):
            net(torch.ones(4, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        copied = copy.deepcopy(model)
        assert ours.report.pending_tensors == 0
        for name, p in reference.named_parameters():
            assert (copied.get_parameter(name) - p).abs().max() <= 1e-6
    with pytest.raises(sluice.ArgumentError, match="cannot be pickled, for its hooks belong to the optimizer; save its state_dict"):
        torch.save(model, io.BytesIO())
    ours.close()
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("gradients", ["step", "backward"])
def test_models_can_be_saved_and_optimizers_cannot(place, gradients):  # noqa: F811
    model = tiny()
    ours = optim.AdamW(model.parameters(), lr=1e-3, gradients=gradients, config=place(host="2MiB"))
    model(*batch(0)).backward()
    ours.step()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    other = torch.load(saved, weights_only=False)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
    other(*batch(0)).backward()
    torch.optim.SGD(other.parameters(), lr=1e-3).step()  # it belongs to no optimizer
    for copied in (lambda: torch.save(ours, io.BytesIO()), lambda: copy.deepcopy(ours)):
        with pytest.raises(sluice.ArgumentError, match="this optimizer keeps its state outside of Python"):
            copied()
    ours.close()


def test_gradients_take_no_memory(place, monkeypatch):  # noqa: F811
    monkeypatch.setattr(detached_base, "GRADIENT_BYTES", 2 << 20)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    ours = optim.AdamW(model.parameters(), lr=1e-3, gradients="backward", config=place(host="2MiB"))
    kept = []
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(lambda p: kept.append(sum(pair[0].nbytes for pair in ours._keep.values())))
    for _ in range(2):
        model(torch.ones(4, 512)).sum().backward()
        assert ours._kept_bytes == sum(pair[0].nbytes for pair in ours._keep.values())
        ours.step()
        assert ours._kept_bytes == 0 and not ours._keep
    assert len(kept) == 16 and max(kept) <= 2 << 20
    ours.close()


def test_copies_of_what_is_not_contiguous_come_in_bunches(place, monkeypatch):  # noqa: F811
    monkeypatch.setattr(detached_base, "GRADIENT_BYTES", 200 << 10)
    torch.manual_seed(2)
    reference = nn.Sequential(*(nn.Conv2d(*((64, 32) if i % 2 else (32, 64)), 3) for i in range(6)))
    model = copy.deepcopy(reference).to(memory_format=torch.channels_last)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    ours = optim.AdamW(model.parameters(), lr=1e-3, config=place())
    held, begin = [], ours._begin

    def begin_and_count(*arguments):
        begin(*arguments)
        held.append(sum(copied.nbytes for _, copied in ours._copies.values()))
    monkeypatch.setattr(ours, "_begin", begin_and_count)
    x = torch.randn(2, 32, 16, 16).to(memory_format=torch.channels_last)
    for _ in range(3):
        for net, optimizer in ((reference, theirs), (model, ours)):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(held) >= 12 and 0 < max(held) <= 200 << 10
    for p, q in zip(model.parameters(), reference.parameters()):
        assert (p - q).abs().max() <= 1e-5
    ours.close()


@pytest.mark.parametrize("overlap", [None, "forward"])
@pytest.mark.parametrize("gradients", ["step", "backward"])
def test_what_is_dropped_is_collected(place, gradients, overlap):  # noqa: F811
    """Without close(), and with updates under way. The optimizer first, which has hooks in the model, and then the model."""
    model = tiny(width=64)
    modules = {"modules": model} if overlap else {}
    ours = optim.AdamW(model.parameters(), lr=1e-3, gradients=gradients, overlap=overlap, config=place(), **modules)
    model(*batch(0)).backward()
    if overlap:
        ours.step()
    known = [weakref.ref(ours), weakref.ref(model.positions)]
    del ours
    gc.collect()
    assert known[0]() is None
    model(*batch(1)).backward()
    assert model.positions.grad is not None
    torch.save(model, io.BytesIO())
    del model, modules
    gc.collect()
    assert known[1]() is None


def test_forward_is_as_torch(place):  # noqa: F811
    model, ours = compare(lambda m, c: optim.AdamW(m.parameters(), lr=1e-3, overlap="forward", modules=m, config=c), place)
    ours.close()


def test_half_of_the_parameters_are_written_after_step_has_returned(place):  # noqa: F811
    model = Wide(is_slow=False)
    ours = optim.AdamW(model.parameters(), lr=1e-3, overlap="forward", modules=model, config=place(host="2MiB"))
    everything = sum(p.numel() for p in model.parameters())
    for _ in range(3):
        before = ours.report.updated_elements
        model(torch.ones(4, 512)).sum().backward()
        ours.step()
        assert ours.report.updated_elements - before <= everything / 2
        ours.zero_grad()  # needs no wait: the gradients are kept until they have been used
        waited = []
        model.layers[0].register_forward_hook(lambda *_: waited.append(ours.report.updated_elements - before))
        model(torch.ones(4, 512))
        assert waited[0] >= 512 * 513
        assert ours.report.updated_elements - before == everything
    ours.close()


def test_state_dicts_wait_for_the_update(place):  # noqa: F811
    model = Wide(is_slow=False)
    ours = optim.AdamW(model.parameters(), lr=1e-3, overlap="forward", modules=model, config=place(host="2MiB"))
    model(torch.ones(4, 512)).sum().backward()
    for read in (model.state_dict, ours.state_dict, ours.synchronize, lambda: ours.zero_grad(set_to_none=False)):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        ours.step()
        read()
        assert ours.report.pending_tensors == 0
    ours.close()


@pytest.mark.parametrize("is_of_model", [True, False], ids=["model", "part"])
def test_gradients_are_not_zeroed_before_they_have_been_used(place, is_of_model):  # noqa: F811
    model = nn.Sequential(nn.Linear(4096, 2048, bias=False))
    nn.init.zeros_(model[0].weight)
    ours = optim.SGD(model.parameters(), lr=1.0, overlap="forward", modules=model,
                     config={"run": {"threads": 1}, **place("host", "64MiB")})
    model[0].weight.grad = torch.ones_like(model[0].weight)
    ours.step()
    (model if is_of_model else model[0]).zero_grad(set_to_none=False)
    assert ours.report.pending_tensors == 0 and model[0].weight.grad.eq(0).all()
    ours.synchronize()
    assert model[0].weight.eq(-1).all()
    ours.close()


class Reading(nn.Module):
    """Reads parameters of modules that it does not call."""

    def __init__(self):
        super().__init__()
        self.uncalled = nn.Linear(512, 512)
        self.listed = nn.ParameterList([torch.ones(512)])
        self.called = nn.Linear(512, 512)

    def forward(self, x):
        return self.called(nn.functional.linear(x, self.uncalled.weight, self.uncalled.bias) * self.listed[0])


def test_what_no_module_of_its_own_calls_is_waited_for_too(place):  # noqa: F811
    model = Reading()
    late = nn.Linear(512, 512)
    model.late = late
    ours = optim.AdamW([*model.uncalled.parameters(), *model.listed, *model.called.parameters()], overlap="forward", modules=model,
                       config=place(host="2MiB"))
    late(model(torch.ones(1, 512)))  # each module has looked up its parameters
    ours.add_param_group({"params": list(late.parameters())})
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        ours.step()
        pending = []
        late.register_forward_hook(lambda *_: pending.append(set(ours._keep)))
        late(torch.ones(1, 512)) if step == 2 else model(torch.ones(1, 512))
        waited = [*model.uncalled.parameters(), *model.listed] if step == 2 else model.uncalled.parameters()
        assert not any(ours._shares[id(p)].index in ours._keep for p in waited)
    # A module of a group that was added later waits for its own.
    assert not pending[-1] & {ours._shares[id(p)].index for p in late.parameters()}
    ours.close()


class Scaling(nn.Module):
    """Reads the weight of another module, and not by calling it."""

    def __init__(self, other):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.known = [other]

    def forward(self, ids):
        return nn.functional.embedding(ids, self.known[0].weight) * self.scale


class ReadingAhead(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(64, 512)
        self.first = Scaling(self.head)

    def forward(self, ids):
        return self.head(self.first(ids))


@pytest.mark.parametrize("gradients", ["step", "backward"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_weight_that_another_module_reads_first_is_waited_for(place, gradients, is_compiled):  # noqa: F811
    model = ReadingAhead()
    reference = copy.deepcopy(model)
    ours = optim.AdamW(model.parameters(), lr=1e-2, gradients=gradients, overlap="forward", modules=model, config=place(host="2MiB"))
    theirs = optim.AdamW(reference.parameters(), lr=1e-2, config=place(host="2MiB"))
    index, pending = ours._shares[id(model.head.weight)].index, []
    model.first.register_forward_pre_hook(lambda *_: pending.append(index in ours._keep))
    model.first.register_forward_hook(lambda *_: pending.append(index in ours._keep))
    if is_compiled:
        model.first.forward = torch.compile(model.first.forward, backend="eager")
    for step in range(4):
        for net, optimizer in ((model, ours), (reference, theirs)):
            net(torch.tensor([step, 511])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert pending == [False, False, *[True, False] * 3]
    with torch.inference_mode():
        assert torch.equal(model(torch.arange(3)), reference(torch.arange(3)))
    ours.synchronize()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
    ours.close()
    assert all(type(module._parameters) is dict for module in (model, model.head, model.first, copy.deepcopy(model).head))


def test_a_compiled_forward_has_no_waits_for_its_own_parameters(place):  # noqa: F811
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    ours = optim.AdamW(model.parameters(), overlap="forward", modules=model, config=place())
    for layer in model:
        layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        ours.step()
        ours.zero_grad()
    assert ours._keep
    ours.close()


def test_a_weight_that_is_read_too_early_fails_in_backward(place):  # noqa: F811
    """One that the program keeps elsewhere than in a module."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    kept = [model[1].weight]
    ours = optim.AdamW(model.parameters(), overlap="forward", modules=model, config=place(host="2MiB"))
    for step in range(2):
        loss = model(model[0](torch.ones(1, 64)) @ kept[0]).sum()
        if step == 0:
            loss.backward()
            ours.step()
            ours.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    ours.close()


def test_two_optimizers_over_one_model_are_both_waited_for(place):  # noqa: F811
    model = nn.Sequential(nn.Linear(8, 8))
    both = [optim.AdamW([p], overlap="forward", modules=model, config=place()) for p in model.parameters()]
    model(torch.ones(1, 8)).sum().backward()
    for ours in both:
        ours.step()
    assert all(ours._keep for ours in both)
    copied = copy.copy(model[0]).weight
    assert copied is model[0].weight and not any(ours._keep for ours in both)
    both[0].close()
    model(torch.ones(1, 8)).sum().backward()
    both[1].step()
    assert both[1]._keep and model[0].bias is not None and not both[1]._keep
    both[1].close()
    assert type(model[0]._parameters) is dict


@pytest.mark.parametrize("second", ["in turn", "closed", "dropped"])
def test_one_of_two_optimizers_goes_on_to_be_waited_for(place, second):  # noqa: F811
    """Hooks of both end the waits for reads, each for its own updates."""
    model = nn.Sequential(nn.Linear(8, 8))
    first, other = (optim.AdamW([p], overlap="forward", modules=model, config=place()) for p in model.parameters())
    for step in range(5):
        model(torch.ones(1, 8)).sum().backward()
        if step == 1 and second == "closed":
            other.close()
        if step == 1 and second == "dropped":
            other = None
        (other if second == "in turn" and step % 2 else first).step()
    assert first._keep and model[0]._parameters.is_pending
    assert model[0].weight is not None and not first._keep and not model[0]._parameters.is_pending
    for ours in (first, other):
        if ours is not None:
            ours.close()


def test_parameters_outside_of_the_modules_are_waited_for_in_step(place):  # noqa: F811
    """Those of a second model, of a module that was added to the first one later, and of none."""
    outside, model, alone = nn.Linear(512, 512), nn.Sequential(nn.Linear(512, 512)), nn.Parameter(torch.zeros(1 << 16))
    ours = optim.AdamW([*outside.parameters(), *model.parameters(), alone], overlap="forward", modules=model, config=place(host="4MiB"))
    model.append(nn.Linear(512, 512))
    added = list(model[1].parameters())
    ours.add_param_group({"params": added})
    for clip in (False, True):
        ours.clip_norm = 1.0 if clip else None
        for p in [*outside.parameters(), *model.parameters(), alone]:
            p.grad = torch.ones_like(p)
        ours.step()
        kept = {index: share.parameter for share in ours._shares.values() if (index := share.index) in ours._keep}
        assert {id(p) for p in kept.values()} == {id(p) for p in model[0].parameters()}
    ours.close()


@pytest.mark.parametrize("overlap", [None, "forward"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_cell_of_a_notebook_that_is_run_again(place, overlap, clip_norm):  # noqa: F811
    """A scheduler of a later cell holds the optimizer of before, whose hooks stand first."""
    model, reference = tiny(), tiny()
    options = {"gradients": "backward", "overlap": overlap, "clip_norm": clip_norm, "config": place()}
    modules = {"modules": model} if overlap else {}
    before = optim.AdamW(model.parameters(), lr=1e-3, **options, **modules)
    schedule = torch.optim.lr_scheduler.ExponentialLR(before, 0.9)
    step_of(model, before, 0, clip=0)
    model(*batch(1)).backward()
    ours = optim.AdamW(model.parameters(), lr=1e-3, **options, **modules)
    assert not before._keep and not before._held
    if clip_norm:  # they had waited for their norm, and are there again as in torch
        assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    reference.load_state_dict(model.state_dict())
    theirs = optim.AdamW(reference.parameters(), lr=1e-3, clip_norm=clip_norm, config=place())
    for i in range(3):
        assert step_of(model, ours, i, clip=0) == step_of(reference, theirs, i, clip=0)
    with pytest.raises(sluice.ArgumentError, match="Use the AdamW that has them, or call its close"):
        before.step()
    ours.close()
    model(*batch(3)).backward()  # its gradients stay
    assert all(p.grad is not None for p in model.parameters())
    schedule.optimizer.close()
    theirs.close()


@pytest.mark.parametrize("options", [{"gradients": "backward"}, {"overlap": "forward"}], ids=["backward", "forward"])
def test_a_model_is_not_offloaded_under_an_optimizer(place, config, options):  # noqa: F811
    """Its hooks would take the gradients of the engine's parameters and write into its memory. The remedy works."""
    model = tiny()
    modules = {"modules": model} if "overlap" in options else {}
    ours = optim.AdamW(model.parameters(), config=place(), **options, **modules)
    with pytest.raises(sluice.ArgumentError, match="sluice_offload.optim.AdamW has parameters of this model.*call the close.. of that"):
        sluice.offload(model, config)
    step_of(model, ours, 0, clip=0)  # as before
    ours.close()
    made = sluice.offload(model, config)
    loss = model(*batch(0))
    loss.backward()
    made.step()
    assert made.gradient_norm > 0
    made.close()


def test_a_model_is_offloaded_behind_an_optimizer_that_nothing_names(place, config):  # noqa: F811
    """A cell of a notebook makes it and fails: the exception keeps it. So does a cycle, until Python's collector runs."""
    model = tiny()

    def fail():
        ours = optim.AdamW(model.parameters(), gradients="backward", config=place())
        raise ValueError(len(ours.param_groups))

    def last_of(call):
        try:
            call()
        except (ValueError, sluice.ArgumentError) as error:
            return error
        return None
    last = last_of(fail)
    last = last_of(lambda: sluice.offload(model, config))  # in the place of the one before
    assert "no name for it any more, an exception has kept it" in str(last)
    made = sluice.offload(model, config)
    made.close()

    model = tiny()
    gc.disable()
    try:
        ours = optim.AdamW(model.parameters(), overlap="forward", modules=model, config=place())
        ours.cycle = ours
        del ours
        sluice.offload(model, config).close()
    finally:
        gc.enable()


@pytest.mark.parametrize("wrong", [{"modules": "model"}, {"modules": [nn.Linear(1, 1)]}, {"modules": None}, {"config": {"memory": {"host": "1"}}}])
def test_a_constructor_that_fails_takes_no_parameters(place, wrong):  # noqa: F811
    model, reference = tiny(), tiny()
    ours, theirs = (optim.AdamW(m.parameters(), lr=1e-3, gradients="backward", clip_norm=1.0, config=place()) for m in (model, reference))
    for m in (model, reference):
        m(*batch(0)).backward()
    with pytest.raises(sluice.SluiceError, match="modules|memory.host"):
        optim.AdamW(model.parameters(), **{"gradients": "backward", "overlap": "forward", "modules": model, "config": place(), **wrong})
    gc.collect()
    assert all(p.grad is None for p in model.parameters())
    ours.step()
    theirs.step()
    for i in range(1, 3):
        assert step_of(model, ours, i, clip=0) == step_of(reference, theirs, i, clip=0)
    ours.close()
    theirs.close()


def test_a_module_that_takes_no_hooks_takes_no_parameters(place, monkeypatch):  # noqa: F811
    """The last that can fail in a constructor."""
    model = tiny()
    before = optim.AdamW(model.parameters(), gradients="backward", clip_norm=1.0, config=place())
    model(*batch(0)).backward()

    def fail(*_, **__):
        raise RuntimeError("no hooks here")
    monkeypatch.setattr(model.norm, "register_state_dict_pre_hook", fail)
    with pytest.raises(RuntimeError, match="no hooks here"):
        optim.AdamW(model.parameters(), gradients="backward", overlap="forward", modules=model, config=place())
    assert all(p.grad is None for p in model.parameters())
    kept = [p.detach().clone() for p in model.parameters()]
    before.step()
    assert any(not torch.equal(p, q) for p, q in zip(kept, model.parameters()))
    before.close()


@pytest.mark.parametrize("begins_anew", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_checkpoint_of_torch_between_backward_and_the_first_step(place, clip_norm, begins_anew):  # noqa: F811
    """Its helper makes a step with zeros where it finds neither a state nor a gradient, and an lr of 0 remains where that is refused."""
    model, reference = tiny(), tiny()
    ours, theirs = (optim.AdamW(m.parameters(), lr=1e-3, gradients="backward", clip_norm=clip_norm, config=place()) for m in (model, reference))
    for m, optimizer in ((model, ours), (reference, theirs)):
        m(*batch(0)).backward()
        if begins_anew:
            optimizer.state = {}
    saved = get_optimizer_state_dict(model, ours)
    assert len(saved["state"]) == (0 if clip_norm or begins_anew else len(list(model.parameters())))
    assert ours.param_groups[0]["lr"] == 1e-3 and all(p.grad is None for p in model.parameters())
    assert len(ours.state) == len(saved["state"]) and len(list(ours.state)) == len(ours.state_dict()["state"]) == len(saved["state"])
    ours.step()
    theirs.step()
    for i in range(1, 3):
        assert step_of(model, ours, i, clip=0) == step_of(reference, theirs, i, clip=0)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("gradients", ["step", "backward"])
def test_parameters_of_an_offloaded_model_are_refused(place, config, gradients):  # noqa: F811
    model = tiny()
    made = sluice.offload(model, config)
    with pytest.raises(sluice.ArgumentError, match="parameters of a model that is offloaded.*the optimizer that offload.. has returned"):
        optim.AdamW(model.parameters(), gradients=gradients, config=place())
    other = optim.AdamW([nn.Parameter(torch.ones(3))], gradients=gradients, config=place())
    with pytest.raises(sluice.ArgumentError, match="parameters of a model that is offloaded"):
        other.add_param_group({"params": list(model.parameters())})
    model(*batch(0)).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    made.step()
    other.close()
    made.close()


def test_parts_of_a_model_are_saved_and_loaded_behind_the_update(place):  # noqa: F811
    model = Wide(is_slow=False)
    ours = optim.AdamW(model.parameters(), lr=1e-3, overlap="forward", modules=model, config=place(host="2MiB"))
    saved = copy.deepcopy(model.layers[7].state_dict())
    for read in (model.layers[7].state_dict, lambda: model.layers[7].load_state_dict(saved)):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        ours.step()
        read()
        assert ours.report.pending_tensors == 0
    assert all(torch.equal(a, b) for a, b in zip(model.layers[7].state_dict().values(), saved.values()))
    ours.close()


def test_parameters_of_a_closed_optimizer_can_go_to_another(place):  # noqa: F811
    model = tiny(width=64)
    ours = optim.AdamW(model.parameters(), gradients="backward", config=place())
    model(*batch(0)).backward()
    ours.step()
    ours.close()
    model(*batch(1)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mode_and_every_way_to_clip_gives_the_same_bits(place, dtype):  # noqa: F811
    """clip_grad_norm_ rounds each clipped gradient to its type, which for bf16 is another one."""
    start = tiny(width=64).to(dtype)

    def run(clips, **options):
        model = copy.deepcopy(start)
        modules = {"modules": model} if "overlap" in options else {}
        ours = optim.AdamW(model.parameters(), lr=1e-3, config=place(), **options, **modules)
        norms = []
        for i in range(6):
            model(*batch(i)).backward()
            if clips:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            ours.step()
            norms += [ours.gradient_norm] if ours.clip_norm else []
            ours.zero_grad()
        ours.synchronize()
        ours.close()
        return norms, [p.detach() for p in model.parameters()]

    free = [run(False, **options) for options in ({}, {"gradients": "backward"}, {"overlap": "forward"})]
    clipped = [run(False, clip_norm=0.5, **options) for options in ({}, {"gradients": "backward"}, {"overlap": "forward"})]
    if dtype == torch.float32:
        clipped.append(run(True))
    for runs in (free, clipped):
        for norms, parameters in runs[1:]:
            assert norms == runs[0][0]
            for p, q in zip(parameters, runs[0][1], strict=True):
                assert torch.equal(p, q)
    assert len(clipped[0][0]) == 6 and min(clipped[0][0]) > 0.5
    assert not torch.equal(free[0][1][0], clipped[0][1][0])


def test_a_norm_that_is_not_finite_changes_nothing(place):  # noqa: F811
    for gradients in ("step", "backward"):
        p = nn.Parameter(torch.ones(100))
        ours = optim.AdamW([p], clip_norm=1.0, gradients=gradients, config=place())
        (p.sum() * float("inf")).backward()
        with pytest.raises(sluice.NonFiniteError, match="norm of the gradients is inf"):
            ours.step()
        assert p.eq(1).all() and ours.state[p]["step"] == 0
        ours.zero_grad()
        p.sum().backward()
        ours.step()
        assert ours.state[p]["step"] == 1 and ours.gradient_norm == pytest.approx(10)
        ours.close()
    with pytest.raises(sluice.ArgumentError, match="clip_norm=0"):
        optim.AdamW([p], clip_norm=0, config=place())


def test_the_norm_of_16_bit_gradients_has_32_bits(place):  # noqa: F811
    for gradients in ("step", "backward"):
        p = nn.Parameter(torch.ones(10_000, dtype=torch.float16))
        q = nn.Parameter(torch.ones(3))
        ours = optim.SGD([p, q], lr=100.0, clip_norm=1.0, gradients=gradients, config=place())
        (1000 * p.float()).sum().backward()
        q.grad = None
        ours.step()  # the norm is above what fp16 has
        assert ours.gradient_norm == pytest.approx(1e5, rel=1e-5) and p.abs().max() < 1e-4
        ours.close()
    p = nn.Parameter(torch.ones(2))
    ours = optim.SGD([p], lr=1.0, clip_norm=1.0, config=place())
    p.grad = torch.full((2,), 1e30)
    with pytest.raises(sluice.NonFiniteError, match="is inf, though each of these is finite"):
        ours.step()
    assert p.eq(1).all()
    ours.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_16_bit_gradients_takes_no_copy_of_them(dtype):
    """No call of torch makes one. On a GPU, its kernel reads 16 bits."""
    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            largest.append(made.numel() if isinstance(made, torch.Tensor) else 0)
            return made
    gradients, largest = [torch.linspace(-3, 3, count).to(dtype) for count in (9_000, 5)], []
    with Copies():
        norm = total_norm(gradients)
    assert largest and max(largest) <= 2
    assert norm.dtype == torch.float32 and float(norm) == pytest.approx(math.hypot(*(float(x.double().norm()) for x in gradients)), rel=1e-5)


@pytest.mark.parametrize("state, lost", [("fp32", [1, 1, 1]), ("8bit", [1, 256, 256])])
def test_what_an_infinite_gradient_leaves(place, state, lost):  # noqa: F811
    p = nn.Parameter(torch.zeros(600))
    ours = optim.AdamW([p], lr=1e-3, config={**place(), "optimizer": {"state": state}})
    counts = []
    for step in range(3):
        p.grad = torch.ones(600)
        if step == 0:
            p.grad[5] = float("inf")
        ours.step()
        counts.append(int((~p.isfinite()).sum()))
    assert counts == lost
    ours.close()


def test_a_failed_transfer_does_not_keep_it_from_closing(place, monkeypatch):  # noqa: F811
    model = nn.Sequential(nn.Linear(8, 8))
    ours = optim.AdamW(model.parameters(), gradients="backward", overlap="forward", modules=model, config=place())
    model(torch.ones(8)).sum().backward()

    def fail(*_):
        raise sluice.StorageError("the drive is gone")
    monkeypatch.setattr(ours._engine, "wait", fail)
    with pytest.raises(sluice.StorageError, match="the drive is gone"):
        ours.close()
    assert not ours._engine.is_open and not ours._keep
    ours.close()
    for other in (model.zero_grad, lambda: model(torch.ones(8)).sum().backward(), torch.optim.SGD(model.parameters()).step):
        other()
    assert model[0].bias.grad is not None


@pytest.mark.parametrize("behind", ["a forward", "another step", "synchronize"])
def test_gradients_that_are_not_finite_are_named_beside_forward_too(place, caplog, behind):  # noqa: F811
    model = nn.Linear(64, 64)
    ours = optim.AdamW(model.parameters(), overlap="forward", modules=model, config=place())
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    ours.step()
    {"a forward": lambda: model(torch.ones(64)), "another step": ours.step, "synchronize": ours.synchronize}[behind]()
    assert any("with an infinity or a NaN" in record.message for record in caplog.records)
    ours.close()


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupt_in_step_forgets_no_update_that_runs(place, monkeypatch, has_begun):  # noqa: F811
    p = nn.Parameter(torch.zeros(1 << 20))
    ours = optim.AdamW([p], lr=1.0, weight_decay=0, config=place("host", "64MiB"))
    begin = ours._engine.begin

    def interrupted(updates):
        if has_begun:
            begin(updates)
        raise KeyboardInterrupt
    for step in (1, 2):
        p.grad = torch.ones_like(p)
        if step == 2:
            monkeypatch.setattr(ours._engine, "begin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ours.step()
        else:
            ours.step()
    ours.synchronize()
    assert ours.state[p]["step"] == 1 + has_begun and not ours._keep
    torch.testing.assert_close(p.detach(), torch.full_like(p, -1.0 - has_begun))
    monkeypatch.undo()
    ours.step()
    assert ours.state[p]["step"] == 2 + has_begun
    ours.close()


def test_backward_and_forward_together(place):  # noqa: F811
    """step() waits for nothing, and the next forward for what it reads."""
    model, ours = compare(lambda m, c: optim.AdamW(m.parameters(), lr=1e-3, gradients="backward", overlap="forward", modules=m, config=c),
                          place)
    ours.close()
    wide = Wide(layers=2, is_slow=False)
    ours = optim.AdamW(wide.parameters(), gradients="backward", overlap="forward", modules=wide, config=place(host="2MiB"))
    for _ in range(2):
        wide(torch.ones(4, 512)).sum().backward()
        kept = set(ours._keep)
        ours.step()
        assert kept and set(ours._keep) == kept
    ours.close()


def test_backward_passes_of_several_threads(place, monkeypatch):  # noqa: F811
    monkeypatch.setattr(detached_base, "GRADIENT_BYTES", 0)
    halves = [[nn.Parameter(torch.ones(1 << 16)) for _ in range(200)] for _ in range(2)]
    ours = optim.SGD([p for half in halves for p in half], lr=1.0, gradients="backward", config=place("host", "256MiB"))
    failed = []

    def run(half):
        try:
            sum(p.sum() for p in half).backward()
        except sluice.SluiceError as error:
            failed.append(error)
    for _ in range(3):
        threads = [threading.Thread(target=run, args=(half,)) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        ours.step()
    assert all(p.eq(-2).all() for half in halves for p in half)
    ours.close()
