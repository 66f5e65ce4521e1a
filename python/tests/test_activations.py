"""activations: "nvme": what autograd keeps for backward goes to storage and comes back, with the same bits."""

import contextlib
import copy
import ctypes
import errno
import gc
import os
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice_offload as sluice
from conftest import Block, Tiny, batch, tiny, train
from sluice_offload import activations, page_file
from sluice_offload.activations import KEPT, ActivationStore
from sluice_offload.page_file import PAGE, new_memory, rounded

ROWS, LENGTH, WIDTH = 4, 12, 32
INPUT_BYTES = rounded(ROWS * LENGTH * WIDTH * 4)  # of a block


class Checkpointed(Tiny):
    """Keeps the inputs of its blocks."""
    reentrant = False

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens) + self.positions[:tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm(x).float().square().mean()


class Reentrant(Checkpointed):
    reentrant = True


def losses_of(model, config, steps=5, **options):
    optimizer = sluice.offload(model, config, units=[Block], **options)
    losses, norms = train(model, optimizer, steps)
    return losses, norms, {name: value for name, value in model.state_dict().items()}, optimizer


def assert_same(one, other):
    assert one[0] == other[0] and one[1] == other[1]
    assert all(torch.equal(value, other[2][name]) for name, value in one[2].items())


@pytest.mark.parametrize("storage", [None, "copy"])
@pytest.mark.parametrize("kind", [Tiny, Checkpointed, Reentrant])
def test_bits_are_those_of_memory(config, kind, storage):
    torch.manual_seed(0)
    model = kind(layers=6)
    other = copy.deepcopy(model)
    expected = losses_of(model, config, storage=storage)
    expected[3].close()
    assert expected[3].activations is None
    actual = losses_of(other, {**config, "activations": "nvme"}, storage=storage)
    assert_same(actual, expected)
    assert actual[3].activations.written_bytes >= actual[3].activations.read_bytes > 0
    assert actual[3].report.schedule_changes == 0
    actual[3].close()


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_bytes_are_those_of_the_shapes(config, kind):
    """Each step writes and reads the inputs of all blocks but the newest tensors, and the rest of the model keeps: the positions'
    sum is the first block's input, the norm keeps its input and its output's square."""
    torch.manual_seed(0)
    layers, steps = 7, 3
    optimizer = losses_of(kind(layers=layers), {**config, "activations": "nvme"}, steps)[3]
    store = optimizer.activations
    behind = 2  # tensors of a block's input's size that the norm and the square keep, which are the newest
    assert behind >= KEPT
    moved = steps * (layers + behind - KEPT) * INPUT_BYTES
    assert (store.written_bytes, store.read_bytes) == (moved, moved)
    assert store.used_bytes_max == moved // steps
    assert sum(file.used_bytes for file in store._files) == 0  # nothing is kept behind a backward
    optimizer.close()


class Wide(nn.Module):
    """Inputs of blocks are large, parameters are few."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def peak_bytes(work):
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")

    def read(name):
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


def test_memory_is_that_of_a_few_tensors(config):
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: freed tensors go back to the system, so that they can be counted
    rows, layers = 1 << 18, 24  # 8 MiB for each block's input
    x = torch.randn(rows, 8)
    x.requires_grad_(True)
    peaks = {}
    for home in ("keep", "nvme"):
        model = Wide(layers)
        optimizer = sluice.offload(model, {**config, "activations": home})

        def step():
            model(x).backward()
            optimizer.step()
        step()
        peaks[home] = peak_bytes(step)
        optimizer.close()
    size = rows * 8 * 4
    assert peaks["keep"] >= layers * size
    assert peaks["nvme"] <= 14 * size, {home: peak / size for home, peak in peaks.items()}


def used_in_the_end(store):
    """Bytes in files when the transfers that were under way are over; their threads give places back."""
    for _ in range(1000):
        used = sum(file.used_bytes for file in store._files)
        if used == 0:
            break
        time.sleep(0.01)
    return used


def plain_store(tmp_path, **options):
    return ActivationStore([str(tmp_path)], options.get("verify", "full"), options.get("timeout_s", 60), options.get("can_abandon", True),
                           lambda storage: False)


@pytest.mark.parametrize("storage", [None, "copy"])
def test_parameters_are_not_kept(config, storage):
    """autograd keeps views of them, which are larger here than any activation."""
    model = tiny()
    optimizer = sluice.offload(model, {**config, "activations": "nvme"}, units=[Block], storage=storage)
    model(*batch(0, rows=1, length=2)).backward()
    optimizer.step()
    assert optimizer.report.nvme_write_bytes > 0 and optimizer.activations._next == 0
    optimizer.close()


def test_tensors_of_every_kind(tmp_path):
    torch.manual_seed(1)
    base = torch.randn(64, 96)
    tensors = [base, base.t(), base[1:], base.bfloat16(), torch.arange(5000), base > 0, torch.randn(3, 40, 50).permute(2, 0, 1),
               torch.randn(1, 4096), base[:, ::2], base.expand(3, 64, 96), torch.randn(10), torch.tensor(1.0),
               torch.randn(64, 64, dtype=torch.complex64).conj(), torch.randn(64, 96, dtype=torch.complex128).t().conj(),
               torch._neg_view(torch.randn(64, 64)), torch._neg_view(torch.randn(64, 64, dtype=torch.complex64).conj())]
    copies = [tensor.clone() for tensor in tensors]
    store = plain_store(tmp_path)
    packed = [store._pack(tensor) for tensor in tensors]
    assert all(torch.equal(store._unpack(one), copied) for one, copied in zip(packed, copies))
    base.zero_()  # what is saved is saved
    for i, (one, copied) in reversed(list(enumerate(zip(tensors, copies)))):
        stays = one.numel() * one.itemsize < PAGE or i in (8, 9)  # small, and with gaps
        assert isinstance(packed[i], activations._InMemory) == stays, i
        if i in (8, 9):  # these are the base's own memory
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                store._unpack(packed[i])
            continue
        came = store._unpack(packed[i])
        assert torch.equal(came, copied) and came.stride() == one.stride() and came.dtype == one.dtype, i
        assert (came.is_conj(), came.is_neg()) == (one.is_conj(), one.is_neg()), i
    store.close()


class Spectral(nn.Module):
    """Keeps conjugate views."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(4):
            x = x + (torch.fft.fft(self.linear(x)).conj() * torch.fft.fft(self.linear(x + 1))).real / 64
        return x.square().mean()


def test_conjugate_views(config):
    def train_one(settings):
        torch.manual_seed(2)
        model = Spectral()
        optimizer = sluice.offload(model, settings, units=[nn.Linear])
        losses = []
        for _ in range(3):
            loss = model(torch.randn(64, 64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
        return losses
    assert train_one({**config, "activations": "nvme"}) == train_one(config)


@pytest.mark.parametrize("shape, step, is_copied", [((10,), 1, False), ((64, 64), 2, False), ((64, 64), 1, True)])
def test_changes_in_place(tmp_path, shape, step, is_copied):
    """Small, with gaps, large. Gradients are never wrong: a copy is as it was, and backward refuses the others as torch does."""
    store = plain_store(tmp_path)
    leaf = torch.randn(shape, requires_grad=True)
    with store.hooks():
        other = (leaf.detach() + 2)[..., ::step]
        loss = (leaf[..., ::step] * other).sum()
    expected = other.clone()
    other.mul_(3)
    if is_copied:
        loss.backward()
        assert torch.equal(leaf.grad, expected)
    else:
        with pytest.raises(RuntimeError, match=r"inplace operation.*version 1, and was at 0.*clone\(\)"):
            loss.backward()
    store.close()


def test_graphs_without_backward_are_forgotten(config):
    """A graph holds small results of its own operations, and may not keep itself alive by them."""
    optimizer = sluice.offload(tiny(layers=6), {**config, "activations": "nvme"}, units=[Block])
    store = optimizer.activations
    for length in (6, 12):
        with store.hooks():
            x = torch.randn(4, length, 128, requires_grad=True)
            results = [x.exp().sum().exp().sigmoid() for _ in range(5)]
    assert sum(file.used_bytes for file in store._files) > 0
    gc.disable()  # a cycle would be collected at some time, with the file's space until then
    try:
        del results
        assert used_in_the_end(store) == 0 and len(store._alive) == 0
    finally:
        gc.enable()
    optimizer.close()


def test_the_file_does_not_grow_with_every_length(tmp_path):
    store = plain_store(tmp_path)
    ends = []
    for pages in range(1, 51):
        packed = [store._pack(torch.ones(pages * PAGE // 4)) for _ in range(6)]
        assert all((store._unpack(one) == 1).all() for one in reversed(packed))
        ends.append(store._files[0].end)
        del packed
        assert used_in_the_end(store) == 0
    assert store._files[0].used_bytes_max == 50 * PAGE * (6 - KEPT)
    assert max(ends) <= 50 * PAGE * (6 - KEPT)
    packed = [store._pack(torch.full(((1 + i % 3) * PAGE // 4,), float(i))) for i in range(12)]
    assert all((store._unpack(packed[i]) == i).all() for i in reversed(range(12)))  # no place is given twice
    store.close()


def test_memory_on_the_way(tmp_path, monkeypatch):
    """Memory of the process's own, not shared memory, which has limits of its own; and where there is none, the size is named."""
    room = new_memory(1 << 20)
    with open("/proc/self/maps", encoding="ascii") as file:
        lines = [line.split() for line in file]
    kind, *name = next((line[1], *line[5:]) for line in lines
                       if int(line[0].split("-")[0], 16) <= room.data_ptr() < int(line[0].split("-")[1], 16))
    assert kind == "rw-p" and not name
    store = plain_store(tmp_path)
    unraised = []
    monkeypatch.setattr("sys.unraisablehook", unraised.append)
    with monkeypatch.context() as patch:
        patch.setattr(page_file.mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
        with pytest.raises(sluice.OutOfMemoryError, match="cannot take 8192 bytes of memory .*Cannot allocate memory; free memory"):
            store._pack(torch.ones(1500))
    assert not unraised
    packed = [store._pack(torch.ones(1500)) for _ in range(KEPT)]
    with monkeypatch.context() as patch:  # an interrupt between the place in the file and its write
        patch.setattr(store._threads, "submit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            store._pack(torch.ones(1500))
    assert store._files[0].used_bytes == 8192
    del packed
    assert used_in_the_end(store) == 0 and not unraised
    store.close()


def test_a_place_is_given_again_only_when_nothing_uses_it(tmp_path):
    """Many tensors that die in every order; each comes back as it was."""
    import random
    choose = random.Random(3)
    store = plain_store(tmp_path)
    alive = []
    for i in range(400):
        tensor = torch.full((choose.choice([1024, 1025, 5000]),), float(i))
        alive.append((store._pack(tensor), i))
        while len(alive) > 12:
            packed, value = alive.pop(choose.randrange(len(alive)))
            if choose.random() < 0.6:
                assert (store._unpack(packed) == value).all(), value
    for packed, value in alive:
        assert (store._unpack(packed) == value).all()
        assert (store._unpack(packed) == value).all()  # again, as with retain_graph
    reference = weakref.ref(packed)
    del packed, alive
    assert reference() is None
    store._threads.shutdown()
    assert sum(file.used_bytes for file in store._files) == 0
    assert store._files[0].end <= 40 * 2 * 5 * PAGE


def test_evaluation_and_two_backwards(config):
    """Evaluation keeps nothing; a graph that is used twice is read twice."""
    torch.manual_seed(0)
    one, other = Checkpointed(layers=5), Checkpointed(layers=5)
    other.load_state_dict(one.state_dict())
    optimizers = [sluice.offload(one, config, units=[Block]),
                  sluice.offload(other, {**config, "activations": "nvme"}, units=[Block])]
    for net, optimizer in zip((one, other), optimizers):
        with torch.no_grad():
            net(*batch(0))
        if optimizer.activations is not None:
            assert optimizer.activations.written_bytes == 0
        loss = net(*batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    assert optimizers[0].gradient_norm == optimizers[1].gradient_norm
    assert optimizers[1].activations.read_bytes == 2 * optimizers[1].activations.written_bytes > 0
    for optimizer in optimizers:
        optimizer.close()


def assert_no_hook(store):
    """Tensors of operations outside of the model's forward stay in memory."""
    before = store._next
    torch.ones(5000, requires_grad=True).exp().sum().backward()
    assert store._next == before


def test_failures_of_the_drive(config, monkeypatch):
    """A write, a read, and bytes that have changed on the way, each with its place; and then no hook is left behind."""
    store = {"activations": "nvme"}
    for call, failure, words in (("pwritev", OSError(28, "No space left on device"), "cannot write activations in .*No space left.*; free space there.*zero_grad"),
                                 ("preadv", OSError(5, "Input/output error"), "cannot read activations in .*output error; check the drive.*zero_grad"),
                                 ("preadv", None, "other bytes than were written")):
        model = Checkpointed(layers=6)
        optimizer = sluice.offload(model, {**config, **store}, units=[Block])
        original = getattr(os, call)

        def faulty(*arguments, original=original, failure=failure):
            if failure is not None:
                raise failure
            count = original(*arguments)
            arguments[1][0][100] ^= 1
            return count
        with monkeypatch.context() as patch:
            patch.setattr(page_file.os, call, faulty)
            with pytest.raises(sluice.StorageError, match=words):
                model(*batch(0)).backward()
        optimizer.zero_grad()
        assert_no_hook(optimizer.activations)
        train(model, optimizer, 1)  # the drive is well again
        optimizer._engine.destroy()


def test_where_torch_forbids_such_hooks(config):
    """torch.func does. The step that the forward has begun ends with torch's error."""
    model = tiny()
    optimizer = sluice.offload(model, {**config, "activations": "nvme"}, units=[Block])
    with warnings.catch_warnings(), torch.autograd.graph.disable_saved_tensors_hooks("forbidden here"):
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="forbidden here"):
            model(*batch(0))
    model.state_dict()
    train(model, optimizer, 2)
    optimizer.close()


def test_an_interrupt_leaves_no_hook(config):
    model = tiny()
    optimizer = sluice.offload(model, {**config, "activations": "nvme"}, units=[Block])

    def interrupt(*_):
        raise KeyboardInterrupt
    handle = model.blocks[1].attention.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(*batch(0))
    handle.remove()
    optimizer.zero_grad()
    assert_no_hook(optimizer.activations)
    train(model, optimizer, 1)
    assert_no_hook(optimizer.activations)
    assert optimizer.activations.used_bytes_max > 0
    optimizer.close()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_drive_that_does_not_answer(tmp_path, monkeypatch, call):
    """It is given up behind the time of storage.timeout, named, and its file stays open for the transfer that may end yet."""
    store = plain_store(tmp_path, timeout_s=0.2)
    original, answers = getattr(os, call), threading.Event()

    def stuck(*arguments):
        answers.wait(20)
        return original(*arguments)
    try:
        monkeypatch.setattr(page_file.os, call, stuck)
        packed = []
        with pytest.raises(sluice.StorageError, match=rf"cannot {'write' if call == 'pwritev' else 'read'} activations in a file of "
                           rf"{tmp_path}, \[\d+, \+8192\): the drive has not answered for 0.2 s.*storage.timeout"):
            for i in range(KEPT + activations.WRITES_AT_ONCE + 1):
                packed.append(store._pack(torch.full((1500,), float(i))))
            store._unpack(packed[0])
        under_way = store._writes[0][0] if call == "pwritev" else packed[0].read
        store.close()
        assert not under_way.done()  # it has not been waited for
        os.fstat(store._files[0].descriptor)
    finally:
        answers.set()
    store._threads.shutdown()
    if call == "preadv":
        assert store._files[0].used_bytes > 0
        del packed
        assert used_in_the_end(store) == 0


def test_timeouts_of_the_config(config):
    for given, expected in ((None, 120), (7, 7), (0, None)):
        section = config["storage"] if given is None else {**config["storage"], "timeout": given}
        optimizer = sluice.offload(tiny(), {**config, "storage": section, "activations": "nvme"}, units=[Block])
        assert optimizer.activations._timeout_s == expected
        optimizer.close()


def test_file_systems_without_files_without_names(tmp_path, monkeypatch):
    original = os.open

    def without(path, flags, *arguments, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return original(path, flags, *arguments, **named)
    with monkeypatch.context() as patch:
        patch.setattr(page_file.os, "open", without)
        store = plain_store(tmp_path)
    assert list(tmp_path.iterdir()) == []
    packed = [store._pack(torch.full((1500,), float(i))) for i in range(6)]
    assert all((store._unpack(packed[i]) == i).all() for i in reversed(range(6)))
    store.close()


def test_several_processes_cannot_abandon(tmp_path, monkeypatch):
    store = plain_store(tmp_path, can_abandon=False)
    packed = [store._pack(torch.ones(1500)) for _ in range(6)]
    monkeypatch.setattr(page_file.os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(sluice.StorageError, match=r"check the drive or the server \(dmesg\); all processes have to begin anew"):
        store._unpack(packed[0])


def files_open_in(folder):
    """How many files without names in `folder` this process has open; files of other tests may still be closing."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(target.startswith(f"{folder}/") and target.endswith(" (deleted)") for target in targets)


def test_files_are_closed(config, tmp_path, monkeypatch):
    """Without close(), when a second folder fails, and when offload() fails behind them."""
    store = plain_store(tmp_path)
    assert files_open_in(tmp_path) == 1
    del store
    assert files_open_in(tmp_path) == 0
    with pytest.raises(sluice.StorageError, match="/nowhere: No such file"):
        ActivationStore([str(tmp_path), "/nowhere"], "full", 60, True, lambda storage: False)
    gc.collect()
    assert files_open_in(tmp_path) == 0
    closed = []
    monkeypatch.setattr(ActivationStore, "close", lambda self, close=ActivationStore.close: closed.append(close(self)))
    with monkeypatch.context() as patch:
        patch.setattr(sluice.OffloadOptimizer, "bind", None)
        with pytest.raises(TypeError):
            sluice.offload(tiny(), {**config, "activations": "nvme"}, units=[Block])
    assert len(closed) == 1
    optimizer = sluice.offload(tiny(), {**config, "activations": "nvme"}, units=[Block])
    monkeypatch.setattr(ActivationStore, "close", lambda self: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    engine_closed = []
    monkeypatch.setattr(optimizer._engine, "close", lambda close=optimizer._engine.close: engine_closed.append(close()))
    with pytest.raises(OSError):
        optimizer.close()
    assert len(engine_closed) == 1


def test_closing_ends_what_an_interrupt_left(config):
    model = tiny()
    optimizer = sluice.offload(model, {**config, "activations": "nvme"}, units=[Block])
    handle = model.blocks[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        model(*batch(0))
    handle.remove()
    optimizer.close()
    assert_no_hook(optimizer.activations)


def test_programs_that_call_parts_of_the_model(config):
    """A step whose forward was not the model's own is warned of once; the program's own context keeps its tensors."""
    model = Tiny(layers=5)
    optimizer = sluice.offload(model, {**config, "activations": "nvme"}, units=[Block])

    def step():
        x = model.embedding(batch(0)[0])
        for block in model.blocks:
            x = block(x)
        x.square().mean().backward()
        optimizer.step()
    with pytest.warns(UserWarning, match=r"did not call the model's own forward.*optimizer.activations.hooks\(\)"):
        step()
    assert optimizer.activations.written_bytes == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        with optimizer.activations.hooks():
            step()
    assert optimizer.activations.written_bytes > 0
    optimizer.close()
    called = tiny()
    optimizer = sluice.offload(called, {**config, "activations": "nvme"}, units=[Block])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(called, optimizer, 2)
    optimizer.close()


def test_homes(config):
    optimizer = sluice.offload(tiny(), {**config, "activations": "host"}, units=[Block])
    assert optimizer.activations is None
    optimizer.close()
    for home, error, words in (("recompute", sluice.ArgumentError, "torch.utils.checkpoint"),
                               ("drive", sluice.ConfigError, "'drive'; it has to be")):
        with pytest.raises(error, match=words):
            sluice.offload(tiny(), {**config, "activations": home}, units=[Block])
    hosted = {**config, "activations": "nvme", "placement": {"parameters": "host", "optimizer": "host"}, "storage": {}}
    with pytest.raises(sluice.ConfigError, match="storage.paths"):
        sluice.offload(tiny(), hosted, units=[Block])
    with pytest.raises(sluice.SluiceError, match="/nowhere"):
        sluice.offload(tiny(), {**hosted, "storage": {"paths": ["/nowhere"]}}, units=[Block])


def test_reads_begin_before_they_are_wanted(tmp_path):
    store = plain_store(tmp_path)
    packed = [store._pack(torch.full((2048,), float(i))) for i in range(9)]
    written = packed[:9 - KEPT]
    assert store.read_bytes == 0 and all(saved.read is None for saved in packed)
    store._unpack(packed[-1])  # is in memory; those before the newest begin to come
    assert [saved.number for saved in packed if saved.read is not None] == [6]
    store._unpack(packed[-2])
    assert [saved.number for saved in packed if saved.read is not None] == [5, 6]
    for i in reversed(range(len(written))):
        assert (store._unpack(written[i]) == i).all()
        assert [saved.number for saved in packed if saved.read is not None] == list(range(max(0, i - 2), i))
    assert store.read_bytes == store.written_bytes == len(written) * 2 * PAGE
    store.close()
