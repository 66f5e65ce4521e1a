"""The program of test_offload_ranks.py: one rank of offload(), started by torchrun or mpirun.
usage: offload_ranks.py FOLDER CASE... With torchrun's environment but for RANK, it becomes all of its ranks."""

import copy
import errno
import json
import os
import pathlib
import signal
import sys
import threading
import time
import zlib

import torch
import torch._dynamo  # by torch's optimizers; in all ranks at once
import torch.distributed as dist

import sluice_offload as sluice
from conftest import Block, adamw, batch, budgeted, moves_as_planned, tiny, without_keys, worst
from test_announced import Expert, Layer, Mixture
from test_mixed_types import Mixed, equal, mixed, states
from sluice_offload.engine import complete_config, plan
from sluice_offload.processes import find_world
from sluice_offload.units import find_units

RANK = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
SIZE = 2
ROWS = 4


def config_of(folder, stage, **storage):
    """Stages 1 and 2 keep all parameters in device memory."""
    return {"placement": {"parameters": "nvme" if stage == 3 else "device", "optimizer": "nvme"},
            "memory": {"device": "400KiB" if stage == 3 else "2MiB", "host": "4MiB"},
            "sharding": {"stage": stage, "timeout": 30, "keep_gathered": "0"},
            "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0, "weight_decay": 0.01, "beta2": 0.999,
                          "overlap": "serial"},
            "storage": {"paths": [str(folder)], "block_elements": 4096, **storage}, "run": {"threads": 1}}


def begin_group(folder):
    """torch's process group of all ranks, for one case. The launcher's store still holds the addresses of an earlier case's group,
    which gloo could take for this one's: so the addresses are in a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'addresses'}", rank=RANK, world_size=SIZE)


def halves(micro):
    """The double batch, and this rank's half."""
    tokens, labels = batch(micro, rows=SIZE * ROWS)
    own = slice(RANK * ROWS, (RANK + 1) * ROWS)
    return (tokens, labels), (tokens[own], labels[own])


def train(model, optimizer, first, steps, micro_batches=1):
    """This rank's losses, and the norms of all."""
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(micro_batches):
            loss = model(*halves(step * micro_batches + micro)[1]) / micro_batches
            loss.backward()
            losses.append(loss.item())
        asked = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()  # before step(), of all ranks
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.gradient_norm)
        assert asked == torch.tensor(norms[-1]).item()
        if step > first and not optimizer._is_durable:  # whose commits come on top
            moves_as_planned(optimizer, micro_batches)
    return losses, norms


def train_double(model, optimizer, first, steps, micro_batches=1):
    """The same by torch in one process: the losses of this rank's half, and the norms."""
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(micro_batches):
            both, own = halves(step * micro_batches + micro)
            with torch.no_grad():
                losses.append(model(*own).item() / micro_batches)
            (model(*both) / micro_batches).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def same_weights(model, reference, start):
    """As far apart as two orders of addition are: 1e-5 of the way."""
    moved = different = 0.0
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        different += without_keys(name, state[name] - value).double().square().sum().item()
        moved += without_keys(name, value - start[name]).double().square().sum().item()
    assert different ** 0.5 <= 1e-5 * moved ** 0.5, (different, moved)
    return (different / moved) ** 0.5


def refused(error, words, call):
    try:
        call()
    except error as failure:
        assert words in str(failure), failure
    else:
        raise AssertionError(words)


