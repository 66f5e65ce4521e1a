#!/usr/bin/env python3
"""usage: spaces_test.py NVCC

Configures a copy of this tree in a folder whose name has a space, with a CUDA compiler that CUDACXX names and architectures that
CMAKE_CUDA_ARCHITECTURES names, and compiles one CUDA source there. CXXFLAGS has -ffast-math, which every command to compile takes back.
CMAKE_CUDA_HOST_COMPILER is heeded, and so is a CMAKE_INSTALL_LIBDIR that is an absolute path. A CUDA compiler that takes no C++ compiler here is left out, and the command says why."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = "cuda_exchanged_sum.cu"


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def configure(tree, build, *options, **variables):
    """The rules of the build."""
    subprocess.run(["cmake", "--preset", "install", "-S", tree, "-B", build, *options], check=True, cwd=tree, env={**os.environ, **variables})
    return (build / "build.ninja").read_text(encoding="utf-8")


def compile_alone(build, rules, source):
    subprocess.run(["ninja", "-C", build, re.search(rf"^build (\S*{source}\.o):", rules, re.MULTILINE)[1]], check=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        tree, build = pathlib.Path(folder) / "a b" / "tree", pathlib.Path(folder) / "a b" / "build"
        listed = subprocess.run(["git", "-c", "safe.directory=*", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], check=True,
                                capture_output=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_bytes((ROOT / name).read_bytes())
        compiler = script(tree.parent / "compiler", f'exec "{sys.argv[1]}" "$@"')
        host = script(tree.parent / "host", 'touch "$0.called"\nexec c++ "$@"')
        rules = configure(tree, build, "-DSLUICE_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=80", f"-DCMAKE_CUDA_HOST_COMPILER={host}",
                          f"-DCMAKE_INSTALL_PREFIX={tree.parent}", f"-DCMAKE_INSTALL_LIBDIR={tree.parent}/lib 64", CUDACXX=str(compiler), CXXFLAGS="-ffast-math")
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
        for line in (f"SLUICE_NVCC:FILEPATH={compiler}", "SLUICE_CUDA_ARCHITECTURES:STRING=80"):
            assert line in cache.splitlines(), line
        flags = [line for line in re.findall(r"^ +FLAGS = (.* -std=c\+\+20\b.*)", rules, re.MULTILINE) if "-ffast-math" in line]
        inexact = [line for line in flags if "-fno-fast-math" not in line.split("-ffast-math")[1]]
        assert len(flags) > 20 and not inexact, inexact[:1]
        text = (build / "static/sluice.pc").read_text(encoding="utf-8").replace("${pcfiledir}", f"{tree.parent}/lib 64/pkgconfig")
        places = dict(line.split("=", 1) for line in text.splitlines()[:3])
        for name, folder in (("libdir", "lib 64"), ("includedir", "include")):
            assert os.path.normpath(places[name].replace("${prefix}", places["prefix"])) == f"{tree.parent}/{folder}", places
        called = pathlib.Path(f"{host}.called")
        called.unlink()
        compile_alone(build, rules, SOURCE)
        assert called.exists()
        refuses = script(tree.parent / "refuses", """[ "$1" = --version ] && exec echo "release 12.0, V12.0.140"
echo 'host_config.h:132:2: error: #error -- unsupported GNU version; "11" is needed' >&2
exit 1""")
        compile_alone(build, configure(tree, build, "--fresh", CUDACXX=str(refuses)), "version_command.cc")


if __name__ == "__main__":
    main()
