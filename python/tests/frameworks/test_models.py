"""Models of transformers with random values against torch in memory: fifty steps of AdamW with clipping, under budgets of at
most a quarter of the state, with counters equal to the plan's."""

import copy

import pytest
import torch
import transformers

import sluice_offload as sluice
from conftest import budgeted, moves_as_planned, worst

transformers.utils.logging.set_verbosity_error()

STEPS, VOCABULARY = 50, 64


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=64, n_layer=8, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        max_position_embeddings=32))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=128, num_layers=5, num_decoder_layers=5, num_heads=4, dropout_rate=0,
        decoder_start_token_id=0, pad_token_id=0))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=8, num_attention_heads=4, intermediate_size=128, image_size=16, patch_size=4,
        num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0))


def deberta(norm="layer_norm"):
    """All layers read the weight of one embedding, or what its norm makes of it."""
    return transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=8, num_attention_heads=4, intermediate_size=128, max_position_embeddings=32,
        relative_attention=True, position_buckets=8, norm_rel_ebd=norm, share_att_key=True, pos_att_type="p2c|c2p", position_biased_input=False,
        type_vocab_size=0, hidden_dropout_prob=0, attention_probs_dropout_prob=0))


def deberta_without_norm():
    return deberta("none")


def inputs(name, step):
    generator = torch.Generator().manual_seed(700 + step)
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator),
                "labels": torch.randint(5, (3,), generator=generator)}
    tokens = torch.randint(1, VOCABULARY, (3, 12), generator=generator)
    return {"input_ids": tokens, "labels": torch.randint(1, VOCABULARY, (3, 9), generator=generator) if name == "t5" else tokens}


# Gradients of these are rounding alone, which Adam makes as large as any: a constant that is added to all of a query's scores
# cancels in the softmax.
CANCELS = ("key.bias", "k_proj.bias")


def apart(model, reference, start):
    """||W - W_reference|| / ||W_reference - W_start|| over all tensors; those that are beyond 1e-3 of their own update."""
    moved = difference = 0.0
    single = {}
    for name, value in model.state_dict().items():
        if name.endswith(CANCELS) or not value.is_floating_point():
            continue
        one, own = (value - reference[name]).double().norm().item(), (reference[name] - start[name]).double().norm().item()
        if one > 1e-3 * own:
            single[name] = one / own if own else one
        difference += one ** 2
        moved += own ** 2
    return (difference / moved) ** 0.5, single


# Each with its budgets for device and host in KiB.
CASES = {"gpt2": (gpt2, 700, 700), "llama": (llama, 700, 700), "mixtral": (mixtral, 500, 700), "t5": (t5, 500, 500),
         "vit": (vit, 500, 500), "deberta": (deberta, 580, 500), "deberta_without_norm": (deberta_without_norm, 580, 500)}


@pytest.mark.parametrize("name", CASES)
def test_fifty_steps_are_torchs(tmp_path, name):
    make, device, host = CASES[name]
    torch.manual_seed(0)
    reference = make()
    model, start = copy.deepcopy(reference), copy.deepcopy(reference.state_dict())
    state_bytes = 16 * sum(p.numel() for p in reference.parameters())
    settings = {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "storage": {"paths": [str(tmp_path)]},
                "optimizer": {"clip_norm": 1.0, "clip_epsilon": 1e-6, "overlap": "serial"}}
    budgeted(settings, reference, device, host)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.01)
    ours = sluice.offload(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01))
    losses, expected, norms = [], [], []
    for step in range(STEPS):
        loss = reference(**inputs(name, step)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
        theirs.step()
        theirs.zero_grad()
        expected.append(loss.item())
        loss = model(**inputs(name, step)).loss
        loss.backward()
        ours.step()
        ours.zero_grad()
        losses.append(loss.item())
        norms.append(abs(ours.gradient_norm - norm) / norm)
        if step > 0:
            moves_as_planned(ours)
    together, single = apart(model, reference.state_dict(), start)
    print(f"{name}: state {state_bytes >> 10} KiB, worst relative loss {worst(losses, expected):.1e}, norm {max(norms):.1e}, "
          f"weights {together:.1e}, tensors beyond 1e-3 of their update: {single or 'none'}; {ours.report.nvme_read_bytes} bytes "
          f"read and {ours.report.nvme_write_bytes} written per step")
    assert worst(losses, expected) <= 2e-6
    assert together <= 1e-5
    model.eval()
    reference.eval()
    if name in ("gpt2", "llama", "mixtral", "t5"):
        prompt = inputs(name, 99)["input_ids"][:1, :4]
        made = [net.generate(prompt, max_new_tokens=6, do_sample=False) for net in (model, reference)]
        assert torch.equal(*made)
    ours.close()
