"""`offload`: hands a model's parameters and optimizer state to the engine, and returns the optimizer."""

import contextlib
import ctypes as C
import faulthandler
import gc
import json
import math
import os
import weakref
import zlib
from collections import ChainMap
from typing import Any, Callable, ContextManager, Iterable, Iterator, Mapping, Optional, Sequence

import torch
from torch import nn

from . import guards, unlent
from .activations import ActivationStore, take_home
from .buffers import make_buffers, matching_buffers, take_buffers, take_saved
from .described import take_over
from .engine import Config, Engine, complete_config, config_of_text, logger, names_type, read_config, require_no_deepspeed, warn_of_memory
from .errors import ArgumentError
from .gpu_copies import GpuCopies
from .gpus import Place, place_of
from .hooks import Walk
from .keywords import explains_keywords
from .optimizer import OffloadOptimizer
from .processes import World, find_world, processes_of_host, require_member
from .program_keys import warn_of_program_keys
from .recordings import refuse_recordings
from .state import Gatherer, hook_state_dict
from .storage import Storages, UnitStorage
from .units import Member, Unit, Units, find_units, rounded_text

Values = "Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]"
# By module that owns tensors of an offloaded model: that model, weakly.
_wholes: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


class _Offloaded:
    """A model carries this from offload() on: it keeps the engine alive, and refuses copies and pickles."""

    def __init__(self, engine: Engine, gatherer: Gatherer, walk: Walk) -> None:
        self.engine, self.gatherer, self.walk = engine, gatherer, walk

    def __reduce__(self) -> Any:
        return self.engine.__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.engine.__reduce__()


def _in_config(*keys: str) -> str:
    return (f"set {' and '.join('optimizer.' + key for key in keys)} in the config, or give optimizer=, a torch optimizer whose "
            "hyperparameters are taken")


_ELSEWHERE = {"betas": _in_config("beta1", "beta2"), "eps": _in_config("epsilon"), "weight_decay": _in_config("weight_decay"),
              "momentum": _in_config("momentum"), "max_norm": "set optimizer.clip_norm in the config",
              "params": "offload() trains all parameters of the model that require gradients", "learning_rate": "it is lr"}


