"""A run that is stopped: by Ctrl-C, SIGTERM and SIGHUP after the step in flight, by kill -9 at once; the
storage folder is empty afterwards, and what was trained until then is exact."""

import contextlib
import json
import os
import pty
import random
import signal
import subprocess
import time

from cli_support import ON_NVME, RUN_TIMEOUT_S, CliCase, mount_tmpfs, sample_text
from top_cases import StatusPages

# The learning rate does not depend on the number of steps, so that a shorter run ends in the same
# state.
STEADY = {**ON_NVME, "optimizer.minimum_learning_rate": 3e-3, "optimizer.warmup_steps": 0,
          "run.steps": 1000000}


ANSWER = b"sluice: ending after this step; a second signal ends at once, without saving\n"
NOTHING_WRITTEN = b"sluice: interrupted before the first step; nothing was written\n"


class Interrupt(CliCase):
    LABEL = "command"

    def start(self, **options):
        """A run that has done at least two steps."""
        process = subprocess.Popen(
            self.command("train", self.write_config(STEADY), "--json", "run.json",
                         "--csv", "run.csv", "--save", "model"),
            cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        self.printed = ""
        while "step     2/" not in self.printed:
            line = process.stdout.readline().decode()
            self.assertNotEqual(line, "", "the run ended early")
            self.printed += line
        return process

    def open_storage_files(self, process):
        folder = f"/proc/{process.pid}/fd"
        links = []
        for name in os.listdir(folder):
            try:
                links.append(os.readlink(os.path.join(folder, name)))
            except FileNotFoundError:
                pass
        return [link for link in links if link.startswith(self.path("storage"))]

    def check_stops_after_a_step(self, number):
        process = self.start()
        self.assertNotEqual(self.open_storage_files(process), [], "the state must be on storage")
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
        self.assertEqual(process.returncode, 130, stderr)
        self.assertEqual(stderr, ANSWER)
        run = self.read_json("run.json")
        steps = len(run["steps"])
        self.assertGreaterEqual(steps, 2)
        self.assertEqual([step["step"] for step in run["steps"]], list(range(1, steps + 1)))
        self.assertTrue(run["interrupted"])
        self.assertIsNone(run["validation_loss"])
        self.assertIn(f"interrupted after step {steps}", (self.printed + stdout.decode()))
        self.assertTrue(os.path.exists(self.path("model")))
        with open(self.path("run.csv"), encoding="ascii") as file:
            self.assertEqual(len(file.readlines()), 1 + steps)
        whole = self.train(STEADY, "--steps", steps)
        self.assertEqual(run["state_sha256"], whole["state_sha256"])

    def test_ctrl_c(self):
        self.check_stops_after_a_step(signal.SIGINT)

    def test_sigterm(self):
        self.check_stops_after_a_step(signal.SIGTERM)

    def test_sighup(self):
        self.check_stops_after_a_step(signal.SIGHUP)

    def test_sighup_under_nohup(self):
        process = self.start(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        process.send_signal(signal.SIGHUP)
        for _ in range(3):
            self.assertIn(b"step ", process.stdout.readline())
        process.kill()
        _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
        self.assertEqual(stderr, b"")

    def test_the_second_signal_ends_at_once(self):
        for second in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(second):
                process = self.start()
                process.send_signal(signal.SIGINT)
                self.assertEqual(process.stderr.readline(), ANSWER)
                time.sleep(0.15)
                # It may have saved and gone by then.
                process.send_signal(second)
                _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
                self.assertIn(process.returncode, (130, -second))
                if process.returncode != 130:
                    self.assertIn(b"ended at once", stderr)
                self.assertEqual([name for name in os.listdir(self.folder) if name.endswith(".tmp")], [])

    def test_a_terminal_that_goes_loses_nothing(self):
        for second in (signal.SIGHUP, signal.SIGTERM):
            with self.subTest(second):
                process = self.start()
                process.send_signal(signal.SIGHUP)
                process.send_signal(second)
                _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
                self.assertEqual(process.returncode, 130, stderr)
                self.assertEqual(stderr, ANSWER)
                self.assertTrue(os.path.exists(self.path("model")))

    def test_a_terminal_that_nothing_reads_holds_up_no_step(self):
        main, terminal = pty.openpty()
        self.addCleanup(os.close, main)
        process = subprocess.Popen(self.command("train", self.write_config(STEADY), "--csv", "run.csv", "--checkpoint", "kept"),
                                   cwd=self.folder, env=self.environment(), stdout=terminal, stderr=subprocess.DEVNULL)
        os.close(terminal)
        self.addCleanup(process.kill)
        rows = 0
        while rows < 2000:  # far more lines than it holds
            self.assertIsNone(process.poll())
            time.sleep(0.05)
            if os.path.exists(self.path("run.csv")):
                with open(self.path("run.csv"), encoding="ascii") as file:
                    rows = len(file.readlines())
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not os.path.exists(self.path("kept", "latest")) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertTrue(os.path.exists(self.path("kept", "latest")), "the report at the end waits for its reader, and the state does not")
        with contextlib.suppress(OSError):  # its end
            while os.read(main, 4096):
                pass
        self.assertEqual(process.wait(timeout=RUN_TIMEOUT_S), 130)

    def test_the_answer_has_a_line_of_its_own(self):
        main, terminal = pty.openpty()
        self.addCleanup(os.close, main)
        process = subprocess.Popen(self.command("train", self.write_config(STEADY)), cwd=self.folder, env=self.environment(), stdout=terminal,
                                   stderr=terminal)
        self.addCleanup(process.kill)
        os.close(terminal)
        seen, is_told = b"", False
        with contextlib.suppress(OSError):  # its end
            while piece := os.read(main, 4096):
                seen += piece
                if b"] 2/" in seen and not is_told:  # a second signal would end it at once
                    is_told = True
                    process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=RUN_TIMEOUT_S), 130)
        self.assertIn(b"\r\n" + ANSWER.strip(), seen)

    def test_kill(self):
        process = self.start()
        self.assertEqual(os.listdir(self.path("storage")), [], "storage files have no names")
        process.kill()
        process.communicate(timeout=RUN_TIMEOUT_S)
        self.assertEqual(process.returncode, -signal.SIGKILL)
        self.assertEqual(sorted(os.listdir(self.folder)), ["config.json", "run.csv", "storage", "text.txt"])

    def test_kill_at_any_moment_returns_the_space(self):
        mount_tmpfs(self, self.path("storage"), "256m")
        cases = int(os.environ.get(
            "SLUICE_TEST_CASES", 6 * int(os.environ.get("SLUICE_TEST_CASES_SCALE", "1"))))
        generator = random.Random(int(os.environ.get("SLUICE_TEST_SEED", "1")))
        config = self.write_config(STEADY)
        empty = os.statvfs(self.path("storage")).f_bfree
        held = 0
        for _ in range(cases):
            process = subprocess.Popen(self.command("train", config, "--quiet"), cwd=self.folder,
                                       env=self.environment())
            self.addCleanup(process.kill)
            time.sleep(generator.uniform(0, 0.5))
            held = max(held, empty - os.statvfs(self.path("storage")).f_bfree)
            process.kill()
            process.wait(timeout=RUN_TIMEOUT_S)
            self.assertEqual(process.returncode, -signal.SIGKILL)
            self.assertEqual(os.listdir(self.path("storage")), [])
            deadline = time.monotonic() + 30  # the kernel cleans up behind the process
            while os.statvfs(self.path("storage")).f_bfree != empty:
                self.assertLess(time.monotonic(), deadline, "the space did not come back")
                time.sleep(0.01)
        self.assertGreater(held, 0, "no run had got as far as its storage")

    def test_interrupted_before_the_first_step(self):
        # A signal at any moment ends the run soon, by the handler or, before it is there, without.
        for delay_s in (0, 0.005, 0.02, 0.1):
            with self.subTest(delay_s=delay_s):
                process = subprocess.Popen(
                    self.command("train", self.write_config(STEADY), "--quiet", "--trace", "trace", "--csv", "csv"),
                    cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                time.sleep(delay_s)
                process.send_signal(signal.SIGTERM)
                _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
                self.assertIn(process.returncode, (130, -signal.SIGTERM), stderr)
                self.assertIn(stderr, (b"", NOTHING_WRITTEN, ANSWER))
                if stderr == NOTHING_WRITTEN:
                    self.assertEqual(process.returncode, 130)
                    self.assertEqual(sorted(os.listdir(self.folder)), ["config.json", "storage", "text.txt"])
                self.assertEqual(os.listdir(self.path("storage")), [])
                for name in {"trace", "csv"} & set(os.listdir(self.folder)):
                    os.unlink(self.path(name))

    def test_interrupted_in_start_up(self):
        # The text is a pipe without a writer: it takes until the signal.
        os.mkfifo(self.path("config-to-come.json"))
        process = subprocess.Popen(
            self.command("train", "config-to-come.json"), cwd=self.folder, env=self.environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        with open(self.path("config-to-come.json"), "wb"):  # it has come to the config, behind the handlers
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(stderr, NOTHING_WRITTEN)


class InterruptedValidation(StatusPages, CliCase):
    LABEL = "command"

    def test_a_signal_ends_the_validation_at_the_end(self):
        with open(self.path("text.txt"), "w", encoding="ascii") as file:
            file.write(sample_text(16000))
        values = {"model": {"layers": 6, "heads": 4, "embedding": 256, "context": 128}, "batch.sequences": 4, "data.validation_fraction": 0.5,
                  "run.steps": 1}
        command = self.command("train", self.write_config(values), "--json", "run.json", "--checkpoint", "kept", "--save", "model")
        process = subprocess.Popen(command, cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while {"evaluating"} != {run["phase"] for run in json.loads(self.run_sluice("top", "--once", "--json").stdout)["runs"]}:
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(process.poll(), "the run is over")
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=RUN_TIMEOUT_S)
        self.assertEqual(process.returncode, 130, stderr)
        self.assertIn(b"the run is over and being saved", stderr)
        self.assertIn(b"step 1 is saved in", stderr)
        self.assertIn(b"interrupted after step 1", stdout)
        self.assertNotIn(b"validation loss", stdout)
        run = self.read_json("run.json")
        self.assertEqual((len(run["steps"]), run["interrupted"], run["validation_loss"], run["bigram_cross_entropy"]), (1, True, None, None))
        self.assertTrue(os.path.exists(self.path("model")))
        again = self.train(values, "--checkpoint", "kept", "--resume")  # measures the loss after all
        self.assertEqual((again["resumed_steps"], again["steps"], again["interrupted"]), (1, [], False))
        self.assertGreater(again["validation_loss"], 1)
        self.assertEqual(again["state_sha256"], run["state_sha256"])
