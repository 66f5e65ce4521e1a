"""The plan that `sluice plan` prints is the plan of a run: random configs, each planned and then run for a step."""

import os
import random
import re

from cli_support import CliCase

BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def random_values(at_random):
    """Settings of a small training, of which some do not go together or do not fit."""
    def one_in(count):
        return at_random.randrange(count) == 0

    def budget():
        return "64MiB" if one_in(3) else f"{round(2 ** at_random.uniform(7, 13))}KiB"

    values = {
        "placement.parameters": at_random.choice(("auto", "device", "host", "nvme")),
        "placement.optimizer": at_random.choice(("auto", "host", "nvme")),
        "placement.gradients": at_random.choice(("auto", "device", "host", "nvme")),
        "memory.device": budget(), "memory.host": budget(), "memory.unified": at_random.choice(("auto", "off")),
        "storage.block_elements": 4096 << at_random.randrange(4),
        "batch.micro_batches": 1 + at_random.randrange(3), "batch.order": at_random.choice(("auto", "horizontal", "vertical")),
        "activations": at_random.choice(("keep", "recompute", "host", "nvme")),
        "precision.parameters": at_random.choice(("fp32", "bf16")),
        "optimizer.overlap": at_random.choice(("auto", "serial", "deferred", "eager", "speculative")),
        "optimizer.state": at_random.choice(("fp32", "bf16", "8bit")),
        "run.steps": 1}
    if one_in(2):
        values["optimizer.lanes"] = 1 + at_random.randrange(12)
    if values["optimizer.overlap"] == "eager" or one_in(3):
        values["optimizer.clip_norm"] = 0
    return values


def pools_of_head(text):
    """[(tier, pool, bytes)] of the table at the head of a run, with sizes as they are printed."""
    found = re.findall(r"^(device|host|nvme) +(\S+(?: \S+)*) +([\d.]+) ([KMG]?i?B)  ", text, re.MULTILINE)
    return [(tier, pool, float(size) * BYTES[unit]) for tier, pool, size, unit in found if pool != "= sum"]


class RandomPlans(CliCase):
    LABEL = "command"

    def check(self, values):
        """Returns whether there is a plan. Without one, run and plan refuse with the same words."""
        config = self.write_config(values)
        run = self.run_sluice("train", config, "--json", "run.json", expect=(0, 2, 5))
        planned = self.run_sluice("plan", config, "--json", "plan.json", expect=run.returncode)
        if run.returncode == 2:
            self.assertEqual(planned.stderr, run.stderr)
            return False
        plan = next(row for row in self.read_json("plan.json")["placements"] if row["name"] == "config")
        self.assertEqual(plan["fits"], run.returncode == 0)
        if not plan["fits"]:
            self.assertIn(plan["obstacle"], run.stderr)
            return False
        document = self.read_json("run.json")
        self.assertEqual((plan["device_bytes"], plan["host_bytes"]), (document["device_pool_bytes"], document["host_pool_bytes"]))
        self.assertEqual(plan["policy"], document["steps"][0]["policy"])
        for name in ("gradient_spill_bytes", "activation_out_bytes", "activation_in_bytes"):
            self.assertEqual(plan["step"][name], document[f"predicted_{name}"])
        self.assertEqual(plan["step"]["nvme_write_bytes"], document["predicted_nvme_write_bytes"])
        of_run = pools_of_head(run.stdout)
        of_plan = [(pool["tier"], pool["pool"], pool["size_bytes"]) for pool in plan["pools"] if pool["size_bytes"] != 0]
        self.assertEqual([pool[:2] for pool in of_run], [pool[:2] for pool in of_plan])
        for (_, pool, shown), (*_, exact) in zip(of_run, of_plan):
            self.assertAlmostEqual(shown, exact, delta=0.006 * exact, msg=pool)
        return True

    def test_random_configs_are_planned_as_they_run(self):
        cases = int(os.environ.get("SLUICE_TEST_CASES", 10 * int(os.environ.get("SLUICE_TEST_CASES_SCALE", "1"))))
        first = int(os.environ.get("SLUICE_TEST_SEED", "1"))
        plans = 0
        for seed in range(first, first + cases):
            values = random_values(random.Random(seed))
            with self.subTest(seed=seed, values=values):
                plans += self.check(values)
        if cases >= 10:
            self.assertGreater(plans, cases // 10)
