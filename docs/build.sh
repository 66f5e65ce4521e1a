#!/usr/bin/env bash
# Builds the documentation as a static site in build/site/html, with packages from the package index in build/site/env.
# Every link is checked: between pages, to headings, and to files of the repository. Exits with 77 where the index cannot be
# reached, and with another code than 0 when a link leads nowhere or a list or table was not understood.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
env=build/site/env
if ! cmp -s docs/site/requirements.txt "$env/requirements.txt"; then
  python3 -m venv --clear "$env"
  "$env/bin/pip" install --quiet --disable-pip-version-check -r docs/site/requirements.txt || {
    echo "docs/build.sh: the packages of docs/site/requirements.txt cannot be had from the package index" >&2
    exit 77
  }
  cp docs/site/requirements.txt "$env/requirements.txt"
fi
"$env/bin/python" -B docs/site/stage_pages.py build/site/pages
NO_MKDOCS_2_WARNING=1 "$env/bin/mkdocs" --quiet build --strict --clean -f build/site/mkdocs.yml
"$env/bin/python" -B docs/site/stage_pages.py --built build/site/html || {
  echo "docs/build.sh: these lines were not understood as lists or tables" >&2
  exit 1
}
echo "build/site/html/index.html: $(find build/site/html -name '*.html' | wc -l) pages, $(find build/site/html -name '*.svg' -path '*results*' | wc -l) plots"
