#!/usr/bin/env python3
"""Measures the cost of commits and checkpoints, as the tables of docs/results/durability.md, in pieces of minutes on an idle machine.

    durable_costs.py --sluice build/release/tools/sluice --path /var/tmp

Steps with commits take turns with steps of an engine without, in one process (`sluice bench step --with-bare`). A ratio is the median over pairs of steps, with
its 10th and 90th percentile; a checkpoint falls into a few of many steps, so there the sums count. The drive is throttled; a flush waits for the write cache and
5 ms. `T_bound` is what the planner's simulation says of both. `waited` is the time that a step's updates and fetches waited for a commit, from a trace.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time

RATE = "1GB"
# Rows: regime, policy, millions of parameters, options. The state lies on storage, but for the rows with --memory-share, where half of it does, and those of
# adam-bound, where all of it is in memory. The page of the design models a drive with a write cache; without one, a flush has to wait for more.
CACHED = ("--write-cache", "256MiB")
COMMITS = [("balanced", "deferred", 20, CACHED), ("balanced", "speculative", 20, CACHED), ("compute-bound", "deferred", 8, CACHED),
           ("compute-bound", "eager", 8, CACHED), ("drive-bound", "deferred", 40, CACHED), ("drive-bound", "deferred", 20, CACHED),
           ("drive-bound", "deferred", 20, ()), ("balanced", "deferred", 20, ()), ("drive-bound", "deferred", 100, CACHED), ("adam-bound", "deferred", 20, CACHED),
           ("balanced", "deferred", 12, ("--memory-share", "0.5", "--commit-every", "5"))]
STEPS = 20


def load():
    return f"{os.getloadavg()[0]:.1f}"


def bench(options, *words, trace=None):
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        report = os.path.join(folder, "step.json")
        command = [options.sluice, "bench", "step", "--path", options.path, "--json", report, *map(str, words)]
        if trace:
            command += ["--trace", trace]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(report, encoding="utf-8") as file:
            return json.load(file)["regimes"][0]


def regime_words(regime, policy, millions, steps, *more):
    words = ["--regime", regime, "--policy", policy, "--parameters", millions * 10**6, "--steps", steps, "--rate", RATE]
    if "--commit-every" not in more and "--save-every" not in more:
        words += ["--commit-every", 1]
    return [*words, *more]


def step_of(result, bare):
    return next(policy for policy in result["policies"] if policy["bare"] == bare)


def waits_for_commits(options, *words):
    """(seconds of a step that wait for commits, flushes beside computation as a share of the flushes' time)"""
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        trace = os.path.join(folder, "commits.trace")
        bench(options, *words, trace=trace)
        report = os.path.join(folder, "summary.json")
        subprocess.run([options.sluice, "trace", "summary", trace, "--json", report], check=True, stdout=subprocess.DEVNULL)
        spans = os.path.join(folder, "spans.json")
        subprocess.run([options.sluice, "trace", "export", trace, "--chrome", spans], check=True, stdout=subprocess.DEVNULL)
        with open(report, encoding="utf-8") as file:
            summary = json.load(file)
        with open(spans, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    return wait_in(summary), hidden_share(events)


def wait_in(summary):
    return sum(wait["total_s"] for rank in summary["ranks"] for wait in rank["waits"] if wait["cause"] == "commit")


def union(spans):
    joined = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined


def hidden_share(events):
    """The share of the flushes' time beside which the device computes."""
    def spans_of(words):
        spans, open_since = [], {}
        for event in events:
            if not any(word in event.get("name", "").lower() for word in words):
                continue
            key = (event.get("cat"), event.get("id"), event["name"])
            if event["ph"] == "X":
                spans.append((event["ts"], event["ts"] + event.get("dur", 0)))
            elif event["ph"] == "b":
                open_since[key] = event["ts"]
            elif event["ph"] == "e" and key in open_since:
                spans.append((open_since.pop(key), event["ts"]))
        return union(spans)

    flushes, computed = spans_of(("flush",)), spans_of((" forward", " backward"))
    whole = sum(end - begin for begin, end in flushes)
    hidden = sum(max(0, min(end, other_end) - max(begin, other)) for begin, end in flushes for other, other_end in computed)
    return hidden / whole if whole else float("nan")


def commit_rows(options):
    rows = [COMMITS[int(row)] for row in options.rows.split(",")] if options.rows else COMMITS
    print("\n| regime, policy | parameters | pairs | step / bare [p10, p90] | T_bound / bare | step / T_bound | bytes / bare | load |")
    print("|---|---|---|---|---|---|---|---|")
    for regime, policy, millions, more in rows:
        result = bench(options, *regime_words(regime, policy, millions, STEPS, *more, "--with-bare"))
        cost, = result["costs"]
        with_commits, bare = step_of(result, False), step_of(result, True)
        words = ", ".join((regime, policy, " ".join(more).replace("--", "") or "no cache"))
        written = with_commits["nvme_write_bytes"] / bare["nvme_write_bytes"] if bare["nvme_write_bytes"] else float("nan")
        print(f"| {words} | {millions} M | {cost['pairs']} | {cost['times_bare']:.3f} [{cost['times_bare_p10']:.3f}, {cost['times_bare_p90']:.3f}] | "
              f"{cost['t_bound_times_bare']:.3f} | {100 / with_commits['percent_of_t_bound']:.3f} | {written:.3f} | {load()} |", flush=True)


def trace_rows(options):
    print("\n| traced | waited for commits, s per trace | flush time beside computation |\n|---|---|---|")
    for regime, policy, millions in (("balanced", "deferred", 12), ("compute-bound", "deferred", 6)):
        waited, hidden = waits_for_commits(options, *regime_words(regime, policy, millions, 6, *CACHED))
        print(f"| {regime}, {policy}, {millions} M, 6 steps | {waited:.3f} | {100 * hidden:.0f} % |", flush=True)


def other_rows(options):
    for millions, more in ((8, ()), (8, CACHED)):
        slow = bench(options, *regime_words("balanced", "deferred", millions, 4, "--flush-ms", 500, *more))
        policy = slow["policies"][0]
        print(f"\nflush of 500 ms, {millions} M, {' '.join(more) or 'no cache'}: step {policy['step_s']['median']:.3f} s, T_bound {policy['t_bound_s']:.3f} s")
    words = ["--regime", "compute-bound", "--policy", "deferred", "--parameters", 8 * 10**6, "--steps", 3 * STEPS, "--save-every", 10, "--rate", RATE, "--with-bare"]
    saved = bench(options, *words)
    cost, = saved["costs"]
    policy = step_of(saved, False)
    count = policy["saves"]
    print(f"checkpoint beside every 10th step, compute-bound: {3 * STEPS} steps take {cost['times_bare_mean']:.3f} of those without; {count} checkpoints, each "
          f"{policy['save_seconds'] / count:.2f} s, blocked {policy['blocked_seconds'] / count:.3f} s, updates waited {policy['update_wait_seconds'] / count:.3f} s; "
          f"load {load()}", flush=True)
    bare_drive = bench(options, "--regime", "drive-bound", "--policy", "deferred", "--parameters", 20 * 10**6, "--steps", STEPS, "--rate", "100GB",
                       "--flush-ms", 0, "--commit-every", 1, "--with-bare")
    cost, = bare_drive["costs"]
    print(f"bare drive, without a throttle, whose flush is nearly free: {cost['times_bare']:.3f} [{cost['times_bare_p10']:.3f}, {cost['times_bare_p90']:.3f}] over "
          f"{cost['pairs']} pairs; load {load()}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", required=True, type=os.path.abspath)
    parser.add_argument("--path", default="/var/tmp")
    parser.add_argument("--rows", help="only these rows of the table of commits, from 0 on, such as 1,5,8, and nothing else")
    options = parser.parse_args()
    begin = time.monotonic()
    print(f"load {load()} at the beginning")
    commit_rows(options)
    if not options.rows:
        trace_rows(options)
        other_rows(options)
    print(f"{time.monotonic() - begin:.0f} s; load {load()} at the end")


if __name__ == "__main__":
    main()
