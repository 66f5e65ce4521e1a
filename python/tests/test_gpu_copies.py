"""Activations that leave a GPU. A stand-in for CUDA's streams copies as late as it may: what does not wait for a copy sees what was
there before. So the order is tested here; CUDA's own streams are in test_cuda_offload.py."""

import contextlib
import copy
import gc
import random
import threading
import weakref

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, Tiny, train
from sluice_offload import gpu_copies
from sluice_offload.activations import AHEAD, KEPT, LEAVING, PAGE, WRITES_AT_ONCE, ActivationStore
from sluice_offload.gpu_copies import GpuCopies
from test_activations import Checkpointed, Reentrant

_lock = threading.RLock()


class Event:
    """Behind the first `count` pieces of a stream's work."""

    def __init__(self, stream, count):
        self._stream, self._count = stream, count

    @property
    def is_past(self):
        return self._stream.done >= self._count

    def synchronize(self):
        with _lock:
            while self._stream.done < self._count:
                self._stream.done += 1
                self._stream.work[self._stream.done - 1]()


class Late:
    """A stream that works when something waits for it."""

    def __init__(self):
        self.work, self.done = [], 0

    def record_event(self):
        return Event(self, len(self.work))

    def wait_event(self, event):
        self.work.append(event.synchronize)


class Current(Late):
    """torch's stream: what it is given is done at once."""

    def wait_event(self, event):
        event.synchronize()


class LateCopies(GpuCopies):
    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.current, self.held = Current(), 0
        self.pinned = {}  # bytes by address
        self.pins = self.pinned_bytes_max = 0

    @property
    def pinned_bytes(self):
        return sum(self.pinned.values())

    def current_stream(self):
        return self.current

    def _new_stream(self):
        return Late()

    def _copy(self, to, source, stream):
        def work():
            assert {to.data_ptr(), source.data_ptr()} & set(self.pinned), "copied to or from memory that is no longer pinned"
            to.copy_(source)
        stream.work.append(work)

    def _pin(self, memory):
        memory.fill_(0xFD)
        self.pinned[memory.data_ptr()] = memory.numel()
        self.pins += 1
        self.pinned_bytes_max = max(self.pinned_bytes, self.pinned_bytes_max)

    def _unpin(self, device, memory):
        del self.pinned[memory.data_ptr()]

    def release(self, tensor, stream, done):
        super().release(tensor, stream, done)
        assert done.is_past, "torch's stream could take the memory before it is copied"

    def landing(self, nbytes):
        landing = super().landing(nbytes)
        landing.memory.fill_(0xFE)
        return landing

    def _hold(self, memory, stream):
        self.held += 1
        stream.record_event().synchronize()


def late_store(home, folder, verify="full"):
    return ActivationStore([str(folder)] if home == "nvme" else [], verify, 60, True, lambda storage: False, LateCopies())


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("kind", [Tiny, Checkpointed, Reentrant])
def test_bits_and_bytes(config, tmp_path, kind, home):
    """Those of training that keeps all in memory; and the bytes are all but those of the newest tensors, once each way."""
    torch.manual_seed(0)
    reference = kind(layers=6)
    model = copy.deepcopy(reference)
    expected = sluice.offload(reference, config, units=[Block])
    losses = train(reference, expected, 5)
    optimizer = sluice.offload(model, {**config, "activations": "nvme"}, units=[Block])
    own = optimizer._walk.activations
    store = ActivationStore([str(tmp_path)] if home == "nvme" else [], "full", 60, True, own._is_ours, LateCopies())
    optimizer._walk.activations = store
    assert train(model, optimizer, 5) == losses
    assert all(torch.equal(value, expected_value) for value, expected_value in
               zip(model.state_dict().values(), reference.state_dict().values()))
    assert store.written_bytes > store.read_bytes > 0
    assert own.written_bytes == 0
    optimizer.close()
    assert store.gpu.pinned_bytes == 0
    expected.close()
    own.close()


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_tensors_that_come_and_go(tmp_path, home):
    """In every order, some twice, some never; rooms are taken again while copies from them are still to come."""
    choose = random.Random(5)
    store = late_store(home, tmp_path, "sample")
    alive = []
    for i in range(400):
        tensor = torch.full((choose.choice([1024, 1025, 5000]),), float(i))
        alive.append((store._pack(tensor), i))
        del tensor
        while len(alive) > 12:
            packed, value = alive.pop(choose.randrange(len(alive)))
            for _ in range(choose.randrange(3)):
                assert (store._unpack(packed) == value).all(), value
            del packed
    assert store.gpu.held > 0  # memory for copies that were never taken
    for packed, value in alive:
        assert (store._unpack(packed) == value).all()
    reference = weakref.ref(packed)
    gc.disable()
    try:
        del packed, alive
        assert reference() is None
    finally:
        gc.enable()
    store.close()
    assert store.gpu.pinned_bytes == 0
    assert store._host_bytes == 0 and sum(file.used_bytes for file in store._files) == 0


@pytest.mark.parametrize("later, is_copied", [(0, False), (KEPT + LEAVING - 1, False), (KEPT + LEAVING, True)])
def test_changes_in_place(tmp_path, later, is_copied):
    """Gradients are never wrong: a tensor whose copy is made is as it was; backward refuses the others as torch does."""
    store = late_store("host", tmp_path)
    leaf = torch.randn(64, 64, requires_grad=True)
    other = leaf.detach() + 2
    expected = other.clone()
    with store.hooks():
        loss = (leaf * other).sum()
        rest = [leaf.exp() for _ in range(later)]
    other.mul_(3)
    if is_copied:
        loss.backward()
        assert torch.equal(leaf.grad, expected)
    else:
        with pytest.raises(RuntimeError, match=r"inplace operation.*version 1, and was at 0.*clone\(\)"):
            loss.backward()
    with store.hooks():  # it had changed before its memory went
        changed = leaf.detach() + 3
        loss = (leaf * changed).sum()
        changed.mul_(2)
        rest += [leaf.exp() for _ in range(KEPT + LEAVING)]
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
    del rest
    store.close()


