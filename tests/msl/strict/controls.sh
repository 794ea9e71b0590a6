#!/usr/bin/env bash
# Proves that check.sh refuses what it should, line by line, and nothing else.
set -euo pipefail
cd "$(dirname "$0")"

./check.sh accepted.metal

if output=$(./check.sh refused.metal 2>&1); then
    echo 'strict: refused.metal passed' >&2
    exit 1
fi
errors=$(sed -n 's/^refused\.metal:\([0-9]*\):[0-9]*: error:.*/\1/p' <<<"$output" | sort -un)
marked=$(sed -n '/\/\/ refused$/=' refused.metal)
if [ "$errors" != "$marked" ]; then
    printf 'strict: lines with an error:\n%s\nlines marked as refused:\n%s\n%s\n' "$errors" "$marked" "$output" >&2
    exit 1
fi
echo "strict: $(wc -l <<<"$marked") mistakes refused, each on its line" >&2
