"""Values for a DeepSpeed file that come from options and from --set, and a line in the report for every key."""

import itertools
import json

from cli_support import with_values
from deepspeed_import_cases import FILE, FileWriter
from deepspeed_keys_cases import BASE, MAPPED, leaves_of, table

ADAMW = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
# The option, its words, the key of the file, another value there, and what arrives.
OPTIONS = [
    ("--batch", [3], "train_micro_batch_size_per_gpu", 2, {"batch.sequences": 3}),
    ("--micro-batches", [5], "gradient_accumulation_steps", 2, {"batch.micro_batches": 5}),
    ("--clip-norm", [0.5], "gradient_clipping", 0.25, {"optimizer.clip_norm": 0.5}),
    ("--precision", ["fp16"], "bf16.enabled", True, {"precision.parameters": "fp16"}),
    ("--lr", [3e-4], "optimizer.params.lr", 2e-4, {"optimizer.learning_rate": 3e-4}),
    ("--betas", [0.8, 0.9], "optimizer.params.betas", [0.9, 0.99], {"optimizer.beta1": 0.8, "optimizer.beta2": 0.9}),
    ("--eps", [1e-6], "optimizer.params.eps", 1e-7, {"optimizer.epsilon": 1e-6}),
    ("--weight-decay", [0.3], "optimizer.params.weight_decay", 0.1, {"optimizer.weight_decay": 0.3}),
    ("--warmup-steps", [77], "scheduler.params.warmup_num_steps", 10, {"optimizer.warmup_steps": 77}),
    ("--steps", [500], "scheduler.params.total_num_steps", 400, {"run.steps": 500}),
]
DECAY = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": "auto", "total_num_steps": 400}}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {}}}


def without(config, key):
    """A copy of `config` without the key, or without the section that ends with it."""
    *sections, name = key.split(".")
    config = place = json.loads(json.dumps(config))
    for section in sections:
        place = place.get(section, {})
    place.pop(name, None)
    return config


