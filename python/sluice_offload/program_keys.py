"""Keys of a config that offload() leaves to the program, such as the schedule of the learning rate: `sluice train` follows them, and
initialize() some."""

from typing import Any, Mapping

from .engine import logger
from .gpus import Place
from .schedule import SCHEDULE_KEYS

_SECTIONS = ("model", "data", "batch", "trace")
_ENGINES = ("threads", "status", "device")  # of section "run"


def engine_part(config: "Mapping[str, Any]") -> "dict[str, Any]":
    """The config without what initialize() follows itself."""
    rest = {name: dict(section) if isinstance(section, Mapping) else section for name, section in config.items() if name != "batch"}
    for name, keys in (("optimizer", SCHEDULE_KEYS), ("run", ("steps",))):
        if isinstance(rest.get(name), dict):
            rest[name] = {key: value for key, value in rest[name].items() if key not in keys}
    return rest


def warn_of_program_keys(config: "Mapping[str, Any]", place: Place) -> None:
    """Says which keys of the config have no effect in offload()."""
    left = [name for name in _SECTIONS if config.get(name)]
    optimizer, run = config.get("optimizer"), config.get("run")
    if isinstance(optimizer, Mapping):
        named = [key for key in SCHEDULE_KEYS if key in optimizer]
        if named != ["schedule"] or optimizer["schedule"] != "constant":  # which is what there is without a scheduler
            left += [f"optimizer.{key}" for key in named]
    if isinstance(run, Mapping):
        left += [f"run.{key}" for key in run if key not in _ENGINES]
        other = "host" if place.device.type == "cuda" else "cuda"
        if run.get("device") == other:
            left.append(f"run.device \"{other}\"")
    if left:
        logger.warning("%s of the config: no effect in offload(), where the program has the model and its device, makes the batches and sets "
                       "the learning rate (a scheduler; the first is lr or optimizer.learning_rate). sluice_offload.initialize() follows "
                       "the config's schedule", ", ".join(left))
