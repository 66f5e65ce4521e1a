"""DeepSpeed's face: initialize() with DeepSpeed's and Sluice's configs, against torch in memory."""

import base64
import copy
import errno
import fractions
import json
import math
import os
import re
import warnings
from typing import NamedTuple

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, Tiny, adamw, batch, budgeted, moves_as_planned, tiny, worst
from sluice_offload.deepspeed import find_config
from sluice_offload.plans import bytes_of

RATE, WARMUP = 1e-3, 4


@pytest.fixture
def deepspeed(tmp_path):
    """As programs with transformers have it, state on NVMe."""
    return {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0, "steps_per_print": 10, "wall_clock_breakdown": False,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": RATE, "warmup_num_steps": WARMUP}},
            "zero_optimization": {"stage": 3, "overlap_comm": True,
                                  "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
                                  "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}


def deepspeeds_rate(update):
    """DeepSpeed's WarmupLR at `update`, counted from 0: its engine moves the scheduler behind each update."""
    behind = max(0, update - 1)
    return RATE * math.log(behind + 1) / math.log(WARMUP) if behind < WARMUP else RATE


def deepspeeds_training(model, steps, first=0):
    """Trains as DeepSpeed defines it: the mean over micro-batches, every tensor decayed, clipping by norm + 1e-6."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(2):
            loss = model(*batch(2 * step + micro)) / 2
            loss.backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.param_groups[0]["lr"] = deepspeeds_rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def run(engine, steps, first=0):
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(2):
            loss = engine(*batch(2 * step + micro))
            losses.append(engine.backward(loss).item())
            assert engine.is_gradient_accumulation_boundary() == (micro == 1)
            engine.step()
            assert engine.was_step_applied() == (micro == 1)
        norms.append(engine.get_global_grad_norm())
    return losses, norms


@pytest.mark.parametrize("form", ["dictionary", "file"])
def test_deepspeeds_loop_with_its_config(deepspeed, tmp_path, form):
    config = deepspeed
    if form == "file":
        config = tmp_path / "ds_config.json"
        config.write_text("// as DeepSpeed allows it\n" + json.dumps(deepspeed), encoding="utf-8")
    reference = tiny()
    model = copy.deepcopy(reference)
    losses, norms = deepspeeds_training(reference, 8)
    engine, optimizer, loader, scheduler = sluice.initialize(model=model, model_parameters=model.parameters(), config=config,
                                                             units=[Block])
    assert loader is None and engine.optimizer is optimizer and engine.module is model
    assert engine.get_global_grad_norm() is None
    actual, bytes_read = ([], []), 0
    for step in range(8):
        for seen, values in zip(actual, run(engine, 1, first=step)):
            seen.extend(values)
        bytes_read += optimizer.report.nvme_read_bytes
    assert worst(actual[0], losses) <= 2e-6
    assert worst(actual[1], norms) <= 2e-6
    assert scheduler.get_last_lr() == pytest.approx([deepspeeds_rate(8)], rel=1e-12) == engine.get_lr()
    assert (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps) == (8, 16, 64, 0)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (8, 4, 2)
    assert (engine.zero_optimization_stage(), engine.gradient_clipping(), engine.bfloat16_enabled()) == (3, 1.0, False)
    read, written = optimizer._engine.predicted_traffic()
    assert bytes_read > 0 and read > 0 and written > 0  # those of one step may fall into the step before
    engine.eval()
    with torch.no_grad():
        assert worst([engine(*batch(99)).item()], [reference(*batch(99)).item()]) <= 2e-6
    engine.destroy()


def test_deepspeeds_loop_under_small_budgets(deepspeed):
    """Budgets are a quarter of the state, and the bytes of every step but the first are the plan's."""
    reference = tiny(width=128, layers=8)
    model = copy.deepcopy(reference)
    losses, norms = deepspeeds_training(reference, 10)
    more = budgeted({"optimizer": {"overlap": "serial"}}, model, 1344, 1344)
    engine, optimizer, _, _ = sluice.initialize(model=model, config=deepspeed, units=[Block], sluice=more)
    actual = [[], []]
    for step in range(10):
        for seen, values in zip(actual, run(engine, 1, first=step)):
            seen.extend(values)
        if step > 0:
            moves_as_planned(optimizer, micro_batches=2)
    assert worst(actual[0], losses) <= 2e-6
    assert worst(actual[1], norms) <= 2e-6
    engine.destroy()
    with pytest.raises(sluice.ConfigError, match='sluice= says optimizer.clip_norm = 2.0, but the config means 1'):
        sluice.initialize(model=tiny(), config=deepspeed, units=[Block], sluice={"optimizer": {"clip_norm": 2.0}})


def test_keys_of_sluice_beside_those_that_are_there(config):
    """They are compared by what they mean."""
    config["memory"]["device"] = "400K"
    more = {"memory": {"device": 400 << 10, "host": "4 MiB"}}
    engine = sluice.initialize(model=tiny(), config=config, units=[Block], sluice=more)[0]
    assert engine.config["memory"] == {"device": "400K", "host": "4MiB"}
    engine.destroy()
    with pytest.raises(sluice.ConfigError, match='says memory.device = "400KB", but the config means "400K"'):
        sluice.initialize(model=tiny(), config=config, units=[Block], sluice={"memory": {"device": "400KB"}})
    for odd, name in ((torch.tensor(3), "Tensor"), ({1}, "set")):
        with pytest.raises(sluice.ConfigError, match=f"says memory.activations = .*, a {name}; configs have"):
            sluice.initialize(model=tiny(), config=config, units=[Block], sluice={"memory": {"activations": odd}})


@pytest.mark.parametrize("size, expected", [
    (5, 5), ("5", 5), ("2GiB", 2 << 30), ("2G", 2 << 30), ("2GB", 2 * 10**9), ("1.5 kib", 1536), ("0.3KB", 300), ("3 B", 3), ("1TiB", 1 << 40),
    ("0.3KiB", None), ("2Q", None), ("-1", None), ("1.", None), ("", None), (True, None), (1.0, None), (None, None)])
def test_sizes(size, expected):
    assert bytes_of(size) == expected


def test_checkpoints_go_on_with_the_same_bits(deepspeed, tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def make(seed):
        return sluice.initialize(model=tiny(seed), config=deepspeed, units=[Block])[0]
    engine = make(0)
    assert engine.load_checkpoint(tmp_path / "nothing") == (None, None)
    run(engine, 3)
    assert engine.save_checkpoint(tmp_path / "run", client_state={"epoch": 2, "generator": torch.arange(3)})
    assert (tmp_path / "run" / "latest").read_text() == "global_step3"
    # A drive that refuses `latest` is named, and what it said before stays.
    with monkeypatch.context() as refusing:
        refusing.setattr(os, "fsync", refuse)
        with pytest.raises(sluice.StorageError, match=r"cannot write \".*/run/latest\".*; check the drive"):
            engine.save_checkpoint(tmp_path / "run", tag="unnamed")
    assert sorted(os.listdir(tmp_path / "run")) == ["global_step3", "latest", "unnamed"]
    assert (tmp_path / "run" / "latest").read_text() == "global_step3"
    expected = run(engine, 3, first=3)
    with pytest.raises(sluice.ArgumentError, match="no sluice_state.json; the state is as before"):
        engine.load_checkpoint(tmp_path / "run", tag="other")
    for option, words in (("load_module_only", "takes all"), ("load_module_strict", "strict=False would leave")):
        with pytest.raises(sluice.ArgumentError, match=words):
            engine.load_checkpoint(tmp_path / "run", **{option: option == "load_module_only"})
    # Into the same engine, whose state is another by now, and into a new one with other values.
    for resumed in (engine, make(5)):
        path, client = resumed.load_checkpoint(tmp_path / "run")
        assert path == str(tmp_path / "run" / "global_step3")
        assert client["epoch"] == 2 and torch.equal(client["generator"], torch.arange(3))
        assert (resumed.global_steps, resumed.micro_steps) == (3, 6)
        assert resumed.get_lr() == pytest.approx([deepspeeds_rate(3)], rel=1e-12)
        assert run(resumed, 3, first=3) == expected
        resumed.destroy()


@pytest.mark.parametrize("form", ["checkpoint", "store"])
def test_the_number_of_micro_batches_may_change(deepspeed, tmp_path, form):
    """As where the processes become fewer. The first step has all of its micro-batches: 6 are no multiple of 4."""
    deepspeed.pop("train_batch_size")
    store = {"storage": {"state": {"name": "run"}}} if form == "store" else None

    def make(micro_batches, batch=4, seed=0):
        config = deepspeed | {"gradient_accumulation_steps": micro_batches, "train_micro_batch_size_per_gpu": batch}
        return sluice.initialize(model=tiny(seed), config=config, units=[Block], sluice=store, resume=form == "store")[0]
    engine = make(2)
    run(engine, 3)
    if form == "checkpoint":
        engine.save_checkpoint(tmp_path / "run")
    engine.destroy()
    engine = make(4, batch=8, seed=1)
    if form == "checkpoint":
        engine.load_checkpoint(tmp_path / "run")
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 6, 24)
    for micro in range(4):
        assert engine.is_gradient_accumulation_boundary() == (micro == 3)
        engine.backward(engine(*batch(6 + micro)))
        engine.step()
    norm, position = engine.get_global_grad_norm(), (engine.global_steps, engine.micro_steps, engine.global_samples)
    assert position == (4, 10, 24 + 4 * 8)
    if form == "checkpoint":
        engine.save_checkpoint(tmp_path / "run")
        engine.load_checkpoint(tmp_path / "run")
    else:
        engine.destroy()
        engine = make(4, batch=8)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == position
    engine.destroy()
    # The same gradient, of the state of then, as the program's own mean.
    deepspeed["gradient_accumulation_steps"] = 2
    whole = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    run(whole, 3)
    whole.set_gradient_accumulation_boundary(False)
    for micro in range(4):
        whole.set_gradient_accumulation_boundary(micro == 3)
        whole.backward(whole(*batch(6 + micro)) / 4, scale_wrt_gas=False)
        whole.step()
    assert whole.get_global_grad_norm() == norm
    whole.destroy()


def test_restoring_goes_on_with_counts_and_schedule(deepspeed, tmp_path, caplog):
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    run(engine, 3)
    engine.save_checkpoint(tmp_path / "run")
    foreign = engine.optimizer.save(tmp_path / "other")  # of a program with offload()
    expected = run(engine, 2, first=3)
    engine.destroy()
    for folder in (tmp_path / "run" / "global_step3" / "latest", foreign):
        engine = sluice.initialize(model=tiny(1), config=deepspeed, units=[Block], restore=folder)[0]
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 6, 24)
        assert engine.get_lr() == pytest.approx([deepspeeds_rate(3)], rel=1e-12)
        assert ("not of an engine of initialize()" in caplog.text) == (folder == foreign)
        assert run(engine, 2, first=3) == expected
        engine.destroy()


def test_client_states_that_cannot_come_back(deepspeed, tmp_path):
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    with pytest.raises(sluice.ArgumentError, match="client_state"):
        engine.save_checkpoint(tmp_path / "run", client_state={"model": Tiny()})
    with pytest.raises(sluice.ArgumentError, match='"loss" is or has another type: fractions.Fraction$') as raised:
        engine.save_checkpoint(tmp_path / "run", client_state={"epoch": 1, "loss": fractions.Fraction(1)})
    assert "weights_only" not in str(raised.value)
    with pytest.raises(sluice.ArgumentError, match="\"latest\" is the name of the file"):
        engine.save_checkpoint(tmp_path / "run", tag="latest")
    assert not (tmp_path / "run").exists()
    engine(*batch(0)).backward()
    with pytest.raises(sluice.ArgumentError, match="middle of a step"):
        engine.save_checkpoint(tmp_path / "run")
    with pytest.raises(sluice.ArgumentError, match="middle of a step"):
        engine.load_checkpoint(tmp_path, tag="run")
    engine.destroy()


def test_durable_stores_go_on_with_counts_and_schedule(config, tmp_path):
    config["storage"]["state"] = {"name": "run"}
    config["batch"] = {"sequences": 4, "micro_batches": 2}
    config["optimizer"] |= {"schedule": "linear", "schedule_steps": 10, "warmup_steps": 3, "minimum_learning_rate": 1e-4}

    def make(seed):
        return sluice.initialize(model=tiny(seed), config=config, units=[Block], resume=True)[0]
    engine = make(0)
    run(engine, 3)
    engine.destroy()
    again = make(1)
    assert (again.global_steps, again.micro_steps, again.optimizer.resumed_step) == (3, 6, 3)
    actual = run(again, 2, first=3)
    rates = again.get_lr()
    again.destroy()
    config["storage"]["state"] = {"name": "whole"}
    whole = make(0)
    assert run(whole, 5)[0][-4:] == actual[0]
    assert whole.get_lr() == rates
    whole.destroy()


def test_a_skipped_step_is_in_no_commit(config):
    """A store whose last step was skipped goes on from the step before it: with that one's counts and learning rate, from
    which the skipped step is made again."""
    config["storage"]["state"] = {"name": "run"}
    config["batch"] = {"sequences": 4, "micro_batches": 2}
    config["precision"] = {"parameters": "fp16", "loss_scale": {"static": 0, "initial_power": 10}}
    config["optimizer"] |= {"schedule": "linear", "schedule_steps": 10, "warmup_steps": 3, "minimum_learning_rate": 1e-4}

    def make(seed):
        return sluice.initialize(model=tiny(seed), config=config, units=[Block], resume=True)[0]

    def skip(engine):
        for _ in range(2):
            engine.backward(engine(*batch(0)) * float("inf"))
            engine.step()
        assert engine.skipped_steps == 1

    def position(engine):
        return engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.lr_scheduler.last_epoch, engine.get_lr()
    engine = make(0)
    run(engine, 4)
    expected = position(engine)
    skip(engine)
    engine.optimizer.commit()
    engine.destroy()
    engine = make(1)
    assert position(engine) == expected
    skip(engine)  # the first step behind resuming
    engine.destroy()
    engine = make(2)
    assert position(engine) == expected
    engine.destroy()


def test_torchs_optimizers_and_schedulers(config):
    """An optimizer that the program makes says type, hyperparameters and groups; its scheduler goes on."""
    for key in ("learning_rate", "weight_decay", "beta2"):
        config["optimizer"].pop(key)
    reference = tiny()
    model = copy.deepcopy(reference)

    def optimizer_of(net):
        norms = [p for name, p in net.named_parameters() if "norm" in name]
        other = [p for name, p in net.named_parameters() if "norm" not in name]
        return torch.optim.AdamW([{"params": other, "weight_decay": 0.2}, {"params": norms, "lr": 3e-3, "weight_decay": 0.0}],
                                 lr=1e-3, betas=(0.8, 0.99), eps=1e-6)
    theirs, given = optimizer_of(reference), optimizer_of(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for optimizer in (theirs, given)]
    engine, optimizer, _, scheduler = sluice.initialize(model=model, optimizer=given, lr_scheduler=schedulers[1],
                                                        config=config, units=[Block])
    assert scheduler is schedulers[1] and [group["lr"] for group in optimizer.param_groups] == [1e-3, 3e-3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a scheduler moves before its optimizer
        for step in range(5):
            losses = [net(*batch(step)) for net in (reference, engine)]
            assert worst([losses[1].item()], [losses[0].item()]) <= 2e-6
            losses[0].backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            theirs.step()
            theirs.zero_grad()
            schedulers[0].step()
            engine.backward(losses[1])
            engine.step()
    assert engine.get_lr() == pytest.approx([group["lr"] for group in theirs.param_groups], rel=1e-12)
    engine.destroy()
    # A function that makes the scheduler, and one that makes the optimizer.
    config["optimizer"] = {}
    engine = sluice.initialize(model=tiny(), config=config, units=[Block],
                               optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
                               lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))[0]
    engine.backward(engine(*batch(0)))
    engine.step()
    assert engine.get_lr() == [0.25]
    engine.destroy()


def test_param_groups_for_the_configs_optimizer(deepspeed):
    deepspeed.pop("scheduler")
    model = tiny()
    groups = [{"params": [model.embedding.weight], "lr": 1e-4},
              {"params": [p for name, p in model.named_parameters() if name != "embedding.weight"], "weight_decay": 0.0}]
    engine, optimizer, _, scheduler = sluice.initialize(model=model, config=deepspeed, model_parameters=groups, units=[Block])
    assert scheduler is None and engine.get_lr() == pytest.approx([1e-4, RATE])
    assert [group["weight_decay"] for group in engine.config["optimizer"]["groups"]] == [0.1, 0.0]
    engine.destroy()
    with pytest.raises(sluice.ArgumentError, match="no group for blocks"):
        sluice.initialize(model=model, config=deepspeed, model_parameters=[model.embedding.weight, model.positions], units=[Block])
    model = tiny()
    for key, value in (("betas", (0.9, 0.99)), ("eps", 1e-6)):  # also without an lr or weight_decay of any group
        with pytest.raises(sluice.ArgumentError, match=f"not \\['{key}'\\].*config's optimizer"):
            sluice.initialize(model=model, config=deepspeed, model_parameters=[{"params": model.parameters(), key: value}], units=[Block])


@pytest.mark.parametrize("type_name, values, rates", [
    ("WarmupLR", {"warmup_max_lr": 5e-4}, [5e-4, 5e-4]), ("WarmupLR", {}, [1e-4, RATE]), ("WarmupDecayLR", {"total_num_steps": 10**6}, None),
    ("WarmupCosineLR", {"total_num_steps": 10**6}, [1e-4, RATE]),
    ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_momentum": False}, None),
    ("LRRangeTest", {}, None)])
def test_rates_of_groups_under_deepspeeds_schedulers(deepspeed, caplog, type_name, values, rates):
    """WarmupCosineLR multiplies them, and WarmupLR ends at them unless it names a rate. All others give all groups one rate."""
    warmup = {"warmup_num_steps": 2} if type_name.startswith("Warmup") else {}
    deepspeed["scheduler"] = {"type": type_name, "params": {**values, **warmup}}
    deepspeed["gradient_accumulation_steps"], deepspeed["train_batch_size"] = 1, 4
    model = tiny()
    groups = [{"params": [model.embedding.weight], "lr": 1e-4},
              {"params": [p for name, p in model.named_parameters() if name != "embedding.weight"]}]
    engine = sluice.initialize(model=model, config=deepspeed, model_parameters=groups, units=[Block])[0]
    for step in range(4):
        engine.backward(engine(*batch(step)))
        engine.step()
        assert rates is not None or engine.get_lr()[0] == engine.get_lr()[1]
    assert rates is None or engine.get_lr() == pytest.approx(rates, rel=1e-4)
    assert ("the lr of a group has no effect" in caplog.text) == (rates != [1e-4, RATE])
    engine.destroy()


def test_a_start_above_zero_warms_up_no_group_of_its_own(deepspeed):
    deepspeed["scheduler"] = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_num_steps": 2}}
    model = tiny()
    with pytest.raises(sluice.ArgumentError, match="write warmup_min_lr 0"):
        sluice.initialize(model=model, config=deepspeed, units=[Block],
                          model_parameters=[{"params": list(model.parameters()), "lr": 1e-4}])
    engine = sluice.initialize(model=model, config=deepspeed, units=[Block],
                               model_parameters=[{"params": list(model.parameters()), "weight_decay": 0.0}])[0]
    assert engine.get_lr() == [1e-5]
    engine.destroy()


def test_a_warmup_of_no_steps_is_a_scheduler(deepspeed):
    """As its warning says, DeepSpeed warmed up two steps then."""
    deepspeed["scheduler"]["params"]["warmup_num_steps"] = 0
    with pytest.raises(sluice.ArgumentError, match="the config has a schedule"):
        sluice.initialize(model=tiny(), config=deepspeed, units=[Block], lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    engine, _, _, scheduler = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])
    assert scheduler is not None and engine.get_lr() == [0.0]
    engine.destroy()


