#!/usr/bin/env python3
"""PyTorch's own training step of the shapes of `sluice bench gpu`, as the yardstick: GPT-2 in bf16 with scaled_dot_product_attention
and fused AdamW, everything on the GPU. Where they are installed, also torchao's optimizer in host memory, and Sluice's for PyTorch with
its state in host memory and on storage.

    torch_step.py [--device cuda] [--shape 124M|1.5B|7B ...] [--optimizer NAME ...] [--path FOLDER] [--steps N] [--seconds S]
                  [--json FILE]

Each shape is tried as it is and then, if that runs out of memory, with activations computed again. FILE is written anew after each
measurement. The moments of torch and torchao are bf16 as the parameters are, and there is no fp32 master copy: 8 bytes per
parameter, where Sluice keeps 14. torchao takes gradients in the backward pass, before they could be clipped; sluice_backward does the
same, and the other optimizers clip. Exits with 77 without a GPU.
"""

import argparse
import gc
import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# layers, heads, width, context, sequences
SHAPES = {"124M": (12, 12, 768, 1024, 16), "1.5B": (48, 25, 1600, 1024, 8), "7B": (32, 32, 4096, 2048, 4), "test": (2, 2, 32, 16, 2)}
VOCABULARY = 50257


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
        x = self.tokens(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


# Each makes an optimizer and says how gradients are clipped before its step(). Where its package is absent, it is left out.


def clip(parameters):
    nn.utils.clip_grad_norm_(parameters, 1.0)


def clip_nothing(parameters):
    pass


def fused_adamw(parameters, device, path):
    return torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.1, fused=device == "cuda"), clip


def torchao_offload(parameters, device, path):
    from torchao.optim import CPUOffloadOptimizer
    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, lr=1e-5, weight_decay=0.1, fused=True), clip_nothing


def sluice_optimizer(parameters, place, path, **options):
    import sluice_offload
    config = {"placement": {"optimizer": place}, "storage": {"paths": [path]}}
    return sluice_offload.optim.AdamW(parameters, lr=1e-5, weight_decay=0.1, config=config, **options), clip_nothing


def sluice_host(parameters, device, path):
    return sluice_optimizer(parameters, "host", path, clip_norm=1.0)


def sluice_backward(parameters, device, path):
    return sluice_optimizer(parameters, "host", path, gradients="backward")


def sluice_nvme(parameters, device, path):
    return sluice_optimizer(parameters, "nvme", path, clip_norm=1.0)


OPTIMIZERS = {made.__name__: made for made in (fused_adamw, sluice_host, sluice_backward, torchao_offload, sluice_nvme)}


def measure(name, device, recompute, make_optimizer, steps, path):
    layers, heads, width, context, sequences = SHAPES[name]
    torch.manual_seed(1)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Gpt(layers, heads, width, context, recompute)
        torch.set_default_dtype(torch.float32)
    optimizer, clip_gradients = make_optimizer(list(model.parameters()), device, path)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for step in range(steps + 2):  # two that are not counted
        tokens = torch.randint(VOCABULARY, (sequences, context + 1), device=device)
        synchronize()
        begin = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        clip_gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        if step >= 2:
            times.append(time.perf_counter() - begin)
    if hasattr(optimizer, "close"):
        optimizer.close()
    median = statistics.median(times)
    return {"tokens_per_s": sequences * context / median, "step_s": {"median": median, "least": min(times), "most": max(times)},
            "device_most_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0, "loss": loss.item(),
            "parameters": sum(p.numel() for p in model.parameters())}


def is_out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS)
    parser.add_argument("--path", default="/var/tmp", help="folder for state on storage")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=400, help="no measurement begins after so many")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is false")
        return 77
    report = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device, "steps": []}

    def add(entry):
        report["steps"].append(entry)
        print(json.dumps(entry), flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1)

    begin = time.perf_counter()
    for make_optimizer in (OPTIMIZERS[name] for name in options.optimizer or OPTIMIZERS):
        for shape in options.shape or ("124M", "1.5B", "7B"):
            for recompute in (False, True):
                entry = {"shape": shape, "optimizer": make_optimizer.__name__, "recompute": recompute}
                if time.perf_counter() - begin > options.seconds:
                    add({**entry, "left_out": "--seconds are over"})
                    break
                if options.device == "cuda":
                    gc.collect()  # the model of the measurement before
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                try:
                    add({**entry, **measure(shape, options.device, recompute, make_optimizer, options.steps, options.path)})
                    break
                except (RuntimeError, ImportError, MemoryError) as error:
                    add({**entry, "left_out": str(error).splitlines()[0]})
                    if not is_out_of_memory(error):
                        break
    measured = [entry for entry in report["steps"] if "tokens_per_s" in entry]
    print(f"{len(measured)} measured:", ", ".join(f"{entry['shape']} {entry['tokens_per_s']:.0f} tok/s" for entry in measured))
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
