"""Packages of the package index for tests that compare with them. Each is installed once, into the build folder."""

import fcntl
import os
import shutil
import subprocess
import sys

FOLDER = os.environ.get("SLUICE_TEST_PACKAGES", os.path.join(os.path.dirname(__file__), "../../../build/test_packages"))
# Versions that these tests have been run with; without their dependencies, where the import needs none.
PACKAGES = {"tokenizers": ["--no-deps", "tokenizers==0.23.3"], "tensorboard": ["tensorboard==2.21.0"],
            "perfetto": ["perfetto==0.59.1"]}
SOURCES = {"deepspeed": "deepspeed==0.19.8"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def made_once(case, name, make):
    """A folder that `make` fills, given its path, and returns the finished process of pip. Skips, aloud, where it cannot be had."""
    folder = os.path.abspath(os.path.join(FOLDER, name))
    os.makedirs(FOLDER, exist_ok=True)
    with open(folder + ".lock", "w", encoding="ascii") as lock:  # held by one process of those that need the package at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(folder):
            shutil.rmtree(folder + ".new", ignore_errors=True)  # of a process that was killed
            done = make(folder + ".new")
            if done.returncode != 0:
                case.skipTest(f"{name} cannot be had: {done.stderr.strip().splitlines()[-1:]}")
            os.rename(folder + ".new", folder)
    return folder


def pip(*words):
    return subprocess.run([*PIP, *words], capture_output=True, text=True, check=False)


def with_package(case, name):
    """The folder of a package for PYTHONPATH. Skips, aloud, where it cannot be had."""
    return made_once(case, name, lambda folder: pip("install", "--quiet", "--target", folder, *PACKAGES[name]))


def with_source(case, name):
    """The folder of a package's source, which is not installed. Skips, aloud, where it cannot be had."""
    def fetch(folder):
        done = pip("download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", folder, SOURCES[name])
        if done.returncode == 0:
            (archive,) = os.listdir(folder)
            shutil.unpack_archive(os.path.join(folder, archive), folder)
        return done
    folder = made_once(case, name + "_source", fetch)
    (unpacked,) = (entry for entry in os.listdir(folder) if os.path.isdir(os.path.join(folder, entry)))
    return os.path.join(folder, unpacked)
