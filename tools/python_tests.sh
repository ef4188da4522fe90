#!/usr/bin/env bash
# Installs torch, transformers and this tree's wheel into an environment outside the tree, once, and
# runs python/tests there. Ends with "python: N passed ..." or a skip that says why.
# usage: python_tests.sh [--installed] [PYTEST ARGUMENTS]
#   --installed       skip where there is no such environment yet, rather than install it
#   RINGATTN_VENV     the environment, default ~/.cache/ringattn-venv (about 6 GB with CUDA's wheels)
#   RA_PYTHON_LIMIT   seconds for the tests, default 900; RA_PYTHON_INSTALL_LIMIT, default 1200
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

venv=${RINGATTN_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/ringattn-venv}
tree=$PWD
log=$(mktemp)
trap 'rm -f "$log"' EXIT

skip() {
    echo "skip  python: $1"
    tail -n 3 "$log" | sed 's/^/        /'
    exit 0
}

python=$(command -v python3) || skip "no python3 here"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || skip "python3 is older than 3.10"
installed_only=false
if [ "${1:-}" = --installed ]; then
    installed_only=true
    shift
fi

wanted=$(grep -E '^(requires|test|dependencies) = ' pyproject.toml)
if [ "$(cat "$venv/ringattn-wanted" 2>/dev/null)" != "$wanted" ]; then
    $installed_only && skip "no environment with torch; tools/python_tests.sh makes it, several GB"
    echo "python: environment $venv"
    echo "python: installing torch, transformers and pytest there (several GB, once)"
    "$python" -m venv "$venv" >"$log" 2>&1 || skip "no virtual environment can be made"
    mapfile -t packages < <(printf '%s\n' "$wanted" | grep -E '^(requires|test) = ' |
        grep -oE '"[^"]+"' | tr -d '"')
    timeout "${RA_PYTHON_INSTALL_LIMIT:-1200}" "$venv/bin/pip" install -q \
        --disable-pip-version-check "${packages[@]}" >"$log" 2>&1 ||
        skip "${packages[*]} cannot be installed"
    printf '%s\n' "$wanted" >"$venv/ringattn-wanted"
fi

"$venv/bin/pip" install -q --disable-pip-version-check --no-deps --no-build-isolation \
    --force-reinstall . >"$log" 2>&1 || {
    cat "$log"
    echo "FAIL  python: the wheel cannot be built or installed"
    exit 1
}

"$venv/bin/python" -m mypy --cache-dir "$venv/mypy" >"$log" 2>&1 || {
    cat "$log"
    echo "FAIL  python: mypy"
    exit 1
}

# From elsewhere, so that the installed package is what is tested.
cd "$venv" || exit 2
export PYTHONDONTWRITEBYTECODE=1
timeout --kill-after=10 "${RA_PYTHON_LIMIT:-900}" "$venv/bin/python" -m pytest -q \
    -p no:cacheprovider -c "$tree/pyproject.toml" --rootdir "$tree" "$tree/python/tests" "$@" 2>&1 |
    tee "$log"
status=${PIPESTATUS[0]}
if [ "$status" -eq 0 ]; then
    echo "ok    python: $(tail -n 1 "$log")"
else
    echo "FAIL  python: status $status"
fi
exit "$status"
