"""docs/cli.md against --help, command by command: the section of a command names exactly its options, and the defaults and bounds
that the section states are those of --help. The page is written by hand; --help comes from the parser's table."""

import os
import re

from cli_support import SOURCE, CliCase

OPTION = r"--[a-z][a-z0-9-]*"
# A number, a size or a path; in the page also a word in backticks.
VALUE = r"\d+(?:\.\d+)?(?:e\d+)?(?:[KMGT]i?B?)?\b|/[\w/]+"
VALUES = rf"(?:{VALUE})(?:(?:, | and | in )(?:{VALUE}))*"


def sections(page):
    """{heading: text} of the sections of commands. The part before the first one is that of ""."""
    parts = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {"": parts[0], **{heading.removeprefix("sluice "): text for heading, text in found.items() if heading.startswith("sluice ")}}


def synopses(section):
    """(names of the command's words, the rest) of each synopsis: an indented line that begins with `sluice`, and those indented below it."""
    for line in re.findall(r"^    (?:mpirun -n \w+ )?sluice (.*(?:\n     +.*)*)", section, re.MULTILINE):
        words = line.split()
        count = next((i for i, word in enumerate(words) if not re.fullmatch(r"[a-z|]+", word)), len(words))
        yield [word.split("|") for word in words[:count]], " ".join(words[count:])


def rows(section):
    """(first cell, second cell) of each row of the tables of options."""
    for table in re.findall(r"^\| option \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", section, re.MULTILINE):
        for line in table.splitlines():
            yield re.fullmatch(r"\| (.*?) \| (.*) \|", line).groups()


def stated_defaults(text):
    """The values that `text` states as defaults, in their order: of --help, or of the page."""
    found = []
    for match in re.finditer(r"\b[Dd]efault:? \(?([^;:|)]*)", text):
        value = re.match(rf"`(?!-)([^`]+)`|({VALUES})|([a-z0-9]+$)", match[1])
        if value:
            found += [value[1] or value[3]] if value[1] or value[3] else re.split(r", | and | in ", value[2])
    return found


def number(text):
    return float(text.replace(",", ""))


class DocumentedOptions(CliCase):
    LABEL = "command"
    options = {}  # of each command, for all tests of the class

    def setUp(self):
        super().setUp()
        with open(os.path.join(SOURCE, "docs", "cli.md"), encoding="utf-8") as file:
            self.page = file.read()
        self.sections = sections(self.page)
        if not self.options:
            self.options.update({command: self.options_of(command) for command in [(), *self.commands_below()]})
        self.commands = list(self.options)
        self.values = self.named_by(re.search(r"^The values are .*?[a-z]`\.", self.sections["config"], re.MULTILINE | re.DOTALL)[0])

    def options_of(self, command):
        """{option: what --help says of it, in one line}, without --help itself."""
        found, option = {}, None
        for line in self.run_sluice(*command, "--help").stdout.splitlines():
            match = re.match(rf"  (?:-\w,)?({OPTION})", line)
            if match:
                option = match[1]
                found[option] = line.strip()
            elif line.startswith("    ") and option:
                found[option] += " " + line.strip()
            else:
                option = None
        del found["--help"]
        return found

    @staticmethod
    def named_by(text):
        return set(re.findall(OPTION, text))

    def heading_of(self, command):
        """The section of "trace summary" is that of "trace"; general commands are in the part before all sections."""
        return next((name for length in (2, 1) if (name := " ".join(command[:length])) in self.sections), "")

    def documented(self, command, section):
        """The options of the command that the synopses and the tables of a section have."""
        found = set()
        for words, rest in synopses(section):
            if len(words) == len(command) and all(word in names for word, names in zip(command, words, strict=True)):
                found |= self.named_by(rest) | (self.values if "[values]" in rest else set())
        for cell, _ in rows(section):
            found |= self.named_by(cell)
        return found - {"--help"}

    def test_each_section_has_the_options_of_its_command(self):
        for command in self.commands:
            if heading := self.heading_of(command):
                with self.subTest(command):
                    self.assertEqual(self.documented(command, self.sections[heading]), set(self.options[command]))
        self.assertGreater(len(self.commands), 25)

    def test_another_page_repeats_the_synopses_of_trace(self):
        with open(os.path.join(SOURCE, "docs", "tracing.md"), encoding="utf-8") as file:
            section = sections(file.read())["trace"]
        for command in self.commands:
            if self.heading_of(command) == "trace":
                with self.subTest(command):
                    self.assertEqual(self.documented(command, section), set(self.options[command]))

    def test_general_options_are_before_the_sections(self):
        general = {option for command in self.commands if not self.heading_of(command) for option in self.options[command]}
        self.assertEqual(general - self.named_by(self.sections[""]), set())
        everything = {option for options in self.options.values() for option in options} | {"--help"}
        self.assertEqual(self.named_by(self.page) - everything, set(), "options that docs/cli.md has and sluice has not")

    def test_the_text_of_a_section_names_no_other_options(self):
        """`--option` alone is one of the section's own commands; those of others stand behind their command, as in `train --json`."""
        for heading, section in self.sections.items():
            own = {option for command in self.commands if self.heading_of(command) == heading for option in self.options[command]} | {"--help"}
            with self.subTest(heading):
                named = {option for option in re.findall(rf"`({OPTION})(?![a-z-])[^`]*`", section)}
                self.assertEqual(named - own if heading else set(), set())

    def stated(self, heading):
        """(options, text) of each row of a table of options, and of each option in the text that stands right before "default"."""
        for cell, text in rows(self.sections[heading]):
            yield re.findall(OPTION, cell), text
        prose = re.sub(r"^\|.*\n", "", self.sections[heading], flags=re.MULTILINE)
        for option, text in re.findall(rf"`({OPTION})[^`]*`[^`.]{{0,40}}?(\(?default [^;:)]*)", prose):
            yield [option], text

    def test_defaults_are_those_of_the_help(self):
        count = 0
        for heading in self.sections:
            commands = [command for command in self.commands if self.heading_of(command) == heading]
            for options, text in self.stated(heading):
                stated = stated_defaults(text)
                if not stated:
                    continue
                count += 1
                of_help = [[value for option in options for value in stated_defaults(self.options[command].get(option, ""))] for command in commands]
                with self.subTest(f"{heading}: {options}"):
                    self.assertIn(stated, of_help)
        self.assertGreater(count, 45)

    def test_bounds_are_those_of_the_help(self):
        count = 0
        for heading in self.sections:
            for options, text in self.stated(heading):
                bounds = re.findall(r"\b(at least|at most|up to) (\d[\d,]*(?:e\d+)?)(?![\d.]| ?[KMGT]i?B| bytes)", text)
                if len(options) != 1 or not bounds:
                    continue
                told = self.options[tuple(heading.split())][options[0]]
                least, most = re.search(r"\((?:[^()]*; )?(\S+) (?:to (\S+?)|or more)[;)]", told).groups()
                for word, bound in bounds:
                    count += 1
                    self.assertEqual(number(bound), number(least if word == "at least" else most), f"{heading}: {options}: {word}")
        self.assertGreaterEqual(count, 5)
