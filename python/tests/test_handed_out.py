"""Modules that return views of their own parameters, which their callers use when other modules have run, and what programs ask of
parameters without values. All is compared with the same model in memory."""

import collections
import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import sluice_offload as sluice
from conftest import Block, Tiny, adamw, batch, train, worst


class Table(nn.Module):
    """Gives rows of its table, as `view` makes them."""

    def __init__(self, values, view, is_trained=True):
        super().__init__()
        self.table, self.view = nn.Parameter(values, requires_grad=is_trained), view

    def forward(self, x):
        return self.view(self.table, x)


class Handed(Tiny):
    """Adds rows of a table behind its blocks, where a threshold is passed, in an order that is given by integers."""

    def __init__(self, view, is_trained=True):
        super().__init__(tied=False)
        self.table = Table(torch.randn(16, 32), view, is_trained)
        self.threshold = Table(torch.randn(1, 32), lambda t, x: t.expand(len(x), 12, -1), is_trained=False)
        self.order = Table(torch.randperm(32), lambda t, x: t[:32], is_trained=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens) + self.positions[:tokens.shape[1]]
        rows, threshold, order = self.table(x), self.threshold(x), self.order(x)
        for block in self.blocks:
            x = block(x)
        rows = getattr(rows, "rows", rows)
        if isinstance(rows, (list, tuple, dict)):
            rows = sum(rows.values() if isinstance(rows, dict) else rows)
        logits = self.head(self.norm((x + rows) * (x > threshold))[..., order])
        if labels is None:
            return logits, self.scale[None]
        return nn.functional.cross_entropy(logits.flatten(0, 1) * self.scale, labels.flatten())


def pair_of(config, reference, **options):
    model = copy.deepcopy(reference)
    return model, sluice.offload(model, config, **options)


@dataclasses.dataclass(frozen=True)
class Wrapped:
    rows: object


Rows = collections.namedtuple("Rows", "first second")
VIEWS = {
    "slice": lambda t, x: t[:12], "columns": lambda t, x: t[:, :1].t()[:, :12].t(), "expand": lambda t, x: t[:1].expand(len(x), 12, -1),
    "transpose": lambda t, x: t.t()[:, :12].mT, "detach": lambda t, x: t.detach()[:12], "data": lambda t, x: t.data[:12],
    "split": lambda t, x: t.split(1)[:2], "named": lambda t, x: Rows(t[:12], t[4:16]), "dict": lambda t, x: {"a": t[:12], "b": x.mean()},
    "object": lambda t, x: Wrapped(t[:12]), "list": lambda t, x: Wrapped([t[:12], x.mean()]), "scalar": lambda t, x: t[0, 0], "parameter": lambda t, x: t[None, :12].squeeze(0), "no_grad": lambda t, x: torch.no_grad()(lambda: t[:12])()}


