"""Updates beside backward and beside the next forward, counted from the trace on a throttled drive, interrupts while a drive does not
answer, and a drive that fails. Each in a program of its own (slow_drive.py), over the drive that slow_drive.c imitates."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from conftest import worst

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: a slow drive cannot be imitated")
    library = tmp_path_factory.mktemp("drive") / "slow_drive.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "slow_drive.c"), "-ldl", "-lpthread"], check=True)
    return library


def run(drive, folder, program, **environment):
    ran = subprocess.run([sys.executable, "-B", str(HERE / "slow_drive.py"), program, str(folder)], cwd=HERE, text=True,
                         env={**os.environ, "LD_PRELOAD": str(drive), **environment}, stdout=subprocess.PIPE, check=False, timeout=600)
    assert ran.returncode == 0, ran.stdout
    return json.loads(ran.stdout.splitlines()[-1])


def test_when_updates_run_by_the_trace(drive, tmp_path):
    counts = run(drive, tmp_path, "modes", SLOW_DRIVE_RATE=str(40 << 20))
    for mode, steps in counts.items():
        assert len(steps) == 3
        for step in steps:
            assert step["all"] == steps[0]["all"] > 8 * 512 * 512 * 8, (mode, step)
            early, late = step["before backward ended"], step["after step returned"]
            assert (2 * early >= step["all"]) == (mode == "backward") and (early > 0) == (mode == "backward"), (mode, step)
            assert (2 * late >= step["all"]) == (mode == "forward") and (late > 0) == (mode == "forward"), (mode, step)


@pytest.mark.parametrize("program", ["interrupt", "announced"])
def test_interrupts_do_not_wait_for_the_drive(drive, tmp_path, program):
    losses = run(drive, tmp_path, program, SLOW_DRIVE_HOLD=str(tmp_path / "hold"))
    assert len(losses["actual"]) == 4 and worst(losses["actual"], losses["expected"]) <= 2e-6


def test_a_drive_that_fails_is_an_error_of_storage_in_forward_backward_and_step(drive, tmp_path):
    """It comes out of the call that meets it and names what was moved. The engine is stopped: later calls say it again, and neither close()
    nor the end of a program that does not catch it waits for anything."""
    broken = {f"SLOW_DRIVE_NO_{kind}": str(tmp_path / f"no {kind}") for kind in ("READS", "WRITES")}
    ran = subprocess.run([sys.executable, "-B", str(HERE / "slow_drive.py"), "broken", str(tmp_path)], cwd=HERE, text=True,
                         env={**os.environ, "LD_PRELOAD": str(drive), **broken}, capture_output=True, check=False, timeout=600)
    assert ran.returncode == 1, ran.stderr
    expected = r'(read|write) of (unit|the state of) ".*failed.*Input/output error; check the drive'
    assert re.search("^sluice_offload.errors.StorageError: " + expected, ran.stderr.strip().splitlines()[-1]), ran.stderr
    found = json.loads(ran.stdout)
    assert list(found) == ["forward, reads", "backward, reads", "step, reads", "step, writes", "optim, reads", "optim, writes"]
    for case, result in found.items():
        where, kind, words = result["first"]
        assert (where, kind) == (case.split(",")[0].replace("optim", "step"), "StorageError"), (case, result)
        assert re.search(expected, words) and str(tmp_path) in words, words
        for kind, said in [*result["again"], result["close"]]:
            assert kind in ("StorageError", "SluiceError") and words in said, (case, result)
