# Builds libringattn-mpi: the shared library holds libringattn and the MPI transport, a program
# links one or the other; the static library holds the transport alone and goes before
# libringattn.a. With RA_CUDA=ON the shared library holds the CUDA backend too, and the transport
# takes tensors in device memory. Attaches the transport to the command line and adds its tests, which ctest starts
# through mpirun. Included last, when every other target exists.
find_package(MPI REQUIRED COMPONENTS C)

set(RA_MPI_SOURCES
    src/comm/mpi/flow.c
    src/comm/mpi/memory.c
    src/comm/mpi/mpi.c
)

add_library(ringattn_mpi_objects OBJECT ${RA_MPI_SOURCES})
ra_target_flags(ringattn_mpi_objects)
target_link_libraries(ringattn_mpi_objects PRIVATE MPI::MPI_C Threads::Threads)

add_library(ringattn_mpi SHARED
    $<TARGET_OBJECTS:ringattn_objects> $<TARGET_OBJECTS:ringattn_mpi_objects>)
add_library(ringattn_mpi_static STATIC $<TARGET_OBJECTS:ringattn_mpi_objects>)
foreach(library ringattn_mpi ringattn_mpi_static)
    target_include_directories(${library} INTERFACE
        $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
        $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
    set_target_properties(${library} PROPERTIES OUTPUT_NAME ringattn-mpi)
    ra_link_flags(${library})
endforeach()
target_link_libraries(ringattn_mpi PRIVATE MPI::MPI_C Threads::Threads m)
target_link_libraries(ringattn_mpi_static PUBLIC ringattn_static MPI::MPI_C Threads::Threads)
set_target_properties(ringattn_mpi PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}
    LINK_DEPENDS "${PROJECT_SOURCE_DIR}/src/ringattn.map;${PROJECT_SOURCE_DIR}/src/ringattn_mpi.map")
target_link_options(ringattn_mpi PRIVATE
    LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/ringattn.map
    LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/ringattn_mpi.map)
set_target_properties(ringattn_mpi_static PROPERTIES EXPORT_NAME mpi_static)
if(RA_CUDA)
    target_compile_definitions(ringattn_mpi_objects PRIVATE RA_WITH_CUDA)
    target_link_libraries(ringattn_mpi_objects PRIVATE CUDA::cudart_static)
    target_sources(ringattn_mpi PRIVATE ${cuda_objects})
    target_link_libraries(ringattn_mpi PRIVATE CUDA::cudart_static stdc++ ${CMAKE_DL_LIBS})
    target_link_libraries(ringattn_mpi_static PUBLIC ringattn_cuda_static)
    set_target_properties(ringattn_mpi PROPERTIES LINKER_LANGUAGE C)
    target_link_options(ringattn_mpi PRIVATE
        LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/ringattn_cuda.map)
endif()
add_library(ringattn::ringattn_mpi ALIAS ringattn_mpi)

install(TARGETS ringattn_mpi LIBRARY)
install(FILES include/ringattn_mpi.h TYPE INCLUDE)

if(TARGET ringattn_cli_objects)
    target_compile_definitions(ringattn_cli_objects PRIVATE RA_WITH_MPI)
    target_link_libraries(ringattn_cli_objects PUBLIC ringattn_mpi_static)
endif()

if(RA_TESTS)
    add_subdirectory(tests/mpi)
endif()
