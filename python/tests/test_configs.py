"""Config files: what `sluice train` reads, Python reads, by the same reader."""

import pytest
import torch

import sluice_offload as sluice
from conftest import Block, batch, tiny

COMMENTED = """{
  // everything on the drive
  "placement": {"parameters": "nvme", /* the moments, too */ "optimizer": "nvme"},
  "memory": {"device": "400KiB", "host": "4MiB"},
  "optimizer": {"clip_norm": 0.5, "learning_rate": 2e-3},
  "storage": {"paths": ["%s"]},
  "precision": {"parameters": "fp32"}
}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sluice.json"
    path.write_text(COMMENTED % tmp_path, encoding="utf-8")
    return path


def test_files_with_comments(file):
    optimizer = sluice.offload(tiny(), str(file), units=[Block])
    assert optimizer.clip_norm == 0.5 and optimizer.param_groups[0]["lr"] == 2e-3
    optimizer.close()
    engine, optimizer, _, _ = sluice.initialize(model=tiny(), config=file, units=[Block])
    assert engine.gradient_clipping() == 0.5
    engine.destroy()


def test_keys_that_the_program_decides_are_named(file, caplog):
    text = file.read_text(encoding="utf-8")
    for changed, keys in ((text, None), (text.replace("2e-3", '2e-3, "schedule": "constant"'), None), (text.replace("2e-3", '2e-3, "warmup_steps": 100, "schedule": "linear", "schedule_steps": 1000'),
                                         "optimizer.schedule, optimizer.warmup_steps, optimizer.schedule_steps of the config: no effect"),
                          (text.replace("{\n", '{"batch": {"micro_batches": 2}, "trace": {"file": "t"}, "run": {"steps": 9, "threads": 1, '
                                        '"device": "cuda"},\n', 1), 'batch, trace, run.steps, run.device "cuda" of the config: no effect')):
        file.write_text(changed, encoding="utf-8")
        caplog.clear()
        with caplog.at_level("WARNING"):
            sluice.offload(tiny(), str(file), units=[Block]).close()
        assert keys in caplog.text if keys else "no effect" not in caplog.text
    file.write_text(text.replace("2e-3", '2e-3, "warmup_steps": 100, "schedule": "constant"'), encoding="utf-8")
    caplog.clear()
    with caplog.at_level("WARNING"):
        sluice.initialize(model=tiny(), config=str(file), units=[Block])[0].destroy()
    assert "no effect" not in caplog.text  # it follows them


def test_files_for_the_optimizer_alone(file, caplog):
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"optimizer": {' not in line), encoding="utf-8")
    parameter = torch.nn.Parameter(torch.ones(300))
    with caplog.at_level("WARNING"):
        optimizer = sluice.optim.AdamW([parameter], lr=0.1, config=file)
    assert "placement.parameters of the config has no effect here" in caplog.text
    parameter.grad = torch.ones(300)
    optimizer.step()
    assert (parameter < 1).all()
    optimizer.close()


@pytest.mark.parametrize("change, words", [
    (('"clip_norm"', '"clip_nrom"'), r"sluice.json:5:\d+: .*clip_nrom.*clip_norm"),
    (('"400KiB", "host"', '"400KiB" "host"'), r"sluice.json:4:\d+: "),
    (('0.5', '"half"'), r"sluice.json:5:\d+: "),
    (('2e-3}', '2e-3, "clip_norm": 1}'), r"sluice.json:5:\d+: .*twice"),
    (('// everything', '\0 everything'), "NUL"),
    (('"fp32"', '"\udcff"'), r"sluice.json:\d+:\d+: "),
])
@pytest.mark.parametrize("call", [
    lambda path: sluice.offload(tiny(), path, units=[Block]),
    lambda path: sluice.initialize(model=tiny(), config=path, units=[Block]),
])
def test_files_that_are_refused_with_their_place(file, change, words, call):
    file.write_text(file.read_text(encoding="utf-8").replace(*change), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(sluice.ConfigError, match=words):
        call(file)


@pytest.mark.parametrize("section", [{"timeout": "2m"}, {"timeout": None}, {"timeout": -1}, None])
def test_the_time_for_the_ranks_to_meet_is_checked(config, section):
    with pytest.raises(sluice.ConfigError, match='"sharding'):
        sluice.offload(tiny(), {**config, "sharding": section}, units=[Block])


def test_folders_and_files_that_are_not_there(tmp_path):
    with pytest.raises(OSError, match="gone.json"):
        sluice.offload(tiny(), tmp_path / "gone.json")
    model = tiny()
    with pytest.raises(IsADirectoryError):
        sluice.offload(model, tmp_path)
    assert torch.isfinite(model(*batch(0)))


@pytest.mark.parametrize("keywords, words", [
    ({"lr": -1}, "lr is -1; a learning rate is a number from 0 on"), ({"lr": float("nan")}, "lr is nan; a learning rate"),
    ({"lr": "1e-3"}, "lr is '1e-3'; a learning rate"), ({"units": Block}, "units is a list of classes of modules, or their names"),
    ({"units": "Block"}, "units is a list of .* and not 'Block'"), ({"units": [1]}, r"units is a list of .* and not \[1\]"),
    ({"announced": Block}, "announced is a list of classes"), ({"buffers": "*.scale"}, "buffers is a list of patterns of names")])
def test_arguments_are_checked_at_once(file, keywords, words):
    model = tiny()
    with pytest.raises(sluice.ArgumentError, match=words):
        sluice.offload(model, str(file), **{"units": [Block], **keywords})
    assert torch.isfinite(model(*batch(0)))


@pytest.mark.parametrize("given", [None, [1], 5])
def test_what_is_no_config(given):
    with pytest.raises(sluice.ConfigError, match=f"the config is of the type {type(given).__name__}; give a dictionary, or the path"):
        sluice.offload(tiny(), given)


@pytest.mark.parametrize("keyword, words", [
    ("betas", "offload.. takes no betas: set optimizer.beta1 and optimizer.beta2 in the config, or give optimizer="),
    ("weight_decay", "set optimizer.weight_decay in the config"),
    ("unit", "did you mean units?"),
    ("xyz", "it takes units, lr, values")])
def test_keywords_that_it_does_not_take(file, keyword, words):
    model = tiny()
    with pytest.raises(sluice.ArgumentError, match=words.replace("?", "[?]")):
        sluice.offload(model, str(file), **{keyword: 1})
    sluice.offload(model, str(file), units=[Block]).close()
