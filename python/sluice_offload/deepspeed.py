"""DeepSpeed's config files, read by the importer of `sluice config import`: one table of keys for both (docs/deepspeed.md)."""

import base64
import contextlib
import ctypes as C
import json
import logging
import math
import os
from typing import Any, Mapping, Optional

from . import library as lib
from .engine import Config, config_of_text
from .errors import ArgumentError, ConfigError
from .plans import bytes_of
from .processes import count_processes

logger = logging.getLogger("sluice_offload")
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "wall_clock_breakdown")


class DeepspeedConfig:
    """A DeepSpeed config, whose "auto" get their values later."""

    def __init__(self, text: bytes, name: str) -> None:
        self.text, self.name = text, name

    def resolved(self, auto: "Mapping[str, Any] | None" = None, has_optimizer: bool = False) -> "ResolvedConfig":
        """The config that it stands for. `auto`: the values of capi/sluice.h's sluice_import_deepspeed(). `has_optimizer`: the
        program has made one, so that none in the file needs no warning. Raises ConfigError with all that is refused. The log has
        what was understood otherwise than written, and what needs no key."""
        report = C.c_char_p()
        given = {name.replace("-", "_"): value for name, value in (auto or {}).items()}
        values = json.dumps({**given, "ranks": count_processes()}).encode()
        try:
            lib.library().import_deepspeed(self.text, os.fsencode(self.name), values, C.byref(report))
        except ConfigError as error:
            if "\n  " in str(error) and "give: --" in str(error) and "names" not in (auto or {}):
                raise ConfigError(f"{error} (here as auto={{\"batch\": 4}}, by the options' names without the first dashes)") from None
            raise
        assert report.value is not None
        answer = json.loads(report.value)
        for level, kind, said in ((logging.WARNING, "understood", ""), (logging.INFO, "not_needed", "not needed: ")):
            for line in answer[kind]:
                if has_optimizer and line["key"] == "optimizer":
                    continue
                logger.log(level, "%s%s", said, " ".join(part for part in (line["place"], line["key"], line["text"]) if part))
        return ResolvedConfig(answer)


class ResolvedConfig:
    """A config of Sluice, made of one of DeepSpeed's. has_optimizer, has_scheduler: whether DeepSpeed's has these sections.
    `values`: what the file has, by its keys, also where nothing in Sluice's config comes of it."""

    def __init__(self, answer: "dict[str, Any]") -> None:
        self.config = dict(answer["config"])
        self.written = {line["key"] for line in answer["mapped"] if "value" in line}
        self.values = {line["key"]: line["value"] for kind in ("mapped", "not_needed", "understood") for line in answer[kind]
                       if line.get("value") is not None}
        self.has_optimizer, self.has_scheduler = (f"{name}.type" in self.written for name in ("optimizer", "scheduler"))

    def is_on(self, key: str) -> bool:
        """Whether the file says true, as the importer understands it. A section says so by its `enabled`."""
        value = self.values.get(key)
        return (value.get("enabled") if isinstance(value, dict) else value) in (True, "true", "True")

    def monitors(self) -> "list[str]":
        """The keys of DeepSpeed's logs and profiles that the file turns on."""
        return [key for key in _MONITORS if self.is_on(key)]


def find_config(config: "Config | str | os.PathLike[str]") -> "DeepspeedConfig | dict[str, Any]":
    """A dictionary, file or base64 text as what it is: DeepSpeed's config, or one of Sluice."""
    text, name = _text_of(config)
    is_one = C.c_int()
    lib.library().is_deepspeed(text, C.byref(is_one))
    return DeepspeedConfig(text, name) if is_one.value else config_of_text(text, name)


def _text_of(config: "Config | str | os.PathLike[str]") -> "tuple[bytes, str]":
    if isinstance(config, Mapping):
        return json.dumps(_plain(config, "config", "")).encode(), "config"
    name = os.fspath(config)
    if not os.path.exists(name):
        with contextlib.suppress(ValueError):  # it is no base64 either
            digits = name.rstrip("=").translate(str.maketrans("-_", "+/"))
            text = base64.b64decode(digits + "=" * (-len(digits) % 4), validate=True)
            if b"{" in text:
                return text, "config"
    with open(config, "rb") as file:
        return file.read(), name


def _plain(value: Any, where: str, key: str) -> Any:
    """`value` as JSON can have it. A number that is not finite becomes a text, which is refused by name where a number counts. Raises
    ConfigError for a value that no config can have."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one, where, f"{key}.{name}" if key else str(name)) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, where, key) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where} says {key} = {value!r}, a {type(value).__name__}; configs have texts, numbers, true, false, lists "
                          "and dictionaries") from None
    return value


def read_any_config(config: "Config | str | os.PathLike[str]", auto: "Mapping[str, Any] | None" = None, has_optimizer: bool = False,
                    ) -> "tuple[dict[str, Any], Optional[ResolvedConfig]]":
    """A config of Sluice, from one of Sluice or DeepSpeed, and where it was DeepSpeed's what became of that. `auto`: what its
    "auto" stand for. `has_optimizer`: as in DeepspeedConfig.resolved()."""
    found = find_config(config)
    if isinstance(found, DeepspeedConfig):
        resolved = found.resolved(auto, has_optimizer)
        return resolved.config, resolved
    if auto:
        name = "config" if isinstance(config, Mapping) else os.fspath(config)
        raise ArgumentError(f"{name} is no DeepSpeed config, so that nothing in it is \"auto\"; leave auto= out")
    return found, None


def add_keys(settings: "dict[str, Any]", more: "Mapping[str, Any]", where: str, section: str = "") -> None:
    """Adds keys to a config; `where` is their argument in messages. Raises ConfigError for one that is there with another value,
    and for a value that no config can have."""
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(settings.get(key, {}), dict):
            add_keys(settings.setdefault(key, {}), value, where, f"{section}{key}.")
            continue
        value = _plain(value, where, f"{section}{key}")
        if settings.setdefault(key, value) != value and (bytes_of(value) is None or bytes_of(settings[key]) != bytes_of(value)):
            raise ConfigError(f"{where} says {section}{key} = {json.dumps(value)}, but the config means "
                              f"{json.dumps(settings[key])}; change the config instead")


def leave_checkpoints(settings: "dict[str, Any]") -> None:
    """Takes what DeepSpeed's activation_checkpointing has become out of the config of a torch program."""
    if settings.pop("activations", "keep") != "keep":
        logger.warning("activation_checkpointing: only sets up the checkpoints that the program itself makes, as in DeepSpeed; with "
                       "torch.utils.checkpoint they work without it")
