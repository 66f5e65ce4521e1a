#!/usr/bin/env python3
"""Trains a small GPT of plain PyTorch on a text, with parameters and Adam's state on a drive.

    train_text.py TEXT --storage /nvme                 trains, prints losses and a sample
    train_text.py TEXT --storage /nvme --resume run    the same; started again after a crash or Ctrl-C, it goes on
    train_text.py TEXT --in-memory                     the same with torch.optim.AdamW, to compare the losses

Needs torch and the package sluice_offload. Only the lines marked "Sluice" know where the state is.
"""

import argparse
import pathlib

import torch
from torch import nn

import sluice_offload as sluice

WIDTH, LAYERS, HEADS, LENGTH, ROWS, BYTES = 128, 6, 4, 64, 8, 256
CONFIG = {"placement": {"parameters": "nvme", "optimizer": "nvme"},
          "memory": {"device": "3MiB", "host": "8MiB"},  # the state takes 20 MiB
          "optimizer": {"clip_norm": 1.0, "clip_epsilon": 1e-6}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(text, step):
    """Rows of the text that depend on the step alone, so that a resumed run sees the data of one without a break."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator)
    return torch.stack([text[start:start + LENGTH + 1] for start in starts])


def sample(model, count=120):
    tokens = torch.tensor([list(b"And ")])
    with torch.no_grad():
        for _ in range(count):
            best = model(tokens[:, -LENGTH:])[0, -1].softmax(0).multinomial(1)
            tokens = torch.cat([tokens, best[None]], 1)
    return bytes(tokens[0].tolist()).decode("ascii", "replace")


def positive(text):
    """A number of steps."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--storage", default="/var/tmp", metavar="FOLDER", help="a folder on the drive (default: %(default)s)")
    parser.add_argument("--resume", metavar="NAME", help="keeps the state there under this name, and goes on from it")
    parser.add_argument("--in-memory", action="store_true", help="trains with torch.optim.AdamW instead")
    parser.add_argument("--steps", type=positive, default=200)
    options = parser.parse_args()
    if options.in_memory and options.resume:
        parser.error("--resume goes on from the state on a drive, which --in-memory has none of")

    try:
        written = options.text.read_bytes()
    except OSError as error:
        parser.error(str(error))
    if len(written) <= LENGTH:
        parser.error(f"{options.text} has {len(written)} bytes; a row takes {LENGTH + 1}")
    text = torch.frombuffer(bytearray(written), dtype=torch.uint8).long()
    torch.manual_seed(1)
    model = TextModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    first = 0
    if not options.in_memory:                                                                    # Sluice, from here
        storage = {"paths": [options.storage]}
        if options.resume:
            storage["state"] = {"name": options.resume}
        optimizer = sluice.offload(model, CONFIG | {"storage": storage}, units=[Block], optimizer=optimizer,
                                   resume=bool(options.resume))
        first = optimizer.resumed_step or 0                                                      # to here

    for step in range(first, options.steps):
        tokens = batch(text, step)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if options.in_memory:                             # Sluice clips by itself, as CONFIG says
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0 or step == first:
            print(f"step {step + 1:4d}  loss {loss.item():.5f}", flush=True)
    print(sample(model))
    if not options.in_memory:
        optimizer.close()


if __name__ == "__main__":
    main()
