"""The common part of the tests of the sluice command: a folder for each test, runs of the real binary, and checks that
hold after every run (no sanitizer report, nothing left in the storage folder).

Environment: SLUICE_BINARY, SLUICE_SOURCE (the repository), SLUICE_SANITIZE, SLUICE_VERSION, SLUICE_TEST_DEVICE.
"""

import copy
import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import unittest

BINARY = os.environ.get("SLUICE_BINARY", "sluice")
SOURCE = os.environ.get("SLUICE_SOURCE", os.path.join(os.path.dirname(__file__), "../../.."))
SANITIZE = os.environ.get("SLUICE_SANITIZE", "")
# Where runs compute: the host, also on a machine with a GPU, unless a test asks for "cuda".
DEVICE = os.environ.get("SLUICE_TEST_DEVICE", "host")
RUN_TIMEOUT_S = 240

# Small enough for many runs, large enough for many blocks: 118,528 parameters, 4,096 in a block.
SMALL_CONFIG = {
    "model": {"layers": 2, "heads": 2, "embedding": 64, "context": 32},
    "data": {"file": "text.txt"},
    "batch": {"sequences": 2, "micro_batches": 1},
    "optimizer": {"learning_rate": 3e-3, "minimum_learning_rate": 3e-4, "warmup_steps": 4},
    "storage": {"paths": ["storage"], "block_elements": 4096},
    "run": {"steps": 3, "seed": 7, "threads": 2, "device": DEVICE},
}

ON_NVME = {"placement.parameters": "nvme", "placement.optimizer": "nvme"}

# The form in which `bench gpu --json` writes its figures.
GPU_RATES = {
    "gpu": "a GPU", "processor": "a processor",
    "copies": [{"direction": direction, "gb_per_s": {"median": rate, "least": rate, "most": rate}}
               for direction, rate in (("up", 10.0), ("down", 5.0), ("both", 12.0))],
    "adam": {"parameters": 2**28, "parameters_per_s": 50e9}, "cpu_adam_parameters_per_s": 1.5e9,
    "drive": {"read_bytes_per_second": 3e9, "write_bytes_per_second": 2e9, "duplex": "half"},
    "training": [{"shape": "124M", "place": "no offload", "compute_flops_per_s": 60e12},
                 {"shape": "1.5B", "place": "no offload", "compute_flops_per_s": 90e12},
                 {"shape": "7B", "place": "no offload", "left_out": "too little memory"}]}

WORDS = ("in the beginning was a block and it lay on storage until it was read again for the next "
         "step then its gradient came and what was written was what had been meant").split()


def sample_text(word_count):
    """Deterministic text: words in an order given by a linear congruential generator."""
    state = 12345
    words = []
    for _ in range(word_count):
        state = (state * 1103515245 + 12345) % 2**31
        words.append(WORDS[state >> 16 & 31] if state >> 16 & 31 < len(WORDS) else "\n")
    return " ".join(words)


def some(values, row, count):
    """`count` of `values`, in turn others for each row of a table. Where tests run more cases (`tools/test.sh --part cases`): all."""
    values = list(values)
    if float(os.environ.get("SLUICE_TEST_CASES_SCALE", "1")) > 1 or len(values) <= count:
        return values
    return [values[(row * count + i) % len(values)] for i in range(count)]


def with_values(config, values):
    """A copy of `config` with {"section.key": value}, {"key": value} and the like put in."""
    config = copy.deepcopy(config)
    for key, value in values.items():
        *sections, name = key.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return config


def documented_words():
    """Everything in backticks on docs/cli.md that may be a key."""
    with open(os.path.join(SOURCE, "docs", "cli.md"), encoding="utf-8") as file:
        return set(re.findall(r"`([a-z0-9_]+)`", file.read()))