def case_stages(folder):
    """Two ranks give what one rank of the double batch gives. Each writes the optimizer's state of its half. At stage 3 the budgets are a
    quarter of a rank's state at most. At the others, all parameters are in device memory."""
    def made(seed=0):
        return tiny(seed, width=64, layers=10)
    for stage in (1, 2, 3):
        reference = made()
        start = copy.deepcopy(reference.state_dict())
        config = config_of(folder, stage)
        if stage == 3:
            budgeted(config, reference, 370, 160, SIZE)
        theirs = adamw(reference, config)
        model = made()
        optimizer = sluice.offload(model, copy.deepcopy(config), units=[Block])
        engine = optimizer._engine
        found = find_units(made(), [Block])
        alone = plan(complete_config(config, found), found)
        losses, norms = train(model, optimizer, 0, 3)
        assert optimizer.report.schedule_changes == 0  # learned in the first step, by both
        moved = (optimizer.report.nvme_read_bytes, optimizer.report.nvme_write_bytes)
        assert moved == engine.predicted_traffic() and 0 < moved[1] <= 0.52 * alone["nvme_write_bytes"], (moved, alone)
        assert sum(engine.world.exchange(moved[1])) >= alone["nvme_write_bytes"]
        expected, expected_norms = train_double(reference, theirs, 0, 3)
        for step in (3, 5):  # accumulation
            more, more_norms = train(model, optimizer, step, 2, micro_batches=2)
            theirs_more, theirs_norms = train_double(reference, theirs, step, 2, micro_batches=2)
            losses, norms = losses + more, norms + more_norms
            expected, expected_norms = expected + theirs_more, expected_norms + theirs_norms
            assert optimizer.report.schedule_changes == 0
        assert worst(losses, expected) <= 2e-6, (losses, expected)
        assert worst(norms, expected_norms) <= 2e-6, (norms, expected_norms)
        model.eval()
        with torch.no_grad():
            seen = model(halves(99)[1][0])
            assert torch.allclose(seen, reference(halves(99)[1][0]), rtol=0, atol=2e-5)
            with torch.no_grad():
                model.blocks[0](torch.zeros(1, 2, 64))  # an evaluation that uses a part of the model
        model.train()
        apart = same_weights(model, reference, start)
        if RANK == 0:  # the rows of docs/results/pytorch.md
            print(f"stage {stage}: losses {worst(losses, expected):.1e}, norms {worst(norms, expected_norms):.1e}, weights {apart:.1e}; "
                  f"read {moved[0]}, written {moved[1]} of {alone['nvme_read_bytes']}, {alone['nvme_write_bytes']}", flush=True)
        with sluice.gathered(model, model.norm):
            assert torch.equal(model.norm.weight, model.state_dict()["norm.weight"])
        other = made(seed=4).state_dict()  # other values for a model that is offloaded
        for net in (model, reference):
            net.load_state_dict(other)
        assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
        replaces = model.embedding._register_state_dict_hook(lambda _, state, prefix, __: state.update(
            {prefix + "weight": state[prefix + "weight"].clone()} if RANK == 1 else {}))  # the tied values, on one rank alone
        assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
        replaces.remove()
        assert worst(train(model, optimizer, 7, 2)[0], train_double(reference, theirs, 7, 2)[0]) <= 2e-6
        optimizer.close()


def case_resuming(folder):
    """Checkpoints, also into another stage, and a durable store."""
    store = folder / "run"
    for stage in (3, 1):
        model = tiny()
        optimizer = sluice.offload(model, config_of(folder, stage), units=[Block])
        train(model, optimizer, 0, 2)
        optimizer.save(store / str(stage), application=f"two {RANK}")
        expected = train(model, optimizer, 2, 2)
        optimizer.close()
        for other in (stage, 2):
            again = tiny(seed=5)
            resumed = sluice.offload(again, config_of(folder, other), units=[Block], restore=store / str(stage) / "latest")
            assert resumed.application == f"two {RANK}"
            assert train(again, resumed, 2, 2) == expected
            resumed.close()
    config = config_of(folder, 3, state={"name": "durable"})
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block], resume=True)
    assert optimizer.resumed_step is None
    whole = train(model, optimizer, 0, 2)[0]
    optimizer.close()
    model = tiny(seed=7)
    optimizer = sluice.offload(model, config, units=[Block], resume=True)
    assert optimizer.resumed_step == 2
    whole += train(model, optimizer, 2, 2)[0]
    optimizer.close()
    model = tiny()
    optimizer = sluice.offload(model, config_of(folder, 3), units=[Block])
    assert train(model, optimizer, 0, 4)[0] == whole
    optimizer.close()


