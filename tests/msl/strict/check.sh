#!/usr/bin/env bash
# Checks the address spaces of Metal texts: `check.sh FILE...`, headers and kernels, as one library. Only clang 19 can;
# it is installed with apt where it is missing. What g++ lets pass and Metal does not, this refuses with the line: a
# threadgroup pointer taken for a device pointer, a pointer without a space, a write to `constant`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if ! command -v clang++-19 >/dev/null; then
    echo 'strict: installing clang-19' >&2
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends clang-19 >/dev/null
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cargo run --quiet --release --manifest-path "$here/../Cargo.toml" --example strict -- "$@" >"$scratch/unit.cl"

# C++ for OpenCL has Metal's address spaces, under its own names.
check() {
    clang++-19 --target=x86_64-linux-gnu -x clcpp -cl-std=clc++2021 -cl-no-stdinc -cl-single-precision-constant \
        -Xclang "-cl-ext=$1-__opencl_c_device_enqueue,-__opencl_c_pipes" \
        -Wno-everything -ferror-limit=0 -fsyntax-only -I "$here" "$scratch/unit.cl"
}
status=0
check '' || status=1

# Again without the generic space, where a pointer that names no space is private: Metal refuses it, too, when it gets
# another one. clang then finds no copy constructor for a struct that a function returns; the first run had it.
check '-__opencl_c_generic_address_space,' 2>"$scratch/errors" || true
known="no matching constructor for initialization of|no viable overloaded '='"
if grep ' error: ' "$scratch/errors" | grep -vE "$known" >&2; then
    status=1
fi
exit "$status"
