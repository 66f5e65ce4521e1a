"""The build backend (PEP 517) of the package: packs the Python files, libsluice.so, the command `sluice`, the C++ library and the
headers into one wheel.

Compiled files come from the build tree that the environment variable SLUICE_BUILD names, such as build/release; without it, the
source tree around this folder is configured and built first. SLUICE_LIBRARY names a libsluice.so alone: the wheel then has neither
the command nor the C++ library. SLUICE_CROSS names the tools of another processor, such as aarch64-linux-gnu, for which these files
have been compiled: the wheel says that it has never run there. SLUICE_CUDA is ON, OFF, or by default AUTO: with CUDA where its
compiler is. SLUICE_CUDA_ARCHITECTURES names the GPUs to compile kernels for. Nothing is fetched.
"""

import ast
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
PACKAGES = "`tools/install_packages.sh run` installs what a build needs"
LIBRARY, COMMAND = "libsluice.so", "bin/sluice"
# The place of each compiled part in the wheel, and in a build tree.
PLACES = {LIBRARY: "capi/libsluice.so", COMMAND: "tools/sluice", "lib/": "engine/libsluice_cxx.so"}

# Every CUDA compiler from 12.0 knows these, and drivers make code for newer GPUs from the last one.
ARCHITECTURES = "80-real;90-real;90-virtual"


def _project():
    """Returns the `key = "value"` lines of pyproject.toml's [project]. Python 3.10 has no reader of TOML."""
    return {key: value.strip('"') for key, value in _section("project").items()}


def _section(name):
    lines = (HERE / "pyproject.toml").read_text(encoding="utf-8").split(f"\n[{name}]\n")[1].split("\n[")[0].splitlines()
    return dict(line.split(" = ", 1) for line in lines if " = " in line)


def _extras():
    """Lines of metadata for the packages that an extra adds."""
    lines = []
    for extra, needed in _section("project.optional-dependencies").items():
        lines += [f"Provides-Extra: {extra}\n", *(f"Requires-Dist: {package}; extra == \"{extra}\"\n" for package in ast.literal_eval(needed))]
    return "".join(lines)


def _need(*programs):
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        names = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise SystemExit(f"{names} {'is' if len(missing) == 1 else 'are'} missing: {PACKAGES}")


def _built(work):
    """The compiled files by their places in the package."""
    # pip runs this in python/, so that relative paths mean the top of the checkout.
    library = os.environ.get("SLUICE_LIBRARY")
    if library:
        if not (SOURCE / library).is_file():
            raise SystemExit(f"SLUICE_LIBRARY: {SOURCE / library} is no file")
        return {LIBRARY: SOURCE / library}
    given = os.environ.get("SLUICE_BUILD")
    build = SOURCE / given if given else pathlib.Path(work) / "build"
    if not given:
        configured = subprocess.run(["cmake", "-S", SOURCE, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DSLUICE_UNITY=ON", "-DSLUICE_TESTS=OFF",
                        "-DSLUICE_C=ON", "-DBUILD_SHARED_LIBS=ON", "-DSLUICE_MPI=OFF",
                        f"-DSLUICE_CUDA={os.environ.get('SLUICE_CUDA', 'AUTO')}", "-DSLUICE_NCCL=OFF",
                        f"-DSLUICE_CUDA_ARCHITECTURES={os.environ.get('SLUICE_CUDA_ARCHITECTURES', ARCHITECTURES)}"], check=False)
        if configured.returncode:
            raise SystemExit(f"CMake failed; its messages are above. Where a package is missing, {PACKAGES}. Where the CUDA compiler is the "
                             "cause, SLUICE_CUDA=OFF leaves it out")
        subprocess.run(["cmake", "--build", build, "--target", "sluice_c", "sluice_shared", "sluice"], check=True)
    found = {}
    for place, path in PLACES.items():
        file = (build / path).resolve()
        if not file.is_file():
            raise SystemExit(f"{build / path} is missing: build the targets sluice_c, sluice_shared and sluice, or leave SLUICE_BUILD out")
        # The linker and the loader look for a shared library by its soname, libsluice_cxx.so.0.1.
        found[place + ".".join(file.name.split(".")[:4]) if place.endswith("/") else place] = file
    return found


def _headers():
    headers = {f"include/sluice/{path.name}": path for layer in ("base", "gpu", "engine") for path in sorted((SOURCE / layer / "include" / "sluice").iterdir())}
    return {**headers, **{f"include/sluice/{name}": SOURCE / "capi" / name for name in ("sluice.h", "sluice_gpu.h")}}


def _metadata(project, cross):
    never = f"\nThis wheel was compiled on another machine ({platform.machine()}) and has never run on one with {cross.split('-')[0]}.\n" if cross else ""
    return (f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
            f"Summary: {project['description']}\nRequires-Python: {project['requires-python']}\nLicense: Apache-2.0\n"
            f"{_extras()}{never}")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = _project()
    cross = os.environ.get("SLUICE_CROSS", "")
    tag = f"py3-none-linux_{cross.split('-')[0] or platform.machine()}"
    strip = f"{cross}-strip" if cross else "strip"
    is_given = os.environ.get("SLUICE_LIBRARY") or os.environ.get("SLUICE_BUILD")
    _need(*([] if is_given else ["cmake", "ninja"]), strip)
    stem = f"{PACKAGE}-{project['version']}"
    files = {path.name: path.read_bytes() for path in sorted((HERE / PACKAGE).iterdir()) if path.suffix == ".py" or path.name == "py.typed"}
    files |= {place: path.read_bytes() for place, path in _headers().items()}
    with tempfile.TemporaryDirectory() as work:
        built = _built(work)
        for place, path in built.items():
            stripped = pathlib.Path(work) / "stripped"
            shutil.copyfile(path, stripped)
            subprocess.run([strip, "--strip-unneeded", stripped], check=True)
            files[place] = stripped.read_bytes()
    files = {f"{PACKAGE}/{place}": data for place, data in files.items()}
    files[f"{PACKAGE}_command.py"] = (HERE / f"{PACKAGE}_command.py").read_bytes()
    info = f"{stem}.dist-info"
    files[f"{info}/licenses/LICENSE"] = (SOURCE / "LICENSE").read_bytes()
    files[f"{info}/METADATA"] = _metadata(project, cross).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: wheel_backend\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    if COMMAND in built:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\nsluice = {PACKAGE}_command:main\n".encode()
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = f"{stem}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name == f"{PACKAGE}/{COMMAND}" else 0o100644) << 16  # pip keeps the right to execute
            archive.writestr(entry, data)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("the package is built from Sluice's source tree: pip wheel ./python")
