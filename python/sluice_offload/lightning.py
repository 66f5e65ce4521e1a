"""Strategies for Lightning: the LightningModule's parameters and the state of its optimizer live where the config says.

    import sluice_offload.lightning
    trainer = Trainer(strategy="sluice_nvme", gradient_clip_val=1.0)

"sluice" places everything as the config says, "sluice_offload" in host memory, "sluice_nvme" on NVMe.
SluiceStrategy(config=..., units=...) names budgets and folders; the config may be one for DeepSpeed.
"""

import contextlib
import copy
import os
import shutil
import signal
from typing import Any, Callable, Mapping, Optional, Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn

from .buffers import take_buffers
from .deepspeed import DeepspeedConfig, add_keys, find_config, leave_checkpoints
from .described import KEYS, describe
from .engine import Config, logger, require_no_store
from .errors import ArgumentError
from .offload import offload
from .optimizer import OffloadOptimizer
from .program_keys import engine_part
from .schedulers import rebind_scheduler, require_rates_alone

_STATE = ".sluice"  # beside Lightning's checkpoint: the folder of Sluice's
_FOLDER = "sluice_folder"  # in Lightning's checkpoint: the name of the one in there
# The names, in messages about a DeepSpeed config, of the values that come from Lightning.
_NAMES = {"batch": "the loader's batch_size", "micro_batches": "the Trainer's accumulate_grad_batches",
          "clip_norm": "the Trainer's gradient_clip_val", "precision": "the type by the Trainer's precision",
          **{key: f"{name} in configure_optimizers" for key, name in (("lr", "lr"), ("betas", "betas"), ("eps", "eps"),
                                                                      ("weight_decay", "weight_decay"))}}


def auto_values(trainer: "pl.Trainer", optimizer: torch.optim.Optimizer) -> "dict[str, Any]":
    """The values for which "auto" in a DeepSpeed config stands, and with which the others have to agree."""
    group, precision = optimizer.param_groups[0], str(trainer.precision)
    values: "dict[str, Any]" = {"names": _NAMES, "micro_batches": trainer.accumulate_grad_batches,
                                "precision": {"bf": "bf16", "16": "fp16"}.get(precision[:2], "fp32")}
    values |= {key: float(group[key]) for key in ("lr", "eps", "weight_decay") if key in group}
    if "betas" in group:
        values["betas"] = [float(beta) for beta in group["betas"]]
    if trainer.gradient_clip_val is not None:
        values["clip_norm"] = float(trainer.gradient_clip_val)
    loader = trainer.fit_loop._data_source.instance
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return values | ({} if size is None else {"batch": int(size)})


def _refuse_callbacks(trainer: "pl.Trainer") -> None:
    """Lightning's callbacks of averages read parameters where they are poison, and write where that
    ends the process. Those of fine-tuning read them there, too, and add groups."""
    names = ("StochasticWeightAveraging", "WeightAveraging")  # not every Lightning has the second
    kinds = tuple(getattr(pl.callbacks, name) for name in names if hasattr(pl.callbacks, name))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kinds):
            raise ArgumentError(
                f"{type(callback).__name__} reads and writes the module's parameters between steps, "
                "where an offloaded module has none; leave it out, and average in a callback of "
                "your own: read the parameters inside of `with sluice_offload.gathered(module):`, "
                "and give the module the averages by module.load_state_dict()")
        if _unfreezes(callback):
            raise ArgumentError(
                f"{type(callback).__name__} unfreezes layers during the training and adds their parameters to the optimizer, and an offloaded "
                "module's are planned beforehand; leave it out, and let configure_optimizers give the frozen layers a group of their own "
                "with an lr of 0, which freezes them until a scheduler or a callback of your own sets it")


def _unfreezes(callback: Any) -> bool:
    """Whether the function that a callback of fine-tuning calls at each epoch names one of those which unfreeze. It may be epochs until it
    does."""
    if not isinstance(callback, pl.callbacks.BaseFinetuning):
        return False
    functions = [vars(kind).get("finetune_function") for kind in type(callback).__mro__]
    names = {name for function in functions for name in getattr(getattr(function, "__code__", None), "co_names", ())}
    return not names.isdisjoint(("unfreeze_and_add_param_group", "add_param_group", "make_trainable"))


