#!/usr/bin/env python3
"""PyTorch's training step of the shapes of `sluice bench gpu` and of two Llamas, in bf16 with scaled_dot_product_attention. The yardstick
is fused AdamW, everything on the GPU. Beside it stand the optimizers that keep their state in host memory or on storage: Sluice's for
PyTorch, alone and with the parameters (offload), and, where they are installed, torchao's and DeepSpeed's.

    torch_step.py [--device cuda] [--shape 124M|1.5B|7B|llama-1.1B|llama-7B ...] [--optimizer NAME ...] [--path FOLDER] [--steps N]
                  [--seconds S] [--threads N] [--peak-flops F] [--trace FOLDER] [--json FILE]

Each shape is tried as it is and then, if that runs out of memory, with activations computed again. FILE is written anew after each
measurement. The moments of torch and torchao are bf16 as the parameters are, and there is no fp32 master copy: 8 bytes per
parameter, where Sluice keeps 14 and DeepSpeed 16. torchao takes gradients in the backward pass, before they could be clipped;
sluice_backward, sluice_bf16 and offload_eager do the same, and all others clip. `mfu` is the part of the GPU's peak in bf16 that the
model's products and causal attention take: --peak-flops, or the maker's figure for a GPU that this script knows. --trace writes
Sluice's trace of each of its runs. Exits with 77 without a GPU.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# GPT: layers, heads, width, context, sequences
SHAPES = {"124M": (12, 12, 768, 1024, 16), "1.5B": (48, 25, 1600, 1024, 8), "7B": (32, 32, 4096, 2048, 4), "test": (2, 2, 32, 16, 2)}
# Llama: layers, heads, width, context, sequences, heads of keys and values, width inside
LLAMAS = {"llama-1.1B": (22, 32, 2048, 2048, 4, 4, 5632), "llama-7B": (32, 32, 4096, 2048, 4, 32, 11008),
          "llama-test": (2, 2, 32, 16, 2, 1, 64)}
VOCABULARY = 50257
# Dense products in bf16 per second, as NVIDIA's data sheets have them, by the name that torch gives a device.
PEAK_FLOPS = {"NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


class Block(nn.Module):

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):

    def __init__(self, layers, heads, width, context, recompute):
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def make_model(shape, recompute):
    """A model of random weights on the default device, and the class of its repeated modules."""
    torch.manual_seed(1)
    if shape in SHAPES:
        return Gpt(*SHAPES[shape][:4], recompute), Block
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    layers, heads, width, context, _, kept, inside = LLAMAS[shape]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inside, num_hidden_layers=layers,
                                         num_attention_heads=heads, num_key_value_heads=kept, max_position_embeddings=context,
                                         use_cache=False, attn_implementation="sdpa"))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, LlamaDecoderLayer


def loss_of(model, tokens):
    if isinstance(model, Gpt):
        return model(tokens[:, :-1], tokens[:, 1:])
    return model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss


class Training:
    """A model that trains with an optimizer of torch's interface. `clip_norm`: torch clips to it; the others clip by themselves."""

    def __init__(self, model, optimizer, clip_norm=0.0):
        self.model, self.optimizer, self.clip_norm = model, optimizer, clip_norm

    def step(self, tokens):
        loss = loss_of(self.model, tokens)
        loss.backward()
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def close(self):
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()


class DeepSpeedTraining:

    def __init__(self, model, zero):
        if torch.cuda.is_available():  # its operators are compiled for this GPU alone
            os.environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability())
        import deepspeed
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": zero,
                  "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.1}},
                  "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 4, "single_submit": False,
                          "overlap_events": True}}
        self.model = model
        self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step(self, tokens):
        # The engine's forward has hooks; a loss that comes out of it is the model's.
        loss = (self.engine(tokens[:, :-1], tokens[:, 1:]) if isinstance(self.model, Gpt) else
                self.engine(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def close(self):
        self.engine.destroy()


def sluice_config(place, path):
    """`threads` of the command line are the optimizer's; without them the package chooses."""
    config = {"placement": {"optimizer": place}, "storage": {"paths": [path]}}
    return config if sluice_threads is None else {**config, "run": {"threads": sluice_threads}}


sluice_threads = None


# Each makes a training of (model, class of its repeated modules, device, folder). Where its package is absent, it is left out.


def fused_adamw(model, block, device, path):
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, fused=device == "cuda"), clip_norm=1.0)


def torchao_offload(model, block, device, path):
    from torchao.optim import CPUOffloadOptimizer
    return Training(model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-5, weight_decay=0.1, fused=True))


def sluice_optimizer(model, place, path, state="fp32", **options):
    import sluice_offload
    config = {**sluice_config(place, path), "optimizer": {"state": state}}
    return Training(model, sluice_offload.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, config=config, **options))


def sluice_host(model, block, device, path):
    return sluice_optimizer(model, "host", path, clip_norm=1.0)


def sluice_backward(model, block, device, path):
    return sluice_optimizer(model, "host", path, gradients="backward")


def sluice_bf16(model, block, device, path):
    """As sluice_backward, with moments of torchao's size."""
    return sluice_optimizer(model, "host", path, gradients="backward", state="bf16")


def sluice_forward(model, block, device, path):
    return sluice_optimizer(model, "host", path, clip_norm=1.0, gradients="backward", overlap="forward", modules=model)


def sluice_nvme(model, block, device, path):
    return sluice_optimizer(model, "nvme", path, clip_norm=1.0)


