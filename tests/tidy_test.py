#!/usr/bin/env python3
"""The rules of the source tree that a machine can judge.

    tests/tidy_test.py               checks this repository; prints PATH:LINE: [RULE] MESSAGE and exits with 1 on a violation
    tests/tidy_test.py --self-test   plants one violation of each rule in a small tree and expects it to be reported
"""

import functools
import json
import os
import pathlib
import re
import sys
import tempfile

LINE_CHARACTERS_MAX = 100
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
CONSTRUCTOR_ARGUMENTS_MAX = 6
PRIVATE_FUNCTIONS_MAX = 25
DOCUMENT_CHARACTERS_MAX = 120

LAYERS = {"base", "io", "cpu_optim", "gpu", "engine", "capi", "tools", "tests"}
HOUSE = "docs/architecture.md"
HOUSE_LINES_MAX = 250
VENDOR_HEADER = re.compile(
    r"^(liburing|xxhash|xxh_x86dispatch|nccl|mpi|hwloc|cblas|cuda\w*|cublas\w*|linux/io_uring)\.h$|^(hwy|tbb|oneapi|openssl|Eigen|unsupported)/")
# Sentences that a reader reads twice: a relative clause before its subject. Questions may open so.
OPENER = re.compile(r"(?:^|(?<=[.:!?] )|(?<=[.:!?]\*\* )|(?<=\| ))(?:What|Whose|Who|Of)\s.*?(?:[.?!](?=\s|$)|$)")
# Code is "it" or "nothing"; "12 bytes per parameter", not "a parameter".
ODD_WORDS = re.compile(
    r"\b(?:for ever|lest|overflown|none the less|nobody|somebody|anybody|everybody|whoever|all else|held against|turn about)\b"
    r"|\b(?:bytes|bits|ns|us|ms|[KMG]iB|state|nats|one) an? (?:parameter|element|unit|block|token|record|row)\b", re.IGNORECASE)
# "{} MB per second" in a message, not "a second"; "{}" is its number.
ODD_RATE = re.compile(
    r"(?:(?:\{[^{}]*\}|\b\d[\w.]*|\bless)(?: ?[KMGT]?i?B| [mu]?s| bytes| tokens| sequences| parameters)?|\b(?:bytes|tokens|sequences|parameters|[mu]s|[KMGT]i?B))"
    r" an? (?:second|minute|hour|day|step|token|parameter)\b(?! (?:time|use)\b)")
# The longest sentence of a document for users, in words; a span of code is one word, and so is an address.
SENTENCE_WORDS_MAX = 25
SENTENCE_END = re.compile(r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)(?<!\.\.\.)(?<=[.?!])[)\"*_]*\s+(?=\S)")
FORBIDDEN_WORD = re.compile(r"\b(TODO|FIXME|XXX)\b")
TEXT_SUFFIXES = {".h", ".cc", ".cu", ".inc", ".py", ".sh", ".cmake", ".in", ".txt", ".md", ".json", ".supp", ".yml"}
CPP_SUFFIXES = {".h", ".cc", ".cu", ".inc"}

# function -> (the files that may call it, what others do instead)
PLANS = ("engine/plan/", "engine/planner/run_plan")
ONE_PLACE = {
    "plan_placement": (PLANS, "call plan_run()"),
    "pass_needs": (PLANS, "call plan_run()"),
    "add_shadows": (PLANS, "call plan_run()"),
}

README_SAMPLE = "examples/sine/main.cc"
# Folders that the table calls pure have no threads, no clock and no device: their results depend on their arguments alone.
IMPURE = re.compile(
    r"^(atomic|barrier|chrono|condition_variable|ctime|future|latch|mutex|semaphore|shared_mutex|stop_token|thread|time\.h|sys/time\.h|pthread\.h"
    r"|base/(at_once|named_thread)\.h|base/trace/.*|gpu/include/sluice/\w*device\.h)$")
# A program that includes the facade compiles these many of our headers, and no more.
FACADE = "engine/include/sluice/engine.h"
FACADE_HEADERS_MAX = 19


