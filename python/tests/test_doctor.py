"""python -m sluice_offload doctor."""

import os
import subprocess
import sys
import tempfile
import types

import pytest
import torch

from sluice_offload import __main__, command, engine, gpus, library
from sluice_offload.__main__ import main


def test_says_what_works(tmp_path, capsys):
    assert main(["doctor", "--path", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for words in ("torch 2.", "libsluice", "C interface", "parameters move by", f"{tmp_path}: "):
        assert words in said
    assert "NO" not in said
    assert "torch sees no GPU" in said or ": Sluice can" in said
    # Three steps: the state is written three times, and read twice, and perhaps a third time ahead.
    moved = int(said.split(f"{tmp_path}: ")[1].split()[0])
    assert 5 * 8 <= moved <= 6 * 8


def test_says_which_commit_was_built(tmp_path, monkeypatch):
    """All commits have one version. The command of a wheel, which the library's build made, knows."""
    program = tmp_path / "bin" / "sluice"
    program.parent.mkdir()
    monkeypatch.setattr(command, "HERE", tmp_path)
    monkeypatch.delenv("SLUICE_LIBRARY", raising=False)
    monkeypatch.setattr(library, "library", lambda: types.SimpleNamespace(version=lambda: "0.1.0"))

    def said(*lines):
        program.write_text("\n".join(["#!/bin/sh", *lines]), encoding="utf-8")
        program.chmod(0o755)
        return __main__._library().split(":")[0]
    for is_modified, words in (("false", "commit 0123456789ab"), ("true", "commit 0123456789ab with changes")):
        found = said(f"""echo '{{"git_commit": "{'0123456789abcdef' * 2}", "git_modified": {is_modified}}}'""")
        assert found == f"libsluice 0.1.0, {words}, C interface {library.ABI_VERSION}"
    for line in ("exit 1", """echo '{"git_commit": null, "git_modified": null}'"""):
        assert said(line) == f"libsluice 0.1.0, C interface {library.ABI_VERSION}"
    monkeypatch.setenv("SLUICE_LIBRARY", "libsluice.so")
    assert "commit" not in said(f"""echo '{{"git_commit": "0", "git_modified": false}}'"""), "it is of another build"


@pytest.mark.parametrize("why, words", [("", "ok  cuda:0, A GPU: Sluice can use it"), (
    "this build has no CUDA", "--  cuda:0, A GPU: Sluice cannot use it: this build has no CUDA")])
def test_says_what_gpus_are_for(monkeypatch, capsys, why, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "A GPU")
    monkeypatch.setattr(gpus, "why_not", lambda gpu: why)
    assert main(["doctor"]) == 0
    assert words in capsys.readouterr().out


def test_says_what_does_not(tmp_path, capsys):
    assert main(["doctor", "--path", str(tmp_path / "nothing"), "--path", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "NO  path:" in said and str(tmp_path / "nothing") in said
    assert f"ok  {tmp_path}: " in said
    broken = subprocess.run([sys.executable, "-m", "sluice_offload", "doctor"], capture_output=True, text=True,
                            env={**os.environ, "SLUICE_LIBRARY": str(tmp_path / "libsluice.so")})
    assert broken.returncode == 1 and "NO  library: cannot load" in broken.stdout and "tools/packages.txt" in broken.stdout and "Traceback" not in broken.stderr


@pytest.mark.parametrize("what", ["raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "raise OSError('libtorch.so')"])
def test_needs_no_torch_to_say_so(tmp_path, what):
    """Nor do the flags of a C++ program, which a Python without torch may ask for."""
    (tmp_path / "torch.py").write_text(what)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    told = run("-m", "sluice_offload", "doctor")
    assert told.returncode == 1 and "NO  torch: " in told.stdout and "ok  libsluice" in told.stdout and not told.stderr
    told = run("-m", "sluice_offload", "flags")
    assert told.stdout.startswith("-std=c++20 ") if told.returncode == 0 else "libsluice_cxx.so" in told.stderr
    for command in (["plan", "nothing"], ["train-demo"]):
        told = run("-m", "sluice_offload", *command)
        assert told.returncode == 1 and "NO  torch: " in told.stderr and "Traceback" not in told.stderr
    for use in ("from sluice_offload import offload", "import sluice_offload; sluice_offload.optim", "from sluice_offload import optim"):
        assert "needs torch, which cannot be imported: " in run("-c", use).stderr
    assert "has no attribute 'nothing'" in run("-c", "import sluice_offload; sluice_offload.nothing").stderr


def test_memory_is_no_drive(capsys, caplog):
    """State in /dev/shm would take the memory that the budgets save."""
    if not os.access("/dev/shm", os.W_OK) or not engine.is_memory("/dev/shm"):
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, caplog.at_level("WARNING"):
        assert main(["doctor", "--path", folder]) == 0
        assert "it is memory (tmpfs), not a drive" in capsys.readouterr().out
        assert f"{folder} is memory (tmpfs)" in caplog.text
    assert not engine.is_memory("/proc")
