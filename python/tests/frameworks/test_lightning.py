"""Lightning: a LightningModule as it is, with a strategy's name."""

import contextlib
import copy
import os
import signal
import time
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import sluice_offload as sluice
import sluice_offload.lightning
from conftest import Block, batch, budgeted, tiny, watch_steps, worst
from test_unlent import Encoder, Relative


class Module(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.losses, self.validations = [], []

    def training_step(self, data, index):
        loss = self.net(*data)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, data, index):
        self.validations.append(self.net(*data).item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


DATA = [batch(step) for step in range(12)]


def trainer(tmp_path, strategy, steps, **options):
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "strategy": strategy, "max_steps": steps, "gradient_clip_val": 0.5,
                         "accumulate_grad_batches": 2, "default_root_dir": tmp_path, "logger": False, "enable_progress_bar": False,
                         "enable_model_summary": False, **options})


def fit(tmp_path, net, strategy, steps, ckpt_path=None, kind=None, **options):
    module = (kind or Module)(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer(tmp_path, strategy, steps, **options)
        loader = torch.utils.data.DataLoader(DATA, batch_size=None)
        made.fit(module, loader, torch.utils.data.DataLoader(DATA[:2], batch_size=None), ckpt_path=ckpt_path)
    return module, made


def small(tmp_path):
    return {"memory": {"device": "400KiB", "host": "4MiB"}, "storage": {"paths": [str(tmp_path)]},
            "optimizer": {"overlap": "serial"}}


def test_a_part_that_the_module_offloads_itself_resumes(tmp_path):
    """Behind the first micro-batch, Lightning would save the step from which it goes on."""
    class Own(Module):
        def configure_optimizers(self):
            return sluice.offload(self.net, {**small(tmp_path), "placement": {"optimizer": "nvme"}}, units=[Block])  # clips at 1.0

    def run(steps, ckpt_path=None):
        module, saved = Own(tiny()), pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "own", every_n_train_steps=2, save_top_k=-1)
        made = trainer(tmp_path, sluice.lightning.SluiceStrategy(), steps, callbacks=[saved], gradient_clip_val=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.fit(module, torch.utils.data.DataLoader(DATA, batch_size=None), ckpt_path=ckpt_path)
        updates = made.strategy.offloaded._engine.applied_step()
        made.strategy.offloaded.close()
        return updates
    assert run(2) == 2
    assert run(4, next((tmp_path / "own").glob("*step=2*"))) == 4


@pytest.mark.parametrize("name", ["sluice", "sluice_offload", "sluice_nvme"])
def test_strategies_by_name(tmp_path, monkeypatch, name):
    """A name has no config of its own. To have budgets of a quarter of the state, "sluice_nvme" gets one where Lightning keeps it."""
    options = {"enable_checkpointing": False}
    net = tiny(width=128, layers=8) if name == "sluice_nvme" else tiny()
    planned = watch_steps(monkeypatch, micro_batches=2)
    if name == "sluice_nvme":
        config = budgeted(small(tmp_path), net, 1344, 1344)
        monkeypatch.setitem(pl.strategies.StrategyRegistry[name]["init_params"], "config", config)
    reference, _ = fit(tmp_path, copy.deepcopy(net), "auto", 6, **options)
    module, made = fit(tmp_path, net, name, 6, **options)
    assert name != "sluice_nvme" or planned == [False, True, True, True, True, True]
    assert worst(module.losses, reference.losses) <= 2e-6
    assert worst(module.validations, reference.validations) <= 2e-6 and module.validations
    optimizer = made.strategy.offloaded
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.8 ** 6)
    assert (optimizer._engine.predicted_traffic()[1] > 0) == (name == "sluice_nvme")  # the report of a deferred update may come later
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.validate(module, torch.utils.data.DataLoader(DATA[:2], batch_size=None), verbose=False)
    assert module.validations[-2:] == pytest.approx(module.validations[-4:-2])
    optimizer.close()


def test_activations_on_storage(tmp_path):
    """Lightning calls training_step, not the module's forward."""
    one, two = (sluice.lightning.SluiceStrategy({**small(tmp_path), **extra}, placement="nvme", units=[Block])
                for extra in ({}, {"activations": "nvme"}))
    reference, plain = fit(tmp_path, tiny(), one, 3, enable_checkpointing=False)
    module, made = fit(tmp_path, tiny(), two, 3, enable_checkpointing=False)
    assert module.losses == reference.losses
    store = made.strategy.offloaded.activations
    assert store.written_bytes > 0 and store.read_bytes > 0 and store.contexts == 6  # 3 steps of 2 micro-batches
    for optimizer in (plain.strategy.offloaded, made.strategy.offloaded):
        optimizer.close()


