#!/usr/bin/env python3
"""Hostile files: configs, traces and model files with one to four mutations each, given to every command that reads them.

    mutants.py --kind config --sluice build/asan/tools/sluice --count 200
    mutants.py --kind trace --sluice build/asan/tools/sluice --from 200 --count 200 --results traces.jsonl

Meant for a build with the address sanitizer. A case is good when the command ends with an exit code of docs/cli.md and a message that is no internal
error, or with 0 and outputs without NaN and infinity that parse. Checksums of mutated traces are right, so that mutants get past them.
"""

import ctypes
import ctypes.util
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time

import campaign

TIMEOUT_S = 180
MEMORY_MAX_KIB = 3 << 20  # resident; of a case beyond it, the machine would suffer
SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
CODES = {"refused": (2, 5), "named": (1, 3)}  # of docs/cli.md, beside 0
# Small enough for thousands of runs. The budgets stand on the command line too, so that no mutant gets others.
CONFIG = {
    "model": {"layers": 2, "heads": 2, "embedding": 32, "context": 16, "vocabulary": 256, "tied_head": True},
    "data": {"file": "text.txt", "validation_fraction": 0.1},
    "batch": {"sequences": 2, "micro_batches": 1},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 4, "clip_norm": 1.0, "overlap": "deferred"},
    "precision": {"parameters": "bf16", "gradients": "fp32"},
    "placement": {"parameters": "nvme", "optimizer": "nvme"},
    "storage": {"paths": ["storage"], "block_elements": 4096, "backend": "threads"},
    "run": {"steps": 3, "seed": 7, "threads": 1, "device": "host"},
}
BUDGETS = ("--set", "memory.host=4MiB", "--set", "memory.device=4MiB")
WEIRD = (0, 1, 2, 3, 7, -1, -4, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 0.5, -0.0, 1e-46, 1e-320, 1e308,
         True, False, None, "", "auto", "nan", "x" * 300, "\0", "/dev/null", "1KiB", "-1MiB", "99999TiB", "\u202e", [], [[]], {}, {"a": {}}, [1, "a"])


def weird(random):
    return random.choice(WEIRD)


def places_of(document, place=()):
    """Every place of a JSON document."""
    yield place
    items = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in items:
        yield from places_of(value, (*place, key))


def mutate_document(document, random, keys=()):
    """Changes one place: another value, a value from elsewhere, gone, twice, or a new key."""
    place = random.choice([place for place in places_of(document) if place])
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    action = random.randrange(6)
    if action == 0:
        del parent[place[-1]]
    elif action == 1 and isinstance(parent, list):
        parent.insert(place[-1], parent[place[-1]])
    elif action == 2 and isinstance(parent, dict):
        parent[random.choice([*keys, "x", "dtype", "__metadata__", "\0"])] = weird(random)
    elif action == 3:
        source = document
        for key in random.choice([place for place in places_of(document) if place]):
            source = source[key]
        parent[place[-1]] = json.loads(json.dumps(source))
    else:
        parent[place[-1]] = weird(random)


def mutate_bytes(content, random):
    """Changes a stretch of bytes: other bytes, gone, twice, many, or all that follows gone."""
    content = bytearray(content)
    at = random.randrange(max(1, len(content)))
    end = min(len(content), at + random.choice((1, 1, 2, 8, 64)))
    action = random.randrange(6)
    if action == 0:
        content[at:end] = random.randbytes(end - at)
    elif action == 1:
        del content[at:end]
    elif action == 2:
        content[end:end] = content[at:end]
    elif action == 3:
        content[at:at] = random.choice((b"{", b"[", b'"', b"\0", b"-", b"9", b",", b"\\")) * random.choice((1, 3, 40, 20000))
    elif action == 4:
        del content[at:]
    elif at < len(content):
        content[at] ^= 1 << random.randrange(8)
    return bytes(content)


