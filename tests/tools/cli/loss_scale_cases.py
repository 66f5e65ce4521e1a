"""precision.loss_scale: the sequence of scales, steps that overflow, and that a scale changes no bit."""

import os

from cli_support import ON_NVME, CliCase
from universal_checkpoint import write_universal

MOVING = {"precision.parameters": "fp16", "precision.loss_scale.static": 0, "precision.loss_scale.initial_power": 31,
          "precision.loss_scale.window": 4, "run.steps": 40, "optimizer.overlap": "deferred"}


def scales_of(steps, values):
    """DeepSpeed's rule over the overflows that the run has had."""
    scale, left, good = 2.0 ** values["precision.loss_scale.initial_power"], values["precision.loss_scale.hysteresis"], 0
    for step in steps:
        yield scale
        if step["skipped"]:
            good = 0
            if left > 1:
                left -= 1
            else:
                scale = max(scale / 2, 1)
        else:
            good += 1
            if good == values["precision.loss_scale.window"]:
                scale, good, left = scale * 2, 0, values["precision.loss_scale.hysteresis"]


class LossScaleCase(CliCase):
    LABEL = "command"

    def test_scale_moves_by_the_rule_and_training_goes_on(self):
        for hysteresis in (1, 2):
            values = {**MOVING, "precision.loss_scale.hysteresis": hysteresis}
            run = self.train(values)
            self.assertEqual([step["loss_scale"] for step in run["steps"]], list(scales_of(run["steps"], values)))
            skipped = [step["skipped"] for step in run["steps"]]
            self.assertTrue(skipped[0], "the first scale overflows")
            self.assertFalse(all(skipped))
            for step in run["steps"]:
                self.assertEqual(step["gradient_norm"] is None, step["skipped"])
            self.assertLess(run["steps"][-1]["loss"], run["steps"][0]["loss"])

    def test_the_limits_and_a_trace_know_skipped_steps(self):
        values = {**MOVING, **ON_NVME, "precision.loss_scale.hysteresis": 20, "run.steps": 8}
        done = self.run_sluice("train", self.write_config(values), "--json", "run.json", "--trace", "run.trace")
        steps = self.read_json("run.json")["steps"]
        self.assertTrue(all(step["skipped"] for step in steps))
        self.assertIn("no two steps in a row had an update", done.stdout)
        self.assertEqual({step["percent_of_t_min"] for step in steps}, {None})
        self.run_sluice("trace", "summary", "run.trace", "--json", "summary.json")
        storage = self.read_json("summary.json")["ranks"][0]["storage"]
        self.assertEqual(storage["read_bytes_per_step"], sum(step["nvme_read_bytes"] for step in steps[1:-1]) / 6)
        self.assertIn("whatif predicts a step with its update", self.run_sluice("trace", "whatif", "run.trace", expect=2).stderr)

    def test_power_of_two_changes_no_bit(self):
        for precision in ("fp32", "bf16"):
            hashes = {self.train({"precision.parameters": precision, **placement,
                                  "precision.loss_scale.static": scale})["state_sha256"]
                      for scale, placement in ((1, {}), (1024, {}), (2 ** -6, ON_NVME))}
            self.assertEqual(len(hashes), 1, precision)

    def test_skipped_steps_leave_every_bit(self):
        hashes = set()
        for steps in (1, 3):
            run = self.train({**MOVING, "precision.loss_scale.hysteresis": 5, "run.steps": steps})
            self.assertTrue(all(step["skipped"] for step in run["steps"]))
            hashes.add(run["state_sha256"])
        self.assertEqual(len(hashes), 1)
        self.assertNotIn(self.train({"precision.parameters": "fp16", "run.steps": 1})["state_sha256"], hashes)

    def test_a_moving_scale_begins_where_the_state_has_none(self):
        values = {"precision.parameters": "fp16", "precision.loss_scale.static": 0}
        store = {**values, "storage.state.name": "other"}
        self.train({"precision.parameters": "fp32"}, "--checkpoint", "static", "--save", "weights.safetensors")
        write_universal(self.path("static", "latest"), self.path("universal"), 3)
        for origin, steps, options in (("weights.safetensors", 3, ()), ("universal", 6, ()), ("static", 6, ("--convert",))):
            with self.subTest(origin):
                whole = self.train({**values, "run.steps": steps}, "--resume-from", origin, "--accept-config", *options)
                config = self.write_config(store)
                self.run_sluice("state", "import", config, origin, *options)
                self.run_sluice("state", "inspect", config, "--json", "state.json")
                self.assertEqual(self.read_json("state.json")["ranks"][0]["loss_scale"], 65536)
                run = self.train({**store, "run.steps": steps}, "--resume=required", "--accept-config")
                for found in (whole, run):
                    self.assertEqual({step["loss_scale"] for step in found["steps"]}, {65536})
                self.assertEqual(run["state_sha256"], whole["state_sha256"])
                self.run_sluice("state", "remove", config)
        os.unlink(self.path("storage", "other.lock"))

    def test_what_cannot_be_is_refused(self):
        for values, told in (({"precision.loss_scale.hysteresis": 0}, "precision.loss_scale.hysteresis"),
                             ({"precision.loss_scale.windows": 1}, 'did you mean "precision.loss_scale.window"'),
                             ({**MOVING, "optimizer.overlap": "eager", "optimizer.clip_norm": 0}, "static loss scale")):
            done = self.run_sluice("train", self.write_config(values), expect=2)
            self.assertIn(told, done.stderr)

    def test_overflow_at_the_minimum_ends_the_run_with_a_remedy(self):
        values = {**MOVING, "precision.loss_scale.minimum": 2.0 ** 31, "precision.loss_scale.hysteresis": 1}
        done = self.run_sluice("train", self.write_config(values), expect=(1, 2, 3, 4, 5))
        self.assertIn("the loss scale is at its minimum", done.stderr)
