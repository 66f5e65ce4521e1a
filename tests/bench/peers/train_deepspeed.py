#!/usr/bin/env python3
"""End to end: the same GPT-2 trained by DeepSpeed's ZeRO-3 with parameters and optimizer on NVMe and by `sluice train`, in
interleaved rounds.

    python3 tests/bench/peers/train_deepspeed.py --sluice build/release/tools/sluice --environment DIR --path DIR [--rounds N]

Each round runs DeepSpeed (deepspeed_gpt.py), Sluice with everything on storage, with parameters in host memory, and with as
much memory as DeepSpeed has taken, for Sluice to use as it likes: same shapes, batch, AdamW, clipping and numbers of threads.
Otherwise as train_torch.py; the ratio is DeepSpeed's step over that of the row.

DeepSpeed runs on its CPU accelerator, with reads and writes of its optimizer pipelined. Its settings for asynchronous I/O are
those that its own tool ds_nvme_tune finds on --path at the beginning (minutes), or those of --aio FILE, which has the
tool's output.

--environment is a Python environment with torch, deepspeed and ninja; DeepSpeed compiles its operators at the first run,
with libaio-dev's headers. Run by hand, on an idle machine; asserts nothing of times.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import train_torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "python" / "bench"))
import peers  # noqa: E402

# The part of the tool's search that differs on a machine of few cores: 16 runs instead of 128.
SWEEP = {"block_size": ["1M", "8M"], "queue_depth": [32, 128], "sequential_requests": [False], "single_submit": [False],
         "io_parallel": [1, 2]}
ON_STORAGE = {"parameters": "nvme", "optimizer": "nvme"}
PARAMETERS_IN_RAM = {"parameters": "host", "optimizer": "nvme"}


def aio_of(text):
    """The settings that ds_nvme_tune has printed, under the names of DeepSpeed's config."""
    aio, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    aio = aio["aio"]
    aio["intra_op_parallelism"] = aio.pop("num_threads")
    return {name: value == "true" if value in ("true", "false") else value for name, value in aio.items()}


def tuned_aio(options):
    python = os.path.join(options.environment, "bin", "python")
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        sweep = os.path.join(folder, "sweep.json")
        with open(sweep, "w", encoding="ascii") as file:
            json.dump(SWEEP, file)
        command = [python, os.path.join(options.environment, "bin", "ds_nvme_tune"), "--nvme_dir", folder, "--sweep_config", sweep,
                   "--log_dir", os.path.join(folder, "log"), "--io_size", "256M"]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=peers.deepspeed_variables(python)).stdout


def run_deepspeed(options, shape, dtype, folder, aio):
    report, settings = os.path.join(folder, "deepspeed.json"), os.path.join(folder, "aio.json")
    with open(settings, "w", encoding="ascii") as file:
        json.dump(aio, file)
    command = train_torch.peer_words(options, shape, dtype, folder, "deepspeed_gpt.py")
    said = tempfile.TemporaryFile(mode="w+", errors="replace")
    done = subprocess.run([*command, "--path", folder, "--aio", settings, "--json", report], stdout=said, stderr=subprocess.STDOUT,
                          env=peers.deepspeed_variables(command[0]), check=False)
    if done.returncode != 0:
        said.seek(0)
        sys.exit(f"DeepSpeed ended with {done.returncode}:\n{said.read()[-4000:]}")
    with open(report, encoding="utf-8") as file:
        return train_torch.figures_of(json.load(file))


def with_its_memory(options, shape, dtype, folder, figures):
    """A quarter is for device and activations; 64 MiB are the process without them."""
    peak = min(run["peak"] for run in figures["DeepSpeed, all on NVMe"])
    room = peak - (64 << 20)
    memory = {"device": f"{room // 8}", "host": f"{room // 4 * 3}"}
    return train_torch.run_sluice(options, shape, dtype, folder, {"parameters": "auto", "optimizer": "auto"}, memory)


def main():
    parser = train_torch.options_of(__doc__)
    parser.add_argument("--aio", metavar="FILE", help="what ds_nvme_tune has printed")
    options = parser.parse_args()
    text = open(options.aio, encoding="utf-8").read() if options.aio else tuned_aio(options)
    text = text[text.index("Best performance"):]
    aio = aio_of(text)
    print(f"ds_nvme_tune: {text.splitlines()[0]}; {json.dumps(aio)}")

    def sides_of(options, shape, dtype, folder):
        sides = {"DeepSpeed, all on NVMe": lambda figures: run_deepspeed(options, shape, dtype, folder, aio)}
        for name, placement in (("Sluice, all on storage", ON_STORAGE), ("Sluice, parameters in RAM", PARAMETERS_IN_RAM)):
            sides[name] = lambda figures, placement=placement: train_torch.run_sluice(options, shape, dtype, folder, placement)
        sides["Sluice, DeepSpeed's memory"] = lambda figures: with_its_memory(options, shape, dtype, folder, figures)
        return sides

    train_torch.run(parser, options, "DeepSpeed's over its", lambda own, peer: peer / own, sides_of)


if __name__ == "__main__":
    main()