class Tree:
    """The text files below a folder, by their path from it, and what was found wrong with them."""

    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.texts = {}
        self.violations = []
        for folder, subfolders, names in os.walk(self.root):
            relative = pathlib.Path(folder).relative_to(self.root)
            subfolders[:] = sorted(name for name in subfolders if not self._is_foreign(relative / name))
            for name in sorted(names):
                path = relative / name
                if path.suffix in TEXT_SUFFIXES or path.parts[0] == ".ci":
                    self.texts[path.as_posix()] = (self.root / path).read_text(encoding="utf-8")
        self.cpp = {path: text for path, text in self.texts.items() if pathlib.Path(path).suffix in CPP_SUFFIXES}
        self.headers = {path for path in self.cpp if path.endswith(".h")}
        self.public = {path[path.index("sluice/"):]: path for path in self.headers if "/include/sluice/" in path}
        # (line, path or name, is_project) of every include.
        self.includes = {path: [(line, self.resolved(name), is_project) for line, name, is_project in self._includes(text)]
                         for path, text in self.cpp.items()}

    def _is_foreign(self, path):
        if path.parts == (".ci",):
            return False
        is_build_tree = (self.root / path / "CMakeCache.txt").exists()
        return path.name.startswith(".") or path.name == "__pycache__" or path.parts[0] in ("build", "data") or is_build_tree

    @staticmethod
    def _includes(text):
        for number, line in enumerate(text.splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
            if match:
                yield number, match[2], match[1] == '"' or match[2].startswith("sluice/")

    def resolved(self, name):
        """The path of the file that an include names: a public header is included as <sluice/NAME.h>."""
        return self.public.get(name, name)

    def report(self, rule, path, line, message):
        self.violations.append((path, line, rule, message))


def house(page):
    """folder -> the folders that it stands on: the rows "| `folder` | what it stands on | ..." of the table."""
    rows = {}
    for line in page.splitlines():
        match = re.match(r"\|\s*`([\w/]+)`\s*\|([^|]*)\|[^|]*\|\s*$", line)
        if match:
            rows[match[1]] = re.findall(r"`([\w/]+)`", match[2])
    return rows


def reachable(rows, folder):
    """`folder` and all that it stands on, directly or not."""
    found, waiting = set(), [folder]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += rows.get(name, [])
    return found


def check_house(tree):
    """Every include against the table of folders, and the vendors' headers."""
    rows = house(tree.texts.get(HOUSE, ""))
    if (count := tree.texts.get(HOUSE, "").count("\n")) > HOUSE_LINES_MAX:
        tree.report("house", HOUSE, HOUSE_LINES_MAX, f"{count} lines; {HOUSE_LINES_MAX} are allowed, so that it is read in one go")
    order = list(rows)
    for place, (folder, below) in enumerate(rows.items()):
        for name in below:
            if name not in order[:place]:
                tree.report("house", HOUSE, 1, f"{folder} stands on {name}, which is not in an earlier row")
    for path, includes in tree.includes.items():
        folder = os.path.dirname(path)
        is_source = path.split("/")[0] in LAYERS - {"tests"}
        if is_source and folder not in rows:
            tree.report("house", path, 1, f"{folder} is not in the table of {HOUSE}")
        allowed = reachable(rows, folder)
        for line, name, is_project in includes:
            if "/include/sluice" in path and not is_project and not re.fullmatch(r"[a-z_]+", name):
                tree.report("public-header", path, line, f"<{name}> is neither the standard library's nor public")
            if VENDOR_HEADER.search(name) and path.endswith(".h"):
                tree.report("vendor-header", path, line, f"<{name}> belongs into a .cc or .cu file")
            if not is_project or name.split("/")[0] not in LAYERS | {"sluice"}:
                continue
            if name not in tree.texts:
                tree.report("include-path", path, line, f'"{name}" is no file of this repository')
            elif "/include/sluice" in path and "/include/sluice" not in name:
                tree.report("house", path, line, f"a public header includes public ones only ({name})")
            elif is_source and os.path.dirname(name) not in allowed:
                tree.report("house", path, line, f"{folder} does not stand on {os.path.dirname(name)} ({name})")
    folders = {os.path.dirname(path) for path in tree.cpp}
    for folder in order:
        if folder not in folders:
            tree.report("house", HOUSE, 1, f"{folder} has no source file")


def check_pure(tree):
    """The includes of the folders that the table calls pure."""
    rows = re.findall(r"^\|\s*`([\w/]+)`\s*\|[^|]*\|[^|]*\bpure\b[^|]*\|\s*$", tree.texts.get(HOUSE, ""), re.MULTILINE)
    for path, includes in tree.includes.items():
        for line, name, _ in includes if os.path.dirname(path) in rows else ():
            if IMPURE.search(name):
                tree.report("pure", path, line, f"{os.path.dirname(path)} is pure ({HOUSE}), so it has no threads, clock or device ({name})")


def check_unique_names(tree):
    """One C++ file per name, so that a name in a message finds it. Each example has its main.cc, as any program."""
    first = {}
    for path in sorted(tree.cpp):
        name = os.path.basename(path)
        if name != "main.cc" and first.setdefault(name, path) != path:
            tree.report("unique-name", path, 1, f"{first[name]} has the same name; a name finds one file")


def check_facade(tree):
    """How many headers of the project the facade includes, directly or not."""
    found, waiting = set(), [FACADE]
    while waiting:
        for _, name, _ in tree.includes.get(waiting.pop(), ()):
            if name in tree.headers and name not in found:
                found.add(name)
                waiting.append(name)
    if len(found) > FACADE_HEADERS_MAX:
        tree.report("facade", FACADE, 1, f"includes {len(found)} headers of the project; {FACADE_HEADERS_MAX} are allowed")


def check_cycles(tree):
    done, trail = set(), []

    def visit(path):
        if path in trail:
            tree.report("include-cycle", path, 1, " -> ".join(trail[trail.index(path):] + [path]))
        elif path in tree.headers and path not in done:
            trail.append(path)
            for _, name, _ in tree.includes[path]:
                visit(name)
            trail.pop()
            done.add(path)

    for header in sorted(tree.headers):
        visit(header)


def check_lengths(tree):
    for path, text in tree.cpp.items():
        lines = text.splitlines()
        # The C interface is one header, as C programs expect, and its comments are its manual.
        lines_max = 540 if path == "capi/sluice.h" else FILE_LINES_MAX
        if len(lines) > lines_max:
            tree.report("file-length", path, lines_max, f"{len(lines)} lines; {lines_max} are allowed")
        for number, line in enumerate(lines, 1):
            if len(line) > LINE_CHARACTERS_MAX and 'R"' not in line:  # a raw string cannot be broken
                tree.report("line-length", path, number, f"{len(line)} characters; {LINE_CHARACTERS_MAX} are allowed")
        for line, name, count in constructors(text) if not path.startswith("tests/") else ():
            if count > CONSTRUCTOR_ARGUMENTS_MAX:
                tree.report("constructor-arguments", path, line,
                            f"{name} takes {count} arguments; {CONSTRUCTOR_ARGUMENTS_MAX} are allowed, so group them in a struct")
        for line, name, count in private_functions(text) if not path.startswith("tests/") else ():
            if count > PRIVATE_FUNCTIONS_MAX:
                tree.report("private-functions", path, line,
                            f"{name} has {count} private functions; {PRIVATE_FUNCTIONS_MAX} are allowed, so move a part to a class of its own")
        for begin, end in functions(text):
            if end - begin + 1 > FUNCTION_LINES_MAX:
                tree.report("function-length", path, begin, f"{end - begin + 1} lines; {FUNCTION_LINES_MAX} are allowed")


@functools.cache
def blanked(text):
    """The text with comments, literals and preprocessor lines made blank; lines stay where they are."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
        r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.DOTALL | re.MULTILINE)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def between(code, begin, opening, closing):
    """Where the bracket at `begin` is closed."""
    depth = 0
    for match in re.compile(f"[{re.escape(opening + closing)}]").finditer(code, begin):
        depth += 1 if match[0] == opening else -1
        if depth == 0:
            return match.start()
    return len(code)


def constructors(text):
    """(line, class, number of arguments) of every constructor that a class declares."""
    code = blanked(text)
    for match in re.finditer(r"\b(?:class|struct)\s+(\w+)(?:\s+final)?(?:\s*:[^{;()]*)?\s*\{", code):
        body = code[match.end():between(code, match.end() - 1, "{", "}")]
        for found in re.finditer(rf"(?<![\w~:.>&<]){match[1]}\s*\(", body):
            before = body[:found.start()]
            if before.count("{") != before.count("}"):
                continue  # in a function, where it makes an object
            parameters = body[found.end():between(body, found.end() - 1, "(", ")")]
            depth = commas = 0
            for character in parameters:
                depth += (character in "(<[{") - (character in ")>]}")
                commas += character == "," and depth == 0
            line = code[:match.end() + found.start()].count("\n") + 1
            yield line, match[1], commas + 1 if parameters.strip() else 0


def private_functions(text):
    """(line, class, number of private functions) of every class, without functions that are defaulted or deleted."""
    code = blanked(text)
    for match in re.finditer(r"\b(class|struct)\s+(\w+)(?:\s+final)?(?:\s*:[^{;()]*)?\s*\{", code):
        body = code[match.end():between(code, match.end() - 1, "{", "}")]
        is_private, statement, count, place = match[1] == "class", "", 0, 0
        while place < len(body):
            is_end = body[place] in "{;"
            if is_end and is_private and is_function(statement):
                count += 1
            if body[place] == "{":  # of a function, an initializer or a nested class
                statement = "" if is_function(statement) else statement
                place = between(body, place, "{", "}")
            elif body[place] == ";":
                statement = ""
            else:
                statement += body[place]
                access = body[place] == ":" and re.search(r"\b(public|protected|private)\s*:$", statement)
                if access and body[place + 1:place + 2] != ":":
                    is_private, statement = access[1] == "private", ""
            place += 1
        yield code[:match.start()].count("\n") + 1, match[2], count


def is_function(statement):
    """Whether the statement of a class, up to its brace or semicolon, declares a function."""
    if re.match(r"\s*(using|friend|static_assert|enum|class|struct|union)\b", statement) or re.search(r"=\s*(default|delete)\s*$", statement):
        return False
    plain = re.sub(r"(\s+(const|noexcept|override|final|try)\b|\s*->[^()]*|\s*=\s*0)*\s*$", "", statement)
    plain = re.sub(r"\)\s*:\s*[^:].*$", ")", plain, flags=re.DOTALL)  # the initializers of a constructor
    return plain.endswith(")") and re.search(r"=[^(]*\(", re.sub(r"operator\W+", "operator", plain).split("(")[0] + "(") is None


def functions(text):
    """(first line, last line) of every function: a brace outside of functions whose statement has a parameter list."""
    code = blanked(text)
    scopes = []  # for each open brace: the first line of the function that it opens, or 0
    in_function, line = False, 1
    for match in re.finditer(r"([^{};]*)([{};])", code):
        statement, end = match.groups()
        line += statement.count("\n")
        if end == "{":
            is_function = not in_function and "(" in statement and not re.match(r"\s*(namespace|enum)\b", statement)
            first = line - statement.lstrip().count("\n")
            scopes.append(first if is_function else 0)
            in_function = in_function or is_function
        elif end == "}" and scopes:
            first = scopes.pop()
            if first:
                in_function = False
                yield first, line


def check_headers(tree):
    for path, text in tree.cpp.items():
        if path in tree.headers:
            if not text.startswith("//"):
                tree.report("header-comment", path, 1, "a header opens with what it is, in a comment")
            if "\n#pragma once\n" not in text:
                tree.report("header-guard", path, 1, "#pragma once is missing")
            for number, line in enumerate(text.splitlines(), 1):
                if re.match(r"\s*using namespace\b", line):
                    tree.report("using-namespace", path, number, "not in a header")
            continue
        stem = pathlib.PurePosixPath(path).stem
        own = tree.public.get(f"sluice/{stem}.h", str(pathlib.PurePosixPath(path).with_suffix(".h")))
        names = [name for _, name, _ in tree.includes[path]]
        # Highway includes a file once per instruction set; its own headers must come first there.
        if own in names and names[0] != own and "hwy/foreach_target.h" not in names:
            tree.report("own-header-first", path, 1, f'"{own}" must be the first include')


def check_fmt(tree):
    """Since release 11 fmt::join() is no more in <fmt/format.h>. The header below has it in all releases."""
    for path, text in tree.cpp.items():
        match = re.search(r"\bfmt::join\(", code := blanked(text))
        if match and "fmt/ranges.h" not in (name for _, name, _ in tree.includes[path]):
            tree.report("fmt-join", path, code[:match.start()].count("\n") + 1, "fmt::join() needs <fmt/ranges.h>")


def listed_sources(tree):
    """Source files named in CMakeLists.txt files: path -> (list, line)."""
    listed = {}
    for cmake, text in tree.texts.items():
        if pathlib.PurePosixPath(cmake).name != "CMakeLists.txt":
            continue
        folder = pathlib.PurePosixPath(cmake).parent
        for number, line in enumerate(text.splitlines(), 1):
            for name in re.findall(r"[^\s()\"]+\.(?:cc|cu)\b", line.split("#")[0]):
                if "BINARY_DIR" in name:
                    continue
                path = (name.removeprefix("${PROJECT_SOURCE_DIR}/") if name.startswith("${PROJECT_SOURCE_DIR}/")
                        else os.path.normpath(folder / name.removeprefix("${CMAKE_CURRENT_SOURCE_DIR}/")))
                listed.setdefault(path, (cmake, number))
    return listed


def check_references(tree):
    listed = listed_sources(tree)
    for path, (cmake, line) in listed.items():
        if path not in tree.cpp:
            tree.report("missing-source", cmake, line, f"{path} does not exist")
    included = {name for path, includes in tree.includes.items() for _, name, _ in includes
                if pathlib.PurePosixPath(path).stem != pathlib.PurePosixPath(name).stem}
    cmake_texts = "\n".join(text for path, text in tree.texts.items() if path.endswith((".cmake", "CMakeLists.txt")))
    for path in tree.texts:
        pure = pathlib.PurePosixPath(path)
        if path in tree.headers and path not in included:
            tree.report("unused-file", path, 1, "no other file includes this header")
        elif pure.suffix in (".cc", ".cu") and path not in listed:
            tree.report("unused-file", path, 1, "no CMakeLists.txt lists this source")
        elif pure.suffix == ".cmake" and not re.search(rf"\b{re.escape(pure.stem)}\b", cmake_texts):
            tree.report("unused-file", path, 1, "no CMake file uses this module")


def parse_commented_json(text):
    def unique(pairs):
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f'key "{key}" appears twice')
        return dict(pairs)

    pattern = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    plain = pattern.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    return json.loads(plain, object_pairs_hook=unique)


def unknown_keys(value, schema, place=""):
    properties = schema.get("properties", {})
    for key, child in value.items():
        if key not in properties:
            yield f"{place}{key}"
        elif isinstance(child, dict):
            yield from unknown_keys(child, properties[key], f"{place}{key}.")


def check_one_place(tree):
    """Functions that only one place may call: other code asks that place for the result."""
    for name, (places, instead) in ONE_PLACE.items():
        for path, text in tree.cpp.items():
            if path.startswith(("tests/", *places)):
                continue
            for number, line in enumerate(blanked(text).splitlines(), 1):
                if re.search(rf"\b{name}\(", line):
                    tree.report("one-place", path, number, f"{name}() is for {', '.join(places)}; {instead}")


def check_configs(tree):
    schema_path = "configs/sluice.schema.json"
    schema = json.loads(tree.texts.get(schema_path, "{}"))
    for path, text in tree.texts.items():
        if not path.startswith("configs/") or not path.endswith(".json") or path == schema_path:
            continue
        try:
            for key in unknown_keys(parse_commented_json(text), schema):
                tree.report("config", path, 1, f'key "{key}" is not in {schema_path}')
        except ValueError as error:
            tree.report("config", path, 1, str(error))


def check_words(tree):
    for path, text in tree.texts.items():
        if path == "tests/tidy_test.py":
            continue
        for number, line in enumerate(text.splitlines(), 1):
            match = FORBIDDEN_WORD.search(line)
            if match:
                tree.report("word", path, number, f"{match[0]}: finish it, or describe the limit in plain words")


def check_named_files(tree):
    """Files of the layers that a document or a comment of a header names. Pages of results speak of their day."""
    for path, text in tree.texts.items():
        is_document = path.endswith(".md") and not path.startswith("docs/results/") and path != "CHANGELOG.md"
        if not is_document and path not in tree.headers:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for name in re.findall(r"(?<![\w./-])((?:%s)/[\w/]+\.(?:h|cc|cu|inc|py|sh))\b" % "|".join(sorted(LAYERS)), line):
                if name not in tree.texts and "#include" not in line:
                    tree.report("named-file", path, number, f"{name} is no file of this repository")


def comment_lines(path, text):
    """(line number, column, text) of every comment, and of every line of a docstring."""
    suffix = pathlib.PurePosixPath(path).suffix
    if suffix in CPP_SUFFIXES or path.startswith("configs/"):
        pattern = r'"(?:\\.|[^"\\\n])*"|(?P<sign>//+) ?(?P<comment>[^\n]*)'
    elif suffix == ".py":
        pattern = r'^[ \t]*r?"""(?P<docstring>.*?)"""|(?:^|(?<=\s))(?P<sign>#+) (?P<comment>[^\n]*)'
    elif suffix in (".sh", ".cmake") or path.endswith("CMakeLists.txt"):
        pattern = r"(?:^|(?<=\s))(?P<sign>#+) (?P<comment>[^\n]*)"
    else:
        return
    for match in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
        groups = match.groupdict()
        first = text.count("\n", 0, match.start()) + 1
        if groups.get("docstring") is not None:
            yield from ((first + i, -1, line.strip()) for i, line in enumerate(groups["docstring"].split("\n")))
        elif groups["sign"]:
            begin = match.start("sign")
            yield first, begin - (text.rfind("\n", 0, begin) + 1), groups["comment"].strip()


def document_lines(text):
    """(line number, column, text) of the lines of a document that are neither code nor headings, without the marks of lists."""
    is_code = was_blank = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("#") and not (line.startswith("    ") and was_blank):
            bullet = re.match(r"\s*(?:[-*+]|\d+\.)\s+", line)
            yield number, number if bullet or line.startswith("|") else 0, line[bullet.end():] if bullet else line.strip()
        was_blank = not line.strip() or (was_blank and line.startswith("    "))


def paragraphs(lines):
    """[(line number, text), ...] of each paragraph: lines that follow each other in one column."""
    paragraph, place = [], None
    for number, column, text in lines:
        follows = place and number == place[0] + 1 and (column == place[1] or column == 0)
        if not (follows and text) and paragraph:
            yield paragraph
            paragraph = []
        if text:
            paragraph.append((number, text))
        place = (number, column) if column else (number, place[1] if follows else 0)
    if paragraph:
        yield paragraph


def check_english(tree):
    """Sentences and words that are read twice, in comments and documents; the width of documents."""
    for path, text in tree.texts.items():
        if path == "tests/tidy_test.py":
            continue
        is_document = path.endswith(".md")
        for paragraph in paragraphs(document_lines(text) if is_document else comment_lines(path, text)):
            # Quotations and code stand for themselves.
            whole = re.sub(r"`[^`]*`|\"[^\"]*\"", lambda match: "x" * len(match[0]), " ".join(line for _, line in paragraph))

            def line_at(offset):
                for number, line in paragraph:
                    offset -= len(line) + 1
                    if offset < 0:
                        return number
                return number

            for match in OPENER.finditer(whole):
                if not match[0].endswith("?"):
                    tree.report("opener", path, line_at(match.start()), f'begin with the subject, not with "{match[0][:40]}"')
            for match in ODD_WORDS.finditer(whole):
                tree.report("odd-words", path, line_at(match.start()), f'"{match[0]}" reads oddly; use plain words')
        for number, line in document_width(text) if is_document else ():
            tree.report("document-width", path, number, f"{line} characters; {DOCUMENT_CHARACTERS_MAX} are allowed")


def literals(text):
    """(line number, text) of the string literals of C++ code. Those that follow each other are one; raw strings are left out."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#[^\n]*'
        r'|(?P<text>"(?:\\.|[^"\\\n])*"(?:\s*"(?:\\.|[^"\\\n])*")*)', re.DOTALL | re.MULTILINE)
    for match in pattern.finditer(text):
        if match["text"]:
            whole = "".join(re.findall(r'"((?:\\.|[^"\\\n])*)"', match["text"]))
            yield text.count("\n", 0, match.start()) + 1, whole.replace("\\n", " ").replace('\\"', '"')


