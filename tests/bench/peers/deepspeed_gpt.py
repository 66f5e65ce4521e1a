#!/usr/bin/env python3
"""torch_gpt.py's GPT-2 trained by DeepSpeed: ZeRO-3 on one CPU, with parameters and optimizer on NVMe. train_deepspeed.py runs it.

Options as torch_gpt.py, --path DIR, --aio FILE and --json FILE, to which it writes the same report with "bytes": bytes that each
step has read from storage and written. As it runs best: reads and writes of the optimizer pipelined, buffers for more pieces of
four million parameters than are ever under way, and small parameters in memory, as is DeepSpeed's default. A parameter leaves
memory behind each use: by default DeepSpeed would keep all of them, and end for lack of buffers.
"""

import json
import os
import pathlib
import sys
import time

import torch

import torch_gpt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "python" / "bench"))
import peers  # noqa: E402

PIECE = 4 << 20  # parameters that the optimizer updates together
OPTIMIZER_BUFFERS = 20
PARAMETER_BUFFERS = 16


def storage_bytes():
    counts = dict(line.split(": ") for line in open("/proc/self/io", encoding="ascii").read().splitlines())
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


def zero_of(path, model):
    return {
        "stage": 3, "sub_group_size": PIECE, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": PIECE,
        "stage3_max_live_parameters": 2 * PIECE,
        "offload_optimizer": {"device": "nvme", "nvme_path": path, "buffer_count": OPTIMIZER_BUFFERS, "pin_memory": False,
                              "pipeline_read": True, "pipeline_write": True},
        "offload_param": {"device": "nvme", "nvme_path": path, "buffer_count": PARAMETER_BUFFERS, "max_in_cpu": 0,
                          "buffer_size": max(parameter.numel() for parameter in model.parameters())},
    }


def main():
    parser = torch_gpt.options_of(__doc__)
    for name in ("--path", "--aio", "--json"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(arguments.threads)
    model = torch_gpt.Gpt(arguments.layers, arguments.heads, arguments.width, arguments.context, arguments.vocabulary)
    count = sum(parameter.numel() for parameter in model.parameters())
    with open(arguments.aio, encoding="ascii") as file:
        aio = json.load(file)
    engine = peers.deepspeed_engine(model, zero_of(arguments.path, model), 1.0, bf16=arguments.dtype == "bf16", aio=aio,
                                    adam={"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1})
    report = {"tokens": arguments.batch * arguments.context, "parameters": count, "time_s": [], "cpu_s": [], "bytes": []}
    batches = torch_gpt.batches_of(arguments)
    for _ in range(arguments.steps):
        begin, cpu_begin, bytes_begin = time.monotonic(), time.process_time(), storage_bytes()
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        loss.item()
        report["time_s"].append(time.monotonic() - begin)
        report["cpu_s"].append(time.process_time() - cpu_begin)
        report["bytes"].append(storage_bytes() - bytes_begin)
    report["peak_rss_bytes"] = torch_gpt.peak_rss_bytes()
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
