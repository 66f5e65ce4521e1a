"""Saved models: the format, read here by hand; saving and starting from them without the loss of a
bit; `sluice generate`."""

import json
import os
import re
import resource
import struct
import subprocess

from cli_support import SMALL_CONFIG, CliCase

# No update changes a weight: the step is far below the smallest fp32 number.
FROZEN = {"optimizer.learning_rate": 1e-300, "optimizer.minimum_learning_rate": 0}


def read_safetensors(path):
    """(metadata, {name: (shape, bytes)} in the order of the file), checked as the format asks."""
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0 and content[8:9] == b"{"
    header = json.loads(content[8:8 + length])
    metadata = header.pop("__metadata__")
    data = content[8 + length:]
    tensors = {}
    end = 0
    for name, entry in header.items():
        assert entry["dtype"] == "F32"
        begin, end_of_this = entry["data_offsets"]
        assert begin == end, "tensors lie one behind the other"
        count = 1
        for extent in entry["shape"]:
            count *= extent
        assert end_of_this - begin == 4 * count
        tensors[name] = (entry["shape"], data[begin:end_of_this])
        end = end_of_this
    assert end == len(data)
    return metadata, tensors


def expected_shapes(model, tied):
    width = model["embedding"]
    shapes = {"wte.weight": [256, width], "wpe.weight": [model["context"], width]}
    for layer in range(model["layers"]):
        for name, shape in (
                ("ln_1.weight", [width]), ("ln_1.bias", [width]),
                ("attn.c_attn.weight", [width, 3 * width]), ("attn.c_attn.bias", [3 * width]),
                ("attn.c_proj.weight", [width, width]), ("attn.c_proj.bias", [width]),
                ("ln_2.weight", [width]), ("ln_2.bias", [width]),
                ("mlp.c_fc.weight", [width, 4 * width]), ("mlp.c_fc.bias", [4 * width]),
                ("mlp.c_proj.weight", [4 * width, width]), ("mlp.c_proj.bias", [width])):
            shapes[f"h.{layer}.{name}"] = shape
    shapes["ln_f.weight"] = [width]
    shapes["ln_f.bias"] = [width]
    if not tied:
        shapes["lm_head.weight"] = [256, width]
    return shapes


