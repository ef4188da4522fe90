#!/bin/bash
# Does the tolerance bite? Each file of tests/mutants breaks one thing in a copy of the sources; then
# `ringattn check` must fail at least one golden case. Untouched, it must pass all of them.
# Usage: mutants.sh [SOURCE [WORK]]. A mutant that no longer applies is a failure.
set -u
source=$(cd "${1:-$(dirname "$0")/..}" && pwd) || exit 1
work=${2:-$(mktemp -d)}
mkdir -p "$work/tree" || exit 1
[ $# -ge 2 ] || trap 'rm -rf "$work"' EXIT
tree=$work/tree
failures=0
count=0

tar -C "$source" --exclude='./build*' --exclude=./.git --exclude=./tests/golden -cf - . |
    tar -C "$tree" -xf - || exit 1
cmake -S "$tree" -B "$work/build" -DCMAKE_BUILD_TYPE=Release >"$work/log" 2>&1 ||
    { cat "$work/log"; exit 1; }

build() {
    cmake --build "$work/build" --target ringattn-cli -j "$(nproc)" >"$work/log" 2>&1
}

# Prints the largest exit status of check over ranks and layouts: 0 all pass, 1 a case fails.
check() {
    local worst=0 status options
    for options in '--ranks 3' '--ranks 2 --layout zigzag'; do
        # shellcheck disable=SC2086
        "$work/build/ringattn" check \
            "$source"/tests/golden/global_{packed,odd_length}.safetensors \
            "$source"/tests/golden/sliding_{causal,packed,vision_packed,vision_within}.safetensors \
            $options --threads 1 >"$work/out" 2>&1
        status=$?
        [ $status -gt $worst ] && worst=$status
    done
    echo $worst
}

build || { tail -n 30 "$work/log"; echo 'FAILED: the sources do not build'; exit 1; }
status=$(check)
[ "$status" = 0 ] || { tail -n 30 "$work/out"; echo "FAILED: untouched, exit $status"; exit 1; }

for mutant in "$source"/tests/mutants/*.sed; do
    name=$(basename "$mutant" .sed)
    file=$(sed -n '1s/^# //p' "$mutant")
    count=$((count + 1))
    sed -f "$mutant" "$source/$file" >"$tree/$file"
    if cmp -s "$source/$file" "$tree/$file"; then
        echo "FAILED: $name does not apply to $file"
        failures=$((failures + 1))
    elif ! build; then
        tail -n 20 "$work/log"
        echo "FAILED: $name does not build"
        failures=$((failures + 1))
    else
        status=$(check)
        if [ "$status" = 1 ]; then
            echo "caught: $name"
        else
            echo "FAILED: $name: check exits $status, expected 1"
            failures=$((failures + 1))
        fi
    fi
    cp "$source/$file" "$tree/$file"
    touch "$tree/$file"
done
echo "mutants: $count, $failures not caught"
[ $failures = 0 ]
