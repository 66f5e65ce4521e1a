#!/usr/bin/env python3
"""Writes docs/config_keys.md, the reference of every config key, from configs/sluice.schema.json.

    tools/config_reference.py           writes the page
    tools/config_reference.py --check   exits with 1 when the page differs from the schema
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


def leaves(prefix, schema):
    for name, value in schema.get("properties", {}).items():
        if "properties" in value:
            yield from leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
            if "items" in value and "properties" in value["items"]:
                yield from leaves(f"{prefix}{name}[].", value["items"])


def range_of(schema):
    """What values a key takes, in words."""
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


def main():
    text = page(json.loads((ROOT / "configs/sluice.schema.json").read_text(encoding="utf-8")))
    target = ROOT / "docs/config_keys.md"
    if sys.argv[1:] == ["--check"]:
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            print("docs/config_keys.md is not what the schema says; run tools/config_reference.py")
            return 1
        return 0
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