def check_literals(tree):
    """The same in the texts of --help and in messages, which are string literals; and rates that read oddly."""
    for path, text in tree.cpp.items():
        for line, literal in literals(text) if path.split("/")[0] in LAYERS - {"tests"} else ():
            plain = re.sub(r"`[^`]*`|\"[^\"]*\"", lambda match: "x" * len(match[0]), literal)
            for match in OPENER.finditer(plain):
                if not match[0].endswith("?"):
                    tree.report("opener", path, line, f'begin with the subject, not with "{match[0][:40]}"')
            for match in (*ODD_WORDS.finditer(plain), *ODD_RATE.finditer(plain)):
                tree.report("odd-words", path, line, f'"{match[0]}" reads oddly; use plain words')


def sentences(paragraph):
    """(line number, words) of each sentence of a paragraph. The cells of a table's row are sentences of their own."""
    text, numbers = "", []
    for number, line in paragraph:
        text += line + " "
        numbers += [number] * (len(line) + 1)
    # A span of code is one word, a link is its text, and a comment of HTML is nothing.
    for pattern, plain in ((r"`[^`]*`", "`"), (r"<!--.*?-->", ""), (r"!?\[([^\]]*)\]\([^)]*\)", None), (r"https?://\S+", "x")):
        text = re.sub(pattern, lambda match: (match[1] if plain is None else plain).ljust(len(match[0]), "\0"), text)
    cells = re.finditer(r"(?:[^|\\]|\\.)+", text) if text.startswith("|") else [re.match(r".*", text)]
    for cell in cells:
        begin = cell.start()
        for end in [*(match.end() for match in SENTENCE_END.finditer(text, cell.start(), cell.end())), cell.end()]:
            yield numbers[begin], [word for word in text[begin:end].replace("\0", "").split() if re.search(r"[\w`]", word)]
            begin = end


