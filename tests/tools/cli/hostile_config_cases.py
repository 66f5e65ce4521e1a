"""Configs that are no configs: each a clear error at once."""

import os

from cli_support import CliCase


class HostileConfig(CliCase):
    LABEL = "cpu"

    def fail_config(self, content, name="bad.json"):
        with open(self.path(name), "wb") as file:
            file.write(content)
        return self.run_sluice("plan", name, expect=2).stderr

    def test_nul_byte(self):
        self.assertIn("bad.json:2:3: there is a NUL byte", self.fail_config(b'{\n  \0"run": {"steps": 2}}'))
        self.assertIn("NUL", self.fail_config(b'{}\0rest'))

    def test_nul_character_in_a_path(self):
        config = self.write_config()
        for setting in ('storage.paths=["/tmp\\u0000/x"]', 'data.file="text.txt\\u0000x"', 'trace.file="a\\u0000"'):
            with self.subTest(setting):
                done = self.run_sluice("train", config, "--quiet", "--set", setting, expect=2)
                self.assertIn("NUL", done.stderr)
                self.assertIn(setting.partition("=")[0], done.stderr)

    def test_entries_of_lists_have_the_numbers_of_entries(self):
        config = self.write_config()
        for entry in ("x", "4000000000", "1", "-1", "", "00", "99999999999999999999999"):
            with self.subTest(entry):
                done = self.run_sluice("plan", config, "--set", f"optimizer.groups.{entry}.weight_decay=0.1", expect=2)
                self.assertIn(f'"optimizer.groups" has 0 entries, with numbers from 0 on, so that there is no entry "{entry}"; '
                              "the next one is optimizer.groups.0.weight_decay", done.stderr)
        done = self.run_sluice("plan", config, "--set", 'optimizer.groups=[{"tensors": ["*"]}]', "--set", "optimizer.groups.0.weight_decay=0.1",
                               "--set", "storage.paths.0=storage")
        done = self.run_sluice("plan", config, "--set", "storage.paths.2=x", expect=2)
        self.assertIn('"storage.paths" has 1 entry', done.stderr)

    def test_deep_nesting_is_refused_at_once(self):
        for opening in (b'{"a":', b"[", b'{"run":'):
            for levels in (17, 10_000, 100_000):
                with self.subTest(f"{opening} {levels}"):
                    self.assertRegex(self.fail_config(opening * levels), r"bad\.json:1:\d+: .*nested more than 16 levels")

    def test_a_config_without_end(self):
        self.assertIn("more than 1.00 MiB", self.run_sluice("plan", "/dev/zero", expect=2).stderr)
        self.assertIn("more than 1.00 MiB", self.fail_config(b" " * (3 << 20)))

    def test_a_folder(self):
        os.mkdir(self.path("folder"))
        self.assertIn("it is a folder", self.run_sluice("plan", "folder", expect=2).stderr)

    def test_a_config_may_come_through_a_pipe(self):
        with open(self.path("text.json"), "w", encoding="ascii") as file:
            file.write("{}")
        with open(self.path("text.json"), "rb") as file:
            self.run_sluice("plan", "/dev/stdin", stdin=file)
