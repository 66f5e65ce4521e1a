"""Training on the file systems that people have, on full ones, and without what containers forbid:
the same state as in memory, or a refusal before the first step, with the numbers."""

import ctypes
import errno
import fcntl
import os
import platform
import re
import shutil
import struct

from cli_support import (ON_NVME, CliCase, as_ordinary_user, is_root, mount, mount_ext4,
                         mount_made, mount_tmpfs, unmount)

IN_MEMORY = {"placement.parameters": "host", "placement.optimizer": "host"}
IO_URING_SETUP = {"x86_64": 425, "aarch64": 425}


class StorageCase(CliCase):
    """Knows the state after training in memory; drive/ is a folder to mount on."""

    LABEL = "command"

    def setUp(self):
        super().setUp()
        os.mkdir(self.path("drive"))
        self.expected = self.train(IN_MEMORY)["state_sha256"]

    def run_on(self, *paths, **options):
        """Trains on storage in `paths`. If that ends well, the state must be that of memory."""
        config = self.write_config({**ON_NVME, "storage.paths": list(paths)})
        done = self.run_sluice("train", config, "--json", "run.json", **options)
        if done.returncode == 0:
            self.assertEqual(self.read_json("run.json")["state_sha256"], self.expected)
        for path in paths:
            self.assertEqual(set(os.listdir(self.path(path))) - {"lost+found"}, set())
        return done


class FileSystem(StorageCase):
    def check_alignment(self, expected):
        done = self.run_sluice("doctor", "--path", "drive")
        self.assertIn(f"O_DIRECT with alignment {expected}", done.stdout)

    def test_ext4_with_512_byte_sectors(self):
        mount_ext4(self, self.path("drive"), 32 << 20, 512)
        self.check_alignment(512)
        self.run_on("drive")

    def test_ext4_with_4096_byte_sectors(self):
        mount_ext4(self, self.path("drive"), 32 << 20, 4096)
        self.check_alignment(4096)
        self.run_on("drive")

    def test_tmpfs(self):
        mount_tmpfs(self, self.path("drive"), "16m")
        self.run_on("drive")

    def test_overlay(self):
        for name in ("lower", "upper", "work"):
            os.mkdir(self.path(name))
        options = ",".join(f"{name}dir={self.path(name)}" for name in ("lower", "upper", "work"))
        mount(self, self.path("drive"), "-t", "overlay", "-o", options, "overlay")
        self.run_on("drive")
        self.assertEqual(os.listdir(self.path("upper")), [])

    def test_all_of_them_as_drives_of_one_run(self):
        for name in ("small-sectors", "large-sectors"):
            os.mkdir(self.path(name))
        mount_ext4(self, self.path("small-sectors"), 32 << 20, 512)
        mount_ext4(self, self.path("large-sectors"), 32 << 20, 4096)
        mount_tmpfs(self, self.path("drive"), "16m")
        self.run_on("small-sectors", "large-sectors", "drive", "storage")


