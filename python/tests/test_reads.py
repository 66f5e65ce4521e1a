"""Weights that a module reads of another one without calling it (reads.py): the output embedding in fused heads, and layers below
adapters."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice_offload as sluice
from conftest import Block, Tiny, adamw, batch, train, worst
from sluice_offload.errors import error_of


class Headed(Tiny):
    """As models of transformers. `way`: how the forward comes to the logits."""
    way = "call"

    def __init__(self, **options):
        super().__init__(**options)
        self.positions = None

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self._logits(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def _logits(self, x):
        if self.way == "call":
            return self.head(x)
        if self.way == "ask":
            return self.head(x.to(self.head.weight.dtype))
        if self.way == "checkpoint":
            return checkpoint(lambda x: x @ self.head.weight.t(), x, use_reentrant=False)
        head = self.get_output_embeddings()  # as TRL and Liger
        x = x.to(head.weight.device)
        return torch.cat([x[:, begin:begin + 5] @ head.weight.t() for begin in range(0, x.shape[1], 5)], 1)


class Within(nn.Module):
    """Goes past the hooks of the model inside, as peft's LoraModel."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels):
        return self.model.forward(tokens, labels)["loss"]


def headed(way, seed=0, is_frozen=False, **options):
    torch.manual_seed(seed)
    model = Headed(**options)
    model.way = way
    if is_frozen:
        model.head.weight.requires_grad_(False)
        model.embedding.weight.requires_grad_(False)
    return Within(model)


def trained(config, way, **options):
    """Losses, the bytes of the last step and its changes of the schedule."""
    model = headed(way, **options)
    optimizer = sluice.offload(model, config, units=[Block])
    with torch.no_grad():
        first = model(*batch(0)).item()
    losses, _ = train(model, optimizer, 3, micro_batches=2)
    report = optimizer.report
    optimizer.close()
    return [first, *losses], (report.nvme_read_bytes, report.nvme_write_bytes), report.schedule_changes


@pytest.mark.parametrize("options", [{"tied": False}, {"tied": True}, {"tied": True, "is_frozen": True}], ids=["untied", "tied", "frozen"])
def test_a_head_whose_weight_the_model_reads(config, options):
    """Its losses are torch's, evaluation before the first step included, and it moves the bytes of a head that is called."""
    reference = headed("read", **options)
    expected = [reference(*batch(0)).item(), *train(reference, adamw(reference, config), 3, clip_norm=1.0, micro_batches=2)[0]]
    _, bytes_of_call, _ = trained(config, "call", **options)
    for way in ("read", "checkpoint", "ask"):
        losses, moved, changes = trained(config, way, **options)
        assert worst(losses, expected) <= 2e-6, way
        assert (moved, changes) == (bytes_of_call, 0), way


class BaseTunerLayer:
    """By its name one of peft's adapters."""

    def get_base_layer(self):
        return self.base_layer


class Scaled(nn.Module):
    """A trained part of an adapter that reads the layer below, as DoRA's."""

    def __init__(self, base):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(base.weight.shape[0], 1))
        self.shift = nn.Parameter(torch.zeros(base.weight.shape[0]))

    def forward(self, x, base):
        return nn.functional.linear(x, self.weight * base.weight / base.weight.norm(), self.shift)


class Adapter(nn.Module, BaseTunerLayer):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.own = Scaled(base)
        self.delta = nn.ParameterDict({"default": nn.Parameter(torch.zeros(base.weight.shape[1]))})

    def forward(self, x):
        return self.own(x, self.base_layer) + (x * self.delta["default"]) @ self.base_layer.weight.t()


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_adapters_that_read_the_layer_below(config, is_checkpointed):
    def made():
        torch.manual_seed(0)
        model = Tiny(layers=2, tied=False)
        model.head = Adapter(model.head)
        model.blocks[0].mlp[1].weight.requires_grad_(False)  # so that modules have two leases
        if is_checkpointed:
            inner = model.head.forward
            model.head.forward = lambda x: checkpoint(inner, x, use_reentrant=True)
        return model
    reference, model = made(), made()
    optimizer = sluice.offload(model, config, units=[Block])
    expected, _ = train(reference, adamw(reference, config), 3, clip_norm=1.0, micro_batches=2)
    losses, _ = train(model, optimizer, 3, micro_batches=2)
    assert worst(losses, expected) <= 2e-6
    optimizer.close()


def test_the_reason_comes_before_the_remedies():
    """In the first step, a smaller learning rate helps nothing."""
    text = str(error_of(11, "the gradient of \"a\" is not finite at element 0 in step 1; nothing was updated. Lower the learning rate, or set "
                            "optimizer.non_finite to \"skip\""))
    assert "updated. Where this is the first step" in text and "gathered(model)" in text
    assert text.endswith("If the losses were finite, lower the learning rate, or set optimizer.non_finite to \"skip\"")
