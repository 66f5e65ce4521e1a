"""sluice config, and --set: every value comes from where the command says."""

import json
import os

from cli_support import CliCase

# A byte that no UTF-8 has, as in names of older systems.
BYTE = os.fsdecode(b"\xff")


class Assignments(CliCase):
    LABEL = "command"

    def shown(self, config, *assignments):
        """{key: (value, origin)} of `config show`."""
        words = [word for assignment in assignments for word in ("--set", assignment)]
        shown = json.loads(self.run_sluice("config", "show", config, "--json", *words).stdout)
        return {key: (entry["value"], entry["origin"]) for key, entry in shown.items()}

    def test_a_section_keeps_the_keys_that_it_does_not_name(self):
        config = self.write_config(base={"storage": {"paths": ["/d1", "/d2"], "state": {"name": "mine"}}})
        shown = self.shown(config, 'storage={"queue_depth":8}')
        self.assertEqual(shown["storage.paths"], (["/d1", "/d2"], "config.json:1:14"))
        self.assertEqual(shown["storage.state.name"][0], "mine")
        self.assertEqual(shown["storage.queue_depth"], (8, '--set storage={"queue_depth":8}'))

    def test_the_last_assignment_is_the_origin(self):
        shown = self.shown(self.write_config(), "optimizer.beta1=0.5", 'optimizer={"beta1":0.4}', 'storage.paths=["/a","/b"]',
                           "storage.paths.1=/c")
        self.assertEqual(shown["optimizer.beta1"], (0.4, '--set optimizer={"beta1":0.4}'))
        self.assertEqual(shown["storage.paths"], (["/a", "/c"], "--set storage.paths.1=/c"))

    def test_a_mistake_names_the_assignment(self):
        config = self.write_config({"optimizer.beta1": 0.8})
        for assignment, why in (('optimizer={"beta1":5}', '"optimizer.beta1" is 5'), ('optimizer={"betta":1}', 'unknown key "optimizer.betta"'),
                                ("optimizer.groups.0=3", '"optimizer.groups" is 3'), ("storage.weights.0=0", '"storage.weights" is 0'),
                                ('optimizer.groups=[{"tensors":["a"],"weight_decay":-1}]', '"optimizer.groups.0.weight_decay" is -1'),
                                ('optimizer={"beta1":0.5,"beta1":0.4}', 'key "optimizer.beta1" is given twice')):
            with self.subTest(assignment):
                refused = self.run_sluice("config", "show", config, "--set", assignment, expect=2)
                self.assertTrue(refused.stderr.startswith(f"sluice: --set {assignment}: {why}"), refused.stderr)

    def test_a_section_counts_for_a_deepspeed_file_as_its_keys_do(self):
        with open(self.path("ds.json"), "w", encoding="ascii") as file:
            json.dump({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, file)
        self.run_sluice("config", "check", "ds.json", expect=2)
        self.run_sluice("config", "check", "ds.json", "--set", 'optimizer={"learning_rate":0.001}')


class OtherBytes(CliCase):
    """Paths may have bytes that are no UTF-8; JSON may not."""

    LABEL = "command"

    def test_they_are_shown_as_replaced(self):
        config = self.write_config()
        setting = f"data.file=/tmp/{BYTE}"
        shown = self.run_sluice("config", "show", config, "--set", setting).stdout
        self.assertIn('"/tmp/\ufffd"', shown)
        self.assertIn("trace.ring", shown)  # and what comes behind it
        shown = json.loads(self.run_sluice("config", "show", config, "--json", "--set", setting).stdout)
        self.assertEqual(shown["data.file"], {"value": "/tmp/\ufffd", "origin": "--set data.file=/tmp/\ufffd"})
        os.rename(self.path(config), self.path(f"u{BYTE}.json"))
        shown = json.loads(self.run_sluice("config", "show", "--json", f"u{BYTE}.json").stdout)
        self.assertEqual(shown["data.file"]["origin"], "u\ufffd.json:1:79")

    def test_a_wrong_value_is_named(self):
        refused = self.run_sluice("config", "check", self.write_config(), "--set", f"run.device={BYTE}", expect=2)
        self.assertIn('"run.device" is "\ufffd", but must be one of', refused.stderr)

    def test_no_config_is_written_with_them(self):
        config = self.write_config()
        for words in (("plan", config, "-o", "out.json", "--set", f"data.file={BYTE}"),
                      ("plan", config, "-o", "out.json", "--set", f'storage.paths.0={BYTE}', "--set", "storage.paths.1=b"),
                      ("plan", config, "-o", "out.json", "--set", 'optimizer.groups=[{"tensors":["*"]}]', "--set",
                       f"optimizer.groups.0.tensors.0={BYTE}"),
                      ("tune", config, "-o", "out.json", "--set", f"data.file={BYTE}"),
                      ("tune", config, "-o", "out.json", "--data", BYTE)):
            with self.subTest(words):
                refused = self.run_sluice(*words, expect=2)
                self.assertIn("no UTF-8", refused.stderr)
                self.assertNotIn("measuring", refused.stderr)
                self.assertFalse(os.path.exists(self.path("out.json")))


class Checked(CliCase):
    LABEL = "command"

    def test_what_train_refuses_for_the_config_alone(self):
        config = self.write_config()
        for setting, code in (('optimizer.groups=[{"tensors":["nothing*"]}]', 2), ('storage.paths=[""]', 2)):
            with self.subTest(setting):
                checked = self.run_sluice("config", "check", config, "--set", setting, expect=code)
                self.assertEqual(checked.stderr, self.run_sluice("train", config, "--set", setting, expect=code).stderr)
        refused = self.run_sluice("config", "check", config, "--set", "run.device=cuda", "--set", "precision.parameters=fp16",
                                  expect=5)
        self.assertIn('run.device is "cuda": ', refused.stderr)
        self.run_sluice("config", "check", config, "--set", 'optimizer.groups=[{"tensors":["*"],"weight_decay":0}]')

    def test_contradictions_have_their_place(self):
        config = self.write_config(base={"optimizer": {"overlap": "eager"}})
        refused = self.run_sluice("config", "check", config, expect=2)
        self.assertIn('sluice: config.json:1:16: "optimizer.overlap": eager updates before the last gradient', refused.stderr)

    def test_a_minimum_above_the_rate_is_the_defaults(self):
        config = self.write_config(base={"optimizer": {"learning_rate": 5e-5}})
        refused = self.run_sluice("config", "check", config, expect=2)
        self.assertIn('config.json:1:16: "optimizer.minimum_learning_rate" is 0.0001 (the default), more than "optimizer.learning_rate" = '
                      "5e-05; set it to 0 or to another rate below", refused.stderr)
        refused = self.run_sluice("config", "check", config, "--set", "optimizer.minimum_learning_rate=0.1", expect=2)
        self.assertIn('sluice: --set optimizer.minimum_learning_rate=0.1: "optimizer.minimum_learning_rate" is 0.1, more', refused.stderr)

    def test_a_rate_that_cannot_fall_is_said(self):
        values = {"optimizer.learning_rate": 1e-4, "optimizer.minimum_learning_rate": 1e-4, "run.steps": 1}
        said = self.run_sluice("train", self.write_config(values)).stdout
        self.assertIn("the learning rate stays at 0.0001 after its warm-up: optimizer.minimum_learning_rate is 0.0001\n", said)
        said = self.run_sluice("train", self.write_config(values), "--set", "optimizer.schedule=constant").stdout
        self.assertNotIn("the learning rate stays", said)


class Explained(CliCase):
    LABEL = "command"

    def test_entries_of_lists(self):
        for key in ("optimizer.groups.0.tensors", "optimizer.groups[].tensors"):
            self.assertIn("Names of tensors", self.run_sluice("config", "explain", key).stdout)
        for key in ("optimizer.groups.foo", "storage.paths.xyz", "storage.paths.", "optimizer.groups.tensors"):
            with self.subTest(key):
                self.assertIn(f'has a key "{key}"', self.run_sluice("config", "explain", key, expect=2).stderr)
        refused = self.run_sluice("config", "explain", "optimizer.groups.tensors", expect=2).stderr
        self.assertIn('did you mean "optimizer.groups.0.tensors"?', refused)
        for key in ("storage.paths.0", "storage.paths[]"):
            self.assertIn(f"{key} is an entry of a list; name the list, storage.paths\n",
                          self.run_sluice("config", "explain", key, expect=2).stderr)

    def test_a_dot_in_a_file_is_part_of_the_name(self):
        config = self.write_config(base={"run.steps": 3, "storage": {"state.name": "a"}})
        refused = self.run_sluice("config", "check", config, expect=2).stderr
        self.assertIn('unknown key "run.steps"; write {"run": {"steps": ...}}\n', refused)
        self.assertIn('unknown key "storage.state.name"; write {"state": {"name": ...}}', refused)
