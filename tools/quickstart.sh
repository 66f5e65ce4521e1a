#!/usr/bin/env bash
# From a fresh checkout to a trained model: installs missing Debian packages, builds the sluice command, trains a small
# byte-level GPT on the King James Bible with its parameters and optimizer state on NVMe, compares a hundred steps with the same
# steps in memory, plots the loss and lets the model write. Takes 3 to 15 minutes on two cores. May be run again; everything that
# it writes is in build/quickstart and data.
#   --prepare   installs and builds, and trains nothing yet: for images
#   --command PATH
#               trains with this `sluice` instead of building one, such as that of a Debian package or of the
#               Python wheel
# Where a GPU is visible, CUDA is used if its compiler is there. SLUICE_QUICKSTART_CUDA names the architectures ("90-real") to
# build for in any case.
# Exits with 0 only if state on the drive gives the bits of state in memory, and the model beats a bigram model on text it was
# not trained on.
set -euo pipefail
# The numbers of JSON and CSV have points, which printf, sort and awk read only so.
export LC_ALL=C.UTF-8
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

prepare=no
command=
while [[ $# -gt 0 ]]; do
  if [[ $1 == --prepare ]]; then
    prepare=yes
  elif [[ $1 == --command && $# -gt 1 ]]; then
    command=$2
    [[ $command != */* ]] || command=$(cd "$caller" && realpath -m -- "$command")
    shift
  else
    [[ $1 == --help || $1 == -h ]] || echo "tools/quickstart.sh: unknown option \"$1\", or one without its value" >&2
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' tools/quickstart.sh >&2
    exit 2
  fi
  shift
done
build=build/quickstart
run=$build/run
jobs=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
text=data/kjv.txt

say() { printf '\n==> [%3d s] %s\n' "$SECONDS" "$*"; }
fail() {
  echo "tools/quickstart.sh: $*" >&2
  exit 1
}

# value_of FILE KEY: a top-level number or text of a run's JSON file.
value_of() {
  local value
  value=$(sed -n "s/^  \"$2\": \"\{0,1\}\([-+.0-9a-z]*\)\"\{0,1\},\{0,1\}$/\1/p" "$1")
  [[ -n $value ]] || fail "$1 has no value \"$2\""
  echo "$value"
}

# median_time FILE: of the steps in a CSV file, in seconds.
median_time() { awk -F, 'NR > 1 {print $4}' "$1" | sort -g | awk '{t[NR] = $1} END {printf "%.3f", t[int((NR + 1) / 2)]}'; }

# mib BYTES
mib() { awk -v bytes="$1" 'BEGIN {printf "%.0f MiB", bytes / 1048576}'; }

# A terminal shows one line that is overwritten. A log gets every fiftieth step.
train() {
  if [[ -t 1 ]]; then
    "$command" train "$@"
  else
    "$command" train "$@" | awk '$1 != "step" || $2 % 50 == 0 {print; fflush()}'
  fi
}

gpu_is_visible() { [[ -e /dev/nvidia0 ]] || nvidia-smi --list-gpus >/dev/null 2>&1; }

write_text() {
  local bytes
  if [[ ! -s $text ]]; then
    mkdir -p "$(dirname "$text")"
    bible -f 'Gen1:1-Rev22:21' >"$text.part"
    mv "$text.part" "$text"
  fi
  bytes=$(stat --format=%s "$text")
  ((bytes > 4000000)) || fail "$text has only $bytes bytes, not 4.4 MB: remove it and run again"
}

build_command() {
  local cuda=OFF architectures=() line count=0
  if [[ -n ${SLUICE_QUICKSTART_CUDA:-} ]]; then
    cuda=ON
    architectures=("-DSLUICE_CUDA_ARCHITECTURES=$SLUICE_QUICKSTART_CUDA")
  elif gpu_is_visible; then
    cuda=AUTO
  fi
  mkdir -p "$build"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSLUICE_PRECOMPILED=ON -DSLUICE_UNITY=ON -DSLUICE_TESTS=OFF -DSLUICE_C=OFF \
    -DSLUICE_CUDA="$cuda" "${architectures[@]}" -DSLUICE_NCCL=OFF -DSLUICE_MPI=OFF >"$build/configure.log" || {
    cat "$build/configure.log" >&2
    fail "CMake failed; its messages are above"
  }
  export NINJA_STATUS='[%f of %t files] '
  if [[ -t 1 ]]; then
    cmake --build "$build" --parallel "$jobs" --target sluice
  else # a log gets every tenth line of progress, and every other line; awk would hold lines back
    cmake --build "$build" --parallel "$jobs" --target sluice | while IFS= read -r line; do
      if [[ ! $line =~ ^\[[0-9]+\ of ]] || ((count++ % 10 == 0)); then echo "$line"; fi
    done
  fi
}

plot() {
  gnuplot <<END
set terminal pngcairo size 900,540
set output "$run/loss.png"
set datafile separator ","
set title "Sluice: byte-level GPT, parameters and optimizer state on NVMe"
set xlabel "step"
set ylabel "loss (nats per byte)"
set grid
set yrange [0:*]
plot "$run/loss.csv" using "step":"loss" with lines linecolor "#4477aa" title "training loss", \
     $bigram with lines linewidth 2 linecolor "#cc3311" dashtype 2 title "bigram model, validation", \
     $validation with lines linewidth 2 linecolor "#228833" dashtype 2 title "trained model, validation"
END
}

say "1 of 4: packages"
if [[ -n $command ]]; then
  found=$(command -v -- "$command") || fail "there is no program $command"
  command=$found
  tools/install_packages.sh text
  say "2 of 4: not building: $("$command" version | head -n 1) is here"
  mkdir -p "$build"
else
  tools/install_packages.sh run text
  say "2 of 4: building the sluice command, $jobs files at a time (--command PATH uses one that is installed)"
  build_command
  command=$build/tools/sluice
fi
write_text
if [[ $prepare == yes ]]; then
  say "prepared: tools/quickstart.sh trains"
  exit
fi
mkdir -p "$run"

say "3 of 4: training; the parameters and Adam's moments, the state, stay on the drive (configs/quickstart.json)"
train configs/quickstart.json --data "$text" --json "$run/loss.json" --csv "$run/loss.csv" --save "$run/model.safetensors"

say "4 of 4: a hundred steps of the same training, from the drive and in memory (configs/in_memory.json)"
for where in quickstart in_memory; do
  "$command" train "configs/$where.json" --data "$text" --steps 100 --json "$run/$where.json" \
    --csv "$run/$where.csv" --quiet
done

validation=$(value_of "$run/loss.json" validation_loss)
bigram=$(value_of "$run/loss.json" bigram_cross_entropy)
on_drive_hash=$(value_of "$run/quickstart.json" state_sha256)
in_memory_hash=$(value_of "$run/in_memory.json" state_sha256)
pools=$(($(value_of "$run/loss.json" device_pool_bytes) + $(value_of "$run/loss.json" host_pool_bytes)))
activations=$(value_of "$run/loss.json" activation_bytes)
peak=$(value_of "$run/loss.json" peak_rss_bytes)
plot

say "a sample of the model's own writing"
"$command" generate --model "$run/model.safetensors" --prompt "And the LORD said" --tokens 300 \
  --temperature 0.7 --seed 1 | tee "$run/sample.txt"

say "done"
same=same
[[ $on_drive_hash == "$in_memory_hash" ]] || same=DIFFERENT
cat <<END
loss on text that the model has not seen: $(printf '%.2f' "$validation") nats per byte; a table of letter pairs (bigram model) reaches $(printf '%.2f' "$bigram")
plot, losses, model and sample: $PWD/$run

exact   100 steps in memory end with the $same bits (SHA-256 ${on_drive_hash:0:16}, ${in_memory_hash:0:16}); a step took $(median_time "$run/quickstart.csv") s from the drive, $(median_time "$run/in_memory.csv") s in memory
memory  $(mib "$peak") at most = $(mib "$pools") of Sluice's buffers, for $(mib "$(value_of "$run/loss.json" state_bytes)") of state + $(mib "$activations") of values between layers (activations) + $(mib $((peak - pools - activations))) of program, libraries and text
next    your own text: $command train configs/quickstart.json --data my.txt --save model.safetensors
END
[[ $on_drive_hash == "$in_memory_hash" ]] || fail "the two runs ended with different states: please report this"
awk -v a="$validation" -v b="$bigram" 'BEGIN {exit !(a < b)}' ||
  fail "the model did not beat the bigram model on the validation text"
