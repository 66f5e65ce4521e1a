"""Parameters on a GPU under sluice_offload.optim: the bits of parameters in the CPU's memory.

Skipped without a GPU. With SLUICE_TEST_FAKE_GPU, the library that SLUICE_LIBRARY names has a stand-in for the CUDA runtime, and the
tensors given to on_gpu() play those of a GPU: everything runs but CUDA itself and torch's kernels."""

import copy
import csv
import os
import shutil
import subprocess

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from sluice_offload import gpus

IS_FAKE = "SLUICE_TEST_FAKE_GPU" in os.environ
PLAYERS = {}  # the tensors that play those of a GPU, by id; they stay alive

if not IS_FAKE and (not torch.cuda.is_available() or gpus.why_not(0)):
    pytest.skip("no GPU that torch and Sluice can use", allow_module_level=True)

COMMAND = os.environ.get("SLUICE_COMMAND") or shutil.which("sluice")
needs_command = pytest.mark.skipif(not COMMAND, reason="the command `sluice` is not here, and SLUICE_COMMAND does not name it")
needs_cuda = pytest.mark.skipif(IS_FAKE, reason="needs CUDA's own streams and kernels")


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch):
    if IS_FAKE:
        monkeypatch.setattr(gpus, "gpu_of", lambda tensor: 0 if id(tensor) in PLAYERS else None)
        import fake_gpu as stand_in
        monkeypatch.setattr(gpus, "current_stream", lambda gpu: stand_in.stream())
    yield
    PLAYERS.clear()


def on_gpu(made):
    """A copy of a module or tensor on the GPU."""
    if not IS_FAKE:
        if isinstance(made, nn.Parameter):  # to() alone would give a tensor that is no leaf
            return nn.Parameter(made.detach().to("cuda"))
        return copy.deepcopy(made).to("cuda")
    copied = copy.deepcopy(made)
    for tensor in copied.parameters() if isinstance(copied, nn.Module) else [copied]:
        PLAYERS[id(tensor)] = tensor
    return copied


def config_of(place, folder):
    return {"placement": {"optimizer": place}, "memory": {"host": "256MiB"}, "storage": {"paths": [str(folder)]}}


def model_of(dtype):
    torch.manual_seed(5)
    # One tensor of several blocks on storage, a small one, and one without elements.
    model = nn.Sequential(nn.Linear(600, 900), nn.GELU(), nn.Linear(900, 600), nn.LayerNorm(600))
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
    return model.to(dtype)


def set_gradients(models, seed):
    """The same gradients on every model, made on torch's current stream."""
    generator = torch.Generator().manual_seed(seed)
    for parameters in zip(*(model.parameters() for model in models)):
        values = torch.randn(parameters[0].shape, generator=generator) * 0.1
        for p in parameters:
            p.grad = values.to(p.device, p.dtype)


def same_bits(one, other):
    return torch.equal(one.detach().cpu(), other.detach().cpu())


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion", "Adagrad", "SGD"])
def test_bits_are_those_of_the_cpu(name, dtype, place, tmp_path):
    on_cpu = model_of(dtype)
    remote = on_gpu(on_cpu)
    extra = {"momentum": 0.9} if name == "SGD" else {}
    optimizers = [getattr(sluice.optim, name)(model.parameters(), lr=1e-2, config=config_of(place, tmp_path), **extra)
                  for model in (on_cpu, remote)]
    for step in range(4):
        set_gradients((on_cpu, remote), step)
        if step == 2:  # the program changes a parameter
            for model in (on_cpu, remote):
                with torch.no_grad():
                    model[0].weight[3, :7] = 0.25
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(on_cpu.parameters(), remote.parameters()):
            assert q.is_cuda != IS_FAKE and same_bits(p, q)
    for p, q in zip(on_cpu.parameters(), remote.parameters()):
        assert all(same_bits(optimizers[0].state[p][key], optimizers[1].state[q][key]) for key in optimizers[0].state[p])
    assert optimizers[0].report.adopted_elements == optimizers[1].report.adopted_elements
    assert (optimizers[1].report.nvme_read_bytes > 0) == (place == "nvme")


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_moments_in_fewer_bits(state, tmp_path):
    on_cpu = model_of(torch.bfloat16)
    remote = on_gpu(on_cpu)
    config = {**config_of("nvme", tmp_path), "optimizer": {"state": state}}
    optimizers = [sluice.optim.AdamW(model.parameters(), lr=1e-2, config=config) for model in (on_cpu, remote)]
    for step in range(3):
        set_gradients((on_cpu, remote), step)
        for optimizer in optimizers:
            optimizer.step()
    assert all(same_bits(p, q) for p, q in zip(on_cpu.parameters(), remote.parameters()))


@pytest.mark.parametrize("gradients, overlap, clip_norm", [("step", None, 0.5), ("backward", None, None), ("backward", None, 0.5),
                                                           ("step", "forward", 0.5), ("backward", "forward", None)])
