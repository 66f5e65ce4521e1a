#!/usr/bin/env python3
"""The project's scripts where they need no build: the parts of tools/test.sh, folders that hold something else, and relative paths."""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command, cwd=ROOT, **others):
    return subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, **others)


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


class Parts(Folder):
    """tools/test.sh with other scripts in the place of those that its parts "twice" and "roots" call."""

    def setUp(self):
        super().setUp()
        (self.folder / "tools").mkdir()
        shutil.copy(ROOT / "tools/test.sh", self.folder / "tools")
        self.script("install_packages.sh", "exit 0")
        self.script("install_trial.sh", "echo roots began")

    def script(self, name, text):
        path = self.folder / "tools" / name
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    def parts(self, *names):
        return run("tools/test.sh", *(word for name in names for word in ("--part", name)), cwd=self.folder)

    def test_each_runs_whatever_fails_before(self):
        self.script("reproducible.sh", "false\nexit 3")
        done = self.parts("twice", "roots")
        self.assertEqual(done.returncode, 1)
        self.assertIn("roots began", done.stdout)
        self.assertIn("parts that failed: twice", done.stdout)
        done = self.parts("roots")
        self.assertEqual((done.returncode, "these parts passed: roots" in done.stdout), (0, True), done)

    def test_a_command_that_fails_ends_its_part(self):
        self.script("reproducible.sh", "exit 0")
        (self.folder / "tools/install_trial.sh").unlink()
        self.assertEqual(self.parts("twice").returncode, 0)
        self.assertEqual(self.parts("roots").returncode, 1)

    def test_ctrl_c_ends_all(self):
        """Also where the program that it hits ends with a status of its own, as pytest does."""
        self.script("reproducible.sh", "trap 'exit 2' INT\ntouch begun\nfor i in 1 2 3 4 5 6 7 8 9; do sleep 1; done")
        command = ["tools/test.sh", "--part", "twice", "--part", "roots"]
        # The signal may be ignored where the tests were started.
        with subprocess.Popen(command, cwd=self.folder, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as running:
            while not (self.folder / "begun").exists() and running.poll() is None:
                time.sleep(0.02)
            os.killpg(running.pid, signal.SIGINT)
            said = running.communicate()[0]
        self.assertEqual(running.returncode, 130, said)
        self.assertNotIn("roots began", said)

    def test_wrong_options(self):
        for words in (["--part"], ["--part", "alone twice"], ["--part", "mutants-0"], ["--slow", "--part", "roots"], ["--jobs", "0"],
                      ["--cases", "x"]):
            with self.subTest(words=words):
                done = run("tools/test.sh", *words, cwd=self.folder)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done)


class Folders(Folder):
    """A script that makes a folder anew leaves one alone that it has not made."""

    def test_kept(self):
        """Also one that looks like it: another checkout, another environment of Python."""
        (self.folder / "tools").mkdir()
        for name in ("thesis.txt", "file", "run.sh", "pyvenv.cfg", "tools/mutate.py"):
            (self.folder / name).write_text("years", encoding="utf-8")
        build = self.folder / "build"
        for target in (self.folder, self.folder / "file"):
            for command in (["tools/gpu_pack.sh", "--built", build, "--torchao", "none", target], ["tools/torch_environment.py", target],
                            ["tools/mutate.py", "--count", "0", "--work", target], ["tools/bundle_deps.sh", target]):
                with self.subTest(command=command):
                    done = run(*command)
                    self.assertIn(done.returncode, (1, 2), done)
                    self.assertIn(f"{target} ", done.stderr)
                    self.assertEqual((self.folder / "thesis.txt").read_text(encoding="utf-8"), "years")


class Fetching(Folder):
    """tools/torch_environment.py with a pip that is too slow."""

    def test_it_is_tried_twice(self):
        path = ROOT / "tools" / "torch_environment.py"
        script = importlib.util.module_from_spec(importlib.util.spec_from_file_location("torch_environment", path))
        script.__spec__.loader.exec_module(script)
        target, calls = self.folder / "torch", []

        def slow(command, **options):
            calls.append(command[2] if command[0] == sys.executable else command[3])
            (target / "half").touch() if calls[-1] == "install" else self.assertFalse((target / "half").exists())
            if calls[-1] == "install":
                raise subprocess.TimeoutExpired(command, options["timeout"])
        said = io.StringIO()
        with unittest.mock.patch.object(script.subprocess, "run", slow), contextlib.redirect_stdout(said), \
                unittest.mock.patch.object(sys, "argv", ["torch_environment.py", str(target)]):
            self.assertEqual(script.main(), script.MISSING)
        self.assertEqual(calls, ["venv", "install"] * 2)
        self.assertIn("Run this again", said.getvalue())


