#!/usr/bin/env bash
# Installs once, then ruff, pyright and pytest, in two processes, one a core (about 6 minutes on 2):
#   bash launch/test.sh
#   bash launch/test.sh --fast         about a minute: no pyright, and none of the tests that are
#                                      slow, of several processes, of the demo or of exports
#   bash launch/test.sh --processors   the tests that compute, as on other processors: without AVX,
#                                      with other kernels of MKL and oneDNN, with two threads
#   bash launch/test.sh tests/schedule -k bound        arguments go to pytest, also after --fast
set -euo pipefail
case "${1:-}" in
--help | -h)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"
    exit
    ;;
--fast | --processors)
    TIER="$1"
    shift
    ;;
*) TIER= ;;
esac
# shellcheck source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev
cd "$ROOT"
export OMP_NUM_THREADS=1
TMP="$VIRTUAL_ENV/tmp"
mkdir -p "$TMP"
COMPUTING=(tests/model tests/train tests/eval)
ALONE="not slow and not dist and not gpu"

in_two() { # pytest of COMPUTING, shown at the end, beside pytest of the rest
    local log="$TMP/pytest.log" failed=0
    python -m pytest --basetemp="$TMP/pytest-computing" "$@" "${COMPUTING[@]}" >"$log" 2>&1 &
    local computing=$!
    # shellcheck disable=SC2064
    trap "kill $computing 2>/dev/null || true" EXIT
    python -m pytest --basetemp="$TMP/pytest" "$@" "${COMPUTING[@]/#/--ignore=}" || failed=$?
    wait "$computing" || failed=$?
    trap - EXIT
    cat "$log"
    return "$failed"
}

echo "==> ruff check"
ruff check --quiet .
echo "==> ruff format"
ruff format --quiet --check .
if [ "$TIER" = --processors ]; then
    for setting in ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE \
        ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2; do
        echo "==> pytest, $setting"
        env "$setting" python -m pytest --basetemp="$TMP/pytest" -m "$ALONE" \
            "${COMPUTING[@]}" tests/export "$@"
    done
    exit
fi
if [ "$TIER" = --fast ]; then
    echo "==> pytest"
    [ $# -gt 0 ] && exec python -m pytest --basetemp="$TMP/pytest" -m "$ALONE" "$@"
    in_two -m "$ALONE" --ignore=tests/demo --ignore=tests/export
    exit
fi
echo "==> pyright"
pyright --pythonpath "$(command -v python)"
echo "==> shell scripts"
for script in launch/*.sh launch/*.sbatch tests/gpu/run.sh .ci/run; do bash -n "$script"; done
echo "==> pytest"
[ $# -gt 0 ] && exec python -m pytest --basetemp="$TMP/pytest" "$@"
in_two
