"""run.device and `sluice bench gpu` on a machine without a GPU, refused with the reason that doctor gives."""

import re

from cli_support import CliCase


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
        self.assertIn("--place: moon not in", self.run_sluice("bench", "gpu", "--place", "moon", expect=2).stderr)
