"""Runs the tests of a class of this folder for CTest, or one of them, or lists them.

  run_case.py --list                     every class as MODULE.CLASS,LABEL,NUMBER OF TESTS; where tests take long, every test
  run_case.py MODULE.CLASS[.TEST]        exit code 0, 1, or 77 when all tests skipped themselves
  run_case.py --list-tests               every test as MODULE.CLASS.TEST,LABEL

A class is one process, since many tests take less time than an interpreter takes to start. Tests of ranks take both
processors, and slow ones minutes: each of those is a process.
"""

import collections
import pathlib
import sys
import unittest

FOLDER = pathlib.Path(__file__).resolve().parent
SKIPPED = 77


def cases(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from cases(item)
        else:
            yield item


def list_all(each):
    listed = collections.Counter()
    for path in sorted(FOLDER.glob("*_cases.py")):
        for case in cases(unittest.defaultTestLoader.loadTestsFromName(path.stem)):
            alone = each or case.LABEL in ("mpi", "slow")
            name = case.id() if alone else case.id().rpartition(".")[0]
            listed[f"{name},{case.LABEL}"] += 1
    print("\n".join(line if each else f"{line},{count}" for line, count in listed.items()))


def main():
    sys.path.insert(0, str(FOLDER))
    if sys.argv[1:] in (["--list"], ["--list-tests"]):
        list_all(sys.argv[1] == "--list-tests")
        return 0
    suite = unittest.defaultTestLoader.loadTestsFromName(sys.argv[1])
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    if not result.wasSuccessful():
        return 1
    for case, reason in result.skipped:
        print(f"SKIPPED: {case.id()}: {reason}")
    return SKIPPED if result.skipped and len(result.skipped) == result.testsRun else 0


if __name__ == "__main__":
    sys.exit(main())
