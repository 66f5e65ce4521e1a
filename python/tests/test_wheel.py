"""The parts of a wheel: files for every Python, and the licenses of the system's libraries in it."""

import ast
import email
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

import sluice_offload_command
from sluice_offload import command, library
from sluice_offload.__main__ import main

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


def test_the_oldest_python_reads_every_file():
    """pyproject.toml says 3.10. This reads the files; only the Python that is here runs them. Python 3.12 and later let f-strings
    pass that 3.10 does not read."""
    files = sorted((TOOLS.parent / "python").rglob("*.py"))
    assert len(files) > 60
    for path in files:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))


def test_the_command_is_in_the_wheel():
    """Command and library are of one build: both say the same version."""
    if not (command.HERE / "bin").is_dir():
        pytest.skip("this wheel was made without the command")
    entry = pathlib.Path(sysconfig.get_path("scripts")) / "sluice"
    told = subprocess.run([entry, "version"], capture_output=True, text=True, check=True).stdout
    assert library.library().version() in told.splitlines()[0]
    refused = subprocess.run([entry, "trian"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "train" in refused.stderr, "arguments and the exit status go through"
    assert subprocess.run([entry, "plan", "--parameters", "7B", "--layers", "32"], capture_output=True, check=True).stdout


def test_a_program_in_c_plus_plus_is_compiled_with_the_wheel(tmp_path):
    if not (command.HERE / "lib").is_dir():
        pytest.skip("this wheel was made without the C++ library")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    flags = subprocess.run([sys.executable, "-m", "sluice_offload", "flags"], capture_output=True, text=True, check=True).stdout.split()
    source = TOOLS.parent / "examples" / "sine" / "main.cc"
    subprocess.run(["c++", "-O1", source, *flags, "-o", tmp_path / "sine"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    told = subprocess.run([tmp_path / "sine", tmp_path], capture_output=True, text=True, check=True, env=environment).stdout
    assert told.splitlines()[-1].startswith("step 200: loss 0.00001")
    assert {path.name for path in (command.HERE / "include" / "sluice").iterdir()} >= {"engine.h", "sluice.h", "status_publisher.h"}


def test_the_command_does_not_wait_for_torch():
    """It takes seconds to import, and `sluice top` asks each second."""
    told = subprocess.run([sys.executable, "-c", "import sluice_offload_command, sys; print(sorted({'torch', 'sluice_offload'} & set(sys.modules)))"],
                          capture_output=True, text=True, check=True).stdout
    assert told == "[]\n"
    if not (command.HERE / "bin").is_dir():
        return  # and then there is no such script
    script = (pathlib.Path(sysconfig.get_path("scripts")) / "sluice").read_text(encoding="utf-8")
    assert "from sluice_offload_command import main" in script


def test_a_wheel_without_the_command_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sluice_offload_command, "HERE", tmp_path)
    monkeypatch.setattr(command, "HERE", tmp_path)
    with pytest.raises(SystemExit):
        sluice_offload_command.main()
    assert "bin/sluice is missing: this wheel was made with SLUICE_LIBRARY" in capsys.readouterr().err
    assert main(["flags"]) == 1
    assert "has no libsluice_cxx.so" in capsys.readouterr().err


@pytest.fixture
def backend(monkeypatch):
    spec = importlib.util.spec_from_file_location("wheel_backend", TOOLS.parent / "python" / "wheel_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("SLUICE_LIBRARY", raising=False)
    return module


def test_a_build_tree_that_lacks_a_part_is_refused(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("SLUICE_BUILD", str(tmp_path))
    with pytest.raises(SystemExit, match="capi/libsluice.so is missing: build the targets"):
        backend.build_wheel(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_build_without_its_programs_says_how_to_get_them(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLUICE_BUILD", raising=False)
    with pytest.raises(SystemExit, match="cmake, ninja and strip are missing: .*tools/install_packages.sh run"):
        backend.build_wheel(str(tmp_path))
    monkeypatch.setenv("SLUICE_LIBRARY", str(tmp_path / "lib.so"))
    (tmp_path / "strip").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "strip").chmod(0o755)
    with pytest.raises(SystemExit, match="SLUICE_LIBRARY: .*/lib.so is no file"):
        backend.build_wheel(str(tmp_path))


@pytest.mark.parametrize("cross", ["", "aarch64-linux-gnu"])
def test_extras_are_in_the_metadata(backend, cross):
    """pip reads them there. The text behind the headers stays one."""
    told = email.message_from_string(backend._metadata(backend._project(), cross))
    assert told["Name"] == "sluice-offload" and told["Requires-Python"] == ">=3.10" and told["Version"]
    assert told.get_all("Provides-Extra") == ["transformers", "lightning", "accelerate"]
    needed = told.get_all("Requires-Dist")
    assert len(needed) == 3 and not any(one.startswith("torch") for one in needed)
    assert f"transformers>={transformers_needed()}; extra == \"transformers\"" in needed
    assert ("never run" in told.get_payload()) == bool(cross)


def transformers_needed():
    """The version below which sluice_offload.transformers refuses to be imported, which this process may not have."""
    source = (TOOLS.parent / "python/sluice_offload/transformers.py").read_text(encoding="utf-8")
    return re.search(r'^_NEEDED = "(\S+)"', source, re.MULTILINE).group(1)


def test_the_documents_install_a_wheel_again():
    """Every commit has one version, so that pip would leave an older commit's wheel."""
    documents = [TOOLS.parent / name for name in ("README.md", "docs/install.md", "docs/pytorch.md")]
    for path in documents:
        assert "pip wheel ./python -w dist && pip install --force-reinstall dist/" in path.read_text(encoding="utf-8"), path


def test_licenses_of_libraries(tmp_path):
    if shutil.which("dpkg-query") is None:
        pytest.skip("no dpkg-query: wheels with libraries are made on Debian")
    wheel = tmp_path / "some-1-py3-none-linux.whl"

    def run():
        return subprocess.run([sys.executable, str(TOOLS / "wheel_licenses.py"), str(wheel)], capture_output=True, text=True, check=False)

    def add(library):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("some-1.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            archive.writestr(f"some.libs/{library}", b"")
            archive.writestr("some-1.dist-info/RECORD", "some-1.dist-info/RECORD,,\n")
        return run()

    def content():
        with zipfile.ZipFile(wheel) as archive:
            return [(name, archive.read(name).decode()) for name in archive.namelist()]
    assert add("libudev-0a1b2c3d.so.1").returncode == 0
    once = content()
    assert run().returncode == 0 and sorted(content()) == sorted(once), "a second run adds the same files again"
    files = dict(once)
    licenses = "some-1.dist-info/licenses/"
    assert "GNU LESSER GENERAL PUBLIC LICENSE" in files[licenses + "LGPL-2.1.txt"]
    assert "LGPL" in files[licenses + "libudev1.txt"]
    assert "'s package libudev1, source systemd " in files[licenses + "LIBRARIES.txt"]
    for name in files:
        assert f"{name}," in files["some-1.dist-info/RECORD"] or ".libs/" in name or name.endswith("WHEEL"), name
    failed = add("libnowhere-0a1b2c3d.so.1")
    assert failed.returncode == 1 and "libnowhere.so.1 is in no package" in failed.stderr


def test_sources_and_texts_of_licenses(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("wheel_licenses", TOOLS / "wheel_licenses.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    (tmp_path / "libx").mkdir()
    monkeypatch.setattr(tool, "package_of", lambda name: ("libx", "x", "1-2"))
    monkeypatch.setattr(tool, "COPYRIGHTS", str(tmp_path))
    release = {}
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    copyright_file = tmp_path / "libx" / "copyright"
    copyright_file.write_text("ours\n")
    for identity, host in (("debian", "snapshot.debian.org/package"), ("ubuntu", "launchpad.net/ubuntu/+source")):
        release["ID"] = identity
        told = tool.licenses(["libx.so"])["LIBRARIES.txt"].decode()
        assert f"Sources: https://{host}/SOURCE/VERSION" in told
        assert f"libx.so: {identity.capitalize()}'s package libx, source x 1-2; license in libx.txt" in told
    copyright_file.write_text("see /usr/share/common-licenses/NONE-1.0\n")
    with pytest.raises(SystemExit, match="common-licenses/NONE-1.0 is missing .*package libx"):
        tool.licenses(["libx.so"])
    copyright_file.unlink()
    with pytest.raises(SystemExit, match="libx/copyright is missing"):
        tool.licenses(["libx.so"])
    release.update(ID="other", NAME="Other Linux")
    with pytest.raises(SystemExit, match="Other Linux keeps its packages' sources"):
        tool.licenses(["libx.so"])
