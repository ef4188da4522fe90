# Every source file of the product, in the order of src/LAYERS. A file that is not listed is not
# built.
set(RA_LIBRARY_SOURCES
    src/base/alloc.c
    src/base/status.c
    src/base/trace.c
    src/tensor/check.c
    src/tensor/rows.c
    src/tensor/tensor.c
    src/rule/layer.c
    src/rule/rule.c
    src/plan/backward.c
    src/plan/balance.c
    src/plan/balance_cut.c
    src/plan/balance_greedy.c
    src/plan/balance_peel.c
    src/plan/balance_repair.c
    src/plan/cost.c
    src/plan/cover.c
    src/plan/desc.c
    src/plan/need.c
    src/plan/passes.c
    src/plan/pieces.c
    src/plan/runs.c
    src/plan/schedule.c
    src/plan/segments.c
    src/plan/shard.c
    src/plan/tokens.c
    src/backend/backend.c
    src/backend/merge.c
    src/backend/cpu/cpu.c
    src/backend/cpu/elementwise.c
    src/backend/cpu/fold.c
    src/backend/cpu/grad.c
    src/backend/cpu/level.c
    src/backend/cpu/team.c
    src/backend/cpu/tile.c
    src/comm/comm.c
    src/comm/threads.c
    src/ring/blocks.c
    src/ring/collect.c
    src/ring/courier.c
    src/ring/ring.c
    src/ring/route.c
    src/oracle/oracle.c
    src/oracle/whole.c
    src/attn/attn.c
    src/attn/check.c
    src/attn/claim.c
    src/attn/ctx.c
    src/attn/gathered.c
    src/attn/inspect.c
    src/attn/path.c
    src/attn/scratch.c
    src/attn/step.c
    src/attn/varlen.c
)

# One file per instruction set. The vector ones exist on x86-64 only; cpu.c learns of them by
# RA_CPU_X86 and still asks the machine before it calls one.
set(RA_KERNEL_SOURCES src/backend/cpu/level_portable.c)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
    set(RA_CPU_X86 ON)
    list(APPEND RA_KERNEL_SOURCES
        src/backend/cpu/level_avx2.c
        src/backend/cpu/level_avx512.c
        src/backend/cpu/level_avx512bf16.c
        src/backend/cpu/level_amxbf16.c)
endif()
list(APPEND RA_LIBRARY_SOURCES ${RA_KERNEL_SOURCES})

# The half of the CUDA backend and of its transports that needs no CUDA: tested on every machine.
set(RA_CUDA_HOST_SOURCES
    src/backend/cuda/forecast.c
    src/backend/cuda/slabs.c
    src/backend/cuda/slabs_cost.c
    src/backend/cuda/slabs_lists.c
    src/backend/cuda/slabs_runs.c
    src/backend/cuda/work.c
    src/comm/nccl/notice.c
    src/comm/nccl/rounds.c
)

set(RA_CHECK_SOURCES
    src/oracle/plain.c
    src/oracle/tolerance.c
)

# src/cli/main.c is listed with the executable.
set(RA_CLI_SOURCES
    src/cli/args.c
    src/cli/bench_problem.c
    src/cli/case.c
    src/cli/cmd_bench.c
    src/cli/cmd_check.c
    src/cli/cmd_plan.c
    src/cli/cmd_run.c
    src/cli/device.c
    src/cli/imagine.c
    src/cli/launch.c
    src/cli/peak.c
    src/cli/processes.c
    src/cli/progress.c
    src/cli/reference.c
    src/cli/report.c
    src/cli/ring_run.c
    src/cli/safetensors.c
    src/cli/safetensors_write.c
    src/cli/setup.c
    src/cli/shards.c
    src/cli/world.c
)
