"""The same program under DeepSpeed itself and under Sluice, which differ in one import. SLUICE_DEEPSPEED_PYTHON names the Python of
an environment with DeepSpeed (`tools/torch_environment.py FOLDER --deepspeed`), whose first use compiles its Adam."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


def run(python, name, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": os.path.dirname(python) + os.pathsep + os.environ["PATH"],
                   **({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
                      if name == "deepspeed" else {})}
    ran = subprocess.run([python, "-B", str(HERE / "deepspeed_loop.py"), name, str(folder)], env=environment, text=True,
                         stdout=subprocess.PIPE, check=False, timeout=1200)
    assert ran.returncode == 0, ran.stdout
    return json.loads(ran.stdout)


def test_a_program_of_deepspeeds(tmp_path):
    python = os.environ.get("SLUICE_DEEPSPEED_PYTHON")
    if not python:
        pytest.skip("SLUICE_DEEPSPEED_PYTHON is not set; tools/test.sh --slow makes an environment with DeepSpeed")
    theirs, ours = run(python, "deepspeed", tmp_path), run(sys.executable, "sluice_offload", tmp_path)
    assert ours["steps"] == theirs["steps"] == 12 and len(ours["losses"]) == len(theirs["losses"]) == 24
    # A parallel sum of DeepSpeed's, in another order than torch's.
    for name, bound in (("losses", 2e-6), ("norms", 1e-5), ("rates", 1e-12)):
        apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours[name], theirs[name], strict=True))
        print(f"{name}: at most {apart:.1e} apart")
        assert apart <= bound, (name, apart)