def case_initialize(folder):
    """DeepSpeed's config counts the ranks: 16 = 4 sequences x 2 micro-batches x 2 ranks."""
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    deepspeed = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
                 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
                 "zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}}
    data = torch.utils.data.TensorDataset(torch.arange(40))
    engine, optimizer, loader, _ = sluice.initialize(model=tiny(), config=deepspeed, units=[Block], training_data=data)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size(), engine.world_size) == (2, 16, 2)
    assert (engine.global_rank, engine.local_rank) == (RANK, RANK)
    assert len(loader) == 5
    losses = []
    for micro in range(4):
        losses.append(engine.backward(engine(*halves(micro)[1])).item())
        engine.step()
    assert engine.global_samples == 32
    engine.save_checkpoint(folder / "engine", client_state={"epoch": 1})
    # A failure of rank 0 alone is one of both, and nothing waits.
    if RANK == 0:
        (folder / "engine" / "latest.new").mkdir()
        (folder / "not a folder").write_text("")
    for error, call in ((sluice.StorageError, lambda: engine.save_checkpoint(folder / "engine", tag="again")),
                        (FileExistsError, lambda: sluice.save_safetensors(engine.module, folder / "not a folder"))):
        try:
            call()
        except error:
            assert RANK == 0
        except sluice.RanksError as failure:
            assert RANK == 1 and f"rank 0 has failed: {error.__name__}" in str(failure), failure
        else:
            raise AssertionError(error)
    if RANK == 0:
        (folder / "engine" / "latest.new").rmdir()
    sluice.save_safetensors(engine.module, folder / "whole")
    path, client = engine.load_checkpoint(folder / "engine")
    assert path.endswith("global_step2") and client == {"epoch": 1}
    for micro in (4, 5):
        engine.backward(engine(*halves(micro)[1]))
        engine.step()
    assert (engine.global_steps, engine.global_samples) == (3, 48)
    engine.destroy()


def case_slow_saving(folder):
    """The drive takes longer for a file than ranks wait for each other, and has no room for another. The training goes on."""
    config = config_of(folder, 3)
    config["sharding"]["timeout"] = 1
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 0, 1)
    sync, count = os.fsync, 0

    def slow(descriptor):
        nonlocal count
        count += 1
        if count == 1 and RANK == 0:
            time.sleep(2.5)
        if count == 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)
    os.fsync = slow
    paths = sluice.save_safetensors(model, folder / "slow", max_shard_bytes=20000)
    values, expected = sluice.open_safetensors(folder / "slow"), model.state_dict()
    assert len(paths) > 2 and all(torch.equal(values[name], expected[name]) for name in values)
    if RANK == 0:
        count = 96
    try:
        sluice.save_safetensors(model, folder / "slow", max_shard_bytes=20000)
    except sluice.StorageError:
        assert RANK == 0
    except sluice.RanksError as failure:
        assert RANK == 1 and "rank 0 has failed: StorageError: cannot write" in str(failure), failure
    else:
        raise AssertionError("the drive had no room, and nothing was said")
    os.fsync = sync
    train(model, optimizer, 1, 1)
    optimizer.close()


def case_failing_saving(folder):
    """A rank that cannot read, or that is interrupted, ends the call on all at once, and ranks meet rarely. The training goes on."""
    config = config_of(folder, 3)
    config["sharding"]["timeout"] = 2
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(60)))
    optimizer = sluice.offload(model, config, units=[torch.nn.Linear])
    world, meetings = optimizer._engine.world, 0
    exchange, read, sync = world.exchange, optimizer._engine.read, os.fsync

    def step():
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer._engine.drain()

    def counted(own):
        nonlocal meetings
        meetings += own != [False, None]
        return exchange(own)

    def fails(member):
        values = read(member)
        if member.name.startswith("3."):
            raise MemoryError("no room")
        return values

    def slow(descriptor):
        if RANK == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(4)
        sync(descriptor)
    world.exchange = counted
    sluice.save_safetensors(model, folder / "many")
    assert meetings < 10, meetings
    values, expected = sluice.open_safetensors(folder / "many"), model.state_dict()
    assert all(torch.equal(values[name], expected[name]) for name in values)
    for failing, error, words in ((1, MemoryError, "rank 1 has failed: MemoryError: no room"), (0, KeyboardInterrupt, "rank 0 has failed: Keyb")):
        if failing == 0:
            os.fsync = slow
        elif RANK == 1:
            optimizer._engine.read = fails
        try:
            sluice.save_safetensors(model, folder / "many")
        except error:
            assert RANK == failing
        except sluice.RanksError as failure:
            assert RANK != failing and words in str(failure), failure
        else:
            raise AssertionError("nothing was said")
        optimizer._engine.read, os.fsync = read, sync
        step()
        assert RANK == 1 or [path.name for path in (folder / "many").iterdir()] == ["model.safetensors"]
    optimizer.close()