class Scaled(torch.nn.Module):
    """With a buffer that computation meets."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.5] * 32))
        self.register_buffer("count", torch.tensor(3))
        self.tiny = Tiny()

    def forward(self, tokens, labels):
        x = self.tiny.embedding(tokens) * self.scale.to(self.tiny.embedding.weight.dtype) * self.count
        return torch.nn.functional.cross_entropy(self.tiny.head(self.tiny.blocks[0](x)).flatten(0, 1), labels.flatten())


def test_buffers_keep_their_types(deepspeed):
    """As DeepSpeed has them since it reads data_types.buffer_dtype."""
    deepspeed["bf16"] = {"enabled": True}
    deepspeed["data_types"] = {"keep_in_fp32_modules": "auto"}
    engine = sluice.initialize(model=Scaled(), config=deepspeed, units=[Block])[0]
    assert engine.module.scale.dtype == torch.float32 and engine.module.count.dtype == torch.int64
    assert engine.backward(engine(*batch(0))).dtype == torch.bfloat16
    engine.destroy()
    for section, name in (({"buffer_dtype": "fp32"}, "buffer_dtype"), ({"keep_in_fp32_modules": ["scale"]}, "keep_in_fp32_modules")):
        with pytest.raises(sluice.ConfigError, match=f"data_types.{name} .*buffers keep the program's types"):
            sluice.initialize(model=Scaled(), config=deepspeed | {"data_types": section}, units=[Block])


def test_base64_and_what_needs_no_key(deepspeed, caplog):
    caplog.set_level("INFO", logger="sluice_offload")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        caplog.clear()
        text = encode(json.dumps(deepspeed | {"_comment": "?>?>?>"}).encode()).decode()
        engine = sluice.initialize(model=tiny(), config=text, units=[Block])[0]
        assert engine.train_batch_size() == 8 and re.search(r"not needed: config:1:\d+ zero_optimization.overlap_comm", caplog.text)
        engine.destroy()
    for name in ("ds_config.json", "bm9uZQ=="):  # the second is base64 of another text
        with pytest.raises(FileNotFoundError, match=name):
            sluice.initialize(model=tiny(), config=name)


def test_values_of_a_program(deepspeed):
    """They stand for "auto", and have to be those of the file otherwise; messages have the program's names."""
    found = find_config(deepspeed | {"gradient_clipping": "auto"})
    found_config = found.resolved({"clip_norm": 0.25, "lr": RATE, "micro_batches": 2, "names": {}}).config
    assert found_config["optimizer"]["clip_norm"] == 0.25
    with pytest.raises(sluice.ConfigError, match=r"params.lr 0.001: the file says 0.001, but args.lr is 0.5: write \"auto\""):
        found.resolved({"clip_norm": 0.25, "lr": 0.5, "names": {"lr": "args.lr"}})
    resolved = find_config(deepspeed).resolved()
    assert resolved.has_optimizer and resolved.has_scheduler and "gradient_clipping" in resolved.written
    deepspeed.pop("optimizer")
    assert not find_config(deepspeed).resolved({"lr": RATE}).has_optimizer


