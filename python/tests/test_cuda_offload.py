"""Whole models on a GPU under offload(). Skipped without a GPU; fake_gpu.py lets the CPU play its part."""

import copy
import logging
import os

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, Tiny, adamw, batch, hidden, tiny, worst
from sluice_offload import gpus
from test_activations import Checkpointed

IS_FAKE = "SLUICE_TEST_FAKE_GPU" in os.environ
DEVICE = "cpu" if IS_FAKE else "cuda"  # of torch's tensors

if not IS_FAKE and (not torch.cuda.is_available() or gpus.why_not(0)):
    pytest.skip("no GPU that torch and Sluice can use", allow_module_level=True)

needs_cuda = pytest.mark.skipif(IS_FAKE, reason="needs CUDA's own streams and kernels")


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch):
    if IS_FAKE:
        import fake_gpu
        for where, name, value in fake_gpu.patches():
            monkeypatch.setattr(where, name, value)


def offloaded(model, config, **options):
    return sluice.offload(model, config, units=[Block], device="cuda", **options)


def steps(model, optimizer, first, last, clip_norm=0.0):
    """The losses. `clip_norm`: torch clips to it; the engine does it by itself."""
    losses = []
    for step in range(first, last):
        tokens, labels = (x.to(DEVICE) for x in batch(step))
        loss = model(tokens, labels)
        loss.backward()
        losses.append(loss.item())
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("storage", ["swap", "poke"])
def test_follows_torch(config, storage):
    if storage == "swap" and not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        pytest.skip(f"torch {torch.__version__} has no _swap_data_ptr_")
    model = tiny(width=64, layers=4)
    reference = copy.deepcopy(model).to(DEVICE)
    optimizer = offloaded(model, config, storage=storage)
    assert next(model.parameters()).device.type == DEVICE
    expected = steps(reference, adamw(reference, config), 0, 20, clip_norm=1.0)
    assert worst(steps(model, optimizer, 0, 20), expected) <= 2e-5
    read, written = optimizer._engine.predicted_traffic()
    assert optimizer.report.schedule_changes == 0
    assert optimizer.report.nvme_read_bytes == read > 0 and optimizer.report.nvme_write_bytes == written > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_placements_and_policies_give_the_same_bits(config, dtype):
    config["precision"] = {"parameters": dtype}
    expected = None
    # "cpu" and "device" update the state in host memory and on storage.
    for placement, update_on in (("nvme", "cpu"), ("nvme", "device"), ("host", "cpu"), ("host", "device"), ("device", "cpu")):
        for overlap in ("serial", "deferred", "speculative"):
            settings = copy.deepcopy(config)
            settings["optimizer"].update(overlap=overlap, update_on=update_on)
            settings["placement"] = {"parameters": placement, "optimizer": placement}
            settings["memory"] = {"device": "16MiB", "host": "16MiB"}
            model = tiny()
            optimizer = offloaded(model, settings)
            losses = steps(model, optimizer, 0, 6)
            bits = losses, {name: value.tolist() for name, value in model.state_dict().items()}
            optimizer.close()
            expected = expected or bits
            assert bits == expected, (placement, overlap)


def test_checkpoints_of_the_cpu_go_on(config, tmp_path):
    """Saved on the GPU and restored there: the same bits. Parameters are read meanwhile, by a copy and by an evaluation."""
    whole, halves = tiny(), tiny()
    one = offloaded(whole, config)
    expected = steps(whole, one, 0, 6)
    two = offloaded(halves, copy.deepcopy(config))
    actual = steps(halves, two, 0, 3)
    with sluice.gathered(halves):
        assert all(torch.equal(p.cpu(), value) for p, value in zip(halves.parameters(), halves.state_dict().values()))
    assert hidden(halves.blocks[0].norm.weight), "outside of gathered() they are poison"
    two.save(tmp_path / "saved")
    two.close()
    again = tiny(seed=3)
    three = offloaded(again, copy.deepcopy(config), restore=tmp_path / "saved" / "latest")
    with torch.no_grad():
        again(*(x.to(DEVICE) for x in batch(99)))
    assert actual + steps(again, three, 3, 6) == expected


def test_two_types_in_one_model(config):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.exact, self.rounded = nn.Linear(16, 16), nn.Linear(16, 16).to(torch.bfloat16)

        def forward(self, x):
            return self.rounded(self.exact(x).to(torch.bfloat16)).float().square().mean()

    model, reference = nn.Sequential(Cast()), nn.Sequential(Cast())
    ours = sluice.offload(model, config, units=[Cast], device="cuda")
    theirs = sluice.offload(reference, {**copy.deepcopy(config), "placement": {"parameters": "host", "optimizer": "host"}}, units=[Cast],
                            device="cuda")
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        losses = []
        for trained, optimizer in ((model, ours), (reference, theirs)):
            loss = trained(x)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] == losses[1]
    assert model[0].rounded.weight.dtype == torch.bfloat16
    ours._engine.drain()
    weight = next(m for unit in ours._walk.units.units for m in unit.members if m.name.endswith("rounded.weight"))
    ours._engine.replace(lambda member: torch.full((16, 16), 3.4e38), [weight])  # infinite in bf16
    with pytest.raises(sluice.NonFiniteError, match="no finite number"):  # on the CPU in forward, on a GPU in step()
        model(x).backward()
        ours.step()


