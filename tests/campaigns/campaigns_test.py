#!/usr/bin/env python3
"""The verdicts of the campaigns, with small programs in the place of mpirun and sluice."""

import pathlib
import signal
import tempfile
import time
import types
import unittest

import mpi_runs
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


if __name__ == "__main__":
    unittest.main()
