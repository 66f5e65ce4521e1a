#!/usr/bin/env python3
"""Makes the pictures of docs/images: the page of `sluice trace html`, as Chromium shows it.

    docs/site/page_pictures.py               draws the pictures again, after a change of tools/trace/trace_page.html
    docs/site/page_pictures.py --record PAGE takes the run that the pictures show from PAGE, which `sluice trace html` has written,
                                             and draws them
    docs/site/page_pictures.py --check       compares the pictures with what the page looks like now; exits with 1 where they differ

The run stands in docs/site/trace_page_data.json. Exits with 77 where there is no Chromium (Debian's package is chromium).
"""

import base64
import html
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "docs/site/trace_page_data.json"
PAGE = ROOT / "tools/trace/trace_page.html"
IMAGES = ROOT / "docs/images"
PLACE = "SLUICE_TRACE_DATA"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Name: width and height in pixels, theme.
PICTURES = {
    "trace_page.png": (1300, 1760, "light"),
    "trace_page_dark.png": (1300, 900, "dark"),
    "trace_page_narrow.png": (500, 1100, "light"),
}

# Pictures are compared by the mean colours of cells. Another version of a font moves edges of letters; a part of the page that is
# missing, moved, or of another colour changes many cells by much more.
CELL_PIXELS = 20
CELL_LEVELS_MAX = 24
CELLS_SHARE_MAX = 0.01

COMPARE = """<body><img id="a" src="data:image/png;base64,%s"><img id="b" src="data:image/png;base64,%s"><script>
const means = image => {
  const box = document.createElement('canvas'); box.width = image.naturalWidth; box.height = image.naturalHeight;
  const context = box.getContext('2d'); context.drawImage(image, 0, 0);
  const cells = [];
  for (let y = 0; y < box.height; y += %d) for (let x = 0; x < box.width; x += %d) {
    const pixels = context.getImageData(x, y, Math.min(%d, box.width - x), Math.min(%d, box.height - y)).data;
    const sum = [0, 0, 0];
    for (let i = 0; i < pixels.length; i += 4) for (let c = 0; c < 3; ++c) sum[c] += pixels[i + c];
    cells.push(sum.map(value => value * 4 / pixels.length));
  }
  return { size: [box.width, box.height], cells };
};
onload = () => { document.documentElement.dataset.result = JSON.stringify(['a', 'b'].map(id => means(document.getElementById(id)))); };
</script></body>"""


def find_browser():
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def browse(browser, folder, page, *arguments):
    path = pathlib.Path(folder) / "page.html"
    path.write_text(page, encoding="utf-8")
    return subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                           "--force-device-scale-factor=1", f"--user-data-dir={folder}/profile", "--virtual-time-budget=10000",
                           *arguments, path.as_uri()], capture_output=True, text=True, timeout=300, check=True).stdout


def page_text(theme):
    """The page with the recorded run, which does not ask the system for its theme."""
    text = PAGE.read_text(encoding="utf-8")
    if text.count(PLACE) != 1:
        raise SystemExit(f"{PAGE}: {text.count(PLACE)} places for the data of a run, named {PLACE}; 1 is wanted")
    theme_script = f"<script>window.matchMedia = () => ({{ matches: {str(theme == 'dark').lower()} }});</script>"
    return text.replace("<head>", "<head>" + theme_script, 1).replace(PLACE, DATA.read_text(encoding="utf-8").strip())


def draw(browser, name):
    """The picture's bytes."""
    width, height, theme = PICTURES[name]
    with tempfile.TemporaryDirectory() as folder:
        picture = pathlib.Path(folder) / name
        # Without the second option, one picture in some twenty lacks its lower end on a busy machine.
        browse(browser, folder, page_text(theme), f"--window-size={width},{height}", "--run-all-compositor-stages-before-draw",
               f"--screenshot={picture}")
        return picture.read_bytes()


def compare(browser, one, other):
    """None where two pictures look alike; else the difference in words."""
    sides = [base64.b64encode(picture).decode() for picture in (one, other)]
    with tempfile.TemporaryDirectory() as folder:
        shown = browse(browser, folder, COMPARE % (*sides, *[CELL_PIXELS] * 4), "--dump-dom")
    a, b = json.loads(html.unescape(re.search(r'data-result="([^"]*)"', shown)[1]))
    if a["size"] != b["size"]:
        return f"the sizes are {a['size']} and {b['size']}"
    apart = sum(max(abs(x - y) for x, y in zip(*pair)) > CELL_LEVELS_MAX for pair in zip(a["cells"], b["cells"]))
    if apart <= CELLS_SHARE_MAX * len(a["cells"]):
        return None
    return (f"{apart} of {len(a['cells'])} cells of {CELL_PIXELS} x {CELL_PIXELS} pixels differ by more than {CELL_LEVELS_MAX} of 255; "
            f"{CELLS_SHARE_MAX:.0%} of them may")


def record(page):
    found = re.search(r'<script[^>]* id="data"[^>]*>(.*?)</script>', pathlib.Path(page).read_text(encoding="utf-8"), re.DOTALL)
    if not found:
        raise SystemExit(f"{page}: not a page of sluice trace html, for it has no <script id=\"data\">")
    DATA.write_text(found[1].strip() + "\n", encoding="utf-8")


def main(arguments):
    if arguments and not (arguments == ["--check"] or (len(arguments) == 2 and arguments[0] == "--record")):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    browser = find_browser()
    if browser is None:
        print("docs/site/page_pictures.py: no Chromium here (Debian's package is chromium)", file=sys.stderr)
        return 77
    if arguments == ["--check"]:
        found = {name: compare(browser, (IMAGES / name).read_bytes(), draw(browser, name)) for name in PICTURES}
        for name, difference in found.items():
            if difference:
                print(f"docs/images/{name} is not what the page looks like: {difference}; draw it with docs/site/page_pictures.py")
        return 1 if any(found.values()) else 0
    if arguments:
        record(arguments[1])
    for name in PICTURES:
        (IMAGES / name).write_bytes(draw(browser, name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
