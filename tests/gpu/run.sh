#!/usr/bin/env bash
# Checks on one CUDA device, in under six minutes; a table last, non-zero when one fails.
#
#   bash tests/gpu/run.sh [--device cuda|cpu] [--only NAME ...]
#
# Needs torch, transformers, safetensors, numpy, omegaconf, pytest. Where the machine has no
# network, wheels of what it lacks go into a folder beforehand (WHEELS, default .whl).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.whl}
PACKAGES=$(mktemp -d)
trap 'rm -rf "$PACKAGES"' EXIT

for file in "$WHEELS"/*.whl; do
  [ -e "$file" ] || continue
  "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$PACKAGES" "$file"
done
# After the machine's own packages, so that a wheel never hides one of them.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export GPU_CHECK_PACKAGES="$PACKAGES"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

"$PYTHON" tests/gpu/checks.py "$@"
