"""The manual page and the completion for shells, against what --help says of every command."""

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
        return re.findall(r"^  ([a-z]+)\s", listed, re.MULTILINE), re.findall(r"^  (?:-\w,)?(--[a-z0-9-]+)", text, re.MULTILINE)

    def commands(self, *command):
        below, options = self.help_of(command)
        yield command, below, options
        for name in below:
            yield from self.commands(*command, name)

    def run_shell(self, shell, script, *words):
        done = subprocess.run([shell, *script, *words], capture_output=True, text=True, timeout=30, check=True)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def bash(self, *words):
        """Bash's offers for the last word."""
        script = self.run_sluice("completion", "bash").stdout
        script += 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sluice; printf "%s\\n" "${COMPREPLY[@]}"'
        return self.run_shell("bash", ["-c", script, "bash", "sluice"], *words).split()

    def zsh(self, *words):
        """The offers for the last word, with descriptions, that the script for zsh gives its _describe; here, that sorts out others."""
        stand_ins = 'compdef() {}; _files() {}; _describe() { local offer; for offer in "${(@P)2}"; do [[ $offer == $words[CURRENT]* ]] && print -r -- "$offer"; done }\n'
        script = stand_ins + self.run_sluice("completion", "zsh").stdout + '\nwords=("$@"); CURRENT=$#; _sluice'
        return dict(line.split(":", 1) for line in self.run_shell("zsh", ["-f", "-c", script, "zsh", "sluice"], *words).splitlines())

    def fish(self, *words):
        """Fish's own offers for the last word, with descriptions; without names of files."""
        script = self.run_sluice("completion", "fish").stdout + "\ncomplete -c sluice -f\ncomplete -C $argv[1]"
        done = self.run_shell("fish", ["--no-config", "-c", script], " ".join(("sluice", *words)))
        return dict(line.split("\t", 1) for line in done.splitlines())

    def check_shell(self, shell, offers, options_need_dashes=False):
        """`offers` are --help's words, at each of the commands."""
        if shutil.which(shell) is None:
            self.skipTest(f"there is no {shell}")
        count = 0
        for command, below, options in self.commands():
            count += 1
            with self.subTest(command):
                found = set(offers(*command, "")) | (set(offers(*command, "--")) if options_need_dashes else set())
                self.assertEqual(sorted(found), sorted(below + options))
        self.assertGreater(count, 25)
        self.assertEqual(sorted(offers("tr")), ["trace", "train"])
        self.assertEqual(sorted(offers("bench", "io", "--pa")), ["--path", "--pattern"])
        self.assertEqual(list(offers("train", "--data", "x", "--no-such")), [])

    def test_bash_knows_every_command_and_option(self):
        self.check_shell("bash", self.bash)

    def test_zsh_knows_every_command_and_option(self):
        self.check_shell("zsh", self.zsh)

    def test_fish_knows_every_command_and_option(self):
        self.check_shell("fish", self.fish, options_need_dashes=True)

    def test_another_shell_is_refused_by_name(self):
        done = self.run_sluice("completion", "tcsh", expect=2)
        self.assertIn("tcsh", done.stderr)

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
