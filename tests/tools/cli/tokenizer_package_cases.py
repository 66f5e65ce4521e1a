"""Tokens of `sluice tokenize` against those of the tokenizers package, which also trains the tokenizers: nothing is
downloaded but the package itself."""

import array
import json
import os
import pathlib
import random
import subprocess
import sys
import unicodedata

from cli_support import CliCase, SMALL_CONFIG, SOURCE
from python_packages import with_package

# Trains a tokenizer on FILE as OPTIONS say, saves it, and writes the ids of TEXT as 32-bit numbers.
TRAIN = """
import array, json, sys
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
corpus, options = sys.argv[1], json.loads(sys.argv[2])
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=options.get("adds_space", False))
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=options["tokens"], min_frequency=0, show_progress=False,
                              special_tokens=options.get("special", []),
                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
tokenizer.train([corpus], trainer)
tokenizer.add_tokens([AddedToken(token, normalized=True) for token in options.get("added", [])])
tokenizer.save("tokenizer.json")
tokenizer.model.save(".")
"""
ENCODE = """
import array, sys
from tokenizers import Tokenizer
text = open(sys.argv[1], encoding="utf-8", newline="").read()
array.array("I", Tokenizer.from_file("tokenizer.json").encode(text).ids).tofile(open("ids", "wb"))
"""


def documents():
    """Text that people have written: this repository's."""
    root = pathlib.Path(SOURCE)
    files = sorted(path for suffix in ("md", "py", "cc") for path in root.glob(f"[a-z]*/**/*.{suffix}")
                   if "build" not in path.relative_to(root).parts[0])
    return "".join(path.read_text(encoding="utf-8") for path in files)


def wild_text(characters, seed):
    """Words of all scripts, numbers, signs and spaces of all kinds, contractions, unassigned characters left out."""
    draw = random.Random(seed)
    assigned = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    spaces = [" ", "  ", "\n", "\n\n", "\t", " \n", "\r\n", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "\u200b", "   x"]
    scripts = [range(0x61, 0x7B), range(0x410, 0x450), range(0x4E00, 0x5000), range(0x5D0, 0x5EB), range(0x660, 0x66A),
               range(0x30, 0x3A), range(0x1F600, 0x1F640), range(0x21, 0x30), range(0x0900, 0x0980), range(0x2150, 0x2180)]
    endings = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'", "''s", "'lx"]
    parts, count = [], 0
    while count < characters:
        kind = draw.randrange(8)
        if kind == 0:
            part = draw.choice(endings)
        elif kind == 1:
            part = "".join(draw.choices(assigned, k=draw.randrange(1, 4)))
        elif kind < 5:
            part = draw.choice(spaces)
        else:
            script = draw.choice(scripts)
            part = "".join(chr(draw.choice(script)) for _ in range(draw.randrange(1, 9)))
        parts.append(part)
        count += len(part)
    return "".join(parts)


def tokens_in(path):
    """(version, tokens) of a file with llm.c's header."""
    with open(path, "rb") as file:
        header = array.array("I", file.read(1024))
        tokens = array.array({1: "H", 7: "I"}[header[1]], file.read())
    assert len(tokens) == header[2]
    return header[1], tokens.tolist()


class TokenizerPackage(CliCase):
    LABEL = "slow"

    def setUp(self):
        super().setUp()
        self.packages = with_package(self, "tokenizers")

    def python(self, program, *words):
        subprocess.run([sys.executable, "-c", program, *words], cwd=self.folder, check=True,
                       env={**os.environ, "PYTHONPATH": self.packages})

    def write_text(self, name, text):
        with open(self.path(name), "w", encoding="utf-8", newline="") as file:
            file.write(text)

    def train_tokenizer(self, corpus, **options):
        self.write_text("corpus", corpus)
        self.python(TRAIN, "corpus", json.dumps(options))

    def compare(self, text, tokenizer="tokenizer.json"):
        """Both tokens of `text` are the same; returns the version of the token file."""
        self.write_text("text", text)
        self.python(ENCODE, "text")
        with open(self.path("ids"), "rb") as file:
            expected = array.array("I", file.read()).tolist()
        self.run_sluice("tokenize", "text", "--tokenizer", tokenizer, "--output", "tokens")
        version, found = tokens_in(self.path("tokens"))
        for place, (ours, theirs) in enumerate(zip(found, expected)):
            self.assertEqual(ours, theirs, f"token {place}")
        self.assertEqual(len(found), len(expected))
        return version

    def test_tokens_of_a_megabyte_are_equal(self):
        documented = documents()
        self.train_tokenizer(documented[:1_000_000] + wild_text(100_000, 1), tokens=8000)
        text = documented[-500_000:] + wild_text(500_000, 2)
        self.assertGreater(len(text.encode()), 1_000_000)
        self.assertEqual(self.compare(text), 1)
        for tokenizer in ("vocab.json", "."):
            self.compare(text[400_000:600_000], tokenizer)

    def test_pieces_of_a_long_text_are_equal(self):
        self.train_tokenizer(documents()[:300_000], tokens=2000)
        self.compare(wild_text(4_000_000, 3))

    def test_a_text_without_spaces_is_equal(self):
        self.train_tokenizer("ab" * 1000 + "ba" * 1000 + "aab" * 500, tokens=300)
        draw = random.Random(4)
        self.compare("".join(draw.choices("ab", k=200_000)))

    def test_special_tokens_and_spaces_before_texts_are_equal(self):
        special = ["<|endoftext|>", "<|end|>", "<|end|><|end|>", "[a b]"]
        for adds_space in (False, True):
            with self.subTest(adds_space):
                self.train_tokenizer(documents()[:300_000], tokens=3000, special=special, added=["xyz", "<|e"], adds_space=adds_space)
                draw = random.Random(5)
                pieces = [*special, "xyz", "<|e", "<|end", "|>", " ", "\n", "word", "it's", "[a", "b]", "\u4e2d"]
                self.compare("".join(draw.choices(pieces, k=200_000)))

    def test_more_than_65536_tokens_take_32_bits(self):
        wide = wild_text(1_000_000, 6)
        self.train_tokenizer(wide, tokens=70_000)
        self.assertEqual(self.compare(wide[:300_000]), 7)
        self.assertGreater(max(tokens_in(self.path("tokens"))[1]), 65_535)
        config = {"model.vocabulary": 70_000, "data.file": "text", "data.tokenizer": "tokenizer.json", "run.steps": 1}
        run = self.train(config, "--save", "model.safetensors", base=SMALL_CONFIG)
        self.assertEqual(len(run["steps"]), 1)
        done = self.run_sluice("generate", "--model", "model.safetensors", "--tokenizer", "tokenizer.json", "--prompt", "\u4e2d it's", "--tokens", 3)
        self.assertTrue(done.stdout.startswith("\u4e2d it's"))
