"""The PyTorch twin of tools/gpt: GPT-2 as a plain nn.Module, trained for ten AdamW steps on fixed data.

It shares no code with Sluice; initial weights and tokens come from the same counter hash, written again here. Writes
gpt2_tied.{json,f32} and gpt2_untied.{json,f32} beside itself (README.md says what is in them).

  python3 twin.py            write the golden files (float32)
  python3 twin.py --check    compare float32 with float64 and write nothing
"""
import argparse
import json
import math
import pathlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional

SEED = 1234
STEPS = 10
MODEL = {"layers": 2, "heads": 2, "embedding": 16, "context": 16, "vocabulary": 64}
BATCH = 2
OPTIMIZER = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-4, "weight_decay": 0.1, "clip_norm": 1.0}


# --- The counter hash of tools/gpt/model/counter_random.h ---


def mixed(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def bits(seed, stream, indexes):
    name = 0xCBF29CE484222325
    for byte in stream.encode():
        name = ((name ^ byte) * 0x100000001B3) % 2**64
    with np.errstate(over="ignore"):
        key = mixed(mixed(np.uint64(seed)) ^ np.uint64(name))
        return mixed(key + (indexes + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def normal(seed, stream, count):
    indexes = np.arange(2 * count, dtype=np.uint64)
    uniform = (bits(seed, stream, indexes) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.sqrt(-2 * np.log(1 - uniform[0::2])) * np.cos(2 * math.pi * uniform[1::2])


# --- The model ---


class Conv1D(nn.Module):
    """y = x W + b, the orientation of GPT-2's checkpoints."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(width, 3 * width)
        self.c_proj = Conv1D(width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        query, key, value = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -math.inf).softmax(dim=3) @ value
        return self.c_proj(y.transpose(1, 2).reshape(batch, sequence, width))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = Conv1D(width, 4 * width)
        self.c_proj = Conv1D(4 * width, width)

    def forward(self, x):
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    def __init__(self, layers, heads, embedding, context, vocabulary, tied_head):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, embedding)
        self.wpe = nn.Embedding(context, embedding)
        self.h = nn.ModuleList(Block(embedding, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(embedding)
        self.lm_head = None if tied_head else nn.Linear(embedding, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            parameter.data.copy_(initial_value(name, tuple(parameter.shape), layers))

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        table = self.wte.weight if self.lm_head is None else self.lm_head.weight
        logits = self.ln_f(x) @ table.t()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initial_value(name, shape, layers):
    """Rounded to float32 in either precision, so that both start from the same weights."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    deviation = 0.02 / math.sqrt(2 * layers) if name.endswith(".c_proj.weight") else 0.02
    return torch.from_numpy((deviation * normal(SEED, name, math.prod(shape))).astype(np.float32)).view(shape)


# --- Training ---


def micro_batch(step):
    """Token j of sequence i of step s is number (s * batch + i) * (context + 1) + j of the stream "golden data"."""
    row = MODEL["context"] + 1
    indexes = np.arange(BATCH * row, dtype=np.uint64) + np.uint64(step * BATCH * row)
    tokens = (bits(SEED, "golden data", indexes) % np.uint64(MODEL["vocabulary"])).astype(np.int64)
    tokens = torch.from_numpy(tokens).view(BATCH, row)
    return tokens[:, :-1], tokens[:, 1:]


def train(tied_head, dtype):
    torch.set_default_dtype(dtype)
    model = Gpt2(**MODEL, tied_head=tied_head)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": OPTIMIZER["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=OPTIMIZER["learning_rate"],
        betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]),
        eps=OPTIMIZER["epsilon"],
        foreach=False,
    )
    names = [name for name, _ in model.named_parameters()]
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*micro_batch(step))
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
        for p in model.parameters():
            p.grad.mul_(min(1.0, OPTIMIZER["clip_norm"] / norm))
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    return {
        "names": names,
        "shapes": [list(p.shape) for p in model.parameters()],
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
    }


def write(tied_head):
    run = train(tied_head, torch.float32)
    path = pathlib.Path(__file__).parent / ("gpt2_tied" if tied_head else "gpt2_untied")
    document = {
        "written_by": f"twin.py, PyTorch {torch.__version__}, float32, CPU",
        "seed": SEED,
        "steps": STEPS,
        "batch": BATCH,
        "model": {**MODEL, "tied_head": tied_head},
        "optimizer": OPTIMIZER,
        "losses": run["losses"],
        "gradient_norms": run["norms"],
        "tensors": [{"name": name, "shape": shape} for name, shape in zip(run["names"], run["shapes"])],
    }
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    with open(path.with_suffix(".f32"), "wb") as file:
        for tensors in [*run["gradients"], run["parameters"]]:
            for name in run["names"]:
                file.write(tensors[name].numpy().astype("<f4").tobytes())


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check(tied_head):
    single, double = train(tied_head, torch.float32), train(tied_head, torch.float64)
    worst_loss = max(abs(a - b) / b for a, b in zip(single["losses"], double["losses"]))
    worst_gradient = max(
        (relative(single["gradients"][step][name], double["gradients"][step][name]), name, step)
        for step in range(STEPS)
        for name in double["names"]
    )
    worst_parameter = max((relative(single["parameters"][n], double["parameters"][n]), n) for n in double["names"])
    print(f"tied head {tied_head}: float32 against float64, largest relative differences")
    print(f"  loss {worst_loss:.1e}, gradient {worst_gradient}, parameter {worst_parameter}")
    print(f"  losses {double['losses'][0]:.4f} .. {double['losses'][-1]:.4f}, norms", *(f"{n:.3f}" for n in double["norms"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare float32 with float64, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for tied_head in (True, False):
        (check if arguments.check else write)(tied_head)
