#!/usr/bin/env python3
"""Compiles every C++ source of a build tree by itself, as far as its types: a build of several sources at a time
(SLUICE_UNITY) does not notice what one of them forgets to include. Configure BUILD without SLUICE_UNITY and SLUICE_PRECOMPILED.

    tools/compile_alone.py BUILD [--jobs N]     exits with 1 if a source does not compile
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys


def compiles(entry):
    done = subprocess.run(f"{entry['command']} -fsyntax-only", shell=True, cwd=entry["directory"], capture_output=True, text=True)
    if done.returncode:
        print(f"{entry['file']} does not compile alone:\n{done.stderr}", flush=True)
    return done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    entries = json.loads((arguments.build / "compile_commands.json").read_text(encoding="utf-8"))
    if any("Unity/" in entry["file"] or "cmake_pch" in entry["command"] for entry in entries):
        sys.exit(f"{arguments.build} compiles sources together: configure it without SLUICE_UNITY and SLUICE_PRECOMPILED")
    sources = [entry for entry in entries if entry["file"].endswith(".cc")]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        good = sum(pool.map(compiles, sources))
    print(f"{good} of {len(sources)} sources compile alone")
    return 0 if good == len(sources) and sources else 1


if __name__ == "__main__":
    sys.exit(main())
