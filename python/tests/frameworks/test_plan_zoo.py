"""`sluice plan --model` against transformers: for each architecture in the zoo, names and shapes of all tensors, the number
of parameters, the names that share a tensor, and the parameters that a token uses are those of a model of the same config,
made without weights. The names and shapes of an unknown architecture come from its safetensors file."""

import json
import os
import pathlib
import re
import subprocess

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[3]
BINARY = pathlib.Path(os.environ.get("SLUICE_BINARY", ROOT / "build/release/tools/sluice"))

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"there is no {BINARY}; SLUICE_BINARY names the command")

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 101}
LATENT = {**SMALL, "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 2,
          "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
          "v_head_dim": 12, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
T5 = {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 101,
      "relative_attention_num_buckets": 16}
WHISPER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
           "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "vocab_size": 101, "num_mel_bins": 20, "pad_token_id": 0,
           "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
VIT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 64}
CASES = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL)),
    "llama-tied": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama-biases": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**SMALL)),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL, head_dim=24)),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**SMALL, num_local_experts=4)),
    "qwen2_moe": (hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
                                                          shared_expert_intermediate_size=48)),
    "qwen2_moe-some": (hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig(**SMALL, num_experts=8, moe_intermediate_size=32,
                                                               decoder_sparse_step=2)),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**SMALL, head_dim=24, num_experts=8, num_experts_per_tok=2,
                                                          moe_intermediate_size=32, mlp_only_layers=[1])),
    "deepseek_v2": (hf.DeepseekV2ForCausalLM, hf.DeepseekV2Config(**LATENT)),
    "deepseek_v2-lite": (hf.DeepseekV2ForCausalLM, hf.DeepseekV2Config(**{**LATENT, "q_lora_rank": None})),
    "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config(**LATENT, attention_bias=True)),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig(**SMALL, head_dim=24)),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**SMALL, head_dim=24)),
    "gemma3_text": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**SMALL, head_dim=24)),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=101)),
    "gpt2-untied": (hf.GPT2LMHeadModel, hf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=101, tie_word_embeddings=False)),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config(**T5)),
    "t5-gated": (hf.T5ForConditionalGeneration, hf.T5Config(**T5, feed_forward_proj="gated-gelu")),
    "whisper": (hf.WhisperForConditionalGeneration, hf.WhisperConfig(**WHISPER)),
    "vit": (hf.ViTForImageClassification, hf.ViTConfig(**VIT, num_labels=7)),
    "vit-two": (hf.ViTForImageClassification, hf.ViTConfig(**VIT, qkv_bias=False)),
}


def planned(folder, *arguments):
    """The plan and the tensors that `sluice plan` finds in `folder`."""
    done = subprocess.run([BINARY, "plan", "--model", folder, "--gpu", "h200", "--host-memory", "64G", "--tokens", "1000", "--json",
                           folder / "plan.out", "--tensors", folder / "tensors.out", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with open(folder / "plan.out", encoding="utf-8") as plan, open(folder / "tensors.out", encoding="utf-8") as tensors:
        return json.load(plan), json.load(tensors)


def tensors_of(model):
    """{name: shape} of each tensor under its first name, and the lists of names of one tensor."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return shapes, [sorted(shared) for shared in names.values() if len(shared) > 1]


def active_of(model, config):
    """The parameters that a token uses: experts that the router does not choose are left out."""
    used = getattr(config, "num_experts_per_tok", None)
    active = 0
    for name, parameter in model.named_parameters():
        is_expert = re.search(r"\bexperts\.(gate_up|down)_proj", name)
        active += parameter.numel() * used // parameter.shape[0] if is_expert else parameter.numel()
    return active


@pytest.mark.parametrize("name", CASES)
def test_the_plan_has_the_models_tensors(name, tmp_path):
    make, config = CASES[name]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = make(config)
    shapes, tied = tensors_of(model)
    plan, tensors = planned(tmp_path)
    found = {}
    for unit in tensors["units"]:
        assert not found.keys() & unit["tensors"].keys()
        found.update(unit["tensors"])
    assert found == shapes
    assert plan["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert plan["active_parameters"] == tensors["active_parameters"] == active_of(model, config)
    assert ([sorted(tensors["tied"])] if tensors["tied"] else []) == tied


def test_a_layer_is_a_unit(tmp_path):
    CASES["mixtral"][1].save_pretrained(tmp_path)
    units = planned(tmp_path)[1]["units"]
    assert [unit["name"] for unit in units] == ["embedding", "layer.0", "layer.1", "layer.2", "head"]
    for index in range(3):
        assert all(name.startswith(f"model.layers.{index}.") for name in units[index + 1]["tensors"])


UNKNOWN = {
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
                                                             vocab_size=101)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
                                                                 decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
                                                                 vocab_size=101)),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("shards", [False, True])
def test_an_unknown_model_is_read_from_its_files(name, shards, tmp_path):
    model = UNKNOWN[name]()
    model.save_pretrained(tmp_path, max_shard_size="100KB" if shards else "5GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    shapes = {}  # under the names in the files, which differ from the model's for some architectures
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes.update((name, tensors.get_slice(name).get_shape()) for name in tensors.keys())
    plan, tensors = planned(tmp_path)
    found = {}
    for unit in tensors["units"]:
        found.update(unit["tensors"])
    assert found == shapes
    buffers = 101 if name == "bart" else 0  # which its file has beside the parameters
    assert plan["parameters"] - buffers == sum(parameter.numel() for parameter in model.parameters())
    assert len([unit for unit in tensors["units"] if re.search(r"\.\d+$", unit["name"])]) == (5 if name == "bart" else 3)


def test_experts_in_files_of_their_own_names(tmp_path):
    """Files have a tensor for each expert, as model hubs keep them."""
    tensors = {"model.embed_tokens.weight": torch.zeros(50, 8), "lm_head.weight": torch.zeros(50, 8)}
    for layer in range(2):
        tensors[f"model.layers.{layer}.norm.weight"] = torch.zeros(8)
        for expert in range(4):
            tensors[f"model.layers.{layer}.moe.experts.{expert}.w1.weight"] = torch.zeros(16, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other", "num_experts_per_tok": 1}), encoding="utf-8")
    plan, _ = planned(tmp_path)
    assert plan["parameters"] == 2 * 50 * 8 + 2 * 8 + 8 * 16 * 8
    assert plan["active_parameters"] == 2 * 50 * 8 + 2 * 8 + 2 * 16 * 8
