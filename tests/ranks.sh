#!/bin/sh
# SPDX-License-Identifier: MIT
#
# ranks.sh N PROGRAM: starts PROGRAM RANK N IDFILE for every rank, as the examples want it; fails if one fails.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
rank=0
started=
while [ "$rank" -lt "$1" ]; do
    "$2" "$rank" "$1" "$folder/id" &
    started="$started $!"
    rank=$((rank + 1))
done
for process in $started; do
    wait "$process"
done
