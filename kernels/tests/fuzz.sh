#!/bin/sh
# Builds fuzz_events with libFuzzer and the address and undefined-behaviour sanitizers, then runs
# it; arguments go to libFuzzer: `fuzz.sh -max_total_time=60 CORPUS`. Needs clang++ ($CLANGXX, else
# clang++) and its runtime library.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build/sanitize
src=kernels/src
program=build/sanitize/fuzz_events
if [ -n "$(find kernels/src kernels/tests -newer "$program" -type f 2>/dev/null || echo missing)" ]
then
  # shellcheck disable=SC2046 # all sources that know nothing of Python
  "${CLANGXX:-clang++}" -std=c++20 -O1 -g -fno-omit-frame-pointer -Wall -Wextra \
    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -I$src \
    kernels/tests/fuzz_events.cpp $(grep -L 'nanobind\|arguments.h' $src/*.cpp) -o "$program.$$"
  mv "$program.$$" "$program"
fi
# Not by `exec`: the peak memory of whoever started us would count as the fuzzer's own (Linux keeps
# it over an exec), and a large parent would be an input of too much memory.
"$program" -artifact_prefix=build/sanitize/ -max_len=4096 -timeout=10 \
  -rss_limit_mb=512 -malloc_limit_mb=64 "$@"
exit $?
