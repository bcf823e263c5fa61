#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks a Mach-O dylib built for macOS, on any system and without Apple's tools.

It fails if the library imports a symbol that is not on the allow-list (macos_imports.txt), needs
any dylib but libSystem, lacks a function of include/mccl.h or exports anything else, asks for a
newer macOS than the floor, is not for arm64, or carries no code signature (macOS kills unsigned
arm64 code).

    check_imports.py build/macos/libmccl.dylib [--list]
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOW_LIST = ROOT / "scripts" / "macos_imports.txt"
HEADER = ROOT / "include" / "mccl.h"
INSTALL_NAME = "@rpath/libmccl.0.dylib"
ONLY_DYLIB = "/usr/lib/libSystem.B.dylib"
FLOOR = (14, 0)

# mach-o/loader.h, mach-o/nlist.h
MH_MAGIC_64 = 0xFEEDFACF
CPU_TYPE_ARM64 = 0x0100000C
MH_DYLIB = 6
LC_REQ_DYLD = 0x80000000
LC_SYMTAB = 0x2
LC_ID_DYLIB = 0xD
LC_DYLIB_LOADERS = {0xC, 0x18 | LC_REQ_DYLD, 0x1F | LC_REQ_DYLD, 0x20, 0x23 | LC_REQ_DYLD}
LC_CODE_SIGNATURE = 0x1D
LC_BUILD_VERSION = 0x32
PLATFORM_MACOS = 1
N_STAB = 0xE0
N_PEXT = 0x10
N_TYPE = 0x0E
N_EXT = 0x01
N_UNDF = 0x0
CSMAGIC_EMBEDDED_SIGNATURE = 0xFADE0CC0

# Made by the linker itself, at the image's start; no part of an interface.
LINKER_SYMBOLS = {"__dso_handle", "_mh_dylib_header"}


class BadFile(Exception):
    """The file is not what this check can read."""


@dataclass
class Library:
    """What the check wants to know of a Mach-O file."""

    cpu_type: int
    file_type: int
    install_name: str = ""
    dylibs: list[str] = field(default_factory=list)
    minimum_os: tuple[int, int] | None = None
    is_signed: bool = False
    imports: dict[str, int] = field(default_factory=dict)  # symbol without its underscore -> library ordinal
    exports: set[str] = field(default_factory=set)


def text_at(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def read_symbols(data: bytes, command: int, library: Library) -> None:
    symbols, n_symbols, strings = struct.unpack_from("<III", data, command + 8)
    for index in range(n_symbols):
        name_at, kind, _, desc, value = struct.unpack_from("<IBBHQ", data, symbols + 16 * index)
        if kind & N_STAB or not kind & N_EXT:
            continue
        name = text_at(data, strings + name_at).removeprefix("_")
        if kind & N_TYPE != N_UNDF:
            if not kind & N_PEXT:
                library.exports.add(name)
        elif value == 0:  # else a common symbol, which is a definition
            library.imports[name] = desc >> 8


def read_library(data: bytes) -> Library:
    if len(data) < 32 or struct.unpack_from("<I", data)[0] != MH_MAGIC_64:
        raise BadFile("not a 64-bit little-endian Mach-O file")
    _, cpu_type, _, file_type, n_commands = struct.unpack_from("<IIIII", data)
    library = Library(cpu_type, file_type)
    at = 32
    for _ in range(n_commands):
        command, size = struct.unpack_from("<II", data, at)
        if size < 8:
            raise BadFile(f"load command of {size} bytes at offset {at}")
        if command == LC_SYMTAB:
            read_symbols(data, at, library)
        elif command == LC_ID_DYLIB or command in LC_DYLIB_LOADERS:
            name = text_at(data, at + struct.unpack_from("<I", data, at + 8)[0])
            if command == LC_ID_DYLIB:
                library.install_name = name
            else:
                library.dylibs.append(name)
        elif command == LC_BUILD_VERSION:
            platform, minimum = struct.unpack_from("<II", data, at + 8)
            if platform == PLATFORM_MACOS:
                library.minimum_os = (minimum >> 16, minimum >> 8 & 0xFF)
        elif command == LC_CODE_SIGNATURE:
            blob = struct.unpack_from("<I", data, at + 8)[0]
            library.is_signed = struct.unpack_from(">I", data, blob)[0] == CSMAGIC_EMBEDDED_SIGNATURE
        at += size
    return library


def read_allow_list(path: Path) -> set[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line}


def public_functions(header: str) -> set[str]:
    """Names of the functions that mccl.h declares with MCCL_API."""
    return set(re.findall(r"^MCCL_API\b[^;(]*?\b(mccl_\w+)\s*\(", header, re.MULTILINE))


def problems(library: Library, allowed: set[str], public: set[str]) -> list[str]:
    found = []
    if (library.cpu_type, library.file_type) != (CPU_TYPE_ARM64, MH_DYLIB):
        found.append(f"not an arm64 dylib: cpu {library.cpu_type:#x}, type {library.file_type}")
    if library.install_name != INSTALL_NAME:
        found.append(f"install name is {library.install_name!r}, should be {INSTALL_NAME!r}")
    found += [
        f"needs {name}; only {ONLY_DYLIB} may be linked" for name in library.dylibs if name != ONLY_DYLIB
    ]
    if library.minimum_os is None:
        found.append("no minimum macOS version (LC_BUILD_VERSION)")
    elif library.minimum_os > FLOOR:
        found.append(f"asks for macOS {library.minimum_os}, the floor is {FLOOR}")
    if not library.is_signed:
        found.append("no code signature")
    for name, ordinal in sorted(library.imports.items()):
        if ordinal != 1:
            found.append(f"import {name} is bound to library ordinal {ordinal}, not to libSystem")
        if name not in allowed:
            found.append(
                f"import {name} is not in {ALLOW_LIST.name}: "
                f"add it there if macOS {FLOOR[0]}.{FLOOR[1]} has it"
            )
    found += [f"{name} of {HEADER.name} is not exported" for name in sorted(public - library.exports)]
    found += [
        f"{name} is exported but not in {HEADER.name}"
        for name in sorted(library.exports - public - LINKER_SYMBOLS)
    ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks a cross-built libmccl.dylib.")
    parser.add_argument("library", type=Path)
    parser.add_argument("--list", action="store_true", help="print the imports, one a line, and stop")
    arguments = parser.parse_args()

    try:
        library = read_library(arguments.library.read_bytes())
    except (BadFile, OSError, ValueError, struct.error) as error:
        print(f"{arguments.library}: {error}", file=sys.stderr)
        return 1
    if arguments.list:
        print("\n".join(sorted(library.imports)))
        return 0
    allowed = read_allow_list(ALLOW_LIST)
    public = public_functions(HEADER.read_text())
    print(f"imports of {arguments.library}: {' '.join(sorted(library.imports))}")
    found = problems(library, allowed, public)
    for problem in found:
        print(f"{arguments.library}: {problem}", file=sys.stderr)
    if not found:
        version = ".".join(map(str, library.minimum_os or ()))
        print(
            f"{arguments.library}: arm64, macOS {version}, signed, "
            f"{len(library.imports)} imports from libSystem, {len(public)} public functions"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
