"""transformers: the Trainer, Accelerate and peft, with tiny random models and no downloads."""

import copy
import importlib.util
import json
import os
import signal
import time

import pytest
import torch
import transformers
from accelerate import Accelerator

import sluice_offload as sluice
from conftest import budgeted, moves_as_planned, watch_steps, worst
from sluice_offload.transformers import Trainer
from test_unlent import Encoder, Relative

transformers.utils.logging.set_verbosity_error()


def gpt2(seed=0, width=32, layers=3):
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=61, n_positions=16, n_embd=width, n_layer=layers, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, pad_token_id=0))


@pytest.fixture
def settings(tmp_path):
    return {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "memory": {"device": "400KiB", "host": "4MiB"},
            "storage": {"paths": [str(tmp_path)]}, "optimizer": {"overlap": "serial"}}


def rows(count=22):
    generator = torch.Generator().manual_seed(5)
    return [{"input_ids": row, "labels": row} for row in torch.randint(1, 61, (count, 12), generator=generator)]


def arguments(tmp_path, **options):
    made = {"output_dir": str(tmp_path / "out"), "max_steps": 6, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0,
            "lr_scheduler_type": "linear", "warmup_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3,
            "save_strategy": "steps", "save_steps": 3, "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3,
            "dataloader_num_workers": 1, "optim": "adamw_torch"}
    return transformers.TrainingArguments(**(made | options))


def logs(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_on_storage(tmp_path, settings, reentrant):
    """With the Trainer's own checkpoints, evaluation between steps included."""
    def run(name, **extra):
        made = Trainer(model=gpt2(), args=arguments(tmp_path / name, gradient_checkpointing=True, max_steps=3, save_strategy="no",
                                                    per_device_train_batch_size=4,
                                                    gradient_checkpointing_kwargs={"use_reentrant": reentrant}),
                       train_dataset=rows(), eval_dataset=rows(4), sluice={**settings, **extra})
        made.train()
        return made
    reference, made = run("memory"), run("storage", activations="nvme")
    for key in ("loss", "grad_norm", "eval_loss"):
        assert logs(made, key) == logs(reference, key), key
    store = made._sluice.activations
    assert store.written_bytes > 0 and store.contexts == 6  # 3 steps of 2 micro-batches
    for one in (reference, made):
        one._sluice.close()


def test_trainer_logs_saves_and_resumes(tmp_path, settings):
    """Accumulation, a schedule, clipping, the norm in the logs, evaluation, saving, resuming."""
    reference = transformers.Trainer(model=gpt2(), args=arguments(tmp_path), train_dataset=rows(), eval_dataset=rows(4))
    reference.train()
    whole = Trainer(model=gpt2(), args=arguments(tmp_path / "ours"), train_dataset=rows(), eval_dataset=rows(4), sluice=settings)
    whole.train()
    for key in ("loss", "grad_norm", "eval_loss"):
        assert worst(logs(whole, key), logs(reference, key)) <= 2e-6, key
    assert logs(whole, "learning_rate") == logs(reference, "learning_rate")
    assert len(logs(whole, "grad_norm")) == 6 and len(logs(whole, "eval_loss")) == 2
    optimizer = whole._sluice
    read, written = optimizer._engine.predicted_traffic()
    assert optimizer.report.nvme_write_bytes == written > 0 and read > 0
    # The saved model is a model of transformers.
    folder = tmp_path / "ours" / "out" / "checkpoint-6"
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder)
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())

    again = Trainer(model=gpt2(seed=9), args=arguments(tmp_path / "ours"), train_dataset=rows(), eval_dataset=rows(4),
                    sluice=settings)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "out" / "checkpoint-3"))
    assert logs(again, "loss") == logs(whole, "loss") and logs(again, "grad_norm") == logs(whole, "grad_norm")
    assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())
    for trainer in (whole, again):
        trainer._sluice.close()


