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
    """tools/test.sh with other scripts in the place of those that its parts "twice" and "roots-I" call."""

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
        done = self.parts("twice", "roots-1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("roots began", done.stdout)
        self.assertIn("parts that failed: twice", done.stdout)
        done = self.parts("roots-1")
        self.assertEqual((done.returncode, done.stdout.endswith("these parts passed: roots-1\n")), (0, True), done)

    def test_a_command_that_fails_ends_its_part(self):
        self.script("reproducible.sh", "exit 0")
        (self.folder / "tools/install_trial.sh").unlink()
        self.assertEqual(self.parts("twice").returncode, 0)
        self.assertEqual(self.parts("roots-1").returncode, 1)

    def test_what_cannot_be_tried_is_named_in_the_end_and_has_not_passed(self):
        self.script("reproducible.sh", "exit 0")
        for said, named in (("echo SKIPPED: deb: no network; echo SKIPPED: tasks: no network", ["roots-1: deb: no network", "roots-1: tasks: no network"]),
                            ("", ["roots-1: build/roots-1.log says why"])):
            self.script("install_trial.sh", f"{said}\nexit 77")
            done = self.parts("roots-1", "twice")
            self.assertEqual(done.returncode, 77, done)
            end = done.stdout[done.stdout.index("these parts passed"):].splitlines()
            self.assertEqual(end[0], "these parts passed: twice")
            self.assertRegex(end[2], "NOT TRIED")
            self.assertEqual([line.strip() for line in end[3:]], named)
        # Beside a failure, too, which decides.
        self.script("install_trial.sh", "echo SKIPPED: noble: no network\nexit 1")
        done = self.parts("roots-4")
        self.assertEqual(done.returncode, 1, done)
        self.assertRegex(done.stdout, r"NOT TRIED.*\n +roots-4: noble: no network\n(?s:.*)parts that failed: roots-4")

    def names(self):
        return run("tools/test.sh", "--part", "none", cwd=self.folder).stderr.split(": ")[-1].split()

    def test_each_is_in_the_list_of_help(self):
        """`NAME-I` stands for pieces 1 to the number that its line names."""
        listed = []
        for name, about in re.findall(r"^  ([a-z]+(?:-I)?) +(.+)$", run("tools/test.sh", "--help", cwd=self.folder).stdout, re.MULTILINE):
            pieces = re.match(r"piece I of 1 to (\d+) of", about)
            self.assertEqual(bool(pieces), name.endswith("-I"), name)
            listed += [f"{name[:-1]}{piece}" for piece in range(1, int(pieces[1]) + 1)] if pieces else [name]
        self.assertEqual(listed, self.names())

    def test_each_way_to_install_is_in_one_piece(self):
        ways = re.search(r"^ways=\((.+)\)$", (ROOT / "tools/install_trial.sh").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
        self.script("install_trial.sh", 'echo "tried: $*"')
        done = self.parts(*(name for name in self.names() if name.startswith("roots-")))
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual(sorted(re.findall("--only ([a-z0-9]+)", done.stdout)), sorted(ways))

    def test_ctrl_c_ends_all(self):
        """Also where the program that it hits ends with a status of its own, as pytest does."""
        self.script("reproducible.sh", "trap 'exit 2' INT\ntouch begun\nfor i in 1 2 3 4 5 6 7 8 9; do sleep 1; done")
        command = ["tools/test.sh", "--part", "twice", "--part", "roots-1"]
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
        for words in (["--part"], ["--part", "alone twice"], ["--part", "mutants-0"], ["--part", "roots"], ["--part", "roots-0"],
                      ["--slow", "--part", "roots-1"], ["--jobs", "0"], ["--cases", "x"]):
            with self.subTest(words=words):
                done = run("tools/test.sh", *words, cwd=self.folder)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done)


class Trial(Folder):
    """tools/install_trial.sh where some or all ways cannot be tried."""

    def setUp(self):
        super().setUp()
        for name in ("tools", "bin"):
            (self.folder / name).mkdir()
        shutil.copy(ROOT / "tools/install_trial.sh", self.folder / "tools")

    def program(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    def trial(self, *ways, path=os.environ["PATH"]):
        words = [word for way in ways for word in ("--only", way)]
        return run("tools/install_trial.sh", *words, "--output", self.folder / "page.md", cwd=self.folder,
                   env={**os.environ, "PATH": f"{self.folder / 'bin'}:{path}"})

    def test_no_way_can_be_tried(self):
        (self.folder / "bare").mkdir()
        for name in ("bash", "dirname", "realpath"):
            (self.folder / "bare" / name).symlink_to(shutil.which(name))
        for program, why in ((None, "debootstrap is not installed"), ("debootstrap", "wget is not installed"), ("wget", "xz is not installed"),
                             ("xz", "cannot be reached" if os.geteuid() == 0 else "needs root")):
            if program is not None:
                self.program(program, "exit 4")
            done = self.trial("deb", "noble", path=str(self.folder / "bare"))
            self.assertEqual(done.returncode, 77, done)
            for line, way in zip(done.stdout.splitlines()[-2:], ("deb", "noble")):
                self.assertTrue(line.startswith(f"SKIPPED: {way}: ") and why in line, done)

    @unittest.skipIf(os.geteuid() != 0, "needs root")
    @unittest.skipIf(os.path.exists("/usr/share/keyrings/ubuntu-archive-keyring.gpg"), "here, Ubuntu's keys are no reason")
    def test_one_way_cannot_be_tried(self):
        """The page keeps what it had of it; a way that fails beside it decides."""
        self.program("debootstrap", "echo no such suite; exit 1")
        self.program("xz", "cat")
        self.program("wget", 'case "$*" in *deb.debian.org*) exit 0 ;; esac; exit 4')
        self.program("git", 'case $1 in archive) tar -cT /dev/null ;; *) echo 1234567 ;; esac')
        before = "## From source on Ubuntu 24.04\n\n| command | seconds | result | last line |\n|---|---|---|---|\n| `before` | 1 | passed | ` ` |\n"
        (self.folder / "page.md").write_text(before, encoding="utf-8")
        done = self.trial("noble")
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1].startswith("SKIPPED: noble: https://")), (77, True), done)
        page = (self.folder / "page.md").read_text(encoding="utf-8")
        self.assertIn(before, page)
        self.assertNotIn("at commit", page)
        done = self.trial("noble", "clang")
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1].startswith("SKIPPED: noble: https://")), (1, True), done)
        self.assertRegex((self.folder / "page.md").read_text(encoding="utf-8"), r"bookworm` \| \d+ \| \*\*failed")


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
    PACKAGES = {"node": "nodejs", "groff": "groff-base", "ip": "iproute2", "mpirun": "openmpi-bin", "xz": "xz-utils", "pip": "python3-pip",
                "venv": "python3-venv", "bash": None, "prlimit": None, "setpriv": None, "unshare": None, "nvidia-smi": None,
                "compute-sanitizer": None, "trace_processor_shell": None}  # the last is in no package of Debian
    OF_SLOW_TESTS = {"bible": "bible-kjv"}  # programs that these alone look for

    def listed(self, *sets):
        lines = [line.split() for line in (ROOT / "tools/packages.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        return {package for packages, of in lines if of in sets for package in packages.split("|")}

    def test_programs_without_which_tests_are_skipped_are_listed(self):
        programs = set()
        for path in [*ROOT.glob("tests/tools/cli/*.py"), *ROOT.glob("tests/campaigns/*.py")]:
            programs |= set(re.findall(r'(?:shutil\.which|self\.check_shell)\("([^"]+)"', path.read_text(encoding="utf-8")))
        self.assertGreater(len(programs), 10)
        wanted = {self.PACKAGES.get(program, program) for program in programs - set(self.OF_SLOW_TESTS)} - {None}
        self.assertEqual(wanted - self.listed("run", "test"), set())

    def test_programs_without_which_slow_parts_are_skipped_are_listed(self):
        trial = (ROOT / "tools/install_trial.sh").read_text(encoding="utf-8")
        programs = set(re.search(r"^for program in (.+); do\n  command -v", trial, re.MULTILINE)[1].split())
        self.assertIn("debootstrap", programs)
        for path in ROOT.glob("tests/tools/cli/*.py"):  # Python's own modules that Debian has packages of
            programs |= set(re.findall(r'sys\.executable, "-m", "(pip|venv)"', path.read_text(encoding="utf-8")))
        self.assertIn("pip", programs)
        wanted = {self.PACKAGES.get(program, program) for program in programs} | set(self.OF_SLOW_TESTS.values())
        self.assertEqual(wanted - self.listed("run", "test", "slow"), set())


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