def check_sentences(tree):
    """Sentences of documents for users: README.md and the pages of docs/ itself."""
    for path, text in tree.texts.items():
        if path != "README.md" and not re.fullmatch(r"docs/[^/]+\.md", path):
            continue
        for paragraph in paragraphs(document_lines(text)):
            for line, words in sentences(paragraph):
                if len(words) > SENTENCE_WORDS_MAX:
                    tree.report("sentence-length", path, line,
                                f'{len(words)} words; {SENTENCE_WORDS_MAX} are allowed, so split "{" ".join(words[:6])} ..."')


def document_width(text):
    """(line number, length) of lines that are too long, without tables and code."""
    is_code = False
    for number, line in enumerate(text.split("\n"), 1):
        is_code ^= line.lstrip().startswith("```")
        if len(line) > DOCUMENT_CHARACTERS_MAX and not is_code and not line.startswith(("|", "    ")):
            yield number, len(line)


def check_readme(tree):
    """The lines of code that README.md shows are lines of the example that a test compiles and runs."""
    text = tree.texts.get("README.md", "")
    match = re.search(r"```cpp\n(.*?)```", text, re.DOTALL)
    if not match:
        tree.report("readme-sample", "README.md", 1, "no ```cpp block")
    elif match[1] not in tree.texts.get(README_SAMPLE, ""):
        line = text[:match.start(1)].count("\n") + 1
        tree.report("readme-sample", "README.md", line, f"the sample is not in {README_SAMPLE}")


