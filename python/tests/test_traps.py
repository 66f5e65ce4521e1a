"""Traps: things that torch programs do and that could go wrong in silence. Each case fails when its cure is taken
out."""

import collections
import copy
import ctypes
import gc
import io
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import sluice_offload as sluice
from conftest import Block, Tiny, adamw, batch, hidden, tiny, train, worst


@pytest.fixture
def pair(config):
    """A model, its offloaded copy, and their optimizers."""
    reference = tiny()
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block])
    yield reference, model, adamw(reference, config), optimizer
    optimizer.close()


def assert_still_right(pair):
    """Whatever happened, steps from here on are torch's, for both have seen the same steps."""
    reference, model, torchs, ours = pair
    expected, _ = train(reference, torchs, 3, clip_norm=1.0, first=50)
    actual, _ = train(model, ours, 3, first=50)
    assert worst(actual, expected) <= 2e-6


def test_parameters_that_are_pointed_elsewhere_would_be_wrong(config, monkeypatch):
    """Why storages are swapped: views that autograd keeps go on reading the old address. The same training with new
    storages for each lease has other losses."""
    reference = tiny(layers=7)
    model = copy.deepcopy(reference)
    expected, _ = train(reference, adamw(reference, config), 8, clip_norm=1.0)
    config["memory"]["device"] = "260KiB"
    optimizer = sluice.offload(model, config, units=[Block])
    walk = optimizer._walk
    walk.check_gradients = lambda: None  # which notices it
    original = walk._lend

    def naive(unit, which):
        original(unit, which)
        if unit.is_held:
            return
        address = walk.storages[unit.index].storage.data_ptr()
        size = walk.storages[unit.index].nbytes
        flat = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.float32)
        for member in unit.members:
            for owner, attribute in member.owners:
                shape = member.parameter.shape
                owner._parameters[attribute].data = flat[member.offset:member.offset + shape.numel()].view(shape)
    monkeypatch.setattr(walk, "_lend", naive)
    actual, _ = train(model, optimizer, 8)
    assert not worst(actual, expected) <= 2e-6


def test_weights_outside_of_a_lease_are_hidden(pair):
    reference, model, _, _ = pair
    assert hidden(model.head.weight)
    with sluice.gathered(model, model.head):
        assert torch.equal(model.head.weight, reference.head.weight)
        assert torch.equal(model.embedding.weight, reference.embedding.weight)
        assert hidden(model.blocks[0].norm.weight)
    with sluice.gathered(model):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters()))
    assert hidden(model.head.weight)
    assert_still_right(pair)


def mappings():
    with open("/proc/self/maps") as file:
        return sum(1 for _ in file)


