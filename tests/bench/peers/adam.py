#!/usr/bin/env python3
"""The CPU Adam of PyTorch (fused AdamW) and DeepSpeed (CPUAdam) against Sluice's, taking turns in one process tree.

    python tests/bench/peers/adam.py --sluice build/release/tools/sluice [--parameters N] [--rounds N] [--threads N]

Needs an environment of its own with torch, and deepspeed and ninja if that is to be measured (DS_ACCELERATOR=cpu where
the CUDA toolkit is not the one that torch was built with; it compiles for two minutes); what cannot be imported is left out
aloud. Run by hand, on an idle machine; prints medians and quartiles in parameters a second.

fp32: parameter, gradient and both moments in fp32 for all. bf16: bf16 gradient to new bf16 parameter with an exact fp32
master, as each really does it: Sluice in one pass over the split master; the peers copy the gradient to fp32, update the
fp32 master, and copy that to the bf16 parameter.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

import torch


def torch_step(parameters, is_bf16, foreign=None):
    """A function that does one whole step."""
    master = torch.nn.Parameter(torch.zeros(parameters))
    master.grad = torch.full((parameters,), 0.01)
    optimizer = (foreign or (lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)))([master])
    if not is_bf16:
        return optimizer.step
    gradient = torch.full((parameters,), 0.01, dtype=torch.bfloat16)
    half = torch.zeros(parameters, dtype=torch.bfloat16)

    def step():
        master.grad.copy_(gradient)
        optimizer.step()
        half.copy_(master.data)

    return step


def deepspeed_optimizer():
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(16))])
    except Exception as error:  # whatever its build of the extension throws
        print(f"deepspeed left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None
    return lambda p: DeepSpeedCPUAdam(p, lr=1e-3, adamw_mode=True)


def sluice_rates(options, threads):
    """One round of `sluice bench adam`: parameters a second, by state."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bench.json")
        subprocess.run([options.sluice, "bench", "adam", "--quiet", "--rounds", "3", "--parameters",
                        str(options.parameters), "--threads", str(threads), "--json", path], check=True)
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)["results"]
    return {row["state"]: row["parameters_per_s"]["median"] for row in rows}


def timed(step, parameters):
    begin = time.perf_counter()
    step()
    return parameters / (time.perf_counter() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    peers = {"torch": None}
    foreign = deepspeed_optimizer()
    if foreign:
        peers["deepspeed"] = foreign
    print(f"torch {torch.__version__}, {options.parameters} parameters, {options.threads} threads, "
          f"load {os.getloadavg()[0]:.1f}")
    for state, is_bf16 in (("fp32", False), ("split_bf16", True)):
        steps = {name: torch_step(options.parameters, is_bf16, peer) for name, peer in peers.items()}
        rates = {name: [] for name in ("sluice", *steps)}
        for step in steps.values():
            step()  # allocates the moments
        for _ in range(options.rounds):
            rates["sluice"].append(sluice_rates(options, options.threads)[state])
            for name, step in steps.items():
                rates[name].append(timed(step, options.parameters))
        for name, values in rates.items():
            low, middle, high = statistics.quantiles(values, n=4)
            ratio = statistics.median(s / v for s, v in zip(rates["sluice"], values))
            print(f"{state:<11}{name:<11}{middle * 1e-9:6.2f} [{low * 1e-9:.2f}, {high * 1e-9:.2f}] Gparam/s"
                  f"   sluice / it {ratio:.2f}")


if __name__ == "__main__":
    main()
