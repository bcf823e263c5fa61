# SPDX-License-Identifier: MIT
#
# CMake toolchain of scripts/build_wheels.sh: compiles for the machine that MCCL_ZIG_TARGET names, through the
# two wrappers in MCCL_ZIG_BIN. The script sets both in the environment.
set(CMAKE_SYSTEM_NAME $ENV{MCCL_ZIG_SYSTEM})
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "$ENV{MCCL_ZIG_TARGET}")
set(CMAKE_C_COMPILER $ENV{MCCL_ZIG_BIN}/cc)
set(CMAKE_AR $ENV{MCCL_ZIG_BIN}/ar)
find_program(MCCL_NO_OPERATION true REQUIRED)
set(CMAKE_RANLIB ${MCCL_NO_OPERATION})            # zig's ar writes the index itself
set(CMAKE_INSTALL_NAME_TOOL ${MCCL_NO_OPERATION}) # the install name is right from the start
# The linker leaves symbols out itself: this machine's strip may not know the format, or would break the
# signature of a Mach-O file.
set(CMAKE_STRIP ${MCCL_NO_OPERATION})
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE NEVER)
