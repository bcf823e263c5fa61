# SPDX-License-Identifier: MIT
#
# Every tests/unit/test_*.c and tests/comm/test_*.c is one program and one ctest entry. A program ends with
# 0 (passed), 1 (failed) or 77 (skipped) and runs under tests/limit.c, which kills its process group after
# 60 s. Two lines near the top of a test file change that:
#     /* limit: 240 s */              another limit
#     /* sanitize: not thread */      not run under that sanitizer, with the reason on the following line
find_package(Python3 COMPONENTS Interpreter REQUIRED)

add_executable(limit tests/limit.c)
target_compile_definitions(limit PRIVATE _GNU_SOURCE)
target_compile_options(limit PRIVATE -std=c11 -Wall -Wextra $<$<BOOL:${MCCL_WERROR}>:-Werror>)

add_library(mccl_internal STATIC $<TARGET_OBJECTS:mccl_objects> ${mccl_kernel_objects})
target_include_directories(mccl_internal PUBLIC include src)
target_link_libraries(mccl_internal PUBLIC mccl_flags mccl_system)

file(GLOB support_sources CONFIGURE_DEPENDS tests/support/*.c)

# Sanitizers slow programs down, by these factors at most.
set(limit_factor 1)
if(MCCL_SANITIZE MATCHES "thread")
    set(limit_factor 8)
elseif(MCCL_SANITIZE)
    set(limit_factor 4)
endif()
set(test_environment "ASAN_OPTIONS=detect_stack_use_after_return=1" "UBSAN_OPTIONS=print_stacktrace=1"
                     "TSAN_OPTIONS=halt_on_error=1 second_deadlock_stack=1")

# mccl_test_line(FILE PATTERN VARIABLE): what PATTERN's group matches in a comment line of FILE, or "".
function(mccl_test_line file pattern variable)
    file(STRINGS ${file} lines REGEX "^/\\* ${pattern} \\*/$" LIMIT_COUNT 1)
    set(value "")
    if(lines MATCHES "${pattern}")
        set(value "${CMAKE_MATCH_1}")
    endif()
    set(${variable} "${value}" PARENT_SCOPE)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
endfunction()

# mccl_add_test(LABEL FILE LIBRARY...): builds and registers one test program.
function(mccl_add_test label file)
    get_filename_component(name ${file} NAME_WE)
    mccl_test_line(${file} "limit: ([0-9]+) s" seconds)
    mccl_test_line(${file} "sanitize: not ([a-z]+)" skipped_sanitizer)
    if(NOT seconds)
        set(seconds 60)
    endif()
    math(EXPR seconds "${seconds} * ${limit_factor}")

    add_executable(${name} ${file})
    target_compile_definitions(${name} PRIVATE _GNU_SOURCE)
    target_include_directories(${name} PRIVATE tests)
    target_link_libraries(${name} PRIVATE ${ARGN} mccl_flags mccl_system)
    add_test(NAME ${name} COMMAND limit ${seconds} $<TARGET_FILE:${name}>)
    math(EXPR ctest_seconds "${seconds} + 30") # only if `limit` itself should hang
    set_tests_properties(${name} PROPERTIES LABELS ${label} SKIP_RETURN_CODE 77 TIMEOUT ${ctest_seconds}
                                            ENVIRONMENT "${test_environment}")
    if(skipped_sanitizer AND MCCL_SANITIZE MATCHES "${skipped_sanitizer}")
        set_tests_properties(${name} PROPERTIES DISABLED ON)
    endif()
    if(label STREQUAL "comm")
        # Several processes each, with deadlines: they need the cores for themselves.
        set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
    endif()
endfunction()

file(GLOB unit_tests CONFIGURE_DEPENDS tests/unit/test_*.c)
foreach(file IN LISTS unit_tests)
    mccl_add_test(unit ${file} mccl_internal)
endforeach()

file(GLOB comm_tests CONFIGURE_DEPENDS tests/comm/test_*.c)
if(support_sources)
    add_library(mccl_test_support STATIC ${support_sources})
    target_compile_definitions(mccl_test_support PRIVATE _GNU_SOURCE)
    target_include_directories(mccl_test_support PUBLIC tests)
    target_link_libraries(mccl_test_support PUBLIC mccl mccl_flags mccl_system)
endif()
foreach(file IN LISTS comm_tests)
    mccl_add_test(comm ${file} mccl_test_support mccl)
endforeach()

# mccl_test_again(SUFFIX VARIABLE=VALUE NAME...): these tests once more, with a setting.
function(mccl_test_again suffix setting)
    foreach(name IN LISTS ARGN)
        get_test_property(${name} TIMEOUT ctest_seconds)
        math(EXPR seconds "${ctest_seconds} - 30")
        add_test(NAME ${name}_${suffix} COMMAND limit ${seconds} $<TARGET_FILE:${name}>)
        set_tests_properties(${name}_${suffix} PROPERTIES LABELS comm SKIP_RETURN_CODE 77 TIMEOUT ${ctest_seconds}
                             RUN_SERIAL ON ENVIRONMENT "${test_environment};${setting}")
    endforeach()
endfunction()

set(channels_tcp "MCCL_TRANSPORT=tcp;MCCL_CHANNELS=")
mccl_test_again(channels2 "${channels_tcp}2" test_algorithms test_driving test_fork test_lost_peer test_mismatch
                test_split)
mccl_test_again(channels4 "${channels_tcp}4" test_collectives test_lost_peer)
if(CMAKE_SYSTEM_NAME STREQUAL "Linux") # where ranks of one host share memory otherwise
    mccl_test_again(tcp MCCL_TRANSPORT=tcp test_algorithms test_collectives test_collectives_threads
                    test_deadlines test_driving test_fork test_lost_peer test_many test_mismatch test_p2p test_p2p_end
                    test_requests test_split)
endif()

# Measures algorithms that no setting names, and fits the cost model; not installed, and no test.
foreach(name algorithms fit_costs)
    add_executable(bench_${name} tests/measure/${name}.c)
    target_compile_definitions(bench_${name} PRIVATE _GNU_SOURCE)
    target_link_libraries(bench_${name} PRIVATE mccl_internal mccl_flags mccl_system m)
endforeach()

file(GLOB examples CONFIGURE_DEPENDS examples/*.c)
foreach(file IN LISTS examples)
    get_filename_component(name ${file} NAME_WE)
    add_executable(example_${name} ${file})
    set_target_properties(example_${name} PROPERTIES OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY examples)
    target_compile_definitions(example_${name} PRIVATE _POSIX_C_SOURCE=200809L)
    target_link_libraries(example_${name} PRIVATE mccl mccl_flags)
    add_test(NAME example_${name} COMMAND limit 30 sh ${CMAKE_CURRENT_SOURCE_DIR}/tests/ranks.sh 3
                                          $<TARGET_FILE:example_${name}>)
    set_tests_properties(example_${name} PROPERTIES LABELS comm TIMEOUT 60 ENVIRONMENT "${test_environment}")
endforeach()

# The limit runner kills what it should: a group of two processes, within its second.
add_test(NAME limit_kills_group COMMAND limit 1 sh -c "sleep 60 & sleep 60")
set_tests_properties(limit_kills_group PROPERTIES LABELS unit TIMEOUT 20
                     PASS_REGULAR_EXPRESSION "ran longer than 1 s and was killed")

if(NOT MCCL_SANITIZE)
    add_test(NAME exports COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/scripts/check_exports.py
                                  --nm ${CMAKE_NM} --library $<TARGET_FILE:mccl>)
    add_test(NAME install COMMAND ${CMAKE_COMMAND} -DBUILD_DIR=${CMAKE_BINARY_DIR} -DCC=${CMAKE_C_COMPILER}
                                  -DSOURCE_DIR=${CMAKE_CURRENT_SOURCE_DIR} -DVERSION=${PROJECT_VERSION}
                                  -DGENERATOR=${CMAKE_GENERATOR} -DMAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}
                                  -P ${CMAKE_CURRENT_SOURCE_DIR}/tests/install/install.cmake)
    set_tests_properties(exports install PROPERTIES LABELS packaging TIMEOUT 120)
endif()
