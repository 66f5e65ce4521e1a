#!/usr/bin/env python3
"""The verdicts of the campaigns, with small programs in the place of mpirun and sluice."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest

import campaign
import mpi_runs
import output_faults
import rank_faults


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "storage").mkdir()

    def script(self, name, text):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)


class Launchers(Folder):
    RANKS = 'shift 2\nfor rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank "$@" & done\nwait\necho "MPI_Init has not ended within 5 s"\n'

    def run_of(self, end, rank="sleep 0.5"):
        """A run whose launcher ends, or does not, behind its last rank; it has begun."""
        run = mpi_runs.MpiRun(self.script("mpirun", self.RANKS + end), 2, ["sh", "-c", rank], str(self.folder))
        self.addCleanup(run.kill)
        while not run.ranks() and run.process.poll() is None:
            time.sleep(0.02)
        return run

    def setUp(self):
        super().setUp()
        self.addCleanup(setattr, mpi_runs, "LAUNCHER_S", mpi_runs.LAUNCHER_S)
        mpi_runs.LAUNCHER_S = 1

    def test_one_that_hangs_behind_its_last_rank_is_told_apart(self):
        run = self.run_of("exec sleep 1000")
        self.assertTrue(run.wait(30))
        self.assertTrue(run.is_launcher_stuck)
        self.assertIn("has not ended", run.output)
        self.assertEqual(run.left([str(self.folder / "storage")]), [])

    def test_segments_of_open_mpi_are_its_own_where_it_does_not_come_to_its_end(self):
        self.addCleanup(setattr, mpi_runs, "SHARED", mpi_runs.SHARED)
        mpi_runs.SHARED = str(self.folder / "shm")  # other campaigns look into the real one
        os.mkdir(mpi_runs.SHARED)
        segment = os.path.join(mpi_runs.SHARED, "vader_segment.vm.0.1")
        stuck = self.run_of(f"touch {segment}\nexec sleep 1000")
        self.assertTrue(stuck.wait(30))
        self.assertEqual(stuck.left(), [])
        self.assertFalse(os.path.exists(segment))
        ended = self.run_of(f"touch {segment}\nexit 1")
        self.assertTrue(ended.wait(30))
        self.assertEqual(ended.left(), [])
        ended.output = "a rank has not answered"
        open(segment, "w", encoding="ascii").close()
        self.assertEqual(ended.left(), [f"files ['{segment}']"])

    def test_one_that_ends_does_not_count_as_stuck(self):
        run = self.run_of("sleep 0.3\nexit 1")
        self.assertTrue(run.wait(30))
        self.assertEqual((run.is_launcher_stuck, run.process.returncode), (False, 1))

    def test_one_whose_rank_hangs_does_not_count_as_stuck(self):
        run = self.run_of("exit 1", rank="exec sleep 1000")
        self.assertFalse(run.wait(2))
        self.assertFalse(run.is_launcher_stuck)

    def test_a_stopped_rank_counts_as_named_when_only_mpirun_does_not_end(self):
        run = types.SimpleNamespace(mpi=self.run_of("exec sleep 1000"), folder=str(self.folder))
        begin = time.monotonic()
        result, note = rank_faults.outcome_of(run, signal.SIGSTOP, 1, None)
        self.assertEqual((result, note), ("named", "MPI_Init has not ended within 5 s; then mpirun itself did not end"))
        self.assertLess(time.monotonic() - begin, 60)


class UringProbe(Folder):
    """storage_faults.py with a command that fails over io_uring, each time in another way."""

    def campaign(self, sluice, *words, **others):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "storage_faults.py")
        return subprocess.run([sys.executable, "-B", script, "--sluice", self.script("sluice", sluice), "--shim", "none", "--count", "1", *words],
                              capture_output=True, text=True, check=False, **others)

    def test_a_crash_is_no_missing_io_uring(self):
        done = self.campaign("kill -SEGV $$", "--kind", "writes", "--backends", "uring")
        self.assertEqual(done.returncode, 1)
        self.assertIn("the undisturbed run over io_uring fails: -11", done.stderr)

    def test_another_error_is_no_missing_io_uring(self):
        done = self.campaign("echo no such key >&2\nexit 2", "--kind", "writes", "--backends", "uring")
        self.assertIn("the undisturbed run over io_uring fails: 2: no such key", done.stderr)

    def test_a_kernel_without_io_uring_leaves_it_out(self):
        done = self.campaign("echo the kernel refuses an io_uring >&2\nexit 5", "--kind", "writes", "--backends", "uring,sync")
        self.assertIn("no io_uring here", done.stdout)
        self.assertNotIn("over io_uring", done.stderr)

    def test_faults_without_strace_are_skipped(self):
        done = self.campaign("exit 0", "--kind", "faults", env={**os.environ, "PATH": str(self.folder)})
        self.assertEqual(done.returncode, 77, done.stderr)
        self.assertIn("needs a strace", done.stdout)


class Outputs(Folder):
    """The verdict on a command that ends well, by what it has written and which of its calls has failed."""

    TABLE = b"".join(b"%d,%d\n" % (i, i * i) for i in range(1000))

    def verdict(self, content, call, fault):
        (self.folder / "out").mkdir()
        (self.folder / "out" / "all.csv").write_bytes(content)
        command = output_faults.Command("trace export", [], {"--csv": "all.csv"})
        command.expected, command.trace = {"--csv": self.TABLE}, b"a trace"
        case = types.SimpleNamespace(folder=str(self.folder), options=types.SimpleNamespace(sluice="none"))
        row = campaign.FaultRow(command, 1, call, "all.csv", fault)
        return output_faults.judge(case, row, subprocess.CompletedProcess([], 0, "", ""))[0]

    def test_a_table_whose_middle_is_missing_is_torn(self):
        third = len(self.TABLE) // 3
        self.assertEqual(self.verdict(self.TABLE[:third] + self.TABLE[2 * third:], "write", "short"), "torn")

    def test_a_table_whose_end_is_missing_is_silent(self):
        self.assertEqual(self.verdict(self.TABLE[:self.TABLE.index(b"\n", 2000) + 1], "write", "short"), "silent")

    def test_a_failed_write_cannot_end_well(self):
        self.assertEqual(self.verdict(self.TABLE, "write", "EIO"), "silent")

    def test_an_interrupted_write_may_end_well(self):
        self.assertEqual(self.verdict(self.TABLE, "write", "EINTR"), "same result")


if __name__ == "__main__":
    unittest.main()
