#!/usr/bin/env bash
# Installs torch, transformers and this tree's wheel into an environment outside the tree, once, and
# runs python/tests there. Ends with "ok    python: N passed ..." or a skip that says why.
# usage: python_tests.sh [--installed] [PYTEST ARGUMENTS]
#   --installed       skip where there is no such environment yet, rather than install it
#   RINGATTN_VENV     the environment, default ~/.cache/ringattn-venv (about 6 GB with CUDA's wheels)
#   RA_PYTHON_LIMIT   seconds for the tests, default 900; RA_PYTHON_INSTALL_LIMIT, default 1200
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

venv=${RINGATTN_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/ringattn-venv}
room_gb=10 # the environment, and the packages while they are unpacked
tree=$PWD
log=$(mktemp)
trap 'rm -f "$log"' EXIT

skip() {
    echo "skip  python: $1"
    tail -n 3 "$log" | sed 's/^/        /'
    echo "        no Python test ran; tools/python_tests.sh runs them (docs/pytorch.md)"
    exit 0
}
free_gb() { # free_gb DIRECTORY: it need not exist yet
    local directory=$1
    until [ -d "$directory" ]; do directory=$(dirname "$directory"); done
    df -Pk "$directory" | awk 'NR == 2 { print int($4 / 1048576) }'
}

installed_only=false
if [ "${1:-}" = --installed ]; then
    installed_only=true
    shift
fi

wanted=$(grep -E '^(requires|test|dependencies) = ' pyproject.toml)
if [ "$(cat "$venv/ringattn-wanted" 2>/dev/null)" != "$wanted" ]; then
    $installed_only && skip "torch and transformers, several GB, are not installed for the tests"
    tools/setup.sh python >"$log" 2>&1 || skip "no virtual environment can be made"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        skip "python3 is older than 3.10"
    free=$(free_gb "$venv")
    [ "$free" -ge $room_gb ] || skip "$free GB are free for $venv, $room_gb GB are needed"
    echo "python: installing torch, transformers and pytest, once, several GB, in $venv"
    python3 -m venv "$venv" >"$log" 2>&1 || skip "no virtual environment can be made"
    mapfile -t packages < <(printf '%s\n' "$wanted" | grep -E '^(requires|test) = ' |
        grep -oE '"[^"]+"' | tr -d '"')
    timeout "${RA_PYTHON_INSTALL_LIMIT:-1200}" "$venv/bin/pip" install -q --retries 2 \
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
