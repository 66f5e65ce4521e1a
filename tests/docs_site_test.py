#!/usr/bin/env python3
"""The documentation's site.

    tests/docs_site_test.py            every link of the documents leads to a file; the parts of docs/site do what they say
    tests/docs_site_test.py --build    builds the site with docs/build.sh, and draws plots from changed numbers; exits with 77
                                       where the package index cannot be reached
"""

import ast
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SITE = ROOT / "docs/site"
SKIPPED = 77
sys.path.insert(0, str(SITE))
sys.dont_write_bytecode = True

import header_reference  # noqa: E402
import result_plots  # noqa: E402
import stage_pages  # noqa: E402

HEADER = """// The purpose.
#pragma once

#include <cstddef>

namespace sluice {

class Other;

// Holds one value.
class Holder {
 public:
  // The value.
  int value() const;

 private:
  int value_ = 0;
};

// Doubles.
// Fails with: kInvalidArgument when negative.
int doubled(int value);
inline int doubled(long value) {
  return static_cast<int>(value * 2);
}

}  // namespace sluice
"""

TABLES = """# Page

## Rates

| pattern | rate, GB/s |
|---|---|
| read | 1.5 [1.0, 2.0] |
| | **2,000** (4 MiB) |
| write | |
"""


class Links(unittest.TestCase):
    def test_all_documents(self):
        self.assertEqual(stage_pages.check(), False)

    def changed(self, text):
        errors, copies = [], {}
        found = stage_pages.with_links(text, "docs/guide.md", "guide.md", stage_pages.documents(), errors, copies)
        return found, errors, sorted(copies)

    def test_lead_to_places_of_the_site(self):
        text = ("[a](design/ranks.md#b) [c](../README.md) [a link\nover lines](../engine/include/sluice/step.h)\n"
                "[d](https://example.org) [e](#here) [f](../LICENSE) [g](results/)\n```\n[h](no.md)\n```\n")
        self.assertEqual(self.changed(text), (
            "[a](design/ranks.md#b) [c](index.md) [a link\nover lines](reference/cpp/step.md)\n"
            "[d](https://example.org) [e](#here) [f](files/LICENSE.txt) [g](results/index.md)\n```\n[h](no.md)\n```\n",
            [], ["files/LICENSE.txt"]))

    def test_that_lead_nowhere_are_named_with_their_line(self):
        self.assertEqual(self.changed("text\n\n[a](no.md)\n[b](../../outside.md)\n")[1],
                         ["docs/guide.md:3: the link (no.md) leads to no file",
                          "docs/guide.md:4: the link (../../outside.md) leads to no file"])

    def test_lists_and_tables_get_an_empty_line_above(self):
        self.assertEqual(stage_pages.with_blank_lines("text\n- a\n  b\n- c\ntext:\n| d |\n|---|\n```\nx\n- y\n```\n"),
                         "text\n\n- a\n  b\n- c\ntext:\n\n| d |\n|---|\n```\nx\n- y\n```\n")