def test_small_budgets_checkpoints_and_resuming(tmp_path):
    """Against the same break without Sluice: Lightning's loader begins anew behind it."""
    def run(name, first, second):
        saved = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=2, save_top_k=-1)
        whole, made = fit(tmp_path, tiny(), first, 6, callbacks=[saved])
        paths = sorted((tmp_path / name).glob("*.ckpt"))
        assert len(paths) == 3
        again, resumed = fit(tmp_path, tiny(seed=7), second, 6, ckpt_path=paths[1], enable_checkpointing=False)
        return whole, made, again, resumed, paths
    strategies = [sluice.lightning.SluiceStrategy(small(tmp_path), placement=placement, units=[Block])
                  for placement in ("nvme", "host")]
    whole, made, again, resumed, paths = run("ours", *strategies)
    reference, _, expected, _, _ = run("torchs", "auto", "auto")
    assert worst(whole.losses, reference.losses) <= 2e-6
    assert worst(again.losses, expected.losses) <= 2e-6
    assert resumed.strategy.offloaded._engine.applied_step() == 6
    read, written = made.strategy.offloaded._engine.predicted_traffic()
    assert made.strategy.offloaded.report.nvme_write_bytes == written > 0 and read > 0
    saved = torch.load(paths[-1], weights_only=False)["state_dict"]
    assert torch.equal(saved["net.head.weight"], whole.state_dict()["net.head.weight"])
    resumed.strategy.remove_checkpoint(paths[0])
    assert not paths[0].exists() and not (tmp_path / "ours" / (paths[0].name + ".sluice")).exists()
    for one in (made, resumed):
        one.strategy.offloaded.close()


class Warming(Module):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedulers = torch.optim.lr_scheduler
        parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.ExponentialLR(optimizer, 0.5)]
        return [optimizer], [{"scheduler": schedulers.SequentialLR(optimizer, parts, [3]), "interval": "step"}]


def test_schedulers_in_schedulers(tmp_path):
    found = []
    for strategy in (sluice.lightning.SluiceStrategy(small(tmp_path), placement="nvme", units=[Block]), "auto"):
        module, made = Warming(tiny()), trainer(tmp_path, strategy, 6, enable_checkpointing=False, limit_val_batches=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.fit(module, torch.utils.data.DataLoader(DATA, batch_size=None))
        found.append((module.losses, [group["lr"] for group in made.optimizers[0].param_groups]))
        if made.strategy.__class__ is sluice.lightning.SluiceStrategy:
            made.strategy.offloaded.close()
    assert worst(found[0][0], found[1][0]) <= 2e-6 and found[0][1] == pytest.approx(found[1][1], rel=1e-12)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = tiny(), torch.nn.BatchNorm1d(61)

    def forward(self, tokens, labels):
        return torch.nn.functional.cross_entropy(self.norm(self.net(tokens).flatten(0, 1)), labels.flatten())


def strategy_of(tmp_path):
    return sluice.lightning.SluiceStrategy(small(tmp_path), placement="nvme", units=[Block])


def test_running_means_and_links(tmp_path):
    saved = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_last="link")
    whole, made = fit(tmp_path, Normed(), strategy_of(tmp_path), 4, callbacks=[saved], limit_val_batches=0)
    expected = {name: value.clone() for name, value in whole.state_dict().items()}
    made.strategy.offloaded.close()
    assert (tmp_path / "saved" / "last.ckpt").is_symlink()
    again, resumed = fit(tmp_path, Normed(), strategy_of(tmp_path), 4, ckpt_path=tmp_path / "saved" / "last.ckpt",
                         enable_checkpointing=False, limit_val_batches=0)
    actual = again.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())
    assert not torch.equal(actual["net.norm.running_mean"], torch.zeros(61))
    resumed.strategy.offloaded.close()


def test_layers_of_a_module_that_is_offloaded_cannot_be_synchronized(tmp_path, monkeypatch):
    """On GPUs, where torch has such layers. The remedy works."""
    monkeypatch.setattr(sluice.lightning.SluiceStrategy, "root_device", torch.device("cuda", 0))
    monkeypatch.setattr(sluice.lightning.SluiceStrategy, "world_size", 2)
    monkeypatch.setattr(sluice.lightning.SluiceStrategy, "model", None)
    for converts in (False, True):
        module = Module(Normed())
        if converts:
            module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)
        optimizer = sluice.offload(module, small(tmp_path), units=[Block])
        strategy = sluice.lightning.SluiceStrategy()
        strategy.model = strategy._lightning_module = module
        strategy._layer_sync = TorchSyncBatchNorm()
        if converts:
            strategy._synchronize_layers()
            assert type(module.net.norm) is torch.nn.SyncBatchNorm
        else:
            with pytest.raises(sluice.ArgumentError, match="comes too late .*convert_sync_batchnorm.module. before offload"):
                strategy._synchronize_layers()
        optimizer.close()


