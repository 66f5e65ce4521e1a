"""usage: python -m sluice_offload doctor [--path FOLDER ...]

Says what this machine, torch and library can do for Sluice. With --path it also trains a few numbers through each folder, as
storage.paths would. Ends with 1 if anything does not work, and says what to do."""

import argparse
import os
import platform
import sys
import time
from typing import Any, Callable

GOOD, BAD = "ok", "NO"
_ELEMENTS = 1 << 20


def _torch() -> str:
    import torch
    return f"torch {torch.__version__} on {torch.get_num_threads()} threads"


def _library() -> str:
    from . import library
    return f"libsluice {library.library().version()}, C interface {library.ABI_VERSION}: {library.path()}"


def _storage() -> str:
    from .storage import best_way
    return {"swap": "parameters move by swapping pointers (\"swap\")",
            "poke": "parameters move by writing pointers (\"poke\"), since this torch has no _swap_data_ptr_",
            "copy": "parameters move by copies (\"copy\"), since this torch allows nothing faster"}[best_way()]


def _memory() -> str:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{size / 2**30:.1f} GiB of memory, {len(os.sched_getaffinity(0))} processors"


def _path(path: str) -> "Callable[[], str]":
    def look() -> str:
        import torch

        from . import optim
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
        return f"{path}: {moved / 2**20:.0f} MiB of state went there and back in {seconds:.2f} s"
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
    if not paths:
        print("  --  no folder was tried; --path FOLDER tries one")
    return 1 if failed else 0


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sluice_offload", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="what this machine, torch and library can do")
    command.add_argument("--path", action="append", default=[], metavar="FOLDER", help="a folder for storage.paths; repeatable")
    return doctor(parser.parse_args(arguments).path)


if __name__ == "__main__":
    sys.exit(main())
