"""An output of sluice destroys nothing that the command reads or writes besides, appears whole or not at all, and fails
aloud. There is a row for every OUTPUT in --help, so that a new one without a row is noticed."""

import fcntl
import json
import os
import re
import shutil
import subprocess

from cli_support import GPU_RATES, ON_NVME, SMALL_CONFIG, CliCase, RUN_TIMEOUT_S, mount, mount_tmpfs, unmount, with_values

# How the other arguments of each command look, and which files it reads.
TRAIN = ["train", "config.json", "--data", "text.txt", "--init", "model"]
COMMANDS = {
    "train": (TRAIN, ("config.json", "text.txt", "model")),
    "plan": (["plan", "config.json", "--set", "run.device=cuda", "--io", "io.json", "--adam", "adam.json", "--gpu-rates", "gpu.json"],
             ("config.json", "io.json", "adam.json", "gpu.json")),
    "bench io": (["bench", "io", "--path", "storage", "--size", "1MiB", "--request", "256KiB", "--depth", "4", "--rounds", "1"], ()),
    "bench adam": (["bench", "adam", "--parameters", "1000", "--rounds", "1", "--threads", "1"], ()),
    "bench matrix": (["bench", "matrix", "--path", "storage", "--parameters", "100000", "--units", "4", "--steps", "1", "--compute-ms", "1"], ()),
    "bench step": (["bench", "step", "--path", "storage", "--parameters", "100000", "--units", "4", "--steps", "1",
                    "--regime", "compute-bound", "--policy", "serial"], ()),
    "tokenize": (["tokenize", "text.txt", "--tokenizer", "tokenizer.json"], ("text.txt", "tokenizer.json")),
    "doctor": (["doctor", "--path", "storage"], ()),
    "trace summary": (["trace", "summary", "old.trace"], ("old.trace",)),
    "trace diff": (["trace", "diff", "old.trace", "old.trace"], ("old.trace",)),
    "trace html": (["trace", "html", "old.trace"], ("old.trace",)),
    "trace export": (["trace", "export", "old.trace"], ("old.trace",)),
    "tune": (["tune", "config.json", "--seconds", "1", "--steps", "1", "--finalists", "1"], ("config.json", "text.txt")),
    "config import": (["config", "import", "ds.json"], ("ds.json",)),
    "state list": (["state", "list", "store.json"], ("store.json",)),
    "state inspect": (["state", "inspect", "store.json"], ("store.json",)),
    "state verify": (["state", "verify", "store.json"], ("store.json",)),
    "state export": (["state", "export", "store.json", "exported"], ("store.json",)),
}
# Each output: (command, option). `grows`: it has its own name while the command runs.
GROWS = {("train", "--trace"), ("train", "--csv"), ("train", "--json-lines")}
OUTPUTS = GROWS | {
    ("train", "--save"), ("train", "--json"), ("plan", "--json"), ("plan", "--output"), ("plan", "--tensors"), ("plan", "--plot"), ("bench io", "--json"), ("bench io", "--plot"), ("bench adam", "--json"),
    ("bench adam", "--plot"), ("bench step", "--plot"), ("trace diff", "--html"),
    ("bench matrix", "--json"), ("bench matrix", "--plot"), ("bench step", "--json"), ("bench step", "--trace"), ("doctor", "--json"),
    ("trace summary", "--json"), ("trace diff", "--json"), ("tokenize", "--output"), ("trace html", "--output"), ("trace export", "--chrome"),
    ("trace export", "--perfetto"), ("trace export", "--csv"), ("trace export", "--json"), ("config import", "--output"), ("tune", "--output"), ("tune", "--json"),
    ("state list", "--json"), ("state inspect", "--json"), ("state verify", "--json"), ("state export", "--json")}
# The first needs a GPU before it comes to its output. A store is made and removed but once; see Stores below. The last predicts
# nothing where the steps of a trace differ much, as they may here; see trace_json_cases.py.
NOT_TRIED = {("bench gpu", "--json"), ("bench gpu", "--plot"), ("state import", "--json"), ("state remove", "--json"), ("trace whatif", "--json")}
# Files that commands with outputs read beside those of COMMANDS: (command, option), and what they need.
INPUTS = {("train", "--tokenizer"): ("tokenizer.json", "--set", "model.vocabulary=300"), ("plan", "--model"): ("gpt2.json",),
          ("trace html", "--io"): ("io.json",),
          ("trace summary", "--io"): ("io.json",), ("tune", "--data"): ("text.txt",),
          ("tune", "--gpu-rates"): ("gpu.json", "--set", "run.device=cuda")}