def test_a_kill_between_the_two_files_mixes_nothing(tmp_path):
    """Lightning's file of one step beside Sluice's folder of a later one: the folder of before stays until both are there, and if it
    is gone, the difference is an error."""
    saved = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", filename="one", every_n_train_steps=2, save_top_k=1,
                                         enable_version_counter=False)
    path = tmp_path / "saved" / "one.ckpt"
    _, made = fit(tmp_path, tiny(), strategy_of(tmp_path), 2, callbacks=[saved], limit_val_batches=0)
    before = path.read_bytes()
    trainer_state = made.strategy.offloaded
    trainer_state.save(str(path) + ".sluice")  # a second one of the same step: its folder takes the place of the first
    trainer_state.close()
    _, resumed = fit(tmp_path, tiny(seed=1), strategy_of(tmp_path), 4, ckpt_path=path, callbacks=[saved], limit_val_batches=0)
    resumed.strategy.offloaded.close()
    folders = [folder.name for folder in (tmp_path / "saved" / "one.ckpt.sluice").iterdir() if folder.name.startswith("step-")]
    assert folders == ["step-000000004"]
    path.write_bytes(before)
    strategy = strategy_of(tmp_path)
    with pytest.raises(sluice.ArgumentError, match="has no folder .*one.ckpt.sluice/step-000000002 beside it: the folder .* is missing"):
        fit(tmp_path, tiny(), strategy, 6, ckpt_path=path, enable_checkpointing=False, limit_val_batches=0)
    assert strategy.offloaded._engine.applied_step() == 0  # as it was, and not the state of step 4
    strategy.offloaded.close()


def test_a_file_of_another_strategy_takes_no_folder_of_before(tmp_path):
    options = {"enable_checkpointing": False, "limit_val_batches": 0}
    path = tmp_path / "one.ckpt"
    for first in (strategy_of(tmp_path), "auto"):
        _, made = fit(tmp_path, tiny(), first, 2, **options)
        made.save_checkpoint(path)
    strategy = strategy_of(tmp_path)
    with pytest.raises(sluice.ArgumentError, match="another strategy saved the file"):
        fit(tmp_path, tiny(), strategy, 4, ckpt_path=path, **options)
    assert strategy.offloaded._engine.applied_step() == 0
    strategy.offloaded.close()


class Failing(TorchCheckpointIO):
    """A drive that is full from some time on."""

    is_full = False

    def save_checkpoint(self, *args, **options):
        if self.is_full:
            raise OSError("the drive is full")
        time.sleep(0.2)  # behind save_checkpoint() of the strategy
        super().save_checkpoint(*args, **options)


