#!/usr/bin/env python3
"""Storage that lies, loses and fails: every case ends in a named error or in the bits of the undisturbed run.

    storage_faults.py --sluice build/release/tools/sluice --shim build/release/tests/campaigns/libstorage_shim.so --kind writes --count 500
    storage_faults.py --sluice ... --shim ... --kind faults --count 500

`writes` are another process's writes into the live scratch file: a bit, a byte, a sector, a page of zeros, a copy of
another block, old bytes of the same one. `faults` are transfers that fail, or say that they have not: EIO, ENOSPC,
EAGAIN, short, lost, torn, misdirected ones. The shim (storage_shim.cc) does both to the backends "sync" and "threads",
at a transfer that is chosen by the phase in which an undisturbed run makes it. Writes into the file of an io_uring come
from this script, at an instant; the phase is that of the bytes the process has read by then (/proc/PID/io). Faults of
an io_uring: the kernel refuses io_uring_enter at one call in mid-run, or from that one on (strace); the phase is that
of the call's share of all. Faults of single transfers of an io_uring would need a failing device-mapper target, which
is not used here.
"""

import errno
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import campaign

CONFIG = {
    "model": {"layers": 2, "heads": 2, "embedding": 64, "context": 32, "vocabulary": 256},
    "data": {"file": "text.txt"},
    "batch": {"sequences": 2, "micro_batches": 1},
    "optimizer": {"learning_rate": 3e-3, "minimum_learning_rate": 3e-4, "warmup_steps": 4, "overlap": "serial"},
    "placement": {"parameters": "nvme", "optimizer": "nvme"},
    "memory": {"device": "1MiB", "host": "2MiB"},
    "storage": {"paths": ["storage"], "block_elements": 4096, "timeout": 60},
    "run": {"steps": 4, "seed": 7, "threads": 2, "device": "host"},
}
POLICIES = ("serial", "serial", "deferred", "speculative")
CHANGES = ("bit", "byte", "sector", "zero_page", "copy", "stale")
FAULTS = {"r": ("eio", "eagain", "eagain_for_long", "short", "zero", "flip"),
          "w": ("eio", "enospc", "eagain", "eagain_for_long", "short", "lost", "torn", "misdirected")}
ENTER_ERRORS = ("ENOMEM", "EIO")
TIMEOUT_S = 240


class Run:
    """One run of `sluice train` in a folder: how it ended, and the hashes of state and model."""

    def __init__(self, options, folder, backend, policy, environment=None, prefix=(), save=True):
        os.makedirs(os.path.join(folder, "storage"), exist_ok=True)
        config = json.loads(json.dumps(CONFIG))
        config["storage"]["backend"] = backend
        config["optimizer"]["overlap"] = policy
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        words = random.Random(5).choices("a block lay on storage until its step came and went again with new gradients".split(), k=6000)
        with open(os.path.join(folder, "text.txt"), "w", encoding="ascii") as file:
            file.write(" ".join(words))
        self.folder = folder
        self.command = [*prefix, os.path.abspath(options.sluice), "train", "config.json", "--quiet", "--json", "run.json"]
        if save:
            self.command += ["--save", "model.safetensors"]
        self.environment = {**os.environ, **(environment or {})}
        self.process = None

    def start(self):
        with open(os.path.join(self.folder, "stderr"), "wb") as errors:
            self.process = subprocess.Popen(self.command, cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL,
                                            stderr=errors, start_new_session=True)
        return self

    def end(self):
        """Returns None, or "hang"."""
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return "hang"
        return None

    def stderr(self):
        with open(os.path.join(self.folder, "stderr"), encoding="utf-8", errors="replace") as file:
            return file.read()

    def hashes(self):
        with open(os.path.join(self.folder, "run.json"), encoding="utf-8") as file:
            state = json.load(file)["state_sha256"]
        with open(os.path.join(self.folder, "model.safetensors"), "rb") as file:
            return state, hashlib.sha256(file.read()).hexdigest()