def check_facade_sample(tree):
    """The lines of code at the head of the facade are lines of the example, too."""
    if FACADE not in tree.texts:
        return
    lines = tree.texts[FACADE].split("#pragma once")[0].splitlines()
    code = [number for number, line in enumerate(lines) if line.startswith("//     ")]
    block = lines[code[0]:code[-1] + 1] if code else []
    sample = "\n".join(line.replace("//     ", "  ", 1) if line != "//" else "" for line in block) + "\n"
    if not block:
        tree.report("facade-sample", FACADE, 1, "no sample at the head, of lines that begin with // and five spaces")
    elif not re.search("^" + re.escape(sample), tree.texts.get(README_SAMPLE, ""), re.MULTILINE):
        tree.report("facade-sample", FACADE, code[0] + 1, f"the sample is not in {README_SAMPLE}")


CHECKS = [check_house, check_pure, check_unique_names, check_facade, check_facade_sample, check_cycles, check_lengths, check_headers, check_fmt, check_references, check_one_place,
          check_configs, check_named_files, check_words, check_english, check_literals, check_sentences, check_readme]


def violations_of(root):
    tree = Tree(root)
    for check in CHECKS:
        check(tree)
    return sorted(tree.violations)


HEADER = "// A header.\n#pragma once\n"
SAMPLE = "int main() {}\n"
FACADE_HEADER = HEADER.replace("#pragma", "//\n//     f();\n//\n//     g();\n#pragma")
CLEAN_HOUSE = ("| `base/include/sluice` | | public |\n| `base` | `base/include/sluice` | errors |\n| `io` | `base` | queues |\n| `engine/plan` | `base` | pure |\n"
               "| `engine/flow` | `engine/plan`, `io` | moves |\n| `tools` | `engine/flow` | the command |\n")
