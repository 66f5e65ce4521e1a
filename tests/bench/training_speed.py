#!/usr/bin/env python3
"""Training speed as ratios: one config against another, or against a peer, in interleaved pairs.

    tests/bench/training_speed.py --sluice build/release/tools/sluice configs/quickstart.json configs/in_memory.json
    tests/bench/training_speed.py --sluice ... configs/in_memory.json --peer "python3 tests/bench/peers/torch_gpt.py"

Both sides run in turn, A B A B ..., so that a machine whose speed drifts treats them alike. A run's figure is the median tokens/s
over its steps without the first five; the ratio is taken pair by pair. The peer is a command that takes --steps N and
prints a JSON object {"tokens": tokens a step, "time_s": [seconds of each step]}.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import tempfile

WARM_UP_STEPS = 5


def tokens_per_second(tokens, times):
    return tokens / statistics.median(times[WARM_UP_STEPS:])


def run_sluice(arguments, config):
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [arguments.sluice, "train", config, "--quiet", "--steps", str(arguments.steps), "--json", report.name]
        for assignment in arguments.set:
            command += ["--set", assignment]
        subprocess.run(command, check=True)
        with open(report.name, encoding="utf-8") as whole:  # the report has taken the place of the empty file
            steps = json.load(whole)["steps"]
    return tokens_per_second(steps[0]["tokens"], [step["time_s"] for step in steps])


def run_peer(arguments):
    command = shlex.split(arguments.peer) + ["--steps", str(arguments.steps)]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return tokens_per_second(result["tokens"], result["time_s"])


def spread(values, digits=0):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="two configs, or one with --peer")
    parser.add_argument("--sluice", required=True, help="the sluice command")
    parser.add_argument("--peer", help="command of the peer")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override for every sluice run")
    arguments = parser.parse_args()
    if len(arguments.configs) != (1 if arguments.peer else 2):
        parser.error("give two configs, or one config and --peer")
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than {WARM_UP_STEPS}")

    first = lambda: run_sluice(arguments, arguments.configs[0])
    second = (lambda: run_peer(arguments)) if arguments.peer else (lambda: run_sluice(arguments, arguments.configs[1]))
    names = [arguments.configs[0], arguments.peer or arguments.configs[1]]
    figures = ([], [])
    for pair in range(arguments.pairs):
        for side, run in enumerate((first, second)):
            figures[side].append(run())
        print(f"pair {pair + 1}: {figures[0][-1]:.0f} and {figures[1][-1]:.0f} tokens/s, "
              f"ratio {figures[0][-1] / figures[1][-1]:.3f}", flush=True)
    for name, values in zip(names, figures):
        print(f"{name}: {spread(values)} tokens/s")
    print(f"ratio: {spread([a / b for a, b in zip(*figures)], 3)} (median, range over {arguments.pairs} pairs)")


if __name__ == "__main__":
    main()
