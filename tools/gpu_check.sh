#!/bin/bash
# Builds the CUDA backend and checks it on this machine's GPU, from a bare copy of the tree: the
# tests of the backend, the CPU's tests of the whole operation on the device, a sweep of random
# shapes, tensors past 2^31 elements, peak memory, every golden case at 1, 2, 4 and 7 ranks, ranks
# over NCCL (on two GPUs, if there are two) and over MPI with device memory, the Python package on
# CUDA tensors, and compute-sanitizer on a small part. Works offline; jansson (golden cases) comes
# from the system or from .deps/ (tools/carry_deps.sh), else what needs it is skipped aloud. Ends
# with "N passed, N failed, N skipped" and fails if anything failed.
# usage: tools/gpu_check.sh [build|tests|sweep|far|golden|nccl|mpi|python|sanitizer|ptxas]...
#        default: all
# environment: RA_GPU_SEEDS=N    random ring processes, each with other problems (8)
#              RA_GPU_SWEEP=N    processes of the sweep, of 140 shapes each (16)
#              RA_BUILD_DIR=DIR  where to build (build/gpu)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

build=${RA_BUILD_DIR:-build/gpu}
seeds=${RA_GPU_SEEDS:-8}
sweeps=${RA_GPU_SWEEP:-16}
logs=$build/logs
passed=0 failed=0 skipped=0
export PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
[ -d .deps/lib ] && export LD_LIBRARY_PATH=$PWD/.deps/lib:${LD_LIBRARY_PATH:-}

result() { # result STATUS LABEL LOG
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok    $2"
    else
        failed=$((failed + 1))
        echo "FAIL  $2"
        tail -n 15 "$3" | sed 's/^/      /'
    fi
}

skip() {
    skipped=$((skipped + 1))
    echo "skip  $1"
}

# Jobs that run beside each other; what they said is reported in the order of their start.
labels=() pids=() limit=170
log_of() { # log_of LABEL
    echo "$logs/${1//[ \/]/_}.log"
}
begin() { # begin LABEL COMMAND...
    local label=$1
    shift
    labels+=("$label")
    timeout "$limit" "$@" >"$(log_of "$label")" 2>&1 &
    pids+=($!)
}
collect() {
    local i status
    for i in "${!pids[@]}"; do
        wait "${pids[$i]}"
        status=$?
        result $status "${labels[$i]}" "$(log_of "${labels[$i]}")"
    done
    labels=() pids=()
}

has_jansson() {
    "${PKG_CONFIG:-pkg-config}" --exists jansson 2>/dev/null
}

# A pkg-config file for what .deps/ brings, as the packages' own ones name other places.
describe_deps() {
    local name
    mkdir -p .deps/pkgconfig
    for name in jansson cmocka; do
        printf 'Name: %s\nDescription: carried\nVersion: 2.14\nCflags: -I%s\nLibs: -L%s -l%s\n' \
            "$name" "$PWD/.deps/include" "$PWD/.deps/lib" "$name" >".deps/pkgconfig/$name.pc"
    done
    command -v pkg-config >/dev/null || export PKG_CONFIG=$PWD/.deps/bin/pkgconf
    export PKG_CONFIG_PATH=$PWD/.deps/pkgconfig:${PKG_CONFIG_PATH:-}
}

step_build() {
    local cli=OFF mpi=OFF
    has_jansson && cli=ON
    command -v mpicc >/dev/null && mpi=ON
    if cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DRA_CUDA=ON -DRA_GPU_TESTS=ON \
        -DRA_MPI=$mpi -DRA_CLI=$cli >"$logs/build.log" 2>&1 &&
        cmake --build "$build" -j "$(nproc)" >>"$logs/build.log" 2>&1; then
        result 0 build "$logs/build.log"
    else
        grep -nE 'error|Error' "$logs/build.log" | head -n 20
        result 1 build "$logs/build.log"
        echo "$passed passed, $failed failed, $skipped skipped"
        exit 1
    fi
}

