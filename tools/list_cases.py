#!/usr/bin/env python3
"""Lists the test cases of a build one by one, however CTest groups them into processes.

  tools/list_cases.py BUILD [--label-regex REGEX] [--label-exclude REGEX]      prints the cases, sorted
  tools/list_cases.py --check FILE LIST...     exits with 1 unless each case of FILE is in a LIST that was printed so

A case is a test of GoogleTest (program.Suite.Test), a Python test of the command (cli.module.test) or any other entry of
CTest. FILE is docs/results/ci_cases.txt; a remark after a case says "missing: " with the reason why tools/test.sh without
--slow does not run the case any more.
"""

import argparse
import functools
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def suites_of(program):
    """{suite: names of its tests}"""
    found, suite = {}, ""
    for line in output(program, "--gtest_list_tests").splitlines():
        if match := re.match(r"([\w/]+)\.( +#.*)?$", line):
            suite = match[1]
        elif suite and (match := re.match(r"  (\S+)", line)):
            found.setdefault(suite, []).append(match[1])
    return found


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


def tests_of_suite(test, name, words):
    """None for an entry that is no suite of a GoogleTest program."""
    program = pathlib.Path(words[0]).name
    suite = name.removeprefix(f"{program}.").split(".")[0]
    if not name.startswith(f"{program}.") or f"--gtest_filter={suite}.*" not in words:
        return None
    step, first = piece_of(test)
    return [f"{program}.{suite}.{one}" for one in suites_of(words[0])[suite][first::step]]


def cases(build, label_regex, label_exclude):
    command = ["ctest", "--test-dir", build, "--show-only=json-v1", "--label-exclude", label_exclude]
    if label_regex:
        command += ["--label-regex", label_regex]
    for test in json.loads(output(*command))["tests"]:
        name, words = test["name"], test.get("command", [])
        if not words:  # a program that has not been built
            yield name
        elif (tests := tests_of_suite(test, name, words)) is not None:
            yield from tests
        elif len(words) > 3 and words[-2].endswith("run_case.py") and words[-1] in python_tests():
            yield from python_tests()[words[-1]]
        else:
            yield name


def lines_of(path):
    return pathlib.Path(path).read_text(encoding="utf-8").splitlines()


def check(path, lists):
    found = {name for one in lists for name in lines_of(one)}
    missing = []
    for line in lines_of(path):
        name, _, remark = line.partition("  # ")
        if name and not line.startswith("#") and not remark.startswith("missing: ") and name not in found:
            missing.append(name)
    for name in missing:
        print(f"missing: {name}")
    return 1 if missing else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="BUILD or LIST")
    parser.add_argument("--label-regex")
    parser.add_argument("--label-exclude", default="^slow$")
    parser.add_argument("--check", metavar="FILE")
    options = parser.parse_args()
    if options.check:
        return check(options.check, options.names)
    if len(options.names) > 1:
        parser.error("one BUILD at a time")
    print("\n".join(sorted(set(cases(options.names[0], options.label_regex, options.label_exclude)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