@pytest.mark.parametrize("kind", ["Sluice's", "transformers'"])
def test_budgets_of_a_quarter(tmp_path, settings, kind, monkeypatch):
    """From the second step on, the bytes of every step are the plan's, also behind an evaluation."""
    planned = watch_steps(monkeypatch, micro_batches=2)
    reference, model = gpt2(width=64, layers=8), gpt2(width=64, layers=8)
    budgeted(settings, model, 700, 800)

    def trained(kind, model, optimizer=None, **options):
        if optimizer is not None:
            options["optimizers"] = (optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 2, 8))
        made = kind(model=model, train_dataset=rows(40), eval_dataset=rows(4), args=arguments(
            tmp_path, max_steps=8, eval_steps=4, save_strategy="no"), **options)
        made.train()
        return made
    if kind == "Sluice's":
        expected, made = trained(transformers.Trainer, reference), trained(Trainer, model, sluice=settings)
    else:
        settings["optimizer"] |= {"clip_norm": 1.0, "clip_epsilon": 1e-6}
        torchs = [torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1) for net in (reference, model)]
        expected = trained(transformers.Trainer, reference, torchs[0])
        made = trained(transformers.Trainer, model, sluice.offload(model, settings, optimizer=torchs[1]))
    for key in ("loss", "eval_loss"):
        assert worst(logs(made, key), logs(expected, key)) <= 2e-6, key
    assert planned == [False] + 7 * [True]


def test_trainer_takes_the_best_model_back(tmp_path, settings):
    settings["optimizer"]["overlap"] = "deferred"
    trainer = Trainer(model=gpt2(), train_dataset=rows(), eval_dataset=rows(4), sluice=settings, args=arguments(
        tmp_path, load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True))
    trainer.train()
    losses = logs(trainer, "eval_loss")
    assert losses[0] > 1.001 * losses[1]  # so the first one is what this calls the best
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-6)
    trainer._sluice.close()


def test_running_means_go_on(tmp_path, settings):
    """Also where transformers' file of weights lacks them, as of peft's."""
    class Normed(transformers.GPT2LMHeadModel):
        def __init__(self, config):
            super().__init__(config)
            self.norm = torch.nn.BatchNorm1d(config.vocab_size)

        def forward(self, input_ids=None, labels=None, **_):
            logits = self.norm(super().forward(input_ids).logits.transpose(1, 2)).transpose(1, 2)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"loss": loss, "logits": logits}

    def made(seed, **options):
        torch.manual_seed(seed)
        return Trainer(model=Normed(gpt2().config), args=arguments(tmp_path, eval_strategy="no", **options), train_dataset=rows(),
                       sluice=settings)
    whole = made(0)
    whole.train()
    expected = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole._sluice.close()
    again = made(1)
    (tmp_path / "out" / "checkpoint-3" / "model.safetensors").unlink()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    actual = again.model.state_dict()
    assert not torch.equal(actual["norm.running_mean"], torch.zeros(61))
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())
    again._sluice.close()


def test_a_model_is_made_for_each_training(tmp_path, settings):
    trainer = Trainer(model_init=lambda: gpt2(), args=arguments(tmp_path, max_steps=2, eval_strategy="no", save_strategy="no"),
                      train_dataset=rows(), sluice=settings)
    trainer.train()
    first, losses = trainer._sluice, logs(trainer, "loss")
    trainer.train()
    assert trainer._sluice is not first and logs(trainer, "loss")[-2:] == losses
    with pytest.raises(sluice.ArgumentError, match="closed"):
        first.step()
    trainer._sluice.close()


