"""usage: exports_test.py LIBSLUICE.SO HEADER...: the library shows the functions of the headers, and nothing else."""
import re
import subprocess
import sys


def main() -> int:
    library, headers = sys.argv[1], sys.argv[2:]
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    shown = {line.split()[-1].split("@")[0] for line in lines.splitlines()}
    declared = set()
    for header in headers:
        with open(header, encoding="utf-8") as file:
            text = re.sub(r"//.*", "", file.read())
        declared.update(re.findall(r"\b(sluice_\w+)\(", text))
    if shown == declared and declared:
        return 0
    print("shown, but not declared:", sorted(shown - declared)[:20])
    print("declared, but not shown:", sorted(declared - shown))
    return 1


if __name__ == "__main__":
    sys.exit(main())
