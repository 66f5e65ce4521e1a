#!/usr/bin/env python3
"""Puts the pages of the site together.

    docs/site/stage_pages.py FOLDER [--no-plots]   writes the pages and mkdocs.yml's part "nav"
    docs/site/stage_pages.py --check               only looks whether every link of the repository's documents leads to a file
    docs/site/stage_pages.py --built FOLDER        looks through the finished site for lists and tables that became paragraphs

The pages are the repository's documents, with links between them changed to the places of the site; a page per example and per
public header; and the plots of the results. A link that leads nowhere is an error with its file and line.
"""

import ast
import pathlib
import re
import shutil
import sys

import header_reference
import result_plots

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
PACKAGE = ROOT / "python/sluice_offload"
FRAMEWORKS = ["lightning", "transformers"]  # modules that a program imports by itself, where it has their framework


def documents():
    """Each document's path in the repository, and its place among the pages."""
    found = dict(TOP)
    for path in sorted((ROOT / "docs").rglob("*.md")):
        found[path.relative_to(ROOT).as_posix()] = path.relative_to(ROOT / "docs").as_posix()
    return found


def headers():
    return sorted(path for folder in ROOT.glob("*/include/sluice") for path in folder.glob("*.h"))


def examples():
    return sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir())


def place_of(target, pages):
    """Where a path of the repository is on the site; None where nothing is at that path."""
    if target in pages:
        return pages[target]
    path = ROOT / target
    if target.rstrip("/") == "docs/results":
        return "results/index.md"
    if path.suffix == ".h" and "/include/sluice/" in target:
        return f"reference/cpp/{path.stem}.md"
    if target.startswith("examples/") and path.exists():
        return f"examples/{target.split('/')[1]}.md"
    if target.startswith("docs/images/") and path.is_file():
        return target.removeprefix("docs/")
    if path.is_file():
        return f"files/{target}" + ("" if path.suffix else ".txt")
    return None


def relative(place, page):
    depth = page.count("/")
    return "../" * depth + place


def prose(text):
    """The text's parts as (is code, part); code stands between fences."""
    for index, part in enumerate(re.split(r"(^ *```.*?^ *```[^\n]*\n)", text, flags=re.MULTILINE | re.DOTALL)):
        yield index % 2 == 1, part


def with_links(text, source, page, pages, errors, copies):
    """The document's text with each link as the site needs it."""
    def change(line, match):
        target, _, anchor = match.group(2).partition("#")
        if re.match(r"^[a-z]+:", target) or not target:
            return match.group(0)
        path = (ROOT / source).parent.joinpath(target).resolve()
        inside = path.is_relative_to(ROOT)
        place = place_of(path.relative_to(ROOT).as_posix(), pages) if inside else None
        if place is None:
            errors.append(f"{source}:{line}: the link ({match.group(2)}) leads to no file")
            return match.group(0)
        if place.startswith(("files/", "images/")):
            copies[place] = path
        return f"{match.group(1)}({relative(place, page)}{'#' + anchor if anchor else ''})"

    parts, line = [], 1
    for is_code, part in prose(text):
        parts.append(part if is_code else
                     LINK.sub(lambda match, line=line, part=part: change(line + part.count("\n", 0, match.start()), match), part))
        line += part.count("\n")
    return "".join(parts)


def with_blank_lines(text):
    """The text with an empty line above each list and table: mkdocs wants one, other readers of Markdown do not."""
    kinds = [r"- |\d+\. ", r"\|"]
    lines = []
    for is_code, part in prose(text):
        for line in part.splitlines():
            for kind in kinds if lines and not is_code else []:
                if re.match(kind, line) and lines[-1].strip() and not re.match(kind + r"| ", lines[-1]):
                    lines.append("")
            lines.append(line)
    return "\n".join(lines) + "\n"


def with_plots(text, page, folder):
    """The text with each of the page's plots below its heading."""
    for index, plot in enumerate(result_plots.plots()):
        if f"results/{plot['page']}" != page:
            continue
        name = f"{pathlib.Path(page).stem}-{index}.svg"
        result_plots.draw(plot, text, folder / "results" / name)
        heading = re.compile(rf"^(#+ {re.escape(plot['section'])})$", re.MULTILINE)
        text = heading.sub(lambda match, plot=plot, name=name: f"{match.group(1)}\n\n![{plot['title']}, as a picture]({name})\n", text, count=1)
    return text


