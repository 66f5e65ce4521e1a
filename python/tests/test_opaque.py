"""Frozen weights of other types beside trained ones: quantized bytes, as parameters and as buffers. Their bits stay, and nothing
but them moves."""

import copy

import pytest
import torch
from conftest import adamw, hidden, worst
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice_offload as sluice

WIDTH = 64


class Int4Linear(nn.Module):
    """Two weights of 4 bits in each byte, and a scale per row; `kind` says how the module keeps them."""

    def __init__(self, inputs, outputs, kind):
        super().__init__()
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        scales = (torch.rand(outputs, 1) * 0.02).to(torch.float16)
        if kind == "parameters":
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.scales = nn.Parameter(scales, requires_grad=False)
        else:
            self.register_buffer("codes", codes)
            self.register_buffer("scales", scales)

    def forward(self, x):
        weight = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1).float() - 7.5
        return nn.functional.linear(x, weight * self.scales)


class Adapted(nn.Module):
    def __init__(self, kind, dtype):
        super().__init__()
        self.base = Int4Linear(WIDTH, WIDTH, kind)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float32)
        self.norm.weight.requires_grad_(False)  # of the trained ones' type, or of another
        self.norm.bias.requires_grad_(False)
        self.down = nn.Parameter((torch.randn(4, WIDTH) * 0.1).to(dtype))
        self.up = nn.Parameter((torch.randn(WIDTH, 4) * 0.1).to(dtype))

    def forward(self, x):
        h = self.norm(x.float())
        return x + self.base(h).to(x.dtype) + h.to(x.dtype) @ self.down.T @ self.up.T


def model_of(kind="parameters", dtype=torch.float32):
    torch.manual_seed(5)
    return nn.Sequential(*(Adapted(kind, dtype) for _ in range(6)))


def settings(config, overlap="serial"):
    config["optimizer"] = {"clip_norm": 1.0, "weight_decay": 0.0, "beta2": 0.999, "overlap": overlap}
    config["memory"] = {"device": "40KiB", "host": "200KiB"}
    config["storage"]["block_elements"] = 4096
    return config


def losses_of(model, optimizer, steps, clips):
    generator = torch.Generator().manual_seed(2)
    found = []
    dtype = model[0].down.dtype
    for _ in range(steps):
        x = torch.randn(8, WIDTH, generator=generator).to(dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", ["parameters", "buffers"])
@pytest.mark.parametrize("storage", ["swap", "poke", "copy"])
def test_a_quantized_base_keeps_its_bits_and_adapters_train_as_in_torch(kind, storage, config):
    plain = model_of(kind)
    model = copy.deepcopy(plain)
    buffers = () if kind == "parameters" else ("*.codes", "*.scales")
    try:
        optimizer = sluice.offload(model, settings(config), units=[Adapted], lr=1e-2, buffers=buffers, storage=storage)
    except sluice.ArgumentError as error:
        if "does not have" not in str(error):
            raise
        pytest.skip(str(error))
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)
    before = {name: values.clone() for name, values in plain.state_dict().items() if "base" in name}
    assert worst(losses_of(model, optimizer, 20, False), losses_of(plain, theirs, 20, True)) <= 2e-6
    assert optimizer.report.schedule_changes == 0
    assert (optimizer.report.nvme_read_bytes, optimizer.report.nvme_write_bytes) == optimizer._engine.predicted_traffic()
    # Forward and backward read each unit once; 4 KiB is the unit of storage. The trained ones are written, too.
    codes, scales = WIDTH * WIDTH // 2, 2 * WIDTH
    assert optimizer.report.nvme_read_bytes >= 2 * 5 * (codes + scales)
    found = model.state_dict()
    assert found.keys() == plain.state_dict().keys()
    for name, values in before.items():
        assert same_bits(found[name], values), name
    with sluice.gathered(model):
        assert same_bits(model[2].base.codes, before["2.base.codes"])
    assert hidden(model[2].base.codes)  # outside: poison
    optimizer.close()


