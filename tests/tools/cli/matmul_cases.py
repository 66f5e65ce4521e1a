"""run.matmul: which library computes the matrix products, that the choice is reported and refused by name, and that bf16
factors change no promise about bits."""

import ctypes
import json
import os
import re
import shlex

from cli_support import ON_NVME, CliCase
from ranks_support import RanksTest

BF16_FAMILIES = ("amx", "avx512_bf16")


def require_onednn(case):
    for name in ("libdnnl.so.3", "libdnnl.so.2"):
        try:
            ctypes.CDLL(name)
            return
        except OSError as error:
            why = error
    case.skipTest(f"no oneDNN (Debian's libdnnl2): {why}")


def set_environment(case, name, value):
    before = os.environ.get(name)
    os.environ[name] = value
    case.addCleanup(lambda: os.environ.pop(name) if before is None else os.environ.update({name: before}))


class Matmul(CliCase):
    LABEL = "command"

    def test_the_report_names_library_kernels_and_shares(self):
        require_onednn(self)
        products = self.train({"run.matmul": "onednn"})["matrix_products"]
        self.assertRegex(products["library"], r"^oneDNN \d+\.\d+\.\d+$")
        self.assertIn(products["kernels"], ("avx2", "avx512", *BF16_FAMILIES))
        self.assertEqual(products["factors"], "bf16" if products["kernels"] in BF16_FAMILIES else "fp32")
        self.assertEqual((products["onednn_percent"], products["openblas_percent"]), (100, 0))
        products = self.train({"run.matmul": "openblas"})["matrix_products"]
        self.assertEqual((products["onednn_percent"], products["openblas_percent"]), (0, 100))
        self.assertEqual(products["factors"], "fp32")
        said = self.run_sluice("train", self.write_config({"run.matmul": "onednn"}), "--steps", 1).stdout
        self.assertIn("multiply-adds: oneDNN 100.0 %, OpenBLAS 0.0 %", said)

    def test_a_store_goes_on_with_the_same_kernels_or_knowingly(self):
        store = {**ON_NVME, "storage.state.name": "run", "run.matmul": "openblas"}
        set_environment(self, "OPENBLAS_CORETYPE", "Haswell")
        first = self.train({**store, "run.steps": 2}, "--accept-config")["matrix_products"]
        self.assertEqual(first["changes"], [])
        os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
        before = {name: os.stat(self.path("storage", name)).st_mtime_ns for name in os.listdir(self.path("storage")) if ".lock" not in name}
        message = self.fail_train(2, {**store, "run.steps": 3}, "--resume", "--accept-config")
        for word in ("kernels Haswell", "kernels Sandybridge", "--accept-kernels"):
            self.assertIn(word, message)
        self.assertEqual(before, {name: os.stat(self.path("storage", name)).st_mtime_ns for name in before})
        changed = self.train({**store, "run.steps": 3}, "--resume", "--accept-kernels")["matrix_products"]["changes"]
        self.assertEqual([change["step"] for change in changed], [2])
        self.assertIn("Haswell", changed[0]["was"])
        self.assertIn("Sandybridge", changed[0]["is"])
        again = self.train({**store, "run.steps": 4}, "--resume", "--checkpoint", "kept")["matrix_products"]  # kept with the state
        self.assertEqual(again["changes"], changed)
        for name in os.listdir(self.path("storage")):
            os.remove(self.path("storage", name))
        os.environ["OPENBLAS_CORETYPE"] = "Haswell"
        del store["storage.state.name"]  # a checkpoint always opens, with a line
        self.assertEqual([change["step"] for change in self.train({**store, "run.steps": 5}, "--checkpoint", "kept", "--resume")
                          ["matrix_products"]["changes"]], [2, 4])

    def test_weaker_kernels_can_be_asked_for(self):
        require_onednn(self)
        if self.train({"run.matmul": "onednn"})["matrix_products"]["kernels"] not in BF16_FAMILIES:
            self.skipTest("this processor has no bf16 kernels")
        products = self.train({"run.matmul": "onednn-avx512_bf16"})["matrix_products"]
        self.assertEqual((products["kernels"], products["factors"]), ("avx512_bf16", "bf16"))
        products = self.train({"run.matmul": "onednn-avx2"})["matrix_products"]
        self.assertEqual((products["kernels"], products["factors"]), ("avx2", "fp32"))

    def test_placement_policy_threads_and_recomputation_change_no_bit(self):
        require_onednn(self)
        for precision in ("bf16", "fp32"):
            values = {"run.matmul": "onednn", "precision.parameters": precision, "batch.micro_batches": 2}
            first = self.train(values)["state_sha256"]
            self.assertNotEqual(first, self.train({**values, "run.matmul": "openblas"})["state_sha256"])
            for others in ({**ON_NVME, "optimizer.overlap": "serial"}, {"run.threads": 1},
                           {**ON_NVME, "optimizer.overlap": "deferred", "activations": "recompute"}):
                self.assertEqual(first, self.train({**values, **others})["state_sha256"], others)

    def test_a_checkpoint_goes_on_under_other_kernels_and_says_so(self):
        require_onednn(self)
        self.train({"run.matmul": "openblas"}, "--checkpoint", "kept")
        for _ in range(2):  # the second time they are the same
            config = self.write_config({"run.matmul": "onednn", "run.steps": 5})
            said = self.run_sluice("train", config, "--quiet", "--checkpoint", "kept", "--resume").stderr
            change = "checkpoint: matrix products was OpenBLAS .*, factors fp32 and is oneDNN .* from here on"
            self.assertRegex(said, change) if _ == 0 else self.assertNotIn("matrix products", said)

    def test_without_onednn_auto_is_openblas_and_says_what_is_missed(self):
        set_environment(self, "SLUICE_ONEDNN", self.path("nowhere.so"))
        automatic = self.train({"run.matmul": "auto"})
        self.assertRegex(automatic["matrix_products"]["library"], "^OpenBLAS")
        self.assertEqual(automatic["state_sha256"], self.train({"run.matmul": "openblas"})["state_sha256"])
        said = self.run_sluice("train", "config.json", "--set", "run.matmul=auto", "--steps", 1).stdout
        with open("/proc/cpuinfo", encoding="ascii") as file:
            has_bf16 = "avx512_bf16" in file.read()
        line = re.search("matrix products could be about .*", said)
        self.assertEqual(line is not None, has_bf16)
        if line:
            self.assertIn("nowhere.so", line.group(0))
        said = self.run_sluice("train", "config.json", "--set", "run.matmul=openblas", "--steps", 1).stdout
        self.assertNotIn("matrix products could be", said)

    def test_kernels_for_older_processors_are_said(self):
        with open("/proc/cpuinfo", encoding="ascii") as file:
            if "avx2" not in file.read():
                self.skipTest("this processor is as old")
        config = self.write_config({"run.matmul": "openblas"})
        set_environment(self, "OPENBLAS_CORETYPE", "Prescott")
        said = self.run_sluice("train", config, "--steps", 1).stdout
        self.assertRegex(said, r"(?m)^OpenBLAS \S+ uses old kernels \(Prescott\), for processors without AVX2, and this one has \S+; set the environment "
                               "variable OPENBLAS_CORETYPE=(Haswell|SkylakeX) for ")
        named = re.search("OPENBLAS_CORETYPE=([A-Za-z]+)", said)[1]
        set_environment(self, "OPENBLAS_CORETYPE", named)
        said = self.run_sluice("train", config, "--steps", 1, "--json", "run.json").stdout
        self.assertNotIn("old kernels", said)
        self.assertEqual(self.read_json("run.json")["matrix_products"]["kernels"], named)

    def test_a_library_that_cannot_be_used_is_refused_with_the_reason(self):
        with open(self.path("text.so"), "w", encoding="ascii") as file:
            file.write("no library")
        for library, why in ((self.path("nowhere.so"), "nowhere.so: cannot open"), (self.path("text.so"), "text.so: "),
                             (os.environ["SLUICE_OLD_ONEDNN"], "is oneDNN 1.7.0, which is too old; 2.6 or newer"),
                             ("libz.so.1", "libz.so.1 has no dnnl_version")):
            set_environment(self, "SLUICE_ONEDNN", library)
            message = self.fail_train(5, {"run.matmul": "onednn"})
            self.assertIn('run.matmul is "onednn": oneDNN cannot be used: SLUICE_ONEDNN: ', message)
            self.assertIn(why, message)
            self.assertIn('"auto" takes what there is', message)

    def test_kernels_that_are_not_there_are_refused_with_those_that_are(self):
        require_onednn(self)
        set_environment(self, "ONEDNN_MAX_CPU_ISA", "AVX2")
        message = self.fail_train(5, {"run.matmul": "onednn-amx"})
        self.assertIn('run.matmul is "onednn-amx"', message)
        self.assertRegex(message, r"oneDNN \S+ has kernels up to (avx2|none) here; the processor goes up to ")

    def test_a_family_that_the_table_lacks_takes_its_default_row_by_name(self):
        require_onednn(self)
        values = {"run.matmul": "auto", "precision.parameters": "fp32"}
        products = self.train(values)["matrix_products"]
        self.assertEqual(products["library"].split()[0], "oneDNN" if products["table_row"] in BF16_FAMILIES else "OpenBLAS")
        self.assertIsNone(self.train({**values, "run.matmul": "openblas"})["matrix_products"]["table_row"])
        set_environment(self, "ONEDNN_MAX_CPU_ISA", "AVX2")
        products = self.train(values)["matrix_products"]
        self.assertRegex(products["library"], "^OpenBLAS")
        self.assertRegex(products["table_row"], "^default for (none|avx2)$")
        said = self.run_sluice("train", "config.json", "--steps", 1).stdout
        self.assertIn(f"kernels {products['kernels']}, factors fp32 (table: {products['table_row']});", said)

    def test_an_unknown_name_is_refused_with_the_known_ones(self):
        message = self.fail_train(2, {"run.matmul": "mkl"})
        self.assertIn("run.matmul", message)
        self.assertIn("onednn-amx", message)


class MatmulOfRanks(RanksTest):
    def test_ranks_that_multiply_in_different_ways_are_refused(self):
        config = self.write_config({"run.threads": 1, "run.matmul": "openblas"})
        command = [self.binary, "train", config, "--quiet"]
        each = f"OPENBLAS_CORETYPE=$([ $OMPI_COMM_WORLD_RANK = 0 ] && echo Prescott || echo Nehalem) {shlex.join(command)}"
        self.binary = "sh"
        done = self.run_sluice("-c", "exec env " + each, prefix=self.mpirun(2), expect=tuple(range(1, 128)))
        self.assertRegex(done.stderr, r"rank \d of 2: matrix products are by OpenBLAS \S+, kernels \w+, factors fp32 here, "
                                      r"and by others on rank \d; set run.matmul")
        self.assertNotIn("step ", json.dumps(done.stdout))
