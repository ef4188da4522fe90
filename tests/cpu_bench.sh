#!/bin/bash
# bench/cpu_bench.py as a user meets it, a stand-in taking the place of a Python with PyTorch.
# Usage: cpu_bench.sh BINARY CPU_BENCH_PY
# Every line of output is a failure, a skip or the sum at the end.
set -u
binary=$1
bench=$2
command -v python3 >/dev/null || {
    echo 'skipped: no python3'
    exit 0
}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
export PYTHONDONTWRITEBYTECODE=1
passed=0
failed=0

# expect STATUS WORD ARGUMENTS...: WORD must be in what is printed.
expect() {
    local status=$1 word=$2 got
    shift 2
    python3 "$bench" --ringattn "$binary" --out "$work/out" "$@" >"$work/log" 2>&1 </dev/null
    got=$?
    if [ "$got" = "$status" ] && grep -qF -- "$word" "$work/log"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: cpu_bench.py $*: exit $got, expected $status and \"$word\""
        tail -n 5 "$work/log" | sed 's/^/    /'
    fi
}

expect 0 'usage: ' --help
expect 2 '--levels: z80, expected some of portable' --levels z80
expect 2 '--threads: 1,0, expected' --threads 1,0
expect 2 '--only: z80, expected' --only z80 --no-torch
expect 2 '--torch-python: /nowhere, expected' --torch-python /nowhere
expect 2 'in a folder that exists' --no-torch --out "$work/none/out"
expect 2 'expected a name' --no-torch --out .
expect 2 'expected the program' --ringattn "$work/none"
expect 2 'expected the command line' --ringattn /bin/true
left=("$work"/*)
[ "${left[*]}" = "$work/log" ] || {
    failed=$((failed + 1))
    echo "FAILED: runs that failed left files: ${left[*]}"
}

# Three ways to ask for a row; the second takes its process along.
cat >"$work/stand_in" <<'END'
#!/usr/bin/env python3
import json, os, sys

if sys.argv[1] == "-c":
    sys.exit(0)  # asked whether it has torch

def say(**answer):
    print(json.dumps(answer), flush=True)

say(torch="stand-in")
for line in sys.stdin:
    for name, seconds in (("slow", 4.0), ("crashing", 1.0), ("fast", 2.0)):
        if name not in json.loads(line)["skip"]:
            say(begin=name)
            if name == "crashing":
                os._exit(7)
            say(variant=name, forward={"seconds": seconds, "gflops": 8 / seconds})
    say(end=True)
END
chmod +x "$work/stand_in"
best=$("$binary" --version | awk 'END { print $NF }')
# Interrupted while it measures, it leaves nothing.
python3 "$bench" --ringattn "$binary" --out "$work/cut" --quick --no-torch >"$work/log" 2>&1 </dev/null &
measuring=$!
for _ in $(seq 100); do
    grep -q 'beside it' "$work/log" && break
    sleep 0.1
done
kill -TERM $measuring
wait $measuring
if [ $? = 130 ] && grep -q 'nothing written' "$work/log" && ! compgen -G "$work/cut*" >/dev/null
then passed=$((passed + 1)); else
    failed=$((failed + 1))
    echo 'FAILED: an interrupted run'
fi

# As when nobody reads what it prints.
python3 "$bench" --ringattn "$binary" --out "$work/cut" --quick --no-torch --threads 1 \
    --levels portable --only 'window1024 s2048 bf16' >/dev/full 2>"$work/log" </dev/null
if [ $? = 3 ] && grep -q 'cpu_bench: .*No space left' "$work/log" && ! compgen -G "$work/cut*" >/dev/null
then passed=$((passed + 1)); else
    failed=$((failed + 1))
    echo 'FAILED: standard output that takes nothing'
    cat "$work/log"
fi

# The results of a name with a dot lie where the program says.
expect 0 'torch, crashing: the process ended with status 7' --quick --threads 1,2 --levels "$best" \
    --only 'window1024 s2048 bf16' --torch-python "$work/stand_in" --out "$work/out.1"
if python3 - "$work/out.1.json" <<'END'
import json, sys

rows = json.load(open(sys.argv[1]))["rows"]
assert [r["threads"] for r in rows] == [1, 2], rows
for row in rows:
    for peer in ("torch", "torch_unlimited"):
        assert row[peer]["forward"] == {"variant": "fast", "seconds": 2.0, "gflops": 4.0}, row
        assert set(row[peer]["variants"]) == {"slow", "crashing", "fast"}, row
    assert row["pass"] and row["error_share"] <= 1, row
    for operation, flops in (("forward", 4), ("backward", 10)):
        r = row[operation]
        # Pairs of a causal window: the first 1024 rows see 1, 2, ..., the others 1024 each.
        work = flops * 256 * 8 * (1024 * 1025 // 2 + 1024 * 1024)
        assert abs(r["gflops"] * r["seconds"] * 1e9 / work - 1) < 1e-6, row
        assert abs(r["gflops"] / max(r["peak_before_gflops"], r["peak_after_gflops"]) / r["ratio"] - 1) < 1e-6
END
then passed=$((passed + 1)); else
    failed=$((failed + 1))
    echo 'FAILED: the contents of the JSON'
fi
if grep -q 'more threads over one' "$work/out.1.txt"; then passed=$((passed + 1)); else
    failed=$((failed + 1))
    echo 'FAILED: no comparison of threads in the text'
fi

echo "cpu_bench: $passed passed, $failed failed"
[ "$failed" = 0 ]
