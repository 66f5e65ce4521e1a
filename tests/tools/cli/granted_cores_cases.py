"""No more threads than the process has been granted cores, by affinity or by a cgroup."""

import os
import subprocess
import time

from cli_support import CliCase

CGROUPS = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")


class GrantedCores(CliCase):
    LABEL = "cpu"

    def bench_threads(self, *prefix):
        self.run_sluice("bench", "adam", "--parameters", 1000, "--rounds", 1, "--quiet", "--json",
                        "bench.json", prefix=prefix)
        document = self.read_json("bench.json")
        self.assertEqual(max(row["threads"] for row in document["results"]),
                         document["granted_cores"])
        return document["granted_cores"]

    def most_threads(self, threads, *prefix):
        """The largest number of threads of a training run that asks for `threads`."""
        config = self.write_config({"run.steps": 40, "run.threads": threads})
        most = 0
        with subprocess.Popen([*prefix, *self.command("train", config, "--quiet")],
                              cwd=self.folder, env=self.environment()) as process:
            while process.poll() is None:
                try:
                    most = max(most, len(os.listdir(f"/proc/{process.pid}/task")))
                except FileNotFoundError:
                    pass
                time.sleep(0.002)
        self.assertEqual(process.returncode, 0)
        return most

    def test_affinity(self):
        core = str(min(os.sched_getaffinity(0)))
        self.assertEqual(self.bench_threads("taskset", "-c", core), 1)
        self.assertEqual(self.most_threads(9, "taskset", "-c", core),
                         self.most_threads(1, "taskset", "-c", core))

    def test_cgroup_quota(self):
        for root in CGROUPS:
            group = os.path.join(root, f"sluice-test-{os.getpid()}")
            try:
                os.mkdir(group)
            except OSError:
                continue
            try:
                if not self.set_one_core(group):
                    continue
                prefix = ("sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh")
                self.assertEqual(self.bench_threads(*prefix), 1)
                return
            finally:
                os.rmdir(group)
        self.skipTest("this user may not make cgroups with a quota of processor time")

    def test_threads_that_cannot_be_started(self):
        """oneTBB starts the arena's threads, and a container may have too few processes left for them."""
        for root in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
            group = os.path.join(root, f"sluice-pids-{os.getpid()}")
            try:
                os.mkdir(group)
            except OSError:
                continue
            try:
                with open(os.path.join(group, "pids.max"), "w", encoding="ascii") as file:
                    file.write("2")
                result = self.run_sluice("bench", "adam", "--parameters", 1000000, "--rounds", 1, "--threads", 2, "--quiet", expect=5,
                                         prefix=("sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"))
                self.assertRegex(result.stderr, r"cannot start .*threads? .*pids\.max")
                return
            except OSError:
                continue
            finally:
                os.rmdir(group)
        self.skipTest("this user may not make cgroups with a limit of processes")

    @staticmethod
    def set_one_core(group):
        for name, quota in (("cpu.max", "100000 100000"), ("cpu.cfs_quota_us", "100000")):
            path = os.path.join(group, name)
            if os.path.exists(path):
                with open(path, "w", encoding="ascii") as file:
                    file.write(quota)
                return True
        return False