def test_a_file_that_is_written_in_the_background(tmp_path):
    """The folder of before stays until the new file is there, and also where that could not be written."""
    path, drive, options = tmp_path / "one.ckpt", Failing(), {"enable_checkpointing": False, "limit_val_batches": 0}

    def folders():
        return [folder.name for folder in (tmp_path / "one.ckpt.sluice").iterdir() if folder.name.startswith("step-")]

    class Saving(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready % 2 == 0:
                drive.is_full = trainer.global_step == 3
                trainer.save_checkpoint(path)
                named = torch.load(path, weights_only=False)["sluice_folder"] if path.exists() else None
                assert trainer.global_step == 1 or folders() == [named] == [f"step-{trainer.global_step:09}"]
    with pytest.raises(OSError, match="the drive is full"):
        fit(tmp_path, tiny(), strategy_of(tmp_path), 4, callbacks=[Saving()], plugins=[AsyncCheckpointIO(drive)], **options)
    assert sorted(folders()) == ["step-000000002", "step-000000003"]
    _, resumed = fit(tmp_path, tiny(seed=1), strategy_of(tmp_path), 4, ckpt_path=path, **options)
    assert resumed.global_step == resumed.strategy.offloaded._engine.applied_step() == 4
    resumed.strategy.offloaded.close()


def test_checkpoints_elsewhere_are_refused(tmp_path, monkeypatch):
    """The engine writes into the local file system, where fsspec's path would be a folder below the working directory."""
    monkeypatch.chdir(tmp_path)
    options, words = {"enable_checkpointing": False, "limit_val_batches": 0}, "^memory://bucket.* is not in the local file system"
    _, made = fit(tmp_path, tiny(), strategy_of(tmp_path), 2, **options)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(sluice.ArgumentError, match=words):
        made.save_checkpoint("memory://bucket/x.ckpt")
    assert sorted(tmp_path.rglob("*")) == before
    address = f"file://{tmp_path}/x.ckpt"
    made.save_checkpoint(address)
    made.strategy.offloaded.close()
    assert (tmp_path / "x.ckpt").is_file() and (tmp_path / "x.ckpt.sluice" / "latest").is_dir()
    _, resumed = fit(tmp_path, tiny(seed=1), strategy_of(tmp_path), 3, ckpt_path=address, **options)
    assert resumed.strategy.offloaded._engine.applied_step() == 3
    resumed.strategy.remove_checkpoint(address)
    assert not (tmp_path / "x.ckpt").exists() and not (tmp_path / "x.ckpt.sluice").exists()
    resumed.strategy.offloaded.close()
    strategy = strategy_of(tmp_path)
    with pytest.raises(sluice.ArgumentError, match=words):
        fit(tmp_path, tiny(), strategy, 3, ckpt_path="memory://bucket/x.ckpt", **options)
    strategy.offloaded.close()
    strategy = strategy_of(tmp_path)
    with pytest.raises(sluice.ArgumentError, match=words):
        fit(tmp_path, tiny(), strategy, 3, callbacks=[pl.callbacks.ModelCheckpoint(dirpath="memory://bucket")], limit_val_batches=0)
    assert strategy.offloaded is None  # before anything is offloaded


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_exception_leaves_a_checkpoint(tmp_path, where, kind):
    """In the third step, between its micro-batches: with the state of the second. The exception is the program's own."""
    class Stopped(Module):
        def stop(self, place):
            if place == where and self.trainer.global_step == 2 and len(self.losses) == 5:
                raise kind("the program's own")

        def training_step(self, data, index):
            (parameter, *_) = self.net.blocks[1].parameters()
            if parameter.grad_fn is None and index == 0:
                parameter.register_hook(lambda _: self.stop("backward"))
                self.net.blocks[1].register_forward_hook(lambda *_: self.stop("forward"))
            return super().training_step(data, index)

        def on_after_backward(self):
            self.stop("optimizer")
    options = {"limit_val_batches": 0}
    expected, plain = fit(tmp_path, tiny(), strategy_of(tmp_path), 2, enable_checkpointing=False, **options)
    saved = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", filename="one", every_n_train_steps=50, save_on_exception=True)
    module, made = Stopped(tiny()), trainer(tmp_path, strategy_of(tmp_path), 4, callbacks=[saved], **options)
    with pytest.raises(SystemExit if kind is KeyboardInterrupt else kind) as raised:
        refit(tmp_path, made, module)
    assert kind is KeyboardInterrupt or str(raised.value) == "the program's own"
    file = torch.load(tmp_path / "saved" / "one.ckpt", weights_only=False)
    assert file["global_step"] == 2 and file["sluice_folder"] == "step-000000002"
    assert all(torch.equal(value, file["state_dict"][name]) for name, value in expected.state_dict().items())
    _, resumed = fit(tmp_path, tiny(seed=1), strategy_of(tmp_path), 4, ckpt_path=tmp_path / "saved" / "one.ckpt",
                     enable_checkpointing=False, **options)
    assert resumed.global_step == resumed.strategy.offloaded._engine.applied_step() == 4
    for one in (plain, made, resumed):
        one.strategy.offloaded.close()


@pytest.mark.parametrize("where", ["step", "validation", "last step", "stopped step"])
def test_slurms_signal_is_answered_between_steps(tmp_path, monkeypatch, where):
    """It comes in a step's second micro-batch, or in the first one, behind which the fit ends. The checkpoint is there before Slurm is
    asked, and training goes on."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\nls {tmp_path}/hpc_ckpt_1.ckpt {tmp_path}/hpc_ckpt_1.ckpt.sluice/latest && echo $* >> {tmp_path}/asked\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    for name, value in {"JOB_ID": "17", "JOB_NAME": "train", "NTASKS": "1", "LOCALID": "0", "PROCID": "0", "NODEID": "0",
                        "JOB_NODELIST": "localhost"}.items():
        monkeypatch.setenv("SLURM_" + name, value)

    class Preempted(Module):
        def training_step(self, data, index):
            comes = index == {"step": 3, "last step": 7, "stopped step": 6}.get(where)
            self.trainer.should_stop = where == "stopped step" and comes
            handle = self.net.blocks[1].register_forward_hook(lambda *_: comes and os.kill(os.getpid(), signal.SIGUSR1) or None)
            loss = super().training_step(data, index)
            handle.remove()
            return loss

        def validation_step(self, data, index):
            if where == "validation" and self.trainer.global_step == 2 and not self.trainer.sanity_checking:
                os.kill(os.getpid(), signal.SIGUSR1)
            super().validation_step(data, index)
    before = signal.getsignal(signal.SIGUSR1)
    module = Preempted(tiny())
    made = trainer(tmp_path, strategy_of(tmp_path), 4, enable_checkpointing=False, plugins=[SLURMEnvironment()], val_check_interval=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module, torch.utils.data.DataLoader(DATA, batch_size=None), torch.utils.data.DataLoader(DATA[:2], batch_size=None))
    assert made.global_step == (3 if where == "stopped step" else 4) and (tmp_path / "asked").read_text() == "requeue 17\n"
    assert signal.getsignal(signal.SIGUSR1) == before
    file = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    step = {"last step": 4, "stopped step": 3}.get(where, 2)
    assert file["global_step"] == step and file["sluice_folder"] == f"step-{step:09}"
    _, resumed = fit(tmp_path, tiny(seed=1), strategy_of(tmp_path), 6, enable_checkpointing=False, limit_val_batches=0,
                     plugins=[SLURMEnvironment()])
    assert resumed.global_step == resumed.strategy.offloaded._engine.applied_step() == 6
    resumed.strategy.offloaded.close()
    if where != "stopped step":  # whose close() would say that the step is lost
        made.strategy.offloaded.close()


@pytest.mark.parametrize("clipped, bound", [(1.0, None), (0, 0.5), (1.0, 0.5)])
def test_an_offloaded_optimizer_that_clips_otherwise_is_refused(tmp_path, clipped, bound):
    class Own(Module):
        def configure_optimizers(self):
            config = small(tmp_path)
            config["optimizer"]["clip_norm"] = clipped
            self.optimizer = sluice.offload(self.net, config, units=[Block], lr=1e-3)
            return self.optimizer
    options = {"enable_checkpointing": False, "limit_val_batches": 0}
    words = (f"optimizer.clip_norm is {float(clipped)}, but the Trainer's gradient_clip_val is {bound}; give the Trainer "
             f"gradient_clip_val={float(clipped)}, or .* optimizer.clip_norm {bound or 0.0}")
    refused = Own(tiny())
    with pytest.raises(sluice.ArgumentError, match=words):
        refit(tmp_path, trainer(tmp_path, "sluice", 1, gradient_clip_val=bound, **options), refused)
    refused.optimizer.close()
    taken = Own(tiny())  # the remedy
    refit(tmp_path, trainer(tmp_path, "sluice", 1, gradient_clip_val=float(clipped), **options), taken)
    assert taken.optimizer._engine.applied_step() == 1
    taken.optimizer.close()


def test_a_loop_of_the_modules_own_clips_by_itself(tmp_path):
    """Without automatic optimization, Lightning has no gradient_clip_val."""
    class Own(Module):
        def training_step(self, data, index):
            self.manual_backward(super().training_step(data, index))
            self.clip_gradients(self.optimizers(), gradient_clip_val=1.0)
            self.optimizers().step()
            self.optimizers().zero_grad()

        def configure_optimizers(self):
            return sluice.offload(self.net, small(tmp_path), units=[Block], lr=1e-3)
    module = Own(tiny())
    module.automatic_optimization = False
    made = trainer(tmp_path, "sluice", 2, gradient_clip_val=None, accumulate_grad_batches=1, enable_checkpointing=False,
                   limit_val_batches=0)
    refit(tmp_path, made, module)
    assert made.strategy.offloaded._engine.applied_step() == 2
    made.strategy.offloaded.close()


def test_a_checkpoint_between_micro_batches_names_the_keys(tmp_path):
    class Early(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 1:
                trainer.save_checkpoint(tmp_path / "early.ckpt")
    strategy = strategy_of(tmp_path)
    with pytest.raises(sluice.ArgumentError, match="val_check_interval be a multiple of accumulate_grad_batches"):
        fit(tmp_path, tiny(), strategy, 2, callbacks=[Early()], enable_checkpointing=False)
    strategy.offloaded.close()


def test_budgets_of_a_quarter(tmp_path, monkeypatch):
    """From the second step on, the bytes of every step are the plan's."""
    planned = watch_steps(monkeypatch, micro_batches=2)
    reference, _ = fit(tmp_path, tiny(width=128, layers=8), "auto", 6, enable_checkpointing=False, limit_val_batches=0)
    config = budgeted(small(tmp_path), reference.net, 1344, 1344)
    strategy = sluice.lightning.SluiceStrategy(config, placement="nvme", units=[Block])
    module, made = fit(tmp_path, tiny(width=128, layers=8), strategy, 6, enable_checkpointing=False, limit_val_batches=0)
    assert worst(module.losses, reference.losses) <= 2e-6
    assert planned == [False, True, True, True, True, True]
    made.strategy.offloaded.close()


def test_leases(tmp_path):
    """They go to offload(), which refuses a model without them whose layers all read a parameter of another unit."""
    def reading():
        torch.manual_seed(0)
        return Encoder()
    options = {"enable_checkpointing": False, "limit_val_batches": 0}
    strategies = [sluice.lightning.SluiceStrategy(small(tmp_path), placement="nvme", units=[Relative], leases=leases) for leases in (2, None)]
    losses = [fit(tmp_path, reading(), strategy, 2, **options)[0].losses for strategy in ("auto", strategies[0])]
    assert worst(losses[1], losses[0]) <= 2e-6
    strategies[0].offloaded.close()
    with pytest.raises(sluice.ArgumentError, match="leases=2"):
        fit(tmp_path, reading(), strategies[1], 2, **options)
    with contextlib.suppress(sluice.SluiceError):  # says that a step was abandoned
        strategies[1].offloaded.close()


def test_modules_on_the_meta_device(tmp_path):
    with torch.device("meta"):
        net = tiny()
    values = {f"net.{name}": value for name, value in tiny().state_dict().items()}
    strategy = sluice.lightning.SluiceStrategy(small(tmp_path), placement="nvme", values=values)
    module, made = fit(tmp_path, net, strategy, 2, enable_checkpointing=False)
    reference, _ = fit(tmp_path, tiny(), "auto", 2, enable_checkpointing=False)
    assert worst(module.losses, reference.losses) <= 2e-6
    made.strategy.offloaded.close()


class Two(Module):
    def configure_optimizers(self):
        halves = list(self.parameters())
        return [torch.optim.SGD(halves[:2]), torch.optim.SGD(halves[2:])]


def test_what_is_refused(tmp_path):
    module = Two(tiny())
    module.automatic_optimization = False
    with pytest.raises(sluice.ArgumentError, match="returned 2 optimizers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(accelerator="cpu", strategy="sluice", max_steps=1, logger=False, enable_checkpointing=False,
                   enable_progress_bar=False).fit(module, torch.utils.data.DataLoader(DATA, batch_size=None))
    with pytest.raises(sluice.ArgumentError, match="clip_grad_value_"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(tmp_path, "sluice", 1, gradient_clip_algorithm="value", enable_checkpointing=False).fit(
            Module(tiny()), torch.utils.data.DataLoader(DATA, batch_size=None))


def test_durable_stores_are_refused(tmp_path):
    """A second run could not go on from them, and ckpt_path neither."""
    section = {"storage": {"state": {"name": "run-7"}}}
    for options in ({"config": {**small(tmp_path), **section}}, {"config": small(tmp_path), "keys": section}):
        with pytest.raises(sluice.ArgumentError, match='SluiceStrategy.*storage.state.name is "run-7".*leave storage.state out'):
            sluice.lightning.SluiceStrategy(**options)

    class Own(Module):
        def configure_optimizers(self):
            config = small(tmp_path)
            config["storage"] |= section["storage"]
            config["optimizer"]["clip_norm"] = 0.5
            self.optimizer = sluice.offload(self.net, config, units=[Block], lr=1e-3)
            return self.optimizer
    module = Own(tiny())
    with pytest.raises(sluice.ArgumentError, match="configure_optimizers.*a durable store.*leave storage.state out"):
        refit(tmp_path, trainer(tmp_path, "sluice", 2, enable_checkpointing=False), module)
    assert not module.losses
    module.optimizer.close()


def refit(tmp_path, made, module, ckpt_path=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module, torch.utils.data.DataLoader(DATA, batch_size=None), ckpt_path=ckpt_path)


def test_a_second_fit_names_remedies_that_work(tmp_path):
    """By the same Trainer, and by another one."""
    options = {"enable_checkpointing": False, "limit_val_batches": 0}
    module, made = fit(tmp_path, tiny(), strategy_of(tmp_path), 2, **options)
    optimizer = made.strategy.offloaded
    words = r"this Module is offloaded already.*trainer.save_checkpoint\(path\).*fit\(module, ckpt_path=path\).*load_state_dict\(\)"
    for again in (made, trainer(tmp_path, strategy_of(tmp_path), 4, **options)):
        again.fit_loop.max_epochs = 9
        with pytest.raises(sluice.ArgumentError, match=words):
            refit(tmp_path, again, module)
    with pytest.raises(sluice.ArgumentError, match="has offloaded another module; make a new Trainer and strategy"):
        refit(tmp_path, made, Module(tiny()))
    made.strategy._lightning_module = module  # as before that one
    made.save_checkpoint(tmp_path / "kept.ckpt")
    state = module.state_dict()
    optimizer.close()
    new = Module(tiny(seed=3))
    going_on = trainer(tmp_path, strategy_of(tmp_path), 4, **options)
    refit(tmp_path, going_on, new, ckpt_path=tmp_path / "kept.ckpt")
    assert going_on.strategy.offloaded._engine.applied_step() == 4
    new = Module(tiny(seed=3))
    new.load_state_dict(state)
    begun = trainer(tmp_path, strategy_of(tmp_path), 1, **options)
    refit(tmp_path, begun, new)
    assert begun.strategy.offloaded._engine.applied_step() == 1
    for one in (going_on, begun):
        one.strategy.offloaded.close()


@pytest.mark.parametrize("is_torchs", [False, True])
def test_a_checkpoint_without_its_folder_names_remedies(tmp_path, is_torchs):
    """Moved without it, or saved by another strategy."""
    options = {"enable_checkpointing": False, "limit_val_batches": 0}
    whole, made = fit(tmp_path, tiny(), "auto" if is_torchs else strategy_of(tmp_path), 2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_checkpoint(tmp_path / "one.ckpt")
    expected = {name: value.clone() for name, value in whole.state_dict().items()}
    if not is_torchs:
        made.strategy.offloaded.close()
        (tmp_path / "one.ckpt.sluice").rename(tmp_path / "elsewhere")
    why = "another strategy saved the file" if is_torchs else "the folder with the state is missing"
    strategy = strategy_of(tmp_path)
    words = rf'one.ckpt has no folder \S*one.ckpt.sluice\S* beside it: {why}.*torch.load\(path\)\["state_dict"\]'
    with pytest.raises(sluice.ArgumentError, match=words):
        fit(tmp_path, tiny(seed=1), strategy, 4, ckpt_path=tmp_path / "one.ckpt", **options)
    strategy.offloaded.close()
    new = Module(tiny(seed=1))
    new.load_state_dict(torch.load(tmp_path / "one.ckpt")["state_dict"])
    assert all(torch.equal(value, expected[name]) for name, value in new.state_dict().items())
    begun = trainer(tmp_path, strategy_of(tmp_path), 1, **options)
    refit(tmp_path, begun, new)
    begun.strategy.offloaded.close()
    if not is_torchs:
        (tmp_path / "elsewhere").rename(tmp_path / "one.ckpt.sluice")
        _, resumed = fit(tmp_path, tiny(seed=1), strategy_of(tmp_path), 4, ckpt_path=tmp_path / "one.ckpt", **options)
        assert resumed.strategy.offloaded._engine.applied_step() == 4
        resumed.strategy.offloaded.close()


class Cycling(Module):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=9), "interval": "step"}]