@pytest.mark.parametrize("count, gib", [(1, 140), (140, 1)])
def test_poison_of_large_models_leaves_mappings(monkeypatch, count, gib):
    """Linux gives a process 65530. In pieces of 2 MiB, 140 GiB would take 71680."""
    region = sluice.storage.Region
    monkeypatch.setattr(region, "_all_bytes", 0)
    before = mappings()
    regions = [region(gib << 30) for _ in range(count)]
    assert mappings() - before <= 4096 + 5 * 2048
    for one in regions:
        for place in (0, one.nbytes // 2, one.nbytes - 8):
            assert ctypes.c_int64.from_address(one.address + place).value == -1
        sluice.storage._libc.munmap(one.address, one.nbytes)


def test_poison_that_cannot_be_mapped_is_given_back(monkeypatch):
    before, mapped, original = mappings(), [], sluice.storage._libc.mmap

    def limited(*arguments):
        mapped.append(arguments)
        if len(mapped) < 100:
            return original(*arguments)
        ctypes.set_errno(12)
        return sluice.storage._FAILED
    monkeypatch.setattr(sluice.storage, "_libc", SimpleNamespace(mmap=limited, munmap=sluice.storage._libc.munmap))
    monkeypatch.setattr(sluice.storage.Region, "_all_bytes", 0)
    with pytest.raises(sluice.SluiceError, match="^cannot map 2097152 bytes: Cannot allocate memory; .* sysctl vm.max_map_count"):
        sluice.storage.Region(1 << 30)
    assert len(mapped) == 100 and mappings() < before + 50 and sluice.storage.Region._all_bytes == 0


def test_a_change_inside_of_gathered_is_an_error(pair):
    _, model, _, _ = pair
    with pytest.raises(sluice.SluiceError, match="blocks.1.*copies"):
        with sluice.gathered(model), torch.no_grad():
            model.blocks[1].norm.weight.add_(1)
    assert_still_right(pair)


def test_state_dict(pair):
    reference, model, _, _ = pair
    expected = reference.state_dict()
    assert {name: value.tolist() for name, value in model.state_dict().items()} == \
        {name: value.tolist() for name, value in expected.items()}
    assert torch.equal(model.blocks[1].state_dict()["mlp.1.weight"], expected["blocks.1.mlp.1.weight"])
    model(*batch(0)).backward()
    with pytest.raises(sluice.ArgumentError, match="step"):
        model.state_dict()
    with pytest.raises(sluice.ArgumentError, match="step"):
        model.load_state_dict(expected)


def test_clip_grad_norm_(pair):
    """torch's would find no gradient, clip nothing and return 0. The engine's norm is this step's, before step(), also of a part of
    its micro-batches and of gradients that are not finite."""
    reference, model, torchs, ours = pair
    clip = torch.nn.utils.clip_grad_norm_
    for step in range(3):
        for micro_batch in range(2):
            reference(*batch(2 * step + micro_batch)).backward()
            model(*batch(2 * step + micro_batch)).backward()
            expected = clip(reference.parameters(), float("inf")).item()
            norm = clip(model.parameters(), 1.0).item()
            assert norm == pytest.approx(expected, rel=2e-6) and norm > 1
            assert clip(model.parameters(), float("inf")).item() == norm
        clip(reference.parameters(), 1.0)
        torchs.step()
        torchs.zero_grad()
        ours.step()
        assert norm == pytest.approx(ours.gradient_norm, rel=1e-6)
        assert clip(model.parameters(), 1.0).item() == pytest.approx(ours.gradient_norm), "without gradients, the last step's"
        ours.zero_grad()
    with pytest.raises(sluice.ArgumentError, match="optimizer.clip_norm, which is 1.0"):
        clip(model.parameters(), 0.5)
    with pytest.raises(sluice.ArgumentError, match="norm of type 2"):
        clip(model.parameters(), 1.0, norm_type=float("inf"))
    (model(*batch(0)) * float("nan")).backward()
    assert clip(model.parameters(), 1.0).isnan()
    with pytest.raises(sluice.NonFiniteError, match="zero_grad"):
        clip(model.parameters(), 1.0, error_if_nonfinite=True)
    ours.zero_grad()


class Failing(Block):
    fails = False

    def forward(self, x):
        if Failing.fails:
            raise ZeroDivisionError("a user's")
        return super().forward(x)


@pytest.mark.parametrize("where", ["unit", "root", "interrupt", "inference"])
def test_an_exception_in_forward(config, where):
    """No lease stays, and the forward is no micro-batch."""
    torch.manual_seed(0)
    reference = Tiny(block=Failing)
    model = copy.deepcopy(reference)
    ours = sluice.offload(model, config, units=[Failing])
    everything = reference, model, adamw(reference, config), ours
    handle = None
    if where == "root":
        handle = model.norm.register_forward_hook(lambda *_: 1 / 0)
    elif where == "interrupt":
        def interrupt(*_):
            raise KeyboardInterrupt
        handle = model.blocks[1].attention.register_forward_hook(interrupt)
    else:
        Failing.fails = True
    try:
        with pytest.raises(KeyboardInterrupt if where == "interrupt" else ZeroDivisionError):
            with torch.set_grad_enabled(where != "inference"):
                model(*batch(7))
    finally:
        Failing.fails = False
        if handle is not None:
            handle.remove()
    if where != "interrupt":  # torch tells no hook of that; the next forward finds out
        assert ours._walk.active is None and not ours._walk.held
        assert hidden(model.blocks[1].norm.weight)
    ours.zero_grad()
    assert_still_right(everything)
    assert ours.report.schedule_changes == 0


def test_an_exception_in_backward(pair):
    _, model, _, ours = pair
    handle = model.blocks[1].mlp.register_forward_hook(lambda module, args, output: output.register_hook(lambda _: 1 / 0) and None)
    loss = model(*batch(0))
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    with pytest.raises(sluice.SluiceError, match="zero_grad"):
        ours.step()
    ours.zero_grad()
    assert_still_right(pair)


def test_gradients_that_are_zeroed_are_forgotten(pair):
    reference, model, torchs, ours = pair
    model(*batch(3)).backward()
    ours.zero_grad()
    ours.step()
    assert ours.report is None
    loss = model(*batch(0))
    ours.zero_grad()  # between forward and backward, as many programs have it
    loss.backward()
    ours.step()
    train(reference, torchs, 1, clip_norm=1.0)
    assert_still_right(pair)


def test_a_step_without_backward_changes_nothing(pair):
    _, model, _, ours = pair
    ours.step()
    model(*batch(0))
    ours.step()
    assert ours.report is None
    assert_still_right(pair)


def test_fork(pair):
    """A child can do nothing with the model, and does not hang; loaders of data fork in the middle of training."""
    reference, model, torchs, ours = pair
    loss = model(*batch(0))
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(20)
        try:
            ours._engine.drain()
        except sluice.ForkedError:
            del ours, model, pair
            gc.collect()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss.backward()
    ours.step()
    ours.zero_grad()
    train(reference, torchs, 1, clip_norm=1.0)
    assert_still_right(pair)


def test_loaders_of_data_with_workers(pair):
    reference, model, torchs, ours = pair
    data = [batch(i, rows=1) for i in range(4)]
    for tokens, labels in torch.utils.data.DataLoader(data, num_workers=2, collate_fn=lambda rows: rows[0]):
        for net in (reference, model):
            net(tokens, labels).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for optimizer in (torchs, ours):
            optimizer.step()
            optimizer.zero_grad()
    assert_still_right(pair)


def test_conversions(pair):
    _, model, _, _ = pair
    for convert in (lambda: model.half(), lambda: model.to(torch.bfloat16), lambda: model.blocks[0].double(),
                    lambda: model.to("meta")):
        with pytest.raises(sluice.ArgumentError, match="before offload"):
            convert()
    model.to(torch.device("cpu", 0))  # as Accelerate does on several ranks
    for change in (lambda: model.share_memory(), lambda: model.blocks[1].to_empty(device="cpu")):
        with pytest.raises(sluice.ArgumentError, match="share_memory.. or to_empty.. before offload"):
            change()
    assert model.to("cpu") is model
    assert model.float() is model
    assert model.to(memory_format=torch.channels_last) is model
    assert_still_right(pair)


def test_copies_and_pickles(pair):
    _, model, _, ours = pair
    with pytest.raises(sluice.ArgumentError, match="state_dict"):
        copy.deepcopy(model)
    linear = model.blocks[1].mlp[1]  # which has no hook
    with pytest.raises(sluice.ArgumentError, match="state_dict"):
        copy.deepcopy(linear)
    assert linear.float() is linear
    activation = model.blocks[1].mlp[2]  # as a loss or a metric, without parameters
    assert copy.deepcopy(activation) is not activation
    for part in (model, model.blocks[1], linear, model.head.weight):
        with pytest.raises(sluice.ArgumentError, match="state_dict"):
            torch.save(part, io.BytesIO())
    with pytest.raises(sluice.ArgumentError, match="state_dict"):
        pickle.dumps(ours)
    with pytest.raises(sluice.ArgumentError, match="already"):
        sluice.offload(model, {})


def test_autocast_is_warned_of(pair):
    _, model, _, _ = pair
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                model(*batch(0))
    assert [str(w.message) for w in caught if "autocast keeps" in str(w.message)] and len(
        [w for w in caught if "autocast keeps" in str(w.message)]) == 1


class InPlace(Block):
    def forward(self, x):
        x.mul_(1.5)
        return super().forward(x)


def test_inputs_that_are_changed_in_place(config):
    torch.manual_seed(0)
    reference = Tiny(block=InPlace)
    model = copy.deepcopy(reference)
    assert_still_right((reference, model, adamw(reference, config), sluice.offload(model, config, units=[InPlace])))


class Passing(Block):
    """Gives its input back in every second call: as layers do that are dropped at random, as a view of it, beside what it computes
    or an object, or with that added in place."""
    how, calls = "", 0

    def forward(self, x):
        self.calls += 1
        if not self.how or self.calls % 2:
            return super().forward(x)
        if self.how in ("beside", "beside an object"):
            return x, super().forward(x) if self.how == "beside" else object()
        if self.how == "changed":
            return x.add_(super().forward(x.clone()))
        return x if self.how == "itself" else x.view_as(x)


class Dropping(Tiny):
    """With a unit in the middle that gives its input back."""

    def __init__(self, how, layers):
        super().__init__(block=Passing, layers=layers)
        for block in self.blocks[1:-1]:
            block.how = how

    def forward(self, tokens, labels):
        x = self.embedding(tokens) + self.positions[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x=x)
            x = x[0] if isinstance(x, tuple) else x
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("how", ["itself", "view", "beside", "beside an object", "changed"])
def test_inputs_that_are_given_back(config, how, layers):
    """Their gradient begins the backward of the unit that made them, not of those that passed them on."""
    torch.manual_seed(0)
    reference = Dropping(how, layers)
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Passing])
    expected = train(reference, adamw(reference, config), 3, clip_norm=1.0, micro_batches=2)
    actual = train(model, optimizer, 3, micro_batches=2)
    assert worst(actual[0], expected[0]) <= 2e-6 and worst(actual[1], expected[1]) <= 2e-6
    optimizer.close()