# Sentences of as many words as are allowed. A span of code, a link's address and an address count as one word, and blocks of code do not count.
WORDS = "a " * SENTENCE_WORDS_MAX
LONG_ENOUGH = ("He **said:** `a b c d` and [the\npage](docs/a.md) and https://a.b/c.d " + WORDS[18:] + "end.** torch (x):\n" + WORDS[4:]
               + f"\n\n- {WORDS}\n- item\n\n| {WORDS}| {WORDS}|\n\n```\n{WORDS}b\n```\n\n")
CLEAN_TREE = {
    "CMakeLists.txt": "project(sluice)\n",
    "README.md": f"```cpp\n{SAMPLE}```\n",
    "base/CMakeLists.txt": "sluice_add_library(base error.cc)\n",
    "base/include/sluice/ids.h": HEADER,
    "base/error.h": HEADER,
    "base/error.cc": '#include "base/error.h"\n\n#include <fmt/ranges.h>\n#include <hwloc.h>\n\nauto x = fmt::join(y, z);\n'
                     # Questions and quotations may open so in messages, too, and "a second time" is no rate.
                     'auto a = "What now? \\"Of course\\" waits for {} a second time; 5 MB per second";\nauto b = \'"\';\nauto c = R"(What)";  // "What else"\n',
    "io/queue.h": HEADER + '#include <sluice/ids.h>\n#include "base/error.h"\n',
    "engine/CMakeLists.txt": "sluice_add_library(engine\n  plan/a.cc\n  flow/b.cc)\n",
    "engine/plan/a.h": HEADER + '#include <sluice/ids.h>\n#include "base/error.h"\n',
    "engine/plan/a.cc": '#include "engine/plan/a.h"\n',
    # As many private functions as are allowed, and members that look like functions.
    "engine/plan/class.h": HEADER + "class A {\n public:\n  A() = default;\n  void shown() { g(); }\n\n private:\n"
                           + "".join(f"  [[nodiscard]] int f{i}(std::function<void()> a) const noexcept;\n" for i in range(PRIVATE_FUNCTIONS_MAX))
                           + "  struct B {\n    void inner();\n  };\n  A(const A&) = delete;\n  std::function<void(int)> a_;\n  int b_ = f(1);\n"
                           "  std::function<void()> c_ = [] { d(); };\n  std::function<int()> d_{};\n};\n",
    "engine/flow/b.h": HEADER + '#include <sluice/ids.h>\n' + '#include "engine/plan/a.h"\n#include "engine/plan/class.h"\n#include "io/queue.h"\n',
    "engine/flow/b.cc": '#include "engine/flow/b.h"\n' + "void f() {\n" + "  g();\n" * (FUNCTION_LINES_MAX - 2) + "}\n",
    "tools/CMakeLists.txt": "add_executable(sluice main.cc)\n",
    "tools/main.cc": '#include <sluice/ids.h>\n#include "base/error.h"\n#include "engine/flow/b.h"\n',
    "examples/sine/CMakeLists.txt": "add_executable(consumer main.cc)\n",
    "examples/sine/main.cc": SAMPLE + "void h() {\n  f();\n\n  g();\n}\n",
    "examples/other/CMakeLists.txt": "add_executable(other main.cc)\n",
    "examples/other/main.cc": SAMPLE,
    "configs/sluice.schema.json": '{"properties": {"run": {"properties": {"steps": {}}}}}',
    "configs/x.json": '// A comment.\n{"run": {"steps": 1}}\n',
    HOUSE: CLEAN_HOUSE,
    # Questions, headings, quotations and code may open so; tables and code may be wide.
        "docs/english.md": LONG_ENOUGH + "# What is new\n\nWhat now? Say `What else`.\n\n    What a sample prints for ever\n\n| "
                       + "x" * DOCUMENT_CHARACTERS_MAX + " |\n\n```\n" + "x" * (DOCUMENT_CHARACTERS_MAX + 1) + "\n```\n",
    "tools/words.py": '"""Words of a script.\n\nIt says "Of course".\n"""\n\nprint("Who goes there.")  # What if? Nothing.\n',
}
# The clean tree with a facade.
WITH_FACADE = {HOUSE: CLEAN_HOUSE.replace("| `tools` | ", "| `engine/include/sluice` | `base` | public |\n| `tools` | `engine/include/sluice`, "),
               FACADE: FACADE_HEADER, "tools/main.cc": '#include <sluice/engine.h>\n#include "engine/flow/b.h"\n'}