step_tests() {
    local seed name
    begin "ptx wrappers" "$build/gpu_ptx"
    collect
    begin "tuned forward" "$build/gpu_fold"
    begin "tuned backward" "$build/gpu_grad"
    collect
    begin "bad input" "$build/gpu_refused"
    begin backend "$build/gpu_backend"
    begin varlen "$build/gpu_varlen"
    for name in mask data shape; do
        begin "probes $name" "$build/gpu_probes_$name"
    done
    begin "ring properties" env RA_TEST_STEPS=2 "$build/gpu_prop_ring"
    for seed in $(seq "$seeds"); do
        begin "random ring, seed $seed" "$build/gpu_ring" --seed "$seed"
    done
    collect
    begin "random ring, queued exchanges" env RA_TEST_QUEUED=1 "$build/gpu_ring" --seed 98
    begin "delayed streams" "$build/gpu_delays"
    begin "random ring, plain kernels" env RA_TEST_SIMPLE=1 "$build/gpu_ring" --seed 99
    collect
    grep -h '^kernels:' "$logs/backend.log" | sed 's/^/      /'
    grep -h '^skipped' "$logs"/*.log | sed 's/^/      /'
}

# Every shape on the kernels that the dispatch chooses, against fp64, twice with the same bits.
step_sweep() {
    local i start=$SECONDS
    for i in $(seq "$sweeps"); do
        begin "sweep, part $i" "$build/gpu_sweep" --seed "$i"
    done
    collect
    cat "$logs"/sweep*.log | awk -v seconds=$((SECONDS - start)) '
        $1 == "shapes:" { shapes += $2 }
        $1 == "forward:" || $1 == "backward:" {
            for (i = 2; i < NF; i += 2) count[$1 " " $i] += $(i + 1)
        }
        END {
            printf "      sweep: %d shapes in %d s\n", shapes, seconds
            for (name in count) printf "      %s %d\n", name, count[name]
        }' | sort
}

# Alone: one takes half of the memory, the other watches how much is taken.
step_far() {
    begin "more than 2^31 elements" "$build/gpu_far"
    collect
    grep -hE '^skipped|heads:' "$(log_of "more than 2^31 elements")" | sed 's/^/      /'
    begin "peak memory" "$build/gpu_memory"
    collect
    grep -h 'ranks:' "$(log_of "peak memory")" | sed 's/^/      /'
}

step_golden() {
    local ranks file
    if [ ! -x "$build/ringattn" ]; then
        skip "golden cases: the command line needs jansson and pkg-config (tools/carry_deps.sh)"
        return
    fi
    for file in tests/golden/*.safetensors; do
        for ranks in 1 2 4 7; do
            begin "golden $(basename "$file" .safetensors) on $ranks" \
                "$build/ringattn" check --backend cuda --ranks "$ranks" "$file"
        done
        [ "${#pids[@]}" -ge "$(nproc)" ] && collect
    done
    collect
    begin "golden, zigzag, kept K/V" "$build/ringattn" check --backend cuda --ranks 4 \
        --layout zigzag --keep-kv tests/golden/*packed*.safetensors
    begin "golden, uneven" "$build/ringattn" check --backend cuda --ranks 3 --layout uneven:5 \
        --no-overlap tests/golden/*vision*.safetensors
    collect
}

gpu_count() {
    nvidia-smi --query-gpu=index --format=csv,noheader | wc -l
}

# The library that Python packages bring, if the system has none.
find_nccl() {
    local folder
    ldconfig -p | grep -q libnccl.so.2 && return
    folder=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)
    [ -d "$folder/lib" ] && export LD_LIBRARY_PATH=$folder/lib:${LD_LIBRARY_PATH:-}
}

step_nccl() {
    local gpus file
    gpus=$(gpu_count)
    find_nccl
    begin "NCCL transport" "$build/gpu_nccl"
    collect
    grep -hE '^(skipped|[0-9]+ devices)' "$(log_of "NCCL transport")" | sed 's/^/      /'
    if [ "$gpus" -lt 2 ]; then
        skip "NCCL between GPUs, its faults and golden cases: $gpus GPU here, and NCCL takes one rank a GPU"
        return
    fi
    begin "NCCL, 500 calls" "$build/gpu_nccl_soak"
    collect
    begin "NCCL faults" "$build/gpu_nccl_faults"
    collect
    grep -hE '(forward|backward) .* s: ' "$(log_of "NCCL faults")" | sed 's/^/      /'
    if [ ! -x "$build/ringattn" ]; then
        skip "golden cases over NCCL: no command line"
        return
    fi
    begin "golden over NCCL" "$build/ringattn" check --backend cuda --transport nccl --ranks 2 \
        tests/golden/*.safetensors
    begin "golden over NCCL, zigzag, kept K/V" "$build/ringattn" check --backend cuda \
        --transport nccl --ranks 2 --layout zigzag --keep-kv tests/golden/*packed*.safetensors
    collect
}

# Processes of MPI may share a GPU.
step_mpi() {
    local ranks launch=(mpirun --oversubscribe)
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    if ! command -v mpirun >/dev/null || [ ! -x "$build/ringattn" ] ||
        ! grep -q '^RA_MPI:BOOL=ON' "$build/CMakeCache.txt"; then
        skip "MPI with device memory: no mpirun, no command line, or it is built without MPI"
        return
    fi
    for ranks in 2 3; do
        begin "golden over MPI on $ranks" "${launch[@]}" -n "$ranks" "$build/ringattn" check \
            --backend cuda --transport mpi tests/golden/*.safetensors
    done
    begin "golden over MPI, zigzag" "${launch[@]}" -n 2 "$build/ringattn" check --backend cuda \
        --transport mpi --layout zigzag --no-overlap tests/golden/*packed*.safetensors
    collect
}

# The Python package on CUDA tensors, from the tree: ranks are processes that share the GPUs.
# What the CPU alone repeats is marked thorough: pytest -m thorough runs it here too, in minutes.
step_python() {
    local file
    if ! python3 -c 'import pytest, torch; torch.empty(1, device="cuda")' 2>/dev/null; then
        skip "the Python package: python3 has no pytest, or no torch that sees the GPU"
        return
    fi
    local run=(env RINGATTN_LIBRARY="$(realpath "$build/libringattn-cuda.so")"
        RINGATTN_TEST_DEVICE=cuda PYTHONPATH="$PWD/python:${PYTHONPATH:-}"
        PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 python3)
    for file in python/tests/test_*.py; do
        begin "python $(basename "$file" .py)" "${run[@]}" -m pytest -q --tb=short -rs \
            -m "not thorough" "$file"
    done
    collect
    for file in "$logs"/python_test_*.log; do
        echo "      $(basename "$file" .log): $(tail -n 1 "$file")"
        grep '^SKIPPED' "$file" | sed 's/^/        /'
    done
}

step_sanitizer() {
    local tool name
    if ! command -v compute-sanitizer >/dev/null; then
        skip "compute-sanitizer: not installed"
        return
    fi
    for name in fold backend; do
        for tool in memcheck synccheck initcheck; do
            begin "$tool, $name" env RA_TEST_STEPS=4 compute-sanitizer --tool $tool \
                --error-exitcode 9 "$build/gpu_$name"
        done
        collect
    done
    begin "memcheck, ring" env RA_TEST_STEPS=8 compute-sanitizer --tool memcheck \
        --error-exitcode 9 "$build/gpu_ring" --seed 3
    collect
    # One at a time: beside others on a GPU a test of seconds reached its time limit. What racecheck
    # names is judged below; here the test has to pass.
    for name in fold backend; do
        begin "racecheck, $name" env RA_TEST_STEPS=4 compute-sanitizer --tool racecheck \
            --print-limit 0 "$build/gpu_$name"
        collect
    done
    if ! command -v python3 >/dev/null; then
        skip "what racecheck names: no python3 to compare it with tests/gpu/known_races.txt"
        return
    fi
    begin "racecheck, only known pairs" tools/check_races.py \
        "$(log_of "racecheck, fold")" "$(log_of "racecheck, backend")"
    collect
    grep -hE '^listed, not seen|listed pairs seen' \
        "$(log_of "racecheck, only known pairs")" | sed 's/^/      /'
}

step_ptxas() {
    if python3 tools/check_ptxas.py >"$logs/ptxas.log" 2>&1; then
        result 0 "ptxas: $(tail -n 1 "$logs/ptxas.log")" "$logs/ptxas.log"
    else
        result 1 ptxas "$logs/ptxas.log"
    fi
}

mkdir -p "$logs"
[ -d .deps/lib ] && describe_deps
if ! command -v nvcc >/dev/null; then
    skip "everything: no nvcc on this machine"
elif ! nvidia-smi >/dev/null 2>&1; then
    skip "everything: no GPU on this machine"
else
    steps=("$@")
    [ $# -gt 0 ] || steps=(build tests sweep far golden nccl mpi python sanitizer ptxas)
    for step in "${steps[@]}"; do
        start=$SECONDS
        "step_$step" || exit 2
        echo "      $step took $((SECONDS - start)) s"
    done
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
