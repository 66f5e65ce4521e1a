#!/usr/bin/env bash
# Builds, tests and measures Sluice on a machine with an NVIDIA GPU, its CUDA compiler, CMake, ninja and python3. Packages are
# not installed: what is missing comes from a bundle of tools/bundle_deps.sh. A machine without compilers takes the programs
# of tools/gpu_pack.sh instead.
#   tools/gpu_check.sh [--deps BUNDLE] [--only PART[,PART...]] OUT
#   --deps BUNDLE   a folder made by tools/bundle_deps.sh, or a tar file of one
#   --only PART     these parts; each ends within 8 minutes. `build` compiles for every kind of GPU that nvidia-smi names, or,
#                   without one, for the usual ones. The others are those of tools/gpu/run.sh, in its order: first, python,
#                   torch, bench, tests, bench7b, sanitizer, streams. They use what `build` left in build/gpu, or make it.
# Writes OUT/PART.json and OUT/PART.md (what passed, what failed, what was missing) and OUT/PART.log.
# Exits with 0 when nothing failed. A check that cannot run for lack of tools is named and is no failure; every part but
# `build` fails without a GPU that works.
set -uo pipefail
script=$(realpath "${BASH_SOURCE[0]}")

usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$script"; }
known=(build first python torch bench tests bench7b sanitizer streams)
# The programs of the first minute come first: a failure of the others does not cost it.
first_programs=(sluice cuda_device_test cuda_math_test cuda_gpt_test)
other_programs=(optimizer_math_cuda_test cuda_trainer_test sluice_c)

parts=("${known[@]}")
deps=
out=
while [[ $# -gt 0 ]]; do
  case $1 in
    --deps) deps=${2:-} && shift ;;
    --only)
      IFS=, read -ra parts <<<"${2:-}"
      [[ ${#parts[@]} -gt 0 ]] || parts=("")
      for part in "${parts[@]}"; do
        [[ -n $part && " ${known[*]} " == *" $part "* ]] || {
          echo "tools/gpu_check.sh: --only takes parts out of: ${known[*]}" >&2
          exit 2
        }
      done
      shift
      ;;
    --help | -h) usage && exit 0 ;;
    -*) usage >&2 && exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
[[ -n $out ]] || { usage >&2 && exit 2; }
mkdir -p "$out" || exit 1
out=$(realpath "$out")
[[ -z $deps ]] || deps=$(realpath "$deps")
cd "$(dirname "$script")/.." || exit 1
mkdir -p build

missing=()
for command in cmake ninja python3 nvcc; do
  command -v "$command" >/dev/null || [[ $command == nvcc && -x /usr/local/cuda/bin/nvcc ]] || missing+=("$command")
done
if [[ ${#missing[@]} -gt 0 ]]; then
  echo "tools/gpu_check.sh: needed and not found: ${missing[*]}; without compilers, run what tools/gpu_pack.sh packs" >&2
  exit 1
fi

capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d ' .' | grep -E '^[0-9]+$' | sort -un)
if [[ -n $capabilities ]]; then
  architectures=$(sed 's/$/-real/' <<<"$capabilities" | paste -sd ';')
else
  architectures='80-real;90-real;90-virtual'
fi
configure=(-S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DSLUICE_CUDA=ON "-DSLUICE_CUDA_ARCHITECTURES=$architectures")
if [[ -n $deps ]]; then
  if [[ -f $deps ]]; then
    # By python3, which brings its own xz. The archive holds one folder.
    rm -rf build/gpu-deps && python3 -m tarfile --extract "$deps" build/gpu-deps || exit 1
    deps=$(echo build/gpu-deps/*)
  fi
  deps=$(realpath "$deps")
  configure+=("-DCMAKE_PREFIX_PATH=$deps" "-DPKG_CONFIG_EXECUTABLE=$deps/bin/pkg-config")
  # The bundle's libraries need this themselves; its path is not in them.
  export LD_LIBRARY_PATH=$deps/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

# The part `build`: its steps with their results, in OUT/build.md and OUT/build.json, written anew after each.
# All steps together end within part_seconds, which leaves ten seconds to end the last.
rows=()
part_seconds=${SLUICE_GPU_PART_SECONDS:-470}
build_step() {
  local name=$1 limit=$2 begin=$SECONDS result=passed rc
  shift 2
  local left=$((part_begin + part_seconds - SECONDS))
  ((limit > left)) && limit=$left
  printf '\n==> %s: %s\n' "$name" "$*" | tee -a "$out/build.log"
  if ((limit < 1)); then
    rc=124
  else
    timeout -k 10 "$limit" "$@" 2>&1 | tee -a "$out/build.log" | tail -n 25
    rc=${PIPESTATUS[0]}
  fi
  ((rc == 0)) || result=failed
  ((rc == 124 || rc == 137)) && result=timeout
  rows+=("$name"$'\t'"$result"$'\t'$((SECONDS - begin)))
  {
    printf '# build, %s\n\nfor %s\n\n| step | result | seconds |\n|---|---|---|\n' "$(date +%F)" "$architectures"
    [[ -n $capabilities ]] || printf '| nvidia-smi is not there or names no GPU | missing | 0 |\n'
    printf '%s\n' "${rows[@]}" | sed 's/^/| /; s/\t/ | /g; s/$/ |/'
  } >"$out/build.md"
  {
    printf '{"part": "build", "architectures": "%s", "steps": [\n' "$architectures"
    printf '%s\n' "${rows[@]}" | sed 's/\(.*\)\t\(.*\)\t\(.*\)/ {"name": "\1", "status": "\2", "seconds": \3}/; $!s/$/,/'
    printf ']}\n'
  } >"$out/build.json"
  [[ $result == passed ]]
}

run_build() {
  local part_begin=$SECONDS
  : >"$out/build.log"
  build_step configure 120 cmake "${configure[@]}" || return
  build_step "build the first programs" 400 cmake --build build/gpu --parallel "$(nproc)" --target "${first_programs[@]}" || return
  build_step "build the others" 300 cmake --build build/gpu --parallel "$(nproc)" --target "${other_programs[@]}"
  # Where MPI and NCCL's header are.
  if grep -q 'nccl_collectives_test' build/gpu/build.ninja 2>/dev/null; then
    build_step "build nccl_collectives_test" 120 cmake --build build/gpu --parallel "$(nproc)" --target nccl_collectives_test sluice_mpi
  fi
  ! printf '%s\n' "${rows[@]}" | grep -q -P '\t(failed|timeout)\t'
}

failed=0
others=()
for part in "${parts[@]}"; do [[ $part == build ]] || others+=("$part"); done
if [[ " ${parts[*]} " == *" build "* || ! -x build/gpu/tools/sluice ]]; then
  run_build || failed=1
  cat "$out/build.md"
fi
if [[ ${#others[@]} -gt 0 ]]; then
  rm -rf build/gpu/pack
  tools/gpu_pack.sh --built build/gpu build/gpu/pack || exit 1
  build/gpu/pack/run.sh --only "$(IFS=, && echo "${others[*]}")" "$out" || failed=1
fi
exit $failed
