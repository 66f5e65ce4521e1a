"""sluice plan --model: parameters of known models, units, GPUs by name, and what it refuses."""

import json
import os

from cli_support import CliCase

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False}
QWEN = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 131072, "tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
# Published numbers of parameters (each tensor once), as their model cards and safetensors indices have them.
MODELS = {
    "Llama-2-7b": (LLAMA, 6738415616),
    "Llama-3-8B": ({**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}, 8030261248),
    "Mistral-7B": ({**LLAMA, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}, 7241732096),
    "Qwen2-0.5B": (QWEN, 494032768),
    "Qwen2-7B": ({**QWEN, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                  "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}, 7615616512),
    "Qwen3-0.6B": ({**QWEN, "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}, 596049920),
    "gpt2": (GPT2, 124439808),
    "gpt2-xl": ({**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1557611200),
}
ON_4090 = ["--gpu", "4090", "--host-memory", "64G", "--read-rate", "7000MB/s", "--write-rate", "5G", "--tokens", 4096]


class PlanModel(CliCase):
    LABEL = "command"

    def write(self, model, name="config.json"):
        with open(self.path(name), "w", encoding="utf-8") as file:
            json.dump(model, file)
        return name

    def plan(self, *arguments, expect=0):
        self.done = self.run_sluice("plan", *arguments, "--json", "plan.json", expect=expect)
        return self.read_json("plan.json") if expect == 0 else None

    def test_parameters_are_those_of_the_models(self):
        for name, (model, parameters) in MODELS.items():
            with self.subTest(name):
                plan = self.plan("--model", self.write(model), "--gpu", "h200", "--host-memory", "2T", "--tokens", 2048)
                self.assertEqual(plan["parameters"], parameters)

    def test_a_folder_is_as_its_config(self):
        os.mkdir(self.path("model"))
        self.write(GPT2, "model/config.json")
        of_folder = self.plan("--model", "model", *ON_4090)
        self.assertEqual(of_folder, self.plan("--model", "model/config.json", *ON_4090))

    def test_the_verdict_comes_first(self):
        model = self.write(MODELS["Llama-3-8B"][0])
        self.plan("--model", model, *ON_4090)
        lines = self.done.stdout.splitlines()
        self.assertRegex(lines[0], r"^fits: [0-9.e+]+ s a step, bound by [a-zA-Z ]+$")
        self.assertEqual(lines[1], "config.json: llama, 32 layers of width 4096, sequences of 2048 tokens")
        self.assertIn("7.00 GB/s", self.done.stdout)
        self.assertIn("5.00 GB/s", self.done.stdout)
        done = self.run_sluice("plan", "--model", model, "--gpu", "4090", "--host-memory", "1MiB", "--tokens", 4096, expect=5)
        self.assertRegex(done.stdout.splitlines()[0], r"^does not fit: memory\.host = 1.00 MiB is too small")
        done = self.run_sluice("plan", "--model", model, "--gpu", "4090", "--tokens", "4e6", expect=5)
        self.assertIn("does not fit: activations of", done.stderr)

    def test_time_follows_from_flops_and_attention(self):
        model = self.write(LLAMA)
        base = ["--model", model, "--gpu", "h200", "--host-memory", "2T", "--tokens", 8192]
        plan = self.plan(*base, "--sequence", 1024)
        inner = 6738415616 - 32000 * 4096  # without the embedding, which is only looked up
        forward = 2 * inner * 8192 + 32 * 2 * 1024 * 4096 * 8192
        own = plan["placements"][0]
        self.assertAlmostEqual(own["compute_s"] / (3 * forward / (0.4 * 989e12)), 1, places=6)
        longer = self.plan(*base, "--sequence", 8192)["placements"][0]["compute_s"]
        self.assertGreater(longer, own["compute_s"])

    def test_a_tied_head_is_the_embedding_once_more(self):
        tied = self.plan("--model", self.write(QWEN), *ON_4090)
        other = self.plan("--model", self.write({**QWEN, "tie_word_embeddings": False}), *ON_4090)
        self.assertEqual(other["parameters"] - tied["parameters"], 151936 * 896)
        self.assertAlmostEqual(tied["placements"][0]["compute_s"] / other["placements"][0]["compute_s"], 1, places=6)

    def test_numbers_as_people_write_them(self):
        for text, parameters in (("8B", 8e9), ("124M", 124e6), ("1.5B", 1.5e9), ("500K", 5e5)):
            plan = self.plan("--parameters", text, "--layers", 4, "--gpu", "h200", "--host-memory", "2T")
            self.assertAlmostEqual(plan["parameters"] / parameters, 1, places=6)

    def test_what_is_refused(self):
        cases = [({"model_type": "mamba"}, "plans know llama, mistral"), ({}, '"model_type" is missing'),
                 ({**LLAMA, "hidden_size": None}, '"hidden_size" is missing'), ({**LLAMA, "hidden_size": 0}, "from 1 to"),
                 ({**LLAMA, "hidden_size": "4096"}, "from 1 to"), ({**LLAMA, "num_attention_heads": 33}, "does not divide"),
                 ({**LLAMA, "num_hidden_layers": 200000}, "too many"), ({**GPT2, "n_head": 7}, "does not divide"),
                 ({**LLAMA, "tie_word_embeddings": 3}, "no boolean")]
        for model, text in cases:
            with self.subTest(text):
                done = self.run_sluice("plan", "--model", self.write(model), expect=2)
                self.assertIn("config.json", done.stderr)
                self.assertIn(text, done.stderr)
        self.assertIn("gone", self.run_sluice("plan", "--model", "gone", expect=2).stderr)
        self.assertIn("4090, l40s", self.run_sluice("plan", "--gpu", "5", expect=2).stderr)
        self.assertIn("no JSON object", self.run_sluice("plan", "--model", self.write([1]), expect=2).stderr)
