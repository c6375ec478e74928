#!/bin/sh
# Builds a fuzzer with libFuzzer and the address and undefined-behaviour sanitizers, then runs it:
# `events`, `requests`, `heads`, `replies` or `streams`. The other arguments go to libFuzzer:
# `fuzz.sh events -max_total_time=60 CORPUS`. Needs make, clang++ ($CLANGXX, else clang++) and its
# runtime library.
set -eu
cd "$(dirname "$0")/../.."
target=${1:?which: events, requests, heads, replies or streams}
shift
case $target in
events | requests | heads | replies | streams) ;;
*)
  echo "no fuzzer of $target: events, requests, heads, replies or streams" >&2
  exit 2 ;;
esac
sh kernels/tests/build.sh "fuzz_$target"
# Not by `exec`: the peak memory of whoever started us would count as the fuzzer's own (Linux keeps
# it over an exec), and a large parent would be an input of too much memory.
"build/sanitize/fuzz_$target" -artifact_prefix=build/sanitize/ -max_len=4096 -timeout=10 \
  -rss_limit_mb=512 -malloc_limit_mb=64 "$@"
exit $?
