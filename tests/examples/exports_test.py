"""usage: exports_test.py LIBSLUICE_CXX.SO SOURCE: the library shows the functions and classes that public headers mark with
SLUICE_EXPORT, each of them, and nothing else of the project; and each function of public headers is marked."""
import pathlib
import re
import subprocess
import sys


NOT_LINKED = "inline|constexpr|template|using|namespace|class|struct|enum|extern|friend|SLUICE_EXPORT|#|}|" + re.escape("[[noreturn]] SLUICE_EXPORT")


def not_marked(text):
    """The functions outside of classes that `text`, without comments, declares without the mark: no program could link them."""
    text = re.sub(r"#.*", "", text)
    return sorted(match[1] for match in re.finditer(rf"^(?!{NOT_LINKED})[A-Za-z_\[][^;{{}}()]*?\b(\w+)\([^;{{}}]*\)[^;{{}}]*;", text, re.MULTILINE))


def main() -> int:
    library, source = sys.argv[1:]
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(pathlib.Path(source).glob("*/include/sluice/*.h")))
    text = re.sub(r"//.*|#define.*", "", text)
    marked = set(re.findall(r"(?:class|struct) SLUICE_EXPORT (\w+)", text))
    marked |= set(re.findall(r"^(?:\[\[noreturn\]\] )?SLUICE_EXPORT [^;{(]*?(\w+)\(", text, re.MULTILINE))
    lines = subprocess.run(["nm", "-D", "--demangle", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    shown, foreign = set(), []
    for line in lines.splitlines():
        _, kind, name = line.split(maxsplit=2)
        found = re.match(r"(?:(?:vtable|typeinfo|typeinfo name) for )?sluice::(\w+)", re.sub(r"\[abi:\w+\]", "", name))
        if found:
            shown.add(found.group(1))
        elif kind not in "WVuw":  # templates of the standard library have weak copies in every library
            foreign.append(name)
    surplus, absent, forgotten = sorted(shown - marked), sorted(marked - shown), not_marked(text)
    print(f"{len(marked)} names are marked; shown, but not marked: {surplus}; marked, but not shown: {absent}; foreign: {foreign[:20]}; "
          f"public, but not marked: {forgotten}")
    return 1 if surplus or absent or foreign or forgotten or not marked else 0


if __name__ == "__main__":
    sys.exit(main())
