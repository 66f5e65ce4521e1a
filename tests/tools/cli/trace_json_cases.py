"""The answers of `sluice trace` and `sluice doctor` as JSON: against the trace's own records and the text for people."""

import collections
import json
import math
import os
import re
import subprocess

from cli_support import ON_NVME, CliCase


class TraceJson(CliCase):
    LABEL = "command"

    def record(self, **values):
        self.run_sluice("train", self.write_config({**ON_NVME, "run.steps": 6, **values}), "--quiet", "--trace", "run.trace")
        self.run_sluice("trace", "export", "run.trace", "--json", "records.json")
        return self.read_json("records.json")["ranks"][0]

    def made(self, name, *steps_ms):
        subprocess.run([os.environ["SLUICE_MADE_TRACE"], self.path(name), *map(str, steps_ms)], check=True)
        return name

    def test_what_waits_for_an_update_between_steps_counts_for_the_step(self):
        values = {**ON_NVME, "run.steps": 8, "optimizer.overlap": "deferred", "model.layers": 4, "model.embedding": 128}
        for options in (["--validate-every", 1], ["--checkpoint", "saved", "--checkpoint-every", 2]):
            with self.subTest(options):
                done = self.run_sluice("train", self.write_config(values), "--trace", "run.trace", "--json", "run.json", *options)
                steps = self.read_json("run.json")["steps"]
                parts = [sum(step[key] for key in ("compute_s", "exposed_io_s", "exposed_optimizer_s", "other_s")) for step in steps]
                for step, sum_s in zip(steps, parts):
                    self.assertGreater(step["time_s"], sum_s - 0.001)
                mean_s = sum(parts[1:]) / 7
                self.assertAlmostEqual(float(re.search(r"the mean step of ([\d.]+) s", done.stdout)[1]), mean_s, delta=0.0006)
                self.run_sluice("trace", "summary", "run.trace", "--json", "summary.json")
                self.assertAlmostEqual(self.read_json("summary.json")["ranks"][0]["steady_steps"]["mean_s"], mean_s, delta=0.001)
                self.run_sluice("trace", "export", "run.trace", "--json", "records.json")
                drained = [step["drained_ns"] for step in self.read_json("records.json")["ranks"][0]["steps"]]
                self.assertEqual([drained_ns > 0 for drained_ns in drained],
                                 [number % options[-1] == 0 and number != 8 for number in range(1, 9)])
                for step, drained_ns in zip(steps, drained):
                    self.assertGreaterEqual(step["exposed_optimizer_s"], 0.99e-9 * drained_ns)

    def test_settings_that_make_steps_longer_are_named(self):
        self.record(**{"optimizer.overlap": "serial", "storage.queue_depth": 1, "run.threads": 1})
        done = self.run_sluice("trace", "summary", "run.trace", "--json", "summary.json")
        settings = self.read_json("summary.json")["ranks"][0]["settings"]
        self.assertRegex("\n".join(settings), r"optimizer\.overlap is serial: .* waits [\d.]+ ms for them\. With deferred")
        self.assertRegex("\n".join(settings), r"storage\.queue_depth is 1: .* requests wait [\d.]+ ms")
        self.assertIn("settings that make the steps longer:\n  " + settings[0] + "\n", done.stdout)
        self.record()
        self.run_sluice("trace", "summary", "run.trace", "--json", "summary.json")
        settings = self.read_json("summary.json")["ranks"][0]["settings"]
        self.assertFalse([line for line in settings if "serial" in line or "queue_depth" in line])

    def test_diff_lists_the_settings_that_differ(self):
        for name, values in (("a.trace", {}), ("b.trace", {"storage.queue_depth": 2, "memory.host": "5MiB"})):
            self.record(**values)
            os.rename(self.path("run.trace"), self.path(name))
        done = self.run_sluice("trace", "diff", "a.trace", "b.trace", "--json", "diff.json", "--html", "diff.html", expect=(0, 3))
        settings = {setting["name"]: (setting["before"], setting["after"]) for setting in self.read_json("diff.json")["settings"]}
        self.assertEqual(settings["storage.queue_depth"], ("32", "2"))
        self.assertEqual(settings["memory.host"][1], str(5 << 20))
        self.assertNotIn("trace.file", settings)
        self.assertIn("settings that differ\n", done.stdout)
        self.assertIn("  storage.queue_depth: 32 -> 2\n", done.stdout)
        with open(self.path("diff.html"), encoding="utf-8") as file:
            self.assertIn("<tr><td>storage.queue_depth</td><td>32</td><td>2</td></tr>", file.read())
        self.assertIn("settings: no difference\n", self.run_sluice("trace", "diff", "a.trace", "a.trace", expect=(0, 3)).stdout)
        made = self.run_sluice("trace", "diff", self.made("c", 9, 10, 10), self.made("d", 9, 10, 10), "--json", "diff.json", expect=(0, 3))
        self.assertIsNone(self.read_json("diff.json")["settings"])
        self.assertIn("settings: unknown", made.stdout)

    def test_summary_has_the_figures_of_the_records(self):
        records = self.record()
        done = self.run_sluice("trace", "summary", "run.trace", "--bytes-written-rating", "1TB", "--json", "summary.json")
        summary = self.read_json("summary.json")
        self.assertEqual(summary["verdict"], done.stdout.splitlines()[0])
        self.assertEqual((summary["slowest_rank"], len(summary["ranks"])), (0, 1))
        rank = summary["ranks"][0]
        self.assertEqual((rank["steps"], rank["records"], rank["lost_records"]),
                         (6, len(records["records"]), records["lost"]))
        # Means over all steps but the first.
        steps = records["steps"][1:]
        means = rank["steady_steps"]
        self.assertEqual(means["count"], len(steps))
        for name in ("compute", "exposed_io", "exposed_optimizer", "other", "background"):
            self.assertAlmostEqual(means[f"{name}_s"], sum(step[f"{name}_ns"] for step in steps) * 1e-9 / len(steps), delta=1e-9)
        lengths = [(step["end_ns"] - step["begin_ns"]) * 1e-9 for step in steps]
        for name, value in (("mean_s", sum(lengths) / len(lengths)), ("least_s", min(lengths)), ("most_s", max(lengths))):
            self.assertAlmostEqual(means[name], value, delta=1e-9)
        # Flows: all records that move bytes.
        moved = collections.Counter()
        spans = collections.Counter()
        for record in records["records"]:
            moved[record["kind"]] += record["size_bytes"]
            spans[record["kind"]] += 1
        flows = {flow["name"]: flow for flow in rank["flows"]}
        for name, kind in (("read drive 0", "read"), ("write drive 0", "write"), ("copy to device", "copy to device")):
            self.assertEqual((flows[name]["size_bytes"], flows[name]["spans"]), (moved[kind], spans[kind]), name)
            self.assertAlmostEqual(flows[name]["bytes_per_second"] * flows[name]["busy_s"], moved[kind], delta=1e-6 * moved[kind])
            self.assertIsNone(flows[name]["share_of_peak"])
            self.assertLessEqual(flows[name]["moved_s"]["p50"], flows[name]["moved_s"]["p99.9"])
        # Bytes of storage in steps 2 to 5, whose update ended under the trace.
        for name, kind in (("read", "read"), ("written", "write")):
            total = sum(record["size_bytes"] for record in records["records"] if record["kind"] == kind and 2 <= record["step"] <= 5)
            self.assertEqual(rank["storage"][f"{name}_bytes_per_step"], total / 4)
        self.assertAlmostEqual(rank["storage"]["drives_last_days"] * rank["storage"]["written_bytes_per_day"], 1e12, delta=1e6)
        # Waits: longest first, and the text shows the same advice.
        waits = [wait["total_s"] for wait in rank["waits"]]
        self.assertEqual(waits, sorted(waits, reverse=True))
        for wait in rank["waits"][:3]:
            self.assertIn(wait["advice"], done.stdout)

    def test_a_dash_leaves_standard_output_to_json(self):
        self.record()
        text = self.run_sluice("trace", "summary", "run.trace").stdout
        done = self.run_sluice("trace", "summary", "run.trace", "--json", "-")
        self.run_sluice("trace", "summary", "run.trace", "--json", "summary.json")
        self.assertEqual(json.loads(done.stdout), self.read_json("summary.json"))
        self.assertEqual(done.stderr, text)
        self.assertFalse(os.path.exists(self.path("-")))
        # So it does for commands that do more than answer.
        done = self.run_sluice("plan", self.write_config(ON_NVME), "--json", "-")
        self.assertIn("placements", json.loads(done.stdout))
        self.assertIn("state", done.stderr)

    def test_some_steps_of_a_trace(self):
        whole = self.record()
        self.run_sluice("trace", "export", "run.trace", "--steps", "3-4", "--json", "some.json")
        some = self.read_json("some.json")["ranks"][0]
        for name in ("records", "steps"):
            wanted = [row for row in whole[name] if row["step"] in (3, 4)]
            self.assertNotIn(len(wanted), (0, len(whole[name])), name)
            self.assertEqual(some[name], wanted, name)
        for command in (["summary", "run.trace"], ["html", "run.trace", "-o", "page.html"], ["diff", "run.trace", "run.trace"],
                        ["export", "run.trace", "--csv", "-"], ["whatif", "run.trace", "--set", "nvme=2x"]):
            done = self.run_sluice("trace", *command, "--steps", "70-90", expect=2)
            self.assertIn('run.trace" has no record of steps 70 to 90', done.stderr)
        for text in ("0", "0-3", "4-3", "3-", "-3", "3-4x", "three", "3-99999999999999999999"):
            done = self.run_sluice("trace", "summary", "run.trace", f"--steps={text}", expect=2)
            self.assertIn(f'--steps "{text}" is neither a step nor a range such as 100-120', done.stderr)

    def test_a_trace_that_is_larger_than_memory(self):
        # Holes. Ten gigabytes are refused on every machine, however much memory it has.
        for size, words in ((1 << 42, "4.00 TiB"), (10 * 10**9, "9.31 GiB"), ((4 << 30) + 1, "4.00 GiB")):
            with open(self.path("large.trace"), "wb") as file:
                file.truncate(size)
            done = self.run_sluice("trace", "summary", "large.trace", expect=5)
            self.assertRegex(done.stderr, f'large.trace" has {words}; .* Give some steps, such as --steps 100-120')
            # The limit that is named is the one that holds here.
            is_of_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 6 * (4 << 30)
            self.assertIn("to read it whole takes" if is_of_memory else "at most 4.00 GiB are read whole", done.stderr)

    def test_an_output_is_no_trace(self):
        self.record()
        for arguments in (("summary", "run.trace"), ("diff", "run.trace", "run.trace"), ("whatif", "run.trace")):
            said = self.run_sluice("trace", *arguments, "--json", "run.trace", expect=2).stderr
            self.assertIn("run.trace", said)
            self.assertIn("--json", said)
        self.run_sluice("trace", "summary", "run.trace")
        self.assertIn("does not exist", self.run_sluice("trace", "summary", "run.trace", "--json", "gone/a.json", expect=2).stderr)

    def test_diff(self):
        before, after = [10, 10.1, 9.9, 10], [11, 11.1, 10.9, 11]
        self.made("before", 900, *before)
        self.made("after", 900, *after)
        self.run_sluice("trace", "diff", "before", "after", "--json", "diff.json", expect=3)
        diff = self.read_json("diff.json")
        self.assertEqual((diff["is_regression"], diff["regression_percent"], diff["step"]["is_certain"]), (True, 5, True))

        def variance_of_mean(values):
            mean = sum(values) / len(values)
            return sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)

        self.assertAlmostEqual(diff["step"]["before_s"], sum(before) / 4e3, delta=1e-9)
        self.assertAlmostEqual(diff["step"]["after_s"], sum(after) / 4e3, delta=1e-9)
        self.assertAlmostEqual(diff["step"]["difference_s"], 1e-3, delta=1e-9)
        # Equal spreads: six degrees of freedom.
        self.assertAlmostEqual(diff["step"]["margin_s"], 2.447e-3 * math.sqrt(variance_of_mean(before) + variance_of_mean(after)), delta=1e-8)
        self.assertEqual([part["name"] for part in diff["parts"]], ["compute", "exposed I/O", "exposed optimizer", "other"])
        self.made("one", 900, 30)
        one = json.loads(self.run_sluice("trace", "diff", "before", "one", "--json", "-").stdout)
        self.assertEqual((one["is_regression"], one["step"]["margin_s"]), (False, None))

    def test_whatif(self):
        self.record()
        done = self.run_sluice("trace", "whatif", "run.trace", "--set", "nvme=2x", "--json", "whatif.json", expect=(0, 2))
        if done.returncode == 2:  # the model is too far off on a machine under load, and says so
            self.assertIn("an error of", done.stderr)
            self.assertFalse(os.path.exists(self.path("whatif.json")))
            return
        answer = self.read_json("whatif.json")
        for key, word in (("recorded_step_s", "recorded step"), ("predicted_step_s", "predicted step"), ("model_step_s", "the model alone says")):
            self.assertAlmostEqual(1e3 * answer[key], float(re.search(rf"{word} ([\d.]+) ms", done.stdout)[1]), delta=6e-4)
        self.assertAlmostEqual(answer["model_error"], answer["model_step_s"] / answer["recorded_step_s"] - 1, delta=1e-9)
        for name, busy in answer["busy"].items():
            shown = re.search(rf"(?m)^{re.escape(name)} +([\d.]+) +([\d.]+)$", done.stdout)
            for key, value in zip(("recorded_s", "predicted_s"), shown.groups()):
                self.assertAlmostEqual(1e3 * busy[key], float(value), delta=6e-4)

    def test_doctor(self):
        for path, code in (("storage", 0), ("gone", 5)):
            done = self.run_sluice("doctor", "--path", path, "--json", "doctor.json", expect=code)
            found = self.read_json("doctor.json")
            self.assertEqual(found["has_failed"], code == 5)
            lines = []
            for finding in found["findings"]:
                mark = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}[finding["health"]]
                lines.append(f"{mark}  {finding['subject']}: {finding['text']}")
                lines += [f"      -> {finding['remedy']}"] if finding["remedy"] else []
            self.assertEqual(done.stdout.splitlines(), lines)
        self.assertIn("fail", [finding["health"] for finding in found["findings"]])
