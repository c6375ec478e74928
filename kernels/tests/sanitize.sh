#!/bin/sh
# Builds the C++ core and its tests with the address and undefined-behaviour sanitizers and all
# warnings as errors, then runs one. Arguments go to the program: `histories N SEED`, or `hashes`,
# which prints a hash for each message length; `workers N SEED` is the virtual worker's, `mirrors N
# SEED` the mirror's, `owners N SEED` the prefix owners', `warmset N SEED` the default policy's,
# `weights N SEED` the sessions', `trunks N SEED` the hot trunks', `sets N SEED` the worker sets';
# `threads ROUNDS` looks up beside a writer, under the thread sanitizer; `relay ROUNDS SEED` is the
# relay's thread over real sockets, `relay-threads` the same under the thread sanitizer. Needs make
# and a C++20 compiler ($CXX, else g++).
set -eu
cd "$(dirname "$0")/../.."
case ${1:-histories} in
# These see only what comes after their name.
workers | mirrors | owners | trunks | warmset | weights | relay | relay-threads)
  program=$1
  shift ;;
sets | threads) program=$1 ;;
*) program=replay ;;
esac
sh kernels/tests/build.sh "$program"
exec "build/sanitize/$program" "$@"