class Viewing(Block):
    """Gives back a view of what it has computed, which its caller changes in place."""

    def forward(self, x):
        return super().forward(x).flatten(1)


class Scaling(Tiny):
    def forward(self, tokens, labels):
        x = self.embedding(tokens) + self.positions[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x).mul_(0.5).view_as(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def test_views_that_the_caller_changes_in_place(config):
    """Such a view gets a new node of autograd, and its hook is lost with the old one."""
    torch.manual_seed(0)
    reference = Scaling(block=Viewing)
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Viewing])
    assert_still_right((reference, model, adamw(reference, config), optimizer))
    optimizer.close()


def test_hooks_of_a_parameter_in_two_places(config):
    """torch calls them with the sum; each place of an offloaded one has a gradient of its own."""
    model = tiny()
    for register in (model.head.weight.register_hook, model.head.weight.register_post_accumulate_grad_hook):
        handle = register(lambda *_: None)
        with pytest.raises(sluice.ArgumentError, match="embedding.weight has a hook and stands in 2 places"):
            sluice.offload(model, config, units=[Block])
        handle.remove()
    optimizer = sluice.offload(model, config, units=[Block])
    handle = model.embedding.weight.register_hook(lambda gradient: 2 * gradient)
    model(*batch(0)).backward()
    with pytest.raises(sluice.ArgumentError, match="has a hook and stands in 2 places"):
        optimizer.step()
    handle.remove()
    optimizer.step()
    optimizer.close()


