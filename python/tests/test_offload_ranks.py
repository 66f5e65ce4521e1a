"""offload() on two ranks: under torchrun, under mpirun, and what is refused where ranks cannot find each other."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import sluice_offload as sluice
from conftest import Block, tiny
from test_optim_ranks import free_port

PROGRAM = str(pathlib.Path(__file__).with_name("offload_ranks.py"))
# It listens at a port that the system chooses; one that was free a moment ago may be another's by then.
TORCHRUN = (sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")


def run(launcher, folder, cases, ranks=2, **environment):
    done = subprocess.run([*launcher, PROGRAM, str(folder), *cases], env={**os.environ, **environment}, capture_output=True,
                          text=True, timeout=240)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    for case in cases:
        for rank in range(ranks):
            assert f"passed: {case} on rank {rank}" in said


def test_torchrun(tmp_path):
    run([*TORCHRUN, "--nproc_per_node=2"], tmp_path, ["stages", "resuming", "initialize", "slow_saving", "failing_saving", "refusals", "torch",
                                                      "norm_group", "announced", "local", "mixed"], OMP_NUM_THREADS="1")


def test_a_group_of_the_processes(tmp_path):
    run([sys.executable, "-B"], tmp_path, ["process_group"], ranks=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="3",
        OMP_NUM_THREADS="1")


def test_mpirun(tmp_path):
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun here")
    run([mpirun, "-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", sys.executable, "-B"], tmp_path, ["initialize"],
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_ranks_that_cannot_meet_are_refused(config, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    with pytest.raises(sluice.ArgumentError, match=f"2 processes .{name}., but does not say how they find each other: "
                                                   ".*MASTER_ADDR, MASTER_PORT.*torchrun"):
        sluice.offload(tiny(), config, units=[Block])
