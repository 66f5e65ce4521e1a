"""trace.nvtx: the ranges that a listening tool gets, beside the spans of the trace of the same run."""

import collections
import os

from cli_support import ON_NVME, CliCase

RECORDER = os.environ.get("SLUICE_NVTX_RECORDER", "")  # tests/support/nvtx_recorder.cc

# Spans that are no ranges, and ranges that the export leaves out.
NO_RANGES = ("lane ", "resident ")
NO_SPANS = ("acquire ", "finish")


class Nvtx(CliCase):
    LABEL = "command"

    def environment(self):
        return dict(super().environment(), NVTX_INJECTION64_PATH=RECORDER, SLUICE_NVTX_RECORD=self.path("ranges"))

    def setUp(self):
        super().setUp()
        if not RECORDER:
            self.skipTest("this build has no NVTX")

    def ranges(self):
        """How often each name began; every range ended once, after it began."""
        names, is_open = collections.Counter(), set()
        with open(self.path("ranges"), encoding="utf-8") as file:
            lines = [line.rstrip("\n").split("\t") for line in file]
        self.assertEqual(lines[0], ["domain", "0", "sluice"])
        for what, number, name in lines[1:]:
            self.assertIn(what, ("begin", "end"))
            if what == "begin":
                names[name] += 1
                is_open.add(number)
            else:
                is_open.remove(number)
        self.assertEqual(is_open, set())
        return names

    def spans(self):
        self.run_sluice("trace", "export", "run.trace", "--chrome", "chrome.json")
        events = self.read_json("chrome.json")["traceEvents"]
        tracks = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
        own = [tracks[name] for name in ("steps", "compute", "Adam, norms")]
        return collections.Counter(event["name"] for event in events
                                   if event["ph"] == "X" and event["tid"] in own or event["ph"] == "b" and event["name"] != "moved")

    def test_ranges_have_the_names_of_the_trace(self):
        for policy in ("deferred", "serial"):
            with self.subTest(policy):
                self.run_sluice("train", self.write_config({**ON_NVME, "trace.nvtx": True, "optimizer.overlap": policy,
                                                            "batch.micro_batches": 3}), "--quiet", "--trace", "run.trace")
                ranges = {name: count for name, count in self.ranges().items() if not name.startswith(NO_SPANS) and "inference" not in name}
                spans = {name: count for name, count in self.spans().items() if not name.startswith(NO_RANGES)}
                self.assertEqual(ranges, spans)
                for name in ("step 1", "h.0 forward", "h.1 backward", "read h.0 parameters", "write h.0 optimizer state",
                             "copy to device h.1", "copy to host h.1", "adam head", "accumulate h.0", "norm h.1"):
                    self.assertIn(name, ranges)

    def test_acquire_and_finish_are_ranges_too(self):
        self.run_sluice("train", self.write_config({"trace.nvtx": True}), "--quiet", "--steps", 2)
        ranges = self.ranges()
        self.assertEqual(ranges["finish"], 2)
        self.assertEqual(ranges["acquire h.0 forward"], ranges["h.0 forward"])

    def test_off_loads_nothing(self):
        self.run_sluice("train", self.write_config(ON_NVME), "--quiet", "--trace", "run.trace")
        self.assertFalse(os.path.exists(self.path("ranges")))


class NoNvtx(CliCase):
    LABEL = "command"

    def test_a_build_without_it_says_so(self):
        if RECORDER:
            self.skipTest("this build has NVTX")
        message = self.fail_train((1, 2, 3, 4, 5, 6), {"trace.nvtx": True, "trace.file": "run.trace"})
        self.assertIn("this build has no NVTX", message)
        self.assertFalse(os.path.exists(self.path("run.trace")))