class Lists(Block):
    """Has parameters in containers, which are never called."""

    def __init__(self, width, hidden=None):
        super().__init__(width, hidden)
        self.shifts = nn.ParameterList([torch.randn(width), nn.ParameterDict({"scale": torch.randn(width)})])

    def forward(self, x):
        return super().forward(x) * self.shifts[1]["scale"] + self.shifts[0]


@pytest.mark.parametrize("units", [[Lists], [nn.Sequential]])
def test_lists_of_parameters(config, units):
    torch.manual_seed(0)
    reference = Tiny(block=Lists)
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=units)
    assert_still_right((reference, model, adamw(reference, config), optimizer))
    optimizer.close()


def test_a_module_in_two_units_is_one(config):
    torch.manual_seed(0)
    reference = tiny()
    reference.blocks[2].mlp[1] = reference.blocks[0].mlp[1] = nn.Linear(32, 128)
    reference.blocks[2].mlp[3] = nn.Linear(128, 32)
    reference.blocks[0].mlp[3] = nn.Linear(128, 32)
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block])
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == sum(p.numel() for p in reference.parameters())
    model(*batch(0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    assert_still_right((reference, model, adamw(reference, config), optimizer))
    optimizer.close()


@pytest.mark.parametrize("storage", ["swap", "copy"])
def test_modules_that_share_a_unit_may_follow_each_other(config, storage):
    """Backward comes from one to the next, where the shared unit is lent already, and the next one's own is not."""
    torch.manual_seed(0)
    reference = tiny()
    reference.blocks[1].norm = reference.blocks[2].norm = reference.blocks[0].norm
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block], storage=storage)
    assert_still_right((reference, model, adamw(reference, config), optimizer))
    optimizer.close()