# Options with a text that names no file that is written.
NO_OUTPUTS = {"--checkpoint", "--set", "--shape", "--path", "--size", "--pattern", "--request", "--backend", "--regime", "--policy", "--rate",
              "--read-rate", "--write-rate", "--duplex", "--copy-rate", "--host-memory-rate", "--bytes-written-rating", "--input", "--prompt",
              "--precision", "--device", "--host-memory", "--shard-size", "--sample-prompt", "--tensorboard", "--resume-from"}


class OutputCase(CliCase):
    """A folder with a config, a text, a model, a trace and calibrations; none of them may change."""

    LABEL = "command"

    def setUp(self):
        super().setUp()
        self.write_config()
        with open(self.path("ds.json"), "w", encoding="ascii") as file:
            file.write('{"train_batch_size": 1}')
        self.write_tokenizer()
        with open(self.path("gpt2.json"), "w", encoding="ascii") as file:
            json.dump({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 256}, file)
        self.run_sluice("train", "config.json", "--quiet", "--steps", 1, "--save", "model", "--trace", "old.trace")
        os.mkdir(self.path("stored"))
        store = with_values(SMALL_CONFIG, {**ON_NVME, "storage.paths": ["stored"], "storage.state.name": "run-7"})
        with open(self.path("store.json"), "w", encoding="ascii") as file:
            json.dump(store, file)
        self.run_sluice("train", "store.json", "--quiet", "--steps", 1)
        self.run_sluice(*COMMANDS["bench io"][0], "--json", "io.json")
        self.run_sluice(*COMMANDS["bench adam"][0], "--json", "adam.json", "--quiet")
        with open(self.path("gpu.json"), "w", encoding="ascii") as file:
            json.dump(GPU_RATES, file)
        self.before = self.contents()

    def contents(self):
        """{name: bytes} of the files in the folder."""
        found = {}
        for name in os.listdir(self.folder):
            if os.path.isfile(self.path(name)) and not os.path.islink(self.path(name)):
                with open(self.path(name), "rb") as file:
                    found[name] = file.read()
        return found

    def assert_untouched(self):
        now = self.contents()
        self.assertEqual(sorted(now), sorted(self.before))
        self.assertEqual([name for name in now if now[name] != self.before[name]], [])

    def write_file(self, name, text="what was there before\n"):
        with open(self.path(name), "w", encoding="ascii") as file:
            file.write(text)
        self.before = self.contents()


