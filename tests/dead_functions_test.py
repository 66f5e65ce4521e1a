#!/usr/bin/env python3
"""No function of the library or the command is without a caller.

    tests/dead_functions_test.py BUILD        checks the objects of a build tree
    tests/dead_functions_test.py --self-test  judges a small set of symbols

A function is dead when no object of the build refers to it, and no source of the library names it but where it is declared or
defined: calls that the compiler has put in place are seen there. One that only tests refer to is dead, too, unless the table below
says why it is there. Public functions are for applications. Inline functions and templates are not looked at: the linker drops them.
"""

import collections
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("base", "io", "cpu_optim", "gpu", "engine", "capi", "tools")
OBJECTS_A_CALL = 60
# Functions that only tests call, and what for.
FOR_TESTS = {
    "sluice::MessageWorld::neighbor_count": "whether the ranks of a host share memory",
    "sluice::force_steady_trace_clock": "the clock of processors without an invariant counter",
    "sluice::trace_enable": "records without a file",
    "sluice::trace_take": "records without a file",
}


def without_comments(text):
    return re.sub(r"//[^\n]*|\"(?:[^\"\\\n]|\\.)*\"", "", text)


def sources():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".h", ".cc", ".cu"):
                yield path


def uses_in(text, is_header):
    """{word: how often `text` uses it}: a source defines its functions at the beginning of a line, a header has one declaration."""
    counts = collections.Counter()
    for line in without_comments(text).splitlines():
        if is_header or line.startswith(" "):
            counts.update(re.findall(r"\w+", line))
    return counts


def words_of_sources():
    """({word: how often the sources use it}, the words of public headers)"""
    used, declared, public = collections.Counter(), collections.Counter(), set()
    for path in sources():
        is_header = path.suffix == ".h"
        (declared if is_header else used).update(uses_in(path.read_text(encoding="utf-8"), is_header))
        if "include/sluice" in path.as_posix() or path.name in ("sluice.h", "sluice_gpu.h"):
            public.update(re.findall(r"(\w+)\s*\(", without_comments(path.read_text(encoding="utf-8"))))
    for word, count in declared.items():
        used[word] += count - 1
    return used, public


class Objects:
    """The functions that the objects of a build define and refer to."""

    def __init__(self, build):
        self.defined = {}                          # symbol: objects
        self.aliases = collections.defaultdict(set)  # (object, section, address): symbols
        self.used = collections.defaultdict(set)   # symbol: objects
        self.paths = sorted(str(path) for path in pathlib.Path(build).rglob("*.o") if "/package/" not in path.as_posix())
        for begin in range(0, len(self.paths), OBJECTS_A_CALL):
            self._read(self.paths[begin:begin + OBJECTS_A_CALL])

    def _read(self, paths):
        listed = subprocess.run(["readelf", "-srW", *paths], capture_output=True, text=True, check=True).stdout
        path, section = paths[0], ""
        for line in listed.splitlines():
            words = line.split()
            if line.startswith("File: "):
                path = line[6:].strip()
            elif line.startswith(("Relocation section", "Symbol table")):
                section = line.split("'")[1]
            elif len(words) == 8 and words[4] in ("GLOBAL", "WEAK") and words[0].endswith(":"):
                self._note(path, words)
            elif len(words) >= 5 and section.startswith(".rela") and not section.startswith((".rela.debug", ".rela.eh_frame")):
                self.used[words[4]].add(path)

    def _note(self, path, words):
        _, address, _, kind, binding, _, section, name = words
        if section == "UND":
            self.used[name].add(path)
        elif kind == "FUNC" and binding == "GLOBAL":
            self.defined.setdefault(name, set()).add(path)
            self.aliases[path, section, address].add(name)

    def callers(self):
        """{symbol: the objects that refer to it or to another name of the same function}"""
        names = {}
        for group in self.aliases.values():
            for name in group:
                names.setdefault(name, set()).update(group)
        return {name: set().union(*(self.used.get(other, ()) for other in names[name])) for name in self.defined}


def demangled(names):
    done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, (re.sub(r"\[abi:\w+\]", "", line) for line in done.stdout.split("\n"))))


def complaints(build, callers, defined, counts, public):
    """The dead functions; `callers` and `defined` are {symbol: objects}."""
    is_test = lambda path: os.path.relpath(path, build).startswith("tests/")
    plain = [name for name in defined if not all(is_test(path) for path in defined[name])]
    readable = demangled(plain)
    found = set()
    for name in plain:
        function = readable[name]
        word = function.rpartition("::")[2]
        is_structor = word.lstrip("~") == function.split("::")[-2] if "::" in function else False
        if name == "main" or name.startswith("sluice_open_mpi_port_") or word in public or is_structor or not re.fullmatch(r"\w+", word):
            continue
        if any(not is_test(path) for path in callers[name]) or counts[word] > 0:
            continue
        if not callers[name]:
            found.add(f"{function} is never called")
        elif function not in FOR_TESTS:
            found.add(f"{function} is called by tests alone; say in {os.path.basename(__file__)} what for, or delete it")
    return sorted(found)


def self_test():
    build = "/b"
    names = {"_ZN6sluice4usedEv": {"/b/engine/a.o"}, "_ZN6sluice4deadEv": {"/b/engine/a.o"}, "_ZN6sluice6testedEv": {"/b/io/b.o"},
             "_ZN6sluice6publicEv": {"/b/engine/a.o"}, "_ZN6sluice7inlinedEv": {"/b/engine/a.o"}, "helper": {"/b/tests/c.o"}}
    callers = {name: set() for name in names}
    callers["_ZN6sluice4usedEv"] = {"/b/tools/d.o"}
    callers["_ZN6sluice6testedEv"] = {"/b/tests/c.o"}
    counts = collections.Counter({"used": 1, "inlined": 1})
    told = complaints(build, callers, names, counts, {"public"})
    judged = [len(told) == 2, told[0] == "sluice::dead is never called", told[-1].startswith("sluice::tested is called by tests alone")]
    judged.append(uses_in('int f() {\n  g();  // f\n  h("f");\n', False) == collections.Counter(["g", "h"]))
    judged.append(uses_in("  int f() const;\n", True)["f"] == 1)
    print(f"{sum(judged)} of {len(judged)} cases were judged correctly")
    return 0 if all(judged) else 1


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    build = sys.argv[1]
    objects = Objects(build)
    found = complaints(build, objects.callers(), objects.defined, *words_of_sources())
    for complaint in found:
        print(complaint)
    print(f"{len(objects.defined)} functions of {len(objects.paths)} objects, {len(found)} dead")
    return 1 if found or not objects.defined else 0


if __name__ == "__main__":
    sys.exit(main())
