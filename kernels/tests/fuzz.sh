#!/bin/sh
# Builds fuzz_events with libFuzzer and the address and undefined-behaviour sanitizers, then runs it;
# arguments go to libFuzzer: `fuzz.sh -max_total_time=60 CORPUS`. Needs clang++ ($CLANGXX, else clang++).
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build/sanitize
src=kernels/src
program=build/sanitize/fuzz_events
if [ -n "$(find kernels/src kernels/tests -newer "$program" -type f 2>/dev/null || echo missing)" ]
then
  "${CLANGXX:-clang++}" -std=c++20 -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer,address,undefined \
    -fno-sanitize-recover=all -Wall -Wextra -I$src kernels/tests/fuzz_events.cpp $src/msgpack.cpp \
    $src/event_batch.cpp $src/event_batch_reader.cpp $src/event_batch_open.cpp \
    $src/event_batch_extras.cpp $src/block_names.cpp $src/worker_blocks.cpp $src/chain_seed.cpp \
    $src/worker_blocks_parked.cpp $src/worker_blocks_file.cpp $src/prefix_index.cpp \
    $src/index_dump.cpp $src/index_tier.cpp $src/index_lookup.cpp $src/index_room.cpp \
    $src/index_restart.cpp $src/block_table.cpp $src/chain.cpp $src/set_pool.cpp $src/worker_set.cpp \
    $src/seats.cpp $src/prefix_walk.cpp -o "$program.$$"
  mv "$program.$$" "$program"
fi
exec "$program" -artifact_prefix=build/sanitize/ -max_len=4096 -rss_limit_mb=512 -malloc_limit_mb=64 -timeout=10 "$@"
