#!/usr/bin/env python3
"""usage: tools/torch_environment.py FOLDER [--frameworks] [--deepspeed] [--torch VERSION]

Makes FOLDER a virtual environment with torch and pytest for the tests of python/, unless it is that already, and checks
that torch can be imported there. Exits with 77, and says why, where the package index cannot give torch. With --frameworks
it adds transformers, accelerate, lightning, peft, bitsandbytes, trl and diffusers; a framework that is missing is then a failure.
--deepspeed adds DeepSpeed, which wants an environment of its own. --torch names a version, such as 2.6.0; by default the newest.

The package index has torch for x86-64 with CUDA alone, which wants 4 GB of NVIDIA's libraries. On a machine without a GPU
nothing calls them; but the loader wants them there. So torch is installed without what it depends on, and each library that
is missing is replaced by one whose every function returns "no device".
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import time

PURE = ["filelock", "typing-extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "setuptools"]
OTHERS = ["numpy"]  # torch.distributed.checkpoint packs Python objects with it
FRAMEWORKS = ["transformers", "accelerate", "lightning", "peft", "torchmetrics", "bitsandbytes", "trl", "diffusers"]
FRAMEWORKS_NEED = ["datasets", "huggingface-hub", "importlib-metadata", "lightning-utilities", "packaging", "pillow", "psutil", "pyyaml", "regex",
                   "requests", "safetensors", "tokenizers", "tqdm", "typer"]
# DeepSpeed compiles with ninja what it uses.
DEEPSPEED_NEED = ["wheel", "ninja", "einops", "hjson", "msgpack", "packaging", "psutil", "py-cpuinfo", "pydantic", "tqdm"]
NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE
TEXT_OF_ERROR = r"^(?!cuGet).*Get\w*(Error|Status)(String|Name)$"
MISSING = 77
FETCH_SECONDS_MAX = 900  # half a gigabyte, twice; a slower network counts as none


def output(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def symbols(library, kind):
    return {line.split()[-1].split("@")[0] for line in output("nm", "-D", f"--{kind}-only", library).splitlines() if line}


def stand_in(folder):
    """Writes libraries for those that the ones in `folder` need and that are nowhere, and returns their names."""
    libraries = sorted(folder.glob("*.so*"))
    needed = set()
    for library in libraries:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", library)))
    missing = sorted(name for name in needed - {library.name for library in libraries} if re.match(r"lib(cu|nv|nccl)", name))
    if not missing:
        return []
    wanted, there = set(), set()
    for library in libraries:
        wanted |= symbols(library, "undefined")
        there |= symbols(library, "defined")
    names = sorted(name for name in wanted - there if re.match(r"_{0,2}(cu|nv|nccl|Cu|CU)[A-Za-z_]\w*$", name))
    source = folder / "stand_ins.c"
    source.write_text("".join(f'const char* {name}(void) {{ return "no device"; }}\n' if re.search(TEXT_OF_ERROR, name) else
                              f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names), encoding="utf-8")
    # The functions are in a library of another name: the loader refuses one of the right name without the right versions.
    functions = folder / "libstand_ins.so"
    output("cc", "-shared", "-fPIC", "-w", "-o", functions, f"-Wl,-soname,{functions.name}", source)
    for name in missing:
        output("cc", "-shared", "-fPIC", "-o", folder / name, f"-Wl,-soname,{name}", "-Wl,--no-as-needed", functions,
               "-Wl,-rpath,$ORIGIN", "-x", "c", "/dev/null")
    return missing


def add_torch(folder, made, wanted):
    """Makes the environment, and once more where pip was cut: what it has fetched is in its cache, and what it was unpacking is of no
    use. `made`: marks the folder as the script's."""
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for is_last in (False, True):
        made.touch()
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        try:
            for packages in (wanted, ["pytest"]):
                subprocess.run([*install, *packages], check=True, timeout=FETCH_SECONDS_MAX)
            return
        except subprocess.TimeoutExpired:
            if is_last:
                raise
            shutil.rmtree(folder)
            folder.mkdir()


def add_frameworks(folder):
    """Installs them without what they depend on where that is torch, and says their versions."""
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--no-deps", *FRAMEWORKS], check=True)
    subprocess.run([*install, *FRAMEWORKS_NEED], check=True)
    versions = output(folder / "bin" / "python", "-m", "pip", "list", "--format=freeze")
    print("\n".join(line for line in versions.splitlines() if line.split("==")[0] in FRAMEWORKS))


def add_deepspeed(folder):
    """It is built from source, and asks this environment's torch what there is."""
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *DEEPSPEED_NEED], check=True)
    subprocess.run([*install, "--no-deps", "--no-build-isolation", "deepspeed"], check=True)
    versions = output(folder / "bin" / "python", "-m", "pip", "list", "--format=freeze")
    print(next(line for line in versions.splitlines() if line.startswith("deepspeed==")))


def main():
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--frameworks", action="store_true")
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--torch", metavar="VERSION")
    given = parser.parse_args()
    folder, frameworks = given.folder, given.frameworks
    python = folder / "bin" / "python"
    done = folder / "complete"
    begin = time.monotonic()
    wanted = ["--no-deps", f"torch=={given.torch}" if given.torch else "torch>=2.6", *PURE, *OTHERS]
    mark = " ".join(wanted) + " with stand-ins 2"
    if not done.exists() or done.read_text(encoding="utf-8") != mark:
        made = folder / ".made-by-torch_environment"  # from the beginning; `complete` is there at the end
        if folder.exists() and not made.exists() and not done.exists() and (not folder.is_dir() or any(folder.iterdir())):
            print(f"{folder} is there and was not made by this script; name another folder", file=sys.stderr)
            return 2
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            add_torch(folder, made, wanted)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"torch cannot be had: {error}. Run this again: pip has what came in its cache")
            return MISSING
        folders = list(folder.glob("lib/python*/site-packages/torch/lib"))
        names = stand_in(folders[0])
        if names:
            print(f"stand-ins for libraries of NVIDIA that a CPU does not use: {', '.join(names)}")
        done.write_text(mark, encoding="utf-8")
    if frameworks:
        add_frameworks(folder)
    if given.deepspeed:
        add_deepspeed(folder)
    version = output(python, "-W", "ignore", "-c", "import torch; print(torch.__version__)").strip()
    print(f"torch {version} in {folder} after {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
