"""The parts of a wheel: files for every Python, and the licenses of the system's libraries in it."""

import ast
import importlib.util
import pathlib
import platform
import shutil
import subprocess
import sys
import zipfile

import pytest

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


def test_the_oldest_python_reads_every_file():
    """pyproject.toml says 3.10. This reads the files; only the Python that is here runs them. Python 3.12 and later let f-strings
    pass that 3.10 does not read."""
    files = sorted((TOOLS.parent / "python").rglob("*.py"))
    assert len(files) > 60
    for path in files:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))


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