def test_a_scheduler_of_momentum_is_refused_before_anything_is_offloaded(tmp_path):
    module = Cycling(tiny())
    with pytest.raises(sluice.ArgumentError, match="OneCycleLR also moves betas or momentum.*cycle_momentum=False"):
        refit(tmp_path, trainer(tmp_path, strategy_of(tmp_path), 2, enable_checkpointing=False), module)
    assert not hasattr(module, "_sluice")


AVERAGES = {"StochasticWeightAveraging": {"swa_lrs": 1e-3}, "WeightAveraging": {},
            "EMAWeightAveraging": {}}


@pytest.mark.parametrize("name", AVERAGES)
def test_callbacks_of_averages_are_refused(tmp_path, name):
    """They would average poison, and end the process where they write."""
    if not hasattr(pl.callbacks, name):
        pytest.skip(f"this Lightning has no {name}")
    callback = getattr(pl.callbacks, name)(**AVERAGES[name])
    strategy = strategy_of(tmp_path)
    words = f"^{name} reads and writes.*leave it out.*gathered.module.*load_state_dict"
    with pytest.raises(sluice.ArgumentError, match=words):
        fit(tmp_path, tiny(), strategy, 2, callbacks=[callback], enable_checkpointing=False)
    assert strategy.offloaded is None


