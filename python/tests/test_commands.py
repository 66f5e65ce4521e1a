"""python -m sluice_offload plan and train-demo."""

import json
import re

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, tiny
from sluice_offload.__main__ import main


def small():
    return tiny()


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def large():
    """8e9 parameters."""
    return nn.Sequential(*(Layer(4096) for _ in range(60)))


def not_a_model():
    return 3


def test_plans_are_what_the_engine_takes(config, capsys, tmp_path, monkeypatch):
    (tmp_path / "sluice.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.syspath_prepend(".")
    assert main(["plan", "test_commands:small", "--config", str(tmp_path / "sluice.json"), "--units", "Block"]) == 0
    said = capsys.readouterr().out
    model = tiny()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count:,} parameters, 0 of them frozen" in said
    assert "of the budget of 400.0 KiB" in said and "of the budget of 4.0 MiB" in said and 'updated "serial"' in said
    optimizer = sluice.offload(model, config, units=[Block])
    read, written = optimizer._engine.predicted_traffic()
    optimizer.close()
    assert f"reads {read / 1024:.1f} KiB" in said or f"reads {read / 2**20:.1f} MiB" in said
    assert f"writes {written / 1024:.1f} KiB" in said or f"writes {written / 2**20:.1f} MiB" in said
    for leases, options in ((1, []), (2, ["--leases", "2"])):
        assert main(["plan", "test_commands:small", "--config", str(tmp_path / "sluice.json"), "--units", "Block", *options]) == 0
        assert f"computation holds {leases} at a time" in capsys.readouterr().out


def test_plans_for_a_gpu(config, capsys, tmp_path, monkeypatch):
    """Its memory is not the host's, and without memory.device it has any size."""
    monkeypatch.syspath_prepend(".")
    said = {}
    for budget in ("400KiB", None):
        config["memory"].pop("device")
        config["memory"].update({} if budget is None else {"device": budget})
        (tmp_path / "sluice.json").write_text(json.dumps(config), encoding="utf-8")
        arguments = ["plan", "test_commands:small", "--config", str(tmp_path / "sluice.json"), "--units", "Block", "--gpu"]
        assert main(arguments) == 0
        said[budget] = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("device: "))
    assert said["400KiB"].endswith(" of the budget of 400.0 KiB") and "budget" not in said[None]


def test_plans_of_configs_with_activations(config, capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(".")
    for home, status, words in (("nvme", 0, f"activations go to files in {config['storage']['paths'][0]}, and are not counted"),
                                ("host", 0, "a step reads"), ("recompute", 1, "torch.utils.checkpoint"),
                                ("host --gpu", 0, "activations go to host memory, and are not counted")):
        home, *gpu = home.split()
        (tmp_path / "sluice.json").write_text(json.dumps({**config, "activations": home}), encoding="utf-8")
        assert main(["plan", "test_commands:small", "--config", str(tmp_path / "sluice.json"), "--units", "Block", *gpu]) == status, home
        said = capsys.readouterr()
        assert words in said.out + said.err, home


def test_large_models_are_planned_from_their_shapes(capsys):
    assert main(["plan", "test_commands:large", "--set", "placement.parameters=nvme", "--set", "placement.optimizer=nvme",
                 "--set", "memory.device=3GiB", "--set", "memory.host=8GiB", "--set", "precision.parameters=bf16"]) == 0
    said = capsys.readouterr().out
    assert "8,054,292,480 parameters" in said
    # In bf16 with exact masters and moments each parameter has 12 bytes at rest, on storage; some gradients wait there, too.
    stored = float(said.split("nvme: ")[1].split(" GiB")[0])
    assert 12 * 8_054_292_480 <= stored * 2**30 < 14 * 8_054_292_480


def test_what_cannot_be_planned(capsys):
    def refused(words, *arguments):
        assert main(["plan", *arguments]) == 1
        assert words in capsys.readouterr().err
    refused("smallest that works", "test_commands:small", "--set", "memory.device=4KiB", "--set", "placement.parameters=nvme")
    refused("returns an object of type int", "test_commands:not_a_model")
    refused("nowhere", "nowhere:model")
    refused("there is no file or folder model, and it is not MODULE:FUNCTION either", "model")
    refused("write KEY=VALUE", "test_commands:small", "--set", "memory")
    refused("--set memory.host=1GiB: memory is a value, \"2GiB\", and no section", "test_commands:small", "--set", "memory=2GiB",
            "--set", "memory.host=1GiB")
    refused("memroy", "test_commands:small", "--set", "memroy.device=1GiB")


@pytest.mark.parametrize("steps", ["0", "-3", "2.5", "many"])
def test_a_demo_has_steps(steps, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train-demo", "--steps", steps])
    assert f"--steps: {steps} is no whole number from 1 on" in capsys.readouterr().err


def test_the_demo_says_where_a_folder_takes_nothing(capsys):
    assert main(["train-demo", "--path", "/proc", "--steps", "1"]) == 1
    assert re.fullmatch("NO: .*'/proc/.*; --path names another folder\n", capsys.readouterr().out)


def test_the_demo_agrees_with_memory(tmp_path, capsys, monkeypatch):
    assert main(["train-demo", "--path", str(tmp_path), "--steps", "4"]) == 0
    said = capsys.readouterr().out
    assert "step    4  loss" in said and "worst relative difference of a loss" in said
    assert float(said.split("wrote ")[1].split()[0]) > 10
    # It says so where they differ.
    monkeypatch.setattr("sluice_offload.demo.LOSS_DIFFERENCE_MAX", -1.0)
    assert main(["train-demo", "--path", str(tmp_path), "--steps", "2"]) == 1
    assert "NO: that is more" in capsys.readouterr().out
