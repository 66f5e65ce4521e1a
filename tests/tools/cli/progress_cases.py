"""Work that takes more than two seconds says so, on a terminal alone. The work is held in the middle of a call on a file
(tests/support/held_calls.cc) until each command has said so: no test asserts a time."""

import json
import os
import pty
import select
import subprocess

from cli_support import RUN_TIMEOUT_S, CliCase

HELD = os.environ.get("SLUICE_HELD_CALLS", "")


class Held:
    """A command in which each `call` on a file whose path has the text `part` waits. Standard error is a terminal."""

    def __init__(self, case, call, part, *arguments):
        self.main, terminal = pty.openpty()
        case.addCleanup(os.close, self.main)
        self.process = start_held(case, call, part, arguments, terminal)
        os.close(terminal)
        self.seen = b""

    def read(self, until=None):
        """Reads what the terminal shows, up to the text `until`, or to the end."""
        while (until is None or until not in self.seen) and select.select([self.main], [], [], RUN_TIMEOUT_S)[0]:
            try:
                piece = os.read(self.main, 4096)
            except OSError:  # EIO: the other side is closed
                return
            self.seen += piece

    def end(self):
        """The exit code, and what was written on standard output."""
        self.read()
        output, _ = self.process.communicate(timeout=RUN_TIMEOUT_S)
        return self.process.returncode, output


def start_held(case, call, part, arguments, stderr):
    environment = {**case.environment(), "TERM": "xterm", "LD_PRELOAD": HELD, "SLUICE_HELD_CALL": call, "SLUICE_HELD_PATH": part,
                   "SLUICE_HELD_UNTIL": case.path("go-on")}
    process = subprocess.Popen(case.command(*arguments), cwd=case.folder, env=environment, stdout=subprocess.PIPE, stderr=stderr)
    case.addCleanup(process.communicate)
    case.addCleanup(process.kill)
    return process


class LongWork(CliCase):
    LABEL = "command"

    def setUp(self):
        super().setUp()
        if not HELD:
            self.skipTest("no library holds a call here: sanitizers want to be loaded first")

    def test_a_terminal_shows_what_takes_long(self):
        self.run_sluice("train", self.write_config({"run.steps": 4}), "--quiet", "--trace", "old.trace", "--save", "old.safetensors")
        commands = {  # the command, the call that waits, and the text that is shown meanwhile
            ("trace", "summary", "old.trace", "--json", "-"): ("open", "old.trace", "reading the trace"),
            ("trace", "html", "old.trace", "--output", "page.html"): ("open", "old.trace", "reading the trace"),
            ("trace", "export", "old.trace", "--csv", "records.csv"): ("open", "old.trace", "reading the trace"),
            ("trace", "diff", "old.trace", "old.trace", "--json", "-"): ("open", "old.trace", "reading the traces"),
            ("trace", "whatif", "old.trace", "--set", "nvme=2x"): ("open", "old.trace", "reading the trace"),
            ("generate", "--model", "old.safetensors", "--prompt", "in the ", "--tokens", 3): ("open", "old.safetensors", "loading the model"),
            ("doctor", "--path", "storage", "--json", "-"): ("open", "storage", "examining the machine"),
            ("train", "config.json", "--trace", "new.trace"): ("fsync", "new.trace", "summing up the trace"),
            ("train", "config.json", "--save", "new.safetensors"): ("fsync", "new.safetensors", "saving the model"),
            ("train", "config.json", "--checkpoint", "checkpoints"): ("fsync", "checkpoints/", "saving the state"),
        }
        runs = {words: Held(self, call, part, *words) for words, (call, part, _) in commands.items()}
        quiet = Held(self, "fsync", "quiet.safetensors", "train", "config.json", "--save", "quiet.safetensors", "--quiet")
        into_pipe = start_held(self, "open", "old.trace", ("trace", "summary", "old.trace"), subprocess.PIPE)
        for words, (_, _, text) in commands.items():
            line = f"\r{text} ... ".encode()
            with self.subTest(words):
                runs[words].read(line)
                self.assertIn(line, runs[words].seen)
        with open(self.path("go-on"), "wb"):
            pass
        for words, run in runs.items():
            with self.subTest(words):
                code, output = run.end()
                # whatif predicts nothing where the steps differ much, as they may here.
                self.assertIn(code, (0, 2) if "whatif" in words else (0,), run.seen)
                self.assertIn(b"\r\x1b[K", run.seen.rpartition(b" ... ")[2], "the line goes when the work ends")
                self.assertNotIn(b"\x1b", output)
                self.assertNotIn(b" ... ", output)
                if words[-1] == "-":
                    json.loads(output)
        with self.subTest("--quiet"):
            self.assertEqual((quiet.end(), quiet.seen), ((0, b""), b""))
        with self.subTest("no terminal"):
            output, errors = into_pipe.communicate(timeout=RUN_TIMEOUT_S)
            self.assertEqual((into_pipe.returncode, errors), (0, b""))
            self.assertIn(b"bytes per parameter", output)
