"""A wheel with libraries of the system has their licenses."""

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


def test_licenses_of_libraries(tmp_path):
    if shutil.which("dpkg-query") is None:
        pytest.skip("no dpkg-query: wheels with libraries are made on Debian")
    wheel = tmp_path / "some-1-py3-none-linux.whl"

    def add(library):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("some-1.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            archive.writestr(f"some.libs/{library}", b"")
            archive.writestr("some-1.dist-info/RECORD", "some-1.dist-info/RECORD,,\n")
        return subprocess.run([sys.executable, str(TOOLS / "wheel_licenses.py"), str(wheel)], capture_output=True, text=True, check=False)
    assert add("libudev-0a1b2c3d.so.1").returncode == 0
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    licenses = "some-1.dist-info/licenses/"
    assert "GNU LESSER GENERAL PUBLIC LICENSE" in files[licenses + "LGPL-2.1.txt"]
    assert "LGPL" in files[licenses + "libudev1.txt"]
    assert "libudev.so.1: Debian's package libudev1, source systemd " in files[licenses + "LIBRARIES.txt"]
    for name in files:
        assert f"{name}," in files["some-1.dist-info/RECORD"] or ".libs/" in name or name.endswith("WHEEL"), name
    failed = add("libnowhere-0a1b2c3d.so.1")
    assert failed.returncode == 1 and "libnowhere.so.1 is in no Debian package" in failed.stderr