class Numbers(Folder):
    """tools/quickstart.sh with a command that trains nothing, where the user's language has a decimal comma."""

    COMMAND = """#!/bin/sh
[ "$1" = train ] || exit 0
while [ $# -gt 0 ]; do
  [ "$1" != --csv ] || printf 'step,loss,x,time\\n1,2,0,0.5\\n2,2,0,0.25\\n3,2,0,0.125\\n' >"$2"
  [ "$1" != --json ] || printf '  "%s": %s,\\n' validation_loss 1.873 bigram_cross_entropy 2.451 state_sha256 1 device_pool_bytes 1 \\
    host_pool_bytes 1 activation_bytes 1 peak_rss_bytes 5242880 state_bytes 1 >"$2"
  shift
done
"""

    def test_a_decimal_comma(self):
        source = "LC_NUMERIC\ndecimal_point \",\"\nthousands_sep \"\"\ngrouping -1\nEND LC_NUMERIC\n"
        for name, text in {"comma.source": source, "tools/install_packages.sh": "#!/bin/sh\n", "gnuplot": "#!/bin/sh\n", "sluice": self.COMMAND,
                           "data/kjv.txt": " " * 4000001}.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")
            (self.folder / name).chmod(0o755)
        shutil.copy(ROOT / "tools/quickstart.sh", self.folder / "tools")
        run("localedef", "-c", "-i", "./comma.source", "./comma", cwd=self.folder)
        comma = {**os.environ, "LOCPATH": str(self.folder), "LC_ALL": "comma", "PATH": f"{self.folder}:{os.environ['PATH']}"}
        self.assertEqual(run("bash", "-c", "printf %.1f 0,5", env=comma).stdout, "0,5")
        done = run("tools/quickstart.sh", "--command", "./sluice", cwd=self.folder, env=comma)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done)
        for words in (": 1.87 nats", " 2.45\n", "took 0.250 s", "memory  5 MiB"):
            self.assertIn(words, done.stdout)


class Packages(unittest.TestCase):
    """tools/packages.txt, from which tools/test.sh prepares a machine."""

    # Debian's packages of programs with other names than theirs; None: every Debian has them, or only a driver brings them.
    PACKAGES = {"node": "nodejs", "groff": "groff-base", "ip": "iproute2", "mpirun": "openmpi-bin", "bash": None, "prlimit": None, "setpriv": None,
                "unshare": None, "nvidia-smi": None}

    def test_programs_without_which_tests_are_skipped_are_listed(self):
        lines = [line.split() for line in (ROOT / "tools/packages.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        listed = {package for packages, of in lines if of in ("run", "test") for package in packages.split("|")}
        programs = set()
        for path in [*ROOT.glob("tests/tools/cli/*.py"), *ROOT.glob("tests/campaigns/*.py")]:
            programs |= set(re.findall(r'(?:shutil\.which|self\.check_shell)\("([^"]+)"', path.read_text(encoding="utf-8")))
        self.assertGreater(len(programs), 10)
        wanted = {self.PACKAGES.get(program, program) for program in programs} - {None}
        self.assertEqual(wanted - listed, set())


class Paths(Folder):
    """Relative paths are those of the caller."""

    def test_options_of_the_quickstart(self):
        for words in (["--command", "./none", "--prepare", "--what"], ["--prepare", "--command"]):
            done = run(ROOT / "tools/quickstart.sh", *words, cwd=self.folder)
            self.assertEqual(done.returncode, 2, done)

    def test_build_of_the_wheel(self):
        """pip runs wheel_backend.py in python/."""
        text = "import wheel_backend as w\nprint(all(path.is_file() for path in w._built(None).values()))"
        places = run(sys.executable, "-B", "-c", "import wheel_backend as w\nprint(*w.PLACES.values())", cwd=ROOT / "python")
        for place in places.stdout.split():
            (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / place).write_text("", encoding="utf-8")
        environment = {**os.environ, "SLUICE_BUILD": os.path.relpath(self.folder, ROOT)}
        environment.pop("SLUICE_LIBRARY", None)
        done = run(sys.executable, "-B", "-c", text, cwd=ROOT / "python", env=environment)
        self.assertEqual(done.stdout, "True\n", done)


if __name__ == "__main__":
    unittest.main()
