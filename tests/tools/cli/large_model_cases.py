"""A model whose state is larger than the machine's memory, trained for three steps from storage. The same code
trains a model of a thousandth of its size in every run of the tests."""

import json
import os
import shutil
import subprocess
import tempfile

from cli_support import ON_NVME, SOURCE, CliCase

STATE_BYTES = 12  # per parameter: 2 for bf16, 2 for the rest of the master, 8 for Adam's moments
PROGRAM_BYTES = 64 << 20


def available_memory_bytes():
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


class ThreeSteps(CliCase):
    """Not a test by itself: what both sizes do."""

    def train_three_steps(self, width, heads, learning_rate, budget, block_elements):
        """A GPT of 27 layers of that width, with budgets of the device and of the host, which must not hold its state."""
        with open(self.path("text.txt"), "w", encoding="utf-8") as text:
            text.write(self.text())
        config = self.write_config({
            **ON_NVME, "model": {"layers": 27, "heads": heads, "embedding": width, "context": 128, "vocabulary": 256, "tied_head": True},
            "data.validation_fraction": 0.0005, "batch.sequences": 1, "precision.parameters": "bf16",
            "optimizer": {"learning_rate": learning_rate, "minimum_learning_rate": 0, "warmup_steps": 0, "clip_norm": 1.0, "overlap": "deferred"},
            "memory": {"device": budget, "host": budget},
            "storage.block_elements": block_elements, "run.threads": len(os.sched_getaffinity(0))})
        self.run_sluice("train", config, "--quiet", "--measure-peak", "--json", "run.json")
        run = self.read_json("run.json")
        steps = run["steps"]
        self.assertEqual([step["step"] for step in steps], [1, 2, 3])
        self.assertGreater(run["state_bytes"], 2 * run["host_pool_bytes"])
        self.assertGreaterEqual(run["state_bytes"], STATE_BYTES * run["parameters"])
        for step in steps:
            self.assertIsInstance(step["loss"], float)
        self.assertLess(steps[2]["loss"], steps[0]["loss"])
        # Reads and writes of an update may fall into the report before or behind.
        for direction in ("read", "write"):
            moved = sum(step[f"nvme_{direction}_bytes"] for step in steps)
            self.assertGreater(moved, 0)
            self.assertLessEqual(moved, len(steps) * run[f"predicted_nvme_{direction}_bytes"])
        pools = run["device_pool_bytes"] + run["host_pool_bytes"] + run["activation_bytes"] + PROGRAM_BYTES
        self.assertLessEqual(run["peak_rss_bytes"], pools)
        self.report(config, run, pools)

    def text(self):
        with open(os.path.join(SOURCE, "LICENSE"), encoding="utf-8") as licence:
            return licence.read() * 22

    def report(self, config, run, pools):
        """Prints the row of docs/results/endtoend.md: the measured steps beside the plan at the run's rates."""
        steps = run["steps"]
        flops = steps[-1]["flops_per_s"] / steps[-1]["mfu"]
        bytes_moved = sum(step["nvme_read_bytes"] + step["nvme_write_bytes"] for step in steps)
        limits = run["limits"]
        rates = [word for name, key in (("--read-rate", "read_bytes_per_second"), ("--write-rate", "write_bytes_per_second"),
                                        ("--copy-rate", "copy_bytes_per_second"), ("--adam-rate", "adam_parameters_per_second"))
                 for word in (name, f"{limits[key]:.0f}")]
        plan = self.run_sluice("plan", config, "--flops", f"{flops:.0f}", "--duplex", "half", *rates, "--json", "plan.json").stdout
        self.assertNotRegex(plan, r"(?m)^ *(storage|copies|Adam|computation) .*assumed")
        row = next(row for row in self.read_json("plan.json")["placements"] if row["name"] == "config")
        self.assertEqual(row["fits"], True)
        self.assertEqual(row["step"]["nvme_write_bytes"], run["predicted_nvme_write_bytes"])
        print(json.dumps({"parameters": run["parameters"], "state_bytes": run["state_bytes"], "step_s": [step["time_s"] for step in steps],
                          "t_bound_s": limits["t_bound_s"], "plan_step_s": row["step"]["step_s"],
                          "plan_bytes": row["step"]["nvme_read_bytes"] + row["step"]["nvme_write_bytes"],
                          "bytes": bytes_moved / len(steps), "rates": limits, "peak_rss_bytes": run["peak_rss_bytes"],
                          "planned_bytes": pools, "loss": [step["loss"] for step in steps]}), flush=True)


class LargeModelInSmall(ThreeSteps):
    LABEL = "command"

    def test_three_million_parameters_under_budgets_of_8_mib(self):
        self.train_three_steps(width=96, heads=3, learning_rate=1e-3, budget="8MiB", block_elements=16384)


class LargeModel(ThreeSteps):
    LABEL = "slow"
    TIMEOUT_S = 4500
    WIDTH = 3072

    def text(self):
        """Real text: the quickstart's, where its package is installed."""
        if shutil.which("bible") is None:
            self.skipTest("the command bible of Debian's package bible-kjv, which gives the text, is not installed")
        return subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], stdout=subprocess.PIPE, check=True, encoding="utf-8").stdout

    def test_three_billion_parameters_under_budgets_of_8_gib(self):
        needed = STATE_BYTES * 12 * 27 * self.WIDTH**2 + (4 << 30)
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if free < needed:
            self.skipTest(f"{tempfile.gettempdir()} has {free >> 30} GiB free; the state of 3e9 parameters needs {needed >> 30} GiB "
                          "(set TMPDIR)")
        if available_memory_bytes() < (19 << 30):
            self.skipTest(f"{available_memory_bytes() >> 30} GiB of memory are available; two budgets of 8 GiB and the rest need 19")
        # Adam's first step moves each of 3e9 parameters by the rate: ten times this one overshoots, and the loss rises.
        self.train_three_steps(width=self.WIDTH, heads=24, learning_rate=2e-7, budget="8GiB", block_elements=1 << 20)
