"""Folders that the command `sluice` writes load in transformers and in safetensors.torch as they are. SLUICE_COMMAND names the command."""

import json
import os
import subprocess

import pytest
import torch
import transformers
from safetensors.torch import load_file

COMMAND = os.environ.get("SLUICE_COMMAND")


def run(folder, *arguments):
    subprocess.run([COMMAND, *arguments], cwd=folder, check=True, capture_output=True, timeout=300)


def tensors_of(folder, index):
    """All tensors of a sharded model, by its index."""
    with open(folder / index, encoding="utf-8") as file:
        names = set(json.load(file)["weight_map"].values())
    return {name: value for file in sorted(names) for name, value in load_file(folder / file).items()}


@pytest.mark.skipif(not COMMAND, reason="SLUICE_COMMAND does not name the command")
@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checkpoints_and_exports(tmp_path, dtype, tied_head):
    (tmp_path / "text.txt").write_text("in the beginning was a block and it lay on storage " * 400)
    config = {"model": {"layers": 2, "heads": 2, "embedding": 32, "context": 16, "vocabulary": 256, "tied_head": tied_head},
              "data": {"file": "text.txt"}, "batch": {"sequences": 2}, "run": {"steps": 3, "device": "host"},
              "precision": {"parameters": str(dtype).removeprefix("torch.").replace("float32", "fp32").replace("bfloat16", "bf16").replace("float16", "fp16")},
              "memory": {"device": "8MiB", "host": "16MiB", "save_buffers": 1}, "storage": {"paths": ["."], "state": {"name": "run"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run(tmp_path, "train", "config.json", "--checkpoint", "saved", "--checkpoint-every", "3", "--shard-size", "40KB", "--save", "masters.safetensors")
    run(tmp_path, "state", "export", "config.json", "exported", "--shard-size", "40KB")
    masters = load_file(tmp_path / "masters.safetensors")
    for name in ("saved", "exported"):
        folder = tmp_path / name / "latest"
        weights = tensors_of(folder, "model.safetensors.index.json")
        assert weights.keys() == masters.keys()
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert isinstance(model, transformers.GPT2LMHeadModel)
        assert model.config.bos_token_id is model.config.eos_token_id is model.generation_config.eos_token_id is None  # one of bytes has none
        theirs = model.state_dict()
        for tensor, master in masters.items():
            assert weights[tensor].dtype == dtype
            assert torch.equal(weights[tensor], master.to(dtype))
            own = theirs[tensor if tensor in theirs else "transformer." + tensor]
            assert own.dtype == dtype and torch.equal(own, weights[tensor])
        moments = {key: value for file in sorted(folder.glob("optimizer-*")) for key, value in load_file(file).items()}
        for tensor, master in masters.items():
            assert moments[tensor + ".exp_avg"].shape == moments[tensor + ".exp_avg_sq"].shape == master.shape
            if dtype == torch.bfloat16:
                high = weights[tensor].view(torch.int16).to(torch.int32) << 16
                assert torch.equal((high + moments[tensor + ".master_low"].to(torch.int32)).view(torch.float32), master)
            if dtype == torch.float16:
                assert torch.equal(moments[tensor + ".master"], master)
