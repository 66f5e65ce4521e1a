"""Parameters that are read where their unit is not lent: a forward has them lent, whichever module computes with them; elsewhere
they are refused, and no NaN goes on in silence. Losses are compared with those of the same model in memory."""

import copy
import ctypes

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, Tiny, adamw, batch, hidden, moves_as_planned, tiny, train, worst


class Quantizer(nn.Module):
    """Looks up the nearest row of a codebook, which NaN would make the first one."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(16, width)

    def forward(self, x):
        with torch.no_grad():
            self.codes = torch.cdist(x, self.embedding.weight.detach().expand(len(x), -1, -1)).argmin(-1)
        rows = self.embedding(self.codes)
        return x + (rows - x).detach() + (rows - x.detach())


class Readers(Tiny):
    """Reads a codebook, the transpose of its embedding, made before other units are lent, and two weights of a unit, of which it also
    calls a part."""

    def __init__(self):
        super().__init__(tied=False)
        self.quantizer, self.head = Quantizer(32), None

    def forward(self, tokens, labels=None):
        table = self.embedding.weight.T
        x = self.quantizer(self.embedding(tokens) + self.positions[:tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        mlp = self.blocks[0].mlp
        x = mlp[0](x) + nn.functional.linear(nn.functional.linear(x, mlp[1].weight, mlp[1].bias).tanh(), self.blocks[2].mlp[1].weight.T)
        first, second = (self.blocks[i].mlp[3].weight for i in (0, 2))
        x = x + (x @ first @ second.T @ first @ second.T).tanh()  # in turns
        logits = self.norm(x) @ table.to(x.dtype)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture(params=["swap", "copy"])
def readers(config, request):
    torch.manual_seed(0)
    reference = Readers()
    reference.blocks[2].mlp[1] = nn.Linear(32, 128)
    reference.blocks[2].mlp[3] = nn.Linear(128, 32)
    reference.blocks[0].mlp[1] = nn.Linear(32, 128)
    reference.blocks[0].mlp[3] = nn.Linear(128, 32)
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block], storage=request.param)
    yield reference, model, adamw(reference, config), optimizer
    optimizer.close()


def test_a_forward_has_lent_what_it_reads(readers):
    reference, model, torchs, ours = readers
    expected, norms = train(reference, torchs, 4, clip_norm=1.0)
    actual, our_norms = train(model, ours, 4)
    assert worst(actual, expected) <= 2e-6 and worst(our_norms, norms) <= 2e-5
    assert torch.equal(model.quantizer.codes, reference.quantizer.codes) and len(reference.quantizer.codes.unique()) > 1
    assert ours.report.schedule_changes == 0
    with torch.no_grad():
        assert torch.equal(model(*batch(9)[:1]).argmax(-1), reference(*batch(9)[:1]).argmax(-1))
    assert hidden(model.embedding.weight)


class Head(nn.Linear):
    def forward(self, x):
        assert type(self.weight) is nn.Parameter  # nothing stands between torch and a module's own
        return super().forward(x)


class Views(Tiny):
    """Adds a view of a table that it has made before its blocks ran, and that of its head's weight, which fused heads read."""
    view = None

    def __init__(self):
        super().__init__(tied=False)
        self.table, self.head = nn.Embedding(12, 32), Head(32, 61, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens, labels=None):
        view, head = self.view(self.table.weight), self.head.weight.t()
        x = self.embedding(tokens) + self.table(torch.arange(tokens.shape[1]))
        self.table.weight.sum()
        later = self.table.weight.unsqueeze(0)  # of what is lent for that sum
        for block in self.blocks:
            x = block(x)
        logits = self.norm(later + x + view) @ head
        assert self.head.weight.dtype == torch.float32  # has it lent for the call
        logits = logits + self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("view", [
    lambda w: w[:12], lambda w: w[None, :12], lambda w: w.reshape(1, 12, 32), lambda w: w.unflatten(0, (1, 12)), lambda w: w.split(12)[0],
    lambda w: torch.stack(list(w.chunk(2))).flatten(0, 1), lambda w: torch.stack(list(w)), lambda w: w.data[:12], lambda w: w[torch.arange(12)],
    lambda w: w.sum() * 0 + w.view(1, 12, 32), lambda w: ctypes.c_float.from_address(w.data_ptr()).value])
