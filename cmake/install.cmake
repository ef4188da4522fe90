# What `cmake --install` places: libraries, header, command line, manual pages, completions, and
# what pkg-config and find_package(ringattn) need.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ringattn)

install(TARGETS ringattn ringattn_static EXPORT ringattnTargets)
install(FILES include/ringattn.h TYPE INCLUDE)
install(EXPORT ringattnTargets NAMESPACE ringattn:: DESTINATION ${package_dir})

configure_package_config_file(cmake/ringattnConfig.cmake.in ringattnConfig.cmake
    INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(ringattnConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
    ${CMAKE_CURRENT_BINARY_DIR}/ringattnConfig.cmake
    ${CMAKE_CURRENT_BINARY_DIR}/ringattnConfigVersion.cmake
    DESTINATION ${package_dir})

# Relative to the .pc file's own place, so that an installed tree can be moved.
cmake_path(RELATIVE_PATH CMAKE_INSTALL_FULL_LIBDIR
    BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX} OUTPUT_VARIABLE RA_PC_LIBDIR)
cmake_path(RELATIVE_PATH CMAKE_INSTALL_FULL_INCLUDEDIR
    BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX} OUTPUT_VARIABLE RA_PC_INCLUDEDIR)
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX
    BASE_DIRECTORY ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig OUTPUT_VARIABLE RA_PC_PREFIX)
configure_file(cmake/ringattn.pc.in ringattn.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ringattn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

foreach(section 1 3 7)
    install(DIRECTORY man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section}
        FILES_MATCHING PATTERN "*.${section}")
endforeach()

if(RA_CLI)
    install(TARGETS ringattn-cli)
    install(FILES completions/ringattn.bash RENAME ringattn
        DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
    install(FILES completions/_ringattn DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
endif()