def test_only_the_bytes_move(config):
    def bytes_of(dtype):
        model = model_of()
        for block in model:
            block.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) if dtype is None else block.base
        optimizer = sluice.offload(model, {**settings(config), "memory": {"device": "80KiB", "host": "200KiB"}}, units=[Adapted],
                                   lr=1e-2)
        losses_of(model, optimizer, 3, False)
        read = optimizer.report.nvme_read_bytes
        assert read == optimizer._engine.predicted_traffic()[0]
        optimizer.close()
        return read

    # Beside the same norms and adapters, fp32 weights take 16 KiB for each of at most 12 reads, codes and scales 4.
    assert 9 * 12288 <= bytes_of(None) - bytes_of(torch.uint8) <= 12 * 12288


class Quantized(nn.Module):
    """Three units: opaque ones, frozen ones and trained ones."""

    def __init__(self, hidden, width=16):
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-9, 9, (hidden, width), dtype=torch.int8), requires_grad=False)
        self.down = nn.Parameter(torch.randn(width, hidden) * 0.02, requires_grad=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.norm(x) @ self.codes.float().T * 0.05) @ self.down.T


@pytest.mark.parametrize("sizes, style", [((100, 300, 100, 300), "two"), ((100, 300, 100, 300), "evaluation"),
                                          ((100,) * 4, "between"), ((300, 100, 40, 16), "checkpoint")])
def test_three_units_of_a_module_find_room_in_any_order(config, sizes, style):
    torch.manual_seed(0)
    reference = nn.Sequential(*map(Quantized, sizes))
    model = copy.deepcopy(reference)
    config["memory"] = {"device": "64MiB", "host": "64MiB"}
    optimizer = sluice.offload(model, config, units=[Quantized])
    torchs = adamw(reference, config)
    losses = {}
    for net, update in ((reference, torchs), (model, optimizer)):
        found = losses[net] = []
        for step in range(3):
            x = torch.randn(6, 16, generator=torch.Generator().manual_seed(step))
            for _ in range(2 if style == "two" else 1):
                y = checkpoint(net, x, use_reentrant=False) if style == "checkpoint" else net(x)
                if style == "between":
                    with torch.no_grad():
                        net(x)
                y.square().mean().backward()
                found.append(y.square().mean().item())
            if style == "evaluation":
                with torch.no_grad():
                    net(x)
            if net is reference:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            update.step()
            update.zero_grad()
    assert worst(losses[model], losses[reference]) <= 2e-6
    optimizer.close()


def losses_in_order(modules, update, orders, clips=False):
    """The losses of one step for each order of the modules. Sluice's optimizer clips by itself, and torch's does not."""
    found = []
    for order in orders:
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(len(found)))
        for at in order:
            x = modules[at](x)
        x.square().mean().backward()
        found.append(x.square().mean().item())
        if clips:
            torch.nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        update.step()
        update.zero_grad(set_to_none=False)
    return found


def test_the_host_as_device_finds_room_in_any_order(config):
    """The model's second step goes from a small module to the largest one, which its first step has kept apart."""
    torch.manual_seed(0)
    reference = nn.ModuleList(map(Quantized, (600, 64, 16, 16)))
    model = copy.deepcopy(reference)
    config["memory"] = {"device": "64MiB", "host": "64MiB", "unified": "auto"}
    optimizer = sluice.offload(model, config, units=[Quantized])
    orders = ((0, 1, 2, 3), (3, 0, 1, 3), (3, 0, 1, 3))
    expected = losses_in_order(reference, adamw(reference, config), orders, clips=True)
    assert worst(losses_in_order(model, optimizer, orders), expected) <= 2e-6
    optimizer.close()