def case_refusals(folder):
    refused(sluice.ArgumentError, "has other values on rank 1 than on rank 0; build the model behind the same",
            lambda: sluice.offload(tiny(seed=RANK), config_of(folder, 3), units=[Block]))
    other = config_of(folder, 3)
    other["optimizer"]["beta2"] = 0.9 + 0.01 * RANK
    refused(sluice.RanksError, "differs between rank 0 and rank 1", lambda: sluice.offload(tiny(), other, units=[Block]))
    model = tiny()
    optimizer = sluice.offload(model, config_of(folder, 3), units=[Block])
    refused(sluice.RanksError, "tensors that get other values differs between rank 0 and rank 1",
            lambda: model.blocks[RANK].load_state_dict(tiny().blocks[RANK].state_dict()))
    optimizer._engine.destroy()
    late = config_of(folder, 3)
    late["sharding"]["timeout"] = 1
    model = tiny()
    optimizer = sluice.offload(model, late, units=[Block])
    train(model, optimizer, 0, 1)
    assert torch.nn.parallel.DistributedDataParallel(model) is model
    begin = time.monotonic()
    if RANK == 1:
        time.sleep(3)  # too late

    def waits_for_the_other():
        train(model, optimizer, 1, 1)
        optimizer._engine.drain()
    if RANK == 0:
        refused(sluice.RanksError, "rank 1 has not answered rank 0 in", waits_for_the_other)
        assert time.monotonic() - begin < 20
    optimizer._engine.destroy()


