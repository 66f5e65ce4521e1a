"""Draws the tables of docs/results that result_plots.json names, as SVG. The same table gives the same file, byte for byte."""

import json
import pathlib
import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def cells(line):
    return [cell.strip().strip("*`") for cell in line.strip().strip("|").split("|")]


def tables(text, section):
    """The tables of a page's section as lists of rows; a row maps columns to texts."""
    found, inside, lines = [], False, text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("#"):
            inside = line.lstrip("# ").strip() == section
        if inside and line.startswith("|") and i + 1 < len(lines) and re.match(r"^\|[-| :]+\|$", lines[i + 1]):
            columns, rows, last = cells(line), [], {}
            for row in lines[i + 2:]:
                if not row.startswith("|"):
                    break
                # an empty first cell means the one above
                last = {column: cell or (last.get(column, "") if column == columns[0] else "")
                        for column, cell in zip(columns, cells(row))}
                rows.append(last)
            found.append(rows)
    return found


def number(cell):
    match = NUMBER.search(cell)
    return float(match.group().replace(",", "")) if match else None


def data(plot, text):
    """Labels of the rows, and a list of values for each column; what the table leaves out is None."""
    found = tables(text, plot["section"])
    index = plot.get("table", 0)
    if index >= len(found):
        raise SystemExit(f"result_plots.json: {plot['page']} has {len(found)} tables below \"{plot['section']}\", table {index} is wanted")
    rows = found[index]
    missing = [column for column in plot["label"] + plot["values"] if column not in rows[0]]
    if missing:
        raise SystemExit(f"result_plots.json: {plot['page']}, \"{plot['section']}\", table {index} has no column {missing[0]!r}; "
                         f"its columns are {', '.join(rows[0])}")
    labels = [", ".join(row[column] for column in plot["label"]) for row in rows]
    return labels, [[number(row[column]) for row in rows] for column in plot["values"]]


def draw(plot, text, path):
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sluice"  # ids that depend on nothing else
    from matplotlib import pyplot
    labels, series = data(plot, text)
    height = 0.8 / len(series)
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.3 * len(labels) * max(1, len(series) * 0.7)))
    for place, (name, values) in enumerate(zip(plot["names"], series)):
        rows = [row for row, value in enumerate(values) if value is not None]
        bars = axes.barh([row + (place - (len(series) - 1) / 2) * height for row in rows], [values[row] for row in rows], height, label=name)
        axes.bar_label(bars, labels=[f"{values[row]:g}" for row in rows], padding=2, fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(plot["unit"])
    axes.set_title(plot["title"], fontsize=10)
    axes.margins(x=0.12)
    if plot.get("logarithmic"):
        axes.set_xscale("log")
    if len(series) > 1:
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def plots():
    return json.loads((pathlib.Path(__file__).parent / "result_plots.json").read_text(encoding="utf-8"))
