"""The time of sluice_offload.optim.AdamW's step with its moments in fp32, bf16 and 8 bits, in host memory and on storage.

    python states.py --path FOLDER [--parameters N] [--rounds N] [--json FILE]

bf16 parameters in tensors of a million elements. In each round every kind takes one step, so that a machine whose speed drifts
treats them alike. A step on storage ends when the state is at home. Prints medians, their ratio to fp32, and the bytes per parameter.
"""

import argparse
import json
import statistics
import time

import torch

import sluice_offload as sluice

STATES = ("fp32", "bf16", "8bit")
_ELEMENTS = 1 << 20


class Case:
    def __init__(self, state, place, path, count):
        self.parameters = [torch.nn.Parameter(torch.randn(_ELEMENTS).to(torch.bfloat16)) for _ in range(count)]
        for p in self.parameters:
            p.grad = torch.randn(_ELEMENTS).to(torch.bfloat16)
        config = {"placement": {"optimizer": place}, "storage": {"paths": [path]}, "optimizer": {"state": state}}
        if place == "nvme":
            config["memory"] = {"host": "256MiB"}
        self.optimizer = sluice.optim.AdamW(self.parameters, lr=1e-4, config=config)
        self.times = []

    def step(self):
        begin = time.perf_counter()
        self.optimizer.step()
        self.optimizer._engine.wait_all()
        self.times.append(time.perf_counter() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="a folder on the drive")
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    count = max(1, round(options.parameters / _ELEMENTS))
    found = []
    for place in ("host", "nvme"):
        cases = {state: Case(state, place, options.path, count) for state in STATES}
        for _ in range(options.rounds + 2):  # two that are not counted
            for case in cases.values():
                case.step()
        for state, case in cases.items():
            report = case.optimizer.report
            size = report.nvme_bytes if place == "nvme" else report.host_bytes
            times = case.times[2:]
            ratios = [own / exact for own, exact in zip(times, cases["fp32"].times[2:])]
            found.append({"state": state, "place": place, "step_s": statistics.median(times), "ratio_to_fp32": statistics.median(ratios),
                          "least": min(ratios), "most": max(ratios), "bytes_per_parameter": size / (count * _ELEMENTS)})
            print(f"{state:5} {place:5} {found[-1]['step_s'] * 1e3:8.1f} ms, {found[-1]['ratio_to_fp32']:.3f} of fp32 "
                  f"({min(ratios):.3f} to {max(ratios):.3f}), {found[-1]['bytes_per_parameter']:.2f} bytes per parameter", flush=True)
            case.optimizer.close()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
