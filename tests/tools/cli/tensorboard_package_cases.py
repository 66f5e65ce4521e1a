"""TensorBoard's own reader against the files of `sluice train --tensorboard`."""

import json
import os
import subprocess
import sys

from cli_support import CliCase
from python_packages import with_package

READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()
print(json.dumps({"scalars": {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in tags["scalars"]},
                  "texts": {tag: [[event.step, event.tensor_proto.string_val[0].decode()] for event in events.Tensors(tag)]
                            for tag in tags["tensors"]}}))
"""


class TensorboardPackage(CliCase):
    LABEL = "slow"

    def test_tensorboard_reads_what_the_run_wrote(self):
        packages = with_package(self, "tensorboard")
        done = self.run_sluice("train", self.write_config({"run.steps": 6}), "--tensorboard", "board", "--json", "run.json",
                               "--validate-every", 3, "--sample-every", 6, "--sample-prompt", "it ", "--sample-tokens", 20)
        read = subprocess.run([sys.executable, "-c", READ, "board"], cwd=self.folder, env={**os.environ, "PYTHONPATH": packages},
                              capture_output=True, text=True, check=True)
        told = json.loads(read.stdout)
        steps = self.read_json("run.json")["steps"]
        for tag, key in (("train/loss", "loss"), ("train/gradient_norm", "gradient_norm"), ("speed/tokens_per_s", "tokens_per_s")):
            self.assertEqual([step for step, _ in told["scalars"][tag]], [1, 2, 3, 4, 5, 6])
            for (_, value), step in zip(told["scalars"][tag], steps):
                self.assertAlmostEqual(value / step[key], 1, places=6)
        self.assertEqual([step for step, _ in told["scalars"]["validation/loss"]], [3, 6])
        self.assertNotIn("speed/mfu", told["scalars"])
        (step, text), = told["texts"]["sample"]
        self.assertEqual(step, 6)
        self.assertTrue(text.startswith("it "))
        self.assertIn("sample: it ", done.stdout)
