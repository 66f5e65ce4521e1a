"""train --trace and sluice trace: the file, the summary, the page, the exports, comparisons and predictions."""

import base64
import collections
import csv
import html.parser
import json
import os
import re
import stat
import struct
import subprocess
import time

from cli_support import ON_NVME, RUN_TIMEOUT_S, CliCase

STEPS = 5


class Scripts(html.parser.HTMLParser):
    """The scripts of a page by their ids, and every address that it refers to."""

    def __init__(self, text):
        super().__init__()
        self.scripts = {}
        self.addresses = []
        self.inside = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.addresses += [values[key] for key in ("src", "href") if key in values]
        self.inside = values.get("id", "") if tag == "script" else None

    def handle_data(self, data):
        if self.inside is not None:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    def handle_endtag(self, tag):
        self.inside = None


def span_count(packed):
    """Spans are four varints each: their last bytes are below 128."""
    return sum(byte < 128 for byte in base64.b64decode(packed)) // 4


class Trace(CliCase):
    LABEL = "command"

    def record(self, name="run.trace", **values):
        done = self.run_sluice("train", self.write_config({**ON_NVME, **values}), "--trace", name, "--steps", STEPS,
                               "--json", "run.json")
        self.run_figures = self.read_json("run.json")
        return done.stdout

    def test_a_traced_run_ends_with_its_summary(self):
        for name in ("eager", "deferred", "speculative", "serial"):
            with self.subTest(name):
                clip = {"optimizer.clip_norm": 0} if name == "eager" else {}
                output = self.record(**{"optimizer.overlap": name}, **clip)
                self.assertRegex(output, r"trace: \d+ records in run\.trace")
                self.assertEqual(stat.S_IMODE(os.stat(self.path("run.trace")).st_mode), 0o600)
                summary = self.run_sluice("trace", "summary", "run.trace", "--bytes-written-rating", "600TB").stdout
                self.assertLessEqual(len(summary.splitlines()), 40)
                self.assertRegex(summary, rf"rank 0 of 1: {STEPS} steps, \d+ records, 0 lost")
                self.assertIn("drives rated for 600 TB last ", summary)
                read, ideal = map(float, re.search(r"step: ([\d.]+) read \(ideal ([\d.]+)\)", summary).groups())
                written, needed = map(float, re.search(r"([\d.]+) written \(ideal ([\d.]+)\)", summary).groups())
                if name == "speculative":  # which writes again what clipping makes it update again
                    self.assertGreaterEqual(written, needed)
                else:
                    self.assertEqual(written, needed)
                self.assertLessEqual(read, ideal * (3 if name == "speculative" else 1.2))
                shares = re.search(r"compute ([\d.]+) %, exposed I/O ([\d.]+) %, exposed optimizer ([\d.]+) %, other ([\d.]+) %", summary)
                self.assertAlmostEqual(sum(map(float, shares.groups())), 100, delta=0.2)

    def test_every_step_says_where_its_time_went(self):
        self.record()
        for step in self.run_figures["steps"]:
            parts = sum(step[key] for key in ("compute_s", "exposed_io_s", "exposed_optimizer_s", "other_s"))
            self.assertLessEqual(parts, step["time_s"] * 1.0001)
            self.assertTrue(0 <= step["hidden_share"] <= 1)
            self.assertGreater(step["percent_of_t_bound"], 0)
        limits = self.run_figures["limits"]
        self.assertLessEqual(limits["t_min_s"], limits["t_bound_s"] * 1.000001)
        self.assertGreater(limits["adam_parameters_per_second"], 0)

    def test_a_short_run_has_no_limits(self):
        self.assertIsNone(self.train(ON_NVME, "--steps", 2)["limits"])

    def test_a_ring_that_cannot_be_is_refused(self):
        message = self.fail_train(2, {"trace.ring": "99TiB"}, "--trace", "large.trace")
        self.assertIn('"trace.ring" is 99.0 TiB, but each thread has at most 64.0 GiB', message)
        self.assertFalse(os.path.exists(self.path("large.trace")))

    def test_the_page_holds_the_trace(self):
        self.record()
        self.run_sluice("trace", "html", "run.trace", "-o", "page.html")
        with open(self.path("page.html"), encoding="utf-8") as file:
            page = Scripts(file.read())
        self.assertEqual(page.addresses, [])
        rank = json.loads(page.scripts["data"])["ranks"][0]
        self.assertEqual(len(rank["steps"]), STEPS)
        names = {lane["name"]: span_count(lane["spans"]) for lane in rank["lanes"]}
        records = self.records()
        self.assertEqual(names["drive 0 reads"] + names["drive 0 writes"],
                         sum(row["kind"] in ("read", "write") and int(row["end_ns"]) >= self.first_step for row in records))
        self.assertIn("wte.weight", sum((unit["tensors"] for unit in rank["units"]), []))

    def records(self):
        self.run_sluice("trace", "export", "run.trace", "--csv", "run.csv", "--json", "all.json", "--chrome", "chrome.json")
        with open(self.path("run.csv"), newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.first_step = min(int(row["begin_ns"]) for row in rows if row["kind"] == "step")
        return rows

    def test_exports_agree(self):
        self.record()
        rows = self.records()
        document = self.read_json("all.json")["ranks"][0]
        self.assertEqual(len(document["records"]), len(rows))
        self.assertEqual(sum(record["size_bytes"] for record in document["records"]),
                         sum(int(row["size_bytes"]) for row in rows))
        self.assertEqual(len(document["steps"]), STEPS)
        for stall in document["stalls"]:
            self.assertLessEqual(stall["begin_ns"], stall["end_ns"])
        # As many bytes as the run counted, in the steps and the evaluation behind them.
        read = sum(int(row["size_bytes"]) for row in rows if row["kind"] == "read")
        self.assertGreaterEqual(read, sum(step["nvme_read_bytes"] for step in self.run_figures["steps"]))

    def test_chrome_events_are_paired(self):
        self.record()
        rows = self.records()
        events = self.read_json("chrome.json")["traceEvents"]
        open_spans = collections.Counter()
        for event in events:
            if event["ph"] in "be":
                open_spans[(event["cat"], event["id"], event["name"])] += 1 if event["ph"] == "b" else -1
        self.assertEqual(set(open_spans.values()), {0})
        starts = {event["id"] for event in events if event["ph"] == "s"}
        ends = {event["id"] for event in events if event["ph"] == "f"}
        self.assertEqual(starts, ends)
        self.assertTrue(starts)
        self.assertEqual(sum(event["ph"] == "X" and event["tid"] == 2 for event in events),
                         sum(row["kind"] == "compute" for row in rows))
        self.assertTrue(any(event["ph"] == "C" and event["name"] == "drive 0 depth" for event in events))

    def test_diff_of_a_run_with_itself_shows_its_parts(self):
        self.record()
        diff = self.run_sluice("trace", "diff", "run.trace", "run.trace").stdout
        for part in ("compute", "exposed I/O", "exposed optimizer", "other"):
            self.assertRegex(diff, rf"(?m)^{part} .* 0\.000 \+- ")
        self.assertNotIn("regression", diff)

    def test_diff_and_its_exit_code(self):
        """By traces whose steps have the lengths that they are given: in a real run under load, the lengths may differ so much
        that no difference is certain."""
        for name, *steps_ms in (("before", 900, 10, 10.1, 9.9, 10), ("slower", 900, 11, 11.1, 10.9, 11),
                                ("unsteady", 900, 6, 40, 5, 35), ("one", 900, 30)):
            subprocess.run([os.environ["SLUICE_MADE_TRACE"], self.path(name), *map(str, steps_ms)], check=True)
        regression = "regression: the step is longer by more than {} %"
        for after, percent, code in (("slower", 5, 3), ("slower", 9, 3), ("slower", 11, 0), ("before", 0, 0), ("unsteady", 5, 0), ("one", 5, 0)):
            with self.subTest(after, percent=percent):
                text = self.run_sluice("trace", "diff", "before", after, "--percent", percent, expect=code).stdout
                self.assertEqual(regression.format(percent) in text, code == 3)
        self.run_sluice("trace", "diff", "slower", "before", "--percent", 0)
        # Five percent are the default.
        self.assertIn(regression.format(5), self.run_sluice("trace", "diff", "before", "slower", expect=3).stdout)
        subprocess.run([os.environ["SLUICE_MADE_TRACE"], self.path("little"), "900", "10.4", "10.5", "10.3", "10.4"], check=True)
        self.run_sluice("trace", "diff", "before", "little")

    def test_all_say_the_same_of_a_step(self):
        output = self.record(**{"run.steps": 9})
        steps = self.run_figures["steps"][1:]
        parts = [sum(step[key] for step in steps) for key in ("compute_s", "exposed_io_s", "exposed_optimizer_s", "other_s")]
        mean_ms = 1e3 * sum(parts) / len(steps)
        summary = self.run_sluice("trace", "summary", "run.trace").stdout
        self.assertAlmostEqual(float(re.search(r"mean step ([\d.]+) ms", summary)[1]), mean_ms, delta=0.006)
        self.assertAlmostEqual(1e3 * float(re.search(r"the mean step of ([\d.]+) s", output)[1]), mean_ms, delta=0.6)
        diff = self.run_sluice("trace", "diff", "run.trace", "run.trace").stdout
        self.assertIn("(mean)", diff)
        self.assertAlmostEqual(float(re.search(r"^step +([\d.]+)", diff, re.MULTILINE)[1]), mean_ms, delta=0.001)
        whatif = self.whatif("run.trace")
        self.assertAlmostEqual(float(re.search(r"(?:recorded|mean) step (?:took )?([\d.]+) ms", whatif)[1]), mean_ms, delta=0.001)
        # The hidden share, of the run and step by step.
        hidden = float(re.search(r"hidden ([\d.]+) % of I/O", output)[1])
        self.assertAlmostEqual(float(re.search(r"hidden: ([\d.]+) %", summary)[1]), hidden, delta=0.1)
        self.run_sluice("trace", "html", "run.trace", "-o", "page.html")
        with open(self.path("page.html"), encoding="utf-8") as file:
            rank = json.loads(Scripts(file.read()).scripts["data"])["ranks"][0]
        self.assertAlmostEqual(float(re.search(r"steps of ([\d.]+) ms", rank["head"])[1]), mean_ms, delta=0.006)
        self.assertEqual(rank["verdict"], summary.splitlines()[0])
        for step, shown in zip(self.run_figures["steps"], rank["steps"]):
            self.assertAlmostEqual(shown["hidden"], 100 * step["hidden_share"], delta=0.1)
        # A share above 100 % is explained.
        shares = [float(share) for share in re.findall(r"([\d.]+) % of [\d.]+ s \(", output.partition("the mean step")[2])]
        self.assertEqual(len(re.findall("a share (?:this far )?above", output)), 1 if max(shares) > 100 else 0)

    def test_the_summary_begins_with_a_verdict_and_ranks_what_is_exposed(self):
        self.record()
        summary = self.run_sluice("trace", "summary", "run.trace").stdout
        self.assertRegex(summary.splitlines()[0], r"^\d+ % compute")
        self.assertNotIn("(pass)", summary)
        exposed = sum(map(float, re.search(r"exposed I/O ([\d.]+) %, exposed optimizer ([\d.]+) %", summary).groups()))
        listed = re.findall(r"^ +([\d.]+) %  .* waits", summary, re.MULTILINE)
        self.assertLessEqual(sum(map(float, listed)), exposed + 0.2)

    def whatif(self, *arguments):
        """The output of the command. On a machine under load the model may be too far off to predict, and then says
        so."""
        done = self.run_sluice("trace", "whatif", *arguments, expect=(0, 2))
        if done.returncode == 2:
            self.expect_misfit(done.stderr)
            return done.stderr
        self.assertLess(abs(float(re.search(r"an error of ([+-][\d.]+) %", done.stdout)[1])), 25.1)
        recorded, predicted = (float(re.search(rf"{word} step ([\d.]+) ms", done.stdout)[1]) for word in ("recorded", "predicted"))
        self.assertGreater(predicted, 0)
        if len(arguments) == 1:
            self.assertEqual(recorded, predicted)
        return done.stdout

    def test_whatif(self):
        self.record()
        self.whatif("run.trace")
        for setting in ("nvme.read=2x", "nvme=0.5x", "drives=2", "prefetch_window=3", "lanes=8", "policy=serial",
                        "memory.host=1GiB", "compute=2x", "adam=2x", "copy=2x"):
            self.whatif("run.trace", "--set", setting)
        for setting in ("nvme=2", "nvme", "speed=2x", "drives=0", "lanes=many", "policy=auto", "lanes=2.5", "prefetch_window=0.5"):
            self.assertIn(setting, self.run_sluice("trace", "whatif", "run.trace", "--set", setting, expect=2).stderr)
        # In the words of a run that has these settings.
        for setting, word in (("policy=eager", "--set policy: eager updates before the last gradient is known, so it needs clip_norm 0"),
                              ("lanes=100000", "optimizer.lanes")):
            self.assertIn(word, self.run_sluice("trace", "whatif", "run.trace", "--set", setting, expect=2).stderr)

    def test_whatif_chooses_lanes_for_another_budget(self):
        self.record()
        budget = self.smallest_budget("memory.host", ON_NVME)
        self.whatif("run.trace", "--set", f"memory.host={budget}")
        self.expect_no_room("--set", "lanes=8", "--set", f"memory.host={budget}")
        self.record(**{"optimizer.lanes": 8})
        self.expect_no_room("--set", f"memory.host={budget}")

    def expect_no_room(self, *arguments):
        done = self.run_sluice("trace", "whatif", "run.trace", *arguments, expect=5)
        self.assertRegex(done.stderr, "memory.host.*too small")

    def test_activations_have_units_and_waits_of_their_own(self):
        values = {"activations": "nvme", "batch.micro_batches": 2, "model.tied_head": False, "model.layers": 4}
        values["memory.device"] = self.smallest_budget("memory.device", {**ON_NVME, **values})
        self.record(**values)
        rows = self.records()
        steps = {step["step"]: step for step in self.run_figures["steps"]}
        for kinds, key in ((("read", "copy to device"), "activation_in_bytes"), (("write", "copy to host"), "activation_out_bytes")):
            for kind in kinds:
                moved = collections.Counter()
                for row in rows:
                    if row["kind"] == kind and row["detail"] == "2":
                        self.assertRegex(row["unit_name"], r"^(embedding|h\.\d)$")
                        self.assertEqual(row["block"], "-1")
                        moved[int(row["step"])] += int(row["size_bytes"])
                for number, step in steps.items():
                    if kind.startswith("copy"):  # without the padding of storage units
                        self.assertLessEqual(moved[number], step[key])
                        self.assertGreater(moved[number], 0)
                    else:
                        self.assertEqual(moved[number], step[key])
        waited = sum(int(row["end_ns"]) - int(row["begin_ns"]) for row in rows if row["reason"] == "activation")
        self.assertGreater(waited, 0)
        # Computation is what is left of a lease's time: no two things at a time.
        spans = sorted((int(row["begin_ns"]), int(row["end_ns"])) for row in rows if row["kind"] in ("compute", "wait"))
        for (_, end), (begin, _) in zip(spans, spans[1:]):
            self.assertLessEqual(end, begin)

    def test_whatif_counts_activations_as_the_run_does(self):
        for order in ("horizontal", "vertical"):
            with self.subTest(order):
                values = {"activations": "nvme", "batch.order": order, "batch.micro_batches": 3, "model.tied_head": False, "model.layers": 4}
                values["memory.device"] = self.smallest_budget("memory.device", {**ON_NVME, **values})
                text = self.fitting_whatif(**values)
                out, back = map(int, re.search(r"bytes per step: (\d+) out, (\d+) back", text).groups())
                step = self.run_figures["steps"][-1]
                self.assertEqual((out, back), (step["activation_out_bytes"], step["activation_in_bytes"]))
                self.assertRegex(text, "left out: boundary activations")
        self.assertNotIn("left out", self.fitting_whatif())

    def fitting_whatif(self, **values):
        """Records a run that the model fits. A step of some milliseconds may not be such a run on a machine under
        load."""
        for _ in range(8):
            self.record(**values)
            done = self.run_sluice("trace", "whatif", "run.trace", expect=(0, 2))
            if done.returncode == 0:
                return done.stdout
            self.expect_misfit(done.stderr)
        self.skipTest("this machine is too unsteady for a prediction: " + done.stderr)

    def test_whatif_needs_rates_of_what_it_moves(self):
        """A run that touched no storage says nothing of its rate."""
        self.record(**{"placement.parameters": "auto", "placement.optimizer": "auto", "memory.host": "1GiB"})
        self.assertEqual(sum(row["kind"] in ("read", "write") for row in self.records()), 0)
        done = self.run_sluice("trace", "whatif", "run.trace", "--set", "memory.host=1MiB", expect=(2, 5))
        self.assertIn("has no reads of storage, so their rate is unknown", done.stderr)

    def test_evaluations_are_no_training(self):
        self.run_sluice("train", self.write_config({**ON_NVME, "optimizer.overlap": "serial", "run.steps": 6}), "--trace", "run.trace",
                        "--json", "run.json", "--validate-every", 1, "--sample-every", 2, "--sample-tokens", 3)
        self.run_sluice("trace", "summary", "run.trace", "--json", "summary.json")
        storage = self.read_json("summary.json")["ranks"][0]["storage"]
        steps = self.read_json("run.json")["steps"][1:-1]
        for side in ("read", "write"):
            key = {"read": "read_bytes_per_step", "write": "written_bytes_per_step"}[side]
            self.assertEqual(storage[key], sum(step[f"nvme_{side}_bytes"] for step in steps) / len(steps))

    def test_steps_in_the_middle_are_all_counted(self):
        subprocess.run([os.environ["SLUICE_MADE_TRACE"], self.path("made"), *map(str, (900, 10, 100, 10, 10, 10))], check=True)
        for steps, count, mean_s in (("3-4", 2, 0.055), ("1-3", 2, 0.055), ("2-6", 5, 0.028), ("3", 1, 0.1)):
            with self.subTest(steps):
                self.run_sluice("trace", "summary", "made", "--steps", steps, "--json", "summary.json")
                means = self.read_json("summary.json")["ranks"][0]["steady_steps"]
                self.assertEqual(means["count"], count)
                self.assertAlmostEqual(means["mean_s"], mean_s, places=6)

    def test_a_crafted_trace_ends_soon(self):
        """Headers that name all bytes behind them: their checksums take the square of the file's length where they are believed."""
        count = 1 << 17
        for name, kind in (("records.trace", 1), ("texts.trace", 2)):
            with open(self.path(name), "wb") as file:
                file.writelines(struct.pack("<QIIQII16sQQ", 0x0A31454341525453, kind, 0, 0, 0, 0, b"", (count - 1 - i) * 64, 1)
                                for i in range(count))
            began = time.monotonic()
            self.assertIn("is no trace", self.run_sluice("trace", "summary", name, expect=2).stderr)
            self.assertLess(time.monotonic() - began, 20)

    def test_what_is_no_trace_is_refused(self):
        self.assertIn("text.txt", self.run_sluice("trace", "summary", "text.txt", expect=2).stderr)
        self.assertIn("none.trace", self.run_sluice("trace", "html", "none.trace", "-o", "x.html", expect=2).stderr)
        os.mkfifo(self.path("pipe"))
        for name in ("pipe", "storage"):
            self.assertIn("not a regular file", self.run_sluice("trace", "summary", name, expect=2).stderr)
        self.run_sluice("trace", "export", "text.txt", expect=2)
        self.assertIn("none/x", self.run_sluice("train", self.write_config(ON_NVME), "--trace", "none/x", expect=2).stderr)

    def test_a_run_killed_in_a_step_leaves_what_that_step_did(self):
        # One step lasts for many minutes, and a use for so long that it is not between two that the run dies.
        config = self.write_config({**ON_NVME, "batch.micro_batches": 65536, "batch.sequences": 64})
        process = subprocess.Popen(self.command("train", config, "--quiet", "--trace", "run.trace"), cwd=self.folder,
                                   env=self.environment())
        self.addCleanup(process.kill)
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not os.path.exists(self.path("run.trace")) or os.path.getsize(self.path("run.trace")) < 200_000:
            self.assertIsNone(process.poll())
            self.assertLess(time.monotonic(), deadline, "nothing is traced")
            time.sleep(0.01)
        time.sleep(1.5)
        process.kill()
        killed_ns = time.monotonic_ns()
        process.wait(timeout=RUN_TIMEOUT_S)
        rows = self.records()
        [step] = [row for row in rows if row["kind"] == "step"]
        computed = [row for row in rows if row["kind"] in ("compute", "wait")]
        self.assertEqual({row["step"] for row in computed}, {"1"})
        # All of the step but its last moments, and one after the other.
        spans = sorted((int(row["begin_ns"]), int(row["end_ns"])) for row in computed)
        for (_, end), (begin, _) in zip(spans, spans[1:]):
            self.assertLessEqual(end, begin)
        passed = killed_ns - int(step["begin_ns"])
        self.assertGreater(passed, 1.4e9)
        uses = sorted({int(row["use"]) for row in computed if row["kind"] == "compute"})
        self.assertEqual(uses, list(range(len(uses))))  # whatever is between two of them on a machine under load
        self.assertEqual(max(int(row["end_ns"]) for row in rows), int(step["end_ns"]))
        self.assertEqual(spans[-1][1], int(step["end_ns"]))  # what was under way
        self.assertTrue(any(row["kind"] == "resident" and row["end_ns"] == step["end_ns"] for row in rows))
        summary = self.run_sluice("trace", "summary", "run.trace").stdout
        self.assertIn("the run did not end its trace, which ends in step 1", summary)
        self.run_sluice("trace", "export", "run.trace", "--json", "records.json")
        rank, = self.read_json("records.json")["ranks"]
        self.assertEqual((rank["open_step"], [step["is_open"] for step in rank["steps"]]), (1, [True]))
        self.assertRegex(summary, r"(?s)^no step ended while it was traced\n.*\nat work in the .*: compute \d")
        self.assertNotIn("mean step", summary)
        self.assertIn("has no step that ended", self.run_sluice("trace", "diff", "run.trace", "run.trace", expect=2).stderr)

    def test_a_refused_run_leaves_no_trace(self):
        self.run_sluice("train", self.write_config({**ON_NVME, "memory.host": "1KiB"}), "--trace", "run.trace", expect=5)
        self.assertFalse(os.path.exists(self.path("run.trace")))

    def test_a_short_trace_is_summarised_but_not_replayed(self):
        self.run_sluice("train", self.write_config(ON_NVME), "--trace", "run.trace", "--steps", 1)
        self.run_sluice("trace", "summary", "run.trace")
        self.assertIn("steps", self.run_sluice("trace", "whatif", "run.trace", expect=2).stderr)
