#!/usr/bin/env bash
# Wheels for a GPU host without network: Linux x86-64, Python 3.12, all that requirements.txt asks
# for and all that those packages need, except what the host brings along.
#
#   here        make bundle                                    # or workflow/bundle.sh wheels
#   carry over  the repository, wheels/ included
#   there       python3 -m venv --system-site-packages .venv   # torch and triton are the host's
#               .venv/bin/pip install --no-index --find-links wheels -r wheels/requirements.txt
#               touch .venv/installed && make all && make record
#   and back    data/recorded/
#
# EXCLUDE names packages that the host has (or that measuring does without: `snakemake measurements`
# draws no figure, so it needs neither vl-convert-python nor duckdb-cli).
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:?usage: workflow/bundle.sh FOLDER}
EXCLUDE=${EXCLUDE:-torch triton}
PIP=${PIP:-.venv/bin/python -m pip}

mkdir -p "$folder"
pattern="^($(tr -s ' ' '|' <<<"$EXCLUDE"))[=<>!~; ]"
grep -v -E -e "$pattern" -e '^#' requirements.txt >"$folder/requirements.txt"

# The one dependency that is published as source only; it is pure Python.
$PIP wheel --quiet --no-deps --wheel-dir "$folder" connection_pool
# Our distributions beside tnp, without the packages that they call.
$PIP wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" ./peers ./lab
rm -rf {peers,lab}/build {peers,lab}/*.egg-info
printf '%s\n' tnp-peers tnp-lab >>"$folder/requirements.txt"
platforms=()
for tag in manylinux_2_{28,27,24,17,12,5}_x86_64 manylinux{2014,2010,1}_x86_64; do
    platforms+=(--platform "$tag")
done
$PIP download --quiet --dest "$folder" --find-links "$folder" --only-binary=:all: \
    --python-version 3.12 "${platforms[@]}" --requirement "$folder/requirements.txt"
for package in $EXCLUDE; do
    rm -f "$folder/${package//-/_}"-[0-9]*.whl
done
du -sh "$folder"
