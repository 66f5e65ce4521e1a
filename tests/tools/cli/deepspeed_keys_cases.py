"""Every row of the table of DeepSpeed's keys (tools/deepspeed/deepspeed_keys.json) does what its class says."""

import json
import os

import cli_support
from cli_support import with_values

TABLE = os.path.join(cli_support.SOURCE, "tools", "deepspeed", "deepspeed_keys.json")
BASE = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
ON_NVME = {"zero_optimization.offload_param.device": "nvme", "zero_optimization.offload_param.nvme_path": "/p",
           "zero_optimization.offload_optimizer.device": "nvme", "zero_optimization.offload_optimizer.nvme_path": "/o"}
FP16 = {"bf16.enabled": False, "fp16.enabled": True}  # under ZeRO: BASE has stage 3
WARMUP = {"scheduler.type": "WarmupLR"}
DECAY = {"scheduler.type": "WarmupDecayLR", "scheduler.params.total_num_steps": 50}
COSINE = {"scheduler.type": "WarmupCosineLR", "scheduler.params.total_num_steps": 50}
CYCLE = {"scheduler.type": "OneCycle", "scheduler.params.cycle_min_lr": 1e-5, "scheduler.params.cycle_max_lr": 1e-3,
         "scheduler.params.cycle_momentum": False}
RANGE = {"scheduler.type": "LRRangeTest"}
# The keys that a mapped key needs around it, and two values that give different configs.
MAPPED = {
    "train_batch_size": ({"train_micro_batch_size_per_gpu": None}, 4, 8),
    "train_micro_batch_size_per_gpu": ({}, 2, 3),
    "gradient_accumulation_steps": ({}, 1, 5),
    "zero_optimization.stage": ({}, 1, 2),
    "zero_optimization.offload_param.device": (ON_NVME, "cpu", "nvme"),
    "zero_optimization.offload_param.nvme_path": (ON_NVME, "/a", "/b"),
    "zero_optimization.offload_optimizer.device": (ON_NVME, "cpu", "nvme"),
    "zero_optimization.offload_optimizer.nvme_path": (ON_NVME, "/a", "/b"),
    "zero_optimization.offload_optimizer.ratio": ({"zero_optimization.offload_optimizer.device": "cpu"}, 1.0, 0.5),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": ({}, 0.01, 1.0),
    "zero_optimization.cpu_offload": ({}, True, False),
    "zero_optimization.cpu_offload_param": ({}, True, False),
    "zero_optimization.stage3_param_persistence_threshold": ({}, 1000, 2000),
    "zero_optimization.zero_hpz_partition_size": ({}, 2, 4),
    "zero_optimization.mics_shard_size": ({}, 2, 4),
    "aio.queue_depth": ({}, 8, 16),
    "bf16.enabled": ({}, True, False),
    "bf16.check_grad_overflow": ({"zero_optimization.stage": 2}, True, False),
    "fp16.enabled": ({"bf16.enabled": False}, True, False),
    "fp16.loss_scale": (FP16, 0, 128),
    "fp16.initial_scale_power": (FP16, 16, 32),
    "fp16.loss_scale_window": (FP16, 1000, 500),
    "fp16.hysteresis": (FP16, 2, 3),
    "fp16.consecutive_hysteresis": (FP16, True, False),
    "fp16.min_loss_scale": (FP16, 1, 4),
    "data_types.grad_accum_dtype": ({}, "fp32", "bf16"),
    "optimizer.type": ({}, "AdamW", "Lion"),
    "optimizer.params.lr": ({}, 1e-3, 2e-3),
    "optimizer.params.betas": ({}, [0.9, 0.999], [0.9, 0.95]),
    "optimizer.params.eps": ({}, 1e-8, 1e-6),
    "optimizer.params.weight_decay": ({}, 0, 0.1),
    "optimizer.params.momentum": ({"optimizer.type": "SGD"}, 0, 0.9),
    "optimizer.params.torch_adam": ({}, False, True),
    "optimizer.params.adam_w_mode": ({"optimizer.type": "Adam"}, True, False),
    "gradient_clipping": ({}, 1.0, 0.5),
    "scheduler.type": ({"scheduler.params.total_num_steps": 50}, "WarmupDecayLR", "WarmupCosineLR"),
    "scheduler.params.warmup_type": (WARMUP, "log", "linear"),
    "scheduler.params.warmup_num_steps": (WARMUP, 10, 20),
    "scheduler.params.warmup_min_lr": (WARMUP, 0, 1e-6),
    "scheduler.params.warmup_max_lr": (WARMUP, 1e-4, 1e-3),
    "scheduler.params.total_num_steps": (DECAY, 50, 60),
    "scheduler.params.cos_min_ratio": (COSINE, 0.1, 0.2),
    "scheduler.params.warmup_min_ratio": (COSINE, 0, 0.2),
    "scheduler.params.cycle_min_lr": (CYCLE, 1e-5, 2e-5),
    "scheduler.params.cycle_max_lr": (CYCLE, 1e-3, 2e-3),
    "scheduler.params.cycle_first_step_size": (CYCLE, 100, 200),
    "scheduler.params.cycle_second_step_size": (CYCLE, 100, 200),
    "scheduler.params.cycle_first_stair_count": (CYCLE, 0, 5),
    "scheduler.params.cycle_second_stair_count": (CYCLE, 0, 5),
    "scheduler.params.decay_step_size": (CYCLE, 0, 10),
    "scheduler.params.decay_lr_rate": (CYCLE, 0, 0.1),
    "scheduler.params.lr_range_test_min_lr": (RANGE, 1e-4, 1e-5),
    "scheduler.params.lr_range_test_step_size": (RANGE, 100, 200),
    "scheduler.params.lr_range_test_step_rate": (RANGE, 1.0, 2.0),
    "scheduler.params.lr_range_test_staircase": (RANGE, False, True),
    "activation_checkpointing.cpu_checkpointing": ({}, True, False),
}
REFUSED_VALUES = {"always": 1, "present": {"x": 1}, "true": True, "false": False, "enabled": {"enabled": True}, ">1": 2,
                  "any enabled": {"data_routing": {"random_ltd": {"enabled": True}}}, "not -1": 49,
                  "autotp_size>1": {"autotp_size": 2}, "stages>1": {"stages": 2}, "fp16": "FP16", "sum": "Sum", "nonzero": 0.5,
                  "names": ["freq"]}