class SavedModel(CliCase):
    def mapped_by_generate(self, layers):
        """The bytes that `generate` has mapped once it prints tokens."""
        values = {"model.layers": layers, "model.context": 1024, "model.embedding": 64, "batch.sequences": 1, "batch.micro_batches": 1,
                  "activations": "recompute", "run.steps": 1}
        self.run_sluice("train", self.write_config(values), "--quiet", "--save", "deep")
        process = subprocess.Popen(self.command("generate", "--model", "deep", "--prompt", "in", "--tokens", 100_000, "--threads", 1),
                                   cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.assertEqual(len(process.stdout.read(3)), 3)
        with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
            return 1024 * int(re.search(r"VmSize:\s+(\d+) kB", file.read()).group(1))

    def test_generate_has_the_activations_of_one_layer(self):
        # A layer of this shape has 16 x 1024 x 64 values, 4 MiB.
        self.assertLess(self.mapped_by_generate(48) - self.mapped_by_generate(2), 64 << 20)

    def content(self, name):
        with open(self.path(name), "rb") as file:
            return file.read()

    def test_format(self):
        for tied in (True, False):
            self.train({"model.tied_head": tied}, "--save", "model")
            metadata, tensors = read_safetensors(self.path("model"))
            self.assertEqual(metadata, {
                "model.layers": "2", "model.heads": "2", "model.embedding": "64",
                "model.context": "32", "model.vocabulary": "256",
                "model.tied_head": "true" if tied else "false"})
            self.assertEqual({name: shape for name, (shape, _) in tensors.items()},
                             expected_shapes(SMALL_CONFIG["model"], tied))

    def test_save_and_init_keep_every_bit(self):
        for precision in ("bf16", "fp32"):
            values = {"precision.parameters": precision, "placement.optimizer": "nvme"}
            self.train(values, "--save", "first", "--steps", 5)
            self.train({**values, **FROZEN}, "--init", "first", "--save", "second", "--steps", 1)
            self.assertEqual(self.content("first"), self.content("second"))
            self.train(values, "--init", "first", "--save", "third", "--steps", 1)
            self.assertNotEqual(self.content("first"), self.content("third"))

    def test_init_goes_on_where_it_was(self):
        self.train(None, "--save", "model", "--steps", 200, "--seed", 1)
        learned = self.train(None, "--init", "model", "--steps", 1, "--seed", 2)
        fresh = self.train(None, "--steps", 1, "--seed", 2)
        self.assertLess(learned["steps"][0]["loss"], fresh["steps"][0]["loss"] - 1)

    def test_save_over_its_own_init(self):
        self.train(None, "--save", "model")
        before = self.content("model")
        self.train(FROZEN, "--init", "model", "--save", "model", "--steps", 1)
        self.assertEqual(self.content("model"), before)

    def test_init_with_a_weight_that_is_not_finite(self):
        self.train(None, "--save", "model")
        content = bytearray(self.content("model"))
        for value in (float("nan"), float("inf")):
            content[-4:] = struct.pack("<f", value)
            with open(self.path("bad"), "wb") as file:
                file.write(content)
            done = self.run_sluice("train", self.write_config(), "--init", "bad", "--save", "new", expect=2)
            self.assertIn('--init "bad": ', done.stderr)
            self.assertIn('the value given for "ln_f.bias" (unit "head") at element 63', done.stderr)
            self.assertIn("check the source", done.stderr)
            self.assertFalse(os.path.exists(self.path("new")))

    def test_init_reads_what_hugging_face_writes(self):
        for tied in (True, False):
            values = {"model.heads": 1, "model.tied_head": tied}  # 64 elements per head
            self.train(values, "--save", "own")
            _, tensors = read_safetensors(self.path("own"))
            header, data = {"__metadata__": {"format": "pt"}}, b""
            for name, (shape, content) in reversed(tensors.items()):
                theirs = name if name == "lm_head.weight" else "transformer." + name
                header[theirs] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
                data += content
            text = json.dumps(header).encode()
            with open(self.path("theirs"), "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text + data)
            self.train({**values, **FROZEN}, "--init", "theirs", "--save", "again", "--steps", 1)
            self.assertEqual(self.content("again"), self.content("own"))
            with open(self.path("double"), "wb") as file:
                text = text.replace(b"F32", b"F64")
                file.write(struct.pack("<Q", len(text)) + text + data)
            message = self.fail_train(2, values, "--init", "double")
            self.assertIn('is of type "F64", expected F32, BF16 or F16', message)
        done = self.run_sluice("generate", "--model", "theirs", "--prompt", "in the ", "--tokens", 5)
        self.assertEqual(len(done.stdout_bytes), 13)

    def write_folder(self, folder, tensors, config, dtypes=("F32",), shards=2):
        """As Hugging Face's save_pretrained() does, written by hand."""
        os.makedirs(self.path(folder))
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        parts, index = [({}, []) for _ in files], {}
        for i, (name, (shape, content)) in enumerate(tensors.items()):
            dtype = dtypes[i % len(dtypes)]
            if dtype == "BF16":  # exact only for what bf16 holds
                content = b"".join(content[at + 2:at + 4] for at in range(0, len(content), 4))
            header, data = parts[i % shards]
            begin = sum(map(len, data))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(content)]}
            data.append(content)
            index[name] = files[i % shards]
        for name, (header, data) in zip(files, parts):
            text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
            with open(self.path(folder, name), "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text + b"".join(data))
        for name, value in (("model.safetensors.index.json", {"metadata": {}, "weight_map": index}), ("config.json", config)):
            with open(self.path(folder, name), "w", encoding="ascii") as file:
                json.dump(value, file)

    def test_init_reads_the_folders_of_hugging_face(self):
        model = SMALL_CONFIG["model"]
        config = {"model_type": "gpt2", "n_layer": model["layers"], "n_head": model["heads"], "n_embd": model["embedding"],
                  "n_positions": model["context"], "vocab_size": 256}
        for tied in (True, False):
            self.train({"model.tied_head": tied}, "--save", "own")
            _, tensors = read_safetensors(self.path("own"))
            # bf16 holds these: the low halves are zero.
            tensors = {name: (shape, b"".join(b"\0\0" + content[at + 2:at + 4] for at in range(0, len(content), 4)))
                       for name, (shape, content) in tensors.items()}
            self.write_folder(f"plain-{tied}", tensors, {**config, "tie_word_embeddings": tied}, shards=1)
            self.train({"model.tied_head": tied, **FROZEN}, "--init", f"plain-{tied}", "--save", "expected", "--steps", 1)
            for prefix in ("", "transformer.", "module.transformer."):
                head = prefix.replace("transformer.", "") + "lm_head.weight"
                theirs = {head if name == "lm_head.weight" else prefix + name: value for name, value in tensors.items()}
                if tied:  # some have the tied head under both names
                    theirs[head] = theirs[prefix + "wte.weight"]
                folder = f"{tied}-{prefix}x"
                self.write_folder(folder, theirs, {**config, "tie_word_embeddings": tied}, ("F32", "BF16"), 3)
                self.train({"model.tied_head": tied, **FROZEN}, "--init", folder, "--save", "again", "--steps", 1)
                self.assertEqual(self.content("again"), self.content("expected"), folder)
        theirs = dict(tensors)  # a head of its own
        self.write_folder("lies", theirs, {**config, "tie_word_embeddings": True})
        self.assertIn("\"lm_head.weight\" and \"wte.weight\" differ", self.fail_train(2, None, "--init", "lies"))
        self.write_folder("llama", theirs, {**config, "model_type": "llama"})
        self.assertIn("field \"model_type\" is \"llama\", expected \"gpt2\"", self.fail_train(2, None, "--init", "llama"))
        for name, value in (("activation_function", "gelu"), ("layer_norm_epsilon", 1e-6), ("scale_attn_weights", False),
                            ("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True)):
            self.write_folder(name, theirs, {**config, "tie_word_embeddings": False, name: value})
            self.assertIn(f"field \"{name}\" is {json.dumps(value)}, expected", self.fail_train(2, None, "--init", name))
        same = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
        self.write_folder("same", theirs, {**config, "tie_word_embeddings": False, **same})
        self.train({"model.tied_head": False, **FROZEN}, "--init", "same", "--steps", 1)
        os.remove(self.path("plain-False", "model-00001-of-00001.safetensors"))
        self.assertIn("model-00001-of-00001.safetensors", self.fail_train(2, None, "--init", "plain-False"))

    def test_a_file_of_a_folder_is_the_folders_model(self):
        model = SMALL_CONFIG["model"]  # two heads of 32 elements each
        config = {"model_type": "gpt2", "n_layer": model["layers"], "n_head": model["heads"], "n_embd": model["embedding"],
                  "n_positions": model["context"], "vocab_size": 256}
        self.train(None, "--save", "own", "--steps", 100)
        self.write_folder("theirs", read_safetensors(self.path("own"))[1], config, shards=1)
        file = "theirs/model-00001-of-00001.safetensors"

        def text(name):
            done = self.run_sluice("generate", "--model", name, "--prompt", "in the ", "--tokens", 40)
            return done.stdout_bytes, done.stderr
        expected = text("own")
        self.assertEqual(expected[1], "")
        self.assertEqual([text("theirs"), text(file)], [expected] * 2)
        for option in ("--init", "--resume-from"):
            self.train(FROZEN, option, file, "--save", "again", "--steps", 1)
            self.assertEqual(self.content("again"), self.content("own"))
        os.remove(self.path("theirs", "config.json"))
        guess = "model.heads = 1, with 64 elements each, is a guess"
        guessed, note = text(file)
        self.assertIn(guess, note)
        self.assertNotEqual(guessed, expected[0])
        for option in ("--init", "--resume-from"):
            self.assertIn(guess + "; the config says 2", self.fail_train(2, None, option, file))

    def test_init_reads_the_weights_of_a_checkpoint(self):
        self.train({"precision.parameters": "fp32"}, "--checkpoint", "kept", "--save", "own")
        self.train({"precision.parameters": "fp32", **FROZEN}, "--init", "kept/latest", "--save", "again", "--steps", 1)
        self.assertEqual(self.content("again"), self.content("own"))

    def test_failed_save_keeps_the_old_file(self):
        self.train(None, "--save", "model")
        before = self.content("model")

        def limit():  # enough for the figures, not for the model
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, 100 << 10))
        done = self.run_sluice("train", self.write_config({"placement.parameters": "host",
                                                           "placement.optimizer": "host"}),
                               "--save", "model", "--json", "figures.json", "--csv", "figures.csv",
                               "--seed", 9, expect=5, preexec_fn=limit)
        self.assertIn('it is as it was', done.stderr)
        self.assertEqual(self.content("model"), before)
        self.assertEqual(sorted(os.listdir(self.folder)), [
            "config.json", "figures.csv", "figures.json", "model", "run.json", "storage",
            "text.txt"])
        self.assertEqual(len(self.read_json("figures.json")["steps"]), 3)


class Generate(CliCase):
    def setUp(self):
        super().setUp()
        self.train(None, "--save", "model", "--steps", 30)

    def generate(self, *arguments, prompt="in the ", tokens=40, expect=0):
        done = self.run_sluice("generate", "--model", "model", "--prompt", prompt, "--tokens",
                               tokens, *arguments, expect=expect)
        if expect == 0:
            self.assertTrue(done.stdout_bytes.startswith(prompt.encode()))
            self.assertEqual(len(done.stdout_bytes), len(prompt.encode()) + tokens + 1)
        return done.stdout_bytes if expect == 0 else done.stderr

    def test_generate_is_deterministic(self):
        first = self.generate("--seed", 3)
        self.assertEqual(self.generate("--seed", 3), first)
        self.assertEqual(self.generate("--seed", 3, "--threads", 1),
                         self.generate("--seed", 3, "--threads", 2))
        self.assertNotEqual(self.generate("--seed", 4), first)
        self.assertNotEqual(self.generate("--seed", 3, "--top-k", 1), first)

    def test_generate_at_temperature_0(self):
        first = self.generate("--temperature", 0, "--seed", 1)
        self.assertEqual(self.generate("--temperature", 0, "--seed", 2), first)
        self.assertEqual(self.generate("--top-k", 1, "--seed", 2), first)

    def test_generate_from_the_newest_of_a_folder_of_checkpoints(self):
        self.train(None, "--checkpoint", "kept", "--checkpoint-every", 1, "--steps", 30, "--keep", 2)

        def text(model):
            return self.run_sluice("generate", "--model", model, "--prompt", "in the ", "--tokens", 40, "--temperature", 0).stdout
        expected = text("kept/step-000000030")
        self.assertEqual(text("kept"), expected)
        os.unlink(self.path("kept", "latest"))  # a copy of the folder may lack it, or the file system links
        self.assertEqual(text("kept"), expected)

    def test_generate_from_a_long_prompt(self):
        self.train(None, "--save", "model", "--steps", 400)  # enough to look at the text
        prompt = "and it lay on storage until it was read again. " * 5  # the context is 32
        text = self.generate("--temperature", 0, prompt=prompt, tokens=20)
        # Only what the context holds is seen.
        self.assertEqual(self.generate("--temperature", 0, prompt=prompt[-32:], tokens=20)[-21:],
                         text[-21:])
        self.assertNotEqual(self.generate("--temperature", 0, prompt=prompt[:32], tokens=20)[-21:],
                            text[-21:])

    def test_generate_nothing(self):
        self.assertEqual(self.generate(tokens=0), b"in the \n")

    def test_generate_with_bad_arguments(self):
        self.assertIn("prompt", self.generate(prompt="", expect=2))
        for arguments in (("--temperature", -1), ("--temperature", "nan"), ("--threads", -1),
                          ("--threads", 5000), ("--top-k", -1), ("--top-k", "x")):
            with self.subTest(arguments):
                self.assertIn(arguments[0], self.generate(*arguments, expect=2))

    def test_generate_from_a_bad_file(self):
        with open(self.path("model"), "rb") as file:
            content = bytearray(file.read())
        for name, damaged in (("empty", b""), ("cut header", content[:100]),
                              ("cut data", content[:-1]), ("no model", b"x" * 1000)):
            with self.subTest(name):
                with open(self.path("bad"), "wb") as file:
                    file.write(damaged)
                done = self.run_sluice("generate", "--model", "bad", "--prompt", "x", expect=2)
                self.assertIn('"bad"', done.stderr)
        done = self.run_sluice("generate", "--model", "gone", "--prompt", "x", expect=2)
        self.assertIn('"gone"', done.stderr)
        content[-4:] = struct.pack("<f", float("nan"))  # the last norm's bias reaches every logit
        with open(self.path("bad"), "wb") as file:
            file.write(content)
        done = self.run_sluice("generate", "--model", "bad", "--prompt", "x", expect=2)
        self.assertIn("damaged", done.stderr)

    def test_generate_needs_bytes_or_a_tokenizer(self):
        self.train({"model.vocabulary": 300}, "--save", "model", "--steps", 1)
        self.assertIn("pass --tokenizer", self.generate(expect=2))
