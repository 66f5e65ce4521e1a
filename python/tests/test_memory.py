"""A model whose parameters and state are ten times the budgets trains within them: resident memory is metered in a process of its
own, which builds the model on the meta device."""

import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).parents[1] / "bench" / "memory.py"


def test_memory_is_that_of_the_budgets(tmp_path):
    ran = subprocess.run([sys.executable, "-B", str(PROGRAM), "--path", str(tmp_path), "--parameters", "0.055", "--width", "512",
                          "--device", "32MiB", "--host", "28MiB"], stdout=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert float(ran.stdout.split("the state is ")[1].split(" times")[0]) >= 10, ran.stdout
    assert "kept" in ran.stdout and "bytes are the plan's" in ran.stdout
