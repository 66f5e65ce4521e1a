#!/usr/bin/env python3
"""A training step with its state on storage: DeepSpeed's ZeRO-3 with NVMe offload against Sluice, in interleaved pairs.

    python3 tests/bench/peers/step.py --sluice build/release/tools/sluice --path DIR --environment DIR [--pairs N]

Both train the same shape (units of equal size, bf16, AdamW, clipping on) with next to no computation, on the bare drive:
DeepSpeed as step_deepspeed.py says, Sluice as `sluice bench step --policy deferred`, throttled to more than any drive gives.
DeepSpeed keeps its bf16 parameters in memory; Sluice runs with them there too (`in RAM`), and with everything on storage.

--environment is a Python environment with torch and deepspeed; where there is none it is made, from PyPI. DeepSpeed builds
its operators at the first run (minutes; needs a compiler and libaio's headers). Run by hand, on an idle machine; asserts
nothing.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

HERE = pathlib.Path(__file__).parent
PARAMETERS_ALONE = 1 / 6  # the 2 bytes of bf16, out of the state's 12 per parameter


def interpreter(environment):
    python = pathlib.Path(environment) / "bin" / "python"
    if not python.exists():
        subprocess.run(["python3", "-m", "venv", environment], check=True)
        subprocess.run([python, "-m", "pip", "install", "torch", "deepspeed", "ninja"], check=True)
    return python


def read_json(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def run_deepspeed(options, python, folder):
    report = os.path.join(folder, "peer.json")
    environment = dict(os.environ, DS_ACCELERATOR="cpu", PATH=f"{python.parent}:{os.environ['PATH']}")
    subprocess.run([python, HERE / "step_deepspeed.py", "--parameters", str(options.parameters), "--units",
                    str(options.units), "--path", folder, "--steps", str(options.steps), "--json", report],
                   check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return statistics.median(read_json(report)["step_s"])


def run_sluice(options, folder, memory_share):
    report = os.path.join(folder, "sluice.json")
    subprocess.run([options.sluice, "bench", "step", "--regime", "drive-bound", "--policy", "deferred", "--rate", "100GB",
                    "--parameters", str(options.parameters), "--units", str(options.units), "--steps", str(options.steps),
                    "--memory-share", str(memory_share), "--path", folder, "--json", report],
                   check=True, stdout=subprocess.DEVNULL)
    return read_json(report)["regimes"][0]["policies"][0]["step_s"]["median"]


def spread(values, digits):
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    python = interpreter(options.environment)
    times = {"DeepSpeed": [], "Sluice, parameters in RAM": [], "Sluice, all on storage": []}
    print(f"{options.parameters} parameters in {options.units} units, {options.pairs} rounds of {options.steps} steps, "
          f"load {os.getloadavg()[0]:.1f} at the beginning", flush=True)
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        for _ in range(options.pairs):
            times["DeepSpeed"].append(run_deepspeed(options, python, folder))
            times["Sluice, parameters in RAM"].append(run_sluice(options, folder, PARAMETERS_ALONE))
            times["Sluice, all on storage"].append(run_sluice(options, folder, 0))
            print("  " + ", ".join(f"{name} {values[-1]:.3f} s" for name, values in times.items()), flush=True)
    print("| | step s, median [quartiles] | DeepSpeed / it, within a round |\n|---|---|---|")
    for name, values in times.items():
        ratios = [peer / own for peer, own in zip(times["DeepSpeed"], values)]
        print(f"| {name} | {spread(values, 3)} | {spread(ratios, 2)} |")
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
