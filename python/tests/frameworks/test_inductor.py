"""Units that torch.compile turns into C++ by its default backend, inductor, and a whole model. Takes a compiler and a minute."""

import copy
import shutil

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, adamw, tiny, train, worst


@pytest.mark.parametrize("what", ["units", "model"])
def test_compiled_by_inductor(config, tmp_path, monkeypatch, what):
    if shutil.which("g++") is None:
        pytest.skip("no g++, which inductor calls")
    import torch._dynamo
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    reference = tiny()
    model = copy.deepcopy(reference)
    expected, _ = train(reference, adamw(reference, config), 8, clip_norm=1.0)
    optimizer = sluice.offload(model, config, units=[Block])
    for module in model.blocks if what == "units" else [model]:
        module.compile()
    actual, _ = train(model, optimizer, 8)
    assert list((tmp_path / "inductor").rglob("*.so")), "inductor has compiled nothing"
    assert worst(actual, expected) <= 2e-6
    report = optimizer.report
    assert report.schedule_changes == 0
    assert (report.nvme_read_bytes, report.nvme_write_bytes) == optimizer._engine.predicted_traffic()
    optimizer.close()
    torch._dynamo.reset()
