"""Every file that a command reads may be gone, a folder, without end, or no such file at all: each is a clear error at once. There is a
row for every FILE, DIR and PATH in --help, so that a new one without a row is noticed."""

import json
import os
import re
import resource
import shutil
import subprocess

from cli_support import CliCase
from forged_checkpoint import mend_checksums

HERE = "@"  # the place of the hostile file
TRAIN = ("train", "config.json", "--data", "text.txt")
# (command, argument): the command line.
READS = {
    ("train", "CONFIG"): ("train", HERE),
    ("train", "--data"): ("train", "config.json", "--data", HERE),
    ("train", "--tokenizer"): (*TRAIN, "--set", "model.vocabulary=300", "--tokenizer", HERE),
    ("train", "--init"): (*TRAIN, "--init", HERE),
    ("generate", "--model"): ("generate", "--prompt", "x", "--model", HERE),
    ("generate", "--tokenizer"): ("generate", "--model", "model", "--prompt", "x", "--tokenizer", HERE),
    ("tokenize", "TEXT"): ("tokenize", HERE, "--tokenizer", "tokenizer.json", "--output", "tokens"),
    ("tokenize", "--tokenizer"): ("tokenize", "text.txt", "--output", "tokens", "--tokenizer", HERE),
    ("plan", "CONFIG"): ("plan", HERE),
    ("plan", "--model"): ("plan", "--model", HERE),
    ("plan", "--io"): ("plan", "config.json", "--io", HERE),
    ("plan", "--adam"): ("plan", "config.json", "--adam", HERE),
    ("plan", "--gpu-rates"): ("plan", "config.json", "--set", "run.device=cuda", "--gpu-rates", HERE),
    ("tune", "CONFIG"): ("tune", HERE),
    ("tune", "--gpu-rates"): ("tune", "config.json", "--dry-run", "--set", "run.device=cuda", "--gpu-rates", HERE),
    ("tune", "--data"): ("tune", "config.json", "--seconds", "1", "--steps", "1", "--data", HERE),
    ("trace summary", "FILE"): ("trace", "summary", HERE),
    ("trace summary", "--io"): ("trace", "summary", "good.trace", "--io", HERE),
    ("trace html", "FILE"): ("trace", "html", HERE, "--output", "page.html"),
    ("trace html", "--io"): ("trace", "html", "good.trace", "--output", "page.html", "--io", HERE),
    ("trace export", "FILE"): ("trace", "export", HERE, "--json", "records.json"),
    ("trace diff", "A"): ("trace", "diff", HERE, "good.trace"),
    ("trace diff", "B"): ("trace", "diff", "good.trace", HERE),
    ("trace whatif", "FILE"): ("trace", "whatif", HERE, "--set", "nvme=2x"),
    ("config import", "FILE"): ("config", "import", HERE),
    ("config check", "CONFIG"): ("config", "check", HERE),
    ("config show", "CONFIG"): ("config", "show", HERE),
    ("config rates", "CONFIG"): ("config", "rates", HERE),
    ("config diff", "A"): ("config", "diff", HERE, "config.json"),
    ("config diff", "B"): ("config", "diff", "config.json", HERE),
    **{(f"state {name}", "CONFIG"): ("state", name, HERE, *words)
       for name, words in (("list", ()), ("inspect", ()), ("verify", ()), ("remove", ()), ("export", ("to",)), ("import", ("from",)))},
    ("state import", "DIR"): ("state", "import", "config.json", HERE, "--set", "storage.state.name=run-7"),
}
WRITTEN = {("state export", "DIR")}  # outputs_cases.py has it
# Inputs that --help calls TEXT, because they may be several things, and keys of the config that name a file.
OTHERS = {
    ("train", "--resume-from"): (*TRAIN, "--resume-from", HERE),
    ("train", "data.file"): ("train", "config.json", "--set", f"data.file={HERE}"),
    ("train", "storage.calibration"): (*TRAIN, "--set", 'placement={"optimizer": "nvme"}', "--set", f"storage.calibration={HERE}"),
}
# Hostile contents: without bytes they are names of what is there, or is not. A text may be anything.
HOSTILE = {"gone": None, "folder": None, "empty": b"", "/dev/zero": None, "rubbish": bytes(range(256)) * 20, "other.json": b'{"a": [1, {"b": null}]}',
           "list.json": b"[]", "deep.json": b"[" * 100_000, "deeper.json": b'{"a":' * 100_000}
