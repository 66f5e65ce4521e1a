"""Refusals of `config`, `plan` and `tune`: each message names the object, the numbers and a remedy, and nothing is written."""

import json
import os

from cli_support import CliCase

DEEPSPEED = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "vocab_size": 100, "max_position_embeddings": 128}
FILES = {"ds.json": DEEPSPEED, "muon.json": {**DEEPSPEED, "optimizer": {"type": "Muon"}}, "typo.json": {**DEEPSPEED, "gradient_cliping": 1},
         "auto.json": {**DEEPSPEED, "train_micro_batch_size_per_gpu": "auto"},
         "batch.json": {**DEEPSPEED, "train_batch_size": 7, "gradient_accumulation_steps": 2},
         "both.json": {**DEEPSPEED, "fp16": {"enabled": True}}, "nvme.json": {**DEEPSPEED, "zero_optimization": {"stage": 4}},
         "tensor.json": {**DEEPSPEED, "tensor_parallel": {"autotp_size": 2}}, "key.json": {"memory": {"devise": "8MiB"}},
         "mamba.json": {"model_type": "mamba"}, "heads.json": {**LLAMA, "num_attention_heads": 5}, "llama.json": LLAMA, "list.json": [1],
         "wide.json": {**LLAMA, "hidden_size": None}}
