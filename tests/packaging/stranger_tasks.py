#!/usr/bin/env python3
"""Five tasks of someone who knows nothing but README.md, by the commands that it and the pages that it links to show.

    tests/packaging/stranger_tasks.py [--markdown FILE]

Needs `sluice` in PATH, and for the fifth task an installed package and a compiler: run it on a machine, or in a root, that has
nothing else of the project. Each command has to stand in its document word by word; the script puts the stranger's own words in
(a text, a model's config.json, a DeepSpeed file), runs it in a copy of the source, and looks for what a stranger would look for.
Prints a line for each command, and writes them as a table. Exits with 1 where a task stops.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 900

LLAMA_7B = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False}
DEEPSPEED = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
             "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "./drive", "pin_memory": True},
                                   "offload_param": {"device": "cpu"}, "overlap_comm": True, "reduce_bucket_size": "auto"},
             "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
             "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
AUTO_VALUES = {"--batch": "2", "--micro-batches": "2", "--clip-norm": "1.0", "--lr": "2e-5", "--betas": "0.9,0.999", "--eps": "1e-8", "--weight-decay": "0.01",
               "--warmup-steps": "10"}

README, CLI, DEEPSPEED_PAGE, TRACING, INSTALL = "README.md", "docs/cli.md", "docs/deepspeed.md", "docs/tracing.md", "docs/install.md"


class Stopped(Exception):
    pass


class Stranger:
    """Runs commands in a copy of the source, and keeps notes."""

    def __init__(self, folder):
        self.folder = folder
        self.rows = []
        self.task = ""

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")

    def do(self, document, shown, expect, *changes, more="", codes=(0,)):
        """Runs a command that `document` shows, with (old, new) words changed and `more` behind it. `expect`: what a stranger looks for."""
        text = (ROOT / document).read_text(encoding="utf-8")
        if shown not in text:
            raise Stopped(f"{document} does not show `{shown}`")
        linked = (ROOT / README).read_text(encoding="utf-8")
        if document != README and f"({document}" not in linked:
            raise Stopped(f"README.md does not lead to {document}")
        command = shown
        for old, new in changes:
            if old not in command:
                raise Stopped(f"`{shown}` has no \"{old}\"")
            command = command.replace(old, new)
        return self.run(f"{command} {more}".strip(), document, expect, codes)

    def run(self, command, document, expect, codes=(0,)):
        begin = time.monotonic()
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=TIMEOUT_S, check=False, text=True, errors="replace")
        found = re.search(expect, done.stdout, re.MULTILINE)
        result = "found" if done.returncode in codes and found else f"stopped ({done.returncode})"
        self.rows.append((self.task, document, command, f"{time.monotonic() - begin:.0f}", found.group(0).strip() if found else result))
        print(f"{self.task}: {command}: {result}", flush=True)
        if result != "found":
            print(done.stdout[-3000:])
            raise Stopped(f"`{command}` ended with {done.returncode}" + ("" if found else f", and says nothing like /{expect}/"))
        return done.stdout


def train_own_text(stranger):
    stranger.write("my.txt", "In the beginning was the word, and the word was with the machine.\n" * 3000)
    train = "build/quickstart/tools/sluice train configs/quickstart.json --data my.txt --save model.safetensors"
    stranger.do(README, train, r"state sha256 [0-9a-f]{64}", more="--steps 8")
    stranger.do(README, 'build/quickstart/tools/sluice generate --model model.safetensors --prompt "In the beginning"', r"In the beginning.+", more="--tokens 30")
    keep = "--checkpoint runs/mine --checkpoint-every 100 --resume"
    stranger.do(README, keep, r"state sha256", ("--checkpoint runs", f"{train} --steps 8 --checkpoint runs"), ("100", "4"))
    stranger.do(README, keep, r"state sha256", ("--checkpoint runs", f"{train} --steps 12 --checkpoint runs"), ("100", "4"))


def plan_a_7b_model(stranger):
    stranger.write("llama/config.json", LLAMA_7B)
    shown = "sluice plan --model PATH --gpu 4090"
    told = stranger.do(README, shown, r"(^fits|does not fit): .*", ("PATH", "llama"), more="--host-memory 64G --drive 990pro", codes=(0, 5))
    # A stranger does what the line says.
    settings = re.findall(r"(?:--set )?([a-z._]+=[a-z0-9]+)", re.search(r".*fit.*", told).group(0))
    again = "".join(f" --set {setting}" for setting in settings)
    told = stranger.do(README, shown, r"^fits: .* a step, bound by .*", ("PATH", "llama"), more=f"--host-memory 64G --drive 990pro{again} --plot plan.svg")
    if not re.search(r"^nvme +", told, re.MULTILINE) or not (stranger.folder / "plan.svg").exists():
        raise Stopped("the plan has no pools, or no picture")


def move_a_deepspeed_config(stranger):
    stranger.write("ds_config.json", DEEPSPEED)
    (stranger.folder / "drive").mkdir(exist_ok=True)
    shown = "sluice config import ds_config.json -o sluice.json"
    told = stranger.do(DEEPSPEED_PAGE, shown, r"for \"auto\", .* give: --.*", codes=(2,))
    wanted = re.findall(r"--[a-z-]+", re.search(r"give: (.*)", told.splitlines()[-1]).group(1))
    stranger.do(DEEPSPEED_PAGE, shown, r"0 refused|mapped", more=" ".join(f"{option} {AUTO_VALUES[option]}" for option in wanted))
    small = "--set model.layers=2 --set model.embedding=64 --set model.heads=2 --set model.context=64"
    stranger.do(CLI, "sluice plan [CONFIG] [options]", r"^fits: .*", ("[CONFIG]", "sluice.json"), ("[options]", small))
    stranger.do(DEEPSPEED_PAGE, "sluice train ds_config.json --data my.txt --batch 4 --lr 2e-5", r"state sha256 [0-9a-f]{64}",
                ("ds_config.json", "sluice.json"), (" --batch 4 --lr 2e-5", f" --steps 3 {small}"))


def find_why_a_step_is_slow(stranger):
    stranger.do(TRACING, "sluice train --trace FILE", r"state sha256", ("FILE", "run.trace"), more="configs/quickstart.json --data my.txt --steps 5")
    stranger.do(TRACING, "sluice trace summary FILE", r"^mean step [0-9.]+ ms .*: compute [0-9.]+ %.*", ("FILE", "run.trace"))
    page = stranger.folder / "page.html"
    stranger.do(TRACING, "sluice trace html FILE... --output PAGE", r"\A\Z", ("FILE...", "run.trace"), ("PAGE", page.name))
    if not page.is_file() or "</html>" not in page.read_text(encoding="utf-8"):
        raise Stopped("trace html has written no page")
    # A prediction, or that a run of five steps on this machine is too uneven for one.
    stranger.do(TRACING, "sluice trace whatif FILE --set KEY=VALUE", r"^predicted step [0-9.]+ ms|: no prediction from \"run\.trace\": .*", ("FILE", "run.trace"),
                ("KEY=VALUE", "nvme=2x"), codes=(0, 2))


def write_a_program(stranger):
    stranger.do(README, "cmake -S examples/sine -B build/sine && cmake --build build/sine && build/sine/sine /var/tmp", r"step +200: loss 0\.0000\d")
    # A program of one's own: a copy of an example, under another name.
    shutil.copy(stranger.folder / "examples/resume/main.cc", stranger.folder / "program.cc")
    stranger.do(INSTALL, "g++ -std=c++20 program.cc $(pkg-config --cflags --libs sluice)", r"came to the bits", more="-o program && ./program .")


TASKS = {"train a text of one's own": train_own_text, "plan a 7B model for a machine": plan_a_7b_model, "move a DeepSpeed config": move_a_deepspeed_config,
         "find out why a step is slow": find_why_a_step_is_slow, "write a program against the library": write_a_program}


def copy_of_the_source(folder):
    shutil.copy(ROOT / README, folder)
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, folder / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=pathlib.Path, help="write the table of commands to this file")
    arguments = parser.parse_args()
    binary = shutil.which("sluice")
    if binary is None:
        sys.exit("stranger_tasks.py: no `sluice` in PATH")
    stopped = {}
    with tempfile.TemporaryDirectory(prefix="stranger-") as name:
        stranger = Stranger(pathlib.Path(name))
        copy_of_the_source(stranger.folder)
        built = stranger.folder / "build/quickstart/tools"
        built.mkdir(parents=True)
        (built / "sluice").symlink_to(binary)  # where tools/quickstart.sh has it
        for task, steps in TASKS.items():
            stranger.task = task
            try:
                steps(stranger)
            except Stopped as why:
                stopped[task] = str(why)
                print(f"STOPPED: {task}: {why}")
    if arguments.markdown:
        lines = ["| task | command | from | seconds | what was found |", "|---|---|---|---|---|"]
        lines += [f"| {task} | `{command}` | {document} | {seconds} | `{found[:100]}` |" for task, document, command, seconds, found in stranger.rows]
        arguments.markdown.write_text("\n".join(line.replace("||", "or") for line in lines) + "\n", encoding="utf-8")
    print(f"{len(TASKS) - len(stopped)} of {len(TASKS)} tasks came to their end")
    return 1 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