def _local(path: Any) -> Optional[str]:
    """A path of Lightning's, which may begin with file://, as one of the local file system; None where it is not in that."""
    return str(url_to_fs(str(path))[1]) if get_protocol(str(path)) in ("file", "local") else None


def _require_local(path: Any) -> str:
    found = _local(path)
    if found is None:
        raise ArgumentError(f"{path} is not in the local file system, and the folder with the state of an offloaded module lies beside "
                            "Lightning's checkpoint there; give ModelCheckpoint's dirpath, the Trainer's default_root_dir, "
                            "save_checkpoint() and ckpt_path a local path, and copy a checkpoint together with its folder")
    return found


def _folder_in(root: str, name: str) -> Optional[str]:
    """The folder `name`, or the newest if it is of the same step: where the same state is saved again, the engine keeps the second
    folder alone."""
    for found in (os.path.join(root, name), os.path.realpath(os.path.join(root, "latest"))):
        if name and os.path.isdir(found) and os.path.basename(found).split(".")[0] == name.split(".")[0]:
            return found
    return None


def _say_unsaved(trainer: "pl.Trainer", module: "pl.LightningModule", exception: BaseException) -> None:
    """Instead of the on_exception() of a callback that would save."""
    logger.warning("%s has ended the training in this process, and the others may be elsewhere: no checkpoint is written; go on from the "
                   "last one", type(exception).__name__)


def _offloaded_already(kind: str) -> ArgumentError:
    return ArgumentError(f"this {kind} is offloaded already, and one fit() trains it. To go on with its moments, call "
                         "trainer.save_checkpoint(path), make a new module, Trainer and strategy, and call fit(module, ckpt_path=path); "
                         "with its values alone, give state_dict() to the new module by load_state_dict()")