@pytest.mark.parametrize("name", ["BackboneFinetuning", "Later", "LaterStill"])
def test_callbacks_of_fine_tuning_are_refused(tmp_path, name):
    """They would unfreeze what was planned without a state, after epochs of training."""
    class Later(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net.blocks)

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 10:
                self.unfreeze_and_add_param_group(module.net.blocks, optimizer)

    class LaterStill(Later):
        def finetune_function(self, module, epoch, optimizer):
            super().finetune_function(module, epoch - 10, optimizer)
    callback = {"BackboneFinetuning": pl.callbacks.BackboneFinetuning, "Later": Later, "LaterStill": LaterStill}[name]()
    strategy = strategy_of(tmp_path)
    with pytest.raises(sluice.ArgumentError, match=f"^{name} unfreezes layers.*leave it out.*a group of their own with an lr of 0"):
        fit(tmp_path, tiny(), strategy, 2, kind=WithBackbone, callbacks=[callback], enable_checkpointing=False)
    assert strategy.offloaded is None


class WithBackbone(Module):
    @property
    def backbone(self):
        return self.net.blocks


def test_a_callback_of_fine_tuning_that_unfreezes_nothing(tmp_path):
    class Slower(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net.blocks)

        def finetune_function(self, module, epoch, optimizer):
            optimizer.param_groups[0]["lr"] = 1e-4
    found = [fit(tmp_path, tiny(), strategy, 3, callbacks=[Slower()], enable_checkpointing=False) for strategy in
             ("auto", strategy_of(tmp_path))]
    assert worst(*(module.losses for module, _ in found)) <= 2e-6
    found[1][1].strategy.offloaded.close()


