"""Checkpoints of offloaded models: training goes on with the bits that it would have had."""

import copy
import json
import math
import pathlib
import re

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, adamw, batch, tiny, train, worst
from sluice_offload.buffers import BufferText


def states(optimizer):
    """Masters and moments of every tensor."""
    engine = optimizer._engine
    return [engine.read(member, kind) for unit in optimizer._walk.units.units for member in unit.members for kind in (1, 2, 3)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resumes_with_the_same_bits(config, tmp_path, precision):
    """Elsewhere, with a schedule, and from the meta device."""
    config["precision"] = {"parameters": precision}
    root = tmp_path / "run"
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.9 ** k)

    def some(m, o, s, steps, first):
        losses = []
        for i in range(first, first + steps):
            losses += train(m, o, 1, first=i)[0]
            s.step()
        return losses
    some(model, optimizer, schedule, 3, 0)
    saved = optimizer.save(root, application=json.dumps([optimizer.state_dict(), schedule.state_dict()]))
    assert pathlib.Path(saved).parent == root and (root / "latest").resolve() == pathlib.Path(saved)
    expected, state = some(model, optimizer, schedule, 4, 3), states(optimizer)
    optimizer.close()

    elsewhere = copy.deepcopy(config)
    elsewhere["placement"] = {"parameters": "host", "optimizer": "host"}
    with torch.device("meta"):
        other = tiny(seed=5)
    resumed = sluice.offload(other, elsewhere, units=[Block], restore=root / "latest")
    assert resumed.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9 ** 3)
    again = torch.optim.lr_scheduler.LambdaLR(resumed, lambda k: 0.9 ** k)
    # As in torch: a new schedule sets the first rate, and both are loaded behind that.
    resumed.load_state_dict(json.loads(resumed.application)[0])
    again.load_state_dict(json.loads(resumed.application)[1])
    assert some(other, resumed, again, 4, 3) == expected
    for one, two in zip(states(resumed), state, strict=True):
        assert torch.equal(one, two)
    assert resumed._engine.applied_step() == 7
    resumed.close()


def test_a_checkpoint_beside_training_has_the_state_of_its_step(config, tmp_path):
    """Steps run while it is written."""
    root = tmp_path / "run"
    optimizer = sluice.offload(tiny(), config, units=[Block])
    with pytest.raises(sluice.ArgumentError, match="memory.save_buffers"):
        optimizer.begin_save(root)
    optimizer.close()
    config.setdefault("memory", {})["save_buffers"] = 2
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 2)
    assert optimizer.finish_save() is None
    state = states(optimizer)
    optimizer.begin_save(root, application="position 17")
    train(model, optimizer, 2, first=2)
    saved = optimizer.poll_save() or optimizer.finish_save()
    assert saved == str(root / "step-000000002") and optimizer.poll_save() is None
    optimizer.close()

    resumed = sluice.offload(tiny(seed=5), config, units=[Block], restore=root / "latest")
    assert resumed.application == "position 17" and resumed._engine.applied_step() == 2
    for one, two in zip(states(resumed), state, strict=True):
        assert torch.equal(one, two)
    resumed.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_universal_checkpoint_of_deepspeed_goes_on(config, tmp_path, precision):
    """Written here as ds_to_universal writes it: fp32 masters, moments and the step of each parameter."""
    config["precision"] = {"parameters": precision}
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 3)
    for unit in optimizer._walk.units.units:
        for member in unit.members:
            folder = tmp_path / "step3_universal" / "zero" / ("module." + member.name)
            folder.mkdir(parents=True)
            for kind, name in ((1, "fp32"), (2, "exp_avg"), (3, "exp_avg_sq")):
                torch.save({"param": optimizer._engine.read(member, kind), "cat_dim": 0}, folder / f"{name}.pt")
            torch.save(torch.tensor(3.0), folder / "step.pt")
    (tmp_path / "latest_universal").write_text("step3_universal")
    before = states(optimizer)
    expected, after = train(model, optimizer, 2, first=3)[0], states(optimizer)
    optimizer.close()

    other = tiny(seed=5)
    resumed = sluice.offload(other, config, units=[Block], restore=tmp_path)
    assert resumed._engine.applied_step() == 3
    for one, two in zip(states(resumed), before, strict=True):
        assert torch.equal(one, two)
    assert train(other, resumed, 2, first=3)[0] == expected
    for one, two in zip(states(resumed), after, strict=True):
        assert torch.equal(one, two)
    resumed.close()

    class Surprise:
        def __reduce__(self):
            return exec, ("open('executed', 'w')",)
    torch.save({"param": Surprise()}, folder / "fp32.pt")
    with pytest.raises(sluice.SluiceError, match=r"fp32\.pt.*__builtin__\.exec|builtins\.exec"):
        sluice.offload(tiny(), config, units=[Block], restore=tmp_path)
    assert not pathlib.Path("executed").exists()


