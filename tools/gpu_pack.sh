#!/usr/bin/env bash
# Builds what checks Sluice on a GPU here, and packs it for a machine that has neither compilers nor this repository:
#   tools/gpu_pack.sh [--torchao WHEEL|none] [--wheel WHEEL] ... [--architectures LIST] [--jobs N] ARCHIVE.tar.gz
#                                                                     builds in build/gpu_pack; at most 60 MiB
#   tools/gpu_pack.sh [--torchao WHEEL|none] [--wheel WHEEL] ... --built BUILD ARCHIVE.tar.gz|FOLDER
#                                                                     of a build tree that is there
#   there: tar -xzf ARCHIVE.tar.gz && sluice_gpu/run.sh OUT
# LIST: the CUDA architectures of the code; default: sm_80, 89, 90, 100 and 120, and PTX. The archive holds the command, the
# programs of the GPU's tests, the libraries that they need, the package for PyTorch with its tests, and tools/gpu/run.sh.
# An archive also holds torchao's wheel, whose optimizer in host memory is a yardstick: WHEEL, or the one that
# tools/gpu/torchao.txt names, which pip brings. Each --wheel comes along, too: DeepSpeed and what it needs, for a comparison.
# The C library there must be no older than this machine's. With a FOLDER
# nothing is stripped, no library copied and nothing brought.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The path that the caller means, from wherever the script runs.
given() { (cd "$caller" && realpath -m -- "$1"); }
usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' tools/gpu_pack.sh; }
limit_mib=60
architectures='80-real;89-real;90-real;100-real;120-real;120-virtual'
programs=(sluice cuda_device_test cuda_math_test cuda_gpt_test optimizer_math_cuda_test cuda_trainer_test nccl_collectives_test)
jobs=$(nproc)
build=
target=
torchao=
wheels=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --architectures) architectures=${2:-} && shift ;;
    --torchao)
      torchao=${2:-} && shift
      [[ -z $torchao || $torchao == none ]] || torchao=$(given "$torchao")
      ;;
    --wheel) wheels+=("$(given "${2:-}")") && shift ;;
    --jobs) jobs=${2:-} && shift ;;
    --built) build=$(given "${2:-}") && shift ;;
    --help | -h) usage && exit 0 ;;
    -*) usage >&2 && exit 2 ;;
    *) target=$1 ;;
  esac
  shift
done
[[ -n $target ]] || { usage >&2 && exit 2; }
target=$(given "$target")

if [[ -z $build ]]; then
  build=$PWD/build/gpu_pack
  # shellcheck disable=SC2016  # $ORIGIN is the loader's
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSLUICE_CUDA=ON "-DSLUICE_CUDA_ARCHITECTURES=$architectures" \
    '-DCMAKE_BUILD_RPATH=$ORIGIN/../lib' -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags \
    -DCMAKE_SHARED_LINKER_FLAGS=-Wl,--disable-new-dtags
  cmake --build "$build" --parallel "$jobs" --target "${programs[@]}" sluice_c
fi

is_archive=no
folder=$target
if [[ $target == *.tar.gz ]]; then
  is_archive=yes
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' EXIT
  folder=$stage/sluice_gpu
fi
mark=.made-by-gpu_pack
if [[ -e $folder && ! -e $folder/$mark ]] && [[ ! -d $folder || -n $(ls -A "$folder") ]]; then
  echo "tools/gpu_pack.sh: $folder is there and was not made by this script; name another folder, or an archive (.tar.gz)" >&2
  exit 2
fi
rm -rf "$folder"
mkdir -p "$folder"
touch "$folder/$mark"
mkdir -p "$folder"/{bin,lib/runtime,wheel}

for program in "${programs[@]}"; do
  file=$(find "$build/tools" "$build/tests" -type f -name "$program" -perm -u+x 2>/dev/null | head -n 1 || true)
  if [[ -z $file ]]; then
    # One needs MPI and NCCL's header. On the machine itself, one that does not compile costs its own tests alone.
    [[ $program == nccl_collectives_test || $is_archive == no ]] && continue
    echo "tools/gpu_pack.sh: $build has no $program; build it first" >&2
    exit 1
  fi
  if [[ $is_archive == yes ]]; then
    cp "$file" "$folder/bin/"
    strip "$folder/bin/$program"
  else
    ln -s "$file" "$folder/bin/$program"
  fi
done
library=$build/capi/libsluice.so
[[ $is_archive == no && ! -e $library ]] ||
  SLUICE_LIBRARY=$library python3 -B -c 'import sys; sys.path.insert(0, "python"); import wheel_backend; wheel_backend.build_wheel(sys.argv[1])' "$folder/wheel"

if [[ -n $torchao && $torchao != none ]]; then
  cp "$torchao" "$folder/wheel/"
elif [[ -z $torchao && $is_archive == yes ]]; then
  python3 -m pip download -q --no-deps --only-binary=:all: --require-hashes --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --implementation cp --abi abi3 -r tools/gpu/torchao.txt -d "$folder/wheel" || {
    echo "tools/gpu_pack.sh: torchao's wheel cannot be had; give it with --torchao WHEEL, or go without by --torchao none" >&2
    exit 1
  }
fi

for wheel in "${wheels[@]}"; do cp "$wheel" "$folder/wheel/"; done

# Opened at run time for ranks that mpirun starts.
if [[ -e $build/lib/sluice/libsluice_mpi.so ]]; then
  mkdir "$folder/lib/sluice"
  cp "$build/lib/sluice/libsluice_mpi.so" "$folder/lib/sluice/"
fi
if [[ $is_archive == yes ]]; then
  ldd "$folder"/bin/* "$library" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u | while read -r needed; do
    case $(basename "$needed") in
      libc.so* | libm.so* | ld-linux* | libdl.so* | libpthread.so* | librt.so* | libresolv.so*) ;;
      # Used where the machine has none: an older one would break PyTorch, which wants a newer.
      libstdc++.so* | libgcc_s.so*) cp --dereference "$needed" "$folder/lib/runtime/" ;;
      *) cp --dereference "$needed" "$folder/lib/" ;;
    esac
  done
  find "$folder/lib" -name '*.so*' -exec strip --strip-unneeded {} +
fi
cp tools/gpu/run.sh tools/gpu/torch_step.py tools/gpu/page_locking.py tools/gpu/small.json tests/tools/cli/exactness.py tests/tools/cli/cli_support.py "$folder/"
cp -r python/tests "$folder/python_tests"
rm -rf "$folder/python_tests/__pycache__"
cat docs/*.md >"$folder/text.txt"
git rev-parse HEAD >"$folder/commit" 2>/dev/null || rm -f "$folder/commit"

[[ $is_archive == yes ]] || exit 0
tar -C "$stage" -cf - sluice_gpu | gzip -9 >"$target.new"
bytes=$(stat -c %s "$target.new")
printf '%s: %s MiB, unpacked %s MiB\n' "$target" "$((bytes >> 20))" "$(du -sm "$folder" | cut -f1)"
if ((bytes > limit_mib << 20)); then
  echo "tools/gpu_pack.sh: more than $limit_mib MiB; the largest files:" >&2
  find "$folder" -type f -printf '%s %p\n' | sort -rn | head -n 10 >&2
  rm -f "$target.new"
  exit 1
fi
mv "$target.new" "$target"
