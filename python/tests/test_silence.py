"""Programs that would quietly train something else than with torch: each is made to work, or refused with words. Each case fails
when its cure is taken out (cures.json)."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_  # before any model is offloaded

import sluice_offload as sluice
from conftest import Block, Tiny, adamw, batch, tiny, train
from test_traps import assert_still_right, pair  # noqa: F401


def test_gradients_that_a_module_zeroes(pair):  # noqa: F811
    """The model's zero_grad(), or that of a module around it. The engine cannot forget those of a part alone."""
    _, model, _, ours = pair
    for module in (model, nn.ModuleDict({"inner": model})):
        model(*batch(3)).backward()
        module.zero_grad()
        ours.step()
        assert ours.report is None
    model.blocks[0].zero_grad()  # there is none
    model(*batch(3)).backward()
    with pytest.raises(sluice.ArgumentError, match="zero_grad.. of a Block, which is a part"):
        model.blocks[0].zero_grad()
    ours.zero_grad()
    assert_still_right(pair)


def test_modules_of_others_are_zeroed_as_ever(pair):  # noqa: F811
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    module.zero_grad(set_to_none=False)
    assert module.weight.grad.tolist() == [[0, 0], [0, 0]]
    module.zero_grad()
    assert module.weight.grad is None


def test_gradients_that_wait_for_their_norm_are_zeroed(tmp_path):
    """Under sluice_offload.optim with gradients="backward": those of the module, and no others."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    theirs = copy.deepcopy(net)
    ours = sluice.optim.SGD(net.parameters(), lr=1.0, gradients="backward", clip_norm=100.0,
                            config={"placement": {"optimizer": "host"}, "memory": {"host": "16MiB"}, "storage": {"paths": [str(tmp_path)]}})
    torchs = torch.optim.SGD(theirs.parameters(), lr=1.0)
    for model, optimizer in ((net, ours), (theirs, torchs)):
        model(torch.ones(1, 4)).sum().backward()
        model[0].zero_grad()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), theirs.parameters()))
    ours.close()


def test_a_gradient_of_the_programs_own(pair):  # noqa: F811
    """torch's optimizer would use it."""
    _, model, _, ours = pair
    model.norm.weight.grad = torch.ones(32)
    with pytest.raises(sluice.ArgumentError, match="norm.weight has a p.grad"):
        ours.step()
    model(*batch(0)).backward()
    assert model.norm.weight.grad is None
    ours.zero_grad()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    ours.zero_grad()
    assert model.head.weight.grad is None
    assert_still_right(pair)


def test_a_gradient_that_a_failed_backward_left(config):
    """A hook of the program's raises where torch has the gradient already; the next backward would add to it."""
    reference = tiny()
    model = copy.deepcopy(reference)
    failures = [ZeroDivisionError()]

    def fail(parameter):
        if failures:
            raise failures.pop()
    model.norm.weight.register_post_accumulate_grad_hook(fail)
    ours = sluice.offload(model, config, units=[Block])
    with pytest.raises(ZeroDivisionError):
        model(*batch(0)).backward()
    ours.zero_grad()
    assert_still_right((reference, model, adamw(reference, config), ours))
    ours.close()


def test_parameters_that_are_frozen_or_trained_later(config):
    """torch's optimizer leaves a parameter without gradient alone; the engine would go on with its moments and decay."""
    reference = tiny()
    reference.blocks[0].norm.requires_grad_(False)
    model = copy.deepcopy(reference)
    ours = sluice.offload(model, config, units=[Block])
    for module, was in ((model.norm, "trained"), (model.blocks[0].norm, "frozen")):
        module.requires_grad_(was == "frozen")
        model(*batch(0)).backward()
        with pytest.raises(sluice.ArgumentError, match=f"was {was} in offload.*state_dict"):
            ours.step()
        module.requires_grad_(was == "trained")
        ours.zero_grad()
    assert_still_right((reference, model, adamw(reference, config), ours))
    ours.close()


def test_graphs_that_outlive_their_step(pair):  # noqa: F811
    """Weights have other values by then, so that backward through them would be wrong; torch says so."""
    reference, model, torchs, ours = pair
    for net, optimizer in ((reference, torchs), (model, ours)):
        loss = net(*batch(0))
        loss.backward(retain_graph=True)
        if net is reference:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
    assert_still_right(pair)


def test_a_scaler_of_gradients(pair):  # noqa: F811
    _, model, _, ours = pair
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(*batch(0))).backward()
    with pytest.raises(sluice.ArgumentError, match="GradScaler cannot see.*loss_scale"):
        scaler.step(ours)
    ours.zero_grad()
    assert_still_right(pair)