def test_what_is_refused(config, tmp_path):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 1)
    model(*batch(1)).backward()
    with pytest.raises(sluice.ArgumentError, match="middle of a step"):
        optimizer.save(tmp_path / "run")
    optimizer.step()
    for _ in range(3):
        folder = pathlib.Path(optimizer.save(tmp_path / "run", keep=2))
        train(model, optimizer, 1)
    assert len(list((tmp_path / "run").glob("step-*"))) == 2
    optimizer.close()

    def refused(error, words, **options):
        fresh = tiny(**options.pop("model", {}))
        before = copy.deepcopy(fresh.state_dict())
        with pytest.raises(error, match=words):
            sluice.offload(fresh, config, units=[Block], **options)
        for name, value in fresh.state_dict().items():
            assert torch.equal(value, before[name])
    refused(sluice.SluiceError, "nothing", restore=tmp_path / "nothing")
    refused(sluice.ArgumentError, "exclude each other", restore=folder, values={})
    refused(sluice.ConfigError, "positions", restore=folder, model={"length": 13})
    data = next(folder.glob("model-*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    refused(sluice.StorageError, "model-", restore=folder)
    content[-5] ^= 1
    data.write_bytes(content)
    config["optimizer"]["groups"] = [{"tensors": ["embedding.*"], "learning_rate_factor": 0.1}]
    refused(sluice.SluiceError, "param_groups", restore=folder)


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_checkpoint_of_another_precision_is_converted(config, tmp_path, goes_back):
    """Masters and moments as they are, parameters rounded from them, and the learning rate."""
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 3e-4
    folder, expected = optimizer.save(tmp_path / "run"), states(optimizer)
    optimizer.close()
    config["precision"] = {"parameters": "bf16"}
    other = tiny(seed=5)
    if goes_back:
        resumed = sluice.offload(other, config, units=[Block])
        train(other, resumed, 1)
        resumed.load_checkpoint(folder, convert=True)
    else:
        resumed = sluice.offload(other, config, units=[Block], restore=folder, convert=True)
    assert resumed._engine.applied_step() == 3 and resumed.param_groups[0]["lr"] == 3e-4
    for one, two in zip(states(resumed), expected, strict=True):
        assert torch.equal(one, two)
    masters = dict(zip((member.name for unit in resumed._walk.units.units for member in unit.members), expected[::3]))
    values = other.state_dict()
    for name, master in masters.items():
        assert values[name].dtype == torch.bfloat16 and torch.equal(values[name].flatten(), master.flatten().bfloat16())
    assert all(map(math.isfinite, train(other, resumed, 2)[0]))
    resumed.close()


def test_a_checkpoint_with_other_frozen_parts_is_converted(config, tmp_path):
    """A parameter that was frozen begins with zero moments, like one that torch's optimizer meets for the first time."""
    reference, model = tiny(), tiny()
    for one in (reference, model):
        one.norm.requires_grad_(False)
    theirs, ours = adamw(reference, config), sluice.offload(model, config, units=[Block])
    train(model, ours, 2), train(reference, theirs, 2, 1.0)
    folder = ours.save(tmp_path / "run")
    ours.close()
    reference.norm.requires_grad_(True)
    for group in adamw(reference, config).param_groups:
        group["params"] = [p for p in group["params"] if not any(p is q for known in theirs.param_groups for q in known["params"])]
        if group["params"]:
            theirs.add_param_group(group)
    again = tiny(seed=5)
    ours = sluice.offload(again, config, units=[Block], restore=folder, convert=True)
    assert worst(train(again, ours, 3, first=2)[0], train(reference, theirs, 3, 1.0, first=2)[0]) <= 2e-6
    with sluice.gathered(again):
        assert (again.norm.weight - reference.norm.weight).abs().max() <= 2e-6
    ours.close()


def test_what_json_cannot_hold_stays_with_the_program(config, tmp_path):
    config["optimizer"] = {}
    model = tiny()
    given = torch.optim.AdamW([{"params": list(model.parameters()), "made_by": adamw, "depth": torch.tensor(3)}], lr=1e-3)
    optimizer = sluice.offload(model, config, units=[Block], optimizer=given)
    train(model, optimizer, 1)
    optimizer.save(tmp_path / "kept")
    optimizer.load_checkpoint(tmp_path / "kept" / "latest")
    assert optimizer.param_groups[0]["made_by"] is adamw and optimizer.param_groups[0]["depth"] == 3
    optimizer.close()


STORE = {"name": "run-7"}


def test_buffers_go_on_with_a_durable_store(config):
    """The file of the first start has older ones, and the program made new ones."""
    config["storage"]["state"] = STORE

    def made(value):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        model[1].running_mean.fill_(value)
        return model
    file = {name: tensor.clone() for name, tensor in made(3.0).state_dict().items()}
    expected = 8 * [3.0]
    for value in (1.0, 2.0):
        model = made(value)
        optimizer = sluice.offload(model, config, values=file, resume=True)
        assert model[1].running_mean.tolist() == expected
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.close()
        expected = model[1].running_mean.tolist()
        assert expected != 8 * [3.0]


def test_buffers_on_the_meta_device_are_made_from_the_values(config, caplog):
    """Where the store goes on, from the commit."""
    config["storage"]["state"] = STORE

    class Scaled(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8))
            self.register_buffer("scale", torch.full((1,), 2.0))
            self.register_buffer("mask", torch.ones(8), persistent=False)
            self[2].running_var = self[1].running_var

    torch.manual_seed(0)
    there = Scaled()
    there[1].running_mean.fill_(3.0)
    expected = 8 * [3.0]
    for _ in range(2):
        with torch.device("meta"):
            model = Scaled()
        caplog.clear()
        optimizer = sluice.offload(model, config, values=dict(there.state_dict()), resume=True)
        assert "buffers mask are on the meta device" in caplog.text and "meta_parameters()" in caplog.text
        assert model[1].running_mean.tolist() == expected and model.scale.item() == 2 and model[2].num_batches_tracked.dtype == torch.int64
        assert model[1].running_var is model[2].running_var
        model.train()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.close()
        expected = model[1].running_mean.tolist()
    with torch.device("meta"):
        model = Scaled()
    wrong = {**there.state_dict(), "1.running_mean": torch.zeros(9)}
    with pytest.raises(sluice.ArgumentError, match="buffer 1.running_mean has shape"):
        sluice.offload(model, config, values=wrong, resume=True)
    assert model[1].running_mean.is_meta and model[0].weight.is_meta


class Kept(torch.nn.Module):
    """With buffers of many kinds."""

    def __init__(self, value=0.0):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)) for _ in range(2))
        for name, buffer in {"two": torch.full((2, 3), value, dtype=torch.bfloat16), "word": torch.full((), value, dtype=torch.int64),
                             "flags": torch.full((5,), value > 0), "odd": torch.full((3, 4), value).t(), "none": torch.empty(0, 3),
                             "wave": torch.full((2,), complex(value, 1))}.items():
            self.register_buffer(name, buffer)
        self.register_buffer("own", torch.full((3,), value), persistent=False)
        self.blocks[1][1].running_var = self.blocks[0][1].running_var

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def kept_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False) if name != "own"}


