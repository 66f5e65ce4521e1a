"""How processes meet in a store that outlives them, as torchrun's does."""

import importlib.util
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import types

import pytest
import torch.distributed as dist

import sluice_offload as sluice
from sluice_offload import library, processes
from sluice_offload.engine import Engine


def start_process():
    """A new copy of the module, as each process has one."""
    spec = importlib.util.find_spec("sluice_offload.processes")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_processes_that_are_started_again_do_not_read_what_dead_ones_wrote(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))

    def run_both(attempt):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        heard = {}

        def run(rank):
            world = start_process()._world_of_store(rank, 2, 60)
            heard[rank] = world.exchange(f"rank {rank} of attempt {attempt}")

        threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        said = [f"rank {rank} of attempt {attempt}" for rank in (0, 1)]
        assert heard == {0: said, 1: said}

    run_both(0)
    run_both(1)
    # Rank 0 of a third attempt is there before rank 1, and has to wait for it, whatever lies in the store.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with pytest.raises(sluice.RanksError, match=r"rank 0 of 2 has waited up to 0.3 s for the words of the other processes .*raise sharding.timeout"):
        start_process()._world_of_store(0, 2, 0.3)


def test_a_second_meeting_finds_the_store_though_rank_0_is_late():
    """Without torchrun, rank 0 serves the store. A program may train twice, and end the first training later on rank 0."""
    code = textwrap.dedent("""
        import os, time
        from sluice_offload import processes
        def train():
            world = processes.find_world(8)
            world.exchange(1)
            time.sleep(1 if world.rank == 0 else 0)
        train()
        print(processes.find_world(8).exchange(int(os.environ["RANK"])))""")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [subprocess.Popen([sys.executable, "-B", "-c", code], env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    for said, failed in [rank.communicate(timeout=60) for rank in ranks]:
        assert said == "[0, 1]\n", failed[-1000:]


def test_a_process_that_does_not_come_is_an_error_after_the_timeout(monkeypatch):
    with socket.socket() as closed:  # without a listener
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(closed.getsockname()[1]))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(sluice.RanksError, match=r"rank 1 of 2 has waited up to 0.3 s for the store of the processes at 127.0.0.1:\d+"):
            start_process().find_world(0.3)


def test_number_and_rank_are_of_one_launcher(monkeypatch):
    for name in (name for launcher in processes._LAUNCHERS for name in launcher):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")  # as some images have it
    monkeypatch.setenv("RANK", "3")
    assert (processes.own_rank(), processes.count_processes()) == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    assert (processes.own_rank(), processes.count_processes()) == (2, 4)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert processes.count_processes() == 4
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    with pytest.raises(sluice.ArgumentError, match="4 processes .OMPI_COMM_WORLD_SIZE., but does not say which one"):
        processes.own_rank()


def test_processes_of_srun_that_cannot_meet_are_an_error(monkeypatch):
    """Each would train a model of its own. A program that sbatch or salloc starts alone has a number of tasks, and is one process."""
    for name in (*(name for launcher in processes._LAUNCHERS for name in launcher), "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert processes.find_world(0.3) is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert processes.find_world(0.3) is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert (processes.own_rank(), processes.count_processes()) == (3, 4)
    with pytest.raises(sluice.ArgumentError, match=r"4 processes \(SLURM_STEP_NUM_TASKS\).*MASTER_ADDR, MASTER_PORT.*init_process_group"):
        processes.find_world(0.3)


@pytest.mark.parametrize("named, files, cores", [
    ("0::/a/b\n", {}, 8), ("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, 8), ("0::/a/b\n", {"a/b/cpu.max": "350000 100000"}, 3),
    ("0::/a/b\n", {"a/b/cpu.max": "350000 100000", "a/cpu.max": "200000 100000"}, 2), ("0::/a/b\n", {"cpu.max": "150000 100000"}, 1),
    ("0::/\n", {"cpu.max": "50000 100000"}, 1), ("0::/a\n", {"cpu.max": "6400000 100000"}, 8),
    ("4:cpu,cpuacct:/d\n2:memory:/e\n", {"cpu/d/cpu.cfs_quota_us": "500000", "cpu/d/cpu.cfs_period_us": "100000"}, 5),
    ("4:cpu,cpuacct:/d\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ("2:memory:/e\n", {"cpu/cpu.cfs_quota_us": "500000", "cpu/cpu.cfs_period_us": "100000"}, 8), (None, {}, 8)])
def test_granted_cores_are_those_of_the_mask_within_the_quota(tmp_path, monkeypatch, named, files, cores):
    masks = {thread: {1, 2} for thread in processes.os.listdir("/proc/self/task")}
    masks[min(masks, key=int)] = {3, 5, 7, 9, 11, 13}  # a library binds each of its threads
    monkeypatch.setattr(processes.os, "listdir", lambda _: [*masks, "0"])
    masks["0"] = {1, 2}
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda thread: masks[str(thread)])
    if named is not None:
        (tmp_path / "cgroup").write_text(named)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text + "\n")
    assert processes.granted_cores(str(tmp_path), str(tmp_path / "root")) == cores


_OF_A_RANK = b"HOME=/\0SLURM_PROCID=3\0"


@pytest.mark.parametrize("own, launcher, wrappers, group, count, cores", [
    ("0-15", "0-15", 0, None, 4, 4), ("4-7", "0-15", 0, None, 4, 4), ("4-7", "0-15", 2, None, 4, 4), ("0-31", "0-63", 1, None, 8, 8),
    ("0-15", "0-127", 0, "0-15", 4, 4), ("0-3,8-11", "0-127", 1, "0-15", 2, 8), ("0-7", None, 0, None, 4, 2), ("0-7", None, 1, None, 4, 2),
    ("0-7", "0-63", 0, None, 1, 8), ("0", "0-1", 0, None, 4, 1)])
def test_each_process_has_an_equal_part_of_the_launchers_cores(tmp_path, monkeypatch, own, launcher, wrappers, group, count, cores):
    """As engine/ranks/host_cores.h says of the ranks of C++: cores that a launcher has divided are not divided again."""
    def add(name, parent, mask, environ=None):
        folder = tmp_path / "proc" / name
        folder.mkdir(parents=True)
        (folder / "status").write_text(f"Name:\tp\nPPid:\t{parent}\nCpus_allowed:\tff\nCpus_allowed_list:\t{mask}\n")
        if environ is not None:
            (folder / "environ").write_bytes(environ)
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setattr(processes, "granted_cores", lambda *_: len(processes._cores(own)))
    chain = [f"{30 + i}" for i in range(wrappers)] + ["20"]
    add("self", chain[0], own)
    for name, parent in zip(chain[:-1], chain[1:]):
        add(name, parent, own, _OF_A_RANK)
    if launcher is not None:
        add("20", "1", launcher)
        add("1", "0", "0-127")
    if group is not None:
        (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job/step\n")
        (tmp_path / "root" / "job").mkdir(parents=True)
        (tmp_path / "root" / "job" / "cpuset.cpus.effective").write_text(group + "\n")
    assert processes.share_of_cores(count, str(tmp_path / "proc"), str(tmp_path / "root")) == cores


@pytest.mark.parametrize("own, quota, count, cores", [
    (64, 16, 4, 4), (16, 20, 4, 5), (32, 32, 4, 8), (16, 64, 4, 16), (16, 1000, 4, 16), (16, 2, 4, 1), (16, 8, 1, 8)])
def test_a_quota_is_shared_by_all_processes(tmp_path, monkeypatch, own, quota, count, cores):
    """Also where each is bound to cores of its own, all of which have more. The launcher has 64."""
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: set(range(own)))
    for name, parent, mask in (("self", "20", f"0-{own - 1}"), ("20", "0", "0-63")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status").write_text(f"PPid:\t{parent}\nCpus_allowed_list:\t{mask}\n")
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text(f"{quota * 100000} 100000\n")
    assert processes.share_of_cores(count, str(tmp_path), str(tmp_path)) == cores


def test_the_launcher_is_found_behind_a_wrapper(monkeypatch):
    """Real processes: this one launches, a shell wraps, and the rank is bound to one core."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    core = min(os.sched_getaffinity(0))
    code = "from sluice_offload import processes as p; print(p._cores_of_launcher('/proc', '/none'), p.granted_cores())"
    environment = {**os.environ, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
    said = subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-B", "-c", code], env=environment, check=True,
                          capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})).stdout
    assert said.split() == [str(len(os.sched_getaffinity(0))), "1"]


@pytest.mark.parametrize("tasks, node, count", [
    ("4(x2),3", "0", 4), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("4(x2),3", "3", 1), ("5,4(x2),2", "2", 4), ("8", "0", 8), ("8", "", 1),
    ("", "0", 1), ("4(x2", "0", 1), ("4(x1000000000000)", "7", 4)])
def test_srun_tells_how_many_processes_a_node_has(monkeypatch, tasks, node, count):
    for name in processes._OF_HOST:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    monkeypatch.setenv("SLURM_NODEID", node)
    assert processes.processes_of_launcher() == count
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # torchrun as the one task of each node
    assert processes.processes_of_launcher() == 2


def test_processes_of_other_groups_share_the_cores(monkeypatch):
    for name in (*processes._OF_HOST, "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert processes.processes_of_host(None, "a group") == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert processes.processes_of_host(None, "a group") == 8
    assert processes.processes_of_host(None, None) == 1


def test_the_failure_of_a_trace_hides_no_other(tmp_path, monkeypatch, caplog):
    stop = library.library().trace_stop

    def fails(result):
        stop(result)
        raise sluice.StorageError("no space left")
    monkeypatch.setattr(library.library(), "trace_stop", fails)
    with caplog.at_level(logging.ERROR, "sluice_offload"), pytest.raises(KeyError, match="of the program"):
        with sluice.trace(tmp_path / "one"):
            raise KeyError("of the program")
    assert "no space left" in caplog.text
    with pytest.raises(sluice.StorageError, match="no space left"):
        with sluice.trace(tmp_path / "two"):
            pass


def test_several_gpus_without_cudas_settings_are_told(monkeypatch, caplog):
    class World:
        rank, size = 0, 2

        def exchange(self, own):
            return [["ab" * 128, ""], own]

    engine = types.SimpleNamespace(_lib=types.SimpleNamespace(gpu_ranks_id=lambda place: None))
    for loading, connections, expected in [(None, None, "CUDA_MODULE_LOADING=EAGER and CUDA_DEVICE_MAX_CONNECTIONS=32 in its"),
                                           ("LAZY", "8", "with CUDA_MODULE_LOADING=EAGER in its environment"), ("eager", "16", None)]:
        for name, value in (("CUDA_MODULE_LOADING", loading), ("CUDA_DEVICE_MAX_CONNECTIONS", connections)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        caplog.clear()
        Engine._gpu_ranks(engine, World())
        assert (expected is None and not caplog.text) or (expected is not None and expected in caplog.text)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this needs two cores")
@pytest.mark.parametrize("variable", ["OMP_PROC_BIND=true", pytest.param("GOMP_CPU_AFFINITY=0-1", marks=pytest.mark.slow)])
def test_threads_are_not_bound_with_openmps_first(variable):
    """OpenMP binds the main thread when torch is loaded, and its others in the first parallel region, which has not been here."""
    code = """
import os, torch, sluice_offload
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
optimizer = sluice_offload.offload(model, {"optimizer": {"learning_rate": 1e-3}}, units=[torch.nn.Linear])
model(torch.ones(2, 256)).sum().backward()
optimizer.step()
for thread in os.listdir("/proc/self/task"):
    name = open(f"/proc/self/task/{thread}/comm").read().strip()
    if name.startswith("sluice-"):
        print(name, *os.sched_getaffinity(int(thread)))
optimizer.close()
"""
    name, value = variable.split("=")
    environment = {**os.environ, "OMP_NUM_THREADS": "2", name: value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    threads = [line.split() for line in done.stdout.splitlines()]
    assert {"sluice-sched", "sluice-work"} <= {thread[0] for thread in threads}
    assert [thread for thread in threads if len(thread) == 2] == []
