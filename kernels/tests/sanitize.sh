#!/bin/sh
# Builds the C++ core and its replay test with the address and undefined-behaviour sanitizers and
# all warnings as errors, then runs it. Arguments go to the program: `histories N SEED`, or
# `hashes`, which prints a hash for each message length. Needs a C++20 compiler ($CXX, else g++).
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build/sanitize
program=build/sanitize/replay
if [ -n "$(find kernels/src kernels/tests -newer "$program" -type f 2>/dev/null || echo missing)" ]
then
  "${CXX:-g++}" -std=c++20 -O1 -g -fno-omit-frame-pointer \
    -fsanitize=address,undefined -fno-sanitize-recover=all \
    -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Werror \
    -Ikernels/src kernels/tests/replay.cpp kernels/src/chain.cpp kernels/src/block_table.cpp \
    kernels/src/prefix_index.cpp -o "$program.$$"
  mv "$program.$$" "$program"
fi
exec "$program" "${@:-histories}"
