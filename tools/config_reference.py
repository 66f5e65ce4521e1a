#!/usr/bin/env python3
"""Writes docs/config_keys.md, the reference of every config key, from configs/sluice.schema.json, and
docs/deepspeed_keys.md, what becomes of every key of DeepSpeed, from tools/deepspeed/deepspeed_keys.json.

    tools/config_reference.py           writes the pages
    tools/config_reference.py --check   exits with 1 when a page differs from its table
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAD = """# Config keys

Every key of a config file, with its default and its range. `tools/config_reference.py` writes this page from
`configs/sluice.schema.json`, the table that the library itself checks files against.
[Configuration](configuration.md) explains how to use the keys; the [guide](guide.md) helps to choose.
"""

DEEPSPEED_HEAD = """# DeepSpeed's keys

Every key of DeepSpeed 0.19.8 that `sluice config import` knows, and what becomes of it.
`tools/config_reference.py` writes this page from `tools/deepspeed/deepspeed_keys.json`, the importer's own table.
[Coming from DeepSpeed](deepspeed.md) explains it; `sluice config explain KEY` prints a row.

| key | DeepSpeed's default | in Sluice | note |
|---|---|---|---|
"""


def leaves(prefix, schema):
    for name, value in schema.get("properties", {}).items():
        if "properties" in value:
            yield from leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
            if "items" in value and "properties" in value["items"]:
                yield from leaves(f"{prefix}{name}[].", value["items"])


def range_of(schema):
    """The values that a key takes, in words."""
    if "anyOf" in schema:
        return "; or ".join(range_of(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = "size" if schema.get("format") == "size" else schema["type"]
    if kind == "array":
        item = schema["items"]
        return "list of " + ("objects" if item["type"] == "object" else f"{item['type']}s")
    parts = [f"{word} {schema[key]:g}" if isinstance(schema[key], float) else f"{word} {schema[key]}"
             for key, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"),
                               ("exclusiveMaximum", "below")) if key in schema]
    return " ".join([kind] + parts)


def page(schema):
    lines = [HEAD]
    sections = {}
    for key, value in leaves("", schema):
        sections.setdefault(key.split(".")[0] if "." in key else "others", []).append((key, value))
    for section, keys in sections.items():
        lines.append(f"\n## {section}\n\n| key | values | default | meaning |\n|---|---|---|---|\n")
        for key, value in keys:
            default = f"`{json.dumps(value['default'])}`" if "default" in value else "chosen by Sluice"
            if not value.get("description"):
                sys.exit(f"configs/sluice.schema.json: {key} has no description")
            meaning = value["description"].replace("|", "\\|")
            lines.append(f"| `{key}` | {range_of(value)} | {default} | {meaning} |\n")
    return "".join(lines)


def fate(row):
    """Says what Sluice does with a key of DeepSpeed."""
    if row["class"] == "map":
        return ", ".join(f"`{key}`" for key in row["to"]) if row.get("to") else "a section"
    return {"derive": "not needed", "note": "not needed", "error": "refused: no key of DeepSpeed",
            "foreign": "ignored: no key of DeepSpeed", "alias": f"as `{row.get('is')}`",
            "refuse": {"always": "refused", "false": "refused where it is false"}.get(row.get("refuse"), "refused where it is on"),
            }[row["class"]]


def deepspeed_page(rows):
    lines = [DEEPSPEED_HEAD]
    for row in rows:
        default = f"`{json.dumps(row['default'])}`" if "default" in row else ""
        why = row["why"].replace("|", "\\|")
        if "auto" in row:
            why += ("; " if why else "") + f"auto: `{row['auto']}`"
        if "of" in row:
            why += ("; " if why else "") + "only for " + ", ".join(row["of"])
        lines.append(f"| `{row['key']}` | {default} | {fate(row)} | {why} |\n")
    return "".join(lines)


def main():
    def table(path):
        return json.loads((ROOT / path).read_text(encoding="utf-8"))

    pages = {"docs/config_keys.md": page(table("configs/sluice.schema.json")),
             "docs/deepspeed_keys.md": deepspeed_page(table("tools/deepspeed/deepspeed_keys.json"))}
    failures = 0
    for name, text in pages.items():
        target = ROOT / name
        if sys.argv[1:] != ["--check"]:
            target.write_text(text, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != text:
            print(f"{name} is not what its table says; run tools/config_reference.py")
            failures = 1
    return failures


if __name__ == "__main__":
    sys.exit(main())
