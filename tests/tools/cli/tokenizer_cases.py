"""`train`, `generate` and `tokenize` with a tokenizer's file. The tokens themselves: tests/tools/gpt/text/tokenizer_test.cc, and
tokenizer_package_cases.py against the tokenizers package."""

import array
import glob
import os
import subprocess

from cli_support import CliCase

VOCABULARY = {"model.vocabulary": 258}


class Tokenizers(CliCase):
    LABEL = "command"

    def setUp(self):
        super().setUp()
        self.write_tokenizer()

    def tokens_of_text(self):
        with open(self.path("text.txt"), "rb") as file:
            text = file.read()
        tokens = []
        while text:
            size = 3 if text.startswith(b"the") else 2 if text.startswith(b"th") else 1
            tokens.append({3: 257, 2: 256, 1: text[0]}[size])
            text = text[size:]
        return tokens

    def token_files(self):
        return glob.glob(self.path("text.txt.*.tokens"))

    def test_tokenize_writes_the_tokens(self):
        done = self.run_sluice("tokenize", "text.txt", "--tokenizer", "tokenizer.json", "--output", "tokens")
        expected = self.tokens_of_text()
        self.assertIn(f"{len(expected)} tokens", done.stdout)
        with open(self.path("tokens"), "rb") as file:
            header, tokens = array.array("I", file.read(1024)), array.array("H", file.read())
        self.assertEqual(tokens.tolist(), expected)
        self.assertEqual(header[:3].tolist(), [20240520, 1, len(expected)])

    def test_train_makes_the_token_file_once(self):
        first = self.train(VOCABULARY, "--tokenizer", "tokenizer.json")
        made, = self.token_files()
        with open(made, "rb") as held:  # so that no other file gets its number
            again = self.train({**VOCABULARY, "data.tokenizer": "tokenizer.json"})
            self.assertEqual(os.stat(made).st_ino, os.fstat(held.fileno()).st_ino)
        self.assertEqual(again["state_sha256"], first["state_sha256"])
        self.run_sluice("tokenize", "text.txt", "--tokenizer", ".", "--output", "tokens")
        self.assertEqual(self.train(VOCABULARY, "--data", "tokens")["state_sha256"], first["state_sha256"])
        with open(self.path("text.txt"), "a", encoding="ascii") as file:
            file.write("the end")
        self.assertNotEqual(self.train(VOCABULARY, "--tokenizer", "tokenizer.json")["state_sha256"], first["state_sha256"])
        self.assertEqual(self.token_files(), [made])

    def test_a_token_file_that_was_cut_is_made_again(self):
        first = self.train(VOCABULARY, "--tokenizer", "tokenizer.json")
        made, = self.token_files()
        with open(made, "rb") as file:
            whole = file.read()
        for cut in (whole[:-2], whole[:-1], whole + b"\0\0", whole[:1024], whole[:9]):
            with open(made, "wb") as file:
                file.write(cut)
            self.assertEqual(self.train(VOCABULARY, "--tokenizer", "tokenizer.json")["state_sha256"], first["state_sha256"])
            with open(made, "rb") as file:
                self.assertEqual(file.read(), whole)

    def test_what_does_not_fit_is_refused_before_a_file_is_made(self):
        message = self.fail_train(2, None, "--tokenizer", "tokenizer.json")
        self.assertIn("has 258 tokens, but model.vocabulary is 256; raise it to at least 258", message)
        message = self.fail_train(2, {**VOCABULARY, "data.format": "bytes"}, "--tokenizer", "tokenizer.json")
        self.assertIn("one token per byte", message)
        self.assertIn("--tokenizer", message)
        self.write_tokenizer(normalizer={"type": "NFC"})
        self.assertIn('normalizer is "NFC"', self.fail_train(2, VOCABULARY, "--tokenizer", "tokenizer.json"))
        self.assertEqual(self.token_files(), [])

    def test_tokens_of_another_tokenizer_are_refused(self):
        self.run_sluice("tokenize", "text.txt", "--tokenizer", "tokenizer.json", "--output", "tokens")
        self.train(VOCABULARY, "--data", "tokens", "--tokenizer", "tokenizer.json")
        os.rename(self.path("tokenizer.json"), self.path("first.json"))
        self.write_tokenizer(merges=(("h", "e"), ("t", "h")))
        message = self.fail_train(2, VOCABULARY, "--data", "tokens", "--tokenizer", "tokenizer.json")
        self.assertIn('"tokens" was made with another tokenizer than "tokenizer.json"', message)
        with open(self.path("tokens"), "r+b") as file:  # a file of llm.c does not say with which
            file.seek(12)
            file.write(bytes(4))
        self.train(VOCABULARY, "--data", "tokens", "--tokenizer", "tokenizer.json")

    def test_a_text_without_spaces_has_a_limit(self):
        with open(self.path("long"), "w", encoding="ascii") as file:
            file.write("the words ")
            file.truncate(66 << 20)
        done = self.run_sluice("tokenize", "long", "--tokenizer", "tokenizer.json", "--output", "tokens", expect=2)
        self.assertIn('text "long": more than 67108864 bytes from byte 9 on have no space', done.stderr)

    def test_no_output_replaces_text_tokens_or_tokenizer(self):
        self.train(VOCABULARY, "--tokenizer", "tokenizer.json")
        for name in ("text.txt", "tokenizer.json", *self.token_files()):
            with self.subTest(name):
                done = self.run_sluice("train", self.write_config(VOCABULARY), "--tokenizer", "tokenizer.json", "--csv", name, expect=2)
                self.assertIn("is the same file as", done.stderr)

    def test_a_pipe_gets_the_same_bytes(self):
        words = ("tokenize", "text.txt", "--tokenizer", "tokenizer.json", "--output")
        self.run_sluice(*words, "tokens")
        os.mkfifo(self.path("pipe"))
        with subprocess.Popen(self.command(*words, "pipe"), cwd=self.folder, stdout=subprocess.DEVNULL) as process:
            with open(self.path("pipe"), "rb") as pipe, open(self.path("tokens"), "rb") as file:
                self.assertEqual(pipe.read(), file.read())
        self.assertEqual(process.returncode, 0)

    def test_generate_speaks_tokens(self):
        with open(self.path("text.txt"), "w", encoding="ascii") as file:
            file.write("the " * 2000)
        self.train({**VOCABULARY, "run.steps": 30}, "--tokenizer", "tokenizer.json", "--save", "model.safetensors")
        words = ("generate", "--model", "model.safetensors", "--prompt", "the the", "--tokens", 6, "--temperature", 0)
        said = self.run_sluice(*words, "--tokenizer", "tokenizer.json").stdout
        self.assertEqual(said, "the the the the the\n")
        self.assertEqual(self.run_sluice(*words).stdout, said)  # the one beside the file
        self.train({"run.steps": 1}, "--save", "bytes.safetensors")  # needs none, whatever lies beside it
        self.run_sluice("generate", "--model", "bytes.safetensors", "--prompt", "the", "--tokens", 2)
        os.mkdir(self.path("folder"))
        os.rename(self.path("model.safetensors"), self.path("folder", "model.safetensors"))
        os.rename(self.path("tokenizer.json"), self.path("folder", "tokenizer.json"))
        words = ("generate", "--model", "folder", *words[3:])
        self.assertEqual(self.run_sluice(*words).stdout, said)
        self.write_tokenizer(merges=(("t", "h"), ("th", "e"), ("i", "n")))
        self.assertIn("belongs to another model", self.run_sluice(*words, "--tokenizer", "tokenizer.json", expect=2).stderr)
