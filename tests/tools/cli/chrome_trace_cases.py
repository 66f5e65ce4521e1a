"""sluice trace export --chrome against the Trace Event Format (chrome_trace.py), and that check against files with faults."""

import copy
import os
import shutil

from chrome_trace import faults_of
from cli_support import ON_NVME, CliCase
from ranks_support import RanksTest

SOUND = {"displayTimeUnit": "ms", "traceEvents": [
    {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}},
    {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "steps"}},
    {"ph": "M", "pid": 0, "tid": 2, "name": "thread_name", "args": {"name": "compute"}},
    {"ph": "X", "pid": 0, "tid": 1, "ts": 10, "dur": 10, "name": "step"},
    {"ph": "X", "pid": 0, "tid": 1, "ts": 12.5, "dur": 7.5, "name": "inside"},
    {"ph": "X", "pid": 0, "tid": 2, "ts": 30, "dur": 1.5, "name": "h.0 forward"},
    {"ph": "b", "pid": 0, "cat": "drive", "id": 1, "ts": 1, "name": "read"},
    {"ph": "b", "pid": 0, "cat": "drive", "id": 1, "ts": 2, "name": "moved"},
    {"ph": "e", "pid": 0, "cat": "drive", "id": 1, "ts": 3, "name": "moved"},
    {"ph": "e", "pid": 0, "cat": "drive", "id": 1, "ts": 3, "name": "read"},
    {"ph": "s", "pid": 0, "tid": 1, "cat": "use", "id": 7, "ts": 19, "name": "use"},
    {"ph": "f", "bp": "e", "pid": 0, "tid": 2, "cat": "use", "id": 7, "ts": 30, "name": "use"},
    {"ph": "C", "pid": 0, "ts": 5, "name": "depth", "args": {"value": 2}}]}

# Each is one fault: the number of an event, and what of it changes (None: the field goes; no field: the event does).
FAULTS = [(3, {"ph": "Y"}), (3, {"dur": -1}), (3, {"dur": None}), (3, {"ts": "10"}), (3, {"tid": "one"}), (3, {"name": None}),
          (3, {"dur": 5}), (5, {"tid": 1, "ts": 15}), (1, {}), (0, {"args": {}}), (6, {"cat": None}), (9, {}), (8, {}), (7, {}), (6, {}),
          (9, {"id": 2}), (9, {"ts": 2.5}), (8, {"name": "read"}), (10, {}), (11, {}), (10, {"ts": 21}), (11, {"ts": 31.5}),
          (10, {"ts": 31}), (11, {"bp": None}), (11, {"name": "other"}), (11, {"tid": 1, "ts": 9}), (12, {"args": {}}),
          (12, {"args": {"value": "2"}}), (12, {"args": {"value": float("nan")}}), (12, {"ts": float("inf")})]


def check(case, *traces):
    """Exports the traces; what phases their events have."""
    case.run_sluice("trace", "export", *traces, "--chrome", "chrome.json")
    document = case.read_json("chrome.json")
    case.assertEqual(faults_of(document)[:5], [])
    return {event["ph"] for event in document["traceEvents"]}


class Chrome(CliCase):
    LABEL = "command"

    def test_faults_are_found(self):
        self.assertEqual(faults_of(SOUND), [])
        for number, change in FAULTS:
            with self.subTest(number=number, change=change):
                document = copy.deepcopy(SOUND)
                event = document["traceEvents"][number]
                for field, value in change.items():
                    if value is None:
                        del event[field]
                    else:
                        event[field] = value
                if not change:
                    del document["traceEvents"][number]
                self.assertNotEqual(faults_of(document), [])
        self.assertNotEqual(faults_of({"traceEvents": []}), [])

    def test_traces_follow_the_format(self):
        for policy in ("eager", "deferred", "speculative", "serial"):
            with self.subTest(policy):
                values = {**ON_NVME, "optimizer.overlap": policy, "batch.micro_batches": 2}
                if policy == "eager":
                    values["optimizer.clip_norm"] = 0
                self.run_sluice("train", self.write_config(values), "--quiet", "--trace", "run.trace")
                self.assertEqual(check(self, "run.trace"), set("MXbesfC"))

    def test_a_trace_that_was_cut_follows_the_format(self):
        self.run_sluice("train", self.write_config(ON_NVME), "--quiet", "--trace", "run.trace")
        size = os.path.getsize(self.path("run.trace"))
        for share in (0.3, 0.6, 0.9):
            shutil.copy(self.path("run.trace"), self.path("cut.trace"))
            os.truncate(self.path("cut.trace"), int(size * share))
            check(self, "cut.trace")


class ChromeOfRanks(RanksTest):
    def test_ranks_follow_the_format(self):
        self.run_sluice("train", self.write_config({**ON_NVME, "run.threads": 1}), "--quiet", "--trace", "run.trace",
                        prefix=self.mpirun(3))
        check(self, "run.trace", "run.trace.rank1", "run.trace.rank2")