@explains_keywords(_ELSEWHERE)
def offload(model: nn.Module, config: "Config | str | os.PathLike[str]", *,
            units: "Sequence[type | str] | None" = None, lr: Optional[float] = None,
            values: "Values | None" = None, storage: Optional[str] = None,
            restore: "str | os.PathLike[str] | None" = None, convert: bool = False, resume: bool = False,
            accept_changes: bool = False,
            optimizer: Optional[torch.optim.Optimizer] = None, buffers: "Sequence[str]" = (), process_group: Any = None,
            norm_group: Any = None, counted_elsewhere: "Iterable[torch.Tensor]" = (),
            announced: "Iterable[type | str]" = (), local: "Iterable[type | str]" = (), leases: Optional[int] = None,
            device: "torch.device | str | int | None" = None) -> OffloadOptimizer:
    """Trains `model` with its parameters, masters and moments where `config` says: device memory, host memory or NVMe.

    config: a dictionary or a JSON file, as docs/configuration.md has it. Missing keys are taken from the model:
        `precision`. The gradient is the sum over the backward passes of a step, as torch's, and clipped to
        `optimizer.clip_norm`.
    units: the classes of modules, or their names, that are fetched as one; by default those that the model names in
        `_no_split_modules`, else the children of its ModuleLists and Sequentials. One that is most of the model is looked into.
    lr: the learning rate, by default the config's `optimizer.learning_rate`.
    values: where the parameters' values are, by name, for a model on the meta device.
    restore: the folder of a checkpoint that `optimizer.save()` has written. Parameters, masters, moments, step and learning
        rates are its; training goes on with the bits that it would have had without a break.
    convert: `restore` may have another precision, other moments (`optimizer.state`) or other frozen parameters. Masters are taken
        over exactly, parameters and moments are rounded, and the moments of a parameter that was frozen begin at zero.
    resume: goes on from the last commit of the durable store that the config names (`storage.state.name`), or begins anew
        where there is none: parameters, masters, moments, step and learning rates are the commit's, and
        `optimizer.resumed_step` is its step.
    accept_changes: `resume` goes on also where numbers of the config that change the training (clipping, betas, weight decay) are
        others than the store's; without it, that is an error which names them. The store keeps a list of the changes.
    optimizer: a new torch.optim.AdamW, Adam, Adagrad or SGD over the model's parameters, whose hyperparameters, groups and
        learning rates are taken instead of the config's. Use what this function returns; a scheduler of the given one goes
        on with rebind_scheduler(scheduler, the returned one).
    buffers: patterns of the names of buffers that move with their units, such as "*.qweight" of a quantized linear layer. They
        keep their type and bits, and are read, never written. Other buffers stay in memory.
    storage: "swap", "poke" or "copy"; by default the best that this torch has (storage.py).
    announced: the classes of modules, or their names, of which a step uses some alone, such as the experts behind a router. Each
        instance is a unit that is read when it is used, or when `optimizer.announce(*modules)` names it in forward, and otherwise
        not at all. With several processes, all call announce() at the same places, with the modules of their own, and use those
        next, in the model's order, outside of checkpoints.
    local: the same, for modules that each of several processes has for itself, as in expert parallelism. No other process has them or
        hears of their announcements, and nothing of them is gathered or reduced. All processes have equally many, in the same places
        and of the same shapes, under names of their own, as those of a ModuleDict by the expert's number. A checkpoint has all.
    leases: how many units a module may use at once, by default as many as have parameters of its own, mostly 1. One whose forward
        reads parameters of another unit, without calling that one's module, needs one more. Each takes room in device memory.
    process_group: the processes that train this model together, a group of torch.distributed; by default all. For programs that
        divide a model themselves, by tensor or pipeline parallelism: those with the same part.
    norm_group: the processes that have one copy of the whole model between them, a group, for such programs: gradients are
        clipped by the norm of all parts. All of its members make the same steps.
    counted_elsewhere: parameters that another member of norm_group has, too, with the same values and gradients: exactly one
        counts each.

    device: where the model computes, the CPU or an NVIDIA GPU ("cuda", "cuda:1"); by default where the parameters are. A model on
        the CPU or the meta device is so taken to a GPU that cannot hold it. Its buffers are moved there. `memory.device` of the
        config is then the engine's part of the GPU's memory, by default half of what is free.

    From here on the parameters are the engine's. Read them by `state_dict()` or inside of `gathered(model)`.
    Raises ConfigError, OutOfMemoryError naming a budget that works, ArgumentError, StorageError; the model is as before
    then.
    """
    units = None if units is None else _several("units", units, (str, type), "classes of modules, or their names")
    announced, local = (_several(name, given, (str, type), "classes of modules, or their names")
                        for name, given in (("announced", announced), ("local", local)))
    buffers = _several("buffers", buffers, (str,), "patterns of names")
    if lr is not None:
        lr = _rate_of(lr)
    if restore is not None and values is not None:
        raise ArgumentError("offload(): values and restore exclude each other; the checkpoint has all values")
    if convert and restore is None:
        raise ArgumentError("offload(): convert is for a checkpoint that restore names")
    if restore is not None and resume:
        raise ArgumentError("offload(): restore and resume exclude each other; a checkpoint is restored, a durable store is "
                            "resumed")
    if accept_changes and not resume:
        raise ArgumentError("offload(): accept_changes is for a durable store that resume=True goes on from")
    if optimizer is not None and lr is not None:
        raise ArgumentError("offload(): lr and optimizer exclude each other; the optimizer's groups have their rates")
    _require_new(model)
    guards.require_free(model.parameters())
    refuse_recordings(model)
    settings = read_config(config)
    require_no_deepspeed(settings)
    warn_of_memory(settings)
    found = find_units(model, units, buffers, announced, keeps_types=not names_type(settings), local=local, leases=leases)
    guards.require_no_hooks_of_tied(found)
    if isinstance(values, Mapping):
        matching_buffers(model, values, found)
    place = place_of(((member.name, member.parameter) for unit in found.units for member in unit.members), device)
    warn_of_program_keys(settings, place)
    if optimizer is not None:
        take_over(settings, optimizer, model, found)
    if norm_group is not None:
        require_member(norm_group, "norm_group")
    world = find_world(_rank_timeout(settings), process_group)
    settings = complete_config(settings, found, processes_of_host(world, process_group), place)
    make_activations = _activation_store(settings, world is None or world.size == 1, place)
    if lr is None:
        lr = float(settings["optimizer"].get("learning_rate", 1e-3))
    if settings.get("sharding", {}).get("group") == "node":
        settings["sharding"]["group"] = "world" if world is None else world.consecutive_per_host()
    if world is not None and local:
        _check_local(found, world)
    if world is not None and values is None and restore is None:
        _check_values(found, world)
    if found.are_mixed:
        logger.info("%s", rounded_text(found, settings["precision"]["gradients"]))
    if Engine.has_open():
        gc.collect()  # that of a model that the program has dropped, which is in a cycle with its optimizer
    engine = Engine(settings, found, world, place)
    activations, before = None, None
    try:
        text = None
        step = None
        opens_store = _opens_store(engine, settings, resume, restore)
        made = OffloadOptimizer(found, engine, settings, lr)
        if optimizer is not None:
            made.follow(optimizer)
        if restore is not None:
            folder = os.path.realpath(restore)  # one checkpoint, also where a link such as `latest` is set anew meanwhile
            if opens_store:
                made.keep_text_of(folder, model, found)
            text = engine.restore(folder, convert)
        elif opens_store:
            step = engine.committed_step()
            if step is None:
                made.keep_first_text(model, found, values)
            text = engine.open_or_create(_values_of(values), found, accept_changes)
            if text == "" and step == 0:  # an older version's, of which nothing is trained: all is as the program says
                text = None
            elif text == "":
                logger.warning("the store's commit of step %s has no text beside its state: learning rates, application and buffers are the "
                               "program's, and not those of that step", step)
        else:
            engine.initialize(_values_of(values), found)
        _join(norm_group, counted_elsewhere, found, engine)
        storages = _storages(found, engine, storage, place)
        activations = make_activations(storages)
        saved = None if text is None else made.take_over(text)
        if saved is not None:
            matching_buffers(model, saved, found)
        made.resumed_step = step
        before = _Before(model, found)
        _adopt(found, engine, storages, before)
        given = values if isinstance(values, Mapping) else {}
        make_buffers(model, given if saved is None else ChainMap(saved, given), found, place.device)  # type: ignore[arg-type]
        _move_rest(model, found, place, before)
        walk = Walk(model, found, engine, storages, made.rates, activations)
        unlent.guard(walk)
        made.bind(walk)
        hook_state_dict(model, found, engine)
        guards.own(model.parameters(), made)
        dtypes = {engine.dtype_of(member) for unit in found.units if not unit.is_opaque for member in unit.members}
        guards.guard_model(model, found, dtypes, place.device)
        if saved is not None:  # a state that goes on is not that of `values` any more
            take_saved(model, saved, found)
        elif isinstance(values, Mapping):
            take_buffers(model, values, found)
    except BaseException:
        if before is not None:
            before.put_back()
        engine.destroy()
        if activations is not None:
            activations.close()
        raise
    _show_crashes()
    object.__setattr__(model, "_sluice", _Offloaded(engine, Gatherer(found, engine, storages, walk.gathered, walk.is_lent), walk))
    _wholes.update((owner, weakref.ref(model)) for unit in found.units for member in unit.members
                   for owner, _ in member.owners)
    return made


