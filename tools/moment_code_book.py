#!/usr/bin/env python3
"""usage: tools/moment_code_book.py

Writes base/moment_codes_signed.inc and base/moment_codes_unsigned.inc: the values of the 8-bit codes of moments, as
bitsandbytes' create_dynamic_map() gives them (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"). Needs
bitsandbytes and torch.
"""

import pathlib

import bitsandbytes.functional

HEAD = """\
// The values of the {} codes, in ascending order; tools/moment_code_book.py wrote them.
// This file is not a header, and is included inside an array in base/moment_codes.h.
"""


def literal(value):
    if value == 0:
        return "0.0f"
    mantissa, exponent = value.hex().split("p")
    return mantissa.rstrip("0").rstrip(".") + "p" + exponent.replace("+", "") + "f"


def main():
    for name in ("signed", "unsigned"):
        values = bitsandbytes.functional.create_dynamic_map(signed=name == "signed").tolist()
        assert len(values) == 256 and values == sorted(set(values))
        lines = [""]
        for value in values:
            if len(lines[-1]) + len(literal(value)) > 98:
                lines.append("")
            lines[-1] += literal(value) + ", "
        path = pathlib.Path(__file__).parent.parent / "base" / f"moment_codes_{name}.inc"
        path.write_text(HEAD.format(name) + "\n".join(line.rstrip() for line in lines) + "\n")


main()