def test_a_group_that_is_frozen_by_its_rate(tmp_path):
    """The remedy that the message names."""
    class Later(pl.Callback):
        def on_train_batch_end(self, made, module, *_):
            seen.append(values(module))
            made.optimizers[0].param_groups[1]["lr"] = 1e-3 if made.global_step >= 2 else 0.0

    class InGroups(Module):
        def configure_optimizers(self):
            late = list(self.net.blocks.parameters())
            others = [p for p in self.parameters() if not any(p is q for q in late)]
            return torch.optim.AdamW([{"params": others}, {"params": late, "lr": 0.0}], lr=1e-3)

    def values(module):
        with sluice.gathered(module):
            return [torch.cat([p.detach().flatten() for p in part.parameters()]) for part in (module.net.norm, module.net.blocks)]
    seen = []
    module, strategy = InGroups(tiny(tied=False)), strategy_of(tmp_path)
    made = trainer(tmp_path, strategy, 4, callbacks=[Later()], enable_checkpointing=False, accumulate_grad_batches=1)
    made.fit(module, torch.utils.data.DataLoader(DATA, batch_size=None))
    moved = [[not torch.equal(a, b) for a, b in zip(one, other)] for one, other in zip(seen, seen[1:])]
    assert moved == [[True, False], [True, True], [True, True]]
    strategy.offloaded.close()