SAMPLES = {"bool": True, "int": 5, "number": 0.5, "string": "x", "object": {"enabled": False}, "any": 1, "path": "/x"}


def table():
    with open(TABLE, encoding="utf-8") as file:
        return json.load(file)


def leaves_of(config):
    """The keys of a file that a report has lines for: all that are no section, and sections that are no object."""
    rows = {row["key"]: row for row in table()}

    def walk(place, path, written):
        for name, value in place.items():
            own = written + name
            row = rows.get(path + name, {})
            key = row.get("is", path + name)
            if rows.get(key, {}).get("type") == "section" and isinstance(value, dict):
                yield from walk(value, key + ".", own + ".")
            else:
                yield own
    return set(walk(config, "", ""))


class DeepspeedKeys(cli_support.CliCase):
    LABEL = "command"

    def imported(self, values, expect=0):
        """The report of importing the base file with `values`; a value of None takes the key out."""
        config = with_values(BASE, values)
        for key, value in values.items():
            if value is None:
                del config[key]
        with open(self.path("ds.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        done = self.run_sluice("config", "import", "ds.json", "--json", expect=expect)
        return json.loads(done.stdout)

    def test_every_mapped_key_changes_the_config(self):
        rows = {row["key"]: row for row in table() if row["class"] == "map" and row["type"] != "section"}
        self.assertEqual(set(rows), set(MAPPED))
        for key, (around, first, second) in MAPPED.items():
            with self.subTest(key):
                reports = [self.imported({**around, key: value}) for value in (first, second)]
                self.assertNotEqual(reports[0]["config"], reports[1]["config"])
                for report in reports[:0 if key == "train_batch_size" else 2]:
                    named = {line["new_key"] for line in report["mapped"] if line["key"] == key}
                    self.assertLessEqual(named, set(rows[key]["to"]))

    def test_every_refused_key_is_refused_by_name_and_place(self):
        for row in table():
            if row["class"] not in ("refuse", "error"):
                continue
            key = row["key"]
            around = CYCLE if key == "scheduler.params.cycle_momentum" else WARMUP if key.startswith("scheduler.params.") else {}
            with self.subTest(key):
                report = self.imported({**around, key: REFUSED_VALUES[row["refuse"]]}, expect=2)
                lines = [line for line in report["refused"] if line["key"] == key]
                self.assertTrue(lines, report["refused"])
                self.assertRegex(lines[0]["place"], r"^ds\.json:1:\d+$")
                self.assertGreater(len(lines[0]["text"]), 20)

    def test_every_other_key_is_listed_and_changes_nothing(self):
        for row in table():
            if row["class"] not in ("derive", "note", "foreign"):
                continue
            with self.subTest(row["key"]):
                key = row["key"]
                around = WARMUP if key.startswith("scheduler") else {}
                plain = self.imported(around)["config"]
                value = {} if key == "log" else 2 if key == "zero_stage" else SAMPLES[row["type"]]
                report = self.imported({**around, key: value})
                listed = [line["key"] for line in report["not_needed"] + report["understood"]]
                self.assertIn(key, listed)
                section = {"activations": "recompute"} if key.startswith("activation_checkpointing") else {}
                self.assertEqual(report["config"], {**plain, **section})

    def test_every_alias_is_the_key_that_it_means(self):
        values = {"any": 1000, "bool": True}
        for row in table():
            if row["class"] != "alias":
                continue
            with self.subTest(row["key"]):
                value = {"aio": {"queue_depth": 4}, "bf16": {"enabled": True}}.get(row["is"], values["any"])
                if "gather_" in row["key"] or "allgather" in row["key"] or "use_all" in row["key"]:
                    value = True
                around = {"bf16": None} if row["is"] == "bf16" else {}
                ours, theirs = (self.imported({**around, key: value} if key != "bf16" else {key: value})
                                for key in (row["key"], row["is"]))
                self.assertEqual(ours["config"], theirs["config"])

    def test_explain_knows_every_key(self):
        for row in table():
            with self.subTest(row["key"]):
                text = self.run_sluice("config", "explain", row["key"]).stdout
                self.assertIn(row["why"], text)

    def test_the_keys_of_sluice_that_rows_name_exist(self):
        with open(os.path.join(cli_support.SOURCE, "configs", "sluice.schema.json"), encoding="utf-8") as file:
            schema = json.load(file)
        for row in table():
            for key in row.get("to", []):
                place = schema
                for name in key.split("."):
                    place = place["properties"][name]
