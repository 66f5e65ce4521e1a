"""No command that takes a config writes over a file that the config names, also where it reads that file for nothing. Each
command, each of its outputs and each file is a case, so that a new command or output without a row is noticed."""

import json
import os
import re
import shutil

from cli_support import ON_NVME, SMALL_CONFIG, CliCase, some, with_values

# The words of each command beside its outputs.
COMMANDS = {
    "train": ["train", "config.json", "--quiet"],
    "plan": ["plan", "config.json"],
    "tune": ["tune", "config.json", "--seconds", "1", "--steps", "1", "--finalists", "1"],
    **{f"state {name}": ["state", name, "config.json"] for name in ("list", "inspect", "verify", "remove")},
    "state export": ["state", "export", "config.json", "fresh"],
    "state import": ["state", "import", "config.json", "exported"],
}
# It takes a DeepSpeed file, which names folders alone.
OF_DEEPSPEED = {"config import": ["config", "import", "deepspeed.json"]}
# They write files and take no config.
WITHOUT_CONFIG = {"tokenize", "doctor", *(f"bench {name}" for name in ("adam", "gpu", "io", "matrix", "step")),
                  *(f"trace {name}" for name in ("diff", "export", "html", "summary", "whatif"))}


class ConfigInputs(CliCase):
    LABEL = "command"

    def setUp(self):
        super().setUp()
        self.write_tokenizer()
        os.mkdir(self.path("stored"))
        self.run_sluice("bench", "io", "--path", "stored", "--size", "1MiB", "--request", "256KiB", "--depth", "4", "--rounds", "1",
                        "--json", "io.json")
        self.values = {**ON_NVME, "storage.paths": ["stored"], "storage.state.name": "run-7", "storage.calibration": "io.json",
                       "data.tokenizer": "tokenizer.json", "model.vocabulary": 258}
        self.write_config(self.values)
        self.run_sluice("train", "config.json", "--quiet", "--steps", 1)
        self.run_sluice("state", "export", "config.json", "exported")
        # A store of another run on the same path.
        self.run_sluice("train", "config.json", "--quiet", "--steps", 1, "--set", "storage.state.name=other")
        (self.tokens,) = [name for name in os.listdir(self.folder) if name.endswith(".tokens")]
        self.before = self.contents()

    def contents(self):
        """{name: bytes} of all files."""
        found = {}
        for root, _, names in os.walk(self.folder):
            for name in names:
                with open(os.path.join(root, name), "rb") as file:
                    found[os.path.relpath(os.path.join(root, name), self.folder)] = file.read()
        return found

    def outputs(self, commands):
        """(command, option) of each output of `commands`, as --help lists them."""
        found = set()
        for words in self.commands_below():
            options = re.findall(r"(--[a-z-]+) OUTPUT", self.run_sluice(*words, "--help").stdout)
            found |= {(" ".join(words), option) for option in options}
        self.assertEqual({command for command, _ in found}, {*COMMANDS, *OF_DEEPSPEED, *WITHOUT_CONFIG})
        return sorted((command, option) for command, option in found if command in commands)

    def stored(self):
        """The files of both stores."""
        names = sorted(name for name in self.before if name.startswith("stored/"))
        self.assertTrue(any("other." in name for name in names) and any("run-7." in name for name in names), names)
        return names

    def refuse(self, *arguments):
        done = self.run_sluice(*arguments, expect=2)
        self.assertRegex(done.stderr, r"(?m)^sluice: .*is the same file as")
        now = self.contents()
        self.assertEqual(sorted(now), sorted(self.before))
        self.assertEqual([name for name in now if now[name] != self.before[name]], [])

    def test_no_output_is_a_file_that_the_config_names(self):
        for row, (command, option) in enumerate(self.outputs(COMMANDS)):
            for name in ("config.json", "text.txt", "tokenizer.json", "io.json", *some(self.stored(), row, 3)):
                with self.subTest(command=command, option=option, input=name):
                    self.refuse(*COMMANDS[command], option, name)

    def test_no_output_is_a_file_in_a_folder_of_a_deepspeed_file(self):
        params = {"lr": 1e-4}
        place = {"device": "nvme", "nvme_path": "stored"}
        content = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": params},
                   "zero_optimization": {"stage": 3, "offload_optimizer": place, "offload_param": place}}
        for refused, options in (({}, ()), ({"momentum": 0.9}, ("--lenient",))):
            with open(self.path("deepspeed.json"), "w", encoding="utf-8") as file:
                json.dump(with_values(content, {"optimizer.params": {**params, **refused}}), file)
            self.before = self.contents()
            for row, (command, option) in enumerate(self.outputs(OF_DEEPSPEED)):
                for name in ("deepspeed.json", *some(self.stored(), row, 3)):
                    with self.subTest(command=command, options=options, option=option, input=name):
                        self.refuse(*OF_DEEPSPEED[command], *options, option, name)

    def test_no_output_is_the_text_as_tokens(self):
        for command, option in self.outputs(COMMANDS):
            if command in ("train", "tune"):
                with self.subTest(command=command, option=option):
                    self.refuse(*COMMANDS[command], option, self.tokens)
        elsewhere = ["--set", "storage.state.name=third", "--set", "storage.calibration="]
        self.run_sluice("train", "config.json", "--quiet", "--steps", 1, "--save", "model.safetensors", *elsewhere, "--set", "storage.state.name=")
        self.before = self.contents()
        self.refuse("state", "import", "config.json", "model.safetensors", *elsewhere, "--json", self.tokens)

    def test_a_store_that_is_to_be_made_is_protected(self):
        for words in (COMMANDS["train"], COMMANDS["tune"], COMMANDS["plan"]):
            self.refuse(*words, "--set", "storage.state.name=new", "--json", "stored/new.lock")

    def test_a_tokenizer_of_two_files(self):
        with open(self.path("tokenizer.json"), encoding="utf-8") as file:
            model = json.load(file)["model"]
        os.mkdir(self.path("gpt2"))
        with open(self.path("gpt2", "vocab.json"), "w", encoding="utf-8") as file:
            json.dump(model["vocab"], file)
        with open(self.path("gpt2", "merges.txt"), "w", encoding="utf-8") as file:
            file.write("#version: 0.2\n" + "\n".join(model["merges"]) + "\n")
        self.write_config({**self.values, "data.tokenizer": "gpt2/vocab.json"})
        self.before = self.contents()
        for name in ("gpt2/vocab.json", "gpt2/merges.txt"):
            for command, option in self.outputs(COMMANDS):
                with self.subTest(command=command, option=option, input=name):
                    self.refuse(*COMMANDS[command], option, name)
            for tokenizer in ("gpt2", "gpt2/vocab.json"):
                with self.subTest(tokenizer=tokenizer, input=name):
                    self.refuse("tokenize", "text.txt", "--tokenizer", tokenizer, "--output", name)

    def test_a_plan_is_made_for_paths_that_are_not_here(self):
        shutil.rmtree(self.path("stored"))
        config = with_values(SMALL_CONFIG, {**ON_NVME, "storage.paths": ["stored"], "storage.state.name": "run-7"})
        with open(self.path("config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        self.run_sluice("plan", "config.json", "--drive-space", "1TB", "--json", "plan.json")
        self.assertIn("placements", self.read_json("plan.json"))
