"""sluice top: status pages of real runs, compared with their own reports and traces; processes that were killed; the
config key that turns it off; the page for browsers."""

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

from cli_support import ON_NVME, RUN_TIMEOUT_S, CliCase
from page_cases import page_pictures
from ranks_support import RanksTest


class StatusPages:
    """A folder for the pages of a test's runs, and answers of `top`. To be mixed into a case."""

    def setUp(self):
        super().setUp()
        os.mkdir(self.path("runtime"), 0o700)
        self.runtime = {"XDG_RUNTIME_DIR": self.path("runtime")}

    def environment(self):
        return {**super().environment(), **self.runtime}

    def start(self, values=None, *arguments):
        """A run that makes very many steps."""
        process = subprocess.Popen(self.command("train", self.write_config(values), "--steps", 1000000, *arguments), cwd=self.folder,
                                   env=self.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def pages(self):
        folder = self.path("runtime", "sluice")
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []

    def ask(self):
        return json.loads(self.run_sluice("top", "--once", "--json").stdout)

    def ask_behind(self, step):
        """The first answer of a run behind that step."""
        end = time.monotonic() + RUN_TIMEOUT_S / 4
        while time.monotonic() < end:
            told = self.ask()
            if told["runs"] and told["runs"][0]["step"] > step:
                return told
            time.sleep(0.01)
        self.fail("no run has come so far")

    def trace_of(self, name):
        self.run_sluice("trace", "export", name, "--json", "trace.json")
        records, = self.read_json("trace.json")["ranks"]
        return records

    def check_trace(self, answer, records):
        """The bytes and waits of the step in the trace, which records each of them."""
        step, = (step for step in records["steps"] if step["step"] == answer["step"])
        inside = [record for record in records["records"] if record["step"] == answer["step"]]
        for link, kind in (("storage_read", "read"), ("storage_write", "write"), ("copy_to_device", "copy to device"),
                           ("copy_from_device", "copy to host")):
            self.assertEqual(answer["links"][link]["bytes"], sum(record["size_bytes"] for record in inside if record["kind"] == kind), link)
        for lane, drive in enumerate(answer["drives"]):
            for direction in ("read", "write"):
                self.assertEqual(drive[direction + "_bytes"], sum(record["size_bytes"] for record in inside
                                                                  if record["kind"] == direction and record["lane"] == lane), drive["path"])
        waits_s = {}
        for stall in records["stalls"]:
            if step["begin_ns"] <= stall["begin_ns"] < step["end_ns"] and not stall["of_pass"] and stall["reason"] != "none":
                waits_s[stall["reason"]] = waits_s.get(stall["reason"], 0) + 1e-9 * (stall["end_ns"] - stall["begin_ns"])
        self.assertEqual(set(answer["waits_s"]), set(waits_s))
        for reason, wait_s in waits_s.items():
            self.assertAlmostEqual(answer["waits_s"][reason], wait_s, places=8, msg=reason)
        self.assertEqual(answer["waits_most_for"], max(answer["waits_s"], key=answer["waits_s"].get))

class Top(StatusPages, CliCase):
    def test_it_agrees_with_the_run_and_its_trace(self):
        values = {**ON_NVME, "optimizer.overlap": "serial"}
        process = self.start(values, "--json", "run.json", "--trace", "run.trace", "--peak-flops", "5G")
        answers = [self.ask_behind(0)["runs"][0]]
        while len(answers) < 10:
            answers.append(self.ask_behind(answers[-1]["step"])["runs"][0])
        self.assertEqual(self.pages(), [str(process.pid)])
        self.assertEqual(os.stat(self.path("runtime", "sluice", str(process.pid))).st_mode & 0o777, 0o600)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(RUN_TIMEOUT_S), 130)
        self.assertEqual(self.pages(), [], "a run that ends takes its page with it")
        steps = {step["step"]: step for step in self.read_json("run.json")["steps"]}
        records = self.trace_of("run.trace")
        self.assertEqual(len({answer["step"] for answer in answers}), 10)
        for answer in answers:
            self.assertEqual((answer["pid"], answer["rank"], answer["ranks"], answer["phase"]), (process.pid, 0, 1, "training"))
            step = steps[answer["step"]]
            for key in ("loss", "gradient_norm", "time_s", "tokens", "compute_s", "exposed_io_s", "exposed_optimizer_s", "other_s",
                        "gathered_bytes", "reduced_bytes"):
                self.assertEqual(answer[key], step[key], key)
            self.assertAlmostEqual(answer["tokens_per_s"], step["tokens"] / step["time_s"], places=6)
            self.assertEqual(answer["links"]["storage_read"]["bytes"], step["nvme_read_bytes"])
            self.assertEqual(answer["links"]["storage_write"]["bytes"], step["nvme_write_bytes"])
            self.check_trace(answer, records)
            # 2 layers of width 64 with a vocabulary of 256 and a context of 32: multiply-adds twice, three passes.
            flops = 6 * (2 * 12 * 64 * 64 + 64 * 256 + 2 * 64 * 32)
            self.assertAlmostEqual(answer["flops_per_s"] / (flops * answer["tokens_per_s"]), 1, places=9)
            self.assertAlmostEqual(answer["mfu"], step["mfu"], places=9)
            self.assertAlmostEqual(answer["mfu"], answer["flops_per_s"] / 5e9, places=9)

    def test_each_drive_has_its_rate(self):
        paths = [self.path("one"), self.path("two")]
        for path in paths:
            os.mkdir(path)
        values = {**ON_NVME, "optimizer.overlap": "serial", "storage.paths": paths, "storage.weights": [3, 1]}
        process = self.start(values, "--trace", "run.trace")
        answers = [self.ask_behind(0)["runs"][0]]
        while len(answers) < 3:
            answers.append(self.ask_behind(answers[-1]["step"])["runs"][0])
        seen = self.run_sluice("top").stdout
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(RUN_TIMEOUT_S), 130)
        records = self.trace_of("run.trace")
        for answer in answers:
            self.check_trace(answer, records)
            one, two = answer["drives"]
            self.assertEqual([one["path"], two["path"]], [path if len(path) < 64 else "..." + path[-60:] for path in paths])
            self.assertGreater(one["read_bytes"], two["read_bytes"])
            self.assertGreater(two["write_bytes"], 0)
            for direction in ("read", "write"):
                whole = answer["links"]["storage_" + direction]
                self.assertEqual(one[direction + "_bytes"] + two[direction + "_bytes"], whole["bytes"])
                self.assertAlmostEqual(one[direction + "_bytes_per_s"] * answer["time_s"] / one[direction + "_bytes"], 1, places=9)
        for drive in answers[0]["drives"]:
            self.assertRegex(seen, rf"(?m)^    {re.escape(drive['path'])}: read .+ GB/s; written .+ GB/s$")

    def test_a_killed_run_is_said_to_be_gone(self):
        process = self.start()
        step = self.ask_behind(2)["runs"][0]["step"]
        process.kill()
        process.wait(RUN_TIMEOUT_S)
        self.assertEqual(self.pages(), [str(process.pid)])
        told = self.run_sluice("top").stdout
        said = re.fullmatch(rf"process {process.pid} is gone: killed or crashed behind step (\d+) of 1000000\n", told)
        self.assertTrue(said, told)
        self.assertGreaterEqual(int(said.group(1)), step)
        self.assertEqual(self.pages(), [])
        self.assertEqual(self.run_sluice("top").stdout, f"no run has a status page in {self.path('runtime', 'sluice')}\n")

    def test_off_and_nowhere(self):
        self.start({"run.status": "off"}, "--csv", "off.csv")
        self.wait_for_rows("off.csv")
        self.assertEqual(self.pages(), [])
        del self.runtime["XDG_RUNTIME_DIR"]
        os.environ.pop("XDG_RUNTIME_DIR", None)
        self.assertIn("XDG_RUNTIME_DIR is not set", self.run_sluice("top", expect=2).stderr)
        self.assertEqual(len(self.train()["steps"]), 3)
        self.runtime["XDG_RUNTIME_DIR"] = self.path("text.txt")
        done = self.run_sluice("train", self.write_config(), "--steps", 1)
        self.assertIn("cannot make the folder of the status page", done.stdout)
        self.assertIn('set run.status to "off"', done.stdout)
        for form in ("--once", "--json", "--prometheus"):
            self.assertRegex(self.run_sluice("top", form, expect=1).stderr,
                             'cannot read the status pages in ".*": Not a directory; .* set XDG_RUNTIME_DIR to one of your own')

    def wait_for_rows(self, name):
        end = time.monotonic() + RUN_TIMEOUT_S
        while not os.path.exists(self.path(name)) or os.path.getsize(self.path(name)) < 1000:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def test_prometheus(self):
        process = self.start(ON_NVME, "--peak-flops", "5G")
        self.ask_behind(1)
        self.assertIn("  MFU ", self.run_sluice("top").stdout)
        text = self.run_sluice("top", "--prometheus").stdout
        names = set()
        for line in text.splitlines():
            if line.startswith("#"):
                self.assertRegex(line, r"^# (HELP sluice_[a-z_]+ .+|TYPE sluice_[a-z_]+ gauge)$")
                continue
            sample = re.fullmatch(r'(sluice_[a-z_]+)\{pid="(\d+)",rank="0"(,(part|link|tier)="[a-z_]+"|,drive="[^"]+",direction="(read|write)")?\} (\S+)',
                                  line)
            self.assertTrue(sample, line)
            self.assertEqual(int(sample.group(2)), process.pid)
            float(sample.group(6))
            names.add(sample.group(1))
        self.assertEqual(names, {"sluice_" + name for name in ("step", "loss", "tokens_per_second", "flops_per_second", "mfu", "step_seconds", "link_bytes", "drive_bytes",
                                                               "memory_bytes", "age_seconds")})
        self.assertIn("excludes", self.run_sluice("top", "--json", "--prometheus", expect=2).stderr)

    def test_a_terminal_of_any_size(self):
        process = self.start()
        self.ask_behind(0)
        for columns in (20, 80):
            seen = self.watch(columns)
            self.assertIn(f"process {process.pid}: training"[:columns], seen)
            rows = seen.split("\x1b[H\x1b[2J")[1].split("\r\n")
            self.assertLessEqual(max(map(len, rows)), columns)
            self.assertLess(len(rows), 25)

    def test_what_a_terminal_has_no_room_for_is_said(self):
        first, second = self.start(), self.start()
        for process in (first, second):
            while str(process.pid) not in self.pages():
                time.sleep(0.01)
        second.kill()
        second.wait(RUN_TIMEOUT_S)
        rows = self.watch(60, 4, "more lines").split("\x1b[H\x1b[2J")[1].split("\r\n")
        self.assertRegex(rows[1], rf"^process {second.pid} is gone: killed or crashed behind step ")
        self.assertRegex(rows[2], r"^\.\.\. and \d+ more lines; --once shows all$")
        self.assertEqual(rows[3:], [""])

    def watch(self, columns, lines=24, until="device"):
        """The terminal's contents when `top` has been ended by Ctrl-C after its first screen. It exits with 0 then."""
        script = f"""import os, pty, sys, fcntl, termios, struct, signal
pid, main = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", {lines}, {columns}, 0, 0))
    os.execv(sys.argv[1], ["sluice", "top"])
seen = b""
while b"{until}" not in seen:
    seen += os.read(main, 4096)
os.kill(pid, signal.SIGINT)
status = os.waitpid(pid, 0)[1]
sys.stdout.buffer.write(seen)
sys.exit(os.waitstatus_to_exitcode(status))
"""
        done = subprocess.run(["python3", "-c", script, self.binary], env=self.environment(), capture_output=True, timeout=RUN_TIMEOUT_S, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.decode()


class TopOnWeb(StatusPages, CliCase):
    LABEL = "command"

    def serve(self, *arguments):
        """(the process, the page's address)"""
        process = subprocess.Popen(self.command("top", "--web", *arguments), cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        said = re.fullmatch(r"open (http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{32})\n", process.stdout.readline())
        self.assertTrue(said)
        return process, said.group(1)

    def fetch(self, address, **options):
        """(status, text)"""
        try:
            with urllib.request.urlopen(urllib.request.Request(address, **options), timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def test_it_shows_what_top_says(self):
        run = self.start(ON_NVME)
        self.ask_behind(1)
        process, address = self.serve()
        parts = urllib.parse.urlsplit(address)
        runs = parts._replace(path="/runs").geturl()
        status, text = self.fetch(runs)
        self.assertEqual(status, 200)
        told, = json.loads(text)["runs"]
        self.assertEqual(told["pid"], run.pid)
        self.assertEqual(set(told), set(self.ask()["runs"][0]))
        status, page = self.fetch(address)
        self.assertEqual((status, page[:15]), (200, "<!DOCTYPE html>"))
        # A killed process is shown as long as the page is, although its own page is removed once it was read.
        run.kill()
        run.wait(RUN_TIMEOUT_S)
        for _ in range(2):
            told = json.loads(self.fetch(runs)[1])
            self.assertEqual([ended["pid"] for ended in told["ended"]], [run.pid])
            self.assertEqual(told["runs"], [])
        self.assertEqual(self.pages(), [])
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(RUN_TIMEOUT_S), 0)

    def test_a_folder_that_cannot_be_read_is_a_problem(self):
        open(self.path("runtime", "sluice"), "w", encoding="ascii").close()
        _, address = self.serve()
        told = json.loads(self.fetch(urllib.parse.urlsplit(address)._replace(path="/runs").geturl())[1])
        self.assertEqual((told["runs"], told["ended"]), ([], []))
        problem, = told["problems"]
        self.assertEqual(problem["page"], self.path("runtime", "sluice"))
        self.assertIn("Not a directory", problem["problem"])

    def test_only_who_has_the_token_reads_it(self):
        other, _ = self.serve()
        del other
        _, address = self.serve()
        bare, token = address.split("?token=")
        wrong = token[:-1] + ("0" if token[-1] != "0" else "1")
        for query in ("", "?token=", "?token=" + wrong, "?token=" + token[:-1], "?token=" + token + "0", "?other=1&token=" + token):
            for path in ("", "runs"):
                status, text = self.fetch(bare + path + query)
                self.assertEqual(status, 403, query)
                self.assertIn("the token is wrong or missing: open the address", text)
                self.assertNotIn(token, text)
        self.assertEqual(self.fetch(bare + "other?token=" + token)[0], 404)
        self.assertEqual(self.fetch(address, method="POST", data=b"x")[0], 405)
        self.assertEqual(self.fetch(address, headers={"X-Long": "x" * 20000})[0], 431)

    def test_a_silent_client_delays_no_other(self):
        _, address = self.serve()
        port = urllib.parse.urlsplit(address).port
        silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(40)]
        for client in silent:
            self.addCleanup(client.close)
        silent[-1].sendall(b"GET /runs?tok")
        self.assertEqual(self.fetch(address)[0], 200)
        # The server lets it go after some seconds.
        self.assertEqual(silent[-1].recv(1), b"")

    def test_a_port_in_use_is_named(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            told = self.run_sluice("top", "--web", "--port", port, expect=2).stderr
        self.assertIn(f"cannot take port {port} of 127.0.0.1: Address already in use; pass another --port", told)
        process, address = self.serve("--port", port)
        self.assertEqual(urllib.parse.urlsplit(address).port, port)
        process.kill()
        self.assertIn("--port", self.run_sluice("top", "--web", "--port", 70000, expect=2).stderr)
        self.assertIn("--web", self.run_sluice("top", "--port", port, expect=2).stderr)
        self.assertIn("excludes", self.run_sluice("top", "--web", "--json", expect=2).stderr)

    def test_a_browser_shows_it(self):
        browser = page_pictures.find_browser()
        if browser is None:
            self.skipTest("no Chromium here (Debian's package is chromium)")
        run = self.start(ON_NVME, "--peak-flops", "5G")
        self.ask_behind(1)
        _, address = self.serve()
        done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={self.path('profile')}",
                               "--virtual-time-budget=4000", "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True)
        self.assertIn("One process runs.", done.stdout)
        self.assertIn(f"Process {run.pid}", done.stdout)
        for word in ("tokens/s", "MFU", "storage, reads", 'aria-label="The last step: computation'):
            self.assertIn(word, done.stdout)
        self.assertGreater(int(re.search(r'data-answers="(\d+)"', done.stdout)[1]), 1)


class TopOfRanks(StatusPages, RanksTest):
    def start_ranks(self):
        """Two ranks that make very many steps, below mpirun."""
        values = {"placement.optimizer": "nvme", "run.threads": 1, "sharding.stage": 2, "optimizer.overlap": "serial"}
        arguments = (self.write_config(values), "--steps", 1000000, "--quiet", "--trace", "run.trace")
        process = subprocess.Popen([*self.mpirun(2), *self.command("train", *arguments)], cwd=self.folder, env=self.environment(),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)  # timeout, which passes it on to mpirun
        return process

    def ask_both(self, process, behind):
        """The answer of each rank at one asking, all behind that rank's step of `behind`."""
        while True:
            self.assertIsNone(process.poll(), "the run has ended by itself")
            runs = {run["rank"]: run for run in self.ask()["runs"]}
            if set(runs) == {0, 1} and all(run["step"] > behind[rank]["step"] for rank, run in runs.items()):
                return runs

    def wait_for_written(self, process, *traces):
        """Until the run has written three more times to each of these, so that all that was recorded before is in them."""
        for trace in traces:
            for _ in range(3):
                size = os.path.getsize(self.path(trace))
                while os.path.getsize(self.path(trace)) == size:
                    self.assertIsNone(process.poll(), "the run has ended by itself")
                    time.sleep(0.005)

    def test_every_rank_has_a_page(self):
        traces = {0: "run.trace", 1: "run.trace.rank1"}
        process = self.start_ranks()
        askings = [{rank: {"step": 1} for rank in traces}]
        for _ in range(10):
            askings.append(self.ask_both(process, askings[-1]))
        del askings[0]
        pids = {rank: run["pid"] for rank, run in askings[0].items()}
        self.assertEqual(len(set(pids.values())), 2)
        self.assertEqual(self.pages(), sorted(map(str, pids.values())))
        # A trace that is cut lacks the last moments.
        self.wait_for_written(process, *traces.values())
        # mpirun ends a rank that still runs when another has died; one that is stopped does not hear of it.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids.values():
                os.kill(pid, number)
        process.wait(RUN_TIMEOUT_S)
        told = self.run_sluice("top", "--once").stdout.splitlines()
        self.assertEqual(len(told), 2, told)
        for rank, pid in pids.items():
            said = [re.fullmatch(rf"process {pid} is gone: killed or crashed behind step (\d+) of 1000000", line) for line in told]
            (step,) = [int(found[1]) for found in said if found]
            self.assertGreaterEqual(step, askings[-1][rank]["step"])
        self.assertEqual(self.pages(), [])
        for rank, trace in traces.items():
            records = self.trace_of(trace)
            for runs in askings:
                self.assertEqual((runs[rank]["pid"], runs[rank]["ranks"], runs[rank]["phase"]), (pids[rank], 2, "training"))
                self.assertGreater(runs[rank]["reduced_bytes"], 0)
                self.check_trace(runs[rank], records)

    def test_ranks_that_end_take_their_pages_with_them(self):
        process = self.start_ranks()
        runs = self.ask_both(process, {rank: {"step": 0} for rank in (0, 1)})
        os.kill(runs[0]["pid"], signal.SIGINT)
        process.wait(RUN_TIMEOUT_S)
        self.assertEqual(self.pages(), [])