def assert_kept(model, expected):
    found = kept_of(model)
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert buffer.dtype == expected[name].dtype and torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("on_meta", [False, True])
def test_buffers_are_in_checkpoints(config, tmp_path, on_meta):
    config.setdefault("memory", {})["save_buffers"] = 2
    model = Kept(1.0)
    optimizer = sluice.offload(model, config)

    def step():
        model(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    step()
    optimizer.begin_save(tmp_path / "run")
    expected = kept_of(model)
    step()
    folder = optimizer.finish_save()
    model.word.add_(1)
    assert not torch.equal(model.blocks[0][1].running_mean, expected["blocks.0.1.running_mean"])
    with torch.device("meta"):  # as a program's default device
        optimizer.load_checkpoint(folder)
    assert_kept(model, expected)
    optimizer.close()
    with torch.device("meta" if on_meta else "cpu"):
        other = Kept(2.0)
    optimizer = sluice.offload(other, config, restore=folder)
    assert_kept(other, expected)
    assert other.blocks[1][1].running_var is other.blocks[0][1].running_var
    assert on_meta or other.own.tolist() == [2.0] * 3
    optimizer.close()


def test_buffers_of_other_shapes_change_nothing(config, tmp_path):
    class Longer(Kept):
        def __init__(self):
            super().__init__()
            self.two = torch.zeros(3, 3)
    optimizer = sluice.offload(Kept(1.0), config)
    folder = optimizer.save(tmp_path / "run")
    optimizer.close()
    model = Longer()
    with pytest.raises(sluice.ArgumentError, match=r"buffer two has shape \(2, 3\) in the checkpoint, but \(3, 3\) in the model; no buffer"):
        sluice.offload(model, config, restore=folder)
    optimizer = sluice.offload(model, config)
    expected, values = kept_of(model), copy.deepcopy(model.state_dict())
    with pytest.raises(sluice.ArgumentError, match="buffer two has shape"):
        optimizer.load_checkpoint(folder)
    assert_kept(model, expected)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    optimizer.close()


def test_buffers_that_a_text_cannot_keep(config, tmp_path, caplog):
    """Too many bytes for a commit, too many for a checkpoint, and sparse ones: each is said, and training goes on."""
    config["storage"]["state"] = STORE
    model = Kept(1.0)
    model.register_buffer("large", torch.ones(1 << 18))
    optimizer = sluice.offload(model, config, resume=True)
    for _ in range(2):
        model(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert caplog.text.count("has room for") == 1 and "persistent=False" in caplog.text
    folder = optimizer.save(tmp_path / "run")  # has more room
    optimizer.close()
    caplog.clear()
    other = Kept(2.0)
    other.register_buffer("large", torch.zeros(1 << 18))
    optimizer = sluice.offload(other, config, resume=True)
    assert "keep their values, since the checkpoint has none for them" in caplog.text
    assert other.word == 2 and other.large.sum() == 0
    optimizer.close()
    del config["storage"]["state"]
    other = Kept(2.0)
    other.register_buffer("large", torch.zeros(1 << 18))
    optimizer = sluice.offload(other, config, restore=folder)
    assert other.word == 1 and other.large.sum() == 1 << 18
    optimizer._buffers._has_warned = False
    caplog.clear()
    assert optimizer._buffers.entries(room=1000) == {} and "room for 1000" in caplog.text
    caplog.clear()
    bare = tiny()
    assert BufferText(bare, sluice.find_units(bare, [Block])).entries(room=-1) == {} and not caplog.text  # none are there
    optimizer.close()
    other = Kept(3.0)
    other.word = torch.eye(2).to_sparse()
    caplog.clear()
    optimizer = sluice.offload(other, config)
    assert "two" in optimizer._buffers.entries(1 << 20) and "buffers word are sparse or quantized" in caplog.text
    optimizer.close()
    other = Kept(3.0)
    other.word = torch.eye(2).to_sparse()
    config["storage"]["state"] = STORE
    sluice.offload(other, config, resume=True).close()


def test_a_durable_store_goes_on_with_the_same_bits(config):
    config["storage"]["state"] = STORE
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block], resume=True)
    assert optimizer.resumed_step is None
    losses = []
    for i in range(7):
        optimizer.application = f"batch {i + 1}"
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.9 ** i
        losses += train(model, optimizer, 1, first=i)[0]
        if i == 2:
            optimizer.commit()
            assert optimizer.committed_step == 3
    state = states(optimizer)
    with pytest.raises(sluice.SluiceError, match="is in use by process .* this one: close.. the optimizer"):
        sluice.offload(tiny(), config, units=[Block], resume=True)
    optimizer.close()
    with pytest.raises(sluice.ArgumentError, match="holds the state of step 7 already; go on from it with resume=True"):
        sluice.offload(tiny(), config, units=[Block])

    elsewhere = copy.deepcopy(config)
    elsewhere["placement"] = {"parameters": "host", "optimizer": "host"}
    with torch.device("meta"):
        other = tiny(seed=5)
    resumed = sluice.offload(other, elsewhere, units=[Block], resume=True)
    assert (resumed.resumed_step, resumed.application) == (7, "batch 7")
    assert resumed.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9 ** 6)
    for one, two in zip(states(resumed), state, strict=True):
        assert torch.equal(one, two)
    expected = train(other, resumed, 2, first=7)[0]
    resumed.close()

    again = sluice.offload(tiny(), config, units=[Block], resume=True)
    assert again.resumed_step == 9
    again.close()
    config["storage"]["state"] = {"name": "whole"}
    whole = tiny()
    optimizer = sluice.offload(whole, config, units=[Block])
    for i in range(7):
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.9 ** i
        assert train(whole, optimizer, 1, first=i)[0] == losses[i:i + 1]
    assert train(whole, optimizer, 2, first=7)[0] == expected
    optimizer.close()


