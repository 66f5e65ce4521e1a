"""Every option that takes a number refuses what is none: a row for each, read from --help."""

import re

from cli_support import CliCase

# The other arguments that each command needs. A new command with a numeric option needs a row here.
COMMANDS = {
    ("train",): ("config.json",),
    ("generate",): ("--model", "gone", "--prompt", "x"),
    ("plan",): ("config.json",),
    ("bench", "io"): ("--path", "storage"),
    ("bench", "adam"): (),
    ("bench", "gpu"): (),
    ("bench", "step"): (),
    ("trace", "summary"): ("gone",),
    ("trace", "diff"): ("gone", "gone"),
    ("config", "import"): ("config.json",),
    ("config", "check"): ("config.json",),
    ("config", "show"): ("config.json",),
    ("config", "rates"): ("config.json",),
    ("config", "diff"): ("config.json", "config.json"),
}
TOO_LARGE = "99999999999999999999999"
BAD = {
    "UINT": ("-1", "-4", "+1", "1.5", "nan", "0x10", "010", "many", "", TOO_LARGE),
    "FLOAT": ("-1", "nan", "inf", "-inf", "1e999", "many", "", "1,5"),
    "SIZE": ("0", "0MiB", "-1MiB", "nan", "1QiB", "many", TOO_LARGE + "TiB"),
}


class NumericOptions(CliCase):
    LABEL = "command"

    def help_of(self, *command):
        return self.run_sluice(*command, "--help").stdout

    def commands_below(self, *command):
        """All commands without subcommands of their own."""
        text = self.help_of(*command)
        listed = text.partition("Subcommands:")[2]
        names = re.findall(r"^  ([a-z]+)\s", listed, re.MULTILINE)
        return [below for name in names for below in self.commands_below(*command, name)] or [command]

    def test_bad_numbers_are_refused(self):
        self.write_config()
        rows = 0
        for command in self.commands_below():
            options = re.findall(r"^  (?:-\w,)?(--[a-z-]+) (UINT|INT|FLOAT|SIZE)\b", self.help_of(*command), re.MULTILINE)
            if options:
                self.assertIn(command, COMMANDS, "a command with a number needs a row in COMMANDS")
            for option, kind in options:
                rows += 1
                for value in BAD[kind]:
                    with self.subTest(f"{command} {option}={value}"):
                        done = self.run_sluice(*command, *COMMANDS[command], f"{option}={value}", expect=2)
                        self.assertIn(option, done.stderr)
                        self.assertLess(len(done.stderr), 500)
        self.assertGreaterEqual(rows, 25)

    def test_an_unknown_command_is_named(self):
        for words, place in ((("trian", "config.json"), "train, generate"), (("help",), "train, generate"), (("bench", "oi"), "gpu, io, adam, step"),
                             (("trace", "sumary", "x"), "summary, html")):
            done = self.run_sluice(*words, expect=2)
            unknown = words[1] if words[0] in ("bench", "trace") else words[0]
            self.assertIn(f'unknown command "{unknown}"; there are ', done.stderr)
            self.assertIn(place, done.stderr)
        self.assertNotIn("unknown command", self.run_sluice("train", expect=2).stderr)
        self.assertNotIn("unknown command", self.run_sluice(expect=2).stderr)

    def test_the_messages_name_ranges_that_fit_on_a_line(self):
        done = self.run_sluice("generate", "--model", "gone", "--prompt", "x", "--temperature", "-1", expect=2)
        self.assertIn("from 0 to 1e+06", done.stderr)
