"""Checkpoints of sluice train: runs that are killed, ended by signals or on a full disk go on with the same bits,
under another placement and at another number of ranks, and what cannot be used is named."""

import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time

from cli_support import ON_NVME, RUN_TIMEOUT_S, CliCase, mount_tmpfs
from ranks_support import RanksTest
from forged_checkpoint import mend_checksums
from universal_checkpoint import read_safetensors, write_universal

STEPS = 8
BASE = {**ON_NVME, "run.steps": STEPS}
BESIDE = {**BASE, "memory.save_buffers": 2}
ELSEWHERE = {"placement.parameters": "host", "placement.optimizer": "host", "storage.block_elements": 8192,
             "optimizer.overlap": "serial", "run.steps": STEPS}
EVERY = ("--checkpoint", "kept", "--checkpoint-every", "1", "--keep", "2")


class Checkpoints(CliCase):
    def names(self):
        return sorted(name for name in os.listdir(self.path("kept")) if name.startswith("step-"))

    def flip(self, *names):
        with open(self.path("kept", *names), "r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte ^ 1]))

    def test_a_run_in_pieces_ends_as_one_that_never_stopped(self):
        for precision in ("bf16", "fp16", "fp32"):
            with self.subTest(precision):
                values = {**BASE, "precision.parameters": precision}
                if precision == "fp16":
                    values.update({"precision.loss_scale.static": 0, "precision.loss_scale.initial_power": 18,
                                   "precision.loss_scale.hysteresis": 1})
                whole = self.train(values)
                kept = ("--checkpoint", "kept-" + precision, "--resume", "--accept-config")
                # More steps are another schedule, unless all pieces are told of the same one.
                first = self.train({**values, "run.steps": 3}, *kept, "--set", "optimizer.minimum_learning_rate=0.003",
                                   "--set", "optimizer.warmup_steps=0")
                self.assertEqual(first["resumed_steps"], 0)
                steady = self.train({**values, "optimizer.minimum_learning_rate": 0.003, "optimizer.warmup_steps": 0})
                moved = {key: value for key, value in ELSEWHERE.items()}
                rest = self.train({**values, **moved}, *kept, "--set", "optimizer.minimum_learning_rate=0.003",
                                  "--set", "optimizer.warmup_steps=0")
                self.assertEqual(rest["resumed_steps"], 3)
                self.assertEqual(rest["state_sha256"], steady["state_sha256"])
                self.assertNotEqual(rest["state_sha256"], whole["state_sha256"])
                self.assertEqual([step["loss"] for step in first["steps"] + rest["steps"]],
                                 [step["loss"] for step in steady["steps"]])

    def kill_until_it_ends(self, configs, generator, prefix=()):
        """Kills the run at random instants until one ends. Returns how often it was killed."""
        kills = 0
        while True:
            command = [*prefix, *self.command("train", configs[kills % len(configs)], "--quiet", "--json", "run.json",
                                              "--csv", "run.csv", *EVERY, "--resume")]
            process = subprocess.Popen(command, cwd=self.folder, env=self.environment(), stderr=subprocess.PIPE,
                                       start_new_session=True)
            try:
                _, stderr = process.communicate(timeout=generator.uniform(0.05, 0.9) if kills < 12 else RUN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                kills += 1
                continue
            self.assertEqual(process.returncode, 0, stderr)
            return kills

    def test_kill_at_any_moment(self):
        expected = self.train(BASE)["state_sha256"]
        configs = [self.write_config(BASE, name="a.json"), self.write_config(ELSEWHERE, name="b.json")]
        self.kill_until_it_ends(configs, random.Random(int(os.environ.get("SLUICE_TEST_SEED", "1"))))
        self.assertEqual(self.read_json("run.json")["state_sha256"], expected)
        self.assert_last_two_are_kept()
        with open(self.path("run.csv"), encoding="ascii") as file:
            rows = [line.split(",")[0] for line in file.readlines()]
        self.assertEqual(rows, ["step", *map(str, range(1, STEPS + 1))])

    def test_checkpoints_beside_training_are_those_of_their_steps(self):
        expected = self.train(BASE)["state_sha256"]
        run = self.train(BESIDE, *EVERY[:-1], "0")
        self.assertEqual(run["state_sha256"], expected)
        self.assertEqual([saved["step"] for saved in run["checkpoints"]], list(range(1, STEPS + 1)))
        for saved in run["checkpoints"]:
            self.assertEqual(saved["path"], f"kept/step-{saved['step']:09}")
            self.assertGreater(saved["seconds"], 0)
            self.assertLessEqual(saved["blocked_seconds"], saved["seconds"])
        for step in range(STEPS - 1, 0, -3):
            for name in self.names()[step:]:
                shutil.rmtree(self.path("kept", name))
            rest = self.train(BESIDE, "--checkpoint", "kept", "--resume")
            self.assertEqual((rest["resumed_steps"], rest["state_sha256"]), (step, expected))

    def assert_last_two_are_kept(self):
        """A kill between the last checkpoint's name and the removal of the oldest leaves that one: no save follows."""
        names = self.names()
        self.assertEqual(names[-2:], [f"step-{step:09}" for step in (STEPS - 1, STEPS)])
        self.assertIn(names[:-2], ([], [f"step-{STEPS - 2:09}"]))

    def test_kill_at_any_moment_beside_training(self):
        expected = self.train(BASE)["state_sha256"]
        configs = [self.write_config(BESIDE, name="a.json"), self.write_config({**ELSEWHERE, "memory.save_buffers": 1}, name="b.json")]
        self.kill_until_it_ends(configs, random.Random(int(os.environ.get("SLUICE_TEST_SEED", "1"))))
        self.assertEqual(self.read_json("run.json")["state_sha256"], expected)
        self.assert_last_two_are_kept()

    def test_a_run_from_elsewhere_has_a_log_of_its_own(self):
        """The rows of another run are not kept as steps of this one; those of the run itself are, when it goes on."""
        values = {**BASE, "run.steps": 3}
        self.train(values, "--checkpoint", "first", "--csv", "run.csv", "--json-lines", "run.jsonl")
        from_there = ("--resume-from", "first", "--checkpoint", "second", "--csv", "run.csv", "--json-lines", "run.jsonl")
        for steps, words in ((5, ()), (7, ("--resume",))):
            self.train({**values, "run.steps": steps}, *from_there, *words)
            with open(self.path("run.csv"), encoding="ascii") as file:
                self.assertEqual([row.split(",")[0] for row in file], ["step", *map(str, range(4, steps + 1))])
            with open(self.path("run.jsonl"), encoding="ascii") as file:
                self.assertEqual([json.loads(row)["step"] for row in file], list(range(4, steps + 1)))
            with open(self.path("run.jsonl"), "a", encoding="ascii") as file:
                file.write('{"step":' + "[" * 400000 + "]" * 400000 + "}\n")  # another's row, which is dropped

    def test_a_run_begins_with_a_checkpoint_from_elsewhere(self):
        values = {**BASE, "precision.parameters": "fp32", "precision.gradients": "fp32", "optimizer.schedule_steps": STEPS}
        whole = self.train(values, "--checkpoint", "whole")["state_sha256"]
        self.train({**values, "run.steps": 3}, "--checkpoint", "first")
        write_universal(self.path("first", "latest"), self.path("universal"), 3)
        for folder, words in (("first", ()), ("first/latest", ()), ("universal", ("another program", "3 updates"))):
            with self.subTest(folder):
                config = self.write_config({**values, "storage.block_elements": 8192})
                done = self.run_sluice("train", config, "--quiet", "--json", "run.json", "--resume-from", folder)
                for word in words:
                    self.assertIn(word, done.stderr)
                run = self.read_json("run.json")
                self.assertEqual((run["resumed_steps"], run["state_sha256"]), (3, whole))
        message = self.fail_train(2, values, "--resume-from", "storage")
        for word in ('"storage" is no checkpoint', "there is none in it", "`sluice state export` write checkpoints"):
            self.assertIn(word, message)
        self.assertIn("run.seed", self.fail_train(2, {**values, "run.seed": 9}, "--resume-from", "first"))
        self.assertIn("--init", self.fail_train(2, values, "--resume-from", "first", "--init", "first/latest"))
        # A checkpoint of the run itself comes first.
        self.assertIn("--resume", self.fail_train(2, values, "--resume-from", "universal", "--checkpoint", "first"))
        again = self.train(values, "--resume-from", "universal", "--resume", "--checkpoint", "whole")
        self.assertEqual((again["resumed_steps"], again["state_sha256"]), (STEPS, whole))
        store = self.write_config({**values, "storage.state.name": "moved"}, name="store.json")
        self.assertIn("step 3", self.run_sluice("state", "import", store, "universal").stdout)
        self.run_sluice("train", store, "--resume=required", "--quiet", "--json", "run.json")
        run = self.read_json("run.json")
        self.assertEqual((run["resumed_steps"], run["state_sha256"]), (3, whole))
        self.run_sluice("state", "remove", store)
        for name in os.listdir(self.path("storage")):
            os.remove(self.path("storage", name))  # the lock

    def expect_sha256(self, folder):
        with open(os.path.join(folder, "sluice_state.json"), encoding="utf-8") as file:
            manifest = json.load(file)
        contents = []
        for entry in manifest["files"]:
            with open(os.path.join(folder, entry["name"]), "rb") as file:
                contents.append(file.read())
            self.assertEqual(entry["sha256"], hashlib.sha256(contents[-1]).hexdigest())
        self.assertGreater(len(contents), 2)
        for tensor in manifest["tensors"]:
            size = sum(count for _, count, _ in tensor["pieces"]) * {"F32": 4, "BF16": 2, "I16": 2}[tensor["dtype"]]
            bytes_of = contents[tensor["file"]][tensor["begin_bytes"]:tensor["begin_bytes"] + size]
            self.assertEqual(tensor["sha256"], hashlib.sha256(bytes_of).hexdigest(), tensor["tensor"])

    def test_manifests_have_sha256_where_asked_for(self):
        values = {**BASE, "run.steps": 2, "storage.state.name": "kept"}
        self.train(values, "--checkpoint", "with", "--shard-size", "64KiB", "--sha256")
        self.expect_sha256(self.path("with", "latest"))
        self.train({**BASE, "run.steps": 3}, "--checkpoint", "with", "--resume", "--accept-config")
        with open(self.path("with", "latest", "sluice_state.json"), encoding="utf-8") as file:
            self.assertNotIn("sha256", file.read())
        config = self.write_config(values)
        self.run_sluice("state", "export", config, "exported", "--shard-size", "64KiB", "--sha256")
        self.expect_sha256(self.path("exported", "latest"))
        self.run_sluice("state", "remove", config)
        os.remove(self.path("storage", "kept.lock"))

    def test_weights_alone_begin_a_run_or_a_store(self):
        values = {**BASE, "precision.parameters": "fp32", "precision.gradients": "fp32"}
        self.train({**values, "run.steps": 2}, "--checkpoint", "first", "--save", "single", "--shard-size", "64KiB")
        hub = self.path("hub")  # as transformers writes it: several files with an index, and a config
        shutil.copytree(self.path("first", "latest"), hub, ignore=shutil.ignore_patterns("sluice_state.json", "optimizer*"))
        self.assertFalse([name for name in os.listdir(hub) if not name.startswith("model-") and name not in ("config.json", "model.safetensors.index.json")])
        expected = self.train(values, "--init", "single")["state_sha256"]
        config = self.write_config({**values, "storage.state.name": "moved"}, name="store.json")
        for weights in ("hub", "single"):
            with self.subTest(weights):
                done = self.run_sluice("train", self.write_config(values), "--quiet", "--json", "run.json", "--resume-from", weights)
                self.assertIn(f'"{weights}" is a model\'s weights alone: training begins at step 0, with zero moments', done.stderr)
                run = self.read_json("run.json")
                self.assertEqual((run["resumed_steps"], run["state_sha256"]), (0, expected))
                compared = self.train(values, "--resume-from", weights, "--compare-memory", 2)["in_memory"]
                self.assertIsNone(compared["losses_are_equal"], "in memory it began with other values")
                self.assertIn("step 0", self.run_sluice("state", "import", config, weights).stdout)
                self.run_sluice("train", config, "--resume=required", "--quiet", "--json", "run.json")
                self.assertEqual(self.read_json("run.json")["state_sha256"], expected)
                self.run_sluice("state", "remove", config)
        for name in os.listdir(self.path("storage")):
            os.remove(self.path("storage", name))  # the lock
        self.assertIn("model.layers", self.fail_train(2, {**values, "model.layers": 3}, "--resume-from", "hub"))
        shards = sorted(name for name in os.listdir(hub) if name.startswith("model-"))
        self.assertGreater(len(shards), 1)
        os.remove(os.path.join(hub, shards[-1]))
        os.truncate(self.path("single"), 100)
        for weights, word in (("hub", shards[-1]), ("single", "100")):
            message = self.fail_train(2, values, "--resume-from", weights)
            self.assertIn(word, message)
            self.assertNotIn("is no checkpoint", message)

    def test_a_part_of_a_checkpoint_is_not_taken_for_weights(self):
        values = {**BASE, "precision.parameters": "fp32", "precision.gradients": "fp32"}
        self.train({**values, "run.steps": 2}, "--checkpoint", "whole")
        newest = os.path.realpath(self.path("whole", "latest"))
        os.makedirs(self.path("root"))
        for copy, left_out in (("copy", ()), ("root/step-000000002", ()), ("root/step-000000003", ("optimizer-*",))):
            shutil.copytree(newest, self.path(copy), ignore=shutil.ignore_patterns("sluice_state.json", *left_out))
        os.symlink("step-000000003", self.path("root", "latest"))
        config = self.write_config({**values, "storage.state.name": "moved"}, name="store.json")
        for origin in ("copy", "root", "root/latest", "root/step-000000002", "root/step-000000003"):
            with self.subTest(origin):
                for message in (self.fail_train(2, values, "--resume-from", origin),
                                self.run_sluice("state", "import", config, origin, expect=1).stderr):
                    for word in (origin, "part of a checkpoint", "sluice_state.json is missing"):
                        self.assertIn(word, message)
                self.assertEqual(os.listdir(self.path("storage")), [])

    def test_a_small_shard_size_needs_few_open_files(self):
        limited = ["prlimit", "--nofile=256:256"]
        config = self.write_config({**BASE, "model.layers": 6, "optimizer.schedule_steps": 2})
        self.run_sluice("train", config, "--quiet", "--checkpoint", "kept", "--steps", "1")
        run = [*self.command("train", config, "--quiet", "--checkpoint", "kept", "--shard-size", "1KiB", "--steps", "2", "--resume")]
        done = subprocess.run([*limited, *run], cwd=self.folder, env=self.environment(), capture_output=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        files = [name for name in os.listdir(self.path("kept", "latest")) if name.endswith(".safetensors")]
        self.assertGreater(2 * len(files), 256)
        # The newest is whole, so that an older one must not take its place.
        done = subprocess.run([*limited, *run], cwd=self.folder, env=self.environment(), capture_output=True, check=False)
        self.assertNotEqual(done.returncode, 0)
        for word in (b"ulimit -n", b"step-000000002"):
            self.assertIn(word, done.stderr)
        self.assertNotIn(b"skipped", done.stderr)

    def test_a_signal_ends_with_a_checkpoint_and_the_command_that_goes_on(self):
        config = self.write_config({**BASE, "run.steps": 100000})
        self.expect_signals_end_resumably(lambda name: (config, "--checkpoint", name),
                                          lambda name, steps: f"step {steps} is saved in \"{name}/step-{steps:09}\"")

    def test_values_that_are_not_finite_are_the_checkpoints(self):
        values = {**BASE, "run.steps": 2, "precision.parameters": "fp32", "precision.gradients": "fp32"}
        self.train(values, "--checkpoint", "whole")
        for file, words in (("model", ("the value given for", "check the source of the values")),
                            ("optimizer", ("the exp_avg", "check the source of the state"))):
            forged, universal = self.path(file, "step-000000002"), self.path("universal-" + file)
            shutil.copytree(self.path("whole", "step-000000002"), forged)
            with open(os.path.join(forged, file + "-00001-of-00001.safetensors"), "r+b") as opened:
                opened.seek(-4, os.SEEK_END)
                opened.write(struct.pack("<f", float("nan")))
            write_universal(forged, universal, 2)
            message = self.fail_train(2, {**values, "run.steps": 4}, "--resume-from", universal)
            for word in (universal, *words, '"ln_f.bias" (unit "head") at element 63 is nan'):
                self.assertIn(word, message)
            if not mend_checksums(forged):
                self.skipTest("libxxhash, which would make a checkpoint's checksums, is not there")
            message = self.fail_train(2, {**values, "run.steps": 4}, "--checkpoint", file, "--resume")
            for word in (forged.removeprefix(self.folder + "/"), *words, '"ln_f.bias" (unit "head") at element 63 is nan'):
                self.assertIn(word, message)

    def test_damaged_ones_are_passed_over_by_name(self):
        expected = self.train(BASE)["state_sha256"]
        self.train(BASE, *EVERY[:-1], "3")
        newest, second = self.names()[:0:-1]
        self.flip(newest, "optimizer-00001-of-00001.safetensors")
        os.truncate(self.path("kept", second, "sluice_state.json"), 50)
        os.mkdir(self.path("kept", ".new-0123456789abcdef"))
        done = self.run_sluice("train", self.write_config(BASE), "--quiet", "--json", "run.json", *EVERY, "--resume")
        for word in (newest, second, "checksum", "50 bytes", ".new-0123456789abcdef"):
            self.assertIn(word, done.stderr)
        run = self.read_json("run.json")
        self.assertEqual((run["resumed_steps"], run["state_sha256"]), (STEPS - 2, expected))

    def test_a_removed_group_is_named(self):
        values = {**BASE, "run.steps": 2, "optimizer.groups": [{"tensors": ["wte.*"], "learning_rate_factor": 0.5}]}
        self.train(values, "--checkpoint", "kept")
        self.assertIn("optimizer.groups[0] was \"wte.*\" with learning_rate_factor 0.5 and is nothing", self.fail_train(
            2, {**BASE, "run.steps": 3}, "--checkpoint", "kept", "--resume"))

    def test_other_batches_go_on_behind_the_sequences_that_were_drawn(self):
        values = {**BASE, "run.steps": 2, "batch.sequences": 2}
        self.train(values, "--checkpoint", "kept")
        self.train({**values, "run.steps": 5, "batch.sequences": 3}, "--checkpoint", "kept", "--resume", "--accept-config")
        with open(self.path("kept", "latest", "sluice_state.json"), encoding="utf-8") as file:
            application = json.loads(json.load(file)["application"][0])
        self.assertEqual((application["steps"], application["draws"]), (5, 2 * 2 + 3 * 3))

    def test_more_steps_say_what_becomes_of_the_schedule(self):
        lowest = 2.9997e-3  # so that four digits do not tell the rates apart
        values = {**BASE, "run.steps": 4, "optimizer.warmup_steps": 1, "optimizer.minimum_learning_rate": lowest}
        self.train(values, "--checkpoint", "kept")
        shutil.copytree(self.path("kept"), self.path("same"))
        config = self.write_config({**values, "run.steps": 8})
        rates = [float(line.split()[1]) for line in self.run_sluice("config", "rates", config).stdout.splitlines()]
        said = self.run_sluice("train", config, "--quiet", "--checkpoint", "kept", "--resume").stderr
        self.assertIn("checkpoint: run.steps was 4 and is 8 from here on, and so the schedule's end: the next learning rate is "
                      f"{rates[4]:.5g}, not {lowest:g}; --set optimizer.schedule_steps=4 --accept-config keeps the schedule\n", said)
        self.run_sluice("train", config, "--quiet", "--checkpoint", "same", "--resume", "--set", "optimizer.schedule_steps=4",
                        "--accept-config", "--json", "run.json")
        self.assertEqual(self.read_json("run.json")["state_sha256"],
                         self.train({**values, "run.steps": 8, "optimizer.schedule_steps": 4})["state_sha256"])

    def test_a_run_whose_steps_are_made_says_so(self):
        values = {**BASE, "run.steps": 3}
        self.train(values, "--checkpoint", "kept")
        for steps in (3, 2):
            said = self.run_sluice("train", "config.json", "--quiet", "--checkpoint", "kept", "--resume", "--steps", steps).stderr
            self.assertIn(f"sluice: nothing to train: step 3 is reached, and run.steps is {steps}; ", said)
        message = self.fail_train(2, values, "--resume-from", "kept", "--checkpoint", "other", "--steps", 2)
        self.assertIn('nothing to train: "kept/step-000000003" is of step 3, and --steps is 2; choose a larger --steps', message)
        self.assertFalse(os.path.exists(self.path("other")))

    def test_lazy_updates_are_no_change(self):
        lazy = {**BASE, "optimizer.untouched": "lazy"}
        expected = self.train({**BASE, "run.steps": 4, "optimizer.schedule_steps": 4})["state_sha256"]
        for first, second in ((BASE, lazy), (lazy, BASE)):
            for values, steps in ((first, 2), (second, 4)):
                made = self.train({**values, "run.steps": steps, "optimizer.schedule_steps": 4}, "--checkpoint", "kept", "--resume")
            self.assertEqual((made["resumed_steps"], made["state_sha256"]), (2, expected))
            shutil.rmtree(self.path("kept"))

    def test_what_cannot_go_on_is_refused_and_nothing_changes(self):
        self.assertIn("no checkpoint", self.fail_train(2, BASE, *EVERY, "--resume=required"))
        self.assertIn("--checkpoint", self.fail_train(2, BASE, "--resume"))
        self.train(BASE, *EVERY)
        before = {name: os.stat(self.path("kept", name)).st_mtime_ns for name in self.names()}
        self.assertIn("--resume", self.fail_train(2, BASE, *EVERY))
        for values, words in (({"run.seed": 8}, ("run.seed was 7 and is 8", "--accept-config")),
                              ({"model.heads": 4}, ("model.heads was 2 and is 4", "--accept-config")),
                              ({"optimizer.untouched": "skip"}, ("optimizer.untouched was update and is skip", "--accept-config")),
                              ({"precision.parameters": "fp32", "precision.gradients": "bf16"}, ("precision", "bf16", "fp32", "--convert")),
                              ({"model.layers": 3}, ("another model",)),
                              ({"optimizer.type": "lion"}, ("adamw", "lion"))):
            message = self.fail_train(2, {**BASE, **values}, *EVERY, "--resume")
            for word in words:
                self.assertIn(word, message)
        with open(self.path("text.txt"), "a", encoding="ascii") as file:
            file.write("more")
        self.assertIn("--accept-data", self.fail_train(2, BASE, *EVERY, "--resume"))
        self.assertEqual({name: os.stat(self.path("kept", name)).st_mtime_ns for name in self.names()}, before)
        for name in self.names():
            self.flip(name, "model-00001-of-00001.safetensors")
        self.assertIn("none of the 2", self.fail_train(1, BASE, *EVERY, "--resume", "--accept-data"))

    def test_files_are_as_large_as_asked_for(self):
        for size, largest in (("64KiB", 64 << 10), ("1GB", 10 ** 9)):
            folder = "shards-" + size
            whole = self.train({**BASE, "run.steps": 2}, "--checkpoint", folder, "--shard-size", size)
            files = [name for name in os.listdir(self.path(folder, "latest")) if name.endswith(".safetensors")]
            for path in (self.path(folder, "latest", name) for name in files):  # with its header; a single tensor may be larger
                self.assertTrue(os.path.getsize(path) <= largest or len(read_safetensors(path)) == 1, path)
            self.assertEqual(len(files) == 2, largest == 10 ** 9, files)
            resumed = self.train({**BASE, "run.steps": 2}, "--checkpoint", folder, "--resume", "--shard-size", size)
            self.assertEqual((resumed["resumed_steps"], resumed["state_sha256"]), (2, whole["state_sha256"]))
        self.assertIn("--shard-size", self.run_sluice("train", self.write_config(BASE), "--checkpoint", "kept",
                                                      "--shard-size", "0", expect=2).stderr)

    def test_a_full_disk_leaves_the_older_ones(self):
        os.mkdir(self.path("kept"))
        mount_tmpfs(self, self.path("kept"), "4m")  # room for two, and not for a third beside them
        config = self.write_config(BASE)
        done = self.run_sluice("train", config, "--quiet", "--checkpoint", "kept", "--checkpoint-every", "1", expect=5)
        self.assertIn("No space left", done.stderr)
        self.assertIn("training goes on", done.stderr)
        whole = self.names()
        self.assertEqual(whole[0], "step-000000001")
        self.assertEqual([name for name in os.listdir(self.path("kept")) if name.startswith(".new")], [])
        run = self.train({**BASE, "run.steps": len(whole)}, "--checkpoint", "kept", "--resume")
        self.assertEqual(run["resumed_steps"], len(whole))


class CheckpointsOfRanks(RanksTest):
    def test_ranks_go_on_after_a_kill_and_one_rank_goes_on_alone(self):
        values = {**BASE, "run.threads": 1, "sharding.keep_gathered": "0"}
        expected = self.train_ranks(2, values)["state_sha256"]
        half = self.train_ranks(2, {**values, "run.steps": 3}, "--checkpoint", "kept")
        alone = self.train({**values, "run.steps": 3}, "--checkpoint", "kept", "--resume")
        self.assertEqual((alone["resumed_steps"], alone["state_sha256"]), (3, half["state_sha256"]))
        process = subprocess.Popen([*self.mpirun(2), *self.command("train", self.write_config(values), "--quiet",
                                                                   "--checkpoint", "more", "--checkpoint-every", "1")],
                                   cwd=self.folder, env=self.environment(), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not os.path.exists(self.path("more", "latest")) and time.monotonic() < deadline:
            time.sleep(0.001)
        with open(self.path("more", ".lock"), encoding="ascii") as file:
            os.kill(int(file.read().split()[-1]), signal.SIGKILL)  # rank 0; mpirun ends the other
        self.assertNotEqual(process.wait(timeout=RUN_TIMEOUT_S), 0)
        rest = self.train_ranks(2, {**values, "sharding.stage": 1, "placement.parameters": "device"},
                                "--checkpoint", "more", "--resume=required")
        self.assertGreater(rest["resumed_steps"], 0)
        self.assertEqual(rest["state_sha256"], expected)

    def test_a_signal_to_the_launcher_loses_nothing(self):
        """Open MPI passes the signal on, reads no more of the terminal that it gives rank 0, kills soon after, and exits with 1."""
        config = self.write_config({**BASE, "run.threads": 1, "run.steps": 100000})
        launcher = self.mpirun(2)[self.mpirun(2).index("mpirun"):]  # without `timeout`, which would not pass the signal on at once
        process = subprocess.Popen([*launcher, *self.command("train", config, "--checkpoint", "kept", "--csv", "rows.csv")],
                                   cwd=self.folder, env={**self.environment(), "OMPI_MCA_odls_base_sigkill_timeout": "5"},
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        rows = 0
        while rows < 200:  # lines of progress that would fill a terminal without a reader
            self.assertIsNone(process.poll())
            if os.path.exists(self.path("rows.csv")):
                with open(self.path("rows.csv"), encoding="ascii") as file:
                    rows = len(file.readlines())
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
        self.assertIn(b"go on with: ", stderr)
        self.assertNotIn(b"MPI_Finalize", stderr)
        with open(self.path("rows.csv"), encoding="ascii") as file:
            steps = len(file.readlines()) - 1
        self.assertEqual(os.readlink(self.path("kept", "latest")), f"step-{steps:09}")
