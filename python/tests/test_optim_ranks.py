"""sluice_offload.optim on 2 and 4 gloo ranks: DistributedDataParallel, FSDP2, HSDP, tensor parallelism and both together."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch

import optim_ranks

PROGRAM = pathlib.Path(__file__).with_name("optim_ranks.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks(size, tmp_path):
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    ranks = [subprocess.Popen([sys.executable, "-B", str(PROGRAM), str(tmp_path)], env={**common, "RANK": str(rank)},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(size)]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)
    print(next(line for line in said[0].splitlines() if line.startswith("state per rank:")))
    for case in optim_ranks.cases(size):
        assert f"passed: {case.__name__}" in said[0]
    left_out = [case.__name__ for case in optim_ranks.CASES[size] if case not in optim_ranks.cases(size)]
    if left_out:
        pytest.skip(f"passed, without {', '.join(left_out)}: FSDP2 of torch {torch.__version__} does not run on the CPU")
