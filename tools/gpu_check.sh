#!/usr/bin/env bash
# Builds, tests and measures Sluice on a machine with an NVIDIA GPU, its CUDA compiler, CMake, ninja and python3. Packages are
# not installed: what is missing comes from a bundle of tools/bundle_deps.sh.
#   tools/gpu_check.sh [--deps BUNDLE] [--only build|tests|bench] OUT
#   --deps BUNDLE   a folder made by tools/bundle_deps.sh, or a tar file of one
#   --only PART     one part; each ends within 9 minutes. The later ones use what `build` left in build/gpu, or make it
# Writes OUT/PART.json and OUT/PART.md (what passed, what failed, what was missing) and OUT/PART.log.
# Exits with 0 when nothing failed. A check that cannot run for lack of tools is named and is no failure; `tests` and
# `bench` fail without a GPU that works. `build` compiles for every kind of GPU that nvidia-smi names, or, without one,
# for the usual ones.
set -uo pipefail
script=$(realpath "${BASH_SOURCE[0]}")

usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$script"; }
part_seconds=520

parts=(build tests bench)
deps=
out=
while [[ $# -gt 0 ]]; do
  case $1 in
    --deps) deps=${2:-} && shift ;;
    --only)
      [[ ${2:-} =~ ^(build|tests|bench)$ ]] || {
        echo "tools/gpu_check.sh: --only takes build, tests or bench" >&2
        exit 2
      }
      parts=("$2") && shift
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
  echo "tools/gpu_check.sh: needed and not found: ${missing[*]}" >&2
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
# cuBLASLt and NCCL are opened at run time: the toolkit's, or those of PyTorch's packages.
for folder in /usr/local/cuda/lib64 $(python3 -c 'import site, glob
for base in site.getsitepackages():
    print(*glob.glob(base + "/nvidia/*/lib"))' 2>/dev/null); do
  [[ -d $folder ]] && export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done

# step NAME SECONDS-MAX COMMAND...: runs one step within what is left of the part and notes how it went.
step() {
  local name=$1 limit=$2 begin=$SECONDS status=passed rc
  shift 2
  local left=$((part_begin + part_seconds - SECONDS))
  ((limit > left)) && limit=$left
  if ((limit < 5)); then
    note "$name" skipped 0 "no time left in this part"
    return 1
  fi
  printf '\n==> %s: %s\n' "$name" "$*" | tee -a "$log"
  timeout -k 10 "$limit" "$@" 2>&1 | tee "$out/$part.step" | tee -a "$log" | tail -n 25
  rc=${PIPESTATUS[0]}
  ((rc == 0)) || status=failed
  ((rc == 124 || rc == 137)) && status=timeout
  ((rc == 77)) && status=skipped
  note "$name" "$status" $((SECONDS - begin)) "$(grep -v '^[[:space:]]*$' "$out/$part.step" | tail -n 1)"
  rm -f "$out/$part.step"
  [[ $status == passed ]]
}

# note NAME passed|failed|timeout|skipped|missing SECONDS TEXT
note() { printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "${4//$'\t'/ }" >>"$records"; }

# Whether this build computes on a GPU here: else every GPU test would skip, and nothing fail. Its own word, not nvidia-smi's.
require_gpu() {
  local found
  found=$(timeout 60 build/gpu/tools/sluice doctor 2>&1 | grep ' CUDA: ')
  [[ $found == *'computes there'* ]] && return
  note GPU failed 0 "nothing can be checked without one: ${found:-sluice doctor does not answer}"
  return 1
}

run_build() {
  step configure 120 cmake "${configure[@]}" || return
  step build 500 cmake --build build/gpu --parallel "$(nproc)"
}

run_tests() {
  [[ -x build/gpu/tools/sluice ]] || run_build || return
  require_gpu || return
  local ctest=(ctest --test-dir build/gpu --output-on-failure --timeout 120)
  step "cpu tests" 150 "${ctest[@]}" --parallel "$(nproc)" --label-regex '^cpu$'
  step "bench adam" 60 build/gpu/tools/sluice bench adam --rounds 5 --json "$out/adam.json"
  step "gpu tests" 200 "${ctest[@]}" --label-regex '^gpu$'
  local skipped
  skipped=$(grep -c 'Skipped' "$log" || true)
  [[ $skipped == 0 ]] || note "gpu tests that skipped" skipped 0 "$skipped lines of the log say why"
  if command -v compute-sanitizer >/dev/null; then
    local checked
    for checked in "gpu/cuda_device_test -*Many*:*Random*:*OddSizes*" "gpu/cuda_math_test *Unscales*:*Norm*:*Notices*" \
      "tools/gpt/cuda_gpt_test *_tied*"; do
      step "compute-sanitizer ${checked%% *}" 60 \
        compute-sanitizer --error-exitcode 1 "build/gpu/tests/${checked%% *}" "--gtest_filter=${checked#* }"
    done
  else
    note compute-sanitizer missing 0 "not on the PATH: memory accesses were not checked"
  fi
}

run_bench() {
  [[ -x build/gpu/tools/sluice ]] || run_build || return
  require_gpu || return
  step "bench gpu" 500 build/gpu/tools/sluice bench gpu --seconds 300 --json "$out/bench_gpu.json"
}

failed=0
for part in "${parts[@]}"; do
  part_begin=$SECONDS
  log=$out/$part.log
  records=$out/$part.tsv
  : >"$log"
  : >"$records"
  [[ -n $capabilities ]] || note nvidia-smi missing 0 "it is not there or names no GPU: compiled for $architectures"
  "run_$part"
  python3 - "$part" "$records" "$out" <<'PYTHON' || failed=1
import datetime, json, os, platform, subprocess, sys

part, records, out = sys.argv[1:]


def output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


steps = []
with open(records, encoding="utf-8", errors="replace") as file:
    for line in file:
        name, status, seconds, text = line.rstrip("\n").split("\t", 3)
        steps.append({"name": name, "status": status, "seconds": int(seconds), "last_line": text})
cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
report = {
    "part": part,
    "date": datetime.date.today().isoformat(),
    "gpu": output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
    "processor": f"{cpu}, {os.cpu_count()} processors",
    "kernel": platform.release(),
    "commit": output("git", "rev-parse", "HEAD"),
    "steps": steps,
}
for name in ("adam", "bench_gpu"):
    path = os.path.join(out, name + ".json")
    if os.path.exists(path) and any(step["name"].replace(" ", "_") in (name, "bench_" + name) for step in steps):
        with open(path, encoding="utf-8") as file:
            report[name] = json.load(file)
with open(os.path.join(out, part + ".json"), "w", encoding="utf-8") as file:
    json.dump(report, file, indent=1)
with open(os.path.join(out, part + ".md"), "w", encoding="utf-8") as file:
    file.write(f"# gpu_check: {part}, {report['date']}\n\n{report['gpu'] or 'no GPU'}; {report['processor']}; {report['commit']}\n\n")
    file.write("| step | result | seconds | last line |\n|---|---|---|---|\n")
    for step in steps:
        text = step["last_line"].replace("|", "\\|")
        file.write(f"| {step['name']} | {step['status']} | {step['seconds']} | {text} |\n")
print(open(os.path.join(out, part + ".md"), encoding="utf-8").read())
sys.exit(any(step["status"] in ("failed", "timeout") for step in steps))
PYTHON
  rm -f "$records"
done
exit $failed
