"""The other parts of a wheel: the command `sluice`, and the C++ library with its headers."""

import os
import pathlib
import sys

from .errors import ArgumentError

HERE = pathlib.Path(__file__).resolve().parent
_REMEDY = "this wheel was made with SLUICE_LIBRARY, for development; `pip wheel ./python` or tools/wheel.sh make one that has it"


def path() -> pathlib.Path:
    """The command's file."""
    found = HERE / "bin" / "sluice"
    if not found.is_file():
        raise ArgumentError(f"{found} is missing: {_REMEDY}")
    return found


def flags() -> "list[str]":
    """The options for a C++ program that uses Sluice: c++ main.cc $(python -m sluice_offload flags)"""
    libraries = sorted((HERE / "lib").glob("libsluice_cxx.so.*"))
    if not libraries:
        raise ArgumentError(f"{HERE / 'lib'} has no libsluice_cxx.so: {_REMEDY}")
    folder = str(HERE / "lib")
    return ["-std=c++20", "-ffp-contract=off", f"-I{HERE / 'include'}", f"-L{folder}", f"-l:{libraries[0].name}", f"-Wl,-rpath,{folder}"]


def main() -> None:
    """The entry point: becomes the command, with its arguments and its exit status."""
    try:
        command = path()
    except ArgumentError as error:
        print(f"sluice: {error}", file=sys.stderr)
        sys.exit(1)
    os.execv(command, ["sluice", *sys.argv[1:]])
