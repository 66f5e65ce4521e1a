"""Runs one test of this folder for CTest, or lists them.

  run_case.py --list               every test as MODULE.CLASS.TEST,LABEL
  run_case.py MODULE.CLASS.TEST    exit code 0, 1, or 77 when the test skipped itself
"""

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


def list_all():
    for path in sorted(FOLDER.glob("*_cases.py")):
        for case in cases(unittest.defaultTestLoader.loadTestsFromName(path.stem)):
            print(f"{case.id()},{case.LABEL}")


def main():
    sys.path.insert(0, str(FOLDER))
    if sys.argv[1:] == ["--list"]:
        list_all()
        return 0
    suite = unittest.defaultTestLoader.loadTestsFromName(sys.argv[1])
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    if not result.wasSuccessful():
        return 1
    for _, reason in result.skipped:
        print("SKIPPED:", reason)
    return SKIPPED if result.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
