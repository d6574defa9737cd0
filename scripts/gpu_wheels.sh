#!/usr/bin/env bash
# Collects the packages that a GPU machine without network lacks: wheels for Python 3.12 on Linux x86_64, in the versions
# of constraints.txt. The machine must have torch with torch's own dependencies, and pip.
#
#   scripts/gpu_wheels.sh [DIR]            (default: .wheels, which git ignores)
#   benchmarks/gpu.sh --wheels DIR         afterwards, on the GPU machine
#
# The second list is collected without dependencies: torchdata depends on torch, and tensorboard on a server that no
# training imports. The folder is emptied first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

WITH_DEPENDENCIES=(numpy pydantic pytest pytest-timeout pytest-xdist tomli)
ALONE=(absl-py protobuf tensorboard torchao torchdata)

folder="${1:-.wheels}"
options=(--quiet --only-binary=:all: --constraint constraints.txt --dest "$folder" --implementation cp --python-version 3.12)
for version in _2_28 _2_27 _2_26 _2_24 _2_17 _2_12 _2_5 2014 2010 1; do
    options+=(--platform "manylinux${version}_x86_64")
done

rm -f "$folder"/*.whl
"${PYTHON:-python3}" -m pip download "${options[@]}" "${WITH_DEPENDENCIES[@]}"
"${PYTHON:-python3}" -m pip download "${options[@]}" --no-deps "${ALONE[@]}"
du --total --apparent-size --block-size=K "$folder"/*.whl
