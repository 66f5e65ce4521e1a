"""sluice tune: what it writes, what it keeps, and what it refuses before anything is written."""

import json
import os
import signal
import subprocess

from cli_support import GPU_RATES, ON_NVME, RUN_TIMEOUT_S, CliCase

QUICK = ["--seconds", 3, "--steps", 1, "--finalists", 2]


# More state than machines have memory.
LARGE = {"model.layers": 32, "model.embedding": 32768, "model.heads": 256, "storage.block_elements": 2**24}


class Tune(CliCase):
    LABEL = "command"

    def tune(self, *arguments, values=None, expect=0):
        self.done = self.run_sluice("tune", self.write_config(values), *arguments, "--json", "tune.json", expect=expect)
        return self.read_json("tune.json") if expect == 0 else None

    def assert_nothing_is_written(self):
        self.assertEqual(sorted(os.listdir(self.folder)), ["config.json", "storage", "text.txt"])

    def test_the_output_is_a_config_that_trains_with_the_same_bits(self):
        values = {**ON_NVME, "memory.device": "1MiB", "memory.host": "2MiB"}
        tune = self.tune("-o", "tuned.json", "--keep", "batch", "--keep", "activations", *QUICK, values=values)
        self.assertRegex(self.done.stdout.splitlines()[0], r"^(tuned: .* a gain of \d|the given config stays: )")
        given = self.read_json("config.json")
        tuned = self.read_json("tuned.json")
        for section in ("model", "data", "batch", "run"):
            self.assertEqual(tuned[section], given[section])
        rows = [tune["given"], *tune["finalists"]]
        self.assertLessEqual(len(tune["finalists"]), 2)
        for row in rows:
            self.assertGreater(row["predicted_s"], 0)
            self.assertEqual(len(row["rounds_s"]), tune["rounds"])
        settings = rows[tune["winner"]]["settings"]
        for key, value in settings.items():
            place = tuned
            for word in key.split("."):
                place = (place or {}).get(word)
            self.assertEqual(place, value)  # None: Sluice chooses
        # The quickest in every round, or the given config.
        if tune["winner"] != 0:
            winner = rows[tune["winner"]]
            self.assertTrue(all(own < of_given for own, of_given in zip(winner["rounds_s"], rows[0]["rounds_s"])))
            self.assertGreater(winner["gain"], 1.01)
        hashes = []
        for name in ("config.json", "tuned.json"):
            self.run_sluice("train", name, "--quiet", "--json", "run.json")
            hashes.append(self.read_json("run.json")["state_sha256"])
        self.assertEqual(hashes[0], hashes[1])

    def test_kept_keys_stay(self):
        values = {**ON_NVME, "memory.device": "1MiB", "memory.host": "2MiB"}
        free = self.tune("--dry-run", values=values)
        self.assertTrue(any("memory.host" in row["settings"] for row in free["finalists"]), free)
        kept = self.tune("--dry-run", "--keep", "memory", values=values)
        self.assertFalse(any(key.startswith("memory") for row in kept["finalists"] for key in row["settings"]), kept)

    def test_a_dry_run_runs_nothing(self):
        os.remove(self.path("text.txt"))  # which a run would read
        tune = self.tune("--dry-run", "--flops", "1e9", values=ON_NVME)
        self.assertIsNone(tune["winner"])
        self.assertEqual((tune["rounds"], tune["given"]["rounds_s"], tune["given"]["measured_s"]), (0, [], None))
        slow = tune["given"]["predicted_s"]
        fast = self.tune("--dry-run", "--flops", "2e9", values=ON_NVME)["given"]["predicted_s"]
        self.assertGreater(slow, 1.5 * fast)
        for option in (("-o", "x"), ("--steps", 5), ("--seconds", 10)):
            self.assertIn("excludes", self.run_sluice("tune", "config.json", "--dry-run", *option, expect=2).stderr)

    def test_figures_of_bench_gpu(self):
        """Without a run, copies, updates of the device and computation come from the file."""
        def predicted(change, *arguments, optimizer="host"):
            with open(self.path("gpu.json"), "w", encoding="utf-8") as file:
                json.dump({**GPU_RATES, **change}, file)
            values = {"run.device": "cuda", "memory.device": "64MiB", "memory.host": "64MiB", "optimizer.overlap": "serial",
                      "placement.parameters": "auto" if optimizer == "device" else "host", "placement.optimizer": optimizer}
            return self.tune("--dry-run", "--keep", "optimizer", "--keep", "placement", *arguments, values=values)["given"]["predicted_s"]
        file = ("--gpu-rates", "gpu.json")
        quick = predicted({}, *file)
        training = [{**GPU_RATES["training"][0], "compute_flops_per_s": 1e6}]
        self.assertGreater(predicted({"training": training}, *file), 2 * quick)
        copies = [{**copy, "gb_per_s": {"median": 1e-4}} for copy in GPU_RATES["copies"]]
        self.assertGreater(predicted({"copies": copies}, *file), 2 * quick)
        slow = {"adam": {"parameters_per_s": 1e4}}
        self.assertGreater(predicted(slow, *file, optimizer="device"), 2 * predicted({}, *file, optimizer="device"))
        self.assertLess(predicted(slow, optimizer="device"), predicted(slow, *file, optimizer="device"))  # without the file
        refused = self.run_sluice("tune", self.write_config({"run.device": "host"}), "--dry-run", *file, expect=2)
        self.assertIn('--gpu-rates "gpu.json" has the rates of a GPU, but this config computes on the host', refused.stderr)

    def test_a_config_that_does_not_fit_gets_settings_that_do(self):
        tune = self.tune("-o", "tuned.json", *QUICK, values={"memory.device": "1MiB", "memory.host": "8KiB"})
        self.assertIn("memory.host", tune["given"]["obstacle"])
        self.assertGreater(tune["winner"], 0)
        self.assertTrue(self.done.stdout.startswith("does not fit as given: "))
        self.run_sluice("train", "tuned.json", "--quiet")

    def test_memory_that_the_config_takes_as_there_is_no_obstacle(self):
        values = {"memory.host": "100TiB", "memory.device": "100TiB", "placement.optimizer": "host", "placement.parameters": "host"}
        for check, fits in (("error", False), ("warn", True), ("off", True)):
            with self.subTest(check):
                tune = self.tune("--dry-run", "--keep", "memory", values={**values, **LARGE, "memory.check": check}, expect=0 if fits else 5)
                self.assertEqual(tune is not None and tune["given"]["obstacle"] in (None, ""), fits)

    def test_refusals_write_nothing(self):
        config = self.write_config()
        for arguments, code, message in (
                (["--set", "memory.host=8KiB", "--set", "memory.device=8KiB", "--keep", "memory"], 5, "no other settings make it fit"),
                (["--data", "gone.txt"], 2, "gone.txt"),
                (["--set", 'storage.paths=["gone"]'], 2, "gone"),
                (["--set", "optimizer.lane=3"], 2, "optimizer.lanes"),
                (["--keep", "memroy"], 2, "--keep memroy: a config has no such key or section")):
            with self.subTest(arguments):
                done = self.run_sluice("tune", config, "-o", "out.json", *arguments, expect=code)
                self.assertIn(message, done.stderr)
                self.assert_nothing_is_written()

    def test_runs_train_on_the_tokens_of_the_text(self):
        """As bytes, no letter of the text is in this vocabulary."""
        with open(self.path("text.txt"), "w", encoding="ascii") as file:
            file.write("the " * 2000)
        with open(self.path("tokenizer.json"), "w", encoding="utf-8") as file:
            json.dump({"model": {"type": "BPE", "vocab": {word: place for place, word in enumerate(["t", "h", "e", "\u0120", "th", "the"])},
                                 "merges": ["t h", "th e"]}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}, file)
        values = {"data.tokenizer": "tokenizer.json", "model.vocabulary": 8}
        self.tune("-o", "tuned.json", *QUICK, values=values)
        self.assertEqual(self.read_json("tuned.json")["data"]["file"], "text.txt")
        (tokens,) = [name for name in os.listdir(self.folder) if name.endswith(".tokens")]
        held = os.stat(self.path(tokens)).st_ino
        self.run_sluice("train", "tuned.json", "--quiet")
        self.assertEqual(os.stat(self.path(tokens)).st_ino, held)

    def test_a_wrong_tokenizer_is_known_before_any_measurement(self):
        for text, vocabulary, message in (('{"precious": 1}', 256, 'its model is "null"'), (None, 256, "raise it to at least 258")):
            self.write_tokenizer()
            if text is not None:
                with open(self.path("tokenizer.json"), "w", encoding="ascii") as file:
                    file.write(text)
            config = self.write_config({"data.tokenizer": "tokenizer.json", "model.vocabulary": vocabulary})
            self.assertIn(message, self.run_sluice("tune", config, "-o", "out.json", *QUICK, expect=2).stderr)
            os.remove(self.path("tokenizer.json"))
            self.assert_nothing_is_written()

    def test_an_interrupt_leaves_no_part_of_the_tokens(self):
        self.write_tokenizer(merges=[(a, b) for a in "0123456789abcdef" for b in "0123456789abcdef"])
        with open(self.path("text.txt"), "wb") as file:  # words that are all different take their time
            for _ in range(3000):
                file.write(os.urandom(5000).hex(" ", 20).encode() + b" ")
        config = self.write_config({"data.tokenizer": "tokenizer.json", "model.vocabulary": 512})
        process = subprocess.Popen(self.command("tune", config, "-o", "out.json", *QUICK), cwd=self.folder, env=self.environment(),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        while not any(name.endswith(".tmp") for name in os.listdir(self.folder)):
            self.assertIsNone(process.poll(), "it ended early")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
        self.assertEqual((process.returncode, stderr), (130, b"sluice: interrupted; no result was written\n"))
        os.remove(self.path("tokenizer.json"))
        self.assert_nothing_is_written()

    def test_a_calibration_is_kept_and_measured_again_when_it_is_old(self):
        self.tune("--dry-run")
        self.assertTrue(self.tune("--dry-run")["calibration"]["was_cached"])
        self.assertFalse(self.tune("--dry-run", "--calibration-days", 0)["calibration"]["was_cached"])
        self.assertIn("calibration measured in", self.done.stdout)

    def test_a_calibration_of_a_time_to_come_is_measured_again(self):
        cache = self.path("cache")
        self.environment = lambda: {**CliCase.environment(self), "XDG_CACHE_HOME": cache}
        self.tune("--dry-run")
        (name,) = os.listdir(os.path.join(cache, "sluice"))
        made = self.read_json(os.path.join("cache", "sluice", name))
        with open(os.path.join(cache, "sluice", name), "w", encoding="utf-8") as file:
            json.dump({**made, "made_s": made["made_s"] + 10**6}, file)
        self.assertFalse(self.tune("--dry-run")["calibration"]["was_cached"])
        self.assertIn(f'{name}" was measured later than now, by this machine\'s clock; measuring again\n', self.done.stderr)

    def test_several_ranks_are_refused(self):
        done = self.run_sluice("tune", self.write_config(), expect=(2, 3, 4, 5),
                               prefix=["env", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=0",
                                       "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=2"])
        self.assertIn("tune works with one", done.stderr)
        self.assert_nothing_is_written()