def sluice_offload_model(model, block, device, path, place, **optimizer):
    import sluice_offload
    config = sluice_config(place, path)
    config["placement"]["parameters"] = place
    config.update(optimizer={"clip_norm": 1.0, **optimizer}, memory={"device": "2GiB"})
    return Training(model, sluice_offload.offload(model, config, units=[block], lr=1e-5))


def offload_host(model, block, device, path):
    return sluice_offload_model(model, block, device, path, "host")


def offload_eager(model, block, device, path):
    """Without clipping, so that the update runs beside backward, as torchao's copies do."""
    return sluice_offload_model(model, block, device, path, "host", clip_norm=0, overlap="eager")


def offload_nvme(model, block, device, path):
    return sluice_offload_model(model, block, device, path, "nvme")


def zero_offload(model, block, device, path):
    """ZeRO-Offload: parameters on the GPU, the optimizer's state in host memory."""
    return DeepSpeedTraining(model, {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
                                     "contiguous_gradients": True})


def zero_infinity(model, block, device, path):
    """ZeRO-3 with parameters and the optimizer's state in host memory."""
    place = {"device": "cpu", "pin_memory": True}
    return DeepSpeedTraining(model, {"stage": 3, "offload_optimizer": place, "offload_param": place, "overlap_comm": True,
                                     "contiguous_gradients": True})


OPTIMIZERS = {
    made.__name__: made
    for made in (fused_adamw, sluice_host, sluice_backward, sluice_forward, sluice_bf16, torchao_offload, offload_host, offload_eager,
                 zero_offload, zero_infinity, sluice_nvme, offload_nvme)
}


def used_bytes(device):
    """All programs and libraries together have taken this much of the GPU's memory."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(shape, device, recompute, make_training, steps, path):
    layers, _, width, context, sequences = (SHAPES.get(shape) or LLAMAS[shape])[:5]
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    before = used_bytes(device)
    begin = time.perf_counter()
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model, block = make_model(shape, recompute)
        finally:
            torch.set_default_dtype(torch.float32)
    count = sum(p.numel() for p in model.parameters())
    training = make_training(model, block, device, path)
    synchronize()
    made_s = time.perf_counter() - begin
    times = []
    for step in range(steps + 2):  # two that are not counted
        tokens = torch.randint(VOCABULARY, (sequences, context + 1), device=device)
        synchronize()
        begin = time.perf_counter()
        loss = training.step(tokens)
        synchronize()
        if step >= 2:
            times.append(time.perf_counter() - begin)
    # This includes what torch has cached, since no other program can have it.
    used = used_bytes(device) - before
    training.close()
    median = statistics.median(times)
    # The products and causal attention, forward and backward.
    operations = sequences * context * (6 * count + 6 * layers * width * context)
    return {"tokens_per_s": sequences * context / median, "step_s": {"median": median, "least": min(times), "most": max(times)},
            "teraflops": operations / median / 1e12, "made_s": made_s, "device_used_bytes": used, "loss": loss.item(), "parameters": count,
            "torch_most_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0}


def is_out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def traced(folder, name):
    if not folder:
        return contextlib.nullcontext()
    import sluice_offload
    return sluice_offload.trace(os.path.join(folder, name + ".trace"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", action="append", choices=[*SHAPES, *LLAMAS])
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS)
    parser.add_argument("--path", default="/var/tmp", help="folder for state on storage")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=400, help="no measurement begins after so many")
    parser.add_argument("--threads", type=int, help="run.threads of Sluice's config")
    parser.add_argument("--peak-flops", type=float, help="the device's peak in bf16, per second, for MFU")
    parser.add_argument("--trace", help="folder for Sluice's traces, SHAPE-OPTIMIZER.trace")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is false")
        return 77
    global sluice_threads
    sluice_threads = options.threads
    device_name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    peak = options.peak_flops or PEAK_FLOPS.get(device_name)
    report = {"torch": torch.__version__, "device": device_name, "peak_flops": peak, "steps": []}

    def add(entry):
        if "teraflops" in entry:
            entry["mfu"] = entry["teraflops"] * 1e12 / peak if peak else None
        report["steps"].append(entry)
        print(json.dumps(entry), flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)

    begin = time.perf_counter()
    for make_training in (OPTIMIZERS[name] for name in options.optimizer or OPTIMIZERS):
        for shape in options.shape or ("124M", "1.5B", "7B"):
            for recompute in (False, True):
                entry = {"shape": shape, "optimizer": make_training.__name__, "recompute": recompute}
                if time.perf_counter() - begin > options.seconds:
                    add({**entry, "left_out": "--seconds are over"})
                    break
                if options.device == "cuda":
                    gc.collect()  # the model of the measurement before
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                try:
                    with traced(options.trace, f"{shape}-{make_training.__name__}"):
                        add({**entry, **measure(shape, options.device, recompute, make_training, options.steps, options.path)})
                    break
                except (RuntimeError, ImportError, MemoryError) as error:
                    add({**entry, "left_out": str(error).splitlines()[0]})
                    if not is_out_of_memory(error):
                        break
    measured = [entry for entry in report["steps"] if "tokens_per_s" in entry]
    print(f"{len(measured)} measured:", ", ".join(f"{entry['shape']} {entry['tokens_per_s']:.0f} tok/s" +
                                                  (f", MFU {100 * entry['mfu']:.1f} %" if entry["mfu"] else "") for entry in measured))
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
