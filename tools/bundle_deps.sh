#!/usr/bin/env bash
# Collects what Sluice is built on and tested with (headers, libraries, CMake and pkg-config files, pkg-config itself) from
# this machine's Debian packages into DIR, for a machine that has compilers, CMake and ninja but no package source:
#   tools/bundle_deps.sh DIR
#   there: cmake -DCMAKE_PREFIX_PATH=DIR ..., with DIR/lib/x86_64-linux-gnu in LD_LIBRARY_PATH for what its libraries need
# DIR is made anew, does not depend on its place, holds no more than 60 MiB, and packs to a quarter (tar -cJf). Its C library
# must be no older than this machine's.
set -euo pipefail
target=$(realpath -m -- "${1:-.}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -ne 1 || $1 == -* ]]; then
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' tools/bundle_deps.sh >&2
  exit 2
fi
multiarch=x86_64-linux-gnu
limit_mib=60

if [[ -e $target && ! -e $target/lib/pkgconfig ]] && [[ -n $(ls -A "$target") ]]; then
  echo "tools/bundle_deps.sh: $target exists, is not empty and is no bundle; name another folder" >&2
  exit 2
fi
rm -rf "$target"
mkdir -p "$target"/{bin,include,share,lib/pkgconfig,"lib/$multiarch/cmake"}

# Packages of headers; the OpenBLAS of packages.txt is one that only depends on the one with the files.
mapfile -t packages < <(awk '!/^#/ && $1 ~ /-dev$/ {print $1}' tools/packages.txt | sed 's/^libopenblas-dev$/libopenblas-pthread-dev/')
for package in "${packages[@]}"; do
  dpkg-query --listfiles "$package" >/dev/null || {
    echo "tools/bundle_deps.sh: $package is not installed; run tools/install_packages.sh run test" >&2
    exit 1
  }
done

# copy SOURCE FOLDER: a file with what it links to, under its own name.
copy() {
  mkdir -p "$2"
  cp --dereference --preserve=mode,timestamps "$1" "$2/"
}

# add_library FILE: a shared library with those that it needs, except the C and C++ runtime, which the compiler brings.
add_library() {
  local name
  name=$(basename "$1")
  [[ -e $target/lib/$multiarch/$name ]] && return 0
  copy "$1" "$target/lib/$multiarch"
  # The name that programs ask for at start may be another than that of the file.
  local soname
  soname=$(objdump -p "$1" | awk '$1 == "SONAME" {print $2}')
  [[ -z $soname || -e $target/lib/$multiarch/$soname ]] || ln -s "$name" "$target/lib/$multiarch/$soname"
  local needed
  while read -r needed; do
    case $(basename "$needed") in
      libc.so* | libm.so* | ld-linux* | libdl.so* | libpthread.so* | librt.so* | libstdc++.so* | libgcc_s.so*) ;;
      *) add_library "$(readlink -f "$needed")" ;;
    esac
  done < <(ldd "$1" | awk '$2 == "=>" && $3 ~ /^\// {print $3}')
}

for file in $(dpkg-query --listfiles "${packages[@]}"); do
  [[ -f $file ]] || continue
  case $file in
    */share/doc/* | */share/man/* | */share/lintian/* | */eigen3/unsupported/* | */libhwy_contrib.so | */libhwy_test.so | \
      */libssl.so | */libblas.* | */liblapack.* | */libgmock*) ;;
    # The headers of one architecture go beside the others: outside of /usr no compiler looks for them apart.
    "/usr/include/$multiarch/openblas-pthread/"*) copy "$file" "$target/include" ;;
    "/usr/include/$multiarch/"*) copy "$file" "$(dirname "$target/include/${file#"/usr/include/$multiarch/"}")" ;;
    /usr/include/*) copy "$file" "$(dirname "$target/${file#/usr/}")" ;;
    */pkgconfig/*.pc)
      sed -e "s|^prefix=.*|prefix=\${pcfiledir}/../..|" -e "s|^libdir=.*|libdir=\${prefix}/lib/$multiarch|" \
        -e "s|^includedir=/usr/include\$|includedir=\${prefix}/include|" "$file" >"$target/lib/pkgconfig/$(basename "$file")"
      ;;
    */cmake/*) copy "$file" "$(dirname "$target/${file#/usr/}")" ;;
    *.so | *.so.*)
      add_library "$(readlink -f "$file")"
      link="$target/lib/$multiarch/$(basename "$file")"
      [[ -e $link ]] || ln -s "$(basename "$(readlink -f "$file")")" "$link"
      ;;
    *.a) [[ -e ${file%.a}.so ]] || copy "$file" "$target/lib/$multiarch" ;;
  esac
done

# pkg-config, which finds the libraries beside it on its own.
add_library "$(readlink -f "$(ldd "$(command -v pkgconf)" | awk '/libpkgconf/ {print $3}')")"
copy "$(command -v pkgconf)" "$target/lib/$multiarch"
cat >"$target/bin/pkg-config" <<'WRAPPER'
#!/bin/sh
lib=$(cd "$(dirname "$0")/../lib/x86_64-linux-gnu" && pwd)
LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$lib/pkgconf" "$@"
WRAPPER
chmod +x "$target/bin/pkg-config"

size_mib=$(du --summarize --apparent-size --block-size=1M "$target" | cut -f1)
printf '%s: %s MiB from %s packages\n' "$target" "$size_mib" "${#packages[@]}"
if ((size_mib > limit_mib)); then
  echo "tools/bundle_deps.sh: more than $limit_mib MiB; the largest files:" >&2
  find "$target" -type f -printf '%s %p\n' | sort -rn | head -n 10 >&2
  exit 1
fi
