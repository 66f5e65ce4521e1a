"""sluice plan --matrix and sluice bench matrix: every ZeRO stage with every offload, as planned alone and as metered; models known by
name, rates of computation, and settings that make a config fit."""

import json
import os

from cli_support import ON_NVME, SOURCE, CliCase, documented_words
from ranks_support import RanksTest

SHAPE = ["--parameters", 2**24, "--layers", 16, "--gpu", "h100", "--host-memory", "2GiB", "--tokens", 4096]
HOMES = {"none": ("device", "device"), "optimizer to host": ("device", "host"), "optimizer to nvme": ("device", "nvme"),
         "all to host": ("host", "host"), "all to nvme": ("nvme", "nvme")}
QUICK = ["--parameters", 300_000, "--units", 6, "--steps", 1, "--compute-ms", 10, "--rate", "2GB"]


class PlanCase(CliCase):
    LABEL = "command"

    def plan(self, *arguments, values=None, expect=0):
        sets = [word for key, value in (values or {}).items() for word in ("--set", f"{key}={value}")]
        self.done = self.run_sluice("plan", *arguments, *sets, "--json", "plan.json", expect=expect)
        return self.read_json("plan.json")


class Matrix(PlanCase):
    def test_each_cell_is_the_plan_of_its_settings(self):
        cells = self.plan(*SHAPE, "--ranks", 4, "--link-rate", "1GB", "--matrix")["matrix"]
        self.assertEqual([(cell["stage"], cell["offload"]) for cell in cells], [(stage, name) for stage in range(4) for name in HOMES])
        for cell in cells:
            with self.subTest(f"stage {cell['stage']}, {cell['offload']}"):
                parameters, optimizer = HOMES[cell["offload"]]
                values = {"sharding.stage": cell["stage"], "placement.parameters": parameters, "placement.optimizer": optimizer}
                if not cell["fits"]:
                    self.assertEqual(cell["stage"] in (1, 2), cell["offload"].startswith("all"), cell["obstacle"])
                    self.run_sluice("plan", *SHAPE, "--ranks", 4, *(word for key, value in values.items() for word in ("--set", f"{key}={value}")),
                                    expect=2)
                    continue
                alone = self.plan(*SHAPE, "--ranks", 4, "--link-rate", "1GB", "--stages", values=values)
                self.assertEqual(cell["step_s"], alone["placements"][0]["step"]["step_s"])
                self.assertEqual(cell["compute_s"], alone["placements"][0]["compute_s"])
                self.assertEqual(cell["links_s"], alone["placements"][0]["step"]["busy_s"]["links between ranks"])
                self.assertEqual(cell["most_in_use_bytes"], alone["stages"][cell["stage"]]["most_in_use_bytes"])
        self.assertEqual(set().union(*cells) - documented_words(), set())

    def test_the_table(self):
        self.plan(*SHAPE, "--matrix")
        lines = self.done.stdout.split("by ZeRO stage and offload, a rank has in use at most:\n")[1].splitlines()
        self.assertEqual(lines[1].split(), ["stage", "offload", "phase", "device", "host", "nvme", "step", "s", "links", "s", "what", "binds"])
        self.assertEqual([line[6:25].strip() for line in lines[2:17:3]], list(HOMES))
        self.assertEqual([line[25:35].strip() for line in lines[2:5]], ["forward", "backward", "optimizer"])

    def test_drives_without_room(self):
        for cell in self.plan(*SHAPE, "--drive-space", "1MB", "--matrix")["matrix"]:
            self.assertEqual(cell["fits"], "nvme" not in cell["offload"])
            if not cell["fits"]:
                self.assertIn("but the drives have 977 KiB", cell["obstacle"])