@pytest.mark.parametrize("section", [{}, {"cpu_checkpointing": True}])
def test_deepspeeds_activation_checkpointing(deepspeed, caplog, section):
    """It sets up calls that a program makes, and changes nothing by itself."""
    engine, optimizer, _, _ = sluice.initialize(model=tiny(), config={**deepspeed, "activation_checkpointing": section})
    assert "activation_checkpointing" in caplog.text and "torch.utils.checkpoint" in caplog.text
    assert optimizer.activations is None
    engine.backward(engine(*batch(0)))
    optimizer.close()


def test_loaders_of_data(deepspeed):
    data = [tuple(part[0] for part in batch(i, rows=1)) for i in range(8)]
    engine, _, loader, _ = sluice.initialize(model=tiny(), config=deepspeed, training_data=data, units=[Block])
    assert loader is engine.training_dataloader and [len(tokens) for tokens, _ in loader] == [4, 4]
    engine.destroy()
    for drops, expected in ((True, [4]), ("true", [4]), (False, [4, 3])):
        engine, _, loader, _ = sluice.initialize(model=tiny(), config=deepspeed | {"dataloader_drop_last": drops}, training_data=data[:7],
                                                 units=[Block])
        assert [len(tokens) for tokens, _ in loader] == expected
        engine.destroy()


