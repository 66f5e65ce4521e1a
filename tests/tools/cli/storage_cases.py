"""`sluice doctor` and `sluice bench io`."""

import json
import os
import re
import resource
import shutil

from cli_support import ON_NVME, CliCase, as_ordinary_user, mount_tmpfs


class Doctor(CliCase):
    LABEL = "command"

    def findings(self, *arguments, expect=0, prefix=()):
        done = self.run_sluice("doctor", *arguments, expect=expect, prefix=prefix)
        self.assertEqual(done.stderr, "")
        lines = re.findall(r"(?m)^(ok|warn|FAIL) +([^:]+): (.+)(?:\n +-> (.+))?$", done.stdout)
        return {subject: (health, text, remedy) for health, subject, text, remedy in lines}

    def test_looks_at_everything_and_leaves_nothing(self):
        os.mkdir(self.path("drive"))
        found = self.findings("--path", self.path("drive"))
        drive = self.path("drive")
        self.assertEqual(set(found), {"io_uring", "locked memory", f"storage {drive}", f"write cache {drive}", "memory", "processor",
                                      "links", "huge pages", "CUDA", "CUDA environment", "MPI"})
        for health, text, remedy in found.values():
            self.assertNotEqual(text, "")
            self.assertEqual(remedy != "", health != "ok")
        self.assertIn("free", found[f"storage {drive}"][1])
        self.assertEqual(os.listdir(self.path("drive")), [])

    def test_a_missing_path_fails_and_the_others_are_still_looked_at(self):
        found = self.findings("--path", "missing", "--path", ".", expect=5)
        self.assertEqual(found["storage missing"][0], "FAIL")
        self.assertIn("does not exist", found["storage missing"][1])
        self.assertNotEqual(found["storage missing"][2], "")
        self.assertNotEqual(found["storage ."][0], "FAIL")

    def test_memory_is_no_drive(self):
        os.mkdir(self.path("memory"))
        mount_tmpfs(self, self.path("memory"), "64m")
        health, text, remedy = self.findings("--path", "memory")["storage memory"]
        self.assertEqual(health, "warn")
        self.assertIn("tmpfs", text)
        self.assertIn("storage.paths", remedy)

    def test_little_locked_memory_is_a_warning_for_ordinary_users(self):
        prefix = as_ordinary_user(self)
        if shutil.which("prlimit") is None:
            self.skipTest("prlimit is missing")
        os.chmod(self.folder, 0o777)
        found = self.findings("--path", ".", prefix=("prlimit", "--memlock=65536", *prefix))
        self.assertEqual(found["locked memory"][0], "warn")
        self.assertIn("64.0 KiB", found["locked memory"][1])
        self.assertIn("ulimit -l", found["locked memory"][2])

    def test_little_locked_memory_binds_root_without_the_capability(self):
        """As in a container."""
        if os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("prlimit") is None:
            self.skipTest("root, setpriv and prlimit are needed")
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        enough_for_small_runs = 64 << 20
        little = ("prlimit", f"--memlock={enough_for_small_runs if hard == resource.RLIM_INFINITY else min(hard, enough_for_small_runs)}")
        with open("/proc/self/status", encoding="ascii") as file:
            has_it = int(re.search(r"CapEff:\s*(\S+)", file.read())[1], 16) >> 14 & 1
        for prefix, health in ((little, "ok" if has_it else "warn"), ((*little, "setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock"), "warn")):
            self.assertEqual(self.findings("--path", ".", prefix=prefix)["locked memory"][0], health)