class EveryOutput(OutputCase):
    def test_every_output_of_the_help_has_a_row(self):
        outputs, texts = set(), set()
        for words in self.commands_below():
            shown = self.run_sluice(*words, "--help").stdout
            for option in re.findall(r"(--[a-z-]+) OUTPUT", shown):
                outputs.add((" ".join(words), option))
            texts |= set(re.findall(r"(--[a-z-]+) (?:TEXT|KEY=VALUE)", shown))
        self.assertEqual(outputs, OUTPUTS | NOT_TRIED)
        self.assertEqual(texts - NO_OUTPUTS, set(), "is it an output? then it is an OUTPUT in --help")

    def test_every_input_of_the_help_has_a_row(self):
        inputs = set()
        for words in self.commands_below():
            command = " ".join(words)
            if command in COMMANDS:
                shown = self.run_sluice(*words, "--help").stdout
                inputs |= {(command, option) for option in re.findall(r"(--[a-z-]+) (?:FILE|PATH)\b", shown)}
        of_commands = {(command, word) for command, (words, _) in COMMANDS.items() for word in words if word.startswith("--")}
        self.assertEqual(inputs - of_commands, set(INPUTS))

    def refuse(self, *arguments, **options):
        done = self.run_sluice(*arguments, expect=2, **options)
        self.assertRegex(done.stderr, r'^sluice: .*is the same file as')
        self.assertNotIn("step ", done.stdout)
        self.assert_untouched()

    def test_no_output_is_an_input(self):
        os.symlink("text.txt", self.path("link"))
        os.symlink("link", self.path("link-of-a-link"))
        for command, option in sorted(OUTPUTS):
            arguments, inputs = COMMANDS[command]
            for name in inputs:
                if (option, name) == ("--save", "model"):
                    continue  # training goes on: see model_file_cases.py
                with self.subTest(command=command, option=option, input=name):
                    self.refuse(*arguments, option, name)
        for (command, option), (name, *needs) in sorted(INPUTS.items()):
            for output in sorted(output for other, output in OUTPUTS if other == command):
                with self.subTest(command=command, option=output, input=option):
                    self.refuse(*COMMANDS[command][0], *needs, option, name, output, name)
        for name in ("link", "link-of-a-link", "./storage/../text.txt", self.path("text.txt")):
            with self.subTest(name):
                self.refuse(*TRAIN, "--json", name)
        os.link(self.path("text.txt"), self.path("hard"))
        self.before = self.contents()
        self.refuse(*TRAIN, "--trace", "hard")
        self.refuse(*TRAIN, "--set", "trace.file=text.txt")
        self.refuse(*TRAIN, "--set", "storage.calibration=io.json", "--csv", "io.json")

    def test_no_two_outputs_are_one_file(self):
        os.symlink("nothing-yet", self.path("link"))
        for command, option in sorted(OUTPUTS):
            for other_command, other in sorted(OUTPUTS):
                if command == other_command and option < other:
                    with self.subTest(command=command, options=(option, other)):
                        self.refuse(*COMMANDS[command][0], option, "nothing-yet", other, "link")
        self.write_file("there")
        self.refuse(*TRAIN, "--csv", "there", "--json", "./there")
        self.refuse(*TRAIN, "--set", "trace.file=there", "--json", "there")

    def test_no_output_is_standard_output(self):
        self.write_file("log", "")
        for command, option in sorted(OUTPUTS):
            with self.subTest(command=command, option=option), open(self.path("log"), "wb") as log:
                done = subprocess.run(self.command(*COMMANDS[command][0], option, "log"), cwd=self.folder, stdout=log,
                                      stderr=subprocess.PIPE, timeout=RUN_TIMEOUT_S, check=False)
                self.assertEqual(done.returncode, 2)
                self.assertIn(b"standard output", done.stderr)

    def test_a_refused_run_touches_nothing(self):
        rows = [*((option, "train") for command, option in OUTPUTS if command == "train")]
        for option, _ in sorted(rows):
            self.write_file("output")
            for why in (["--set", "memory.host=1B"], ["--data", "gone.txt"], ["--init", "config.json"],
                        ["--set", "placement.optimizer=nvme", "--set", 'storage.paths=["gone"]']):
                with self.subTest(option=option, why=why):
                    done = self.run_sluice(*TRAIN, option, "output", *why, expect=(2, 5))
                    self.assertNotIn("step ", done.stdout)
                    self.assert_untouched()
        for command in ("plan", "trace html", "trace export"):
            for output_command, option in sorted(OUTPUTS):
                if output_command == command:
                    with self.subTest(command=command, option=option):
                        arguments = [("text.txt" if word == COMMANDS[command][1][0] else word) for word in COMMANDS[command][0]]
                        self.run_sluice(*arguments, option, "output", expect=(1, 2))
                        self.assert_untouched()

    def test_what_was_there_is_replaced_whole_with_its_mode(self):
        for command, option in sorted(OUTPUTS):
            with self.subTest(command=command, option=option):
                self.write_file("output")
                os.chmod(self.path("output"), 0o640)
                old = os.stat(self.path("output")).st_ino
                self.run_sluice(*COMMANDS[command][0], option, "output")
                now = os.stat(self.path("output"))
                self.assertNotEqual(now.st_ino, old, "written in place")
                is_private = command.startswith("trace") or option == "--trace"
                self.assertEqual(now.st_mode & 0o777, 0o600 if is_private else 0o640)
                self.assertNotEqual(self.contents()["output"], self.before["output"])
                os.unlink(self.path("output"))
                self.before.pop("output")
                self.assert_untouched()

    def test_a_link_is_followed(self):
        os.mkdir(self.path("elsewhere"))
        for command, option in sorted(OUTPUTS):
            for exists in (False, True):
                with self.subTest(command=command, option=option, exists=exists):
                    os.symlink("elsewhere/target", self.path("link"))
                    if exists:
                        with open(self.path("elsewhere", "target"), "w", encoding="ascii") as file:
                            file.write("old")
                    self.run_sluice(*COMMANDS[command][0], option, "link")
                    self.assertTrue(os.path.islink(self.path("link")))
                    self.assertGreater(os.path.getsize(self.path("elsewhere", "target")), 3)
                    self.assertEqual(os.listdir(self.path("elsewhere")), ["target"])
                    os.unlink(self.path("link"))
                    os.unlink(self.path("elsewhere", "target"))

    def test_devices_and_pipes_are_opened_as_they_are(self):
        os.symlink("/dev/null", self.path("null"))
        for command, option in sorted(OUTPUTS):
            with self.subTest(command=command, option=option):
                self.run_sluice(*COMMANDS[command][0], option, "null")
                self.assertTrue(os.path.islink(self.path("null")))
                os.mkfifo(self.path("pipe"))
                with open(self.path("read"), "wb") as read:
                    reader = subprocess.Popen(["cat", self.path("pipe")], stdout=read)
                self.addCleanup(reader.kill)
                self.run_sluice(*COMMANDS[command][0], option, "pipe")
                reader.wait(timeout=RUN_TIMEOUT_S)
                self.assertNotEqual(os.path.getsize(self.path("read")), 0)
                os.unlink(self.path("pipe"))
                os.unlink(self.path("read"))
                self.assert_untouched()
        self.run_sluice(*TRAIN, "--csv", "/dev/null", "--json", "/dev/null", "--save", "null", "--trace", "/dev/null")
        done = self.run_sluice(*TRAIN, "--quiet", "--steps", 2, "--csv", "/dev/stdout", "--json-lines", "/dev/fd/1")
        self.assertEqual(len(done.stdout.splitlines()), 5)

    def test_a_file_that_is_mounted_by_itself_is_refused(self):
        self.write_file("mounted")
        self.write_file("source")
        mount(self, self.path("mounted"), "--bind", self.path("source"))
        for command, option in sorted(OUTPUTS):
            with self.subTest(command=command, option=option):
                done = self.run_sluice(*COMMANDS[command][0], option, "mounted", expect=2)
                self.assertIn("mount its folder", done.stderr)
        unmount(self.path("mounted"))
        self.assert_untouched()

    def test_a_full_disk_is_an_error_of_every_output(self):
        for command, option in sorted(OUTPUTS):
            for quiet in ((), ("--quiet",)) if command in ("train", "bench adam") else ((),):
                with self.subTest(command=command, option=option, quiet=quiet):
                    done = self.run_sluice(*COMMANDS[command][0], option, "/dev/full", *quiet, expect=5)
                    self.assertRegex(done.stderr, r'cannot write ' + option + r' "/dev/full": .*No space left on device')
        done = self.run_sluice(*TRAIN, "--quiet", "--json-lines", "/dev/full", "--json", "/dev/full", "--save", "saved", expect=5)
        self.assertIn("training goes on", done.stderr)
        self.assertEqual(self.contents()["saved"][:8], self.before["model"][:8])