def test_fp16_casts_inputs_in_containers(deepspeed):
    class Pair(NamedTuple):
        tokens: torch.Tensor
        weights: torch.Tensor

    class Own(dict):
        pass

    class Weighted(Tiny):
        def forward(self, given):
            pair, (kept,) = given["pair"], given["kept"]
            assert (type(pair), pair.tokens.dtype, pair.weights.dtype, kept) == (Pair, torch.int64, torch.float16, "text")
            assert given["own"]["weights"].dtype == torch.float16
            return super().forward(pair.tokens, pair.tokens)

    deepspeed["fp16"] = {"enabled": True, "auto_cast": True}
    model = tiny()
    model.__class__ = Weighted
    engine = sluice.initialize(model=model, config=deepspeed, units=[Block])[0]
    tokens = batch(0)[0]
    engine.backward(engine({"pair": Pair(tokens, torch.ones(2)), "kept": ("text",), "own": Own(weights=torch.ones(2))}))
    engine.step()


def test_fp16_scales_the_loss(deepspeed, tmp_path):
    deepspeed["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    assert engine.cur_scale == 1024
    assert engine.fp16_enabled() and next(engine.parameters()).dtype == torch.float16
    losses, norms = run(engine, 3)
    assert engine.cur_scale == 2048  # doubled behind two steps
    bf16 = copy.deepcopy(deepspeed) | {"fp16": {"enabled": False}, "bf16": {"enabled": True}}
    other = sluice.initialize(model=tiny(), config=bf16, units=[Block])[0]
    expected = run(other, 3)
    assert worst(losses, expected[0]) <= 2e-2 and worst(norms, expected[1]) <= 5e-2
    before = (engine.global_steps, engine.get_lr())
    engine.backward(engine(*batch(0)) * float("inf"))
    engine.step()
    engine.backward(engine(*batch(0)))
    engine.step()
    assert engine.skipped_steps == 1 and not engine.was_step_applied()
    assert engine.get_global_grad_norm() == math.inf  # as in DeepSpeed
    assert (engine.global_steps - 1, engine.get_lr()) == before  # the scheduler stands still
    engine.save_checkpoint(tmp_path / "run")
    engine.destroy()
    other.destroy()
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    engine.load_checkpoint(tmp_path / "run")
    assert engine.cur_scale == 2048
    engine.destroy()


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16)])

    def forward(self, inputs, count):
        assert count.dtype == torch.int64
        return self.layers[0](inputs["x"][0]).float().square().mean()


