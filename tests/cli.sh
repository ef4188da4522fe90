#!/bin/bash
# The built program as a user meets it: exit statuses, messages, files. Usage: cli.sh BINARY GOLDEN
# Every line of output is a failure, a skip or the sum at the end.
set -u
binary=$1
golden=$2
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

ok() { passed=$((passed + 1)); }
bad() {
    failed=$((failed + 1))
    echo "FAILED: $1"
    tail -n 5 "$work/err" | sed 's/^/    /'
}

# holds WHAT COMMAND...: the command succeeds.
holds() {
    local what=$1
    shift
    if "$@"; then ok; else bad "$what"; fi
}

# expect STATUS WORD ARGUMENTS...: WORD must be in standard error (or output, where that is empty).
expect() {
    local status=$1 word=$2 got
    shift 2
    "$binary" "$@" >"$work/out" 2>"$work/err" </dev/null
    got=$?
    if [ "$got" != "$status" ]; then
        bad "ringattn $*: exit $got, expected $status"
    elif [ "$status" != 0 ] && [ "$status" != 1 ] && ! grep -q '^ringattn: ' "$work/err"; then
        bad "ringattn $*: no message that begins with ringattn:"
    elif ! grep -qF -- "$word" "$work/err" "$work/out"; then
        bad "ringattn $*: no \"$word\" in the output"
    else
        ok
    fi
}

# json FILTER: standard output of the last command is JSON, and the jq or Python expression holds.
json() {
    if command -v python3 >/dev/null; then
        if python3 -c "import json, sys
d = json.load(open(sys.argv[1]))
assert $1, d" "$work/out" 2>"$work/err"; then ok; else bad "JSON: $1"; fi
    else
        echo "skipped: JSON: $1 (no python3)"
    fi
}

causal=$golden/global_causal.safetensors
sliding=$golden/sliding_packed.safetensors
complete=$golden/global_with_image.safetensors # has every expected tensor
for file in "$causal" "$sliding" "$complete"; do
    [ -r "$file" ] || { echo "FAILED: $file is missing"; exit 1; }
done

# ---- help, version, use
expect 0 'usage: ringattn COMMAND' --help
expect 0 'ringattn 0.' --version
expect 0 'cpu levels of this machine: portable' --version
for command in check run plan bench; do
    expect 0 "usage: ringattn $command" $command --help
done
expect 2 'COMMAND: missing'
expect 2 'no such command' chekc
expect 2 'did you mean --ranks' check "$causal" --rnaks 2
expect 2 'no such option' check "$causal" --frobnicate
expect 2 '--ranks: 0' check "$causal" --ranks 0
expect 2 '--cpu-level: z80' check "$causal" --cpu-level z80
expect 2 'FILE: missing' check

# ---- check: every layout, also more ranks than positions
for layout in contiguous zigzag uneven uneven:5 balanced balanced:equal; do
    for ranks in 1 3 150; do
        expect 0 'pass' check "$causal" "$sliding" --ranks $ranks --layout $layout --threads 1
    done
done
printf '[[[40, 44]], [], [[10, 30], [0, 10]]]' >"$work/runs.json"
expect 0 "runs:$work/runs.json" check "$causal" --ranks 3 --layout "runs:$work/runs.json"
printf '[[[0, 44]], [], [[40, 44]]]' >"$work/overlap.json"
expect 2 'ringattn: ' check "$causal" --ranks 3 --layout "runs:$work/overlap.json"
expect 2 'No such file' check "$causal" --ranks 3 --layout "runs:$work/none.json"
mkfifo "$work/fifo"
for odd in "$work/fifo" /dev/zero "$work"; do
    expect 2 'not a regular file' check "$causal" --layout "runs:$odd"
    expect 2 'not a regular file' plan --seq 100 --ranks 2 --docs "$odd"