class Stores(OutputCase):
    """Folders of files: a store, a checkpoint, a model of Hugging Face."""

    def files_below(self, name):
        found = {}
        for root, _, names in os.walk(self.path(name)):
            for each in names:
                if not os.path.islink(os.path.join(root, each)):
                    with open(os.path.join(root, each), "rb") as file:
                        found[os.path.relpath(os.path.join(root, each), self.folder)] = file.read()
        return found

    def refuse_all(self, folder, *arguments, option="--json"):
        before = self.files_below(folder)
        self.assertNotEqual(before, {})
        for name in before:
            if os.path.basename(name) not in (".lock", "latest"):
                with self.subTest(arguments=arguments[:2], name=os.path.basename(name)):
                    self.assertIn("is the same file as", self.run_sluice(*arguments, option, name, expect=2).stderr)
        self.assertTrue(self.files_below(folder) == before, "changed")
        self.assert_untouched()

    def test_no_output_is_a_file_of_a_store(self):
        for command in ("list", "inspect", "verify", "remove"):
            self.refuse_all("stored", "state", command, "store.json")
        self.refuse_all("stored", "state", "export", "store.json", "exported")
        self.assertFalse(os.path.exists(self.path("exported")), "refused before anything is done")
        for option in ("--json", "--save", "--csv"):
            self.refuse_all("stored", "train", "store.json", "--resume", "--quiet", option=option)

    def test_no_output_is_a_folder_that_is_to_be_made(self):
        for option in ("--csv", "--json"):
            for folder in ("--checkpoint", "--tensorboard"):
                self.assertIn(f"\"fresh\" is the same file as {folder}", self.run_sluice(
                    "train", "store.json", "--resume", "--quiet", folder, "fresh", option, "fresh", expect=2).stderr)
                if os.path.isdir(self.path("fresh")):
                    os.rmdir(self.path("fresh"))
        self.assertIn("is the same file as DIR", self.run_sluice("state", "export", "store.json", "fresh", "--json", "fresh", expect=2).stderr)
        self.assertFalse(os.path.exists(self.path("fresh")))

    def test_an_output_beside_a_store_may_begin_with_its_name(self):
        for _ in range(2):
            self.run_sluice("train", "store.json", "--resume", "--quiet", "--steps", "1", "--json", "stored/run-7.json")
        self.assertIn("steps", self.read_json("stored/run-7.json"))

    def test_no_output_is_a_file_of_a_checkpoint(self):
        self.run_sluice("state", "export", "store.json", "exported")
        self.refuse_all("exported", "train", "config.json", "--checkpoint", "exported", "--resume", "--quiet")
        (checkpoint,) = [name for name in os.listdir(self.path("exported")) if name.startswith("step-")]
        self.refuse_all(f"exported/{checkpoint}", "train", "config.json", "--quiet", "--init", f"exported/{checkpoint}")
        self.refuse_all(f"exported/{checkpoint}", "train", "config.json", "--quiet", "--resume-from", "exported")
        for option in ("--init", "--resume-from"):  # a file is read with the config beside it
            self.assertIn(f"is the same file as {option}", self.run_sluice(
                "train", "config.json", "--quiet", option, f"exported/{checkpoint}/model-00001-of-00001.safetensors",
                "--json", f"exported/{checkpoint}/config.json", expect=2).stderr)
        self.refuse_all(f"exported/{checkpoint}", "plan", "--model", f"exported/{checkpoint}")
        # A config.json beside a file that needs none may be anything.
        self.run_sluice("train", "config.json", "--quiet", "--steps", 1, "--save", f"exported/{checkpoint}/own.safetensors")
        os.remove(self.path(f"exported/{checkpoint}/config.json"))
        os.mkdir(self.path(f"exported/{checkpoint}/config.json"))
        self.run_sluice("train", "config.json", "--quiet", "--steps", 1, "--init", f"exported/{checkpoint}/own.safetensors")
        os.rmdir(self.path(f"exported/{checkpoint}/config.json"))
        with open(self.path(f"exported/{checkpoint}/config.json"), "wb") as file:
            file.truncate(1 << 30)  # more than is read
        self.run_sluice("train", "config.json", "--quiet", "--steps", 1, "--init", f"exported/{checkpoint}/own.safetensors")
        os.mkdir(self.path("imported"))
        elsewhere = ["--set", 'storage.paths=["imported"]']
        self.refuse_all(f"exported/{checkpoint}", "state", "import", "store.json", "exported", *elsewhere)
        self.assertEqual(os.listdir(self.path("imported")), [])
        self.run_sluice("state", "import", "store.json", "exported", *elsewhere, "--json", "made.json")
        self.assertEqual(self.read_json("made.json")["name"], "run-7")


