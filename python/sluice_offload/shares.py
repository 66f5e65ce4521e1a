"""Which elements of a parameter this process updates: all of them; its local shard, where the parameter is a DTensor; or
one N-th, where N processes hold equal parameters. And the way back to tensors as the program knows them."""

import contextlib
import datetime
import hashlib
import logging
import sys
import time
from typing import Any, Iterable, Iterator, Optional

import torch
import torch.distributed as dist

from . import gpus
from .errors import ArgumentError

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # a torch that was built without torch.distributed
    DTensor = None  # type: ignore[assignment,misc]

logger = logging.getLogger("sluice_offload")

_BUCKET_BYTES = 32 << 20  # gathered at once: fewer are more messages, larger ones more memory
_ELEMENTS_AT_ONCE = 4 << 20  # looked at: fewer are more calls, more take more memory
_WORD_BYTES = 8  # of a checksum
_PARTS = 8  # of the gradients, one of which each step compares between the ranks
_PATIENCE_S = 60.0  # until a rank that waits for the others to read the state, too, says so
_last_number = 0  # of a group that this process is in


def _trainer_in(function: str) -> Any:
    """The Trainer of transformers in whose `function` this is called, if it reads the optimizer's state on the first rank alone; or None."""
    frame: Any = sys._getframe(1)
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != ("transformers.trainer", function):
        frame = frame.f_back
    trainer = None if frame is None else frame.f_locals.get("self")
    return None if getattr(getattr(trainer, "args", None), "save_on_each_node", True) else trainer


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    return DTensor is not None and isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's part of a tensor; shares memory."""
    return tensor.to_local() if is_distributed_tensor(tensor) else tensor  # type: ignore[attr-defined]


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A number by which equal tensors are equal, and others hardly ever; on the tensor's device. It adds words of 64 bits, which takes a
    twentieth of the time of words of 16 or 32."""
    if tensor.is_sparse:  # refused where it is used
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = local_of(tensor).detach().contiguous().view(-1)
    per_word = _WORD_BYTES // flat.itemsize
    if flat.numel() % per_word or flat.storage_offset() % per_word:  # as in a bucket of DistributedDataParallel's
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % per_word)])
    return flat.view(torch.int64).sum()


def sums_of_bits(tensors: "list[torch.Tensor]") -> "list[int]":
    """Those of all; few copies bring them from a GPU."""
    by_device: "dict[torch.device, list[int]]" = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    found: "dict[int, int]" = {}
    for places in by_device.values():
        found.update(zip(places, torch.stack([sum_of_bits(tensors[i]) for i in places]).tolist()))
    return [found[i] for i in range(len(tensors))]


def total_norm(gradients: "list[torch.Tensor]") -> torch.Tensor:
    """The norm of all elements, each counted once; the same bits as torch's clip_grad_norm_ takes in fp32. torch refuses tensors of
    several meshes, and plain tensors beside DTensors: here, the norms of each mesh's tensors are added up. torch's norm of 16-bit
    gradients has 16 bits; here it is one of fp32."""
    by_mesh: "dict[Any, list[torch.Tensor]]" = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_distributed_tensor(gradient) else None  # type: ignore[attr-defined]
        by_mesh.setdefault(mesh, []).append(gradient)
    norms: "list[Any]" = []
    for some in by_mesh.values():
        wide = [gradient for gradient in some if gradient.itemsize > 2]
        norms += [torch.nn.utils.get_total_norm(wide)] if wide else []
        norms += [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in some if gradient.itemsize <= 2]
    norms = [norm.full_tensor() if is_distributed_tensor(norm) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def are_finite(gradients: "list[torch.Tensor]") -> bool:
    return all(bool(torch.isfinite(local_of(gradient)).all()) for gradient in gradients)


def require_squares(values: torch.Tensor, words: str) -> None:
    """Raises ArgumentError for negative values, called `words`, which no update makes of squares. It makes infinity and NaN."""
    flat = values.detach().reshape(-1)
    for begin in range(0, flat.numel(), _ELEMENTS_AT_ONCE):
        piece = flat[begin:begin + _ELEMENTS_AT_ONCE].float()  # torch compares none of float8
        is_negative = piece < 0
        if is_negative.any():
            at = int(is_negative.byte().argmax())
            raise ArgumentError(f"{words} is {float(piece[at]):g} at element {begin + at}; it is made of squares, so it has to be at least 0. "
                                "Check where this state comes from")


class Share:
    """This process's elements of one parameter: [begin, end) of what is local, flattened."""

    def __init__(self, parameter: torch.Tensor, index: int, name: str, group: "Optional[ProcessGroup]") -> None:
        self.parameter, self.index, self.name = parameter, index, name
        count = local_of(parameter).numel()
        self.group = group
        self.begin, self.end = group.bounds(count, group.rank) if group else (0, count)
        self.dtype, self.shape, self.device = parameter.dtype, tuple(parameter.shape), parameter.device
        self.gpu = gpus.gpu_of(local_of(parameter))

    @property
    def count(self) -> int:
        return self.end - self.begin

    def check(self) -> None:
        """The parameter is still what it was when the optimizer was made; its memory may be another."""
        p = self.parameter
        if p.dtype != self.dtype or tuple(p.shape) != self.shape or p.device != self.device:
            raise ArgumentError(f"parameter {self.name} was {self.dtype} {self.shape} on {self.device} when the optimizer was "
                                f"made, and is {p.dtype} {tuple(p.shape)} on {p.device} now; make a new optimizer" +
                                (", and load this one's state_dict() into it" if tuple(p.shape) == self.shape else
                                 ", whose state begins anew, since this one's is of the other shape"))

    def placed_gradient(self) -> torch.Tensor:
        """The gradient, placed as the parameter is: tensor parallelism leaves sums to be made, as torch's optimizers do. Then every rank
        has to call it. Raises ArgumentError where an update cannot use it."""
        grad = self.parameter.grad
        assert grad is not None
        if grad.is_sparse or grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ArgumentError(f"the gradient of {self.name} is {'sparse' if grad.is_sparse else grad.dtype}; it has to be "
                                "dense, of fp32, bf16 or fp16")
        p: Any = self.parameter
        if is_distributed_tensor(p) != is_distributed_tensor(grad) or getattr(grad, "device_mesh", None) != getattr(p, "device_mesh", None):
            raise ArgumentError(f"the gradient of {self.name} is on {getattr(grad, 'device_mesh', 'no mesh')}, the parameter on "
                                f"{getattr(p, 'device_mesh', 'no mesh')}; make it a DTensor of that mesh, or a plain tensor where the "
                                "parameter is one, before step()")
        if is_distributed_tensor(grad) and grad.placements != p.placements:  # type: ignore[attr-defined]
            p.grad = grad = grad.detach().redistribute(placements=p.placements)  # type: ignore[attr-defined]
        return grad

    def copied_bytes(self) -> int:
        """Bytes that an update copies, since parameter or gradient is not contiguous, as in channels_last."""
        grad = self.parameter.grad
        tensors = [local_of(self.parameter), *([] if grad is None else [local_of(grad)])]
        return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())

    def gradient(self) -> torch.Tensor:
        """The local gradient, contiguous, whole."""
        return local_of(self.placed_gradient()).contiguous()

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """State of these elements as a tensor like the parameter. With a group, every rank has to call it."""
        if self.group:
            self.group.meet()
            values = self.group.gather_one(values, local_of(self.parameter).numel())
        values = values.view(local_of(self.parameter).shape)
        if not is_distributed_tensor(self.parameter):
            return values
        p: Any = self.parameter
        return DTensor.from_local(values.to(local_of(p).device), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    def check_like(self, values: Any, words: str) -> None:
        """Raises ArgumentError unless `values`, called `words`, is a tensor like the parameter."""
        if not isinstance(values, torch.Tensor):
            raise ArgumentError(f"{words} is of {type(values).__name__}; it has to be a tensor of shape {tuple(self.parameter.shape)}")
        if tuple(values.shape) != tuple(self.parameter.shape):
            raise ArgumentError(f"{words} has shape {tuple(values.shape)}, but the parameter has {tuple(self.parameter.shape)}")
        if values.is_meta or values.is_quantized or values.is_complex() or values.layout != torch.strided:
            kind = "on the meta device" if values.is_meta else f"{values.layout}, {values.dtype}"
            raise ArgumentError(f"{words} is a tensor {kind}; it has to be dense, of real numbers, with values")

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """The other way round: these elements of a tensor like the parameter."""
        self.check_like(values, f"the state of {self.name}")
        p: Any = self.parameter
        if is_distributed_tensor(p):
            given: Any = values
            if not is_distributed_tensor(given):
                given = distribute_tensor(given.detach(), p.device_mesh, p.placements, src_data_rank=None)
            elif given.placements != p.placements or given.device_mesh != p.device_mesh:
                given = given.redistribute(p.device_mesh, p.placements)
            values = given.to_local()
        return values.detach().reshape(-1)[self.begin:self.end]


class ProcessGroup:
    """Processes with equal parameters, each of which updates one N-th of every tensor."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._number: Optional[int] = None  # that the ranks' store knows it by
        self._meetings = self._together = self._votes = 0
        # A group of NCCL alone moves nothing that is in the CPU's memory.
        moves_on_cpu = "cpu:" in dist.get_backend_config(group)
        self._device = torch.device("cpu") if moves_on_cpu else torch.device("cuda", torch.cuda.current_device())

    def bounds(self, count: int, rank: int) -> "tuple[int, int]":
        return count * rank // self.size, count * (rank + 1) // self.size

    def agree(self, what: "list[Any]", words: str) -> None:
        """Raises on every rank if `what`, as text, differs between ranks."""
        digest = hashlib.sha256(repr(what).encode()).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self._device)
        every = torch.empty(self.size * own.numel(), dtype=torch.uint8, device=self._device)
        dist.all_gather_into_tensor(every, own, self.group)
        different = (every.view(self.size, -1) != every[:own.numel()]).any(dim=1).nonzero().flatten().tolist()
        if different:
            raise ArgumentError(f"{words}: rank {different[0]} and rank 0 of the process group differ; give shard=False where "
                                "ranks do not hold equal parameters, or process_group= of those that do")
        if self._number is None:
            self._take_number()

    def _take_number(self) -> None:
        """A number that no earlier group of any of these processes has; they may have been in different ones."""
        global _last_number
        number = torch.tensor([_last_number + 1], dtype=torch.int64, device=self._device)
        dist.all_reduce(number, dist.ReduceOp.MAX, self.group)
        self._number = _last_number = int(number)

    def agree_on_gradients(self, shares: "list[Share]") -> None:
        """Every rank has gradients of the same parameters, and the same gradients, since each rank updates its elements by its own. Looking at
        all of them takes 5 % of a step: each step looks at some, in turn, and the first at all. Ranks that do not reduce their gradients
        differ in each."""
        count = len(shares)
        present = [share.parameter.grad is not None for share in shares]
        gradients = [share.parameter.grad for share in shares if share.parameter.grad is not None]
        parts = min(_PARTS, len(gradients)) if self._votes else 1
        looked_at = gradients[self._votes % parts::parts] if gradients else []
        self._votes += 1
        total = sum((i + 1) * number for i, number in enumerate(sums_of_bits(looked_at))) & (1 << 62) - 1
        votes = torch.tensor([*present, *(not one for one in present), total, -total], dtype=torch.int64, device=self._device)
        dist.all_reduce(votes, dist.ReduceOp.MAX, self.group)
        found = votes.tolist()
        both = [i for i in range(count) if found[i] and found[count + i]]
        if both:
            raise ArgumentError(f"{', '.join(shares[i].name for i in both)} {'has a gradient' if len(both) == 1 else 'have gradients'} "
                                "on some ranks and none on others; nothing was updated. DistributedDataParallel with "
                                "find_unused_parameters=True gives all ranks the same")
        if found[-2] != -found[-1]:
            raise self._different([share for share in shares if share.parameter.grad is not None], gradients)

    def _different(self, shares: "list[Share]", gradients: "list[torch.Tensor]") -> ArgumentError:
        """The error of gradients that differ; every rank calls it."""
        sums = torch.tensor(sums_of_bits(gradients), dtype=torch.int64, device=self._device)
        votes = torch.stack([sums, ~sums])  # the greatest of ~x is that of the least x
        dist.all_reduce(votes, dist.ReduceOp.MAX, self.group)
        names = [shares[i].name for i in (votes[0] != ~votes[1]).nonzero().flatten().tolist()]
        others = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
        return ArgumentError(f"the gradients of {names[0]}{others} differ between the ranks, and each rank would update its part of the state "
                             "by its own; nothing was updated. Let DistributedDataParallel reduce them, with no_sync() around all but the "
                             "last backward() of a step. Where ranks are to train by gradients of their own, as with LocalSGD, give the "
                             "optimizer shard=False")

    def meet(self) -> None:
        """Returns when every rank has called it as often: a rank that reads the state alone gets an error instead of a collective call that
        no other rank makes. Inside of together() it returns at once."""
        if self._together:
            return
        if _trainer_in("_save_optimizer_and_scheduler") is not None:
            raise ArgumentError(f"{self._words_of_reading()}. Nothing was read")
        store = self._store()
        if store is None:
            return
        self._meetings += 1
        key = f"sluice_state/{self._number}/{self._meetings}"
        if store.add(key, 1) == self.size:
            store.set(f"{key}/all", "1")
            with contextlib.suppress(RuntimeError):  # not every store deletes
                store.delete_key(f"sluice_state/{self._number}/{self._meetings - 1}")
                store.delete_key(f"sluice_state/{self._number}/{self._meetings - 1}/all")
            return
        try:
            if self._wait(store, f"{key}/all"):
                return
        except BaseException:  # such as Ctrl-C: no other rank may take this one for there
            store.add(key, -1)
            self._meetings -= 1
            raise
        if store.add(key, -1) < self.size - 1 and not store.check([f"{key}/all"]):  # the last one may have come meanwhile
            self._meetings -= 1
            raise ArgumentError(f"{self._words_of_reading()}. Nothing was read")

    def _wait(self, store: Any, key: str) -> bool:
        """Until `key` is in the store. It does not wait quite as long as the group's own calls, whose end would end the process without a
        word of this. An interrupt (Ctrl-C) ends it."""
        begin, pause = time.monotonic(), 0.001
        end = begin + 0.9 * self._timeout_s(store)
        says_at = min(begin + _PATIENCE_S, end)
        while not store.check([key]):
            now = time.monotonic()
            if now >= end:
                return False
            if now >= says_at:
                logger.warning("%s; this one waits for %.0f s more", self._words_of_reading(), end - now)
                says_at = end
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    def _words_of_reading(self) -> str:
        return (f"rank {self.rank} of {self.size} reads the optimizer's state alone: it is sharded over the ranks, so every rank has to call "
                "state_dict(), or to read optimizer.state. The Trainer of transformers calls it on the first rank: there, give the optimizer "
                "shard=False, or args save_only_model=True")

    def warn_of_trainer(self) -> None:
        """Before the first update, instead of behind hours of them."""
        trainer = _trainer_in("train")
        if trainer is None or self.rank > 0:
            return
        saves = getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy) != "no" and not getattr(trainer.args, "save_only_model", False)
        if saves and getattr(getattr(trainer, "_save_optimizer_and_scheduler", None), "__module__", "") == "transformers.trainer":
            logger.warning("the state of this optimizer is sharded over %d ranks, and the Trainer's first checkpoint will fail: it reads the state "
                           "on the first rank alone. Give the optimizer shard=False, or args save_only_model=True or save_strategy=\"no\"",
                           self.size)

    def _timeout_s(self, store: Any) -> float:
        timeout = getattr(store, "timeout", datetime.timedelta(minutes=10))
        with contextlib.suppress(AttributeError, RuntimeError):  # not every backend tells it
            timeout = (self.group or dist.group.WORLD)._get_backend(self._device).options._timeout
        return float(timeout.total_seconds())

    def _store(self) -> Any:
        """The one by which the ranks of the group have found each other; None where torch does not tell it."""
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            return dist.distributed_c10d._world.pg_map[self.group or dist.group.WORLD][1]
        return None

    @contextlib.contextmanager
    def together(self) -> "Iterator[None]":
        """Around reads that all ranks make: they meet once."""
        self.meet()
        self._together += 1
        try:
            yield
        finally:
            self._together -= 1

    def gather_one(self, values: torch.Tensor, count: int) -> torch.Tensor:
        whole = torch.empty(count, dtype=values.dtype, device=values.device)
        begin, end = self.bounds(count, self.rank)
        whole[begin:end] = values
        self._gather([whole])
        return whole

    def gather(self, parameters: "Iterable[torch.Tensor]") -> None:
        """Every rank's elements of `parameters` go to all ranks."""
        bucket: "list[torch.Tensor]" = []
        for flat in parameters:
            if bucket and (flat.dtype != bucket[0].dtype or
                           sum(b.numel() for b in bucket) * flat.itemsize > _BUCKET_BYTES):
                self._gather(bucket)
                bucket = []
            bucket.append(flat)
        if bucket:
            self._gather(bucket)

    def _gather(self, bucket: "list[torch.Tensor]") -> None:
        lengths = [sum(end - begin for begin, end in (self.bounds(flat.numel(), rank) for flat in bucket))
                   for rank in range(self.size)]
        longest = max(lengths)
        own = torch.zeros(longest, dtype=bucket[0].dtype, device=self._device)
        own[:lengths[self.rank]] = torch.cat([flat[slice(*self.bounds(flat.numel(), self.rank))] for flat in bucket])
        every = torch.empty(self.size * longest, dtype=own.dtype, device=self._device)
        # As bytes: not every backend adds, but every one moves, any type.
        dist.all_gather_into_tensor(every.view(torch.uint8), own.view(torch.uint8), self.group)
        for rank in range(self.size):
            at = rank * longest
            for flat in bucket:
                begin, end = self.bounds(flat.numel(), rank)
                if rank != self.rank:
                    flat[begin:end] = every[at:at + end - begin]
                at += end - begin