def keep(store, count, pages):
    """A forward and its backward."""
    packed = [store._pack(torch.ones(pages * PAGE // 4)) for _ in range(count)]
    assert all((store._unpack(one) == 1).all() for one in reversed(packed))


def test_memory_that_is_pinned(tmp_path):
    """No more than was in use at a time, however often the sizes change, and a quarter more."""
    store = late_store("host", tmp_path)
    gpu = store.gpu
    for pages in (*range(1, 30), *range(30, 0, -1)):
        keep(store, 8, pages)
    assert store.used_bytes_max == 30 * PAGE * (8 - KEPT)
    keep(store, 180 + KEPT, 1)
    keep(store, 8, 30)
    assert gpu.pinned_bytes_max <= (store.used_bytes_max + 30 * PAGE) * 5 / 4
    dead = [store._pack(torch.ones(PAGE)) for _ in range(8)]  # whose copies are still to come
    del dead
    store.close()
    assert gpu.pinned_bytes == 0
    for stream in (gpu._out, gpu._back):
        stream.record_event().synchronize()


def test_memory_is_pinned_once(tmp_path):
    """Not for each tensor that goes to a file, and not for each that comes back."""
    store = late_store("nvme", tmp_path)
    for _ in range(20):
        keep(store, 12, 3)
    assert store.gpu.pins <= WRITES_AT_ONCE + AHEAD + 2
    store.close()


def test_batches_of_varying_length_pin_no_memory_each(tmp_path):
    """Those of the longest ones serve all, and there is room for some short ones beside them."""
    store = late_store("host", tmp_path)
    draw = random.Random(3)
    lengths = [*(draw.randrange(64, 128) for _ in range(100)), *(draw.choice([8, 9, 100, 127]) for _ in range(100))]
    for pages in lengths[:50] + [128] + lengths[100:150]:
        keep(store, 4, pages)
    pins = store.gpu.pins
    for pages in lengths[50:100] + lengths[150:]:
        keep(store, 4, pages)
    assert store.gpu.pins == pins
    store.close()


class Guards:
    """torch.cuda without a GPU: its runtime, and the GPU that is current."""

    def __init__(self, monkeypatch, code=0):
        self.current, self.calls, self.kernels, self.code = 0, [], 0, code
        monkeypatch.setattr(gpu_copies.torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(gpu_copies.torch.cuda, "device", self.device)
        monkeypatch.setattr(gpu_copies.torch.cuda, "stream", self.stream)
        monkeypatch.setattr(gpu_copies.torch, "zeros", self.zeros)

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    @contextlib.contextmanager
    def stream(self, stream):
        self.calls.append(("stream", self.current))
        yield

    def zeros(self, count, device):
        self.kernels += 1
        raise RuntimeError("CUDA error: the failure of the call before")

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(("pin", self.current, flags))
        return self.code

    def cudaHostUnregister(self, address):
        self.calls.append(("unpin", self.current))
        return self.code


def test_calls_are_those_of_the_gpu_on_any_thread(monkeypatch):
    """A thread's current GPU is 0. Else there would be a context on it, and the memory would be pinned for that one alone."""
    guards = Guards(monkeypatch)
    copies = GpuCopies.__new__(GpuCopies)
    copies.device = torch.device("cuda:1")
    memory = torch.ones(16)
    copies._pin(memory)
    copies._copy(memory, torch.ones(16), None)
    copies._unpin(copies.device, memory)
    portable = 1
    assert guards.calls == [("pin", 1, portable), ("stream", 1), ("unpin", 1)]
    assert guards.current == 0
    assert guards.kernels == 0


def test_a_failure_to_pin_is_not_that_of_a_later_kernel(monkeypatch):
    guards = Guards(monkeypatch, code=2)
    copies = GpuCopies.__new__(GpuCopies)
    copies.device = torch.device("cuda:1")
    with pytest.raises(sluice.OutOfMemoryError, match="cannot pin"):
        copies._pin(torch.ones(16))
    copies._unpin(copies.device, torch.ones(16))
    assert guards.kernels == 2, "a kernel has asked for each"


def test_memory_that_cannot_be_pinned(tmp_path, monkeypatch):
    """CUDA's number for it is in the message, and nothing stays pinned."""
    store = late_store("host", tmp_path)
    Guards(monkeypatch, code=2)
    monkeypatch.setattr(store.gpu, "device", torch.device("cuda:0"))
    monkeypatch.setattr(store.gpu, "_pin", lambda memory: GpuCopies._pin(store.gpu, memory))
    packed = [store._pack(torch.ones(PAGE)) for _ in range(KEPT)]
    with pytest.raises(sluice.OutOfMemoryError, match='cannot pin 16384 bytes of host memory for activations: 2; lower .*"keep"'):
        store._pack(torch.ones(PAGE))
    del packed
    store.close()


def test_a_program_that_calls_parts_is_told(tmp_path):
    store = late_store("host", tmp_path)
    with pytest.warns(UserWarning, match='activations is "host", but .* stayed on the GPU'):
        store.check_use()
    store.close()
