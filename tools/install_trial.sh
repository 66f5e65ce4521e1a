#!/usr/bin/env bash
# Tries the ways to install Sluice, each in a fresh root of Debian made by debootstrap, and writes docs/results/install.md: the
# commands, their seconds and last lines. Needs root, a network, and time: the parts "roots" of `tools/test.sh --slow` run it.
#   --only WAY       one of deb, tasks, docker, cuda, conan, vcpkg, wheel, clang, trixie, noble, aarch64 (may be repeated; default:
#                    all). The page keeps what earlier runs noted about the other ways
#   --optimize LEVEL such as -O1: compiles in the roots with this instead of -O3, to spare the machine; the page says so
#   --packages DIR   Debian packages made before (build/deb/packages), else they are built first
#   --wheel FILE     a wheel that tools/wheel.sh has made, else it is built first
#   --note TEXT      a sentence for the page, about the ways of this run
#   --bases DIR      keeps the roots that debootstrap makes, for other runs
#   --output FILE    instead of docs/results/install.md
# Exits with 1 if a command failed; with 77 if none failed and some ways could not be tried, for which programs, root or a network
# are needed. The last lines name these ways: "SKIPPED: WAY: WHY".
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The path that the caller means, from wherever the script runs.
given() { (cd "$caller" && realpath -m -- "$1"); }

packages=
wheel=
bases=
note=
optimize=
only=()
output=docs/results/install.md
while [[ $# -gt 0 ]]; do
  case $1 in
    --packages) packages=$(given "${2:?--packages needs a folder}") ;;
    --wheel) wheel=$(given "${2:?--wheel needs a file}") ;;
    --only) only+=("${2:?--only needs a way}") ;;
    --note) note=${2:?--note needs a text} ;;
    --optimize) optimize=${2:?--optimize needs a level, such as -O1} ;;
    --bases) bases=$(given "${2:?--bases needs a folder}") ;;
    --output) output=$(given "${2:?--output needs a file}") ;;
    *)
      sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' tools/install_trial.sh >&2
      exit 2
      ;;
  esac
  shift 2
