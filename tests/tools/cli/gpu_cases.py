"""run.device and `sluice bench gpu` on a machine without a GPU, refused with the reason that doctor gives, and the script
that checks one with a GPU."""

import os
import re
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

    def test_bench_gpu_knows_its_shapes(self):
        message = self.run_sluice("bench", "gpu", "--shape", "3B", expect=2).stderr
        self.assertIn("124M, 1.5B or 7B", message)
