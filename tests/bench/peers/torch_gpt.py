#!/usr/bin/env python3
"""A GPT-2, by default the quickstart's, trained by PyTorch on the CPU, for speed: prints {"tokens": tokens a step,
"parameters": ..., "time_s": [seconds of each step], "cpu_s": [...], "peak_rss_bytes": ...}.

Run by hand in an environment of its own (python3 -m venv env; env/bin/pip install torch numpy). The same shape, batch, global-norm
clipping and AdamW as configs/in_memory.json; scaled_dot_product_attention and fused AdamW, PyTorch's best on this processor. With
--dtype bf16 model, activations and gradients are bf16, and AdamW updates fp32 masters, from which the model is rounded each step.
"""

import argparse
import json
import re
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        split = lambda t: t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        query, key, value = (split(t) for t in self.c_attn(self.ln_1(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, context, vocabulary):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def options_of(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", default="data/kjv.txt")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    for name, value in (("layers", 6), ("heads", 6), ("width", 192), ("context", 128), ("vocabulary", 256), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser


def batches_of(arguments):
    """Draws tokens and targets without end."""
    context = arguments.context
    text = torch.frombuffer(bytearray(open(arguments.data, "rb").read()), dtype=torch.uint8).long()
    while True:
        starts = torch.randint(0, len(text) - context - 1, (arguments.batch,))
        yield torch.stack([text[s:s + context] for s in starts]), torch.stack([text[s + 1:s + context + 1] for s in starts])


def peak_rss_bytes():
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status", encoding="ascii").read()).group(1)) << 10


def main():
    arguments = options_of(__doc__).parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(arguments.threads)
    model = Gpt(arguments.layers, arguments.heads, arguments.width, arguments.context, arguments.vocabulary)
    parameters = masters = list(model.parameters())
    if arguments.dtype == "bf16":
        masters = [parameter.detach().clone() for parameter in parameters]
        model.to(torch.bfloat16)
        parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    times, cpu_times = [], []
    batches = batches_of(arguments)
    for _ in range(arguments.steps):
        begin, cpu_begin = time.monotonic(), time.process_time()
        loss = model(*next(batches))
        model.zero_grad(set_to_none=True)
        loss.backward()
        if masters is not parameters:
            for master, parameter in zip(masters, parameters):
                master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        if masters is not parameters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        loss.item()
        times.append(time.monotonic() - begin)
        cpu_times.append(time.process_time() - cpu_begin)
    print(json.dumps({"tokens": arguments.batch * arguments.context, "parameters": sum(p.numel() for p in parameters),
                      "time_s": times, "cpu_s": cpu_times, "peak_rss_bytes": peak_rss_bytes()}))


if __name__ == "__main__":
    main()