done
truncate -s 67108865 "$work/large"
expect 2 'at most 67108864' check "$causal" --layout "runs:$work/large"
expect 2 '--docs: ' plan --seq 100 --ranks 2 --docs "$work/large"
truncate -s 10 "$work/large"
expect 2 'a 0 byte' plan --seq 100 --ranks 2 --docs "$work/large"
sed -i 's/^/[/' "$work/overlap.json"
expect 2 'overlap.json' check "$causal" --ranks 3 --layout "runs:$work/overlap.json"
for option in --forward-only --keep-kv --no-overlap '--dtype=f16' '--dtype=bf16' --verbose \
    '--cpu-level=portable' "--trace=$work/trace.json"; do
    expect 0 'pass' check "$sliding" --ranks 2 "$option"
done
cp "$work/trace.json" "$work/out" 2>/dev/null
json 'len(d["traceEvents"]) > 0'
json '{e["tid"] for e in d["traceEvents"]} == {"call", "compute", "comm", "wait"}'
expect 0 'exposed communication' check "$sliding" --ranks 2 --trace "$work/trace.json"
expect 0 '"exposed"' check "$sliding" --ranks 2 --trace "$work/trace.json" --json
json 'all(abs(t["wall"] - t["compute"] - t["exposed"] - t["idle"]) < 1e-6 for t in d[0]["trace"])'
expect 0 '"pass": true' check "$causal" "$sliding" --ranks 3 --json
json 'len(d) == 2 and all(c["pass"] and c["ranks"] == 3 and len(c["hops"]) == 3 for c in d)'
json 'set(d[0]["errors"]) == {"out", "lse", "grad_query", "grad_key", "grad_value"}'
json 'all(e["max_abs"] <= e["tolerance"] for c in d for e in c["errors"].values())'
json 'len(d[0]["bytes_sent"]["forward"]) == 3 and sum(d[0]["bytes_sent"]["forward"]) > 0'

# ---- check: a wrong expected value is seen, the other files are still checked
cp "$complete" "$work/wrong.safetensors" && chmod u+w "$work/wrong.safetensors"
header=$(od -An -tu8 -N8 "$complete" | tr -d ' ')
# The data begin with an expected F32 tensor; 0x7f in an exponent byte is a value far too large.
printf '\x7f' |
    dd of="$work/wrong.safetensors" bs=1 seek=$((8 + header + 4003)) conv=notrunc status=none
expect 1 'FAILED' check "$work/wrong.safetensors" "$sliding"
holds 'the second file is still checked' grep -q '^  pass' "$work/out"
expect 1 '"pass": false' check "$work/wrong.safetensors" --json