class Wide(nn.Module):
    def __init__(self, hidden, has_frozen):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, 16) / 20)
        self.bias = nn.Parameter(torch.ones(16), requires_grad=not has_frozen)

    def forward(self, x):
        return x + torch.tanh(x @ self.weight.T) @ self.weight + self.bias


def test_leases_of_modules_that_are_over_make_room(config):
    """Backward comes from one large unit to another, which the order of the model keeps apart, in the smallest window."""
    torch.manual_seed(0)
    reference = nn.ModuleList(Wide(hidden, has_frozen) for hidden, has_frozen in ((512, False), (16, True), (512, False), (16, True)))
    model = copy.deepcopy(reference)
    config["memory"]["device"] = "4KiB"
    with pytest.raises(sluice.OutOfMemoryError, match="the smallest that works is") as refused:
        sluice.offload(copy.deepcopy(reference), config, units=[Wide])
    config["memory"]["device"] = str(refused.value).split("the smallest that works is \"")[1].split("\"")[0]
    optimizer = sluice.offload(model, config, units=[Wide])
    orders = ((0, 2, 1, 3),) * 3
    expected = losses_in_order(reference, adamw(reference, config), orders, clips=True)
    assert worst(losses_in_order(model, optimizer, orders), expected) <= 2e-6
    optimizer.close()


def test_types_of_trained_and_frozen_parameters_differ(config):
    """bf16 adapters beside fp32 norms and bytes: no frozen parameter is rounded."""
    plain = model_of(dtype=torch.bfloat16)
    with torch.no_grad():
        for block in plain:
            block.norm.weight.mul_(1 + 2.0**-20)
    model = copy.deepcopy(plain)
    optimizer = sluice.offload(model, settings(config), units=[Adapted], lr=1e-2)
    with torch.no_grad():
        x = torch.randn(3, WIDTH).bfloat16()
        assert torch.equal(model(x), plain(x))
    losses_of(model, optimizer, 3, False)
    found = model.state_dict()
    assert found["0.norm.weight"].dtype == torch.float32 and found["0.up"].dtype == torch.bfloat16
    for name, values in plain.state_dict().items():
        if "norm" in name or "base" in name:
            assert same_bits(found[name], values), name
    optimizer.close()


def test_files_checkpoints_and_other_values(config, tmp_path):
    model = model_of("buffers")
    optimizer = sluice.offload(model, settings(config), units=[Adapted], lr=1e-2, buffers=["*.codes", "*.scales"])
    losses_of(model, optimizer, 2, False)
    first = model.state_dict()
    sluice.save_safetensors(model, tmp_path / "files")
    optimizer.save(tmp_path / "run")
    losses = losses_of(model, optimizer, 3, False)

    other = model_of("buffers")
    with torch.no_grad():
        for block in other:
            block.base.codes.zero_()
    state = other.state_dict()
    model.load_state_dict(state)
    assert all(same_bits(values, state[name]) for name, values in model.state_dict().items())
    sluice.load_safetensors(model, tmp_path / "files")
    assert all(same_bits(values, first[name]) for name, values in model.state_dict().items())
    optimizer.close()

    resumed = sluice.offload(other, settings(config), units=[Adapted], lr=1e-2, buffers=["*.codes", "*.scales"],
                             restore=tmp_path / "run" / "latest")
    assert all(same_bits(values, first[name]) for name, values in other.state_dict().items())
    assert losses_of(other, resumed, 3, False) == losses
    resumed.close()


def test_a_model_on_the_meta_device(config, tmp_path):
    source = model_of()
    values = source.state_dict()
    with torch.device("meta"):
        model = nn.Sequential(*(Adapted("parameters", torch.float32) for _ in range(6)))
    optimizer = sluice.offload(model, settings(config), units=[Adapted], lr=1e-2, values=values)
    assert all(same_bits(found, values[name]) for name, found in model.state_dict().items())
    with torch.no_grad():
        x = torch.randn(3, WIDTH)
        assert torch.equal(model(x), source(x))
    optimizer.close()
    with torch.device("meta"):
        model = nn.Sequential(*(Adapted("parameters", torch.float32) for _ in range(6)))
    values["1.base.codes"] = values["1.base.codes"].to(torch.int8)
    with pytest.raises(sluice.ArgumentError, match="1.base.codes are of torch.int8, but it is of torch.uint8"):
        sluice.offload(model, settings(config), units=[Adapted], lr=1e-2, values=values)


