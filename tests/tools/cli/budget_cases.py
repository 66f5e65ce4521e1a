"""Budgets against what the machine has, and the sizes that refusals name."""

import os
import re

from cli_support import ON_NVME, SANITIZE, SOURCE, CliCase, is_root
from ranks_support import RanksTest

LIMIT_MIB = 200
# 6.3 M parameters: 88 MiB of state, and at 8 sequences about as much of activations.
LARGE = {"model.embedding": 512, "model.heads": 8, "model.context": 128, "batch.sequences": 8, "run.steps": 1}


def memory_groups():
    """Where a group of this process can have groups below it, by the file of its limit."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        lines = [line.strip().split(":", 2) for line in file]
    for _, controllers, path in lines:
        if controllers == "memory":
            yield f"/sys/fs/cgroup/memory{path}", "memory.limit_in_bytes"
            yield "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        if controllers == "":
            yield "/sys/fs/cgroup", "memory.max"


class Limited(CliCase):
    """Runs in a control group of its own with 200 MiB."""

    def setUp(self):
        super().setUp()
        if SANITIZE:
            self.skipTest("a sanitizer's shadow memory counts as the process's")
        if not is_root():
            self.skipTest("a control group of its own needs root")
        self.group = self.make_group()

    def make_group(self):
        for parent, limit in memory_groups():
            group = f"{parent}/sluice-test-{os.getpid()}-{self._testMethodName[-20:]}"
            try:
                os.mkdir(group)
                self.addCleanup(os.rmdir, group)
                with open(f"{group}/{limit}", "w", encoding="ascii") as file:
                    file.write(str(LIMIT_MIB << 20))
                return group
            except OSError as error:
                reason = error
        self.skipTest(f"no control group with a limit can be made here: {reason}")

    def enter(self):
        with open(f"{self.group}/cgroup.procs", "w", encoding="ascii") as file:
            file.write(str(os.getpid()))

    def run_limited(self, values, expect):
        return self.run_sluice("train", self.write_config({**LARGE, **values}), "--json", "run.json",
                               expect=expect, preexec_fn=self.enter)

    def test_pools_beyond_the_group_are_refused_with_numbers(self):
        host = {"placement.parameters": "host", "placement.optimizer": "host"}
        done = self.run_limited({**host, "memory.host": "600MiB", "memory.device": "100MiB"}, 5)
        for part in ("of the host's memory", f"the cgroup's limit of {LIMIT_MIB} MiB leaves", "host pools",
                     "device pools", "the application", "lower memory.host"):
            self.assertIn(part, done.stderr)

    def test_plan_and_doctor_know_the_limit(self):
        values = {**LARGE, "placement.parameters": "host", "placement.optimizer": "host"}
        large = {**values, "memory.host": "600MiB", "memory.device": "100MiB"}
        done = self.run_sluice("plan", self.write_config(large), "--json", "plan.json", expect=5, preexec_fn=self.enter)
        self.assertRegex(done.stdout, rf"^does not fit this machine: the run needs .* but the cgroup's limit of {LIMIT_MIB} MiB leaves ")
        self.assertIn("here, sluice train would refuse this: ", done.stdout)
        self.assertIn("lower memory.host", done.stdout)
        plan = self.read_json("plan.json")
        self.assertIn("lower memory.host", plan["obstacle_here"])
        self.assertTrue(plan["placements"][0]["fits"])
        # Nor is a row proposed, or a cell of the matrix said to fit, that this machine has no memory for.
        done = self.run_sluice("plan", "config.json", "--matrix", "--json", "plan.json", expect=5, preexec_fn=self.enter)
        plan = self.read_json("plan.json")
        cells = {cell["offload"]: cell for cell in plan["matrix"]}
        rows = {row["name"]: row for row in plan["placements"]}
        for same in (cells["all to host"], rows["host"]):
            self.assertFalse(same["fits"])
            self.assertIn("lower memory.host", same["obstacle"])
        self.run_sluice("plan", "config.json", "--matrix", "--json", "plan.json", "--set", "memory.check=off", preexec_fn=self.enter)
        plan = self.read_json("plan.json")
        self.assertTrue(all(row["fits"] for row in plan["matrix"] + plan["placements"]))
        small = {**values, "memory.host": "4MiB", "memory.device": "600MiB"}
        done = self.run_sluice("plan", self.write_config(small), expect=5, preexec_fn=self.enter)
        self.assertRegex(done.stdout, "^does not fit: memory.host = ")
        self.assertNotIn("it fits", done.stdout.splitlines()[0])
        self.write_config(large)
        # `train` goes on, so the plan is one that can be had; and plans of other machines are not of this one.
        elsewhere = (["--host-memory", "600MiB"], ["--gpu", "4090"], ["--ranks", 2], ["--parameters", "6e6"])
        for arguments in (*elsewhere, ["--set", "memory.check=warn"], ["--set", "memory.check=off"]):
            done = self.run_sluice("plan", "config.json", *arguments, "--json", "plan.json", preexec_fn=self.enter)
            self.assertNotIn("would refuse", done.stdout)
            self.assertEqual(self.read_json("plan.json")["obstacle_here"], "")
        # Budgets that are not named are the group's, and so is the sum.
        done = self.run_sluice("plan", self.write_config(LARGE), preexec_fn=self.enter)
        self.assertNotIn("would refuse", done.stdout)
        total, unit = re.search(r"- += sum +([\d.]+) (\w+)  all that is in the host's memory", done.stdout).groups()
        self.assertEqual(unit, "MiB")
        self.assertLessEqual(float(total), LIMIT_MIB)
        self.assertGreater(float(total), LIMIT_MIB / 2)
        done = self.run_sluice("plan", self.write_config({**LARGE, "batch.sequences": 64}), expect=5, preexec_fn=self.enter)
        self.assertIn("batch.sequences", done.stderr)
        done = self.run_sluice("doctor", "--path", "storage", preexec_fn=self.enter)
        self.assertRegex(done.stdout, rf"warn +memory: {LIMIT_MIB} MiB by the cgroup, of ")

    def test_the_sizes_named_run(self):
        """The budget that the refusal names works."""
        values = {"memory.host": "160MiB", "memory.device": "20MiB"}
        done = self.run_limited(values, 5)
        lower = re.search(r'lower memory.host to "(\d+KiB)"', done.stderr).group(1)
        self.run_limited({**values, "memory.host": lower}, 0)

    def test_activations_beyond_the_group_are_refused(self):
        done = self.run_limited({"batch.sequences": 64}, 5)
        self.assertIn("batch.sequences", done.stderr)

    def test_budgets_that_are_auto_leave_room_for_activations(self):
        done = self.run_limited({}, 0)
        run = self.read_json("run.json")
        self.assertGreater(run["activation_bytes"], 60 << 20)
        self.assertRegex(done.stdout, rf"- +program +64.0 MiB")
        self.assertRegex(done.stdout, rf"- += sum .* of \d+ MiB that the cgroup's limit of {LIMIT_MIB} MiB leaves")


class Named(RanksTest):
    """Several ranks: the buffers that they share are in the sizes that refusals name."""

    VALUES = {**ON_NVME, "sharding.keep_gathered": "0", "run.threads": 1, "run.steps": 1}

    def refusal(self, ranks, values):
        return self.run_sluice("train", self.write_config({**self.VALUES, **values}), "--quiet",
                               prefix=self.mpirun(ranks), expect=tuple(range(1, 256))).stderr

    def expect_the_smallest(self, ranks, values):
        message = self.refusal(ranks, {**values, "memory.device": "64KiB"})
        size = int(re.search(r'the smallest that works is "(\d+)KiB"', message).group(1))
        self.assertIn(f'works is "{size}KiB"', self.refusal(ranks, {**values, "memory.device": f"{size - 4}KiB"}))
        for tried in (size, size + 4):
            self.train_ranks(ranks, {**self.VALUES, **values, "memory.device": f"{tried}KiB"})
        done = self.run_sluice("plan", self.write_config({**self.VALUES, **values, "memory.device": "64KiB"}),
                               "--ranks", ranks, expect=5)
        self.assertIn(f'works is "{size}KiB"', done.stdout)

    def test_two_ranks(self):
        self.expect_the_smallest(2, {})

    def test_groups(self):
        self.expect_the_smallest(4, {"sharding.group": 2})


class Order(CliCase):
    LABEL = "cpu"

    def test_auto_refuses_nothing_that_one_of_the_orders_could_run(self):
        config = os.path.join(SOURCE, "configs", "quickstart.json")
        values = ["--ranks", 2]
        for value in ("batch.micro_batches=2", "activations=recompute", "memory.host=64MiB", "model.tied_head=false"):
            values += ["--set", value]
        done = self.run_sluice("plan", config, *values, "--set", "memory.device=64KiB", expect=5)
        least = int(re.search(r'the smallest that works is "(\d+)KiB"', done.stdout).group(1))
        done = self.run_sluice("plan", config, *values, "--set", "batch.order=vertical", "--set",
                               "memory.device=64KiB", expect=5)
        vertical = int(re.search(r'the smallest that works is "(\d+)KiB"', done.stdout).group(1))
        self.assertLess(least, vertical)
        for size in (least, vertical - 64, vertical - 4, vertical, vertical + 64):
            done = self.run_sluice("plan", config, *values, "--set", f"memory.device={size}KiB")
            self.assertIn("micro-batches vertical" if size >= vertical else "micro-batches horizontal", done.stdout)
