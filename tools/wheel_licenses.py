#!/usr/bin/env python3
"""usage: tools/wheel_licenses.py WHEEL

Adds to a wheel that holds libraries of this machine's Debian or Ubuntu packages what their licenses ask for: each package's
copyright file, the license texts that it refers to, such as the LGPL's, and a list of the libraries with source package and
version. The files go to the folder licenses/ of the wheel's .dist-info, in place of those that a run before has added. Fails if
a library is of no package, or a text of a license is missing.
"""

import base64
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import sys
import zipfile

COMMON = re.compile(r"/usr/share/common-licenses/[A-Za-z]+[A-Za-z0-9.-]*[A-Za-z0-9]")
COPYRIGHTS = "/usr/share/doc"
SOURCES = {"debian": "https://snapshot.debian.org/package/SOURCE/VERSION/", "ubuntu": "https://launchpad.net/ubuntu/+source/SOURCE/VERSION"}
FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu")


def original_name(path):
    """auditwheel names libtbb.so.12 libtbb-1a2b3c4d.so.12, or with the version of the file: libtbb-1a2b3c4d.so.12.8. A version before
    the ".so" comes behind its mark, too: libopenblasp-r0-1a2b3c4d.3.21.so."""
    return re.sub(r"-[0-9a-f]{8,}(\.)", r"\1", pathlib.PurePosixPath(path).name)


def package_of(name):
    """Returns package, source package and version of the library. Raises SystemExit where no package has it."""
    # The last is a library that alternatives choose, such as OpenBLAS, in a folder of its own.
    for folder in (*FOLDERS, *(f"{folder}/*" for folder in FOLDERS)):
        file = os.path.join(folder, name)
        for known in (file, os.path.realpath(file)):
            found = subprocess.run(["dpkg-query", "--search", known], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
            if found.returncode == 0:
                package = found.stdout.split(": ")[0].split(", ")[0]
                shown = subprocess.run(["dpkg-query", "--show", "--showformat", "${Package} ${source:Package} ${source:Version}", package],
                                       stdout=subprocess.PIPE, text=True, check=True)
                return tuple(shown.stdout.split(" "))
    sys.exit(f"tools/wheel_licenses.py: {name} is in no package of this machine, so that its license is not known")


def distribution():
    """Its name, and where its packages' sources are. Raises SystemExit for one whose sources are elsewhere."""
    release = platform.freedesktop_os_release()
    where = SOURCES.get(release.get("ID", ""))
    if where is None:
        sys.exit(f"tools/wheel_licenses.py: where {release.get('NAME')} keeps its packages' sources is not known; make the wheel on Debian or Ubuntu")
    return release["ID"].capitalize(), where


def text_of(path, package):
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        sys.exit(f"tools/wheel_licenses.py: {path} is missing ({error.strerror}), which the license of the package {package} is in or refers to; "
                 "install it: small images leave documentation out")


def licenses(libraries):
    """The files to add, by name."""
    files, lines = {}, []
    system, where = distribution()
    for name in sorted(original_name(path) for path in libraries):
        package, source, version = package_of(name)
        text = text_of(f"{COPYRIGHTS}/{package}/copyright", package)
        files[f"{package}.txt"] = text
        for path in sorted(set(COMMON.findall(text.decode(errors="replace")))):
            files[f"{pathlib.Path(path).name}.txt"] = text_of(path, package)
        lines.append(f"{name}: {system}'s package {package}, source {source} {version}; license in {package}.txt\n")
    files["LIBRARIES.txt"] = f"Libraries beside libsluice.so in this wheel. Sources: {where}\n{''.join(lines)}".encode()
    return files


def add(wheel):
    """Rewrites the wheel with the licenses of its libraries; returns their names."""
    with zipfile.ZipFile(wheel) as archive:
        content = {item: archive.read(item) for item in archive.infolist()}
    names = [item.filename for item in content]
    info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/WHEEL"))
    added = {f"{info}/licenses/{name}": data
             for name, data in licenses([name for name in names if ".libs/" in name and ".so" in name]).items()}
    record = next(item for item in content if item.filename == f"{info}/RECORD")
    content = {item: data for item, data in content.items() if item.filename not in added}
    lines = "".join(line for line in content[record].decode().splitlines(keepends=True) if line.split(",")[0] not in added)
    for name, data in added.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines = f"{name},sha256={digest},{len(data)}\n{lines}"
    content[record] = lines.encode()
    fresh = wheel.with_suffix(".new")
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
        for item, data in content.items():
            archive.writestr(item, data)
        for name, data in added.items():
            archive.writestr(name, data)
    fresh.replace(wheel)
    return sorted(added)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    for name in add(pathlib.Path(sys.argv[1])):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
