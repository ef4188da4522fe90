# Builds libringattn-cuda: the shared library holds libringattn and the CUDA backend, a program
# links one or the other; the static library holds the backend alone and goes before libringattn.a.
# Included with RA_CUDA=ON; attaches the backend to the command line and adds the device's tests.
option(RA_GPU_TESTS "Build the device's tests and benchmark" OFF)
if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

set(RA_CUDA_SOURCES
    src/attn/forecast.c
    src/backend/cuda/cuda.c
    src/backend/cuda/device.c
    src/backend/cuda/dispatch.c
    src/backend/cuda/memory.c
    src/comm/device_copy.c
    src/comm/threads_device.c
)
# Only the header of NCCL is needed here; the library is found when a program runs.
find_path(RA_NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS}
    DOC "Where nccl.h is; without it the NCCL transport answers that it is not there")
if(RA_NCCL_INCLUDE_DIR)
    list(APPEND RA_CUDA_SOURCES
        src/comm/nccl/ending.c
        src/comm/nccl/library.c
        src/comm/nccl/nccl.c
        src/comm/nccl/watch.c)
else()
    message(STATUS "nccl.h not found: building without the NCCL transport")
    list(APPEND RA_CUDA_SOURCES src/comm/nccl/absent.c)
endif()
# Kernels for any device from Hopper on.
set(RA_CUDA_PLAIN_SOURCES
    src/backend/cuda/elementwise.cu
    src/backend/cuda/simple.cu
)
# Kernels for Hopper alone, and the host code that only they need. tools/check_ptxas.py reads this
# list.
set(RA_CUDA_TUNED_SOURCES
    src/backend/cuda/fold_256.cu
    src/backend/cuda/fold_512.cu
    src/backend/cuda/gemm.cu
    src/backend/cuda/grad.c
    src/backend/cuda/grad_map.c
    src/backend/cuda/score.cu
    src/backend/cuda/score_256.cu
    src/backend/cuda/tensor_map.c
)

function(ra_cuda_flags target)
    target_compile_definitions(${target} PRIVATE _GNU_SOURCE)
    target_include_directories(${target} PRIVATE
        ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    # 20014: host helpers inside functions that only the host calls. Kernels are optimised whatever
    # the build type says of host code; -lineinfo changes none of their instructions, and names the
    # lines of what the sanitizer finds.
    target_compile_options(${target} PRIVATE
        $<$<COMPILE_LANGUAGE:C>:-Wall -Wextra -Wconversion -Wshadow -Wstrict-prototypes -Wvla>
        $<$<COMPILE_LANGUAGE:CUDA>:--threads=1 -diag-suppress=20014 -Xcompiler=-Wall,-Wextra>
        $<$<AND:$<CONFIG:RelWithDebInfo>,$<COMPILE_LANGUAGE:CUDA>>:-lineinfo>
        $<$<AND:$<BOOL:${RA_WERROR}>,$<COMPILE_LANGUAGE:C>>:-Werror>
        $<$<AND:$<BOOL:${RA_WERROR}>,$<COMPILE_LANGUAGE:CUDA>>:-Werror=all-warnings>)
    set_target_properties(${target} PROPERTIES
        CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_VISIBILITY_PRESET hidden)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static Threads::Threads)
endfunction()

add_library(ringattn_cuda_objects OBJECT
    ${RA_CUDA_HOST_SOURCES} ${RA_CUDA_SOURCES} ${RA_CUDA_PLAIN_SOURCES})
ra_cuda_flags(ringattn_cuda_objects)
target_link_libraries(ringattn_cuda_objects PRIVATE ${CMAKE_DL_LIBS})
if(RA_NCCL_INCLUDE_DIR)
    target_include_directories(ringattn_cuda_objects SYSTEM PRIVATE ${RA_NCCL_INCLUDE_DIR})
endif()
set_target_properties(ringattn_cuda_objects PROPERTIES CUDA_ARCHITECTURES 90)
set(cuda_objects $<TARGET_OBJECTS:ringattn_cuda_objects>)
if(RA_CUDA_TUNED_SOURCES)
    add_library(ringattn_cuda_tuned OBJECT ${RA_CUDA_TUNED_SOURCES})
    ra_cuda_flags(ringattn_cuda_tuned)
    set_target_properties(ringattn_cuda_tuned PROPERTIES CUDA_ARCHITECTURES 90a-real)
    list(APPEND cuda_objects $<TARGET_OBJECTS:ringattn_cuda_tuned>)
endif()

add_library(ringattn_cuda SHARED $<TARGET_OBJECTS:ringattn_objects> ${cuda_objects})
add_library(ringattn_cuda_static STATIC ${cuda_objects})
foreach(library ringattn_cuda ringattn_cuda_static)
    target_include_directories(${library} INTERFACE
        $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
        $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
    set_target_properties(${library} PROPERTIES
        OUTPUT_NAME ringattn-cuda LINKER_LANGUAGE C)
endforeach()
target_link_libraries(ringattn_cuda PRIVATE
    CUDA::cudart_static Threads::Threads m stdc++ ${CMAKE_DL_LIBS})
target_link_libraries(ringattn_cuda_static
    PUBLIC ringattn_static CUDA::cudart_static Threads::Threads m stdc++ ${CMAKE_DL_LIBS})
set_target_properties(ringattn_cuda PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}
    LINK_DEPENDS "${PROJECT_SOURCE_DIR}/src/ringattn.map;${PROJECT_SOURCE_DIR}/src/ringattn_cuda.map")
