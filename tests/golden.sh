#!/bin/bash
# Every golden case through the command line: ranks x layouts x K/V kept or exchanged again.
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

for ranks in 1 2 3 4 7; do
    for layout in contiguous zigzag balanced balanced:align=4,equal "uneven:$ranks"; do
        for keep in '' --keep-kv; do
            options=(--ranks "$ranks" --layout "$layout" --threads 1 ${keep:+"$keep"})
            "$binary" check "${cases[@]}" "${options[@]}" >"$work/out" 2>"$work/err"
            status=$?
            passes=$(grep -c '^  pass' "$work/out")
            checks=$((checks + ${#cases[@]}))
            if [ $status != 0 ] || [ "$passes" != ${#cases[@]} ]; then
                failures=$((failures + ${#cases[@]} - passes))
                echo "FAILED: check ${options[*]}: exit $status, $passes of ${#cases[@]} cases pass"
                grep -h -e FAILED -e '^ringattn' "$work/out" "$work/err" | head -n 20
            fi
        done
    done
done
echo "golden: $checks checks, $failures failed"
[ $failures = 0 ]
