"""Bad input: the exit code, a message that names the thing and the remedy, nothing left behind."""

import os
import re
import resource

from cli_support import ON_NVME, SMALL_CONFIG, CliCase, as_ordinary_user, is_root, mount_tmpfs


class BadConfig(CliCase):
    LABEL = "cpu"

    def fail_text(self, text):
        """The message that a config file with this text gets."""
        with open(self.path("bad.json"), "w", encoding="utf-8") as file:
            file.write(text)
        return self.run_sluice("train", "bad.json", expect=2).stderr

    def test_missing_config(self):
        self.assertIn("nowhere.json", self.run_sluice("train", "nowhere.json", expect=2).stderr)

    def test_config_is_a_folder(self):
        self.assertIn("storage", self.run_sluice("train", "storage", expect=2).stderr)

    def test_config_is_no_json(self):
        self.assertIn("bad.json:2:1", self.fail_text('{\n]'))

    def test_unknown_key(self):
        message = self.fail_text('{\n  "memory": {\n    "devise": "8MiB"\n  }\n}')
        self.assertIn('bad.json:3:5: unknown key "memory.devise"; did you mean "memory.device"?',
                      message)

    def test_wrong_type(self):
        message = self.fail_text('{"run": {"steps": "many"}}')
        self.assertRegex(message, r'bad\.json:1:10: "run\.steps" is "many", .*integer')

    def test_out_of_range(self):
        self.assertRegex(self.fail_text('{"run":\n{"steps": 0}}'),
                         r'bad\.json:2:2: "run\.steps" is 0, but must be at least 1')
        self.assertRegex(self.fail_text('{"memory": {"host": "many"}}'), r"bad\.json:1:13: .*many")

    def test_values_that_do_not_fit_together(self):
        self.assertRegex(self.fail_text('{"model": {"heads": 5, "embedding": 64}}'),
                         r'bad\.json:1:12: "model\.heads" is 5, .*64')
        self.assertIn("minimum_learning_rate", self.fail_text(
            '{"optimizer": {"learning_rate": 1e-3, "minimum_learning_rate": 1e-2}}'))

    def test_bad_set(self):
        for assignment in ("run.steps", "run.step=1", "run.steps=x", "=1", "run.steps=-1",
                           "storage.paths=[]"):
            with self.subTest(assignment):
                message = self.fail_train(2, None, "--set", assignment)
                self.assertIn(assignment.partition("=")[0], message)
        self.assertIn("--set run.steps=-1: ", self.fail_train(2, None, "--set", "run.steps=-1", "--steps", 2))

    def test_bad_command_line(self):
        config = self.write_config()
        for arguments in ((), ("tain", config), ("train",), ("train", config, "--step", "3"),
                          ("train", config, "--steps", "-1"), ("train", config, "--seed", "x"),
                          ("train", config, "--steps"), ("train", config, config), ("generate",),
                          ("generate", "--model", "x")):
            with self.subTest(arguments):
                done = self.run_sluice(*arguments, expect=2)
                self.assertNotEqual(done.stderr, "")
        self.assertIn("--steps is 0", self.fail_train(2, None, "--steps", 0))
        self.assertIn("--seed is 1152921504606846976", self.fail_train(2, None, "--seed", 2**60))