def test_an_optimizer_of_the_programs_own_resumes(tmp_path, settings):
    settings["optimizer"] |= {"clip_norm": 1.0, "clip_epsilon": 1e-6}

    def made(seed, **options):
        model = gpt2(seed)
        optimizer = sluice.offload(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return Trainer(model=model, args=arguments(tmp_path, eval_strategy="no"), train_dataset=rows(), sluice=settings,
                       optimizers=(optimizer, schedule))
    whole = made(0)
    whole.train()
    whole._sluice.close()
    again = made(1)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert logs(again, "loss") == logs(whole, "loss")
    again._sluice.close()


@pytest.mark.parametrize("micro", [0, 1])
def test_a_checkpoint_just_in_time(tmp_path, settings, micro):
    """SIGTERM comes in the third step: the checkpoint has its update, training ends, and another goes on with the same bits."""
    whole = made(tmp_path / "whole", settings, save_strategy="no")
    whole.train()
    stopped = made(tmp_path, settings, save_strategy="no", eval_strategy="no", enable_jit_checkpoint=True)
    manager, = (one.jit_manager for one in stopped.callback_handler.callbacks if hasattr(one, "jit_manager"))
    manager.kill_wait, forwards = 0, []

    def preempt(*_):
        forwards.append(1)
        if len(forwards) == 5 + micro:
            os.kill(os.getpid(), signal.SIGTERM)
            while not manager.is_checkpoint_requested:
                time.sleep(0.01)
    stopped.model.register_forward_hook(preempt)
    before = signal.getsignal(signal.SIGTERM)
    stopped.train()
    assert signal.getsignal(signal.SIGTERM) != before and len(forwards) == 6 and stopped.state.global_step == 3
    resumed = made(tmp_path, settings, gpt2(seed=1), save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert logs(resumed, "loss")[-3:] == logs(whole, "loss")[-3:] and resumed._sluice._engine.applied_step() == 6
    for one in (whole, stopped, resumed):
        one._sluice.close()


def test_what_the_trainer_refuses(tmp_path, settings):
    settings["optimizer"]["clip_norm"] = 0.5
    with pytest.raises(sluice.ArgumentError, match="args.max_grad_norm is 1.0"):
        Trainer(model=gpt2(), args=arguments(tmp_path), train_dataset=rows(), eval_dataset=rows(4), sluice=settings).train()
    plain = transformers.Trainer(model=gpt2(), args=arguments(tmp_path, max_steps=3), train_dataset=rows(),
                                 eval_dataset=rows(4))
    plain.train()
    settings["optimizer"].pop("clip_norm")

    def resumed(folder):
        made(tmp_path, settings).train(resume_from_checkpoint=folder)
    with pytest.raises(sluice.ArgumentError, match='no folder "sluice".*from_pretrained.*out/checkpoint-3"'):
        resumed(True)
    with pytest.raises(sluice.ArgumentError, match="there is no folder .*out/checkpoint-4; the newest .*out is checkpoint-3"):
        resumed(str(tmp_path / "out" / "checkpoint-4"))
    with pytest.raises(sluice.ArgumentError, match="there is no folder .*nowhere/checkpoint-4; .*nowhere has no checkpoint"):
        resumed(str(tmp_path / "nowhere" / "checkpoint-4"))
    # The remedy.
    weights = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "checkpoint-3")
    begun = made(tmp_path / "new", settings, weights, max_steps=1)
    assert begun.evaluate()["eval_loss"] == pytest.approx(logs(plain, "eval_loss")[0], rel=1e-6)
    begun.train()
    begun._sluice.close()


def made(tmp_path, settings, model=None, optimizers=(None, None), keys=None, kind=Trainer, **options):
    """A Trainer of this package, or without `settings` one of transformers."""
    more = {} if settings is None else {"sluice": settings, "sluice_keys": keys}
    return (transformers.Trainer if settings is None else kind)(
        model=model or gpt2(), args=arguments(tmp_path, **options), train_dataset=rows(), eval_dataset=rows(4),
        optimizers=optimizers, **more)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_scheduler_of_the_programs_own_is_followed(tmp_path, settings, is_offloaded):
    """It was made with the torch optimizer, whether the Trainer or the program offloads."""
    settings["optimizer"] |= {"clip_norm": 1.0, "clip_epsilon": 1e-6}
    found = []
    for config in (None, settings):
        model = gpt2()
        given = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
        optimizer = sluice.offload(model, settings, optimizer=given) if config is settings and is_offloaded else given
        trainer = made(tmp_path, config, model, (optimizer, schedule))
        trainer.train()
        found.append(trainer)
    reference, ours = found
    for key in ("loss", "eval_loss"):
        assert worst(logs(ours, key), logs(reference, key)) <= 2e-6, key
    assert logs(ours, "learning_rate") == logs(reference, "learning_rate")
    assert ours._sluice.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5 ** 6)
    ours._sluice.close()


def test_a_scheduler_of_momentum_is_refused_before_anything_is_offloaded(tmp_path, settings):
    model = gpt2()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(sluice.ArgumentError, match="OneCycleLR also moves betas or momentum.*cycle_momentum=False"):
        made(tmp_path, settings, model, (given, torch.optim.lr_scheduler.OneCycleLR(given, 1e-3, total_steps=6))).train()
    assert not hasattr(model, "_sluice")