class GrowingOutputs(CliCase):
    LABEL = "command"

    def rows(self, *arguments):
        self.run_sluice("train", self.write_config({"run.steps": 7}), "--quiet", "--csv", "run.csv", "--json-lines", "run.jsonl",
                        "--json", "run.json", *arguments)
        with open(self.path("run.csv"), encoding="ascii") as file:
            csv = [int(line.split(",")[0]) for line in file.readlines()[1:]]
        with open(self.path("run.jsonl"), encoding="ascii") as file:
            lines = [json.loads(line) for line in file]
        for line in lines:
            step = self.read_json("run.json")["steps"][line["step"] - 1]
            self.assertEqual(line, {key: step[key] for key in line})
            self.assertEqual(set(step) - set(line), {"percent_of_t_min", "percent_of_t_bound"})
        self.assertEqual(csv, [line["step"] for line in lines])
        return csv

    def test_log_every(self):
        self.assertEqual(self.rows(), [1, 2, 3, 4, 5, 6, 7])
        self.assertEqual(self.rows("--log-every", 3), [3, 6, 7])
        self.assertEqual(self.rows("--log-every", 100), [7])
        self.run_sluice("train", "config.json", "--log-every", 0, expect=2)
        done = self.run_sluice("train", "config.json", "--log-every", 3)
        self.assertEqual(re.findall(r"(?m)^step +(\d+)/", done.stdout), ["3", "6", "7"])

    def test_a_killed_run_leaves_its_steps(self):
        process = subprocess.Popen(
            self.command("train", self.write_config({**ON_NVME, "run.steps": 1000000}), "--csv", "run.csv",
                         "--json-lines", "run.jsonl", "--json", "run.json", "--save", "model"),
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        printed = 0
        while printed < 3:
            line = process.stdout.readline().decode()
            self.assertNotEqual(line, "")
            if line.startswith("step "):
                printed = int(line.split()[1].split("/")[0])
        process.kill()
        process.wait(timeout=RUN_TIMEOUT_S)
        with open(self.path("run.csv"), encoding="ascii") as file:
            self.assertGreaterEqual(len(file.readlines()), 1 + 3)
        with open(self.path("run.jsonl"), encoding="ascii") as file:
            self.assertGreaterEqual(len([json.loads(line) for line in file]), 3)
        self.assertEqual(sorted(os.listdir(self.folder)), ["config.json", "run.csv", "run.jsonl", "storage", "text.txt"])

    def test_a_file_that_grows_has_one_writer(self):
        files = ("--csv", "run.csv", "--json-lines", "run.jsonl", "--trace", "run.trace")
        command = self.command("train", self.write_config({"run.steps": 1000000}), *files)
        process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        while b"step     1/" not in process.stdout.readline():
            self.assertIsNone(process.poll())
        for option, name in zip(files[::2], files[1::2]):
            second = self.run_sluice("train", "config.json", "--steps", 1, option, name, expect=2)
            self.assertIn(f'{option} "{name}": another process still writes it', second.stderr)
        os.unlink(self.path("run.csv"))
        os.rename(self.path("text.txt"), self.path("run.trace"))
        process.terminate()
        stdout, stderr = (text.decode() for text in process.communicate(timeout=RUN_TIMEOUT_S))
        self.assertEqual(process.returncode, 1, stderr)
        for name in ("run.csv", "run.trace"):
            self.assertRegex(stderr, f'"{name}" has been removed or replaced by another process')
        self.assertNotIn("trace: ", stdout)
        with open(self.path("run.jsonl"), encoding="ascii") as file:
            self.assertEqual(len(file.readlines()), int(re.findall(r"(?m)^step +(\d+)/", stdout)[-1]))

    def test_a_full_disk_keeps_whole_rows_and_what_was_there(self):
        os.mkdir(self.path("disk"))
        mount_tmpfs(self, self.path("disk"), "64k")
        self.write_config()
        for name in ("run.json", "model"):
            with open(self.path("disk", name), "w", encoding="ascii") as file:
                file.write("old")
        # All but three pages: the trace, the model and the later rows find no room.
        space = os.statvfs(self.path("disk"))
        with open(self.path("disk", "ballast"), "wb") as file:
            file.write(b"x" * ((space.f_bavail - 3) * space.f_frsize))
        done = self.run_sluice("train", "config.json", "--quiet", "--steps", 100, "--json", "disk/run.json", "--save", "disk/model",
                               "--json-lines", "disk/run.jsonl", "--trace", "disk/run.trace", expect=5)
        self.assertIn("No space left on device", done.stderr)
        for name in ("run.json", "model"):
            with open(self.path("disk", name), encoding="ascii") as file:
                self.assertEqual(file.read(), "old")
        with open(self.path("disk", "run.jsonl"), encoding="ascii") as file:
            self.assertTrue(all(json.loads(line) for line in file))
        self.assertEqual([name for name in os.listdir(self.path("disk")) if name.endswith(".tmp")], [])


class TemporaryNames(CliCase):
    LABEL = "command"

    def test_leftovers_are_named_and_in_nobodys_way(self):
        config = self.write_config()
        stale, held = "model.sluice-0123456789abcdef.tmp", "model.sluice-00000000000000ff.tmp"
        for name in (stale, held, "other.sluice-0123456789abcdef.tmp", "model.1.tmp"):
            with open(self.path(name), "w", encoding="ascii"):
                pass
        with open(self.path(held), encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            done = self.run_sluice("train", config, "--quiet", "--save", "model")
        self.assertEqual(done.stderr.count(".tmp"), 1, done.stderr)
        self.assertIn(stale, done.stderr)
        self.assertTrue(os.path.exists(self.path("model")))

    def test_the_process_number_is_no_part_of_the_name(self):
        """In a container it is the same every time."""
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            self.skipTest("needs root and unshare")
        config = self.write_config()
        for number in range(1, 5):
            open(self.path(f"model.{number}.tmp"), "w", encoding="ascii").close()
        self.run_sluice("train", config, "--quiet", "--save", "model", prefix=("unshare", "-p", "-f", "--mount-proc"))
        self.assertTrue(os.path.exists(self.path("model")))

    def test_a_long_name(self):
        name = "m" * 250
        self.run_sluice("train", self.write_config(), "--quiet", "--save", name, "--csv", "c" * 255)
        self.assertTrue(os.path.exists(self.path(name)))
        self.assertEqual(len(os.listdir(self.folder)), 5)


class StandardStreams(CliCase):
    LABEL = "command"

    def run_shell(self, redirection, *arguments, expect=0):
        """Runs under a shell that redirects."""
        command = " ".join(map(str, self.command(*arguments))) + " " + redirection
        done = subprocess.run(["sh", "-c", command], cwd=self.folder, env=self.environment(), capture_output=True,
                              text=True, timeout=RUN_TIMEOUT_S, check=False)
        self.assertEqual(done.returncode, expect, (command, done.stderr))
        return done

    def test_notes_that_cannot_be_printed_lose_nothing(self):
        config = self.write_config({"storage.backend": "sync"})
        for redirection in ("2>/dev/full", "2>&-", "<&- 2>&-"):
            with self.subTest(redirection):
                with open(self.path("model.sluice-0123456789abcdef.tmp"), "w", encoding="ascii"):
                    pass  # a note at the start
                self.run_shell(redirection, "train", config, "--json-lines", "/dev/full", "--json", "run.json", "--save", "model", expect=5)
                self.assertEqual(len(self.read_json("run.json")["steps"]), 3)
                os.unlink(self.path("model"))

    def test_errors_that_cannot_be_printed_keep_their_code(self):
        for redirection in ("2>/dev/full", "2>&-"):
            self.run_shell(redirection, "train", "gone.json", expect=2)
            self.run_shell(redirection, "train", self.write_config(), "--set memory.host=1B", expect=5)

    def test_closed_descriptors_are_given_to_nobody(self):
        config = self.write_config()
        for redirection in (">&-", "<&- >&- 2>&-"):
            with self.subTest(redirection):
                self.run_shell(redirection, "train", config, "--trace", "run.trace", "--csv", "run.csv", "--save", "model")
                summary = self.run_sluice("trace", "summary", "run.trace").stdout
                self.assertNotIn("damaged", summary)
                with open(self.path("run.csv"), encoding="ascii") as file:
                    self.assertEqual(len(file.readlines()), 4)
                self.run_sluice("generate", "--model", "model", "--prompt", "a", "--tokens", 1)

    def test_standard_output_that_is_full(self):
        config = self.write_config()
        for arguments in (("train", config, "--json", "run.json"), ("plan", config), ("doctor", "--path", "storage"), ("--help",)):
            with self.subTest(arguments):
                done = self.run_shell(">/dev/full", *arguments, expect=5)
                self.assertIn("cannot write to standard output: No space left on device", done.stderr)
        self.assertEqual(len(self.read_json("run.json")["steps"]), 3)

    def test_standard_output_whose_reader_has_gone(self):
        config = self.write_config({"run.steps": 200})
        done = self.run_shell("| head -n 1", "config", "rates", config, "--steps", 10**9)
        self.assertEqual(done.stdout.count("\n"), 1)
        done = self.run_shell("| head -n 1", "train", config, "--json", "run.json", "--save", "model", "--log-every", 1)
        self.assertIn("cannot write to standard output: Broken pipe", done.stderr)
        self.assertEqual(len(self.read_json("run.json")["steps"]), 200)
        self.assertTrue(os.path.exists(self.path("model")))
        read_end, write_end = os.pipe()
        os.close(read_end)
        self.addCleanup(os.close, write_end)
        subprocess.run(self.command("train", config, "--steps", 3), cwd=self.folder, stdout=write_end, stderr=subprocess.DEVNULL,
                       timeout=RUN_TIMEOUT_S, check=True)
