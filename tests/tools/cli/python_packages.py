"""Packages of the package index for tests that compare with them. Each is installed once, into the build folder."""

import os
import subprocess
import sys

FOLDER = os.environ.get("SLUICE_TEST_PACKAGES", os.path.join(os.path.dirname(__file__), "../../../build/test_packages"))
# Versions that these tests have been run with; without their dependencies, where the import needs none.
PACKAGES = {"tokenizers": ["--no-deps", "tokenizers==0.23.3"], "tensorboard": ["tensorboard==2.21.0"],
            "perfetto": ["perfetto==0.59.1"]}


def with_package(case, name):
    """The folder of a package for PYTHONPATH. Skips, aloud, where it cannot be had."""
    folder = os.path.abspath(os.path.join(FOLDER, name))
    if not os.path.isdir(folder):
        done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target",
                               folder + ".new", *PACKAGES[name]], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            case.skipTest(f"{name} cannot be had: {done.stderr.strip().splitlines()[-1:]}")
        os.rename(folder + ".new", folder)
    return folder