class Keys(unittest.TestCase):
    OTHERS = ("pytorch.md", "deepspeed.md", "deepspeed_keys.md")  # Python's names, and DeepSpeed's keys

    def unknown(self, text):
        schema = json.loads((ROOT / "configs/sluice.schema.json").read_text(encoding="utf-8"))

        def keys(place, table):
            for name, value in table.get("properties", {}).items():
                yield place + name
                yield from keys(f"{place}{name}.", value)
        known = set(keys("", schema))
        named = (found.split(".") for found in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?=[`:= ])", text))
        return [".".join(words) for words in named
                if words[0] in known and words[-1] not in ("sh", "h", "json") and not words[-1].isdigit() and ".".join(words) not in known]

    def test_all_that_the_documents_name(self):
        for folder in (ROOT, ROOT / "docs", ROOT / "docs/design"):
            for path in sorted(folder.glob("*.md")):
                if path.name not in (*self.OTHERS, "CHANGELOG.md"):  # which may name keys of earlier versions
                    self.assertEqual(self.unknown(path.read_text(encoding="utf-8")), [], path)

    def test_that_do_not_exist_are_named(self):
        self.assertEqual(self.unknown("`optimizer.lanes`, `run.sh`, `precision.optimizer`, `optimizer.close()`, `memory.hosts: 1GiB` `a.b`"),
                         ["precision.optimizer", "memory.hosts"])


class Headers(unittest.TestCase):
    def test_declarations_stand_with_their_comments_and_without_private_parts(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "include/sluice/holder.h"
            path.parent.mkdir(parents=True)
            path.write_text(HEADER, encoding="utf-8")
            page = header_reference.page(path)
        self.assertIn("# &lt;sluice/holder.h&gt;\n\nThe purpose.\n", page)
        self.assertIn("## Holder\n\nHolds one value.\n\n```cpp\nclass Holder {\n public:\n  // The value.\n  int value() const;\n};\n```", page)
        self.assertIn("## doubled\n\nDoubles.\nFails with: kInvalidArgument when negative.\n\n```cpp\nint doubled(int value);\n```", page)
        self.assertIn("return static_cast<int>(value * 2);\n}\n```", page)
        self.assertEqual(page.count("## doubled"), 1)
        self.assertNotIn("Other", page)

    def test_every_public_header_has_a_section(self):
        for header in stage_pages.headers():
            self.assertIn("\n## ", header_reference.page(header), header.name)


class Python(unittest.TestCase):
    def test_every_public_name_and_nothing_else_is_on_the_page(self):
        text = (ROOT / "python/sluice_offload/__init__.py").read_text(encoding="utf-8")
        public = re.findall(r'"(\w+)"', re.search(r"__all__ = \[(.*?)\]", text, re.DOTALL).group(1))
        self.assertIn("log_steps", public)
        places = re.findall(r"^::: (\S+)$", stage_pages.python_page(), re.MULTILINE)
        self.assertEqual(sorted(place.rpartition(".")[2] for place in places), sorted([*public, *stage_pages.FRAMEWORKS]))

    def test_each_has_words_where_the_page_says_that_it_is(self):
        for place in [*stage_pages.python_names().values(), *(f"sluice_offload.{module}" for module in stage_pages.FRAMEWORKS)]:
            module, _, name = place.rpartition(".")
            path = ROOT / "python" / f"{place.replace('.', '/')}.py"
            if module == "sluice_offload" and path.is_file():
                found = [ast.parse(path.read_text(encoding="utf-8"))]
            else:
                text = (ROOT / "python" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
                found = [node for node in ast.parse(text).body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name]
            self.assertEqual([bool(ast.get_docstring(node)) for node in found], [True], place)


class Tables(unittest.TestCase):
    PLOT = {"page": "page.md", "section": "Rates", "label": ["pattern"], "values": ["rate, GB/s"]}

    def test_are_read_as_they_are_meant(self):
        self.assertEqual(result_plots.data(self.PLOT, TABLES), (["read", "read", "write"], [[1.5, 2000.0, None]]))

    def test_that_a_plot_does_not_find_are_named(self):
        for change, words in (({"table": 1}, "1 tables"), ({"values": ["speed"]}, "no column 'speed'; its columns are pattern, rate")):
            with self.assertRaisesRegex(SystemExit, words):
                result_plots.data(self.PLOT | change, TABLES)


def build():
    status = subprocess.run([ROOT / "docs/build.sh"], check=False).returncode
    if status == SKIPPED:
        return SKIPPED
    if status:
        return 1
    # Drawn by the site's own environment: the same numbers give the same bytes, and each other number another picture.
    draw = ("import sys, json, pathlib; sys.path.insert(0, sys.argv[1]); import result_plots; "
            "result_plots.draw(json.loads(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4]))")
    page = (ROOT / "build/site/html/reference/python.html").read_text(encoding="utf-8")
    absent = [place for place in stage_pages.python_names().values() if f'id="{place}"' not in page]
    print(f"reference/python.html: {'LACKS ' + ', '.join(absent) if absent else 'has every public name'}")
    failures = len(absent)
    with tempfile.TemporaryDirectory() as folder:
        for index, plot in enumerate(result_plots.plots()):
            text = (ROOT / "docs/results" / plot["page"]).read_text(encoding="utf-8")
            row = result_plots.tables(text, plot["section"])[plot.get("table", 0)][0][plot["values"][0]]
            pictures = []
            for version in (text, text, text.replace(f"| {row} |", f"| 7{row} |")):
                path = pathlib.Path(folder) / "plot.svg"
                subprocess.run([ROOT / "build/site/env/bin/python", "-B", "-c", draw, SITE, json.dumps(plot), version, path], check=True)
                pictures.append(path.read_bytes())
            built = (ROOT / "build/site/html/results" / f"{pathlib.Path(plot['page']).stem}-{index}.svg").read_bytes()
            good = pictures[0] == pictures[1] == built and pictures[2] != built
            failures += not good
            print(f"{plot['page']}: {plot['title']}: {'follows its table' if good else 'DOES NOT FOLLOW ITS TABLE'}")
    return failures


if __name__ == "__main__":
    if sys.argv[1:] == ["--build"]:
        sys.exit(build())
    unittest.main()
