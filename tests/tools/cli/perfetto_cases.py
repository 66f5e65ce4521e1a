"""`sluice trace export --perfetto`: every record and wait as a slice on a track of its unit, read by a small decoder here and, in the
slow tests, by the descriptions of Perfetto's own package and by Perfetto's trace processor."""

import collections
import csv
import json
import os
import shutil
import subprocess
import sys

from cli_support import ON_NVME, CliCase
from python_packages import with_package

ROWS = {"compute": "computation", "read": "storage", "write": "storage", "flush": "storage", "copy to device": "copies",
        "copy to host": "copies", "adam": "optimizer", "accumulate": "optimizer", "norm": "optimizer"}
# The packets of a file as plain values, by the package's own classes. A field that they do not know ends this.
READ = """
import json, sys
from google.protobuf.json_format import MessageToDict
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
trace = Trace()
trace.ParseFromString(open(sys.argv[1], "rb").read())
def known(message):
    assert len(UnknownFieldSet(message)) == 0, message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                known(one)
known(trace)
print(json.dumps([MessageToDict(packet, preserving_proto_field_name=True) for packet in trace.packet]))
"""
# Questions to the trace processor. A note is an annotation of a slice.
NOTES = ("step", "block", "bytes", "drive", "for")
SLICES = ("select parent.name as unit, track.name as track, slice.ts as begin_ns, slice.ts + slice.dur as end_ns, "
          + ", ".join(f"extract_arg(slice.arg_set_id, 'debug.{note}') as note_{note}" for note in NOTES)
          + " from slice join track on slice.track_id = track.id left join track as parent on track.parent_id = parent.id")
DEPTHS = ("select counter.ts as time_ns, counter.value as depth from counter join track on counter.track_id = track.id"
          " where track.name = 'drive 0 depth' order by counter.ts")


def fields(data):
    """[(number, value)] of a message; a value is a number or bytes."""
    found, at = [], 0

    def varint():
        nonlocal at
        value, shift = 0, 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value

    while at < len(data):
        key = varint()
        value = varint()
        if key & 7 == 2:
            at += value
            value = data[at - value:at]
        else:
            assert key & 7 == 0, key
        found.append((key >> 3, value))
    assert at == len(data)
    return found


def packets_of(data):
    """The packets in the form that MessageToDict gives them."""
    kinds = {1: "TYPE_SLICE_BEGIN", 2: "TYPE_SLICE_END", 4: "TYPE_COUNTER"}
    for number, packet in fields(data):
        assert number == 1
        parts = dict(fields(packet))
        shown = {"timestamp": parts[8]} if 8 in parts else {}
        if 60 in parts:
            track = dict(fields(parts[60]))
            shown["track_descriptor"] = {"uuid": track[1], "parent_uuid": track.get(5, 0), "name": track.get(2, b"").decode()}
            if 3 in track:
                process = dict(fields(track[3]))
                shown["track_descriptor"]["process"] = {"pid": process[1], "process_name": process[6].decode()}
            if 8 in track:
                shown["track_descriptor"]["counter"] = {}
        if 11 in parts:
            event = dict(fields(parts[11]))
            shown["track_event"] = {"type": kinds[event[9]], "track_uuid": event[11], "name": event.get(23, b"").decode(),
                                    "counter_value": event.get(30, 0), "debug_annotations": []}
            for annotation in (dict(fields(value)) for number, value in fields(parts[11]) if number == 4):
                shown["track_event"]["debug_annotations"].append({"name": annotation[10].decode(), **(
                    {"int_value": annotation[4]} if 4 in annotation else {"string_value": annotation[6].decode()})})
        yield shown


