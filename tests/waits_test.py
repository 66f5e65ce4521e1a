#!/usr/bin/env python3
"""Every call of the ranks' code that can block has a row that says what ends it.

    tests/waits_test.py              checks tests/waits.json against the sources and the tests; exits with 1 where they differ
    tests/waits_test.py --list       prints each call with its row
    tests/waits_test.py --self-test  breaks each side of a small tree and expects a complaint

A rank that waits for another one without a deadline hangs when that one is stopped. So the table has each line of gpu/ranks and
engine/ranks that waits, sleeps, yields, reads a socket, or calls MPI or NCCL in a way that may block. `deadline` names the tests in which
another rank does not come and the call is given up; `ends` says why a call needs none, such as a wait for this process's own thread.
"""

import argparse
import json
import pathlib
import re
import sys
import tempfile

from promises_test import Tests

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = "tests/waits.json"
FOLDERS = ("gpu/ranks", "engine/ranks")
# Calls of MPI and NCCL that only look or begin; every other one may wait for other ranks.
LOCAL = (r"MPI_(?:Comm_(?:rank|size|set_errhandler|get_attr)|Get_\w+|Error_\w+|Initialized|Query_thread|I[sr]\w+|Testsome|Abort)\b"
         r"|MPI_[A-Z][A-Z_]*\b")
BLOCKS = re.compile(
    r"[.>](?:wait|wait_for|wait_until|synchronize|await)\(|\.join\(\)|\b(?:sleep_for|sleep_until|yield|flock|waitpid|getaddrinfo|usleep|nanosleep)\("
    r"|(?<!\w)::(?:p?poll|select|epoll_wait|recv|recvmsg|read|accept4?|connect|sendmsg|send|write)\("
    rf"|\b(?!{LOCAL})MPI_\w+\("
    r"|(?:functions\(\)|nccl_)\.(?:init|split|finalize|destroy|abort|get_async_error)\(")
# A module's own collectives and its own words for the same.
OWN = re.compile(r"\b(?:exchange|exchanges\[i\])\.wait\(")


def calls(root):
    """{file: [line that may block]}, without comments."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("*")):
            if path.suffix not in (".cc", ".h", ".cu"):
                continue
            for line in path.read_text(encoding="utf-8").splitlines():
                code = line.split("//")[0].strip()
                if BLOCKS.search(code) and not OWN.search(code):
                    found.setdefault(path.relative_to(root).as_posix(), []).append(code)
    return found


def complaints(root):
    table = json.loads((root / TABLE).read_text(encoding="utf-8"))
    tests = Tests(root)
    found = calls(root)
    for file, lines in found.items():
        for line in lines:
            if line not in table.get(file, {}):
                yield f'{file}: "{line}" may block, and {TABLE} does not say what ends it: a deadline and its tests, or why it needs none'
    for file, rows in table.items():
        for line, row in rows.items():
            if line not in found.get(file, []):
                yield f'{file}: {TABLE} has "{line}", which is not there (any more)'
            if not row.get("ends") or not row["ends"].strip():
                yield f'{file}: "{line}" has no words on what ends it'
            if ("deadline" in row) != ("sharding.timeout" in row.get("ends", "")):
                yield f'{file}: "{line}": rows that end by sharding.timeout, and no others, name the tests of their deadline'
            for test in row.get("deadline", []) or ([""] if "deadline" in row else []):
                if test not in tests.files:
                    yield f'{file}: "{line}" names the test "{test}", which does not exist'


def self_test():
    source = "void f() { changed_.wait(lock); }  // x.join() is a comment\n  MPI_Comm_rank(a, b);\n  int code = MPI_Barrier(a);\n"
    wait, barrier = "void f() { changed_.wait(lock); }", "int code = MPI_Barrier(a);"
    good = {"gpu/ranks/a.cc": {wait: {"ends": "the own thread ends"},
                               barrier: {"ends": "after sharding.timeout", "deadline": ["Waits.End"]}}}
    cases = [("nothing is wrong", good, None),
             ("a call without a row", {"gpu/ranks/a.cc": {wait: good["gpu/ranks/a.cc"][wait]}}, "may block"),
             ("a row without a call", {**good, "engine/ranks/b.cc": {"x.join();": {"ends": "x"}}}, "not there"),
             ("a row without words", {"gpu/ranks/a.cc": {**good["gpu/ranks/a.cc"], wait: {"ends": ""}}}, "no words"),
             ("a deadline without a test", {"gpu/ranks/a.cc": {**good["gpu/ranks/a.cc"], barrier: {"ends": "after sharding.timeout"}}}, "name the tests"),
             ("no test in a list", {"gpu/ranks/a.cc": {**good["gpu/ranks/a.cc"], barrier: {"ends": "after sharding.timeout", "deadline": []}}},
              "does not exist"),
             ("a test that is not there", {"gpu/ranks/a.cc": {**good["gpu/ranks/a.cc"],
                                                              barrier: {"ends": "after sharding.timeout", "deadline": ["Waits.Gone"]}}}, "does not exist")]
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in ("gpu/ranks", "engine/ranks", "tests"):
            (root / name).mkdir(parents=True)
        (root / "gpu/ranks/a.cc").write_text(source, encoding="utf-8")
        (root / "tests/a_test.cc").write_text("TEST(Waits, End) {}\n", encoding="utf-8")
        for name, table, expected in cases:
            (root / TABLE).write_text(json.dumps(table), encoding="utf-8")
            said = list(complaints(root))
            if len(said) != (expected is not None) or (expected and expected not in said[0]):
                print(f"{name}: expected {expected!r}, got {said}")
                return 1
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    if options.list:
        table = json.loads((ROOT / TABLE).read_text(encoding="utf-8"))
        for file, lines in calls(ROOT).items():
            for line in lines:
                print(f"{file}: {line}\n    {table.get(file, {}).get(line, 'NO ROW')}")
        return 0
    said = list(complaints(ROOT))
    print("\n".join(said) if said else "every call of the ranks' code that may block has a row")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
