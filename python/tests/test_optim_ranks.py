"""sluice_offload.optim on 2 and 4 gloo ranks: DistributedDataParallel, FSDP2, HSDP, tensor parallelism and both together."""

import contextlib
import os
import pathlib
import signal
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


@pytest.mark.parametrize("group", ["2", "4", pytest.param("4 copies", marks=pytest.mark.slow)])
def test_ranks(group, tmp_path):
    left_out = [case.__name__ for case in optim_ranks.CASES[group] if case not in optim_ranks.cases(group)]
    why = f"without {', '.join(left_out)}: FSDP2 of torch {torch.__version__} does not run on the CPU"
    if not optim_ranks.cases(group):
        pytest.skip(why)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": group[0]}
    ranks = subprocess.Popen([sys.executable, "-B", str(PROGRAM), str(tmp_path), group], env=environment, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said = ranks.communicate(timeout=240)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, said
    print(*(line for line in said.splitlines() if line.startswith("state per rank:")), sep="\n")
    for case in optim_ranks.cases(group):
        assert f"passed: {case.__name__}" in said
    assert ("passed: alone" in said) == (optim_ranks.fewer_ranks in optim_ranks.cases(group))
    if left_out:
        pytest.skip(f"passed, {why}")
