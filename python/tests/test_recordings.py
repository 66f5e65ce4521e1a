"""torch.compile that records CUDA graphs, which keep the addresses of parameters, is refused for an offloaded model, on every device."""

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, batch, tiny, train

WORDS = "records CUDA graphs.*Leave the mode out of torch.compile.*max-autotune-no-cudagraphs"
ASKING = [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}, {"mode": "reduce-overhead", "backend": "inductor"}]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    import torch._dynamo
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("arguments", [*ASKING, {"backend": "cudagraphs"}], ids=str)
def test_compiling_an_offloaded_model_so(config, arguments):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    name = next(iter(arguments))
    for ask in (lambda: torch.compile(model, **arguments), lambda: torch.compile(**arguments)(model), lambda: model.compile(**arguments),
                lambda: model.blocks[1].compile(**arguments), lambda: torch.compile(model.blocks[0].forward, **arguments)):
        with pytest.raises(sluice.ArgumentError, match=f"torch.compile of an offloaded (Tiny|Block): {name}=.*{WORDS}"):
            ask()
    train(model, optimizer, 1)  # nothing of it stays
    optimizer.close()


@pytest.mark.parametrize("arguments", ASKING, ids=str)
@pytest.mark.parametrize("where", ["model", "wrapper", "block", "forward"])
def test_offloading_a_model_that_is_compiled_so(config, where, arguments):
    model = tiny()
    block = model.blocks[1]
    if where == "model":
        model.compile(**arguments)
    elif where == "wrapper":
        model.blocks[1] = torch.compile(block, **arguments)
    elif where == "block":
        block.compile(**arguments)
    else:
        block.forward = torch.compile(block.forward, **arguments)
    named = "the model" if where == "model" else "blocks.1"
    with pytest.raises(sluice.ArgumentError, match=f"torch.compile of {named}.*{WORDS}"):
        sluice.offload(model, config, units=[Block])
    assert not hasattr(model, "_sluice")


@pytest.mark.parametrize("what", ["wrapper", "function"])
def test_what_was_compiled_so_before_is_refused_where_it_computes(config, what):
    """offload() sees the model, and not what the program has made of it. torch puts its own exception around that of a backend."""
    model = tiny()
    if what == "wrapper":
        compiled = torch.compile(model, mode="reduce-overhead")
    else:
        compiled = torch.compile(lambda *given: model(*given), mode="reduce-overhead")
    optimizer = sluice.offload(model, config, units=[Block])
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="ArgumentError: a compiled function.*records CUDA graphs"):
        compiled(*batch(0))
    optimizer.zero_grad()
    torch._dynamo.reset()
    train(model, optimizer, 1)
    optimizer.close()


def test_others_are_torchs(config):
    """Models that are not offloaded, and backends and modes without CUDA graphs."""
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    torch.compile(nn.Linear(2, 2), mode="reduce-overhead")
    torch.compile(lambda x: x, mode="reduce-overhead")
    torch.compile(model, mode="max-autotune-no-cudagraphs")
    torch.compile(model, options={"triton.cudagraphs": False})
    torch.compile(model)
    compiled = torch.compile(model, backend="eager", mode="reduce-overhead")
    compiled(*batch(0)).backward()
    optimizer.step()
    optimizer.close()