class Bench:
    """A folder with the files that mutants are made of, and runs of the command in it."""

    def __init__(self, options):
        self.sluice = os.path.abspath(options.sluice)
        self.made = {}  # files of unharmed runs, by what they were made with

    def make(self, name, *arguments):
        """The file `name` that training with these arguments writes; made once."""
        key = (name, *arguments)
        if key not in self.made:
            with tempfile.TemporaryDirectory(prefix="sluice-mutants-") as folder:
                self.prepare(folder)
                code, _, stderr = self.run(folder, "train", "good.json", *BUDGETS, "--quiet", *arguments)
                if code != 0:
                    raise RuntimeError(stderr)
                self.made[key] = read(folder, name)
        return self.made[key]

    def prepare(self, folder):
        """A case's folder: text, storage and the unharmed config."""
        os.mkdir(os.path.join(folder, "storage"))
        with open(os.path.join(folder, "text.txt"), "w", encoding="ascii") as file:
            file.write("in the beginning was a block and it lay on storage\n" * 40)
        with open(os.path.join(folder, "good.json"), "w", encoding="ascii") as file:
            json.dump(CONFIG, file)

    def run(self, folder, *arguments):
        """(exit code, stdout, stderr); the code is "hang" or "memory" for what had to be ended."""
        environment = dict(os.environ, ASAN_OPTIONS="exitcode=99:allocator_may_return_null=0:" + os.environ.get("ASAN_OPTIONS", ""))
        with open(os.path.join(folder, "stdout"), "wb") as out, open(os.path.join(folder, "stderr"), "wb") as err:
            process = subprocess.Popen([self.sluice, *arguments], cwd=folder, env=environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
            ended = self.watch(process)
        texts = []
        for name in ("stdout", "stderr"):
            with open(os.path.join(folder, name), "rb") as file:
                texts.append(file.read().decode("utf-8", "replace"))
        return (ended or process.returncode, *texts)

    def watch(self, process):
        deadline = time.monotonic() + TIMEOUT_S
        pause_s = 0.005
        while process.poll() is None:
            why = "hang" if time.monotonic() > deadline else "memory" if resident_kib(process.pid) > MEMORY_MAX_KIB else None
            if why:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return why
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.5)
        return None


def resident_kib(pid):
    try:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1])
    except (OSError, TypeError):  # it has just ended
        return 0


def refuse_constant(name):
    raise ValueError(f"{name} in JSON")


def parse_json(text):
    return json.loads(text, parse_constant=refuse_constant)


def read(folder, name):
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


def write(folder, name, content):
    with open(os.path.join(folder, name), "wb") as file:
        file.write(content)


def check_text(text):
    found = re.search(r"(?<![A-Za-z\"])[-+]?(nan|inf)(?![A-Za-z])", text)
    if found:
        raise ValueError(f"\"{found[0]}\" in \"{text[max(0, found.start() - 60):found.end() + 20]}\"")


def judge(phase, code, stdout, stderr, check_outputs):
    """The outcome of a run that ended with `code`. `check_outputs` raises where outputs of a run that ended with 0 are not sound."""
    first_line = stderr.strip().splitlines()[0] if stderr.strip() else ""
    if code in ("hang", "memory"):
        return campaign.Outcome(phase, "hang", str(code))
    if any(sign in stderr for sign in ("Sanitizer", "runtime error:", "check failed", "internal error", "terminate called")) or (code != 0 and not first_line):
        return campaign.Outcome(phase, "crash", f"exit code {code}: {' / '.join(stderr.strip().splitlines()[:4])[:400]}")
    for result, codes in CODES.items():
        if code in codes and (code != 3 or phase == "diff"):
            if "the value given for" not in first_line:  # which names it, because it is not finite
                check_text(first_line)
            return campaign.Outcome(phase, result, f"{code} {first_line[:100]}")
    if code != 0:
        return campaign.Outcome(phase, "crash", f"exit code {code}: {stderr[:300]}")
    try:
        check_outputs()
    except ValueError as error:
        return campaign.Outcome(phase, "silent", f"outputs are not sound: {error}")
    return campaign.Outcome(phase, "sound")


# --- Configs ---

def config_case(bench, case):
    folder, random = case.folder, case.random
    bench.prepare(folder)
    with open(os.path.join(SOURCE, "configs/sluice.schema.json"), encoding="utf-8") as file:
        schema = json.load(file)
    document = json.loads(json.dumps(CONFIG))
    for _ in range(random.choice((1, 1, 2))):
        section = random.choice([key for key in schema["properties"] if "properties" in schema["properties"][key]])
        key = random.choice(list(schema["properties"][section]["properties"]))
        allowed = schema["properties"][section]["properties"][key].get("enum", [])
        if random.random() < 0.6 and isinstance(document.get(section, {}), dict):
            document.setdefault(section, {})[key] = random.choice([*allowed, weird(random)])
        elif document:
            mutate_document(document, random, [section, key])
    content = json.dumps(document).encode()
    if random.random() < 0.3:
        content = mutate_bytes(content, random)
    write(folder, "mutant.json", content)
    if case.number % 2:
        code, stdout, stderr = bench.run(folder, "plan", "mutant.json", *BUDGETS, "--json", "out.json")
        return judge("plan", code, stdout, stderr, lambda: (check_text(stdout), parse_json(read(folder, "out.json"))))
    steps = ("--steps", "2", "--data", "text.txt", "--quiet", "--json", "out.json", "--set", 'storage.paths=["storage"]')
    code, stdout, stderr = bench.run(folder, "train", "mutant.json", *BUDGETS, *steps)
    if os.listdir(os.path.join(folder, "storage")):
        return campaign.Outcome("train", "silent", "files are left in the storage folder")
    return judge("train", code, stdout, stderr, lambda: parse_json(read(folder, "out.json")))


