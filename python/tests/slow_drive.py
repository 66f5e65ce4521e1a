"""Programs of test_slow_drive.py, which run over the drive that slow_drive.c imitates:

    slow_drive.py modes FOLDER       trains in each mode of sluice_offload.optim under a trace, and prints JSON with what the
                                     trace counts
    slow_drive.py interrupt FOLDER   interrupts a forward while the drive does not answer
    slow_drive.py announced FOLDER   the same in the acquire of an announced unit
    slow_drive.py broken FOLDER      trains over a drive that fails in forward, backward and step(), and prints JSON with what was raised;
                                     ends by an error that it does not catch
"""

import copy
import json
import os
import pathlib
import signal
import struct
import sys
import threading
import time

import torch

import sluice_offload as sluice
from conftest import Block, adamw, batch, budgeted, tiny, train
from sluice_offload import optim
from test_announced import Expert, Mixture, train_torch
from test_optim_modes import Wide

ADAM = 4  # docs/tracing.md
CLOCK_NS = 1_000_000  # a trace's clock and Python's agree better than that


def config(folder, **more):
    return {"placement": {"optimizer": "nvme"}, "memory": {"host": "2MiB"},
            "storage": {"paths": [folder], "backend": "threads", "block_elements": 16384}, **more}


def updates_of(path):
    """(begin, end, step, bytes) of each update in a trace file, whose layout docs/tracing.md has."""
    data = pathlib.Path(path).read_bytes()
    found, at = [], 0
    while at < len(data):
        magic, kind, count, payload = struct.unpack_from("<8sII32xQ", data, at)
        assert magic == b"STRACE1\n", (magic, at)
        for i in range(count if kind == 1 else 0):
            begin, end, size, step, what = struct.unpack_from("<QQ16xQQ12xB", data, at + 64 + 64 * i)
            if what == ADAM:
                found.append((begin, end, step, size))
        at += 64 + payload
    return found


def count(folder, name, steps=4, **options):
    """Per step from the second on, the bytes of all updates, of those that began before backward ended, and of those that ended
    after step() had returned."""
    model = Wide()
    modules = {"modules": model} if "overlap" in options else {}
    backward_ended, step_returned = [], []
    path = os.path.join(folder, name + ".trace")
    with sluice.trace(path):
        ours = optim.AdamW(model.parameters(), lr=1e-3, config=config(folder), **options, **modules)
        for _ in range(steps):
            model(torch.ones(4, 512)).sum().backward()
            backward_ended.append(time.monotonic_ns())
            ours.step()
            step_returned.append(time.monotonic_ns())
            ours.zero_grad()
        ours.close()
    every = updates_of(path)
    counts = []
    for step in range(2, steps + 1):
        own = [update for update in every if update[2] == step]
        counts.append({"all": sum(size for _, _, _, size in own),
                       "before backward ended": sum(size for begin, _, _, size in own if begin < backward_ended[step - 1] - CLOCK_NS),
                       "after step returned": sum(size for _, end, _, size in own if end > step_returned[step - 1] + CLOCK_NS)})
    return counts


def modes(folder):
    print(json.dumps({"step": count(folder, "step"), "backward": count(folder, "backward", gradients="backward"),
                      "forward": count(folder, "forward", overlap="forward")}))


def interrupted(where, body):
    """Runs `body` until Ctrl-C, which comes every second once the drive does not answer: every second, since Python prints an
    exception in a callback and goes on. Whatever happens, the drive answers afterwards, as the end of the program waits for it."""
    hold = pathlib.Path(os.environ["SLOW_DRIVE_HOLD"])
    is_over = threading.Event()

    def interrupt():
        while not is_over.wait(1.0):
            if hold.exists():
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        body()
        sys.exit(f"{where}: no interrupt came")
    except KeyboardInterrupt:
        is_over.set()
        assert hold.exists(), "the drive has answered before"
    finally:
        is_over.set()
        thread.join()
        hold.unlink(missing_ok=True)


def settings_of(folder):
    return {"placement": {"parameters": "nvme", "optimizer": "nvme"}, "memory": {"device": "400KiB", "host": "4MiB"},
            "optimizer": {"learning_rate": 1e-3, "clip_norm": 1.0, "weight_decay": 0.01, "beta2": 0.999, "overlap": "serial"},
            "storage": {"paths": [folder], "backend": "threads"}}


