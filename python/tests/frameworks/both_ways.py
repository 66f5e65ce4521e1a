"""Trains a small model in memory and offloaded, with everything on NVMe, for tests that compare the losses."""

import contextlib

import torch

import sluice_offload as sluice

RATE = 1e-4


def _losses(model, loss_of, step):
    """Those of three steps, and of an evaluation. `loss_of` is called with the model and the number of its inputs."""
    losses = []
    model.train()
    for number in range(3):
        loss = loss_of(model, number)
        loss.backward()
        step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model, 5).item())
    return losses


def in_memory(model, loss_of):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)

    def step():
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return _losses(model, loss_of, step)


def offloaded(model, loss_of, folder):
    optimizer = sluice.offload(model, {
        "placement": {"parameters": "nvme", "optimizer": "nvme"}, "storage": {"paths": [str(folder)]},
        "optimizer": {"learning_rate": RATE, "weight_decay": 0, "beta2": 0.999, "clip_norm": 1.0, "clip_epsilon": 1e-6}})
    try:
        return _losses(model, loss_of, optimizer.step)
    finally:
        with contextlib.suppress(sluice.SluiceError):  # behind a failure
            optimizer.close()
