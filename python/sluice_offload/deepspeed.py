"""DeepSpeed's config files, read by the importer of `sluice config import`: one table of keys for both (docs/deepspeed.md)."""

import ctypes as C
import json
import logging
import os
from typing import Any, Mapping

from . import library as lib
from .engine import Config, config_of_text
from .errors import ArgumentError, ConfigError
from .processes import count_processes

logger = logging.getLogger("sluice_offload")


def read_any_config(config: "Config | str | os.PathLike[str]", auto: "Mapping[str, Any] | None" = None,
                    ) -> "tuple[dict[str, Any], bool]":
    """A config of Sluice, from one of Sluice or DeepSpeed, and whether it was DeepSpeed's. `auto`: what its "auto" stand
    for."""
    if isinstance(config, Mapping):
        text, name = json.dumps(config).encode(), "config"
    else:
        name = os.fspath(config)
        with open(config, "rb") as file:
            text = file.read()
    is_one = C.c_int()
    lib.library().is_deepspeed(text, C.byref(is_one))
    if is_one.value:
        return import_deepspeed(text, name, auto), True
    if auto:
        raise ArgumentError(f"{name} is no DeepSpeed config, so that nothing in it is \"auto\"; leave auto= out")
    return config_of_text(text, name), False


def import_deepspeed(text: bytes, name: str, auto: "Mapping[str, Any] | None" = None) -> "dict[str, Any]":
    """The config that a DeepSpeed text stands for. Raises ConfigError with all that is refused. Lines that were understood
    otherwise than written are logged."""
    report = C.c_char_p()
    try:
        lib.library().import_deepspeed(text, os.fsencode(name), json.dumps({**(auto or {}), "ranks": count_processes()}).encode(), C.byref(report))
    except ConfigError as error:
        if "\n  " in str(error) and "give: --" in str(error):
            raise ConfigError(f"{error} (here as auto={{\"batch\": 4}}, with the option's name without dashes)") from None
        raise
    assert report.value is not None
    answer = json.loads(report.value)
    for line in answer["understood"]:
        logger.warning("%s", " ".join(part for part in (line["place"], line["key"], line["text"]) if part))
    return dict(answer["config"])
