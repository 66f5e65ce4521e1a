"""The reports of a run: JSON, CSV, the table and the lines on standard output, the bar on a terminal, and that the
seed, and nothing else, decides the result."""

import csv
import os
import re

from cli_support import ON_NVME, CliCase

KEYS = {
    "parameters": int, "state_bytes": int, "seed": int, "steps": list,
    "predicted_nvme_read_bytes": int, "predicted_nvme_write_bytes": int,
    "predicted_nvme_read_bytes_least": int, "order": str,
    "predicted_activation_out_bytes": int, "predicted_activation_in_bytes": int,
    "validation_loss": float, "bigram_cross_entropy": float, "peak_rss_bytes": int,
    "state_sha256": str, "matrix_products": dict, "setting_changes": list,
}
STEP_KEYS = {
    "step": int, "loss": float, "gradient_norm": float, "time_s": float, "tokens": int,
    "nvme_read_bytes": int, "nvme_write_bytes": int, "stall_s": float,
    "compute_s": float, "exposed_io_s": float, "exposed_optimizer_s": float, "other_s": float,
    "hidden_share": float,
    "stall_for_update_s": float, "policy": str, "activation_out_bytes": int,
    "activation_in_bytes": int,
}


class Report(CliCase):
    LABEL = "command"

    def check_keys(self, document, keys):
        for key, kind in keys.items():
            self.assertIn(key, document)
            accepted = (int, float) if kind is float else kind
            self.assertIsInstance(document[key], accepted, key)

    def test_json(self):
        run = self.train(ON_NVME, "--seed", 5, "--steps", 4)
        self.check_keys(run, KEYS)
        for step in run["steps"]:
            self.check_keys(step, STEP_KEYS)
        # 256 x 64 and 32 x 64 embeddings, two blocks of 12 * 64^2 + 13 * 64, the last norm.
        self.assertEqual(run["parameters"], 118528)
        # 12 bytes per parameter, and the gaps between tensors and units.
        self.assertGreaterEqual(run["state_bytes"], 118528 * 12)
        self.assertLess(run["state_bytes"], 118528 * 12 * 1.05)
        self.assertEqual(run["seed"], 5)
        self.assertEqual([step["step"] for step in run["steps"]], [1, 2, 3, 4])
        self.assertEqual({step["tokens"] for step in run["steps"]}, {2 * 32})
        self.assertFalse(run["interrupted"])
        self.assertGreater(run["peak_rss_bytes"], 1 << 20)

    def test_the_kernels_of_matrix_products_are_named(self):
        products = self.train({"run.matmul": "openblas"})["matrix_products"]
        self.assertRegex(products["library"], r"^OpenBLAS \d+\.\d+")
        self.assertEqual(products["threads"], min(2, len(os.sched_getaffinity(0))))
        os.environ["OPENBLAS_CORETYPE"] = "Prescott"  # every x86-64 processor has what it needs
        self.addCleanup(os.environ.pop, "OPENBLAS_CORETYPE")
        self.assertEqual(self.train({"run.matmul": "openblas"})["matrix_products"]["kernels"], "Prescott")
        self.assertIn("kernels Prescott, factors fp32; ", self.run_sluice("train", "config.json", "--steps", 1).stdout)

    def test_traffic_is_predicted(self):
        for values in ({}, {"batch.micro_batches": 3}, {"placement.optimizer": "host"},
                       {"placement.parameters": "device"}, {"precision.parameters": "fp32"},
                       {"precision.gradients": "fp32"}):
            with self.subTest(values):
                run = self.train({**ON_NVME, "optimizer.overlap": "serial", **values})
                self.assertGreater(run["predicted_nvme_write_bytes"], 0)
                for step in run["steps"]:
                    self.assertEqual(step["nvme_read_bytes"], run["predicted_nvme_read_bytes"])
                    self.assertEqual(step["nvme_write_bytes"], run["predicted_nvme_write_bytes"])

    def test_seed_decides(self):
        first = self.train()
        again = self.train()
        other = self.train(None, "--seed", 8)
        self.assertEqual(first["state_sha256"], again["state_sha256"])
        self.assertEqual([step["loss"] for step in first["steps"]],
                         [step["loss"] for step in again["steps"]])
        self.assertNotEqual(first["state_sha256"], other["state_sha256"])
        self.assertNotEqual(first["steps"][0]["loss"], other["steps"][0]["loss"])

    def test_steps_and_set_override_the_config(self):
        by_option = self.train(None, "--steps", 2, "--seed", 3)
        by_set = self.train(None, "--set", "run.steps=2", "--set", "run.seed=3")
        by_file = self.train({"run.steps": 2, "run.seed": 3})
        self.assertEqual(len(by_option["steps"]), 2)
        self.assertEqual(by_option["state_sha256"], by_file["state_sha256"])
        self.assertEqual(by_set["state_sha256"], by_file["state_sha256"])

    def test_data_option_overrides_the_config(self):
        os.rename(self.path("text.txt"), self.path("other.txt"))
        self.assertIn("text.txt", self.fail_train(2))
        self.train(None, "--data", "other.txt")

    def test_csv(self):
        run = self.train(ON_NVME, "--csv", "run.csv")
        with open(self.path("run.csv"), encoding="ascii") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(len(rows), len(run["steps"]))
        for row, step in zip(rows, run["steps"]):
            # An empty cell says what null says in JSON: the step has no such figure.
            values = {key: value if key == "policy" else float(value) if value else None
                      for key, value in row.items()}
            # The shares of limits that are known at the end of the run are JSON's alone.
            self.assertEqual(values, {key: value for key, value in step.items()
                                      if not key.startswith("percent_of_")})

    def test_quiet_prints_nothing(self):
        done = self.run_sluice("train", self.write_config(), "--quiet")
        self.assertEqual((done.stdout, done.stderr), ("", ""))

    def test_a_line_for_each_step(self):
        done = self.run_sluice("train", self.write_config(ON_NVME), "--json", "run.json")
        run = self.read_json("run.json")
        lines = re.findall(r"^step +(\d+)/3  loss (\d+\.\d{4}) .*tok/s.*read.*written.*I/O wait.*optimizer wait",
                           done.stdout, re.MULTILINE)
        self.assertEqual(lines, [(str(step["step"]), f"{step['loss']:.4f}")
                                 for step in run["steps"]])
        self.assertNotIn("\r", done.stdout)
        for text in ("118528 parameters", "device  = sum", "host    = sum", "nvme    = sum",
                     "activations", run["state_sha256"], f"{run['validation_loss']:.4f}"):
            self.assertIn(text, done.stdout)

    def test_a_bar_on_a_terminal(self):
        for columns in (200, 80, 20):
            with self.subTest(columns=columns):
                shape = r"\[[#.]{24}\] " if columns > 50 else ""
                seen = self.on_terminal(columns, "train", self.write_config(), "--steps", "5")
                bars = re.findall(r"\r(" + shape + r"\d/5[^\r\x1b]*)\x1b\[K", seen)
                self.assertEqual([re.search(r"(\d)/5", bar).group(1) for bar in bars],
                                 ["1", "2", "3", "4", "5"])
                self.assertLess(max(len(bar) for bar in bars), columns, "a bar must not wrap")
                self.assertTrue(bars[-1].startswith("[" + "#" * 24 + "] 5/5" if shape else "5/5"))
                self.assertNotRegex(seen, r"step +1/5")
                self.assertRegex(seen, r"\x1b\[K\r\nsteps: compute [^\r]*\r\n(?s:.*)\nvalidation\sloss")
