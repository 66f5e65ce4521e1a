"""Makes a page of a public header: each declaration with the comment above it."""

import re

OPENING = re.compile(r"^(template.*>\s*)?(class|struct|enum class|enum|union)\s+(\w+)")
FUNCTION = re.compile(r"([~\w]+)\s*\(")


def chunks(lines):
    """The declarations at the level of the namespace, each as (comment lines, code lines)."""
    comment, code, depth = [], [], 0
    for line in lines:
        if not code and line.startswith("//"):
            comment.append(line[2:].removeprefix(" "))
            continue
        if not code and not line.strip():
            comment = []
            continue
        code.append(line)
        bare = re.sub(r"//.*|\"(\\.|[^\"])*\"", "", line)
        depth += sum(bare.count(c) for c in "{(") - sum(bare.count(c) for c in "})")
        if depth == 0 and (bare.rstrip().endswith((";", "}"))):
            yield comment, code
            comment, code = [], []


def name_of(code):
    text = " ".join(code)
    opening = OPENING.match(text)
    if opening:
        return opening.group(3)
    using = re.match(r"using (\w+)", text)
    if using:
        return using.group(1)
    function = FUNCTION.search(re.sub(r"^template\s*<[^>]*>\s*|^explicit\s+|\[\[\w+(\(.*?\))?\]\]", "", text))
    if function:
        return function.group(1)
    variable = re.search(r"(\w+)\s*(=|\{|;)", text)
    return variable.group(1) if variable else None


def public(code):
    """A class without its private part."""
    kept, is_private = [], False
    for line in code:
        if line.strip() in ("private:", "public:", "protected:"):
            is_private = line.strip() != "public:"
            if is_private:
                continue
        if not is_private or line.startswith("}"):
            kept.append(line)
    while len(kept) > 1 and not kept[-2].strip():
        del kept[-2]
    return kept


def is_forward(code):
    return len(code) == 1 and re.match(r"^(class|struct|enum class) \w+;$", code[0])


def page(path):
    """The page's Markdown. `path` is a header below a folder include/."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = []
    while lines and lines[0].startswith("//"):
        head.append(lines.pop(0)[2:].removeprefix(" "))
    include = path.as_posix().split("/include/")[1]
    text = [f"# &lt;{include}&gt;", "", "\n".join(head), "", f"```cpp\n#include <{include}>\n```", ""]
    inside = False
    body = []
    for line in lines:
        if re.match(r"^namespace sluice\b.*\{$", line):
            inside = True
        elif re.match(r"^\}\s*// namespace sluice", line):
            inside = False
        elif inside:
            body.append(line)
    if not body:  # macros alone
        text += ["## Macros", "", "```cpp", *[line for line in lines if line.strip() and line != "#pragma once"], "```", ""]
    last = None
    for comment, code in chunks(body):
        name = name_of(code)
        if is_forward(code) or name is None:
            continue
        if name != last:
            text += [f"## {name}", ""]
        last = name
        text += ["\n".join(comment), "", "```cpp", *public(code), "```", ""]
    return "\n".join(text) + "\n"
