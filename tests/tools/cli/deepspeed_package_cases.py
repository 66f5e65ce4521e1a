"""Learning rates and estimates of memory against DeepSpeed's own source, which is fetched from the package index: every update of
10,000, and every row of both estimators for three models."""

import ast
import collections
import importlib.util
import json
import math
import os
import subprocess
import sys

from cli_support import SOURCE, CliCase
from python_packages import with_source

FOLDER = os.path.join(SOURCE, "tests", "tools", "deepspeed")
# A process of its own, which replaces torch by a stand-in.
RATES = """
import json, sys
sys.path.insert(0, sys.argv[1])
import deepspeed_rates as rates
module = rates.schedulers(sys.argv[2])
print(json.dumps({name: rates.rates_of(module, schedule) for name, schedule in rates.SCHEDULES.items()}))
"""


def functions_of(path, *names):
    """Functions of a file that cannot be imported as a whole, for lack of torch."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list = []
    scope = {"math": math}
    exec(compile(ast.Module(body=found, type_ignores=[]), path, "exec"), scope)  # pylint: disable=exec-used
    return [scope[name] for name in names]


class DeepspeedPackage(CliCase):
    LABEL = "slow"

    def setUp(self):
        super().setUp()
        self.source = with_source(self, "deepspeed")

    def test_every_rate_of_every_schedule(self):
        done = subprocess.run([sys.executable, "-B", "-c", RATES, FOLDER, self.source], capture_output=True, text=True, check=True)
        theirs = json.loads(done.stdout)
        spec = importlib.util.spec_from_file_location("deepspeed_rates", os.path.join(FOLDER, "deepspeed_rates.py"))
        known = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(known)
        self.assertEqual(set(theirs), set(known.SCHEDULES))
        for name, rates in theirs.items():
            with self.subTest(name):
                with open(self.path("ds.json"), "w", encoding="utf-8") as file:
                    json.dump({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "scheduler": known.SCHEDULES[name],
                               "optimizer": {"type": "AdamW", "params": {"lr": known.OPTIMIZER_RATE}}}, file)
                lines = self.run_sluice("config", "rates", "ds.json", "--steps", known.UPDATES).stdout.splitlines()
                self.assertEqual(len(lines), len(rates))
                for update, (line, rate) in enumerate(zip(lines, rates)):
                    self.assertLessEqual(abs(float(line.split()[1]) - rate), 1e-12 * abs(rate) + 1e-18, update)

    def estimates(self, parameters, largest, gpus, nodes):
        zero = os.path.join(self.source, "deepspeed", "runtime", "zero")
        (second,) = functions_of(os.path.join(zero, "stage_1_and_2.py"), "estimate_zero2_model_states_mem_needs")
        (third,) = functions_of(os.path.join(zero, "stage3.py"), "estimate_zero3_model_states_mem_needs")
        machine = {"num_gpus_per_node": gpus, "num_nodes": nodes}
        rows = [second(parameters, cpu_offload=offload, **machine) for offload in (True, False)]
        rows += [third(parameters, largest, cpu_offload=optimizer, cpu_offload_params=both, zero_init=init, **machine)[:2]
                 for optimizer, both in ((True, True), (True, False), (False, False)) for init in (True, False)]
        return [tuple(row) for row in rows]

    def test_both_estimators(self):
        for model in ("t5-3b", "llama-2-7b", "gpt2-xl"):
            for gpus, nodes in ((1, 1), (8, 1), (4, 16)):
                with self.subTest(f"{model} on {nodes} x {gpus}"):
                    self.run_sluice("plan", "--model", model, "--as", "deepspeed", "--ranks", gpus * nodes, "--nodes", nodes, "--gpu", "h200",
                                    "--host-memory", "2T", "--tokens", 512, "--json", "plan.json", "--tensors", "tensors.json")
                    modules = collections.Counter()
                    for unit in self.read_json("tensors.json")["units"]:
                        for name, shape in unit["tensors"].items():
                            modules[name.rpartition(".")[0]] += math.prod(shape)
                    plan = self.read_json("plan.json")
                    ours = [(row["cpu_bytes"], row["gpu_bytes"]) for row in plan["deepspeed"]]
                    self.assertEqual(ours, self.estimates(int(plan["parameters"]), max(modules.values()), gpus, nodes))