def _several(name: str, given: Any, kinds: "tuple[type, ...]", what: str) -> "tuple[Any, ...]":
    """A list as a tuple. A class or a text by itself is refused: a text would be a list of its letters."""
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, type, nn.Module))
    found = tuple(given) if is_list else (given,)
    if not is_list or not all(isinstance(one, kinds) for one in found):
        shown = " ".join(repr(given).split())
        raise ArgumentError(f"offload(): {name} is a list of {what}, such as {name}=[...], and not {shown:.80}")
    return found


def _rate_of(lr: Any) -> float:
    """As torch's optimizers, which refuse a wrong rate at once. A tensor with one element is a number."""
    rate = math.nan
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        rate = math.nan if isinstance(lr, (str, bytes)) else float(lr)
    if not 0 <= rate < math.inf:
        raise ArgumentError(f"offload(): lr is {lr!r}; a learning rate is a number from 0 on, such as 1e-3")
    return rate


def _show_crashes() -> None:
    """A write to a parameter outside of its module's forward ends the process: Python then prints the line that wrote."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # no stderr of the system's, as in notebooks
            faulthandler.enable()


def _require_new(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"offload() takes a model, a torch.nn.Module, and this is a {type(model).__name__}")
    kind = type(model).__name__
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ArgumentError("this model is in a DistributedDataParallel, which would look for gradients that the engine has; give "
                            "offload() what is in it, model.module. Offloaded, it needs no wrapper")
    for name, module in model.named_modules():
        whole = _wholes.get(module, lambda: None)()
        if hasattr(module, "_sluice") or whole is not None:
            part = f"{name} of this {kind}" if name else f"this {kind}"
            if hasattr(module, "_sluice") and not module._sluice.engine.is_open:
                raise ArgumentError(f"{part} was offloaded, and its optimizer is closed, with which its values went; make the model anew")
            raise ArgumentError(f"{part} is offloaded already; offload the whole model once, or its parts one by one")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ArgumentError(f"{name} has no shape yet, as in lazy modules; run the model once before offload()")
        if parameter.is_inference():
            raise ArgumentError(f"{name} was made under torch.inference_mode(), so autograd cannot use it; make the model outside of it")


def _join(norm_group: Any, counted_elsewhere: "Iterable[torch.Tensor]", units: Units, engine: Engine) -> None:
    """Has the gradient norm taken over the parts of a model that the program has divided."""
    counted = list(counted_elsewhere)  # parameters(), for example, can be read only once
    if norm_group is None:
        if counted:
            raise ArgumentError("offload(): counted_elsewhere needs norm_group, whose members count each parameter once")
        return
    members = {id(member.parameter): member for unit in units.units if not unit.is_frozen for member in unit.members}
    if any(id(parameter) not in members for parameter in counted):
        raise ArgumentError("offload(): counted_elsewhere has a tensor that is no trained parameter of the model")
    engine.set_norm_group(lambda sums: torch.distributed.all_reduce(sums, group=norm_group),
                          [members[id(parameter)] for parameter in counted])


def gathered(model: nn.Module, what: "nn.Module | Iterable[torch.Tensor] | None" = None) -> "ContextManager[None]":
    """Inside of it, parameters of the offloaded `model` can be read: all of them, or those of `what`, a module or
    parameters (whole units at a time). They are copies in host memory; a change of one is an error.
    `model` may also be a part of an offloaded one, or contain some. Others are left as they are."""
    offloaded = getattr(model, "_sluice", None)
    if offloaded is not None:
        return offloaded.gatherer.gathered(what)
    wholes = _wholes_of(model)
    if not wholes:
        return contextlib.nullcontext()
    if what is None:
        what = model
    return _gathered_of(wholes, what if isinstance(what, nn.Module) else list(what))


def _wholes_of(model: nn.Module) -> "list[nn.Module]":
    """The offloaded models of which `model` has parts, each once."""
    known = [_wholes[module]() for module in model.modules() if module in _wholes]
    return list({id(whole): whole for whole in known if whole is not None}.values())


@contextlib.contextmanager
def _gathered_of(wholes: "list[nn.Module]", what: "nn.Module | list[torch.Tensor]",
                 ) -> "Iterator[None]":
    with contextlib.ExitStack() as stack:
        for whole in wholes:
            gatherer: Gatherer = whole._sluice.gatherer  # type: ignore[union-attr, assignment]
            if gatherer.has(what):
                stack.enter_context(gatherer.gathered(what))
        yield


def _places_of(units: Units) -> "set[tuple[int, str]]":
    return {(id(owner), attribute) for unit in units.units for member in unit.members for owner, attribute in member.owners}


def _rank_timeout(settings: "dict[str, Any]") -> float:
    """`sharding.timeout`. The ranks meet before the engine checks its config, so this section is checked here."""
    given = {key: settings[key] for key in ("sharding",) if key in settings}
    checked = config_of_text(json.dumps(given).encode(), "config")
    return float(checked.get("sharding", {}).get("timeout", 120))


def _opens_store(engine: Engine, settings: "dict[str, Any]", resume: bool, restore: "str | os.PathLike[str] | None") -> bool:
    """Whether the state is that of a durable store, or will be. Refuses a store that is there and was not asked for."""
    name = settings.get("storage", {}).get("state", {}).get("name", "")
    if resume and not name:
        raise ArgumentError("offload(): resume=True needs a durable store to go on from: storage.state.name in the config")
    step = engine.committed_step()
    if step is not None and not resume:
        other = "" if restore is None else f", which the checkpoint {os.fspath(restore)} would take the place of"
        raise ArgumentError(f"the store \"{name}\" holds the state of step {step} already{other}; go on from it with resume=True"
                            f"{'' if restore is None else ' instead of restore'}, choose another storage.state.name, or remove the "
                            "store's files with `sluice state remove`")
    return bool(name)


def _activation_store(settings: "dict[str, Any]", is_alone: bool, place: Place) -> "Callable[[list[UnitStorage]], Optional[ActivationStore]]":
    """Takes `activations` out of the config, and returns a function that makes the store for them."""
    folders = take_home(settings, not place.is_cpu_memory)
    if folders is None:
        return lambda storages: None
    section = settings.get("storage", {})

    def make(storages: "list[UnitStorage]") -> ActivationStore:
        known = {place._cdata for storage in storages for place in storage.places()}
        return ActivationStore(folders, section.get("verify", "full"), float(section.get("timeout", 120)), is_alone,
                               lambda storage: storage._cdata in known, None if place.is_cpu_memory else GpuCopies(place.device))
    return make


def _check_local(units: Units, world: World) -> None:
    """A name says whose state it is, in a checkpoint of all processes too."""
    owners: "dict[str, int]" = {}
    for rank, names in enumerate(world.exchange([unit.name for unit in units.units if unit.is_local])):
        for name in names:
            if owners.setdefault(name, rank) != rank:
                raise ArgumentError(f"local: ranks {owners[name]} and {rank} both have a module {name}; give the modules of each rank "
                                    "names of their own, as those of a torch.nn.ModuleDict by the number that the expert has among "
                                    "the experts of all ranks")


def _check_values(units: Units, world: World) -> None:
    """Each rank brings the values of its part of the model, so all ranks have to have the same, but for local units."""
    def of_rank(parameter: torch.Tensor) -> int:
        data = parameter.detach()
        data = data if data.is_meta else data.cpu().contiguous()
        return 0 if data.is_meta else zlib.crc32((C.c_char * data.nbytes).from_address(data.data_ptr()))

    members = [member for unit in units.units for member in unit.members if not unit.is_local]
    sums = world.exchange([of_rank(member.parameter) for member in members])
    other = next((rank for rank in range(world.size) if sums[rank] != sums[0]), None)
    if other is None:
        return
    name = next((member.name for member, one, two in zip(members, sums[0], sums[other]) if one != two), "the model")
    raise ArgumentError(f"{name} has other values on rank {other} than on rank 0; build the model behind the same "
                        "torch.manual_seed() on every rank, load the same file, or send rank 0's parameters to all by "
                        "torch.distributed.broadcast()")


def _values_of(values: "Values | None") -> "Callable[[Member], torch.Tensor]":
    if values is None:
        return lambda member: member.parameter
    if callable(values):
        return lambda member: values(member.name)

    def look_up(member: Member) -> torch.Tensor:
        if not isinstance(member.parameter, nn.Parameter) and not member.parameter.is_meta and member.name not in values:
            return member.parameter  # buffers are made with the model
        try:
            return values[member.name]
        except KeyError:
            raise ArgumentError(f"values has no {member.name}") from None
    return look_up


def _storages(units: Units, engine: Engine, way: Optional[str], place: Place) -> "list[UnitStorage]":
    sizes = [engine.parameter_bytes(unit) for unit in units.units]
    storages = Storages(way, max(sizes), place)

    def of(unit: Unit, size: int) -> UnitStorage:
        if not unit.rounded:
            return storages.make(size)
        dtype = unit.rounded[0].rounded
        assert dtype is not None
        return storages.make_mixed(size, dtype, _ranges(unit), unit.name)
    return [of(unit, size) for unit, size in zip(units.units, sizes)]


def _ranges(unit: Unit) -> "list[tuple[int, int]]":
    """The elements of the unit's rounded parameters: one range for those that follow each other, with the zeros between them."""
    ranges: "list[tuple[int, int]]" = []
    follows = False
    for member in unit.members:
        if member.rounded is not None:
            end = member.offset + member.parameter.numel()
            begin = ranges.pop()[0] if follows else member.offset
            ranges.append((begin, end))
        follows = member.rounded is not None
    return ranges