class CliCase(unittest.TestCase):
    """A test in a folder of its own, with text.txt, an empty folder storage/, and that as the
    current directory of every run."""

    # cpu and io run under sanitizers, too. "command" does not: what a command prints, refuses and writes. A process
    # for each option costs much there and shows little, since sources of the command that every run passes are
    # covered by cli.doc_samples, what it reads by bad_input, state, model_file and others, and the engine by its
    # own tests.
    LABEL = "io"
    TIMEOUT_S = RUN_TIMEOUT_S  # of a run

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="sluice-cli-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        os.chmod(self.folder, 0o755)
        os.mkdir(self.path("storage"))
        with open(self.path("text.txt"), "w", encoding="ascii") as file:
            file.write(sample_text(4000))
        self.binary = BINARY

    def tearDown(self):
        self.assertEqual(os.listdir(self.path("storage")), [], "files left in the storage folder")

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def write_config(self, values=None, base=None, name="config.json"):
        with open(self.path(name), "w", encoding="utf-8") as file:
            json.dump(with_values(base or SMALL_CONFIG, values or {}), file)
        return name

    def write_tokenizer(self, name="tokenizer.json", merges=(("t", "h"), ("th", "e")), **parts):
        """A byte-level tokenizer: the bytes in the order of their values, then a token for each merge."""
        printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printed]
        letters = [chr(0x100 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]
        tokens = [*letters, *("".join(pair) for pair in merges)]
        with open(self.path(name), "w", encoding="utf-8") as file:
            json.dump({"model": {"type": "BPE", "vocab": {token: place for place, token in enumerate(tokens)},
                                 "merges": [" ".join(pair) for pair in merges]},
                       "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}, **parts}, file)
        return name

    def command(self, *arguments):
        return [self.binary, *map(str, arguments)]

    def environment(self):
        # Calibrations of a busy machine are no user's.
        cache = os.path.join(tempfile.gettempdir(), f"sluice-test-cache-{os.getuid()}")
        return dict(os.environ, ASAN_OPTIONS="exitcode=99:" + os.environ.get("ASAN_OPTIONS", ""), XDG_CACHE_HOME=cache)

    def check_no_report(self, stderr):
        for sign in ("Sanitizer", "runtime error", "check failed"):
            self.assertNotIn(sign, stderr)

    def run_sluice(self, *arguments, expect=0, prefix=(), **options):
        """Runs the command, expects an exit code (or one of several), returns the finished process."""
        done = subprocess.run([*prefix, *self.command(*arguments)], cwd=self.folder,
                              env=self.environment(), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=self.TIMEOUT_S, check=False, **options)
        done.stdout_bytes = done.stdout
        done.stdout = done.stdout.decode("utf-8", "replace")
        done.stderr = done.stderr.decode("utf-8", "replace")
        self.check_no_report(done.stderr)
        self.assertIn(done.returncode, expect if isinstance(expect, tuple) else (expect,),
                      f"{arguments}\n{done.stdout}\n{done.stderr}")
        return done

    def commands_below(self, *command):
        """All commands without subcommands of their own, as --help lists them."""
        listed = self.run_sluice(*command, "--help").stdout.partition("Subcommands:")[2]
        names = re.findall(r"^  ([a-z]+)\s", listed, re.MULTILINE)
        return [below for name in names for below in self.commands_below(*command, name)] or [command]

    def on_terminal(self, columns, *arguments, expect=0, stdout=None, stderr=None, **environment):
        """The text that a terminal of that width shows of a command, which may write one of its streams elsewhere."""
        main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = subprocess.Popen(self.command(*arguments), cwd=self.folder, stdout=stdout or terminal,
                                   stderr=stderr or terminal, env={**self.environment(), "TERM": "xterm", **environment})
        os.close(terminal)
        seen = b""
        while True:
            try:
                piece = os.read(main, 4096)
            except OSError:  # EIO: the other side is closed
                break
            if not piece:
                break
            seen += piece
        os.close(main)
        self.assertEqual(process.wait(RUN_TIMEOUT_S), expect, seen)
        return seen.decode()

    def train(self, values=None, *arguments, base=None):
        """Trains with the small config and `values`, returns what --json wrote."""
        self.run_sluice("train", self.write_config(values, base), "--quiet", "--json", "run.json",
                        *arguments)
        return self.read_json("run.json")

    def expect_signals_end_resumably(self, arguments, saved):
        """SIGINT, SIGTERM and SIGHUP end `sluice train *arguments(NAME)`, where NAME is another one for each signal. The last line on
        stderr has the text saved(NAME, STEPS) and the command that goes on, and that command finds the same state."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number):
                name = f"run-{number.value}"
                process = subprocess.Popen(self.command("train", *arguments(name), "--json", "run.json"), cwd=self.folder,
                                           env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                self.addCleanup(process.stdout.close)
                self.addCleanup(process.stderr.close)
                self.addCleanup(process.kill)
                while b"step     2/" not in process.stdout.readline():
                    self.assertIsNone(process.poll())
                process.send_signal(number)
                _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
                self.assertEqual(process.returncode, 130, stderr)
                before = self.read_json("run.json")
                steps = len(before["steps"])
                line = stderr.decode().splitlines()[-1]
                self.assertIn(saved(name, steps), line)
                words = shlex.split(line.split("go on with: ")[1])
                self.assertEqual(words[-1], "--resume")
                self.run_sluice(*words[1:], "--steps", steps)
                after = self.read_json("run.json")
                self.assertEqual((after["resumed_steps"], after["steps"]), (steps, []))
                self.assertEqual(after["state_sha256"], before["state_sha256"])

    def read_json(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return json.load(file)

    def fail_train(self, code, values=None, *arguments, base=None, **options):
        """Expects that training refuses to start with `code`. Returns its one message."""
        done = self.run_sluice("train", self.write_config(values, base), "--quiet", *arguments,
                               expect=code, **options)
        self.assertTrue(done.stderr.startswith("sluice: "), done.stderr)
        self.assertEqual(done.stdout, "")
        return done.stderr

    def expect_misfit(self, stderr):
        """The words of a prediction that is refused because the model misses the recorded step, as it may on a machine
        under load."""
        found = re.search(r"no prediction from .* an error of ([+-][\d.]+) %, where at most 25 %", stderr)
        self.assertTrue(found, stderr)
        self.assertGreater(abs(float(found[1])), 24.9)

    def smallest_budget(self, key, values, base=None):
        """The smallest memory.device or memory.host, as the refusal of 1 KiB names it."""
        message = self.fail_train(5, {**values, key: "1KiB"}, base=base)
        self.assertIn(key, message)
        return re.search(r'the smallest that works is "(\d+KiB)"', message).group(1)


def is_root():
    return os.geteuid() == 0


def as_root(case, *command):
    """Runs a command that only root may, and returns its output. Skips where that is impossible."""
    if not is_root() or shutil.which(command[0]) is None:
        case.skipTest(f"a file system of its own needs root and {command[0]}")
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        case.skipTest(f"{' '.join(command)}: {done.stderr.decode().strip()}")
    return done.stdout.decode().strip()


def mount(case, path, *arguments):
    """A file system at `path` until the test ends, or unmount() before."""
    as_root(case, "mount", *arguments, path)
    case.addCleanup(unmount, path)


def unmount(path):
    if os.path.ismount(path):
        subprocess.run(["umount", path], check=True)


def mount_tmpfs(case, path, size):
    mount(case, path, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def mount_made(case, path, size_bytes, make, sector_bytes=512):
    """A file system that the command `make` makes on a loop device with sectors of `sector_bytes`. The device goes with the mount."""
    image = path + ".img"
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    device = as_root(case, "losetup", "--show", "--find", "--sector-size", str(sector_bytes), image)
    try:
        as_root(case, *make, device)
        mount(case, path, device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)  # once it is no longer in use
        os.unlink(image)


def mount_ext4(case, path, size_bytes, sector_bytes):
    mount_made(case, path, size_bytes, ("mkfs.ext4", "-q", "-m", "0"), sector_bytes)


def as_ordinary_user(case):
    """A command prefix under which file modes count, for root; the binary goes where that user
    can reach it."""
    if not is_root():
        return ()
    if shutil.which("setpriv") is None:
        case.skipTest("root may write anywhere, and setpriv is missing")
    case.binary = shutil.copy(BINARY, case.path("sluice-copy"))
    os.chmod(case.binary, 0o755)
    prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    probe = subprocess.run([*prefix, case.binary, "--version"], cwd=case.folder,
                           capture_output=True, check=False)
    if probe.returncode != 0:
        case.skipTest("cannot run the command as another user: " + probe.stderr.decode().strip())
    return prefix