# --- Traces ---

HEADER = struct.Struct("<8sIIQII16sQQ")  # base/trace/trace_format.h
RECORD = struct.Struct("<QQQQQQIIIBBBB")
NUMBERS = (0, 1, 2, 3, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
SETTINGS = ("nvme=2x", "compute=4x", "drives=2", "prefetch_window=3", "lanes=8", "policy=serial", "memory.host=1GiB", "adam=0.5x", "nvme.latency=9x")


def xxhash():
    """XXH3 of bytes with a seed, from the library that Sluice is built with; None where there is none."""
    name = ctypes.util.find_library("xxhash")
    if name is None:
        return None
    function = ctypes.CDLL(name).XXH3_64bits_withSeed
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64)
    function.restype = ctypes.c_uint64
    return lambda content, seed=0: function(content, len(content), seed)


class TraceBlocks:
    """A trace as blocks: [fields of the header without its checksum, payload]."""

    def __init__(self, content):
        self.blocks = []
        at = 0
        while at < len(content):
            *fields, payload_bytes, _ = HEADER.unpack_from(content, at)
            at += HEADER.size
            self.blocks.append([fields, content[at:at + payload_bytes]])
            at += payload_bytes

    def content(self, checksum):
        whole = b""
        for fields, payload in self.blocks:
            blank = HEADER.pack(*fields, len(payload), 0)
            whole += HEADER.pack(*fields, len(payload), checksum(payload, checksum(blank))) + payload
        return whole

    def mutate(self, random):
        index = random.randrange(len(self.blocks))
        fields, payload = self.blocks[index]
        action = random.randrange(8)
        if action == 0:
            self.blocks.insert(random.randrange(len(self.blocks) + 1), [list(fields), payload])
        elif action == 1 and len(self.blocks) > 2:
            del self.blocks[index]
        elif action == 2:
            field = random.randrange(1, 6)
            fields[field] = random.choice(NUMBERS) % (2**64 if field == 3 else 2**32)
        elif fields[1] == 2 or action == 3:
            self.mutate_section(random)
        else:
            self.mutate_records(fields, payload, index, random)

    def mutate_section(self, random):
        """One of the texts: its document, or its bytes."""
        index = random.choice([i for i, (fields, _) in enumerate(self.blocks) if fields[1] == 2])
        fields, payload = self.blocks[index]
        text = payload[:fields[2]]
        try:
            document = json.loads(text)
            for _ in range(random.randint(1, 3)):
                mutate_document(document, random)
            text = json.dumps(document).encode() if random.random() < 0.8 else mutate_bytes(text, random)
        except (ValueError, IndexError, RecursionError):
            text = mutate_bytes(text, random)
        fields[2] = len(text)
        self.blocks[index][1] = text + bytes(-len(text) % 64)

    def mutate_records(self, fields, payload, index, random):
        """Fields of some records: of one, of the next ones, or of all of them."""
        count = len(payload) // RECORD.size
        if count == 0:
            return
        field = random.randrange(13)
        first = random.randrange(count)
        last = min(count, first + random.choice((1, 1, 10, count)))
        value = random.choice(NUMBERS)
        changed = bytearray(payload)
        for record in range(first, last):
            values = list(RECORD.unpack_from(changed, record * RECORD.size))
            old = values[field]
            new = random.choice((value, old + random.choice((-1, 1, 1000, -1000, 10**9)), old ^ 1 << random.randrange(63)))
            values[field] = new % (2**64 if field < 6 else 2**32 if field < 9 else 2**8)
            RECORD.pack_into(changed, record * RECORD.size, *values)
        self.blocks[index] = [fields, bytes(changed)]


def base_trace(bench, random):
    """A short run's trace, of one of several policies."""
    overlap, micro_batches = random.choice(("serial", "deferred", "speculative")), random.choice((1, 2))
    return bench.make("good.trace", "--steps", "4", "--trace", "good.trace", "--set", f"optimizer.overlap={overlap}",
                      "--set", f"batch.micro_batches={micro_batches}")


