"""Activations and the order of micro-batches: the same bits everywhere, traffic as predicted, and
the order that the plan prefers."""

import itertools

from cli_support import ON_NVME, CliCase

UNTIED = {"model.tied_head": False, "model.layers": 5, "batch.micro_batches": 3}
SERIAL = {"optimizer.overlap": "serial"}
HOMES = ("recompute", "host", "nvme")
ORDERS = ("horizontal", "vertical")


class Activations(CliCase):
    LABEL = "command"

    def check_traffic(self, run):
        for step in run["steps"]:
            for key in ("nvme_read_bytes", "nvme_write_bytes", "activation_out_bytes",
                        "activation_in_bytes"):
                self.assertEqual(step[key], run["predicted_" + key], key)

    def smallest_budgets(self, values):
        for key in ("memory.device", "memory.host"):
            values = {**values, key: self.smallest_budget(key, values)}
        return values

    def test_every_home_and_order_gives_the_same_bits(self):
        kept = self.train({**UNTIED, **ON_NVME, **SERIAL})
        self.assertEqual(kept["order"], "horizontal")
        for home, order in itertools.product(HOMES, ORDERS):
            with self.subTest(home=home, order=order):
                run = self.train(self.smallest_budgets(
                    {**UNTIED, **SERIAL, **(ON_NVME if home == "nvme" else {}),
                     "batch.order": order, "activations": home}))
                self.assertEqual(run["state_sha256"], kept["state_sha256"])
                self.assertEqual(run["validation_loss"], kept["validation_loss"])
                self.assertEqual([step["loss"] for step in run["steps"]],
                                 [step["loss"] for step in kept["steps"]])
                self.assertEqual(run["order"], order)
                self.check_traffic(run)
                moves = home != "recompute"
                self.assertEqual(run["predicted_activation_in_bytes"] > 0, moves)
                # The factors and tiles of products are in both.
                self.assertLess(run["activation_bytes"], kept["activation_bytes"] * 0.6)

    def test_vertical_order_reads_parameters_once(self):
        values = self.smallest_budgets({**UNTIED, **SERIAL, **ON_NVME, "activations": "host",
                                        "batch.order": "horizontal", "batch.micro_batches": 8})
        horizontal = self.train(values)
        values = self.smallest_budgets({**values, "batch.order": "vertical"})
        vertical = self.train(values)
        saved = (horizontal["predicted_nvme_read_bytes"] - vertical["predicted_nvme_read_bytes"])
        parameters = 2 * horizontal["parameters"]  # bytes, read again by seven of eight
        self.assertGreater(saved, 0.8 * 2 * 7 * parameters * 0.8)

    def test_auto_takes_what_moves_fewer_bytes(self):
        values = {**UNTIED, **SERIAL, **ON_NVME, "batch.order": "vertical", "activations": "host"}
        values = {**self.smallest_budgets(values), "batch.order": "auto"}
        run = self.train(values)
        self.assertEqual(run["order"], "vertical")
        done = self.run_sluice("train", self.write_config(values))
        self.assertRegex(done.stdout, r"micro-batches vertical: .* read, .* per step; horizontal: ")
        plan = self.run_sluice("plan", self.write_config(values), "--json", "plan.json")
        self.assertRegex(plan.stdout, r"micro-batches vertical: .* read, .* per step; horizontal: ")
        document = self.read_json("plan.json")
        self.assertEqual(document["order"], "vertical")
        step = document["placements"][0]["step"]
        for key in ("nvme_read_bytes", "nvme_write_bytes", "activation_out_bytes",
                    "activation_in_bytes"):
            self.assertEqual(step[key], run["predicted_" + key], key)
        # Parameters in memory and activations on storage: vertical order would only cost.
        values = {**UNTIED, **SERIAL, "batch.order": "vertical", "activations": "nvme"}
        values = {**values, "memory.device": self.smallest_budget("memory.device", values)}
        self.assertEqual(self.train({**values, "batch.order": "auto"})["order"], "horizontal")

    def test_auto_leaves_a_tied_head_its_bits(self):
        values = {**SERIAL, **ON_NVME, "batch.micro_batches": 3, "batch.order": "vertical",
                  "activations": "host"}
        values = self.smallest_budgets(values)
        self.assertEqual(self.train({**values, "batch.order": "auto"})["order"], "horizontal")
        self.assertEqual(self.train(values)["order"], "vertical")

    def test_vertical_order_needs_room_for_activations(self):
        message = self.fail_train(2, {**UNTIED, "batch.order": "vertical"})
        self.assertIn('choose "recompute", "host" or "nvme"', message)
        self.assertEqual(self.train({"batch.order": "vertical"})["order"], "horizontal",
                         "one micro-batch goes both ways at once")
