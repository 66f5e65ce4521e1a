"""Durable stores of sluice train: runs that are killed or ended by signals go on with the same bits, a checkpoint that is newer is
taken, what cannot go on is refused, and sluice state looks at stores, verifies and removes them."""

import glob
import json
import os
import random
import re
import shutil
import subprocess

from cli_support import ON_NVME, RUN_TIMEOUT_S, CliCase

STEPS = 8
STORE = {"storage.state.name": "run-7"}
BASE = {**ON_NVME, **STORE, "run.steps": STEPS}
ELSEWHERE = {**STORE, "placement.parameters": "host", "placement.optimizer": "host", "optimizer.overlap": "serial",
             "storage.state.commit_every": 2, "run.steps": STEPS}


class DurableStores(CliCase):
    def tearDown(self):
        shutil.rmtree(self.path("storage"))  # what lies there is meant to stay
        os.mkdir(self.path("storage"))
        super().tearDown()

    def files(self, pattern="*"):
        return sorted(glob.glob(self.path("storage", pattern)))

    def test_kill_at_any_moment(self):
        expected = self.train({key: value for key, value in BASE.items() if key not in STORE})["state_sha256"]
        configs = [self.write_config(BASE, name="a.json"), self.write_config(ELSEWHERE, name="b.json")]
        generator = random.Random(int(os.environ.get("SLUICE_TEST_SEED", "1")))
        for kills in range(100):
            command = self.command("train", configs[kills % 2], "--quiet", "--json", "run.json", "--resume")
            process = subprocess.Popen(command, cwd=self.folder, env=self.environment(), stderr=subprocess.PIPE)
            try:
                _, stderr = process.communicate(timeout=generator.uniform(0.05, 0.9) if kills < 12 else RUN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                continue
            self.assertEqual(process.returncode, 0, stderr)
            break
        self.assertEqual(self.read_json("run.json")["state_sha256"], expected)

    def test_a_signal_ends_with_a_commit_and_the_command_that_goes_on(self):
        values = {**BASE, "run.steps": 100000, "storage.state.commit_every": 1000}
        self.expect_signals_end_resumably(lambda name: (self.write_config({**values, "storage.state.name": name}),),
                                          lambda name, steps: f"step {steps} is committed to the store \"{name}\"")

    def test_what_commits_write_and_take_is_planned(self):
        config = self.write_config({**BASE, "placement.parameters": "host", "placement.optimizer": "host"})
        done = self.run_sluice("plan", config, "--bytes-written-rating", "1GB")
        self.assertRegex(done.stdout, r"of the writes, \d.* are a commit's, of state at home in memory\n")
        often = float(re.search(r"last for (\S+) steps", done.stdout).group(1))
        done = self.run_sluice("plan", config, "--bytes-written-rating", "1GB", "--set", "storage.state.commit_every=10")
        self.assertAlmostEqual(float(re.search(r"last for (\S+) steps", done.stdout).group(1)) / often, 10, delta=0.1)
        self.assertIn("a commit writes", self.run_sluice("train", config).stdout)
        self.assertNotIn("a commit's", self.run_sluice("plan", self.write_config(BASE)).stdout)
        for values in (BASE, ON_NVME):  # speculation would take the same copies as shadows
            stdout = self.run_sluice("plan", self.write_config({**values, "optimizer.overlap": "deferred"})).stdout
            self.assertEqual("copies for commits" in stdout, values is BASE)

    def test_how_a_run_begins_is_said_or_refused(self):
        self.assertIn("there is no store \"run-7\"", self.fail_train(2, BASE, "--resume=required"))
        self.assertEqual(self.files("*.data*"), [])
        done = self.run_sluice("train", self.write_config({**BASE, "run.steps": 3}), "--resume")
        self.assertIn("beginning anew: there is no store \"run-7\" in storage yet", done.stdout)
        self.assertRegex(done.stdout, r'nvme += sum .* in the files of the store "run-7", which stay\n')
        before = {name: os.stat(name).st_mtime_ns for name in self.files("*.[dc]*")}
        self.assertIn("holds the state of step 3 already; go on from it with --resume", self.fail_train(2, BASE))
        for values, words in (({"run.seed": 8}, ("run.seed was 7 and is 8", "--accept-config")),
                              ({"optimizer.beta2": 0.5}, ("optimizer.beta2", "0.5", "--accept-config")),
                              ({"precision.parameters": "fp32", "precision.gradients": "bf16"}, ("precision.parameters was bf16 and is fp32",)),
                              ({"model.layers": 3}, ("another model",)),
                              ({"optimizer.type": "lion"}, ("adamw", "lion"))):
            message = self.fail_train(2, {**BASE, **values}, "--resume")
            for word in words:
                self.assertIn(word, message)
        with open(self.path("text.txt"), "a", encoding="ascii") as file:
            file.write("more")
        self.assertIn("--accept-data", self.fail_train(2, BASE, "--resume"))
        self.assertEqual({name: os.stat(name).st_mtime_ns for name in self.files("*.[dc]*")}, before)
        done = self.run_sluice("train", self.write_config(BASE), "--resume", "--accept-data", "--accept-config", "--set", "optimizer.beta2=0.5",
                               "--json", "run.json")
        self.assertIn("going on after step 3, from the store \"run-7\"", done.stdout)
        self.run_sluice("state", "export", self.write_config(BASE), "kept")
        changes = json.loads(self.read_json("kept/latest/sluice_state.json")["application"][0])["setting_changes"]
        self.assertEqual([(change["step"], change["key"]) for change in changes], [(3, "optimizer.beta2"), (3, "run.steps"), (3, "text")])
        self.assertEqual(changes[0]["is"], "0.5")
        self.assertEqual(self.read_json("run.json")["setting_changes"], changes)

    def test_the_newer_of_store_and_checkpoint_is_taken(self):
        kept = ("--checkpoint", "kept", "--resume", "--accept-config")
        whole = self.train({**BASE, "storage.state.name": "whole"})
        self.train({**BASE, "run.steps": 3}, *kept)
        self.train({**BASE, "run.steps": 5}, "--resume", "--accept-config")  # the store alone
        run = self.train(BASE, *kept)
        self.assertEqual(run["resumed_steps"], 5)
        self.train({**BASE, "storage.state.name": "other", "run.steps": 2}, "--resume")
        done = self.run_sluice("train", self.write_config({**BASE, "storage.state.name": "other"}), "--quiet", "--json", "run.json", *kept)
        self.assertIn("is newer than step 2 of the store \"other\"", done.stderr)
        self.assertEqual(self.read_json("run.json")["resumed_steps"], STEPS)
        again = self.train({**BASE, "storage.state.name": "other"}, "--resume=required")
        self.assertEqual((again["resumed_steps"], again["state_sha256"]), (STEPS, run["state_sha256"]))
        self.assertEqual(whole["resumed_steps"], 0)

    def test_a_second_run_is_refused_by_name_and_the_store_opens_after_a_kill(self):
        config = self.write_config({**BASE, "run.steps": 100000})
        process = subprocess.Popen(self.command("train", config), cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        while b"step     2/" not in process.stdout.readline():
            self.assertIsNone(process.poll())
        self.assertIn(f"in use by process {process.pid} on", self.fail_train(2, BASE, "--resume"))
        self.assertIn(f"in use by process {process.pid} on", self.run_sluice("state", "list", config).stdout)
        self.assertIn("in use", self.run_sluice("state", "remove", config, expect=2).stderr)
        process.kill()
        process.wait()
        self.assertGreater(self.train({**BASE, "run.steps": 4}, "--resume=required", "--accept-config")["resumed_steps"], 0)

    def test_state_lists_inspects_verifies_and_removes(self):
        config = self.write_config(BASE)
        self.assertIn("no durable store in storage", self.run_sluice("state", "list", config).stdout)
        self.assertIn("there is no store \"run-7\"", self.run_sluice("state", "inspect", config, expect=2).stderr)
        self.run_sluice("train", config, "--quiet")
        self.assertRegex(self.run_sluice("state", "list", config).stdout, rf"^run-7 .* step {STEPS}  1 rank\n$")
        self.run_sluice("state", "inspect", config, "--json", "state.json")
        state = self.read_json("state.json")
        self.assertEqual((state["name"], state["step"], state["ranks"][0]["step"]), ("run-7", STEPS, STEPS))
        self.assertEqual(state["ranks"][0]["settings"]["layout"]["precision.parameters"], "bf16")
        self.assertIn("0 damaged", self.run_sluice("state", "verify", config).stdout)
        data = self.files("*.data0")[0]
        os.rename(data, self.path("aside"))
        self.assertIn("cannot be opened (`sluice state inspect` says why)", self.run_sluice("state", "list", config).stdout)
        self.assertRegex(self.run_sluice("state", "inspect", config, "--json", "state.json").stdout, r"data0 not found in storage on ")
        self.assertIn("data0 not found", self.read_json("state.json")["ranks"][0]["problem"])
        self.assertEqual(self.read_json("state.json")["step"], STEPS)
        os.rename(self.path("aside"), data)
        with open(self.files("*.data0")[0], "r+b") as file:  # every page, so that a copy that counts is hit
            for at in range(17, os.path.getsize(file.name), 4096):
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))
        done = self.run_sluice("state", "verify", config, expect=1)
        self.assertIn("checksum", done.stdout)
        self.assertIn("is damaged", done.stderr)
        removed = self.files()
        size = sum(os.path.getsize(name) for name in removed if not name.endswith(".lock"))
        self.run_sluice("state", "remove", config, "--json", "removed.json")
        report = self.read_json("removed.json")
        self.assertEqual((report["name"], report["id"], report["bytes"], report["paths"]), ("run-7", state["id"], size, ["storage"]))
        self.assertEqual([os.path.basename(name) for name in self.files()], ["run-7.lock"])
        self.assertEqual(self.train(BASE, "--resume")["resumed_steps"], 0)
        self.assertIn("names no durable store", self.run_sluice("state", "verify", self.write_config(ON_NVME), expect=2).stderr)

    def test_a_store_that_has_lost_a_path_is_listed_and_can_be_removed(self):
        os.mkdir(self.path("second"))
        paths = {**BASE, "storage.paths": ["storage", "second"]}
        self.train({**paths, "storage.state.name": "other"})
        config = self.write_config(paths)
        self.run_sluice("train", config, "--quiet")
        os.rename(self.path("second"), self.path("aside"))
        os.mkdir(self.path("second"))  # a mount point without its drive
        shutil.copy(self.path("aside", "other.lock"), self.path("second"))
        for name in os.listdir(self.path("aside")):
            if name.startswith("other."):
                shutil.copy(self.path("aside", name), self.path("second"))
        before = self.files()
        for command in ("inspect", "verify"):
            self.assertIn("second does not know it", self.run_sluice("state", command, config, expect=2).stderr)
        done = self.run_sluice("state", "list", config, "--json", "list.json")
        self.assertRegex(done.stdout, r"(?m)^other .* 1 rank$")
        self.assertRegex(done.stdout, r"(?m)^run-7  cannot be opened: .*second does not know it.*`sluice state remove`$")
        listed = {store["name"]: store for store in self.read_json("list.json")}
        self.assertIn("does not know it", listed["run-7"]["problem"])
        self.assertEqual(listed["other"]["step"], STEPS)
        self.assertEqual(self.files(), before)
        self.assertIn("removed the store \"run-7\"", self.run_sluice("state", "remove", config).stdout)
        self.assertEqual([name for name in self.files("run-7.*") if not name.endswith(".lock")], [])
        self.assertEqual(self.files("other.*"), [name for name in before if os.path.basename(name).startswith("other.")])
        self.assertIn("there is no store", self.run_sluice("state", "remove", config, expect=2).stderr)
        # The drive comes back: what it has is of no store, and goes in the same way.
        for name in os.listdir(self.path("aside")):
            if name.startswith("run-7."):
                os.replace(self.path("aside", name), self.path("second", name))
        self.assertIn("does not know it", self.fail_train(2, paths, "--resume"))
        self.run_sluice("state", "remove", config)
        self.assertEqual(self.train(paths, "--resume")["resumed_steps"], 0)

    def test_a_store_that_was_never_finished_is_not_called_whole(self):
        config = self.write_config(BASE)
        self.run_sluice("train", config, "--quiet")
        mark = self.files("run-7.lock")[0]
        with open(mark, "rb") as file:
            made = file.read()
        with open(mark, "wb") as file:
            file.write(made.replace(b"stage: made", b"stage: creating")[:512])
        words = "never finished; the next start removes it"
        self.assertIn(words, self.run_sluice("state", "list", config).stdout)
        self.assertIn(words, self.run_sluice("state", "inspect", config).stdout)
        for _ in range(2):
            done = self.run_sluice("state", "verify", config, "--json", "verify.json", expect=1)
            self.assertIn("never finished, or its removal was cut short; the next start removes it", done.stderr)
            self.assertNotIn("0 damaged", done.stdout)
            self.assertIn("never finished", self.read_json("verify.json")["problem"])
            for name in self.files("*.commit*"):
                os.remove(name)
        with open(mark, "wb") as file:  # a store that has lost its records
            file.write(made)
        for command, code in (("verify", 1), ("inspect", 0)):
            done = self.run_sluice("state", command, config, expect=code)
            self.assertIn("has no commit records in storage", done.stdout + done.stderr)

    def test_a_store_that_has_lost_its_mark_is_read_and_goes_on(self):
        planned = {**BASE, "optimizer.schedule_steps": STEPS}
        expected = self.train({**planned, "storage.state.name": "whole"})["state_sha256"]
        config = self.write_config(planned, name="planned.json")
        mark = self.path("storage", "run-7.lock")
        for steps, text in ((3, None), (5, b""), (STEPS, bytes(512))):
            self.run_sluice("train", self.write_config({**planned, "run.steps": steps}, name="steps.json"), "--quiet", "--resume")
            os.remove(mark)
            if text is not None:
                with open(mark, "wb") as file:
                    file.write(text)
            done = self.run_sluice("state", "verify", config)
            self.assertIn("0 damaged", done.stdout)
            self.assertIn("storage/run-7.lock is missing or damaged; all files of the store are there", done.stdout)
            self.assertRegex(self.run_sluice("state", "list", config).stdout, rf"(?m)^run-7 .* step {steps}  1 rank$")
            self.run_sluice("state", "inspect", config, "--json", "state.json")
            self.assertEqual(self.read_json("state.json")["lost_marks"], ["storage"])
            self.run_sluice("state", "export", config, "kept")
        done = self.run_sluice("train", self.write_config({**planned, "run.steps": STEPS + 1}), "--resume=required", "--accept-config")
        self.assertIn("storage/run-7.lock was missing or damaged, and has been written again", done.stdout)
        moved = self.train({**planned, "storage.state.name": "other"}, "--resume-from", f"kept/step-00000000{STEPS}")
        self.assertEqual(moved["state_sha256"], expected)
        with open(mark, "wb") as file:
            file.write(bytes(512))
        self.assertIn("removed the store \"run-7\"", self.run_sluice("state", "remove", config).stdout)
        self.assertEqual(self.files("run-7.*"), [mark])

    def test_a_refused_start_leaves_the_size_of_a_store(self):
        self.run_sluice("train", self.write_config(BASE), "--quiet")
        sizes = {name: os.path.getsize(name) for name in self.files("*.data*")}
        wants_three = {**BASE, "optimizer.overlap": "speculative", "storage.state.commit_every": 2}
        self.assertIn("go on from it with --resume", self.fail_train(2, wants_three))
        self.assertIn("run.seed", self.fail_train(2, {**wants_three, "run.seed": 8}, "--resume"))
        self.assertEqual({name: os.path.getsize(name) for name in self.files("*.data*")}, sizes)

    def test_stores_of_one_name_are_not_removed_together(self):
        os.mkdir(self.path("second"))
        for path in ("storage", "second"):
            self.train({**BASE, "storage.paths": [path]})
        before = self.files()
        both = self.write_config({**BASE, "storage.paths": ["storage", "second"]})
        self.assertIn("files of 2 stores \"run-7\"", self.run_sluice("state", "remove", both, expect=2).stderr)
        self.assertEqual(self.files(), before)
        self.run_sluice("state", "remove", self.write_config(BASE))
        self.assertIn("0 damaged", self.run_sluice("state", "verify", self.write_config({**BASE, "storage.paths": ["second"]})).stdout)

    def test_a_damaged_checkpoint_that_is_newer_leaves_the_store(self):
        values = {**BASE, "optimizer.schedule_steps": STEPS}
        expected = self.train({key: value for key, value in values.items() if key not in STORE})["state_sha256"]
        self.train({**values, "run.steps": 2})
        self.train({**values, "storage.state.name": "other", "run.steps": 5}, "--checkpoint", "kept")
        with open(self.path("kept", "latest", "optimizer-00001-of-00001.safetensors"), "r+b") as file:
            file.seek(-1, os.SEEK_END)  # its last block: those before have been read by then
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        done = self.run_sluice("train", self.write_config(values), "--quiet", "--json", "run.json", "--resume", "--checkpoint", "kept")
        self.assertIn("the checkpoint is damaged", done.stderr)
        run = self.read_json("run.json")
        self.assertEqual((run["resumed_steps"], run["state_sha256"]), (2, expected))

    def test_a_store_is_exported_and_imported(self):
        planned = {**BASE, "optimizer.schedule_steps": STEPS}
        whole = self.train({**planned, "storage.state.name": "whole"})["state_sha256"]
        first = self.write_config({**planned, "run.steps": 3}, name="first.json")
        resumed = self.write_config({**planned, **ELSEWHERE, "storage.state.name": "moved"}, name="moved.json")
        self.run_sluice("train", first, "--quiet")
        before = self.files("run-7.*")
        done = self.run_sluice("state", "export", first, "kept", "--json", "export.json")
        self.assertIn("step 3, is now also \"kept/step-000000003\"", done.stdout)
        report = self.read_json("export.json")
        self.assertEqual((report["name"], report["ranks"], report["step"], report["path"]), ("run-7", 1, 3, "kept/step-000000003"))
        self.assertEqual(self.files("run-7.*"), before)
        names = os.listdir(self.path("kept", "latest"))
        for name in ("config.json", "model.safetensors.index.json", "sluice_state.json"):
            self.assertIn(name, names)
        for folder in ("kept", "kept/latest"):
            done = self.run_sluice("state", "import", resumed, folder, "--json", "import.json")
            self.assertIn("is now also the store \"moved\" of 1 rank, step 3", done.stdout)
            self.assertEqual((self.read_json("import.json")["step"], self.read_json("import.json")["ranks"]), (3, 1))
            self.assertIn("0 damaged", self.run_sluice("state", "verify", resumed).stdout)
            self.assertIn("there is a store \"moved\"", self.run_sluice("state", "import", resumed, folder, expect=2).stderr)
            self.run_sluice("train", resumed, "--resume=required", "--quiet", "--json", "run.json")
            run = self.read_json("run.json")
            self.assertEqual((run["resumed_steps"], run["state_sha256"]), (3, whole))
            self.run_sluice("state", "remove", resumed)

    def test_what_an_export_removes_is_named(self):
        config = self.write_config({**BASE, "run.steps": 1})
        self.run_sluice("train", config, "--quiet")
        left = self.path("kept", ".new-0123456789abcdef")
        os.makedirs(left)
        done = self.run_sluice("state", "export", config, "kept")
        self.assertEqual(done.stderr.count("kept/.new-0123456789abcdef"), 1, done.stderr)
        self.assertFalse(os.path.exists(left))

    def test_an_exported_config_has_the_heads_of_the_store(self):
        self.run_sluice("train", self.write_config({**BASE, "run.steps": 1, "model.heads": 2}), "--quiet")
        done = self.run_sluice("state", "export", self.write_config({**BASE, "run.steps": 1, "model.heads": 4}), "kept")
        with open(self.path("kept", "latest", "config.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["n_head"], 2)
        self.assertIn("the store has model.heads = 2, and so has the config.json; the config says 4", done.stderr)

    def test_checkpoints_of_another_run_stay(self):
        stores = [{**BASE, "storage.state.name": f"run-{seed}", "run.seed": seed} for seed in (1, 2)]
        sums = [self.train(values)["state_sha256"] for values in stores]
        first = self.run_sluice("state", "export", self.write_config(stores[0]), "kept")
        again = self.run_sluice("state", "export", self.write_config(stores[0]), "kept")  # the same state is there once
        self.assertEqual(first.stderr + again.stderr, "")
        done = self.run_sluice("state", "export", self.write_config(stores[1]), "kept")
        self.assertIn(f"step-00000000{STEPS}.1\" is of another state of this step, and stays", done.stderr)
        for seed, name, expected in zip((1, 2), (".1", ".2"), sums):
            run = self.train({**BASE, "storage.state.name": "", "run.seed": seed}, "--resume-from",
                             f"kept/step-00000000{STEPS}{name}")
            self.assertEqual((run["resumed_steps"], run["state_sha256"]), (STEPS, expected))
        scratch = {**stores[0], "storage.state.name": ""}
        for changed in ({}, {"model.layers": 1}):
            self.train({**scratch, **changed, "run.steps": 2}, "--checkpoint", "other")
            before = sorted(os.listdir(self.path("other")))
            self.assertIn("is a checkpoint of another run", self.fail_train(2, {**stores[1], "run.steps": STEPS + 1}, "--resume",
                                                                           "--checkpoint", "other", "--keep", "1"))
            self.assertEqual(sorted(os.listdir(self.path("other"))), before)
            shutil.rmtree(self.path("other"))
        self.train({**scratch, "run.steps": 2}, "--checkpoint", "other")
        self.train({**stores[0], "run.steps": STEPS + 1}, "--resume", "--checkpoint", "other", "--keep", "1", "--accept-config")
        self.assertEqual([name for name in sorted(os.listdir(self.path("other"))) if name[0] != "."], ["latest", f"step-00000000{STEPS + 1}"])

    def test_a_signal_while_the_store_is_made(self):
        config = self.write_config({**BASE, "run.steps": 100000})
        process = subprocess.Popen(self.command("train", config, "--quiet"), cwd=self.folder, env=self.environment(), stderr=subprocess.PIPE)
        while not (self.files("run-7.lock") and b"stage: made" in open(self.files("run-7.lock")[0], "rb").read(60)):
            self.assertIsNone(process.poll())
        process.terminate()
        _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
        self.assertEqual(process.returncode, 130, stderr)
        self.assertNotIn(b"nothing was written", stderr)
        self.run_sluice("train", config, "--steps", "100", "--quiet", "--resume", "--accept-config")

    def test_a_store_begins_another_run_or_store(self):
        planned = {**BASE, "optimizer.schedule_steps": STEPS}
        whole = self.train({**planned, "storage.state.name": "whole"})["state_sha256"]
        self.run_sluice("train", self.write_config({**planned, "run.steps": 3}), "--quiet")
        before = {name: os.stat(name).st_mtime_ns for name in self.files("run-7.*.*")}
        other = {**planned, **ELSEWHERE, "storage.block_elements": 8192, "storage.state.name": "other"}
        resumed = self.write_config(other, name="other.json")
        done = self.run_sluice("train", resumed, "--resume-from", "store:run-7", "--json", "run.json")
        self.assertIn("going on after step 3, from \"store:run-7\"", done.stdout)
        run = self.read_json("run.json")
        self.assertEqual((run["resumed_steps"], run["state_sha256"]), (3, whole))
        self.run_sluice("state", "remove", resumed)
        self.assertIn("\"store:run-7\" is now also the store \"other\" of 3 ranks, step 3",
                      self.run_sluice("state", "import", resumed, "store:run-7", "--ranks", "3").stdout)
        self.assertIn("0 damaged", self.run_sluice("state", "verify", resumed).stdout)
        self.run_sluice("state", "remove", resumed)
        for name, words in (("other", "the store of the config itself"), ("none", "there is no store \"none\""), ("", "there is no store")):
            self.assertIn(words, self.fail_train(2, other, "--resume-from", f"store:{name}"))
        self.assertIn("which it would destroy", self.run_sluice("train", resumed, "--resume-from", "store:run-7", "--json", self.files("run-7.*.data*")[0], expect=2).stderr)
        self.assertEqual({name: os.stat(name).st_mtime_ns for name in self.files("run-7.*.*")}, before)

    def test_what_cannot_be_exported_or_imported_is_named(self):
        config = self.write_config(BASE)
        self.assertIn("there is no store \"run-7\"", self.run_sluice("state", "export", config, "kept", expect=2).stderr)
        self.assertFalse(os.path.exists(self.path("kept")))
        self.assertIn("no checkpoint, and there is none in it", self.run_sluice("state", "import", config, ".", expect=2).stderr)
        self.run_sluice("train", config, "--quiet", "--save", "weights.safetensors")
        self.run_sluice("state", "export", config, "kept")
        before = self.files()
        for setting, words in (("precision.parameters=fp32", "--convert"), ("model.layers=3", 'it has no tensor "h.2.'),
                               ("optimizer.type=lion", "lion")):
            done = self.run_sluice("state", "import", config, "kept", "--set", "storage.state.name=other", "--set", setting, expect=2)
            self.assertIn(words, done.stderr)
        for origin in ("kept", "weights.safetensors"):
            done = self.run_sluice("state", "import", config, origin, "--set", "storage.state.name=other", "--set", "sharding.group=node",
                                   "--ranks", "2", expect=2)
            self.assertIn("sharding.group", done.stderr)
        self.assertEqual(self.files(), before)
        self.run_sluice("state", "import", config, "kept", "--convert", "--ranks", "3", "--set", "precision.parameters=fp32",
                        "--set", "precision.gradients=bf16", "--set", "storage.state.name=other")
        self.run_sluice("state", "inspect", config, "--set", "storage.state.name=other", "--json", "state.json")
        state = self.read_json("state.json")
        self.assertEqual([rank["settings"]["layout"]["precision.parameters"] for rank in state["ranks"]], 3 * ["fp32"])
        self.assertNotIn("units", state["ranks"][0]["settings"])