# (rule, path that is reported, files that are added to or replaced in the clean tree)
PLANTED = [
    ("house", "io/queue.h", {"io/queue.h": HEADER + '#include "engine/plan/a.h"\n'}),
    ("house", "base/error.h", {"base/error.h": HEADER + '#include "io/x.h"\n', "io/x.h": HEADER}),
    ("house", "engine/plan/a.cc", {"engine/plan/a.cc": '#include "engine/plan/a.h"\n\n#include "engine/flow/c.h"\n',
                                   "engine/flow/c.h": HEADER}),
    ("house", "engine/flow/b.cc", {"engine/flow/b.cc": '#include "tools/t.h"\n', "tools/t.h": HEADER}),
    ("house", "engine/new/c.cc", {"engine/new/c.cc": "", "engine/new/CMakeLists.txt": "add_library(c c.cc)\n"}),
    ("house", HOUSE, {HOUSE: CLEAN_HOUSE + "\n" * HOUSE_LINES_MAX}),
    ("house", HOUSE, {HOUSE: CLEAN_HOUSE + "| `gone` | `base` | nothing |\n"}),
    ("house", HOUSE, {HOUSE: CLEAN_HOUSE.replace("| `base` | queues", "| `tools` | queues").replace(
        "`engine/plan`, `io`", "`engine/plan`, `io`, `base`")}),
    ("public-header", "base/include/sluice/x.h", {"base/include/sluice/x.h": HEADER + "#include <fmt/format.h>\n",
                                                  "base/error.h": HEADER + "#include <sluice/x.h>\n"}),
    ("house", "base/include/sluice/x.h", {"base/include/sluice/x.h": HEADER + '#include "base/error.h"\n',
                                          "io/queue.h": HEADER + "#include <sluice/x.h>\n"}),
    ("vendor-header", "io/queue.h", {"io/queue.h": HEADER + '#include <liburing.h>\n#include "base/error.h"\n'}),
    ("vendor-header", "engine/plan/a.h", {"engine/plan/a.h": HEADER + '#include <tbb/task_arena.h>\n#include "base/error.h"\n'}),
    ("include-path", "tools/main.cc", {"tools/main.cc": '#include "engine/flow/b.h"\n#include "base/none.h"\n'}),
    ("include-cycle", "base/error.h", {"base/error.h": HEADER + '#include "base/x.h"\n',
                                       "base/x.h": HEADER + '#include "base/error.h"\n'}),
    ("facade", FACADE, WITH_FACADE | {FACADE: FACADE_HEADER + "#include <sluice/h1.h>\n#include <sluice/ids.h>\n"}
     | {f"base/include/sluice/h{i}.h": HEADER + f"#include <sluice/h{i + 1}.h>\n" for i in range(1, FACADE_HEADERS_MAX)}
     | {f"base/include/sluice/h{FACADE_HEADERS_MAX}.h": HEADER}),
    ("facade-sample", FACADE, WITH_FACADE | {FACADE: HEADER}),
    ("facade-sample", FACADE, WITH_FACADE | {FACADE: FACADE_HEADER.replace("g();", "g(1);")}),
    ("facade-sample", FACADE, WITH_FACADE | {FACADE: FACADE_HEADER.replace("//\n//     g", "//     g")}),
    ("pure", "engine/plan/a.cc", {"engine/plan/a.cc": '#include "engine/plan/a.h"\n\n#include <future>\n'}),
    ("pure", "engine/plan/a.h", {"engine/plan/a.h": HEADER + '#include <chrono>\n\n#include "base/error.h"\n'}),
    ("pure", "engine/plan/a.cc", {"engine/plan/a.cc": '#include "engine/plan/a.h"\n\n#include "base/at_once.h"\n', "base/at_once.h": HEADER}),
    ("unique-name", "io/error.h", {"io/error.h": HEADER, "io/queue.h": HEADER + '#include "base/error.h"\n#include "io/error.h"\n'}),
    ("unique-name", "tools/b.cc", {"tools/b.cc": "", "tools/CMakeLists.txt": "add_executable(sluice main.cc b.cc)\n"}),
    ("line-length", "tools/main.cc", {"tools/main.cc": '#include "engine/flow/b.h"\n//' + "x" * LINE_CHARACTERS_MAX + "\n"}),
    ("file-length", "tools/main.cc", {"tools/main.cc": '#include "engine/flow/b.h"\n' + "//\n" * FILE_LINES_MAX}),
    ("file-length", "io/part.inc", {"io/part.inc": "//\n" * (FILE_LINES_MAX + 1)}),
    ("function-length", "tools/main.cc", {"tools/main.cc": '#include "engine/flow/b.h"\nnamespace {\nvoid f(int x,\n       int y) {\n'
                                          + "  if (x) { g('}', \"{\"); }  // }\n" * (FUNCTION_LINES_MAX - 2) + "}\n}\n"}),
    ("constructor-arguments", "base/error.h", {"base/error.h": HEADER + "class A {\n  explicit A(int a, std::map<int, int> b, int c, int d,\n"
                                                               "    int e, int f, int i = h(1, 2));\n};\n"}),
    ("private-functions", "base/error.h", {"base/error.h": HEADER + "class A {\n public:\n  void shown();\n\n private:\n  struct B {\n    void inner();\n"
                                           "  };\n" + "".join(f"  int f{i}(int a) const;\n" for i in range(PRIVATE_FUNCTIONS_MAX - 1))
                                           + "  explicit A(int a) : a_(a), b_{a} {}\n  bool g() const { return h(); }\n  int a_;\n};\n"}),
    ("header-comment", "base/error.h", {"base/error.h": "\n#pragma once\n"}),
    ("header-guard", "base/error.h", {"base/error.h": "// A header.\n"}),
    ("using-namespace", "base/error.h", {"base/error.h": HEADER + "using namespace std;\n"}),
    ("own-header-first", "base/error.cc", {"base/error.cc": '#include <vector>\n#include "base/error.h"\n'}),
    ("fmt-join", "tools/main.cc", {"tools/main.cc": '#include <fmt/format.h>\n\n#include "engine/flow/b.h"\nauto x = fmt::join(y, ", ");\n'}),
    ("missing-source", "base/CMakeLists.txt", {"base/CMakeLists.txt": "sluice_add_library(base error.cc gone.cc)\n"}),
    ("unused-file", "base/lone.cc", {"base/lone.cc": ""}),
    ("unused-file", "base/lone.h", {"base/lone.h": HEADER}),
    ("unused-file", "cmake/Lone.cmake", {"cmake/Lone.cmake": ""}),
    ("one-place", "engine/flow/b.cc", {"engine/flow/b.cc": '#include "engine/flow/b.h"\nint x = plan_placement(1);\n'}),
    ("config", "configs/x.json", {"configs/x.json": '{"run": {"step": 1}}'}),
    ("config", "configs/x.json", {"configs/x.json": '{"run": {"steps": 1, "steps": 2}}'}),
    ("config", "configs/x.json", {"configs/x.json": '{"run": '}),
    ("named-file", "docs/english.md", {"docs/english.md": "Read `engine/flow/b.h` and `engine/flow/gone.cc`.\n"}),
    ("named-file", "base/error.h", {"base/error.h": "// A header; base/error.cc has the rest, base/gone.h nothing.\n#pragma once\n"}),
    ("word", "tools/main.cc", {"tools/main.cc": '#include "engine/flow/b.h"\n// TODO: later\n'}),
    ("opener", "base/error.h", {"base/error.h": "// What a caller sees.\n#pragma once\n"}),
    ("opener", "base/error.h", {"base/error.h": HEADER + "// A thing. Of\n// several, the first.\n"}),
    ("opener", "base/error.h", {"base/error.h": HEADER + "int x;  // Whose it is\n"}),
    ("opener", "tools/words.py", {"tools/words.py": '"""Words.\n\nWho waits\nruns it. Why?\n"""\n'}),
    ("opener", "tools/words.py", {"tools/words.py": "x = 1  # Of the last run.\n"}),
    ("opener", "docs/english.md", {"docs/english.md": "| key | Of the step. |\n"}),
    ("opener", "docs/english.md", {"docs/english.md": "- What is left stays.\n"}),
    ("opener", "docs/english.md", {"docs/english.md": "**It is so.** Of that, half.\n"}),
    ("odd-words", "base/error.h", {"base/error.h": HEADER + "// It waits for\n// ever.\n"}),
    ("odd-words", "docs/english.md", {"docs/english.md": "Nobody waits.\n"}),
    ("opener", "tools/main.cc", {"tools/main.cc": '#include "engine/flow/b.h"\nauto x = help("--a", "What it\\n"\n                      "does");\n'}),
    ("opener", "base/error.h", {"base/error.h": HEADER + 'auto x = f("It ends. Of all, one goes on.");\n'}),
    ("odd-words", "tools/main.cc", {"tools/main.cc": '#include "engine/flow/b.h"\nauto x = f("throttled to {} a "\n           "second\\n", 1\'000);\n'}),
    ("odd-words", "tools/main.cc", {"tools/main.cc": '#include "engine/flow/b.h"\nauto x = f("boundary, bytes a step: {}");\n'}),
    ("odd-words", "base/error.cc", {"base/error.cc": '#include "base/error.h"\nvoid f() { check(x, "nobody waits"); }\n'}),
    ("odd-words", "docs/english.md", {"docs/english.md": "It takes 12 bytes a parameter.\n"}),
        ("sentence-length", "docs/english.md", {"docs/english.md": "It has " + "a [long\nname](of a b c) `of two`, " * 6 + "e.g. this (the 28th).\n"}),
    ("sentence-length", "README.md", {"README.md": f"```cpp\n{SAMPLE}```\n\n| key | " + WORDS + "b | x |\n"}),
    ("sentence-length", "docs/english.md", {"docs/english.md": "- One.\n- Two, as\n  " + WORDS + "\n- Three.\n"}),
    ("document-width", "docs/english.md", {"docs/english.md": "x" * (DOCUMENT_CHARACTERS_MAX + 1) + "\n"}),
    ("readme-sample", "README.md", {"examples/sine/main.cc": "int main() { }\n"}),
    ("readme-sample", "README.md", {"README.md": "# Sluice\n"}),
]