class Base(nn.Module):
    """Calls another module, which uses its frozen weight, between two uses of its trained one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.weight = nn.Parameter(torch.randn(16, 16) / 4, requires_grad=False)
        self.others = []  # where torch does not look

    def forward(self, x):
        x = torch.tanh(x * self.scale)
        return self.others[0]((x @ self.weight)) * self.scale


def test_a_module_that_another_one_interrupts_keeps_all_its_units(config):
    torch.manual_seed(0)
    reference = nn.ModuleDict({"base": Base(), "user": nn.Linear(16, 16, bias=False), "three": nn.Linear(16, 16)})
    reference.user.weight = reference.base.weight
    reference.three.weight.requires_grad_(False)
    reference.three.register_parameter("codes", nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False))
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[nn.Linear])
    theirs = torch.optim.AdamW([reference.base.scale, reference.three.bias], lr=1e-3, betas=(0.9, 0.999), weight_decay=0)
    losses = []
    for net, steps in ((reference, theirs), (model, optimizer)):
        net.base.others = [net.user]
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            loss = net.three(net.base(x)).square().mean()
            loss.backward()
            if net is reference:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            steps.step()
            steps.zero_grad()
            losses.append(loss.item())
    assert worst(losses[3:], losses[:3]) <= 2e-6
    optimizer.close()


def test_behind_a_refused_step_a_part_has_no_gradients(pair):
    _, model, _, optimizer = pair
    (model(*batch(0)) * math.nan).backward()
    with pytest.raises(sluice.ArgumentError, match="a part of an offloaded model"):
        model.head.zero_grad()
    with pytest.raises(sluice.NonFiniteError):
        optimizer.step()
    model.head.zero_grad()
    assert_still_right(pair)


def test_another_thread_hears_of_a_backward_that_has_failed(pair):
    _, model, _, optimizer = pair
    handle = model.head.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(*batch(0)).backward()
    handle.remove()
    heard = []

    def evaluate():
        try:
            with torch.no_grad():
                model(*batch(0))
        except sluice.ArgumentError as error:
            heard.append(str(error))
    for _ in range(2):
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        optimizer.zero_grad()
    assert len(heard) == 1 and "optimizer.zero_grad() ends it" in heard[0]
    assert_still_right(pair)


def test_a_forward_inside_of_gathered(pair):
    reference, model, _, _ = pair
    with sluice.gathered(model), torch.no_grad():
        assert torch.equal(model(*batch(0)), reference(*batch(0)))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters()))
    assert hidden(model.head.weight)
    assert_still_right(pair)


def test_a_step_that_begins_inside_of_gathered_goes_on_outside(config):
    """The root's own parameter stays lent until the step ends."""
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.weight = tiny(), nn.Parameter(torch.tensor([1.5, 0.5]))

        def forward(self, tokens, labels):
            return self.weight[0] * self.inner(tokens, labels) * self.weight[1]
    reference = Root()
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block, Tiny])
    torchs = adamw(reference, config)
    with sluice.gathered(model):
        loss = model(*batch(0))
        model(*batch(1)).backward()
    loss.backward()
    model(*batch(2)).backward()
    for micro in range(3):
        reference(*batch(micro)).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    for one in (torchs, optimizer):
        one.step()
        one.zero_grad()
    assert_still_right((reference, model, torchs, optimizer))
    optimizer.close()


def test_a_graph_of_the_gradients_is_not_kept(pair):
    reference, model, torchs, ours = pair
    for trained, optimizer in ((reference, torchs), (model, ours)):
        for micro in range(2):
            loss = trained(*batch(micro))
            with pytest.warns(UserWarning, match="second backward, .* gives NaN") if trained is model and micro == 0 else nullcontext():
                loss.backward(create_graph=True)
        if trained is reference:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert not any(view.requires_grad for view in ours._walk._views.values())
    assert_still_right(pair)


def test_a_part_may_be_zeroed_behind_the_step(pair):
    _, model, _, ours = pair
    model(*batch(0)).backward()
    ours.step()
    model.blocks[0].zero_grad()


def test_a_scheduler_that_keeps_more_in_the_groups(config):
    del config["optimizer"]
    model = tiny()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(given, 2e-3, total_steps=5, cycle_momentum=False)
    optimizer = sluice.offload(model, config, units=[Block], optimizer=given)
    sluice.rebind_scheduler(scheduler, optimizer)
    for _ in range(4):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < 1e-3
    optimizer.close()


def test_meta_device_and_values(config):
    reference = tiny()
    with torch.device("meta"):
        model = Tiny()
    with pytest.raises(sluice.ArgumentError, match="positions is on the meta device"):
        sluice.offload(model, config, units=[Block])
    values = reference.state_dict()
    values.pop("blocks.0.norm.bias")
    with pytest.raises(sluice.ArgumentError, match="no blocks.0.norm.bias"):
        sluice.offload(model, config, units=[Block], values=values)
    ours = sluice.offload(model, config, units=[Block], values=reference.state_dict())
    assert model.head.weight.device.type == "cpu"
    assert_still_right((reference, model, adamw(reference, config), ours))


def test_values_of_safetensors(config, tmp_path):
    import json
    import struct
    reference = tiny()
    header, data = {}, b""
    for name, value in reference.state_dict().items():
        raw = bytes(value.contiguous().view(torch.uint8).flatten().tolist())
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    with torch.device("meta"):
        model = Tiny()
    ours = sluice.offload(model, config, units=[Block], values=sluice.SafetensorsValues(tmp_path / "m.safetensors"))
    assert_still_right((reference, model, adamw(reference, config), ours))
    (tmp_path / "bad.safetensors").write_bytes(b"12345678")
    with pytest.raises(sluice.ArgumentError, match="bad.safetensors"):
        sluice.SafetensorsValues(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("header", [
    "[1]", "5", "[" * 100000, '{"a": 5}', '{"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}',
    '{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0.0, 0.0]}}', '{"a": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}}',
    '{"a": {"dtype": "F32", "shape": [4.5], "data_offsets": [0, 16]}}', '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
    '{"a": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}', '{"a": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}',
    '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}'])
def test_headers_of_safetensors_that_are_none(tmp_path, header):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    with pytest.raises(sluice.ArgumentError, match="bad.safetensors is not a safetensors file"):
        sluice.SafetensorsValues(path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3, "b": "c"}}', '{"weight_map": {"a": 3}}',
                                   "[" * 100000])
