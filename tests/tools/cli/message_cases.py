"""Errors that name what failed, and a remedy that is one."""

import os
import re
import resource
import shutil
import subprocess

from cli_support import ON_NVME, SANITIZE, CliCase, as_ordinary_user


class Messages(CliCase):
    LABEL = "command"

    def test_too_few_open_files(self):
        self.train(ON_NVME)
        seen = set()
        for limit in range(4, 24):
            with self.subTest(limit):
                done = self.run_sluice("train", self.write_config(ON_NVME), "--quiet", expect=(0, 1, 2, 5),
                                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
                self.assertNotIn("internal error", done.stderr)
                if "scratch file" in done.stderr:
                    self.assertIn("raise the limit of open files (ulimit -n)", done.stderr)
                    self.assertEqual(done.returncode, 5)
                    seen.add(limit)
        self.assertTrue(seen, "no limit fell on the scratch file")

    def test_limit_of_file_size(self):
        message = self.fail_train(5, ON_NVME, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)))
        self.assertIn("raise the limit of file size (ulimit -f)", message)
        self.assertNotIn("free space there", message)

    def test_a_run_that_gets_no_memory_ends(self):
        if SANITIZE:
            self.skipTest("a sanitizer needs more address space than this test leaves")
        config = self.write_config({"memory.host": "64MiB"})
        for limit_mb in (80, 100, 150, 250):
            with self.subTest(limit_mb):
                done = self.run_sluice("train", config, "--quiet", expect=(0, 1, 5),
                                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_mb << 20, limit_mb << 20)))
                self.assertTrue(done.returncode == 0 or done.stderr.startswith("sluice: "), done.stderr)

    def test_activations_are_not_the_budgets(self):
        message = self.fail_train(5, {"batch.sequences": 65536, "model.context": 8192})
        self.assertIn("activations", message)
        self.assertNotIn("lower the budgets", message)

    def test_a_group_of_one_rank_is_named(self):
        for key, stages in (("placement.gradients", "stage 2 or 3"),):
            done = self.run_sluice("plan", self.write_config({"sharding.stage": 3, "sharding.group": 1, key: "nvme"}), "--ranks", 4,
                                   expect=(0, 2, 5))
            text = done.stdout + done.stderr
            self.assertIn("in groups of one rank (sharding.group), which is stage 0", text)
            self.assertIn("choose a larger sharding.group with " + stages, text)

    def test_a_folder_that_may_not_be_entered(self):
        prefix = as_ordinary_user(self)
        os.mkdir(self.path("private"), 0o700)
        for option in ("--json", "--csv", "--save"):
            with self.subTest(option):
                message = self.fail_train(2, {"storage.paths": ["/var/tmp"]}, option, "private/x", prefix=prefix)
                self.assertIn("private", message)
                self.assertIn("Permission denied", message)
                self.assertNotIn("internal", message)
        os.mkdir(self.path("closed"), 0o555)
        self.assertIn('--tensorboard "closed/x": create its folder "closed/x": Permission denied; check the folder and its mode',
                      self.fail_train(2, None, "--tensorboard", "closed/x", prefix=prefix))
        if prefix:
            refused = self.run_sluice("config", "check", "private/config.json", expect=2, prefix=prefix).stderr
            self.assertEqual(refused, 'sluice: cannot read the config file "private/config.json": Permission denied\n')

    def test_storage_where_no_files_can_be(self):
        message = self.fail_train(2, {**ON_NVME, "storage.paths": ["/proc"]})
        self.assertNotIn("does not exist", message)
        self.assertIn('"/proc" is on a file system that accepts no files', message)

    def test_a_text_that_cannot_be_read_is_read_again_once(self):
        if shutil.which("strace") is None or SANITIZE:
            self.skipTest("needs strace, and a build without a sanitizer, which strace keeps from working")
        probe = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False)
        if probe.returncode != 0:
            self.skipTest("strace is not allowed to trace here")

        def inject(when):
            return ("strace", "-f", "-qq", "-o", "/dev/null", "-P", self.path("text.txt"), "-e", "trace=pread64",
                    "-e", f"inject=pread64:error=EIO:when={when}")
        whole = self.train()
        self.train()
        config = self.write_config()
        self.run_sluice("train", config, "--quiet", "--json", "again.json", prefix=inject("3"))
        self.assertEqual(self.read_json("again.json")["state_sha256"], whole["state_sha256"])
        done = self.run_sluice("train", config, "--quiet", prefix=inject("3+"), expect=1)
        self.assertTrue(re.search(r'read of data file "text.txt" \[\d+, \+\d+\) failed 2 times: Input/output error; check the drive', done.stderr),
                        done.stderr)
