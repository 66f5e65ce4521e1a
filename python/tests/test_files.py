"""Models that go to files and come from files tensor by tensor, with memory metered."""

import ctypes
import errno
import gc
import itertools
import json
import os
import re
import shutil

import pytest
import torch
from torch import nn

import sluice_offload as sluice
from conftest import Block, Tiny, batch, tiny
from sluice_offload.files import replace_file


class Counted(Tiny):
    """With buffers: one that is saved, and one that is not."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("count", torch.tensor([3, 5]))
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)


def counted(seed=0, **options):
    torch.manual_seed(seed)
    return Counted(**options)


def peak_bytes(work):
    """How much more memory the process had while `work` ran than before, at most."""
    def read(name):
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that an earlier test has freed would be used again, and not counted
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


def same_values(values, state, tied="head.weight"):
    assert set(values) == set(state) - {tied}
    for name in values:
        assert torch.equal(values[name], state[name]) and values[name].dtype == state[name].dtype, name


@pytest.mark.parametrize("number, remedy", [(errno.EDQUOT, "raise the quota"), (errno.EIO, "check the drive"), (errno.ENOSPC, "free space")])
def test_a_file_that_the_drive_refuses_is_named(config, tmp_path, monkeypatch, number, remedy):
    model = tiny()
    sluice.offload(model, config, units=[Block])
    (path,) = sluice.save_safetensors(model, tmp_path)
    with open(path, "rb") as file:
        before = file.read()

    def refuse(descriptor):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(sluice.StorageError, match=f"{re.escape(path)}.*{os.strerror(number)}; {remedy}"):
        sluice.save_safetensors(model, tmp_path)
    with open(path, "rb") as file:
        assert file.read() == before
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"]


def test_a_file_is_durable_with_its_name(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        sync(descriptor)

    def note_replace(source, target):
        done.append(("replace", os.path.basename(target)))
        replace(source, target)
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    replace_file(tmp_path / "latest", lambda file: file.write(b"global_step3"))
    assert done == [("sync", "latest.new"), ("replace", "latest"), ("sync", tmp_path.name)]
    assert (tmp_path / "latest").read_text() == "global_step3"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_sync_takes_files(tmp_path, monkeypatch, number):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "fsync", refuse)
    replace_file(tmp_path / "latest", lambda file: file.write(b"global_step3"))
    assert os.listdir(tmp_path) == ["latest"]


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20000])
def test_files_have_all_that_state_dict_has(config, tmp_path, shard_bytes):
    model = counted()
    expected = model.state_dict()
    optimizer = sluice.offload(model, config, units=[Block])
    folder = tmp_path / "saved"
    sluice.save_safetensors(model, folder, shard_bytes // 2)  # an older save, in other files
    paths = sluice.save_safetensors(model, folder, shard_bytes)
    assert sorted(str(path) for path in folder.iterdir() if path.suffix == ".safetensors") == sorted(paths)
    same_values(dict(sluice.named_values(model)), expected)
    assert (len(paths) == 1) == (shard_bytes == 1 << 30) != (folder / "model.safetensors.index.json").exists()
    values = sluice.open_safetensors(folder)
    floating = {name: value for name, value in expected.items() if value.is_floating_point()}
    same_values({name: values[name] for name in values if values[name].is_floating_point()}, floating)
    assert torch.equal(values["count"], expected["count"])
    with sluice.meta_parameters():
        empty = counted(seed=4)
    assert all(parameter.is_meta for parameter in empty.parameters()) and torch.equal(empty.scale, model.scale)
    other = sluice.offload(empty, config, units=[Block], values=values)
    with torch.no_grad():
        assert torch.equal(empty(batch(0)[0]), model(batch(0)[0]))
    other.close()
    optimizer.close()


def test_one_tensor_at_a_time_is_in_memory(config, tmp_path):
    config["memory"] = {"device": "8MiB", "host": "16MiB"}
    model = Tiny(width=512, layers=20, vocabulary=64, block=Wide)
    model_bytes = sum(p.numel() * 4 for p in model.parameters())
    largest = max(p.numel() * 4 for p in model.parameters())
    assert model_bytes > 12 * largest
    optimizer = sluice.offload(model, config, units=[Wide])
    folder = tmp_path / "saved"
    sluice.save_safetensors(model, folder)  # what torch and libraries allocate once
    slack = 6 << 20
    assert peak_bytes(lambda: sluice.save_safetensors(model, folder)) <= 2 * largest + slack
    assert peak_bytes(model.state_dict) >= 0.5 * model_bytes  # which is why
    optimizer.close()
    made = []

    def load():
        with sluice.meta_parameters():
            empty = Tiny(width=512, layers=20, vocabulary=64, block=Wide)
        made.append(sluice.offload(empty, config, units=[Wide], values=sluice.open_safetensors(folder)))
    assert peak_bytes(load) <= (8 << 20) + (16 << 20) + 3 * largest + slack < 0.8 * model_bytes
    made[0].close()


class Tabled(Tiny):
    """With as many bytes of buffers as of parameters."""

    def __init__(self, tables=20, **options):
        super().__init__(**options)
        for i in range(tables):
            self.register_buffer(f"table{i}", torch.full((1 << 10, 1 << 10), float(i)))


@pytest.mark.parametrize("on_meta", [False, True])
def test_one_buffer_at_a_time_is_read(config, tmp_path, on_meta):
    optimizer = sluice.offload(Tabled(), config, units=[Block])
    sluice.save_safetensors(optimizer._walk.model, tmp_path / "saved")
    optimizer.close()
    with torch.device("meta" if on_meta else "cpu"):
        model = Tabled()
    made = []
    used = peak_bytes(lambda: made.append(sluice.offload(model, config, units=[Block], values=sluice.open_safetensors(tmp_path / "saved"))))
    assert used <= (80 << 20) * on_meta + (48 << 20)  # all that is read would be 80 MiB more
    for i in range(20):
        assert (getattr(model, f"table{i}") == i).all()
    made[0].close()


class Wide(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_what_is_refused(config, tmp_path):
    model = counted()
    with pytest.raises(sluice.ArgumentError, match="is not offloaded"):
        sluice.save_safetensors(model, tmp_path)
    with pytest.raises(sluice.ArgumentError, match="has neither model.safetensors nor"):
        sluice.open_safetensors(tmp_path)
    optimizer = sluice.offload(model, config, units=[Block])
    model(*batch(0)).backward()
    with pytest.raises(sluice.ArgumentError, match="middle of a step"):
        sluice.save_safetensors(model, tmp_path)
    optimizer.step()
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(sluice.ArgumentError, match="odd is of torch.complex64.*nothing was written.*torch.save"):
        sluice.save_safetensors(model, tmp_path / "saved", 1000)
    assert not (tmp_path / "saved").exists()  # also no shard before the one with it
    optimizer.close()


def test_files_that_are_cut(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(sluice.ArgumentError, match="is not a safetensors file.*a lies beyond the end of the file"):
        sluice.open_safetensors(tmp_path)
    header = header.replace(b"[4]", b"[5]")
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(sluice.ArgumentError, match="a has 16 bytes, which is not the size of .5."):
        sluice.open_safetensors(tmp_path)


@pytest.mark.parametrize("before, after", [(16 << 10, 16 << 10), (16 << 10, 1 << 30), (1 << 30, 16 << 10)])
def test_a_save_that_stops_leaves_one_model_or_none(config, tmp_path, monkeypatch, before, after):
    """Wherever it stops. Where there is none, the index is missing: one over the files of two models would open."""
    model = tiny(layers=1)
    optimizer = sluice.offload(model, config, units=[Block])
    folder = tmp_path / "model"

    def save(number, shard_bytes):
        model.load_state_dict({name: torch.full_like(value, number) for name, value in model.state_dict().items()})
        sluice.save_safetensors(model, folder, shard_bytes)

    def found():
        values = sluice.open_safetensors(folder)
        return {number for name in values for number in values[name].unique().tolist()}

    def stopping(call, left):
        def stop(*arguments):
            if not left:
                raise InterruptedError
            left.pop()
            return call(*arguments)
        return stop

    met = set()
    for at in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        save(1, before)
        (folder / "model-00007-of-00009.safetensors.new").touch()  # of one that was killed
        left = [None] * at
        with monkeypatch.context() as patched:
            for name in ("replace", "fsync"):
                patched.setattr(os, name, stopping(getattr(os, name), left))
            try:
                save(2, after)
                break
            except sluice.StorageError:
                pass
        try:
            met.add(tuple(found()))
        except sluice.ArgumentError as error:
            assert "has neither" in str(error)
        assert len(list(folder.glob("*.new"))) <= 1
    assert (1,) in met and met <= {(1,), (2,)} and found() == {2} and not list(folder.glob("*.new"))
    optimizer.close()


def test_types_that_torch_lacks_stop_only_who_asks_for_them(config, tmp_path):
    model = counted()
    names = list(dict(model.named_parameters()))
    kinds = {"bytes": torch.uint16, "eighth": torch.float8_e4m3fn, "other": torch.float8_e5m2}
    for name, dtype in kinds.items():
        model.register_buffer(name, torch.arange(6).to(dtype))
    optimizer = sluice.offload(model, config, units=[Block])
    (path,) = sluice.save_safetensors(model, tmp_path)
    values = sluice.open_safetensors(tmp_path)
    for name, dtype in kinds.items():
        assert values[name].dtype == dtype and torch.equal(values[name].float(), torch.arange(6.0))
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(content.replace(b'"other": {"dtype": "F8_E5M2"', b'"other": {"dtype": "F4_NEW0"'))
    values = sluice.open_safetensors(tmp_path)
    assert set(names) <= set(values) and values["bytes"].dtype == torch.uint16
    with pytest.raises(sluice.ArgumentError, match="other is of F4_NEW0 in .*convert it to one of"):
        values["other"]
    before = model.state_dict()
    with torch.no_grad():
        model.count.zero_()
    with pytest.raises(sluice.ArgumentError, match="other is of F4_NEW0"):
        sluice.load_safetensors(model, tmp_path)
    assert not model.count.any() and torch.equal(model.state_dict()["norm.weight"], before["norm.weight"])
    optimizer.close()