class _Before:
    """A model as it was before the engine took its parameters, for a failure behind that, as of a module that takes no hooks. Their old
    memory stays as long as this does."""

    def __init__(self, model: nn.Module, units: Units) -> None:
        kept = [key for key, value in vars(nn.Module()).items() if isinstance(value, dict)]  # parameters, buffers and hooks
        self._modules = [(module, dict(vars(module)), {key: dict(vars(module)[key]) for key in kept if isinstance(vars(module).get(key), dict)})
                         for module in model.modules()]
        tensors = (*model.parameters(), *(member.parameter for unit in units.units for member in unit.members))
        self._tensors = [(tensor, type(tensor), dict(vars(tensor)), set(tensor._post_accumulate_grad_hooks or ()), tensor.data)
                         for tensor in {id(tensor): tensor for tensor in tensors}.values()]
        self.swapped: "list[tuple[torch.Tensor, torch.Tensor]]" = []

    def put_back(self) -> None:
        for module, attributes, kept in self._modules:
            for key in vars(module).keys() - attributes.keys():
                del vars(module)[key]
            vars(module).update(attributes)
            for key, content in kept.items():  # in place, since handles of hooks know the dictionary
                attributes[key].clear()
                attributes[key].update(content)
        for tensor, fresh in self.swapped:
            torch.utils.swap_tensors(tensor, fresh)
        for tensor, kind, attributes, hooks, data in self._tensors:
            if type(tensor) is not kind:
                tensor.__class__ = kind  # type: ignore[assignment]
            vars(tensor).clear()
            vars(tensor).update(attributes)
            for key in set(tensor._post_accumulate_grad_hooks or ()) - hooks:
                del tensor._post_accumulate_grad_hooks[key]  # type: ignore[union-attr]
            if not data.is_meta:
                tensor.data = data


