#!/usr/bin/env bash
# Runs every static check and ends with "lint: N passed, N failed, N skipped". A check whose tool
# is missing is a skip, said aloud.
# usage: lint.sh BUILD_DIR    a configured and built tree, for its library and its compile commands
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

build=${1:?usage: lint.sh BUILD_DIR}
passed=0 failed=0 skipped=0

# check NAME TOOL COMMAND...: output is shown only when the command fails.
check() {
    local name=$1 tool=$2 output
    shift 2
    if ! command -v "$tool" >/dev/null; then
        echo "skip  $name: no $tool here"
        skipped=$((skipped + 1))
    elif output=$("$@" 2>&1); then
        echo "ok    $name"
        passed=$((passed + 1))
    else
        echo "FAIL  $name"
        printf '%s\n' "$output" | tail -n 60
        failed=$((failed + 1))
    fi
}

check_header() { # check_header COMPILER LANGUAGE STANDARD
    echo '#include "ringattn.h"' |
        "$1" -x "$2" -std="$3" -Iinclude -Wall -Wextra -pedantic -Werror -fsyntax-only -
}

# Files of this build: what includes mpi.h or CUDA's headers is compiled in builds of its own.
built() {
    local file
    while read -r file; do
        grep -qF "/$file\"" "$build/compile_commands.json" && echo "$file"
    done
}

tidy() { # without the analyzer's long paths
    git ls-files -co --exclude-standard 'src/*.c' | built |
        xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p "$build" --warnings-as-errors='*' \
            --checks="-*,$(tr -d ' \n' <tools/tidy_checks.txt)" 2>&1 |
        { grep -E ' (error|warning): ' || true; }
}

mapfile -t c_files < <(git ls-files -co --exclude-standard \
    '*.c' '*.h' '*.inc' '*.cu' '*.cuh')
mapfile -t shell_files < <(git ls-files -co --exclude-standard '*.sh' .ci/run)
mapfile -t man_files < <(git ls-files -co --exclude-standard 'man/*')

check format clang-format clang-format --dry-run -Werror "${c_files[@]}"
check layers python3 python3 tools/check_layers.py
check sizes python3 python3 tools/check_sizes.py
check sources python3 python3 tools/check_sources.py
check exports python3 python3 tools/check_exports.py "$build/libringattn.so"
check "header, gcc C17" gcc check_header gcc c c17
check "header, clang C17" clang check_header clang c c17
check "header, gcc C++17" g++ check_header g++ c++ c++17
check "header, clang C++17" clang++ check_header clang++ c++ c++17
# cppcheck does not know that a subscript of a GNU vector can be assigned to.
check cppcheck cppcheck cppcheck --quiet --enable=warning,performance,portability --std=c11 \
    --suppress=uninitvar:src/backend/cpu/kernels.inc --error-exitcode=1 -j "$(nproc)" \
    -D_GNU_SOURCE -Iinclude -Isrc src
check clang-tidy clang-tidy tidy
# Needs no GPU. CUDA's own place is often not in PATH.
PATH=$PATH:/usr/local/cuda/bin check ptxas nvcc python3 tools/check_ptxas.py
check shellcheck shellcheck shellcheck "${shell_files[@]}"
check "manual pages" mandoc mandoc -Tlint -W warning "${man_files[@]}"

echo "lint: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
