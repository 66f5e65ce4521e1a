#!/usr/bin/env bash
# Builds what an installation has twice, from copies of the commit in two folders, and compares the files byte for byte: a
# build is the same wherever and whenever it is made, as long as compiler and packages are. Takes minutes.
#   tools/reproducible.sh [CMAKE ARGUMENTS...]     such as -DBUILD_SHARED_LIBS=ON
# Exits with 1 and the names of the files that differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d "${TMPDIR:-/tmp}/sluice-reproducible-XXXXXX")
trap 'rm -rf "$work"' EXIT

# build SOURCE: installs to $work/prefix, and notes the checksums of what is there.
build() {
  mkdir -p "$1"
  git archive HEAD | tar -x -C "$1"
  cmake -S "$1" --preset install -DCMAKE_INSTALL_PREFIX="$work/prefix" "${@:2}" >"$1.log" || {
    tail -n 20 "$1.log"
    exit 1
  }
  cmake --build "$1/build/install" -- --quiet
  cmake --install "$1/build/install" --strip >/dev/null
  (cd "$work/prefix" && find . -type f -print0 | sort -z | xargs -0 sha256sum) >"$1.sums"
  rm -rf "$work/prefix"
}

build "$work/one" "$@"
sleep 1.1 # another second, should a file hold the time
build "$work/a longer place/here" "$@"
if ! diff "$work/one.sums" "$work/a longer place/here.sums"; then
  echo "two builds of $(git rev-parse --short HEAD) differ in the files above" >&2
  exit 1
fi
echo "two builds in different folders: $(wc -l <"$work/one.sums") files, all the same; sluice is $(grep '/bin/sluice$' "$work/one.sums" | cut -c1-24)..."
