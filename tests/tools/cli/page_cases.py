"""The page of sluice trace html as a browser shows it: no script fails, the timeline is drawn, search and sort work."""

import html
import json
import re
import shutil
import subprocess

from cli_support import ON_NVME, CliCase

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Runs before the page's own script.
WATCH = """<script>window.faults = []; window.addEventListener('error', event => faults.push(event.message));</script>"""

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
document.getElementById('theme').click();
document.querySelector('#waits tbody tr')?.click();
const shownWaits = what => [...document.querySelectorAll('#waits tbody tr' + what)];
const unitRows = () => shownWaits('.one').length;
result.groups = shownWaits('.group').map(row => [row.children[0].textContent.slice(2), row.children[1].textContent, parseInt(row.children[4].textContent)]);
result.firstOpen = unitRows();
shownWaits('.group')[0]?.click(); result.firstShut = unitRows();
result.waits = rank.waits;
result.split = [...document.querySelectorAll('#split div')].map(part => parseFloat(part.style.width));
result.steps = rank.steps;
result.wider = document.documentElement.scrollWidth > window.innerWidth;
result.faults = window.faults;
document.documentElement.dataset.result = JSON.stringify(result);
</script>"""


class Page(CliCase):
    def setUp(self):
        super().setUp()
        self.browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if self.browser is None:
            self.skipTest("no Chromium here (Debian's package is chromium)")

    def used(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            page = file.read()
        with open(self.path("used.html"), "w", encoding="utf-8") as file:
            file.write(page.replace("<head>", "<head>" + WATCH, 1).replace("</body>", USE + "</body>", 1))
        done = subprocess.run([self.browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                               f"--user-data-dir={self.path('profile')}", "--window-size=1500,2000", "--dump-dom",
                               "file://" + self.path("used.html")], capture_output=True, text=True, timeout=120, check=True)
        return json.loads(html.unescape(re.search(r'data-result="([^"]*)"', done.stdout)[1]))

    def test_a_browser_shows_it_and_works_with_it(self):
        self.run_sluice("train", self.write_config({**ON_NVME, "batch.micro_batches": 2}), "--quiet", "--steps", 5, "--trace", "run.trace")
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
        # One row for a cause, the sum of its units' waits; a click opens it and another shuts it.
        sums = {}
        for wait in result["waits"]:
            key = (wait["cause"], wait["who"])
            sums[key] = sums.get(key, 0) + wait["count"]
        self.assertEqual({(cause, who): count for cause, who, count in result["groups"]}, sums)
        self.assertEqual(len(result["groups"]), len(sums))
        first = result["groups"][0][:2]
        self.assertEqual(result["firstOpen"], sum([wait["cause"], wait["who"]] == first for wait in result["waits"]))
        self.assertEqual(result["firstShut"], 0)
        # The split of the mean step.
        steps = result["steps"][1:]
        for key, share in zip(("compute", "io", "optimizer", "other"), result["split"]):
            self.assertAlmostEqual(share, 100 * sum(step[key] for step in steps) / sum(step["length"] for step in steps), delta=0.01)
        self.assertFalse(result["wider"])

    def test_an_empty_page_fails_nothing(self):
        self.run_sluice("train", self.write_config(), "--quiet", "--steps", 1, "--trace", "run.trace")
        self.run_sluice("trace", "html", "run.trace", "-o", "page.html")
        self.assertEqual(self.used("page.html")["faults"], [])
