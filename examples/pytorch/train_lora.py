#!/usr/bin/env python3
"""Fine-tunes adapters (LoRA) of a frozen model whose weights stay on a drive.

    train_lora.py --storage /nvme [--quantized]

The frozen weights are read for each pass, and never written. Only the adapters have gradients, moments and masters. With
--quantized the frozen weights have 8 bits each, and a quarter of the bytes moves. Needs torch and the package sluice_offload.
Only the lines marked "Sluice" know where the weights are.
"""

import argparse

import torch
from torch import nn

import sluice_offload as sluice

WIDTH, LAYERS, RANK, ROWS = 256, 6, 8, 32


class Quantized(nn.Module):
    """A frozen linear layer with weights of 8 bits and a scale for each row."""

    def __init__(self, linear):
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.codes = nn.Parameter((linear.weight.detach() / scales).round().to(torch.int8), requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.codes * self.scales, self.bias)


class Adapted(nn.Module):
    """A frozen linear layer, and a trained one of low rank beside it."""

    def __init__(self, inputs, outputs, quantized):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        if quantized:
            self.base = Quantized(self.base)
        self.down = nn.Parameter(torch.randn(RANK, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


class Block(nn.Module):
    def __init__(self, quantized):
        super().__init__()
        self.wide, self.narrow = Adapted(WIDTH, 4 * WIDTH, quantized), Adapted(4 * WIDTH, WIDTH, quantized)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))


def positive(text):
    """A number of steps."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", default="/var/tmp", metavar="FOLDER", help="a folder on the drive (default: %(default)s)")
    parser.add_argument("--quantized", action="store_true", help="frozen weights of 8 bits")
    parser.add_argument("--steps", type=positive, default=40)
    options = parser.parse_args()

    torch.manual_seed(1)
    model = nn.Sequential(*(Block(options.quantized) for _ in range(LAYERS)))
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    config = {"placement": {"parameters": "nvme", "optimizer": "host"}, "storage": {"paths": [options.storage]},  # Sluice, from here
              "memory": {"device": "6MiB", "host": "12MiB"}}
    optimizer = sluice.offload(model, config, units=[Block], lr=1e-2)                                              # to here
    for step in range(options.steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0 or step == 0:
            print(f"step {step + 1:3d}  loss {loss.item():.5f}", flush=True)
    report = optimizer.report
    print(f"{frozen:,} frozen and {trained:,} trained parameters; the last step read {report.nvme_read_bytes:,} bytes from the drive "
          f"and wrote {report.nvme_write_bytes:,}")
    optimizer.close()


if __name__ == "__main__":
    main()
