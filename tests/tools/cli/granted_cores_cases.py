"""No more threads than the process has been granted cores, by affinity or by a cgroup."""

import contextlib
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
        with self.limited_group(CGROUPS, {"cpu.max": "100000 100000", "cpu.cfs_quota_us": "100000"}) as prefix:
            self.assertEqual(self.bench_threads(*prefix), 1)

    def test_threads_that_cannot_be_started(self):
        """oneTBB starts the arena's threads, and a container may have too few processes left for them."""
        with self.limited_group(("/sys/fs/cgroup/pids", "/sys/fs/cgroup"), {"pids.max": "2"}) as prefix:
            result = self.run_sluice("bench", "adam", "--parameters", 1000000, "--rounds", 1, "--threads", 2, "--quiet", expect=5,
                                     prefix=prefix)
            self.assertRegex(result.stderr, r"cannot start .*threads? .*pids\.max")

    @contextlib.contextmanager
    def limited_group(self, roots, limits):
        """The words before a command that run it in a cgroup of its own, with the first of the limits that the kernel has there."""
        for root in roots:
            group = os.path.join(root, f"sluice-test-{os.getpid()}")
            try:
                os.mkdir(group)
            except OSError:
                continue
            try:
                if self.set_limit(group, limits):
                    yield "sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"
                    return
            finally:
                os.rmdir(group)
        self.skipTest(f"this user may not make cgroups with {' or '.join(limits)}")

    @staticmethod
    def set_limit(group, limits):
        for name, limit in limits.items():
            path = os.path.join(group, name)
            if os.path.exists(path):
                with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
                    file.write(limit)
                    return True
        return False
