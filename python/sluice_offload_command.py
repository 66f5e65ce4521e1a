"""The command `sluice` of a wheel. It stands outside of the package, which imports torch: that takes seconds."""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent / "sluice_offload"
REMEDY = "this wheel was made with SLUICE_LIBRARY, for development; `pip wheel ./python` or tools/wheel.sh make one that has it"


def main() -> None:
    """The entry point: becomes the command, with its arguments and its exit status."""
    command = HERE / "bin" / "sluice"
    if not command.is_file():
        print(f"sluice: {command} is missing: {REMEDY}", file=sys.stderr)
        sys.exit(1)
    os.execv(command, ["sluice", *sys.argv[1:]])