def test_resume_needs_a_store(config):
    with pytest.raises(sluice.ArgumentError, match="storage.state.name"):
        sluice.offload(tiny(), config, units=[Block], resume=True)
    with pytest.raises(sluice.ArgumentError, match="exclude each other"):
        sluice.offload(tiny(), config, units=[Block], resume=True, restore="somewhere")


def test_another_checkpoint_ends_no_save_under_way(config, tmp_path):
    root = tmp_path / "run"
    config.setdefault("memory", {})["save_buffers"] = 2
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 1)
    first = optimizer.save(root)
    train(model, optimizer, 1, first=1)
    optimizer.begin_save(root)
    optimizer.load_checkpoint(first)
    assert optimizer._engine.applied_step() == 1
    assert optimizer.poll_save() == str(root / "step-000000002") and optimizer.finish_save() is None
    for name in ("a", "b"):  # the first one's path is never asked for
        optimizer.begin_save(tmp_path / name)
        optimizer.load_checkpoint(first)
        assert (tmp_path / name / "step-000000001").is_dir(), name
    optimizer.begin_save(tmp_path / "c")
    assert optimizer.finish_save() == str(tmp_path / "c" / "step-000000001") and optimizer.finish_save() is None
    optimizer.close()
    resumed = sluice.offload(tiny(seed=5), config, units=[Block], restore=root / "step-000000002")
    assert resumed._engine.applied_step() == 2
    resumed.close()


