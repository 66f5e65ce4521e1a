#!/usr/bin/env python3
"""Writes tools/gpt/text/unicode_ranges.cc: the letters, numbers and spaces of Unicode, for the pre-tokenizer of GPT-2.

    tools/unicode_classes.py [--check]

The Unicode version is that of the Python that runs this: the committed table has 14.0, as the `tokenizers` package has
(Oniguruma 6.9.8). --check compares and writes nothing. With a Python of another version, it exits with 77.
"""

import pathlib
import sys
import unicodedata

TABLE = pathlib.Path(__file__).parent / "gpt" / "text" / "unicode_ranges.cc"
VERSION = "14.0.0"
# The property White_Space, which unicodedata does not have: str.isspace() also takes U+001C to U+001F.
SPACES = {*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def class_of(code):
    if code in SPACES:
        return "kSpace"
    return {"L": "kLetter", "N": "kNumber"}.get(unicodedata.category(chr(code))[0])


def ranges_of(wanted):
    ranges, begin = [], None
    for code in range(0x110001):
        is_in = code < 0x110000 and class_of(code) == wanted
        if is_in and begin is None:
            begin = code
        elif not is_in and begin is not None:
            ranges.append((begin, code - 1))
            begin = None
    return ranges


def array(name, ranges):
    lines, line = [], "   "
    for begin, end in ranges:
        item = f" {{{begin:#x}, {end:#x}}},"
        if len(line) + len(item) > 100:
            lines.append(line)
            line = "   "
        line += item
    return f"constexpr CodeRange {name}[] = {{\n" + "\n".join([*lines, line]) + "\n};\n"


def table():
    return (f"// Made by tools/unicode_classes.py from Unicode {VERSION}. Sorted; both ends belong to a range.\n"
            '#include "tools/gpt/text/unicode_ranges.h"\n\n'
            "namespace sluice {\nnamespace {\n\n// clang-format off\n"
            + array("kLetters", ranges_of("kLetter")) + "\n" + array("kNumbers", ranges_of("kNumber")) + "\n"
            + array("kSpaces", ranges_of("kSpace")) +
            "// clang-format on\n\n}  // namespace\n\n"
            "std::span<const CodeRange> letter_ranges() {\n  return kLetters;\n}\n\n"
            "std::span<const CodeRange> number_ranges() {\n  return kNumbers;\n}\n\n"
            "std::span<const CodeRange> space_ranges() {\n  return kSpaces;\n}\n\n"
            "}  // namespace sluice\n")


def main():
    if unicodedata.unidata_version != VERSION:
        print(f"this Python has Unicode {unicodedata.unidata_version}; the table has {VERSION}")
        return 77
    if sys.argv[1:] == ["--check"]:
        return 0 if TABLE.read_text(encoding="utf-8") == table() else f"{TABLE} is not what this script writes"
    TABLE.write_text(table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
