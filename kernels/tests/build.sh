#!/bin/sh
# Builds one program of kernels/tests/Makefile by all cores: `build.sh fuzz_events`. Tests that run
# in parallel may want the same objects at the same time, so that they take turns.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build/sanitize
turn=$(command -v flock || true)
# Whoever runs the tests by `make` passes its own flags and job server on.
exec ${turn:+"$turn" build/sanitize/lock} env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL \
  make -s -j "$(getconf _NPROCESSORS_ONLN)" -f kernels/tests/Makefile "build/sanitize/$1"
