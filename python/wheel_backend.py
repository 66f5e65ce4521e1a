"""The build backend (PEP 517) of the package: packs the Python files and libsluice.so into one wheel.

The library is the one that the environment variable SLUICE_LIBRARY names, as a development build has it; without it, the
source tree around this folder is configured and built first. Nothing is fetched.
"""

import base64
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parent
PACKAGE = "sluice_offload"


def _project():
    """Returns the `key = "value"` lines of pyproject.toml's [project]. Python 3.10 has no reader of TOML."""
    lines = (HERE / "pyproject.toml").read_text(encoding="utf-8").split("[project]")[1].splitlines()
    pairs = [line.split(" = ", 1) for line in lines if " = " in line]
    return {key: value.strip('"') for key, value in pairs}


def _library(work):
    given = os.environ.get("SLUICE_LIBRARY")
    if given:
        return pathlib.Path(given)
    build = pathlib.Path(work) / "build"
    subprocess.run(["cmake", "-S", SOURCE, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DSLUICE_UNITY=ON", "-DSLUICE_TESTS=OFF",
                    "-DSLUICE_TOOLS=OFF", "-DSLUICE_C=ON", "-DSLUICE_MPI=OFF", "-DSLUICE_CUDA=OFF"], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "sluice_c"], check=True)
    return build / "capi" / "libsluice.so"


def _metadata(project):
    return (f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
            f"Summary: {project['description']}\nRequires-Python: {project['requires-python']}\nLicense: Apache-2.0\n")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = _project()
    tag = f"py3-none-linux_{platform.machine()}"
    stem = f"{PACKAGE}-{project['version']}"
    with tempfile.TemporaryDirectory() as work:
        library = pathlib.Path(work) / "libsluice.so"
        shutil.copyfile(_library(work), library)
        subprocess.run(["strip", "--strip-unneeded", library], check=True)
        files = {f"{PACKAGE}/{path.name}": path.read_bytes() for path in sorted((HERE / PACKAGE).iterdir())
                 if path.suffix == ".py" or path.name == "py.typed"}
        files[f"{PACKAGE}/libsluice.so"] = library.read_bytes()
    info = f"{stem}.dist-info"
    files[f"{info}/licenses/LICENSE"] = (SOURCE / "LICENSE").read_bytes()
    files[f"{info}/METADATA"] = _metadata(project).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: wheel_backend\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = f"{stem}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("the package is built from Sluice's source tree: pip wheel ./python")