def test_indices_of_safetensors_that_are_none(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(sluice.ArgumentError, match="index.json is no index of safetensors files"):
        sluice.open_safetensors(tmp_path)


def test_tied_weights_stay_one(pair):
    _, model, _, ours = pair
    train(model, ours, 2)
    state = model.state_dict()
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def test_tied_weights_are_one_tensor_in_files(config, tmp_path):
    """In the model, and in a module of it. safetensors writes them under one name, and reads them into offloaded models, too."""
    safetensors = pytest.importorskip("safetensors.torch")
    plain, inner = torch.nn.Sequential(tiny()), tiny(seed=3)
    model = torch.nn.Sequential(inner)
    optimizer = sluice.offload(model, config, units=[Block])
    for state, prefix in ((model.state_dict(), "0."), (inner.state_dict(), ""), (model.state_dict(prefix="a."), "a.0.")):
        assert state[prefix + "head.weight"].data_ptr() == state[prefix + "embedding.weight"].data_ptr()
    for source, target in ((model, plain), (torch.nn.Sequential(tiny(seed=4)), model)):
        safetensors.save_model(source, tmp_path / "one.safetensors")
        assert safetensors.load_model(target, tmp_path / "one.safetensors") == (set(), [])
        found = target.state_dict()
        assert all(torch.equal(value, found[name]) for name, value in source.state_dict().items())
    optimizer.close()


@pytest.mark.parametrize("is_given", [False, True])
def test_tied_weights_are_one_tensor_where_hooks_rename_them(config, is_given):
    """As those of torch's checkpoint_wrapper do. They are read once, and again when they have changed."""
    model = tiny()
    model.head = checkpoint_wrapper(model.head)
    optimizer = sluice.offload(model, config, units=[Block])
    engine, calls = optimizer._engine, []
    read = engine.read
    engine.read = lambda member, *kinds: calls.append(member.name) or read(member, *kinds)
    given = collections.OrderedDict() if is_given else None
    before = model.state_dict(destination=given)
    assert before["head.weight"] is before["embedding.weight"] and len(set(calls)) == len(calls) == len(before) - 1
    values = before["head.weight"].clone()
    train(model, optimizer, 1)
    after = model.state_dict(destination=given)
    assert after["head.weight"] is after["embedding.weight"] and not torch.equal(after["head.weight"], values)
    model.embedding.load_state_dict({"weight": values})
    again = model.state_dict(destination=given)
    assert again["head.weight"] is again["embedding.weight"] and torch.equal(again["head.weight"], values)
    optimizer.close()


def test_evaluation_inside_of_a_step(pair):
    """Between the passes of an accumulation, and behind the last: with the step's parameters, and no trace in the gradients."""
    reference, model, torchs, ours = pair
    for net, optimizer in ((reference, torchs), (model, ours)):
        net.seen = []
        for micro in range(4):
            (net(*batch(micro)) / 2).backward()
            net.eval()
            with torch.no_grad():
                net.seen.append(net(batch(10 + micro)[0]))
                net.blocks[1](torch.ones(1, 2, 32))  # a part of it alone
            net.train()
            if micro % 2 == 1:
                if net is reference:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    for one, two in zip(reference.seen, model.seen):
        assert torch.allclose(one, two, rtol=0, atol=2e-5 * one.abs().max())
    assert_still_right(pair)


def test_backward_twice_over_one_graph(pair):
    reference, model, torchs, ours = pair
    for net in (reference, model):
        loss = net(*batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
    for optimizer in (torchs, ours):
        optimizer.step()
        optimizer.zero_grad()
    assert ours.gradient_norm == pytest.approx(expected, rel=2e-6)
    assert_still_right(pair)


class Box:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Boxing(Block):
    box, unbox = Box, staticmethod(lambda box: box.value)

    def forward(self, x):
        return self.box(super().forward(x if torch.is_tensor(x) else self.unbox(x)))


class Unboxing(Tiny):
    def __init__(self):
        super().__init__(block=Boxing)
        self.norm.register_forward_pre_hook(lambda module, args: (Boxing.unbox(args[0]),))


@pytest.mark.parametrize("box, unbox", [(lambda x: collections.UserDict(x=x), lambda box: box["x"]), (lambda x: {x}, lambda box: [*box][0]),
                                        (lambda x: SimpleNamespace(beside=[1, x]), lambda box: box.beside[1])])
def test_outputs_in_objects(config, monkeypatch, box, unbox):
    """Such as the mapping that a tokenizer has made, to which a model adds its own."""
    monkeypatch.setattr(Boxing, "box", staticmethod(box))
    monkeypatch.setattr(Boxing, "unbox", staticmethod(unbox))
    torch.manual_seed(0)
    reference = Unboxing()
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Boxing])
    assert_still_right((reference, model, adamw(reference, config), optimizer))
    optimizer.close()


