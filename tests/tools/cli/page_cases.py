"""The page of sluice trace html as a browser shows it: no script fails, the timeline is drawn, search and sort work."""

import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from cli_support import ON_NVME, CliCase

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "docs/site"))
import page_pictures

# Runs before the page's own script.
WATCH = """<script>window.faults = []; window.addEventListener('error', event => faults.push(event.message));</script>"""

# A window of any width: the browser's own has at least 500 pixels.
FRAME = """<body><iframe src="used.html" style="width: WIDTHpx; height: 2000px" onload="document.documentElement.dataset.result = this.contentDocument.documentElement.dataset.result"></iframe></body>"""

# The actions of a user; the result stands in an attribute of the document.
USE = """<script>
const colors = id => { const box = document.getElementById(id); const pixels = box.getContext('2d').getImageData(0, 0, box.width, box.height).data;
  const seen = new Set(); for (let i = 0; i < pixels.length; i += 4) seen.add(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]); return seen.size; };
const result = { rendered: document.documentElement.dataset.rendered, canvases: {} };
for (const id of ['timeline', 'map', 'band', 'hist']) result.canvases[id] = colors(id);
const header = [...document.querySelectorAll('#steps th')].find(cell => cell.textContent === 'Time');
const column = [...header.parentNode.children].indexOf(header);
const times = () => [...document.querySelectorAll('#steps tbody tr')].map(row => parseFloat(row.children[column].textContent));
result.before = times(); header.click(); result.down = times(); header.click(); result.up = times();
const field = document.getElementById('search');
field.value = 'H.1.'; field.dispatchEvent(new Event('input')); result.found = hits.size;
field.value = 'no such tensor'; field.dispatchEvent(new Event('input')); result.notFound = hits.size;
const wide = to - from;
document.getElementById('timeline').dispatchEvent(new WheelEvent('wheel', { deltaY: -100, cancelable: true })); result.zoomed = (to - from) / wide;
const wheel = (deltaY, times) => { for (let i = 0; i < times; ++i) document.getElementById('timeline').dispatchEvent(new WheelEvent('wheel', { deltaY, cancelable: true })); return to - from; };
result.closest = wheel(-100, 200); result.widest = wheel(100, 200) / rank.length_us;
document.getElementById('theme').click();
document.querySelector('#waits tbody tr')?.click();
const shownWaits = what => [...document.querySelectorAll('#waits tbody tr' + what)];
const unitRows = () => shownWaits('.one').length;
result.groups = shownWaits('.group').map(row => [row.children[0].textContent.slice(2), row.children[1].textContent, parseInt(row.children[4].textContent), row.children[3].textContent]);
result.units = rank.units.map(unit => unit.name);
result.firstOpen = unitRows();
shownWaits('.group')[0]?.click(); result.firstShut = unitRows();
result.waits = rank.waits;
result.split = [...document.querySelectorAll('#split div')].map(part => parseFloat(part.style.width));
result.steps = rank.steps;
result.width = window.innerWidth;
result.wider = document.documentElement.scrollWidth > window.innerWidth;
// The keyboard: a canvas that has the focus moves and zooms; a button opens a cause and keeps the focus.
const press = (id, key) => document.getElementById(id).dispatchEvent(new KeyboardEvent('keydown', { key, cancelable: true, bubbles: true }));
press('timeline', 'Home'); result.whole = [from, to, rank.length_us];
press('timeline', '+'); result.keyZoom = (to - from) / rank.length_us;
const before = from; press('map', 'ArrowRight'); result.keyMove = (from - before) / (to - from);
press('timeline', 'Home');
result.focusable = [...document.querySelectorAll('#timeline, #map, #band, #search, #rank, #bar button, th button, #waits .group button, #steps td button')].every(element => element.tabIndex === 0);
result.headings = document.querySelectorAll('th').length === document.querySelectorAll('th button').length;
const opener = document.querySelector('#waits .group button');
if (opener) { const was = opener.getAttribute('aria-expanded'); opener.focus(); opener.click(); result.expanded = [was, document.activeElement.getAttribute('aria-expanded')]; }
// Text alternatives.
result.labels = {}; for (const element of document.querySelectorAll('canvas, [role=img], input, select')) result.labels[element.id || element.className] = element.getAttribute('aria-label') || '';
result.evaluations = rank.evaluations;
result.config = document.getElementById('config').textContent;
result.subjects = [...new Set(rank.lanes[0].spans.subject.map(subject => data.subjects[subject]))];
// Contrast: WCAG's ratio of every text to what it stands on, in both themes; of colours to what they lie on.
const luminance = color => { const [r, g, b] = color.map(value => { value /= 255; return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ratio = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((m, n) => n - m); return (x + 0.05) / (y + 0.05); };
const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const rgba = color => { paint.clearRect(0, 0, 1, 1); paint.fillStyle = color; paint.fillRect(0, 0, 1, 1); return [...paint.getImageData(0, 0, 1, 1).data]; };
const behind = element => { for (; element; element = element.parentElement) { const found = rgba(getComputedStyle(element).backgroundColor); if (found[3] === 255) return found.slice(0, 3); } return [255, 255, 255]; };
result.contrast = {};
for (const theme of ['one', 'other']) {
  document.getElementById('theme').click();
  const texts = [...document.querySelectorAll('body *')].filter(element => element.id !== 'tip' && element.getClientRects().length && [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()));
  result.contrast[theme] = { texts: texts.length, least: Math.min(...texts.map(element => ratio(rgba(getComputedStyle(element).color).slice(0, 3), behind(element)))),
    spans: Math.min(...Object.keys(PALETTE).filter(name => name !== 'text' && name !== 'held').map(name => ratio(rgba(shade(name)).slice(0, 3), rgba(shade('text')).slice(0, 3)))),
    graphics: Math.min(...Object.keys(PALETTE).filter(name => name !== 'text').map(name => ratio(rgba(shade(name)).slice(0, 3), rgba(css('--panel')).slice(0, 3)))),
    places: Math.min(...Object.keys(GROUNDS).flatMap(tier => ['device', 'held'].map(name => ratio(rgba(shade(name)).slice(0, 3), rgba(ground(tier)).slice(0, 3))))) };
}
result.faults = window.faults;
document.documentElement.dataset.result = JSON.stringify(result);
</script>"""


