"""The program of test_ranks.py: one of two ranks under torchrun, each framework with its own DistributedDataParallel and then
with Sluice. usage: ranks.py FOLDER CASE..."""

import contextlib
import datetime
import logging
import os
import pathlib
import signal
import sys
import time
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import DDPStrategy

import sluice_offload as sluice
import sluice_offload.lightning
from conftest import Block, batch, budgeted, tiny, watch_steps, without_keys, worst
from sluice_offload.transformers import Trainer
from test_lightning import Module, Normed
from test_transformers import arguments, gpt2, logs, rows

RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def settings(folder, stage=3):
    folder.mkdir(parents=True, exist_ok=True)
    return {"placement": {"parameters": "nvme" if stage == 3 else "device", "optimizer": "nvme"},
            "memory": {"device": "400KiB" if stage == 3 else "6MiB", "host": "4MiB"}, "run": {"threads": 1},
            "sharding": {"stage": stage, "timeout": 60, "keep_gathered": "0"}, "optimizer": {"overlap": "serial"},
            "storage": {"paths": [str(folder)], "block_elements": 4096}}


def quarter(config, model, device=500, host=160):
    """Budgets in KiB, of a quarter of a rank's state at most."""
    return budgeted(config, model, device, host, ranks=2)


def deep(seed=0):
    return gpt2(seed, width=64, layers=8)


def case_trainer(folder):
    """Accumulation, a schedule, clipping, evaluation, saving by rank 0, resuming, the best model; the budgets are a quarter of the state."""
    reference = transformers.Trainer(model=deep(), args=arguments(folder / "theirs"), train_dataset=rows(26), eval_dataset=rows(6))
    reference.train()
    assert dist.get_world_size() == 2 and reference.model_wrapped is not reference.model
    whole = Trainer(model=deep(), args=arguments(folder / "ours"), train_dataset=rows(26), eval_dataset=rows(6),
                    sluice=quarter(settings(folder / "one"), reference.model))
    with pytest.MonkeyPatch.context() as patch:
        planned = watch_steps(patch, micro_batches=2)
        whole.train()
    assert planned == [False, True, True, False, False, True], planned  # the fourth window has one micro-batch
    assert whole.model_wrapped is whole.model and whole._sluice._engine.world.size == 2
    for key in ("loss", "grad_norm", "eval_loss"):
        assert worst(logs(whole, key), logs(reference, key)) <= 2e-6, (key, logs(whole, key), logs(reference, key))
    assert len(logs(whole, "grad_norm")) == 6 and len(logs(whole, "eval_loss")) == 2
    expected = whole.model.state_dict()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder / "ours" / "out" / "checkpoint-6")
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    again = Trainer(model=deep(seed=9), args=arguments(folder / "ours", load_best_model_at_end=True), train_dataset=rows(26),
                    eval_dataset=rows(6), sluice=settings(folder / "two", stage=2))
    again.train(resume_from_checkpoint=str(folder / "ours" / "out" / "checkpoint-3"))
    assert logs(again, "loss")[3:] == logs(whole, "loss")[3:]
    best = again.evaluate()["eval_loss"]
    assert abs(best - min(logs(again, "eval_loss"))) <= 1e-6 * best
    for trainer in (whole, again):
        trainer._sluice.close()


def case_preempted(folder):
    """SIGTERM comes to one rank in a step's first micro-batch, and to the other in that step's second one, or behind the step."""
    for late in (1, 2):
        name = f"late {late}"
        trainer = Trainer(model=gpt2(), args=arguments(folder / name, enable_jit_checkpoint=True, save_strategy="no", eval_strategy="no"),
                          train_dataset=rows(26), sluice=settings(folder / f"state {late}"))
        manager, = (one.jit_manager for one in trainer.callback_handler.callbacks if hasattr(one, "jit_manager"))
        forwards = []

        def preempt(*_):
            forwards.append(1)
            if len(forwards) == 3 + late * RANK:
                manager.is_checkpoint_requested = True
        trainer.model.register_forward_hook(preempt)
        trainer.train()
        assert trainer.state.global_step == 2 and len(forwards) == 4
        assert [path.name for path in (folder / name / "out").iterdir()] == ["checkpoint-2"]
        trainer._sluice.close()
        resumed = Trainer(model=gpt2(seed=1), args=arguments(folder / name, eval_strategy="no"), train_dataset=rows(26),
                          sluice=settings(folder / f"again {late}"))
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == resumed._sluice._engine.applied_step() == 6
        resumed._sluice.close()