class Reference:
    """The undisturbed run: its hashes, and the phase of each of its transfers, in the order of the sync backend."""

    def __init__(self, options):
        self.hashes = None
        self.enter_calls = 0
        folder = campaign.tempfile.mkdtemp(prefix="sluice-storage-reference-")
        self.transfers = self.log_of(options, os.path.join(folder, "saved"), save=True)
        unsaved = self.log_of(options, os.path.join(folder, "unsaved"), save=False)
        self.phases = self.phases_of(len(unsaved))
        shutil.rmtree(folder)

    def log_of(self, options, folder, save):
        os.makedirs(folder)
        log = os.path.join(folder, "transfers")
        run = Run(options, folder, "sync", "serial", {"LD_PRELOAD": os.path.abspath(options.shim), "SLUICE_SHIM_LOG": log}, save=save)
        if run.start().end() or run.process.returncode != 0:
            sys.exit(f"the undisturbed run fails: {run.stderr()}")
        if save:
            self.hashes = run.hashes()
        with open(log, encoding="ascii") as file:
            lines = [line.split() for line in file]
        return [(line[0], int(line[1]), int(line[2])) for line in lines]

    def phases_of(self, save_begin):
        """Initial writes; in each step the parameters upwards, then downwards, then every block's update; what is read for the end."""
        start = next(i for i, (kind, _, _) in enumerate(self.transfers) if kind == "r")
        last_write = max(i for i, (kind, _, _) in enumerate(self.transfers) if kind == "w")
        parameter_bytes = CONFIG["storage"]["block_elements"] * 2
        phases, seen, is_update = [], set(), False
        for i, (kind, offset, length) in enumerate(self.transfers):
            if i < start:
                phases.append("start")
            elif i >= save_begin:
                phases.append("save")
            elif i > last_write:
                phases.append("end")
            else:
                is_record = length > parameter_bytes
                if kind == "w" or is_record:
                    is_update = True
                elif is_update and self.next_is_parameters(i, parameter_bytes):
                    seen, is_update = set(), False  # the next step
                phases.append("update" if is_update else "backward" if offset in seen else "forward")
                if not is_update:
                    seen.add(offset)
        return phases

    def next_is_parameters(self, i, parameter_bytes):
        """Whether three reads of parameters come in a row: an update reads each block's, and then its record."""
        return all(kind == "r" and length <= parameter_bytes for kind, _, length in self.transfers[i:i + 3])

    def pick(self, generator, phase, kind):
        numbers = [i for i, known in enumerate(self.phases) if known == phase and kind in ("", self.transfers[i][0])]
        return generator.choice(numbers) if numbers else None

    def count_enter_calls(self, options):
        """How often an undisturbed run over io_uring calls io_uring_enter: the phase of a call is that of its share."""
        with campaign.tempfile.TemporaryDirectory() as folder:
            log = os.path.join(folder, "calls")
            run = Run(options, folder, "uring", "serial", prefix=strace(log, "signal=none"))
            if run.start().end() or run.process.returncode != 0:
                sys.exit(f"the undisturbed run under strace fails: {run.stderr()}")
            with open(log, encoding="ascii", errors="replace") as file:
                self.enter_calls = sum("io_uring_enter(" in line for line in file)
        if self.enter_calls < len(campaign.PHASES):
            sys.exit(f"strace has seen {self.enter_calls} calls of io_uring_enter, too few to refuse one in each phase")

    def phase_of_bytes(self, read_bytes):
        """The phase in which the serial run has read so many bytes."""
        total = 0
        for (kind, _, length), phase in zip(self.transfers, self.phases):
            total += length if kind == "r" else 0
            if total > read_bytes:
                return phase
        return "end"


def strace(log, action):
    return (shutil.which("strace"), "-f", "-qq", "-o", log, "-e", "trace=io_uring_enter", "-e", action)


def can_trace():
    return shutil.which("strace") is not None and subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode == 0


