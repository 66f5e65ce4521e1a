"""`sluice top` shows trainings of this package. SLUICE_COMMAND names the command; otherwise it is looked for on the path."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, batch, tiny, train

COMMAND = os.environ.get("SLUICE_COMMAND") or shutil.which("sluice")
needs_command = pytest.mark.skipif(not COMMAND, reason="the command `sluice` is not here, and SLUICE_COMMAND does not name it")

# Trains until it is killed, and prints what each step's report says.
PROGRAM = """
import json, sys
import sluice_offload as sluice
from conftest import Block, batch, tiny

model = tiny()
optimizer = sluice.offload(model, json.loads(sys.argv[1]), units=[Block])
optimizer.show(tokens=48, steps=1000000, flops_per_token=1e6, peak_flops=1e9)
for step in range(1000000):
    loss = model(*batch(step % 7))
    loss.backward()
    optimizer.show(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    report = optimizer.report
    print(json.dumps({"step": report.step, "loss": float(loss), "gradient_norm": report.gradient_norm,
                      "storage_read": report.nvme_read_bytes, "storage_write": report.nvme_write_bytes}), flush=True)
"""


@pytest.fixture(name="pages")
def pages_fixture(tmp_path, monkeypatch):
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "sluice"


def names(pages):
    return sorted(os.listdir(pages)) if pages.is_dir() else []


def ask():
    return json.loads(subprocess.run([COMMAND, "top", "--once", "--json"], check=True, capture_output=True, text=True).stdout)


def own_run():
    run, = ask()["runs"]
    assert run["pid"] == os.getpid()
    return run


@pytest.mark.slow
@needs_command
def test_top_agrees_with_a_run_and_tells_its_end(config, pages, tmp_path):
    lines = tmp_path / "lines"
    here = os.path.dirname(os.path.abspath(__file__))
    with open(lines, "wb") as file, \
            subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(config)], stdout=file, cwd=here,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}) as process:
        try:
            answers = {}
            while len(answers) < 10:
                assert process.poll() is None
                for run in ask()["runs"]:
                    if run["step"] > 0:
                        answers[run["step"]] = run
            said = ""
            while said.count("\n") <= max(answers):
                time.sleep(0.01)
                said = lines.read_text(encoding="utf-8")
        finally:
            process.send_signal(signal.SIGKILL)
    reports = {line["step"]: line for line in map(json.loads, said.splitlines()[:-1])}
    for step, run in answers.items():
        assert (run["pid"], run["phase"], run["steps"], run["tokens"]) == (process.pid, "training", 1000000, 48)
        report = reports[step]
        assert run["loss"] == pytest.approx(report["loss"]) and run["gradient_norm"] == report["gradient_norm"]
        for link in ("storage_read", "storage_write"):
            assert run["links"][link]["bytes"] == report[link] > 0
        drive, = run["drives"]
        assert (drive["read_bytes"], drive["write_bytes"]) == (report["storage_read"], report["storage_write"])
        assert drive["path"].endswith(str(tmp_path)[-40:])
        assert run["mfu"] == pytest.approx(1e6 * 48 / run["time_s"] / 1e9)
        assert run["total_s"] == pytest.approx(sum(run[part + "_s"] for part in ("compute", "exposed_io", "exposed_optimizer", "other")))
    told = subprocess.run([COMMAND, "top"], check=True, capture_output=True, text=True).stdout
    assert told.startswith(f"process {process.pid} is gone: killed or crashed behind step ") and told.endswith(" of 1000000\n")
    assert not names(pages)


def test_a_page_lives_as_long_as_its_engine(config, pages):
    optimizer = sluice.offload(tiny(), config, units=[Block])
    assert names(pages) == [str(os.getpid())]
    assert (pages / str(os.getpid())).stat().st_mode & 0o777 == 0o600
    child = os.fork()
    if child == 0:
        optimizer.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert names(pages) == [str(os.getpid())], "a child that ends leaves its parent's page"
    optimizer.close()
    assert not names(pages)


def test_off_and_nowhere(config, pages, monkeypatch):
    optimizer = sluice.offload(tiny(), {**config, "run": {"status": "off"}}, units=[Block])
    optimizer.show(loss=1.0)
    assert not names(pages)
    optimizer.close()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 1)
    optimizer.close()
    assert not names(pages)


def test_a_process_has_one_page(config, pages, caplog):
    with caplog.at_level(logging.INFO, "sluice_offload"):
        first = sluice.offload(tiny(), config, units=[Block])
        assert "another engine" not in caplog.text
        second = sluice.offload(tiny(), config, units=[Block])
    assert "`sluice top` shows another engine of this process" in caplog.text
    second.close()
    assert names(pages) == [str(os.getpid())]
    first.close()
    assert not names(pages)


@needs_command
@pytest.mark.filterwarnings("error")  # as torch's, of a tensor that requires a gradient
def test_losses_come_from_the_program_closures_and_engines(config, pages):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 1)
    run = own_run()
    assert run["loss"] is None and run["steps"] is None and run["tokens"] is None and run["step"] == 1

    def closure():
        loss = model(*batch(1))
        loss.backward()
        return loss
    loss = optimizer.step(closure)
    optimizer.zero_grad()
    assert own_run()["loss"] == pytest.approx(loss.item())
    train(model, optimizer, 1, first=2)
    assert own_run()["loss"] is None, "a loss is of one step"
    loss = model(*batch(3))
    loss.backward()
    optimizer.show(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    assert own_run()["loss"] == pytest.approx(loss.item())
    optimizer.show(loss=math.inf)
    train(model, optimizer, 1, first=3)
    assert own_run()["loss"] is None  # JSON has no infinity
    for wrong in ({"tokens": -1}, {"steps": 1 << 64}, {"peak_flops": -1.0}, {"flops_per_token": math.nan}):
        with pytest.raises(sluice.ArgumentError, match=next(iter(wrong))):
            optimizer.show(**wrong)
    optimizer.show(tokens=7)
    assert names(pages) and own_run()["step"] == 5
    optimizer.close()

    engine, _, _, _ = sluice.initialize(model=tiny(), config={**config, "batch": {"sequences": 4, "micro_batches": 2}}, units=[Block])
    losses = []
    for micro in range(2):
        loss = engine(*batch(micro))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    assert own_run()["loss"] == pytest.approx(sum(losses) / 2)
    engine.destroy()


@needs_command
def test_the_page_stays_with_another_checkpoint(config, pages, tmp_path):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 2)
    folder = optimizer.save(tmp_path / "saved")
    train(model, optimizer, 1, first=2)
    assert own_run()["step"] == 3
    optimizer.load_checkpoint(folder)
    train(model, optimizer, 1, first=2)
    assert own_run()["step"] == 3 and names(pages) == [str(os.getpid())]
    assert torch.isfinite(torch.tensor(optimizer.gradient_norm))
    optimizer.close()