def test_views_are_made_before_other_modules_run(config, view):
    torch.manual_seed(0)
    reference = Views()
    reference.view = view
    model = copy.deepcopy(reference)
    optimizer = sluice.offload(model, config, units=[Block])
    expected, norms = train(reference, adamw(reference, config), 2, clip_norm=1.0, micro_batches=2)
    actual, our_norms = train(model, optimizer, 2, micro_batches=2)
    assert worst(actual, expected) <= 2e-6 and worst(our_norms, norms) <= 2e-5
    with torch.no_grad():
        assert torch.equal(model(*batch(9)[:1]).argmax(-1), reference(*batch(9)[:1]).argmax(-1))
        with sluice.gathered(model):
            model(*batch(9)[:1])
            assert all(type(p) is nn.Parameter for p in model.parameters())
    optimizer.close()


def test_a_parameter_with_memory_of_its_own_is_torchs(config):
    model = tiny(tied=False)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = sluice.offload(model, config, units=[Block])
    optimizer.close()
    with pytest.raises(sluice.ArgumentError, match=r"sum\(\) reads norm.weight, whose optimizer is closed, and its values went with it"):
        model.norm.weight.sum()
    for name, p in model.named_parameters():
        p.data = values[name]
    assert model.norm.weight.sum() == 32 and type(model.norm.weight) is nn.Parameter
    assert torch.equal(copy.deepcopy(model.head.weight), values["head.weight"]) and type(model.head.weight) is nn.Parameter


@pytest.fixture
def pair(config):
    model = tiny(tied=False)
    optimizer = sluice.offload(model, config, units=[Block])
    yield model, optimizer
    optimizer.close()


def test_a_read_outside_of_the_forward_is_refused(pair):
    model, _ = pair
    weight, average = model.blocks[1].norm.weight, torch.zeros(32)
    view = weight.unsqueeze(0)
    for read in (lambda: weight.isnan(), lambda: weight.detach().norm(), lambda: weight.data.clone(), lambda: view + 1, lambda: float(weight[0]),
                 lambda: average.lerp_(weight, 0.1), lambda: torch.stack([average, weight]), lambda: weight.tolist(), lambda: weight.T.numpy(),
                 lambda: model.blocks[1].norm(torch.ones(32)), lambda: sum(p.square().sum() for p in model.parameters())):
        for is_training in (False, True):
            with torch.set_grad_enabled(is_training), pytest.raises(sluice.ArgumentError, match=r"reads .*gathered\(model\)"):
                read()
    for write in (lambda: weight.mul_(2), lambda: weight.data.copy_(average), lambda: nn.init.normal_(weight), lambda: view.zero_(),
                  lambda: weight.__setitem__(0, 1), lambda: torch.add(average, 1, out=weight)):
        with torch.no_grad(), pytest.raises(sluice.ArgumentError, match=r"would change blocks.1.norm.weight .*load_state_dict"):
            write()
    with sluice.gathered(model):
        assert (view == 1).all() and weight.detach().norm() == weight.data.square().sum().sqrt()
    assert hidden(weight)


