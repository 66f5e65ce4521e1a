#!/usr/bin/env python3
"""tools/release.sh, in clones of this repository: the archive and its recipes, and each release that it refuses."""

import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command, cwd):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


class Release(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.tree = pathlib.Path(folder.name) / "clone"
        cloned = run("git", "-c", "safe.directory=*", "clone", "--quiet", "--no-tags", "--depth", "1", f"file://{ROOT}", cls.tree, cwd=ROOT)
        if cloned.returncode != 0:  # an unpacked archive, or another user's checkout
            raise unittest.SkipTest(f"this tree cannot be cloned: {cloned.stderr.strip()}")
        # The clone gets this tree's script, committed or not.
        for name in ("tools/release.sh", "packaging/vcpkg/portfile.cmake", "packaging/vcpkg/vcpkg.json", "packaging/conan/conanfile.py"):
            (cls.tree / name).parent.mkdir(parents=True, exist_ok=True)
            (cls.tree / name).write_bytes((ROOT / name).read_bytes())
        (cls.tree / "tools/release.sh").chmod(0o755)
        # Each test copies it, so folders go that the script does not look at.
        for name in ("cpu_optim", "docs", "engine", "gpu", "io", "python/sluice_offload", "python/tests", "tests"):
            shutil.rmtree(cls.tree / name)
        # Whatever version this tree has, the clones are of 0.1.0.
        made = cls("rewrite")
        made.rewrite("base/include/sluice/version.h", r"SLUICE_VERSION \d+", "SLUICE_VERSION 100")
        made.rewrite("base/include/sluice/version.h", r'kVersion = "[\d.]+"', 'kVersion = "0.1.0"')
        made.rewrite("python/pyproject.toml", r'\nversion = ".*"', '\nversion = "0.1.0"')
        made.rewrite("CHANGELOG.md", r"\n## .*", "\n## 0.1.0 (2026-11-23)")
        made.commit()
        made.git("tag", "v0.1.0")

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = pathlib.Path(folder.name) / "clone"
        shutil.copytree(type(self).tree, self.tree, symlinks=True)

    def git(self, *arguments, cwd=None):
        done = run("git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "safe.directory=*", *arguments, cwd=cwd or self.tree)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "state")

    def edit(self, name, old, new):
        text = (self.tree / name).read_text(encoding="utf-8")
        self.assertIn(old, text)
        (self.tree / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    def rewrite(self, name, pattern, new):
        text, changes = re.subn(pattern, new, (self.tree / name).read_text(encoding="utf-8"), count=1)
        self.assertEqual(changes, 1, name)
        (self.tree / name).write_text(text, encoding="utf-8")

    def release(self, *arguments):
        return run("tools/release.sh", *arguments, cwd=self.tree)

    def refused(self, *words, arguments=()):
        done = self.release(*arguments)
        self.assertEqual(done.returncode, 1, done.stdout)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertFalse(list(self.tree.glob("build/dist/*0.1.0.tar.gz")))

    def test_archive_notes_and_recipes(self):
        done = self.release()
        self.assertEqual(done.returncode, 0, done.stderr)
        folder = self.tree / "build/dist"
        archive = (folder / "sluice-0.1.0.tar.gz").read_bytes()
        sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
        self.assertEqual(sums["sluice-0.1.0.tar.gz"], hashlib.sha256(archive).hexdigest())
        self.assertIn(sums["sluice-0.1.0.tar.gz"], done.stdout)
        notes = (folder / "notes-0.1.0.md").read_bytes()
        self.assertEqual(sums["notes-0.1.0.md"], hashlib.sha256(notes).hexdigest())
        changelog = (self.tree / "CHANGELOG.md").read_text(encoding="utf-8")
        sections = changelog[changelog.index("## "):].split("\n## ")
        self.assertEqual(notes.decode().rstrip(), sections[0].rstrip())
        with tarfile.open(folder / "sluice-0.1.0.tar.gz") as tar:
            names = {member.name for member in tar.getmembers() if member.isfile()}
            commit = tar.extractfile("sluice-0.1.0/cmake/commit.txt").read().decode().strip()
        self.assertEqual(commit, self.git("rev-parse", "HEAD"))
        self.assertEqual(names, {f"sluice-0.1.0/{name}" for name in self.git("ls-files").splitlines()})
        for recipe in ("vcpkg/sluice", "conan"):
            self.assertEqual((folder / recipe / "sluice-0.1.0.tar.gz").read_bytes(), archive)
        self.assertEqual(json.loads((folder / "vcpkg/sluice/vcpkg.json").read_text())["version"], "0.1.0")
        self.assertIn(hashlib.sha512(archive).hexdigest(), (folder / "vcpkg/sluice/portfile.cmake").read_text())
        conan = (folder / "conan/conanfile.py").read_text()
        compile(conan, "conanfile.py", "exec")
        self.assertIn(sums["sluice-0.1.0.tar.gz"], conan)
        self.assertNotRegex(conan + (folder / "vcpkg/sluice/portfile.cmake").read_text(), "@[A-Z]")

    def test_twice_the_same_archive(self):
        self.assertEqual(self.release("one").returncode, 0)
        self.assertEqual(self.release("--draft", "two").returncode, 0)
        one, two = ((self.tree / name / "sluice-0.1.0.tar.gz").read_bytes() for name in ("one", "two"))
        self.assertEqual(one, two)

    def test_number_of_version(self):
        self.edit("base/include/sluice/version.h", "SLUICE_VERSION 100", "SLUICE_VERSION 101")
        self.refused("SLUICE_VERSION is 101 for 0.1.0; write 100", arguments=["--draft"])

    def test_version_of_the_python_package(self):
        self.edit("python/pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"')
        self.refused("python/pyproject.toml has version 0.2.0, version.h has 0.1.0", arguments=["--draft"])

    def test_changelog_of_another_version(self):
        self.edit("CHANGELOG.md", "## 0.1.0", "## 0.0.9")
        self.refused('begins with "## 0.0.9 (2026-11-23)"', "## 0.1.0 (DATE)", arguments=["--draft"])

    def test_changelog_without_a_date(self):
        self.edit("CHANGELOG.md", "(2026-11-23)", "(unreleased)")
        self.commit()
        self.git("tag", "--force", "v0.1.0")
        self.refused("unreleased")
        self.assertEqual(self.release("--draft").returncode, 0)

    def test_changed_files_and_files_that_git_does_not_know(self):
        self.edit("README.md", "# Sluice", "# Sluices")
        (self.tree / "surplus.txt").write_text("x")
        self.refused("README.md", "surplus.txt", "commit or remove them")
        self.assertEqual(self.release("--draft").returncode, 0)

    def test_tag(self):
        self.git("tag", "--delete", "v0.1.0")
        self.refused("the tag v0.1.0 is not at this commit", "git tag -a v0.1.0")
        self.git("tag", "v0.1.0")
        self.commit()
        self.refused("the tag v0.1.0 is not at this commit")

    def test_archive_of_another_release(self):
        (self.tree / "build/dist").mkdir(parents=True)
        (self.tree / "build/dist/sluice-0.0.9.tar.gz").write_text("x")
        self.refused("build/dist/sluice-0.0.9.tar.gz is no file of release 0.1.0")

    def test_folders_with_other_files_stay_as_they_are(self):
        for name in ("home/vcpkg/vcpkg.json", "home/conan/data/x", "home/notes-0.1.0.md/x"):
            with self.subTest(name):
                file = self.tree / "build" / name
                file.parent.mkdir(parents=True)
                file.write_text("x")
                self.refused("is no file of release 0.1.0", arguments=["build/home"])
                self.assertEqual([path for path in (self.tree / "build/home").rglob("*") if path.is_file()], [file])
                shutil.rmtree(self.tree / "build/home")
        self.refused("packaging/", "is no file of release 0.1.0", arguments=["packaging"])
        self.assertEqual(self.git("status", "--porcelain"), "")

    def test_again_into_the_same_folder(self):
        self.assertEqual(self.release().returncode, 0)
        recipe = self.tree / "build/dist/vcpkg/sluice/portfile.cmake"
        first = recipe.read_bytes()
        recipe.write_text("x")
        self.assertEqual(self.release().returncode, 0)
        self.assertEqual(recipe.read_bytes(), first)

    def test_unknown_option(self):
        done = self.release("--fast")
        self.assertEqual(done.returncode, 2)
        self.assertIn("tools/release.sh [--draft]", done.stderr)


if __name__ == "__main__":
    if run("git", "rev-parse", "HEAD", cwd=ROOT).returncode:
        print("SKIPPED: this is no clone, so there is no commit to make an archive of")
        sys.exit(77)
    unittest.main()