def test_what_cannot_move_is_refused(config):
    with pytest.raises(sluice.ArgumentError, match=r"'\*.zeros' names no buffer; the model has \['0.base.codes'"):
        sluice.offload(model_of("buffers"), config, units=[Adapted], buffers=["*.codes", "*.zeros"])


def shared_model():
    """Two quantized layers with one table, which is a buffer of both."""
    model = model_of("buffers")
    model[3].base._buffers["scales"] = model[2].base.scales
    return model


def test_a_buffer_of_two_modules_is_saved_once_with_its_values(config, tmp_path):
    model = shared_model()
    scales = model[2].base.scales.clone()
    optimizer = sluice.offload(model, settings(config), units=[Adapted], lr=1e-2, buffers=["*.codes", "*.scales"])
    sluice.save_safetensors(model, tmp_path / "files")
    values = sluice.open_safetensors(tmp_path / "files")
    assert same_bits(values["2.base.scales"], scales) and "3.base.scales" not in values
    assert [name for name, _ in sluice.named_values(model)].count("2.base.scales") == 1
    optimizer.close()


def test_initialize_leaves_buffers_alone(config):
    model = model_of("buffers")
    for block in model:
        block.register_buffer("own", torch.ones(3))
    before = {name: values.clone() for name, values in model.state_dict().items() if "base" in name}
    sections = settings(config)
    deepspeed = {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True},
                 "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": sections["storage"]["paths"][0]},
                                       "offload_optimizer": {"device": "nvme", "nvme_path": sections["storage"]["paths"][0]}},
                 "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, optimizer, *_ = sluice.initialize(model=model, config=deepspeed, units=[Adapted], buffers=["*.codes", "*.scales"])
    assert model[1].own.dtype == torch.float32 and model[1].base.scales.dtype == torch.float16
    found = model.state_dict()
    assert all(same_bits(found[name], values) for name, values in before.items())
    engine.destroy()


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_checkpoint_of_the_same_bytes_in_another_shape_or_type_is_refused(config, tmp_path, change, is_long, monkeypatch):
    """Also where there are too many tensors for the text that goes with a checkpoint."""
    monkeypatch.setattr("sluice_offload.optimizer._OPAQUE_TEXT_MAX", 100 if is_long else 64 << 10)

    def changed():
        other = model_of()
        for block in other:
            codes = block.base.codes
            values = codes.reshape(WIDTH // 2, WIDTH) if change == "shape" else codes.view(torch.int8)
            block.base.codes = nn.Parameter(values.clone(), requires_grad=False)
        return other

    optimizer = sluice.offload(model_of(), settings(config), units=[Adapted], lr=1e-2)
    folder = optimizer.save(tmp_path / "run")
    optimizer.load_checkpoint(folder)  # the same model has it
    optimizer.close()
    pattern = r"0.base.codes as torch.uint8 of shape \(64, 32\), but the model as torch.*make the model as it was saved"
    if is_long:
        pattern = "opaque tensors .* of other types or shapes than the model.*make the model as it was saved"
    with pytest.raises(sluice.ArgumentError, match=pattern):
        sluice.offload(changed(), settings(config), units=[Adapted], lr=1e-2, restore=folder)
    other = changed()
    optimizer = sluice.offload(other, settings(config), units=[Adapted], lr=1e-2)
    before = other.state_dict()
    with pytest.raises(sluice.ArgumentError, match=pattern):
        optimizer.load_checkpoint(folder)
    assert all(same_bits(values, before[name]) for name, values in other.state_dict().items())
    optimizer.close()


@pytest.mark.parametrize("saved, own, words", [
    ("none", "named", r"this one has a 0.codes of shape \[2\], in opaque words, and the checkpoint has none"),
    ("named", "none", r"it has a 0.codes of shape \[2\], in opaque words, and this one has none"),
    ("named", "longer", r"a 0.codes of shape \[4\], in opaque words, and the checkpoint has one of shape \[2\], in opaque words"),
    ("parameter", "named", r"a 0.codes of shape \[2\], in opaque words, and the checkpoint has one of shape \[2\]"),
    ("named", "bf16", "was saved with precision.parameters \"fp32\", and the words of 0.codes, which is opaque, have another size")])
def test_a_checkpoint_of_other_opaque_tensors_changes_nothing(config, tmp_path, monkeypatch, saved, own, words):
    monkeypatch.setattr("sluice_offload.optimizer.OffloadOptimizer._require_same_opaque", lambda *_: None)  # texts of other programs

    def make(kind):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.bfloat16 if kind == "bf16" else torch.float32)
        if kind == "parameter":
            model[0].codes = nn.Parameter(torch.zeros(2), requires_grad=False)
        elif kind != "none":
            model[0].register_buffer("codes", torch.arange(16 if kind == "longer" else 8, dtype=torch.uint8))
        return model, sluice.offload(model, {"optimizer": {"clip_norm": 1.0}}, lr=1e-2, buffers=["*.codes"] if hasattr(
            model[0], "codes") and kind != "parameter" else ())

    _, optimizer = make(saved)
    folder = optimizer.save(tmp_path)
    optimizer.close()
    model, optimizer = make(own)
    before = model.state_dict()
    with pytest.raises(sluice.ArgumentError, match=f"{words}.*the state is as before"):
        optimizer.load_checkpoint(folder, convert=own == "bf16")
    assert all(same_bits(values, before[name]) for name, values in model.state_dict().items())
    optimizer.close()


