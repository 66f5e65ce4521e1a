"""Models of transformers to files and from files, tensor by tensor; tiny random models and no downloads."""

import pytest
import torch
import transformers

import sluice_offload as sluice

MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=61, n_positions=16, n_embd=32, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32)),
}


def settings(tmp_path):
    return {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "memory": {"device": "400KiB", "host": "4MiB"},
            "storage": {"paths": [str(tmp_path)]}, "optimizer": {"overlap": "serial"}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_folders_of_transformers(tmp_path, name, dtype):
    """Folders of transformers come back on the meta device, and folders of Sluice in transformers."""
    torch.manual_seed(2)
    MODELS[name]().to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    model, values = sluice.from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "theirs")
    assert all(parameter.is_meta and parameter.dtype == dtype for parameter in model.parameters())
    optimizer = sluice.offload(model.eval(), settings(tmp_path), values=values)
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        expected = whole(tokens).logits
        assert torch.equal(model(tokens).logits, expected)
    sluice.save_pretrained(model, tmp_path / "ours", max_shard_bytes=20000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert again.dtype == dtype
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)
    optimizer.close()


def test_parameters_that_the_files_lack(tmp_path):
    MODELS["llama"]().model.save_pretrained(tmp_path)  # without the head
    with pytest.raises(sluice.ArgumentError, match="has no .*; use LlamaForCausalLM.from_pretrained"):
        sluice.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
