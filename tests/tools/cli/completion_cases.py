"""The manual page and the completion for bash, against what --help says of every command."""

import re
import shutil
import subprocess

from cli_support import CliCase


class Completion(CliCase):
    LABEL = "command"

    def help_of(self, command):
        """The subcommands and the long options of a command."""
        text = self.run_sluice(*command, "--help").stdout
        listed = text.partition("Subcommands:")[2]
        return re.findall(r"^  ([a-z]+)\s", listed, re.MULTILINE), re.findall(r"^  (?:-\w,)?(--[a-z-]+)", text, re.MULTILINE)

    def commands(self, *command):
        below, options = self.help_of(command)
        yield command, below, options
        for name in below:
            yield from self.commands(*command, name)

    def complete(self, *words):
        """Bash's offers for the last word."""
        script = self.run_sluice("completion").stdout
        script += 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sluice; printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", script, "bash", "sluice", *words], capture_output=True, text=True, timeout=30, check=True)
        self.assertEqual(done.stderr, "")
        return done.stdout.split()

    def test_bash_knows_every_command_and_option(self):
        if shutil.which("bash") is None:
            self.skipTest("there is no bash")
        count = 0
        for command, below, options in self.commands():
            count += 1
            with self.subTest(command):
                self.assertEqual(sorted(self.complete(*command, "")), sorted(below + options))
        self.assertGreater(count, 25)
        self.assertEqual(self.complete("tr"), ["train", "trace"])
        self.assertEqual(self.complete("bench", "io", "--pa"), ["--path", "--pattern"])
        self.assertEqual(self.complete("train", "--data", "x", "--no-such"), [])

    def test_the_manual_has_every_command_and_option(self):
        page = self.run_sluice("man").stdout
        sections = re.split(r"^\.SS ", page.replace("\\-", "-"), flags=re.MULTILINE)
        told = {section.partition("\n")[0]: section for section in sections[1:]}
        for command, _, options in self.commands():
            section = told[" ".join(("sluice", *command))] if command else sections[0]
            for option in options:
                self.assertTrue(re.search(rf'(?m)^\.BI "(-\w,)?{option} "', section), f"{command} {option}")
        for line in page.splitlines():
            self.assertRegex(line, r"^(?!\.)|^\.(TH|SH|SS|TP|B|BI|I)\b", "a line that roff takes for a macro")

    def test_roff_reads_the_manual(self):
        if shutil.which("groff") is None:
            self.skipTest("there is no groff")
        page = self.run_sluice("man").stdout
        done = subprocess.run(["groff", "-man", "-ww", "-Tascii", "-rLL=200n"], input=page, capture_output=True, text=True, timeout=60, check=True)
        self.assertEqual(done.stderr, "")
        self.assertIn("Overrides run.steps.", done.stdout)
