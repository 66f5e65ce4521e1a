"""Values of safetensors files are of one model, whatever happens to the files' names meanwhile."""

import copy
import gc
import os
import pickle
import resource

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, tiny, train
from sluice_offload import files


def filled(model, folder, number, shard_bytes=16 << 10):
    model.load_state_dict({name: torch.full_like(value, number) for name, value in model.state_dict().items()})
    return sluice.save_safetensors(model, folder, shard_bytes)


def numbers_of(values, names=None):
    return {number for name in names or values for number in values[name].unique().tolist()}


@pytest.fixture
def model(config):
    made = tiny(layers=1)
    optimizer = sluice.offload(made, config, units=[Block])
    yield made
    optimizer.close()


def link(folder, name):
    os.symlink(name, folder / ".new")
    os.rename(folder / ".new", folder / "latest")


def test_files_that_are_replaced_meanwhile(model, tmp_path):
    paths = filled(model, tmp_path / "model", 1)
    values = sluice.open_safetensors(tmp_path / "model")
    one = sluice.SafetensorsValues(*paths)
    names = list(values)
    assert len(paths) > 2 and numbers_of(values, names[:2]) == {1}
    filled(model, tmp_path / "model", 2)
    assert numbers_of(values) == numbers_of(one) == numbers_of(copy.deepcopy(values)) == {1}
    assert numbers_of(sluice.open_safetensors(tmp_path / "model")) == {2}


def test_a_link_that_is_set_anew(config, tmp_path):
    model = tiny()
    optimizer = sluice.offload(model, config, units=[Block])
    train(model, optimizer, 1)
    optimizer.save(tmp_path / "run")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    values = sluice.open_safetensors(tmp_path / "run" / "latest")
    names = list(values)
    found = {name: values[name] for name in names[:len(names) // 2]}
    train(model, optimizer, 2, first=1)
    optimizer.save(tmp_path / "run", keep=1)
    optimizer.close()
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-000000003"]  # what was opened has no name any more
    found |= {name: values[name] for name in names[len(names) // 2:]}
    for name in names:
        assert torch.equal(found[name], before[name]), name


def test_a_link_that_is_set_anew_between_two_files(model, tmp_path, monkeypatch):
    for number in (1, 2):
        paths = filled(model, tmp_path / str(number), number)
    link(tmp_path, "1")
    original = sluice.SafetensorsValues._add

    def add(self, path):
        original(self, path)
        link(tmp_path, "2")
    monkeypatch.setattr(sluice.SafetensorsValues, "_add", add)
    assert numbers_of(sluice.open_safetensors(tmp_path / "latest")) == {1}
    link(tmp_path, "1")
    assert numbers_of(sluice.SafetensorsValues(*(tmp_path / "latest" / os.path.basename(path) for path in paths))) == {1}


def test_a_folder_that_is_saved_while_it_is_opened(model, tmp_path, monkeypatch):
    filled(model, tmp_path / "model", 1)
    original = files.SafetensorsValues

    def opening(*paths):
        filled(model, tmp_path / "model", 2)
        return original(*paths)
    monkeypatch.setattr(files, "SafetensorsValues", opening)
    with pytest.raises(sluice.ArgumentError, match="model was saved anew while its files were opened, .* open it again"):
        sluice.open_safetensors(tmp_path / "model")


def test_a_file_that_is_written_to_meanwhile(model, tmp_path):
    (path,) = filled(model, tmp_path / "model", 1, 1 << 30)
    values = sluice.open_safetensors(tmp_path / "model")
    (other,) = filled(model, tmp_path / "other", 2, 1 << 30)
    with open(other, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:  # in place, as other programs save
        file.write(content)
    with pytest.raises(sluice.SluiceError, match="model.safetensors was written anew after it was opened, so norm.weight .* open the files again"):
        values["norm.weight"]
    with open(path, "wb") as file:
        file.write(content[:100])
    with pytest.raises(sluice.SluiceError, match="has become shorter"):
        numbers_of(values)


def test_descriptors_go_with_the_object_and_are_not_all_taken(model, tmp_path, monkeypatch):
    paths = filled(model, tmp_path / "model", 1)

    def opened():
        gc.collect()
        return sum(os.path.realpath(f"/proc/self/fd/{number}") in paths for number in os.listdir("/proc/self/fd"))
    values = sluice.open_safetensors(tmp_path / "model")
    assert opened() == len(paths)
    del values
    assert opened() == 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    values = sluice.open_safetensors(tmp_path / "model")
    assert opened() == 1 and numbers_of(values) == {1}
    filled(model, tmp_path / "model", 2)
    with pytest.raises(sluice.SluiceError, match="was written anew after it was opened"):
        numbers_of(values)


def test_another_process_reads_the_same_files_or_none(model, tmp_path):
    filled(model, tmp_path / "model", 1)
    values = sluice.open_safetensors(tmp_path / "model")
    names = list(values)
    sent = pickle.dumps(values)
    assert numbers_of(pickle.loads(sent)) == {1}
    child = os.fork()
    if child == 0:  # reads from the same descriptors
        for _ in range(50):
            numbers_of(values)
        os._exit(0 if numbers_of(values) == {1} else 1)
    assert all(numbers_of(values, names) == {1} for _ in range(50))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    filled(model, tmp_path / "model", 2)
    with pytest.raises(sluice.SluiceError, match="was written anew after it was opened"):
        numbers_of(pickle.loads(sent))
