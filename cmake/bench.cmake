# SPDX-License-Identifier: MIT
#
# mccl-bench-rank: one rank of a library that `mccl bench` measures (bench/worker.c). In the wheel it lies beside
# libmccl, where the Python side looks for it. It opens the libraries by path, so it is linked to none of them.
file(GLOB bench_sources CONFIGURE_DEPENDS bench/*.c)
add_executable(mccl-bench-rank ${bench_sources})
# It looks at sockets and schedulers, so it wants more than POSIX; its loops over the data want the vectoriser.
target_compile_definitions(mccl-bench-rank PRIVATE _GNU_SOURCE)
target_compile_options(mccl-bench-rank PRIVATE -O3)
target_include_directories(mccl-bench-rank PRIVATE include)
target_link_libraries(mccl-bench-rank PRIVATE mccl_flags mccl_system)
if(SKBUILD)
    install(TARGETS mccl-bench-rank RUNTIME DESTINATION .)
endif()
