# SPDX-License-Identifier: MIT
#
# ctest "install": installs into a fresh prefix, then builds and runs an example there as a user would, once
# through pkg-config and once through find_package(mccl). Needs BUILD_DIR, SOURCE_DIR, CC, VERSION, GENERATOR
# and MAKE_PROGRAM.
set(work ${BUILD_DIR}/install-test)
set(example ${SOURCE_DIR}/examples/all_reduce.c)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})

function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT code EQUAL 0)
        list(JOIN ARGN " " command)
        message(FATAL_ERROR "${command}\nended with ${code}:\n${output}")
    endif()
endfunction()

# One rank of one: enough to show that the program finds its library.
function(run_example program library_dir)
    file(REMOVE ${work}/id)
    run(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${library_dir} DYLD_LIBRARY_PATH=${library_dir}
        ${program} 0 1 ${work}/id)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${work}/prefix)
file(GLOB_RECURSE pc_file ${work}/prefix/mccl.pc)
if(NOT pc_file)
    message(FATAL_ERROR "mccl.pc was not installed under ${work}/prefix")
endif()
get_filename_component(pc_dir ${pc_file} DIRECTORY)
get_filename_component(library_dir ${pc_dir} DIRECTORY)

find_program(PKG_CONFIG NAMES pkg-config pkgconf)
if(PKG_CONFIG)
    set(ENV{PKG_CONFIG_PATH} ${pc_dir})
    execute_process(COMMAND ${PKG_CONFIG} --cflags --libs mccl OUTPUT_VARIABLE flags RESULT_VARIABLE code
                    OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT code EQUAL 0)
        message(FATAL_ERROR "pkg-config does not find mccl in ${pc_dir}")
    endif()
    separate_arguments(flags)
    run(${CC} -std=c11 -D_POSIX_C_SOURCE=200809L ${example} -o ${work}/with-pkg-config ${flags})
    run_example(${work}/with-pkg-config ${library_dir})
else()
    message(STATUS "no pkg-config here: its part is skipped")
endif()

run(${CMAKE_COMMAND} -S ${SOURCE_DIR}/tests/install -B ${work}/build -G ${GENERATOR}
    -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_C_COMPILER=${CC} -DCMAKE_PREFIX_PATH=${work}/prefix
    -DMCCL_VERSION=${VERSION} -DMCCL_EXAMPLE=${example})
run(${CMAKE_COMMAND} --build ${work}/build)
run_example(${work}/build/user ${library_dir})

# C++ callers: the header alone, with the warnings they are likely to use.
find_program(CXX NAMES c++ g++ clang++)
if(CXX)
    run(${CXX} -x c++ -std=c++11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only
        -include ${work}/prefix/include/mccl.h /dev/null)
endif()
