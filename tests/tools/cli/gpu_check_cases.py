"""The scripts that check Sluice on a machine with a GPU, over stand-ins for the machine's programs, and the packed archive on a
machine that has nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time

from cli_support import BINARY, SANITIZE, SOURCE, CliCase

PARTS = ("first", "sanitizer", "bench", "bench7b", "torch", "tests", "python", "streams")
PROGRAMS = ("cuda_device_test", "cuda_math_test", "cuda_gpt_test", "optimizer_math_cuda_test", "cuda_trainer_test")
# A machine with a GPU, as `sluice` says it. HASH is what training ends with.
GPU = """case $1 in
  doctor) echo 'ok    CUDA: cuda:0 Stand-in: run.device "auto" computes there' ;;
  --version) echo 'sluice 0' ;;
  *) echo 'peak resident memory 1 MiB; state sha256 'HASH ;;
esac"""
# tools/gpu/run.sh calls these.
TOOLS = "bash env dirname mkdir mktemp rm date nproc mv cat stat timeout tail head tr grep ln".split()


class GpuCheckCase(CliCase):
    LABEL = "command"

    def script(self, path, *arguments, **environment):
        done = subprocess.run([path, *arguments], cwd=self.folder, capture_output=True, text=True, check=False,
                              env=dict(os.environ, TMPDIR=self.folder, **environment))
        return done.returncode, done.stdout + done.stderr

    def write_program(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(f"#!/bin/bash\n{text}\n")
        os.chmod(self.path(name), 0o755)

    def packed(self, sluice, **programs):
        """A folder as tools/gpu_pack.sh makes it, of stand-ins."""
        for name in ("run.sh", "torch_step.py", "page_locking.py", "small.json"):
            os.makedirs(self.path("pack/bin"), exist_ok=True)
            shutil.copy(os.path.join(SOURCE, "tools", "gpu", name), self.path("pack"))
        self.write_program("pack/bin/sluice", sluice)
        for name in PROGRAMS:
            self.write_program(f"pack/bin/{name}", programs.get(name, "echo '[  PASSED  ] 3 tests.'"))
        return self.path("pack/run.sh")

    def results(self, part):
        """name -> (status, last line) of the part's steps."""
        with open(self.path("out", part + ".json"), encoding="utf-8") as file:
            return {step["name"]: (step["status"], step["last_line"]) for step in json.load(file)["steps"]}

    def has_sanitizer(self):
        return shutil.which("compute-sanitizer") or os.access("/usr/local/cuda/bin/compute-sanitizer", os.X_OK)

    def test_they_explain_themselves_and_refuse_other_parts(self):
        for name in ("tools/gpu_check.sh", "tools/gpu/run.sh", "tools/gpu_pack.sh"):
            path = os.path.join(SOURCE, name)
            self.assertEqual(self.script(path, "--help")[0], 0)
            self.assertIn("OUT" if "pack" not in name else "ARCHIVE", self.script(path, "--help")[1])
            self.assertEqual(self.script(path)[0], 2)
        for name in ("tools/gpu_check.sh", "tools/gpu/run.sh"):
            for parts in ("everything", "", "first,everything"):
                code, text = self.script(os.path.join(SOURCE, name), "--only", parts, "out")
                self.assertEqual(code, 2)
                self.assertIn("--only takes parts out of", text)

    def gpu_check(self, part, gpus, cmake=""):
        """Runs a copy of gpu_check.sh whose tools are stand-ins. `gpus` has the capabilities that nvidia-smi names, or is None;
        `cmake` is what cmake does."""
        for folder in ("tools", "python", "docs", "tests/tools/cli"):
            shutil.copytree(os.path.join(SOURCE, folder), self.path(folder), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("cmake", "ninja", "nvcc"):
            self.write_program(f"bin/{name}", f'echo "{name} $*"' + (f"\n{cmake}\nexit 0" if name == "cmake" else ""))
        self.write_program("build/gpu/tools/sluice", "echo 'ok    CUDA: no usable GPU: none'")
        if gpus is not None:
            self.write_program("bin/nvidia-smi", f"printf '{gpus}'")
        return self.script(self.path("tools/gpu_check.sh"), "--only", part, self.path("out"),
                           PATH=f"{self.path('bin')}:{os.environ['PATH']}")

    def test_gpu_check_compiles_for_every_gpu_and_the_first_programs_first(self):
        code, text = self.gpu_check("build", "9.0\\n8.0\\n9.0\\n")
        self.assertEqual(code, 0, text)
        self.assertIn("-DSLUICE_CUDA_ARCHITECTURES=80-real;90-real ", text.replace("\n", " "))
        self.assertLess(text.index("cuda_gpt_test"), text.index("cuda_trainer_test"))
        self.assertEqual(self.results_of_build(), ["passed"] * 3)

    def test_the_part_build_ends_by_itself(self):
        os.environ["SLUICE_GPU_PART_SECONDS"] = "3"
        self.addCleanup(os.environ.pop, "SLUICE_GPU_PART_SECONDS")
        code, text = self.gpu_check("build", "9.0\\n", cmake='[[ $1 != --build ]] || exec sleep 60')
        self.assertEqual(code, 1, text)
        # On a machine with more to do, the step before may have taken all the time.
        self.assertIn(self.results_of_build(), (["passed", "timeout"], ["timeout"]))

    def results_of_build(self):
        with open(self.path("out/build.json"), encoding="utf-8") as file:
            return [step["status"] for step in json.load(file)["steps"]]

    def test_gpu_check_without_a_gpu_is_no_success(self):
        if shutil.which("nvidia-smi"):
            self.skipTest("this machine has nvidia-smi")
        code, text = self.gpu_check("first,bench", None)
        self.assertEqual(code, 1, text)
        for part in ("first", "bench"):
            self.assertEqual(self.results(part)["GPU"][0], "failed")
            self.assertIn("no usable GPU: none", self.results(part)["GPU"][1])

    def test_the_first_part_compares_the_bits_of_the_updates(self):
        code, text = self.script(self.packed(GPU.replace("HASH", "abcd")), "--only", "first", "out")
        self.assertEqual(code, 0, text)
        steps = self.results("first")
        self.assertEqual(steps["cuda_gpt_test"], ("passed", "[  PASSED  ] 3 tests. "))
        self.assertEqual(steps["update: GPU's bits are the CPU's"], ("passed", "state sha256 abcd"))
        differing = GPU.replace("HASH", '$([[ "$*" == *optimizer=host* ]] && echo 1234 || echo abcd)')
        code, text = self.script(self.packed(differing), "--only", "first", "out")
        self.assertEqual(code, 1, text)
        steps = self.results("first")
        self.assertEqual(steps["update: GPU's bits are the CPU's"], ("failed", "state sha256 abcd against state sha256 1234"))
        self.assertEqual(steps["bits with the state on NVMe"][0], "passed")

    def test_a_step_that_fails_costs_itself_alone(self):
        run = self.packed(GPU.replace("HASH", "abcd"), cuda_device_test="echo '[  FAILED  ] A.B \"x\" | y'; exit 1",
                          cuda_gpt_test="exit 124")
        code, text = self.script(run, "--only", "first", "out")
        self.assertEqual(code, 1, text)
        steps = self.results("first")
        self.assertEqual(steps["cuda_device_test"], ("failed", '[  FAILED  ] A.B "x" | y '))
        self.assertEqual(steps["cuda_math_test"][0], "passed")
        self.assertEqual(steps["cuda_gpt_test"][0], "timeout")
        self.assertEqual(steps["optimizer_math_cuda_test"][0], "passed")

    def test_a_step_that_hangs_ends_with_its_part(self):
        run = self.packed(GPU.replace("HASH", "abcd"), cuda_gpt_test="sleep 100")
        code, text = self.script(run, "--only", "first", "out", SLUICE_GPU_PART_SECONDS="10")
        steps = self.results("first")
        # On a machine with more to do, the steps before may have taken all the time.
        self.assertIn((code, steps["cuda_gpt_test"][0]), ((1, "timeout"), (0, "skipped")), text)
        self.assertEqual(steps["optimizer_math_cuda_test"], ("skipped", "no time left in this part"))

    def test_a_part_that_is_killed_leaves_its_results(self):
        run = self.packed(GPU.replace("HASH", "abcd"), cuda_math_test="echo begun; sleep 100")
        process = subprocess.Popen([run, "--only", "first", "out"], cwd=self.folder, stdout=subprocess.DEVNULL, start_new_session=True,
                                   env=dict(os.environ, TMPDIR=self.folder))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self.is_running("cuda_math_test"):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.assertEqual(self.results("first")["cuda_device_test"][0], "passed")
        self.assertEqual(self.results("first")["cuda_math_test"][0], "running")
        with open(self.path("out/first.md"), encoding="utf-8") as file:
            self.assertIn("| cuda_math_test | running |", file.read())

    def is_running(self, step):
        try:
            with open(self.path("out/first.log"), encoding="utf-8") as file:
                return "begun" in file.read() and self.results("first")[step][0] == "running"
        except (OSError, KeyError):
            return False

    def test_a_program_that_does_not_start_is_named(self):
        code, text = self.script(self.packed("echo 'version GLIBC_2.99 not found'; exit 1"), "--only", "first", "out")
        self.assertEqual(code, 1, text)
        self.assertEqual(self.results("first")["GPU"],
                         ("failed", "no GPU: bin/sluice does not start: version GLIBC_2.99 not found"))

    def test_what_the_machine_lacks_is_named_and_is_no_failure(self):
        self.write_program("nothing/python3", "exit 1")
        code, text = self.script(self.packed(GPU.replace("HASH", "abcd")), "--only", "sanitizer,bench,torch,python,streams", "out",
                                 PATH=f"{self.path('nothing')}:{os.environ['PATH']}")
        self.assertEqual(code, 0, text)
        sanitizer = "PyTorch" if self.has_sanitizer() else "compute-sanitizer"
        for part, name in (("bench", "cuBLASLt"), ("torch", "PyTorch"), ("python", "PyTorch"), ("streams", sanitizer)):
            self.assertEqual(self.results(part)[name][0], "missing", part)

    def test_two_ranks_meet_without_mpi(self):
        text, steps = self.run_two_ranks("2.28.9; NCCL has everything")
        for rank in (0, 1):
            self.assertIn(f"rank {rank} of 2 at 127.0.0.1:29731 host rank_{rank} shared multicast", text)
        self.assertEqual(steps["two ranks: the same bits"], ("passed", "state sha256 abcd"))
        self.assertEqual(steps["exactness: one"], ("passed", "ran"))
        self.assertEqual(steps["two ranks by NCCL's setting"][0], "missing")
        self.assertIn("NCCL 2.28.9 has no NCCL_MULTI_RANK_GPU_ENABLE", steps["two ranks by NCCL's setting"][1])

    def test_two_ranks_share_a_gpu_by_the_setting_of_nccl_where_it_has_one(self):
        text, steps = self.run_two_ranks("2.30.7")
        for rank in (0, 1):
            self.assertIn(f"rank {rank} of 2 at 127.0.0.1:29731 host shared 1 multicast 0", text)
        self.assertEqual(steps["two ranks by NCCL's setting"][0], "passed")
        self.assertEqual(steps["two ranks by NCCL's setting: the same bits"], ("passed", "state sha256 abcd"))

    def run_two_ranks(self, nccl):
        """Returns the text of the part `tests` and its steps, where doctor names this NCCL."""
        says = ("echo rank $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT host $NCCL_HOSTID shared $NCCL_MULTI_RANK_GPU_ENABLE "
                "multicast $NCCL_NVLS_ENABLE; echo 'state sha256 'abcd")
        machine = GPU.replace("*) echo 'peak resident memory 1 MiB; state sha256 'HASH", f"*) {says}")
        run = self.packed(machine.replace("computes there' ;;", f"computes there'; echo 'ok    NCCL: {nccl}' ;;"))
        with open(self.path("pack/exactness.py"), "w", encoding="utf-8") as file:
            file.write("print('one' if '--list' in __import__('sys').argv[1:] else 'ran')\n")
        code, text = self.script(run, "--only", "tests", "out")
        self.assertEqual(code, 0, text)
        return text, self.results("tests")

    def test_torchao_that_came_along_is_measured(self):
        os.makedirs(self.path("nothing"))
        self.write_program("nothing/python3", 'case "$*" in *zipfile*) echo unpacked ;; *torch_step*) echo "path $PYTHONPATH" ;; esac')
        run = self.packed(GPU.replace("HASH", "abcd"))
        path = f"{self.path('nothing')}:{os.environ['PATH']}"
        code, text = self.script(run, "--only", "torch", "out", PATH=path)
        self.assertEqual(code, 0, text)
        self.assertEqual(self.results("torch")["torchao"][0], "missing")
        os.makedirs(self.path("pack/wheel"))
        with open(self.path("pack/wheel/torchao-0.18.0-cp310-abi3-linux.whl"), "wb"):
            pass
        with open(self.path("pack/wheel/other-1.0-py3-none-any.whl"), "wb"):
            pass
        code, text = self.script(run, "--only", "torch", "out", PATH=path)
        self.assertEqual(code, 0, text)
        steps = self.results("torch")
        self.assertEqual(steps["unpack torchao-0.18.0-cp310-abi3-linux.whl"], ("passed", "unpacked"))
        self.assertEqual(steps["unpack other-1.0-py3-none-any.whl"], ("passed", "unpacked"))
        for shape in ("1.5B", "llama-1.1B", "124M", "7B"):
            self.assertIn("/torchao", steps[f"PyTorch's step, {shape}"][1])
            self.assertIn("/wheels", steps[f"PyTorch's step, {shape}"][1])

    def test_streams_of_pytorch_run_under_the_sanitizer(self):
        self.write_program("nothing/python3", "exit 0")
        run = self.packed(GPU.replace("HASH", "abcd"))
        os.makedirs(self.path("pack/python_tests"))
        path = f"{self.path('nothing')}:{os.environ['PATH']}"
        if not self.has_sanitizer():
            code, text = self.script(run, "--only", "streams", "out", PATH=path)
            self.assertEqual((code, [status for status, _ in self.results("streams").values()]), (0, ["missing"]), text)
        self.write_program("nothing/compute-sanitizer", 'echo "$PWD $PYTHONPATH $*"; [[ $* != *racecheck* ]]')
        code, text = self.script(run, "--only", "streams", "out", PATH=path)
        self.assertEqual(code, 1, text)  # what the sanitizer finds is a failure
        steps = self.results("streams")
        self.assertEqual([steps[f"{tool}: streams of PyTorch"][0] for tool in ("memcheck", "racecheck")], ["passed", "failed"])
        self.assertRegex(steps["memcheck: streams of PyTorch"][1],
                         "^\\S*/pack/python_tests \\S*/site.* --tool memcheck .*--error-exitcode 1 \\S*/python3 .*-k stream test_cuda_offload.py")

    def test_the_archive_runs_in_a_bare_root(self):
        """Without compilers, libraries of Sluice's, Python and the repository: bash, coreutils and grep with their libraries."""
        if SANITIZE:
            self.skipTest("a sanitizer needs /proc")
        if shutil.which("nvidia-smi"):
            self.skipTest("this machine has nvidia-smi")
        namespace = [] if os.geteuid() == 0 else ["unshare", "--map-root-user"]
        if subprocess.run([*namespace, "chroot", "/", "true"], capture_output=True, check=False).returncode != 0:
            self.skipTest("chroot is not allowed here")
        os.makedirs(self.path("built/tools"))
        os.makedirs(self.path("built/capi"))
        shutil.copy(BINARY, self.path("built/tools/sluice"))
        for place in [f"tools/{name}" for name in PROGRAMS] + ["capi/libsluice.so"]:
            shutil.copy("/bin/true", self.path("built", place))
        with open(self.path("torchao-1-py3-none-any.whl"), "wb"):
            pass
        code, text = self.script(os.path.join(SOURCE, "tools/gpu_pack.sh"), "--torchao", self.path("torchao-1-py3-none-any.whl"), "--built",
                                 self.path("built"), self.path("pack.tar.gz"))
        self.assertEqual(code, 0, text)
        root = self.bare_root()
        with tarfile.open(self.path("pack.tar.gz")) as archive:
            archive.extractall(root)
        wheels = sorted(os.listdir(os.path.join(root, "sluice_gpu/wheel")))
        self.assertEqual([wheel.split("-")[0] for wheel in wheels], ["sluice_offload", "torchao"])
        done = subprocess.run([*namespace, "chroot", root, "/bin/env", "-i", "PATH=/bin", "/sluice_gpu/run.sh", "/out"], capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertEqual(done.stderr, "")
        for part in PARTS:
            with open(os.path.join(root, "out", part + ".json"), encoding="utf-8") as file:
                report = json.load(file)
            self.assertEqual(report["gpu"], "no GPU")
            self.assertRegex(report["steps"][0]["last_line"], "^no GPU: .*CUDA: ")
            with open(os.path.join(root, "out", part + ".md"), encoding="utf-8") as file:
                self.assertIn("no GPU", file.read())

    def bare_root(self):
        root = self.path("root")
        for folder in ("bin", "tmp", "dev"):
            os.makedirs(os.path.join(root, folder))
        os.symlink(".", os.path.join(root, "usr"))
        with open(os.path.join(root, "dev/null"), "w", encoding="ascii"):
            pass
        for tool in TOOLS:
            program = shutil.which(tool)
            shutil.copy(program, os.path.join(root, "bin", tool))
            found = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
            found += subprocess.run(["ldd", BINARY], capture_output=True, text=True, check=True).stdout
            for library in re.findall(r"(/\S+) \(0x", found):
                # The C library alone: the others come along.
                if re.search(r"/(libc|libm|libtinfo|libpcre2?-?8?|libselinux|libacl|libattr|libcap|ld-linux[^/]*)\.so", library):
                    os.makedirs(root + os.path.dirname(library), exist_ok=True)
                    shutil.copy(library, root + library)
        return root