class BenchIo(CliCase):
    LABEL = "command"

    def bench(self, *arguments, expect=0, size="4MiB", rounds="2"):
        return self.run_sluice("bench", "io", "--path", self.drive, "--size", size, "--rounds",
                               rounds, *arguments, expect=expect)

    def setUp(self):
        super().setUp()
        self.drive = self.path("drive")
        os.mkdir(self.drive)

    def test_every_pattern_request_and_depth_once(self):
        done = self.bench("--json", "io.json")
        calibration = self.read_json("io.json")
        self.assertEqual(calibration["format"], "sluice-io-calibration-1")
        self.assertEqual(calibration["paths"], [self.drive])
        cases = {(case["pattern"], case["request_bytes"], case["depth"]): case
                 for case in calibration["cases"]}
        self.assertEqual(set(cases), {(pattern, request << 20, depth)
                                      for pattern in ("read", "write", "mixed")
                                      for request in (1, 4) for depth in (4, 16, 32)})
        for case in cases.values():
            self.assertGreater(case["bytes_per_second_min"], 0)
            self.assertLessEqual(case["bytes_per_second_min"], case["bytes_per_second"])
            self.assertLessEqual(case["bytes_per_second"], case["bytes_per_second_max"])
        for pattern in ("read", "write", "mixed"):
            rates = [case["bytes_per_second"] for key, case in cases.items() if key[0] == pattern]
            self.assertEqual(calibration["best"][pattern]["bytes_per_second"], max(rates))
        self.assertGreater(calibration["interference"], 0)
        self.assertEqual(len(re.findall(r"(?m)^(?:read|write|mixed) ", done.stdout)), 18)
        self.assertEqual(os.listdir(self.drive), [])

    def test_choices(self):
        for backend in ("threads", "sync"):
            self.bench("--backend", backend, "--pattern", "mixed", "--request", "64KiB",
                       "--request", "16KiB", "--depth", "3", "--json", "io.json", "--path", ".")
            calibration = self.read_json("io.json")
            self.assertEqual(calibration["backend"], backend)
            self.assertEqual(calibration["paths"], [self.drive, "."])
            self.assertEqual([(case["request_bytes"], case["depth"])
                              for case in calibration["cases"]], [(65536, 3), (16384, 3)])
            self.assertIsNone(calibration["interference"])
            self.assertEqual([drive["path"] for drive in calibration["drives"]],
                             [os.path.realpath(self.drive), os.path.realpath(self.folder)])
            for drive in calibration["drives"]:
                self.assertEqual(set(drive), {"path", "mixed"})
                self.assertGreater(drive["mixed"], 0)
            # Rates of all paths at once, and of each by itself: three different measurements.
            rates = [calibration["best"]["mixed"]["bytes_per_second"],
                     *(drive["mixed"] for drive in calibration["drives"])]
            self.assertEqual(len(set(rates)), 3)

    def test_a_run_spreads_its_blocks_by_the_calibration(self):
        os.mkdir(self.path("second"))
        self.bench("--path", "second", "--pattern", "mixed", "--request", "64KiB", "--depth", "2",
                   "--json", "io.json")
        calibration = self.read_json("io.json")
        calibration["drives"][0]["mixed"] = 3 * calibration["drives"][1]["mixed"]
        with open(self.path("io.json"), "w", encoding="utf-8") as file:
            json.dump(calibration, file)
        paths = {**ON_NVME, "storage.paths": [self.drive, "second"]}
        whole = self.train(paths)["state_sha256"]
        done = self.run_sluice("train", self.write_config(
            {**paths, "storage.calibration": "io.json"}), "--json", "run.json")
        self.assertEqual(self.read_json("run.json")["state_sha256"], whole)
        rows = re.findall(r"(?m)^nvme +of these +([\d.]+) ([KM])iB +(\S+)/\(scratch\)$", done.stdout)
        self.assertEqual([folder for *_, folder in rows], [self.drive, "second"])
        first, second = (float(size) * {"K": 1, "M": 1024}[unit] for size, unit, _ in rows)
        self.assertAlmostEqual(first / second, 3, delta=0.4)
        calibration["drives"].pop()
        with open(self.path("io.json"), "w", encoding="utf-8") as file:
            json.dump(calibration, file)
        message = self.fail_train(2, {**paths, "storage.calibration": "io.json"})
        self.assertIn('"second"', message)
        self.assertIn("sluice bench io --path", message)

    def test_what_cannot_be_measured_is_refused(self):
        for size, rounds, code, word in (("none", "2", 2, "none"), ("900TiB", "2", 5, "free"),
                                         ("4MiB", "0", 2, "rounds")):
            self.assertIn(word, self.bench(size=size, rounds=rounds, expect=code).stderr)
        for arguments, code, word in (
                (("--request", "5000"), 2, "4096"),
                (("--request", "12KiB", "--request", "1MiB"), 2, "divide"),
                (("--request", "8MiB"), 2, "smaller"),
                (("--depth", "0"), 2, "depth"),
                (("--path", "missing"), 2, "does not exist"),
                (("--json", "missing/io.json"), 2, "missing/io.json")):
            done = self.bench(*arguments, expect=code)
            self.assertIn(word, done.stderr)
        self.assertEqual(os.listdir(self.drive), [])
