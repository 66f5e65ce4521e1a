"""DeepSpeed files as people have them: mistakes that are often copied, "auto", Hjson, base64; and the commands that take
them."""

import base64
import json
import math
import os
import time

import cli_support

FILE = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}}
RATES = os.path.join(cli_support.SOURCE, "tests", "tools", "deepspeed", "deepspeed_rates.json")


def warmed_up(params, iteration):
    """DeepSpeed's warm-up as a share, or None behind it."""
    steps = max(2, params.get("warmup_num_steps", 1000))
    if iteration >= steps:
        return None
    return iteration / steps if params.get("warmup_type") == "linear" else math.log(iteration + 1) / math.log(steps)


def cycle_rate(params, update):
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    up = params.get("cycle_first_step_size", 2000)
    down = params.get("cycle_second_step_size", up)
    if update > up + down:
        size, rate = params.get("decay_step_size", 0), params.get("decay_lr_rate", 0)
        return low / (1 + rate * (update - up - down) / size) if size else low
    stairs = params.get("cycle_first_stair_count", 0)
    position = update / up
    if update > up:
        position, stairs = (up + down - update) / down, params.get("cycle_second_stair_count", stairs)
    if stairs:
        left = update if update <= up else up + down - update
        position = left * stairs // (up if update <= up else down) / stairs
    return low + (high - low) * position


def deepspeed_rate(schedule, base, update):
    """The rate of an update by DeepSpeed's published definitions; its engine moves the scheduler behind each update."""
    kind, params = schedule["type"], schedule["params"]
    if kind == "OneCycle":
        return cycle_rate(params, update)
    if kind == "LRRangeTest":
        passed = update / params.get("lr_range_test_step_size", 2000)
        if params.get("lr_range_test_staircase"):
            passed = math.floor(passed)
        return params.get("lr_range_test_min_lr", 1e-3) * (1 + params.get("lr_range_test_step_rate", 1) * passed)
    iteration = update - 1
    steps = max(2, params.get("warmup_num_steps", 1000))
    if kind == "WarmupCosineLR":
        if iteration < 0:
            return 0.0
        share = warmed_up(params, iteration)
        if share is not None:
            low = params.get("warmup_min_ratio", 0)
            return base * (low + share * (1 - low))
        low = params.get("cos_min_ratio", 1e-4)
        progress = min(1.0, (iteration - steps + 1) / max(1, params["total_num_steps"] - steps))
        return base * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)
    low = params.get("warmup_min_lr", 0)
    high = params.get("warmup_max_lr", base if kind == "WarmupLR" else 1e-3)
    if iteration < 0:
        return low
    share = warmed_up(params, iteration)
    if share is None:
        total = params.get("total_num_steps")
        share = 1 if kind == "WarmupLR" else max(0, (total - iteration) / max(1, total - steps))
    return low + (high - low) * share


class FileWriter(cli_support.CliCase):
    def write(self, content, name="ds.json"):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(content if isinstance(content, str) else json.dumps(content, indent=1))
        return name