class StoreOnFileSystem(CliCase):
    """Durable stores where the file system is nearly full: a run that goes on has the bits of one that never stopped."""

    LABEL = "command"
    STORE = {**ON_NVME, "storage.paths": ["drive"], "storage.state.name": "run-7", "run.steps": 6, "optimizer.schedule_steps": 6}

    def setUp(self):
        super().setUp()
        os.mkdir(self.path("drive"))

    def go_on(self, *words):
        expected = self.train({"run.steps": 6, "optimizer.schedule_steps": 6, **IN_MEMORY})["state_sha256"]
        first = self.run_sluice("train", self.write_config({**self.STORE, "run.steps": 3}))
        for word in words:
            self.assertIn(word, first.stdout)
        space = os.statvfs(self.path("drive"))
        self.fill(space.f_bavail * space.f_frsize - space.f_blocks * space.f_frsize // 20)
        run = self.train(self.STORE, "--resume=required")
        self.assertEqual((run["resumed_steps"], run["state_sha256"]), (3, expected))
        self.run_sluice("state", "verify", self.write_config(self.STORE))
        self.run_sluice("state", "remove", self.write_config(self.STORE))
        self.assertEqual(sorted(set(os.listdir(self.path("drive"))) - {"lost+found"}), ["filler", "run-7.lock"])

    def fill(self, size_bytes):
        self.assertGreater(size_bytes, 0)
        with open(self.path("drive", "filler"), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)

    def made_with(self, *command):
        """A loop device with a file system that `command` makes."""
        if shutil.which(command[0]) is None:
            self.skipTest(f"{command[0]} is missing")
        mount_made(self, self.path("drive"), 512 << 20, command)

    def test_ext4(self):
        mount_ext4(self, self.path("drive"), 32 << 20, 4096)
        self.go_on()

    def test_xfs(self):
        self.made_with("mkfs.xfs", "-q")
        self.go_on()

    def test_btrfs(self):
        self.made_with("mkfs.btrfs", "-q")
        self.go_on()

    def test_tmpfs_is_named(self):
        mount_tmpfs(self, self.path("drive"), "32m")
        self.go_on("storage: drive is memory, not a drive: a durable store is gone when the machine stops")

    def test_a_lock_on_another_file_system_is_not_this_stores(self):
        os.mkdir(self.path("other"))
        for path in ("drive", "other"):  # the same files in the same order, so the same inodes
            mount_tmpfs(self, self.path(path), "32m")
            self.train({**self.STORE, "storage.paths": [path]})
        locks = [self.path(path, "run-7.lock") for path in ("drive", "other")]
        self.assertEqual(*(os.stat(lock).st_ino for lock in locks))
        with open(locks[1], "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertNotIn("in use", self.run_sluice("state", "list", self.write_config(self.STORE)).stdout)
            other = self.write_config({**self.STORE, "storage.paths": ["other"]})
            self.assertIn("in use", self.run_sluice("state", "list", other).stdout)

    def test_an_overlay_is_named(self):
        os.mkdir(self.path("layers"))
        mount_ext4(self, self.path("layers"), 32 << 20, 4096)
        for name in ("lower", "upper", "work"):
            os.mkdir(self.path("layers", name))
        options = ",".join(f"{name}dir={self.path('layers', name)}" for name in ("lower", "upper", "work"))
        mount(self, self.path("drive"), "-t", "overlay", "-o", options, "overlay")
        found = self.run_sluice("doctor", "--path", "drive").stdout
        for words in ("little for a model", "this is an overlay", "free space, or name more storage.paths; name a folder on a local drive"):
            self.assertIn(words, found)
        try:
            os.close(os.open(self.path("drive"), os.O_TMPFILE | os.O_RDWR, 0o600))
        except OSError as error:
            self.skipTest(f"this kernel's overlays have no unnamed files (O_TMPFILE), which stores need: {error}")
        self.go_on("storage: drive is an overlay")


class FullDisk(StorageCase):
    SIZES = [(1024 + 64 * i) << 10 for i in range(32)]  # the state takes about 1.5 MiB

    def test_refused_before_the_first_step_or_complete(self):
        refused = complete = 0
        for size_bytes in self.SIZES:
            with self.subTest(size_bytes=size_bytes):
                mount_ext4(self, self.path("drive"), size_bytes, 512)
                free_before = os.statvfs(self.path("drive")).f_bfree
                if self.is_enough():
                    complete += 1
                else:
                    refused += 1
                self.assertEqual(os.statvfs(self.path("drive")).f_bfree, free_before)
                unmount(self.path("drive"))
        self.assertGreaterEqual(refused, 4)
        self.assertGreaterEqual(complete, 4)

    def is_enough(self):
        """Whether a run on drive/ ends well; if not, it must have been refused for a good reason."""
        space = os.statvfs(self.path("drive"))
        free_bytes = space.f_bavail * space.f_frsize
        done = self.run_on("drive", expect=(0, 5))
        if done.returncode == 0:
            return True
        self.assertNotIn("step ", done.stdout)
        self.assertLess(free_bytes, 118528 * 12 + (1 << 20))
        found = re.search(r'"drive" needs .*\((\d+) bytes\) and has .*\((\d+) bytes\) free: (.*);',
                          done.stderr)
        self.assertTrue(found, done.stderr)
        self.assertGreaterEqual(int(found[1]), 118528 * 12)
        self.assertLessEqual(int(found[2]), free_bytes)
        if found[3].startswith("too little"):
            self.assertGreater(int(found[1]), int(found[2]))
        else:  # what the file system itself needs counts too
            self.assertIn("No space left on device", found[3])
        return False

    def test_two_paths_on_one_disk_share_its_space(self):
        mount_ext4(self, self.path("drive"), 1536 << 10, 512)  # each half fits, both do not
        for name in ("drive/first", "drive/second"):
            os.mkdir(self.path(name))
        message = self.fail_train(5, {**ON_NVME, "storage.paths": ["drive/first", "drive/second"]})
        self.assertIn('"drive/second" needs', message)

    def test_the_second_of_two_drives(self):
        mount_ext4(self, self.path("drive"), 512 << 10, 512)
        message = self.fail_train(5, {**ON_NVME, "storage.paths": ["storage", "drive"]})
        self.assertIn('"drive" needs', message)


class Restricted(StorageCase):
    """A forbidden feature changes a line at the start, and no bit."""

    def test_64_kib_of_locked_memory(self):
        if shutil.which("prlimit") is None:
            self.skipTest("prlimit is missing")
        prefix = as_ordinary_user(self)
        os.chmod(self.path("storage"), 0o777)
        os.chmod(self.folder, 0o777)
        if is_root():
            os.unlink(self.path("run.json"))  # root's
        printed = self.run_on("storage", prefix=("prlimit", "--memlock=65536", *prefix)).stdout
        if "uses threads instead of io_uring" not in printed:
            self.assertRegex(printed, r"(?m)^storage: buffers are pinned anew .*ulimit -l")

    def test_without_io_uring(self):
        for refusal in (errno.EPERM, errno.ENOSYS):
            with self.subTest(errno.errorcode[refusal]):
                printed = self.run_on("storage", preexec_fn=lambda e=refusal: refuse_io_uring(e)).stdout
                self.assertRegex(printed, r"(?m)^storage: uses threads instead of io_uring, because .*"
                                 + re.escape(os.strerror(refusal)))
        message = self.fail_train(5, {**ON_NVME, "storage.backend": "uring"},
                                  preexec_fn=lambda: refuse_io_uring(errno.EPERM))
        self.assertIn("io_uring", message)

    def setUp(self):
        if platform.machine() not in IO_URING_SETUP:
            self.skipTest("the number of io_uring_setup is not known here")
        super().setUp()


def refuse_io_uring(error):
    """A seccomp filter for the process to come: io_uring_setup answers `error`."""
    load, jump_equal, give = 0x20, 0x15, 0x06
    code = [(load, 0, 0, 0), (jump_equal, 0, 1, IO_URING_SETUP[platform.machine()]),
            (give, 0, 0, 0x00050000 | error), (give, 0, 0, 0x7fff0000)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(code), ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if (libc.prctl(set_no_new_privileges, 1, 0, 0, 0) != 0 or
            libc.prctl(set_seccomp, filter_mode, ctypes.byref(program), 0, 0) != 0):
        raise OSError(ctypes.get_errno(), "a seccomp filter is not allowed here")