@pytest.mark.parametrize("storage", ["swap", "copy"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_module_returns_a_view_of_its_parameter(config, view, storage):
    torch.manual_seed(0)
    reference = Handed(VIEWS[view], is_trained=view not in ("detach", "data", "no_grad"))  # torch updates none without a gradient
    model, optimizer = pair_of(config, reference, units=[Block], storage=storage)
    torchs = adamw(reference, config)
    with torch.no_grad():
        for actual, expected in zip(model(batch(9)[0]), reference(batch(9)[0])):
            assert torch.equal(actual, expected)
    expected, norms = train(reference, torchs, 3, clip_norm=1.0, micro_batches=2)
    actual, our_norms = train(model, optimizer, 3, micro_batches=2)
    assert worst(actual, expected) <= 2e-6 and worst(our_norms, norms) <= 2e-5
    for is_training in (False, True):  # behind the model's forward, too
        with torch.set_grad_enabled(is_training):
            for actual, expected in zip(model(batch(9)[0]), reference(batch(9)[0])):
                assert torch.allclose(actual * 2, expected * 2, rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()
    state = model.state_dict()
    for name in ("table.table", "threshold.table", "order.table", "scale"):
        assert torch.allclose(state[name], reference.state_dict()[name], rtol=1e-4, atol=1e-5)
    optimizer.close()


def test_a_view_of_a_module_that_is_called_alone(config):
    torch.manual_seed(0)
    reference = Handed(lambda t, x: t[:12])
    model, optimizer = pair_of(config, reference, units=[Block])
    x = torch.ones(2, 12, 32)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(model.table(x), reference.table(x)) and torch.equal(model.threshold(x), reference.threshold(x))
            assert model.threshold(x).untyped_storage().nbytes() == 4 * 32  # expanded, as the view is
    weight = torch.randn(12, 32)
    for one, its in ((reference, adamw(reference, config)), (model, optimizer)):
        (one.table(x) * weight).sum().backward()
        its.step()
        its.zero_grad()
    assert torch.allclose(model.state_dict()["table.table"], reference.table.table, atol=1e-5)
    optimizer.close()


def test_a_view_that_a_checkpoint_hands_out_again(config):
    class Checkpointed(Handed):
        def forward(self, tokens, labels):
            def part(x):
                rows = self.table(x)
                return self.blocks[1](self.blocks[0](x)) * rows.tanh() * rows

            x = checkpoint(part, self.embedding(tokens), use_reentrant=False)
            return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    reference = Checkpointed(lambda t, x: t[:12])
    model, optimizer = pair_of(config, reference, units=[Block])
    expected, norms = train(reference, adamw(reference, config), 2, clip_norm=1.0)
    actual, our_norms = train(model, optimizer, 2)
    assert worst(actual, expected) <= 2e-6 and worst(our_norms, norms) <= 2e-5
    optimizer.close()


def test_a_distribution_over_a_parameter(config):
    """Its scale is a view, whether the program reads it or not."""
    class Policy(Handed):
        def forward(self, tokens, labels=None):
            rows = self.table(self.embedding(tokens))
            return -rows.log_prob(torch.ones(())).mean() - rows.scale.mean()

    torch.manual_seed(0)
    reference = Policy(lambda t, x: torch.distributions.Normal(x, t[:12]))
    with torch.no_grad():
        reference.table.table.abs_().add_(1)
    model, optimizer = pair_of(config, reference, units=[Block])
    expected, norms = train(reference, adamw(reference, config), 2, clip_norm=1.0)
    actual, our_norms = train(model, optimizer, 2)
    assert worst(actual, expected) <= 2e-6 and worst(our_norms, norms) <= 2e-5
    optimizer.close()


def test_a_view_in_what_cannot_be_changed_is_refused(config):
    model, optimizer = pair_of(config, Handed(lambda t, x: {t[:12]}), units=[Block])
    for is_training in (False, True):
        with torch.set_grad_enabled(is_training), pytest.raises(sluice.ArgumentError, match=(
                r'module "table" returns a view of its parameters within a set, .*Return view.clone\(\)')):
            model(batch(0)[0])
        optimizer.zero_grad()
    optimizer.close()


def test_what_is_no_view_is_given_back_as_it_is(config):
    """A parameter itself, an input, and memory of a module's own."""
    kept = torch.ones(2, 12, 32)
    for view in (lambda t, x: t, lambda t, x: x, lambda t, x: (x, kept)):
        model, optimizer = pair_of(config, Handed(view), units=[Block])
        with torch.no_grad():
            found = model.table(kept)
        assert found is (model.table.table if isinstance(found, nn.Parameter) else kept) or found[0] is kept is found[1]
        optimizer.close()


@pytest.mark.parametrize("way", ["edge", "expand_as"])
def test_hooks_of_gradient_accumulators_run(config, way):
    torch.manual_seed(0)
    reference = Tiny(tied=False)
    model, optimizer = pair_of(config, reference, units=[Block])
    results, counts = [], []
    for one, its in ((reference, adamw(reference, config)), (model, optimizer)):
        calls, nodes = [], []
        for p in one.parameters():
            nodes.append(get_gradient_edge(p).node if way == "edge" else p.expand_as(p).grad_fn.next_functions[0][0])
            nodes[-1].register_prehook(lambda g, calls=calls: (calls.append(1), (g[0] * 0.5,))[1])
        assert {type(node).__name__ for node in nodes} == {"AccumulateGrad"}
        results.append(train(one, its, 2, clip_norm=0 if its is optimizer else 1.0))
        counts.append(len(calls))
    assert worst(results[1][0], results[0][0]) <= 2e-6 and worst(results[1][1], results[0][1]) <= 2e-5
    assert counts[0] == counts[1] > 0
    optimizer.close()


def test_a_hook_of_several_gradients_runs(config):
    torch.manual_seed(0)
    reference = Tiny(tied=False)
    model, optimizer = pair_of(config, reference, units=[Block])
    seen = []
    for one in (reference, model):
        handle = register_multi_grad_hook(list(one.parameters()), lambda gradients: seen.append([g.clone() for g in gradients]))
        one(*batch(0)).backward()
        handle.remove()
    assert len(seen) == 2 and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*seen, strict=True))
    optimizer.close()


def test_a_view_that_is_the_parameter_itself_stays_it(config):
    model, optimizer = pair_of(config, Tiny(), units=[Block])
    weight = model.norm.weight
    for same in (weight.flatten(), torch.atleast_1d(weight), weight.positive(), weight.real):
        assert same is weight or type(same).__name__ == "_UnlentView"
    assert isinstance(weight, nn.Parameter) and weight is dict(model.named_parameters())["norm.weight"]
    model(*batch(0)).backward()
    optimizer.step()
    assert isinstance(weight, nn.Parameter)
    optimizer.close()


def test_calls_that_copy_values_are_refused(config):
    model, optimizer = pair_of(config, Tiny(), units=[Block])
    weight = model.norm.weight
    for read in (lambda: weight.new_tensor(weight), lambda: weight.new_tensor([1.0, weight[0]]), lambda: weight.as_subclass(torch.Tensor),
                 lambda: weight.detach().as_subclass(torch.Tensor)):
        with warnings.catch_warnings(), pytest.raises(sluice.ArgumentError, match=r"reads norm.weight .*gathered\(model\)"):
            warnings.simplefilter("ignore")
            read()
    assert weight.new_tensor([1.0, 2.0]).tolist() == [1, 2] and weight.new_tensor(3).dtype == weight.dtype
    with sluice.gathered(model):
        assert type(weight.as_subclass(torch.Tensor)) is torch.Tensor and torch.equal(weight.as_subclass(torch.Tensor), torch.ones(32))
    optimizer.close()


@pytest.mark.parametrize("of", [lambda model: list(model.parameters()), lambda model: [model.blocks[1].mlp[1].weight, model.embedding.weight]],
                         ids=["all", "some"])
def test_backward_with_inputs(config, of):
    config["optimizer"]["weight_decay"] = 0  # the engine decays what gets no gradient, too
    torch.manual_seed(0)
    reference = Tiny(tied=False)
    model, optimizer = pair_of(config, reference, units=[Block])
    torchs = adamw(reference, config)
    for step in range(3):
        for micro in range(2):
            for one in (reference, model):
                loss = one(*batch(2 * step + micro))
                if micro:
                    torch.autograd.backward([loss], inputs=of(one))
                else:
                    loss.backward(inputs=of(one))
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for its in (torchs, optimizer):
            its.step()
            its.zero_grad()
        assert worst([optimizer.gradient_norm], [norm.item()]) <= 2e-5
    optimizer.close()


@pytest.mark.parametrize("options", [{}, {"materialize_grads": True}, {"allow_unused": True}], ids=["plain", "zeros", "unused"])
def test_gradients_that_are_asked_for(config, options):
    class Other(Tiny):
        def __init__(self):
            super().__init__(tied=False)
            self.unused = nn.Linear(4, 4) if options else None

    torch.manual_seed(0)
    reference = Other()
    model, optimizer = pair_of(config, reference, units=[Block])
    found = []
    for one in (reference, model):
        loss = one(*batch(0))
        found.append(torch.autograd.grad(loss, list(one.parameters()), **options))
        assert one.norm.weight.grad is None
    for actual, expected in zip(found[1], found[0], strict=True):
        assert (actual is expected is None) or torch.allclose(actual, expected, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(model(*batch(1)), reference(*batch(1)))
    optimizer.step()  # has no gradients, and changes nothing
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in model.state_dict().items())
    weight = model.blocks[0].norm.weight
    actual, expected = (torch.autograd.grad(one(*batch(0)), one.blocks[0].norm.weight)[0] for one in (model, reference))
    assert torch.allclose(actual, expected, atol=1e-6) and type(actual) is torch.Tensor and weight.grad is None
    optimizer.close()
