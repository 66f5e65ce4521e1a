"""--help and --version, and that docs/cli.md tells of every key and exit code. Its options: documented_options_cases.py."""

import os
import re

from cli_support import SOURCE, CliCase


class Help(CliCase):
    LABEL = "command"

    def help_of(self, *subcommand):
        done = self.run_sluice(*subcommand, "--help")
        self.assertEqual(done.stderr, "")
        return done.stdout

    def documentation(self):
        with open(os.path.join(SOURCE, "docs", "cli.md"), encoding="utf-8") as file:
            return file.read()

    def test_version(self):
        done = self.run_sluice("--version")
        self.assertEqual(done.stdout.strip(), "sluice " + os.environ["SLUICE_VERSION"])

    def test_help(self):
        self.assertRegex(self.help_of(), r"(?s)Usage: sluice.*\btrain\b.*\bgenerate\b")
        for option in ("--data", "--steps", "--seed", "--set", "--init", "--save", "--json",
                       "--csv", "--quiet"):
            self.assertIn(option, self.help_of("train"))
        for option in ("--model", "--prompt", "--tokens", "--temperature", "--top-k", "--seed"):
            self.assertIn(option, self.help_of("generate"))

    def test_help_is_in_words_and_fits_the_terminal(self):
        for words in ((), ("train",), ("plan",), ("bench", "io"), ("bench", "step"), ("trace", "whatif"), ("config", "import"), ("top",)):
            text = self.help_of(*words)
            self.assertLessEqual(max(map(len, text.splitlines())), 80, words)
            self.assertNotRegex(text, r"UINT|FLOAT|INT in|Excludes:|Needs:|1e\+|\[\d", words)
        plan = self.help_of("plan")
        joined = " ".join(plan.split())
        self.assertIn("--ranks N Ranks that share the state (1 to 16777216; default 1)", joined)
        self.assertIn("--layers N Units of that model, all alike (1 to 100000; default 1; with --parameters)", joined)
        self.assertIn("--duplex full|half ", joined)
        self.assertIn("--drive NAME[:COUNT] ", joined)
        self.assertIn("--betas NUMBER NUMBER ", joined)
        wide = self.on_terminal(120, "plan", "--help")
        self.assertGreater(max(map(len, wide.splitlines())), 80)

    def test_documentation_has_every_json_key(self):
        run = self.train(None, "--csv", "run.csv")
        written = set(re.findall(r"`([a-z0-9_]+)`", self.documentation()))
        keys = set(run) | set(run["steps"][0])
        self.assertEqual(keys - written, set())
        with open(self.path("run.csv"), encoding="ascii") as file:
            self.assertEqual(set(file.readline().strip().split(",")) - written, set())

    def test_documentation_has_every_exit_code(self):
        with open(os.path.join(SOURCE, "tools", "cli", "exit_codes.h"), encoding="utf-8") as file:
            codes = set(re.findall(r"constexpr int kExit\w+ = (\d+);", file.read()))
        self.assertGreaterEqual(len(codes), 5)
        written = set(re.findall(r"^\| (\d+) \|", self.documentation(), re.MULTILINE))
        self.assertEqual(codes - written, set())
