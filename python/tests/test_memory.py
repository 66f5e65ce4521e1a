"""A model whose parameters and state are ten times the budgets trains within them: resident memory is metered in a process of its
own, which builds the model on the meta device or in memory."""

import pathlib
import subprocess
import sys
import types

import pytest
from sluice_offload import freed

PROGRAM = pathlib.Path(__file__).parents[1] / "bench" / "memory.py"


def test_budgets_are_read_first():
    ran = subprocess.run([sys.executable, "-B", str(PROGRAM), "--device", "2Q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         check=False, timeout=300)
    assert ran.returncode == 2 and "--device is no size; write a number with a unit" in ran.stderr and not ran.stdout, ran


def run(folder, *options):
    """A tensor has 4 MiB at most, which torch gets from a heap that the C library keeps."""
    ran = subprocess.run([sys.executable, "-B", str(PROGRAM), "--path", str(folder), "--parameters", "0.055", "--width", "512",
                          "--device", "32M", "--host", "28MiB", "--steps", "2", *options], stdout=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert float(ran.stdout.split("the state is ")[1].split(" times")[0]) >= 10, ran.stdout
    assert "kept" in ran.stdout and "bytes are the plan's" in ran.stdout


def test_memory_is_that_of_the_budgets(tmp_path):
    run(tmp_path)


@pytest.mark.slow
def test_the_models_own_memory_goes_back(tmp_path):
    run(tmp_path, "--in-memory")


@pytest.mark.slow
def test_freed_memory_goes_back_in_forward_and_behind_copies():
    done = subprocess.run([sys.executable, "-B", str(pathlib.Path(__file__).with_name("freed_memory.py"))], capture_output=True, text=True,
                          check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_resident_memory_is_looked_at_every_two_milliseconds(monkeypatch):
    memory, looks = freed.FreedMemory(), []
    monkeypatch.setattr(freed, "resident", lambda: looks.append(now) or 0)
    monkeypatch.setattr(freed, "time", types.SimpleNamespace(monotonic=lambda: now))
    for now in (10.0, 10.0005, 10.0019, 10.0021, 10.003, 10.1):
        memory.look()
    assert looks == [10.0, 10.0021, 10.1]
    memory.look_closer()
    assert looks[3:] == [10.1]
