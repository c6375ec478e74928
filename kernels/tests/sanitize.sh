#!/bin/sh
# Builds the C++ core and its tests with the address and undefined-behaviour sanitizers and all
# warnings as errors, then runs one. Arguments go to the program: `histories N SEED`, or `hashes`,
# which prints a hash for each message length; `workers N SEED` is the virtual worker's, `mirrors N
# SEED` the mirror's, `owners N SEED` the prefix owners', `sets N SEED` the worker sets'; `threads
# ROUNDS` looks up beside a writer, under the thread sanitizer. Needs a C++20 compiler ($CXX, else g++).
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build/sanitize
src=kernels/src
checks=address,undefined
index="$src/chain.cpp $src/block_table.cpp $src/prefix_index.cpp $src/set_pool.cpp
  $src/worker_set.cpp $src/seats.cpp $src/index_tier.cpp $src/prefix_walk.cpp
  $src/index_lookup.cpp $src/index_room.cpp $src/index_restart.cpp $src/index_dump.cpp"
if [ "${1:-histories}" = workers ]
then
  shift
  program=build/sanitize/workers
  sources="kernels/tests/workers.cpp $src/virtual_worker.cpp $src/scheduler.cpp $src/schedule.cpp
    $src/request_blocks.cpp $src/block_pool.cpp $src/block_lookup.cpp"
elif [ "${1:-histories}" = mirrors ]
then
  shift
  program=build/sanitize/mirrors
  sources="kernels/tests/mirrors.cpp $src/mirror.cpp $src/recency.cpp $index"
elif [ "${1:-histories}" = owners ]
then
  shift
  program=build/sanitize/owners
  sources="kernels/tests/owners.cpp $src/prefix_owners.cpp"
elif [ "${1:-histories}" = sets ]
then
  program=build/sanitize/sets
  sources="kernels/tests/sets.cpp $index"
elif [ "${1:-histories}" = threads ]
then
  program=build/sanitize/threads
  sources="kernels/tests/sets.cpp $index"
  checks="thread -pthread"
else
  program=build/sanitize/replay
  sources="kernels/tests/replay.cpp $index"
fi
if [ -n "$(find kernels/src kernels/tests -newer "$program" -type f 2>/dev/null || echo missing)" ]
then
  # shellcheck disable=SC2086 # a list of files
  "${CXX:-g++}" -std=c++20 -O1 -g -fno-omit-frame-pointer -ffp-contract=off \
    -fsanitize=$checks -fno-sanitize-recover=all \
    -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Werror \
    -I$src $sources -o "$program.$$"
  mv "$program.$$" "$program"
fi
exec "$program" "$@"
