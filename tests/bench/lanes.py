#!/usr/bin/env python3
"""How much time a step saves when optimizer state is read ahead into host memory that is left.

    tests/bench/lanes.py --sluice BINARY [--lanes 18] [--rounds 7] [--path FOLDER]

A GPT of 29.5 million parameters in bf16, everything on storage, budgets that hold more than the buffers. A run with
`optimizer.lanes` and one without take turns. Ends with an error if their states differ. A benchmark, no test.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import tempfile

CONFIG = {
    "model": {"layers": 8, "heads": 8, "embedding": 512, "context": 256, "vocabulary": 8192, "tied_head": True},
    "data": {"format": "uint16"}, "batch": {"sequences": 1}, "precision": {"parameters": "bf16"},
    "placement": {"parameters": "nvme", "optimizer": "nvme"},
    "memory": {"device": "192MiB", "host": "512MiB"}, "optimizer": {"clip_norm": 1.0}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sluice", required=True)
    parser.add_argument("--lanes", type=int, default=18, help="of the other run; default 18")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--path", help="a folder on the drive; default the one for temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as name:
        folder = pathlib.Path(name)
        draw = random.Random(1)
        (folder / "tokens.bin").write_bytes(b"".join(draw.randrange(8192).to_bytes(2, "little") for _ in range(100000)))
        CONFIG["data"]["file"] = str(folder / "tokens.bin")
        CONFIG["storage"] = {"paths": [name]}
        (folder / "config.json").write_text(json.dumps(CONFIG))

        def step(*settings):
            """The median step in seconds, and the state."""
            subprocess.run([options.sluice, "train", folder / "config.json", "--steps", "12", "--quiet", "--json",
                            folder / "run.json", *settings], check=True)
            run = json.loads((folder / "run.json").read_text())
            return statistics.median(each["time_s"] for each in run["steps"][3:]), run["state_sha256"]

        pairs = []
        for _ in range(options.rounds):
            few, all_left = step("--set", f"optimizer.lanes={options.lanes}"), step()
            if few[1] != all_left[1]:
                raise SystemExit("the states differ")
            pairs.append((few[0], all_left[0]))
            (folder / "run.json").unlink()
        ratios = sorted(after / before for before, after in pairs)
        print(f"{options.lanes} lanes {statistics.median(few for few, _ in pairs):.3f} s, as planned "
              f"{statistics.median(left for _, left in pairs):.3f} s, ratio {statistics.median(ratios):.3f} "
              f"[{ratios[0]:.3f}, {ratios[-1]:.3f}]; states equal")


if __name__ == "__main__":
    main()