def trace_case(bench, case):
    folder, random = case.folder, case.random
    bench.prepare(folder)
    good = base_trace(bench, random)
    write(folder, "good.trace", good)
    blocks = TraceBlocks(good)
    for _ in range(random.randint(1, 4)):
        blocks.mutate(random)
    content = blocks.content(xxhash())
    write(folder, "mutant.trace", mutate_bytes(content, random) if random.random() < 0.1 else content)
    phase = ("summary", "html", "export", "diff", "whatif")[case.number % 5]
    arguments = {"summary": ("mutant.trace",), "html": ("mutant.trace", "-o", "page.html"),
                 "export": ("mutant.trace", "--chrome", "chrome.json", "--csv", "out.csv", "--json", "out.json"),
                 "diff": random.choice((("good.trace", "mutant.trace"), ("mutant.trace", "good.trace"))),
                 "whatif": ("mutant.trace", "--set", random.choice(SETTINGS))}[phase]
    code, stdout, stderr = bench.run(folder, "trace", phase, *arguments)

    def check_outputs():
        check_text(stdout)
        if phase == "export":
            parse_json(read(folder, "out.json"))
            parse_json(read(folder, "chrome.json"))
            check_text(read(folder, "out.csv").decode("utf-8", "replace"))
        if phase == "html":
            page = read(folder, "page.html").decode("utf-8", "replace")
            parse_json(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    outcome = judge(phase, code, stdout, stderr, check_outputs)
    if outcome.result in campaign.GOOD and (record := impossible_record(bench, folder)):
        return campaign.Outcome(phase, "silent", f"a record that cannot be is taken: {record}")
    return outcome


def impossible_record(bench, folder):
    """A record of the mutant that ends before it begins, or in years, although the reader has accepted it."""
    code, _, _ = bench.run(folder, "trace", "export", "mutant.trace", "--json", "records.json")
    records = [record for rank in parse_json(read(folder, "records.json"))["ranks"] for record in rank["records"]] if code == 0 else []
    return next((record for record in records if not record["begin_ns"] <= record["end_ns"] <= 2**60), None)


# --- Model files ---

def mutate_model(content, random):
    (length,) = struct.unpack_from("<Q", content)
    header, data = content[8:8 + length], content[8 + length:]
    action = random.randrange(4)
    if action == 0:
        data = bytearray(data)
        for _ in range(random.choice((1, 10, 1000))):
            struct.pack_into("<I", data, random.randrange(len(data) // 4) * 4,
                             random.choice((0x7fc00000, 0x7f800000, 0xff800000, 1, 0x7f7fffff, random.getrandbits(32))))
        data = bytes(data)
    elif action == 1:
        header = mutate_bytes(header, random)
    elif action == 2:
        return mutate_bytes(content, random)
    else:
        try:
            document = json.loads(header)
            for _ in range(random.randint(1, 3)):
                mutate_document(document, random)
            header = json.dumps(document).encode()
        except (ValueError, IndexError, RecursionError):
            header = mutate_bytes(header, random)
    if random.random() < 0.05:
        header = random.choice((b"[", b'{"a":', b"1,", b'{"a":{"shape":[1,')) * (1 << 20)
    length = random.choice(NUMBERS) if random.random() < 0.05 else len(header)
    return struct.pack("<Q", length) + header + data


def is_not_finite(content):
    """Whether a model file has a value that is NaN or infinite."""
    (length,) = struct.unpack_from("<Q", content)
    data = content[8 + length:]
    return any(word & 0x7f800000 == 0x7f800000 for (word,) in struct.iter_unpack("<I", data[:len(data) // 4 * 4]))


def safetensors_case(bench, case):
    folder, random = case.folder, case.random
    bench.prepare(folder)
    content = bench.make("good.safetensors", "--steps", "1", "--save", "good.safetensors")
    for _ in range(random.randint(1, 2)):
        if len(content) > 8 and struct.unpack_from("<Q", content)[0] < len(content) - 8:
            content = mutate_model(content, random)
    write(folder, "mutant.safetensors", content)
    if case.number % 2:
        code, stdout, stderr = bench.run(folder, "generate", "--model", "mutant.safetensors", "--prompt", "in the", "--tokens", "3")
        return judge("generate", code, stdout, stderr, lambda: None)
    code, stdout, stderr = bench.run(folder, "train", "good.json", *BUDGETS, "--quiet", "--steps", "1", "--init", "mutant.safetensors", "--json", "out.json")
    if code == 1 and is_not_finite(content):
        return campaign.Outcome("init", "blamed on training", stderr.strip()[:100])
    return judge("init", code, stdout, stderr, lambda: parse_json(read(folder, "out.json")))


def main():
    parser = campaign.parser(__doc__)
    kinds = {"config": config_case, "trace": trace_case, "safetensors": safetensors_case}
    parser.add_argument("--kind", choices=kinds, required=True, help="what is mutated")
    options = parser.parse_args()
    if options.kind == "trace" and xxhash() is None:
        print("SKIPPED: libxxhash is not here, so checksums of mutated traces would be wrong")
        return 77
    bench = Bench(options)
    return campaign.run(options, lambda case: kinds[options.kind](bench, case), f"{options.kind}-mutants", phases=())


if __name__ == "__main__":
    sys.exit(main())
