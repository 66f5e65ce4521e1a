"""Every option that takes a number refuses what is none: a row for each, read from --help."""

import re

from cli_support import CliCase, some

# The other arguments that each command needs. A new command with a numeric option needs a row here.
COMMANDS = {
    ("train",): ("config.json",),
    ("generate",): ("--model", "gone", "--prompt", "x"),
    ("plan",): ("config.json",),
    ("tune",): ("config.json",),
    ("bench", "io"): ("--path", "storage"),
    ("bench", "adam"): (),
    ("bench", "gpu"): (),
    ("bench", "step"): (),
    ("bench", "matrix"): (),
    ("top",): ("--web",),
    ("state", "import"): ("config.json", "gone"),
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
    "N": ("-1", "-4", "+1", "1.5", "nan", "0x10", "010", "many", "", TOO_LARGE),
    "NUMBER": ("-1", "nan", "inf", "-inf", "1e999", "many", "", "1,5"),
    "SIZE": ("0", "0MiB", "-1MiB", "nan", "1QiB", "many", TOO_LARGE + "TiB"),
}


class NumericOptions(CliCase):
    LABEL = "command"

    def help_of(self, *command):
        return self.run_sluice(*command, "--help").stdout

    def test_bad_numbers_are_refused(self):
        self.write_config()
        rows = 0
        for command in self.commands_below():
            options = re.findall(r"^  (?:-\w,)?(--[a-z-]+) (NUMBER|N|SIZE)\b", self.help_of(*command), re.MULTILINE)
            if options:
                self.assertIn(command, COMMANDS, "a command with a number needs a row in COMMANDS")
            for option, kind in options:
                rows += 1
                for value in some(BAD[kind], rows, 3):
                    with self.subTest(f"{command} {option}={value}"):
                        done = self.run_sluice(*command, *COMMANDS[command], f"{option}={value}", expect=2)
                        self.assertIn(option, done.stderr)
                        self.assertLess(len(done.stderr), 500)
        self.assertGreaterEqual(rows, 25)

    def test_numbers_as_people_write_them(self):
        def plan(*arguments):
            self.run_sluice("plan", "--layers", 2, "--json", "plan.json", *arguments, expect=(0, 5))
            return self.read_json("plan.json")
        for written, plain in ((("--parameters", "1.5M"), ("--parameters", "1500000")), (("--parameters", "2m"), ("--parameters", "2000000")),
                               (("--parameters", "1M", "--tokens", "8K"), ("--parameters", "1000000", "--tokens", "8000")),
                               (("--parameters", "1M", "--flops", "165.2T"), ("--parameters", "1000000", "--flops", "165200000000000")),
                               (("--parameters", "1M", "--adam-rate", "2G"), ("--parameters", "1000000", "--adam-rate", "2B")),
                               (("--parameters", "1M", "--read-rate", "7000MB/s"), ("--parameters", "1000000", "--read-rate", "7GB")),
                               (("--parameters", "1M", "--read-rate", "7g", "--write-rate", "7000m/s"),
                                ("--parameters", "1M", "--read-rate", "7GB", "--write-rate", "7GB")),
                               (("--parameters", "1M", "--host-memory", "24m"), ("--parameters", "1000000", "--host-memory", "24MiB")),
                               (("--parameters", "1M", "--set", "memory.host=1G"), ("--parameters", "1000000", "--set", "memory.host=1GiB"))):
            with self.subTest(written):
                self.assertEqual(plan(*written), plan(*plain))
        self.assertNotEqual(plan("--parameters", "1M"), plan("--parameters", "1K"))
        for arguments, words in ((("bench", "adam", "--parameters", "1.5"), '"1.5" is not a whole number'),
                                 (("bench", "adam", "--parameters", "1.2345K"), '"1.2345K" is not a whole number'),
                                 (("bench", "adam", "--rounds", "KK"), '"KK" is not a whole number'),
                                 (("bench", "adam", "--rounds", "M"), '"M" is not a whole number'),
                                 (("plan", "--parameters", "8Q"), '"8Q" is not a finite number'),
                                 (("bench", "io", "--path", "storage", "--size", "1G/s"), '"1G/s" is not a size')):
            with self.subTest(arguments):
                self.assertIn(words, self.run_sluice(*arguments, expect=2).stderr)

    def test_help_names_the_limits_that_hold(self):
        told = " ".join(self.run_sluice("bench", "io", "--help").stdout.split())
        for option, most in (("--depth", 1024), ("--rounds", 1000)):
            with self.subTest(option):
                self.assertRegex(told, rf"{option} N [^-]*1 to {most}\b")
                self.assertIn("1 to", self.run_sluice("bench", "io", "--path", "storage", option, most + 1, expect=2).stderr)

    def test_the_messages_name_ranges_that_fit_on_a_line(self):
        done = self.run_sluice("generate", "--model", "gone", "--prompt", "x", "--temperature", "-1", expect=2)
        self.assertIn("from 0 to 1e+06", done.stderr)
