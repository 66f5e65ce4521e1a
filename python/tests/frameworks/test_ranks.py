"""transformers' Trainer, Accelerate and Lightning on two ranks, against their own DistributedDataParallel over gloo."""

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = str(pathlib.Path(__file__).with_name("ranks.py"))


def run(launcher, folder, case):
    tests = str(pathlib.Path(PROGRAM).parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(
        [tests, *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, "-B", *launcher, PROGRAM, str(folder), case], env=environment, capture_output=True,
                          text=True, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    for rank in (0, 1):
        assert f"passed: {case} on rank {rank}" in said, said[-6000:]


@pytest.mark.parametrize("case", ["trainer", "generates", "preempted", "accelerate", "alone", "saves", "lightning", "predicts", "raises", "stops",
                                  "norms"])
def test_two_ranks(tmp_path, case):
    run(["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--local-addr=127.0.0.1"], tmp_path, case)


def test_processes_that_lightning_starts(tmp_path):
    run([], tmp_path, "launched")
