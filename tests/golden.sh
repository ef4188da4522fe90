#!/bin/bash
# Every golden case through the command line: ranks x layouts x K/V kept or exchanged again, and f32.
# Usage: golden.sh BINARY GOLDEN. Prints failures and a sum; exit 1 if anything failed.
set -u
binary=$1
golden=$2
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cases=("$golden"/*.safetensors)
[ ${#cases[@]} -ge 18 ] || { echo "FAILED: ${#cases[@]} cases in $golden, expected 18"; exit 1; }
checks=0
failures=0

# check_all OPTIONS...: every case must pass.
check_all() {
    local status passes
    "$binary" check "${cases[@]}" --threads 1 "$@" >"$work/out" 2>"$work/err"
    status=$?
    passes=$(grep -c '^  pass' "$work/out")
    checks=$((checks + ${#cases[@]}))
    if [ $status != 0 ] || [ "$passes" != ${#cases[@]} ]; then
        failures=$((failures + ${#cases[@]} - passes))
        echo "FAILED: check $*: exit $status, $passes of ${#cases[@]} cases pass"
        grep -h -e FAILED -e '^ringattn' "$work/out" "$work/err" | head -n 20
    fi
}

for ranks in 1 2 3 4 7; do
    for layout in contiguous zigzag balanced balanced:align=4,equal "uneven:$ranks"; do
        check_all --ranks "$ranks" --layout "$layout"
        check_all --ranks "$ranks" --layout "$layout" --keep-kv
    done
done
# Inputs in f32 over many hops: what one hop loses, seven add up.
for seed in 0 1 2 5; do
    check_all --ranks 7 --layout "uneven:$seed" --dtype f32
done
echo "golden: $checks checks, $failures failed"
[ $failures = 0 ]
