"""sluice_offload.optim under accelerate, transformers' Trainer and Lightning, as a program would use torch.optim there."""

import lightning.pytorch as pl
import pytest
import torch
import transformers
from accelerate import Accelerator

from conftest import batch, tiny, worst
from sluice_offload import optim
from test_lightning import Module
from test_transformers import arguments, gpt2, logs, rows

transformers.utils.logging.set_verbosity_error()


@pytest.fixture
def place(tmp_path):
    """The state on NVMe, through buffers of a part of it."""
    return {"placement": {"optimizer": "nvme"}, "memory": {"host": "240KiB"},
            "storage": {"paths": [str(tmp_path)], "block_elements": 4096}}


def adamw(model, config=None):
    """torch's, or with a config this package's."""
    kind = torch.optim.AdamW if config is None else optim.AdamW
    return kind(model.parameters(), lr=1e-3, weight_decay=0.1, **({} if config is None else {"config": config}))


def is_untouched(optimizer):
    report = optimizer.report
    return report.nvme_bytes > 0 and report.nvme_read_bytes == report.nvme_write_bytes == 0 and not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accelerate(tmp_path, place, dtype):
    """prepare() brings whatever state there is to its device, and writes it back. Before the first step, there is none."""
    def run(model, optimizer, windows, load=None, save=None):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = torch.utils.data.DataLoader(rows(12), batch_size=2)
        model, prepared, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if isinstance(optimizer, optim.AdamW):
            assert is_untouched(optimizer)
        if load:
            accelerator.load_state(load)
        losses = []
        for window, data in enumerate(loader):
            if window not in windows:
                continue
            with accelerator.accumulate(model):
                loss = model(**data).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
                schedule.step()
                prepared.zero_grad()
            losses.append(loss.item())
            if save and window == 3:
                accelerator.save_state(save)
        return losses
    model, reference = gpt2(width=64).to(dtype), gpt2(width=64).to(dtype)
    ours = adamw(model, place)
    losses = run(model, ours, range(6), save=tmp_path / "saved")
    expected = run(reference, adamw(reference), range(6))
    assert worst(losses, expected) <= (2e-6 if dtype == torch.float32 else 2e-2)
    assert {int(entry["step"]) for entry in ours.state.values()} == {3}
    again = gpt2(seed=9, width=64).to(dtype)
    other = adamw(again, place)
    assert run(again, other, range(4, 6), load=tmp_path / "saved") == losses[4:]
    assert {int(entry["step"]) for entry in other.state.values()} == {3}
    for optimizer in (ours, other):
        optimizer.close()


def test_what_was_prepared_takes_another_group(place):
    """It has neither stepped nor loaded anything."""
    model = gpt2()
    ours = adamw(model, place)
    prepared = Accelerator(cpu=True).prepare(ours)
    prepared.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    ours.param_groups[1]["params"][0].grad = torch.ones(3)
    prepared.step()
    assert ours.param_groups[1]["params"][0].ne(1).all()
    ours.close()


def test_the_trainer(tmp_path, place):
    """It gives the optimizer to accelerate. A checkpoint has its state, and training goes on with the same bits."""
    untouched = []

    class Begins(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **_):
            untouched.append(is_untouched(optimizer.optimizer))

    def trained(name, model, optimizer, first=None, callbacks=(), **options):
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
        made = transformers.Trainer(model=model, args=arguments(tmp_path / name, eval_strategy="no", **options), train_dataset=rows(),
                                    optimizers=(optimizer, schedule), callbacks=list(callbacks))
        made.train(resume_from_checkpoint=first)
        return made
    reference, model, again = gpt2(width=64), gpt2(width=64), gpt2(seed=9, width=64)
    expected = trained("theirs", reference, adamw(reference))
    ours, other = adamw(model, place), adamw(again, place)
    whole = trained("ours", model, ours, callbacks=[Begins()])
    for key in ("loss", "grad_norm"):
        assert worst(logs(whole, key), logs(expected, key)) <= 2e-6, key
    assert logs(whole, "learning_rate") == logs(expected, "learning_rate")
    assert untouched == [True] and ours.report.nvme_write_bytes > 0
    resumed = trained("ours", again, other, first=str(tmp_path / "ours" / "out" / "checkpoint-3"), save_strategy="no")
    assert logs(resumed, "loss") == logs(whole, "loss")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    for optimizer in (ours, other):
        optimizer.close()


