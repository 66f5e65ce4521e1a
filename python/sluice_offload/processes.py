"""The processes that train together: how many there are, as launchers and torch say, and how they find each other.

torch.distributed connects them where it is initialized. Otherwise the store of torchrun, or of any launcher that names
MASTER_ADDR and MASTER_PORT, brings each rank's address to the others. Either is only used to meet: from then on the ranks of
the engine talk to each other by connections of their own.
"""

import contextlib
import ctypes
import datetime
import json
import math
import os
import re
import socket
import threading
from typing import Any, Callable, Iterator, Optional

import torch
import torch.distributed as dist

from .errors import ArgumentError, RanksError

# The number of processes and this one's, as launchers name them: torchrun, mpirun of Open MPI, mpirun of MPICH and Intel, srun.
# SLURM_NTASKS is no such name: a program that sbatch or salloc starts alone has it, too.
_LAUNCHERS = (("WORLD_SIZE", "RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"),
              ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
_OF_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")  # how many of them this host has
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_AT_WORK_S = 0.05  # how often rank 0 says that it is still at work; a fraction of the least sharding.timeout
_meetings = 0
_stores: "dict[str, Any]" = {}  # rank 0's first store at each place of meeting: the others connect to it again for later ones


class World:
    """The ranks of a training. `exchange` brings a small object of JSON from every rank to all; all ranks call it equally
    often."""

    def __init__(self, rank: int, size: int, exchange: "Callable[[Any], list[Any]]") -> None:
        self.rank, self.size, self.exchange = rank, size, exchange
        names = exchange([_host(), socket.gethostname()])
        self._hosts = hosts = [host for host, _ in names]
        self._first_name = names[0][1]
        self.hosts = len(set(hosts))
        self.local_size = hosts.count(hosts[rank])
        self.local_rank = hosts[:rank].count(hosts[rank])

    def on_first_rank(self, body: "Callable[[], Any]", failure: Optional[BaseException] = None) -> None:
        """Runs `body` on rank 0. No rank goes on before that has ended. Where it fails, or before it any rank did, whose `failure` that is,
        this fails on all. It may take longer than ranks wait for each other: meanwhile a thread of rank 0 tells the others that it is at
        work, also where an interrupt (Ctrl-C) waits for a drive. It must not meet the other ranks."""
        every: "list[Any]" = [[False, None]]
        if self.rank != 0:
            while not every[0][0]:
                every = self.exchange([True, _words_of(failure)])
        else:
            every, failure = self._run_while_telling(body, failure)
        if failure is not None:
            raise failure
        for rank, (_, told) in enumerate(every):
            if told is not None:
                raise RanksError(f"rank {rank} has failed: {told}")

    def _run_while_telling(self, body: "Callable[[], Any]", failure: Optional[BaseException]) -> "tuple[list[Any], Optional[BaseException]]":
        every: "list[Any]" = []
        ended = threading.Event()
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # each thread has one of its own

        def tell() -> None:
            nonlocal failure
            try:
                if gpu is not None:
                    torch.cuda.set_device(gpu)
                while not ended.wait(_AT_WORK_S):
                    self.exchange([False, None])
                every.extend(self.exchange([True, _words_of(failure)]))
            except BaseException as error:  # pylint: disable=broad-except  # raised by the thread that waits for this one
                failure = failure or error
        thread = threading.Thread(target=tell, name="sluice-rank-0")
        try:
            with contextlib.suppress(RuntimeError):  # no thread can be had: the others hear of it when it has ended
                thread.start()
            if failure is None:
                body()
        except BaseException as error:  # pylint: disable=broad-except  # the others have to hear of any
            failure = error
        finally:
            ended.set()
        if thread.ident is None:
            tell()
        else:
            thread.join()
        return every, failure

    def consecutive_per_host(self) -> int:
        """How many ranks each host has, where they are equally many and follow each other."""
        runs = [self._hosts[i:i + self.local_size] for i in range(0, self.size, self.local_size)]
        if any(len(set(run)) != 1 or len(run) != self.local_size for run in runs) or len(runs) != self.hosts:
            raise ArgumentError('sharding.group is "node", but the hosts do not have equally many ranks, one host after the '
                                "other; set sharding.group to a number of ranks")
        return self.local_size

    def address(self) -> str:
        """The IP address at which the other ranks reach this process: SLUICE_ADDRESS, or that of the way to the first rank."""
        given = os.environ.get("SLUICE_ADDRESS")
        if given:
            return given
        if self.hosts == 1:
            return "127.0.0.1"
        first = os.environ.get("MASTER_ADDR") or self._first_name
        family, _, _, _, target = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(target)
            return str(probe.getsockname()[0])


def _words_of(failure: Optional[BaseException]) -> Optional[str]:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def _host() -> str:
    """Equal for processes of one machine and network."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip() + os.readlink("/proc/self/ns/net")


def _is_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def _launcher() -> "Optional[tuple[str, str, int]]":
    """The launcher's names of the number of processes and of this one's, and the number; None where it has started one."""
    for size_name, rank_name in _LAUNCHERS:
        size = os.environ.get(size_name, "")
        if size.isdigit() and int(size) > 1:
            return size_name, rank_name, int(size)
    return None


def count_processes() -> int:
    """How many processes train together, without a meeting."""
    if _is_connected():
        return dist.get_world_size()
    found = _launcher()
    return 1 if found is None else found[2]


def own_rank() -> int:
    """This process's number among those that count_processes() counts."""
    if _is_connected():
        return dist.get_rank()
    found = _launcher()
    if found is None:
        return 0
    rank = os.environ.get(found[1], "")
    if not rank.isdigit():
        raise ArgumentError(f"the launcher has started {found[2]} processes ({found[0]}), but does not say which one this is: "
                            f"{found[1]} is \"{rank}\"; start with torchrun or mpirun, which set it")
    return int(rank)


def rank_and_size(group: Any) -> "tuple[int, int]":
    """As find_world() will number the processes of `group`, or all, without a meeting."""
    if group is None:
        return own_rank(), count_processes()
    require_member(group, "process_group")
    return dist.get_rank(group), dist.get_world_size(group)


def processes_of_host(world: Optional[World], group: Any) -> int:
    """How many processes share this host's cores. Those of other groups than `group` are known from the launcher alone."""
    known = 1 if world is None else world.local_size
    return known if group is None else max(known, processes_of_launcher())


def granted_cores(proc: str = "/proc/self", cgroups: str = "/sys/fs/cgroup") -> int:
    """How many cores this process may use, as base/topology.h counts them: those in the affinity masks of its threads and those to which
    OpenMP will bind threads, within the CPU quota of its cgroups; at least 1. A quota of 1.5 cores counts as 1."""
    usable = _openmp_processors()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            usable |= os.sched_getaffinity(int(thread))
    return max(1, min(len(usable), int(min(_quotas(proc, cgroups), default=len(usable)))))


def _openmp_processors() -> "set[int]":
    """The processors to which the OpenMP runtime that torch has loaded binds threads, as in base/openmp_places.h. Before the first parallel
    region it has bound only the main thread."""
    runtime = ctypes.CDLL(None)
    if not hasattr(runtime, "omp_get_place_proc_ids") or runtime.omp_get_proc_bind() == 0:
        return set()
    found: "set[int]" = set()
    for place in range(runtime.omp_get_num_places()):
        processors = (ctypes.c_int * runtime.omp_get_place_num_procs(place))()
        runtime.omp_get_place_proc_ids(place, processors)
        found |= set(processors)
    return found


def share_of_cores(processes: int, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """How many cores this process takes, as one of `processes` on this host; at least 1. As engine/ranks/host_cores.h says: an equal part
    of the cores that the launcher may use, but no more than this process may use. A launcher may bind each process to cores of its own,
    which are not divided again. A quota is of all of them."""
    granted = granted_cores(f"{proc}/self", cgroups)
    if processes <= 1:
        return granted
    quota = min(_quotas(f"{proc}/self", cgroups), default=math.inf)
    shared = int(min(quota, max(granted, _cores_of_launcher(proc, cgroups))))
    return max(1, min(granted, shared // processes))


def _cores_of_launcher(proc: str, cgroups: str) -> int:
    """How many cores the launcher may use: the nearest ancestor that was not started with the variable of a rank, as wrappers of a rank
    are. The variables of another user's process, such as Slurm's, cannot be read. 0 where no ancestor can be seen."""
    found = _launcher()
    cores: "set[int]" = set()
    parent = _status(f"{proc}/self").get("PPid", "0")
    while parent != "0":
        status = _status(f"{proc}/{parent}")
        if not status.get("Cpus_allowed_list"):
            break
        cores = _cores(status["Cpus_allowed_list"])
        variables = b""
        with contextlib.suppress(OSError), open(f"{proc}/{parent}/environ", "rb") as file:
            variables = file.read()
        if found is None or not any(entry.startswith(found[1].encode() + b"=") for entry in variables.split(b"\0")):
            break
        parent = status.get("PPid", "0")
    return len(cores & (_cores_of_groups(f"{proc}/self", cgroups) or cores))


def _cores_of_groups(proc: str, cgroups: str) -> "set[int]":
    """The cores that this process's cgroups allow, which may be fewer than those of the launcher; empty where they do not say."""
    for folder in _group_folders(proc, cgroups, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            cores = _cores("".join(_words(f"{folder}/{name}")))
            if cores:
                return cores
    return set()


def _status(folder: str) -> "dict[str, str]":
    """The kernel's words of a process; empty for one that cannot be seen."""
    with contextlib.suppress(OSError), open(f"{folder}/status", encoding="utf-8", errors="replace") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    return {}


def _cores(text: str) -> "set[int]":
    """The cores of a kernel's list, such as "0-3,8"."""
    pairs = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {core for first, last in pairs for core in range(int(first), int(last or first) + 1)}


def _quotas(proc: str, cgroups: str) -> "Iterator[float]":
    """The CPU quota of each cgroup that this process is in, in cores."""
    for folder in _group_folders(proc, cgroups, "cpu"):
        for texts in (_words(f"{folder}/cpu.max"), _words(f"{folder}/cpu.cfs_quota_us") + _words(f"{folder}/cpu.cfs_period_us")):
            if len(texts) == 2 and all(text.isdigit() for text in texts) and int(texts[1]):  # "max" and "-1" are no quota
                yield int(texts[0]) / int(texts[1])


def _group_folders(proc: str, cgroups: str, controller: str) -> "list[str]":
    """The folders of the cgroups that this process is in, its own first. Inside a container, a path may be the host's: the mount itself is
    the container's group then."""
    folders: "list[str]" = []
    with contextlib.suppress(OSError), open(f"{proc}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:  # "0::/user.slice" of version 2, "4:cpu,cpuacct:/docker/1f" of version 1
            _, names, path = line.rstrip("\n").split(":", 2)
            if not names or controller in names.split(","):
                parts = path.split("/")
                folders += [cgroups + (f"/{controller}" if names else "") + "/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return folders


def _words(path: str) -> "list[str]":
    with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        return file.readline().split()
    return []


def processes_of_launcher() -> int:
    """How many processes the launcher says that it has started on this host; 1 where there is none."""
    counts = [*(os.environ.get(name, "") for name in _OF_HOST), _tasks_of_slurm_node()]
    return max(1, next((int(count) for count in counts if count.isdigit()), 1))


def _tasks_of_slurm_node() -> str:
    """Slurm lists how many tasks each node of a step has: "4(x2),3" stands for 4, 4 and 3."""
    tasks: "list[str]" = []
    for entry in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if found is None:
            return ""
        tasks += [found[1]] * min(int(found[2] or 1), 1 << 20)
    node = os.environ.get("SLURM_NODEID", "")
    return tasks[int(node)] if node.isdigit() and int(node) < len(tasks) else ""


def require_member(group: Any, name: str) -> None:
    """Raises ArgumentError unless this process is in `group`, the argument `name`. torch.distributed passes over the calls of
    others, most of them without a word."""
    if not _is_connected():
        raise ArgumentError(f"{name} needs torch.distributed.init_process_group()")
    if dist.get_rank(group) < 0:
        raise ArgumentError(f"{name}: this process, rank {dist.get_rank()} of {dist.get_world_size()}, is not in that group; give each "
                            "process a group that it is in")


def find_world(timeout_s: float, group: Any = None) -> Optional[World]:
    """The ranks that train together, or None for one process. `group`: a process group of torch.distributed, instead of all.
    Raises ArgumentError for several processes that cannot find each other, and for one that is not in `group`: each would
    train a model of its own, without a word. Raises RanksError where one does not come within `timeout_s`;
    torch.distributed, where it is initialized, has its own timeout."""
    if group is not None:
        require_member(group, "process_group")
    if _is_connected():
        return _world_of_torch(group) if dist.get_world_size(group) > 1 else None
    found = _launcher()
    if found is None:
        return None
    size_name, rank_name, size = found
    missing = [name for name in (rank_name, *_MEETING) if not os.environ.get(name)]
    if missing:
        raise ArgumentError(f"the launcher has started {size} processes ({size_name}), but does not say how they find "
                            f"each other: {', '.join(missing)}. Start with torchrun; or set MASTER_ADDR and MASTER_PORT "
                            "to an address and a free port of the first process's host; or call "
                            "torch.distributed.init_process_group() before offload(). If each process trains a model of its own, take "
                            f"{size_name} out of its environment")
    return _world_of_store(int(os.environ[rank_name]), size, timeout_s)


def _world_of_torch(group: Any) -> World:
    size = dist.get_world_size(group)

    def exchange(own: Any) -> "list[Any]":
        all_of_them: "list[Any]" = [None] * size
        dist.all_gather_object(all_of_them, own, group=group)
        return all_of_them
    return World(dist.get_rank(group), size, exchange)


def _world_of_store(rank: int, size: int, timeout_s: float) -> World:
    global _meetings
    timeout = datetime.timedelta(seconds=timeout_s)
    place = ":".join(os.environ.get(name, "?") for name in _MEETING)

    @contextlib.contextmanager
    def named(wait: str) -> "Iterator[None]":
        try:
            yield
        except dist.DistError as error:
            raise RanksError(f"rank {rank} of {size} has waited up to {timeout_s:g} s for {wait} at {place}: "
                             f"{str(error).splitlines()[0]}; a process may have failed, or not have been started; if it is only "
                             "late, raise sharding.timeout") from error

    with named("the store of the processes"):
        found, _, _ = next(iter(dist.rendezvous("env://", rank=rank, world_size=size, timeout=timeout)))
    # Without torchrun, rank 0 serves the store, as long as it has one. With each World's end, the server would end under ranks that
    # are at the next meeting already.
    if rank == 0:
        _stores.setdefault(place, found)
    # torchrun keeps its store when it starts the processes again; what the dead ones have written must not be read.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"sluice/{attempt}/{_meetings}", found)
    store.set_timeout(timeout)
    _meetings += 1
    count = 0

    def exchange(own: Any) -> "list[Any]":
        nonlocal count
        count += 1
        with named("the words of the other processes"):
            store.set(f"{count}/{rank}", json.dumps(own))  # pickle would run what a stranger writes there
            every = [json.loads(word) for word in store.multi_get([f"{count}/{other}" for other in range(size)])]  # in one request
            # The store may live in rank 0, which may end after this.
            if rank != 0:
                store.set(f"{count}/{rank}/has read", "1")
            else:
                store.wait([f"{count}/{other}/has read" for other in range(1, size)])
                for other in range(size):  # a training of weeks says much
                    store.delete_key(f"{count}/{other}")
                    store.delete_key(f"{count}/{other}/has read")
        return every
    return World(rank, size, exchange)