def _adopt(units: Units, engine: Engine, storages: "list[UnitStorage]", before: _Before) -> None:
    """Puts every parameter over its unit's storage. A tied one becomes a parameter of its own at its second place: its
    gradients come at two times, are added by the engine, and torch need not keep the first until the second comes."""
    for unit in units.units:
        for member in unit.members:
            for i, (owner, attribute) in enumerate(member.owners):
                if i > 0 and unit.is_frozen:  # the same object, without a gradient, may stand in several places
                    continue
                view = torch.empty(0, dtype=engine.dtype_of(member), device=engine.place.device)
                shape = member.parameter.shape
                offset = member.offset * engine.dtype.itemsize // view.itemsize if member.is_opaque else member.offset
                view.set_(storages[unit.index].place_of(member.rounded), offset, shape, torch.empty(shape, device="meta").stride())
                if i > 0:
                    owner._parameters[attribute] = nn.Parameter(view)
                elif member.parameter.is_meta:
                    is_parameter = isinstance(member.parameter, nn.Parameter)
                    fresh = nn.Parameter(view, requires_grad=not unit.is_frozen) if is_parameter else view
                    torch.utils.swap_tensors(member.parameter, fresh)
                    before.swapped.append((member.parameter, fresh))
                else:
                    member.parameter.data = view


def _move_rest(model: nn.Module, units: Units, place: Place, before: _Before) -> None:
    """Brings to `place` what belongs to no unit: parameters without elements, of which those on the meta device are made here, and
    buffers that do not move with units."""
    for parameter in model.parameters():
        if parameter.numel() == 0 and parameter.device != place.device:
            fresh = nn.Parameter(torch.empty_like(parameter, device=place.device), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, fresh)
            before.swapped.append((parameter, fresh))
    managed = _places_of(units)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and (id(module), name) not in managed:
                module._buffers[name] = buffer.to(place.device)