class DeepspeedFiles(FileWriter):
    LABEL = "cpu"

    def report(self, content, *options, expect=0):
        done = self.run_sluice("config", "import", self.write(content), "--json", *options, expect=expect)
        return json.loads(done.stdout)

    def understood(self, content, key):
        report = self.report(content)
        self.assertIn(key, [line["key"] for line in report["understood"]])
        return report["config"]

    def refused(self, content, key, *options):
        lines = [line for line in self.report(content, *options, expect=2)["refused"] if line["key"] == key]
        self.assertTrue(lines, key)
        return lines[0]["text"]

    def test_rates_are_those_of_deepspeed(self):
        with open(RATES, encoding="utf-8") as file:
            document = json.load(file)
        base, updates = document["optimizer_rate"], document["updates"]
        self.assertEqual(updates, 10000)
        self.assertGreater(len(document["cases"]), 15)
        for case in document["cases"]:
            with self.subTest(case["name"]):
                name = self.write({**FILE, "optimizer": {"type": "AdamW", "params": {"lr": base}}, "scheduler": case["scheduler"]})
                lines = self.run_sluice("config", "rates", name, "--steps", updates).stdout.splitlines()
                rates = [float(line.split()[1]) for line in lines]
                self.assertEqual(len(rates), updates)
                for update, rate in enumerate(rates):
                    expected = deepspeed_rate(case["scheduler"], base, update)
                    self.assertLessEqual(abs(rate - expected), 1e-12 * expected + 1e-18, update)
                for update, expected in case["rates"].items():
                    self.assertLessEqual(abs(rates[int(update)] - expected), 1e-12 * expected + 1e-18, update)

    def test_what_everybody_copies_is_understood(self):
        inside = {**FILE, "zero_optimization": {"stage": 3, "aio": {"queue_depth": 9, "thread_count": 2}}}
        self.assertEqual(self.understood(inside, "zero_optimization.aio")["storage"]["queue_depth"], 9)
        old = {**FILE, "bfloat16": {"enabled": True}}
        del old["bf16"]
        self.assertEqual(self.understood(old, "bfloat16")["precision"]["parameters"], "bf16")
        flag = {**FILE, "zero_optimization": {"stage": 2, "cpu_offload": True}}
        self.assertEqual(self.understood(flag, "zero_optimization.cpu_offload")["placement"]["optimizer"], "host")
        self.assertEqual(self.understood({**FILE, "zero_stage": 2}, "zero_stage")["sharding"]["stage"], 2)
        self.assertEqual(self.understood({**FILE, "zero_optimization": True}, "zero_optimization")["sharding"]["stage"], 1)
        strings = {**FILE, "zero_optimization": {"stage": "3", "overlap_comm": "true"}, "bf16": {"enabled": "true"},
                   "optimizer": {"type": "AdamW", "params": {"lr": "2e-5"}}}
        config = self.understood(strings, "optimizer.params.lr")
        self.assertEqual((config["sharding"]["stage"], config["optimizer"]["learning_rate"]), (3, 2e-5))
        self.assertEqual(config["precision"]["parameters"], "bf16")
        below = {**FILE, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
        self.assertEqual(self.understood(below, "zero_optimization.offload_param.device")["placement"]["parameters"], "device")

    def test_adam_is_adamw_and_decays_every_tensor(self):
        config = self.report({**FILE, "optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}})["config"]["optimizer"]
        self.assertEqual((config["type"], config["learning_rate"], config["beta2"], config["epsilon"]),
                         ("adamw", 1e-3, 0.999, 1e-8))
        self.assertEqual(config["groups"], [{"tensors": ["*"], "weight_decay": 0.1}])
        self.assertEqual((config["schedule"], config["warmup_steps"]), ("constant", 0))
        self.assertEqual((config["clip_norm"], config["clip_epsilon"]), (1.0, 1e-6))
        self.assertNotIn("state", config)
        for other in ("Muon", "Lamb", "OneBitAdam", "ZeroOneAdam", "adamw_torch_fused", "sgd", "MuAdam", "lion_8bit", "Adam8bit"):
            self.refused({**FILE, "optimizer": {"type": other}}, "optimizer.type")

    def test_adamw_of_torch_has_the_decay_of_torch(self):
        def optimizer(kind, **params):
            return self.report({**FILE, "optimizer": {"type": kind, "params": {"lr": 1e-4, **params}}})["config"]["optimizer"]
        for kind in ("AdamW", "Adam"):
            torch = optimizer(kind, torch_adam=True)
            self.assertEqual((torch["weight_decay"], torch["groups"]), (0.01, [{"tensors": ["*"], "weight_decay": 0.01}]))
            for off in (False, 0, "", None):
                self.assertEqual(optimizer(kind, torch_adam=off)["weight_decay"], 0)
            self.assertEqual(optimizer(kind, torch_adam="torch_impl")["weight_decay"], 0.01)  # as a file of optimum-habana has it
            self.assertEqual(optimizer(kind, torch_adam=True, weight_decay=0)["weight_decay"], 0)
            self.assertEqual(optimizer(kind, torch_adam=True, weight_decay=0.3)["weight_decay"], 0.3)
        self.assertEqual(optimizer("Adam", torch_adam=True, adam_w_mode=False)["weight_decay"], 0)
        self.refused({**FILE, "optimizer": {"type": "Lion", "params": {"torch_adam": True}}}, "optimizer.params.torch_adam")

    def test_values_that_train_refuses_are_refused_with_their_keys(self):
        betas = {**FILE, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 1.5]}}}
        self.assertIn('"optimizer.beta2" is 1.5, but must be less than 1', self.refused(betas, "optimizer.params.betas"))
        name = self.write(betas)
        self.run_sluice("config", "import", name, "--lenient", "-o", "out.json")
        self.assertEqual([self.read_json("out.json")["optimizer"][key] for key in ("beta1", "beta2")], [0.9, 0.999])
        self.run_sluice("config", "check", "out.json")
        cycle = {**FILE, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.001,
                                                                      "cycle_momentum": False}}}
        self.assertIn('"optimizer.minimum_learning_rate" is 0.01, more than', json.dumps(self.report(cycle, expect=2)["refused"]).replace("\\", ""))
        done = self.run_sluice("config", "import", self.write(cycle), "--lenient", "-o", "cycle.json", expect=2)
        self.assertIn("optimizer.minimum_learning_rate", done.stderr)
        self.assertFalse(os.path.exists(self.path("cycle.json")))

    def test_what_may_be_on_is_refused_in_any_spelling(self):
        for value in (0.5, "0.5", [0.5], True):
            sgd = {**FILE, "optimizer": {"type": "SGD", "params": {"lr": 1e-4, "dampening": value}}}
            self.refused(sgd, "optimizer.params.dampening")
        for value in (0, "0", None):
            sgd = {**FILE, "optimizer": {"type": "SGD", "params": {"lr": 1e-4, "dampening": value}}}
            self.report(sgd)

    def test_adamw_in_8_bits_keeps_its_moments_so(self):
        for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "AdamW8bit", "PagedAdamW8bit"):
            with self.subTest(name):
                report = self.report({**FILE, "optimizer": {"type": name, "params": {"lr": 1e-4}}})
                config = report["config"]["optimizer"]
                self.assertEqual((config["type"], config["state"], config["learning_rate"]), ("adamw", "8bit", 1e-4))
                self.assertIn("bitsandbytes", json.dumps(report["mapped"]))

    def test_a_file_without_an_optimizer_takes_options(self):
        name = self.write({"train_batch_size": 2, "bf16": {"enabled": True}})
        self.assertNotIn("learning_rate", self.report({"train_batch_size": 2})["config"]["optimizer"])
        optimizer = json.loads(self.run_sluice("config", "import", name, "--lr", "2e-5", "--betas", "0.8", "0.9", "--eps", "1e-7",
                                               "--weight-decay", "0.3").stdout)["optimizer"]
        self.assertEqual([optimizer[key] for key in ("learning_rate", "minimum_learning_rate", "beta1", "beta2", "epsilon",
                                                     "weight_decay")], [2e-5, 2e-5 / 10, 0.8, 0.9, 1e-7, 0.3])
        self.run_sluice("config", "check", name, "--lr", "2e-5")
        self.run_sluice("config", "check", name, "--set", "optimizer.learning_rate=2e-5")

    def test_batch_keys_are_checked_with_their_numbers(self):
        three = {**FILE, "train_batch_size": 7, "gradient_accumulation_steps": 2}
        self.assertIn("it is 7, but train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 2 x 3 ranks are 12",
                      self.refused(three, "train_batch_size", "--ranks", 3))
        three["train_batch_size"] = 12
        self.assertEqual(self.report(three, "--ranks", 3)["config"]["batch"], {"sequences": 2, "micro_batches": 2})
        total = {"train_batch_size": 12, "optimizer": FILE["optimizer"]}
        self.assertEqual(self.report(total, "--ranks", 3)["config"]["batch"], {"sequences": 4, "micro_batches": 1})
        self.assertIn("7", self.refused({**total, "train_batch_size": 7}, "train_batch_size", "--ranks", 2))
        del total["train_batch_size"]
        self.assertIn("--batch", self.refused(total, "train_micro_batch_size_per_gpu"))
        self.assertIn("the file says 2, but --batch says 3",
                      self.refused(FILE, "train_micro_batch_size_per_gpu", "--batch", 3))
        derived = {**FILE, "train_batch_size": 16}
        derived.pop("gradient_accumulation_steps", None)
        self.assertEqual(self.report(derived)["config"]["batch"], {"sequences": 2, "micro_batches": 8})
        self.assertIn("the file says 8, by its train_batch_size, but --micro-batches says 2",
                      self.refused(derived, "gradient_accumulation_steps", "--micro-batches", 2))

    def test_a_batch_of_none_is_refused(self):
        for key, other, assignment in (("gradient_accumulation_steps", {}, "batch.micro_batches=0"),
                                       ("train_micro_batch_size_per_gpu", {}, "batch.sequences=0"),
                                       ("train_micro_batch_size_per_gpu", {"gradient_accumulation_steps": 2}, "batch.sequences=0")):
            name = self.write({"train_batch_size": 32, key: "auto", **other})
            for command in ("plan", "train", "tune"):
                with self.subTest(command=command, key=key):
                    done = self.run_sluice(command, name, "--set", assignment, expect=2)
                    self.assertRegex(done.stderr, rf'"{assignment[:-2]}" is 0, but must be at least 1')

    def test_the_steps_are_asked_for_as_the_command_takes_them(self):
        name = self.write({**FILE, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})
        for command in (("plan",), ("tune",), ("config", "rates")):
            with self.subTest(command):
                done = self.run_sluice(*command, name, expect=2)
                self.assertIn("give --set run.steps=N", done.stderr)
                self.assertNotIn("give --steps", done.stderr)
        self.run_sluice("plan", name, "--set", "run.steps=9")
        self.assertEqual(len(self.run_sluice("config", "rates", name, "--set", "run.steps=9").stdout.splitlines()), 9)
        for command in (("config", "import"), ("config", "check"), ("config", "show"), ("train",)):
            self.assertIn("give --steps", self.run_sluice(*command, name, expect=2).stderr)

    def test_many_keys_take_no_time_without_end(self):
        begin = time.monotonic()
        self.run_sluice("plan", self.write("{" + ",".join(f"k{i}:1" for i in range(100_000))), expect=2)
        self.assertLess(time.monotonic() - begin, 200 if cli_support.SANITIZE else 20)

    def test_options_beside_what_the_file_says_or_leaves_out(self):
        bare = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
        for precision in ("bf16", "fp16", "fp32"):
            self.assertEqual(self.report(bare, "--precision", precision)["config"]["precision"]["parameters"], precision)
        self.assertIn("the file says fp32, but --precision says bf16",
                      self.refused({**bare, "bf16": {"enabled": False}}, "bf16.enabled", "--precision", "bf16"))

    def test_auto_names_the_option_and_takes_it(self):
        auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
                "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
                "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                                  "warmup_num_steps": "auto", "total_num_steps": "auto"}},
                "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}}
        options = ["--batch", 4, "--micro-batches", 2, "--clip-norm", 0.5, "--lr", 3e-4, "--betas", 0.8, 0.9, "--eps", 1e-7,
                   "--weight-decay", 0.2, "--warmup-steps", 5, "--steps", 40]
        asked = self.report(auto, expect=2)
        self.assertEqual(set(asked["options"]), {option for option in options if str(option).startswith("--")})
        config = self.report(auto, *options)["config"]
        self.assertEqual(config["batch"], {"sequences": 4, "micro_batches": 2})
        optimizer = config["optimizer"]
        self.assertEqual([optimizer[key] for key in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "clip_norm",
                                                     "warmup_steps", "schedule_steps")],
                         [3e-4, 0.8, 0.9, 1e-7, 0.2, 0.5, 5, 40])
        self.assertEqual((config["precision"]["parameters"], config["run"]["steps"]), ("bf16", 40))
        self.assertEqual(self.report(auto, *options, "--precision", "fp16")["config"]["precision"]["parameters"], "fp16")

    def test_typos_are_refused_with_a_suggestion(self):
        self.assertIn('"gradient_clipping"', self.refused({**FILE, "gradient_cliping": 1}, "gradient_cliping"))
        nested = {**FILE, "zero_optimization": {"stage": 3, "overlap_com": True}}
        self.assertIn('"zero_optimization.overlap_comm"', self.refused(nested, "zero_optimization.overlap_com"))
        done = self.run_sluice("config", "import", self.write('{\n  "bf16": {"enabled": true},\n   "train_batch_sise": 3\n}'),
                               expect=2)
        self.assertIn("ds.json:3:4: train_batch_sise 3", done.stderr)

    def test_values_that_deepspeed_refuses(self):
        zero = {"stage": 3}
        for key, value, hint in [("reduce_bucket_size", "5e7", "write 50000000"), ("reduce_bucket_size", 0, "at least 1"),
                                 ("stage3_prefetch_bucket_size", 14745.6, "write 14746"), ("stage", [2, 3], "autotuner"),
                                 ("stage", 4, "at most 3")]:
            self.assertIn(hint, self.refused({**FILE, "zero_optimization": {**zero, key: value}}, "zero_optimization." + key))
        self.refused({**FILE, "fp16": {"enabled": True}}, "fp16.enabled")
        fp16 = {**FILE, "bf16": {"enabled": False}}
        self.assertIn("at least 1", self.refused({**fp16, "fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale"))
        self.assertIn("write 1", self.refused({**fp16, "fp16": {"enabled": True, "min_loss_scale": 0.5}}, "fp16.min_loss_scale"))
        nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "none"}}
        self.assertIn("nvme_path", self.refused({**FILE, "zero_optimization": nvme}, "zero_optimization.offload_param.device"))

    def test_one_drive_for_both_is_one_path(self):
        os.mkdir(self.path("real"))
        os.symlink("real", self.path("link"))
        for one, other in (("/drive", "/drive/./"), ("real", self.path("real")), ("gone", self.path("gone")), ("real", "link")):
            zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": one},
                    "offload_optimizer": {"device": "nvme", "nvme_path": other}}
            self.assertEqual(self.report({**FILE, "zero_optimization": zero})["config"]["storage"]["paths"], [one])

    def test_hjson_and_base64(self):
        text = """# no braces
  train_batch_size: 2   // of all
  bf16: {
    enabled: true
  }
  /* nothing
     here */
  optimizer: {type: "AdamW", 'params': {"lr": 1e-3,},}
  zero_optimization: {
    stage: 3
    offload_param: {
      device: nvme
      nvme_path: /a folder/with # and , in it
    }
  }
"""
        config = self.report(text)["config"]
        self.assertEqual(config["storage"]["paths"], ["/a folder/with # and , in it"])
        self.assertEqual((config["batch"]["sequences"], config["optimizer"]["learning_rate"]), (2, 1e-3))
        for encode in (base64.urlsafe_b64encode, base64.b64encode):
            done = self.run_sluice("config", "import", encode(json.dumps(FILE).encode()).decode(), "--json")
            self.assertEqual(json.loads(done.stdout)["config"], self.report(FILE)["config"])
        long = base64.b64encode(json.dumps({**FILE, "comment": "x" * 9000}).encode()).decode()
        self.assertIn("optimizer.learning_rate", self.run_sluice("config", "show", long).stdout)
        for broken, place in [('{"bf16": {"enabled": true}, "bf16": {}}', "1:29"), ('{"a": 1', "1:8"), ('{"a" 1}', "1:6"),
                              ('{"a": [1, 2', "1:12"), ('{"a": "x\n"}', "1:7"), ("[1]", "1:1"), ('{"a": 1} 2', "1:10"),
                              ('{"a": ' + "[" * 40, "1:38")]:
            done = self.run_sluice("config", "import", self.write(broken), expect=2)
            self.assertIn("ds.json:" + place + ":", done.stderr)

    def test_values_are_for_files_of_deepspeed(self):
        config = self.write_config()
        for words, key in ((("--lr", "3"), "optimizer.learning_rate=3"), (("--batch", "7"), "batch.sequences=7"), (("--precision", "fp32"), "precision.parameters=fp32"),
                           (("--betas", "0.9,0.99"), "optimizer.beta1=0.9 --set optimizer.beta2=0.99")):
            for command in (("train",), ("plan",), ("config", "check"), ("config", "show"), ("config", "rates")):
                refused = self.run_sluice(*command, config, *words, expect=2).stderr
                self.assertIn(f"{words[0]} is a value for \"auto\" in a DeepSpeed file", refused)
                self.assertIn(f"give --set {key} instead", refused)
        self.assertIn("is a config of Sluice already", self.run_sluice("config", "import", config, expect=2).stderr)
        self.run_sluice("config", "diff", config, self.write({**FILE, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}), "--lr", "3")
        own = self.write('{"model": {"layers": 3}}', "own.json")
        for words in (("--lr", "3"), ("--betas", "0.9,0.99"), ("--precision", "fp32"), ("--steps", "50"), ("--ranks", "2")):
            refused = self.run_sluice("config", "diff", config, own, *words, expect=2).stderr
            self.assertIn("neither config.json nor own.json is a DeepSpeed file", refused)
        for command in ("check", "show"):
            self.assertIn("give --set run.steps=50 instead", self.run_sluice("config", command, config, "--steps", "50", expect=2).stderr)
            self.assertIn("--ranks is a value for a DeepSpeed file", self.run_sluice("config", command, config, "--ranks", "2", expect=2).stderr)

    def test_output_goes_where_it_is_asked_for(self):
        name = self.write({**FILE, "gradient_cliping": 1})
        refused = self.run_sluice("config", "import", name, "-o", "out.json", expect=2)
        self.assertFalse(os.path.exists(self.path("out.json")))
        self.assertIn("1 refused", refused.stdout)
        lenient = self.run_sluice("config", "import", name, "-o", "out.json", "--lenient")
        self.assertIn("--lenient goes on without it", lenient.stderr)
        with open(self.path("out.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file), self.report(FILE)["config"])
        self.run_sluice("config", "check", "out.json")
        # A terminal breaks no line of JSON, where a break would be within a text.
        for words in ((), ("--json",)):
            name = self.write({**FILE, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a folder" * 20}}})
            with open(os.devnull, "wb") as nowhere:
                shown = self.on_terminal(80, "config", "import", name, *words, stderr=nowhere)
            self.assertIn("config" if words else "storage", json.loads(shown.replace("\r\n", "\n")))
        plain = self.run_sluice("config", "import", self.write(FILE))
        self.assertEqual(json.loads(plain.stdout), self.report(FILE)["config"])
        self.assertIn("none refused", plain.stderr)

    def test_show_diff_check_and_explain(self):
        name = self.write(FILE)
        shown = json.loads(self.run_sluice("config", "show", name, "--json", "--set", "run.seed=4").stdout)
        self.assertEqual(shown["optimizer.beta2"], {"value": 0.999, "origin": "ds.json (optimizer.params.betas)"})
        self.assertEqual(shown["batch.sequences"], {"value": 2, "origin": "ds.json:2:2 (train_micro_batch_size_per_gpu)"})
        self.assertEqual(shown["run.seed"], {"value": 4, "origin": "--set run.seed=4"})
        self.assertEqual(shown["model.layers"], {"value": 6, "origin": "default"})
        own = self.write('{"model": {"layers": 3}}', "own.json")
        diff = self.run_sluice("config", "diff", own, self.write({}, "plain.json")).stdout
        self.assertEqual(diff.splitlines()[0], "model.layers: 3 (own.json:1:12) -> 6 (default)")
        self.assertRegex(diff.splitlines()[1], r"^1 of \d+ keys differ$")
        self.assertIn("ds.json is a config that sluice train takes", self.run_sluice("config", "check", name).stdout)
        self.assertIn("overlap_comm", self.run_sluice("config", "check", self.write({**FILE, "overlap_com": 1}), expect=2).stderr)
        self.assertIn("default 0.95", self.run_sluice("config", "explain", "optimizer.beta2").stdout)
        self.assertIn("did you mean", self.run_sluice("config", "explain", "gradient_cliping", expect=2).stderr)


class DeepspeedTraining(FileWriter):
    LABEL = "io"
    SETTINGS = ["--set", "model.layers=1", "--set", "model.embedding=32", "--set", "model.heads=2", "--set", "model.context=16",
                "--set", "run.device=host", "--set", "storage.paths=[\"storage\"]", "--data", "text.txt"]

    def test_train_takes_it_and_equals_the_imported_config(self):
        content = {**FILE, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                   "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 4}}}
        name = self.write(content)
        done = self.run_sluice("train", name, *self.SETTINGS, "--json", "a.json")
        self.assertRegex(done.stdout.splitlines()[0], r"^ds\.json is a DeepSpeed file: \d+ values mapped, 0 not needed, "
                                                      r"0 understood, none refused")
        self.run_sluice("config", "import", name, "-o", "own.json")
        own = self.run_sluice("train", "own.json", *self.SETTINGS, "--json", "b.json")
        self.assertNotIn("DeepSpeed", own.stdout)
        self.assertEqual(self.read_json("a.json")["state_sha256"], self.read_json("b.json")["state_sha256"])
        self.assertEqual(len(self.read_json("a.json")["steps"]), 4)
        self.run_sluice("train", name, *self.SETTINGS, "--steps", 1, "--json", "a.json")  # overrides the file's total
        self.assertEqual(len(self.read_json("a.json")["steps"]), 1)

    def test_an_epsilon_of_clipping_and_a_large_scale_reach_the_run(self):
        name = self.write({**FILE, "gradient_clipping": 0.01})
        settings = [*self.SETTINGS, "--steps", 1, "--quiet", "--json", "a.json"]
        hashes = set()
        for epsilon in (0, 1e-6, 0.5):
            self.run_sluice("train", name, *settings, "--set", f"optimizer.clip_epsilon={epsilon}", "--set", "optimizer.type=sgd")
            hashes.add(self.read_json("a.json")["state_sha256"])
        self.assertEqual(len(hashes), 3)
        fp16 = {**FILE, "bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 32}}
        self.run_sluice("train", self.write(fp16), *settings)
        self.assertEqual(self.read_json("a.json")["steps"][0]["loss_scale"], 2**32)

    def test_a_run_does_not_go_on_under_another_schedule(self):
        name = self.write({**FILE, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}})
        run = ["train", name, *self.SETTINGS, "--quiet", "--checkpoint", "saved"]
        self.run_sluice(*run, "--steps", 1)
        done = self.run_sluice(*run, "--steps", 2, "--resume", "--set", "optimizer.warmup=linear", expect=2)
        self.assertIn("the config has changed: optimizer.warmup was log and is linear; change it back", done.stderr)
        self.run_sluice(*run, "--steps", 2, "--resume")

    def test_train_refuses_before_anything_is_made(self):
        name = self.write({**FILE, "train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "Muon"}})
        done = self.run_sluice("train", name, *self.SETTINGS, "--json", "a.json", expect=2)
        self.assertIn("optimizer.type \"Muon\"", done.stderr)
        self.assertIn("give --batch", done.stderr)
        self.assertFalse(os.path.exists(self.path("a.json")))
        name = self.write({**FILE, "train_micro_batch_size_per_gpu": "auto"})
        self.run_sluice("train", name, *self.SETTINGS, "--batch", 1, "--steps", 1)
        self.run_sluice("train", name, *self.SETTINGS, "--set", "batch.sequences=1", "--steps", 1)
        self.run_sluice("plan", name, *self.SETTINGS[:-2], "--batch", 1)

