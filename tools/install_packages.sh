#!/usr/bin/env bash
# Installs the Debian packages of tools/packages.txt that are missing; does nothing, and needs no network, when none is.
#   tools/install_packages.sh SET...      SET is `run`, `text`, `test` or `slow`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -eq 0 ]]; then
  echo "usage: tools/install_packages.sh SET...  (SET: run, text, test, slow)" >&2
  exit 2
fi

wanted=()
for set_name in "$@"; do
  mapfile -t packages < <(awk -v name="$set_name" '!/^#/ && $2 == name {print $1}' tools/packages.txt)
  if [[ ${#packages[@]} -eq 0 ]]; then
    echo "tools/install_packages.sh: tools/packages.txt has no package of the set \"$set_name\"" >&2
    exit 2
  fi
  wanted+=("${packages[@]}")
done

if ! command -v dpkg-query >/dev/null; then
  echo "This is not a Debian system: packages are not checked. Needed, under Debian's names: ${wanted[*]}" >&2
  exit 0
fi

# A package that was removed but left its configuration behind is known to dpkg, too: ask for its status.
installed() {
  # shellcheck disable=SC2016  # ${...} is dpkg-query's
  [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null || true) == installed ]]
}

missing=()
for package in "${wanted[@]}"; do
  present=no
  for name in ${package//|/ }; do
    if installed "$name"; then present=yes; fi
  done
  [[ $present == yes ]] || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

as_root=()
if [[ $EUID -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "Packages are missing and neither root nor sudo is at hand. As root: apt-get install ${missing[*]%%|*}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

echo "Installing: ${missing[*]}"
# Without fresh lists an install may still succeed from older ones, so only the install decides.
"${as_root[@]}" apt-get update --quiet || echo "apt-get update failed; trying with the lists at hand" >&2
# A package with several names is installed under the first that this release has.
names=()
for package in "${missing[@]}"; do
  chosen=${package%%|*}
  for name in ${package//|/ }; do
    if apt-cache show --quiet=2 "$name" >/dev/null 2>&1; then
      chosen=$name
      break
    fi
  done
  names+=("$chosen")
done
if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install --yes --quiet --no-install-recommends "${names[@]}"; then
  echo "apt-get could not install: ${names[*]}" >&2
  echo "Its messages above say why: no network, no such package in this release (Debian 12 has them all), or no right to." >&2
  exit 1
fi