done
ways=(deb docker cuda conan vcpkg trixie noble tasks aarch64 clang wheel)
[[ ${#only[@]} -gt 0 ]] || only=("${ways[@]}")
for way in "${only[@]}"; do
  [[ $way != *" "* && " ${ways[*]} " == *" $way "* ]] || {
    echo "tools/install_trial.sh: no way is called \"$way\"; there are ${ways[*]}" >&2
    exit 2
  }
done

skipped=() # lines about ways that cannot be tried
# left_out WAY WHY
left_out() {
  skipped+=("SKIPPED: $1: $2")
  echo "==> $1: cannot be tried: $2"
}
tell_skipped() {
  if [[ ${#skipped[@]} -gt 0 ]]; then printf '%s\n' "${skipped[@]}"; fi
}

# reaches URL
reaches() { wget --quiet --spider --timeout=20 --tries=2 "$1"; }
why=
for program in debootstrap wget xz; do
  command -v "$program" >/dev/null || why=${why:-"$program is not installed (tools/install_packages.sh slow)"}
done
if [[ $EUID -ne 0 ]]; then why=${why:-"this needs root"}; fi
if [[ -z $why ]] && ! reaches http://deb.debian.org/debian/dists/bookworm/Release; then
  why="http://deb.debian.org/debian cannot be reached"
fi
if [[ -n $why ]]; then
  for way in "${only[@]}"; do left_out "$way" "$why"; done
  tell_skipped
  exit 77
fi

notes=build/install_trials # a file of rows for each way
mkdir -p "$notes"
work=$(mktemp -d "${TMPDIR:-/tmp}/sluice-install-XXXXXX")
leave_root() {
  local folder
  for folder in proc sys dev; do
    if mountpoint --quiet "$work/root/$folder"; then umount --lazy "$work/root/$folder"; fi
  done
  rm -rf --one-file-system "$work/root"
}
clean() {
  leave_root
  rm -rf --one-file-system "$work"
}
trap clean EXIT
bases=${bases:-$work}
mkdir -p "$bases"
log=$work/log
failed=no

# row COMMAND SECONDS RESULT: with the last line that the command printed.
row() {
  local last
  last=$({ grep -v '^[[:space:]]*$' "$log" || true; } | tail -n 1 | tr -d '\r`' | sed 's/\x1b\[[0-9;]*m//g; s/|/\\|/g' | cut -c1-110)
  printf '| `%s` | %s | %s | `%s` |\n' "${1//|/\\|}" "$2" "$3" "${last:- }" >>"$notes/$way"
}

# step COMMAND: in the root, in the source's folder if there is one. After a failure the rest of the way is left out.
broken=no
step() {
  [[ $broken == no ]] || return 0
  local begin=$SECONDS status=0
  echo "==> $way: $1"
  chroot "$work/root" /usr/bin/env -i "${environment[@]}" PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    DEBIAN_FRONTEND=noninteractive TERM=dumb LC_ALL=C.UTF-8 bash -euo pipefail -c "cd /root/sluice 2>/dev/null || cd /root; $1" \
    </dev/null >"$log" 2>&1 || status=$?
  if [[ $status == 0 ]]; then
    row "$1" $((SECONDS - begin)) passed
  else
    row "$1" $((SECONDS - begin)) "**failed ($status)**"
    tail -n 30 "$log"
    broken=yes
    failed=yes
  fi
}

# enter SUITE: a fresh root of the smallest system; its steps have the variables of `enter_with`.
enter_with=()
archive_options=() # for a suite that is not in Debian's archive
archive=()
enter() {
  local begin=$SECONDS
  echo "==> $way: a fresh root of $1"
  broken=no
  environment=("${enter_with[@]}" ${optimize:+CMAKE_TOOLCHAIN_FILE=/root/optimize.cmake})
  : >"$notes/$way"
  leave_root
  if [[ ! -d $bases/$1 ]]; then
    debootstrap --variant=minbase --include=ca-certificates "${archive_options[@]}" "$1" "$bases/$1.part" "${archive[@]}" >"$log" 2>&1 || {
      row "debootstrap --variant=minbase $1" $((SECONDS - begin)) "**failed**"
      tail -n 5 "$log"
      rm -rf --one-file-system "$bases/$1.part"
      broken=yes
      failed=yes
      mkdir -p "$work/root/root" # what is brought there for the steps that are left out
      return 0
    }
    cp /etc/resolv.conf "$bases/$1.part/etc/resolv.conf"
    mv "$bases/$1.part" "$bases/$1"
  fi
  cp -a "$bases/$1" "$work/root"
  # A package index that is reached through a certificate of this machine's own is reached from the root, too.
  cp /etc/ssl/certs/ca-certificates.crt "$work/root/etc/ssl/certs/"
  if [[ -e /etc/pip.conf ]]; then cp /etc/pip.conf "$work/root/etc/"; fi
  mount -t proc proc "$work/root/proc"
  mount -t sysfs -o ro sysfs "$work/root/sys" # without it, hwloc complains
  mount --bind /dev "$work/root/dev"
  if [[ -n $optimize ]]; then
    echo "set(CMAKE_CXX_FLAGS_RELEASE \"$optimize -DNDEBUG\" CACHE STRING \"\")" >"$work/root/root/optimize.cmake"
  fi
  : >"$log"
  row "debootstrap --variant=minbase $1" $((SECONDS - begin)) "a fresh root"
}

bring_source() { mkdir -p "$work/root/root/sluice" && git archive HEAD | tar -x -C "$work/root/root/sluice"; }
bring_release() { tools/release.sh --draft "$work/root/root/release" >/dev/null; }
install_build_packages() { step "apt-get update -q && apt-get install -yq --no-install-recommends $1"; }

try_deb() {
  enter bookworm
  cp "$packages"/*.deb "$work/root/root/"
  step 'apt-get update -q && apt-get install -yq --no-install-recommends ./sluice_*.deb'
  step 'sluice version && sluice plan --parameters 7B --layers 32'
  step 'seq 100000 >/tmp/text && cd /tmp && sluice train /usr/share/sluice/configs/quickstart.json --data /tmp/text --steps 3'
  step 'apt-get install -yq --no-install-recommends g++ cmake make pkg-config ./libsluice*.deb'
  step 'cmake -S /usr/share/sluice/examples/sine -B /tmp/sine >/dev/null && cmake --build /tmp/sine >/dev/null && /tmp/sine/sine /tmp'
  step 'g++ -std=c++20 /usr/share/sluice/examples/resume/main.cc -o /tmp/resume $(pkg-config --cflags --libs sluice) && /tmp/resume /tmp'
  step 'gcc /usr/share/sluice/examples/line/main.c -o /tmp/line $(pkg-config --cflags --libs sluice_c) && /tmp/line /tmp'
  step 'if ls sluice-mpi*.deb; then apt-get install -yq --no-install-recommends openmpi-bin ./sluice-mpi*.deb; fi && cd /tmp && OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n 2 sluice train /usr/share/sluice/configs/in_memory.json --data /tmp/text --steps 3'
  step 'apt-get install -yq --no-install-recommends lintian >/dev/null && lintian --fail-on error,warning *.deb && echo "lintian: no error, no warning"'
  step 'apt-get purge -yq "sluice*" "libsluice*" && ! find /usr /etc -iname "*sluice*" | grep .'
}

# Five tasks of someone who knows nothing but README.md, with nothing on the machine but the packages.
try_tasks() {
  enter bookworm
  cp "$packages"/*.deb "$work/root/root/"
  bring_source
  step 'cd /root && apt-get update -q && apt-get install -yq --no-install-recommends ./sluice_*.deb ./libsluice*.deb g++ cmake make pkg-config python3'
  step 'python3 tests/packaging/stranger_tasks.py'
}

# The lines of a Dockerfile, run in a root instead of by docker.
try_dockerfile() {
  enter bookworm
  bring_source
  local line
  while IFS= read -r line; do
    case $line in
      ENV\ *) eval "environment+=(${line#ENV })" ;;
      RUN\ *) step "${line#RUN }" ;;
      CMD\ *) step "$(tr -d '[],"' <<<"${line#CMD }")" ;;
    esac
  done < <(sed -e ':join' -e '/\\$/{N;s/ *\\\n */ /;b join' -e '}' "$1")
}
try_docker() { try_dockerfile packaging/Dockerfile; }
try_cuda() { try_dockerfile packaging/cuda.Dockerfile; }

try_conan() {
  enter bookworm
  bring_release
  install_build_packages 'python3-venv g++ cmake make'
  step 'python3 -m venv /opt/conan && /opt/conan/bin/pip install -q conan && /opt/conan/bin/conan profile detect'
  step '/opt/conan/bin/conan create release/conan --no-remote -s compiler.cppstd=20 -c tools.system.package_manager:mode=install'
  bring_source
  step '/opt/conan/bin/conan install --no-remote --requires=sluice/[*] -s compiler.cppstd=20 -g CMakeToolchain -of /tmp/conan && cmake -S examples/sine -B /tmp/sine -DCMAKE_TOOLCHAIN_FILE=/tmp/conan/conan_toolchain.cmake -DCMAKE_BUILD_TYPE=Release >/dev/null && cmake --build /tmp/sine >/dev/null && /tmp/sine/sine /tmp'
}

try_vcpkg() {
  enter bookworm
  bring_release
  install_build_packages 'g++ cmake ninja-build pkg-config liburing-dev libtbb-dev libhwloc-dev libhwy-dev nlohmann-json3-dev libfmt-dev libxxhash-dev'
  mkdir -p "$work/root/root/steps" && cp tests/packaging/port_steps.cmake "$work/root/root/steps/"
  step 'cmake -DPORT=/root/release/vcpkg/sluice -DPREFIX=/root/installed -DWORK=/root/work -DLINKAGE=static -P steps/port_steps.cmake'
  bring_source
  step 'cmake -G Ninja -S examples/sine -B /tmp/sine -DCMAKE_PREFIX_PATH=/root/installed >/dev/null && cmake --build /tmp/sine >/dev/null && /tmp/sine/sine /tmp'
}

# From source: try_source SUITE COMPILER [PACKAGE]
try_source() {
  enter "$1"
  bring_source
  step "tools/install_packages.sh run${3:+ && apt-get install -yq --no-install-recommends $3}"
  step "$2 --version | sed -n 1p"
  step 'cmake --preset install >/dev/null && cmake --build build/install -- --quiet && cmake --install build/install --strip >/dev/null && sluice version'
  step 'seq 100000 >/tmp/text && sluice train configs/quickstart.json --data /tmp/text --steps 3'
}
try_trixie() { try_source trixie g++; }
try_noble() {
  local site=https://archive.ubuntu.com/ubuntu keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg file
  if [[ ! -e $keyring ]]; then # Debian 12 has no package of it; where it comes from is as sure as TLS
    file=$(wget -qO- --timeout=60 "$site/dists/noble/main/binary-amd64/Packages.xz" | xz -d |
      sed -n '/^Package: ubuntu-keyring$/,/^$/s/^Filename: //p') || true
    keyring=$work/keyring/usr/share/keyrings/ubuntu-archive-keyring.gpg
    if [[ -z $file ]] || ! wget -qO "$work/keyring.deb" "$site/$file" || ! dpkg -x "$work/keyring.deb" "$work/keyring"; then
      left_out noble "$site or the keys of its packages cannot be had"
      rm -f "$work/keyring.deb"
      return 0
    fi
  fi
  archive_options=(--keyring="$keyring" --components=main,universe)
  archive=("$site" gutsy) # the script for all releases of Ubuntu, which debootstrap of Debian 12 does not list to noble
  try_source noble g++
  archive_options=()
  archive=()
}

try_clang() {
  enter_with=(CC=clang-16 CXX=clang++-16)
  try_source bookworm clang++-16 clang-16
  enter_with=()
}

# Into an environment that has torch, on a system without a compiler's libraries or any of those that Sluice needs: what the stand-ins
# for NVIDIA's libraries take to be made is removed first.
try_wheel() {
  enter bookworm
  bring_source
  cp "$wheel" "$work/root/root/"
  step 'apt-get update -q && apt-get install -yq --no-install-recommends python3-venv gcc libc6-dev'
  step 'tools/torch_environment.py /opt/torch'
  step 'apt-get purge -yq --auto-remove gcc libc6-dev && cd /root && /opt/torch/bin/pip install -q --no-deps sluice_offload-*.whl && /opt/torch/bin/pip show sluice-offload | sed -n 1,2p'
  step 'cd /tmp && /opt/torch/bin/python -m sluice_offload doctor --path /tmp'
  step 'cd /tmp && /opt/torch/bin/python -m sluice_offload train-demo'
  step 'cd /tmp && seq 100000 >/tmp/text && /opt/torch/bin/sluice train /root/sluice/configs/quickstart.json --data /tmp/text --steps 3'
  step 'apt-get install -yq --no-install-recommends g++ && cd /tmp && g++ -std=c++20 /root/sluice/examples/resume/main.cc -o /tmp/resume $(/opt/torch/bin/python -m sluice_offload flags) && /tmp/resume /tmp'
}

# The libraries for 64-bit ARM, compiled here. QEMU runs the tests of arithmetic, layout, storage and threads, and trainings whose
# state has to hash to what it does on x86-64.
try_aarch64() {
  enter bookworm
  bring_source
  local libraries=() package tests
  for package in libtbb-dev libhwloc-dev liburing-dev libhwy-dev libfmt-dev libxxhash-dev libgtest-dev; do libraries+=("$package:arm64"); done
  step "dpkg --add-architecture arm64 && apt-get update -q && apt-get install -yq --no-install-recommends g++-aarch64-linux-gnu qemu-user cmake ninja-build pkg-config python3 nlohmann-json3-dev ${libraries[*]}"
  step 'cmake --preset aarch64 >/dev/null && cmake --build build/aarch64 --target sluice_c -- --quiet && file=$(readlink -f build/aarch64/capi/libsluice.so) && aarch64-linux-gnu-readelf -h "$file" | grep Machine'
  tests='base_test adam_oracle_test gradient_ops_test rank_sum_test simd_dispatch_test float_environment_test moment_codec_test other_optimizers_test optimizer_options_test io_rules_test sync_queue_test thread_queue_test engine_plan_test store_protocol_test store_files_test state_hashes_test'
  step "cmake --build build/aarch64 --target $tests -- --quiet"
  # QEMU starts no second program of the other processor, as death tests do. It knows no MADV_DONTFORK, and no limit of memory.
  step "ctest --test-dir build/aarch64 --parallel \$(nproc) --tests-regex '^(${tests// /|})[.]' --exclude-regex 'DeathTest|[.]AlignedBuffer|[.]ProcessFd$|[.]Trace$' --output-on-failure | grep -E 'tests passed|FAILED'"
  step 'qemu-aarch64 build/aarch64/tests/base/base_test --gtest_filter="ProcessFd.*:Trace.*-ProcessFd.MappingsAreNotInChildren:Trace.CountsWhatThreadsLose*" | tail -n 1'
  step 'ctest --test-dir build/aarch64 --tests-regex "^state_hashes_test" --verbose | grep -c "       OK .*AreThoseOfEveryProcessor/"'
  step 'SLUICE_LIBRARY=$PWD/build/aarch64/capi/libsluice.so SLUICE_CROSS=aarch64-linux-gnu python3 -c "import sys; sys.path.insert(0, \"python\"); import wheel_backend; print(wheel_backend.build_wheel(\"/tmp\"))"'
}

titles=([0]="Debian packages on Debian 12" [1]="\`packaging/Dockerfile\`: its lines in a root of Debian 12, not by docker"
  [2]="\`packaging/cuda.Dockerfile\`: its lines in a root of Debian 12, not by docker" [3]="conan on Debian 12"
  [4]="The vcpkg port on Debian 12: its portfile by \`tests/packaging/port_steps.cmake\`, not by vcpkg" [5]="From source on Debian 13"
  [6]="From source on Ubuntu 24.04" [7]="Five tasks of a stranger on Debian 12, by the commands of README.md and the pages behind it"
  [8]="64-bit ARM: cross-compiled on Debian 12, tests under QEMU, never run on such a machine"
  [9]="From source on Debian 12 with Clang 16" [10]="The wheel on Debian 12, with torch from the package index")

# recall: where this checkout has no notes of a way, since build/ is not kept, the page has them.
recall() {
  local index
  [[ -e $output ]] || return 0
  for index in "${!ways[@]}"; do
    if [[ ! -e $notes/${ways[$index]} ]]; then
      title="## ${titles[$index]}" awk '/^## / {here = $0 == ENVIRON["title"]; rows = 0; empty = 0; next}
        here && /^\|---/ {rows = 1; next}
        here && rows && /^$/ {empty = 1; next}
        here && rows {if (empty) {print ""; empty = 0}; print}' "$output" >"$notes/${ways[$index]}"
    fi
  done
}
write_page() {
  local index missing=()
  cat <<'END'
# Results: installing

Made by `tools/install_trial.sh`: each way begins in a fresh root of the smallest system. Below each are the cores and
the load of the machine, on which other work ran where the load is higher than the cores.
END
  for index in "${!ways[@]}"; do
    if [[ ! -s $notes/${ways[$index]} ]]; then
      missing+=("${titles[$index]}")
      continue
    fi
    printf '\n## %s\n\n| command | seconds | result | last line |\n|---|---|---|---|\n' "${titles[$index]}"
    cat "$notes/${ways[$index]}"
  done
  printf '\n## Not tried\n\n'
  if [[ ${#missing[@]} -gt 0 ]]; then printf -- '- %s.\n' "${missing[@]}"; fi
  printf -- '- docker and vcpkg themselves: neither can be had here. Tried are the commands of their recipes.\n'
  printf -- '- The CUDA image on a GPU: it has run on none. Its quickstart trained on the processor.\n'
}

recall
# Those are compiled outside of their root, by conan's own flags, or at -O1 in any case.
not_optimized=" deb tasks wheel conan aarch64 "
for way in "${only[@]}"; do
  if [[ ($way == deb || $way == tasks) && -z $packages ]]; then
    rm -rf build/deb/packages # whatever fails, packages made before are not tried
    cmake --preset deb >"$log"
    cmake --build build/deb -- --quiet
    (cd build/deb && cpack >"$log")
    packages=build/deb/packages
  fi
  if [[ $way == wheel && -z $wheel ]]; then
    rm -rf build/trial_wheel
    tools/wheel.sh build/trial_wheel >"$log"
    wheel=$(echo build/trial_wheel/*.whl)
  fi
  commit=$(git rev-parse --short HEAD)
  before=${#skipped[@]}
  "try_$way"
  # The page keeps what it had of a way that could not be tried.
  if [[ ${#skipped[@]} == "$before" ]]; then
    said=$note
    if [[ -n $optimize && $not_optimized != *" $way "* ]]; then
      said="Compiled with $optimize in place of -O3, to spare the machine.${note:+ $note}"
    fi
    printf '\nOn %s, at commit %s; %s cores, load average %s at the end.%s\n' "$(LC_ALL=C date -u +'%-d %B %Y')" "$commit" \
      "$(nproc)" "$(cut -d' ' -f1 /proc/loadavg)" "${said:+$'\n'$said}" >>"$notes/$way"
  fi
  write_page >"$output"
done
tell_skipped
[[ $failed == no ]] || exit 1
[[ ${#skipped[@]} == 0 ]] || exit 77
