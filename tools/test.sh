#!/usr/bin/env bash
# Builds Sluice and runs each test at least once: in a release build, or under AddressSanitizer and
# UndefinedBehaviorSanitizer, or in both (CONTRIBUTING.md, labels), and the tests of the package for PyTorch, for which torch
# is fetched from the package index into build/torch once. Installs missing Debian packages first.
#   --slow      also all parts of the list below, one after another
#   --part NAME only this part, which needs none of the others; may be given several times
#   --cases N   how many cases each randomized test runs (default: a fixed number of each test; 50 times that in the
#               parts "cases" and "long")
#   --seed N    where the randomized tests begin (default: 1); a failing test prints the seed that repeats it
#   --jobs N    parallel compile jobs (default: the processors); twice as many tests run side by side, since they often
#               wait for drives, messages and deadlines
# Parts of --slow, each of which is to end within 80 minutes on two cores:
#   sanitizers  what is left to --slow under AddressSanitizer: three in four pieces of long suites, the command and the
#               programs of tests/tools, and examples built against the installed package
#   threads-I   piece I of 1 to 2 of all tests of processors, files and suites under ThreadSanitizer
#   cases       the tests of the release build, with 50 times the cases of the randomized ones
#   long        the tests labelled slow, and the suites that the release build leaves to the sanitizers, with as many cases
#   copies      the engine's tests with copies on the host device (memory.unified off)
#   guard       the engine's tests with memory that only leases may use (memory.guard on)
#   frameworks  the package for PyTorch under transformers, accelerate, lightning, peft, bitsandbytes, TRL, diffusers and DeepSpeed
#   wheels      the wheel that holds its libraries, under the oldest torch and the newest, and the Python tests marked slow
#   alone       each source compiled alone
#   twice       two builds in different folders, compared
#   roots-I     piece I of 1 to 4 of the ways to install Sluice, each in a fresh root of Debian or Ubuntu: 1 Debian packages, a
#               stranger's tasks and the wheel; 2 conan and vcpkg; 3 Dockerfiles; 4 from source, and for 64-bit ARM
#   mutants-I   piece I of 1 to 12 of tests/mutation/mutants.json: one line of the source broken at a time
#   objects     symbols and unused functions, in a build of one object per source
# Exits with 0 when everything passed, and with 77 when nothing failed but a part was not tried, or not whole: for want of a
# network, or of root. The last lines name what that was. Build trees: build/release, build/asan, build/tsan.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' tools/test.sh; }

