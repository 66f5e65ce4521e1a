"""sluice plan --model: parameters of known models, units, GPUs by name, and what it refuses."""

import json
import math
import os
import re
import struct

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
MIXTRAL = {**LLAMA, "model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8,
           "num_experts_per_tok": 2}
QWEN3_MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
             "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
             "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False}
DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False}
GEMMA2 = {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
          "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000}
T5 = {"model_type": "t5", "d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "vocab_size": 32128}
WHISPER = {"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_ffn_dim": 5120,
           "decoder_ffn_dim": 5120, "num_mel_bins": 128, "vocab_size": 51866}
VIT = {"model_type": "vit", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
       "id2label": {str(i): str(i) for i in range(1000)}}
MODELS.update({
    "Mixtral-8x7B": (MIXTRAL, 46702792704), "Qwen3-30B-A3B": (QWEN3_MOE, 30532122624),
    "DeepSeek-V3": (DEEPSEEK, 671026404352),  # without the layer that predicts a second token
    "gemma-2-9b": (GEMMA2, 9241705984), "t5-3b": (T5, 2851598336), "whisper-large-v3": (WHISPER, 1543490560),
    "vit-base-patch16-224": (VIT, 86567656)})
# Billions of parameters that a token uses, as the models' cards have them.
ACTIVE = {"Mixtral-8x7B": 12.9, "Qwen3-30B-A3B": 3.3, "DeepSeek-V3": 37.0}
# (CPU, GPU) bytes that DeepSpeed 0.19.8's estimators return, by model, GPUs of a node and nodes: stage 2 with and without
# offload; stage 3 with both, the optimizer and nothing offloaded, each with and without zero_init.
ESTIMATES = {
    ("t5-3b", 8, 1): [
        (136876720128, 5703196672), (136876720128, 12119292928), (76993155072, 131596288), (136876720128, 131596288),
        (68438360064, 844495872), (136876720128, 844495872), (1579155456, 6547692544), (136876720128, 6547692544)],
    ("t5-3b", 4, 16): [
        (1095013761024, 5703196672), (68438360064, 6505208704), (4812072192, 131596288), (68438360064, 131596288),
        (4277397504, 220708736), (68438360064, 220708736), (789577728, 933608320), (68438360064, 933608320)],
    ("Llama-2-7b", 8, 1): [
        (323443949568, 13476831232), (323443949568, 28638266368), (181937221632, 524288000), (323443949568, 524288000),
        (161721974784, 2208891904), (323443949568, 2208891904), (6291456000, 15685723136), (323443949568, 15685723136)],
    ("Llama-2-7b", 4, 16): [
        (2587551596544, 13476831232), (161721974784, 15372010624), (11371076352, 524288000), (161721974784, 524288000),
        (10107623424, 734863488), (161721974784, 734863488), (3145728000, 2419467392), (161721974784, 2419467392)],
    ("gpt2-xl", 8, 1): [
        (74765337600, 3115222400), (74765337600, 6619847600), (42055502400, 321644800), (74765337600, 321644800),
        (37382668800, 711047600), (74765337600, 711047600), (3859737600, 3826270000), (74765337600, 3826270000)],
    ("gpt2-xl", 4, 16): [
        (598122700800, 3115222400), (37382668800, 3553300550), (2628468900, 321644800), (37382668800, 321644800),
        (2336416800, 370320150), (37382668800, 370320150), (1929868800, 759722950), (37382668800, 759722950)],
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
                plan = self.plan("--model", self.write(model), "--gpu", "h200", "--host-memory", "2T", "--tokens", 512, "--ranks", 256)
                self.assertEqual(plan["parameters"], parameters)
                if name in ACTIVE:
                    self.assertAlmostEqual(plan["active_parameters"] / 1e9 / ACTIVE[name], 1, delta=0.02)
                else:
                    self.assertEqual(plan["active_parameters"], parameters)

    def test_only_the_experts_of_a_token_compute(self):
        base = ["--gpu", "h200", "--host-memory", "2T", "--tokens", 8192, "--sequence", 1, "--ranks", 256]
        compute = [self.plan("--model", self.write({**MIXTRAL, "num_experts_per_tok": used}), *base)["placements"][0]["compute_s"]
                   for used in (1, 2, 3)]
        expert = 32 * 3 * 14336 * 4096
        self.assertAlmostEqual((compute[1] - compute[0]) / (6 * expert * 8192 / (0.4 * 989e12)), 1, places=6)
        self.assertAlmostEqual((compute[2] - compute[1]) / (compute[1] - compute[0]), 1, places=6)

    def test_as_deepspeed_has_its_estimators_numbers(self):
        for (name, gpus, nodes), rows in ESTIMATES.items():
            with self.subTest(f"{name} on {nodes} x {gpus}"):
                plan = self.plan("--model", self.write(MODELS[name][0]), "--as", "deepspeed", "--ranks", gpus * nodes, "--nodes", nodes,
                                 "--gpu", "h200", "--host-memory", "2T", "--tokens", 512)
                self.assertEqual([(row["cpu_bytes"], row["gpu_bytes"]) for row in plan["deepspeed"]], rows)
                self.assertIn("Sluice, this config: ", self.done.stdout)
        # As its documentation prints them for t5-3b on a node with 8 GPUs (deepspeed.readthedocs.io/en/latest/memory.html).
        self.plan("--model", self.write(T5), "--as", "deepspeed", "--ranks", 8, "--gpu", "h200", "--host-memory", "2T", "--tokens", 512)
        for row in ("2851M parameters, 32M in the largest module", "71.71GB |   0.12GB", "127.48GB |   0.12GB", "63.74GB |   0.79GB",
                    "1.47GB |   6.10GB", "127.48GB |   6.10GB"):
            self.assertIn(row, self.done.stdout)
        self.assertIn("--nodes 3 does not divide --ranks 8", self.run_sluice("plan", "--ranks", 8, "--nodes", 3, expect=2).stderr)

    def write_tensors(self, name, shapes, types=None):
        """A safetensors file of BF16 zeros, or of `types` by name, which say no size; its bytes take no room."""
        header, end = {}, 0
        for tensor, shape in shapes.items():
            dtype = (types or {}).get(tensor, "BF16")
            size = 2 * math.prod(shape) if dtype == "BF16" else 0
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with open(self.path(name), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)

    def test_any_other_model_is_read_from_its_tensors(self):
        os.mkdir(self.path("model"))
        self.write({"model_type": "mamba", "num_experts_per_tok": 1}, "model/config.json")
        shapes = {"backbone.embeddings.weight": [1000, 64], "lm_head.weight": [1000, 64], "norm_f.weight": [64]}
        for layer in range(3):
            shapes[f"backbone.layers.{layer}.mixer.in_proj.weight"] = [128, 64]
            shapes[f"backbone.layers.{layer}.norm.weight"] = [64]
            for expert in range(4):
                shapes[f"backbone.layers.{layer}.experts.{expert}.weight"] = [32, 64]
        names = list(shapes)
        self.write_tensors("model/model-00001-of-00002.safetensors", {name: shapes[name] for name in names[:9]})
        self.write_tensors("model/model-00002-of-00002.safetensors", {name: shapes[name] for name in names[9:]})
        index = {"weight_map": {name: f"model-0000{1 + (i >= 9)}-of-00002.safetensors" for i, name in enumerate(names)}}
        with open(self.path("model/model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump(index, file)
        for path in ("model", "model/model.safetensors.index.json"):
            plan = self.plan("--model", path, *ON_4090, "--tensors", "tensors.json")
            self.assertEqual(plan["parameters"], sum(math.prod(shape) for shape in shapes.values()))
            self.assertEqual(plan["parameters"] - plan["active_parameters"], 3 * 3 * 32 * 64)
            units = self.read_json("tensors.json")["units"]
            self.assertEqual([unit["name"] for unit in units], ["embedding", "backbone.layers.0", "backbone.layers.1", "backbone.layers.2", "head"])
            self.assertEqual({name: shape for unit in units for name, shape in unit["tensors"].items()}, shapes)
            self.assertIn("mamba, from its tensors, 3 layers of width 64", self.done.stdout)
        self.write_tensors("flat.safetensors", {"weight": [8, 8]})
        self.assertIn("none of their names has a number that repeats", self.run_sluice("plan", "--model", "flat.safetensors", expect=2).stderr)
        with open(self.path("model/model-00002-of-00002.safetensors"), "r+b") as file:
            file.truncate(100)
        self.assertIn("model-00002-of-00002", self.run_sluice("plan", "--model", "model", expect=2).stderr)

    def refused_tensors(self, shapes, types=None):
        self.write_tensors("some.safetensors", {"embed.weight": [100, 64], "h.0.norm": [64], **shapes}, types)
        return self.run_sluice("plan", "--model", "some.safetensors", expect=2).stderr

    def test_quantized_tensors_are_refused(self):
        packed = {"h.0.q.scales": [1, 64], "h.0.q.qweight": [64, 8]}
        for dtype in ("U8", "I8", "I32"):
            self.assertIn(f"has quantized tensors (h.0.q.qweight is {dtype})", self.refused_tensors(packed, {"h.0.q.qweight": dtype}))
        # A mask and a small part do not count.
        self.write_tensors("some.safetensors", {**packed, "h.0.w": [64, 64], "h.0.mask": [1, 1, 500, 500]}, {"h.0.q.qweight": "U8", "h.0.mask": "U8"})
        self.assertEqual(self.plan("--model", "some.safetensors", *ON_4090)["parameters"], 64 + 64 * 64)

    def test_extents_that_no_tensor_has_are_refused(self):
        for dtype in ("F64", "F8_E4M3", "I32"):
            for shape in ([10**12, 1000], [10**12, 1, 1000], [1 << 32, 1 << 32], [5, 0]):
                self.assertIn(f'tensor "h.0.experts.up" of type {dtype} has the shape [{shape[0]}, ', self.refused_tensors(
                    {"h.0.experts.up": shape}, {"h.0.experts.up": dtype}))
        many = {f"h.0.{i}.up": [1 << 16, 1 << 32] for i in range(4)}
        self.assertIn("parameters, but plans are made for fewer than 1e+15", self.refused_tensors(many, dict.fromkeys(many, "F64")))
        self.write_tensors("some.safetensors", {"h.0.up": [10**12, 1, 1], "h.0.experts.up": [10**12, 1, 1], "h.1.norm": []},
                           {"h.0.up": "F64", "h.0.experts.up": "F64", "h.1.norm": ""})
        self.assertIn("64.0 TiB of the host's memory", self.run_sluice("plan", "--model", "some.safetensors", expect=5).stderr)

    def units_of_tensors(self, shapes, config=None):
        os.makedirs(self.path("some"), exist_ok=True)
        self.write_tensors("some/model.safetensors", shapes)
        if config is not None:
            self.write(config, "some/config.json")
        self.result = self.plan("--model", "some", *ON_4090, "--tensors", "tensors.json")
        return [(unit["name"], list(unit["tensors"])) for unit in self.read_json("tensors.json")["units"]]

    def test_the_head_of_gpt_neox_is_no_embedding(self):
        layers = {f"gpt_neox.layers.{i}.attention.dense.weight": [64, 64] for i in range(2)}
        shapes = {"gpt_neox.embed_in.weight": [1000, 64], **layers, "gpt_neox.final_layer_norm.weight": [64], "embed_out.weight": [1000, 64]}
        units = self.units_of_tensors(shapes)
        self.assertEqual(units[0], ("embedding", ["gpt_neox.embed_in.weight"]))
        self.assertEqual(units[-1][0], "head")
        self.assertIn("embed_out.weight", units[-1][1])

    def test_tensors_know_the_experts_of_a_token(self):
        shapes = {"embed.weight": [1000, 64], "h.0.norm.weight": [64], "h.0.shift": [], "embed.a": []}
        together = {**shapes, "h.0.experts.up": [4, 32, 64], "h.0.experts.down": [4, 64, 32], "h.0.experts.up_bias": [4, 32]}
        single = {f"h.0.experts.{i}.{name}": shape for i in range(4) for name, shape in (("up", [32, 64]), ("down", [64, 32]))}
        of_text = {"text_config": {"num_experts_per_tok": 1, "tie_word_embeddings": True}}  # no model_type: the tensors tell
        idle = 3 * 2 * 32 * 64
        self.units_of_tensors({**shapes, **single}, of_text)
        self.assertEqual(self.result["parameters"] - self.result["active_parameters"], idle)
        activations = {}
        for used in (1, 2, 4):
            for name, experts in (("together", together), ("single", {**shapes, **single})):
                self.units_of_tensors(experts, {"num_experts_per_tok": used})
                activations[name, used] = self.result["activation_bytes"]
                self.assertNotIn("unknown", self.done.stdout)
        for name in ("together", "single"):  # a product's input each, of width 64 and 32
            self.assertEqual(activations[name, 2] - activations[name, 1], 4096 * 2 * (64 + 32))
            self.assertEqual(activations[name, 4] - activations[name, 1], 4096 * 2 * 3 * (64 + 32))
        self.units_of_tensors({**shapes, **single}, {})
        self.assertIn("experts per token unknown: all counted", self.done.stdout)
        self.assertEqual(self.result["parameters"], self.result["active_parameters"])

    def test_attention_without_a_mask_has_all_keys(self):
        heads = T5["num_heads"] * T5["d_kv"]
        # The sum over layers of keys times width, for a sequence of two tokens: half of them are behind a mask.
        cases = ((T5, 24 * 2 * heads + 24 * (heads + 2 * heads)), (VIT, 12 * 2 * 768), (GPT2, 12 * 768))
        for model, widths in cases:
            with self.subTest(model["model_type"]):
                base = ["--model", self.write(model), "--gpu", "h200", "--host-memory", "2T", "--tokens", 8192]
                short, long = (self.plan(*base, "--sequence", length)["placements"][0]["compute_s"] for length in (64, 192))
                self.assertAlmostEqual((long - short) / (3 * 2 * 8192 * 128 * widths / (0.4 * 989e12)), 1, places=4)

    def elements(self, *stacks):
        """The elements of all units of these names, or of names with a number behind them."""
        return sum(math.prod(shape) for unit in self.read_json("tensors.json")["units"] if re.sub(r"\.\d+$", "", unit["name"]) in stacks
                   for shape in unit["tensors"].values())

    def test_whisper_hears_thirty_seconds_for_every_text(self):
        width, layers, frames, kept = 1280, 32, 1500, 8 * 1280 + 2 * 5120
        for length, sequences in ((448, 4), (100, 4), (100, 9)):
            with self.subTest(f"{sequences} x {length}"):
                plan = self.plan("--model", self.write(WHISPER), "--gpu", "h200", "--host-memory", "2T", "--sequence", length,
                                 "--tokens", sequences * length, "--tensors", "tensors.json")
                convolutions = width * (2 * 128 * 3 + 1) + width * (width * 3 + 1)  # the first has twice as many outputs
                encoder = frames * (convolutions + self.elements("encoder", "encoder.norm") + layers * frames * 2 * width)
                decoder = self.elements("decoder", "head") + WHISPER["vocab_size"] * width + layers * (2 * frames + length) * width
                forward = 2 * sequences * (encoder + length * decoder)
                self.assertAlmostEqual(plan["placements"][0]["compute_s"] / (3 * forward / (0.4 * 989e12)), 1, places=6)
                activations = 2 * sequences * layers * kept * (frames + 2 * length) + 4 * sequences * length * WHISPER["vocab_size"]
                self.assertAlmostEqual(plan["activation_bytes"] / activations, 1, places=6)

    def test_vits_classifier_sees_one_token_of_an_image(self):
        plan = self.plan("--model", self.write(VIT), "--gpu", "h200", "--host-memory", "2T", "--tokens", 8 * 197, "--tensors", "tensors.json")
        of_token = 768 * (3 * 16 * 16 + 1) + self.elements("layer") + 12 * 2 * 768 * 197 + 2 * 768
        forward = 2 * 8 * (197 * of_token + 1000 * 769)
        self.assertAlmostEqual(plan["placements"][0]["compute_s"] / (3 * forward / (0.4 * 989e12)), 1, places=6)

    def test_the_length_of_a_sequence(self):
        on = ["--gpu", "h200", "--host-memory", "2T"]
        for model, limit in ((GPT2, 1024), (WHISPER, 448), (VIT, 197)):
            name = self.write(model)
            refused = self.run_sluice("plan", "--model", name, *on, "--sequence", limit + 1, expect=2).stderr
            self.assertIn(f"--sequence {limit + 1} is more than the {limit} positions for which config.json has embeddings; give "
                          f"--sequence {limit} or less", refused)
            self.plan("--model", name, *on, "--sequence", limit)
        long = ["--sequence", 5000, "--tokens", 5000]
        self.plan("--model", self.write(LLAMA), *on, *long)
        self.assertIn(", sequences of 5000 tokens, more than the 4096 of the model's config\n", self.done.stdout)
        without = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
        for model in (T5, without):
            self.plan("--model", self.write(model), *on, *long)
            self.assertIn(", sequences of 5000 tokens\n", self.done.stdout)
        # No more than a micro-batch has.
        self.plan("--model", self.write(LLAMA), *on, "--tokens", 512, "--set", "batch.micro_batches=4")
        self.assertIn(", sequences of 128 tokens\n", self.done.stdout)
        refused = self.run_sluice("plan", "--model", "config.json", *on, "--tokens", 512, "--sequence", 300, "--set", "batch.micro_batches=2",
                                  expect=2).stderr
        self.assertIn("--tokens 512 in 2 micro-batches have no room for one sequence of --sequence 300; give at least --tokens 600", refused)

    def test_a_tied_head_is_said_where_there_is_one(self):
        for model in (T5, QWEN, GPT2, WHISPER):
            for is_tied in (True, False):
                self.plan("--model", self.write({**model, "tie_word_embeddings": is_tied}), "--gpu", "h200", "--host-memory", "2T", "--tokens", 512)
                self.assertEqual(", a tied head" in self.done.stdout, is_tied, model["model_type"])

    def test_a_folder_is_as_its_config(self):
        os.mkdir(self.path("model"))
        self.write(GPT2, "model/config.json")
        of_folder = self.plan("--model", "model", *ON_4090)
        self.assertEqual(of_folder, self.plan("--model", "model/config.json", *ON_4090))

    def test_the_verdict_comes_first(self):
        model = self.write(MODELS["Llama-3-8B"][0])
        self.plan("--model", model, *ON_4090)
        lines = self.done.stdout.splitlines()
        self.assertRegex(lines[0], r"^fits: [0-9.e+]+ s per step, bound by [a-zA-Z ]+(; .* makes it [0-9.e+]+ s)?$")
        self.assertEqual(lines[1], "config.json: llama, 32 layers of width 4096, sequences of 2048 tokens")
        self.assertIn("7.00 GB/s", self.done.stdout)
        self.assertIn("5.00 GB/s", self.done.stdout)
        done = self.run_sluice("plan", "--model", model, "--gpu", "4090", "--host-memory", "1MiB", "--tokens", 4096, expect=5)
        self.assertRegex(done.stdout.splitlines()[0], r"^does not fit: memory\.host = 1.00 MiB is too small")
        done = self.run_sluice("plan", "--model", model, "--gpu", "4090", "--tokens", "4e6", expect=5)
        self.assertIn("does not fit: the activations of 4000000 tokens take", done.stderr)

    def test_the_verdict_has_the_least_change_that_helps(self):
        base = ["--model", self.write(LLAMA), "--gpu", "4090", "--tokens", 2048, "--set", "activations=recompute", "--set",
                "placement.parameters=auto", "--set", "placement.optimizer=auto"]
        self.plan(*base, "--host-memory", "40G")
        told = re.match(r"fits: (\S+) s per step, bound by .*; (\S+) GiB more host memory makes it (\S+) s$", self.done.stdout.splitlines()[0])
        self.assertTrue(told, self.done.stdout.splitlines()[0])
        plan = self.plan(*base, "--host-memory", f"{40 + float(told[2])}G")
        self.assertAlmostEqual(plan["placements"][0]["step"]["step_s"] / float(told[3]), 1, delta=0.01)
        self.assertLess(float(told[3]), 0.95 * float(told[1]))
        self.plan(*base[:-2], "--set", "placement.optimizer=nvme", "--host-memory", "200G")
        self.assertRegex(self.done.stdout.splitlines()[0], r"; placement\.\S+.* makes it ")

    def test_the_verdict_of_a_large_model_has_it_too(self):
        shape = ["--parameters", "20B", "--layers", 40, "--gpu", "h100", "--tokens", 2048, "--set", "activations=recompute"]
        self.plan(*shape, "--host-memory", "100G")  # 19,000 blocks
        told = re.match(r"fits: (\S+) s per step, bound by .*; (\S+) GiB more host memory makes it (\S+) s$", self.done.stdout.splitlines()[0])
        self.assertTrue(told, self.done.stdout.splitlines()[0])
        plan = self.plan(*shape, "--host-memory", f"{100 + float(told[2])}G")
        self.assertAlmostEqual(plan["placements"][0]["step"]["step_s"] / float(told[3]), 1, delta=0.01)

    def test_a_model_of_one_unit_is_told_of_layers(self):
        base = ["plan", "--parameters", "8B", "--gpu", "4090", "--host-memory", "64G", "--tokens", 1000, "--set", "activations=recompute"]
        hint = "; all parameters are one unit: --layers cuts them into units that take turns"
        self.assertTrue(self.run_sluice(*base, expect=5).stdout.splitlines()[0].endswith(hint))
        self.assertNotIn(hint, self.run_sluice(*base, "--layers", 32).stdout)

    def test_a_rate_beyond_the_data_sheet_is_said(self):
        text = ", which is more than the GPU can: check the rate of computation\n"
        model = self.write(LLAMA)
        base = ["--model", model, "--gpu", "h200", "--host-memory", "2T", "--tokens", "64K", "--set", "activations=recompute",
                "--adam-rate", "1T", "--copy-rate", "1TB"]
        self.plan(*base, "--flops", "989T")
        self.assertNotIn(text, self.done.stdout)
        self.assertGreater(self.plan(*base, "--flops", "20000T")["mfu"], 1)
        self.assertIn(text, self.done.stdout)

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

    def test_a_config_has_the_operations_of_its_model(self):
        """As `plan --model` and as train's own count. A look-up is no product."""
        width, layers, context, vocabulary = 768, 12, 1024, 50257
        forward = 2 * (12 * width**2 * layers + width * vocabulary + width * context * layers)
        machine = ["--gpu", "4090", "--host-memory", "64G", "--tokens", 8192, "--flops", 1e12]
        model = self.plan("--model", self.write(GPT2, "gpt2.json"), "--sequence", context, *machine)
        for tied in (True, False):
            config = self.write_config({"model": {"layers": layers, "heads": 12, "embedding": width, "context": context,
                                                  "vocabulary": vocabulary, "tied_head": tied}, "batch": {"micro_batches": 2}})
            plan = self.plan(config, *machine)
            seconds = plan["placements"][0]["compute_s"]
            self.assertAlmostEqual(seconds / (8192 * 3 * forward / 1e12), 1, places=6)
            self.assertAlmostEqual(seconds / model["placements"][0]["compute_s"], 1, delta=2e-3)

    def test_numbers_as_people_write_them(self):
        for text, parameters in (("8B", 8e9), ("124M", 124e6), ("1.5B", 1.5e9), ("500K", 5e5)):
            plan = self.plan("--parameters", text, "--layers", 4, "--gpu", "h200", "--host-memory", "2T")
            self.assertAlmostEqual(plan["parameters"] / parameters, 1, places=6)

    def test_what_is_refused(self):
        cases = [({"model_type": "mamba"}, "plans know llama, mistral"), ({}, '"model_type" is missing'),
                 ({**LLAMA, "hidden_size": None}, '"hidden_size" is missing'), ({**LLAMA, "hidden_size": 0}, "from 1 to"),
                 ({**LLAMA, "hidden_size": "4096"}, "from 1 to"), ({**LLAMA, "num_attention_heads": 33}, "does not divide"),
                 ({**LLAMA, "num_hidden_layers": 200000}, "too many"), ({**GPT2, "n_head": 7}, "does not divide"),
                 ({**LLAMA, "tie_word_embeddings": 3}, "no boolean"),
                 ({**MIXTRAL, "num_experts_per_tok": 9}, "a layer has 8 experts"), ({**VIT, "patch_size": 15}, "does not divide"),
                 ({**DEEPSEEK, "kv_lora_rank": None}, '"kv_lora_rank" is missing'), ({**LLAMA, "hidden_size": []}, '"hidden_size" is array'),
                 ({**MIXTRAL, "intermediate_size": 1 << 28, "num_local_experts": 1 << 28}, "mlp.experts.gate_up_proj"),
                 ({**DEEPSEEK, "moe_intermediate_size": 1 << 28, "n_shared_experts": 1 << 28, "n_routed_experts": 8}, "mlp.shared_experts"),
                 ({**VIT, "image_size": 1 << 28, "patch_size": 1}, "position_embeddings"),
                 ({**LLAMA, "intermediate_size": 1 << 28, "num_hidden_layers": 100000}, "plans are made for fewer than 1e+15")]
        for model, text in cases:
            with self.subTest(text):
                done = self.run_sluice("plan", "--model", self.write(model), expect=2)
                self.assertIn("config", done.stderr)
                self.assertIn(text, done.stderr)
        with open(self.path("config.json"), "w", encoding="utf-8") as file:
            file.write('{"hidden_size": ' + "[" * 100_000 + "]" * 100_000 + "}")
        self.assertIn("nested more than 64 deep", self.run_sluice("plan", "--model", "config.json", expect=2).stderr)
        self.assertIn("gone", self.run_sluice("plan", "--model", "gone", expect=2).stderr)
        self.assertIn("4090, 5090", self.run_sluice("plan", "--gpu", "5", expect=2).stderr)
        self.assertIn("no JSON object", self.run_sluice("plan", "--model", self.write([1]), expect=2).stderr)
