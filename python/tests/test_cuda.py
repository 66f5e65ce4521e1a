"""Parameters on a GPU under sluice_offload.optim: the bits of parameters in the CPU's memory. Skipped without a GPU."""

import copy

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from sluice_offload.detached import why_no_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or bool(why_no_gpu(0)),
                                reason="no GPU that torch and Sluice can use")


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
    on_gpu = copy.deepcopy(on_cpu).to("cuda")
    extra = {"momentum": 0.9} if name == "SGD" else {}
    optimizers = [getattr(sluice.optim, name)(model.parameters(), lr=1e-2, config=config_of(place, tmp_path), **extra)
                  for model in (on_cpu, on_gpu)]
    for step in range(4):
        set_gradients((on_cpu, on_gpu), step)
        if step == 2:  # the program changes a parameter
            for model in (on_cpu, on_gpu):
                with torch.no_grad():
                    model[0].weight[3, :7] = 0.25
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(on_cpu.parameters(), on_gpu.parameters()):
            assert q.is_cuda and same_bits(p, q)
    for p, q in zip(on_cpu.parameters(), on_gpu.parameters()):
        assert all(same_bits(optimizers[0].state[p][key], optimizers[1].state[q][key]) for key in optimizers[0].state[p])
    assert optimizers[0].report.adopted_elements == optimizers[1].report.adopted_elements
    assert (optimizers[1].report.nvme_read_bytes > 0) == (place == "nvme")


@pytest.mark.parametrize("gradients, overlap, clip_norm", [("step", None, 0.5), ("backward", None, None), ("backward", None, 0.5),
                                                           ("step", "forward", 0.5), ("backward", "forward", None)])
def test_modes_have_the_same_bits(gradients, overlap, clip_norm, tmp_path):
    """A model trained with its state in host memory, step by step, and the same with the mode and its state on NVMe."""
    plain = model_of(torch.float32).to("cuda")
    tried = copy.deepcopy(plain)
    one = sluice.optim.AdamW(plain.parameters(), lr=1e-3, clip_norm=clip_norm, config=config_of("host", tmp_path))
    two = sluice.optim.AdamW(tried.parameters(), lr=1e-3, clip_norm=clip_norm, config=config_of("nvme", tmp_path),
                             gradients=gradients, overlap=overlap, modules=tried if overlap else None)
    for step in range(5):
        x = torch.randn(64, 600, generator=torch.Generator().manual_seed(step)).to("cuda")
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
    plain = nn.Linear(300, 200, device="cuda")
    tried = copy.deepcopy(plain)
    one = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1)
    two = sluice.optim.AdamW(tried.parameters(), lr=1e-3, weight_decay=0.1)
    begin = plain.weight.detach().clone()
    for step in range(20):
        x = torch.randn(32, 300, device="cuda")
        for model, optimizer in ((plain, one), (tried, two)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    moved = (plain.weight - begin).norm()
    assert (plain.weight - tried.weight).norm() <= 1e-5 * moved


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
    on_cpu, on_gpu = nn.Parameter(torch.ones(5000)), nn.Parameter(torch.ones(5000, device="cuda"))
    optimizer = sluice.optim.AdamW([on_cpu, on_gpu], config=config_of("nvme", tmp_path))
    for step in range(3):
        on_cpu.grad = torch.full((5000,), 0.5 + step)
        on_gpu.grad = on_cpu.grad.to("cuda")
        optimizer.step()
    assert same_bits(on_cpu, on_gpu) and not same_bits(on_cpu, torch.ones(5000))


def test_parameters_that_are_not_contiguous():
    p = nn.Parameter(torch.randn(40, 30, device="cuda").t())
    q = nn.Parameter(p.detach().contiguous())
    for x in (p, q):
        optimizer = sluice.optim.AdamW([x])
        x.grad = torch.ones_like(x)
        optimizer.step()
    assert not p.is_contiguous() and same_bits(p, q)


def test_a_state_dict_goes_on(tmp_path):
    whole, halves = model_of(torch.bfloat16).to("cuda"), model_of(torch.bfloat16).to("cuda")
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


def test_a_parameter_that_moved_is_refused():
    p = nn.Parameter(torch.ones(10, device="cuda"))
    optimizer = sluice.optim.AdamW([p])
    p.data = p.data.cpu()
    p.grad = torch.ones(10)
    with pytest.raises(sluice.ArgumentError, match="on cuda:0 when the optimizer was made"):
        optimizer.step()


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