def has_uring(options):
    """Whether the kernel allows an io_uring. A run over it that fails in another way ends the campaign."""
    with campaign.tempfile.TemporaryDirectory() as folder:
        probe = Run(options, folder, "uring", "serial")
        hung = probe.start().end()
        code, stderr = probe.process.returncode, probe.stderr()
    if not hung and code == 5 and "io_uring" in stderr:
        print(f"no io_uring here, so none is tried: {stderr.strip()[:200]}", flush=True)
    elif hung or code != 0:
        sys.exit(f"the undisturbed run over io_uring fails: {hung or code}: {stderr}")
    return code == 0


def judge(run, hung, reference, phase, what):
    """The outcome of the case: the promise is a named error, or the right bits."""
    if hung:
        return campaign.Outcome(phase, "hang", what)
    code, stderr = run.process.returncode, run.stderr()
    if code < 0 or code >= 128:
        return campaign.Outcome(phase, "crash", f"{what}: exit code {code}: {stderr[-300:]}")
    if code == 0:
        same = run.hashes() == reference.hashes
        return campaign.Outcome(phase, "same result" if same else "silent", what)
    is_named = "unit \"" in stderr and "storage" in stderr and "[" in stderr
    last = stderr.strip().splitlines()[-1] if stderr.strip() else "no message"
    return campaign.Outcome(phase, "named" if is_named else "unnamed", f"{what}: {last[:160]}")


def by_shim(case, reference, backend):
    """A case over the sync or threads backend."""
    phase = case.random.choice(campaign.PHASES)
    is_fault = case.options.kind == "faults"
    kinds = sorted({reference.transfers[i][0] for i, known in enumerate(reference.phases) if known == phase})
    kind = case.random.choice(kinds)
    what = case.random.choice(FAULTS[kind] if is_fault else CHANGES)
    number = reference.pick(case.random, phase, kind)
    environment = {"LD_PRELOAD": os.path.abspath(case.options.shim), "SLUICE_SHIM_LOG": os.path.join(case.folder, "transfers"),
                   "SLUICE_SHIM_AT": str(number), "SLUICE_SHIM_DO": what, "SLUICE_SHIM_KIND": kind,
                   "SLUICE_SHIM_RANDOM": str(case.random.getrandbits(32))}
    policy = case.random.choice(POLICIES)
    run = Run(case.options, case.folder, backend, policy, environment)
    hung = run.start().end()
    note = f"{backend}, {policy}: {what} at transfer {number} ({'read' if kind == 'r' else 'write'})"
    with open(environment["SLUICE_SHIM_LOG"], encoding="ascii") as file:
        if "event" not in file.read() and not hung:
            return campaign.Outcome(phase, "same result" if run.process.returncode == 0 and run.hashes() == reference.hashes else "silent",
                                    note + ": the run made no such transfer")
    return judge(run, hung, reference, phase, note)


def scratch_of(process):
    """The scratch file of a process, by its open descriptor; None before it is there and after the end."""
    try:
        for name in os.listdir(f"/proc/{process.pid}/fd"):
            path = f"/proc/{process.pid}/fd/{name}"
            if "/storage/" in os.readlink(path) and os.stat(path).st_nlink == 0 and os.stat(path).st_size > 0:
                return path
    except OSError:
        pass
    return None


def read_bytes_of(process):
    try:
        with open(f"/proc/{process.pid}/io", encoding="ascii") as file:
            return int(next(line for line in file if line.startswith("read_bytes")).split()[1])
    except (OSError, StopIteration):
        return None


