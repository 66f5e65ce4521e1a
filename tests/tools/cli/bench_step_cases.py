"""sluice bench step: its JSON file, its table, and what it refuses. No speed is asserted."""

from cli_support import CliCase, documented_words


class BenchStep(CliCase):
    LABEL = "command"

    def bench(self, *arguments, **options):
        return self.run_sluice("bench", "step", "--path", "storage", *arguments, **options)

    def test_all_policies(self):
        done = self.bench("--parameters", 300000, "--units", 5, "--steps", 5, "--json", "step.json",
                          "--regime", "balanced", "--regime", "adam-bound", "--regime",
                          "adam-unpaced")
        self.assertEqual(done.stderr, "")
        document = self.read_json("step.json")
        self.assertEqual([regime["regime"] for regime in document["regimes"]],
                         ["balanced", "adam-bound", "adam-unpaced"])
        for regime in document["regimes"]:
            self.assertTrue(regime["states_equal"])
            self.assertIn(f"\n{regime['regime']}: ", done.stdout)
            self.assertEqual([policy["policy"] for policy in regime["policies"]],
                             ["serial", "deferred", "eager", "speculative"])
            for policy in regime["policies"]:
                self.assertEqual(len(policy["steps_s"]), 5)
                # The bound of the whole is never below that of a part, at the same rates.
                self.assertGreaterEqual(policy["predicted_s"], regime["t_min_s"] * 0.98)
                # Nothing is faster than the emulated computation.
                self.assertGreaterEqual(policy["step_s"]["min"], regime["compute_s"])
                written = policy["nvme_write_bytes"]
                if policy["policy"] == "serial":  # of the others some is counted a step later
                    self.assertEqual(written, policy["ideal_write_bytes"])
                self.assertLessEqual(written, 2 * policy["ideal_write_bytes"])
                self.assertEqual(written == 0, regime["regime"] != "balanced")
            self.assertEqual(regime["policies"][0]["times_serial"], 1)
            serial = regime["policies"][0]
            self.assertEqual(serial["nvme_read_bytes"], serial["ideal_read_bytes"])
        regime = document["regimes"][0]
        keys = set(document) | set(regime) | set(regime["policies"][0])
        self.assertEqual(keys - documented_words(), set())

    def test_experts(self):
        done = self.bench("--parameters", 2000000, "--units", 4, "--steps", 4, "--json", "step.json", "--regime", "experts",
                          "--policy", "serial", "--policy", "deferred")
        regime, = self.read_json("step.json")["regimes"]
        self.assertTrue(regime["states_equal"])
        self.assertEqual(regime["used_units"], 5)  # one unit and 4 of its 64 experts
        self.assertIn("serial: steps use 5 of 65 units, and move 100.0 % (read) and 100.0 % (written)", done.stdout)
        serial, deferred = regime["policies"]
        self.assertEqual(serial["nvme_write_bytes"], serial["ideal_write_bytes"])
        self.assertLess(serial["nvme_write_bytes"], 13 * 2000000 * 5 / 65)
        self.assertLessEqual(deferred["percent_of_wanted_read"], 100)
        self.assertEqual(set(regime) - documented_words(), set())

    def test_rows(self):
        done = self.bench("--parameters", 2000000, "--units", 8, "--steps", 4, "--json", "step.json", "--regime", "rows",
                          "--policy", "serial", "--policy", "deferred")
        regime, = self.read_json("step.json")["regimes"]
        self.assertTrue(regime["states_equal"])
        self.assertEqual(regime["used_units"], 18)  # 2 units, and 16 of the 512 units of rows
        self.assertIn("serial: steps use 18 of 514 units, and move 100.0 % (read) and 100.0 % (written)", done.stdout)
        serial, deferred = regime["policies"]
        # Pages of storage: a unit of rows has 3,892 parameters in 4,096 places, and two reads of each unit do not find it.
        touched = 18 * 4096
        self.assertLessEqual(serial["nvme_write_bytes"], 13 * touched)
        self.assertLessEqual(serial["nvme_read_bytes"], 17 * touched)
        self.assertEqual(serial["percent_of_wanted_read"], 100)
        self.assertLessEqual(deferred["percent_of_wanted_read"], 100)

    def test_lora(self):
        done = self.bench("--parameters", 2000000, "--units", 8, "--steps", 4, "--json", "step.json", "--regime", "lora",
                          "--policy", "serial", "--policy", "deferred")
        regime, = self.read_json("step.json")["regimes"]
        self.assertTrue(regime["states_equal"])
        frozen = regime["frozen_parameters"]
        self.assertGreater(frozen, 0.99 * 2000000)
        for policy in regime["policies"]:
            with self.subTest(policy["policy"]):
                self.assertEqual(policy["nvme_write_bytes"], 0)
                # 2 bytes in each pass, less what the window keeps over the turn: 3 units of 8. Beside computation, as much
                # may be read in the step before: the median is of few steps.
                ahead = 0 if policy["policy"] == "serial" else 2 * frozen * 3 / 8
                self.assertLessEqual(policy["nvme_read_bytes"], 2 * 2 * frozen + ahead)
                self.assertGreaterEqual(policy["nvme_read_bytes"], 2 * 2 * frozen * 5 / 8 - ahead)
                if not ahead:
                    self.assertEqual(policy["percent_of_wanted_read"], 100)
        self.assertIn("bytes for each frozen parameter, 100.0 % of what the plan reads", done.stdout)

    def test_half_of_the_state_in_memory(self):
        written = {}
        for share in (0, 0.5):
            self.bench("--parameters", 300000, "--units", 5, "--steps", 1, "--json", "step.json",
                       "--regime", "drive-bound", "--policy", "serial", "--memory-share", share)
            policy, = self.read_json("step.json")["regimes"][0]["policies"]
            written[share] = policy["nvme_write_bytes"]
        self.assertLess(written[0.5], 0.55 * written[0])
        self.assertGreater(written[0.5], 0.35 * written[0])

    def test_every_checkpoint_falls_into_the_measured_steps(self):
        for steps, every in ((2, 2), (6, 2), (3, 3)):
            with self.subTest(steps=steps, every=every):
                self.bench("--parameters", 300000, "--units", 5, "--steps", steps, "--json", "step.json", "--regime", "drive-bound",
                           "--policy", "deferred", "--save-every", every, "--with-bare")
                bare, saved = self.read_json("step.json")["regimes"][0]["policies"]
                self.assertEqual((bare["saves"], saved["saves"]), (0, steps // every))

    def test_times_serial_compares_like_with_like(self):
        self.bench("--parameters", 300000, "--units", 5, "--steps", 2, "--json", "step.json", "--plot", "step.svg", "--regime", "drive-bound",
                   "--policy", "serial", "--policy", "deferred", "--save-every", 2, "--with-bare")
        policies = self.read_json("step.json")["regimes"][0]["policies"]
        serial = {policy["bare"]: policy["step_s"]["median"] for policy in policies if policy["policy"] == "serial"}
        self.assertEqual(len(serial), 2)
        for policy in policies:
            self.assertAlmostEqual(policy["times_serial"], serial[policy["bare"]] / policy["step_s"]["median"], places=9)
        with open(self.path("step.svg"), encoding="utf-8") as file:
            picture = file.read()
        for label in ("drive-bound, serial, bare", "drive-bound, deferred, bare", "drive-bound, deferred<"):
            self.assertIn(label, picture)

    def test_refusals(self):
        for arguments, code, words in (
                (("--rate", "999KB"), 2, "--rate"),
                (("--units", 7, "--parameters", 6), 2, "7 units"),
                (("--steps", 5, "--save-every", 2), 2, "--steps 5 is no multiple of --save-every 2"),
                (("--steps", 5, "--save-every", 10), 2, "--steps 5 is no multiple of --save-every 10"),
                (("--regime", "lucky"), 2, "lucky"),
                (("--policy", "auto"), 2, "auto"),
                (("--regime", "balanced", "--policy", "serial", "--with-bare", "--trace", "x"), 2, "leave --with-bare out"),
                (("--json", "no/such/folder.json"), 2, "no/such/folder.json")):
            with self.subTest(arguments):
                done = self.bench(*arguments, expect=code)
                self.assertIn(words, done.stderr + done.stdout)