def test_inputs_are_cast_to_fp16_where_the_file_says_so(deepspeed):
    deepspeed["gradient_accumulation_steps"], deepspeed["train_batch_size"] = 1, 4
    inputs = {"x": [torch.ones(4, 16)]}, torch.tensor(3)
    for casts in (True, False):
        deepspeed["fp16"] = {"enabled": True, "auto_cast": casts, "initial_scale_power": 4}
        engine = sluice.initialize(model=Line(), config=deepspeed)[0]
        if casts:
            engine.backward(engine(*inputs))
            engine.step()
            assert engine.was_step_applied()
        else:
            with pytest.raises(RuntimeError, match="dtype"):
                engine(*inputs)
        engine.destroy()
    deepspeed["fp16"] = {"enabled": False, "auto_cast": True}
    engine = sluice.initialize(model=Line(), config=deepspeed)[0]
    assert engine.backward(engine(*inputs)).dtype == torch.float32
    engine.destroy()


def test_boundaries_of_the_programs_own(deepspeed):
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(3):
        engine.backward(engine(*batch(0)))
        engine.step()
    assert engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert engine.global_steps == 1 and engine.get_global_grad_norm() > 0
    with pytest.raises(sluice.ArgumentError, match="without a backward"):
        engine.step()
    engine.destroy()


def test_samples_are_those_of_updates(deepspeed, tmp_path):
    """As in DeepSpeed, each update has those of a whole batch: with one step() for all micro-batches, too."""
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    for update in range(2):
        for micro in range(2):
            engine.set_gradient_accumulation_boundary(micro == 1)
            engine.backward(engine(*batch(2 * update + micro)))
        engine.step()
    assert (engine.global_steps, engine.global_samples) == (2, 16)
    engine.save_checkpoint(tmp_path)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(*batch(4)))
    engine.step()
    assert engine.global_samples == 16
    engine.zero_grad()
    engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, engine.global_samples) == (2, 16)
    engine.destroy()


def test_gradients_that_came_past_the_engine_are_refused(deepspeed):
    """loss.backward() divides by no micro-batches. step() raises before it changes anything, and zero_grad() drops the gradients."""
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    whole = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]

    def refused():
        before = engine.global_steps, engine.micro_steps, engine.global_samples, engine.get_lr()
        for _ in range(2):
            with pytest.raises(sluice.ArgumentError, match=r"which divides the loss by the 2 micro-batches of a step; call engine.backw"):
                engine.step()
        assert (engine.global_steps, engine.micro_steps, engine.global_samples, engine.get_lr()) == before
    engine(*batch(7)).backward()
    refused()
    engine.zero_grad()
    assert run(engine, 2) == run(whole, 2)
    engine.backward(engine(*batch(7)))  # one that came right
    engine.step()
    for _ in range(2):
        engine.module(*batch(8)).backward()
    refused()
    engine.zero_grad()
    for is_boundary in (False, True):
        engine.set_gradient_accumulation_boundary(is_boundary)
        engine(*batch(7)).backward()
        refused()
        engine.optimizer.zero_grad()
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(*batch(4)))
    engine.step()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*batch(5)))
    engine.step()
    run(whole, 1, first=2)
    assert engine.get_global_grad_norm() == whole.get_global_grad_norm()
    for one in (engine, whole):
        one.destroy()


@pytest.mark.parametrize("scale", [0, 128])
def test_gradients_without_the_loss_scale_are_refused(deepspeed, scale):
    deepspeed["gradient_accumulation_steps"], deepspeed["train_batch_size"] = 1, 4
    deepspeed["fp16"] = {"enabled": True, "loss_scale": scale, "initial_scale_power": 10}
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    engine(*batch(0)).backward()
    with pytest.raises(sluice.ArgumentError, match=f"which multiplies the loss with the loss scale, {scale or 1024}; call"):
        engine.step()
    assert engine.global_steps == 0
    engine.zero_grad()
    engine.backward(engine(*batch(0)))
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied()
    engine.destroy()


