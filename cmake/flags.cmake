# Compiler and linker flags in one place.

# Warnings, language and instrumentation of every target of the project.
function(ra_target_flags target)
    target_compile_definitions(${target} PRIVATE _GNU_SOURCE)
    target_include_directories(${target} PRIVATE
        ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    # Contraction is off but in the kernels, so that every compiler computes the same elsewhere.
    target_compile_options(${target} PRIVATE
        -Wall -Wextra -Wconversion -Wshadow -Wstrict-prototypes -Wvla
        -fno-math-errno -ffp-contract=off
        $<$<BOOL:${RA_WERROR}>:-Werror>)
    if(RA_SANITIZE)
        target_compile_options(${target} PRIVATE
            -fsanitize=${RA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    endif()
    if(RA_FUZZ)
        target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
    endif()
    if(RA_COVERAGE)
        target_compile_options(${target} PRIVATE --coverage -fprofile-update=atomic)
    endif()
endfunction()

function(ra_link_flags target)
    if(RA_SANITIZE)
        target_link_options(${target} PRIVATE -fsanitize=${RA_SANITIZE})
    endif()
    if(RA_COVERAGE)
        target_link_options(${target} PRIVATE --coverage)
    endif()
endfunction()

# A file of one instruction set gets its own flags; all other files run on any machine.
function(ra_kernel_flags target)
    set_source_files_properties(${RA_KERNEL_SOURCES} PROPERTIES
        COMPILE_OPTIONS "-O3;-ffp-contract=fast")
    if(RA_CPU_X86)
        target_compile_definitions(${target} PRIVATE RA_CPU_X86)
        set_property(SOURCE src/backend/cpu/level_avx2.c APPEND PROPERTY
            COMPILE_OPTIONS -mavx2 -mfma)
        set_property(SOURCE src/backend/cpu/level_avx512.c APPEND PROPERTY
            COMPILE_OPTIONS -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma)
        set_property(SOURCE src/backend/cpu/level_avx512bf16.c APPEND PROPERTY
            COMPILE_OPTIONS -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma)
        set_property(SOURCE src/backend/cpu/level_amxbf16.c APPEND PROPERTY
            COMPILE_OPTIONS -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma
            -mamx-tile -mamx-bf16)
    endif()
endfunction()