def test_outputs_that_cannot_be_looked_into(config):
    model = Tiny(block=Boxing)
    sluice.offload(model, config, units=[Boxing])
    with pytest.raises(sluice.ArgumentError, match='"blocks.0" returns a Box'):
        model(*batch(0))


def test_another_optimizer(pair):
    _, model, torchs, _ = pair
    foreign = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(sluice.ArgumentError, match="SGD holds parameters"):
        foreign.step()
    torchs.step()
    assert_still_right(pair)


def test_hyperparameters_that_cannot_change(config):
    model = tiny()
    ours = sluice.offload(model, config, units=[Block])
    ours.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(sluice.ArgumentError, match="only the lr"):
        ours.step()
    del ours.param_groups[0]["weight_decay"]
    with pytest.raises(sluice.ArgumentError, match="cannot be added"):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_another_thread_may_go_backward(pair):
    reference, model, torchs, ours = pair
    for step in range(2):
        for net, optimizer in ((reference, torchs), (model, ours)):
            loss = net(*batch(step))
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            if optimizer is torchs:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert_still_right(pair)


def test_gradients_that_are_not_finite(pair):
    _, model, _, ours = pair
    (model(*batch(0)) * float("inf")).backward()
    with pytest.raises(sluice.NonFiniteError, match="nothing was updated"):
        ours.step()
    assert_still_right(pair)


@pytest.mark.parametrize("change, error, words", [
    ({"memroy": {}}, sluice.ConfigError, "memroy"),
    ({"precision": {"parameters": "fp64"}}, sluice.ConfigError, "fp64"),
    ({"storage": {"paths": ["/nowhere/at/all"]}}, sluice.ConfigError, "/nowhere/at/all"),
])
def test_configs_that_cannot_be(config, change, error, words):
    model = tiny()
    with pytest.raises(error, match=words):
        sluice.offload(model, config | change, units=[Block])
    assert torch.isfinite(model(*batch(0)))


def test_models_that_cannot_be(config):
    with pytest.raises(sluice.ArgumentError, match="names no module"):
        sluice.offload(tiny(), config, units=[nn.Conv2d])
    for module in (nn.ReLU(), nn.Linear(3, 0)):
        with pytest.raises(sluice.ArgumentError, match="no parameters"):
            sluice.offload(nn.Sequential(module), config)
    with pytest.raises(sluice.ArgumentError, match="nothing to train"):
        sluice.offload(nn.Linear(3, 3).requires_grad_(False), config)
    with pytest.raises(sluice.ArgumentError, match="of one type"):
        sluice.offload(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).half()), config)
    with pytest.raises(sluice.ArgumentError, match='"swap"'):
        sluice.offload(tiny(), config, storage="magic")


def test_ways_that_a_torch_does_not_have(config, monkeypatch):
    """An older torch: the best way is another, and a way by name is refused before anything changes."""
    monkeypatch.setattr("sluice_offload.storage._can_swap", lambda: False)
    with pytest.raises(sluice.ArgumentError, match=f"torch {torch.__version__.split('+')[0]}.* best way is 'poke'"):
        sluice.offload(tiny(), config, units=[Block], storage="swap")
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 1)
    assert "PokeStorage" in {type(storage).__name__ for storage in optimizer._walk.storages}
    monkeypatch.setattr("sluice_offload.storage._can_poke", lambda: False)
    with pytest.raises(sluice.ArgumentError, match="best way is 'copy'"):
        sluice.offload(tiny(), config, units=[Block], storage="poke")
    optimizer.close()


@pytest.mark.parametrize("what", ["units", "model"])
def test_compiled_modules(pair, what):
    """The hooks stay outside of a compiled unit; in a compiled model they are left out of the graphs."""
    import torch._dynamo
    _, model, _, ours = pair
    torch._dynamo.reset()
    for module in model.blocks if what == "units" else [model]:
        module.compile(backend="aot_eager")
    limits = ("recompile_limit", "fail_on_recompile_limit_hit")
    if not hasattr(torch._dynamo.config, limits[0]):  # torch 2.6
        limits = ("cache_size_limit", "fail_on_cache_limit_hit")
    with torch._dynamo.config.patch({"error_on_recompile": False, limits[0]: 4, limits[1]: True}):
        assert_still_right(pair)
    assert ours.report.schedule_changes == 0


