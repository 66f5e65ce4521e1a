#!/usr/bin/env python3
"""How long `sluice plan` takes, and how much memory, as models grow.

    tests/bench/plan_scale.py --sluice BINARY [--rounds 5]

Each plan is layout, placement, window and about thirty simulated schedules. A benchmark, no test: it asserts nothing.
"""

import argparse
import os
import statistics
import tempfile
import time

# Parameters, units, ranks.
CASES = (("1e9", 32, 1), ("70e9", 80, 8), ("1e12", 128, 1024), ("1e12", 1000, 1024), ("1e11", 1000, 1))


def run(command):
    """Seconds, and the largest resident set in MiB."""
    begin = time.monotonic()
    with open(os.devnull, "w", encoding="ascii") as nothing:
        child = os.posix_spawn(command[0], command, os.environ,
                               file_actions=[(os.POSIX_SPAWN_DUP2, nothing.fileno(), 1)])
        _, status, usage = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 5):
        raise SystemExit(f"{command} failed")
    return time.monotonic() - begin, usage.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        config.write('{"placement": {"parameters": "nvme", "optimizer": "nvme"}}')
        config.flush()
        print("parameters  units  ranks   median s  [min, max]      MiB")
        for parameters, units, ranks in CASES:
            runs = [run([options.sluice, "plan", config.name, "--parameters", parameters, "--layers", str(units),
                         "--ranks", str(ranks), "--set", "memory.device=4TiB", "--set", "memory.host=4TiB"])
                    for _ in range(options.rounds)]
            times = [seconds for seconds, _ in runs]
            print(f"{parameters:>10}  {units:>5}  {ranks:>5}  {statistics.median(times):9.3f}  "
                  f"[{min(times):.3f}, {max(times):.3f}]  {max(memory for _, memory in runs):6.0f}")


if __name__ == "__main__":
    main()
