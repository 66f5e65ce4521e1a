#!/usr/bin/env python3
"""Every C++ file includes what it names: a cheap stand-in for compiling each source alone, which builds that compile several
sources at a time (SLUICE_UNITY) or with precompiled headers do not do. `tools/test.sh --slow` compiles each alone, too.

    tests/includes_test.py              the violations in this source tree; exits with 1 if there are any
    tests/includes_test.py --self-test  also sees violations where there are some

Looked at are types, constants and macros that one header of the project defines, and the standard library's most used names.
A name may come from any file that is included, directly or not, except from another header of the standard library.
"""

import collections
import os
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PUBLIC = ("base/include", "gpu/include", "engine/include")
STANDARD = {
    "algorithm": "all_of any_of clamp copy_n count_if equal fill fill_n find_if lower_bound max_element min_element none_of "
                 "partial_sort remove_if replace reverse shuffle sort stable_sort upper_bound",
    "array": "array", "atomic": "atomic atomic_flag memory_order_acquire memory_order_relaxed", "barrier": "barrier",
    "bit": "bit_cast bit_ceil bit_width countl_zero countr_zero has_single_bit popcount",
    "charconv": "from_chars to_chars", "chrono": "chrono", "condition_variable": "condition_variable condition_variable_any",
    "cmath": "ceil exp floor isfinite isinf isnan lround nextafter pow sqrt tanh", "cstring": "memcmp memcpy memmove memset strlen",
    "deque": "deque", "filesystem": "filesystem", "fstream": "fstream ifstream ofstream", "functional": "function hash less",
    "iostream": "cerr cin cout", "latch": "latch", "limits": "numeric_limits", "map": "map multimap",
    "memory": "make_shared make_unique shared_ptr unique_ptr weak_ptr",
    "mutex": "call_once lock_guard mutex once_flag recursive_mutex scoped_lock unique_lock", "new": "bad_alloc nothrow",
    "numeric": "accumulate gcd iota lcm", "optional": "nullopt optional", "queue": "priority_queue queue", "random":
    "mt19937 mt19937_64 normal_distribution uniform_int_distribution uniform_real_distribution", "regex": "regex",
    "semaphore": "binary_semaphore counting_semaphore", "set": "multiset set", "shared_mutex": "shared_lock shared_mutex",
    "span": "span", "sstream": "istringstream ostringstream stringstream", "stdexcept": "invalid_argument logic_error runtime_error",
    "string": "getline string to_string", "string_view": "string_view", "system_error": "system_error",
    "thread": "jthread thread", "tuple": "tie tuple", "type_traits": "enable_if_t is_same_v is_trivially_copyable_v remove_cvref_t",
    "unordered_map": "unordered_map", "unordered_set": "unordered_set", "utility": "exchange in_range",
    "variant": "get_if holds_alternative monostate variant visit", "vector": "vector"}
HEADER_OF = {name: header for header, names in STANDARD.items() for name in names.split()}
# Headers of the standard library that are made of others.
BRINGS = {"string": {"string_view"}, "fstream": {"string"}, "sstream": {"string"}, "filesystem": {"string"}, "stdexcept": {"string"},
          "iostream": {"string"}}
DEFINITION = re.compile(
    r"^(?:template <[^;{]*?>\s*)?(?:(?:class|struct|enum class|enum)\s+(?:SLUICE_\w+\s+)?(?P<type>[A-Z]\w+)[^;()]*?\{"
    r"|using (?P<alias>[A-Z]\w+) =|(?:inline )?constexpr [\w:<>, ]+?\b(?P<constant>k[A-Z]\w*)\s*[=\[{]"
    r"|#define (?P<macro>SLUICE_\w+))", re.MULTILINE)
