"""The pictures of `--plot`: well-formed SVG with the figures of the command's JSON as text, and descriptions."""

import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree

from cli_support import CliCase

SPACE = "{http://www.w3.org/2000/svg}"


class Plots(CliCase):
    LABEL = "command"

    def picture(self, name):
        """The root of a picture that has a title, a description and nothing outside of its frame."""
        root = ElementTree.parse(self.path(name)).getroot()
        self.assertEqual((root.tag, root.get("role")), (SPACE + "svg", "img"))
        self.assertEqual(root.get("aria-label"), root.find(SPACE + "title").text)
        self.assertTrue(root.find(SPACE + "desc").text.strip())
        width, height = float(root.get("width")), float(root.get("height"))
        for element in root.iter():
            for key, most in (("x", width), ("y", height), ("x1", width), ("x2", width), ("y1", height), ("y2", height), ("cx", width), ("cy", height)):
                value = float(element.get(key, 0))
                self.assertTrue(0 <= value <= most, ElementTree.tostring(element))
        return root

    def bars(self, name):
        """{label: (value, low, high)} as the bars say; the length of each bar is in proportion."""
        found, scales = {}, []
        for bar in self.picture(name).iter(SPACE + "rect"):
            title = bar.find(SPACE + "title")
            if title is None:
                continue
            label, value, spread = re.fullmatch(r"(.*): (\S+) [^\[]+?(?: \[(.*)\])?", title.text).groups()
            found[label] = (float(value), *map(float, spread.split(", "))) if spread else (float(value),)
            scales.append(float(bar.get("width")) / float(value))
        self.assertLess(max(scales) / min(scales), 1.1)
        return found

    def assert_close(self, found, expected):
        self.assertEqual(set(found), set(expected))
        for label, values in expected.items():
            for one, other in zip(found[label], values, strict=True):
                self.assertAlmostEqual(one / other, 1, delta=1e-3, msg=label)

    def test_bench_io(self):
        os.mkdir(self.path("second"))
        self.run_sluice("bench", "io", "--path", "storage", "--path", "second", "--size", "1MiB", "--request", "256KiB", "--depth", 4, "--depth", 8,
                        "--pattern", "read", "--pattern", "mixed", "--rounds", 3, "--json", "io.json", "--plot", "io.svg")
        found, calibration = self.bars("io.svg"), self.read_json("io.json")
        self.assertEqual(len(found), 12)
        self.assert_close({label: bar for label, bar in found.items() if label.endswith(", all paths")}, {
            f"{case['pattern']} 256 KiB, {case['depth']}, all paths": [1e-9 * case["bytes_per_second" + part] for part in ("", "_min", "_max")]
            for case in calibration["cases"]})
        for drive in calibration["drives"]:
            best = max(bar[0] for label, bar in found.items() if label.startswith("read ") and label.endswith(", " + os.path.basename(drive["path"])))
            self.assertAlmostEqual(best / (1e-9 * drive["read"]), 1, delta=1e-3)

    def test_a_path_may_have_any_bytes(self):
        name = os.fsdecode(b"c\x01l\xff<")
        os.mkdir(self.path(name))
        self.run_sluice("bench", "io", "--path", name, "--size", "1MiB", "--request", "256KiB", "--depth", 4, "--pattern", "read",
                        "--rounds", 1, "--json", "io.json", "--plot", "io.svg")
        self.assertIn("c\ufffdl\ufffd<", ElementTree.tostring(self.picture("io.svg"), encoding="unicode").replace("&lt;", "<"))
        self.assertEqual(self.read_json("io.json")["paths"], ["c\x01l\ufffd<"])
        self.run_sluice("train", self.write_config(), "--checkpoint", name, "--checkpoint-every", 2, "--json", "run.json")
        self.assertIn("c\x01l\ufffd<", self.read_json("run.json")["checkpoints"][0]["path"])

    def test_bench_adam(self):
        self.run_sluice("bench", "adam", "--parameters", 50000, "--rounds", 3, "--threads", 1, "--json", "adam.json", "--plot", "adam.svg")
        expected = {}
        for row in self.read_json("adam.json")["results"]:
            for name, key in (("update", "update"), ("the same streams without arithmetic", "limit"), ("memcpy", "memcpy"), ("triad", "triad")):
                spread = row[key + "_gb_per_s"]
                expected[f"{row['state']}, 1 thread, {name}"] = [spread["median"], spread["p25"], spread["p75"]]
        self.assert_close(self.bars("adam.svg"), expected)

    def test_bench_step(self):
        self.run_sluice("bench", "step", "--path", "storage", "--parameters", 100000, "--units", 4, "--steps", 2, "--regime", "balanced",
                        "--policy", "serial", "--policy", "deferred", "--json", "step.json", "--plot", "step.svg")
        regime, = self.read_json("step.json")["regimes"]
        expected = {}
        for policy in regime["policies"]:
            label = f"balanced, {policy['policy']}, "
            step = policy["step_s"]
            expected.update({label + "measured": [step["median"], step["min"], step["max"]], label + "T_bound": [policy["t_bound_s"]],
                             label + "T_min": [regime["t_min_s"]]})
        self.assert_close(self.bars("step.svg"), expected)

    def test_bench_matrix(self):
        self.run_sluice("bench", "matrix", "--path", "storage", "--parameters", 300_000, "--units", 6, "--steps", 2, "--compute-ms", 10, "--rate", "2GB",
                        "--json", "matrix.json", "--plot", "matrix.svg")
        expected = {}
        for cell in self.read_json("matrix.json")["cells"]:
            label, measured = f"stage {cell['stage']}, {cell['offload']}, ", cell["measured"]
            expected[label + "measured"] = [measured["step_s"], min(measured["steps_s"]), max(measured["steps_s"])]
            expected[label + "planned"] = [cell["planned"]["step_s"]]
        self.assertEqual(len(expected), 10)
        self.assert_close(self.bars("matrix.svg"), expected)

    def plan(self, *arguments, expect=0):
        words = ("plan", "--parameters", "100M", "--layers", 8, "--tokens", 40000, "--gpu", "4090", "--drive", "990pro", "--set", "memory.device=128MiB")
        self.run_sluice(*words, *arguments, "--json", "plan.json", expect=expect)
        return self.read_json("plan.json")["placements"][0]

    def test_a_plan_over_budgets(self):
        own = self.plan("--host-memory", "500MiB", "--plot", "plan.svg")
        root = self.picture("plan.svg")
        lines = {}
        for point in root.iter(SPACE + "circle"):
            name, value = re.fullmatch(r"[^:]+: (.*) (\S+) s", point.find(SPACE + "title").text).groups()
            lines.setdefault(name, {})[int(point.get("data-place"))] = float(value)
        whole = lines.pop("the step")
        self.assertGreater(len(whole), 20)
        self.assertAlmostEqual(whole[500 << 20], own["step"]["step_s"], delta=1e-5 * own["step"]["step_s"])
        # Each point is the plan under that budget; below the first nothing fits, above the last nothing changes.
        budgets = sorted(whole)
        for budget in (budgets[0], budgets[len(budgets) // 2], budgets[-1]):
            step = self.plan("--host-memory", budget)["step"]
            self.assertAlmostEqual(whole[budget] / step["step_s"], 1, delta=1e-5)
            for name, line in lines.items():
                busy_s = step["busy_s"][name.removesuffix(", busy")]
                self.assertAlmostEqual(line[budget], busy_s, delta=1e-5 * step["step_s"], msg=name)
        self.plan("--host-memory", budgets[0] * 9 // 10, expect=5)
        self.assertEqual(self.plan("--host-memory", 8 * budgets[-1])["step"], self.plan("--host-memory", budgets[-1])["step"])
        # From where on more memory stops helping.
        least = min(whole.values())
        enough = next(budget for budget in budgets if whole[budget] <= 1.01 * least)
        texts = "".join(text.text or "" for text in root.iter(SPACE + "text"))
        self.assertLess(enough, budgets[-1], "computation hides the rest before all is in memory")
        marked = re.search(r"from (\S+ \S+) on, more host memory wins less than 1 %", texts).group(1)
        titles = {int(point.get("data-place")): point.find(SPACE + "title").text.split(":")[0] for point in root.iter(SPACE + "circle")}
        self.assertEqual(marked, titles[enough])
        self.assertGreater(max(whole.values()), 1.05 * least, "memory helps at all")
        self.assertIn("this config's budget, 500 MiB", texts)

    def test_more_memory_is_never_much_slower(self):
        # Around 210 MiB all gradients begin to fit beside a single lane; and at 260 MiB some parameters fit, and no longer one more lane.
        least = None
        for budget in (*range(196, 240, 4), 260, 300, 330, 400, 500, 700, 1200):
            with self.subTest(f"{budget} MiB"):
                step_s = self.plan("--host-memory", f"{budget}MiB")["step"]["step_s"]
                least = min(least or step_s, step_s)
                self.assertLess(step_s, 1.08 * least)

    def test_a_plan_that_fits_no_budget_has_no_picture(self):
        words = ("plan", "--parameters", "100M", "--layers", 8, "--set", "memory.device=1MiB")
        bare = self.run_sluice(*words, "--json", "bare.json", expect=5)
        done = self.run_sluice(*words, "--json", "plan.json", "--plot", "plan.svg", expect=5)
        self.assertEqual((done.stdout, self.read_json("plan.json")), (bare.stdout, self.read_json("bare.json")))
        self.assertIn("no budget of host memory lets this config fit, so there is no picture", done.stderr)
        self.assertFalse(os.path.exists(self.path("plan.svg")))

    def test_budgets_that_the_drives_have_no_room_for_are_left_out(self):
        self.plan("--host-memory", "500MiB", "--drive-space", "300MB", "--plot", "plan.svg", expect=5)
        budgets = sorted({int(point.get("data-place")) for point in self.picture("plan.svg").iter(SPACE + "circle")})
        self.assertNotIn(500 << 20, budgets)
        self.assertTrue(self.plan("--host-memory", budgets[0], "--drive-space", "300MB")["fits"])
        self.plan("--host-memory", "500MiB", "--drive-space", "1MB", "--set", "placement.optimizer=nvme", "--plot", "none.svg", expect=5)
        self.assertFalse(os.path.exists(self.path("none.svg")))

    def test_the_same_figures_give_the_same_file(self):
        for name in ("one.svg", "two.svg"):
            self.run_sluice("plan", "--parameters", "10M", "--layers", 4, "--set", "memory.host=100MiB", "--plot", name)
        with open(self.path("one.svg"), "rb") as one, open(self.path("two.svg"), "rb") as two:
            self.assertEqual(one.read(), two.read())

    def test_the_page_of_two_traces(self):
        for name, steps in (("a", (9, 10, 10, 10, 10.1)), ("b", (9, 12, 12.2, 12, 12))):
            subprocess.run([os.environ["SLUICE_MADE_TRACE"], self.path(name), *map(str, steps)], check=True)
        self.run_sluice("trace", "diff", "a", "b", "--json", "diff.json", "--html", "diff.html", expect=3)
        with open(self.path("diff.html"), encoding="utf-8") as file:
            page = file.read()
        diff = self.read_json("diff.json")
        self.assertEqual(os.stat(self.path("diff.html")).st_mode & 0o777, 0o600)
        self.assertRegex(page, r"The mean step went from 10\.025 ms to 12\.050 ms \(\+20\.\d %\); that is not chance\.")
        for change in (diff["step"], *diff["parts"], *diff["causes"], *diff["units"]):
            row = f"<td>{1e3 * change['before_s']:.3f}</td><td>{1e3 * change['after_s']:.3f}</td>"
            self.assertIn(row, page)
        for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
            ElementTree.fromstring(svg)
        self.assertNotIn("<script", page)