def test_what_needs_no_values_is_answered(pair):
    model, _ = pair
    weight = model.blocks[1].norm.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, torch.Tensor) and weight.is_leaf and weight.is_contiguous()
    assert weight.data_ptr() == weight.detach().data_ptr() != 0
    assert (weight.dtype, weight.device, weight.shape, weight.requires_grad) == (torch.float32, torch.device("cpu"), (32,), True)
    assert (weight.numel(), weight.dim(), len(weight), weight.size(0), weight.element_size(), weight.nbytes) == (32, 1, 32, 32, 4, 128)
    assert weight.is_floating_point() and torch.is_tensor(weight) and weight.type() == "torch.FloatTensor" and weight.grad is None
    assert weight.to("cpu") is weight.float() is weight.contiguous() is weight.to(torch.float32) is weight.requires_grad_() is weight
    for made in (torch.zeros_like(weight), weight.new_zeros(32), torch.empty_like(weight).fill_(0)):
        assert type(made) in (torch.Tensor, nn.Parameter) and not made.any()
    plain = torch.zeros(32, dtype=torch.float64)
    assert plain.to(weight).dtype == plain.type_as(weight).dtype == torch.float32 and plain.view_as(weight).shape == plain.expand_as(weight).shape == (32,)
    assert "nan" in repr(weight) and {weight: 1}[weight] == 1 and any(weight is one for one in model.parameters())


class Beside(Block):
    """Reads a weight of another block, which is no part of it."""
    other = ()

    def forward(self, x):
        for block in self.other:
            assert block.norm.weight.dtype == torch.float32  # needs no values
            x = x * block.norm.weight
        return super().forward(x)


def test_a_read_without_room_names_what_helps(config):
    torch.manual_seed(0)
    reference = Tiny(block=Beside)
    model = copy.deepcopy(reference)
    model.blocks[1].other = (model.blocks[0],)
    optimizer = sluice.offload(model, config, units=[Beside])
    for is_training in (False, True):
        with torch.set_grad_enabled(is_training), pytest.raises(sluice.ArgumentError, match=(
                r'mul\(\) reads blocks.0.norm.weight in the forward of module "blocks.1", .* no room .* leases=2, .*units=')):
            model(*batch(0))
        optimizer.zero_grad()
    optimizer.close()


class Relative(Block):
    """As DeBERTa's layers: all get one parameter of another unit, of which they compute with views."""

    def forward(self, x, table):
        table = nn.functional.dropout(table, 0.0)  # which gives back its input
        return super().forward(x) + self.mlp[1](table[1:3].unsqueeze(0)).mean()


class Encoder(Tiny):
    def __init__(self):
        super().__init__(layers=4, block=Relative)
        self.relative = nn.Embedding(4, 32)

    def get_table(self):
        return self.relative.weight

    def forward(self, tokens, labels):
        x = self.embedding(tokens) + self.positions[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.get_table())
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Deberta(Encoder):
    def get_rel_embedding(self):
        return self.relative.weight

    get_table = get_rel_embedding


@pytest.mark.parametrize("kind, leases", [(Encoder, 2), (Encoder, 3), (Deberta, None)])
def test_many_units_read_a_parameter_of_another(config, kind, leases):
    torch.manual_seed(0)
    reference = kind()
    model = copy.deepcopy(reference)
    expected = train(reference, adamw(reference, config), 8, clip_norm=1.0)
    optimizer = sluice.offload(model, config, units=[Relative], leases=leases)
    losses, norms = train(model, optimizer, 8)
    assert worst(losses, expected[0]) <= 2e-6 and worst(norms, expected[1]) <= 1e-5
    moves_as_planned(optimizer)
    with torch.no_grad():
        assert abs(model(*batch(9)) - reference(*batch(9))) <= 1e-5
    optimizer.close()


@pytest.mark.parametrize("leases", [0, 1, True, 2.0, "2"])
def test_leases_are_a_number_that_the_model_needs(config, leases):
    model = tiny(tied=False)
    model.head.bias = nn.Parameter(torch.zeros(61))
    model.tail = nn.Linear(32, 61)
    model.tail.weight, model.tail.bias = model.embedding.weight, model.head.bias
    with pytest.raises(sluice.ArgumentError, match=rf"leases={leases!r}: give the number .*; tail has parameters in 2"):
        sluice.offload(model, config, units=[Block], leases=leases)


def test_the_model_itself_is_no_unit(config):
    for units in ([Tiny], [Tiny, Block], ["Tiny"]):
        with pytest.raises(sluice.ArgumentError, match="Tiny is the class of the model itself, which cannot be a unit"):
            sluice.offload(tiny(), config, units=units)
