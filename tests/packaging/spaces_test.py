#!/usr/bin/env python3
"""usage: spaces_test.py NVCC

Configures a copy of this tree in a folder whose name has a space, with a CUDA compiler that CUDACXX names and architectures that
CMAKE_CUDA_ARCHITECTURES names, and compiles one CUDA source there. CXXFLAGS has -ffast-math, which every command to compile takes back."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = "cuda_exchanged_sum.cu"


def main():
    with tempfile.TemporaryDirectory() as folder:
        tree, build = pathlib.Path(folder) / "a b" / "tree", pathlib.Path(folder) / "a b" / "build"
        listed = subprocess.run(["git", "-c", "safe.directory=*", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], check=True,
                                capture_output=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_bytes((ROOT / name).read_bytes())
        compiler = tree.parent / "compiler"
        compiler.write_text(f'#!/bin/sh\nexec "{sys.argv[1]}" "$@"\n', encoding="utf-8")
        compiler.chmod(0o755)
        subprocess.run(["cmake", "--preset", "install", "-S", tree, "-B", build, "-DSLUICE_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=80"],
                       check=True, cwd=tree, env={**os.environ, "CUDACXX": str(compiler), "CXXFLAGS": "-ffast-math"})
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
        for line in (f"SLUICE_NVCC:FILEPATH={compiler}", "SLUICE_CUDA_ARCHITECTURES:STRING=80"):
            assert line in cache.splitlines(), line
        rules = (build / "build.ninja").read_text(encoding="utf-8")
        flags = [line for line in re.findall(r"^ +FLAGS = (.* -std=c\+\+20\b.*)", rules, re.MULTILINE) if "-ffast-math" in line]
        inexact = [line for line in flags if "-fno-fast-math" not in line.split("-ffast-math")[1]]
        assert len(flags) > 20 and not inexact, inexact[:1]
        subprocess.run(["ninja", "-C", build, re.search(rf"^build (\S*{SOURCE}\.o):", rules, re.MULTILINE)[1]], check=True)


if __name__ == "__main__":
    main()
