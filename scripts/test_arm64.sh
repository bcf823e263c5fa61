#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# Builds the test of the reduction kernels for arm64, whose kernels are NEON, and runs it: under qemu-user, or as
# it is on such a machine. PYTHON needs ziglang.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=build/arm64
runner=()
if [ "$(uname -m)" != aarch64 ]; then
    runner=("$(command -v qemu-aarch64)") || { echo 'test-arm64: needs qemu-aarch64 (package qemu-user)' >&2; exit 1; }
fi
mkdir -p "$out"
"$python" -m ziglang cc -target aarch64-linux-musl -std=c11 -O3 -ffp-contract=off -D_GNU_SOURCE -DMCCL_BUILDING \
    -Iinclude -Isrc -Itests tests/unit/test_reduce.c src/reduce/*.c src/os/os_cpu.c src/os/os_clock.c \
    src/base/{error,log,names,text}.c -o "$out/test_reduce" -lm
"${runner[@]}" "$out/test_reduce"
