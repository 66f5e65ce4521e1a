"""run.device and `sluice bench gpu` on a machine without a GPU, refused with the reason that doctor gives, and the script
that checks one with a GPU."""

import os
import re
import shutil
import subprocess

from cli_support import SOURCE, CliCase


class GpuCase(CliCase):
    LABEL = "cpu"

    def why_no_gpu(self):
        found = re.search("CUDA: (.*)", self.run_sluice("doctor", expect=(0, 5)).stdout).group(1)
        if "computes there" in found:
            self.skipTest(found)
        return found.split(": run.device")[0]

    def test_cuda_is_refused_with_the_reason(self):
        message = self.fail_train(5, {"run.device": "cuda"})
        self.assertIn(self.why_no_gpu(), message)

    def test_auto_says_why_it_is_the_host(self):
        why = self.why_no_gpu()
        done = self.run_sluice("train", self.write_config({"run.device": "auto", "run.steps": 1}))
        self.assertIn(f"parameters on the host ({why})", done.stdout)

    def test_bench_gpu_is_refused_with_the_reason(self):
        why = self.why_no_gpu()
        self.assertIn(why, self.run_sluice("bench", "gpu", expect=5).stderr)

    def test_gpu_check_explains_itself_and_refuses_other_parts(self):
        def run(*arguments):
            script = os.path.join(SOURCE, "tools", "gpu_check.sh")
            return subprocess.run([script, *arguments], cwd=self.folder, capture_output=True, text=True, check=False)

        self.assertIn("--only PART", run("--help").stdout)
        self.assertEqual(run("--help").returncode, 0)
        self.assertEqual(run("--only", "everything", "out").returncode, 2)
        self.assertEqual(run().returncode, 2)

    def gpu_check(self, part, gpus):
        """Runs a copy of gpu_check.sh whose tools are stand-ins; `gpus`: the capabilities that nvidia-smi names, or None."""
        tools = self.path("bin")
        os.makedirs(tools, exist_ok=True)
        os.makedirs(self.path("tools"), exist_ok=True)
        os.makedirs(self.path("build/gpu/tools"), exist_ok=True)
        shutil.copy(os.path.join(SOURCE, "tools", "gpu_check.sh"), self.path("tools"))
        programs = {"bin/cmake": 'echo "cmake $*"', "bin/ninja": "exit 1", "bin/nvcc": "exit 1", "bin/ctest": "exit 0",
                    "build/gpu/tools/sluice": "echo 'ok    CUDA: no usable GPU: none'"}
        if gpus is not None:
            programs["bin/nvidia-smi"] = f"printf '{gpus}'"
        for name, text in programs.items():
            with open(self.path(name), "w", encoding="utf-8") as file:
                file.write(f"#!/bin/sh\n{text}\n")
            os.chmod(self.path(name), 0o755)
        done = subprocess.run([self.path("tools/gpu_check.sh"), "--only", part, self.path("out")], capture_output=True,
                              text=True, check=False, env=dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}"))
        return done.returncode, done.stdout + done.stderr

    def test_gpu_check_compiles_for_every_gpu(self):
        code, text = self.gpu_check("build", "9.0\\n8.0\\n9.0\\n")
        self.assertEqual(code, 0, text)
        self.assertIn("-DSLUICE_CUDA_ARCHITECTURES=80-real;90-real ", text.replace("\n", " "))

    def test_gpu_check_without_a_gpu_is_no_success(self):
        if shutil.which("nvidia-smi"):
            self.skipTest("this machine has nvidia-smi")
        for part in ("tests", "bench"):
            code, text = self.gpu_check(part, None)
            self.assertEqual(code, 1, text)
            self.assertIn("no usable GPU: none", text)
        code, text = self.gpu_check("build", None)
        self.assertEqual(code, 0, text)
        self.assertIn("names no GPU", text)

    def test_cuda_reads_an_environment_that_suits_several_ranks(self):
        def line(*prefix):
            text = self.run_sluice("doctor", expect=(0, 5), prefix=prefix).stdout
            return re.search("(.*) CUDA environment: (.*)(\n +-> .*)?", text).groups()

        unset = ("env", "-u", "CUDA_MODULE_LOADING", "-u", "CUDA_DEVICE_MAX_CONNECTIONS")
        self.assertEqual(line(*unset)[:2], ("ok   ", "CUDA_MODULE_LOADING=EAGER, CUDA_DEVICE_MAX_CONNECTIONS=32"))
        for variable, value in (("CUDA_MODULE_LOADING", "LAZY"), ("CUDA_DEVICE_MAX_CONNECTIONS", "8")):
            health, found, remedy = line(*unset, f"{variable}={value}")
            self.assertEqual(health, "warn ")
            self.assertIn(f"{variable}={value}", found)
            self.assertIn(f"unset {variable}", remedy)

    def test_bench_gpu_knows_its_shapes(self):
        message = self.run_sluice("bench", "gpu", "--shape", "3B", expect=2).stderr
        self.assertIn("124M, 1.5B or 7B", message)