TEXTS = {("train", "--data"), ("train", "data.file"), ("tune", "--data"), ("tokenize", "TEXT")}
NO_TEXTS = ("gone", "folder", "empty", "/dev/zero")
MEMORY_MAX = 8 << 30  # of addresses: a reader of a file without end would take all of the machine's memory


class HostileInputs(CliCase):
    LABEL = "command"

    def test_every_file_of_the_help_has_a_row(self):
        found = set()
        for words in self.commands_below():
            shown = self.run_sluice(*words, "--help").stdout
            command = " ".join(words)
            positionals = shown.partition("Positionals:")[2].partition("\n\n")[0]
            found |= {(command, name) for name in re.findall(r"^  (FILE\b|[A-Z]+(?= FILE\b))", positionals, re.MULTILINE)}
            found |= {(command, name) for name in re.findall(r"^  (DIR)\b", positionals, re.MULTILINE)}
            found |= {(command, option) for option in re.findall(r"(--[a-z-]+) (?:FILE|DIR|PATH)\b", shown)}
        self.assertEqual(found, set(READS) | WRITTEN)

    def test_each_is_a_clear_error_at_once(self):
        self.write_config()
        self.write_tokenizer()
        self.run_sluice(*TRAIN, "--quiet", "--steps", 2, "--save", "model", "--trace", "good.trace")
        os.mkdir(self.path("folder"))
        for name, content in HOSTILE.items():
            if content is not None:
                with open(self.path(name), "wb") as file:
                    file.write(content)
        before = set(os.listdir(self.folder))
        for row, words in sorted({**READS, **OTHERS}.items()):
            for name in NO_TEXTS if row in TEXTS else HOSTILE:
                with self.subTest(row=row, hostile=name):
                    self.refuse([word.replace(HERE, name) for word in words], name)
                    self.assertEqual(set(os.listdir(self.folder)), before)

    def refuse(self, words, name):
        done = subprocess.run(self.command(*words), cwd=self.folder, env=self.environment(), capture_output=True, timeout=60, check=False,
                              stdin=subprocess.DEVNULL, text=True, errors="replace",
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX)))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stderr, r"\A(sluice: |\S+ is a DeepSpeed file: .*, [1-9]\d* refused\n)")
        self.assertNotIn("internal error", done.stderr)
        self.assertIn(name, done.stderr)
        self.assertLess(len(done.stderr), 2000)

    def test_a_checkpoint_with_the_text_of_another_program_is_named(self):
        store = {"storage.state.name": "run-7", "run.steps": 3}
        self.train({"run.steps": 2}, "--checkpoint", "kept")
        folder = self.path("kept", "step-000000002")
        with open(os.path.join(folder, "sluice_state.json"), encoding="utf-8") as file:
            manifest = json.load(file)
        manifest["application"] = [json.dumps({**json.loads(manifest["application"][0]), "beginning": 5})]
        with open(os.path.join(folder, "sluice_state.json"), "w", encoding="utf-8") as file:
            json.dump(manifest, file)
        if not mend_checksums(folder):
            self.skipTest("libxxhash, which would make a checkpoint's checksums, is not there")
        message = self.fail_train(2, {}, "--checkpoint", "kept", "--resume")
        for words in ("kept/step-000000002", "comes from another program"):
            self.assertIn(words, message)
        self.train(store)
        message = self.fail_train(2, {**store, "run.steps": 4}, "--checkpoint", "kept", "--resume", "--accept-config")
        self.assertIn("kept/step-000000002\" is a checkpoint of another run", message)
        self.run_sluice("state", "remove", self.write_config(store))
        os.unlink(self.path("storage", "run-7.lock"))

    def test_a_folder_in_place_of_the_calibration_of_tune_is_measured_anew(self):
        self.write_config()
        cache = self.path("cache")
        environment = {**self.environment(), "XDG_CACHE_HOME": cache}
        tune = self.command("tune", "config.json", "--data", "text.txt", "--seconds", 1, "--steps", 1, "--finalists", 1)
        os.mkdir(cache)

        def run():
            return subprocess.run(tune, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(run().returncode, 0)
        (calibration,) = [os.path.join(folder, name) for folder, _, names in os.walk(cache) for name in names]
        os.remove(calibration)
        os.mkdir(calibration)
        done = run()
        self.assertNotIn("internal error", done.stderr)
        self.assertIn("it is a folder", done.stdout + done.stderr)
        shutil.rmtree(cache)