# The page's script over elements that show nothing, for machines with node and without a browser.
SCRIPT = """
const [page] = process.argv.slice(1), html = require('fs').readFileSync(page, 'utf8');
const part = open => html.slice(html.indexOf(open) + open.length, html.indexOf('</script>', html.indexOf(open)));
const listeners = {}, elements = {};
const element = id => ({ id, style: {}, dataset: {}, children: [], clientWidth: 1300, value: '', textContent: id === 'data' ? part('type="application/json">') : '',
  classList: { contains: () => false, add() {}, toggle() {} }, append() {}, setAttribute() {}, removeAttribute() {}, replaceChildren(...all) { this.children = all; },
  querySelector: () => element(''), querySelectorAll: () => [], addEventListener(type, call) { (listeners[id] ||= {})[type] = call; },
  getContext: () => new Proxy({}, { get: (of, name) => name in of ? of[name] : () => 0, set: (of, name, value) => (of[name] = value, true) }) });
const document = { getElementById: id => elements[id] ||= element(id), createElement: () => element(''), documentElement: element('root'), querySelectorAll: () => [] };
const context = require('vm').createContext({ document, atob, innerWidth: 1300, getComputedStyle: () => ({ getPropertyValue: () => '#000' }),
  window: { devicePixelRatio: 1, matchMedia: () => ({ matches: false }), addEventListener() {} } });
const run = text => require('vm').runInContext(text, context, { timeout: 60000 });
run(part('<script>'));
const zoom = deltaY => { context.turn = () => { for (let i = 0; i < 300; ++i) listeners.timeline.wheel({ preventDefault() {}, offsetX: 700, deltaY }); }; run('turn()'); return run('to - from'); };
const ranks = run('data.ranks').map((rank, i) => { run(`choose(${i})`); return [rank.units.length, rank.steps.length, elements.head.textContent]; });
console.log(JSON.stringify({ rendered: document.documentElement.dataset.rendered, closest: zoom(-100), widest: zoom(100) / run('rank.length_us'), ranks,
  split: elements.split.children.map(child => parseFloat(child.style.width)) }));
"""


