#!/usr/bin/env python3
"""No folder needs a symbol from a folder to its right: what includes promise, the linker would keep.

    tests/symbols_test.py BUILD        checks the objects of a build tree against the table of folders in docs/architecture.md
    tests/symbols_test.py --self-test  judges small sets of symbols, with a violation in each

For every folder of the table, each symbol that its objects use and the project defines has to be defined in the folder itself or in one
that it stands on, directly or not. A folder so linked with the folders at its left alone has no undefined symbol of the project's.
Weak definitions (inline functions, templates) are wherever the compiler put them and are not looked at.
"""

import collections
import os
import pathlib
import subprocess
import sys

import tidy_test

ROOT = pathlib.Path(__file__).resolve().parent.parent
STRONG = "TDBRSG"
OBJECTS_A_CALL = 100


def folder_of(path, folders, is_there=lambda source: (ROOT / source).exists()):
    """The folder of the source of an object: .../engine/CMakeFiles/sluice_engine.dir/plan/layout.cc.o is in engine/plan. None for
    the tests' objects, and for generated sources, which belong to no folder: texts and the commit's name."""
    before, _, after = path.partition("/CMakeFiles/")
    source = os.path.normpath(os.path.join(before, after.partition(".dir/")[2])).removesuffix(".o")
    folder = os.path.dirname(source)
    return folder if folder in folders and is_there(source) else None


def symbols_of(build, folders):
    """({symbol: folders that define it}, {(folder, symbol): an object that uses it}) of the objects below `build`."""
    objects = {}
    for path in sorted(pathlib.Path(build).rglob("*.o")):
        folder = folder_of(path.relative_to(build).as_posix(), folders)
        if folder is not None:
            objects[str(path)] = folder
    defined, used = collections.defaultdict(set), {}
    names = list(objects)
    for begin in range(0, len(names), OBJECTS_A_CALL):
        listed = subprocess.run(["nm", "-A", "-P", *names[begin:begin + OBJECTS_A_CALL]], capture_output=True, text=True, check=True)
        for line in listed.stdout.splitlines():
            path, _, entry = line.partition(": ")
            symbol, kind = entry.split()[:2]
            if kind in STRONG:
                defined[symbol].add(objects[path])
            elif kind == "U":
                used[objects[path], symbol] = path
    return len(objects), defined, used


def complaints(rows, defined, used):
    found = []
    for (folder, symbol), path in sorted(used.items()):
        places = defined.get(symbol)
        if places and not places & tidy_test.reachable(rows, folder):
            found.append(f"{folder} does not stand on {' or '.join(sorted(places))}, but {os.path.basename(path)} needs {symbol}")
    return found


def self_test():
    rows = {"base": [], "io": ["base"], "engine/plan": ["io"], "engine/step": ["engine/plan"]}
    defined = {"b": {"base"}, "p": {"engine/plan"}, "s": {"engine/step"}, "two": {"engine/step", "base"}}
    fine = {("base", "b"): "b.o", ("engine/step", "b"): "s.o", ("engine/step", "p"): "s.o", ("io", "two"): "i.o",
            ("io", "memcpy"): "i.o"}
    judged = [complaints(rows, defined, fine) == []]
    for use in (("engine/plan", "s"), ("base", "p"), ("io", "s")):
        told = complaints(rows, defined, fine | {use: "x.o"})
        judged.append(len(told) == 1 and told[0].startswith(f"{use[0]} does not stand on {min(defined[use[1]])}"))
    everything, nothing = (lambda source: True), (lambda source: False)
    judged.append(folder_of("engine/CMakeFiles/sluice_engine.dir/plan/layout.cc.o", rows, everything) == "engine/plan")
    judged.append(folder_of("engine/CMakeFiles/sluice_engine.dir/plan/layout.cc.o", rows, nothing) is None)
    judged.append(folder_of("tests/engine/CMakeFiles/x_test.dir/plan/layout_test.cc.o", rows, everything) is None)
    print(f"{sum(judged)} of {len(judged)} cases were judged correctly")
    return 0 if all(judged) else 1


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    rows = tidy_test.house((ROOT / tidy_test.HOUSE).read_text(encoding="utf-8"))
    count, defined, used = symbols_of(sys.argv[1], set(rows))
    found = complaints(rows, defined, used)
    for complaint in found:
        print(complaint)
    checked = sum(symbol in defined for _, symbol in used)
    print(f"{count} objects, {checked} uses of the project's symbols, {len(found)} from a folder to the right")
    return 1 if found or checked == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
