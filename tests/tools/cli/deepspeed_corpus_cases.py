"""Real DeepSpeed files (tests/tools/deepspeed/corpus.json) with what DeepSpeed 0.19.8's own parser decided about each, after
"auto" was resolved as transformers does: what it accepts is accepted here, or refused for a key of class refuse; what
it refuses is refused here, for the same key."""

import json
import os
import re

import cli_support
from deepspeed_keys_cases import leaves_of

CORPUS = os.path.join(cli_support.SOURCE, "tests", "tools", "deepspeed", "corpus.json")
TABLE = os.path.join(cli_support.SOURCE, "tools", "deepspeed", "deepspeed_keys.json")
# Keys that are mapped, but refused for any other value: numbers would not be those of DeepSpeed.
VALUES = {"optimizer.type": {"adam", "adamw", "lion", "adagrad", "sgd"},
          "scheduler.type": {"warmuplr", "warmupdecaylr", "warmupcosinelr", "onecycle", "lrrangetest"}}
# DeepSpeed's parser lets them pass, and its engine raises for them: the last two beside WarmupCosineLR.
RAISED_LATER = {"optimizer.params.max_grad_norm", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr"}
# Parts of the file by the name of the class that checks them in DeepSpeed.
SECTIONS = {"DeepSpeedFP16": "fp16.", "DeepSpeedBF16": "bf16.", "DeepSpeedZero": "zero_optimization.", "Compile": "compile."}
OPTIONS = {"optimizer.params.lr": ("--lr", "1e-4"), "optimizer.params.betas": ("--betas", "0.9", "0.999"),
           "optimizer.params.eps": ("--eps", "1e-8"), "optimizer.params.weight_decay": ("--weight-decay", "0.1"),
           "gradient_clipping": ("--clip-norm", "1"), "scheduler.params.warmup_num_steps": ("--warmup-steps", "10"),
           "scheduler.params.total_num_steps": ("--steps", "100")}


def value_at(config, key):
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def has_key(config, key):
    """Whether the file has `key`; a refusal of a key that it lacks would be one of another file."""
    *folder, name = key.split(".")
    inner = value_at(config, ".".join(folder)) if folder else config
    return isinstance(inner, dict) and name in inner


def options_for(config):
    """The values that a Trainer would give where the file has "auto", and ranks that the batch keys fit."""
    options = []
    for key, option in OPTIONS.items():
        if value_at(config, key) == "auto":
            options += option
    total, batch, micro = (value_at(config, key) for key in
                           ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    numbers = [value for value in (total, batch, micro) if isinstance(value, int)]
    if batch == "auto" or (batch is None and not isinstance(total, int)):
        batch = total // (micro if isinstance(micro, int) else 1) if isinstance(total, int) else 2
        options += ["--batch", str(batch)]
    if micro == "auto":
        options += ["--micro-batches", str(total // batch if isinstance(total, int) else 1)]
    if len(numbers) == 3 and total >= batch * micro and total % (batch * micro) == 0:
        options += ["--ranks", str(total // (batch * micro))]
    peak = value_at(config, "scheduler.params.warmup_max_lr")
    if not isinstance(config.get("optimizer"), dict) and config.get("scheduler") and peak in (None, "auto") and "--lr" not in options:
        options += ["--lr", "1e-4"]
    if value_at(config, "fp16.enabled") == "auto" and not config.get("bf16"):
        options += ["--precision", "fp16"]
    return options


class DeepspeedCorpus(cli_support.CliCase):
    LABEL = "command"

    def reports(self, accepted):
        with open(CORPUS, encoding="utf-8") as file:
            corpus = json.load(file)
        for entry in corpus:
            if (entry["decision"] == "ok") != accepted:
                continue
            with open(self.path("ds.json"), "w", encoding="utf-8") as file:
                json.dump(entry["config"], file)
            done = self.run_sluice("config", "import", "ds.json", "--json", *options_for(entry["config"]), expect=(0, 2))
            report = json.loads(done.stdout)
            self.assertEqual(done.returncode == 0, not report["refused"])
            with self.subTest(entry["family"] + " " + entry["path"]):
                lines = [line for name in ("mapped", "not_needed", "understood", "refused") for line in report[name]]
                self.assertLessEqual(leaves_of(entry["config"]), {line["key"] for line in lines})
            yield entry, report

    def test_what_deepspeed_accepts(self):
        with open(TABLE, encoding="utf-8") as file:
            refusable = {row["key"] for row in json.load(file) if row["class"] == "refuse"} | RAISED_LATER | VALUES.keys()
        counted = refused = 0
        for entry, report in self.reports(accepted=True):
            counted += 1
            refused += bool(report["refused"])
            for line in report["refused"]:
                with self.subTest(entry["family"] + " " + entry["path"], line=line):
                    self.assertIn(line["key"], refusable)
                    self.assertTrue(has_key(entry["config"], line["key"]))
                    if line["key"] in VALUES:
                        self.assertNotIn(value_at(entry["config"], line["key"]).lower(), VALUES[line["key"]])
        self.assertEqual(counted, 102)
        with open(os.path.join(cli_support.SOURCE, "docs", "deepspeed.md"), encoding="utf-8") as page:
            self.assertIn(f"DeepSpeed's config reader takes {counted} of them: Sluice takes {counted - refused} of these and refuses {refused}",
                          " ".join(page.read().split()))

    def test_what_deepspeed_refuses(self):
        counted = 0
        for entry, report in self.reports(accepted=False):
            counted += 1
            decision, keys = entry["decision"], [line["key"] for line in report["refused"]]
            with self.subTest(entry["family"] + " " + entry["path"], decision=decision, refused=report["refused"]):
                if "GDS" in decision:  # there is only no GPU
                    self.assertEqual(keys, [])
                    continue
                if "batch related" in decision:
                    # DeepSpeed's message ends with "TOTAL != MICRO * ACCUMULATED * RANKS".
                    total, micro, accumulated, ranks = re.search(r"(\S+) != (\S+) \* (\S+) \* (\S+)$", decision.strip()).groups()
                    text, = (line["text"] for line in report["refused"] if line["key"] == "train_batch_size")
                    self.assertIn(f"it is {total}, but train_micro_batch_size_per_gpu {micro} x "
                                  f"gradient_accumulation_steps {accumulated} x {ranks} ranks", text)
                    continue
                named = re.search(r"Config (\w+)|'(\w+)'|(Sparse Attention)", decision)
                key = (named[1] or named[2] or "sparse_attention").lower()
                self.assertTrue(any(key == name.split(".")[-1] for name in keys))
                if errors := re.search(r"(\d+) validation errors? for (\w+)Config", decision):
                    section = SECTIONS[errors[2]]
                    self.assertEqual(sum(name.startswith(section) for name in keys), int(errors[1]))
                for name in keys:
                    self.assertTrue(has_key(entry["config"], name), name)
        self.assertEqual(counted, 21)