class PageScript(CliCase):
    def used(self, *traces):
        if shutil.which("node") is None:
            self.skipTest("no node here")
        self.run_sluice("trace", "html", *traces, "-o", "page.html")
        done = subprocess.run(["node", "-e", SCRIPT, self.path("page.html")], capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_zooming_ends(self):
        """At a microsecond, where nothing more can be seen. Ever closer ticks of the axis had no end."""
        self.run_sluice("train", self.write_config(ON_NVME), "--quiet", "--steps", 3, "--trace", "run.trace")
        used = self.used("run.trace")
        self.assertEqual(used["rendered"], "yes")
        self.assertAlmostEqual(used["closest"], 1, places=6)
        self.assertAlmostEqual(used["widest"], 4, places=6)
        self.assertAlmostEqual(sum(used["split"]), 100, places=6)

    def test_a_run_of_many_steps(self):
        subprocess.run([os.environ["SLUICE_MADE_TRACE"], self.path("run.trace"), *(["1"] * 5000)], check=True)
        used = self.used("run.trace")
        [[_, steps, head]] = used["ranks"]
        self.assertEqual(steps, 3000)
        self.assertIn("this page has 3000 of 5000 steps", head)
        self.assertLess(os.path.getsize(self.path("page.html")), 5_000_000)


class Page(CliCase):
    def setUp(self):
        super().setUp()
        self.browser = page_pictures.find_browser()
        if self.browser is None:
            self.skipTest("no Chromium here (Debian's package is chromium)")

    def used(self, name, width=1500):
        with open(self.path(name), encoding="utf-8") as file:
            page = file.read()
        with open(self.path("used.html"), "w", encoding="utf-8") as file:
            file.write(page.replace("<head>", "<head>" + WATCH, 1).replace("</body>", USE + "</body>", 1))
        with open(self.path("frame.html"), "w", encoding="utf-8") as file:
            file.write(FRAME.replace("WIDTH", str(width)))
        done = subprocess.run([self.browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                               f"--user-data-dir={self.path('profile')}", "--window-size=1500,2000", "--allow-file-access-from-files", "--virtual-time-budget=10000", "--dump-dom",
                               "file://" + self.path("frame.html")], capture_output=True, text=True, timeout=120, check=True)
        return json.loads(html.unescape(re.search(r'data-result="([^"]*)"', done.stdout)[1]))

    def test_a_browser_shows_it_and_works_with_it(self):
        self.run_sluice("train", self.write_config({**ON_NVME, "batch.micro_batches": 2}), "--quiet", "--steps", 5, "--validate-every", 3, "--trace", "run.trace")
        self.run_sluice("trace", "html", "run.trace", "-o", "page.html")
        result = self.used("page.html")
        self.assertEqual(result["faults"], [])
        self.assertEqual(result["rendered"], "yes")
        for name, colors in result["canvases"].items():
            self.assertGreater(colors, 3, name)
        self.assertEqual(len(result["before"]), 5)
        self.assertEqual(result["down"], sorted(result["before"], reverse=True))
        self.assertEqual(result["up"], sorted(result["before"]))
        self.assertEqual((result["found"], result["notFound"]), (1, 0))
        self.assertAlmostEqual(result["zoomed"], 0.8, places=6)
        self.assertAlmostEqual(result["closest"], 1, places=6)
        self.assertAlmostEqual(result["widest"], 4, places=6)
        # One row for a cause, the sum of its units' waits; a click opens it and another shuts it.
        sums, units = {}, {}
        for wait in result["waits"]:
            key = (wait["cause"], wait["who"])
            sums[key] = sums.get(key, 0) + wait["count"]
            units.setdefault(key, set()).update({wait["unit"]} - {-1})  # -1: a wait for no unit, such as for norms
        self.assertEqual({(cause, who): count for cause, who, count, _ in result["groups"]}, sums)
        self.assertEqual({(cause, who): unit for cause, who, _, unit in result["groups"]},
                         {key: f"{len(of)}\u00a0units" if len(of) > 1 else "".join(result["units"][unit] for unit in of) for key, of in units.items()})
        self.assertEqual(len(result["groups"]), len(sums))
        totals = {}
        for wait in result["waits"]:
            totals[wait["who"], wait["cause"]] = totals.get((wait["who"], wait["cause"]), 0) + wait["total_us"]
        self.assertEqual([(who, cause) for cause, who, *_ in result["groups"]], sorted(totals, key=lambda key: (key[0], -totals[key])))
        first = result["groups"][0][:2]
        self.assertEqual(result["firstOpen"], sum([wait["cause"], wait["who"]] == first for wait in result["waits"]))
        self.assertEqual(result["firstShut"], 0)
        # The split of the mean step.
        steps = result["steps"][1:]
        for key, share in zip(("compute", "io", "optimizer", "other"), result["split"]):
            self.assertAlmostEqual(share, 100 * sum(step[key] for step in steps) / sum(step["length"] for step in steps), delta=0.01)
        self.assertFalse(result["wider"])
        self.check_keyboard(result)
        self.check_words(result)
        for theme, found in result["contrast"].items():
            self.assertGreater(found["texts"], 50)
            self.assertGreaterEqual(found["least"], 4.5, theme)
            self.assertGreaterEqual(found["spans"], 4.5, theme)
            self.assertGreaterEqual(found["graphics"], 3, theme)
            self.assertGreaterEqual(found["places"], 3, theme)

    def check_keyboard(self, result):
        begin, end, length = result["whole"]
        self.assertEqual((begin, end), (0, length))
        self.assertAlmostEqual(result["keyZoom"], 0.8, places=6)
        self.assertAlmostEqual(result["keyMove"], 0.2, places=6)
        self.assertTrue(result["focusable"])
        self.assertTrue(result["headings"])
        self.assertEqual(set(result["expanded"]), {"true", "false"})

    def check_words(self, result):
        """Every picture in words; evaluation by its name; settings as a config file has them."""
        labels = result["labels"]
        self.assertEqual(set(labels), {"timeline", "map", "band", "hist", "split", "search", "rank", "meter"})
        self.assertNotIn("", labels.values())
        self.assertRegex(labels["timeline"], r"compute \d+, waits \d+")
        self.assertRegex(labels["map"], r"Places of \d+ units")
        self.assertRegex(labels["band"], r"reads up to [\d.]+ GB/s")
        self.assertEqual(set(result["subjects"]) - {""}, {"forward", "backward"})
        # One behind the third step, and one at the end.
        steps = [(step["begin"], step["begin"] + step["length"]) for step in result["steps"]]
        (first, last) = [(span["begin"], span["begin"] + span["length"]) for span in result["evaluations"]]
        self.assertTrue(steps[2][1] <= first[0] < first[1] <= steps[3][0], (steps, first))
        self.assertTrue(steps[4][1] <= last[0] < last[1], (steps, last))
        settings = json.loads(result["config"])["config"]
        self.assertEqual(settings["placement"]["parameters"], "nvme")
        self.assertEqual(settings["optimizer"]["overlap"], "auto")

    def test_it_fits_every_width(self):
        self.run_sluice("train", self.write_config(ON_NVME), "--quiet", "--steps", 3, "--trace", "run.trace")
        self.run_sluice("trace", "html", "run.trace", "-o", "page.html")
        for width in (420, 1024, 3840):
            result = self.used("page.html", width)
            self.assertEqual(result["faults"], [])
            self.assertEqual((result["wider"], result["width"]), (False, width))

    def test_a_wide_table_scrolls_by_itself(self):
        self.run_sluice("train", self.write_config(ON_NVME), "--quiet", "--steps", 3, "--trace", "run.trace")
        self.run_sluice("trace", "html", "run.trace", "-o", "page.html")
        with open(self.path("page.html"), "r+", encoding="utf-8") as file:
            page = file.read().replace("</head>", "<style>#waits td { min-width: 400px; }</style></head>", 1)
            file.seek(0)
            file.write(page)
        for width in (420, 1024):
            self.assertFalse(self.used("page.html", width)["wider"], width)

    def test_an_empty_page_fails_nothing(self):
        self.run_sluice("train", self.write_config(), "--quiet", "--steps", 1, "--trace", "run.trace")
        self.run_sluice("trace", "html", "run.trace", "-o", "page.html")
        self.assertEqual(self.used("page.html")["faults"], [])

    def test_it_looks_as_in_the_documents(self):
        for name in page_pictures.PICTURES:
            committed = (page_pictures.IMAGES / name).read_bytes()
            difference = page_pictures.compare(self.browser, committed, page_pictures.draw(self.browser, name))
            self.assertIsNone(difference, f"docs/images/{name}: {difference}; docs/site/page_pictures.py draws it again")

    def test_the_recorded_run_has_the_parts_of_a_page_of_today(self):
        self.run_sluice("train", self.write_config(ON_NVME), "--quiet", "--steps", 2, "--trace", "run.trace")
        self.run_sluice("trace", "html", "run.trace", "-o", "page.html")
        with open(self.path("page.html"), encoding="utf-8") as file:
            today = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', file.read(), re.DOTALL)[1])
        recorded = json.loads(page_pictures.DATA.read_text(encoding="utf-8"))
        self.assertEqual(list(recorded), list(today))
        self.assertEqual(list(recorded["ranks"][0]), list(today["ranks"][0]), "docs/site/page_pictures.py --record takes a new run")