threads_pieces=2
pieces=12  # of the mutants
# The ways that tools/install_trial.sh knows, in pieces that keep to their time.
roots=("deb tasks wheel" "conan vcpkg" "docker cuda" "trixie noble clang aarch64")
parts=(sanitizers)
for ((piece = 1; piece <= threads_pieces; ++piece)); do parts+=("threads-$piece"); done
parts+=(cases long copies guard frameworks wheels alone twice)
for ((piece = 1; piece <= ${#roots[@]}; ++piece)); do parts+=("roots-$piece"); done
for ((piece = 1; piece <= pieces; ++piece)); do parts+=("mutants-$piece"); done
parts+=(objects)

is_part() {
  local part
  for part in "${parts[@]}"; do
    [[ $part != "$1" ]] || return 0
  done
  return 1
}

slow=no
chosen=()
jobs=$(nproc)
while [[ $# -gt 0 ]]; do
  case $1 in
    --slow) slow=yes ;;
    --part)
      if ! is_part "${2:-}"; then
        echo "tools/test.sh: --part needs one of: ${parts[*]}" >&2
        exit 2
      fi
      chosen+=("$2")
      shift
      ;;
    --cases | --seed | --jobs)
      if [[ ! ${2:-} =~ ^[0-9]+$ ]]; then
        echo "tools/test.sh: $1 needs a number" >&2
        exit 2
      fi
      case $1 in
        --cases) export SLUICE_TEST_CASES=$2 ;;
        --seed) export SLUICE_TEST_SEED=$2 ;;
        --jobs) jobs=$((10#$2)) ;;
      esac
      shift
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    *)
      echo "tools/test.sh: unknown option \"$1\"" >&2
      usage >&2
      exit 2
      ;;
  esac
  shift
done
if [[ $jobs == 0 ]]; then
  echo "tools/test.sh: --jobs needs at least 1" >&2
  exit 2
fi
if [[ $slow == yes && ${#chosen[@]} -gt 0 ]]; then
  echo "tools/test.sh: --slow runs all parts, --part some of them: give one of the two" >&2
  exit 2
fi

say() { printf '\n==> [%4d s] %s\n' "$SECONDS" "$*"; }

# skip TEXT: what cannot be tried here. It does not fail, and is named again in the end.
not_tried=build/not_tried.txt
skip() {
  say "SKIPPED: $*"
  printf '%s\n' "$*" >>"$not_tried"
}

tell_skipped() {
  [[ -s $not_tried ]] || return 0
  say "NOT TRIED, for this machine cannot:"
  sed 's/^/    /' "$not_tried"
}

# build PRESET [CMAKE ARGUMENTS...]
build() {
  say "building the preset \"$1\""
  cmake --preset "$1" "${@:2}" >"build/$1.configure.log" 2>&1 || {
    cat "build/$1.configure.log" >&2
    return 1
  }
  sed -n '/^-- Sluice /,$ {/^-- \(Sluice\|  \)/p}' "build/$1.configure.log"
  cmake --build "build/$1" --parallel "$jobs"
}

# begin NAME COMMAND...: runs COMMAND in the background, with its output in build/NAME.log. await NAME waits for its end.
declare -A beside=()
begin() {
  say "beginning in the background: $1 (build/$1.log)"
  set -m  # a process group of its own, for end_all
  ("${@:2}") </dev/null >"build/$1.log" 2>&1 &
  beside[$1]=$!
  set +m
  trap end_all EXIT
}

await() {
  say "waiting for: $1"
  local status=0
  wait "${beside[$1]}" || status=$?
  unset "beside[$1]"
  if [[ $status != 0 ]]; then
    tail -n 200 "build/$1.log" >&2
    return 1
  fi
  grep -E '^-- |SKIPPED|[0-9] passed' "build/$1.log" || true
}

# Returns when they have ended, so that the next run is alone in the build trees.
end_all() {
  local pid tries
  for pid in "${beside[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for pid in "${beside[@]}"; do
    wait "$pid" 2>/dev/null || true
    for ((tries = 0; tries < 100; ++tries)); do
      kill -0 -- "-$pid" 2>/dev/null || break
      sleep 0.1
    done
  done
}

# At the lowest priority, for a build beside tests, which often wait.
build_last() {
  renice -n 19 "$BASHPID" >/dev/null
  build "$@"
}

# run PRESET CTEST-ARGUMENTS...
run() {
  say "testing the preset \"$1\": ctest ${*:2}"
  # Without times of its own, CTest begins with the cases that are long elsewhere, so that none of them runs alone at the end.
  mkdir -p "build/$1/Testing/Temporary"
  [[ -e build/$1/Testing/Temporary/CTestCostData.txt ]] ||
    cp tests/long_cases.txt "build/$1/Testing/Temporary/CTestCostData.txt"
  local status=0
  ctest --test-dir "build/$1" --parallel $((2 * jobs)) --output-on-failure --progress --test-output-size-passed 100000 "${@:2}" || status=$?
  # A suite of which some tests skipped has passed: each of them is named here, with its reason.
  awk '/: Skipped$/ {getline reason} /^\[  SKIPPED \] .* \([0-9]+ ms\)$/ {print "skipped: " $4 ": " reason}
       sub(/^SKIPPED: /, "skipped: ")' \
    "build/$1/Testing/Temporary/LastTest.log" || status=1
  return "$status"
}

# Entries whose labels match REGEX, and none of them NOT: entries PRESET REGEX [NOT]
entries() {
  ctest --test-dir "build/$1" --show-only --label-regex "$2" ${3:+--label-exclude "$3"} | sed -n 's/^ *Test *#[0-9]*: //p' | sort
}

# Entries that each of the two builds leaves to the other, which does not run them.
lost_entries() {
  comm -23 <(entries release '^sanitized$') <(entries asan '^(cpu|io)$')
  comm -23 <(sort build/release/tests/left_out.txt) <(entries asan '^(cpu|io)$' | sed 's/[.].*//' | sort -u)
  comm -23 <(entries asan '^more$') <(entries release . '^(slow|sanitized)$')
}

# Cases of the list that neither build runs: a case that goes has its reason there.
missing_cases() {
  tools/list_cases.py build/release --label-exclude '^(slow|sanitized)$' >build/release/cases.txt
  tools/list_cases.py build/asan --label-regex '^(cpu|io)$' >build/asan/cases.txt
  tools/list_cases.py --check docs/results/ci_cases.txt build/release/cases.txt build/asan/cases.txt
}

# GCC's leak checker crashes on the thread-local storage of libraries that are opened at run time, such as oneDNN, unless it
# leaves their calls alone.
run_asan() {
  ASAN_OPTIONS=intercept_tls_get_addr=0${ASAN_OPTIONS:+:$ASAN_OPTIONS} run asan "$@"
}

# install_wheel ENVIRONMENT: the package for PyTorch, with the library of the release build.
install_wheel() {
  local pip=("$1/bin/python" -m pip --quiet --disable-pip-version-check)
  rm -rf build/wheel
  SLUICE_BUILD=$PWD/build/release "${pip[@]}" wheel --no-deps --no-build-isolation -w build/wheel ./python
  "${pip[@]}" install --no-deps --force-reinstall build/wheel/*.whl
}

# In an environment of its own.
test_torch() {
  say "testing the package for PyTorch"
  local environment=$PWD/build/torch status=0
  tools/torch_environment.py "$environment" || status=$?
  if [[ $status == 77 ]]; then
    skip "the tests of python/, since torch cannot be had here"
    return
  fi
  [[ $status == 0 ]] || return "$status"
  install_wheel "$environment"
  # The folder before the rest of the path: the tests use the wheel's command.
  (cd python/tests && PATH=$environment/bin:$PATH "$environment/bin/python" -B -m pytest -q -rs -p no:cacheprovider -m "not slow" --ignore frameworks .) || return
  local fake=$PWD/build/release/tests/capi/libsluice_fake_gpu.so
  if [[ ! -e $fake ]]; then
    skip "tensors on a stand-in for a GPU, since this build has no CUDA"
    return
  fi
  say "testing the package for PyTorch with tensors on a stand-in for a GPU"
  (cd python/tests && export SLUICE_LIBRARY=$fake SLUICE_TEST_FAKE_GPU=1 &&
    "$environment/bin/python" -B -m pytest -q -p no:cacheprovider test_cuda.py test_cuda_offload.py &&
    "$environment/bin/python" -B -m pytest -q -p no:cacheprovider -p fake_gpu -m "not slow" test_announced.py test_resume.py test_mixed_types.py \
      test_opaque.py)
}

# transformers, accelerate, lightning and peft with that wheel; one that is missing is a failure.
test_frameworks() {
  say "testing the package for PyTorch under transformers, accelerate, lightning, peft, bitsandbytes, TRL, diffusers and DeepSpeed"
  local environment=$PWD/build/torch status=0
  tools/torch_environment.py "$environment" --frameworks || status=$?
  if [[ $status == 77 ]]; then
    skip "the tests of python/tests/frameworks, for torch cannot be had here"
    return
  fi
  [[ $status == 0 ]] || return "$status"
  install_wheel "$environment"
  local command=$PWD/build/release/tools/sluice
  [[ -x $command ]] || {
    echo "tools/test.sh: no release build of the command, so its exports are not tried with the frameworks" >&2
    command=
  }
  tools/torch_environment.py build/torch-deepspeed --deepspeed || status=$?
  if [[ $status == 77 ]]; then
    skip "the tests of python/tests/frameworks, for DeepSpeed's torch cannot be had here"
    return
  fi
  [[ $status == 0 ]] || return "$status"
  (cd python/tests && SLUICE_COMMAND=$command SLUICE_DEEPSPEED_PYTHON=$OLDPWD/build/torch-deepspeed/bin/python HF_HUB_OFFLINE=1 \
    "$environment/bin/python" -B -m pytest -q -p no:cacheprovider -p no:warnings -rA frameworks)
  local fake=$PWD/build/release/tests/capi/libsluice_fake_gpu.so
  if [[ -e $fake ]]; then
    say "testing training, traps, Lightning and transformers with tensors on a stand-in for a GPU"
    (cd python/tests && SLUICE_LIBRARY=$fake SLUICE_TEST_FAKE_GPU=1 HF_HUB_OFFLINE=1 "$environment/bin/python" -B -m pytest -q \
      -p no:cacheprovider -p no:warnings -m "not slow" -p fake_gpu test_training.py test_traps.py frameworks/test_lightning.py frameworks/test_transformers.py)
  fi
  say "taking the cures of traps out of the package for PyTorch"
  SLUICE_LIBRARY=$PWD/build/release/capi/libsluice.so "$environment/bin/python" -B python/tests/cures.py
}

# The wheel with everything in it, under the oldest torch that the package serves and under the newest.
test_wheels() {
  say "testing the wheel that holds its libraries"
  rm -rf build/manylinux
  SLUICE_BUILD=$PWD/build/release tools/wheel.sh "$PWD/build/manylinux"
  local version status
  for version in 2.6.0 newest; do
    local environment=$PWD/build/torch-$version named=()
    [[ $version == newest ]] || named=(--torch "$version")
    status=0
    tools/torch_environment.py "$environment" "${named[@]}" || status=$?
    if [[ $status == 77 ]]; then
      skip "the wheel under torch $version, which cannot be had here"
      continue
    fi
    [[ $status == 0 ]] || return "$status"
    "$environment/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps --force-reinstall build/manylinux/*.whl
    (cd python/tests && PATH=$environment/bin:$PATH "$environment/bin/python" -B -m pytest -q -p no:cacheprovider -p no:warnings -rA \
      --ignore frameworks .)
  done
}

# Those whose configs begin with config_of_environment() of tests/support. All other runs have memory.unified auto.
engine_tests='activation|allocation|announce|bytes_at_rest|callers_environment|durable|engine|misuse|opaque_unit|restore|scheduler_fuzz'
engine_tests+='|sharding|state_hashes|status|step_norm|storage'

test_engine() {
  run release --label-regex '^(io|sanitized)$' --tests-regex "^($engine_tests)_test[.]"
}

# A build that is there is made anew as far as sources have changed since. The parts run all tests of this build.
build_release() { build release "${cuda[@]}" -DSLUICE_TEST_LEFT_OUT="${1:-OFF}"; }

part_sanitizers() {
  build asan -DSLUICE_TOOLS=ON
  run asan --tests-regex '^package[.]' --label-regex '^command$'
  cmake --build build/asan --parallel "$jobs" --target sluice_more_tests
  run_asan --label-regex '^more$'
}

part_threads() {
  build tsan -DSLUICE_CUDA=AUTO  # for the code over CUDA and NCCL, with stand-ins for both
  cmake --build build/tsan --parallel "$jobs" --target sluice_more_tests
  run tsan --label-regex '^(cpu|io|more)$' --tests-information "$1,,$threads_pieces"
  [[ $1 == 1 ]] || return 0
  run tsan --tests-regex '^package[.](sine|resume|line)[.]static[.]cmake$' --label-regex '^command$'
}

part_cases() {
  build_release
  SLUICE_TEST_CASES_SCALE=${SLUICE_TEST_CASES_SCALE:-50} run release --label-exclude '^(slow|sanitized)$'
}

part_long() {
  build_release
  SLUICE_TEST_CASES_SCALE=${SLUICE_TEST_CASES_SCALE:-50} run release --label-regex '^(slow|sanitized)$'
}

part_copies() {
  build_release
  SLUICE_TEST_UNIFIED=off test_engine
}

part_guard() {
  build_release
  SLUICE_TEST_GUARD=on test_engine
}

part_frameworks() {
  build_release
  test_frameworks
}

part_wheels() {
  build_release
  test_wheels
}

# Sees what builds of several sources at a time do not: an #include that is missing.
part_alone() {
  cmake --preset dev >build/dev.configure.log 2>&1 || {
    cat build/dev.configure.log >&2
    return 1
  }
  cmake --build build/dev --target sluice_git_commit
  tools/compile_alone.py build/dev --jobs "$jobs"
}

part_twice() { tools/reproducible.sh -DSLUICE_CUDA=OFF; }

# The page of results is left as it is: build/install.md has this run's.
part_roots() {
  local status=0 only=() way line log=build/roots-$1.log
  for way in ${roots[$1 - 1]}; do only+=(--only "$way"); done
  tools/install_trial.sh --output build/install.md "${only[@]}" 2>&1 | tee "$log" || status=$?
  [[ $status != 0 ]] || return 0
  while IFS= read -r line; do skip "roots-$1: $line"; done < <(sed -n 's/^SKIPPED: //p' "$log")
  [[ $status == 77 ]] || return "$status"
  grep -q '^SKIPPED: ' "$log" || skip "roots-$1: $log says why"
}

part_mutants() { tools/mutate.py --jobs "$jobs" --piece "$1/$pieces"; }

part_objects() {
  cmake -G Ninja -S . -B build/objects -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DNDEBUG" \
    -DSLUICE_CUDA=OFF -DSLUICE_NCCL=OFF >build/objects.configure.log 2>&1 || {
    cat build/objects.configure.log >&2
    return 1
  }
  cmake --build build/objects --parallel "$jobs" --target sluice sluice_mpi sluice_c
  tests/symbols_test.py build/objects
  tests/dead_functions_test.py build/objects
}

# All of them, whatever fails before. Not to be called in a condition, where `set -e` has no effect.
passed=()
run_parts() {
  local part begin status skipped failed=()
  trap 'exit 130' INT  # some programs end of Ctrl-C with a status of their own, and the next part would begin
  for part in "$@"; do
    say "part \"$part\""
    begin=$SECONDS
    skipped=$(wc -l <"$not_tried")
    set +e
    (
      set -e
      case $part in
        mutants-*) part_mutants "${part#mutants-}" ;;
        threads-*) part_threads "${part#threads-}" ;;
        roots-*) part_roots "${part#roots-}" ;;
        *) "part_$part" ;;
      esac
    )
    status=$?
    set -e
    if [[ $status == 0 && $(wc -l <"$not_tried") != "$skipped" ]]; then
      say "part \"$part\" was not tried, or not whole, after $((SECONDS - begin)) s"
    elif [[ $status == 0 ]]; then
      say "part \"$part\" passed in $((SECONDS - begin)) s"
      passed+=("$part")
    else
      say "part \"$part\" FAILED after $((SECONDS - begin)) s"
      failed+=("$part")
    fi
  done
  if [[ ${#failed[@]} -gt 0 ]]; then
    tell_skipped
    say "parts that failed: ${failed[*]}"
    return 1
  fi
}

tools/install_packages.sh run test
if [[ $slow == yes || ${#chosen[@]} -gt 0 ]]; then tools/install_packages.sh slow; fi
mkdir -p build
: >"$not_tried"

# CUDA code is compiled for the card that is here, else for the default architecture.
cuda=()
if capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) &&
  [[ $capability =~ ^([0-9]+)\.([0-9]+)$ ]]; then
  cuda=("-DSLUICE_CUDA_ARCHITECTURES=${BASH_REMATCH[1]}${BASH_REMATCH[2]}-real")
fi

if [[ ${#chosen[@]} -gt 0 ]]; then
  run_parts "${chosen[@]}"
  if [[ ${#passed[@]} -gt 0 ]]; then say "these parts passed: ${passed[*]}"; fi
  tell_skipped
  [[ ${#passed[@]} == "${#chosen[@]}" ]] || exit 77
  exit 0
fi

build_release ON
begin asan build_last asan -DSLUICE_TOOLS=OFF
begin torch test_torch  # one process, which would be alone at the end
# A failure does not hide another beside it: each is told before the end.
status=0
run release --label-exclude '^(slow|sanitized)$' || status=1
await asan || status=1
if [[ $status != 0 ]]; then
  await torch || true
  exit 1
fi
lost=$(lost_entries)
if [[ -n $lost ]]; then
  printf 'tools/test.sh: no build runs these, since each leaves them to the other:\n%s\n' "$lost" >&2
  exit 1
fi
# A build without CUDA has no programs with stand-ins for it.
if [[ -e build/release/tests/capi/libsluice_fake_gpu.so ]]; then missing_cases; fi
run_asan --label-regex '^(cpu|io)$' || status=1
await torch || status=1
[[ $status == 0 ]] || exit "$status"
status=0
if [[ $slow == yes ]]; then
  run_parts "${parts[@]}"
  [[ ${#passed[@]} == "${#parts[@]}" ]] || status=77
fi
if [[ -s $not_tried ]]; then
  say "all tests that could be tried passed"
  tell_skipped
else
  say "all tests passed"
fi
exit "$status"