@pytest.mark.parametrize("bound", [1.0, 0.0])
def test_the_trainer_with_gradients_that_wait_for_their_norm(tmp_path, place, bound):
    """It asks for the norm with its bound, or without one."""
    def trained(model, optimizer, bound):
        made = transformers.Trainer(model=model, args=arguments(tmp_path, max_steps=2, eval_strategy="no", save_strategy="no", max_grad_norm=bound,
                                                                gradient_accumulation_steps=1, dataloader_num_workers=0),
                                    train_dataset=rows(), optimizers=(optimizer, transformers.get_constant_schedule(optimizer)))
        made.train()
        return made
    reference, model = gpt2(width=64), gpt2(width=64)
    expected = trained(reference, adamw(reference), 1.0)
    ours = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, config=place, gradients="backward", clip_norm=1.0)
    made = trained(model, ours, bound)
    for key in ("loss", "grad_norm"):
        assert worst(logs(made, key), logs(expected, key)) <= 2e-6, key
    ours.close()


def test_lightning(tmp_path, place):
    """It moves each tensor of the state to the Trainer's device, and back at the end."""
    untouched = []

    class Alone(Module):
        config = None

        def configure_optimizers(self):
            return adamw(self, self.config)

        def on_train_start(self):
            if self.config:
                untouched.append(is_untouched(self.optimizers().optimizer))

    def fit(config):
        module = Alone(tiny(width=64))
        module.config = config
        trainer = pl.Trainer(accelerator="cpu", max_steps=4, gradient_clip_val=0.5, default_root_dir=tmp_path, logger=False,
                             enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(module, torch.utils.data.DataLoader([batch(step) for step in range(4)], batch_size=None))
        return module, trainer
    (expected, _), (module, trainer) = fit(None), fit(place)
    assert worst(module.losses, expected.losses) <= 2e-6 and len(module.losses) == 4
    assert untouched == [True]
    ours = trainer.optimizers[0]
    ours._engine.wait_all()
    assert ours.report.nvme_write_bytes == 4 * ours.report.pass_bytes  # nothing but updates has written
    assert not any(entry.was_set for entry in ours.state.values())
    ours.close()


@pytest.mark.parametrize("options", [{}, {"gradients": "backward", "clip_norm": 1.0}])
def test_what_lightning_wraps_is_the_optimizer(tmp_path, place, options):
    """The wrapper in self.optimizers() is of the optimizer's class, and runs its methods. They change the optimizer, not the wrapper."""
    class Grows(Module):
        def on_train_start(self):
            wrapper, self.extra = self.optimizers(), torch.nn.Parameter(torch.ones(3))
            assert wrapper is not wrapper.optimizer
            wrapper.add_param_group({"params": [self.extra]})
            wrapper.clip_norm = 0.25
            assert wrapper.optimizer.clip_norm == 0.25 and "clip_norm" not in vars(wrapper)
            wrapper.state[self.extra] = {"step": 2, "exp_avg": torch.ones(3)}
            wrapper.load_state_dict(wrapper.state_dict())
            wrapper.zero_grad()
            wrapper.synchronize()

        def training_step(self, data, index):
            return super().training_step(data, index) + self.extra.square().sum()

        def configure_optimizers(self):
            return optim.AdamW(self.parameters(), lr=1e-3, config=place, **options)
    module = Grows(tiny(width=64))
    trainer = pl.Trainer(accelerator="cpu", max_steps=3, default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, torch.utils.data.DataLoader([batch(step) for step in range(4)], batch_size=None))
    ours, wrapper = trainer.optimizers[0], module.optimizers()
    assert ours.state[module.extra]["step"] == 5 and len(module.losses) == 3 and module.extra.ne(1).all()
    assert set(vars(wrapper)) == {"_optimizer", "_strategy", "_on_before_step", "_on_after_step"}
    assert wrapper.report.updated_elements == ours.report.updated_elements > 0
    wrapper.close()
    assert not ours._engine.is_open