PLAN = ("plan", "config.json")
TUNE = ("tune", "config.json", "-o", "out.json")
SET = "--set"
# The words of a command, its exit code, and what its message has: the object, the numbers, the remedy.
ROWS = [
    # config import
    (("config", "import", "gone.json"), 2, ("gone.json", "No such file or directory", "name a file that exists")),
    (("config", "import", "storage"), 2, ("storage", "it is a folder", "name a file in it")),
    (("config", "import", "list.json"), 2, ("list.json:1:1",)),
    (("config", "import", "muon.json"), 2, ('optimizer.type "Muon"', "it has AdamW, Adam, Lion, Adagrad and SGD")),
    (("config", "import", "typo.json"), 2, ("gradient_cliping 1", '"gradient_clipping"')),
    (("config", "import", "auto.json"), 2, ("train_micro_batch_size_per_gpu", "give --batch")),
    (("config", "import", "batch.json"), 2, ("train_batch_size", "it is 7", "2 x gradient_accumulation_steps 2 x 1 ranks are 4")),
    (("config", "import", "both.json"), 2, ("fp16.enabled", "bf16")),
    (("config", "import", "nvme.json"), 2, ("zero_optimization.stage 4", "at most 3")),
    (("config", "import", "tensor.json"), 2, ("tensor_parallel",)),
    (("config", "import", "ds.json", "--batch", "0"), 2, ("--batch", "0 not in range 1 to")),
    (("config", "import", "ds.json", "--lr", "-1"), 2, ("--lr", '"-1" is not a number from 0')),
    (("config", "import", "ds.json", "--betas", "0.9", "1"), 2, ("--betas", "1 is no number from 0 to below 1")),
    (("config", "import", "ds.json", "--precision", "fp8"), 2, ("--precision", "fp8 not in {bf16,fp16,fp32}")),
    (("config", "import", "ds.json", "--device", "tpu"), 2, ("--device", "tpu not in {auto,cuda,host}")),
    (("config", "import", "ds.json", "-o", "storage"), 2, ('--output "storage"', "it is a folder", "name a file in it")),
    (("config", "import", "ds.json", "-o", "gone/x"), 2, ('--output "gone/x"', "its folder does not exist", "create it")),
    (("config", "import", "ds.json", "-o", "ds.json"), 2, ("the same file as the DeepSpeed file", "name another file")),
    # config check, show, diff, rates, explain
    (("config", "check", "gone.json"), 2, ("gone.json", "name a file that exists")),
    (("config", "check", "key.json"), 2, ('key.json:1:13: unknown key "memory.devise"', 'did you mean "memory.device"?')),
    (("config", "check", "muon.json"), 2, ("muon.json is a DeepSpeed file that is refused, for 1 reason", 'optimizer.type "Muon"')),
    (("config", "check", "config.json", SET, "memory.host=-1"), 2, ("--set memory.host=-1", "it is negative", '"64KiB"')),
    (("config", "check", "config.json", SET, "memory.device=1EB"), 2, ('its unit "EB" is unknown', '"64KiB"')),
    (("config", "check", "config.json", SET, "optimizer.type=Muon"), 2, ('"optimizer.type" is "Muon"', '"adamw", "adam", "lion"')),
    (("config", "check", "config.json", SET, "optimizer.beta1=2"), 2, ('"optimizer.beta1" is 2', "less than 1")),
    (("config", "show", "config.json", SET, "foo"), 2, ("--set foo", "KEY=VALUE, such as memory.host=10MiB")),
    (("config", "show", "config.json", SET, "memory=5"), 2, ('"memory" is 5', "object")),
    (("config", "show", "typo.json"), 2, ("gradient_cliping 1", '"gradient_clipping"')),
    (("config", "rates", "muon.json"), 2, ('optimizer.type "Muon"',)),
    (("config", "diff", "config.json", "gone.json"), 2, ("gone.json", "name a file that exists")),
    (("config", "diff", "muon.json", "config.json"), 2, ("muon.json", 'optimizer.type "Muon"')),
    (("config", "explain", "memory.hots"), 2, ('"memory.hots"', 'did you mean "memory.host"?')),
    (("config", "explain", "zero_optimization.stge"), 2, ('; in DeepSpeed, did you mean "zero_optimization.stage"?',)),
    (("config", "explain", "nosuch"), 2, ('neither Sluice nor DeepSpeed has a key "nosuch"\n',)),
    (("config", "explain", ""), 2, ("the key is empty", "optimizer.beta2")),
    # plan
    (("plan", "gone.json"), 2, ("gone.json", "name a file that exists")),
    (("plan", "muon.json"), 2, ('optimizer.type "Muon"',)),
    (("plan", "auto.json"), 2, ("train_micro_batch_size_per_gpu", "give --batch")),
    (("plan", "--model", "gone"), 2, ('--model "gone"', "neither a file or folder", "llama-3-8b")),
    (("plan", "--model", "storage"), 2, ('--model "storage"', "without a config.json and without safetensors files", "name the folder of a model")),
    (("plan", "--model", "gone/config.json"), 2, ("gone/config.json", "name a file that exists")),
    (("plan", "--model", "mamba.json"), 2, ('"model_type" is "mamba"', "plans know llama, mistral", "--parameters and --layers")),
    (("plan", "--model", "heads.json"), 2, ("num_attention_heads", "5", "64")),
    (("plan", "--model", "wide.json"), 2, ('"hidden_size" is missing',)),
    (("plan", "--model", "list.json"), 2, ("list.json", "no JSON object", "config.json of a model")),
    (("plan", "--model", "llama.json", "--parameters", "8B"), 2, ("--model", "excludes", "--parameters")),
    (("plan", "--sequence", "64"), 2, ("--sequence requires --model",)),
    (("plan", "--layers", "4"), 2, ("--layers requires --parameters",)),
    (("plan", "--parameters", "5", "--layers", "6"), 2, ("--parameters 5 in 6 layers",)),
    (("plan", "--parameters", "8X"), 2, ('"8X" is not a finite number', "70B")),
    (("plan", "--gpu", "5"), 2, ("--gpu 5 is not known", "4090, 5090")),
    (("plan", "--drive", "floppy"), 2, ("--drive floppy is not known", "990pro, sn850x")),
    (("plan", "--drive", "990pro:0"), 2, ("990pro:0", "from 1 to 1024", "such as 990pro:4")),
    ((*PLAN, "--host-memory", "banana"), 2, ('"banana" is not a size', '"10MiB"')),
    ((*PLAN, "--ranks", "3", "--nodes", "2"), 2, ("--nodes 2 does not divide --ranks 3", "--ranks counts those of all nodes")),
    ((*PLAN, "--read-rate", "1KB"), 2, ("--read-rate 1KB is below 1MB per second", "such as 7000MB")),
    ((*PLAN, "--ranks", "2", "--link-rate", "1KB"), 2, ("--link-rate 1KB is below 1MB per second", "25GB")),
    ((*PLAN, "--link-rate", "25GB"), 2, ("--link-rate 25GB has no effect on one rank", "give --ranks")),
    ((*PLAN, "--flush-ms", "2.5"), 2, ("--flush-ms 2.5 has no effect without a durable store", "storage.state.name=NAME")),
    ((*PLAN, "--io", "gone.json"), 2, ('"gone.json"', "name a file that exists")),
    ((*PLAN, "--io", "ds.json"), 2, ('"ds.json" is no calibration', "sluice bench io --json")),
    ((*PLAN, "--adam", "ds.json"), 2, ('"ds.json" has no row', "sluice bench adam --state fp32 --json")),
    ((*PLAN, SET, "run.device=cuda", "--gpu-rates", "ds.json"), 2, ('"ds.json" has no rates of copies', "sluice bench gpu --json")),
    ((*PLAN, "--json", "gone/x"), 2, ('--json "gone/x"', "its folder does not exist", "create it")),
    ((*PLAN, "--json", "config.json"), 2, ("the same file as the config", "name another file")),
    ((*PLAN, SET, "memory.host=4KiB"), 5, ("memory.host = 4.00 KiB is too small", 'the smallest that works is "')),
    ((*PLAN, SET, "memory.device=4KiB"), 5, ("memory.device = 4.00 KiB is too small", 'the smallest that works is "')),
    (("plan", "--parameters", "8B", "--gpu", "4090", "--tokens", "1e9"), 5,
     ("1000000000 tokens", "24.0 GiB", "give fewer --tokens, or --set activations=recompute")),
    (("plan", "--parameters", "8B", "--gpu", "4090", "--tokens", "1e9", SET, "activations=recompute"), 5,
     ("1000000000 tokens", "24.0 GiB", "give fewer --tokens, or a larger --gpu")),
    (("plan", "--parameters", "8B", "--layers", "1", "--gpu", "4090", "--tokens", "1e6"), 5,
     ("1000000 tokens", "no --tokens are few enough beside its pools: give a larger --gpu; all parameters are one unit: --layers cuts")),
    (("plan", "--parameters", "8B", "--tokens", "1e11"), 5,
     ("lower what it keeps (--tokens, ", "plan for another machine: --gpu NAME, or --set memory.device=SIZE and --host-memory SIZE:")),
    (("plan", "--parameters", "900T", "--layers", "100", "--gpu", "4090"), 2,
     ("blocks of 1048576 elements on each rank are more than the 16777216 of the largest plan", "more --ranks (now 1)",
      "storage.block_elements=16777216")),
    (("plan", "--model", "gpt2", "--sequence", "5000"), 2, ("--sequence 5000 is more than the 1024 positions", "give --sequence 1024 or less")),
    (("plan", "--model", "llama.json", "--sequence", "128", "--tokens", "100"), 2,
     ("--tokens 100 in 1 micro-batches have no room", "--sequence 128", "at least --tokens 128")),
    (("plan", "--parameters", "1e12", "--layers", "100", "--gpu", "4090", "--host-memory", "64G", "--drive-space", "1TB", SET, "activations=recompute"),
     5, ("is too small", "smallest that works")),
    (("plan", "--parameters", "7B", "--layers", "32", "--gpu", "4090", "--host-memory", "32G", "--drive-space", "1GB"), 5,
     ("storage needs", "the drives have 954 MiB", "take more or larger drives")),
    # tune
    (("tune", "gone.json", "-o", "out.json"), 2, ("gone.json", "name a file that exists")),
    ((*TUNE, "--data", "gone.txt"), 2, ('"gone.txt"', "No such file or directory", "name another in data.file or with --data FILE")),
    ((*TUNE, "--keep", "memroy"), 2, ("--keep memroy: a config has no such key or section", "did you mean")),
    ((*TUNE, "--finalists", "0"), 2, ("--finalists", "0 not in range 1 to 20")),
    ((*TUNE, "--seconds", "0"), 2, ("--seconds", '"0" is not a number from 1')),
    ((*TUNE, "--calibration-days", "-1"), 2, ("--calibration-days", '"-1" is not a number from 0')),
    ((*TUNE, "--dry-run"), 2, ("--output excludes --dry-run",)),
    ((*TUNE, "--flops", "1e9"), 2, ("--flops requires --dry-run",)),
    ((*TUNE, SET, 'storage.paths=["nowhere"]'), 2, ('"nowhere"', "No such file or directory")),
    ((*TUNE, SET, "model.heads=3"), 2, ('"model.heads" is 3',)),
    (("tune", "config.json", "-o", "config.json"), 2, ("the same file as the config", "name another file")),
    (("tune", "config.json", "-o", "text.txt"), 2, ("the same file as the text", "name another file")),
    (("tune", "muon.json", "-o", "out.json"), 2, ('optimizer.type "Muon"',)),
    ((*TUNE, SET, "memory.host=8KiB", SET, "memory.device=8KiB", "--keep", "memory"), 5, ("8.00 KiB", "no other settings make it fit")),
]


class Refusals(CliCase):
    LABEL = "command"

    def contents(self):
        found = {}
        for folder, folders, files in os.walk(self.folder):
            found[folder] = sorted(folders)
            for name in files:
                with open(os.path.join(folder, name), "rb") as file:
                    found[os.path.join(folder, name)] = file.read()
        return found

    def test_object_numbers_remedy_and_nothing_written(self):
        self.write_config()
        for name, content in FILES.items():
            with open(self.path(name), "w", encoding="utf-8") as file:
                json.dump(content, file)
        before = self.contents()
        for words, code, parts in ROWS:
            with self.subTest(" ".join(words)):
                done = self.run_sluice(*words, expect=code)
                text = done.stderr + (done.stdout if words[0] == "plan" else "")
                self.assertNotIn("internal error", text)
                for part in parts:
                    self.assertIn(part, text)
                self.assertEqual(self.contents(), before)