def test_the_budget_has_a_default_and_buffers_move(config, caplog, tmp_path):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("shift", torch.ones(8))

        def forward(self, x):
            return self.linear(x) + self.shift

    del config["memory"]["device"]
    model = Shifted()
    with caplog.at_level(logging.INFO, "sluice_offload"):
        optimizer = sluice.offload(model, config, device="cuda")
    assert "half of what" in caplog.text and model.shift.device.type == DEVICE
    assert model.to(DEVICE) is model
    model(torch.ones(2, 8, device=DEVICE)).sum().backward()
    optimizer.step()
    folder = optimizer.save(tmp_path / "saved")
    model.shift.add_(1)
    optimizer.load_checkpoint(folder)
    assert model.shift.tolist() == [1.0] * 8 and model.shift.device.type == DEVICE
    with pytest.raises(sluice.ArgumentError, match="before offload"):
        model.half()


def test_what_is_refused(config):
    with pytest.raises(sluice.ArgumentError, match="on the CPU or on an NVIDIA GPU"):
        gpus.place_on(torch.device("meta"))
    with pytest.raises(sluice.ArgumentError, match=f"cuda:77 cannot be used: torch sees {torch.cuda.device_count()} GPUs"):
        gpus.place_on(torch.device("cuda", 77))


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("kind", [Tiny, Checkpointed])
def test_activations_elsewhere(config, kind, home):
    """The bits are those of activations that stay on the GPU, also where tensors are large enough that copies take their time."""
    if IS_FAKE and home == "host":
        pytest.skip("the stand-in's memory is the host's")
    config["memory"] = {"device": "64MiB", "host": "64MiB"}
    torch.manual_seed(0)
    reference = kind(width=256, layers=8)
    model = copy.deepcopy(reference)
    expected, optimizer = offloaded(reference, config), offloaded(model, {**config, "activations": home})
    for step in range(6):
        losses = []
        for net, made in ((reference, expected), (model, optimizer)):
            tokens, labels = (x.to(DEVICE) for x in batch(step, rows=64))
            loss = net(tokens, labels)
            loss.backward()
            made.step()
            made.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1], step
    assert expected.gradient_norm == optimizer.gradient_norm
    assert all(torch.equal(one, other) for one, other in zip(reference.state_dict().values(), model.state_dict().values()))
    store = optimizer.activations
    assert store.written_bytes >= store.read_bytes > 0 and (IS_FAKE or store.gpu is not None)


def test_ranks_get_the_text_of_the_first(config, monkeypatch):
    monkeypatch.delenv("NCCL_LOCAL_REGISTER", raising=False)
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    class World:
        size = 2

        def __init__(self, rank, told):
            self.rank, self.told = rank, told

        def exchange(self, own):
            return [own if self.told is None else self.told, ["", ""]]

    engine = offloaded(tiny(), config)._engine
    second = engine._gpu_ranks(World(1, ["ab" * 128, ""]))
    assert (os.environ["NCCL_LOCAL_REGISTER"], os.environ["NCCL_RUNTIME_CONNECT"]) == ("0", "1")
    assert (second.id, second.rank, second.rank_count) == (b"ab" * 128, 1, 2)
    with pytest.raises(sluice.RanksError, match="rank 0 cannot begin to connect the GPUs: no NCCL"):
        engine._gpu_ranks(World(1, ["", "no NCCL"]))


@needs_cuda
def test_parameters_in_two_places_are_refused(config):
    model = tiny()
    model.head.to("cuda")
    with pytest.raises(sluice.ArgumentError, match='device="cuda:0"'):
        sluice.offload(model, config, units=[Block])
    with pytest.raises(sluice.ArgumentError, match='storage="copy" is for the CPU'):
        offloaded(tiny(), config, storage="copy")


@needs_cuda
def test_a_stream_of_the_programs_own(config):
    """Late work: a unit's lease ends behind it, and its gradient is used when it is there."""
    plain, tried = tiny(), tiny()
    one, two = offloaded(plain, config), offloaded(tried, copy.deepcopy(config))
    for module in tried.blocks:
        module.register_forward_hook(lambda *_: torch.cuda._sleep(10_000_000))
    expected = steps(plain, one, 0, 4)
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        assert steps(tried, two, 0, 4) == expected
