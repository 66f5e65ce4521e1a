"""LoRA (peft) over a base of bitsandbytes' 4-bit layers, which stay as they are on storage. Tiny random model, no downloads."""

import bitsandbytes as bnb
import peft
import torch
import transformers
from torch import nn

import sluice_offload as sluice
from conftest import worst

transformers.utils.logging.set_verbosity_error()


def llama():
    """Adapters of fp32 beside NF4 weights, which bitsandbytes keeps as bytes."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32))
    for block in model.model.layers:
        for name, linear in [*block.named_modules()]:
            if isinstance(linear, nn.Linear):
                quantized = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32,
                                              quant_type="nf4")
                quantized.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=quantized)
                block.set_submodule(name, quantized.to("cpu"))
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def run(model, optimizer, steps, clip):
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(61, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_lora_over_a_4_bit_base(tmp_path):
    plain, model = llama(), llama()
    base = {name: values.clone() for name, values in plain.state_dict().items() if "lora" not in name}
    codes = [name for name, values in base.items() if values.dtype == torch.uint8 and name.endswith("weight")]
    assert len(codes) == 3 * 7
    config = {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "memory": {"device": "300KiB", "host": "300KiB"},
              "storage": {"paths": [str(tmp_path)], "block_elements": 4096},
              "optimizer": {"clip_norm": 1.0, "clip_epsilon": 1e-6, "weight_decay": 0.0, "beta2": 0.999, "overlap": "serial"}}
    optimizer = sluice.offload(model, config, units=["LlamaDecoderLayer"], lr=1e-2)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0)
    assert worst(run(model, optimizer, 20, False), run(plain, theirs, 20, True)) <= 2e-6
    report = optimizer.report
    assert report.schedule_changes == 0
    assert (report.nvme_read_bytes, report.nvme_write_bytes) == optimizer._engine.predicted_traffic()
    bytes_of_codes = sum(base[name].nbytes for name in codes)
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    numbers = 4 * sum(p.numel() for p in plain.parameters() if not p.requires_grad and p.dtype == torch.float32)
    # Forward and backward read all codes, but for the block that is still in memory.
    assert report.nvme_read_bytes >= 2 * bytes_of_codes * 2 // 3
    assert report.nvme_read_bytes <= 2 * (bytes_of_codes + numbers + 4 * trained) + 12 * trained + (160 << 10)
    found = model.state_dict()
    for name, values in base.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name], values), name
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    optimizer.close()
