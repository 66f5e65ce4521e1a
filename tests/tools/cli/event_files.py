"""Reads TensorBoard's event files with the standard library alone: records by their sums, protobuf by its wire format."""

import struct


def crc32c(data):
    """Bit by bit, as RFC 3720 defines it."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283  # the check value of the algorithm


def masked(data):
    value = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(data, place):
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place


def fields(data):
    """[(number, value)] of a message; bytes for messages and texts."""
    found, place = [], 0
    while place < len(data):
        key, place = varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = varint(data, place)
        elif kind == 2:
            size, place = varint(data, place)
            value, place = data[place:place + size], place + size
        else:
            form = {1: "<d", 5: "<f"}[kind]
            value = struct.unpack_from(form, data, place)[0]
            place += struct.calcsize(form)
        found.append((key >> 3, value))
    return found


def events_in(path):
    """[(step, {tag: number or text})]; the first event, with the file's version, is checked and left out."""
    with open(path, "rb") as file:
        data = file.read()
    events, place = [], 0
    while place < len(data):
        size, size_sum = struct.unpack_from("<QI", data, place)
        assert size_sum == masked(data[place:place + 8])
        event = data[place + 12:place + 12 + size]
        assert struct.unpack_from("<I", data, place + 12 + size)[0] == masked(event)
        place += 16 + size
        events.append(dict(fields(event)))
    assert events.pop(0)[3] == b"brain.Event:2"
    told = []
    for event in events:
        values = {}
        for number, value in fields(event[5]):
            assert number == 1
            value = dict(fields(value))
            if 8 in value:
                assert dict(fields(dict(fields(value[9]))[1])) == {1: b"text"}
                values[value[1].decode()] = dict(fields(value[8]))[8].decode()
            else:
                values[value[1].decode()] = value[2]
        told.append((event[2], values))
    return told