class Generating(Trainer, transformers.Seq2SeqTrainer):
    """Sluice's Trainer for models that generate in evaluations."""


def case_generates(folder):
    """Each rank samples texts of lengths of its own, and all ranks go on until the longest has ended, since they fetch units together."""
    rows_of_ids = torch.randint(2, 12, (8, 10), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in rows_of_ids]
    for stage in (3, 2):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=12, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0, decoder_start_token_id=0, pad_token_id=0,
            eos_token_id=1))
        model.generation_config.do_sample, model.generation_config.eos_token_id = True, [1, 2, 3]
        args = transformers.Seq2SeqTrainingArguments(
            output_dir=str(folder / str(stage)), predict_with_generate=True, generation_max_length=24, max_steps=1, use_cpu=True,
            per_device_train_batch_size=2, per_device_eval_batch_size=1, save_strategy="no", report_to=[], disable_tqdm=True)
        config = settings(folder / f"state {stage}", stage)
        config["sharding"]["timeout"] = 15
        config["memory"] = {"device": "4MiB", "host": "8MiB"}
        trainer = Generating(model=model, args=args, train_dataset=data, sluice=config)
        trainer.train()
        torch.manual_seed(100 + RANK)
        synced = []
        generate, model.generate = model.generate, lambda **options: synced.append(options["synced_gpus"]) or generate(**options)
        for options in ({}, {"max_length": 20}):
            lengths = (trainer.predict(data[:6], **options).predictions != 0).sum(1).tolist()
            assert len(set(lengths)) > 1 and max(lengths) <= 24, lengths
        assert synced == [stage == 3] * 6
        if stage == 2:
            assert trainer.predict(data[:2], synced_gpus=True) and synced[-1] is True  # as the program says
        trainer._sluice.close()


