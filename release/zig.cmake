# A toolchain for CMake: zig's C++ compiler, which brings its own libc++ and the symbols of each glibc.
# What it makes runs wherever that glibc or a later one is, whatever this machine has.
# From the environment: ZIG (the program) and ZIG_TARGET, as x86_64-linux-gnu.2.28.
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "$ENV{ZIG_TARGET}")

set(CMAKE_CXX_COMPILER "$ENV{ZIG}" c++ -target "$ENV{ZIG_TARGET}")
# nanobind has <cstdio> from Python.h, which leaves it out where it gives the stable ABI alone.
set(CMAKE_CXX_FLAGS_INIT "-include cstdio")

# CMake takes one program, without arguments, for each of these.
set(CMAKE_CXX_ARCHIVE_CREATE "\"$ENV{ZIG}\" ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "\"$ENV{ZIG}\" ranlib <TARGET>")
