#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
#
# Cross-builds build/macos/libmccl.dylib (arm64, macOS 14 and later) with zig's C compiler, which carries Apple's
# libc headers, and checks what the result imports and exports; then the program that lies beside it in the
# wheel. Called by `make macos`; also runs on its own.
#
#   PYTHON   python that has the package ziglang and runs the check (default: python3)
#   JOBS     compilers at a time (default: number of cores)
set -euo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
out=build/macos
target=aarch64-macos.14.0

if ! "$python" -c 'import ziglang' 2>/dev/null; then
    echo "macos: $python has no module ziglang; install it: $python -m pip install ziglang" >&2
    exit 1
fi

mkdir -p "$out/obj"
export ZIG_GLOBAL_CACHE_DIR="$PWD/build/zig-cache/global" ZIG_LOCAL_CACHE_DIR="$PWD/build/zig-cache/local"

flags=(-target "$target" -std=c11 -O2 -fvisibility=hidden -ffp-contract=off -Iinclude -Isrc -DMCCL_BUILDING
    -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wvla -Werror)

# The files of Linux stay out; everything else is either common or macOS's own.
mapfile -t sources < <(find src -name '*.c' ! -name '*_linux.c' ! -name 'os_poll_epoll.c' | LC_ALL=C sort)
objects=()
commands="$out/obj/commands"
: > "$commands"
for source in "${sources[@]}"; do
    object="$out/obj/$(echo "${source#src/}" | tr / _ | sed 's/\.c$/.o/')"
    objects+=("$object")
    opt=()
    [[ $source == src/reduce/* ]] && opt=(-O3) # as in CMakeLists.txt
    printf '%q ' "$python" -m ziglang cc "${flags[@]}" "${opt[@]}" -c "$source" -o "$object" >> "$commands"
    echo >> "$commands"
done

echo "macos: compiling ${#sources[@]} files for $target"
xargs -P "$jobs" -d '\n' -n 1 bash -c < "$commands"

# -install_name: what programs linked against the library will look for.
"$python" -m ziglang cc -target "$target" -shared "${objects[@]}" -o "$out/libmccl.dylib" \
    -install_name @rpath/libmccl.0.dylib
"$python" scripts/check_imports.py "$out/libmccl.dylib"

# The rank of `mccl bench`: a program of its own, that the wheel carries beside the library.
"$python" -m ziglang cc "${flags[@]}" bench/*.c -o "$out/mccl-bench-rank"
