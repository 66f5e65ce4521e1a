"""Runs of several ranks that a campaign disturbs: the processes of a run, how it ends, and what it leaves behind.

A run is marked by its folder in the environment, which every process of it inherits.
"""

import contextlib
import os
import signal
import subprocess
import time

MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
PATIENCE_S = 120  # beyond every deadline of a run: more is a hang
SHARED = "/dev/shm"
LAUNCHER_S = 10  # that a launcher may take behind the end of its last rank


def read_bytes(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def shared_files():
    """Files in /dev/shm that no process has mapped: those that a run has left there, once it has ended."""
    files = {os.path.join(SHARED, name) for name in os.listdir(SHARED)}
    for process in filter(str.isdigit, os.listdir("/proc")) if files else ():
        maps = read_bytes(f"/proc/{process}/maps").decode("utf-8", "replace")
        files = {path for path in files if path not in maps}
    return files


class MpiRun:
    """`mpirun -n RANKS COMMAND` in a folder. `output` holds what all of it has said when wait() has returned.

    `is_launcher_stuck` tells of a run whose ranks have all ended, and mpirun had to be killed. Open MPI 4.1.4 over PMIx 4.2.2
    (Debian 12) waits without end in PMIx_server_finalize in one run of seven or so in which a rank was stopped within MPI_Init.
    """

    def __init__(self, mpirun, ranks, command, folder, environment=None):
        self.mark = f"SLUICE_RUN_MARK={folder}".encode()
        self.before = shared_files()
        self.log = os.path.join(folder, "output.txt")
        with open(self.log, "wb") as log:  # a pipe would be held open by who is stopped
            self.process = subprocess.Popen([mpirun, "-n", str(ranks), *command], cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT,
                                            env={**os.environ, **MPI_ENVIRONMENT, "SLUICE_RUN_MARK": folder, **(environment or {})})
        self.output = ""
        self.has_begun = False  # a rank has been seen
        self.is_launcher_stuck = False

    def processes(self):
        """{process: rank, or None for mpirun and its like} of those that live."""
        found = {}
        for process in filter(str.isdigit, os.listdir("/proc")):
            words = read_bytes(f"/proc/{process}/environ").split(b"\0")
            if self.mark in words and int(process) != os.getpid():
                rank = [word for word in words if word.startswith(b"OMPI_COMM_WORLD_RANK=")]
                found[int(process)] = int(rank[0].split(b"=")[1]) if rank else None
        self.has_begun = self.has_begun or any(rank is not None for rank in found.values())
        return found

    def ranks(self):
        """The ranks that live."""
        return set(self.processes().values()) - {None}

    def process_of(self, rank):
        """The process of a rank, or None when it has not begun or has ended."""
        return next((process for process, other in self.processes().items() if other == rank), None)

    def wait(self, patience_s=PATIENCE_S):
        """Whether all ranks have ended by themselves. Those that live are ended here, the launcher too."""
        deadline = time.monotonic() + patience_s
        last_rank = time.monotonic()
        ended = True
        while self.process.poll() is None:
            now = time.monotonic()
            last_rank = now if self.ranks() or not self.has_begun else last_rank
            self.is_launcher_stuck = now > last_rank + LAUNCHER_S
            ended = now < deadline or self.is_launcher_stuck
            if self.is_launcher_stuck or not ended:
                self.kill()
                self.process.wait()
            time.sleep(0.1)
        self.output = read_bytes(self.log).decode("utf-8", "replace")
        return ended

    def kill(self):
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def segments_of_open_mpi(self):
        """Open MPI's own files in /dev/shm, where nothing removes them: mpirun had to be killed or died of a signal, or ranks ended within
        MPI_Init."""
        if not self.is_launcher_stuck and self.process.returncode >= 0 and "MPI_Init" not in self.output:
            return set()
        segments = {path for path in shared_files() - self.before if os.path.basename(path).startswith("vader_segment.")}
        for path in segments:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        return segments

    def left(self, folders=()):
        """The leftovers of the run, in words, after it has ended: processes, files in /dev/shm, files in the
        folders."""
        for _ in range(50):  # what has been killed takes its time
            processes = self.processes()
            files = shared_files() - self.before - self.segments_of_open_mpi()
            if not processes and not files:
                break
            time.sleep(0.1)
        found = [f"processes {sorted(processes)}"] if processes else []
        found += [f"files {sorted(files)}"] if files else []
        self.kill()
        found += [f"files {os.listdir(folder)} in {folder}" for folder in folders if os.listdir(folder)]
        return found
