"""The rules of the Trace Event Format for a file that Perfetto and chrome://tracing read, checked strictly: anything
that those would drop, draw wrongly or not bind is a violation here.
"""

import collections
import math

FIELDS = {"X": ("ts", "dur", "tid"), "b": ("ts", "id", "cat"), "e": ("ts", "id", "cat"), "s": ("ts", "id", "cat", "tid"),
          "f": ("ts", "id", "cat", "tid"), "C": ("ts", "args"), "M": ("args",)}


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def field_faults(event):
    phase = event.get("ph")
    if phase not in FIELDS:
        return [f"phase {phase!r}"]
    faults = [f"{phase}: no {field}" for field in ("pid", "name", *FIELDS[phase]) if field not in event]
    faults += [f"{phase}: {field} is {event[field]!r}" for field in ("ts", "dur") if field in event and
               (not is_number(event[field]) or event[field] < 0)]
    faults += [f"{phase}: {field} is {event[field]!r}" for field in ("pid", "tid") if field in event and not isinstance(event[field], int)]
    if not isinstance(event.get("name"), str) or not isinstance(event.get("args", {}), dict):
        faults.append(f"{phase}: name or args of a wrong type")
    elif phase == "C" and not (event["args"] and all(map(is_number, event["args"].values()))):
        faults.append(f"counter {event['name']}: {event['args']}")
    elif phase == "M" and not isinstance(event["args"].get("name"), str):
        faults.append(f"{event['name']}: {event['args']}")
    return faults


def slice_faults(slices):
    """Slices of one track lie in each other or apart."""
    faults, ends = [], []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        end = round(event["ts"] + event["dur"], 3)
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        if ends and end > ends[-1]:
            faults.append(f"slice {event['name']!r} at {event['ts']} overlaps the one before")
        ends.append(end)
    return faults


def async_faults(events):
    """Events of one category and id: each end closes the one that began last."""
    faults, names, last = [], [], 0
    for event in events:
        if event["ts"] < last:
            faults.append(f"async {event['name']!r} at {event['ts']} is behind {last}")
        last = event["ts"]
        if event["ph"] == "b":
            names.append(event["name"])
        elif not names or names.pop() != event["name"]:
            faults.append(f"async {event['name']!r} ends at {event['ts']} and has not begun last")
    return faults + [f"async {name!r} does not end" for name in names]


def flow_faults(flow, slices):
    """One start and one later end, each inside a slice of its track."""
    if [event["ph"] for event in flow] != ["s", "f"]:
        return [f"flow {flow[0]['id']} is {[event['ph'] for event in flow]}"]
    faults = [] if flow[0]["ts"] <= flow[1]["ts"] else [f"flow {flow[0]['id']} runs backwards"]
    if len({event["name"] for event in flow}) != 1 or flow[1].get("bp") != "e":
        faults.append(f"flow {flow[0]['id']} does not bind")
    for event in flow:
        around = slices[event["pid"], event["tid"]]
        if not any(of["ts"] <= event["ts"] < of["ts"] + of["dur"] for of in around):
            faults.append(f"flow {event['id']} {event['ph']} at {event['ts']} is in no slice")
    return faults


def faults_of(document):
    if document.get("displayTimeUnit") not in ("ms", "ns") or not isinstance(document.get("traceEvents"), list):
        return ["no document of trace events"]
    events = document["traceEvents"]
    faults = [fault for event in events for fault in field_faults(event)]
    if faults:
        return faults
    slices, trees, flows = (collections.defaultdict(list) for _ in range(3))
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "be":
            trees[event["cat"], event["id"]].append(event)
        elif event["ph"] in "sf":
            flows[event["cat"], event["id"]].append(event)
    for track in slices.values():
        faults += slice_faults(track)
    for tree in trees.values():
        faults += async_faults(tree)
    for flow in flows.values():
        faults += flow_faults(flow, slices)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    faults += [f"track {track} has no name" for track in slices if track not in named]
    return faults
