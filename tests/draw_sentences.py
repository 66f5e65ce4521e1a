#!/usr/bin/env python3
"""Draws sentences of header comments at random, for readers to judge.

    tests/draw_sentences.py COUNT [REVISION] [--alone]
    tests/draw_sentences.py --self-test

Prints COUNT sentences of at least six words from the comments of all headers at REVISION (default: HEAD). The full hash of the revision
is the seed, so the choice of sentences is not ours, and the same ones can be drawn again. Each sentence is shown as a reader of the
header meets it: its file and line, the class around it, the sentences before it in the same comment, and the declaration under the
comment. --alone prints the sentences only, one per line.
"""

import random
import re
import subprocess
import sys
import textwrap

DECLARATION_LINES_MAX = 6
COMMENT = re.compile(r"\s*// ?( *)(- )?(.*)")


def git(*arguments):
    return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout


def paragraphs(text):
    """The comments of a file: pairs of a text in one line and the numbers of its lines. An empty comment line ends a paragraph. An item of
    a list is a paragraph, behind the words that begin the list ("Fails with: kIo: ..."), because an item is never read without them. Lines
    that are indented and belong to no item are samples of code or tables, which have no sentences; they end a paragraph, too.
    """
    words, numbers, head, is_item = [], [], "", False
    for number, line in enumerate([*text.splitlines(), ""]):
        match = COMMENT.match(line)
        is_comment = bool(match and match[3].strip())
        is_item = is_comment and bool(match[2] or is_item and match[1])
        is_comment = is_comment and (is_item or not match[1])
        is_after_list = bool(head) and is_comment and not match[1] and not match[2]
        if words and (not is_comment or match[2] or is_after_list):
            yield " ".join(words), numbers
            if is_comment and match[2] and not head:
                head = re.split(r"(?<=[.?!])\s+", " ".join(words))[-1]
                head = head + " " if head.endswith(":") else ""
            words, numbers = [], []
        if not is_comment or is_after_list:
            head = ""
        if is_comment:
            words.append((head if match[2] else "") + match[3].strip())
            numbers.append(number)


def sentences(text):
    """Triples: a sentence of at least six words, the sentences before it in its paragraph, and the lines that the paragraph stands on."""
    for paragraph, numbers in paragraphs(text):
        before = []
        for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z`\"(])", paragraph):
            if len(sentence.split()) >= 6:
                yield sentence, " ".join(before), numbers
            before.append(sentence)


def is_comment(line):
    return line.lstrip().startswith("//")


def declaration(lines, number):
    """The lines under the comment that has line `number` up to the end of the first declaration."""
    while number < len(lines) and is_comment(lines[number]):
        number += 1
    found = []
    for line in lines[number:number + DECLARATION_LINES_MAX]:
        if not line.strip() or line.startswith("#") or is_comment(line):
            break
        found.append(line.split("  //")[0])
        if re.search(r"[;{}]\s*$", found[-1]):
            break
    return textwrap.dedent("\n".join(found))


def owner(lines, number):
    """The first line of the class, struct or enum around the line, or ""."""
    indent = len(lines[number]) - len(lines[number].lstrip())
    for line in reversed(lines[:number]):
        deeper = len(line) - len(line.lstrip())
        if line.strip() and not line.startswith("#") and deeper < indent and not re.match(r"\s*(?:public|private|protected):", line):
            return line.strip().rstrip("{ ") if re.match(r"\s*(?:template.*)?(?:class|struct|union|enum)\b", line) else ""
    return ""


def shown(path, lines, sentence, before, numbers):
    around = owner(lines, numbers[0])
    rows = [f"{path}:{numbers[0] + 1}" + (f", in {around}" if around else "")]
    earlier = numbers[0] - 1  # paragraphs above, in the same comment
    above = []
    while earlier >= 0 and is_comment(lines[earlier]):
        above.insert(0, lines[earlier].strip().lstrip("/").strip())
        earlier -= 1
    before = " ".join(filter(None, (*above, before)))
    rows += [f"    before:    {before}"] * bool(before)
    rows.append(f"    sentence:  {sentence}")
    under = [f"    {'under it:' if i == 0 else '':<11}{line}" for i, line in enumerate(declaration(lines, numbers[0]).splitlines())]
    rows += under or ["    (the head of the file)"]
    return "\n".join(rows)


def draw(revision, count, is_alone):
    headers = [path for path in git("ls-tree", "-r", "--name-only", revision).splitlines() if path.endswith(".h")]
    found = {}
    for path in headers:
        text = git("show", f"{revision}:{path}")
        for sentence, before, numbers in sentences(text):
            found.setdefault(sentence, (path, text.splitlines(), sentence, before, numbers))
    drawn = random.Random(revision).sample(sorted(found), count)
    return [sentence if is_alone else shown(*found[sentence]) for sentence in drawn]


SAMPLE = """// The head of the file has this sentence.
//   int sample = of_code(1 + 1, 2 + 2);  // which is no sentence
#pragma once

// The first sentence says what it is. The second sentence says rather more.
//
// Fails with:
// - kIo: the drive reports an error, and the call
//   ends at once.
class Sample {
 public:
  // Gives the number of elements per row.
  int count(int row,
            int column);

  int bare;
};
"""


def self_test():
    lines = SAMPLE.splitlines()
    found = {sentence: shown("a.h", lines, sentence, before, numbers) for sentence, before, numbers in sentences(SAMPLE)}
    assert list(found) == ["The head of the file has this sentence.", "The first sentence says what it is.",
                           "The second sentence says rather more.", "Fails with: kIo: the drive reports an error, and the call ends at once.",
                           "Gives the number of elements per row."], list(found)
    assert "(the head of the file)" in found["The head of the file has this sentence."]
    second = found["The second sentence says rather more."]
    assert "a.h:5\n" in second and "before:    The first sentence says what it is.\n" in second and "class Sample {" in second, second
    assert "before:    The first sentence" in found["Fails with: kIo: the drive reports an error, and the call ends at once."]
    member = found["Gives the number of elements per row."]
    assert "in class Sample\n" in member and "int column);" in member and "bare" not in member and "before:" not in member, member
    print("the drawing of sentences: 5 sentences, each with its place")


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--alone"]
    if arguments == ["--self-test"]:
        self_test()
        return
    if len(arguments) not in (1, 2) or not arguments[0].isdigit():
        sys.exit(__doc__)
    revision = git("rev-parse", arguments[1] if len(arguments) == 2 else "HEAD").strip()
    is_alone = "--alone" in sys.argv
    drawn = draw(revision, int(arguments[0]), is_alone)
    print("\n".join(drawn) if is_alone else "\n\n".join(f"{i}. {text}" for i, text in enumerate(drawn, 1)))


if __name__ == "__main__":
    main()
