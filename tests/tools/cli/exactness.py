"""The central promise, over the real command: wherever the state lives, 20 steps end in the same
bits. One run of one variant for CTest:

  exactness.py PRECISION MICRO_BATCHES VARIANT REFERENCE_FILE

With SLUICE_TEST_DEVICE=cuda, on a GPU. The variant "reference" trains in memory on one thread and writes REFERENCE_FILE; every other one
is compared with that file. exactness.py --list names the variants, exactness.py --list-once
those that change how state moves and not where it is: one precision and number of micro-batches says of them what all would.
"""

import json
import re
import subprocess
import sys
import unittest

from cli_support import DEVICE, ON_NVME, CliCase

STEPS = 20
SKIPPED = 77

IN_MEMORY = {"placement.parameters": "device", "placement.optimizer": "host"}
SERIAL = {"optimizer.overlap": "serial"}

# The settings of each variant beside precision and micro-batches.
VARIANTS = {
    "reference": {**IN_MEMORY, **SERIAL, "run.threads": 1},
    "two_threads": {**IN_MEMORY, "run.threads": 2},
    "parameters_in_host_memory": {"placement.parameters": "host", "placement.optimizer": "host"},
    "in_memory_copied": {**IN_MEMORY, "memory.unified": "off"},
    "parameters_in_host_memory_copied": {"placement.parameters": "host", "placement.optimizer": "host",
                                         "memory.unified": "off"},
    "parameters_on_nvme": {"placement.parameters": "nvme", "placement.optimizer": "host"},
    "optimizer_on_nvme": {"placement.parameters": "device", "placement.optimizer": "nvme"},
    "parameters_on_nvme_serial": {"placement.parameters": "nvme", "placement.optimizer": "host",
                                  **SERIAL},
    "optimizer_on_nvme_serial": {"placement.parameters": "device", "placement.optimizer": "nvme",
                                 **SERIAL},
    "optimizer_on_device": {"placement.optimizer": "device"},
    "optimizer_on_device_serial": {"placement.optimizer": "device", **SERIAL},
    "both_on_nvme": {**ON_NVME},
    "both_on_nvme_serial": {**ON_NVME, **SERIAL},
    "both_on_nvme_speculative": {**ON_NVME, "optimizer.overlap": "speculative"},
    "both_on_nvme_one_thread": {**ON_NVME, "run.threads": 1},
    "both_on_nvme_io_uring": {**ON_NVME, "storage.backend": "uring"},
    "both_on_nvme_reference_queue": {**ON_NVME, "storage.backend": "sync"},
    "both_on_nvme_depth_1": {**ON_NVME, "storage.queue_depth": 1},
    "blocks_of_16384": {**ON_NVME, "storage.block_elements": 16384},
    "smallest_device_budget": {**ON_NVME},
    "activations_recompute": {**ON_NVME, "activations": "recompute"},
    "activations_host": {"activations": "host"},
    "activations_nvme": {**ON_NVME, "activations": "nvme"},
    # Automatic placement, a device for one unit, and the host budget as a share of what would hold
    # everything: from all but nothing to nearly all.
    "host_budget_smallest": {},
    "host_budget_half": {},
    "host_budget_most": {},
}

ONCE = ("two_threads", "in_memory_copied", "parameters_in_host_memory_copied", "both_on_nvme_one_thread",
        "both_on_nvme_io_uring", "both_on_nvme_reference_queue", "both_on_nvme_depth_1", "blocks_of_16384")


class ExactnessCase(CliCase):
    def __init__(self, precision, micro_batches, variant, reference_file):
        super().__init__("runTest")
        self.variant = variant
        self.reference_file = reference_file
        self.values = {"precision.parameters": precision, "batch.micro_batches": micro_batches,
                       "run.steps": STEPS, **VARIANTS[variant]}

    def add_budgets(self):
        if self.variant == "smallest_device_budget" or self.variant.startswith("activations_"):
            self.values["memory.device"] = self.smallest_budget("memory.device", self.values)
        if not self.variant.startswith("host_budget_"):
            return
        self.values["memory.device"] = self.smallest_budget(
            "memory.device", {**self.values, "placement.parameters": "nvme"})
        smallest = int(self.smallest_budget("memory.host", self.values)[:-3])
        whole = smallest + 1400  # 12 bytes for each of 118,528 parameters, and their slots
        share = {"smallest": 0, "half": 0.5, "most": 0.9}[self.variant.removeprefix("host_budget_")]
        self.values["memory.host"] = f"{int(smallest + share * (whole - smallest))}KiB"

    def skip_without_io_uring(self):
        if self.variant != "both_on_nvme_io_uring":
            return
        probe = subprocess.run(self.command("train", self.write_config(
            {**self.values, "run.steps": 1}), "--quiet"), cwd=self.folder, capture_output=True,
                               check=False)
        if probe.returncode == 5 and b"io_uring" in probe.stderr:
            self.skipTest(probe.stderr.decode().strip())

    def skip_without_gpu(self):
        if DEVICE != "cuda":
            return
        found = re.search("CUDA: (.*)", self.run_sluice("doctor", expect=(0, 5)).stdout).group(1)
        if "computes there" not in found:
            self.skipTest(found)

    def runTest(self):
        self.skip_without_gpu()
        self.skip_without_io_uring()
        self.add_budgets()
        run = self.train(self.values)
        self.assertEqual(len(run["steps"]), STEPS)
        if self.values.get("optimizer.overlap") == "serial":
            for step in run["steps"]:
                self.assertEqual(step["nvme_read_bytes"], run["predicted_nvme_read_bytes"])
                self.assertEqual(step["nvme_write_bytes"], run["predicted_nvme_write_bytes"])
        if self.variant == "reference":
            self.check_reference(run)
            with open(self.reference_file, "w", encoding="utf-8") as file:
                json.dump(run, file)
        else:
            self.compare(run)

    def check_reference(self, run):
        self.assertEqual(run["predicted_nvme_read_bytes"], 0)
        self.assertEqual(run["predicted_nvme_write_bytes"], 0)
        self.assertRegex(run["state_sha256"], re.compile("^[0-9a-f]{64}$"))
        self.assertLess(run["steps"][-1]["loss"], run["steps"][0]["loss"] - 0.5, "it must learn")

    def compare(self, run):
        with open(self.reference_file, encoding="utf-8") as file:
            reference = json.load(file)
        uses_storage = "nvme" in self.values.values() or "host_budget" in self.variant
        self.assertEqual(run["predicted_nvme_write_bytes"] > 0, uses_storage)
        for key in ("loss", "gradient_norm"):
            self.assertEqual([step[key] for step in run["steps"]],
                             [step[key] for step in reference["steps"]])
        self.assertEqual(run["validation_loss"], reference["validation_loss"])
        self.assertEqual(run["state_sha256"], reference["state_sha256"])


def main():
    if sys.argv[1:] == ["--list"]:
        print(";".join(name for name in VARIANTS if name != "reference" and name not in ONCE))
        return 0
    if sys.argv[1:] == ["--list-once"]:
        print(";".join(ONCE))
        return 0
    precision, micro_batches, variant, reference_file = sys.argv[1:]
    case = ExactnessCase(precision, int(micro_batches), variant, reference_file)
    result = unittest.TextTestRunner(verbosity=2).run(case)
    if not result.wasSuccessful():
        return 1
    for _, reason in result.skipped:
        print("SKIPPED:", reason)
    return SKIPPED if result.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
