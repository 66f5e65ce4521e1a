"""The programs in examples/pytorch, as a reader would start them."""

import pathlib
import re
import runpy
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples/pytorch"


def run(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments, words", [
    (("train_lora.py", "--steps", "0"), "--steps: 0 is no whole number from 1 on"),
    (("train_experts.py", "text.txt", "--steps", "-1"), "--steps: -1 is no whole number from 1 on"),
    (("train_text.py", "text.txt", "--steps", "0"), "--steps: 0 is no whole number from 1 on"),
    (("train_text.py", "empty.txt"), "empty.txt has 0 bytes"), (("train_experts.py", "empty.txt"), "empty.txt is too short"),
    (("train_text.py", "missing.txt"), "missing.txt"), (("train_experts.py", "missing.txt"), "missing.txt"),
    (("train_text.py", "text.txt", "--in-memory", "--resume", "run"), "--resume goes on from the state on a drive")])
def test_arguments_that_cannot_be(monkeypatch, capsys, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("in the beginning was the word " * 200, encoding="ascii")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, capsys, *arguments)
    assert words in capsys.readouterr().err


def test_a_text_is_learned_from_storage_as_in_memory_and_after_a_break(monkeypatch, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("in the beginning was the word, and the word was written down " * 40, encoding="ascii")
    storage = ["--storage", tmp_path]
    expected = run(monkeypatch, capsys, "train_text.py", text, "--steps", 6, "--in-memory")
    offloaded = run(monkeypatch, capsys, "train_text.py", text, "--steps", 6, *storage)
    losses = [float(re.search(r"loss (\S+)", said).group(1)) for said in (expected, offloaded)]
    assert abs(losses[0] - losses[1]) <= 2e-5
    run(monkeypatch, capsys, "train_text.py", text, "--steps", 4, *storage, "--resume", "run")
    resumed = run(monkeypatch, capsys, "train_text.py", text, "--steps", 6, *storage, "--resume", "run")
    whole = run(monkeypatch, capsys, "train_text.py", text, "--steps", 6, *storage, "--resume", "whole")
    assert resumed.startswith("step    5  loss ")
    # The sample's random numbers go on from the seed alone: the same parameters give the same text.
    assert resumed.splitlines()[1:] == whole.splitlines()[1:] == offloaded.splitlines()[1:]


def test_experts_learn_from_storage_as_in_memory(monkeypatch, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {i % 97}th word was with the {i * i % 89}th; " for i in range(200)), encoding="ascii")
    arguments = ("train_experts.py", text, "--steps", 4)
    expected = run(monkeypatch, capsys, *arguments, "--in-memory")
    offloaded = run(monkeypatch, capsys, *arguments, "--storage", tmp_path)
    for name in ("loss", "held-out loss"):
        losses = [float(re.search(rf"{name} (\S+)", said).group(1)) for said in (expected, offloaded)]
        assert abs(losses[0] - losses[1]) <= 2e-5, name
    moved = [float(mebibytes) for mebibytes in re.search(r"read (\S+) MiB and wrote (\S+) MiB", offloaded).groups()]
    assert all(0 < mebibytes < 50 for mebibytes in moved), moved  # of a state of 101 MiB


def test_adapters_are_trained_and_frozen_weights_are_read_alone(monkeypatch, capsys, tmp_path):
    said = run(monkeypatch, capsys, "train_lora.py", "--storage", tmp_path, "--steps", 10)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", said)]
    assert losses[-1] < 0.5 * losses[0]
    frozen, trained, read, written = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", said.splitlines()[-1]))
    assert written <= 2 * 4 * trained < frozen  # a block's update may end in the report of the step before or after
    # A pass each in forward and backward, as far as none was kept, and what the host memory takes in for the next step.
    assert 4 * frozen < read <= 2 * 4 * (frozen + trained) + (12 << 20)


def test_adapters_beside_weights_of_8_bits(monkeypatch, capsys, tmp_path):
    said = run(monkeypatch, capsys, "train_lora.py", "--storage", tmp_path, "--steps", 10, "--quantized")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", said)]
    assert losses[-1] < 0.5 * losses[0]
    frozen, trained, read, written = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", said.splitlines()[-1]))
    assert written <= 2 * 4 * trained < frozen  # a block's update may end in the report of the step before or after
    assert frozen < read <= 2 * (1.05 * frozen + 4 * trained) + (12 << 20)  # a byte for each weight
