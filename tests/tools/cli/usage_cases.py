"""Mistyped command lines, `help`, `version`, and errors in the command's own words."""

import os
import re
import subprocess

from cli_support import SOURCE, CliCase


class Usage(CliCase):
    LABEL = "command"

    def mistake(self, *words):
        done = self.run_sluice(*words, expect=2)
        self.assertTrue(done.stderr.startswith("sluice: "), done.stderr)
        return done.stderr

    def test_an_unknown_command_is_named_with_the_nearest(self):
        for words, meant, others in ((("trian", "config.json"), "train", "generate"), (("bench", "oi"), "io", "adam"),
                                     (("trace", "sumary", "x"), "summary", "html"), (("docter",), "doctor", "train")):
            message = self.mistake(*words)
            unknown = words[1] if words[0] in ("bench", "trace") else words[0]
            self.assertIn(f'unknown command "{unknown}"; did you mean "{meant}"?; there are ', message)
            self.assertIn(others, message)
        self.assertNotIn("did you mean", self.mistake("frobnicate"))
        self.assertIn("a command is missing: train, ", self.mistake())
        self.assertIn("a command is missing: gpu, ", self.mistake("bench"))
        self.assertIn("CONFIG is required", self.mistake("train"))

    def test_an_unknown_option_is_named_with_the_nearest(self):
        for words, unknown, meant in ((("plan", "--parmeters", "8B"), "--parmeters", "--parameters"), (("train", "--stps=4"), "--stps", "--steps"),
                                      (("train", "c.json", "--check"), "--check", "--checkpoint"), (("--verson",), "--verson", "--version"),
                                      (("bench", "io", "--pth", "x"), "--pth", "--path"), (("config", "show", "--jsn", "c"), "--jsn", "--json")):
            with self.subTest(words):
                self.assertIn(f'unknown option "{unknown}"; did you mean "{meant}"?', self.mistake(*words))
        self.assertIn('unknown option "--frobnicate"\n`sluice plan --help` has more', self.mistake("plan", "--frobnicate"))

    def test_an_option_that_is_given_twice(self):
        self.assertIn("sluice: --data is given 2 times, with a and b; give it once\n",
                      self.mistake("train", "config.json", "--data", "a", "--data", "b"))

    def test_surplus_words_come_in_their_order(self):
        self.assertIn("--set KEY=VALUE\n`sluice plan --help`", self.mistake("plan", "one", "two", "three", "four"))

    def test_help(self):
        for words in ((), ("train",), ("bench",), ("bench", "io"), ("config", "import"), ("help",)):
            self.assertEqual(self.run_sluice("help", *words).stdout, self.run_sluice(*words, "--help").stdout)
        self.assertIn('unknown command "oi"; did you mean "io"?', self.mistake("help", "bench", "oi"))
        self.assertIn("train has no commands of its own", self.mistake("help", "train", "x"))

    def test_version(self):
        version = os.environ["SLUICE_VERSION"]
        done = self.run_sluice("version", "--json")
        self.assertEqual(done.stdout, self.run_sluice("--version", "--json").stdout)
        with open(self.path("version.json"), "w", encoding="utf-8") as file:
            file.write(done.stdout)
        told = self.read_json("version.json")
        self.assertEqual(told["version"], version)
        self.assertEqual(set(told), {"version", "git_commit", "git_modified", "compiler", "build_type", "simd", "cuda", "nccl", "mpi", "nvtx"})
        self.assertRegex(told["compiler"], r"^(GNU|Clang) \d+\.")
        self.assertIn(told["simd"], self.run_sluice("version").stdout)
        self.assertTrue(self.run_sluice("version").stdout.startswith(f"sluice {version}\ncommit    {told['git_commit'] or 'not known'}"))
        head = subprocess.run(["git", "-C", SOURCE, "cat-file", "-t", told["git_commit"] or "none"], capture_output=True, check=False)
        if os.path.exists(os.path.join(SOURCE, ".git")) and told["git_commit"]:
            self.assertEqual(head.stdout.strip(), b"commit")
        self.assertIn("--json requires --version", self.mistake("--json"))

    def test_values_are_not_empty(self):
        """A variable of a script that is not set would take the next option for its value, or leave an output out."""
        config = self.write_config()
        before = sorted(os.listdir(self.path("")))
        for words in (("--checkpoint=", "--resume"), ("--trace=", "--quiet"), ("--json=", "--steps", "2")):
            self.assertIn(f'{words[0]} has no value; write it behind the "="', self.mistake("train", config, *words))
        for option in ("--save", "--checkpoint", "--json", "--data"):
            message = self.mistake("train", config, option, "")
            self.assertIn(option, message)
            self.assertIn("it is empty; give a value, or leave the option out", message)
        self.assertEqual(sorted(os.listdir(self.path(""))), before)

    def test_names_of_numbers(self):
        for option, names in (("--state", "fp32,bf16,8bit"), ("--input", "plain,unaligned,denormal")):
            self.assertIn(f'{option}: "bogus" is none of {names}\n', self.mistake("bench", "adam", option, "bogus"))
        self.run_sluice("bench", "adam", "--parameters", "10K", "--rounds", "1", "--threads", "1", "--state", "BF16")

    def test_errors_name_the_option_that_was_given(self):
        config = self.write_config()
        for words, option, key in ((("bench", "io", "--path", "gone"), "--path", "storage.paths"), (("bench", "step", "--path", "gone"), "--path", "storage.paths"),
                                   (("train", config, "--steps", "2000000000"), "--steps", "run.steps"), (("train", config, "--data", "gone"), "gone", "data.file")):
            with self.subTest(words):
                message = self.mistake(*words)
                self.assertIn(option, message)
                self.assertNotIn(key, message)
        self.assertIn('"run.steps" is 2000000000', self.mistake("train", config, "--set", "run.steps=2000000000"))
        self.assertEqual("sluice: --steps 2000000000: --steps is 2000000000, but must be at most 1000000000\n",
                         self.mistake("train", config, "--steps", "2000000000"))
        for name in ("my.data.file.txt", "run/data.file", "data.file.txt", "data.file-2"):
            self.assertIn(f'"{name}"', self.mistake("train", config, "--data", name))
        self.assertIn("name another with --data FILE", self.mistake("train", config, "--data", "gone"))
        told = self.run_sluice("doctor", "--path", "gone", expect=5).stdout
        self.assertIn('"gone" does not exist; create it, or name another one in --path', told)