FORWARD = re.compile(r"^\s*(?:class|struct|enum class) ([A-Z]\w+)(?: : [\w:]+)?;", re.MULTILINE)
LITERAL = re.compile(r'R"(\w*)\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'(?!\w)|//[^\n]*|/\*(?:.|\n)*?\*/')


def without_literals(text):
    """`text` with comments and literals blanked, each line at its place."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group()) if not match.group().startswith('"') else '""' + " " * (len(match.group()) - 2)
    return LITERAL.sub(blank, text)


class Tree:
    """The C++ files below a folder."""

    def __init__(self, root):
        self.text, self.includes, self.code = {}, {}, {}
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in (".git", "build", "examples", "data")]
            for name in names:
                if name.endswith((".h", ".cc", ".inc", ".cu")):
                    path = os.path.relpath(os.path.join(folder, name), root)
                    text = pathlib.Path(root, path).read_text(encoding="utf-8")
                    self.includes[path] = re.findall(r'^#include [<"]([^>"]+)[>"]', text, re.MULTILINE)
                    self.code[path] = without_literals(text)
        self.closures = {}

    def place(self, name):
        """The file of the project that an include names, or None."""
        return next((path for path in (name, *(f"{folder}/{name}" for folder in PUBLIC)) if path in self.code), None)

    def closure(self, path):
        """All files and standard headers that `path` includes, directly or not, and itself."""
        if path not in self.closures:
            self.closures[path] = found = {path}
            for name in self.includes[path]:
                place = self.place(name)
                found |= self.closure(place) if place else {name, *BRINGS.get(name, ())}
        return self.closures[path]

    def definitions(self):
        """name -> the headers that define it."""
        found = collections.defaultdict(set)
        for path, code in self.code.items():
            if path.endswith(".h"):
                for match in DEFINITION.finditer(code):
                    found[next(filter(None, match.groupdict().values()))].add(path)
        return found


def violations_of(root):
    tree = Tree(root)
    # A name that is defined elsewhere, too, or inside of a class, says nothing about headers.
    defines = re.compile(r"\b(?:class|struct|enum class|using|constexpr [\w:<>]+) (\w+)\b(?! *;)")
    within = re.compile(r"^ +(?:class|struct|using|enum class) (\w+)", re.MULTILINE)
    everywhere = collections.Counter(name for code in tree.code.values() for name in set(defines.findall(code)))
    nested = {name for code in tree.code.values() for name in within.findall(code)}
    header_of = {name: next(iter(headers)) for name, headers in tree.definitions().items()
                 if len(headers) == 1 and everywhere[name] <= 1 and name not in nested}
    forward = {path: set(FORWARD.findall(code)) for path, code in tree.code.items()}
    found = []
    for path, code in sorted(tree.code.items()):
        if not path.endswith((".h", ".cc")):
            continue
        seen = tree.closure(path)
        declared = set().union(*(forward[include] for include in seen if include in forward))
        for place, line in enumerate(code.split("\n"), 1):
            if line.startswith(("#include", "TEST")):
                continue
            for name in set(re.findall(r"\b[A-Zk]\w+", line)):
                header = header_of.get(name)
                if header and header not in seen and name not in declared:
                    foreign = re.search(rf"(\.|->|\b(?!sluice)\w+::){name}\b", line)
                    if not foreign:
                        found.append((path, place, name, header))
            for name in set(re.findall(r"\bstd::(\w+)", line)):
                header = HEADER_OF.get(name)
                if header and header not in seen:
                    found.append((path, place, f"std::{name}", f"<{header}>"))
    return found


def self_test():
    files = {"base/one.h": "#pragma once\n#include <string>\nnamespace sluice {\nclass One {};\nconstexpr int kOne = 1;\n}\n",
             "base/two.h": '#pragma once\n#include "base/one.h"\n',
             "base/good.cc": '#include "base/two.h"\nstd::string text(One one, int = kOne);  // Three, std::vector\n',
             "base/bad.cc": '#include <string>\nstd::string text(One one);\nstd::vector<int> more{kOne};\n',
             "base/forward.h": "#pragma once\nclass One;\nvoid use(const One& one);\n",
             "base/fine.cc": '#include "base/forward.h"\nTEST(One, Two) { use(*one); }\n'}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            pathlib.Path(folder, name).parent.mkdir(exist_ok=True)
            pathlib.Path(folder, name).write_text(text, encoding="utf-8")
        found = violations_of(folder)
    expected = [("base/bad.cc", 2, "One", "base/one.h"), ("base/bad.cc", 3, "kOne", "base/one.h"),
                ("base/bad.cc", 3, "std::vector", "<vector>")]
    if found != expected:
        print(f"found {found}\nexpected {expected}")
        return 1
    return 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    found = violations_of(ROOT)
    for path, line, name, header in found:
        print(f"{path}:{line}: names {name} without including {header}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
