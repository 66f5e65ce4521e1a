"""sluice train on several ranks, started by a real mpirun."""

import json
import os
import re
import subprocess
import time

from cli_support import ON_NVME, as_root
from ranks_support import RanksTest


class RanksCase(RanksTest):
    def test_every_stage_and_placement_ends_in_the_same_bits(self):
        for ranks in (2, 3, 4):
            hashes = set()
            for stage in range(4):
                on_nvme = dict(ON_NVME) if stage in (0, 3) else {"placement.optimizer": "nvme"}
                for placement in ({}, on_nvme) if ranks == 3 else (on_nvme,):
                    run = self.train_ranks(ranks, {"sharding.stage": stage, **placement})
                    hashes.add(run["state_sha256"])
                    self.assertEqual(len(run["ranks"]), ranks)
            on_device = {"placement.parameters": "device", "placement.optimizer": "device"}
            hashes.add(self.train_ranks(ranks, {"sharding.stage": 3, **on_device})["state_sha256"])
            self.assertEqual(len(hashes), 1, f"{ranks} ranks: {hashes}")

    def test_ranks_see_what_one_rank_sees_with_as_many_micro_batches(self):
        values = {"precision.parameters": "fp32", "run.steps": 10}
        alone = self.train({**values, "batch.micro_batches": 4})
        for stage in (0, 3):
            run = self.train_ranks(4, {**values, "sharding.stage": stage})
            for step, expected in zip(run["steps"], alone["steps"]):
                for key in ("loss", "gradient_norm"):
                    self.assertAlmostEqual(step[key] / expected[key], 1, delta=1e-5, msg=f"{key} {step}")
                self.assertEqual(step["tokens"], expected["tokens"])

    def test_overflow_skips_the_step_on_all_ranks(self):
        values = {"precision.parameters": "fp16", "precision.loss_scale.static": 0, "run.steps": 24,
                  "precision.loss_scale.initial_power": 31, "precision.loss_scale.hysteresis": 1}
        runs = [self.train_ranks(3, {**values, "sharding.stage": stage}) for stage in (0, 1, 3)]
        self.assertEqual(len({run["state_sha256"] for run in runs}), 1)
        for run in runs:
            self.assertEqual([(step["loss_scale"], step["skipped"]) for step in run["steps"]],
                             [(step["loss_scale"], step["skipped"]) for step in runs[0]["steps"]])
        self.assertTrue(any(step["skipped"] for step in runs[0]["steps"]))
        self.assertFalse(runs[0]["steps"][-1]["skipped"])

    def test_groups_have_copies_and_the_same_bits_in_every_stage(self):
        fp32 = {"precision.parameters": "fp32"}  # in which the order of four shows
        hashes = {self.train_ranks(4, {"sharding.group": 2, "sharding.stage": stage, **fp32, **placement})["state_sha256"]
                  for stage, placement in ((0, ON_NVME), (1, {}), (2, {"placement.optimizer": "nvme"}), (3, ON_NVME))}
        self.assertEqual(len(hashes), 1, hashes)
        self.assertNotIn(self.train_ranks(4, {"sharding.group": "world", **fp32})["state_sha256"], hashes)
        one_host = self.train_ranks(2, {"sharding.group": "node"})["state_sha256"]
        self.assertEqual(one_host, self.train_ranks(2)["state_sha256"])

    def test_plan_of_groups_is_that_of_as_many_ranks(self):
        stages = []
        for ranks, group in ((4, 2), (2, "world")):
            self.run_sluice("plan", self.write_config({"sharding.group": group}), "--ranks", ranks, "--stages", "--json",
                            "plan.json")
            stages.append(self.read_json("plan.json")["stages"])
        for groups, ranks in zip(*stages):  # except the padding, which lets a group's shards be cut once more
            for key in ("parameter_bytes", "window_bytes", "gradient_bytes", "optimizer_bytes"):
                self.assert_near(groups[key], ranks[key], key)
            for phase, marks in ranks["most_in_use_bytes"].items():
                for key, expected in marks.items():
                    self.assert_near(groups["most_in_use_bytes"][phase][key], expected, f"{phase} {key}")

    def test_groups_that_cannot_be_are_refused(self):
        self.write_config({"sharding.group": 3, "run.threads": 1})
        done = subprocess.run([*self.mpirun(4), *self.command("train", "config.json", "--quiet")], cwd=self.folder,
                              capture_output=True, text=True, env=self.environment(), timeout=60, check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("sharding.group is 3, but 4 ranks", done.stderr)
        for value, told in (("host", '"world", "node"'), (0, "at least 1"), (1.5, "string or integer")):
            done = self.run_sluice("train", self.write_config({"sharding.group": value}), expect=2)
            self.assertIn(told, done.stderr)

    def test_an_output_that_fails_leaves_the_trace_whole(self):
        config = self.write_config({"run.threads": 1})
        command = (*self.mpirun(2), *self.command("train", config, "--quiet", "--trace", "run.trace", "--json", "/dev/full"))
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=self.environment(), timeout=100,
                              check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('rank 0 of 2: cannot write --json "/dev/full"', done.stderr)
        self.assertNotIn("did not end its trace", self.run_sluice("trace", "summary", "run.trace").stdout)

    def test_saved_model_is_that_of_all_ranks(self):
        self.train_ranks(3, {}, "--save", "three.safetensors")
        again = self.train_ranks(3, {"sharding.stage": 0}, "--save", "zero.safetensors")
        with open(self.path("three.safetensors"), "rb") as a, open(self.path("zero.safetensors"), "rb") as b:
            self.assertEqual(a.read(), b.read())
        self.assertFalse(again["interrupted"])

    def test_a_store_of_other_ranks_begins_a_run(self):
        os.mkdir(self.path("stored"))
        stored = {**ON_NVME, "storage.paths": ["stored"], "run.steps": 2, "optimizer.schedule_steps": 4}
        self.train_ranks(2, {**stored, "storage.state.name": "two"})
        self.run_sluice("state", "export", "config.json", "kept")
        hashes = set()
        for name, origin in (("a", "store:two"), ("b", "kept")):
            run = self.train_ranks(3, {**stored, "run.steps": 4, "storage.state.name": name}, "--resume-from", origin)
            self.assertEqual(run["resumed_steps"], 2)
            hashes.add(run["state_sha256"])
        self.assertEqual(len(hashes), 1, hashes)

    def assert_near(self, actual, expected, what):
        self.assertAlmostEqual(actual, expected, delta=0.05 * expected, msg=what)

    def plan_stages(self, values):
        self.run_sluice("plan", self.write_config(values), "--ranks", 4, "--stages", "--json", "plan.json")
        self.assertEqual(self.read_json("plan.json")["ranks"], 4)
        return self.read_json("plan.json")["stages"]

    def test_memory_in_use_is_that_of_the_formula_and_of_the_plan(self):
        # Every stage keeps its own part of the sum of two micro-batches, and nothing goes on under forward.
        shared = {"model.embedding": 128, "model.layers": 12, "run.steps": 2, "storage.block_elements": 16384,
                  "batch.micro_batches": 2, "batch.order": "horizontal", "optimizer.overlap": "serial",
                  "placement.gradients": "host", "sharding.keep_gathered": "0",
                  "memory.device": "32MiB", "memory.host": "64MiB", "placement.optimizer": "nvme"}
        for stage in range(4):
            values = {**shared, "sharding.stage": stage, "placement.parameters": "nvme" if stage in (0, 3) else "device"}
            plan = self.plan_stages(values)[stage]
            run = self.train_ranks(4, values)
            parameters, shards = run["parameters"], [4 if stage >= first else 1 for first in range(4)]
            largest = 12 * 128 * 128  # of a layer, without its small tensors
            for rank in run["ranks"]:
                for phase, marks in rank["most_in_use_bytes"].items():
                    predicted, what = plan["most_in_use_bytes"][phase], f"stage {stage} {phase} "
                    self.assert_near(marks["optimizer"], 10 * parameters / shards[1], what + "optimizer")
                    self.assert_near(marks["parameters"], 2 * parameters / shards[3], what + "parameters")
                    self.assert_near(marks["optimizer"], predicted["optimizer"], what + "optimizer, plan")
                    self.assert_near(marks["parameters"], predicted["parameters"], what + "parameters, plan")
                    self.assert_near(marks["window"], predicted["window"], what + "window, plan")
                    self.assert_near(marks["nvme"], predicted["nvme"], what + "nvme, plan")
                    for key, most in predicted.items():
                        self.assertLessEqual(marks[key], most, what + key)
                backward = rank["most_in_use_bytes"]["backward"]
                self.assert_near(backward["gradients"], 2 * parameters / shards[2], f"stage {stage} gradients")
                self.assert_near(backward["gradients"], plan["most_in_use_bytes"]["backward"]["gradients"],
                                 f"stage {stage} gradients, plan")
                if stage == 3:  # whole units
                    self.assertGreaterEqual(backward["window"], 2 * 2 * largest)
                    self.assertLessEqual(backward["window"], 1.05 * 3 * 2 * largest)
                self.assertEqual(backward["window"] > 0, stage in (0, 3))

    def test_memory_at_rest_is_that_of_the_plan(self):
        values = {"model.embedding": 128, "model.layers": 3, "run.steps": 1, "storage.block_elements": 16384}
        for keep in ("0", "100KiB"):
            values["sharding.keep_gathered"] = keep
            stages = self.plan_stages(values)
            for stage in (2, 3):
                for rank in self.train_ranks(4, {**values, "sharding.stage": stage})["ranks"]:
                    for key in ("optimizer_bytes", "gradient_bytes", "parameter_bytes"):
                        self.assert_near(rank[key], stages[stage][key], f"stage {stage} {key}")
                    if stage == 3:
                        self.assert_near(rank["window_bytes"], stages[3]["window_bytes"], "window")
            if keep == "0":
                without = stages[3]["parameter_bytes"]
        # A unit that is kept gathered is whole, and leaves the window.
        self.assertGreater(stages[3]["parameter_bytes"], 1.05 * without)

    def test_plan_is_that_of_a_run(self):
        tight = {"memory.device": "480KiB", "memory.host": "4MiB", "optimizer.overlap": "serial",
                 "placement.optimizer": "nvme", "optimizer.lanes": 2}
        for values in ({"sharding.stage": 0}, {"sharding.stage": 1}, {"sharding.stage": 2, **tight},
                       {"sharding.stage": 3, **tight, "placement.parameters": "nvme", "sharding.keep_gathered": "0"},
                       {"sharding.stage": 3, **tight, "sharding.keep_gathered": "256KiB", "sharding.group": 2},
                       {"sharding.stage": 3, **tight, "memory.device": "640KiB", "sharding.keep_gathered": "80KiB"}):
            self.run_sluice("plan", self.write_config(values), "--ranks", 4, "--json", "plan.json")
            own = self.read_json("plan.json")["placements"][0]
            run = self.train_ranks(4, values)
            for rank in run["ranks"]:
                if "memory.host" in values:  # else it is a share of the host
                    self.assertEqual(rank["host_pool_bytes"], own["host_bytes"], values)
                self.assertEqual(rank["device_pool_bytes"], own["device_bytes"], values)
                self.assertEqual(rank["nvme_bytes"], own["nvme_bytes"], values)
            for way in ("read", "write"):
                self.assertEqual(run[f"predicted_nvme_{way}_bytes"], own["step"][f"nvme_{way}_bytes"], values)

    def test_small_units_stay_gathered(self):
        values = {"model.layers": 6, "memory.device": "1MiB", "optimizer.overlap": "serial", **ON_NVME}
        runs = {keep: self.train_ranks(3, {**values, "sharding.keep_gathered": keep}, "--steps", 4)
                for keep in ("0", "80KiB", "256KiB")}
        self.assertEqual(len({run["state_sha256"] for run in runs.values()}), 1)
        gathered = [[step["gathered_bytes"] for step in run["steps"]] for run in runs.values()]
        for none, some, most in zip(*gathered):
            self.assertGreater(none, some)
            self.assertGreater(some, most)
        for value in ("many", "-1KiB", 4096):
            done = self.run_sluice("train", self.write_config({"sharding.keep_gathered": value}), expect=2)
            self.assertIn("sharding.keep_gathered", done.stderr)

    def test_one_progress_line_a_step(self):
        done = self.run_sluice("train", self.write_config({"run.threads": 1}), prefix=self.mpirun(3))
        self.assertEqual(len(re.findall(r"^step ", done.stdout.replace("\r", "\n"), re.M)) or
                         len(re.findall(r"\d/3  ", done.stdout)), 3, done.stdout)
        self.assertEqual(done.stdout.count("state sha256"), 1)
        self.assertIn("3 ranks, ZeRO stage 3", done.stdout)

    def test_traces_of_ranks_whose_clocks_differ_come_onto_one_clock(self):
        ahead_s = 3600
        namespace = ("unshare", "--time", "--monotonic", str(ahead_s), "--fork")
        as_root(self, *namespace, "true")
        self.write_config({"run.threads": 1})
        script = f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && set -- {" ".join(namespace)} "$@"; exec "$@"'
        self.run_sluice("train", "config.json", "--quiet", "--steps", 4, "--trace", "run.trace",
                        prefix=(*self.mpirun(3), "sh", "-c", script, "sh"))
        names = ("run.trace", "run.trace.rank1", "run.trace.rank2")
        self.run_sluice("trace", "export", *names, "--json", "all.json")
        ranks = self.read_json("all.json")["ranks"]
        for rank, expected_s in zip(ranks, (0, ahead_s, 0)):
            clock = rank["clock"]
            self.assertLessEqual(abs(clock["offset_ns"] - expected_s * 10**9), clock["error_ns"])
            self.assertLess(clock["error_ns"], 10**9)
        # A step ends on no rank before it has begun on every one.
        slack = sum(rank["clock"]["error_ns"] for rank in ranks)
        for steps in zip(*(rank["steps"] for rank in ranks)):
            self.assertEqual(len({step["step"] for step in steps}), 1)
            self.assertLess(max(step["begin_ns"] for step in steps), min(step["end_ns"] for step in steps) + slack)
        self.run_sluice("trace", "export", *names[1:], "--json", "two.json")  # without rank 0
        steps = [rank["steps"][0]["begin_ns"] for rank in self.read_json("two.json")["ranks"]]
        self.assertLess(abs(steps[0] - steps[1]), ahead_s * 10**9 / 2)

    def test_traces_know_each_rank_s_part_of_the_host_s_cores(self):
        """Ranks that are not bound may each use all cores, and advice for one of them must not hand out those of all."""
        self.write_config({"run.threads": 1})
        self.run_sluice("train", "config.json", "--quiet", "--trace", "one.trace")
        self.run_sluice("train", "config.json", "--quiet", "--trace", "run.trace", prefix=self.mpirun(2))
        found = []
        for name in ("one.trace", "run.trace", "run.trace.rank1"):
            self.run_sluice("trace", "export", name, "--json", "trace.json")
            (rank,) = self.read_json("trace.json")["ranks"]
            found.append(int(rank["engine"]["granted_cores"]))
        self.assertEqual(found[1:], 2 * [max(1, found[0] // 2)])

    def test_prediction_from_the_trace_of_one_rank_says_what_it_leaves_out(self):
        self.write_config({"run.threads": 1})
        for _ in range(5):
            self.run_sluice("train", "config.json", "--quiet", "--steps", 8, "--trace", "run.trace", prefix=self.mpirun(3))
            done = self.run_sluice("trace", "whatif", "run.trace.rank1", "--set", "nvme=2x", expect=(0, 2))
            if done.returncode == 0:
                self.assertRegex(done.stdout, r"left out: rank 1 of 3 alone, .*waiting for other ranks \([\d.]+ ms per step\)")
                return
            self.expect_misfit(done.stderr)
        self.skipTest("this machine is too busy for a prediction")

    def test_launchers_that_contradict_each_other_are_named(self):
        environment = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2",
                       "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        done = subprocess.run(self.command("train", self.write_config()), cwd=self.folder, capture_output=True,
                              text=True, env=dict(self.environment(), **environment), timeout=60, check=False)
        self.assertEqual(done.returncode, 2)
        for name in ("Open MPI", "torchrun"):
            self.assertIn(name, done.stderr)

    def test_ranks_wait_for_the_outputs_of_the_first_as_long_as_they_take(self):
        """As a drive does that syncs for minutes, the pipe keeps rank 0 longer than sharding.timeout."""
        os.mkfifo(self.path("pipe"))
        config = self.write_config({"run.threads": 1, "run.steps": 2, "sharding.timeout": 1})
        run = subprocess.Popen([*self.mpirun(2), *self.command("train", config, "--quiet", "--save", "m.safetensors", "--json", "pipe")],
                               cwd=self.folder, stderr=subprocess.PIPE, text=True, env=self.environment())
        try:
            while not os.path.exists(self.path("m.safetensors")) and run.poll() is None:
                time.sleep(0.05)
            time.sleep(4)
            self.assertIsNone(run.poll())
            with open(self.path("pipe"), encoding="utf-8") as pipe:
                self.assertEqual(len(json.load(pipe)["steps"]), 2)
            self.assertEqual(run.wait(30), 0)
        finally:
            run.kill()
            said = run.communicate()[1]
        self.assertEqual(said, "")

    def test_what_several_ranks_need_of_a_gpu_is_said(self):
        for values, told in (({"sharding.reduction": "nccl"}, 'sharding.reduction "nccl" is for ranks on GPUs'),
                             ({"run.device": "cuda", "sharding.timeout": 2}, 'run.device is "cuda"')):
            done = subprocess.run([*self.mpirun(2), *self.command("train", self.write_config(values), "--quiet")],
                                  cwd=self.folder, capture_output=True, text=True, env=self.environment(), timeout=60,
                                  check=False)
            if done.returncode == 0 and "run.device" in values:
                self.skipTest("this machine has a GPU for every rank")
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(told, done.stderr)

    def test_who_waits_for_a_killed_rank_says_so(self):
        self.write_config({"run.threads": 1, "run.steps": 100000})
        script = '[ "$OMPI_COMM_WORLD_RANK" = 1 ] && { me=$$; (sleep 3; kill -9 $me) & } ; exec "$@"'
        done = subprocess.run([*self.mpirun(3), "sh", "-c", script, "sh", *self.command("train", "config.json", "--quiet")],
                              cwd=self.folder, capture_output=True, text=True, env=self.environment(), timeout=60,
                              check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r'told to end while ranks? .*1.* not answered rank [02] in \w+ of "')

    def test_rank_that_fails_ends_all_with_its_name(self):
        self.write_config({"run.threads": 1, "storage.paths": ["storage"]})
        script = ('[ "$OMPI_COMM_WORLD_RANK" = 1 ] && set -- "$@" --set storage.paths=[\\"/nowhere\\"]'
                  ' --set placement.optimizer=nvme; exec "$@"')
        done = subprocess.run([*self.mpirun(3), "sh", "-c", script, "sh",
                               *self.command("train", "config.json", "--quiet", "--set", "placement.optimizer=nvme",
                                             "--set", "sharding.timeout=2")],
                              cwd=self.folder, capture_output=True, text=True, env=self.environment(), timeout=60,
                              check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("rank 1 of 3: ", done.stderr)
        self.assertIn("/nowhere", done.stderr)