@pytest.mark.parametrize("clipped, bound", [(0.5, 1.0), (1.0, 0), (1.0, None), (0, 1.0)])
def test_an_offloaded_optimizer_that_clips_otherwise_is_refused(tmp_path, settings, clipped, bound):
    model = gpt2()
    settings["optimizer"]["clip_norm"] = clipped
    optimizer = sluice.offload(model, settings, lr=1e-3)
    words = f"optimizer.clip_norm is {float(clipped)}, but args.max_grad_norm is {bound}; give args.max_grad_norm={float(clipped)}"
    with pytest.raises(sluice.ArgumentError, match=words):
        made(tmp_path, settings, model, (optimizer, None), max_grad_norm=bound).train()
    again = made(tmp_path, settings, model, (optimizer, None), max_grad_norm=clipped, max_steps=1)
    again.train()
    assert optimizer._engine.applied_step() == 1
    again.args.max_grad_norm = bound
    with pytest.raises(sluice.ArgumentError, match=words):
        again.train()
    optimizer.close()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_evaluations_in_another_type_are_refused(tmp_path, settings, name):
    with pytest.raises(sluice.ArgumentError, match=f"args.{name}_full_eval is True.*leave it out"):
        made(tmp_path, settings, **{f"{name}_full_eval": True})


def test_durable_stores_are_refused(tmp_path, settings):
    """Before training: a checkpoint could not be taken back at its end."""
    section = {"storage": {"state": {"name": "run-7"}}}
    durable = {**settings, "storage": {**settings["storage"], **section["storage"]}}
    for config, keys in ((durable, None), (settings, section)):
        with pytest.raises(sluice.ArgumentError, match='storage.state.name is "run-7".*leave storage.state out'):
            made(tmp_path, config, keys=keys)
    model = gpt2()
    optimizer = sluice.offload(model, durable, lr=1e-3)
    with pytest.raises(sluice.ArgumentError, match="optimizers= has a durable store.*leave storage.state out"):
        made(tmp_path, settings, model, (optimizer, None))
    optimizer.close()


def test_a_second_trainer_goes_on_with_the_first_ones_optimizer(tmp_path, settings, caplog):
    options = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    first = made(tmp_path, settings, **options)
    first.train()
    words = r"GPT2LMHeadModel is offloaded already.*optimizers=\(first.optimizer, None\).*model.state_dict\(\)"
    with pytest.raises(sluice.ArgumentError, match=words):
        made(tmp_path, settings, first.model, **options).train()
    second = made(tmp_path, settings, first.model, (first.optimizer, None), **options)
    second.train()
    assert second._sluice is first._sluice and second._sluice._engine.applied_step() == 4
    assert worst(logs(second, "loss"), logs(first, "loss")) > 1e-3
    # The other remedy.
    new = gpt2(seed=4)
    new.load_state_dict(first.model.state_dict())
    third = made(tmp_path, settings, new, **options)
    third.train()
    assert worst(logs(third, "loss")[:1], logs(second, "loss")[:1]) > 1e-6 and third._sluice._engine.applied_step() == 2
    third._sluice.close()
    second.optimizer = second.lr_scheduler = None
    caplog.clear()
    second.train()
    assert second._sluice is first._sluice and second._sluice._engine.applied_step() == 6
    assert "takes the offloaded model's again: it goes on with its moments, after 4 updates" in caplog.text
    second._sluice.close()


@pytest.mark.parametrize("is_adapter", [False, True])
def test_the_best_weights_alone_come_back(tmp_path, settings, is_adapter):
    """With save_only_model. The parts of peft's model come from its own file."""
    import peft
    settings["optimizer"]["overlap"] = "deferred"
    model = gpt2()
    if is_adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True))
    trainer = made(tmp_path, settings, model, load_best_model_at_end=True, metric_for_best_model="eval_loss", save_only_model=True,
                   greater_is_better=not is_adapter, learning_rate=0.1 if is_adapter else 1e-3)
    trainer.train()
    losses = logs(trainer, "eval_loss")
    assert abs(losses[0] / losses[1] - 1) > 1e-3 and trainer.state.best_global_step == 3
    assert not (tmp_path / "out" / "checkpoint-3" / "sluice").exists()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-6)
    trainer._sluice.close()


@pytest.mark.parametrize("named", ["args", "config", "keys"])
def test_lion_is_the_programs_own(tmp_path, settings, named):
    """One message, whichever place names it, and its remedy works."""
    config, keys = copy.deepcopy(settings), None
    options = {"optim": "lion_32bit"} if named == "args" else {}
    if named == "config":
        config["optimizer"]["type"] = "lion"
    elif named == "keys":
        keys = {"optimizer": {"type": "lion"}}
    words = r'Lion: .*"type": "lion", "clip_norm": 1.0}}, lr=0.001\), and give the Trainer optimizers=\(optimizer, None\)'
    with pytest.raises(sluice.ArgumentError, match=words):
        made(tmp_path, config, keys=keys, **options).train()
    model = gpt2()
    optimizer = sluice.offload(model, {**settings, "optimizer": {"type": "lion", "clip_norm": 1.0}}, lr=1e-4)
    trainer = made(tmp_path, config, model, (optimizer, None), keys, max_steps=2, save_strategy="no", **options)
    trainer.train()
    assert optimizer._engine.applied_step() == 2
    optimizer.close()