# ---- run: round trip, dtypes, nothing left on failure
expect 0 'forward and backward' run "$complete" -o "$work/results.safetensors" --ranks 3
found=("$work"/results*)
holds 'run: no temporary file is left' [ ${#found[@]} = 1 ]
expect 0 '"backward": false' run "$complete" -o "$work/forward.safetensors" --forward-only --json
expect 0 '' run "$complete" -o "$work/f32.safetensors" --out-dtype f32
if command -v python3 >/dev/null; then
    if python3 - "$complete" "$work/results.safetensors" "$work/f32.safetensors" 2>"$work/err" <<'END'
import json, struct, sys

def read(path):
    data = open(path, "rb").read()
    length = struct.unpack("<Q", data[:8])[0]
    assert length % 8 == 0
    return json.loads(data[8:8 + length])

case, results, wide = map(read, sys.argv[1:])
names = {"out", "lse", "grad_query", "grad_key", "grad_value", "__metadata__"}
assert set(results) == names, results
assert results["__metadata__"] == case["__metadata__"]
for name in names - {"__metadata__"}:
    assert results[name]["shape"] == case[name]["shape"], name
    assert results[name]["dtype"] == ("F32" if name == "lse" else "BF16"), name
    assert wide[name]["dtype"] == "F32", name
END
    then ok; else bad 'run: results'; fi
else
    echo 'skipped: contents of run -o (no python3)'
fi
before=$(ls -A "$work")
expect 2 'cannot write' run "$complete" -o "$work/none/results"
expect 2 'not a regular file' run "$complete" -o "$work"
expect 2 'not a regular file' run "$complete" -o /dev/null
expect 2 'no OUT' run "$complete"
expect 2 'none.safetensors' run "$work/none.safetensors" -o "$work/never"
(
    trap '' XFSZ
    ulimit -f 8
    "$binary" run "$complete" -o "$work/never" >/dev/null 2>"$work/err"
)
holds 'run: a full disk, exit 2' [ $? = 2 ]
holds 'run: failures leave no file' [ "$(ls -A "$work")" = "$before" ]

# generate FILE HEADS SEQ WINDOW: an f32 case of equal values.
generate() {
    python3 - "$@" <<'END'
import json, struct, sys

path, (count, seq, window), chan = sys.argv[1], map(int, sys.argv[2:]), 64
header, begin = {"__metadata__": {"scale": "1", "causal": "true", "sliding_window": str(window)}}, 0
sizes = {name: [1, count if name == "query" else 1, seq, chan] for name in ("query", "key", "value")}
for name, shape in sizes.items():
    end = begin + 4 * shape[1] * seq * chan
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    begin = end
text = json.dumps(header).encode()
with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    file.write(struct.pack("<f", 0.01) * (begin // 4))
END
}

# ---- run: a signal at any time leaves no file either; the old one stays, or the new one is whole
mkdir "$work/killed"
if command -v python3 >/dev/null; then
    generate "$work/wide_out" 32 4096 8
    for delay in 5 10 20 40 60 80 100 120 140 160 180 200 220 240 260 280 300 350 400 500 600; do
        timeout -s $((delay % 3 == 0 ? 2 : 15)) "$(printf 0.%03d $delay)" "$binary" \
            run "$work/wide_out" -o "$work/killed/out" >/dev/null 2>"$work/err"
    done
else
    echo 'skipped: signals (no python3)'
fi
"$binary" run "$complete" -o "$work/killed/out" >/dev/null 2>"$work/err"
holds 'run: signals leave no file' [ "$(ls -A "$work/killed")" = out ]
holds 'run: the mode follows the umask' [ "$(stat -c %a "$work/killed/out")" = \
    "$(printf %o $((0666 & ~0$(umask))))" ]

# ---- nccl: where there are not as many GPUs as ranks, no process is started that would say so
"$binary" check "$causal" --transport nccl --backend cuda --ranks 4096 >"$work/out" 2>&1
holds 'nccl: one message for all ranks' [ "$(wc -l <"$work/out")" = 1 ]

# ---- trace: neither an input nor the output, by any name; whole or not at all
cp "$complete" "$work/in.safetensors" && chmod u+w "$work/in.safetensors"
ln "$work/in.safetensors" "$work/hard" && ln -s in.safetensors "$work/soft"
sum=$(cksum <"$work/in.safetensors")
for trace in "$work/in.safetensors" "$work/./in.safetensors" "$work/hard" "$work/soft"; do
    expect 2 'is an input' check "$causal" "$work/in.safetensors" --trace "$trace"
    expect 2 'is an input' run "$work/in.safetensors" -o "$work/traced" --trace "$trace"
done
holds 'trace: the input is as it was' [ "$(cksum <"$work/in.safetensors")" = "$sum" ]
expect 2 'is the output' run "$complete" -o "$work/traced" --trace "$work/killed/../traced"
holds 'trace: refused before anything is written' [ ! -e "$work/traced" ]
expect 2 'not a regular file' check "$causal" --trace /dev/null
expect 2 'cannot write' check "$causal" --trace "$work/none/trace"
expect 2 'cannot write' run "$complete" -o "$work/traced" --trace "$work/none/trace"
holds 'trace: a folder that is missing is found before anything is written' [ ! -e "$work/traced" ]
echo old >"$work/trace.json"
(
    trap '' XFSZ
    ulimit -f 0
    "$binary" check "$causal" --trace "$work/trace.json" >/dev/null 2>&1
)
holds 'trace: a full disk, exit 2' [ $? = 2 ]
holds 'trace: a full disk leaves the old one' [ "$(cat "$work/trace.json")" = old ]
expect 0 '' run "$complete" -o "$work/traced" --trace "$work/trace.json"
cp "$work/trace.json" "$work/out"
json 'len(d["traceEvents"]) > 0'

# ---- timeout: rank 0 has nothing to compute and waits for rank 2, which has nearly all
if command -v python3 >/dev/null; then
    generate "$work/lopsided" 4 2048 0
    printf '[[[0, 1]], [[1, 1]], [[2, 2046]]]' >"$work/lopsided.json"
    lopsided=(run "$work/lopsided" -o "$work/lopsided.out" --ranks 3 --threads 1
        --layout "runs:$work/lopsided.json" --cpu-level portable)
    expect 3 'rank' "${lopsided[@]}" --timeout 0.01
    expect 0 'forward' "${lopsided[@]}"
else
    echo 'skipped: timeout (no python3)'
fi

# ---- plan
expect 0 'imbalance' plan "$sliding" --ranks 4
expect 0 'half of hop 0, hop 1, the rest' plan --seq 100 --ranks 2
expect 0 'backward: hop 1, hop 0' plan --seq 100 --ranks 4 --window 8
expect 0 'half of hop 0, hops 1 to 3, the rest' plan --seq 100 --ranks 4 --layout zigzag
expect 0 'imbalance' plan --seq 1000000 --ranks 64 --window 1024
expect 0 '' plan --seq 1000000 --ranks 64 --layout zigzag --json
json 'len(d["rank"]) == 64 and d["pairs"] == 1000000 * 1000001 // 2 and d["imbalance"] < 1.01'
json 'sum(n for r in d["rank"] for _, n in r["runs"]) == 1000000'
json 'all(t["from"] != t["to"] for t in d["transfers"])'
json 'all(r["local_halved"] for r in d["rank"])'
expect 0 '' plan --seq 1000000 --ranks 64 --docs 700000,200000 --layout balanced --json
json 'd["imbalance"] <= 1.03 and all(len(r["runs"]) == 1 for r in d["rank"])'
expect 0 '' plan --seq 1048576 --ranks 64 --docs 700000,200000 --layout balanced:align=64,equal --json
json 'd["imbalance"] <= 1.03 and sum(len(r["runs"]) for r in d["rank"]) <= 127'
json 'all(r["seq_local"] == 16384 and all(s % 64 == 0 for s, _ in r["runs"]) for r in d["rank"])'
printf '300\n\n500\n' >"$work/lengths"
expect 0 '' plan --seq 1000 --ranks 3 --docs "$work/lengths" --json
json 'd["pairs"] == 300 * 301 // 2 + 500 * 501 // 2'
expect 0 '' plan --seq 100 --ranks 2 --window 10 --vision within_window --images 40:20 --json
expect 2 '--docs: document 2' plan --seq 100 --ranks 2 --docs 50,60
expect 2 '--docs: ' plan --seq 100 --ranks 2 --docs "$work/none"
expect 2 '--images: 90:20' plan --seq 100 --ranks 2 --window 5 --vision over_window --images 90:20
expect 2 '--images: given without --vision' plan --seq 100 --ranks 2 --window 5 --images 9:2
expect 2 '--vision: given without --window' plan --seq 100 --ranks 2 --vision over_window
expect 2 'expected at most 1024' plan --seq 100 --ranks 1025
expect 2 'expected at most 1024' check "$causal" --ranks 1025
expect 2 'ringattn: ' plan --seq 100 --ranks 2 --heads 8/3
expect 2 'ringattn: ' plan --seq 100 --ranks 2 --head-dim 13

# ---- metadata of 64 bits: ids are told apart and types compared before they are narrowed
if command -v python3 >/dev/null; then
    python3 - "$work/wide" <<'END'
import json, struct, sys

heads = {"query": 1, "key": 1, "value": 1}
header, body = {"__metadata__": {"scale": "1.0", "causal": "true", "sliding_window": "2",
                                 "vision_rule": "over_window"}}, b""

def add(name, dtype, shape, data):
    global body
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
    body += data

for name in heads:
    add(name, "F32", [1, 1, 8, 8], struct.pack("<64f", *[(i * 7 % 13) / 13 for i in range(64)]))
far = 2**32 + 1
add("packed_seq_ids", "I64", [1, 8], struct.pack("<8q", 1, 1, 1, far, far, far, far, -5))
add("mm_token_type_ids", "I64", [1, 8], struct.pack("<8q", far, far, far, 0, 1, 2, 0, 0))
add("padding_mask", "BOOL", [1, 8], bytes([0, 0, 0, 0, 0, 0, 1, 0]))
text = json.dumps(header).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(text)) + text + body)
END
    # By query: document 1 sees 1, 2, 2; the other 1, then the block of two 3 (window and block) and
    # 2; padding and the id below 1 see nothing.
    expect 0 '' plan "$work/wide" --ranks 2 --json
    json 'd["pairs"] == 1 + 2 + 2 + 1 + 3 + 2'
    expect 0 'pass' check "$work/wide" --ranks 3
else
    echo 'skipped: 64-bit metadata (no python3)'
fi

# ---- hostile files
hostile() { # NAME WORD: checks $work/NAME
    expect 2 "$2" check "$work/$1"
}
: >"$work/empty" && hostile empty 'expected at least 8'
printf '\xff\xff\xff\xff\xff\xff\xff\xff{}' >"$work/length" && hostile length 'header length'
printf '\x09\0\0\0\0\0\0\0{}' >"$work/short" && hostile short 'header length'
printf '\x02\0\0\0\0\0\0\0[]' >"$work/list" && hostile list 'JSON object'
printf '\x02\0\0\0\0\0\0\0{}' >"$work/bare" && hostile bare 'query: tensor missing'
printf '\x0c\0\0\0\0\0\0\0{"\\u001b[2J":1}' >"$work/escape"
expect 2 'escape' check "$work/escape"
holds 'no control character reaches the terminal' [ "$(grep -c $'\033' "$work/err")" = 0 ]
sed '1s/"name":"global_causal"/"name":"\\u001b[3mglob"/' "$causal" >"$work/name"
expect 0 '?[3mglob' check "$work/name"
head -c 100000 "$causal" >"$work/cut" && hostile cut 'lie in'
{ cat "$causal" && printf x; } >"$work/longer" && hostile longer 'cover'
sed '1s/"causal":"true"/"causal":"tree"/;1s/"causal": "true"/"causal": "tree"/' "$causal" \
    >"$work/tree" && hostile tree 'causal: tree'
expect 2 'not a regular file' check "$work"
expect 2 'not a regular file' check /dev/zero
expect 2 'No such file' check "$work/none"
mkfifo "$work/pipe" && expect 2 'not a regular file' check "$work/pipe"
expect 2 '"error"' check "$work/empty" "$causal" --json
json 'len(d) == 2 and not d[0]["pass"] and d[1]["pass"]'

# ---- memory and output
if { (ulimit -v 400000 && "$binary" --version) >/dev/null; } 2>/dev/null; then
    (
        ulimit -v 400000
        "$binary" check "$causal" --ranks 1000 --threads 1 >/dev/null 2>"$work/err"
    )
    holds 'check: no memory for 1000 ranks, exit 3' [ $? = 3 ]
else
    echo 'skipped: memory limit (the binary needs more, as sanitizers do)'
fi
if [ -w /dev/full ]; then
    "$binary" plan "$sliding" --ranks 2 >/dev/full 2>"$work/err"
    holds 'plan >/dev/full, exit 2' [ $? = 2 ]
    holds 'plan >/dev/full, message' grep -q 'standard output' "$work/err"
else
    echo 'skipped: full standard output (no /dev/full)'
fi

echo "cli: $passed passed, $failed failed"
[ "$failed" = 0 ]
