#!/usr/bin/env python3
"""Breaks one line of the source at a time and runs the tests that ought to notice.

    tools/mutate.py                        every mutant of tests/mutation/mutants.json
    tools/mutate.py --from 10 --count 5    those from the 11th on
    tools/mutate.py --piece 2/12           the second of twelve pieces of equal length
    tools/mutate.py --only fw_wait,op_next
    tools/mutate.py --list                 the names, and what they change
    tools/mutate.py --check                whether every line is still there, without building
    tools/mutate.py --mutants tests/campaigns/cures.json      each campaign without one cure

A mutant is one line: `file`, `old` (exactly as it stands there, once; or with `after`, the first time behind
that line) and `new`. Its `runs` are test programs with their gtest filters, and for "sluice" the names of tests of the
command, as tests/tools/cli/run_case.py lists them, separated by spaces. For an example of several ranks, "example_pipeline",
they are the script of tests/examples that runs it. For a campaign, "kill.py", they are its arguments;
{output_faults} stands for the library of that target. It is killed when one of them fails, or does not
end in time. Each is built in a copy of the checkout under --work, which is kept, so that only what the mutant
touches is compiled. A mutant with `parts` "cuda" is built with CUDA and NCCL, for tests over the stand-ins of both;
that takes nvcc and no GPU. A mutant with a `reason` changes nothing that can be seen, and the reason says why; it is
skipped, except with --equivalent. A mutant with `survives` is known to survive, and is reported as such.
Prints one line per mutant and a summary; exits with 1 when a mutant survives that ought not to, or cannot be applied or built.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build/mutation"
MARK = "build/.made-by-mutate"  # in the copy, from its beginning
LIST = ROOT / "tests/mutation/mutants.json"
CAMPAIGNS = "tests/campaigns"
FLAGS = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DNDEBUG"]
# By what the tests are over: nothing of CUDA, or the stand-ins for its runtime and for NCCL.
PARTS = {"plain": ["-DSLUICE_CUDA=OFF", "-DSLUICE_NCCL=OFF"], "cuda": ["-DSLUICE_CUDA=ON", "-DSLUICE_NCCL=ON"]}


class Failure(Exception):
    """The mutant could not be tried."""


def apply(text, mutant):
    """The file's text with the mutant's line changed."""
    begin = 0
    if "after" in mutant:
        begin = text.find(mutant["after"])
        if begin < 0:
            raise Failure(f"{mutant['file']} has no line \"{mutant['after']}\"")
    found = text.count(mutant["old"], begin)
    if found == 0 or (found > 1 and "after" not in mutant):
        raise Failure(f"{mutant['file']} has \"{mutant['old']}\" {found} times, not once: mend the list")
    at = text.index(mutant["old"], begin)
    return text[:at] + mutant["new"] + text[at + len(mutant["old"]):]


def check(mutants):
    """Prints the mutants whose lines are not in the checkout, and returns how many they are."""
    missing = 0
    for mutant in mutants:
        try:
            apply((ROOT / mutant["file"]).read_text(encoding="utf-8"), mutant)
        except (Failure, OSError) as failure:
            print(f"{mutant['name']}: FAILS: {failure}")
            missing += 1
    print(f"{len(mutants)} mutants, {missing} without their line")
    return missing


class Workshop:
    """A copy of the checkout, and its build."""

    def __init__(self, folder, jobs, limit_s):
        is_own = folder == WORK or (folder / MARK).exists()
        if folder.exists() and not is_own and (not folder.is_dir() or any(folder.iterdir())):
            raise SystemExit(f"{folder} is there and was not made by this script; name another folder with --work")
        (folder / MARK).parent.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
        self.source = folder
        self.build = None
        self.jobs = jobs
        self.limit_s = limit_s
        self._copy_checkout()

    def _configure(self, parts):
        """Chooses the build that has these parts."""
        self.build = self.source / ("build/mutants" if parts == "plain" else f"build/mutants_{parts}")
        if not (self.build / "build.ninja").exists():
            launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
            self._run(["cmake", "-G", "Ninja", "-S", self.source, "-B", self.build, *FLAGS, *PARTS[parts], *launcher])

    def _copy_checkout(self):
        """Copies what differs, so that what is the same need not be compiled again."""
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], check=True, capture_output=True)
        names = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
        for name in names:
            target = self.source / name
            content = (ROOT / name).read_bytes()
            if target.exists() and target.read_bytes() == content:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            shutil.copymode(ROOT / name, target)
        for path in self.source.rglob("*"):
            name = path.relative_to(self.source).as_posix()
            if path.is_file() and not name.startswith("build/") and name not in names:
                path.unlink()

    def _run(self, command):
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Failure("does not build:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-20:]))

    def make(self, targets):
        self._run(["ninja", "-C", self.build, "-j", self.jobs, *targets])

    def targets_of(self, target, tests):
        """The targets of the build that a run needs."""
        if not target.endswith(".py"):
            return [target]
        return ["sluice", *(["sluice_mpi"] if target == "rank_faults.py" else []), *re.findall(r"{(\w+)}", tests)]

    def test(self, target, tests):
        """The first test that fails, "does not end" or "crashes"; None when all pass."""
        if target == "sluice":
            return self._test_command(tests.split())
        if target.endswith(".py"):
            return self._test_campaign(target, tests)
        if target.startswith("example_"):
            return self._test_example(target, tests)
        program = next(path for path in self.build.glob(f"tests/**/{target}") if path.is_file() and os.access(path, os.X_OK))
        command = [str(program), f"--gtest_filter={tests}", "--gtest_fail_fast", "--gtest_brief=1"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=self.limit_s)
        except subprocess.TimeoutExpired:
            return f"no end after {self.limit_s} s"
        if done.returncode == 0:
            if "0 tests from 0 test suites" in done.stdout:
                raise Failure(f"{target} has no test that matches {tests}")
            return None
        failed = [line for line in done.stdout.splitlines() if line.startswith("[  FAILED  ]")]
        return failed[0].removeprefix("[  FAILED  ] ").split(" (")[0].split(",")[0] if failed else f"exit status {done.returncode}"

    def _test_command(self, names):
        environment = {**os.environ, "SLUICE_BINARY": str(self.build / "tools/sluice"), "SLUICE_SOURCE": str(self.source)}
        for name in names:
            command = [sys.executable, "-B", str(self.source / "tests/tools/cli/run_case.py"), name]
            try:
                done = subprocess.run(command, capture_output=True, check=False, timeout=self.limit_s, env=environment)
            except subprocess.TimeoutExpired:
                return f"no end after {self.limit_s} s"
            if done.returncode == 77:
                raise Failure(f"{name} skips itself on this machine")
            if done.returncode != 0:
                return name
        return None

    def _test_example(self, target, script):
        mpiexec = shutil.which("mpiexec")
        program = next((path for path in self.build.glob(f"tests/**/{target}") if path.is_file()), None)
        if mpiexec is None or program is None:
            raise Failure(f"{target} needs mpiexec")
        command = [sys.executable, "-B", str(self.source / "tests/examples" / script), str(program), mpiexec]
        # As in tests/CMakeLists.txt.
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                       "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        done = subprocess.run(command, capture_output=True, check=False, text=True, env=environment)
        return f"{script}: {done.stderr.strip().splitlines()[-1][:200]}" if done.returncode != 0 else None

    def _test_campaign(self, script, arguments):
        """The first failure that a campaign names."""
        words = [re.sub(r"{(\w+)}", lambda name: str(self.build / CAMPAIGNS / f"lib{name[1]}.so"), word) for word in arguments.split()]
        command = [sys.executable, "-B", str(self.source / CAMPAIGNS / script), "--sluice", str(self.build / "tools/sluice"), *words]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode == 77:
            raise Failure(f"{script} skips itself on this machine: {done.stdout}")
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
        if done.returncode != 0 and not failed:
            raise Failure(f"{script} ends with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}")
        return f"{failed[0].removeprefix('FAILED ')[:200]} ({len(failed)} in all)" if failed else None

    def try_out(self, mutant):
        """Returns the test that kills the mutant, or None."""
        self._configure(mutant.get("parts", "plain"))
        path = self.source / mutant["file"]
        whole = path.read_text(encoding="utf-8")
        path.write_text(apply(whole, mutant), encoding="utf-8")
        try:
            for target, tests in mutant["runs"].items():
                self.make(self.targets_of(target, tests))
                killer = self.test(target, tests)
                if killer:
                    return killer
            return None
        finally:
            path.write_text(whole, encoding="utf-8")


def piece(text):
    """(2, 12) for "2/12"."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f'"{text}" is not I/N with I from 1 to N')
    return int(match[1]), int(match[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=pathlib.Path, default=LIST, help="the list (default: tests/mutation/mutants.json)")
    parser.add_argument("--from", dest="first", type=int, default=0, help="how many of the list to leave out at its beginning")
    parser.add_argument("--count", type=int, help="how many to try")
    parser.add_argument("--piece", type=piece, help="I/N: the I-th of N pieces of the list")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--equivalent", action="store_true", help="also those that are said to change nothing")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--check", action="store_true", help="only say whether every mutant's line is in the checkout")
    parser.add_argument("--work", type=pathlib.Path, default=WORK, help="where the copy is and its build")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one run of tests")
    options = parser.parse_args()

    mutants = json.loads(options.mutants.read_text(encoding="utf-8"))
    if options.only:
        names = options.only.split(",")
        unknown = set(names) - {mutant["name"] for mutant in mutants}
        if unknown:
            parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if mutant["name"] in names]
    mutants = mutants[options.first:][:options.count]
    if options.piece:
        index, pieces = options.piece
        mutants = mutants[len(mutants) * (index - 1) // pieces:len(mutants) * index // pieces]
    if options.list:
        for mutant in mutants:
            print(f"{mutant['name']}: {mutant['what']} ({mutant['file']})")
        return 0
    if options.check:
        return 1 if check(mutants) else 0
    workshop = Workshop(options.work.resolve(), options.jobs, options.limit)
    counts = {"killed": 0, "SURVIVES": 0, "survives, as known": 0, "equivalent": 0, "FAILS": 0}
    for mutant in mutants:
        begin = time.monotonic()
        detail = ""
        if "reason" in mutant and not options.equivalent:
            verdict, detail = "equivalent", mutant["reason"]
        else:
            try:
                killer = workshop.try_out(mutant)
                verdict = "killed" if killer else "survives, as known" if "survives" in mutant else "SURVIVES"
                detail = f"by {killer}" if killer else mutant.get("survives", mutant["what"])
            except Failure as failure:
                verdict, detail = "FAILS", str(failure)
        counts[verdict] += 1
        print(f"{mutant['name']}: {verdict}: {detail} ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"{len(mutants)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    return 1 if counts["SURVIVES"] or counts["FAILS"] else 0


if __name__ == "__main__":
    sys.exit(main())