def test_other_optimizers_hear_nothing_of_lion(tmp_path, settings):
    with pytest.raises(sluice.ArgumentError, match="optimizer=Adafactor: .*SGD; give one of them$"):
        made(tmp_path, settings, optim="adafactor").train()


def test_tied_weights_count_once(tmp_path, settings):
    """In num_parameters() and in the logged total_flos."""
    reference, ours = made(tmp_path, None), made(tmp_path, settings)
    for one in (reference, ours):
        one.train()
    assert reference.model.lm_head.weight is reference.model.transformer.wte.weight
    for options in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert ours.model.num_parameters(**options) == reference.model.num_parameters(**options)
    assert logs(ours, "total_flos") == logs(reference, "total_flos")
    ours._sluice.close()


def test_the_trainer_of_sequences_to_sequences(tmp_path, settings):
    class Both(Trainer, transformers.Seq2SeqTrainer):
        pass
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))
    args = transformers.Seq2SeqTrainingArguments(**{
        key: value for key, value in arguments(tmp_path, max_steps=2, save_strategy="no", eval_steps=1).to_dict().items()
        if key in ("output_dir", "max_steps", "save_strategy", "eval_strategy", "eval_steps", "report_to", "use_cpu", "learning_rate")},
        predict_with_generate=True, generation_max_length=4)
    trainer = Both(model=model, args=args, train_dataset=rows(4), eval_dataset=rows(2), sluice=settings)
    trainer.train()
    assert trainer._sluice._engine.applied_step() == 2 and len(logs(trainer, "eval_loss")) == 2
    trainer._sluice.close()


