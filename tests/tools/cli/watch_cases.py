"""The words of `sluice train` about the model between steps: validation, samples, TensorBoard's files, rates and MFU."""

import array
import csv
import glob
import json
import os
import random
import re
import struct
import subprocess

from cli_support import CliCase, ON_NVME, RUN_TIMEOUT_S, mount_tmpfs
from event_files import events_in

# The rate stays the same, so that a shorter run is the beginning of a longer one.
STEADY = {"optimizer.learning_rate": 3e-3, "optimizer.minimum_learning_rate": 3e-3, "precision.parameters": "fp32"}


def fp32(number):
    return struct.unpack("<f", struct.pack("<f", number))[0]


class Watch(CliCase):
    LABEL = "command"

    def run_train(self, values, *arguments):
        """(--json's document, what was printed)."""
        done = self.run_sluice("train", self.write_config(values), "--json", "run.json", *arguments)
        return self.read_json("run.json"), done.stdout

    def test_validation_between_steps_changes_no_bit(self):
        for placement in ({}, {**ON_NVME, "optimizer.overlap": "serial"}):
            with self.subTest(placement):
                values = {**STEADY, **placement, "run.steps": 5}
                plain = self.train(values)
                watched, printed = self.run_train(values, "--validate-every", 2, "--sample-every", 3, "--sample-tokens", 5)
                self.assertEqual(watched["state_sha256"], plain["state_sha256"])
                self.assertEqual(watched["validation_loss"], plain["validation_loss"])
                found = [step["validation_loss"] for step in watched["steps"]]
                for steps in (2, 4):
                    self.assertEqual(found[steps - 1], self.train({**values, "run.steps": steps})["validation_loss"])
                    self.assertIn(f"step     {steps}: validation loss {found[steps - 1]:.4f}", printed)
                self.assertEqual([found[0], found[2], found[4]], [None] * 3)
                if placement:
                    for step in watched["steps"]:
                        self.assertEqual(step["nvme_read_bytes"], watched["predicted_nvme_read_bytes"])
                        self.assertEqual(step["nvme_write_bytes"], watched["predicted_nvme_write_bytes"])

    def test_a_text_that_is_cut_meanwhile_takes_no_model(self):
        """The end of a run reads the text again, for its figures alone."""
        values = {**STEADY, "run.steps": 400}
        size = os.path.getsize(self.path("text.txt"))
        with open(self.path("cut.txt"), "wb") as file, open(self.path("text.txt"), "rb") as text:
            file.write(text.read())
        arguments = ["train", self.write_config(values), "--data", "cut.txt", "--save", "model", "--json", "run.json",
                     "--csv", "run.csv"]
        process = subprocess.Popen(self.command(*arguments), cwd=self.folder, env=self.environment(),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.kill)
        while b"step     1/" not in process.stdout.readline():
            self.assertIsNone(process.poll())
        os.truncate(self.path("cut.txt"), int(0.97 * size))
        said = process.communicate(timeout=RUN_TIMEOUT_S)[1].decode()
        self.assertEqual(process.returncode, 2, said)
        self.assertRegex(said, r'data file "cut.txt": it ends at byte \d+, .* it was cut meanwhile')
        run = self.read_json("run.json")
        self.assertEqual((run["validation_loss"], run["bigram_cross_entropy"]), (None, None))
        self.assertEqual(len(run["state_sha256"]), 64)
        self.run_sluice("generate", "--model", "model", "--prompt", "in", "--tokens", 1)
        with open(self.path("run.csv"), encoding="utf-8") as file:
            self.assertEqual(len(file.readlines()), 1 + len(run["steps"]))

    def test_pairs_of_a_long_text_take_little_memory(self):
        peaks = []
        for tokens in ([5] * 3_000_000, random.Random(1).choices(range(65536), k=3_000_000)):
            with open(self.path("tokens"), "wb") as file:
                array.array("H", tokens).tofile(file)
            run = self.train({**STEADY, "data.file": "tokens", "data.format": "uint16", "model.vocabulary": 65536, "run.steps": 1})
            self.assertGreater(run["bigram_cross_entropy"], 0)
            peaks.append(run["peak_rss_bytes"])
        self.assertLess(peaks[1] - peaks[0], 50 << 20)  # a table of all pairs takes more than 100 MB

    def test_every_validation_has_a_row(self):
        self.run_train({**STEADY, "run.steps": 9}, "--validate-every", 3, "--log-every", 4, "--csv", "run.csv", "--json-lines", "run.jsonl")
        with open(self.path("run.csv"), encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([int(row["step"]) for row in rows], [3, 4, 6, 8, 9])
        self.assertEqual([row["step"] for row in rows if row["validation_loss"]], ["3", "6", "9"])
        with open(self.path("run.jsonl"), encoding="utf-8") as file:
            self.assertEqual([json.loads(line)["step"] for line in file], [3, 4, 6, 8, 9])

    def test_a_sample_is_what_generate_says(self):
        values = {**STEADY, "run.steps": 4}
        _, printed = self.run_train(values, "--save", "model", "--sample-every", 4, "--sample-tokens", 40, "--sample-prompt", "in the", "--quiet")
        self.assertEqual(printed, "")
        _, printed = self.run_train(values, "--save", "model", "--sample-every", 4, "--sample-tokens", 40, "--sample-prompt", "in the")
        said = self.run_sluice("generate", "--model", "model", "--prompt", "in the", "--tokens", 40, "--seed", 7).stdout
        self.assertIn("step     4: sample: " + said, printed)
        self.assertEqual(printed.count("sample:"), 1)

    def test_lines_on_a_terminal_begin_behind_the_bar(self):
        seen = self.on_terminal(200, "train", self.write_config(STEADY), "--steps", 4, "--validate-every", 1, "--sample-every", 2,
                                "--sample-prompt", "a\x1b[31m\a", "--sample-tokens", 5)
        for line, count in (("validation loss", 4), ("sample: a", 2)):
            before = re.findall(r"(.)step +\d: " + line, seen, re.DOTALL)
            self.assertEqual(before, ["\n"] * count, seen)
        self.assertIn("sample: a\ufffd[31m\ufffd", seen)
        self.assertNotIn("\x1b[31m", seen)

    def test_samples_speak_the_tokenizer(self):
        self.write_tokenizer()
        words = ("--tokenizer", "tokenizer.json", "--save", "model", "--sample-every", 20, "--sample-prompt", "the", "--sample-tokens", 20)
        values = {**STEADY, "model.vocabulary": 258, "run.steps": 20, "activations": "recompute", "batch.micro_batches": 2, **ON_NVME}
        _, printed = self.run_train(values, *words)
        said = self.run_sluice("generate", "--model", "model", "--tokenizer", "tokenizer.json", "--prompt", "the", "--tokens", 20, "--seed", 7).stdout
        self.assertIn("step    20: sample: " + said, printed)

    def test_events_have_the_rows_of_the_csv(self):
        values = {**STEADY, "run.steps": 5}
        self.run_train(values, "--tensorboard", "board", "--csv", "run.csv", "--validate-every", 2, "--sample-every", 5, "--sample-tokens", 3,
                       "--sample-prompt", "a", "--peak-flops", "1T")
        path, = glob.glob(self.path("board", "events.out.tfevents.*"))
        events = events_in(path)
        with open(self.path("run.csv"), encoding="ascii", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual([step for step, _ in events], [1, 2, 3, 4, 5, 5, 5])
        pairs = {"train/loss": "loss", "train/gradient_norm": "gradient_norm", "speed/step_s": "time_s", "speed/tokens_per_s": "tokens_per_s",
                 "speed/flops_per_s": "flops_per_s", "speed/mfu": "mfu", "traffic/nvme_read_bytes": "nvme_read_bytes",
                 "traffic/nvme_write_bytes": "nvme_write_bytes", "validation/loss": "validation_loss"}
        for row, (_, told) in zip(rows, events):
            self.assertAlmostEqual(told.pop("train/learning_rate"), 3e-3 * min(1, int(row["step"]) / 4), places=6)
            self.assertEqual(told, {tag: fp32(float(row[name])) for tag, name in pairs.items() if row[name]})
        self.assertTrue(events[5][1]["sample"].startswith("a"))
        self.assertEqual(events[6][1], {"validation/loss": fp32(self.read_json("run.json")["validation_loss"])})

    def test_events_have_the_logged_steps(self):
        self.run_train({**STEADY, "run.steps": 9}, "--tensorboard", "board", "--validate-every", 3, "--log-every", 4)
        path, = glob.glob(self.path("board", "events.out.tfevents.*"))
        self.assertEqual([step for step, _ in events_in(path)], [3, 4, 6, 8, 9])
        self.run_train({**STEADY, "run.steps": 5}, "--tensorboard", "more", "--log-every", 4)
        path, = glob.glob(self.path("more", "events.out.tfevents.*"))
        self.assertEqual([step for step, _ in events_in(path)], [4, 5, 5])  # and the loss at the end

    def test_a_refused_run_leaves_no_folder_of_events(self):
        os.mkdir(self.path("there"))
        for values, code in (({"memory.host": "1KiB", **ON_NVME}, 5), ({"data.file": "none.txt"}, 2)):
            for folder in ("new/board", "there", "there/board"):
                self.run_sluice("train", self.write_config(values), "--tensorboard", folder, expect=code)
            self.assertFalse(os.path.exists(self.path("new")))
            self.assertEqual(os.listdir(self.path("there")), [])

    def test_the_update_before_an_evaluation_is_of_its_step(self):
        """T_min and T_bound are those of training; the parts of a step that an evaluation waits for are in the step's time."""
        run, _ = self.run_train({**STEADY, **ON_NVME, "run.steps": 6}, "--validate-every", 1, "--sample-every", 1, "--sample-tokens", 5)
        for rate in ("read_bytes_per_second", "copy_bytes_per_second", "adam_parameters_per_second"):
            self.assertGreater(run["limits"][rate], 0, rate)

    def test_rates_follow_from_tokens_operations_and_time(self):
        run, printed = self.run_train({}, "--peak-flops", "2G")
        weights = 2 * 12 * 64 * 64 + 256 * 64  # of the products: two blocks and the head
        for step in run["steps"]:
            self.assertAlmostEqual(step["tokens_per_s"], step["tokens"] / step["time_s"])
            operations = step["flops_per_s"] / step["tokens_per_s"]
            self.assertGreater(operations, 6 * weights)  # attention comes on top
            self.assertLess(operations, 1.2 * 6 * weights)
            self.assertAlmostEqual(step["mfu"], step["flops_per_s"] / 2e9)
        self.assertRegex(printed, r"step +1/3 .* tok/s  \S+ TFLOP/s  MFU \d+\.\d %")
        plain = self.train()
        self.assertEqual({step["mfu"] for step in plain["steps"]}, {None})

    def test_the_peak_is_measured(self):
        run, printed = self.run_train({}, "--measure-peak", "--json-lines", "lines")
        self.assertIn("MFU", printed)
        with open(self.path("lines"), encoding="ascii") as file:
            for line in file:
                step = json.loads(line)
                self.assertGreater(step["mfu"], 0)
        peaks = {round(step["flops_per_s"] / step["mfu"]) for step in run["steps"]}
        self.assertEqual(len(peaks), 1)

    def test_a_model_without_finite_logits_has_no_sample(self):
        self.train({"run.steps": 1}, "--save", "model")
        with open(self.path("model"), "rb") as file:
            content = bytearray(file.read())
        length, = struct.unpack_from("<Q", content)
        header = json.loads(content[8:8 + length])

        def put(name, place, *values):
            begin = 8 + length + header[name]["data_offsets"][0] + 4 * place
            struct.pack_into(f"<{len(values)}f", content, begin, *values)

        # A byte that the text does not have: the first value before the head is 1, so its logit is far below all others. Only
        # weight decay changes its row, to 99 times as much, and the logit overflows.
        put("ln_f.weight", 0, 0)
        put("ln_f.bias", 0, 1)
        put("wte.weight", 255 * 64, -3e36, *[0] * 63)
        with open(self.path("model"), "wb") as file:
            file.write(content)
        values = {"run.steps": 1, "optimizer.learning_rate": 10, "optimizer.minimum_learning_rate": 10, "optimizer.warmup_steps": 0,
                  "optimizer.weight_decay": 10, "precision.parameters": "fp32"}
        _, printed = self.run_train(values, "--init", "model", "--sample-every", 1)
        self.assertIn("step     1: sample: (the logits are not finite)\n", printed)

    def test_what_cannot_be_sampled_is_refused(self):
        self.assertIn("pass --tokenizer", self.fail_train(2, {"model.vocabulary": 300}, "--sample-every", 1))
        self.assertIn("--sample-prompt is empty", self.fail_train(2, None, "--sample-every", 1, "--sample-prompt", ""))
        for option in (("--sample-prompt", "a"), ("--sample-tokens", 3)):
            self.assertIn(f"{option[0]} requires --sample-every", self.fail_train(2, None, *option))
        self.assertIn("--measure-peak", self.fail_train(2, None, "--peak-flops", 1, "--measure-peak"))

    def test_a_full_disk_ends_the_events_and_not_the_run(self):
        os.mkdir(self.path("board"))
        mount_tmpfs(self, self.path("board"), "4k")
        done = self.run_sluice("train", self.write_config({"run.steps": 20}), "--json", "run.json", "--tensorboard", "board", expect=5)
        self.assertIn("training goes on", done.stderr)
        self.assertEqual(len(self.read_json("run.json")["steps"]), 20)