def test_a_checkpoint_with_other_groups_changes_nothing(config, tmp_path):
    optimizer = sluice.offload(tiny(), config, units=[Block])
    folder = optimizer.save(tmp_path / "run")
    optimizer.close()
    config["optimizer"]["groups"] = [{"tensors": ["*bias"], "weight_decay": 0.0}]
    model = tiny(seed=5)
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 1)
    before = states(optimizer)
    with pytest.raises(sluice.ArgumentError, match="the checkpoint has 1 param_groups, but the config's optimizer.groups make 2"):
        optimizer.load_checkpoint(folder)
    assert all(torch.equal(one, two) for one, two in zip(states(optimizer), before, strict=True))
    assert optimizer._engine.applied_step() == 1
    optimizer.close()


class Scaled(torch.nn.Module):
    """With a parameter that is one number, without dimensions."""

    def __init__(self):
        super().__init__()
        self.net = tiny()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, data, target):
        return self.net(data, target) * self.scale


def test_a_number_as_a_parameter_goes_on_from_a_checkpoint(config, tmp_path):
    model = Scaled()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 1)
    folder, before = optimizer.save(tmp_path / "run"), states(optimizer)
    train(model, optimizer, 1, first=1)
    optimizer.load_checkpoint(folder)
    assert optimizer._engine.applied_step() == 1 and model.state_dict()["scale"].shape == ()
    assert all(torch.equal(one, two) for one, two in zip(states(optimizer), before, strict=True))
    optimizer.close()