target_link_options(ringattn_cuda PRIVATE
    LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/ringattn.map
    LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/ringattn_cuda.map)
set_target_properties(ringattn_cuda_static PROPERTIES EXPORT_NAME cuda_static)
add_library(ringattn::ringattn_cuda ALIAS ringattn_cuda)

install(TARGETS ringattn_cuda LIBRARY)
install(FILES include/ringattn_cuda.h TYPE INCLUDE)

if(TARGET ringattn_cli_objects)
    target_compile_definitions(ringattn_cli_objects PRIVATE RA_WITH_CUDA)
    target_link_libraries(ringattn_cli_objects PUBLIC ringattn_cuda_static)
    set_target_properties(ringattn_cli_objects ringattn-cli PROPERTIES CUDA_ARCHITECTURES 90)
endif()

# ---- what runs on a device, started by tools/gpu_check.sh

if(RA_GPU_TESTS)
    # Without cmocka a small header stands in for it, so that a bare machine can test.
    find_package(PkgConfig)
    if(PKG_CONFIG_FOUND)
        pkg_check_modules(CMOCKA IMPORTED_TARGET cmocka)
    endif()
    set(tests ${PROJECT_SOURCE_DIR}/tests)
    file(GLOB support_sources CONFIGURE_DEPENDS ${tests}/support*.c)
    add_library(gpu_support STATIC ${support_sources}
        ${tests}/gpu/on_device.c ${tests}/gpu/device_job.c ${tests}/gpu/nccl_world.c
        ${tests}/gpu/queued_comm.c ${tests}/gpu/soak_rank.c)
    ra_target_flags(gpu_support)
    target_compile_options(gpu_support PUBLIC -include ${tests}/gpu/on_device.h)
    set_source_files_properties(${tests}/gpu/on_device.c PROPERTIES
        COMPILE_DEFINITIONS RA_TESTS_ON_DEVICE_ITSELF)
    target_compile_definitions(gpu_support PUBLIC RA_GOLDEN_DIR="${tests}/golden")
    target_include_directories(gpu_support PUBLIC ${tests} ${tests}/gpu)
    target_link_libraries(gpu_support PUBLIC ringattn_check ringattn_cuda_static m)
    if(TARGET PkgConfig::CMOCKA)
        target_link_libraries(gpu_support PUBLIC PkgConfig::CMOCKA)
    else()
        target_include_directories(gpu_support PUBLIC ${tests}/gpu/harness)
    endif()
    # The CPU's own tests of the whole operation run there unchanged.
    foreach(source gpu/test_gpu_backend.c gpu/test_gpu_fold.c gpu/test_gpu_grad.c
            gpu/test_gpu_refused.c gpu/test_gpu_far.c gpu/test_gpu_memory.c
            gpu/test_gpu_sweep.c gpu/test_gpu_ring.c gpu/test_gpu_delays.c gpu/test_gpu_nccl.c
            gpu/test_gpu_nccl_faults.c gpu/test_gpu_nccl_soak.c test_prop_ring.c test_varlen.c
            test_probes_mask.c test_probes_data.c test_probes_shape.c)
        cmake_path(GET source STEM name)
        string(REGEX REPLACE "^test_(gpu_)?" "gpu_" name ${name})
        add_executable(${name} ${tests}/${source})
        ra_target_flags(${name})
        target_link_libraries(${name} PRIVATE gpu_support)
    endforeach()

    add_executable(gpu_ptx ${tests}/gpu/test_ptx.cu)
    ra_cuda_flags(gpu_ptx)
    set_target_properties(gpu_ptx PROPERTIES CUDA_ARCHITECTURES 90a-real)

    add_executable(gpu_bench bench/gpu_bench.cu bench/gpu_bench_check.c bench/gpu_bench_hop.c
        bench/gpu_bench_job.cu bench/gpu_bench_must.cu bench/gpu_bench_problem.cu bench/gpu_bench_time.cu)
    ra_cuda_flags(gpu_bench)
    set_target_properties(gpu_bench PROPERTIES CUDA_ARCHITECTURES 90)
    target_link_libraries(gpu_bench PRIVATE ringattn_check ringattn_cuda_static CUDA::cublas)

    add_executable(gpu_bench_ring bench/gpu_bench_ring.cu bench/gpu_bench_job.cu
        bench/gpu_bench_must.cu bench/gpu_bench_shard.cu)
    ra_cuda_flags(gpu_bench_ring)
    set_target_properties(gpu_bench_ring PROPERTIES CUDA_ARCHITECTURES 90)
    target_link_libraries(gpu_bench_ring PRIVATE ringattn_cuda_static)
endif()