def test_parameters_over_the_same_memory(config):
    model = tiny(tied=False)
    model.head.weight.data = model.embedding.weight.data
    with pytest.raises(sluice.ArgumentError, match="embedding.weight and head.weight are two parameters over the same memory"):
        sluice.offload(model, config, units=[Block])
    flat = torch.randn(100)
    for begin in (20, 24):
        parts = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
        parts[0].weight.data, parts[1].weight.data = flat[:25].view(5, 5), flat[begin:begin + 25].view(5, 5).t()
        with pytest.raises(sluice.ArgumentError, match="0.weight and 1.weight"):
            sluice.offload(parts, config)
    parts[1].weight.data = flat[25:50].view(5, 5)  # beside it
    sluice.offload(parts, config).close()
    model = Tiny(tied=False)  # frozen ones never change
    model.head.weight.data = model.embedding.weight.data
    model.head.requires_grad_(False)
    model.embedding.requires_grad_(False)
    sluice.offload(model, config, units=[Block]).close()


def test_clipping_of_parts_and_of_strangers_is_refused(pair):  # noqa: F811
    """The engine knows one norm, that of all gradients of the model."""
    _, model, _, ours = pair
    head = nn.Linear(2, 2)
    head(torch.ones(1, 2)).sum().backward()
    model(*batch(3)).backward()
    clip = torch.nn.utils.clip_grad_norm_
    with pytest.raises(sluice.ArgumentError, match="trained parameters of the model are not in the list"):
        clip(model.blocks.parameters(), ours.clip_norm)
    with pytest.raises(sluice.ArgumentError, match="parameters of several optimizers"):
        clip([*model.parameters(), *head.parameters()], ours.clip_norm)
    if hasattr(torch.nn.utils, "clip_grads_with_norm_"):
        with pytest.raises(sluice.ArgumentError, match="would not be clipped"):
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(1.0))
        torch.nn.utils.clip_grads_with_norm_(head.parameters(), 1.0, torch.tensor(8.0))
        assert head.weight.grad.max() < 0.2
    ours.zero_grad()
    assert_still_right(pair)


@pytest.mark.parametrize("unscales", [False, True])
def test_scalers_cannot_see_the_gradients(pair, unscales):  # noqa: F811
    _, model, _, ours = pair
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(*batch(3))).backward()
    if unscales:
        scaler.unscale_(ours)
    with pytest.raises(sluice.ArgumentError, match="a GradScaler cannot see the gradients"):
        scaler.step(ours)
    ours.zero_grad()
    assert_still_right(pair)


def test_the_count_of_steps_keeps_its_bits():
    torch.set_default_dtype(torch.bfloat16)
    try:
        parameter = nn.Parameter(torch.ones(4, dtype=torch.float32))
        optimizer = sluice.optim.AdamW([parameter])
        parameter.grad = torch.ones(4, dtype=torch.float32)
        optimizer.step()
        assert optimizer.state[parameter]["step"].dtype == torch.float32
        optimizer.close()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("of_model", [False, True])
def test_gradients_that_are_used_cannot_be_zeroed(of_model):
    """As a program does that drops a step, or sends another model's loss through this one."""
    model = nn.Linear(8, 4)
    ours = sluice.optim.AdamW(model.parameters(), lr=0.1, config={"placement": {"optimizer": "host"}, "memory": {"host": "16MiB"}},
                              gradients="backward")
    theirs = torch.optim.AdamW((reference := copy.deepcopy(model)).parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        for net, optimizer in ((reference, theirs), (model, ours)):
            (net if of_model else optimizer).zero_grad()
            net(x).square().mean().backward()
            if net is model and step == 1:
                with pytest.raises(sluice.ArgumentError, match="has been used already.*step.. ends this step.*gradients=\"step\""):
                    (model if of_model else ours).zero_grad()
            optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters()):
        assert (p - q).abs().max() <= 1e-6
    ours.close()


@pytest.mark.parametrize("layers, words", [
    (2, r"this one has a blocks\.2\..* and the checkpoint has none"), (4, r"it has a blocks\.3\..* of shape \[.*\], and this one has none")])
def test_another_models_checkpoint_changes_nothing(config, tmp_path, layers, words):
    """load_checkpoint() gives the state up before it reads the other."""
    other = sluice.offload(tiny(layers=layers), config, units=[Block])
    folder = other.save(tmp_path / "other")
    other.close()
    reference, model = tiny(), tiny()
    theirs, ours = adamw(reference, config), sluice.offload(model, config, units=[Block])
    train(model, ours, 2), train(reference, theirs, 2, 1.0)
    with pytest.raises(sluice.ArgumentError, match=f"is of another model: {words}; the state is as before"):
        ours.load_checkpoint(folder)
    assert_still_right((reference, model, theirs, ours))
    ours.close()


