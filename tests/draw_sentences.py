#!/usr/bin/env python3
"""Draws sentences of header comments at random, for readers to judge.

    tests/draw_sentences.py COUNT [REVISION]

Prints COUNT sentences of at least six words, one per line, from the comments of all headers at REVISION (default: HEAD). The
full hash of the revision is the seed, so the choice of sentences is not ours, and the same ones can be drawn again.
"""

import random
import re
import subprocess
import sys


def git(*arguments):
    return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout


def paragraphs(text):
    """The comments of a file, each as one line. An empty comment line ends a paragraph. An item of a list is a paragraph, behind the words
    that begin the list ("Fails with: kIo: ..."), because an item is never read without them.
    """
    lines, head = [], ""
    for line in [*text.splitlines(), ""]:
        match = re.match(r"\s*// ?( *)(- )?(.*)", line)
        is_comment = bool(match and match[3].strip())
        is_after_list = bool(head) and is_comment and not match[1] and not match[2]
        if lines and (not is_comment or match[2] or is_after_list):
            yield " ".join(lines)
            if is_comment and match[2] and not head:
                head = re.split(r"(?<=[.?!])\s+", " ".join(lines))[-1]
                head = head + " " if head.endswith(":") else ""
            lines = []
        if not is_comment or is_after_list:
            head = ""
        if is_comment:
            lines.append((head if match[2] else "") + match[3].strip())


def sentences(text):
    for paragraph in paragraphs(text):
        for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z`\"(])", paragraph):
            if len(sentence.split()) >= 6:
                yield sentence


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    revision = git("rev-parse", sys.argv[2] if len(sys.argv) == 3 else "HEAD").strip()
    headers = [path for path in git("ls-tree", "-r", "--name-only", revision).splitlines() if path.endswith(".h")]
    found = sorted({sentence for path in headers for sentence in sentences(git("show", f"{revision}:{path}"))})
    print("\n".join(random.Random(revision).sample(found, int(sys.argv[1]))))


if __name__ == "__main__":
    main()