class DeepspeedValues(FileWriter):
    LABEL = "command"

    def shown(self, content, *options):
        shown = json.loads(self.run_sluice("config", "show", self.write(content), "--json", *options).stdout)
        return {key: line["value"] for key, line in shown.items()}

    def refusal(self, content, *options, command=("config", "check")):
        return self.run_sluice(*command, self.write(content), *options, expect=2).stderr

    def imported(self, content, *options, expect=0):
        return json.loads(self.run_sluice("config", "import", self.write(content), "--json", *options, expect=expect).stdout)

    def test_an_option_arrives_or_is_refused_by_name(self):
        for option, words, key, other, expected in OPTIONS:
            full = with_values({**ADAMW, **DECAY}, {key: other})
            section = key.split(".", maxsplit=1)[0]
            both = {key: "auto", **({"fp16.enabled": "auto"} if option == "--precision" else {})}
            states = {"number": full, "auto": with_values(full, both), "no key": without(full, key),
                      "no section": without(without(full, section), "scheduler" if section == "optimizer" else section)}
            for state, content in states.items():
                with self.subTest(option, state=state):
                    if state == "number":
                        self.assertRegex(self.refusal(content, option, *words), rf"the file says .*, but {option} says")
                        continue
                    if option == "--precision" and state == "no key":  # false, as in DeepSpeed: the key is the section's only one
                        self.assertIn(option, self.refusal(content, option, *words))
                        continue
                    shown = self.shown(content, option, *words)
                    self.assertEqual({key: shown[key] for key in expected}, expected)
        decay = self.shown(ADAMW, "--weight-decay", 0.3)
        self.assertEqual(decay["optimizer.groups"], [{"tensors": ["*"], "weight_decay": 0.3}])
        self.assertEqual(self.shown(without(ADAMW, "optimizer"), "--warmup-steps", 77)["optimizer.warmup_steps"], 77)

    def test_steps_reach_the_config_of_every_scheduler(self):
        cycle = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_momentum": False}
        for kind, params in (("WarmupLR", {}), ("OneCycle", cycle), ("LRRangeTest", {})):
            report = self.imported({**ADAMW, "scheduler": {"type": kind, "params": params}}, "--steps", 50)
            self.assertEqual(report["config"]["run"]["steps"], 50)

    def test_an_option_that_the_type_has_no_use_for_is_refused(self):
        def optimizer(kind):
            return {**ADAMW, "optimizer": {"type": kind, "params": {"lr": 1e-4}}}
        cycle = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_momentum": False}
        for content, options in ((optimizer("SGD"), ("--betas", 0.8, 0.9)), (optimizer("SGD"), ("--eps", 1e-6)),
                                 (optimizer("Lion"), ("--eps", 1e-6)), (optimizer("Adagrad"), ("--betas", 0.8, 0.9)),
                                 ({**ADAMW, "scheduler": {"type": "LRRangeTest", "params": {}}}, ("--warmup-steps", 7)),
                                 ({**ADAMW, "scheduler": {"type": "OneCycle", "params": cycle}}, ("--warmup-steps", 7))):
            with self.subTest(options):
                self.assertRegex(self.refusal(content, *options), rf"{options[0]} .*takes no such value; leave the option out")
        bare = without(ADAMW, "optimizer.params.lr")
        for content, key in (({**bare, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3}}}, "warmup_max_lr"),
                             ({**bare, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}}, "warmup_max_lr"),
                             ({**bare, "scheduler": {"type": "OneCycle", "params": cycle}}, "cycle_max_lr"),
                             ({**bare, "scheduler": {"type": "LRRangeTest", "params": {}}}, "lr_range_test_min_lr")):
            self.assertRegex(self.refusal(content, "--lr", 3e-4), rf"{key}.*the file says .*, but --lr says 0.0003")

    def test_set_overrides_what_the_file_says(self):
        params = {"lr": 1e-4, "betas": [0.9, 0.99], "eps": 1e-7, "weight_decay": 0.1}
        content = {**ADAMW, **DECAY, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
                   "optimizer": {"type": "AdamW", "params": params}}
        for assignment in ("optimizer.learning_rate=0.001", "batch.sequences=4", "batch.micro_batches=3", "optimizer.clip_norm=0.5",
                           "optimizer.weight_decay=0.2", "optimizer.epsilon=1e-06", "optimizer.warmup_steps=5", "run.steps=7",
                           'precision.parameters="fp32"', "optimizer.beta1=0.8", "optimizer.beta2=0.9"):
            with self.subTest(assignment):
                key, value = assignment.split("=")
                shown = self.run_sluice("config", "show", self.write(content), "--json", "--set", assignment).stdout
                self.assertEqual(json.loads(shown)[key], {"value": json.loads(value), "origin": f"--set {assignment}"})
        self.assertEqual(self.shown(content, "--set", "run.steps=7")["optimizer.schedule_steps"], 400)
        # DeepSpeed's keys of all ranks are checked among themselves.
        total = {**content, "train_batch_size": 4}
        self.assertEqual(self.shown(total, "--set", "batch.sequences=4")["batch.sequences"], 4)

    def test_what_follows_from_a_value_follows_from_that_of_set(self):
        shown = self.shown(ADAMW, "--set", "optimizer.weight_decay=0.2")
        self.assertEqual(shown["optimizer.groups"], [{"tensors": ["*"], "weight_decay": 0.2}])
        decay = with_values(ADAMW, {"optimizer.params.weight_decay": 0.1})
        self.assertEqual(self.shown(decay, "--set", "optimizer.weight_decay=0.2")["optimizer.groups"][0]["weight_decay"], 0.2)
        self.assertEqual(self.shown(decay, "--set", "optimizer.weight_decay=0")["optimizer.groups"], [])
        bare = self.run_sluice("config", "show", self.write(without(ADAMW, "optimizer")), "--json", "--set", "optimizer.learning_rate=0.01").stdout
        self.assertEqual(json.loads(bare)["optimizer.minimum_learning_rate"], {"value": 0.001, "origin": "ds.json (--set)"})
        cosine = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.5}}}
        for rate in (1e-4, "auto"):
            content = with_values({**ADAMW, **cosine}, {"optimizer.params.lr": rate})
            shown = self.shown(content, "--set", "optimizer.learning_rate=1", "--set", "optimizer.learning_rate=0.002")
            for key, value in (("learning_rate", 0.002), ("minimum_learning_rate", 0.0002), ("warmup_start", 0.001)):
                self.assertAlmostEqual(shown[f"optimizer.{key}"], value, places=12)
        self.assertEqual(self.shown({**ADAMW, "gradient_clipping": 0}, "--set", "optimizer.clip_norm=1")["optimizer.clip_epsilon"], 1e-6)
        fp16 = {**ADAMW, "bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 128}}
        shown = self.shown(fp16, "--set", "precision.parameters=fp32")
        self.assertEqual((shown["precision.parameters"], shown["precision.loss_scale.static"]), ("fp32", 1))
        betas = with_values(ADAMW, {"optimizer.params.betas": "auto"})
        shown = self.shown(betas, "--set", "optimizer.beta1=0.8", "--set", "optimizer.beta2=0.9")
        self.assertEqual((shown["optimizer.beta1"], shown["optimizer.beta2"]), (0.8, 0.9))
        self.assertIn("give --betas", self.refusal(betas, "--set", "optimizer.beta1=0.8"))
        self.assertIn("--set optimizer.learning_rate=fast", self.refusal(ADAMW, "--set", "optimizer.learning_rate=fast"))
        self.assertEqual(self.shown(with_values(ADAMW, {"optimizer.type": "SGD"}), "--set", "optimizer.epsilon=1e-6")["optimizer.epsilon"], 1e-6)

    def test_fp16_auto_beside_bf16_asks_for_the_precision(self):
        for bf16 in ({"enabled": False}, {}, None):
            content = {"train_micro_batch_size_per_gpu": 2, "bf16": bf16, "fp16": {"enabled": "auto"}}
            self.assertIn("give --precision", self.refusal(content))
            self.assertEqual(self.shown(content, "--precision", "fp16")["precision.parameters"], "fp16")
            self.assertEqual(self.shown(content, "--set", "precision.parameters=fp16")["precision.parameters"], "fp16")
        for enabled in (True, "auto"):
            content = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": enabled}, "fp16": {"enabled": "auto"}}
            self.assertEqual(self.shown(content)["precision.parameters"], "bf16")

    def test_a_gradient_that_is_not_finite_does_what_it_does_in_deepspeed(self):
        """As in step() of zero/stage3.py and zero/stage_1_and_2.py of 0.19.8."""
        for stage in (0, 1, 2, 3):
            for checks, kind in ((True, "skip"), (False, "skip" if stage == 3 else "stop")):
                content = with_values(ADAMW, {"zero_optimization.stage": stage, "bf16.check_grad_overflow": checks})
                self.assertEqual(self.shown(content)["optimizer.non_finite"], kind, (stage, checks))
            fp32 = with_values(ADAMW, {"zero_optimization.stage": stage, "bf16.enabled": False})
            self.assertEqual(self.shown(fp32)["optimizer.non_finite"], "stop" if stage == 0 else "skip", stage)

    def test_without_zero_each_overflow_halves_the_scale(self):
        """As in 0.19.8, where _update_scale() of fp16/fused_optimizer.py reads no hysteresis."""
        for stage in (0, 1, None):
            for given in (None, 2, 5):
                values = {"bf16.enabled": False, "fp16.enabled": True, "fp16.hysteresis": given, "zero_optimization.stage": stage}
                content = with_values(ADAMW, {key: value for key, value in values.items() if value is not None})
                expected = (given or 2) if stage else 1
                self.assertEqual(self.shown(content)["precision.loss_scale.hysteresis"], expected, (stage, given))
                text, = (line["text"] for line in self.imported(content)["mapped"] if line["key"] == "fp16.hysteresis")
                self.assertEqual("without ZeRO" in text, not stage, (stage, given))

    def test_a_schedule_that_begins_later_is_refused(self):
        for value in (0, 49, -2, "49"):
            content = with_values({**ADAMW, **WARMUP}, {"scheduler.params.last_batch_iteration": value})
            self.assertIn("a run that goes on knows its step", self.refusal(content))
        self.imported(with_values({**ADAMW, **WARMUP}, {"scheduler.params.last_batch_iteration": -1}))

    def test_auto_is_the_default_that_the_report_names(self):
        claims = 0
        for row in table():
            if row["class"] != "map" or "default" not in row or "auto" in row:
                continue
            key = row["key"]
            auto = with_values(BASE, {**MAPPED[key][0], key: "auto"})
            with self.subTest(key):
                text, = (line["text"] for line in self.imported(auto)["understood"] if line["key"] == key)
                if text == "chosen by Sluice":
                    self.assertEqual(self.shown(auto), self.shown(without(auto, key)))
                    continue
                claims += 1
                self.assertEqual(text, f"DeepSpeed's default, {json.dumps(row['default'])}")
                self.assertEqual(self.shown(auto), self.shown(with_values(auto, {key: row["default"]})))
        self.assertGreater(claims, 20)

    def test_a_key_that_the_type_does_not_take_is_refused(self):
        content = with_values({**ADAMW, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50}}},
                              {"optimizer.params.momentum": 0.7, "scheduler.params.warmup_max_lr": 5e-3,
                               "scheduler.params.warmup_min_lr": "auto", "scheduler.params.cycle_max_lr": 3})
        refused = {line["key"]: line["text"] for line in self.imported(content, expect=2)["refused"]}
        self.assertEqual(refused, {
            "optimizer.params.momentum": "AdamW takes no such value, and DeepSpeed raises for it; remove it",
            **{f"scheduler.params.{name}": "WarmupCosineLR takes no such value, and DeepSpeed raises for it; remove it"
               for name in ("warmup_max_lr", "warmup_min_lr", "cycle_max_lr")}})
        lion = {**ADAMW, "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "eps": 1e-3}}}
        self.assertIn("Lion takes no such value", self.refusal(lion))
        warmup = {**ADAMW, "scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 100, "cos_min_ratio": 0.1}}}
        self.assertEqual(self.refusal(warmup).count("WarmupLR takes no such value"), 2)
        for kind, key, value, options in (("Lion", "eps", "auto", ()), ("Lion", "eps", "auto", ("--eps", 1e-8)), ("Lion", "eps", "small", ()),
                                          ("Lion", "eps", 1e-6, ("--eps", 1e-8)), ("SGD", "betas", "auto", ()), ("Adagrad", "betas", "auto", ())):
            content = {**ADAMW, "optimizer": {"type": kind, "params": {"lr": 1e-4, key: value}}}
            self.only_remove(content, f"optimizer.params.{key}", *options)
        for kind, key in (("WarmupLR", "total_num_steps"), ("LRRangeTest", "warmup_num_steps")):
            self.only_remove({**ADAMW, "scheduler": {"type": kind, "params": {key: "auto"}}}, f"scheduler.params.{key}")

    def only_remove(self, content, key, *options):
        """`key` is refused for its optimizer or scheduler alone: no value in the file and no option would help."""
        with self.subTest(content, options=options):
            report = self.imported(content, *options, expect=2)
            (line,) = report["refused"]
            self.assertEqual(line["key"], key)
            self.assertRegex(line["text"], "takes no such value, and DeepSpeed raises for it; remove it$")
            self.assertEqual(report["options"], [])
            self.assertNotIn("give --", self.refusal(content, *options))

    def test_every_key_has_a_line_wherever_it_is(self):
        off = {"fp16": {"enabled": False, "loss_scale": 128, "hysteresis": 5, "consecutive_hysteresis": True}}
        for key, (around, _, other) in MAPPED.items():
            for value in (other, "auto", None):
                for content in (with_values(BASE, {key: value}), with_values({**BASE, **off}, {**around, key: value})):
                    with self.subTest(key, value=value):
                        report = self.imported(content, expect=(0, 2))
                        lines = itertools.chain(*(report[name] for name in ("mapped", "not_needed", "understood", "refused")))
                        self.assertLessEqual(leaves_of(content), {line["key"] for line in lines})
        texts = {line["key"]: line["text"] for line in self.imported({**BASE, **off})["not_needed"]}
        self.assertEqual(texts["fp16.loss_scale"], "the precision is bf16")


class DeepspeedTexts(FileWriter):
    """Files with mistakes in their text, and unusual files that DeepSpeed reads."""
    LABEL = "command"

    def write_bytes(self, content):
        with open(self.path("ds.json"), "wb") as file:
            file.write(content)
        return "ds.json"

    def test_a_file_that_is_not_utf_8_is_refused_with_its_place(self):
        for content, place in ((b"{train_batch_size: 2\n nvme_path: /donn\xe9es\n}", "2:18"), (b'{train_batch_size: 2\n "\xe9": 1}', "2:3"),
                               (b"{train_batch_size: 2\n \xe9t\xe9: 1}", "2:2"), (b'{train_batch_size: 2, a: "\xe9"}', "1:27"),
                               (b"train_batch_size: 2\nzero_optimization: {x: '''\n\xff'''}", "3:1")):
            for command in (("config", "import"), ("config", "check"), ("plan",), ("train",)):
                with self.subTest(content, command=command):
                    done = self.run_sluice(*command, self.write_bytes(content), expect=2)
                    self.assertIn(f"ds.json:{place}: byte 0x", done.stderr)
                    self.assertIn("save the file as UTF-8", done.stderr)

    def test_a_mistake_in_a_deepspeed_file_is_one_of_hjson(self):
        for content, place in (("# my config\ntrain_batch_size: 2\nbf16: {enabled: true\noptimizer: {type: AdamW\n}", "5:2: the text ends inside"),
                               ('{"train_batch_size": 2, "bf16": {"enabled": true}', "1:50: the text ends inside"),
                               ('{"train_batch_size": 2, "train_batch_size": 2}', '1:25: key "train_batch_size" is given twice'),
                               ('{"train_batch_size" 2}', "1:21: a ':' is expected")):
            for command in (("config", "check"), ("plan",), ("train",)):
                self.assertIn("ds.json:" + place, self.run_sluice(*command, self.write(content), expect=2).stderr)
        own = self.run_sluice("config", "check", self.write('{"model": {"layers": 2}, "optimizer": {"beta1": 0.9'), expect=2)
        self.assertIn("a config is JSON, and may have comments", own.stderr)

    def test_a_byte_order_mark_is_skipped(self):
        text = json.dumps(FILE).encode()
        name = self.write_bytes(b"\xef\xbb\xbf" + text)
        shown = json.loads(self.run_sluice("config", "show", name, "--json").stdout)
        self.assertEqual(shown["batch.sequences"], {"value": 2, "origin": "ds.json:1:2 (train_micro_batch_size_per_gpu)"})

    def test_block_strings_are_those_of_hjson(self):
        for text, expected in (("'''/x'''", "/x"), ("'''\n      /x\n      '''", "/x"), ("'''\n      /x\n        y  \n      '''", "/x\n  y  "),
                               ("''' /x\r\n      y\r\n'''", "/x\ny"), ("'''it's '' so'''", "it's '' so"), ("''''''", ""),
                               ("'''\n\n  /x\n\n'''", "\n/x\n"), ("'''\n          /x'''", "    /x")):
            with self.subTest(text):
                name = self.write("{\n  a:\n      " + text + "\n train_batch_size: 2}")
                report = json.loads(self.run_sluice("config", "import", name, "--json", expect=2).stdout)
                self.assertEqual([line["value"] for line in report["refused"] if line["key"] == "a"], [expected])
        name = self.write("{train_batch_size: 2\n zero_optimization: {stage: 3\n offload_param: {device: nvme\n nvme_path:\n  '''\n  /local_nvme\n  '''}}}")
        self.assertEqual(json.loads(self.run_sluice("config", "show", name, "--json").stdout)["storage.paths"]["value"], ["/local_nvme"])

    def test_a_dot_in_a_name_is_no_section(self):
        content = {**FILE, "zero_optimization.stage": 3, "optimizer.params.lr": 0.5, "_a.b": 1}
        del content["optimizer"]
        report = json.loads(self.run_sluice("config", "import", self.write(content), "--json", expect=2).stdout)
        texts = {line["key"]: line["text"] for line in report["refused"]}
        self.assertEqual(set(texts), {"zero_optimization.stage", "optimizer.params.lr"})
        self.assertIn('write {"optimizer":{"params":{"lr":0.5}}}', texts["optimizer.params.lr"])
        self.assertEqual([report["config"]["sharding"]["stage"], [line["key"] for line in report["not_needed"]]], [0, ["_a.b"]])
        both = {**FILE, "zero_optimization": {"stage": 2, "a.b": 1}, "zero_optimization.stage": 3}
        report = json.loads(self.run_sluice("config", "import", self.write(both), "--json", expect=2).stdout)
        self.assertEqual({line["key"] for line in report["refused"]}, {"zero_optimization.stage", "zero_optimization.a.b"})
        self.assertEqual(report["config"]["sharding"]["stage"], 2)

    def test_numbers_that_no_run_has(self):
        for value in (0, -1, -2):
            content = {"train_batch_size": 8, "sequence_parallel_size": value}
            refused = json.loads(self.run_sluice("config", "import", self.write(content), "--json", expect=2).stdout)["refused"]
            self.assertEqual([(line["key"], line["text"]) for line in refused],
                             [("sequence_parallel_size", f"it is {value}, but must be at least 1")])
        fp16 = {**FILE, "bf16": {"enabled": False}}
        for content, key in (({**FILE, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2**64 - 1}}}, "scheduler.params.warmup_num_steps"),
                             ({**fp16, "fp16": {"enabled": True, "loss_scale_window": 2**64 - 1}}, "fp16.loss_scale_window"),
                             ({**FILE, "train_batch_size": 2**64 - 1}, "train_batch_size")):
            refused = json.loads(self.run_sluice("config", "import", self.write(content), "--json", expect=2).stdout)["refused"]
            self.assertEqual([(line["key"], line["text"]) for line in refused],
                             [(key, "it is 18446744073709551615, but must be a whole number below 2^63")])
        content = {**FILE, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2**63 - 1}}}
        refused, = json.loads(self.run_sluice("config", "import", self.write(content), "--json", expect=2).stdout)["refused"]
        self.assertIn("at most", refused["text"])
