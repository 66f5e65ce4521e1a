"""A program that flushes denormal numbers gets the same bits from the engine, and keeps its setting."""

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from sluice_offload import optim
from sluice_offload.library import EXP_AVG, EXP_AVG_SQ, MASTER

# Gradients whose squares are denormal numbers of fp32, while torch itself computes with none.
FACTOR = 2.0 ** -66


class Block(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 96).to(dtype))

    def forward(self, scale):
        return (self.weight * scale).sum()


class Blocks(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(3))

    def forward(self, scales):
        return sum(block(scale) for block, scale in zip(self.blocks, scales))


def scales(step):
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(64, 96, generator=generator) * FACTOR) for _ in range(3)]


@pytest.fixture
def flushing():
    """Turns flushing on and off; off again at the end."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    torch.set_flush_denormal(False)
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


def flushes():
    return (torch.full((1,), 1e-38) * torch.full((1,), 1e-2)).item() == 0


def state_of(config, dtype, placement, tmp_path, flush, set_flush):
    torch.manual_seed(0)
    model = Blocks(dtype)
    kept = config | {"placement": dict(placement), "storage": {"paths": [str(tmp_path)]},
                     "memory": {"device": "4MiB", "host": "16MiB"}}
    set_flush(flush)
    try:
        optimizer = sluice.offload(model, kept, units=[Block])
        for step in range(3):
            model([scale.to(dtype) for scale in scales(step)]).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert flushes() == flush, "the setting is the program's"
        engine = optimizer._engine
        members = [member for unit in optimizer._walk.units.units for member in unit.members]
        found = [engine.read(member, kind) for member in members for kind in (MASTER, EXP_AVG, EXP_AVG_SQ)]
        optimizer.close()
    finally:
        set_flush(False)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["nvme", "host", "device"])
def test_flushing_changes_no_bit_of_offload(config, tmp_path, flushing, dtype, placement):
    config["optimizer"] = {"learning_rate": 1e-3, "clip_norm": 0, "epsilon": 1e-30, "overlap": "deferred"}
    homes = {"parameters": placement, "optimizer": placement}
    expected = state_of(config, dtype, homes, tmp_path, False, flushing)
    actual = state_of(config, dtype, homes, tmp_path, True, flushing)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    squares = torch.cat([tensor.flatten() for tensor in expected[2::3]])
    assert 0 < squares.max() < 2.0 ** -126, "the case has denormal numbers"
    assert (squares != 0).float().mean() > 0.5


def test_flushing_changes_no_bit_of_the_optimizer_alone(tmp_path, flushing):
    def state(flush):
        torch.manual_seed(0)
        model = Blocks(torch.bfloat16)
        flushing(flush)
        try:
            optimizer = optim.AdamW(model.parameters(), lr=1e-3, eps=1e-30,
                                    config={"placement": {"optimizer": "nvme"}, "storage": {"paths": [str(tmp_path)]},
                                            "memory": {"host": "1MiB"}})
            for step in range(3):
                for p, scale in zip(model.parameters(), scales(step)):
                    p.grad = scale.bfloat16()
                optimizer.step()
            assert flushes() == flush
            found = [optimizer.state[p][key].clone() for p in model.parameters() for key in ("master", "exp_avg", "exp_avg_sq")]
            optimizer.close()
        finally:
            flushing(False)
        return found

    expected = state(False)
    for a, b in zip(state(True), expected, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    assert 0 < expected[2].max() < 2.0 ** -126
