# SPDX-License-Identifier: MIT
#
# Compiler flags, in three parts: mccl_flags for everything that is compiled here, mccl_system for what the
# library links to, mccl_source_flags for what single folders of src need.

add_library(mccl_flags INTERFACE)
target_compile_options(mccl_flags INTERFACE
    -std=c11
    -ffp-contract=off # a fused multiply-add would make results depend on the compiler
    -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wvla
    $<$<BOOL:${MCCL_WERROR}>:-Werror>)
if(MCCL_SANITIZE)
    target_compile_options(mccl_flags INTERFACE -O1 -g -fno-omit-frame-pointer -fsanitize=${MCCL_SANITIZE}
                                                -fno-sanitize-recover=all)
    target_link_options(mccl_flags INTERFACE -fsanitize=${MCCL_SANITIZE})
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
add_library(mccl_system INTERFACE)
target_link_libraries(mccl_system INTERFACE Threads::Threads ${CMAKE_DL_LIBS} m)

# src/os may use what a system offers beyond POSIX, src/reduce wants the vectoriser; the rest is plain C11 on
# POSIX. (Darwin shows everything without a feature macro, and hides things with one.)
function(mccl_source_flags sources)
    foreach(source IN LISTS sources)
        if(source MATCHES "/src/os/")
            set(feature _GNU_SOURCE)
        else()
            set(feature _POSIX_C_SOURCE=200809L)
        endif()
        if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
            set_source_files_properties(${source} PROPERTIES COMPILE_DEFINITIONS ${feature})
        endif()
        if(source MATCHES "/src/reduce/")
            set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS -O3)
        elseif(NOT source MATCHES "/src/os/")
            set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS -Wpedantic)
        endif()
    endforeach()
endfunction()