def test_modes_have_the_same_bits(gradients, overlap, clip_norm, tmp_path):
    """A model trained with its state in host memory, step by step, and the same with the mode and its state on NVMe."""
    plain = on_gpu(model_of(torch.float32))
    tried = on_gpu(plain)
    one = sluice.optim.AdamW(plain.parameters(), lr=1e-3, clip_norm=clip_norm, config=config_of("host", tmp_path))
    two = sluice.optim.AdamW(tried.parameters(), lr=1e-3, clip_norm=clip_norm, config=config_of("nvme", tmp_path),
                             gradients=gradients, overlap=overlap, modules=tried if overlap else None)
    for step in range(5):
        x = torch.randn(64, 600, generator=torch.Generator().manual_seed(step)).to(plain[0].weight.device)
        losses = []
        for model, optimizer in ((plain, one), (tried, two)):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        if clip_norm is not None:
            assert one.gradient_norm == two.gradient_norm > 0
    two.synchronize()
    assert all(same_bits(p, q) for p, q in zip(plain.parameters(), tried.parameters()))


def test_follows_torchs_adamw():
    torch.manual_seed(1)
    plain = on_gpu(nn.Linear(300, 200))
    tried = on_gpu(plain)
    one = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    two = sluice.optim.AdamW(tried.parameters(), lr=1e-3, weight_decay=0.1)
    begin = plain.weight.detach().clone()
    for step in range(20):
        x = torch.randn(32, 300, device=plain.weight.device)
        for model, optimizer in ((plain, one), (tried, two)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    moved = (plain.weight - begin).norm()
    assert (plain.weight - tried.weight).norm() <= 1e-5 * moved


@needs_cuda
@pytest.mark.parametrize("stream", ["default", "own"])
def test_waits_for_the_programs_stream(stream):
    """A gradient that is made late is used, and what comes after step() sees the new values."""
    p = nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    optimizer = sluice.optim.SGD([p], lr=1.0)
    own = torch.cuda.Stream() if stream == "own" else torch.cuda.default_stream()
    own.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(own):
        for step in range(1, 6):
            gradient = torch.zeros_like(p)
            torch.cuda._sleep(20_000_000)  # about 10 ms
            gradient.fill_(-1.0)
            p.grad = gradient
            optimizer.step()
            assert (p.detach() == step).all().item()


def test_parameters_on_both(tmp_path):
    local = nn.Parameter(torch.ones(50_000))
    remote = on_gpu(local)
    optimizer = sluice.optim.AdamW([local, remote], config=config_of("nvme", tmp_path))
    for step in range(3):
        local.grad = torch.full((50_000,), 0.5 + step)
        remote.grad = local.grad.to(remote.device)
        optimizer.step()
    assert same_bits(local, remote) and not same_bits(local, torch.ones(50_000))


def test_parameters_that_are_not_contiguous():
    p = on_gpu(nn.Parameter(torch.randn(40, 30).t()))
    q = on_gpu(nn.Parameter(p.detach().contiguous()))
    for x in (p, q):
        optimizer = sluice.optim.AdamW([x])
        x.grad = torch.ones_like(x)
        optimizer.step()
    assert not p.is_contiguous() and same_bits(p, q)


def test_a_state_dict_goes_on(tmp_path):
    whole, halves = on_gpu(model_of(torch.bfloat16)), on_gpu(model_of(torch.bfloat16))
    one = sluice.optim.AdamW(whole.parameters(), lr=1e-2)
    two = sluice.optim.AdamW(halves.parameters(), lr=1e-2)
    for step in range(6):
        if step == 3:
            saved = two.state_dict()
            two.close()
            two = sluice.optim.AdamW(halves.parameters(), lr=1e-2, config=config_of("nvme", tmp_path))
            two.load_state_dict(saved)
        set_gradients((whole, halves), step)
        one.step()
        two.step()
    assert all(same_bits(p, q) for p, q in zip(whole.parameters(), halves.parameters()))


@needs_command
def test_a_trace_has_the_times_of_copies(tmp_path):
    model = on_gpu(model_of(torch.bfloat16))
    with sluice.trace(tmp_path / "optimizer.trace"):
        optimizer = sluice.optim.AdamW(model.parameters(), config=config_of("host", tmp_path))
        for step in range(3):
            set_gradients((model,), step)
            optimizer.step()
        optimizer.close()
    subprocess.run([COMMAND, "trace", "export", tmp_path / "optimizer.trace", "--csv", tmp_path / "records.csv"], check=True)
    with open(tmp_path / "records.csv", encoding="utf-8", newline="") as file:
        copies = [row for row in csv.DictReader(file) if row["kind"].startswith("copy to")]
    assert {(row["kind"], row["step"]) for row in copies} == {(f"copy to {to}", str(step)) for to in ("host", "device") for step in (1, 2, 3)}
    for row in copies:
        begin, started, moved, end = (int(row[name]) for name in ("begin_ns", "started_ns", "moved_ns", "end_ns"))
        assert 0 < begin <= started < moved <= end


@needs_cuda
def test_a_parameter_that_moved_is_refused():
    p = nn.Parameter(torch.ones(10, device="cuda"))
    optimizer = sluice.optim.AdamW([p])
    p.data = p.data.cpu()
    p.grad = torch.ones(10)
    with pytest.raises(sluice.ArgumentError, match="on cuda:0 when the optimizer was made"):
        optimizer.step()


@needs_cuda
def test_a_gradient_scaler():
    p = nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = sluice.optim.AdamW([p], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    for values in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((p * values).sum()).backward()
        before = p.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(p.detach(), before) == (values == float("inf"))
