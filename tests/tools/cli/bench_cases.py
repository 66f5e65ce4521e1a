"""sluice bench adam: its JSON file, its table, and what it refuses. No speed is asserted."""

import json
import re

from cli_support import CliCase, documented_words


SPREADS = {"parameters_per_s", "update_gb_per_s", "limit_gb_per_s", "percent_of_limit",
           "memcpy_gb_per_s", "triad_gb_per_s"}


class Bench(CliCase):
    LABEL = "cpu"

    def test_adam(self):
        done = self.run_sluice("bench", "adam", "--parameters", 100003, "--rounds", 3,
                               "--json", "bench.json")
        self.assertEqual(done.stderr, "")
        with open(self.path("bench.json"), encoding="utf-8") as file:
            document = json.load(file)
        self.assertEqual((document["parameters"], document["rounds"]), (100003, 3))
        self.assertFalse(document["interrupted"])
        rows = document["results"]
        self.assertEqual({row["state"]: row["bytes_per_parameter"] for row in rows},
                         {"fp32": 28, "split_bf16": 26, "fp16": 28})
        self.assertEqual({row["threads"] for row in rows if row["state"] == "fp32"},
                         {row["threads"] for row in rows if row["state"] == "fp16"})
        for row in rows:
            self.assertRegex(done.stdout, rf"(?m)^{row['state']} +{row['threads']} ")
            for key in SPREADS:
                spread = row[key]
                self.assertGreater(spread["p25"], 0)
                self.assertLessEqual(spread["p25"], spread["median"])
                self.assertLessEqual(spread["median"], spread["p75"])
        keys = set(document) | set(rows[0]) | set(rows[0]["update_gb_per_s"])
        self.assertEqual(keys - documented_words(), set())

    def test_simd_forced(self):
        """Each set that this machine has can be forced by name and is the one that runs; training
        under it ends in the same bits."""
        refused = self.run_sluice("bench", "adam", "--parameters", 1000, "--rounds", 1,
                                  prefix=("env", "SLUICE_SIMD=AVX9000"), expect=2)
        names = re.search(r"AVX9000.*set it to one of: ([A-Z0-9_, ]+)", refused.stderr)
        self.assertIsNotNone(names, refused.stderr)
        hashes = set()
        for name in names[1].strip().split(", "):
            prefix = ("env", f"SLUICE_SIMD={name.lower()}")
            self.run_sluice("bench", "adam", "--parameters", 1001, "--rounds", 1, "--threads", 1,
                            "--quiet", "--json", "bench.json", prefix=prefix)
            self.assertEqual(self.read_json("bench.json")["instruction_set"], name)
            self.run_sluice("train", self.write_config({"run.steps": 3}), "--quiet", "--json",
                            "run.json", prefix=prefix)
            hashes.add(self.read_json("run.json")["state_sha256"])
        self.assertEqual(len(hashes), 1)
        refused = self.run_sluice("train", self.write_config({"run.steps": 1}), "--quiet",
                                  prefix=("env", "SLUICE_SIMD=AVX9000"), expect=2)
        self.assertIn("AVX9000", refused.stderr)

    def test_inputs(self):
        for name in ("unaligned", "denormal"):
            self.run_sluice("bench", "adam", "--parameters", 100003, "--rounds", 1, "--quiet",
                            "--input", name, "--json", "bench.json")
            self.assertEqual(self.read_json("bench.json")["input"], name)
        self.run_sluice("bench", "adam", "--input", "huge", expect=2)

    def test_quiet(self):
        done = self.run_sluice("bench", "adam", "--parameters", 1000, "--rounds", 1, "--threads", 1,
                               "--quiet")
        self.assertEqual((done.stdout, done.stderr), ("", ""))

    def test_refusals(self):
        for arguments, code, words in (
                (("--threads", 4000), 2, "granted"),
                (("--parameters", 10**12), 5, "--parameters"),
                (("--rounds", 0), 2, "rounds"),
                (("--parameters", 1000, "--rounds", 1, "--json", "no/such/folder.json"), 2,
                 "no/such/folder.json")):
            with self.subTest(arguments):
                done = self.run_sluice("bench", "adam", *arguments, expect=code)
                self.assertIn(words, done.stderr)