def test_one_micro_batch_without_a_scale_needs_no_engine_backward(deepspeed):
    deepspeed["gradient_accumulation_steps"], deepspeed["train_batch_size"] = 1, 4
    engines = [sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0] for _ in range(2)]
    for step in range(3):
        engines[0](*batch(step)).backward()
        engines[1].backward(engines[1](*batch(step)))
        for engine in engines:
            engine.step()
        assert engines[0].get_global_grad_norm() == engines[1].get_global_grad_norm()
    for engine in engines:
        engine.destroy()


class Checkpointed(torch.nn.Module):
    """Backward computes each layer again, in a backward of its own inside of the loss's."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        return x


def checkpointed():
    torch.manual_seed(0)
    return Checkpointed()


@pytest.mark.parametrize("precision, micro_batches", [("fp32", 2), ("bf16", 3), ("fp16", 2)])
def test_scale_prepares_a_loss_for_a_backward_of_the_programs_own(deepspeed, precision, micro_batches):
    deepspeed["gradient_accumulation_steps"], deepspeed["train_batch_size"] = micro_batches, 4 * micro_batches
    if precision != "fp32":
        deepspeed[precision] = {"enabled": True, **({"initial_scale_power": 10} if precision == "fp16" else {})}
    engines = [sluice.initialize(model=checkpointed(), config=deepspeed)[0] for _ in range(2)]

    def loss_of(engine, seed):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(next(engine.parameters()).dtype)
        return engine(x.requires_grad_()).float().square().mean()
    for step in range(3):
        for micro in range(micro_batches):
            losses = [loss_of(engine, micro_batches * step + micro) for engine in engines]
            scaled = engines[1].scale(losses[1])
            assert scaled.item() == losses[1].item() * (1024 if precision == "fp16" else 1)
            engines[0].backward(losses[0])
            scaled.backward()
            for engine in engines:
                engine.step()
        assert engines[0].get_global_grad_norm() == engines[1].get_global_grad_norm() > 0
        assert engines[0].cur_scale == engines[1].cur_scale
    # One that was scaled speaks for no other.
    scaled = engines[1].scale(loss_of(engines[1], 0))
    scaled.backward()
    loss_of(engines[1], 1).backward()
    with pytest.raises(sluice.ArgumentError, match=r"gradients of a loss.backward\(\) without the engine"):
        engines[1].step()
    for wrong in (loss_of(engines[0], 0).detach(), torch.ones(2, requires_grad=True) * 2, 0.5):
        with pytest.raises(sluice.ArgumentError, match=r"scale\(\) takes a loss: a tensor of one number, with a gradient"):
            engines[0].scale(wrong)
    for engine in engines:
        engine.destroy()


def test_gradients_of_inputs_are_none_of_the_step(deepspeed):
    engine = sluice.initialize(model=checkpointed(), config=deepspeed)[0]
    x = torch.ones(4, 16, requires_grad=True)
    for _ in range(2):
        assert torch.autograd.grad(engine.module.layers[1](x).sum(), x)[0].shape == x.shape
        engine.backward(engine(x).square().mean())
        engine.step()
    assert engine.global_steps == 1
    engine.destroy()


@pytest.mark.parametrize("type_name, values", [
    ("WarmupLR", {"warmup_num_steps": 100, "warmup_type": "linear", "warmup_max_lr": RATE}),
    ("WarmupDecayLR", {"total_num_steps": 50, "warmup_num_steps": 10}), ("WarmupCosineLR", {"total_num_steps": 50, "warmup_num_steps": 10}),
    ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 20, "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_step_size": 5})])
def test_schedulers_go_to_deepspeeds_numbers(deepspeed, type_name, values):
    """DeepSpeed's last_batch_iteration is -1 before the first step() and n behind step(n)."""
    deepspeed["scheduler"] = {"type": type_name, "params": values}
    engine, _, _, scheduler = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])
    rates = []
    for last in range(30):
        assert scheduler.state_dict()["last_batch_iteration"] == last - 1
        scheduler.step()
        rates.append(engine.get_lr())
    for last in (10, 0, 29, 3):
        scheduler.step(last)
        assert engine.get_lr() == rates[last]
        scheduler.load_state_dict({"last_batch_iteration": last - 1})
        scheduler.step()
        assert engine.get_lr() == rates[last]
        scheduler.load_state_dict({"last_epoch": last})  # as checkpoints had it before
        scheduler.step()
        assert engine.get_lr() == rates[last]
    if type_name == "WarmupLR":
        scheduler.step(10)
        assert engine.get_lr() == pytest.approx([1e-4], rel=1e-12)
    engine.destroy()


def test_schedules_of_sluices_own_count_as_torch_does(config):
    config["optimizer"] |= {"schedule": "linear", "schedule_steps": 20, "warmup_steps": 10, "minimum_learning_rate": 1e-4}
    engine, _, _, scheduler = sluice.initialize(model=tiny(), config=config, units=[Block])
    for _ in range(7):
        scheduler.step()
    expected = engine.get_lr()
    scheduler.step(3)
    scheduler.step(7)
    assert engine.get_lr() == expected and scheduler.state_dict() == {"last_epoch": 7}
    engine.destroy()


def test_monitors_that_are_on_have_a_warning(deepspeed, caplog):
    sections = {"tensorboard": {"enabled": True, "output_path": "x"}, "csv_monitor": {"enabled": False}, "wandb": {},
                "comet": {"enabled": "true"}, "flops_profiler": {"enabled": True}, "comms_logger": {"enabled": True, "verbose": False},
                "wall_clock_breakdown": True}
    sluice.initialize(model=tiny(), config=deepspeed | sections, units=[Block])[0].destroy()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and said[0].startswith("the DeepSpeed config turns on tensorboard, comet, flops_profiler, comms_logger and "
                                                 "wall_clock_breakdown, ")
    assert "sluice_offload.log_steps(optimizer, log)" in said[0] and "sluice_offload.trace(" in said[0]
    caplog.clear()
    off = {"tensorboard": {"enabled": False}, "wall_clock_breakdown": False, "steps_per_print": 1}
    sluice.initialize(model=tiny(), config=deepspeed | off, units=[Block])[0].destroy()
    assert not caplog.records


