// The state of the emulator: one machine a host thread, which runs one launch at a time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <string>
#include <vector>

#include "emulator/emu.h"
#include "emulator/emu_async.h"
#include "emulator/emu_writes.h"

namespace wr::emu {

constexpr unsigned LANES = 32;

struct Copy {
    void* to;
    const void* from;
    bool keep, is_early;
};

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::unique_ptr<char[]> stack;
    bool is_started = false, is_done = false;
    bool has_waited = false;  // for the grid before, where the launch is dependent
    const char* waits_at = nullptr;
    std::vector<Copy> open;                 // since the last commit
    std::vector<std::vector<Copy>> groups;  // committed, oldest first
};

struct Warp {
    const void* in[LANES];
    void* out[LANES];
    unsigned arrived = 0;
    const char* name = nullptr;
};

struct Range {
    const char *begin, *end;
    bool is_written = false;  // by a launch of this call
};

struct Machine {
    uint64_t seed = 1;
    std::vector<Range> granted;
    bool has_launched = false, is_dependent = false;  // in this call; this launch
    std::string error;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<unsigned> ready;
    std::vector<char> shared_bytes;
    char* shared = nullptr;
    size_t shared_size = 0;
    SharedWrites writes;
    Async async;
    unsigned threads = 0, current = 0, done = 0, at_barrier = 0;
    Index cta{};
    Kernel kernel = nullptr;
    const void* params = nullptr;
    jmp_buf scheduler;
};

extern thread_local Machine machine;

uint64_t draw();  // from the seed
void leave(const char* waits_at);  // back to the scheduler until somebody wakes this fiber
[[noreturn]] void fail(const std::string& what);  // ends the launch; for fibers

}  // namespace wr::emu