def test_values_of_another_type_are_refused_before_anything_is_loaded(config, tmp_path):
    model = model_of()
    optimizer = sluice.offload(model, settings(config), units=[Adapted], lr=1e-2)
    before = model.state_dict()
    other = {name: values + 1 if values.is_floating_point() else values for name, values in before.items()}
    other["5.base.codes"] = other["5.base.codes"].to(torch.int16)
    with pytest.raises(sluice.ArgumentError, match="5.base.codes is of torch.int16 in the state_dict, but of torch.uint8.*nothing was loaded"):
        model.load_state_dict(other, assign=True)
    assert all(same_bits(values, before[name]) for name, values in model.state_dict().items())
    sluice.save_safetensors(model, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"5.base.codes": {"dtype": "U8"', b'"5.base.codes": {"dtype": "I8"'))
    assert sluice.open_safetensors(tmp_path)["5.base.codes"].dtype == torch.int8
    losses_of(model, optimizer, 1, False)
    before = model.state_dict()
    with pytest.raises(sluice.ArgumentError, match="5.base.codes is of torch.int8 in .*, but of torch.uint8.*nothing was loaded"):
        sluice.load_safetensors(model, tmp_path)
    assert all(same_bits(values, before[name]) for name, values in model.state_dict().items())
    optimizer.close()


def test_complex_parameters_are_frozen_or_refused(config):
    model = model_of()
    model[1].turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(sluice.ArgumentError, match="1.turn is of torch.complex64 and requires a gradient.*view_as_real"):
        sluice.offload(model, settings(config), units=[Adapted], lr=1e-2)
    model[1].turn.requires_grad_(False)
    optimizer = sluice.offload(model, settings(config), units=[Adapted], lr=1e-2)
    assert torch.equal(model.state_dict()["1.turn"], torch.ones(3, dtype=torch.complex64))
    optimizer.close()
