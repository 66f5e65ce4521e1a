#!/usr/bin/env bash
# From a fresh checkout to a trained model: installs missing Debian packages, builds the sluice command, trains a small
# byte-level GPT on the King James Bible with its parameters and optimizer state on NVMe, plots the loss and lets the model
# write. Takes a few minutes on two cores. May be run again; everything it writes is in build/quickstart and data.
# Exits with 0 only if the model beats a bigram model on text it was not trained on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build=build/quickstart
run=$build/run
text=data/kjv.txt

say() { printf '\n==> [%3d s] %s\n' "$SECONDS" "$*"; }
fail() {
  echo "tools/quickstart.sh: $*" >&2
  exit 1
}

# number_of KEY: the value of a top-level number in the run's JSON file.
number_of() {
  local value
  value=$(sed -n "s/^  \"$1\": \([-+.e0-9]*\),\{0,1\}$/\1/p" "$run/loss.json")
  [[ -n $value ]] || fail "$run/loss.json has no number \"$1\""
  echo "$value"
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
  local cuda=OFF
  if gpu_is_visible; then cuda=AUTO; fi
  mkdir -p "$build"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSLUICE_TESTS=OFF -DSLUICE_CUDA="$cuda" \
    -DSLUICE_NCCL=OFF -DSLUICE_MPI=OFF >"$build/configure.log" || {
    cat "$build/configure.log" >&2
    fail "CMake failed; its messages are above"
  }
  cmake --build "$build" --parallel
}

plot() {
  gnuplot <<END
set terminal pngcairo size 900,540
set output "$run/loss.png"
set datafile separator ","
set title "Sluice: byte-level GPT, parameters and optimizer state on NVMe"
set xlabel "step"
set ylabel "loss (nats a byte)"
set grid
set yrange [0:*]
plot "$run/loss.csv" using "step":"loss" with lines linecolor "#4477aa" title "training loss", \
     $bigram with lines linewidth 2 linecolor "#cc3311" dashtype 2 title "bigram model, validation", \
     $validation with lines linewidth 2 linecolor "#228833" dashtype 2 title "trained model, validation"
END
}

tools/install_packages.sh run
say "building the sluice command"
build_command
write_text

say "training (configs/quickstart.json)"
mkdir -p "$run"
"$build/tools/sluice" train configs/quickstart.json --data "$text" --json "$run/loss.json" --csv "$run/loss.csv" \
  --save "$run/model.safetensors"
validation=$(number_of validation_loss)
bigram=$(number_of bigram_cross_entropy)
plot

say "a sample of the model's own writing"
"$build/tools/sluice" generate --model "$run/model.safetensors" --prompt "And the LORD said" --tokens 300 \
  --temperature 0.7 --seed 1 | tee "$run/sample.txt"

say "done"
printf 'validation loss   %.4f nats a byte\n' "$validation"
printf 'bigram model      %.4f nats a byte\n' "$bigram"
printf 'loss curve        %s, %s\n' "$PWD/$run/loss.csv" "$PWD/$run/loss.png"
printf 'model             %s\n' "$PWD/$run/model.safetensors"
printf 'sample            %s\n' "$PWD/$run/sample.txt"
awk -v a="$validation" -v b="$bigram" 'BEGIN {exit !(a < b)}' ||
  fail "the model did not beat the bigram model on the validation text"
