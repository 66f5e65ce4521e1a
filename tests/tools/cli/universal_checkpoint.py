"""Writes a universal checkpoint of DeepSpeed from a checkpoint of sluice train, without torch: the same zip archives and pickles
(tests/golden/universal has files of torch itself)."""

import json
import os
import struct
import zipfile


def read_safetensors(path):
    """{name: (shape, bytes)} of a file of fp32 tensors."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        begin = file.tell()
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                file.seek(begin + entry["data_offsets"][0])
                found[name] = (entry["shape"], file.read(entry["data_offsets"][1] - entry["data_offsets"][0]))
        return found


def text(words):
    return b"X" + struct.pack("<I", len(words)) + words.encode()


def integer(number):
    return b"J" + struct.pack("<i", number)


def integers(numbers):
    return b"(" + b"".join(map(integer, numbers)) + b"t"


def tensor_pickle(shape):
    strides = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    count = strides[0] * shape[0] if shape else 1
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + integer(count) + b"tQ"
    return (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + integer(0) + integers(shape) + integers(strides if shape else [])
            + b"\x89ccollections\nOrderedDict\n)RtR")


def write_torch_file(path, shape, values, is_parameter=True):
    pickle = tensor_pickle(shape)
    if is_parameter:
        pickle = b"}(" + text("param") + pickle + text("cat_dim") + integer(0) + b"u"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickle + b".")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", values)
        archive.writestr("archive/version", "3\n")


def write_universal(checkpoint, folder, step):
    """`checkpoint` is one of a run in fp32, whose weights are the masters."""
    weights = read_safetensors(os.path.join(checkpoint, "model-00001-of-00001.safetensors"))
    moments = read_safetensors(os.path.join(checkpoint, "optimizer-00001-of-00001.safetensors"))
    for name, (shape, values) in weights.items():
        own = os.path.join(folder, "zero", name)
        os.makedirs(own)
        write_torch_file(os.path.join(own, "fp32.pt"), shape, values)
        for moment in ("exp_avg", "exp_avg_sq"):
            write_torch_file(os.path.join(own, moment + ".pt"), *moments[f"{name}.{moment}"])
        write_torch_file(os.path.join(own, "step.pt"), [], struct.pack("<f", step), is_parameter=False)
