# SPDX-License-Identifier: MIT
#
# mccl_kernel_set(NAME OPTION...): compiles the reduction kernels once more, for a processor with more
# instructions than the architecture promises. src/reduce/reduce.c picks a set at run time.
file(GLOB kernel_sources CONFIGURE_DEPENDS src/reduce/reduce_*.c)
# GCC 12 fuses the multiplication and addition of complex products where it can, -ffp-contract=off or not.
list(FILTER kernel_sources EXCLUDE REGEX "reduce_complex")

function(mccl_kernel_set name)
    set(target mccl_kernels_${name})
    add_library(${target} OBJECT ${kernel_sources})
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON C_VISIBILITY_PRESET hidden)
    target_compile_definitions(${target} PRIVATE MCCL_BUILDING REDUCE_SET=${name})
    target_compile_options(${target} PRIVATE ${ARGN})
    target_include_directories(${target} PRIVATE include src)
    target_link_libraries(${target} PRIVATE mccl_flags)
    set(mccl_kernel_objects ${mccl_kernel_objects} $<TARGET_OBJECTS:${target}> PARENT_SCOPE)
endfunction()

set(mccl_kernel_objects "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    mccl_kernel_set(avx2 -mavx2 -mf16c)
    mccl_kernel_set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mprefer-vector-width=512)
    target_compile_definitions(mccl_objects PRIVATE MCCL_X86_KERNELS)
endif()