def test_what_is_refused(deepspeed, config):
    def refused(error, words, model=None, **arguments):
        fresh = model or tiny()
        with pytest.raises(error, match=words):
            sluice.initialize(model=fresh, units=[Block], **arguments)
        assert torch.isfinite(fresh(*batch(0)))
    refused(sluice.ArgumentError, "config= is missing")
    refused(sluice.ConfigError, "optimizer.type.*Lamb", config=deepspeed | {"optimizer": {"type": "Lamb", "params": {}}})
    refused(sluice.ConfigError, "torch_autocast.*compute under torch.autocast in the program",
            config=deepspeed | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    refused(sluice.ArgumentError, "takes no lr: write optimizer.learning_rate, or optimizer.params.lr", config=deepspeed, lr=0.1)
    refused(sluice.ConfigError, "zero_optimisation", config=deepspeed | {"zero_optimisation": {}})
    automatic = deepspeed | {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    refused(sluice.ConfigError, r'train_micro_batch_size_per_gpu(?s:.*)auto=\{"batch": 4\}', config=automatic)
    engine = sluice.initialize(model=tiny(), config=automatic, auto={"batch": 6 / 2}, units=[Block])[0]
    assert engine.train_batch_size() == 6
    engine.destroy()
    refused(sluice.ArgumentError, "\"btch\" is none of", config=automatic, auto={"btch": 3})
    for wrong in (-3, 2.5, 0, True, "3"):
        refused(sluice.ArgumentError, r'"batch" is .*; it must be a whole number between 1 and', config=automatic, auto={"batch": wrong})
    refused(sluice.ArgumentError, "no DeepSpeed config", config=config, auto={"batch": 3})
    model = tiny()
    given = torch.optim.AdamW(model.parameters())
    refused(sluice.ArgumentError, "the config has a schedule", model=model, config=deepspeed, optimizer=given)
    deepspeed.pop("scheduler")
    refused(sluice.ArgumentError, "optimizer.type, and a AdamW is given", model=model, config=deepspeed, optimizer=given)
    refused(sluice.ArgumentError, "which ends at some update", config=config | {"optimizer": {"schedule": "cosine"}})
    refused(sluice.ArgumentError, "mpu", config=config, mpu=object())
    deepspeed.pop("optimizer")
    refused(sluice.ArgumentError, "AdamW does the work|RMSprop", model=model, config=deepspeed,
            optimizer=torch.optim.RMSprop(model.parameters()))
    refused(sluice.ArgumentError, "amsgrad", model=model, config=deepspeed,
            optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True))
    refused(sluice.ArgumentError, "no group for positions and others|no group for", model=model, config=deepspeed,
            optimizer=torch.optim.AdamW([model.embedding.weight]))
    refused(sluice.ArgumentError, "none of the model's", model=model, config=deepspeed,
            optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    halves = [list(model.parameters())[:2], list(model.parameters())[2:]]
    refused(sluice.ArgumentError, "betas is .* in group 1", model=model, config=deepspeed,
            optimizer=torch.optim.AdamW([{"params": halves[0]}, {"params": halves[1], "betas": (0.5, 0.5)}]))
    model(*batch(0)).backward()
    given.step()
    refused(sluice.ArgumentError, "made steps already", model=model, config=deepspeed, optimizer=given)


def test_what_fails_late_leaves_the_model_as_before(config):
    model = tiny()
    data = [tuple(part[0] for part in batch(i, rows=1)) for i in range(8)]
    with pytest.raises(sluice.ArgumentError, match="how large a micro-batch is"):
        sluice.initialize(model=model, config=config, units=[Block], training_data=data)
    falls = {**config, "optimizer": {"learning_rate": 2e-5, "schedule": "cosine", "schedule_steps": 100}}  # ends at 1e-4
    with pytest.raises(sluice.ConfigError, match="minimum_learning_rate"):
        sluice.initialize(model=model, config=falls, units=[Block])
    engine = sluice.initialize(model=model, config=config, units=[Block])[0]
    engine.backward(engine(*batch(0)))
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("kind", ["deepspeed", "config"])
@pytest.mark.parametrize("keys, words", [
    ({"batch": {"micro_batchs": 4}}, 'unknown key "batch.micro_batchs"; did you mean "batch.micro_batches"'),
    ({"batch": {"order": "nonsense"}}, '"batch.order" is "nonsense", but must be one of'), ({"optimizer": {"warmup": "lgo"}}, '"optimizer.warmup" is "lgo", but must be one of'),
    ({"optimizer": {"schedule_count": "x"}}, '"optimizer.schedule_count" is "x", but must be one of'),
    ({"optimizer": {"one_cycle": {"frist_steps": 1}}}, 'unknown key "optimizer.one_cycle.frist_steps"')])
def test_keys_that_offload_does_not_see_are_checked(request, kind, keys, words):
    config = request.getfixturevalue(kind)
    config.pop("scheduler", None)
    with pytest.raises(sluice.ConfigError, match=re.escape(words)):
        sluice.initialize(model=tiny(), config=config, units=[Block], sluice=keys)


def test_a_step_whose_gradients_are_gone_begins_anew(deepspeed, caplog):
    """Behind a step() that raised, and behind a zero_grad() amid the micro-batches."""
    raises = {**deepspeed, "zero_optimization": {"stage": 0}}  # where DeepSpeed skips no step in fp32
    engine = sluice.initialize(model=tiny(), config=raises, units=[Block])[0]
    run(engine, 1)
    with pytest.raises(sluice.NonFiniteError):
        for scale in (1.0, math.nan):
            engine.backward(engine(*batch(0)) * scale)
            engine.step()
    engine.zero_grad()
    assert "zero_grad" not in caplog.text
    run(engine, 1, first=1)  # with both of its micro-batches
    engine.backward(engine(*batch(0)))
    engine.step()
    engine.zero_grad()
    assert "the gradients of the step's 1 micro-batches are gone" in caplog.text
    assert "in front of every micro-batch never gets an update, which needs 2 of them" in caplog.text
    run(engine, 1, first=2)
    assert engine.global_steps == 3
    engine.destroy()


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(6))


def test_data_that_come_one_after_the_other(deepspeed):
    loader = sluice.initialize(model=tiny(), config=deepspeed, units=[Block], training_data=_Stream())[2]
    assert [part.tolist() for part in loader] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("size", [8, 7])
def test_data_come_in_deepspeeds_order(deepspeed, size):
    """That of a DistributedSampler of one process, which torch's generator does not change. Each epoch has the same."""
    data = list(range(size))
    sampler = torch.utils.data.DistributedSampler(data, 1, 0)
    for seed in (0, 1):
        torch.manual_seed(seed)
        engine, _, loader, _ = sluice.initialize(model=tiny(), config=deepspeed, units=[Block], training_data=data)
        torch.manual_seed(seed)
        for epoch in (0, 0, 1):
            if epoch > 0:
                loader.sampler.set_epoch(epoch)
            sampler.set_epoch(epoch)
            assert torch.cat(list(loader)).tolist() == list(sampler)
        engine.destroy()


def test_data_without_a_loader_leave_the_model_as_before(deepspeed):
    model = tiny()
    for data, error, words in (([], sluice.ArgumentError, "training_data= has no entries"), (object(), TypeError, "no len")):
        with pytest.raises(error, match=words):
            sluice.initialize(model=model, config=deepspeed, units=[Block], training_data=data)
    sluice.initialize(model=model, config=deepspeed, units=[Block])[0].destroy()


def test_a_scheduler_that_cannot_go_on_from_the_checkpoints_is_named(deepspeed, tmp_path):
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])[0]
    run(engine, 1)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    deepspeed.pop("scheduler")

    def constant(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(sluice.ArgumentError, match="LambdaLR cannot go on from the scheduler of the checkpoint, whose state has last_epoch"):
        sluice.initialize(model=tiny(), config=deepspeed, units=[Block], lr_scheduler=constant, restore=tmp_path / "global_step1" / "latest")
    engine = sluice.initialize(model=tiny(), config=deepspeed, units=[Block], lr_scheduler=constant)[0]
    with pytest.raises(sluice.ArgumentError, match="LambdaLR cannot go on"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


def test_a_function_that_fails_leaves_no_engine(config):
    def fail(optimizer):
        made.append(optimizer)
        raise KeyError("mine")
    made = []
    config["optimizer"].pop("learning_rate")
    with pytest.raises(KeyError, match="mine"):
        sluice.initialize(model=tiny(), config=config, units=[Block], lr_scheduler=fail)
    with pytest.raises(sluice.SluiceError, match="closed"):
        made[0].step()


@pytest.mark.parametrize("section", [None, {}, {"legacy_fusion": False}])
def test_adamw_is_what_a_config_without_optimizer_means(deepspeed, caplog, section):
    deepspeed.pop("optimizer")
    deepspeed.pop("scheduler")
    if section is not None:
        deepspeed["optimizer"] = section
    engine, _, _, scheduler = sluice.initialize(model=tiny(), config=deepspeed, units=[Block])
    assert "the file has no optimizer" in caplog.text
    assert engine.get_lr() == [1e-3] and scheduler is None
    engine.destroy()
    engine, _, _, scheduler = sluice.initialize(model=tiny(), config=deepspeed, units=[Block], auto={"lr": 0.5})
    assert engine.get_lr() == [0.5] and scheduler is None
    engine.destroy()


@pytest.mark.parametrize("is_function", [False, True])
def test_an_optimizer_of_the_program_needs_no_warning(deepspeed, caplog, is_function):
    deepspeed.pop("optimizer")
    deepspeed.pop("scheduler")
    model = tiny()
    given = torch.optim.AdamW if is_function else torch.optim.AdamW(model.parameters())
    engine = sluice.initialize(model=model, config=deepspeed, units=[Block], optimizer=given)[0]
    assert not caplog.records
    engine.destroy()


def test_values_that_json_has_not(deepspeed):
    """As accelerate has them in its dictionaries."""
    engine = sluice.initialize(model=tiny(), config=deepspeed | {"steps_per_print": math.inf}, units=[Block])[0]
    assert engine.gradient_accumulation_steps() == 2
    engine.destroy()
    for key, value, words in (("gradient_clipping", math.nan, 'gradient_clipping "nan": it is "nan", but must be a number'),
                              ("communication_data_type", torch.bfloat16, "says communication_data_type = torch.bfloat16, a dtype")):
        with pytest.raises(sluice.ConfigError, match=words):
            sluice.initialize(model=tiny(), config=deepspeed | {key: value}, units=[Block])
    with pytest.raises(sluice.ConfigError, match=r"says optimizer.params.betas = tensor\(0.9"):
        deepspeed["optimizer"]["params"]["betas"] = [torch.tensor(0.9), 0.95]
        sluice.initialize(model=tiny(), config=deepspeed, units=[Block])


def test_plain_configs_and_adamw_agree(config):
    """Sluice's own config through the same face."""
    reference = tiny()
    engine = sluice.initialize(model=copy.deepcopy(reference), config=config, units=[Block])[0]
    optimizer = adamw(reference, config)
    for step in range(3):
        losses = [net(*batch(step)) for net in (reference, engine)]
        assert worst([losses[1].item()], [losses[0].item()]) <= 2e-6
        losses[0].backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(losses[1])
        engine.step()
    with pytest.raises(sluice.ArgumentError, match="how large a micro-batch is"):
        engine.train_batch_size()
    engine.destroy()


def test_a_config_whose_name_is_no_utf8(deepspeed, tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/ds\xff.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(deepspeed, file)
    engine = sluice.initialize(model=tiny(), config=path, units=[Block])[0]
    assert engine.gradient_accumulation_steps() == 2
    engine.destroy()


def test_other_calls_of_deepspeed_have_a_hint():
    for name, words in (("init_distributed", "init_process_group"), ("zero", "meta_parameters"), ("checkpointing", "activations")):
        with pytest.raises(AttributeError, match=words):
            getattr(sluice, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
        sluice.nothing
