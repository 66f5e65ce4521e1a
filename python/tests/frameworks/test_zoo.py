"""Architectures of transformers with small random models: three steps and an evaluation on an offloaded model give the losses
of torch in memory. zoo.json lists those of which a small model can be made, and trains in memory. `python test_zoo.py` writes
it anew, from those that the installed transformers has."""

import copy
import json
import pathlib
import re
import sys
import tempfile

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import sluice_offload as sluice
from both_ways import in_memory, offloaded

transformers.utils.logging.set_verbosity_error()

ZOO = pathlib.Path(__file__).with_name("zoo.json")
KINDS = {"causal": "CAUSAL_LM", "masked": "MASKED_LM", "translation": "SEQ_TO_SEQ_CAUSAL_LM", "text": "SEQUENCE_CLASSIFICATION",
         "image": "IMAGE_CLASSIFICATION"}
VOCABULARY, PARAMETERS_MAX = 64, 6_000_000

# Small numbers, under the names that configs have for them.
SMALL = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "num_labels": 2,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim",
                     "feed_forward_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "activation_dropout",
                     "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "hidden_dropout", "classifier_dropout",
                     "encoder_layerdrop", "decoder_layerdrop", "layerdrop", "router_jitter_noise", "drop_path_rate"), 0.0),
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "attention_head_size": 8, "rotary_dim": 4, "rope_dim": 4, "embedding_size": 16,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "state_size": 8, "time_step_rank": 4,
    "n_groups": 1, "expand": 2, "chunk_size": 4, "type_vocab_size": 2, "sliding_window": 8, "attention_window": 4, "block_size": 4,
    "num_random_blocks": 1, "image_size": 64, "patch_size": 8, "num_channels": 3}
# Tried one after the other, until a model of the config can be made and trains.
VARIANTS: "list[dict]" = [{}, {"layer_types": 2}, {"head_dim": None}, {"head_dim": 4, "num_key_value_heads": 4}, {"vocab_size": None}]


def _config(kind, variant):
    default = kind()
    wanted = {**SMALL, **variant}
    layers = wanted.pop("layer_types", None)
    found = {key: value for key, value in wanted.items() if value is not None and hasattr(default, key)}
    if layers is not None:
        found["layer_types"] = default.layer_types[:layers]
    made = kind(**found)
    for key in ("decoder_start_token_id", "pad_token_id", "eos_token_id"):
        if getattr(made, key, None) is None:
            setattr(made, key, SMALL[key])
    return made


def _inputs(kind, config, step):
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(2, (4 if kind == "image" else 2,), generator=generator)
    if kind == "image":
        side = config.image_size if isinstance(getattr(config, "image_size", None), int) else 64
        return {"pixel_values": torch.randn(4, 3, side, side, generator=generator), "labels": labels}
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    tokens[:, -1] = 2  # encoders with a decoder look for the end
    answer = torch.randint(3, VOCABULARY, (2, 8), generator=generator)
    return {"input_ids": tokens, "labels": {"text": labels, "translation": answer}.get(kind, tokens)}


def _loss_of(kind, config):
    def loss_of(model, step):
        torch.manual_seed(step)
        return model(**_inputs(kind, config, step)).loss
    return loss_of


def _make(name, architecture, variant):
    config = _config(transformers.CONFIG_MAPPING[architecture], variant)
    kind = getattr(transformers, name)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > PARAMETERS_MAX:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    return kind(config), config


@pytest.mark.parametrize("name", json.loads(ZOO.read_text(encoding="utf-8")) if ZOO.exists() else [])
def test_small_models_train_as_in_memory(tmp_path, name):
    kind, architecture, variant, refusal = json.loads(ZOO.read_text(encoding="utf-8"))[name]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model, config = _make(name, architecture, VARIANTS[variant])
    if refusal:
        with pytest.raises(sluice.ArgumentError, match=re.escape(refusal)):
            offloaded(model, _loss_of(kind, config), tmp_path)
        return
    expected = in_memory(copy.deepcopy(model), _loss_of(kind, config))
    losses = offloaded(model, _loss_of(kind, config), tmp_path)
    # Deep convolutions with batch norms and no way around them: their gradients are mostly rounding, which Adam makes large.
    assert losses == pytest.approx(expected, rel=1e-2 if name.startswith("MobileNet") else 2e-5)


def _bits(name, folder, placement, dtype, **settings):
    """The parameters after three steps of two micro-batches each, checkpointed where the model can be."""
    kind, architecture, variant, _ = json.loads(ZOO.read_text(encoding="utf-8"))[name]
    model, config = _make(name, architecture, VARIANTS[variant])
    model.to(dtype).train()
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": len(name) % 2 == 0})
    optimizer = sluice.offload(model, {"placement": {"parameters": placement, "optimizer": placement}, "storage": {"paths": [str(folder)]},
                                       "optimizer": {"learning_rate": 1e-3}, **settings})
    for micro_batch in range(6):
        torch.manual_seed(micro_batch)
        given = {key: value.to(dtype) if value.is_floating_point() else value for key, value in _inputs(kind, config, micro_batch).items()}
        model(**given).loss.backward()
        if micro_batch % 2:
            optimizer.step()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer.close()
    return state


def _smallest(name, folder, dtype):
    """As `_bits`, under the smallest budgets, which errors name."""
    memory = {"device": "1KiB", "host": "1KiB"}
    while True:
        try:
            return _bits(name, folder, "nvme", dtype, memory=dict(memory))
        except sluice.OutOfMemoryError as error:
            before = dict(memory)
            for pattern in (r'memory\.(\w+) = [^;]* is too small; the smallest that works is "([^"]+)"', r'with memory\.(\w+) = "([^"]+)"'):
                memory.update(re.findall(pattern, str(error)))
            if memory == before:
                raise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name, (*_, refusal) in json.loads(ZOO.read_text(encoding="utf-8")).items() if not refusal]
                         if ZOO.exists() else [])
def test_placement_changes_no_bit(tmp_path, name, dtype):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if name.startswith(("FNet", "Mra")) and dtype == torch.bfloat16:
        pytest.skip("it does not compute in bf16, wherever its state is")
    expected = _bits(name, tmp_path, "device", dtype)
    state = _smallest(name, tmp_path, dtype)
    assert state.keys() == expected.keys()
    assert [key for key, value in state.items() if not torch.equal(value, expected[key])] == []


def _record():
    found = {}
    for kind, mapping in KINDS.items():
        for architecture, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            name = names if isinstance(names, str) else names[0]
            if name in found or not hasattr(transformers, name):
                continue
            for variant, settings in enumerate(VARIANTS):
                try:
                    model, config = _make(name, architecture, settings)
                    in_memory(copy.deepcopy(model), _loss_of(kind, config))
                except Exception as error:  # pylint: disable=broad-except  # such as a shape that a small config cannot have
                    reason = f"{type(error).__name__}: {error}"
                    continue
                refusal = ""
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        offloaded(model, _loss_of(kind, config), folder)
                    except sluice.ArgumentError as error:
                        refusal = str(error)[:60]
                found[name] = [kind, architecture, variant, refusal]
                print(name, variant, refusal, flush=True)
                break
            else:
                print(name, "is left out:", reason[:200].replace("\n", " "), flush=True)
    ZOO.write_text("{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(_record())
