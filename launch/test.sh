#!/usr/bin/env bash
# Installs once, then ruff, pyright and pytest. Arguments go to pytest:
#   bash launch/test.sh
#   bash launch/test.sh tests/schedule -k bound
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev
cd "$ROOT"
export OMP_NUM_THREADS=1
echo "==> ruff check"
ruff check --quiet .
echo "==> ruff format"
ruff format --quiet --check .
echo "==> pyright"
pyright --pythonpath "$(command -v python)"
echo "==> shell scripts"
for script in launch/*.sh launch/*.sbatch tests/gpu/run.sh .ci/run; do bash -n "$script"; done
echo "==> pytest"
mkdir -p "$VIRTUAL_ENV/tmp"
exec python -m pytest --basetemp="$VIRTUAL_ENV/tmp/pytest" "$@"
