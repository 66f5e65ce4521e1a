"""DeepSpeed's config files in the Trainer of transformers and in Lightning: what "auto" becomes, and what contradicts it."""

import json
import math
import re

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

import sluice_offload as sluice
import sluice_offload.lightning
from conftest import Block, tiny, worst
from sluice_offload.transformers import Trainer
from test_lightning import fit, small
from test_transformers import arguments, gpt2, logs, rows

RATE, WARMUP, STEPS = 1e-3, 2, 6
KEYS = {"memory": {"device": "400KiB", "host": "4MiB"}, "optimizer": {"overlap": "serial"}}


def automatic(tmp_path, **more):
    """The file of transformers' own documentation, in its parts."""
    home = {"device": "nvme", "nvme_path": str(tmp_path)}
    return {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto", "steps_per_print": 2000,
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 3, "offload_optimizer": home, "offload_param": home, "overlap_comm": True,
                                  "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                                  "stage3_param_persistence_threshold": "auto"}, **more}


ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
SCHEDULERS = {
    "WarmupLR": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    "WarmupDecayLR": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}


def rate(kind, update):
    """DeepSpeed's rate at `update`, counted from 0, as a part of the whole one: its engine moves the scheduler behind each update."""
    behind = max(0, update - 1)
    if behind < WARMUP:
        return math.log(behind + 1) / math.log(WARMUP)
    return 1.0 if kind == "WarmupLR" else (STEPS - behind) / (STEPS - WARMUP)


def made(tmp_path, config, model=None, keys=None, **options):
    return Trainer(model=model or gpt2(), args=arguments(tmp_path, **options), train_dataset=rows(), eval_dataset=rows(4),
                   sluice=config, sluice_keys=KEYS if keys is None else keys)


@pytest.mark.parametrize("kind", list(SCHEDULERS))
def test_auto_is_what_the_arguments_say(tmp_path, kind):
    """Optimizer and scheduler are DeepSpeed's: every tensor is decayed, and the warm-up is logarithmic. Resuming has the same bits."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(automatic(tmp_path, optimizer=ADAMW, scheduler={"type": kind, "params": SCHEDULERS[kind]})))
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), eps=1e-7, weight_decay=0.1)
    options = {"adam_beta2": 0.98, "adam_epsilon": 1e-7}
    reference = transformers.Trainer(
        model=model, args=arguments(tmp_path, **options), train_dataset=rows(), eval_dataset=rows(4),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rate(kind, update))))
    reference.train()
    whole = made(tmp_path / "ours", file, **options)
    whole.train()
    for key in ("loss", "grad_norm", "eval_loss"):
        assert worst(logs(whole, key), logs(reference, key)) <= 2e-6, key
    assert logs(whole, "learning_rate") == pytest.approx(logs(reference, "learning_rate"), rel=1e-12)
    assert len(set(logs(whole, "learning_rate"))) > 1 and whole._sluice.report.nvme_write_bytes > 0

    again = made(tmp_path / "ours", file, gpt2(seed=9), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "out" / "checkpoint-3"))
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logs(again, key) == logs(whole, key), key
    for trainer in (whole, again):
        trainer._sluice.close()


def test_what_the_file_leaves_to_the_arguments(tmp_path):
    """Without optimizer and scheduler: the same bits as with Sluice's own config."""
    own = {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "storage": {"paths": [str(tmp_path)]}, **KEYS}
    plain, ours = made(tmp_path / "plain", own, keys={}), made(tmp_path / "ours", automatic(tmp_path))
    for trainer in (plain, ours):
        trainer.train()
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logs(ours, key) == logs(plain, key), key
    # The scheduler of `args` with DeepSpeed's optimizer.
    mixed = made(tmp_path / "mixed", automatic(tmp_path, optimizer=ADAMW))
    mixed.train()
    assert logs(mixed, "learning_rate") == logs(plain, "learning_rate") and logs(mixed, "loss") != logs(plain, "loss")
    # DeepSpeed's scheduler with the optimizer of `args`.
    other = made(tmp_path / "other", automatic(tmp_path, scheduler={"type": "WarmupLR", "params": SCHEDULERS["WarmupLR"]}))
    other.train()
    assert logs(other, "learning_rate") == pytest.approx([RATE * rate("WarmupLR", update) for update in range(STEPS)])
    for trainer in (plain, ours, mixed, other):
        trainer._sluice.close()


def test_bf16_is_that_of_the_parameters(tmp_path):
    """As in DeepSpeed, without autocast around it."""
    own = {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "storage": {"paths": [str(tmp_path)]},
           "precision": {"parameters": "bf16"}, **KEYS}
    plain = made(tmp_path / "plain", own, keys={})
    plain.train()
    AcceleratorState._reset_state(True)  # the process's precision, which the first Trainer has set
    ours = made(tmp_path / "ours", automatic(tmp_path), bf16=True)
    assert ours.accelerator.native_amp
    ours.train()
    AcceleratorState._reset_state(True)
    assert plain._sluice._engine.dtype == ours._sluice._engine.dtype == torch.bfloat16
    assert logs(ours, "loss") == logs(plain, "loss") and logs(ours, "eval_loss") == logs(plain, "eval_loss")
    for trainer in (plain, ours):
        trainer._sluice.close()


@pytest.mark.parametrize("change, words", [
    ({"train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu 3: the file says 3, but args.per_device_train_batch_size is 2"),
    ({"gradient_accumulation_steps": 4}, "the file says 4, but args.gradient_accumulation_steps is 2"),
    ({"train_batch_size": 5}, "train_batch_size 5: it is 5, but .* 2 x .* 2 x 1 ranks are 4"),
    ({"gradient_clipping": 0.5}, "the file says 0.5, but args.max_grad_norm is 1.0"),
    ({"bf16": {"enabled": True}}, "the file says bf16, but the type by args.bf16 and args.fp16 is fp32"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}, "optimizer.params.lr 3e-05: .*args.learning_rate is 0.001"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.999]}}}, r"\[0.8,0.999\], but \[args.adam_beta1, .* is \[0.9,0.999\]"),
    ({"optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}}, "1e-06, but args.adam_epsilon is 1e-08"),
    ({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0}}}, "weight_decay 0: the file says 0.*args.weight_decay is 0.1"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": "auto"}}}, "0.5, but args.learning_rate is 0.001"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}, "7, but args.warmup_steps is 2"),
    ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": "auto"}}},
     "9, but the number of steps by args is 6"),
    ({"optimizer": {"type": "Lamb", "params": {}}}, "optimizer.type.*Lamb"),
    ({"zero_optimisation": {}}, "zero_optimisation.*zero_optimization"),
])
def test_contradictions_name_both_values(tmp_path, change, words):
    model = gpt2()
    with pytest.raises(sluice.ConfigError, match=words):
        made(tmp_path, automatic(tmp_path, **change), model).train()
    assert not hasattr(model, "_sluice")