def test_averages_by_a_callback_of_the_programs_own(tmp_path):
    """The remedy that the message names."""
    class Average(pl.Callback):
        def __init__(self):
            self.sums, self.count = None, 0

        def on_train_batch_end(self, made, module, *_):
            if made.fit_loop.epoch_loop.batch_progress.current.ready % 2:
                return  # in the middle of a step
            with sluice.gathered(module):
                values = [parameter.detach().clone() for parameter in module.net.parameters()]
            self.sums = values if self.sums is None else [a + b for a, b in zip(self.sums, values)]
            self.count += 1

        def on_train_end(self, made, module):
            names = [name for name, _ in module.net.named_parameters()]
            averages = {name: total / self.count for name, total in zip(names, self.sums)}
            module.net.load_state_dict(averages, strict=False)
    found = []
    for strategy in ("auto", strategy_of(tmp_path)):
        module, made = fit(tmp_path, tiny(tied=False), strategy, 3, callbacks=[Average()],
                           enable_checkpointing=False, limit_val_batches=0)
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    assert all(torch.allclose(value, found[1][name], atol=2e-5) for name, value in found[0].items())
    made.strategy.offloaded.close()


def test_where_it_computes(tmp_path, monkeypatch):
    """Each process on its own GPU of those that the Trainer names. The model goes there unit by unit, not as a whole."""
    strategy = sluice.lightning.SluiceStrategy(small(tmp_path), placement="nvme", units=[Block])
    assert strategy.root_device == torch.device("cpu")
    strategy.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 1)
    assert strategy.root_device == torch.device("cuda", 1)

    given = []

    def offload(model, config, *, device, **options):
        given.append(device)
        return sluice.offload(model, config, **options)
    monkeypatch.setattr(sluice.lightning, "offload", offload)
    monkeypatch.setattr(Module, "to", lambda module, *where: pytest.fail("moved as a whole"))
    monkeypatch.setattr(Module, "cpu", lambda module: pytest.fail("moved as a whole"))
    _, made = fit(tmp_path, tiny(), sluice.lightning.SluiceStrategy(small(tmp_path), placement="nvme", units=[Block]), 1,
                  enable_checkpointing=False)
    assert given == [torch.device("cpu")]
    assert made.lightning_module is not None
    made.strategy.offloaded.close()


def test_evaluation_without_training_moves_the_model(tmp_path, monkeypatch):
    moved = []
    module = Module(tiny())
    to = module.to
    monkeypatch.setattr(module, "to", lambda where: moved.append(where) or to(where))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(tmp_path, "sluice_nvme", 1).validate(module, torch.utils.data.DataLoader(DATA[:2], batch_size=None), verbose=False)
    assert moved == [torch.device("cpu")] and len(module.validations) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_on_a_gpu(tmp_path):
    losses = []
    for strategy in ("auto", sluice.lightning.SluiceStrategy(small(tmp_path), placement="nvme", units=[Block])):
        module, made = fit(tmp_path, tiny(), strategy, 6, enable_checkpointing=False, accelerator="gpu")
        losses.append(module.losses)
    assert worst(losses[1], losses[0]) <= 2e-5
    made.strategy.offloaded.close()
