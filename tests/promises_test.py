#!/usr/bin/env python3
"""Every promise of a public header has a test that names it.

    tests/promises_test.py               checks tests/promises.json against headers and tests; exits with 1 where they differ
    tests/promises_test.py --list        prints each promise with its tests
    tests/promises_test.py --reword      takes headers' new words into the table where a promise says the same in other words, and
                                         prints each clause before and after, to be read: a new promise needs a test, not a row
    tests/promises_test.py --self-test   breaks each side of a small tree and expects a complaint

A promise is a sentence of a header's comments that says what a call fails with, requires, throws or refuses. The table has, for each
header and each function below such a comment, the promise cut into clauses, and for each clause the tests that were read to see to it:
"Suite.Name" of GoogleTest, or "file.py:name" of a method or function. Headers that are not public are checked where the table has them.

The page of results about reliability names the tests of what it says in the same way; they have to exist, too.

Complaints: a promise whose words no clause covers, a clause that the header does not have (any more), a test that does not exist, and a
clause that speaks of an error code whose tests' files never speak of that code. And a comment of a public header that names a header which
is not installed, so that a reader of the package cannot look there.
"""

import argparse
import difflib
import json
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = "tests/promises.json"
PAGE = "docs/results/reliability.md"
CODES = "Internal|InvalidArgument|Config|Input|Io|Damaged|Timeout|NoSpace|OutOfMemory|Unsupported|NonFinite|Ranks|Poisoned"
CODE = re.compile(rf"\bk({CODES})\b")
C_CODE = re.compile(r"\bSLUICE_(INVALID_ARGUMENT|FORKED|CALLBACK)\b")
# Begins an item of a list, which promises what the line before it says.
ITEM = "\N{BULLET}"
PROMISE = re.compile(
    rf"\b[Ff]ails?\b[^;.]{{0,20}}\bwith\b|\bRequires:|\b[Tt]hrows?\b|\brethr[eo]wn?s?\b|\brefused?s?\b|{CODE.pattern}|{C_CODE.pattern}"
    r"|\bThe message (names|has|lists)\b|[Nn]othing is left behind|\bnothing has changed\b|\b(engine is poisoned|state is unchanged)\b"
    r"|\bNot while\b|\b[Mm]ust not\b|\bhas to have\b|\bOnce, |\bcannot be set\b")
# Words that may stand between clauses.
GLUE = re.compile(r"\b(Fails|further|with|Requires|and|or|for|when|where|while|in|if)\b|[\s,;:.()]+")
# A header of the source tree, as comments name it.
INNER = re.compile(r"^[^#\n]*?//.*?\b((?:base|capi|cpu_optim|engine|gpu|io|tools)/[\w/]+\.h)\b", re.M)
TEST = re.compile(r"\b(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\s*\)")


def sentences(text):
    return re.split(rf"(?<=[.:])\s+(?=[A-Z`{ITEM}])", text)


def promises(header):
    """{name of what the comment is of: the promising sentences}. Comments that no declaration follows are of "the header"."""
    found = {}
    block = []
    for line in [*header.splitlines(), ""]:
        comment = re.match(r"\s*//(.*)$", line)
        if comment:
            block.append(re.sub(r"^- ", f"{ITEM} ", comment.group(1).strip()))
            continue
        if not block or line.strip().startswith("template"):
            continue
        text = re.sub(r"\s+", " ", " ".join(block)).strip()
        block = []
        said = " ".join(sentence for sentence in promising(rejoined(sentences(text))))
        if said:
            name = name_of(line)
            found[name] = f"{found[name]} {said}" if name in found else said
    return found


def promising(parts):
    """The sentences that promise something, and the items of a list that such a sentence begins."""
    begins_list = False
    for part in parts:
        is_item = part.startswith(ITEM)
        begins_list = begins_list if is_item else bool(PROMISE.search(part)) or begins_list and part.startswith("The message")
        if PROMISE.search(part) or is_item and begins_list:
            yield part.replace(f"{ITEM} ", "")


def rejoined(parts):
    """Sentences again, where "Fails with:" has been cut off from what follows. The items of a list stay apart."""
    whole = []
    for part in parts:
        if whole and whole[-1].endswith(":"):
            whole[-1] += " " + part
        else:
            whole.append(part)
    return whole


def name_of(line):
    """Returns the name that a declaration declares."""
    if line.startswith("#"):
        return "the header"
    kind = re.match(r"\s*(?:class|struct|enum class|enum)\s+(?:SLUICE_EXPORT\s+)?(\w+)", line)
    if kind:
        return kind.group(1)
    function = re.search(r"([~\w]+)\)?\(", line.replace("(*", ""))
    return function.group(1) if function else line.strip() or "the header"


