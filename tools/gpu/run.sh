#!/usr/bin/env bash
# Checks and measures Sluice on a machine with an NVIDIA GPU. Needs bash, coreutils, grep and the driver. Compilers and the
# repository are not needed: the programs lie beside this script, where tools/gpu_pack.sh puts them.
#   run.sh [--only PART[,PART...]] OUT
# Parts, in the order of what they are worth; each ends by itself within 8 minutes:
#   first      the tests of the device and its kernels, 20 training steps, the updates of CPU and GPU compared by hash
#   python     the tests of the package for PyTorch, those with parameters on the GPU first
#   torch      page-locked memory; PyTorch's step of GPT-2 and Llama: fused AdamW, and torchao's optimizer, DeepSpeed's
#              and Sluice's in host memory and on storage
#   bench      copies, Adam, drive, and steps of GPT-2 124M and 1.5B in four placements
#   tests      training in every placement, the exactness matrix, two ranks on one GPU
#   bench7b    the steps of a 7B model
#   sanitizer  a training step and the tests of the kernels under compute-sanitizer
#   streams    PyTorch's own streams, which the engine adopts, under compute-sanitizer
# OUT/PART.md and OUT/PART.json are written anew when a step begins and when it ends, so that a part that is killed leaves
# its results. OUT/PART.log has all output. Exits with 0 when nothing failed. Without a GPU that works, each part says
# "no GPU" in its files and fails. A step that lacks its tools is named and is no failure.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
part_seconds=${SLUICE_GPU_PART_SECONDS:-460}
known=(first python torch bench tests bench7b sanitizer streams)

