# SPDX-License-Identifier: MIT
#
# `cmake --install`: library, header, pkg-config file and CMake package. All of it can be moved: paths inside
# are relative to the files themselves, so that an install under another --prefix or DESTDIR works as it is.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mccl)
install(TARGETS mccl EXPORT mccl LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/mccl.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

install(EXPORT mccl FILE mccl-targets.cmake NAMESPACE mccl:: DESTINATION ${package_dir})
configure_package_config_file(cmake/mccl-config.cmake.in mccl-config.cmake INSTALL_DESTINATION ${package_dir})
# While the major version is 0, a new minor version may break callers.
write_basic_package_version_file(mccl-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/mccl-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/mccl-config-version.cmake
        DESTINATION ${package_dir})

file(RELATIVE_PATH pc_to_prefix "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
configure_file(mccl.pc.in mccl.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/mccl.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