class SluiceStrategy(ParallelStrategy):
    """One process, on the CPU or a GPU, or several, which share the state as sharding.stage of the config says.
    configure_optimizers returns one of torch.optim's AdamW, Adam, Adagrad or SGD, whose hyperparameters, groups and schedulers
    are taken."""

    strategy_name = "sluice"
    num_nodes = 1  # Lightning sets it
    # Lightning's own for processes that compute different parts of a batch.
    num_processes = DDPStrategy.num_processes
    set_world_ranks = DDPStrategy.set_world_ranks
    barrier, broadcast, reduce = DDPStrategy.barrier, DDPStrategy.broadcast, DDPStrategy.reduce
    determine_ddp_device_ids = DDPStrategy.determine_ddp_device_ids

    def __init__(self, config: "Config | str | os.PathLike[str] | None" = None, *, placement: Optional[str] = None,
                 units: "Sequence[type | str] | None" = None, values: Any = None, buffers: "Sequence[str]" = (),
                 leases: Optional[int] = None, keys: "Mapping[str, Any] | None" = None, **arguments: Any) -> None:
        """config: Sluice's or DeepSpeed's, a dictionary or a file. keys: keys of Sluice for which DeepSpeed has none."""
        super().__init__(**arguments)
        self._given = find_config({} if config is None else config)
        self._keys = keys or {}
        for one in (self._given, self._keys):
            require_no_store({} if isinstance(one, DeepspeedConfig) else one, "SluiceStrategy()")
        if placement is not None:
            if isinstance(self._given, DeepspeedConfig):
                raise ArgumentError(f"{self._given.name} is DeepSpeed's and says where the state lives; leave placement= out, and use "
                                    "the strategy \"sluice\"")
            self._given["placement"] = {"parameters": placement, "optimizer": placement, **self._given.get("placement", {})}
        self._options = {"units": units, "values": values, "buffers": buffers, "leases": leases}
        self.offloaded: Optional[OffloadOptimizer] = None
        self._stage: Optional[int] = None  # sharding.stage, where this has offloaded the module
        self._requeue: "Optional[Callable[[Any, Any], Any]]" = None  # Lightning's answer to Slurm's signal
        self._requeue_signal: "Optional[tuple[Any, Any]]" = None  # that has come, and is not answered yet

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, placement in (("sluice", None), ("sluice_offload", "host"), ("sluice_nvme", "nvme")):
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=f"{cls.__name__} with state on {placement or 'any tier'}",
                                           placement=placement)

    # --- Processes.

    @property
    def root_device(self) -> torch.device:
        """The CPU, or this process's GPU, by the Trainer's accelerator and devices."""
        return self.parallel_devices[self.local_rank] if self.parallel_devices else torch.device("cpu")

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives each process its own part of the data."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> "dict[str, Any]":
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        if self.world_size > 1:  # under torchrun it starts nothing
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        if self.world_size > 1 and not dist.is_initialized():
            assert self.cluster_environment is not None
            os.environ["MASTER_ADDR"] = str(self.cluster_environment.main_address)
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            backend = "gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, rank=self.global_rank, world_size=self.world_size)

    def model_to_device(self) -> None:
        """For training, the model stays on the CPU or on the meta device, from which offload() takes it: it may be larger than the
        GPU."""
        assert self.lightning_module is not None
        if self.offloaded is None and self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            self.lightning_module.to(self.root_device)

    def teardown(self) -> None:
        """Lightning moves the module to the CPU at the end. An offloaded one stays where it computes."""
        module = self._lightning_module
        if self.offloaded is not None:
            self._lightning_module = None
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    # --- Offloading.

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        _refuse_callbacks(trainer)
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "dirpath", None) is not None:
                _require_local(callback.dirpath)  # type: ignore[attr-defined]
            saves = isinstance(callback, pl.callbacks.OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False)
            if saves and self.world_size > 1:  # all of them save together, and one may have failed alone
                setattr(callback, "on_exception", _say_unsaved)
        self._synchronize_layers()
        before = self.optimizers, self.lr_scheduler_configs
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ArgumentError(f"configure_optimizers returned {len(self.optimizers)} optimizers; Sluice trains with one")
        for scheduler in self.lr_scheduler_configs:
            require_rates_alone(scheduler.scheduler)
        given = self.optimizers[0]
        if isinstance(given, OffloadOptimizer):
            self._require_usable(trainer, given)
        if self.offloaded is None:
            self.offloaded = given if isinstance(given, OffloadOptimizer) else self._offload(trainer, given)
        elif given is not self.offloaded:
            self.optimizers, self.lr_scheduler_configs = before  # for the checkpoint that the message names
            if not hasattr(self.lightning_module, "_sluice"):
                raise ArgumentError("this strategy has offloaded another module; make a new Trainer and strategy for this one")
            raise _offloaded_already(type(self.lightning_module).__name__)
        for scheduler in self.lr_scheduler_configs:
            rebind_scheduler(scheduler.scheduler, self.offloaded)
        self.optimizers = [self.offloaded]

    def _synchronize_layers(self) -> None:
        """The Trainer's sync_batchnorm, as Lightning's ddp does it: before there are optimizers."""
        if self._layer_sync is None or self.world_size == 1 or self.offloaded is not None:
            return
        assert self.model is not None
        is_torchs = isinstance(self._layer_sync, TorchSyncBatchNorm)
        norms = [module for module in self.model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
        if is_torchs and norms and self.root_device.type == "cpu":
            raise ArgumentError(f"sync_batchnorm=True on {self.world_size} processes on the CPU: torch's SyncBatchNorm computes on GPUs "
                                "alone; leave it out, and each process normalizes by its own part of the batch")
        if not hasattr(self.lightning_module, "_sluice"):
            self.model = self._layer_sync.apply(self.model)
        elif not is_torchs:
            raise ArgumentError(f"the module is offloaded already, and {type(self._layer_sync).__name__} would change its layers; apply it "
                                "before offload(), and leave it out of the Trainer's plugins")
        elif not all(isinstance(module, torch.nn.SyncBatchNorm) for module in norms):
            raise ArgumentError("sync_batchnorm=True comes too late for a module that is offloaded already; call "
                                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(module) before offload()")

    def _require_usable(self, trainer: "pl.Trainer", given: OffloadOptimizer) -> None:
        """Raises for an optimizer of the module's own offload() that clips otherwise than the Trainer says, or that Lightning's
        checkpoints could not resume."""
        if given._is_durable:
            raise ArgumentError("configure_optimizers returned an optimizer with a durable store, which goes on from its own commits and "
                                "not from Lightning's checkpoints; leave storage.state out of offload()'s config")
        assert self.lightning_module is not None
        bound = float(trainer.gradient_clip_val or 0)
        if self.lightning_module.automatic_optimization and given.clip_norm != bound:
            raise ArgumentError(f"the offloaded module's optimizer.clip_norm is {given.clip_norm}, but the Trainer's gradient_clip_val is "
                                f"{trainer.gradient_clip_val}; give the Trainer gradient_clip_val={given.clip_norm}, or give offload() a "
                                f"config with optimizer.clip_norm {bound}")

    def _offload(self, trainer: "pl.Trainer", given: Any) -> OffloadOptimizer:
        if hasattr(self.lightning_module, "_sluice"):
            raise _offloaded_already(type(self.lightning_module).__name__)
        found = self._given
        settings = engine_part(self._deepspeeds(found, trainer, given)) if isinstance(found, DeepspeedConfig) else copy.deepcopy(found)
        add_keys(settings, self._keys, "SluiceStrategy(): keys=")
        section = settings.setdefault("optimizer", {})
        section.setdefault("clip_norm", float(trainer.gradient_clip_val or 0))
        section.setdefault("clip_epsilon", 1e-6)  # as in torch
        self._stage = int(settings.get("sharding", {}).get("stage", 3))
        assert self.lightning_module is not None
        return offload(self.lightning_module, settings, optimizer=given, device=self.root_device, **self._options)

    def _deepspeeds(self, found: DeepspeedConfig, trainer: "pl.Trainer", given: Any) -> "dict[str, Any]":
        """The config that a DeepSpeed config stands for, beside the optimizer of configure_optimizers."""
        resolved = found.resolved(auto_values(trainer, given))
        settings = resolved.config
        if resolved.has_scheduler:
            raise ArgumentError(f"{found.name}: scheduler: here configure_optimizers makes it; leave it out of the file")
        if settings["precision"]["parameters"] == "fp16":
            raise ArgumentError(f"{found.name}: fp16.enabled: this strategy does not scale the loss; write bf16, or train with "
                                "sluice_offload.initialize()")
        section = settings["optimizer"]
        assert self.lightning_module is not None
        kind = describe(given, self.lightning_module)["type"]
        if resolved.has_optimizer and section["type"] != kind:
            raise ArgumentError(f"{found.name}: optimizer.type means {section['type']}, but configure_optimizers makes {kind}; leave "
                                "optimizer out of the file")
        settings["optimizer"] = {key: value for key, value in section.items() if key not in KEYS}
        if trainer.gradient_clip_val is None and "gradient_clipping" not in resolved.written:
            settings["optimizer"]["clip_norm"] = 0.0
        leave_checkpoints(settings)
        return settings

    def on_predict_start(self) -> None:
        """At stage 3 all ranks fetch each unit together. Lightning repeats no sample for predictions, so one rank may have a batch more
        than another."""
        super().on_predict_start()
        if self.offloaded is None or self.world_size == 1 or self._stage != 3:
            return
        assert self.lightning_module is not None
        own = [float(count) for count in self.lightning_module.trainer.predict_loop.max_batches]
        every: "list[Any]" = [None] * self.world_size
        dist.all_gather_object(every, own)
        other = next((rank for rank, counts in enumerate(every) if counts != every[0]), None)
        if other is not None:
            words = ["+".join(f"{count:g}" for count in every[rank]) for rank in (0, other)]
            raise ArgumentError(f"predict(): rank 0 has {words[0]} batches and rank {other} has {words[1]}, but at sharding.stage 3 all ranks "
                                "fetch the module's parameters together. Let the number of samples be a multiple of "
                                f"{self.world_size} times the batch size, or train with sharding.stage 2, under which each rank has all "
                                "parameters")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning calls the module's training_step, not its forward, which would begin to keep activations by itself."""
        store = None if self.offloaded is None else self.offloaded.activations
        with contextlib.nullcontext() if store is None else store.hooks():
            return super().training_step(*args, **kwargs)

    # --- Checkpoints: Lightning's file with the module's state_dict, and beside it Sluice's folder with all of the state.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> "dict[str, Any]":
        """All processes read it together, and the one that writes it keeps it."""
        self._require_no_step()
        state = super().lightning_module_state_dict()
        return state if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: "dict[str, Any]", filepath: Any, storage_options: Any = None) -> None:
        if self.offloaded is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self._require_no_step()
        root = _require_local(filepath) + _STATE
        checkpoint[_FOLDER] = os.path.basename(self.offloaded.save(root))
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:  # until here, Lightning's file of before goes with the folder of before
            old = [name for name in os.listdir(root) if name.startswith("step-") and name != checkpoint[_FOLDER]]
            if old:
                self.checkpoint_io.teardown()  # AsyncCheckpointIO waits for its files here, and raises where one could not be written
            for name in old:
                shutil.rmtree(os.path.join(root, name), ignore_errors=True)

    def on_train_start(self) -> None:
        """ModelCheckpoint forgets that the checkpoint from which training goes on is one: it would save that step again behind the
        first micro-batch of the next."""
        super().on_train_start()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for callback in trainer.checkpoint_callbacks if self.offloaded is not None else []:
            if getattr(callback, "_last_global_step_saved", None) == 0:
                setattr(callback, "_last_global_step_saved", trainer.global_step)
        self._defer_requeue()

    def _defer_requeue(self) -> None:
        """Slurm's signal comes at any time, and Lightning would save at once: amid a step, which no checkpoint has."""
        self._requeue = self._requeue_signal = None
        environment = self.cluster_environment
        if self.offloaded is None or not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return
        number = environment.requeue_signal
        handler = None if number is None else signal.getsignal(number)
        if callable(handler) and type(handler).__module__.startswith("lightning."):  # and not the program's own
            self._requeue = handler
            signal.signal(number, lambda *given: setattr(self, "_requeue_signal", given))  # type: ignore[arg-type]

    def _answer_requeue(self) -> None:
        """Saves and asks Slurm to begin the job again, if its signal has come to any process: all of them save together."""
        if self._requeue is None:
            return
        given = self._requeue_signal
        if self.world_size > 1:
            assert isinstance(self.cluster_environment, SLURMEnvironment)
            has_come = torch.tensor(int(given is not None), device=self.root_device)
            dist.all_reduce(has_come, dist.ReduceOp.MAX)
            if has_come.item():
                given = given or (self.cluster_environment.requeue_signal, None)
        if given is not None:
            self._requeue_signal = None
            assert self.offloaded is not None
            self.offloaded.zero_grad()  # of a step that the fit has ended
            self._requeue(*given)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if not self._has_gradients():
            self._answer_requeue()

    def on_train_end(self) -> None:
        super().on_train_end()
        self._answer_requeue()
        self._requeue = None

    def _has_gradients(self) -> bool:
        walk = None if self.offloaded is None else self.offloaded._walk
        return walk is not None and walk.active is not None and walk.has_gradients

    def _require_no_step(self) -> None:
        """Behind an exception the step is lost, and what is saved is the state of the last update."""
        assert self.lightning_module is not None
        if self.offloaded is not None and self.lightning_module.trainer.interrupted and self.world_size == 1:
            self.offloaded.zero_grad()
        if self._has_gradients():
            raise ArgumentError("a checkpoint is due between the micro-batches of a step, whose gradients it could not have; let "
                                "val_check_interval be a multiple of accumulate_grad_batches, and ModelCheckpoint count steps "
                                "(every_n_train_steps) instead of time")

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        local = _local(filepath)
        if self.is_global_zero and local is not None:
            shutil.rmtree(local + _STATE, ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Optional[bool] = None) -> "dict[str, Any]":
        if self.offloaded is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        root = os.path.realpath(_require_local(checkpoint_path)) + _STATE  # of a link, beside its target
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        name = checkpoint.get(_FOLDER, "")
        folder = _folder_in(root, name)
        if folder is None:
            why = "the folder with the state is missing" if name else "another strategy saved the file"
            missing = os.path.join(root, name) if name else root
            raise ArgumentError(f"{checkpoint_path} has no folder {missing} beside it: {why}. Copy it with the file, or begin with the "
                                "weights alone: give torch.load(path)[\"state_dict\"] of the file to load_state_dict() of a "
                                "new module, and call fit() without ckpt_path")
        self.offloaded.load_checkpoint(folder)
        return checkpoint

    def load_model_state_dict(self, checkpoint: "Mapping[str, Any]", strict: bool = True) -> None:
        if self.offloaded is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        assert self.lightning_module is not None  # load_checkpoint() has taken everything but these
        take_buffers(self.lightning_module, checkpoint["state_dict"], self.offloaded._walk.units)

    def load_optimizer_state_dict(self, checkpoint: "Mapping[str, Any]") -> None:
        """load_checkpoint() has taken the state; this says whether it is that of Lightning's file."""
        if self.offloaded is None:
            super().load_optimizer_state_dict(checkpoint)
        elif checkpoint.get("optimizer_states"):
            self.offloaded.load_state_dict(checkpoint["optimizer_states"][0])


SluiceStrategy.register_strategies(StrategyRegistry)
