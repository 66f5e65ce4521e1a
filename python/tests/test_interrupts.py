"""Hard ends: interrupts (Ctrl-C), which Python raises behind a call in C, and optimizers that end while another thread uses them."""

import contextlib
import itertools
import threading
import weakref

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, batch, tiny, train
from sluice_offload.detached import _destroy_at_exit
from sluice_offload.engine import _close_at_exit


class Interrupting:
    """The library, and torch's swap of storages, with an interrupt behind call number `at`."""

    def __init__(self, library, at):
        self._library, self._left, self.interrupted = library, at, None

    def behind(self, name, function):
        def call(*arguments):
            result = function(*arguments)
            self._left -= 1
            if self._left == 0:
                self.interrupted = name
                raise KeyboardInterrupt
            return result
        return call

    def __getattr__(self, name):
        return self.behind(name, getattr(self._library, name))


@pytest.mark.parametrize("zeroes", [True, False])
def test_an_interrupt_behind_any_call_leaves_an_optimizer_that_goes_on(config, tmp_path, monkeypatch, zeroes):
    """With zero_grad() behind it as the guide says, and with a forward at once."""
    model, reference = tiny(layers=1), tiny(layers=1)
    optimizer = sluice.offload(model, config, units=[Block])
    engine, library = optimizer._engine, optimizer._engine._lib
    swap = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)  # a torch without it is interrupted in the others
    met = set()
    for at in itertools.count(1):
        engine._lib = Interrupting(library, at)
        try:
            with monkeypatch.context() as patched:
                if swap is not None:
                    patched.setattr(torch.UntypedStorage, "_swap_data_ptr_", engine._lib.behind("swap", swap))
                with torch.no_grad():
                    model(*batch(0))
                train(model, optimizer, 1, first=engine.applied_step())
            break
        except KeyboardInterrupt:
            met.add(engine._lib.interrupted)
        finally:
            engine._lib = library
        if zeroes:
            optimizer.zero_grad()
            made = 0 if optimizer.report is None else optimizer.report.step
            assert optimizer.state_dict()["sluice_updates"] == engine.applied_step() == made
            model.state_dict()
        else:
            model(*batch(0)).backward()
            optimizer.zero_grad()
    assert {"begin_inference", "end_inference", "begin_step", "raw_acquire", "raw_release", "finish_step", "next_note",
            *([] if swap is None else ["swap"])} <= met
    twin = sluice.offload(reference, config, units=[Block])
    train(reference, twin, engine.applied_step())
    expected = reference.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    optimizer.save(tmp_path / "saved")
    twin.close()
    optimizer.close()


class Meanwhile:
    """Runs something on another thread up to the middle of it."""

    def __init__(self, run):
        self._is_inside, self._goes_on, self._failures = threading.Event(), threading.Event(), []
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)

    def _run(self, run):
        try:
            run(self.middle)
        except BaseException as error:
            self._failures.append(error)

    def middle(self, *_):
        self._is_inside.set()
        self._goes_on.wait(60)

    def __enter__(self):
        self._thread.start()
        assert self._is_inside.wait(60)

    def __exit__(self, *_):
        self._goes_on.set()
        self._thread.join(60)
        assert not self._failures


@pytest.mark.parametrize("where", ["call", "forward"])
def test_an_engine_that_another_thread_uses_stays(config, where):
    """close() is refused, and the end of the program leaves the engine to the system."""
    model = tiny(layers=1)
    optimizer = sluice.offload(model, config, units=[Block])

    def in_a_call(middle):
        member = optimizer._walk.units.units[0].members[0]
        optimizer._engine.replace(lambda _: middle() or torch.zeros(member.parameter.shape), [member])

    def in_a_forward(middle):
        hook = model.blocks[0].register_forward_hook(middle)
        model(*batch(0)).backward()
        hook.remove()
        optimizer.step()

    with Meanwhile(in_a_call if where == "call" else in_a_forward):
        with pytest.raises(sluice.ArgumentError, match="another thread is in"):
            optimizer.close()
        _close_at_exit(weakref.ref(optimizer._engine))
    assert optimizer._engine.is_left
    optimizer._engine.is_left = False
    train(model, optimizer, 1)
    optimizer.close()
    with pytest.raises(sluice.ArgumentError, match="is closed"):
        optimizer.step()


def test_an_optimizer_that_another_thread_uses_stays_at_the_end(config):
    model = tiny(layers=1)
    optimizer = sluice.optim.AdamW(model.parameters(), config={"storage": config["storage"]})

    def in_a_call(middle):
        with optimizer._engine._alone():
            middle()
    with Meanwhile(in_a_call):
        _destroy_at_exit(weakref.ref(optimizer._engine))
    train(model, optimizer, 1)
    optimizer._engine._is_left = False
    _destroy_at_exit(weakref.ref(optimizer._engine))
    assert not optimizer._engine.is_open
    with contextlib.suppress(sluice.ArgumentError):
        optimizer.close()