class OnATerminal(CliCase):
    """Widths, colours and their absence."""

    LABEL = "command"

    def lines(self, seen):
        """The lines that the terminal has shown."""
        for line in seen.split("\r\n"):
            for shown in line.split("\r"):
                yield re.sub(r"\x1b\[\d*[mK]", "", shown)

    def test_tables_fit(self):
        self.write_config({"batch.micro_batches": 2, "placement.parameters": "nvme"})
        os.mkdir(self.path("stores"))
        self.write_config({"storage.paths": ["stores"], "storage.state.name": "a-store-of-a-name-that-is-as-long-as-names-of-runs-are"}, name="stored.json")
        commands = [("plan", "config.json", "--stages", "--ranks", 2), ("plan", "--parameters", "8B", "--layers", 4, "--stages", "--set", "memory.host=1G"),
                    ("train", "config.json", "--trace", "run.trace"), ("trace", "summary", "run.trace"), ("doctor", "--path", "storage"),
                    ("bench", "adam", "--parameters", "200K", "--rounds", 1), ("bench", "io", "--path", "storage", "--size", "4M", "--rounds", 1),
                    ("bench", "step", "--path", "storage", "--parameters", "300K", "--units", 5, "--steps", 1, "--regime", "balanced"),
                    ("bench", "matrix", "--path", "storage", "--parameters", 100000, "--units", 4, "--steps", 1, "--compute-ms", 1),
                    ("tune", "config.json", "--seconds", 3, "--steps", 1, "--finalists", 2), ("train", "stored.json"),
                    *(("state", what, "stored.json") for what in ("list", "inspect", "verify", "remove"))]
        if "computes there" in self.run_sluice("doctor", expect=(0, 5)).stdout:  # a GPU
            commands.append(("bench", "gpu", "--path", "storage", "--shape", "124M", "--place", "device", "--steps", 1))
        for command in commands:
            with self.subTest(f"{command}"):
                seen = self.on_terminal(80, *command, expect=5 if "8B" in command else 0)
                long = [line for line in self.lines(seen) if len(line) > 80 and " " in line.strip()]
                self.assertEqual(long, [])

    def test_a_narrow_terminal_is_none_the_worse(self):
        for columns in (1, 20):
            seen = self.on_terminal(columns, "doctor", "--path", "storage")
            self.assertIn("io_uring:", seen)

    def test_colours(self):
        marked = "\x1b[32mok  \x1b[0m"
        self.assertIn(marked, self.on_terminal(80, "doctor", "--path", "storage"))
        self.assertIn("\x1b[31msluice:\x1b[0m unknown", self.on_terminal(80, "trian", expect=2))
        for variable, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
            self.assertNotIn("\x1b", self.on_terminal(80, "doctor", "--path", "storage", **{variable: value}))
        self.assertIn(marked, self.on_terminal(80, "doctor", "--path", "storage", NO_COLOR=""))
        self.assertNotIn("\x1b", self.run_sluice("doctor", "--path", "storage").stdout)

    def test_colours_where_the_text_goes(self):
        """Beside data on standard output, text goes to standard error."""
        for command, mark in ((("doctor", "--path", "storage"), "\x1b[32mok  \x1b[0m"),
                              (("plan", "--parameters", "1M", "--layers", 4, "--gpu", "h100"), "\x1b[32mfits")):
            self.assertIn(mark, self.on_terminal(80, *command, "--json", "-", stdout=subprocess.DEVNULL))
            with open(self.path("text"), "wb") as file:
                self.on_terminal(80, *command, "--json", "-", stderr=file)
            with open(self.path("text"), "rb") as file:
                text = file.read()
            self.assertIn(mark[5:9].encode(), text)
            self.assertNotIn(b"\x1b", text)
