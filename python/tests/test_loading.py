"""Values for a model that is offloaded already: load_state_dict() and load_safetensors()."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sluice_offload as sluice
from conftest import Block, Tiny, adamw, hidden, tiny, train, worst
from sluice_offload import structures


@pytest.fixture
def pair(config):
    """A model, its offloaded copy, and their optimizers, behind two steps."""
    reference = tiny()
    model = copy.deepcopy(reference)
    torchs, ours = adamw(reference, config), sluice.offload(model, config, units=[Block])
    train(reference, torchs, 2, clip_norm=1.0)
    train(model, ours, 2)
    yield reference, model, torchs, ours
    ours.close()


def assert_still_right(pair):
    """Moments and step are those from before, in both."""
    reference, model, torchs, ours = pair
    expected, _ = train(reference, torchs, 4, clip_norm=1.0, first=2)
    actual, _ = train(model, ours, 4, first=2)
    assert worst(actual, expected) <= 2e-6
    assert ours._engine.applied_step() == 6


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_whole_models(pair, assign):
    reference, model, _, _ = pair
    other = tiny(seed=5).state_dict()
    for net in (reference, model):
        assert not any(net.load_state_dict(other, assign=assign and net is model))
    state = model.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in other)
    assert hidden(model.head.weight)  # as ever outside of gathered()
    assert_still_right(pair)


def test_state_dicts_of_parts(pair):
    reference, model, _, _ = pair
    other = tiny(seed=6).state_dict()
    some = {name: value for name, value in other.items() if name.startswith("blocks.1.mlp")}
    before = model.state_dict()
    for net in (reference, model):
        missing = net.load_state_dict(some, strict=False).missing_keys
        net.blocks[0].attention.load_state_dict({name.removeprefix("blocks.0.attention."): value for name, value in other.items()
                                                 if name.startswith("blocks.0.attention.")})
    assert set(missing) == set(other) - set(some)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed >= {name for name in other if "blocks.1.mlp.1" in name or "blocks.0.attention.in_proj_w" in name}
    assert all(name.startswith(("blocks.1.mlp", "blocks.0.attention")) for name in changed)
    assert_still_right(pair)


def test_what_torch_refuses_is_refused_and_changes_nothing(pair):
    reference, model, _, _ = pair
    before = model.state_dict()
    wrong = {**before, "blocks.1.norm.weight": torch.ones(5)}
    for net in (reference, model):
        with pytest.raises(RuntimeError, match=r"size mismatch for blocks.1.norm.weight"):
            net.load_state_dict(wrong)
        with pytest.raises(RuntimeError, match="Missing key.*positions"):
            net.load_state_dict({name: value for name, value in before.items() if name != "positions"})
        with pytest.raises(RuntimeError, match="Unexpected key.*surplus"):
            net.load_state_dict({**before, "surplus": torch.ones(1)})
    with pytest.raises(sluice.NonFiniteError, match="norm.bias"):
        model.norm.load_state_dict({"weight": torch.ones(32), "bias": torch.full((32,), torch.inf)})
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_files(pair, config, tmp_path):
    reference, model, _, _ = pair
    other = tiny(seed=7)
    copied = copy.deepcopy(other)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    saver = sluice.offload(copied, {**config, "storage": {"paths": [str(scratch)]}}, units=[Block])
    sluice.save_safetensors(copied, tmp_path / "one")
    sluice.save_safetensors(copied, tmp_path / "several", max_shard_bytes=20000)
    saver.close()
    reference.load_state_dict(other.state_dict())
    for source in (tmp_path / "one" / "model.safetensors", tmp_path / "one", sluice.open_safetensors(tmp_path / "several")):
        model.load_state_dict(tiny(seed=8).state_dict())
        assert sluice.load_safetensors(model, source) == []
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())
    assert_still_right(pair)


def test_a_default_device_is_the_programs(pair, tmp_path):
    """As torch.set_default_device() sets it."""
    reference, model, _, ours = pair
    with torch.device("meta"):
        sluice.save_safetensors(model, tmp_path / "file")
        folder = ours.save(tmp_path / "run")
    before = model.state_dict()
    model.load_state_dict(tiny(seed=8).state_dict())
    with torch.device("meta"):
        assert sluice.load_safetensors(model, tmp_path / "file") == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.device("meta"):
        ours.load_checkpoint(folder)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).device.type == "cpu"
    assert_still_right(pair)


class Wider(Tiny):
    def __init__(self, **options):
        super().__init__(**options)
        self.extra = torch.nn.Linear(3, 3)
        self.register_buffer("count", torch.tensor([1]))


def test_files_that_lack_something(config, tmp_path):
    torch.manual_seed(3)
    model = Wider()
    optimizer = sluice.offload(model, config, units=[Block])
    before = model.state_dict()
    small = tiny(seed=4)
    saver = sluice.offload(copy.deepcopy(small), {**config, "storage": {"paths": [str(tmp_path)]}}, units=[Block])
    sluice.save_safetensors(saver._walk.model, tmp_path / "small")
    saver.close()
    with pytest.raises(sluice.ArgumentError, match="no extra.weight, extra.bias; nothing was loaded"):
        sluice.load_safetensors(model, tmp_path / "small")
    assert sluice.load_safetensors(model, tmp_path / "small", strict=False) == ["extra.weight", "extra.bias"]
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in small.state_dict().items())
    assert torch.equal(state["extra.weight"], before["extra.weight"])
    with pytest.raises(sluice.ArgumentError, match="not offloaded"):
        sluice.load_safetensors(small, tmp_path / "small")
    narrow = tiny(width=16)
    narrow_optimizer = sluice.offload(narrow, config, units=[Block])
    with pytest.raises(sluice.ArgumentError, match=r"positions has shape \(12, 32\) in .*, but \(12, 16\) in the model; nothing was loaded"):
        sluice.load_safetensors(narrow, tmp_path / "small")
    for one in (optimizer, narrow_optimizer):
        one.close()


def test_bf16_masters_keep_what_fp32_values_say(config):
    config["precision"] = {"parameters": "bf16"}
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    other = tiny(seed=9)
    model.load_state_dict(other.state_dict())
    engine = optimizer._engine
    for unit in optimizer._walk.units.units:
        for member in unit.members:
            assert torch.equal(engine.read(member, 1), other.state_dict()[member.name]), member.name
    optimizer.close()


def test_a_durable_store_refuses(config):
    config["storage"]["state"] = {"name": "kept"}
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    with pytest.raises(sluice.SluiceError, match='"kept"'):
        model.load_state_dict(tiny(seed=1).state_dict())
    optimizer.close()


class Copies(TorchDispatchMode):
    """The shapes of all copies in another type or place."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("is_transposed", [False, True])
def test_no_tensor_is_copied_on_its_way_to_the_engine(config, is_transposed):
    model = tiny().to(torch.bfloat16)
    if is_transposed:  # is copied, and has the same values
        model.positions.data = model.positions.data.t().contiguous().t()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    with Copies() as copies:
        optimizer = sluice.offload(model, config, units=[Block])
    assert [shape for shape in copies.shapes if len(shape) == 2] == [(12, 32)] * is_transposed
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    optimizer.close()


def test_a_gpu_converts_its_values(monkeypatch):
    """Torch would bring them over as they are, and convert them in memory of the CPU that it makes for that."""
    class OnGpu:
        device = torch.device("cuda", 0)

        def __init__(self, *numbers):
            self.numbers = numbers

        def split(self, count):
            return [OnGpu(*self.numbers[i:i + count]) for i in range(0, len(self.numbers), count)]

        def to(self, dtype):
            assert dtype == torch.float32 and len(self.numbers) <= 2
            return torch.tensor(self.numbers)
    monkeypatch.setattr(structures, "PIECE", 2)
    target = torch.zeros(3)
    structures.copy_values(OnGpu(1.5, 2.5, 3.5), target)
    assert target.tolist() == [1.5, 2.5, 3.5]
