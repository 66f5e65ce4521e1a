#!/usr/bin/env python3
"""Lists the test cases of a build one by one, however CTest groups them into processes.

  tools/list_cases.py BUILD [--label-regex REGEX]          prints the cases, sorted
  tools/list_cases.py BUILD ... --check FILE               exits with 1 unless they are those of FILE

A case is a test of GoogleTest (program.Suite.Test), a Python test of the command (cli.module.test) or any other entry of
CTest. Slow ones are left out, as in tools/test.sh. FILE is docs/results/ci_cases.txt; a remark behind a case says
"release only", or "missing: " with the reason why the case has gone. --label-regex '^(cpu|io|more)$' lists what runs under
sanitizers; of the label "more", with tools/test.sh --slow only.
"""

import argparse
import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def tests_of_program(program, name, filtered):
    suite = ""
    for line in output(program, "--gtest_list_tests", filtered).splitlines():
        if match := re.match(r"([\w/]+)\.( +#.*)?$", line):
            suite = match[1]
        elif suite and (match := re.match(r"  (\S+)", line)):
            yield f"{name}.{suite}.{match[1]}"


def piece_of(test):
    """Which tests of a suite an entry runs: every how many, and the first."""
    given = {property["name"]: property["value"] for property in test.get("properties", [])}
    piece = dict(change.split("=set:") for change in given.get("ENVIRONMENT_MODIFICATION", []))
    return int(piece.get("GTEST_TOTAL_SHARDS", 1)), int(piece.get("GTEST_SHARD_INDEX", 0))


@functools.cache
def python_tests():
    """{MODULE.CLASS: names of its tests}"""
    found = {}
    for line in output(sys.executable, "-B", str(ROOT / "tests/tools/cli/run_case.py"), "--list-tests").splitlines():
        module, group, test = line.partition(",")[0].split(".")
        found.setdefault(f"{module}.{group}", []).append(
            f"cli.{module.removesuffix('_cases')}.{test.removeprefix('test_')}")
    return found


def cases(build, label_regex):
    command = ["ctest", "--test-dir", build, "--show-only=json-v1", "--label-exclude", "slow"]
    if label_regex:
        command += ["--label-regex", label_regex]
    for test in json.loads(output(*command))["tests"]:
        name, words = test["name"], test.get("command", [])
        if not words:  # a program that has not been built
            yield name
            continue
        filtered = [word for word in words if word.startswith("--gtest_filter=")]
        program = pathlib.Path(words[0]).name
        if filtered and "*" in filtered[0] and name.startswith(f"{program}.") and f"={name.removeprefix(program + '.').split('.')[0]}." in filtered[0]:
            step, first = piece_of(test)
            yield from itertools.islice(tests_of_program(words[0], program, filtered[0]), first, None, step)
        elif len(words) > 3 and words[-2].endswith("run_case.py") and words[-1] in python_tests():
            yield from python_tests()[words[-1]]
        else:
            yield name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--label-regex")
    parser.add_argument("--check", metavar="FILE")
    options = parser.parse_args()
    found = sorted(set(cases(options.build, options.label_regex)))
    if not options.check:
        print("\n".join(found))
        return 0
    left_out = ("missing: ", "release only") if options.label_regex else ("missing: ",)
    expected = set()
    for line in pathlib.Path(options.check).read_text(encoding="utf-8").splitlines():
        name, _, remark = line.partition("  # ")
        if name and not line.startswith("#") and not remark.startswith(left_out):
            expected.add(name)
    for name in sorted(expected - set(found)):
        print(f"missing: {name}")
    for name in sorted(set(found) - expected):
        print(f"new: {name}")
    return 1 if expected - set(found) else 0


if __name__ == "__main__":
    sys.exit(main())