def interrupt(folder):
    """Ends with the losses of a run without interrupts."""
    hold = os.environ["SLOW_DRIVE_HOLD"]
    settings = settings_of(folder)
    reference = tiny()
    model = copy.deepcopy(reference)
    expected, _ = train(reference, adamw(reference, settings), 4, clip_norm=1.0)
    optimizer = sluice.offload(model, settings, units=[Block])
    actual, _ = train(model, optimizer, 2)
    pathlib.Path(hold).touch()  # the reads of this forward do not return
    interrupted("forward", lambda: train(model, optimizer, 1, first=2))
    optimizer.zero_grad()
    assert optimizer._walk.active is None, "the step is not abandoned"
    actual += train(model, optimizer, 2, first=2)[0]
    optimizer.close()
    print(json.dumps({"expected": expected, "actual": actual}))


def announced(folder):
    """The same with experts. After the first interrupt the next forward follows at once, in the same step; after the second,
    zero_grad() abandons the step."""
    hold = pathlib.Path(os.environ["SLOW_DRIVE_HOLD"])
    reference = Mixture()
    model = copy.deepcopy(reference)
    expected = train_torch(reference, 4)
    optimizer = sluice.offload(model, settings_of(folder), units=[torch.nn.Linear], announced=[Expert])
    actual, _ = train(model, optimizer, 1)
    for abandons in (False, True):
        handles = [layer.router.register_forward_hook(lambda *_: hold.touch()) for layer in model.layers]
        interrupted("announced", lambda: train(model, optimizer, 1, first=1 + abandons))
        assert optimizer._walk.announcements._coming, "no announced unit was waited for"
        for handle in handles:
            handle.remove()
        if abandons:
            optimizer.zero_grad()
            assert optimizer._walk.active is None, "the step is not abandoned"
        actual += train(model, optimizer, 1, first=1 + abandons)[0]
    actual += train(model, optimizer, 1, first=3)[0]
    optimizer.close()
    print(json.dumps({"expected": expected, "actual": actual}))


def fail(kind):
    """From now on the drive fails in that direction."""
    pathlib.Path(os.environ[f"SLOW_DRIVE_NO_{kind.upper()}"]).touch()


def mend():
    for kind in ("READS", "WRITES"):
        pathlib.Path(os.environ[f"SLOW_DRIVE_NO_{kind}"]).unlink(missing_ok=True)


def raised_by(call):
    """The class and the words of what it raises; None where it raises nothing."""
    try:
        call()
    except Exception as error:  # pylint: disable=broad-except
        return type(error).__name__, str(error)
    return None


def break_in(where, kind, folder):
    """A small training whose third step meets a drive that fails from `where` on. Returns the model, its optimizer and the place where
    the failure came out, with what it was; a program may go on from there as it likes."""
    model = tiny(width=128, layers=8)
    settings = budgeted(settings_of(folder), model, 1344, 1344)
    optimizer = sluice.offload(model, settings, units=[Block])
    train(model, optimizer, 2)
    loss = []
    for name, call in (("forward", lambda: loss.append(model(*batch(2)))), ("backward", lambda: loss[0].backward()), ("step", optimizer.step)):
        if name == where:
            fail(kind)
        found = raised_by(call)
        if found is not None:
            return model, optimizer, [name, *found]
    return model, optimizer, ["nowhere", "", ""]


def broken(folder):
    results = {}
    for where, kind in (("forward", "reads"), ("backward", "reads"), ("step", "reads"), ("step", "writes")):
        model, optimizer, first = break_in(where, kind, folder)
        again = [raised_by(call) for call in (lambda: model(*batch(3)), model.state_dict)]
        results[f"{where}, {kind}"] = {"first": first, "again": again, "close": raised_by(optimizer.close)}
        mend()
    for kind in ("reads", "writes"):
        model = Wide()
        ours = optim.AdamW(model.parameters(), lr=1e-3, config=config(folder))
        for _ in range(2):
            model(torch.ones(4, 512)).sum().backward()
            ours.step()
        model(torch.ones(4, 512)).sum().backward()
        fail(kind)
        results[f"optim, {kind}"] = {"first": ["step", *(raised_by(ours.step) or ("", ""))], "again": [raised_by(ours.step)],
                                     "close": raised_by(ours.close)}
        mend()
    print(json.dumps(results))
    sys.stdout.flush()
    model = tiny(width=128, layers=8)
    optimizer = sluice.offload(model, budgeted(settings_of(folder), model, 1344, 1344), units=[Block])
    train(model, optimizer, 2)
    loss = model(*batch(2))
    fail("reads")
    loss.backward()  # nothing catches this


if __name__ == "__main__":
    # A shell's background job ignores Ctrl-C, and with it all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    {"modes": modes, "interrupt": interrupt, "announced": announced, "broken": broken}[sys.argv[1]](sys.argv[2])