def test_transformers_own_trainer(tmp_path, settings):
    """Without Sluice's class: an optimizer like any other."""
    def made(model, optimizer):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)
        return transformers.Trainer(model=model, args=arguments(tmp_path), train_dataset=rows(), eval_dataset=rows(4),
                                    optimizers=(optimizer, schedule))
    model = gpt2()
    reference = made(model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1))
    reference.train()
    model = gpt2()
    settings["optimizer"] |= {"clip_norm": 1.0, "clip_epsilon": 1e-6}
    optimizer = sluice.offload(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    ours = made(model, optimizer)
    ours.train()
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert worst(logs(ours, key), logs(reference, key)) <= 2e-6, key
    assert len(logs(ours, "grad_norm")) == 6
    optimizer.close()


def test_accelerate(settings, monkeypatch):
    """A plain loop of Accelerate's, without a helper: a window of accumulation that is shorter than the others, clipping with the norm
    of each step, and the plan's bytes in every step that is like the one before, within budgets of a quarter of the state."""
    planned = watch_steps(monkeypatch, micro_batches=2)

    def run(model, optimizer):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(rows(14), batch_size=2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        losses, norms = [], []
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        return losses + norms
    model = gpt2(width=64, layers=8)
    expected = run(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    model = gpt2(width=64, layers=8)
    budgeted(settings, model, 700, 800)
    settings["optimizer"] |= {"clip_norm": 1.0, "clip_epsilon": 1e-6}
    optimizer = sluice.offload(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    assert worst(run(model, optimizer), expected) <= 2e-6
    assert planned == 2 * [False, True, True, False]
    optimizer.close()


LAYERS = 12


def test_peft(tmp_path, settings):
    """LoRA over a frozen base: only the adapters have state, and they are saved as peft saves them. The budgets are a quarter of the model
    and that state."""
    import peft

    def made():
        torch.manual_seed(1)
        return peft.get_peft_model(gpt2(layers=LAYERS), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"],
                                                           lora_dropout=0.0, fan_in_fan_out=True))

    def run(model, optimizer, clip):
        losses = []
        for row in rows(10):
            loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if not clip and losses:
                moves_as_planned(optimizer)
            losses.append(loss.item())
        return losses
    reference = made()
    expected = run(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), True)
    model = made()
    base = copy.deepcopy(model.state_dict())
    settings["optimizer"] |= {"clip_norm": 1.0, "clip_epsilon": 1e-6}
    settings["storage"]["block_elements"] = 4096
    budgeted(settings, model, 100, 110)
    optimizer = sluice.offload(model, settings, units=["GPT2Block"],
                               optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    assert worst(run(model, optimizer, False), expected) <= 2e-6
    trained = sum(p.numel() for p in reference.parameters() if p.requires_grad)
    # Parameters, masters and moments of adapters alone, each with less than a page beside it.
    assert optimizer.report.nvme_write_bytes <= 16 * trained + LAYERS * 4 * 4096
    for name, value in model.state_dict().items():
        assert ("lora" in name) or torch.equal(value, base[name]), name
    model.save_pretrained(tmp_path / "adapter")
    back = peft.PeftModel.from_pretrained(gpt2(layers=LAYERS), tmp_path / "adapter")
    for name, value in back.state_dict().items():
        assert (value - reference.state_dict()[name]).abs().max() <= 1e-4, name
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    optimizer.close()


class Reading(torch.nn.Module):
    """A model whose layers all read a parameter of another unit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Encoder()

    def forward(self, input_ids, labels):
        return {"loss": self.net(input_ids, labels)}


def test_leases(tmp_path, settings):
    """sluice_leases goes to offload(), which refuses such a model without it."""
    options = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    losses = []
    for more in ({}, {"sluice": settings, "sluice_units": [Relative], "sluice_leases": 2}):
        trainer = (Trainer if more else transformers.Trainer)(model=Reading(), args=arguments(tmp_path, **options), train_dataset=rows(), **more)
        trainer.train()
        losses.append(logs(trainer, "loss"))
    assert worst(losses[1], losses[0]) <= 2e-6
    trainer._sluice.close()
    with pytest.raises(sluice.ArgumentError, match="leases=2"):
        Trainer(model=Reading(), args=arguments(tmp_path, **options), train_dataset=rows(), sluice=settings, sluice_units=[Relative]).train()


def test_where_it_computes(tmp_path, settings, monkeypatch):
    """The model goes there unit by unit, not as a whole; before training, evaluation moves it."""
    given = []

    def offload(model, config, *, device, **options):
        given.append(device)
        return sluice.offload(model, config, **options)
    monkeypatch.setattr("sluice_offload.transformers.offload", offload)
    made = Trainer(model=gpt2(), args=arguments(tmp_path, max_steps=1, save_strategy="no"), train_dataset=rows(), eval_dataset=rows(4),
                   sluice=settings)
    made._move_model_to_device(made.model, torch.device("meta"))
    assert made.model.transformer.wte.weight.device.type == "cpu"
    made.evaluate()
    made.train()
    assert given == [torch.device("cpu")]
    made._sluice.close()


def test_an_evaluation_first_leaves_no_autocast(tmp_path):
    """accelerate wraps the forward of a model that is evaluated in autocast, which DeepSpeed's bf16 does not have."""
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
              "bf16": {"enabled": True}, "zero_optimization": {
                  "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
    made = Trainer(model=gpt2(), train_dataset=rows(), eval_dataset=rows(4), sluice=config, args=arguments(
        tmp_path, max_steps=1, save_strategy="no", eval_strategy="no", bf16=True))
    seen = []
    made.model.transformer.h[0].mlp.act.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    made.evaluate()
    assert seen and all(seen)  # transformers' own evaluation, of parameters in fp32
    seen.clear()
    made.train()
    assert seen == [False, False]
    assert made.model.transformer.wte.weight.dtype == torch.bfloat16
    made._sluice.close()


def test_a_transformers_that_is_too_old_is_named(monkeypatch):
    """At the import. The method of transformers 5.2, which is not told the model."""
    monkeypatch.setattr(transformers.Trainer, "create_optimizer", lambda self: None)
    found = importlib.util.spec_from_file_location("sluice_offload.again", sluice.transformers.__file__)
    with pytest.raises(ImportError, match='needs transformers 5.3 or newer, and .* is installed: pip install "transformers>=5.3"'):
        found.loader.exec_module(importlib.util.module_from_spec(found))


def test_a_process_that_writes_no_weights_reads_them_too(tmp_path, settings, monkeypatch):
    """Older transformers call _save() in the first process alone, which would wait for the others' parts."""
    trainer = made(tmp_path, settings, max_steps=1, save_strategy="no", eval_strategy="no")
    trainer.train()
    read, state_dict = [], trainer.model.state_dict
    monkeypatch.setattr(trainer.model, "state_dict", lambda *args, **options: read.append(1) or state_dict(*args, **options))
    trainer.save_model(tmp_path / "weights")
    assert len(read) == 1 and (tmp_path / "weights" / "model.safetensors").is_file()
    monkeypatch.setattr(transformers.Trainer, "save_model", lambda self, output_dir=None, _internal_call=False: None)
    trainer.save_model(tmp_path / "weights")
    assert len(read) == 2
    trainer._sluice.close()


def test_a_refusal_leaves_nothing_behind(tmp_path, settings):
    """The next train() has the arguments of then, and not the checkpoint that the one before was to go on from."""
    saved = made(tmp_path, settings, max_steps=3)
    saved.train()
    saved._sluice.close()
    options = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 2, "lr_scheduler_type": "constant", "warmup_steps": 0}
    trainer = made(tmp_path, {**settings, "memory": {"device": "1KiB", "host": "4MiB"}}, **options)
    with pytest.raises(sluice.SluiceError, match="memory.device"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert trainer.optimizer is None and not hasattr(trainer.model, "_sluice")
    trainer._sluice_given["memory"]["device"] = "400KiB"
    trainer.args.learning_rate, trainer.args.weight_decay = 1e-5, 0.0
    trainer.train()
    assert logs(trainer, "learning_rate") == [1e-5, 1e-5] and trainer._sluice._engine.applied_step() == 2
    assert {value for name, value in trainer._sluice._hyperparameters.items() if name.endswith("].weight_decay")} == {0.0}
    trainer._sluice.close()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_its_schedule_is_refused(tmp_path, settings, name):
    """transformers would begin it anew, and say nothing."""
    saved = made(tmp_path, settings, max_steps=3)
    saved.train()
    saved._sluice.close()
    (tmp_path / "out" / "checkpoint-3" / name).rename(tmp_path / name)
    trainer = made(tmp_path, settings, gpt2(seed=1))
    with pytest.raises(sluice.ArgumentError, match=f"checkpoint-3 has no {name}, .*Copy it .*from_pretrained.*out/checkpoint-3"):
        trainer.train(resume_from_checkpoint=True)
    assert not hasattr(trainer.model, "_sluice")
    (tmp_path / name).rename(tmp_path / "out" / "checkpoint-3" / name)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._sluice._engine.applied_step() == 6 and logs(trainer, "learning_rate")[:3] == logs(saved, "learning_rate")
    trainer._sluice.close()


def test_an_empty_group_of_the_programs_own_is_refused(tmp_path, settings):
    """Without it, the scheduler would have a rate too many, or give a group that of another."""
    model = gpt2()
    given = torch.optim.AdamW([{"params": [], "lr": 9.0}, {"params": list(model.parameters()), "lr": 1e-3}])
    schedule = torch.optim.lr_scheduler.LambdaLR(given, [lambda step: 1.0, lambda step: 0.5])
    with pytest.raises(sluice.ArgumentError, match="AdamW: group 0 has no parameter that requires a gradient; leave it out"):
        made(tmp_path, settings, model, (given, schedule)).train()
    assert len(given.param_groups) == 2 and not hasattr(model, "_sluice")


def test_several_gpus_in_a_process_are_refused(tmp_path, settings):
    made = arguments(tmp_path)
    made._setup_devices  # a property, which counts them
    made._n_gpu = 2
    with pytest.raises(sluice.ArgumentError, match="sees 2 GPUs.*torchrun --nproc_per_node=2.*CUDA_VISIBLE_DEVICES"):
        Trainer(model=gpt2(), args=made, train_dataset=rows(), eval_dataset=rows(4), sluice=settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_on_a_gpu(tmp_path, settings):
    options = {"use_cpu": False, "save_strategy": "no"}
    reference = transformers.Trainer(model=gpt2(), args=arguments(tmp_path, **options), train_dataset=rows(), eval_dataset=rows(4))
    made = Trainer(model=gpt2(), args=arguments(tmp_path, **options), train_dataset=rows(), eval_dataset=rows(4), sluice=settings)
    for one in (reference, made):
        one.train()
    assert worst(logs(made, "loss"), logs(reference, "loss")) <= 2e-5
    made._sluice.close()