def example_page(folder):
    text = [f"# Example: {folder.name}", ""]
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == "CMakeLists.txt", path.name)):
        language = {".cc": "cpp", ".c": "c", ".py": "python", ".txt": "cmake"}.get(path.suffix, "")
        if language:
            text += [f"## {path.name}", "", f"```{language}", path.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(text)


def python_names():
    """Each name of the package's `__all__`, and the object that it is: `optim` is a module, the others are in modules."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    places = {alias.asname or alias.name: ".".join(filter(None, ["sluice_offload", node.module, alias.name]))
              for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1 for alias in node.names}
    public, = (ast.literal_eval(node.value) for node in tree.body
               if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"])
    return {name: places[name] for name in sorted(public, key=lambda name: (".errors." in places[name], name.lower()))}


def python_page():
    text = ["# The Python package", "", "`import sluice_offload as sluice` gives these names. The modules of frameworks, which stand last, are",
            "imported by themselves.", ""]
    for place in [*python_names().values(), *(f"sluice_offload.{module}" for module in FRAMEWORKS)]:
        text += [f"::: {place}", ""]
    return "\n".join(text)


def title(path):
    return next(line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def navigation(folder):
    """mkdocs.yml, in which a folder stands for all its pages."""
    lines = []
    for line in (pathlib.Path(__file__).parent / "mkdocs.yml").read_text(encoding="utf-8").splitlines():
        match = re.match(r"^( *)- ([^:]+): (\S+/)$", line)
        lines.append(f"{match.group(1)}- {match.group(2)}:" if match else line)
        if match:
            lines += [f"{match.group(1)}    - {path.relative_to(folder).as_posix()}"
                      for path in sorted((folder / match.group(3)).glob("*.md"), key=lambda path: (path.stem != "index", path.stem))]
    return "\n".join(lines) + "\n"


def stage(folder, plots):
    shutil.rmtree(folder, ignore_errors=True)
    pages, errors, copies = documents(), [], {}
    for source, page in pages.items():
        text = with_links((ROOT / source).read_text(encoding="utf-8"), source, page, pages, errors, copies)
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        write(folder / page, with_blank_lines(with_plots(text, page, folder) if plots else text))
    if errors:
        sys.exit("\n".join(errors))
    for place, path in copies.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / place)
    for header in headers():
        write(folder / f"reference/cpp/{header.stem}.md", with_blank_lines(header_reference.page(header)))
    for example in examples():
        write(folder / f"examples/{example.name}.md", example_page(example))
    write(folder / "reference/python.md", python_page())
    rows = [f"- [{title(path)}]({path.name})" for path in sorted((folder / "results").glob("*.md"))]
    write(folder / "results/index.md", "# Results\n\nFigures with the commands that make them.\n\n" + "\n".join(rows) + "\n")
    write(folder.parent / "mkdocs.yml", navigation(folder).replace("../../build/site/", "").replace("../../python", str(ROOT / "python")))


def check():
    pages, errors = documents(), []
    for source, page in pages.items():
        with_links((ROOT / source).read_text(encoding="utf-8"), source, page, pages, errors, {})
    for plot in result_plots.plots():
        result_plots.data(plot, (ROOT / "docs/results" / plot["page"]).read_text(encoding="utf-8"))
    print("\n".join(errors) if errors else f"{len(pages)} documents: every link leads to a file, every plot has its table")
    return bool(errors)


def built(folder):
    found = []
    for path in sorted(pathlib.Path(folder).rglob("*.html")):
        text = re.sub(r"<pre\b.*?</pre>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [f"{path}: {line.strip()[:100]}" for line in text.splitlines() if re.match(r"(<p>)?(- \S|\|[^|]+\|)", line)]
    print("\n".join(found[:20]))
    return bool(found)


def main():
    if sys.argv[1:] == ["--check"]:
        return check()
    if len(sys.argv) == 3 and sys.argv[1] == "--built":
        return built(sys.argv[2])
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    stage(pathlib.Path(sys.argv[1]).resolve(), "--no-plots" not in sys.argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