def self_test():
    failures = 0
    for rule, path, files in [(None, None, {})] + PLANTED:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (CLEAN_TREE | files).items():
                target = pathlib.Path(folder, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            expected = {(path, rule)} if rule else set()
            found = {(violation[0], violation[2]) for violation in violations_of(folder)}
            if found != expected:
                failures += 1
                print(f"planted {sorted(files)}: expected {expected}, reported {found}")
    print(f"{len(PLANTED) + 1 - failures} of {len(PLANTED) + 1} trees were judged correctly")
    return failures + rows_self_test()


def rows_self_test():
    """For each row of this repository's own table: an include of each folder that the row does not stand on."""
    page = (pathlib.Path(__file__).resolve().parent.parent / HOUSE).read_text(encoding="utf-8")
    rows = house(page)
    failures = planted = 0
    for folder in rows:
        forbidden = [other for other in rows if other not in reachable(rows, folder)]
        with tempfile.TemporaryDirectory() as root:
            for name, text in {HOUSE: page, f"{folder}/own.h": HEADER + "".join(
                    f'#include "{other}/their.h"\n' for other in forbidden)}.items() | {
                        (f"{other}/their.h", HEADER) for other in forbidden}:
                target = pathlib.Path(root, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            tree = Tree(root)
            check_house(tree)
            reported = [line for path, line, _, _ in tree.violations if path == f"{folder}/own.h"]
            planted += len(forbidden)
            if len(reported) != len(forbidden):
                failures += 1
                print(f"{folder}: {len(forbidden)} includes are forbidden, {len(reported)} were reported")
    print(f"{planted} forbidden includes of {len(rows)} rows were planted")
    return failures


def main():
    if sys.argv[1:] == ["--self-test"]:
        return 1 if self_test() else 0
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    violations = violations_of(pathlib.Path(__file__).resolve().parent.parent)
    for path, line, rule, message in violations:
        print(f"{path}:{line}: [{rule}] {message}")
    print(f"{len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
