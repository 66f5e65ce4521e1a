"""log_steps(): the figures of each step, given to a logger as Weights & Biases takes them."""

import math

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, batch, tiny, train


class Run:
    """Takes what wandb.log takes, and refuses what it refuses: steps that go back."""

    def __init__(self):
        self.rows = []

    def log(self, data, step=None, commit=None):
        assert commit is None
        assert not self.rows or step > self.rows[-1][0]
        for name, value in data.items():
            assert isinstance(name, str) and isinstance(value, (int, float)) and math.isfinite(value)
        self.rows.append((step, data))


def test_every_step_is_logged_once_with_its_own_figures(config):
    run, model = Run(), tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    handle = sluice.log_steps(optimizer, run.log)
    expected = []
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["lr"] = 5e-4
        train(model, optimizer, 1, first=step)
        optimizer.step()  # without gradients there is no step, and nothing to log
        report = optimizer.report
        expected.append((report.step, {"train/learning_rate": 1e-3 if step < 2 else 5e-4, "train/skipped": 0.0, "train/loss_scale": 1.0,
                                       "speed/stall_s": report.stall_ns * 1e-9, "train/gradient_norm": report.gradient_norm,
                                       "traffic/nvme_read_bytes": report.nvme_read_bytes, "traffic/nvme_write_bytes": report.nvme_write_bytes}))
    times = [figures.pop("speed/step_s", None) for _, figures in run.rows]
    assert times[0] is None and all(time > 0 for time in times[1:])
    assert run.rows == expected
    assert [step for step, _ in run.rows] == [1, 2, 3, 4] and run.rows[0][1]["traffic/nvme_read_bytes"] > 0
    handle.remove()
    train(model, optimizer, 1, first=4)
    assert len(run.rows) == 4
    optimizer.close()


def test_a_skipped_step_has_no_norm(config, caplog):
    """Three in a row have a warning."""
    config["optimizer"]["non_finite"] = "skip"
    run, model = Run(), tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    sluice.log_steps(optimizer, run.log)
    tokens, labels = batch(0)
    (model(tokens, labels) * torch.tensor(math.inf)).backward()
    optimizer.step()
    (step, figures), = run.rows
    assert (step, figures["train/skipped"]) == (1, 1.0)
    assert "train/gradient_norm" not in figures
    with caplog.at_level("WARNING"):
        for step in range(5):  # of which the first has gradients that are finite
            (model(*batch(step)) * (math.inf if step else 1.0)).backward()
            optimizer.step()
            assert len(caplog.records) == (step >= 3)
    assert "3 steps in a row were skipped" in caplog.text
    optimizer.close()


def test_numbers_go_up_over_skipped_steps(config):
    """Weights & Biases drops what comes with a number that it has seen. Resumed training goes on counting its updates."""
    config["optimizer"]["non_finite"] = "skip"
    config["storage"]["state"] = {"name": "run"}
    run, model = Run(), tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    sluice.log_steps(optimizer, run.log)
    for step, factor in enumerate((1, math.inf, math.inf, 1)):
        (model(*batch(step)) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [(step, figures["train/skipped"]) for step, figures in run.rows] == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 0.0)]
    optimizer.close()
    again = sluice.offload(model := tiny(), config, units=[Block], resume=True)
    resumed = Run()
    sluice.log_steps(again, resumed.log)
    train(model, again, 2, first=4)
    assert [step for step, _ in resumed.rows] == [again.resumed_step + 1, again.resumed_step + 2] and again.resumed_step > 0
    again.close()


@pytest.mark.parametrize("status", ["auto", "off"])
def test_what_the_program_tells_is_logged_by_the_names_of_the_command(config, status):
    """The peak is told behind the second step. The loss is of the step that it was told for."""
    config["run"] = {"status": status}
    run, model = Run(), tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    sluice.log_steps(optimizer, run.log)
    optimizer.show(tokens=48, flops_per_token=1e6)
    losses = []
    for step in range(4):
        if step == 2:
            optimizer.show(peak_flops=1e9)
        loss = model(*batch(step))
        loss.backward()
        if step < 2:
            optimizer.show(loss=loss)
        optimizer.step()
        losses.append(loss.item())
    rows = [figures for _, figures in run.rows]
    assert [row.get("train/loss") for row in rows] == [*losses[:2], None, None]
    assert not {"speed/tokens_per_s", "speed/flops_per_s", "speed/mfu"} & set(rows[0])  # there is no time yet
    for step, row in enumerate(rows[1:], 1):
        rate = 48 / row["speed/step_s"]
        assert row["speed/tokens_per_s"] == rate
        assert row["speed/flops_per_s"] == pytest.approx(1e6 * rate)
        assert row.get("speed/mfu") == (pytest.approx(1e6 * rate / 1e9) if step >= 2 else None)

    def closure():
        loss = model(*batch(4))
        loss.backward()
        return loss
    loss = optimizer.step(closure)
    assert run.rows[-1][1]["train/loss"] == loss.item()
    optimizer.close()
