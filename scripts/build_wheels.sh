#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# build_wheels.sh: builds the wheels of all platforms from any one of them into build/wheels, with zig as the
# cross compiler. PYTHON is an interpreter whose environment holds requirements-cross.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:?name an interpreter that has ziglang and wheel}"

export MCCL_ZIG_BIN=$PWD/build/zig-cache/bin
export ZIG_GLOBAL_CACHE_DIR=$PWD/build/zig-cache/global ZIG_LOCAL_CACHE_DIR=$PWD/build/zig-cache/local
mkdir -p "$MCCL_ZIG_BIN" build/wheels
# The binary itself: pip hides the environment's packages, and so `python -m ziglang`, from the builds it starts.
zig=$("$PYTHON" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / "zig")')
printf '#!/bin/sh\nexec "%s" cc -target "$MCCL_ZIG_TARGET" "$@"\n' "$zig" >"$MCCL_ZIG_BIN/cc"
printf '#!/bin/sh\nexec "%s" ar "$@"\n' "$zig" >"$MCCL_ZIG_BIN/ar"
chmod +x "$MCCL_ZIG_BIN"/*
rm -f build/wheels/*.whl

# build SYSTEM TARGET HOST_PLATFORM TAG. The floors, glibc 2.28 and macOS 14, are those of docs/rationale.md.
build() {
    local folder=build/wheels/$4
    rm -rf "$folder"
    MCCL_ZIG_SYSTEM=$1 MCCL_ZIG_TARGET=$2 _PYTHON_HOST_PLATFORM=$3 \
        "$PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" \
        --config-settings=cmake.args=-DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/zig.cmake" .
    "$PYTHON" -m wheel tags --remove --platform-tag "$4" "$folder"/*.whl >/dev/null
    mv "$folder"/*.whl build/wheels/
    rmdir "$folder"
}
build Linux x86_64-linux-gnu.2.28 linux-x86_64 manylinux_2_28_x86_64
build Linux aarch64-linux-gnu.2.28 linux-aarch64 manylinux_2_28_aarch64
build Darwin aarch64-macos.14.0 macosx-14.0-arm64 macosx_14_0_arm64
ls build/wheels/*.whl
