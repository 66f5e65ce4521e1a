"""usage: python -m sluice_offload doctor [--path FOLDER ...]
       python -m sluice_offload plan MODEL [--config FILE] [--set KEY=VALUE ...] [--units CLASS ...] [--gpu]
       python -m sluice_offload train-demo [--path FOLDER] [--steps N]
       python -m sluice_offload flags

doctor checks what this machine, torch and library can do for Sluice. With --path it also trains a few numbers through each
folder, as storage.paths would. plan says the memory and the traffic that a model will need, from its shapes alone.
train-demo trains a small model from storage and compares its losses with those in memory. flags prints what a compiler needs for
a C++ program that uses the library in this package. Each ends with 1 if something does not work, and says what to do."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any, Callable

from .errors import ArgumentError, SluiceError

GOOD, BAD = "ok", "NO"
_ELEMENTS = 1 << 20


def _torch() -> str:
    import torch
    return f"torch {torch.__version__} on {torch.get_num_threads()} threads"


def _commit() -> str:
    """The commit of the library in this package, as the command beside it says; nothing where that is unknown."""
    from . import command
    try:
        told = json.loads(subprocess.run([command.HERE / "bin" / "sluice", "version", "--json"], capture_output=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):  # a wheel without the command
        return ""
    changes = " with changes" if told["git_modified"] else ""
    return f", commit {told['git_commit'][:12]}{changes}" if told["git_commit"] else ""


def _library() -> str:
    from . import library
    commit = "" if os.environ.get("SLUICE_LIBRARY") else _commit()
    return f"libsluice {library.library().version()}{commit}, C interface {library.ABI_VERSION}: {library.path()}"


def _storage() -> str:
    from .storage import best_way
    return {"swap": "parameters move by swapping pointers (\"swap\")",
            "poke": "parameters move by writing pointers (\"poke\"), since this torch has no _swap_data_ptr_",
            "copy": "parameters move by copies (\"copy\"), since this torch allows nothing faster"}[best_way()]


def _memory() -> str:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{size / 2**30:.1f} GiB of memory, {len(os.sched_getaffinity(0))} processors"


def _gpus() -> "list[str]":
    """A line for each GPU of torch's, whether Sluice can use it. None is needed."""
    import torch

    from . import gpus
    lines = []
    try:
        for gpu in range(torch.cuda.device_count()):
            why = gpus.why_not(gpu)
            lines.append(f"  {GOOD if not why else '--'}  cuda:{gpu}, {torch.cuda.get_device_name(gpu)}: Sluice " +
                         (f"cannot use it: {why}" if why else "can use it"))
    except RuntimeError as error:  # a GPU that is broken, or another process's alone
        lines.append(f"  --  torch cannot use a GPU that it sees: {str(error).splitlines()[0]}")
    return lines or ["  --  torch sees no GPU"]


def _path(path: str) -> "Callable[[], str]":
    def look() -> str:
        import torch

        from . import optim
        from .engine import is_memory
        parameter = torch.nn.Parameter(torch.ones(_ELEMENTS))
        optimizer = optim.AdamW([("probe", parameter)], config={
            "placement": {"optimizer": "nvme"}, "memory": {"host": "16MiB"}, "storage": {"paths": [path]}})
        begin = time.monotonic()
        for _ in range(3):
            parameter.grad = torch.ones(_ELEMENTS)
            optimizer.step()
        optimizer._engine.wait_all()  # type: ignore[union-attr]
        seconds = time.monotonic() - begin
        report = optimizer.report
        optimizer.close()
        moved = report.nvme_read_bytes + report.nvme_write_bytes
        where = "; it is memory (tmpfs), not a drive" if is_memory(path) else ""
        return f"{path}: {moved / 2**20:.0f} MiB of state went there and back in {seconds:.2f} s{where}"
    return look


def doctor(paths: "list[str]") -> int:
    print(f"python {platform.python_version()} on {platform.platform()}")
    checks: "list[tuple[str, Callable[[], str]]]" = [
        ("torch", _torch), ("library", _library), ("storage", _storage), ("memory", _memory)]
    checks += [("path", _path(path)) for path in paths]
    failed = 0
    for name, check in checks:
        try:
            print(f"  {GOOD}  {check()}")
        except Exception as error:  # whatever it is, the other checks go on
            failed += 1
            print(f"  {BAD}  {name}: {error or type(error).__name__}")
    if not failed:
        print("\n".join(_gpus()))
    if not paths:
        print("  --  no folder was tried; --path FOLDER tries one")
    return 1 if failed else 0


def _set(config: "dict[str, Any]", assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    if not equals:
        raise ArgumentError(f"--set {assignment}: write KEY=VALUE, such as memory.device=2GiB")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    *sections, last = key.split(".")
    for i, section in enumerate(sections):
        config = config.setdefault(section, {})
        if not isinstance(config, dict):
            raise ArgumentError(f"--set {assignment}: {'.'.join(sections[:i + 1])} is a value, {json.dumps(config)}, and no section")
    config[last] = value


def plan(model: str, config: "str | None", assignments: "list[str]", units: "list[str] | None",
         buffers: "list[str]", is_on_gpu: bool = False, leases: "int | None" = None) -> int:
    try:
        from .engine import read_config
        from .plans import describe, model_of
        settings = {} if config is None else read_config(config)
        for assignment in assignments:
            _set(settings, assignment)
        print("\n".join(describe(model_of(model), settings, units, buffers, is_on_gpu, leases)))
    except (SluiceError, OSError, ValueError) as error:
        print(f"  {BAD}  {error}", file=sys.stderr)
        return 1
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def _flags() -> int:
    from . import command
    try:
        print(" ".join(command.flags()))
    except ArgumentError as error:
        print(f"  {BAD}  {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sluice_offload", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="checks what this machine, torch and library can do")
    command.add_argument("--path", action="append", default=[], metavar="FOLDER", help="a folder for storage.paths; repeatable")
    command = commands.add_parser("plan", help="says the memory and traffic that a model will need")
    command.add_argument("model", metavar="MODEL", help="MODULE:FUNCTION that makes it, or the folder or config.json of a model "
                         "of transformers")
    command.add_argument("--config", metavar="FILE", help="a config file in JSON")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the config; repeatable")
    command.add_argument("--units", action="append", metavar="CLASS", help="the classes of modules that are units; repeatable")
    command.add_argument("--buffers", action="append", default=[], metavar="PATTERN",
                         help="names of buffers that move with their units, such as '*.qweight'; repeatable")
    command.add_argument("--leases", type=_positive, metavar="N", help="how many units a module may use at once, where it reads parameters of others")
    command.add_argument("--gpu", action="store_true", help="for computation on a GPU, within memory.device of its memory; none is needed here")
    command = commands.add_parser("train-demo", help="trains a small model from storage, and compares it with one in memory")
    command.add_argument("--path", metavar="FOLDER", help="a folder on the drive; by default the one for temporary files")
    command.add_argument("--steps", type=_positive, default=30, metavar="N")
    commands.add_parser("flags", help="prints the options with which a C++ program is compiled: c++ main.cc $(python -m sluice_offload flags)")
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        return doctor(given.path)
    if given.command == "flags":
        return _flags()
    try:
        _torch()
    except (ImportError, OSError) as error:
        print(f"  {BAD}  torch: {error}", file=sys.stderr)
        return 1
    if given.command == "plan":
        return plan(given.model, given.config, given.set, given.units, given.buffers, given.gpu, given.leases)
    from .demo import train_demo
    return train_demo(given.path, given.steps)


if __name__ == "__main__":
    sys.exit(main())
