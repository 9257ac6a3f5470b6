# Sourced by the other scripts: a Python environment with dflashdist in it, made once.
#
#   source launch/environment.sh base     what a run needs
#   source launch/environment.sh dev      and what tests need
#   source launch/environment.sh found    what is here, or a word on what is missing
#
# The active virtual environment is used; without one, .venv is made in the repository. A second run
# finds its stamp and installs nothing. Nothing is left outside the repository but pip's cache.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [ "$1" = found ]; then # nothing is installed: which torch suits this machine's GPUs is your choice
    usable() {
        python -c 'import importlib.util as u, dflashdist.config; u.find_spec("torch") or exit(1)' \
            2>/dev/null
    }
    if ! usable && [ -x "$ROOT/.venv/bin/python" ]; then
        # shellcheck disable=SC1091
        source "$ROOT/.venv/bin/activate"
    fi
    if ! usable; then
        echo "no Python here has dflashdist: activate the environment that has it, or make .venv by" \
            "bash -c 'source $ROOT/launch/environment.sh base'" >&2
        exit 2
    fi
    export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
    return
fi
[ "$1" = dev ] && EXTRA=dev || EXTRA=
WANTED_PYTHON="${PYTHON:-python3}"

if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -x "$ROOT/.venv/bin/python" ]; then
        "$WANTED_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "dflashdist needs Python 3.11 or newer; $("$WANTED_PYTHON" --version) found." \
                "Set PYTHON to another one." >&2
            exit 2
        }
        echo "==> making the virtual environment .venv"
        "$WANTED_PYTHON" -m venv "$ROOT/.venv"
    fi
    # shellcheck disable=SC1091
    source "$ROOT/.venv/bin/activate"
fi

# Caches and temporary files stay in the environment, not in the home folder.
export HF_HOME="${HF_HOME:-$VIRTUAL_ENV/cache/huggingface}"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"

install_once() {
    local stamp
    stamp="$(cat "$ROOT/pyproject.toml" "$ROOT/launch/constraints.txt" - <<<"$ROOT" | cksum | tr ' ' '-')"
    for have in "$VIRTUAL_ENV/.dflashdist-$stamp" "$VIRTUAL_ENV/.dflashdist-$stamp-dev"; do
        [ -e "$have" ] && { [ -z "$EXTRA" ] || [[ "$have" == *-dev ]]; } && return 0
    done
    echo "==> installing dflashdist${EXTRA:+ with $EXTRA tools} (once)"
    local constraints="$ROOT/launch/constraints.txt"
    local pip=(python -m pip install -qq --disable-pip-version-check)
    if python - <<'PY' 2>/dev/null
import sys, importlib.metadata as m
sys.exit(tuple(int(p) for p in m.version("torch").split("+")[0].split(".")[:2]) < (2, 10))
PY
    then # a torch is here, perhaps one for this machine's GPU: keep it
        constraints="$(mktemp "$VIRTUAL_ENV/constraints.XXXXXX")"
        grep -v '^torch==' "$ROOT/launch/constraints.txt" >"$constraints"
    else # the pinned one first: a range would let pip choose a build of several gigabytes
        "${pip[@]}" "$(grep '^torch==' "$constraints")"
    fi
    "${pip[@]}" -c "$constraints" -e "$ROOT${EXTRA:+[$EXTRA]}"
    if [ "$EXTRA" = dev ]; then # parity oracles, whose pins name other versions than they need, and
        # models' own chat templates, of which only the files are used
        "${pip[@]}" --no-deps dflash==0.1.0 trl==1.16.0 speculators==0.9.0 hs-connectors==0.9.0 \
            loguru==0.7.3 pydantic-settings==2.16.3
    fi
    touch "$VIRTUAL_ENV/.dflashdist-$stamp${EXTRA:+-$EXTRA}"
}
install_once
