"""The C++ library of a wheel, with its headers. The command `sluice` is sluice_offload_command.py."""

import pathlib

from sluice_offload_command import REMEDY

from .errors import ArgumentError

HERE = pathlib.Path(__file__).resolve().parent


def flags() -> "list[str]":
    """The options for a C++ program that uses Sluice: c++ main.cc $(python -m sluice_offload flags)"""
    libraries = sorted((HERE / "lib").glob("libsluice_cxx.so.*"))
    if not libraries:
        raise ArgumentError(f"{HERE / 'lib'} has no libsluice_cxx.so: {REMEDY}")
    folder = str(HERE / "lib")
    exact = ["-fno-fast-math", "-ffp-contract=off"]
    return ["-std=c++20", *exact, f"-I{HERE / 'include'}", f"-L{folder}", f"-l:{libraries[0].name}", f"-Wl,-rpath,{folder}"]
