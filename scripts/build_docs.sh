#!/usr/bin/env bash
# Builds the site of docs/ into a folder (default: site). Needs the extra `docs`: pip install -e ".[docs]"
#
#   scripts/build_docs.sh [FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
NO_MKDOCS_2_WARNING=1 python3 -m mkdocs build --strict --clean --site-dir "${1:-site}"