class PerfettoCase(CliCase):

    def record(self):
        self.run_sluice("train", self.write_config({**ON_NVME, "run.steps": 3, "batch.micro_batches": 2}), "--quiet", "--trace", "run.trace")
        self.run_sluice("trace", "export", "run.trace", "--json", "records.json", "--perfetto", "run.perfetto-trace")
        return self.read_json("records.json")["ranks"][0]

    def check(self, rank, packets):
        tracks, open_slices, slices, depths = {}, {}, [], collections.defaultdict(list)
        for packet in packets:
            if "track_descriptor" in packet:
                track = packet["track_descriptor"]
                self.assertNotIn(int(track["uuid"]), tracks)
                tracks[int(track["uuid"])] = track
            if "track_event" not in packet:
                continue
            event, time_ns = packet["track_event"], int(packet["timestamp"])
            uuid = int(event["track_uuid"])
            self.assertIn(uuid, tracks, "a track is described before its events")
            if event["type"] == "TYPE_SLICE_BEGIN":
                self.assertNotIn(uuid, open_slices, "slices of a track must not overlap")
                open_slices[uuid] = (event, time_ns)
            elif event["type"] == "TYPE_SLICE_END":
                begun, begin_ns = open_slices.pop(uuid)
                self.assertGreaterEqual(time_ns, begin_ns)
                annotations = {one["name"]: one.get("string_value", int(one.get("int_value", 0))) for one in begun["debug_annotations"]}
                slices.append((self.place(tracks, uuid), begin_ns, time_ns, annotations))
            else:
                depths[tracks[uuid]["name"]].append((time_ns, int(event.get("counter_value", 0))))
        self.assertEqual(open_slices, {})
        process, = [track["process"] for track in tracks.values() if "process" in track]
        self.assertEqual((int(process["pid"]), process["process_name"]), (1, "rank 0"))
        self.check_slices(rank, slices)
        self.check_depths(rank, depths["drive 0 depth"])

    def check_slices(self, rank, slices):
        """Each record and wait once, on a track below its unit's. A slice is (place, begin_ns, end_ns, notes)."""
        units = [unit["name"] for unit in rank["engine"]["units"]]
        expected = []
        for record in rank["records"]:
            if record["kind"] == "wait":
                continue
            unit = () if record["unit"] < 0 else (f"unit {units[record['unit']]}",)
            notes = {"step": record["step"]}
            if record["block"] >= 0:
                notes["block"] = record["block"]
            if record["size_bytes"] and record["kind"] != "step":
                notes["bytes"] = record["size_bytes"]
            if record["kind"] in ("read", "write"):
                notes["drive"] = record["lane"]
            expected.append((unit + (ROWS.get(record["kind"], record["kind"]),), record["begin_ns"], record["end_ns"], notes))
        for stall in rank["stalls"]:
            unit = () if stall["unit"] < 0 else (f"unit {units[stall['unit']]}",)
            row = "waits of the pass" if stall["of_pass"] else "waits"
            expected.append((unit + (row,), stall["begin_ns"], stall["end_ns"],
                             {"for": stall["reason"], "step": stall["step"], **({"block": stall["block"]} if stall["block"] >= 0 else {})}))
        def in_order(some):
            return sorted((place, begin_ns, end_ns, sorted(notes.items())) for place, begin_ns, end_ns, notes in some)

        self.assertEqual(in_order(slices), in_order(expected))
        self.assertGreater(len({place for place, *_ in slices}), 2 * len(units))

    def check_depths(self, rank, depths):
        """Transfers under way at the drive, from the records alone."""
        moved = [record for record in rank["records"] if record["kind"] in ("read", "write")]
        for time_ns, depth in depths:
            self.assertEqual(depth, sum(one["started_ns"] <= time_ns < one["moved_ns"] for one in moved))
        self.assertEqual(len(depths), len({one[key] for one in moved for key in ("started_ns", "moved_ns")}))

    def place(self, tracks, uuid):
        names = []
        while "process" not in tracks[uuid]:
            names.insert(0, tracks[uuid]["name"])
            uuid = int(tracks[uuid]["parent_uuid"])
        return tuple(names)


class Perfetto(PerfettoCase):
    LABEL = "command"

    def test_every_record_is_a_slice_on_a_track_of_its_unit(self):
        rank = self.record()
        with open(self.path("run.perfetto-trace"), "rb") as file:
            self.check(rank, packets_of(file.read()))


class PerfettoPackage(PerfettoCase):
    LABEL = "slow"

    def test_the_descriptions_of_the_package_read_it(self):
        folder = with_package(self, "perfetto")
        rank = self.record()
        done = subprocess.run([sys.executable, "-c", READ, self.path("run.perfetto-trace")], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": folder})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check(rank, json.loads(done.stdout))


class PerfettoTraceProcessor(PerfettoCase):
    LABEL = "slow"

    def ask(self, query):
        """The rows of the answer, which comes as CSV."""
        with open(self.path("query.sql"), "w", encoding="ascii") as file:
            file.write(query)
        done = subprocess.run([self.processor, "-q", self.path("query.sql"), self.path("run.perfetto-trace")], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [{name: None if value == "[NULL]" else value for name, value in row.items()} for row in csv.DictReader(done.stdout.splitlines())]

    def test_the_trace_processor_finds_every_slice(self):
        self.processor = os.environ.get("SLUICE_TRACE_PROCESSOR") or shutil.which("trace_processor_shell")
        if self.processor is None:
            self.skipTest("Perfetto's trace processor is not here: no trace_processor_shell in PATH or in SLUICE_TRACE_PROCESSOR")
        rank = self.record()
        slices = []
        for row in self.ask(SLICES):
            unit = (row["unit"],) if (row["unit"] or "").startswith("unit ") else ()
            notes = {note: row["note_" + note] for note in NOTES if row["note_" + note] is not None}
            slices.append((unit + (row["track"],), int(row["begin_ns"]), int(row["end_ns"]),
                           {note: value if note == "for" else int(value) for note, value in notes.items()}))
        self.check_slices(rank, slices)
        self.check_depths(rank, [(int(row["time_ns"]), int(float(row["depth"]))) for row in self.ask(DEPTHS)])