def change_file(path, generator, reference, what):
    """Writes into the scratch file, in the place of one of its blocks.

    Past the page cache, as the run itself: where a page of the cache is dirty when a direct write of the run ends,
    the kernel keeps both and has fsync fail with EIO (Linux, mm/filemap.c, dio_warn_stale_pagecache).
    """
    places = sorted({(offset, length) for kind, offset, length in reference.transfers if kind == "w"})
    offset, length = generator.choice(places)
    descriptor = open_direct(path)
    try:
        if what == "copy":
            with mmap.mmap(-1, length) as bytes_of:
                os.preadv(descriptor, [bytes_of], generator.choice(places)[0])
                os.pwritev(descriptor, [bytes_of], offset)
            return
        at = offset + generator.randrange(length)
        page = at // mmap.PAGESIZE * mmap.PAGESIZE
        with mmap.mmap(-1, mmap.PAGESIZE) as bytes_of:
            os.preadv(descriptor, [bytes_of], page)
            if what in ("bit", "byte"):
                bytes_of[at - page] ^= 1 << generator.randrange(8) if what == "bit" else 0x5A
            else:
                size = 512 if what == "sector" else mmap.PAGESIZE
                start = (at - page) // size * size
                bytes_of[start:start + size] = generator.randbytes(size) if what == "sector" else bytes(size)
            os.pwritev(descriptor, [bytes_of], page)
    finally:
        os.close(descriptor)


def open_direct(path):
    """A descriptor with O_DIRECT, or without where the file system has none (tmpfs)."""
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDWR)


def write_beside_uring(case, reference):
    """Another process writes into the file of an io_uring, when the process has read so much."""
    phase = case.random.choice(campaign.PHASES)
    what = case.random.choice(CHANGES[:-1])
    number = reference.pick(case.random, phase, "")
    wanted = sum(length for kind, _, length in reference.transfers[:number] if kind == "r")
    run = Run(case.options, case.folder, "uring", "serial").start()
    struck, start = None, None
    while run.process.poll() is None and struck is None:
        time.sleep(0.002)  # it runs in slices, and stands still while it is looked at
        run.process.send_signal(signal.SIGSTOP)
        path, now = scratch_of(run.process), read_bytes_of(run.process)
        if path and now is not None:
            start = now if start is None else start
            if now - start >= wanted:
                change_file(path, case.random, reference, what)
                struck = reference.phase_of_bytes(now - start)
        run.process.send_signal(signal.SIGCONT)
    return judge(run, run.end(), reference, struck or "end", f"uring, serial: {what}")


def refuse_uring(case, reference):
    """The kernel refuses io_uring_enter at a call in mid-run, and all behind it."""
    error = case.random.choice(ENTER_ERRORS)
    phase = case.random.choice(campaign.PHASES)
    share = (reference.pick(case.random, phase, "") + case.random.random()) / len(reference.phases)
    call = 2 + int(share * (reference.enter_calls - 2))  # the first is the trial, which falls back
    sticky = case.random.choice(("+", ""))
    run = Run(case.options, case.folder, "uring", "serial",
              prefix=strace("/dev/null", f"inject=io_uring_enter:error={error}:when={call}{sticky}"))
    hung = run.start().end()
    return judge(run, hung, reference, phase, f"uring: {error} at call {call}{sticky} of io_uring_enter")


def main():
    parser = campaign.parser(__doc__)
    parser.add_argument("--shim", required=True, help="libstorage_shim.so, as the tests have built it")
    parser.add_argument("--kind", choices=("writes", "faults"), required=True)
    parser.add_argument("--backends", default="sync,threads,uring", help="by commas (default: all three)")
    options = parser.parse_args()
    backends = options.backends.split(",")
    if options.kind == "faults" and "uring" in backends and not can_trace():
        print("needs a strace that may trace; --backends sync,threads does without")
        sys.exit(77)
    if "uring" in backends and not has_uring(options):
        backends.remove("uring")
    reference = Reference(options)
    if options.kind == "faults" and "uring" in backends:
        reference.count_enter_calls(options)

    def make_case(case):
        backend = case.random.choice(backends)
        if backend != "uring":
            return by_shim(case, reference, backend)
        return write_beside_uring(case, reference) if options.kind == "writes" else refuse_uring(case, reference)

    sys.exit(campaign.run(options, make_case, f"storage-{options.kind}"))


if __name__ == "__main__":
    main()
