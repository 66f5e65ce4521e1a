"""Checkpoints whose bytes were changed, with checksums that are right."""

import ctypes
import ctypes.util
import json
import os


class _Sum(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def mend_checksums(folder):
    """Makes the checksums of a checkpoint those of its bytes. False where the library that computes them is not there."""
    name = ctypes.util.find_library("xxhash")
    if name is None:
        return False
    function = ctypes.CDLL(name).XXH3_128bits
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    function.restype = _Sum

    def checksum(content):
        found = function(content, len(content))
        return f"{found.high:016x}{found.low:016x}"

    path = os.path.join(folder, "sluice_state.json")
    with open(path, encoding="utf-8") as file:
        manifest = json.load(file)
    for stored in manifest["tensors"]:
        with open(os.path.join(folder, manifest["files"][stored["file"]]["name"]), "rb") as file:
            content = file.read()
        element_bytes = 4 if stored["dtype"] == "F32" else 2
        for piece in stored["pieces"]:
            first, count, _ = piece
            begin = stored["begin_bytes"] + first * element_bytes
            piece[2] = checksum(content[begin:begin + count * element_bytes])
    del manifest["checksum"]
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    manifest["checksum"] = checksum(text.encode())
    with open(path, "w", encoding="utf-8") as file:
        json.dump(manifest, file, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return True
