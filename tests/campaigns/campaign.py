"""The common part of the campaigns: cases numbered by seed, one line of result per case, pieces that add up.

A campaign tries one kind of hostile event many times. Its script calls run() with a function that makes one case; case
number N of seed S is the same on every machine and in every piece. Each case ends in an Outcome: the phase of the run in
which the event fell, what became of it, and a note. Outcomes in GOOD keep the promise; all others are failures.

    kill.py --sluice build/release/tools/sluice --count 60                 # cases 0 to 59 of seed 1
    kill.py --sluice ... --from 60 --count 60 --results piece2.jsonl       # the next piece
    python3 tests/campaigns/campaign.py piece1.jsonl piece2.jsonl          # the table of both
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import random
import shutil
import sys
import tempfile
import traceback

PHASES = ("start", "forward", "backward", "update", "save", "end")
GOOD = ("named", "same result", "saved", "refused", "nothing left", "sound")
PHASE_SHARE_MIN = 0.05
CASES_FOR_SHARES = 60  # in fewer cases a phase may be missing by chance


@dataclasses.dataclass
class Outcome:
    """How a case ended. `result` is one of GOOD, or "silent", "hang", "crash", or words of its own."""

    phase: str
    result: str
    note: str = ""


@dataclasses.dataclass
class Case:
    """One case: its number, a random generator that follows from seed and number, and an empty folder."""

    number: int
    random: random.Random
    folder: str
    options: argparse.Namespace


def parser(description):
    """The options that all campaigns have. Scripts may add theirs before run()."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--sluice", required=True, help="the sluice command to be tried")
    made.add_argument("--seed", type=int, default=1, help="what the cases follow from (default: 1)")
    made.add_argument("--from", dest="first", type=int, default=0, help="number of the first case (default: 0)")
    made.add_argument("--count", type=int, required=True, help="how many cases")
    made.add_argument("--results", help="a file to which each case adds a line of JSON")
    made.add_argument("--keep", action="store_true", help="leave the folders of failed cases")
    return made


def run(options, make_case, name, phases=PHASES):
    """Runs the cases, prints a line for each and the table, and returns the exit code: 1 after a failure, 0 otherwise.

    `phases` are those of which each has to hold a twentieth of the cases; an empty tuple asks for no shares.
    """
    lines = []
    for number in range(options.first, options.first + options.count):
        folder = tempfile.mkdtemp(prefix=f"sluice-{name}-")
        case = Case(number, random.Random(f"{name} {options.seed} {number}"), folder, options)
        try:
            outcome = make_case(case)
        except Exception:  # a broken case is a failure of the campaign, and the next ones still run
            outcome = Outcome("?", "broken case", traceback.format_exc(limit=-3))
        good = outcome.result in GOOD
        line = {"campaign": name, "seed": options.seed, "case": number, "phase": outcome.phase,
                "result": outcome.result, "note": outcome.note}
        lines.append(line)
        print(f"{name} {options.seed}/{number}: {outcome.phase}: {outcome.result}"
              + (f": {outcome.note}" if outcome.note else ""), flush=True)
        if options.results:
            with open(options.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if good or not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"  its folder: {folder}", flush=True)
    return summarize(lines, phases)


@dataclasses.dataclass
class FaultRow:
    """A case of the campaigns in which one call of a command goes wrong: call number N, on a file of this name."""

    command: object
    number: int
    call: str
    name: str
    fault: str

    def __str__(self):
        return f"{self.command.name}: call {self.number}, {self.call} of {self.name}: {self.fault}"


def fault_parser(description, library):
    """The options of campaigns whose cases are the rows of a table."""
    made = parser(description)
    made.add_argument("--faults", required=True, help=f"{library} of the same build")
    made.add_argument("--command", help="only the calls of this command, such as \"load\"")
    made.add_argument("--spread", action="store_true", help="each piece is spread over all calls, instead of one after another")
    return made


def run_faults(options, table, make_case, name):
    """Runs `make_case(case, row)` for the rows of the table: all of them where the count is 0. Other pieces have other rows."""
    options.count = min(options.count, len(table) - options.first) if options.count else len(table) - options.first
    stride = round(len(table) * 0.618) or 1  # neighbours lie far apart, and no row comes twice
    while math.gcd(stride, len(table)) != 1:
        stride += 1

    def of_row(case):
        return make_case(case, table[case.number * stride % len(table) if options.spread else case.number])

    return run(options, of_row, name, phases=())


def summarize(lines, phases=PHASES):
    """Prints a table of phases and results, then what failed. Returns 1 if anything did."""
    table = collections.Counter((line["phase"], line["result"]) for line in lines)
    results = sorted({result for _, result in table}, key=lambda result: (result not in GOOD, result))
    rows = [*phases, *sorted({phase for phase, _ in table} - set(phases))]
    print("\n| phase | cases | " + " | ".join(results) + " |\n|" + "---|" * (len(results) + 2))
    for phase in rows:
        counts = [table[phase, result] for result in results]
        print(f"| {phase} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
    totals = [sum(table[phase, result] for phase in rows) for result in results]
    print(f"| all | {len(lines)} | " + " | ".join(map(str, totals)) + " |")
    failures = [line for line in lines if line["result"] not in GOOD]
    for line in failures:
        print(f"FAILED {line['campaign']} {line['seed']}/{line['case']}: {line['result']} {line['note']}")
    thin = [phase for phase in phases
            if sum(table[phase, result] for result in results) < PHASE_SHARE_MIN * len(lines)]
    if len(lines) >= CASES_FOR_SHARES and thin:
        print(f"FAILED: too few cases fell into {', '.join(thin)}; each phase wants {PHASE_SHARE_MIN:.0%}")
    return int(bool(failures) or (len(lines) >= CASES_FOR_SHARES and bool(thin)))


def main():
    """Adds up the result files given as arguments, a table for each campaign."""
    if len(sys.argv) < 2 or not all(map(os.path.exists, sys.argv[1:])):
        sys.exit(__doc__)
    campaigns = collections.defaultdict(list)
    for name in sys.argv[1:]:
        with open(name, encoding="utf-8") as file:
            for text in file:
                line = json.loads(text)
                campaigns[line["campaign"]].append(line)
    failed = 0
    for name, lines in campaigns.items():
        print(f"\n## {name}: {len(lines)} cases")
        failed |= summarize(lines, ())
    sys.exit(failed)


if __name__ == "__main__":
    main()
