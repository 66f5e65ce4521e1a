#!/usr/bin/env python3
"""Trains a mixture of experts of plain PyTorch on a text. A step reads, updates and writes the experts that its rows use, and leaves
the others where they are, on a drive.

    train_experts.py TEXT --storage /nvme    trains, prints losses, that of text which was held out, and what a step moved
    train_experts.py TEXT --in-memory        the same with torch.optim.AdamW, to compare the losses

Each layer has 32 experts. A router sends each row of the batch, 64 bytes of text, to two of them. Needs torch and the package
sluice_offload. Only the lines marked "Sluice" know where the state is.
"""

import argparse
import pathlib

import torch
from torch import nn

import sluice_offload as sluice

WIDTH, LAYERS, HEADS, EXPERTS, USED, LENGTH, ROWS, BYTES = 128, 4, 4, 32, 2, 64, 4, 256
CONFIG = {"placement": {"parameters": "nvme", "optimizer": "nvme"},
          "memory": {"device": "8MiB", "host": "24MiB"},  # the state takes 101 MiB
          "optimizer": {"clip_norm": 1.0, "clip_epsilon": 1e-6, "untouched": "skip"}}


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Experts(nn.Module):
    announce = staticmethod(lambda *experts: None)

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.imbalance = torch.tensor(0.0)

    def forward(self, x):
        shares = self.router(x.mean(1)).softmax(-1)  # [rows, experts]
        weights, chosen = shares.topk(USED)
        used = chosen.unique().tolist()
        self.announce(*(self.experts[i] for i in used))  # the engine begins to read them
        # The loss of Switch Transformer that keeps rows from all taking the same experts (Fedus et al. 2021, section 2.2).
        taken = torch.zeros_like(shares).scatter(1, chosen, 1.0).mean(0)
        self.imbalance = EXPERTS / USED * (taken * shares.mean(0)).sum()
        result = torch.zeros_like(x)
        for i in used:
            row, place = (chosen == i).nonzero(as_tuple=True)
            result = result.index_add(0, row, weights[row, place, None, None] * self.experts[i](x[row]))
        return result


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.experts = Attention(), nn.LayerNorm(WIDTH), Experts()

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.experts(self.norm(x))


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, tokens):
        """The loss of guessing each next byte, in nats per byte, and the imbalance of the experts."""
        x = self.embedding(tokens[:, :-1]) + self.positions(torch.arange(tokens.shape[1] - 1))
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())
        return loss, sum(block.experts.imbalance for block in self.blocks) / LAYERS


def batch(text, seed):
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[start:start + LENGTH + 1] for start in starts])


def positive(text):
    """A number of steps."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--storage", default="/var/tmp", metavar="FOLDER", help="a folder on the drive (default: %(default)s)")
    parser.add_argument("--in-memory", action="store_true", help="trains with torch.optim.AdamW instead")
    parser.add_argument("--steps", type=positive, default=300)
    options = parser.parse_args()

    try:
        written = options.text.read_bytes()
    except OSError as error:
        parser.error(str(error))
    if len(written) <= 20 * LENGTH:
        parser.error(f"{options.text} is too short: a twentieth of it is held out, and has to have more than {LENGTH} bytes")
    text = torch.frombuffer(bytearray(written), dtype=torch.uint8).long()
    text, held_out = text[:-len(text) // 20], text[-len(text) // 20:]
    torch.manual_seed(1)
    model = TextModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    if not options.in_memory:                                                                    # Sluice, from here
        optimizer = sluice.offload(model, CONFIG | {"storage": {"paths": [options.storage]}}, units=[Attention],
                                   announced=[Expert], optimizer=optimizer)
        for block in model.blocks:
            block.experts.announce = optimizer.announce                                          # to here

    for step in range(options.steps):
        loss, imbalance = model(batch(text, step))
        (loss + 0.01 * imbalance).backward()
        if options.in_memory:                             # Sluice clips by itself, as CONFIG says
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0 or step == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.5f}", flush=True)
    if not options.in_memory:
        moved = optimizer.report
        print(f"the last step read {moved.nvme_read_bytes / 2**20:.1f} MiB and wrote {moved.nvme_write_bytes / 2**20:.1f} MiB")
    with torch.no_grad():
        losses = [model(batch(held_out, seed))[0].item() for seed in range(50)]
    print(f"held-out loss {sum(losses) / len(losses):.5f} nats per byte")
    if not options.in_memory:
        optimizer.close()


if __name__ == "__main__":
    main()