class BadFiles(CliCase):
    def test_text_missing(self):
        self.assertIn('"gone.txt"', self.fail_train(2, {"data.file": "gone.txt"}))

    def test_text_not_given(self):
        self.assertIn("--data", self.fail_train(2, {"data.file": ""}))

    def test_text_empty(self):
        open(self.path("empty.txt"), "w", encoding="ascii").close()
        self.assertIn("empty", self.fail_train(2, {"data.file": "empty.txt"}))

    def test_text_too_short(self):
        with open(self.path("short.txt"), "w", encoding="ascii") as file:
            file.write("x" * 65)  # one less than two sequences of 32 and their successors
        message = self.fail_train(2, {"data.file": "short.txt"})
        self.assertIn("65 tokens", message)
        self.assertIn("66", message)
        with open(self.path("short.txt"), "a", encoding="ascii") as file:
            file.write("x")
        self.train({"data.file": "short.txt"})

    def test_text_is_a_folder_or_a_pipe(self):
        os.mkfifo(self.path("pipe"))
        self.write_tokenizer()
        for name, remedy in (("storage", "join its files with `cat DIR/* > FILE`"), ("pipe", "")):
            self.assertRegex(self.fail_train(2, {"data.file": name}), "not a regular file.*" + re.escape(remedy))
            self.assertRegex(self.fail_train(2, {"data.file": name, "model.vocabulary": 258}, "--tokenizer", "tokenizer.json"),
                             "not a regular file.*" + re.escape(remedy))

    def test_text_unreadable(self):
        prefix = as_ordinary_user(self)
        os.chmod(self.path("text.txt"), 0)
        self.assertIn("text.txt", self.fail_train(2, prefix=prefix))

    def test_token_beyond_vocabulary(self):
        self.assertRegex(self.fail_train(2, {"model.vocabulary": 100}),
                         r"token \d+ is \d+, but model.vocabulary is 100")

    def test_output_that_cannot_be_written(self):
        os.mkdir(self.path("folder"))
        for option in ("--json", "--csv", "--save", "--json-lines", "--trace"):
            with self.subTest(option):
                self.assertIn("missing", self.fail_train(2, None, option, "missing/file"))
                self.assertIn("folder", self.fail_train(2, None, option, "folder"))

    def test_output_folder_not_writable(self):
        prefix = as_ordinary_user(self)
        os.mkdir(self.path("locked"), 0o555)
        for option in ("--json", "--csv", "--save", "--json-lines", "--trace"):
            with self.subTest(option):
                message = self.fail_train(2, {"storage.paths": ["/var/tmp"]}, option, "locked/file",
                                          prefix=prefix)
                self.assertIn("locked", message)

    def test_init_missing_or_no_model(self):
        self.assertIn("gone", self.fail_train(2, None, "--init", "gone"))
        self.assertIn("text.txt", self.fail_train(2, None, "--init", "text.txt"))

    def test_init_of_another_shape(self):
        self.train(None, "--save", "model")
        for key, value in (("model.layers", 3), ("model.heads", 4), ("model.embedding", 32),
                           ("model.context", 16), ("model.vocabulary", 300),
                           ("model.tied_head", False)):
            with self.subTest(key):
                message = self.fail_train(2, {key: value}, "--init", "model")
                self.assertIn(key, message)
                self.assertIn('"model"', message)


class BadStorage(CliCase):
    def test_storage_missing(self):
        message = self.fail_train(2, {**ON_NVME, "storage.paths": ["nowhere"]})
        self.assertIn('"nowhere" does not exist', message)

    def test_second_storage_path_missing(self):
        message = self.fail_train(2, {**ON_NVME, "storage.paths": ["storage", "nowhere"]})
        self.assertIn('"nowhere" does not exist', message)

    def test_storage_is_a_file(self):
        self.assertIn("text.txt", self.fail_train(2, {**ON_NVME, "storage.paths": ["text.txt"]}))

    def test_storage_not_writable(self):
        prefix = as_ordinary_user(self)
        os.chmod(self.path("storage"), 0o555)
        self.assertIn("not writable", self.fail_train(2, ON_NVME, prefix=prefix))

    def check_space_message(self, message):
        found = re.search(r"needs .*\((\d+) bytes\) and has .*\((\d+) bytes\) free", message)
        self.assertTrue(found, message)
        return int(found.group(1)), int(found.group(2))

    def test_too_little_space(self):
        os.mkdir(self.path("small"))
        mount_tmpfs(self, self.path("small"), "512k")
        message = self.fail_train(5, {**ON_NVME, "storage.paths": ["small"]})
        needed, free = self.check_space_message(message)
        self.assertGreaterEqual(needed, 118528 * 12)
        self.assertLessEqual(free, 512 << 10)
        self.assertEqual(os.listdir(self.path("small")), [])

    def test_limit_on_file_size(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        self.check_space_message(self.fail_train(5, ON_NVME, preexec_fn=limit))

    def test_budgets_too_small(self):
        for precision in ("bf16", "fp32"):
            with self.subTest(precision):
                values = {**ON_NVME, "precision.parameters": precision}
                device = self.smallest_budget("memory.device", values)
                host = self.smallest_budget("memory.host", {**values, "memory.device": device})
                run = self.train({**values, "memory.device": device, "memory.host": host})
                self.assertLessEqual(run["device_pool_bytes"], int(device[:-3]) << 10)
                self.assertLessEqual(run["host_pool_bytes"], int(host[:-3]) << 10)
                for key, budget in (("memory.device", device), ("memory.host", host)):
                    less = {"memory.device": device, "memory.host": host,
                            key: f"{int(budget[:-3]) - 4}KiB"}
                    self.assertIn(f'smallest that works is "{budget}"',
                                  self.fail_train(5, {**values, **less}))

    def test_all_on_the_device_does_not_fit(self):
        budget = self.smallest_budget("memory.device", {"placement.parameters": "device"})
        self.train({"placement.parameters": "device", "memory.device": budget})

    def test_ordinary_user(self):
        prefix = as_ordinary_user(self)
        if not is_root():
            self.skipTest("this is an ordinary user already")
        os.chmod(self.path("storage"), 0o777)
        self.run_sluice("train", self.write_config(ON_NVME, SMALL_CONFIG), prefix=prefix)