def test_a_checkpoint_does_not_take_the_place_of_a_store(config, tmp_path):
    """Its newer commits would be gone."""
    config["storage"]["state"] = STORE
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block], resume=True)
    train(model, optimizer, 1)
    folder = optimizer.save(tmp_path / "run")
    train(model, optimizer, 2, first=1)
    optimizer.close()
    words = 'store "run-7" holds the state of step 3 already, .*step-000000001 would.*resume=True instead of restore.*sluice state remove'
    with pytest.raises(sluice.ArgumentError, match=words):
        sluice.offload(tiny(), config, units=[Block], restore=folder)
    resumed = sluice.offload(tiny(), config, units=[Block], resume=True)
    assert resumed.resumed_step == 3
    resumed.close()
    config["storage"]["state"] = {"name": "another"}
    restored = sluice.offload(tiny(), config, units=[Block], restore=folder)
    assert restored._engine.applied_step() == 1
    restored.close()


GROUPS = [{"tensors": ["embedding.*"], "weight_decay": 0.5}, {"tensors": ["*.bias"], "learning_rate_factor": 0.5}]


def test_other_hyperparameters_of_a_checkpoint_are_said(config, tmp_path, caplog):
    """Those of the program count. All in one warning, or none where they are the same."""
    config["optimizer"]["groups"] = GROUPS
    optimizer = sluice.offload(tiny(), config, units=[Block])
    folder = optimizer.save(tmp_path / "run")
    text = json.loads(pathlib.Path(folder, "sluice_state.json").read_text())["application"][0]
    optimizer.take_over(text)
    optimizer.close()
    sluice.offload(tiny(), config, units=[Block], restore=folder).close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    del config["optimizer"]["beta2"]
    config["optimizer"] |= {"clip_norm": 0.25, "groups": copy.deepcopy(GROUPS)}
    config["optimizer"]["groups"][0]["weight_decay"] = 0.0
    del config["optimizer"]["groups"][1]["learning_rate_factor"]
    config["optimizer"]["groups"][1]["weight_decay"] = 0.125
    optimizer = sluice.offload(tiny(), config, units=[Block], restore=folder)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    said = record.getMessage()
    for words in ("optimizer.beta2 is 0.95 and was 0.999", "optimizer.clip_norm is 0.25 and was 1.0",
                  "groups[0].weight_decay is 0.0 and was 0.5", "groups[1].weight_decay is 0.125 and was not set",
                  "groups[1].learning_rate_factor is not set and was 0.5", "rates in optimizer.param_groups are the checkpoint's"):
        assert words in said
    assert said.count(" and was ") == 5
    caplog.clear()
    optimizer.load_checkpoint(folder)
    assert caplog.text.count(" and was ") == 5
    caplog.clear()
    saved = json.loads(text)
    assert saved["hyperparameters"].pop("optimizer.clip_epsilon") == 0.0
    optimizer.take_over(json.dumps(saved))  # of a version that did not keep this one
    assert caplog.text.count(" and was ") == 5
    caplog.clear()
    older = {key: value for key, value in json.loads(text).items() if key != "hyperparameters"}
    optimizer.take_over(json.dumps(older))  # of a version that did not keep them
    assert not caplog.records
    optimizer.close()


def test_the_defaults_of_hyperparameters_are_the_engines(config, tmp_path):
    config["optimizer"] = {}
    optimizer = sluice.offload(tiny(), config, units=[Block])
    saved = json.loads(pathlib.Path(optimizer.save(tmp_path / "run"), "sluice_state.json").read_text())
    expected = {f"optimizer.{key}": value for key, value in saved["optimizer"]["hyperparameters"].items()}
    expected["optimizer.clip_epsilon"] = 0.0  # which the description of the state lacks
    assert json.loads(saved["application"][0])["hyperparameters"] == expected
    optimizer.close()


