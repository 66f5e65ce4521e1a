"""tools/gpu/torch_step.py, which measures PyTorch's step on a GPU, on the CPU and with a model that takes no time."""

import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE.parents[1] / "tools" / "gpu" / "torch_step.py"


def test_the_part_of_the_peak_is_that_of_the_counted_operations(tmp_path):
    if not SCRIPT.is_file():
        pytest.skip("no source tree here")
    peak = 2e9
    ran = subprocess.run([sys.executable, "-B", str(SCRIPT), "--device", "cpu", "--shape", "test", "--optimizer", "fused_adamw", "--steps", "2",
                          "--path", str(tmp_path), "--json", str(tmp_path / "out.json"), "--peak-flops", str(peak)], capture_output=True, text=True, check=True)
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    step, = report["steps"]
    assert report["peak_flops"] == peak and step["tokens_per_s"] > 0
    # Layers, width and context of the shape "test": 6 operations for each parameter and token, and causal attention.
    per_token = 6 * step["parameters"] + 6 * 2 * 32 * 16
    assert step["teraflops"] * 1e12 == pytest.approx(per_token * step["tokens_per_s"])
    assert step["mfu"] == pytest.approx(per_token * step["tokens_per_s"] / peak)
    assert "MFU" in ran.stdout.splitlines()[-1]
