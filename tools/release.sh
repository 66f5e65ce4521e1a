#!/usr/bin/env bash
# Makes a release from the commit at hand: checks what has to be true of it, then writes the archive, its notes and checksums,
# and the recipes for vcpkg and conan with the archive beside them.
#   tools/release.sh [--draft] [FOLDER]    FOLDER by default build/dist; it must have no other files than those of this release
# Checked: the version is the same in version.h (text and number), the package for PyTorch and CHANGELOG.md, whose first
# section has a date; no file is changed or missing from git; the tag vVERSION is at this commit. --draft leaves out the date, the
# changed files and the tag: for trying the archive.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

draft=no
folder=$PWD/build/dist
while [[ $# -gt 0 ]]; do
  case $1 in
    --draft) draft=yes ;;
    -*)
      sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' tools/release.sh >&2
      exit 2
      ;;
    *) folder=$(cd "$caller" && realpath -m -- "$1") ;;
  esac
  shift
done

wrong=0
complain() {
  echo "tools/release.sh: $*" >&2
  wrong=1
}

version=$(sed -n 's/.*kVersion = "\([0-9.]*\)".*/\1/p' base/include/sluice/version.h)
number=$(sed -n 's/^#define SLUICE_VERSION \([0-9]*\).*/\1/p' base/include/sluice/version.h)
IFS=. read -r major minor patch <<<"$version"
expected=$((10000 * major + 100 * minor + patch))
[[ $number == "$expected" ]] || complain "base/include/sluice/version.h: SLUICE_VERSION is $number for $version; write $expected"
python=$(sed -n 's/^version = "\(.*\)"$/\1/p' python/pyproject.toml)
[[ $python == "$version" ]] || complain "python/pyproject.toml has version $python, version.h has $version: make them equal"
heading=$(sed -n '/^## /{p;q}' CHANGELOG.md)
if [[ $heading != "## $version ("*")" ]]; then
  complain "CHANGELOG.md begins with \"$heading\"; its first section must be \"## $version (DATE)\""
elif [[ $draft == no && ! $heading =~ \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$ ]]; then
  complain "CHANGELOG.md begins with \"$heading\"; write \"## $version ($(date -u +%F))\""
fi
if [[ $draft == no ]]; then
  changed=$(git status --porcelain)
  [[ -z $changed ]] || complain "these files differ from the commit; commit or remove them:"$'\n'"$changed"
  [[ $(git rev-parse --quiet --verify "v$version^{commit}" || true) == "$(git rev-parse HEAD)" ]] ||
    complain "the tag v$version is not at this commit; as the last step: git tag -a v$version -m \"Sluice $version\""
fi
name=sluice-$version
# Everything that is written here. Other files in the folder are of another release, or of no release at all.
written=(vcpkg vcpkg/sluice conan "$name.tar.gz" "notes-$version.md" SHA256SUMS vcpkg/sluice/vcpkg.json
  vcpkg/sluice/portfile.cmake "vcpkg/sluice/$name.tar.gz" conan/conanfile.py "conan/$name.tar.gz")
if [[ -d $folder ]]; then
  known=()
  for file in "${written[@]}"; do known+=(! -path "./$file"); done
  other=$(cd "$folder" && find . -mindepth 1 "${known[@]}" -print -quit)
  [[ -z $other ]] ||
    complain "$folder/${other#./} is no file of release $version; remove it if it is of another release, or name another folder"
fi
[[ $wrong == 0 ]] || exit 1

# Without names and times in it, the archive of a commit is the same wherever it is made.
mkdir -p "$folder/vcpkg/sluice" "$folder/conan"
git archive --format=tar --prefix="$name/" HEAD | gzip -9n >"$folder/$name.tar.gz"
commit=$(git rev-parse HEAD)
[[ $(tar -xOzf "$folder/$name.tar.gz" "$name/cmake/commit.txt") == "$commit" ]] || {
  echo "tools/release.sh: cmake/commit.txt of the archive does not name $commit (see .gitattributes)" >&2
  exit 1
}
sed -n '/^## /,$ {/^## /{x;s/^/x/;/^xx/q;x};p}' CHANGELOG.md >"$folder/notes-$version.md"

# recipe FROM TO: a recipe that knows the version, the archive's checksums and its name.
recipe() {
  sed -e "s/@VERSION@/$version/g" -e "s/@SHA256@/$(sha256sum "$folder/$name.tar.gz" | cut -d' ' -f1)/" \
    -e "s/@SHA512@/$(sha512sum "$folder/$name.tar.gz" | cut -d' ' -f1)/" "$1" >"$2"
}
for file in vcpkg.json portfile.cmake; do recipe "packaging/vcpkg/$file" "$folder/vcpkg/sluice/$file"; done
recipe packaging/conan/conanfile.py "$folder/conan/conanfile.py"
cp "$folder/$name.tar.gz" "$folder/vcpkg/sluice/"
cp "$folder/$name.tar.gz" "$folder/conan/"
(cd "$folder" && sha256sum "$name.tar.gz" "notes-$version.md" >SHA256SUMS && sha256sum --quiet --check SHA256SUMS)
echo "$folder/$name.tar.gz: commit ${commit:0:12}, $(stat --format=%s "$folder/$name.tar.gz") bytes, SHA-256 $(cut -c1-64 "$folder/SHA256SUMS" | head -n 1)"