def test_other_refusals_and_what_is_not_needed(tmp_path, caplog):
    caplog.set_level("INFO", logger="sluice_offload")
    with pytest.raises(sluice.ConfigError, match=r"sluice_keys= says sharding.stage = 1, but the config means 3"):
        made(tmp_path, automatic(tmp_path), keys={"sharding": {"stage": 1}}).train()
    assert re.search(r"not needed: config:1:\d+ steps_per_print", caplog.text) and "overlap_comm" in caplog.text
    with pytest.raises(sluice.ArgumentError, match="fp16.enabled: this Trainer does not scale"):
        made(tmp_path, automatic(tmp_path), fp16_full_eval=True).train()
    with pytest.raises(sluice.ArgumentError, match="args.fp16_full_eval is True"):
        made(tmp_path, automatic(tmp_path), bf16=True, fp16_full_eval=True).train()
    model = gpt2()
    given = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(given)
    with pytest.raises(sluice.ArgumentError, match="has a scheduler, and optimizers= has one"):
        Trainer(model=model, args=arguments(tmp_path), train_dataset=rows(), eval_dataset=rows(4), optimizers=(given, schedule),
                sluice=automatic(tmp_path, scheduler={"type": "WarmupLR", "params": SCHEDULERS["WarmupLR"]})).train()


def strategy(tmp_path, config):
    keys = {key: value for key, value in small(tmp_path).items() if key != "storage"}
    return sluice.lightning.SluiceStrategy(config, units=[Block], keys=keys)


def test_lightning(tmp_path):
    """The optimizer and the scheduler of configure_optimizers train."""
    options = {"enable_checkpointing": False}
    plain = sluice.lightning.SluiceStrategy(small(tmp_path), placement="nvme", units=[Block])
    expected, one = fit(tmp_path, tiny(), plain, 4, **options)
    file = automatic(tmp_path, optimizer=ADAMW)
    file |= {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 8}  # its loader has no batch_size
    module, two = fit(tmp_path, tiny(), strategy(tmp_path, file), 4, **options)
    assert module.losses == expected.losses
    assert two.strategy.offloaded.report.nvme_write_bytes > 0 and two.strategy.offloaded.clip_norm == 0.5
    for made_one in (one, two):
        made_one.strategy.offloaded.close()


@pytest.mark.parametrize("change, words", [
    ({"gradient_accumulation_steps": 4}, "4, but the Trainer's accumulate_grad_batches is 2"),
    ({"gradient_clipping": 1.0}, "1.0, but the Trainer's gradient_clip_val is 0.5"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, "0.5, but lr in configure_optimizers is 0.001"),
    ({"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}, "means sgd, but configure_optimizers makes adamw"),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler: here configure_optimizers makes it"),
    ({"train_batch_size": 7}, "7, but .* 4 x .* 2 x 1 ranks are 8"),
])
def test_what_lightning_refuses(tmp_path, change, words):
    file = automatic(tmp_path) | {"train_micro_batch_size_per_gpu": 4, **change}
    with pytest.raises((sluice.ConfigError, sluice.ArgumentError), match=words):
        fit(tmp_path, tiny(), strategy(tmp_path, file), 2, enable_checkpointing=False)
    with pytest.raises(sluice.ArgumentError, match="leave placement= out"):
        sluice.lightning.SluiceStrategy(file, placement="nvme")