def test_a_compiled_model_that_reads_the_weight_of_its_head(config):
    import torch._dynamo

    class Reading(Tiny):
        def get_output_embeddings(self):
            return self.head

        def forward(self, tokens, labels):
            logits = self.norm(self.embedding(tokens)) @ self.get_output_embeddings().weight.t()
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch._dynamo.reset()
    torch.manual_seed(0)
    reference = Reading(layers=1, tied=False)
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block])
    model.compile(backend="eager")
    expected, _ = train(reference, adamw(reference, config), 2, clip_norm=1.0)
    assert worst(train(model, optimizer, 2)[0], expected) <= 2e-6
    optimizer.close()


def test_gradients_are_the_engines(pair):
    """Hooks of the program that read p.grad find none, and may not be led to believe in an old one."""
    _, model, _, ours = pair
    model(*batch(0)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    ours.step()
    assert ours.gradient_norm > 0


def test_a_state_dict_of_other_updates_is_refused(pair):
    """The learning rates of a checkpoint would come back without the moments, and training go on as if nothing were missing."""
    _, model, _, optimizer = pair
    before = optimizer.state_dict()
    train(model, optimizer, 2)
    with pytest.raises(sluice.ArgumentError, match="had made 0 updates, and this one has made 2.*restore"):
        optimizer.load_state_dict(before)
    saved = optimizer.state_dict()
    assert saved["sluice_updates"] == 2
    optimizer.load_state_dict(saved)  # what a program does behind offload(restore=...)


def test_a_parameter_that_is_replaced_is_noticed(pair):
    """The engine would go on with the old one, and the forward with the new."""
    _, model, _, optimizer = pair
    model(*batch(0)[:1]).sum().backward()
    place = model.blocks[0].up if hasattr(model.blocks[0], "up") else next(m for m in model.modules() if isinstance(m, nn.Linear))
    kept = place.weight
    place.weight = nn.Parameter(torch.zeros_like(kept))
    with pytest.raises(sluice.ArgumentError, match="is another tensor than in offload"):
        optimizer.step()
    place.weight = kept
    optimizer.zero_grad()
    assert_still_right(pair)


def test_a_parameter_with_other_memory_is_noticed(pair):
    _, model, _, optimizer = pair
    place = next(m for m in model.modules() if isinstance(m, nn.Linear))
    kept = place.weight.data
    model(*batch(0)[:1]).sum().backward()
    place.weight.data = torch.zeros(place.weight.shape)
    with pytest.raises(sluice.ArgumentError, match="or has other memory"):
        optimizer.step()
    place.weight.data = kept
    optimizer.zero_grad()
    assert_still_right(pair)


def test_a_closed_optimizer_says_so(config):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    optimizer.close()
    for call in (optimizer.step, lambda: model(batch(0)[0]), optimizer.state_dict):
        with pytest.raises(sluice.ArgumentError, match="the optimizer is closed"):
            call()


def test_reading_values_inside_a_step_says_what_to_do(pair):
    _, model, _, optimizer = pair
    model(*batch(0)).backward()
    with pytest.raises(sluice.ArgumentError, match="a step is under way.*torch.no_grad"):
        model.state_dict()
    optimizer.zero_grad()
    assert_still_right(pair)


def test_a_config_of_deepspeed_is_named(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "train_batch_size": 4}')
    for given in (str(file), {"zero_optimization": {"stage": 3}}):
        with pytest.raises(sluice.ConfigError, match=r"is a key of DeepSpeed.*initialize\(\)"):
            sluice.offload(tiny(), given, units=[Block])


def test_a_write_outside_of_the_forward_shows_its_line(tmp_path):
    """By a view from where it had values: the process ends, since the page cannot be written; Python names the line."""
    program = tmp_path / "writes.py"
    program.write_text(f"""
import sys
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
import torch, sluice_offload as sluice
from conftest import Block, tiny
model = tiny()
optimizer = sluice.offload(model, {{"placement": {{"parameters": "nvme"}}, "storage": {{"paths": [{str(tmp_path)!r}]}}}}, units=[Block])
kept = []
model.norm.register_forward_pre_hook(lambda module, _: kept.append(module.weight.detach()))
with torch.no_grad():
    model(torch.zeros(1, 3, dtype=torch.long))
    kept[0].mul_(0.5)  # the line
""")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGSEGV, done
    assert "Segmentation fault" in done.stderr and 'writes.py", line 12' in done.stderr, done.stderr