class Part(torch.nn.Module):
    """A part of a model that the program has divided, and a layer that both ranks have."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.own = torch.nn.Linear(16, 16)
        torch.manual_seed(7)
        self.shared = torch.nn.Linear(16, 16)

    def forward(self, x, uses_shared=True):
        loss = self.own(x).square().mean()
        return 30 * (loss + self.shared(torch.ones(2, 16)).square().mean() if uses_shared else loss)


def case_norm_group(folder):
    """Each rank trains its part alone, and clips by the norm of the whole, in which the shared layer counts once."""
    begin_group(folder)
    alone = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    parts = [Part(rank) for rank in range(SIZE)]
    whole = [*parts[0].parameters(), *parts[1].own.parameters()]
    model = Part(RANK)
    shared = list(model.shared.parameters())
    config = config_of(folder, 3)
    theirs = torch.optim.AdamW([{"params": [p for p in whole if p.dim() > 1], "weight_decay": 0.01},
                                {"params": [p for p in whole if p.dim() < 2], "weight_decay": 0.0}], lr=1e-3)
    refused(sluice.ArgumentError, "counted_elsewhere needs norm_group",
            lambda: sluice.offload(Part(0), config, process_group=alone, counted_elsewhere=shared))
    refused(sluice.ArgumentError, "no trained parameter of the model",
            lambda: sluice.offload(Part(0), config, process_group=alone, norm_group=dist.group.WORLD, counted_elsewhere=shared))
    optimizer = sluice.offload(model, config, process_group=alone, norm_group=dist.group.WORLD,
                               counted_elsewhere=model.shared.parameters() if RANK == 1 else ())
    assert optimizer._engine.world is None
    for step in range(4):
        for rank, part in enumerate(parts):
            part(x, uses_shared=rank == 0).backward()
        norm = torch.nn.utils.clip_grad_norm_(whole, 1.0).item()
        theirs.step()
        theirs.zero_grad()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert norm > 1 and abs(optimizer.gradient_norm / norm - 1) <= 2e-6, (step, optimizer.gradient_norm, norm)
    state = model.state_dict()
    for name, value in {**{f"own.{k}": v for k, v in parts[RANK].own.state_dict().items()},
                        **{f"shared.{k}": v for k, v in parts[0].shared.state_dict().items()}}.items():
        assert (state[name] - value).abs().max() <= 2e-6, name

    kind = sluice.ArgumentError if RANK == 0 else KeyboardInterrupt

    def fails(sums, **_):
        raise kind("the network is gone")
    kept, dist.all_reduce = dist.all_reduce, fails
    model(x).backward()
    try:
        optimizer.step()
        raise AssertionError("the sums have failed, and nothing was said")
    except kind as error:
        assert "the network is gone" in str(error)
    assert optimizer._walk.active is None
    optimizer.zero_grad()  # of a step that has ended there is nothing to abandon
    dist.all_reduce = kept
    optimizer._engine.destroy()
    dist.destroy_process_group()


def case_process_group(folder):
    """The last two of three ranks train one model. A rank outside of a group is refused."""
    global RANK
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    if RANK == 0:
        for name in ("process_group", "norm_group"):
            refused(sluice.ArgumentError, f"{name}: this process, rank 0 of 3, is not in that group",
                    lambda: sluice.offload(tiny(), config_of(folder, 3), units=[Block], **{name: group}))
    else:
        RANK -= 1  # which half is its own
        reference, model = tiny(), tiny()
        optimizer = sluice.offload(model, config_of(folder, 3), units=[Block], process_group=group)
        assert (optimizer._engine.world.rank, optimizer._engine.world.size) == (RANK, 2)
        losses, norms = train(model, optimizer, 0, 3)
        expected, expected_norms = train_double(reference, adamw(reference, config_of(folder, 3)), 0, 3)
        assert worst(losses, expected) <= 2e-6 and worst(norms, expected_norms) <= 2e-6
        optimizer.close()
        RANK += 1
    dist.barrier()
    dist.destroy_process_group()


def case_announced(folder):
    """Each rank's router sends its half to experts of its own choice. The gradient of one that no rank uses is zero."""
    class Routed(Layer):
        def forward(self, x):
            weights, chosen = torch.topk(self.router(x.mean(dim=(0, 1))).softmax(-1), 2)
            order = chosen.argsort()  # the model's
            self.ways.append(chosen[order].tolist())
            if self.announce is not None and not self.skips:
                self.announce(*(self.experts[i] for i in chosen.tolist()))
            return x + sum(weights[i] * self.experts[chosen[i]](x) for i in order.tolist())

    def make():
        model = Mixture()
        for layer in model.layers:
            layer.__class__ = Routed
        return model
    for stage in (1, 3):
        reference, model = make(), make()
        start = copy.deepcopy(reference.state_dict())
        theirs = adamw(reference, config_of(folder, stage))
        optimizer = sluice.offload(model, config_of(folder, stage), units=[torch.nn.Linear], announced=[Expert])
        for layer in model.layers:
            layer.announce = optimizer.announce
        for step in range(6):
            losses = []
            for micro in range(1 + step // 3):
                tokens, labels = batch(step + 100 * micro, rows=SIZE * ROWS)
                parts = [slice(rank * ROWS, (rank + 1) * ROWS) for rank in range(SIZE)]
                every = [reference(tokens[part], labels[part]) for part in parts]
                (sum(every) / SIZE / (1 + step // 3)).backward()
                loss = model(tokens[parts[RANK]], labels[parts[RANK]])
                (loss / (1 + step // 3)).backward()
                losses.append((loss.item(), every[RANK].item()))
            assert worst(*zip(*losses)) <= 2e-6, (step, losses)
            for parameter in reference.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
            theirs.step()
            theirs.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.report.schedule_changes == 0 or step % 3 == 0
            assert worst([optimizer.gradient_norm], [norm]) <= 2e-6
        same_weights(model, reference, start)
        ways = optimizer._engine.world.exchange([layer.ways for layer in model.layers])
        assert ways[0] != ways[1], "both ranks have chosen the same experts throughout, which tells nothing"
        with torch.no_grad():
            (_, own) = halves(99)
            assert worst([model(*own).item()], [reference(*own).item()]) <= 2e-6
        for layer in model.layers:
            layer.skips = True
        refused(sluice.ArgumentError, "is used without an announcement", lambda: model(*halves(3)[1]))
        optimizer._engine.world.exchange(None)
        optimizer._engine.destroy()


class Gather(torch.autograd.Function):
    """All ranks' x, one behind the other; in backward, each rank's part of the sum over the ranks."""
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[RANK]


class Combine(torch.autograd.Function):
    """This rank's part of the sum over the ranks; in backward, the other way round."""
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x[RANK]

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(SIZE)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.stack(parts)


class Spread(Layer):
    """This rank has some of the experts. It computes for the tokens of all ranks that are sent to those."""
    def forward(self, x):
        weights, chosen = torch.topk(self.router(x.mean(dim=(0, 1))).softmax(-1), 2)
        ways = torch.zeros(len(self.router.bias)).scatter(0, chosen, weights)
        self.ways.append(sorted(chosen.tolist()))
        every = Gather.apply(torch.cat([x.flatten(), ways]))
        xs, ways = every[:, :x.numel()].view(SIZE, *x.shape), every[:, x.numel():]
        used = [key for key in self.experts if ways[:, int(key)].any()]
        if self.announce is not None and used:
            self.announce(*(self.experts[key] for key in used))
        parts = []
        for rank in range(SIZE):
            part = xs[rank] * 0
            for key in used:
                if ways[rank, int(key)] != 0:
                    part = part + ways[rank, int(key)] * self.experts[key](xs[rank])
            parts.append(part)
        return x + Combine.apply(torch.stack(parts))


def spread(model, first):
    """The part of a rank that has every second expert, from `first` on."""
    for layer in model.layers:
        layer.__class__ = Spread
        layer.experts = torch.nn.ModuleDict({str(i): expert for i, expert in enumerate(layer.experts) if i % SIZE == first})
    return model


def case_local(folder):
    """Each rank has half of the experts, which the other knows nothing of. A checkpoint has all of them, also for ranks that have
    divided them in another way."""
    begin_group(folder)
    for stage in (1, 3):
        def train_both(reference, theirs, model, optimizer, steps):
            for step in steps:
                parts = [slice(rank * ROWS, (rank + 1) * ROWS) for rank in range(SIZE)]
                tokens, labels = batch(step, rows=SIZE * ROWS)
                every = [reference(tokens[part], labels[part]) for part in parts]
                (sum(every) / SIZE).backward()
                loss = model(tokens[parts[RANK]], labels[parts[RANK]])
                loss.backward()
                assert worst([loss.item()], [every[RANK].item()]) <= 2e-6, step
                for parameter in reference.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
                theirs.step()
                theirs.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
                assert worst([optimizer.gradient_norm], [norm]) <= 2e-6
                assert optimizer.report.schedule_changes == 0

        def check(model, reference):
            state, expected = model.state_dict(), reference.state_dict()
            assert sum("experts" in name for name in state) == 2 * sum("experts" in name for name in expected) / (2 * SIZE)
            moved = sum((expected[name] - start[name]).double().square().sum().item() for name in state)
            different = sum((state[name] - expected[name]).double().square().sum().item() for name in state)
            assert different ** 0.5 <= 1e-5 * moved ** 0.5, (different, moved)

        reference = Mixture()
        start = copy.deepcopy(reference.state_dict())
        theirs = adamw(reference, config_of(folder, stage))
        model = spread(Mixture(), RANK)
        optimizer = sluice.offload(model, config_of(folder, stage), units=[torch.nn.Linear], local=[Expert])
        for layer in model.layers:
            layer.announce = optimizer.announce if stage == 3 else None  # else each expert is announced when it is called
        train_both(reference, theirs, model, optimizer, range(3))
        check(model, reference)
        optimizer.save(folder / str(stage), application="spread")
        ways = [layer.ways for layer in model.layers]
        assert ways != optimizer._engine.world.exchange(ways)[1 - RANK], "both ranks' tokens went the same ways, which tells nothing"
        again = copy.deepcopy(reference), copy.deepcopy(theirs.state_dict())

        def saved_reference():
            reference = copy.deepcopy(again[0])
            theirs = adamw(reference, config_of(folder, stage))
            theirs.load_state_dict(copy.deepcopy(again[1]))
            return reference, theirs

        train_both(reference, theirs, model, optimizer, range(3, 5))
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.load_checkpoint(folder / str(stage) / "latest")  # which has the experts of both
        reference, theirs = saved_reference()
        train_both(reference, theirs, model, optimizer, range(3, 5))
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
        optimizer.close()
        for first in (RANK, 1 - RANK):
            other = spread(Mixture(), first)
            resumed = sluice.offload(other, config_of(folder, 4 - stage), units=[torch.nn.Linear], local=[Expert],
                                     restore=folder / str(stage) / "latest")
            assert resumed.application == "spread"
            reference, theirs = saved_reference()
            train_both(reference, theirs, other, resumed, range(3, 5))
            check(other, reference)
            if first == RANK:
                values = other.state_dict()
                assert all(torch.equal(values[name], value) for name, value in saved.items())
            resumed.close()
    model = Mixture()
    refused(sluice.ArgumentError, "ranks 0 and 1 both have a module layers.0.experts.0; give",
            lambda: sluice.offload(model, config_of(folder, 3), units=[torch.nn.Linear], local=[Expert]))
    refused(sluice.ArgumentError, "local=['Specialist'] names no module",
            lambda: sluice.offload(model, config_of(folder, 3), units=[torch.nn.Linear], local=["Specialist"]))
    dist.barrier()
    dist.destroy_process_group()


def case_mixed(folder):
    """Parameters of fp32 and bf16: the stages give the same bits, each rank the same values in the parameters' types."""
    found = []
    for stage in (1, 2, 3):
        model = mixed()
        config = config_of(folder, stage)
        config["memory"] = {"device": "4MiB", "host": "8MiB"}
        optimizer = sluice.offload(model, config, units=[Mixed])
        losses, norms = train(model, optimizer, 0, 4)
        values = model.state_dict()
        assert {name: value.dtype for name, value in values.items()} == {name: p.dtype for name, p in mixed().state_dict().items()}
        sums = [zlib.crc32(values[name].view(torch.uint8).numpy()) for name in sorted(values)]
        assert all(other == sums for other in optimizer._engine.world.exchange(sums))
        found.append((losses, norms, sums, states(optimizer)))
        optimizer.close()
    for losses, norms, sums, state in found[1:]:
        assert losses == found[0][0] and norms == found[0][1] and sums == found[0][2] and equal(state, found[0][3])


def case_torch(folder):
    """The program's own process group brings the ranks together."""
    begin_group(folder)
    case_resuming(folder)
    case_failing_saving(folder)
    dist.destroy_process_group()


def main():
    if "WORLD_SIZE" in os.environ and "RANK" not in os.environ:
        return fork_ranks(int(os.environ["WORLD_SIZE"]))
    run_rank()
    return 0


def fork_ranks(size):
    """torch is imported once for all of them. Returns whether a rank has failed."""
    global RANK
    ranks = []
    for RANK in range(size):
        if (child := os.fork()) == 0:
            os.environ["RANK"] = str(RANK)
            run_rank()
            os._exit(0)
        ranks.append(child)
    return any([os.waitpid(child, 0)[1] for child in ranks])


def run_rank():
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[1])
    for name in sys.argv[2:]:
        own = folder / name
        os.makedirs(own, exist_ok=True)
        globals()[f"case_{name}"](own)
        print(f"passed: {name} on rank {RANK}", flush=True)


sys.exit(main())