def test_a_checkpoint_of_a_model_with_other_frozen_parts(config, tmp_path):
    saved = tiny()
    saved.norm.requires_grad_(False)
    ours = sluice.offload(saved, config, units=[Block])
    folder = ours.save(tmp_path / "frozen")
    ours.close()
    with pytest.raises(sluice.ConfigError, match="norm.*frozen.*convert=True starts with zero moments") as refused:
        sluice.offload(tiny(), config, units=[Block], restore=folder)
    assert "--" not in str(refused.value)
    with pytest.raises(sluice.ArgumentError, match="convert is for a checkpoint that restore names"):
        sluice.offload(tiny(), config, units=[Block], convert=True)


@pytest.mark.parametrize("found, words", [
    ({"precision": {"parameters": "bf16"}}, 'precision.parameters "bf16", and this training has "fp32"; convert=True takes'),
    ({"optimizer": {"state": "8bit"}}, 'optimizer.state "8bit", and this training has "fp32"; convert=True takes'),
    ({"optimizer": {"type": "sgd", "momentum": 0.9}}, 'optimizer.type "sgd", and this training has "adamw"; .*before offload'),
    ({"frozen": True}, "norm.weight frozen, and it is trained here; convert=True starts with zero moments")])
def test_another_kind_of_checkpoint_changes_nothing(config, tmp_path, found, words):
    saved = tiny()
    saved.norm.requires_grad_("frozen" not in found)
    other_config = copy.deepcopy(config)
    if "optimizer" in found:
        other_config["optimizer"] = {}
    for section, keys in found.items():
        if section != "frozen":
            other_config.setdefault(section, {}).update(keys)
    other = sluice.offload(saved, other_config, units=[Block])
    folder = other.save(tmp_path / "other")
    other.close()
    reference, model = tiny(), tiny()
    theirs, ours = adamw(reference, config), sluice.offload(model, config, units=[Block])
    train(model, ours, 2), train(reference, theirs, 2, 1.0)
    with pytest.raises(sluice.ArgumentError, match=f"{words}.*the state is as before"):
        ours.load_checkpoint(folder)
    assert_still_right((reference, model, theirs, ours))
    ours.close()


def test_parameters_of_inference_mode(config):
    with torch.inference_mode():
        model = tiny()
    with pytest.raises(sluice.ArgumentError, match="positions was made under torch.inference_mode"):
        sluice.offload(model, config, units=[Block])


def test_the_state_of_an_offloaded_model_is_none_of_an_optimizers(config):
    offloaded = sluice.offload(tiny(), config, units=[Block])
    model = tiny()
    ours = sluice.optim.AdamW(model.parameters(), config={"placement": {"optimizer": "host"}, "memory": {"host": "16MiB"}})
    with pytest.raises(sluice.ArgumentError, match="of an optimizer that offload.. has returned, and has no moments"):
        ours.load_state_dict(offloaded.state_dict())
    offloaded.close(), ours.close()


def test_the_loss_scale_behind_a_read_of_values(config):
    """A read ends a step that has had a forward alone; its backward begins another, and may ask for the scale before."""
    config["precision"] = {"parameters": "fp16", "loss_scale": {"static": 0, "initial_power": 10}}
    ours = sluice.offload(model := tiny(), config, units=[Block])
    with pytest.raises(sluice.ArgumentError, match="loss_scale belongs to the step"):
        _ = ours.loss_scale
    for step in range(2):
        loss = model(*batch(step))
        before = model.state_dict()["norm.weight"].clone()
        assert ours.loss_scale == 1024
        (loss * ours.loss_scale).backward()
        ours.step()
        assert ours.report.step == step + 1 and not ours.report.is_skipped
        assert not torch.equal(model.state_dict()["norm.weight"], before)
    ours.close()


def test_clipping_by_a_name_that_was_imported_before(config):
    ours = sluice.offload(model := tiny(), config, units=[Block])
    model(*batch(0)).backward()
    norm = clip_grad_norm_(model.parameters(), 1.0).item()
    ours.step()
    assert norm == pytest.approx(ours.gradient_norm) and norm > 0
    ours.close()


@pytest.mark.parametrize("rate", [-5.0, math.nan, math.inf])
@pytest.mark.parametrize("group", [0, 1])
def test_a_rate_that_is_none(config, rate, group):
    """Set between forward and step(), where one that is negative would leave the rate as it was."""
    config["optimizer"]["groups"] = [{"tensors": ["*bias"], "weight_decay": 0.0}]
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    model(*batch(0)).backward()
    optimizer.param_groups[group]["lr"] = rate
    with pytest.raises(sluice.ArgumentError, match="rate.* is .*; it must be finite and not negative"):
        optimizer.step()
    optimizer.param_groups[group]["lr"] = 1e-3
    optimizer.step()
    assert optimizer._engine.applied_step() == 1
    optimizer.close()