class Presets(PlanCase):
    def test_every_preset_has_its_models_parameters(self):
        with open(os.path.join(SOURCE, "tools", "zoo", "model_presets.json"), encoding="utf-8") as file:
            presets = json.load(file)
        with open(os.path.join(SOURCE, "docs", "cli.md"), encoding="utf-8") as file:
            page = file.read()
        self.assertGreater(len(presets), 30)
        for name, preset in presets.items():
            with self.subTest(name):
                self.assertIn(f"| `{name}` | {preset['parameters']:,} | {preset['source']} |", page)
                plan = self.plan("--model", name, "--gpu", "h200", "--host-memory", "2T", "--tokens", 512, "--ranks", 256)
                self.assertEqual(plan["parameters"], preset["parameters"])
                self.assertIn(f"{name}: {preset['config']['model_type']}, ", self.done.stdout)

    def test_a_file_goes_before_a_name(self):
        known = self.plan("--model", "GPT2", "--gpu", "4090", "--host-memory", "64G")
        os.mkdir(self.path("gpt2"))
        config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 6, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
        with open(self.path("gpt2", "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        own = self.plan("--model", "gpt2", "--gpu", "4090", "--host-memory", "64G")
        self.assertEqual(known["parameters"] - own["parameters"], 6 * (12 * 768**2 + 13 * 768))

    def test_names_that_are_not_known(self):
        done = self.run_sluice("plan", "--model", "llama-9", expect=2)
        self.assertIn('--model "llama-9" is neither a file or folder, nor a model that plans know by name; they know llama-2-7b, ', done.stderr)
        self.assertIn("no/such", self.run_sluice("plan", "--model", "no/such", expect=2).stderr)


class Verdicts(PlanCase):
    def test_rates_of_computation(self):
        plan = self.plan(*SHAPE)
        step_s = plan["placements"][0]["step"]["step_s"]
        self.assertAlmostEqual(plan["flops_per_s"] * step_s / (6 * 2**24 * 4096), 1)
        self.assertAlmostEqual(plan["mfu"], plan["flops_per_s"] / 989e12)
        self.assertRegex(self.done.stdout, rf"binds; {plan['flops_per_s'] * 1e-12:.4g} TFLOP/s, MFU {100 * plan['mfu']:.1f} %\n")
        here = self.plan(*SHAPE[:4], "--host-memory", "2GiB", values={"memory.device": "2GiB"})
        self.assertIsNone(here["mfu"])
        self.assertGreater(here["flops_per_s"], 0)

    def test_settings_that_fit_stand_beside_the_budget_that_would(self):
        values = {"placement.parameters": "host", "placement.optimizer": "host"}
        shape = [*SHAPE[:6], "--host-memory", "64MiB"]
        self.plan(*shape, values=values, expect=5)
        first = self.done.stdout.splitlines()[0]
        self.assertRegex(first, r"^does not fit: memory\.host = 64\.0 MiB is too small.*works is .*; with placement\.\S+.* it fits: \S+ s per step$")
        told = dict(word.split("=") for word in first.split("; with ")[1].split(" it fits")[0].split())
        fitting = self.plan(*shape, values={**values, **told})
        quickest = min(row["step"]["step_s"] for row in fitting["placements"] if row["fits"])
        self.assertEqual(fitting["placements"][0]["step"]["step_s"], quickest)


class BenchMatrix(CliCase):
    LABEL = "command"

    def bench(self, *arguments, **options):
        done = self.run_sluice("bench", "matrix", "--path", "storage", *QUICK, "--json", "matrix.json", *arguments, **options)
        return done, self.read_json("matrix.json")

    def check_cells(self, cells):
        for cell in cells:
            if "obstacle" in cell:
                self.assertIn(cell["stage"], (1, 2))
                continue
            with self.subTest(f"stage {cell['stage']}, {cell['offload']}"):
                self.assertGreaterEqual(cell["measured"]["step_s"], 0.01)
                for phase, marks in cell["measured"]["most_in_use_bytes"].items():
                    planned = cell["planned"]["most_in_use_bytes"][phase]
                    for kind, size in marks.items():
                        if kind in ("parameters", "window", "optimizer", "gradients"):
                            self.assertEqual(size, planned[kind], f"{phase} {kind}")
                        else:  # a run's timing decides how many buffers it uses
                            self.assertLessEqual(size, planned[kind], f"{phase} {kind}")

    def test_one_rank(self):
        done, document = self.bench()
        self.assertEqual([cell["offload"] for cell in document["cells"]], list(HOMES))
        self.check_cells(document["cells"])
        self.assertIn("% off in memory", done.stdout)
        keys = set(document) | set(document["cells"][0])
        self.assertEqual(keys - documented_words(), set())

    def test_refusals(self):
        for arguments, words in ((("--rate", "999KB"), "--rate"), (("--units", 6, "--parameters", 5), "5 parameters in 6 units"),
                                 (("--path", "gone"), "gone"), (("--json", "no/such/folder.json"), "no/such/folder.json")):
            with self.subTest(arguments):
                self.assertIn(words, self.run_sluice("bench", "matrix", *arguments, expect=2).stderr)


class BenchMatrixOfRanks(RanksTest):
    def test_two_ranks(self):
        self.run_sluice("bench", "matrix", "--path", "storage", *QUICK, "--json", "matrix.json", "--plot", "matrix.svg", prefix=self.mpirun(2))
        with open(self.path("matrix.svg"), encoding="utf-8") as file:
            self.assertEqual(file.read().count(", measured: "), 2 * 16, "once in a bar, once in the description")
        document = self.read_json("matrix.json")
        self.assertEqual((document["ranks"], len(document["cells"])), (2, 20))
        BenchMatrix.check_cells(self, document["cells"])
        self.assertEqual(sum("obstacle" in cell for cell in document["cells"]), 4)