usage() {
  local line
  while read -r line; do
    [[ $line == '#!'* ]] && continue
    [[ $line == '#'* ]] || break
    line=${line#'#'}
    printf '%s\n' "${line# }"
  done <"${BASH_SOURCE[0]}"
}

parts=("${known[@]}")
out=
while [[ $# -gt 0 ]]; do
  case $1 in
    --only)
      IFS=, read -ra parts <<<"${2:-}"
      [[ ${#parts[@]} -gt 0 ]] || parts=("")
      for part in "${parts[@]}"; do
        [[ " ${known[*]} " == *" $part "* && -n $part ]] || {
          echo "run.sh: --only takes parts out of: ${known[*]}" >&2
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
out=$(cd "$out" && pwd)
work=$(mktemp -d "${SLUICE_GPU_WORK:-${TMPDIR:-/tmp}}/sluice-gpu.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

# The libraries of NVIDIA that are opened at run time: the toolkit's, or those of PyTorch's packages.
python=$(command -v python3 || true)
for folder in /usr/local/cuda/lib64 $([[ -z $python ]] || "$python" -c 'import site, glob
for base in site.getsitepackages():
    print(*glob.glob(base + "/nvidia/*/lib"))' 2>/dev/null); do
  [[ -d $folder ]] && export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
# The C++ runtime that came along, where the machine has none or an older one; then all libraries that came along, which the
# programs find themselves where /proc is mounted.
nvidia=${LD_LIBRARY_PATH:-}
starting=
for folder in "" "$here/lib/runtime" "$here/lib/runtime:$here/lib"; do
  [[ -z $folder ]] || export LD_LIBRARY_PATH=$folder${nvidia:+:$nvidia}
  if starting=$("$here/bin/sluice" --version 2>&1); then
    starting=
    break
  fi
done

json_text() {
  local text=$1
  text=${text//\\/\\\\}
  text=${text//\"/\\\"}
  text=${text//[$'\x01'-$'\x1f']/ }
  printf '"%s"' "$text"
}

# The steps of this part so far.
names=()
results=()
times=()
lines=()

save() {
  local i separator=
  {
    printf '# %s, %s\n\n%s; %s processors; %s\n\n| step | result | seconds | last line |\n|---|---|---|---|\n' "$part" "$today" "$gpu" \
      "$(nproc)" "$version"
    for i in "${!names[@]}"; do
      printf '| %s | %s | %s | %s |\n' "${names[i]}" "${results[i]}" "${times[i]}" "${lines[i]//|/\\|}"
    done
  } >"$out/$part.md.new"
  {
    printf '{"part": "%s", "date": "%s", "gpu": %s, "processors": %s, "version": %s,\n "steps": [' "$part" "$today" "$(json_text "$gpu")" \
      "$(nproc)" "$(json_text "$version")"
    for i in "${!names[@]}"; do
      printf '%s\n  {"name": %s, "status": "%s", "seconds": %s, "last_line": %s}' "$separator" "$(json_text "${names[i]}")" "${results[i]}" \
        "${times[i]}" "$(json_text "${lines[i]}")"
      separator=,
    done
    printf '\n ]}\n'
  } >"$out/$part.json.new"
  mv "$out/$part.md.new" "$out/$part.md"
  mv "$out/$part.json.new" "$out/$part.json"
}

# note NAME passed|failed|timeout|skipped|missing|running SECONDS TEXT
note() {
  local i=${#names[@]}
  ((i == 0)) || [[ ${results[i - 1]} != running ]] || i=$((i - 1))
  names[i]=$1 results[i]=$2 times[i]=$3 lines[i]=$4
  [[ $2 != failed && $2 != timeout ]] || failed=1
  save
}

# step NAME SECONDS-MAX COMMAND...: runs one step within what is left of the part and notes how it went.
step() {
  local name=$1 limit=$2 begin=$SECONDS result=passed rc last
  shift 2
  local left=$((part_begin + part_seconds - SECONDS))
  ((limit > left)) && limit=$left
  if ((limit < 5)); then
    note "$name" skipped 0 "no time left in this part"
    return 1
  fi
  printf '\n==> %s: %s\n' "$name" "$*" | tee -a "$log"
  note "$name" running 0 "$*"
  local logged
  logged=$(stat -c %s "$log")
  timeout -k 5 "$limit" "$@" >>"$log" 2>&1
  rc=$?
  tail -c "+$((logged + 1))" "$log" >"$work/step"
  ((rc == 0)) || result=failed
  ((rc == 124 || rc == 137)) && result=timeout
  ((rc == 77)) && result=skipped
  last=$(grep -E '^\[  (PASSED|FAILED|SKIPPED) ' "$work/step" | tr '\n' ' ')
  [[ -n $last ]] || last=$(grep -v '^[[:space:]]*$' "$work/step" | tail -n 1)
  tail -n 12 "$work/step"
  note "$name" "$result" $((SECONDS - begin)) "${last:0:600}"
  [[ $result == passed ]]
}

# gtest NAME SECONDS-MAX [ARGUMENTS...]: a test program.
gtest() {
  step "$1" "$2" "$here/bin/$1" "${@:3}"
}

# train NAME SECONDS-MAX [SECTION.KEY=VALUE...]: steps of a small GPT on the GPU; the hash of its state goes to hash_NAME.
train() {
  local name=$1 limit=$2 settings=()
  shift 2
  local setting
  for setting in "$@"; do settings+=(--set "$setting"); done
  step "train: $name" "$limit" "$here/bin/sluice" train "$here/small.json" --set "data.file=$here/text.txt" \
    --set "storage.paths=[\"$work\"]" --set run.device=cuda "${settings[@]}" || return
  printf -v "hash_${name//[^a-z0-9]/_}" '%s' "$(hash_of "$work/step")"
}

hash_of() { grep -o 'state sha256 [0-9a-f]*' "$1" | tail -n 1; }

# same NAME HASH HASH: whether two runs ended in the same bits.
same() {
  if [[ -n $2 && $2 == "$3" ]]; then
    note "$1" passed 0 "$2"
  else
    note "$1" failed 0 "${2:-no hash} against ${3:-no hash}"
  fi
}

run_first() {
  step "doctor" 60 "$here/bin/sluice" doctor
  gtest cuda_device_test 60
  gtest cuda_math_test 60
  gtest cuda_gpt_test 90
  train "20 steps" 60 placement.optimizer=device placement.parameters=device
  train "cpu update" 60 placement.optimizer=host placement.parameters=device
  train "nvme" 60 placement.optimizer=nvme placement.parameters=nvme
  train "streamed" 60 placement.optimizer=nvme placement.parameters=device optimizer.update_on=device
  same "update: GPU's bits are the CPU's" "${hash_20_steps:-}" "${hash_cpu_update:-}"
  same "bits with the state on NVMe" "${hash_20_steps:-}" "${hash_nvme:-}"
  same "bits with updates on the GPU of state on NVMe" "${hash_20_steps:-}" "${hash_streamed:-}"
  gtest optimizer_math_cuda_test 60
}

# Puts the program's path into the variable `sanitizer`.
find_sanitizer() {
  sanitizer=$(command -v compute-sanitizer || true)
  [[ -n $sanitizer || ! -x /usr/local/cuda/bin/compute-sanitizer ]] || sanitizer=/usr/local/cuda/bin/compute-sanitizer
  [[ -z $sanitizer ]] || return 0
  note compute-sanitizer missing 0 "not on the PATH: memory accesses were not checked"
  return 1
}

run_sanitizer() {
  local sanitizer
  find_sanitizer || return
  local tool
  for tool in memcheck racecheck initcheck; do
    step "$tool: one step" 110 "$sanitizer" --tool "$tool" --error-exitcode 1 "$here/bin/sluice" train "$here/small.json" \
      --set "data.file=$here/text.txt" --set "storage.paths=[\"$work\"]" --set run.device=cuda --set run.steps=1 \
      --set placement.optimizer=device --set model.layers=1
  done
  step "memcheck: cuda_device_test" 60 "$sanitizer" --error-exitcode 1 "$here/bin/cuda_device_test" '--gtest_filter=-*Many*:*Random*:*OddSizes*'
  step "memcheck: cuda_math_test" 60 "$sanitizer" --error-exitcode 1 "$here/bin/cuda_math_test" '--gtest_filter=*Accumulates*:*Norm*:*Notices*'
  step "memcheck: cuda_gpt_test" 60 "$sanitizer" --error-exitcode 1 "$here/bin/cuda_gpt_test" '--gtest_filter=*_tied*'
}

# Without cuBLASLt every product is a plain kernel: 100 to 1000 times slower.
require_products() {
  local found
  found=$(timeout 60 "$here/bin/sluice" train "$here/small.json" --set "data.file=$here/text.txt" --set "storage.paths=[\"$work\"]" \
    --set run.device=cuda --set run.steps=1 2>&1 | grep -o 'matrix products by [^;)]*' | head -n 1)
  [[ $found == *cuBLASLt* ]] && return
  note "cuBLASLt" missing 0 "libcublasLt is neither in /usr/local/cuda/lib64 nor among PyTorch's packages; ${found:-training fails}"
  return 1
}

run_bench() {
  require_products || return
  step "bench gpu 124M and 1.5B" 450 "$here/bin/sluice" bench gpu --shape 124M --shape 1.5B --seconds 330 --path "$work" \
    --json "$out/bench_gpu.json"
}

run_bench7b() {
  require_products || return
  step "bench gpu 7B" 450 "$here/bin/sluice" bench gpu --shape 7B --seconds 330 --path "$work" --json "$out/bench_gpu_7b.json"
}

has_torch() {
  [[ -n $python ]] && "$python" -c 'import torch' 2>/dev/null && return
  note "PyTorch" missing 0 "python3 has no torch here"
  return 1
}

# The package came along: its optimizer in host memory is the other yardstick.
add_torchao() {
  local wheels=("$here"/wheel/torchao-*.whl)
  if [[ ! -e ${wheels[0]} ]]; then
    note torchao missing 0 "no wheel came along: only what this machine's PyTorch has is measured"
    return
  fi
  step "unpack ${wheels[0]##*/}" 60 "$python" -m zipfile -e "${wheels[0]}" "$work/torchao" &&
    export PYTHONPATH=$work/torchao${PYTHONPATH:+:$PYTHONPATH}
}

# DeepSpeed, for one, and what it needs.
add_wheels() {
  local wheel
  for wheel in "$here"/wheel/*.whl; do
    [[ ! -e $wheel || ${wheel##*/} == torchao-* || ${wheel##*/} == sluice* ]] && continue
    step "unpack ${wheel##*/}" 60 "$python" -m zipfile -e "$wheel" "$work/wheels" &&
      export PYTHONPATH=$work/wheels${PYTHONPATH:+:$PYTHONPATH}
  done
}

run_torch() {
  has_torch || return
  add_torchao
  add_wheels
  add_package || true  # torch's own optimizer is a yardstick by itself
  step "page-locked memory" 40 "$python" "$here/page_locking.py"
  local shape
  for shape in 1.5B llama-1.1B 124M 7B; do
    step "PyTorch's step, $shape" 170 "$python" "$here/torch_step.py" --shape "$shape" --seconds 130 --path "$work" \
      --json "$out/torch_step_$shape.json"
  done
}

# two_ranks shared|hosts [SECTION.KEY=VALUE...]: two ranks that meet without MPI. NCCL takes two ranks on one GPU where it is
# told to (2.30 and later), or when each seems to be a host of its own, which leaves only sockets between them.
two_ranks() {
  local way=$1 rank settings=() pids=() rc=0
  shift
  local setting
  for setting in "$@"; do settings+=(--set "$setting"); done
  for rank in 0 1; do
    env RANK="$rank" WORLD_SIZE=2 LOCAL_RANK="$rank" LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29731 \
      $(if [[ $way == shared ]]; then echo NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0; else echo "NCCL_HOSTID=rank_$rank"; fi) \
      NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0 NCCL_RAS_ENABLE=0 NCCL_MAX_NCHANNELS=2 \
      "$here/bin/sluice" train "$here/small.json" --set "data.file=$here/text.txt" --set "storage.paths=[\"$work\"]" \
      --set run.device=cuda --set memory.device=512MiB "${settings[@]}" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || rc=$?; done
  return "$rc"
}

# NCCL_MULTI_RANK_GPU_ENABLE is of 2.30.
takes_ranks_together() {
  [[ $nccl =~ ^([0-9]+)\.([0-9]+) ]] && ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] >= 2030))
}

run_tests() {
  gtest cuda_trainer_test 120
  export -f two_ranks
  export here work
  local hash=
  if step "two ranks as two hosts" 60 bash -c 'two_ranks "$@"' - hosts placement.optimizer=device; then
    hash=$(hash_of "$work/step")
    step "two ranks, NVMe" 60 bash -c 'two_ranks "$@"' - hosts placement.optimizer=nvme placement.parameters=nvme &&
      same "two ranks: the same bits" "$hash" "$(hash_of "$work/step")"
  fi
  local shared=()
  if takes_ranks_together; then
    shared=(NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0)
    step "two ranks by NCCL's setting" 60 bash -c 'two_ranks "$@"' - shared placement.optimizer=device &&
      same "two ranks by NCCL's setting: the same bits" "$hash" "$(hash_of "$work/step")"
  else
    note "two ranks by NCCL's setting" missing 0 "NCCL ${nccl:-of an unknown version} has no NCCL_MULTI_RANK_GPU_ENABLE, as 2.30 has: the ranks met as two hosts, over sockets"
  fi
  if [[ ! -x $here/bin/nccl_collectives_test ]]; then
    note nccl_collectives_test missing 0 "built without MPI or NCCL's header"
  elif command -v mpirun >/dev/null; then
    step nccl_collectives_test 100 env "${shared[@]}" mpirun --allow-run-as-root --oversubscribe -n 2 "$here/bin/nccl_collectives_test"
  else
    note nccl_collectives_test missing 0 "mpirun is not on the PATH"
  fi
  if [[ -z $python ]]; then
    note exactness missing 0 "python3 is not on the PATH"
    return
  fi
  export SLUICE_BINARY=$here/bin/sluice SLUICE_SOURCE=$here SLUICE_TEST_DEVICE=cuda
  local variant
  for variant in reference $("$python" -B "$here/exactness.py" --list | tr ';' ' ') $("$python" -B "$here/exactness.py" --list-once | tr ';' ' '); do
    step "exactness: $variant" 60 "$python" -B "$here/exactness.py" bf16 4 "$variant" "$work/reference.json" || [[ $variant != reference ]] || return
  done
}

# The library finds its own libraries in the folder lib beside the package.
add_package() {
  [[ ${package:-} != here ]] || return 0
  rm -rf "$work/site"
  mkdir "$work/site" && ln -s "$here/lib" "$work/site/lib" &&
    step "install the wheel" 120 "$python" -m pip install -q --no-index --no-deps --no-cache-dir --target "$work/site" "$here"/wheel/sluice*.whl &&
    export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH} && package=here
}

has_pytest() {
  "$python" -c 'import pytest' 2>/dev/null && return
  note pytest missing 0 "python3 has no pytest here"
  return 1
}

# torch asks CUDA for things that it knows to handle when they fail, so failed calls are no findings here.
run_streams() {
  local sanitizer tool
  find_sanitizer || return
  has_torch && has_pytest && add_package || return
  for tool in memcheck racecheck; do
    step "$tool: streams of PyTorch" 220 bash -c 'cd "$1" && exec "$2" --tool "$3" --report-api-errors no --error-exitcode 1 \
      "$4" -B -m pytest -q -p no:cacheprovider -k stream test_cuda_offload.py test_cuda.py' \
      - "$here/python_tests" "$sanitizer" "$tool" "$python"
  done
}

run_python() {
  has_torch && has_pytest && add_package || return
  for part in test_cuda_offload.py test_cuda.py; do
    step "python/tests/$part" 150 bash -c 'cd "$1" && exec "$2" -B -m pytest -q -p no:cacheprovider "$3"' - "$here/python_tests" "$python" "$part"
  done
  # The others compute on the CPU.
  step "python/tests" 400 bash -c 'cd "$1" && CUDA_VISIBLE_DEVICES= exec "$2" -B -m pytest -q -p no:cacheprovider --ignore frameworks .' - "$here/python_tests" "$python"
}

# Whether Sluice computes on a GPU here: its own word, since nvidia-smi may be absent, or see what cannot be used.
said=$(timeout 60 "$here/bin/sluice" doctor 2>&1 || true)
found=$(grep ' CUDA: ' <<<"$said" || true)
nccl=$(grep -o ' NCCL: [0-9.]*' <<<"$said" || true)
nccl=${nccl#* NCCL: }
version=$("$here/bin/sluice" --version 2>/dev/null | head -n 1)
[[ ! -e $here/commit ]] || version="$version, $(cat "$here/commit")"
gpu="no GPU"
[[ $found != *'computes there'* ]] ||
  gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max --format=csv,noheader 2>/dev/null | head -n 1)
[[ -n $gpu ]] || gpu=${found#* CUDA: }
failed=0
for part in "${parts[@]}"; do
  part_begin=$SECONDS
  today=$(date +%F)
  log=$out/$part.log
  names=() results=() times=() lines=()
  : >"$log"
  if [[ $gpu == "no GPU" ]]; then
    note GPU failed 0 "no GPU: ${found:-bin/sluice does not start: $starting}"
  else
    "run_$part"
  fi
  echo
  cat "$out/$part.md"
done
exit $failed