class Tests:
    """The tests of a tree, by name, and the text of their files."""

    def __init__(self, root):
        self.files = {}
        self.texts = {}
        for path in sorted([*root.glob("tests/**/*.cc"), *root.glob("tests/**/*.h"), *root.glob("tests/**/*.py")]):
            text = path.read_text(encoding="utf-8")
            self.texts[path] = text
            if path.suffix == ".py":
                for name in re.findall(r"^\s*def (\w+)\(", text, re.M):
                    self.files.setdefault(f"{path.name}:{name}", []).append(path)
            else:
                for suite, name in TEST.findall(text):
                    self.files.setdefault(f"{suite}.{name}", []).append(path)

    def speaks_of(self, name, word):
        return any(word in self.texts[path] for path in self.files.get(name, []))


def complaints_of(header, name, text, clauses, tests):
    """Returns the faults of one promise."""
    where = f"{header}: {name}"
    rest = text
    for clause, named in sorted(clauses.items(), key=lambda item: -len(item[0])):
        at = text.find(clause)
        if at < 0:
            yield f"{where}: the header does not say \"{clause}\" (any more)"
            continue
        rest = rest.replace(clause, "|", 1)
        if not named:
            yield f"{where}: \"{clause}\" has no test"
        for test in named:
            if test not in tests.files:
                yield f"{where}: \"{clause}\" names the test {test}, which does not exist"
        codes = CODE.findall(clause) or CODE.findall(re.split(r"[;.] ", text[:at])[-1])[-1:]
        for code in codes if named else []:
            if not any(tests.speaks_of(test, word) for test in named for word in spellings(code)):
                yield f"{where}: \"{clause}\" is k{code}, of which no file of its tests speaks: {', '.join(named)}"
    left = GLUE.sub(" ", rest.replace("|", " ")).strip()
    if left:
        yield f"{where}: no test is named for \"{left}\" of \"{text}\""


def spellings(code):
    """In C++, in C, and in the command's output."""
    words = re.findall(r"[A-Z][a-z]+", code)
    return f"::k{code}", f"SLUICE_{'_'.join(words).upper()}", " ".join(words).lower()


def complaints(root):
    table = json.loads((root / TABLE).read_text(encoding="utf-8"))
    tests = Tests(root)
    public = [path.relative_to(root).as_posix() for path in sorted(root.glob("*/include/sluice/*.h"))]
    headers = [*public, *(path.relative_to(root).as_posix() for path in sorted(root.glob("capi/sluice*.h")))]
    for header in headers:
        for inner in INNER.findall((root / header).read_text(encoding="utf-8")):
            yield f"{header}: a comment names {inner}, which is not installed"
    for header in dict.fromkeys([*headers, *table]):
        if not (root / header).exists():
            yield f"{header}: it is in {TABLE}, but there is no such header"
            continue
        said = promises((root / header).read_text(encoding="utf-8"))
        known = table.get(header, {})
        for name, text in said.items():
            yield from complaints_of(header, name, text, known.get(name, {}), tests)
        for name in known.keys() - said.keys():
            yield f"{header}: {name}: it is in {TABLE}, but promises nothing"
    if (root / PAGE).exists():
        for test in re.findall(r"`([A-Z]\w*\.[A-Z]\w*|\w+\.py:\w+)`", (root / PAGE).read_text(encoding="utf-8")):
            if test not in tests.files:
                yield f"{PAGE}: names the test {test}, which does not exist"


def reworded(text, clauses):
    """The clauses as `text` has them now: {clause before: clause now}. Words that both have decide where a clause lies."""
    before = [(word, number) for number, clause in enumerate(clauses) for word in clause.split()]
    words = list(re.finditer(r"\S+", text))
    owners = [None] * len(words)
    plain = lambda word: word.strip(",;:.()").lower()
    matcher = difflib.SequenceMatcher(None, [plain(word) for word, _ in before], [plain(word.group()) for word in words], autojunk=False)
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            owners[block.b + i] = before[block.a + i][1]
    known = [i for i, owner in enumerate(owners) if owner is not None]
    for left, right in zip([None, *known], [*known, None]):
        gap = range(0 if left is None else left + 1, len(words) if right is None else right)
        # Behind the last end of a part in the gap, or of the word before it, the next clause begins.
        ends = [i for i in gap if words[i].group()[-1] in ",;:." or words[i].group() in ("and", "or")]
        cut = gap.start if left is not None and words[left].group()[-1] in ",;:." else ends[-1] + 1 if ends else gap.stop
        for i in gap:
            owners[i] = owners[left] if left is not None and (i < cut or right is None) else None if right is None else owners[right]
    spans = {}
    for word, owner in zip(words, owners):
        if owner is not None and not (owner not in spans and GLUE.fullmatch(word.group())):
            spans[owner] = (spans.get(owner, (word.start(), 0))[0], word.end())
    edge = r"(Fails|further|with|Requires|and|or)"
    trimmed = {number: re.sub(rf"^({edge}\b[: ]+)+|([,;:. ]+{edge}?\b)*[,;:. ]*$", "", text[slice(*span)]) for number, span in spans.items()}
    return {clause: trimmed[number] for number, clause in enumerate(clauses) if trimmed.get(number)}