def run_accelerate(model, optimizer):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = torch.utils.data.DataLoader(rows(20), batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for _ in range(2):
        for data in loader:
            with accelerator.accumulate(model):
                loss = model(**data).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    state = accelerator.get_state_dict(model)
    return losses, {name.removeprefix("module."): value for name, value in state.items()}, accelerator.unwrap_model(model)


def case_accelerate(folder):
    """prepare() gives the model to DistributedDataParallel; the last window of an epoch is shorter. At stage 3 the budgets are a quarter of
    the state."""
    model = deep()
    expected, weights, _ = run_accelerate(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    assert dist.get_world_size() == 2
    for stage in (3, 1):
        config = settings(folder / str(stage), stage)
        config["optimizer"] |= {"clip_norm": 1.0, "clip_epsilon": 1e-6}
        model = deep()
        if stage == 3:
            quarter(config, model)
        optimizer = sluice.offload(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
        with pytest.MonkeyPatch.context() as patch:
            planned = watch_steps(patch, micro_batches=2)
            losses, state, unwrapped = run_accelerate(model, optimizer)
        assert planned == 2 * [False, True, False], planned
        assert unwrapped is model
        assert worst(losses, expected) <= 2e-6, (losses, expected)
        for name, value in state.items():
            assert without_keys(name, value - weights[name]).abs().max() <= 2e-5, name
        if stage == 3:
            optimizer.close()
    # A process of its own group would train another model.
    alone = dist.new_group([RANK], use_local_synchronization=True)
    try:
        torch.nn.parallel.DistributedDataParallel(model, process_group=alone)
    except sluice.ArgumentError as error:
        assert "over 1 processes around a model that is offloaded on 2" in str(error)
    else:
        raise AssertionError("DistributedDataParallel over another group")
    wrapped = torch.nn.parallel.DistributedDataParallel(gpt2())
    try:
        sluice.offload(wrapped, config)
    except sluice.ArgumentError as error:
        assert "model.module" in str(error)
    else:
        raise AssertionError("offload() of a wrapped model")
    optimizer.close()


def case_alone(folder):
    """The same loop with sluice_offload.optim, which is made after the processes have found each other, and has a part of the state on
    each. prepare() asks for the whole of it, of which there is none yet."""
    model = gpt2()
    expected, weights, _ = run_accelerate(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    config = {"placement": {"optimizer": "nvme"}, "memory": {"host": "240KiB"},
              "storage": {"paths": [str(folder)], "block_elements": 4096}}
    folder.mkdir(exist_ok=True)
    model = gpt2()
    optimizer = sluice.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, config=config)
    assert optimizer._group.size == 2
    losses, state, _ = run_accelerate(model, optimizer)
    assert worst(losses, expected) <= 2e-6, (losses, expected)
    for name, value in state.items():
        assert without_keys(name, value - weights[name]).abs().max() <= 2e-5, name
    steps = {int(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
    assert len(steps) == 1 and steps.pop() > 0
    optimizer.close()


def case_saves(folder):
    """transformers' own Trainer reads the optimizer's state on the first rank alone, where it is sharded: that rank is told so, at the first
    step, and then at once. The program itself may read it, on all ranks."""
    class Reading(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **_):
            read.append(len(optimizer.state_dict()["state"]))

    class Told(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
    read, told = [], []
    logging.getLogger("sluice_offload").addHandler(Told())
    Accelerator(cpu=True)  # whose processes find each other
    model = gpt2()
    optimizer = sluice.optim.AdamW(model.parameters(), lr=1e-3, config={"placement": {"optimizer": "host"}, "memory": {"host": "8MiB"}})
    begin = time.monotonic()
    for options in ({"save_strategy": "no"}, {"save_only_model": True}, {}):
        trainer = transformers.Trainer(model=model, args=arguments(folder, eval_strategy="no", max_steps=3, **options), train_dataset=rows(26),
                                       optimizers=(optimizer, transformers.get_constant_schedule(optimizer)), callbacks=[Reading()])
        if options:
            trainer.train()
            assert len(read) == 3 and min(read) > 1 and not told, (read, told)
            read.clear()
            optimizer.close()
            optimizer = sluice.optim.AdamW(model.parameters(), lr=1e-3, config={"placement": {"optimizer": "host"}, "memory": {"host": "8MiB"}})
            continue
        try:
            trainer.train()
        except (sluice.ArgumentError if RANK == 0 else RuntimeError) as error:  # the second rank is in its next step
            assert RANK == 1 or "rank 0 of 2 reads the optimizer's state alone" in str(error) and "shard=False" in str(error), error
            assert len(told) == 1 - RANK and all("the Trainer's first checkpoint will fail" in line for line in told), told
        else:
            assert RANK == 1  # it had nothing more to do
    assert time.monotonic() - begin < 50
    print(f"passed: saves on rank {RANK}", flush=True)
    os._exit(0)  # the group ends with this rank


class Averaged(Module):
    def validation_step(self, data, index):
        self.log("validation", self.net(*data), sync_dist=True)

    def on_validation_epoch_end(self):
        self.validations.append(self.trainer.callback_metrics["validation"].item())


class OffloadsItself(Averaged):
    """In setup(), before the strategy could."""

    def setup(self, stage):
        config = settings(self.folder_of_state)
        config["optimizer"] |= {"clip_norm": 0.5, "clip_epsilon": 1e-6}
        self.offloaded_by_itself = sluice.offload(self, config, units=[Block], optimizer=super().configure_optimizers()[0][0])

    def configure_optimizers(self):
        optimizer = self.offloaded_by_itself
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


def fit(folder, net, strategy, steps, first=None, callbacks=(), kind=Averaged, folder_of_state=None, **options):
    module = kind(net)
    module.folder_of_state = folder_of_state
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, gradient_clip_val=0.5,
                         accumulate_grad_batches=2, default_root_dir=folder, logger=False, enable_progress_bar=False,
                         enable_model_summary=False, callbacks=list(callbacks), enable_checkpointing=bool(callbacks), **options)
    data = torch.utils.data.DataLoader([batch(step) for step in range(24)], batch_size=None)
    checks = torch.utils.data.DataLoader([batch(step) for step in range(4)], batch_size=None)
    trainer.fit(module, data, checks, ckpt_path=first)
    return module, trainer


def case_lightning(folder):
    """Parts of the data by Lightning's sampler, accumulation, clipping, validation, checkpoints, resuming; the budgets are a quarter of the
    state."""
    def net(seed=0):
        return tiny(seed, width=64, layers=10)

    def run(name, first, second):
        saved = pl.callbacks.ModelCheckpoint(dirpath=folder / name, every_n_train_steps=2, save_top_k=-1)
        whole, made = fit(folder, net(), first, 6, callbacks=[saved])
        paths = sorted((folder / name).glob("*.ckpt"))
        assert len(paths) == 3, paths
        again, resumed = fit(folder, net(seed=7), second, 6, first=paths[1])
        return whole, made, again, resumed, paths
    configs = quarter(settings(folder / "stage 3"), net(), 370, 160), settings(folder / "stage 1", 1)
    with pytest.MonkeyPatch.context() as patch:
        planned = watch_steps(patch, micro_batches=2)
        whole, made, again, resumed, paths = run("ours", *(sluice.lightning.SluiceStrategy(one, units=[Block]) for one in configs))
    assert planned == [False, *5 * [True], False, True], planned  # six steps, and two behind the fourth
    reference, _, expected, _, _ = run("theirs", "ddp", "ddp")
    for one, other in ((whole, reference), (again, expected)):
        assert worst(one.losses, other.losses) <= 2e-6, (one.losses, other.losses)
        assert worst(one.validations, other.validations) <= 2e-6 and one.validations
    assert made.strategy.offloaded._engine.world.size == 2
    seen = [None, None]
    dist.all_gather_object(seen, whole.losses)
    assert seen[0] != seen[1]  # each rank has its own part of the data
    assert resumed.strategy.offloaded._engine.applied_step() == 6
    expected_state = whole.state_dict()
    saved = torch.load(paths[-1], weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in expected_state.items())
    for one in (made, resumed):
        one.strategy.offloaded.close()


class Predicting(Averaged):
    def predict_step(self, data, index):
        return self.net(data[0]).sum().item()


def case_predicts(folder):
    """Lightning repeats no sample for predictions. Where all ranks fetch each unit together, an uneven number of batches is refused at once."""
    for stage in (3, 1):
        strategy = sluice.lightning.SluiceStrategy(settings(folder / f"state {stage}", stage), units=[Block])
        module, trainer = fit(folder, tiny(), strategy, 1, kind=Predicting)

        def predict(count):
            return trainer.predict(module, torch.utils.data.DataLoader([batch(step) for step in range(count)], batch_size=None))
        assert len(predict(4)) == 2
        begin = time.monotonic()
        try:
            assert len(predict(5)) == 3 - RANK and stage == 1
        except sluice.ArgumentError as error:
            assert stage == 3 and "rank 0 has 3 batches and rank 1 has 2" in str(error) and "sharding.stage 2" in str(error), error
        assert time.monotonic() - begin < strategy._given["sharding"]["timeout"]
        assert len(predict(4)) == 2
        strategy.offloaded.close()


class Raising(Averaged):
    """With sluice_offload.optim, whose state has a part on each rank."""

    def configure_optimizers(self):
        return sluice.optim.AdamW(self.parameters(), lr=1e-3, config={"placement": {"optimizer": "host"}, "memory": {"host": "8MiB"}})

    def training_step(self, data, index):
        if index == 6 and RANK == 1:
            raise ValueError("the program's own")
        return super().training_step(data, index)


def case_raises(folder):
    """Lightning's end moves the state of each optimizer to the CPU, also behind an exception of one rank, which comes out itself."""
    strategy = DDPStrategy(timeout=datetime.timedelta(seconds=60))
    begin = time.monotonic()
    try:
        fit(folder, tiny(), strategy, 8, kind=Raising)
    except ValueError as error:
        assert RANK == 1 and str(error) == "the program's own"
    except RuntimeError:  # the first rank waits until the second one has ended
        assert RANK == 0
    else:
        raise AssertionError("no exception")
    assert time.monotonic() - begin < 50
    print(f"passed: raises on rank {RANK}", flush=True)
    os._exit(0)  # the group ends with this rank


class Signalled(Averaged):
    def on_after_backward(self):
        if self.trainer.global_step == 1 and RANK == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


class Stopped(Averaged):
    def training_step(self, data, index):
        if self.trainer.global_step == 1 and RANK == 1:
            raise ValueError("the program's own")
        return super().training_step(data, index)


class Heard(pl.Callback):
    def __init__(self):
        self.exceptions = []

    def on_exception(self, trainer, module, exception):
        self.exceptions.append(exception)


def case_stops(folder):
    """Slurm's signal to one rank is answered by both. An exception of one rank leaves no checkpoint, which all would write together.
    It comes out itself, behind all that Lightning does with it."""
    for name, value in {"JOB_ID": "17", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "LOCALID": str(RANK), "PROCID": str(RANK),
                        "NODEID": "0", "JOB_NODELIST": "localhost"}.items():
        os.environ["SLURM_" + name] = value
    strategy = sluice.lightning.SluiceStrategy(settings(folder / "state"), units=[Block])
    _, trainer = fit(folder, tiny(), strategy, 4, kind=Signalled, plugins=[SLURMEnvironment()])
    assert trainer.global_step == 4
    file = torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=False)
    assert file["global_step"] == 2 and file["sluice_folder"] == "step-000000002"
    trainer.strategy.offloaded.close()
    saved = [pl.callbacks.ModelCheckpoint(dirpath=folder / "saved", every_n_train_steps=50, save_on_exception=True),
             pl.callbacks.OnExceptionCheckpoint(folder / "saved"), Heard()]
    config = settings(folder / "stopped")
    config["sharding"]["timeout"] = 20
    strategy = sluice.lightning.SluiceStrategy(config, units=[Block])
    before = signal.getsignal(signal.SIGTERM)
    try:
        fit(folder / "second", tiny(), strategy, 4, kind=Stopped, callbacks=saved)
    except (ValueError if RANK == 1 else sluice.RanksError) as error:
        assert RANK == 0 or str(error) == "the program's own"
        assert saved[-1].exceptions == [error]
    else:
        raise AssertionError("no exception")
    assert signal.getsignal(signal.SIGTERM) == before
    assert not list((folder / "saved").glob("*"))
    with contextlib.suppress(sluice.SluiceError):  # says that a step was abandoned
        strategy.offloaded.close()


class SharedNorm(torch.nn.BatchNorm1d):
    """By the means of both ranks. torch's SyncBatchNorm computes on GPUs alone."""

    def forward(self, values):
        sums = torch.distributed.nn.functional.all_reduce(torch.stack([values.mean(0), values.pow(2).mean(0)])) / dist.get_world_size()
        return (values - sums[0]) * (sums[1] - sums[0].pow(2) + self.eps).rsqrt() * self.weight + self.bias


class SharedNorms(LayerSync):
    def apply(self, model):
        norm = SharedNorm(61)
        norm.weight, norm.bias = model.net.norm.weight, model.net.norm.bias
        model.net.norm = norm
        return model

    def revert(self, model):
        return model


def case_norms(folder):
    """Layers that normalize by the batch of all ranks."""
    losses = []
    for strategy in ("ddp", sluice.lightning.SluiceStrategy(settings(folder / "state"), units=[Block])):
        module, trainer = fit(folder, Normed(), strategy, 4, plugins=[SharedNorms()])
        losses.append(module.losses)
    assert type(module.net.norm) is SharedNorm
    assert worst(*losses) <= 2e-6, losses
    trainer.strategy.offloaded.close()
    alone, trainer = fit(folder, Normed(), sluice.lightning.SluiceStrategy(settings(folder / "alone"), units=[Block]), 4)
    assert worst(alone.losses, module.losses) > 1e-4
    trainer.strategy.offloaded.close()
    strategy = sluice.lightning.SluiceStrategy(settings(folder / "torchs"), units=[Block])
    try:
        fit(folder, Normed(), strategy, 1, sync_batchnorm=True)
    except sluice.ArgumentError as error:
        assert "sync_batchnorm=True on 2 processes on the CPU" in str(error) and strategy.offloaded is None
    else:
        raise AssertionError("SyncBatchNorm on the CPU")
    _, trainer = fit(folder, tiny(), sluice.lightning.SluiceStrategy(settings(folder / "none"), units=[Block]), 1, sync_batchnorm=True)
    trainer.strategy.offloaded.close()
    # A module that has offloaded itself cannot get other layers, and trains with those that it has got before.
    for number, (options, words) in enumerate((({"sync_batchnorm": True}, "sync_batchnorm=True on 2 processes on the CPU"),
                                               ({"plugins": [SharedNorms()]}, "SharedNorms would change its layers; apply it before"))):
        try:
            fit(folder, Normed(), sluice.lightning.SluiceStrategy(), 1, kind=OffloadsItself, folder_of_state=folder / str(number), **options)
        except sluice.ArgumentError as error:
            assert words in str(error), error
        else:
            raise AssertionError("other layers for a module that is offloaded")
    module, trainer = fit(folder, SharedNorms().apply(Averaged(Normed())).net, sluice.lightning.SluiceStrategy(), 4, kind=OffloadsItself,
                          folder_of_state=folder / "before")
    assert worst(module.losses, losses[0]) <= 2e-6, (module.losses, losses[0])
    trainer.strategy.offloaded.close()


def case_launched(folder):
    """Lightning starts the second process itself."""
    module, trainer = fit(folder, tiny(), sluice.lightning.SluiceStrategy(settings(folder / "state"), units=[Block]), 2)
    assert trainer.strategy.offloaded._engine.world.size == 2 and len(module.losses) == 4
    trainer.strategy.offloaded.close()
    print(f"passed: launched on rank {trainer.global_rank}", flush=True)


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = pathlib.Path(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[f"case_{name}"](folder / name)
        if name != "launched":
            print(f"passed: {name} on rank {RANK}", flush=True)


if __name__ == "__main__":
    main()
