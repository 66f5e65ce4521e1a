"""Leases and updates without copies on the host device (memory.unified), as the report counts them; and the same
training in memory as a yardstick (--compare-memory)."""

import json
import os

from cli_support import ON_NVME, SOURCE, CliCase

COPIES = ("copied_parameter_bytes", "copied_gradient_bytes", "copied_update_bytes")
# The quickstart's embeddings, 256 tokens and 128 places of width 192, in bf16. Its tied head uses them a second time in
# backward, and adds that gradient to the first.
SECOND_GRADIENT = (256 + 128) * 192 * 2


def quickstart_in_memory():
    """configs/in_memory.json, with a text of the test and few steps."""
    with open(os.path.join(SOURCE, "configs", "in_memory.json"), encoding="utf-8") as file:
        lines = [line for line in file if not line.startswith("//")]
    config = json.loads("".join(lines))
    config["data"] = {"file": "text.txt"}
    config["batch"]["sequences"] = 1
    config["run"].update(steps=3, device="host")
    return config


class Unified(CliCase):
    LABEL = "command"

    def copies(self, values):
        run = self.train(values, base=quickstart_in_memory())
        return [[step[key] for key in COPIES] for step in run["steps"]], run["state_sha256"]

    def test_the_quickstart_in_memory_copies_nothing_for_a_use(self):
        in_place, state = self.copies({"memory.unified": "auto"})
        self.assertEqual(in_place, [[0, SECOND_GRADIENT, 0]] * 3)
        at_home, same_state = self.copies({"memory.unified": "on", "placement.parameters": "host"})
        self.assertEqual(at_home, in_place)
        self.assertEqual(same_state, state)
        for values in ({}, {"placement.parameters": "host"}):
            copied, same_state = self.copies({"memory.unified": "off", "optimizer.overlap": "serial", **values})
            self.assertEqual(same_state, state)
            self.assertGreater(min(sum(step[:1] + step[2:]) for step in copied), 2 * 2_700_000)
            self.assertGreater(min(step[1] for step in copied), 2 * 2_700_000)

    def test_the_end_tells_the_copies(self):
        said = self.run_sluice("train", self.write_config({"model.tied_head": False, "placement.parameters": "host"})).stdout
        self.assertIn("no parameters or gradients were copied for leases and updates", said)
        self.assertIn("host memory, too: the sum below counts both", said)
        said = self.run_sluice("train", self.write_config(ON_NVME)).stdout
        self.assertRegex(said, r"copied in memory in a step: [\d.]+ KiB of parameters for leases, [\d.]+ KiB of gradients, 0 B for updates")

    def test_the_same_training_in_memory(self):
        run = self.train({**ON_NVME, "run.steps": 4}, "--compare-memory", 3)
        compared = run["in_memory"]
        self.assertEqual((compared["steps"], compared["losses_are_equal"]), (3, True))
        mean_s = sum(step["time_s"] for step in run["steps"][1:]) / 3
        self.assertAlmostEqual(compared["percent"], 100 * compared["step_s"] / mean_s, 6)
        self.assertGreater(compared["device_pool_bytes"] + compared["host_pool_bytes"], run["state_bytes"])
        self.assertEqual(run["state_sha256"], self.train({**ON_NVME, "run.steps": 4})["state_sha256"])
        self.assertIsNone(self.read_json("run.json")["in_memory"])
        said = self.run_sluice("train", "config.json", "--compare-memory", 2).stdout
        self.assertRegex(said, r"the same training in memory takes \d.* of its speed, and its losses to the bit")
        self.run_sluice("train", "config.json", "--compare-memory", 1, expect=2)
