#!/usr/bin/env python3
"""A program of this build starts on a machine without NVIDIA's driver and without the CUDA toolkit: the dynamic section asks
the loader for none of their libraries.

    tests/dynamic_section_test.py PROGRAM...
"""

import re
import subprocess
import sys

OPENED_AT_RUN_TIME = re.compile(r"^lib(cuda|cudart|cublas|cublasLt|nccl|nvidia-ml|nvrtc)\.so")


def needed(program):
    text = subprocess.run(["readelf", "--dynamic", "--wide", program], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"\(NEEDED\)\s+Shared library: \[([^\]]+)\]", text)
    assert any(name.startswith("libc.so") for name in names), f"{program}: readelf's output was not understood:\n{text}"
    return names


def main():
    assert sys.argv[1:], __doc__
    refused = [(program, name) for program in sys.argv[1:] for name in needed(program) if OPENED_AT_RUN_TIME.match(name)]
    for program, name in refused:
        print(f"{program} needs {name} to start; open it at run time instead")
    print(f"{len(sys.argv) - 1} programs, {len(refused)} libraries that they may not need")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