def reword(root):
    path = root / TABLE
    table = json.loads(path.read_text(encoding="utf-8"))
    for header, functions in table.items():
        said = promises((root / header).read_text(encoding="utf-8"))
        for name, clauses in functions.items():
            if name not in said or not any(complaints_of(header, name, said[name], clauses, Tests(root))):
                continue
            now = reworded(said[name], clauses)
            for clause in clauses:
                if now.get(clause) != clause:
                    print(f"{header}: {name}:\n  - {clause}\n  + {now.get(clause, '(gone)')}")
            functions[name] = {now[clause]: named for clause, named in clauses.items() if clause in now}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def listing(root):
    for header, functions in json.loads((root / TABLE).read_text(encoding="utf-8")).items():
        for name, clauses in functions.items():
            for clause, named in clauses.items():
                print(f"{header}: {name}: {clause}: {', '.join(named)}")


def self_test():
    """The tree is in order, and one change to each side of it is a complaint."""
    header = "// A thing.\n// Fails with: kInput when it is missing, or kIo\n// when the drive fails.\nvoid open();\n"
    test = "TEST(Open, Fails) { ErrorCode::kInput; ErrorCode::kIo; }\n"
    table = {"x/include/sluice/x.h": {"open": {"kInput when it is missing": ["Open.Fails"], "kIo when the drive fails": ["Open.Fails"]}}}
    short = {"x/include/sluice/x.h": {"open": {"kInput when it is missing": ["Open.Fails"]}}}
    cases = [
        (header, test, table, None),
        (header, test, short, "no test is named for"),
        (header.replace("missing", "gone"), test, table, "does not say"),
        (header + "// Requires: it is open.\nvoid read();\n", test, table, "no test is named for \"it is open\""),
        (header.replace("kInput when it is missing, or kIo\n// when", "\n// - kInput when it is missing.\n// - kIo when"), test, table, None),
        (header.replace(", or kIo\n// when the drive fails.", ".\n// - The drive's own errors."), test, short, "no test is named for"),
        (header.replace("Fails with: kInput when it is missing, or kIo\n// when", "There are:\n// - fast drives.\n// Fails with: kInput when it is missing.\n// - kIo when"), test, table, None),
        (header, test.replace("Fails", "Works"), table, "does not exist"),
        (header, test.replace("ErrorCode::kIo", ""), table, "is kIo, of which no file"),
        ("// Fine.\nvoid open();\n", test, table, "promises nothing"),
        (header + "#include \"engine/x.h\"\n// sluice/x.h has more.\n", test, table, None),
        (header + "int y;  // see engine/plan/x.h\n", test, table, "names engine/plan/x.h"),
    ]
    pages = {number: "" for number in range(len(cases))}
    for page, expected in (("`Open.Fails`, `x.py:y z`", None), ("`Open.Works`", "does not exist"), ("`x_cases.py:test_y`", "does not exist")):
        pages[len(cases)] = page
        cases.append((header, test, table, expected))
    for number, (of_header, of_test, of_table, expected) in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {"x/include/sluice/x.h": of_header, "tests/x_test.cc": of_test, TABLE: json.dumps(of_table), PAGE: pages[number]}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            found = list(complaints(root))
            if bool(found) != bool(expected) or (expected and not any(expected in line for line in found)):
                print(f"self-test {number}: expected {expected}, found {found}")
                return 1
    print(f"{len(cases)} cases")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the promises and their tests")
    parser.add_argument("--reword", action="store_true", help="take headers' new words into the table")
    parser.add_argument("--self-test", action="store_true", help="check the script itself")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    if options.reword:
        reword(ROOT)
        return 0
    if options.list:
        listing(ROOT)
        return 0
    found = list(complaints(ROOT))
    print("\n".join(found) or "every promise has a test")
    if any("(any more)" in line for line in found):
        print("where a header only says the same in other words: tests/promises_test.py --reword, and read what it prints")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
