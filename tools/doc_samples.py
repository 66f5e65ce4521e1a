#!/usr/bin/env python3
"""Makes the samples of the command's output in docs/cli.md, or compares them.

    tools/doc_samples.py BINARY           runs the command and writes the samples that differ
    tools/doc_samples.py BINARY --check   exits with 1 when a sample differs

A sample is the indented block after a line `<!-- tools/doc_samples.py: NAME -->`. SAMPLES has the command and the lines of
its output. Whatever depends on the machine or on time is left out of the comparison.
"""

import argparse
import pathlib
import random
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/cli.md"
TEXT_BYTES = 4404412  # as the King James Bible of tools/quickstart.sh
LIBRARY = ["--set", "run.matmul=openblas", "--set", "run.threads=1"]

TRAIN = ["train", "quickstart.json", "--data", "text.txt", "--steps", "3", *LIBRARY]
ORDERS = ["plan", "quickstart.json", "--set", "batch.sequences=2", "--set", "batch.micro_batches=4", "--set", "activations=host",
          "--set", "model.tied_head=false", "--set", "memory.host=16MiB", "--set", "run.device=host", *LIBRARY]
STAGES = ["plan", "quickstart.json", "--ranks", "4", "--stages", "--set", "model.embedding=258", "--set", "batch.micro_batches=2",
          "--set", "batch.order=horizontal", "--set", "placement.parameters=auto", "--set", "memory.device=16MiB",
          "--set", "optimizer.overlap=serial", "--set", "run.device=host", *LIBRARY]
DOCTOR = ["doctor", "--path", "/dev/shm"]

# name -> (command, first line, last line, lines to leave out, whether its numbers vary from run to run)
SAMPLES = {
    "start": (TRAIN, r"GPT with", r"on average, a step reads", r"OpenBLAS \S+ uses old kernels", False),
    "step": (TRAIN, r"step +1/", r"step +1/", None, True),
    "end": (TRAIN, r"steps: compute", r"peak resident", r"a share above", True),
    "orders": (ORDERS, r"micro-batches", r"micro-batches", None, False),
    "stages": (STAGES, r"one of 4 ranks", r"collectives take no time|stage \d does not have", r"[01]  |collectives|stage \d does not", False),
    "doctor": (DOCTOR, r"warn  storage /dev/shm", r" +->", None, False),
}

# Parts of a line that depend on the machine.
MACHINE = [(r"on the host \(.*\);", "on the host;"), (r"matrix products by .*;", "matrix products;"), (r"of \S+ [KMGT]?i?B that .* leaves.*", "leaves"),
           (r"\d+ threads?", "threads"), (r"tmpfs, .*", "tmpfs"), (r"^ +-> .*", "->")]
TIMED = [(r"[0-9a-f]{64}", "SHA-256"), (r"\((T_\w+), [^)]*\)", r"(\1)"), (r"-?\d+(\.\d+)?( ([KMGT]i)?B\b)?", "N")]


def lines_of(output, name):
    """The lines of a command's output that belong to sample `name`."""
    _, first, last, without, _ = SAMPLES[name]
    lines = output.split("\n")
    begin = next(i for i, line in enumerate(lines) if re.match(first, line))
    end = next(i for i in range(begin, len(lines)) if re.match(last, lines[i]))
    kept = [line.rstrip() for line in lines[begin:end + 1] if not (without and re.match(without, line))]
    while not kept[-1]:
        kept.pop()
    return kept


def comparable(lines, name):
    """The lines with everything that varies made alike."""
    for pattern, word in MACHINE + (TIMED if SAMPLES[name][4] else []):
        lines = [re.sub(pattern, word, line) for line in lines]
    return [" ".join(line.split()) for line in lines]


def write_text(path):
    """A text of made-up words, the same every time."""
    generator = random.Random(1)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 8))) for _ in range(800)]
    path.write_text(" ".join(generator.choices(words, k=TEXT_BYTES // 3))[:TEXT_BYTES], encoding="ascii")


def outputs(binary):
    """name -> the lines that the command prints now."""
    found, printed = {}, {}
    with tempfile.TemporaryDirectory(prefix="sluice-samples-") as folder:
        write_text(pathlib.Path(folder, "text.txt"))
        pathlib.Path(folder, "quickstart.json").write_text((ROOT / "configs/quickstart.json").read_text(encoding="utf-8"), encoding="utf-8")
        for name, (command, *_) in SAMPLES.items():
            key = tuple(command)
            if key not in printed:
                done = subprocess.run([binary, *command], cwd=folder, capture_output=True, text=True, check=False)
                if done.returncode not in (0, 5):  # doctor and plan may find something wrong
                    sys.exit(f"{' '.join(command)} ends with {done.returncode}:\n{done.stdout}{done.stderr}")
                printed[key] = done.stdout
            found[name] = lines_of(printed[key], name)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()

    page, failures = PAGE.read_text(encoding="utf-8"), 0
    for name, lines in outputs(options.binary.resolve()).items():
        block = re.search(rf"(<!-- tools/doc_samples\.py: {name} -->\n\n)((?:    [^\n]*\n|\n(?=    ))+)", page)
        if not block:
            sys.exit(f"{PAGE}: sample {name} is missing")
        shown = [line[4:] for line in block[2].rstrip("\n").split("\n")]
        if comparable(shown, name) == comparable(lines, name):
            continue
        failures += 1
        print(f"{PAGE}: sample {name} is not what the command prints; run tools/doc_samples.py")
        if options.check:
            print("\n".join(lines))
        new = "\n".join(f"    {line}".rstrip() for line in lines) + "\n"
        page = page[:block.start(2)] + new + page[block.end(2):]
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
    return failures if options.check else 0


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