def test_another_clip_epsilon_of_a_checkpoint_is_said(config, tmp_path, caplog):
    optimizer = sluice.offload(tiny(), config, units=[Block])
    folder = optimizer.save(tmp_path / "run")
    optimizer.close()
    config["optimizer"]["clip_epsilon"] = 1e-6
    optimizer = sluice.offload(tiny(), config, units=[Block], restore=folder)
    assert "optimizer.clip_epsilon is 1e-06 and was 0.0" in caplog.text
    optimizer.close()


@pytest.mark.parametrize("key, value, said", [
    ("clip_norm", 0.5, "optimizer.clip_norm was 1 and is 0.5"), ("clip_epsilon", 0.01, "optimizer.clip_epsilon was 0 and is 0.01"),
    ("non_finite", "skip", "optimizer.non_finite was stop and is skip"), ("weight_decay", 0.1, "optimizer.weight_decay was 0.01 and is 0.1")])
def test_changed_numbers_of_a_store_are_accepted_on_demand(config, key, value, said):
    config["storage"]["state"] = STORE
    with pytest.raises(sluice.ArgumentError, match="accept_changes is for a durable store that resume=True goes on from"):
        sluice.offload(tiny(), config, units=[Block], accept_changes=True)
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block], resume=True, accept_changes=True)
    train(model, optimizer, 2)
    optimizer.close()
    config["optimizer"][key] = value
    with pytest.raises(sluice.ConfigError, match=re.escape(said) + ".*change them back, or accept the change .*in Python accept_changes=True"):
        sluice.offload(tiny(), config, units=[Block], resume=True)
    model = tiny(seed=4)
    optimizer = sluice.offload(model, config, units=[Block], resume=True, accept_changes=True)
    assert optimizer.resumed_step == 2
    train(model, optimizer, 1, first=2)
    optimizer.close()
    sluice.offload(tiny(), config, units=[Block], resume=True).close()  # it is the store's now


def test_initialize_accepts_changed_numbers_of_a_store(config):
    config["storage"]["state"] = STORE
    config["batch"] = {"sequences": 2, "micro_batches": 1}
    _, optimizer, _, _ = sluice.initialize(model=tiny(), config=config, units=[Block], resume=True)
    optimizer.close()
    config["optimizer"]["clip_norm"] = 0.5
    with pytest.raises(sluice.ConfigError, match="accept_changes=True"):
        sluice.initialize(model=tiny(), config=config, units=[Block], resume=True)
    _, optimizer, _, _ = sluice.initialize(model=tiny(), config=config, units=[Block], resume=True, accept_changes=True)
    assert optimizer.resumed_step == 0
    optimizer.close()


@pytest.mark.parametrize("length", [1, 300])
def test_a_store_of_long_names(config, length):
    """Groups by name, as of a torch optimizer with decay for some. Long ones take more room than a commit has for all of its settings."""
    config["storage"]["state"] = STORE
    config["memory"] = {"device": "64MiB", "host": "256MiB"}
    config["optimizer"] = {"overlap": "serial", "clip_norm": 1.0}

    class Many(torch.nn.Module):
        def __init__(self, unit):
            super().__init__()
            for i in range(200):
                self.register_parameter(f"expert_{i:05d}" + length * "s", torch.nn.Parameter(torch.ones(2)))

        def forward(self, x):
            return x + 1e-3 * torch.stack(list(self.parameters())).sum()

    def start(decay, **options):
        model = torch.nn.Sequential(*[Many(unit) for unit in range(20)])
        parameters = list(model.parameters())
        given = torch.optim.AdamW([{"params": parameters[::2], "weight_decay": decay}, {"params": parameters[1::2], "weight_decay": 0.0}])
        return model, sluice.offload(model, config, units=[Many], optimizer=given, resume=True, **options)

    for _ in range(2):
        model, optimizer = start(0.1)
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        optimizer.close()
    with pytest.raises(sluice.ConfigError, match="with learning_rate_factor 1 and weight_decay 0.1 and is .* and weight_decay 0.2; change") as caught:
        start(0.2)
    assert len(str(caught.value)) < 2500
    _, optimizer = start(0.2, accept_changes=True)
    assert optimizer.resumed_step == 2
    optimizer.close()
