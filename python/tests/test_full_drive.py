"""activations: "nvme" on a full drive: the step fails, and gives everything back that it had."""

import copy
import errno
import gc
import os
import weakref

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import worst
from sluice_offload import activations, page_file
from sluice_offload.activations import KEPT, WRITES_AT_ONCE, ActivationStore
from test_activations import used_in_the_end

WIDTH, LAYERS = 64, 10
ROOM = 1 << 20  # bytes of the drive


@pytest.fixture
def full(monkeypatch):
    """Nothing can be written beyond ROOM."""
    original = os.pwritev

    def pwritev(descriptor, buffers, offset):
        if offset + sum(map(len, buffers)) > ROOM:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(descriptor, buffers, offset)
    monkeypatch.setattr(page_file.os, "pwritev", pwritev)


def step(model, optimizer, rows):
    loss = model(torch.ones(rows, WIDTH)).square().mean()
    loss.backward()  # this frame, and the loss in it, are in the traceback of its error
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_a_smaller_batch_works_behind_a_full_drive(config, full):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    reference = copy.deepcopy(model)
    given = [torch.optim.AdamW(net.parameters()) for net in (model, reference)]
    config["optimizer"], config["activations"] = {"clip_norm": 0}, "nvme"
    optimizer = sluice.offload(model, config, optimizer=given[0])
    store = optimizer.activations
    gc.collect()
    gc.disable()  # what only the collector finds would be there for long
    try:
        for _ in range(2):
            words = "cannot write activations.*No space.*zero_grad"
            with pytest.raises(sluice.StorageError, match=words) as caught:
                step(model, optimizer, 1024)
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.__cause__.errno == errno.ENOSPC
            assert store._files[0].end > ROOM
            del caught
            optimizer.zero_grad()
            assert not store._alive
            assert used_in_the_end(store) == 0 == store._files[0].end
            ours = [step(model, optimizer, 16) for _ in range(3)]
            assert worst(ours, [step(reference, given[1], 16) for _ in range(3)]) <= 2e-6
    finally:
        gc.enable()
    assert store.written_bytes > 0
    optimizer.close()


def test_tensors_that_cannot_be_written_leave_memory(tmp_path, monkeypatch, full):
    """Their graph lives on, until backward meets the failure."""
    taken = []

    def new_memory(nbytes, original=activations.new_memory):
        memory = original(nbytes)
        taken.append(weakref.ref(memory))
        return memory
    monkeypatch.setattr(activations, "new_memory", new_memory)
    store = ActivationStore([str(tmp_path)], "full", 0.0, True, lambda storage: False)
    x = torch.ones(ROOM // 2, requires_grad=True)
    gc.disable()
    try:
        with store.hooks():
            for _ in range(12):
                x = x.sin()
        store._threads.shutdown()  # behind all writes
        assert len(taken) == 12 and store._files[0].end > 4 * ROOM
        assert sum(memory() is not None for memory in taken) <= KEPT + WRITES_AT_ONCE
    finally:
        gc.enable()
    store.close()
