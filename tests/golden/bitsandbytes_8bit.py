#!/usr/bin/env python3
"""usage: bitsandbytes_8bit.py

Writes bitsandbytes_8bit.bin: three updates of 8-bit AdamW by bitsandbytes on the CPU, for tests/cpu_optim/moment_codec_test.cc.
Little-endian; COUNT elements, with GROUPS scales for each moment:

  uint32 COUNT, uint32 STEPS; float32 parameters[COUNT]; then for each step: float32 gradients[COUNT]; after the update:
  float32 parameters[COUNT], uint8 codes of exp_avg[COUNT], float32 scales[GROUPS], uint8 codes of exp_avg_sq[COUNT],
  float32 scales[GROUPS]

Learning rate 1e-3, betas 0.9 and 0.999, epsilon 1e-8, decay 0.1. Every tensor is quantized (min_8bit_size=0). Needs torch and
bitsandbytes (0.50 or later has the update for the CPU).
"""

import pathlib
import struct

import bitsandbytes
import torch

COUNT, STEPS = 1000, 3


def main():
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(COUNT) * 0.05)
    optimizer = bitsandbytes.optim.AdamW8bit([parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, min_8bit_size=0)
    data = struct.pack("<II", COUNT, STEPS) + parameter.detach().numpy().tobytes()
    for step in range(STEPS):
        # Magnitudes over six decades inside a group, zeros, and a group of zeros in the first step.
        gradient = torch.randn(COUNT) * 10 ** (torch.rand(COUNT) * 6 - 6)
        gradient[::17] = 0
        gradient[256:512] *= step
        parameter.grad = gradient
        optimizer.step()
        state = optimizer.state[parameter]
        assert state["state1"].dtype == torch.uint8 and state["absmax1"].numel() == (COUNT + 255) // 256
        data += gradient.numpy().tobytes() + parameter.detach().numpy().tobytes()
        for codes, scales in (("state1", "absmax1"), ("state2", "absmax2")):
            data += state[codes].numpy().tobytes() + state[scales].numpy().tobytes()
    pathlib.Path(__file__).with_suffix(".bin").write_bytes(data)


main()
