// Fibers, their meetings and the launch of `emu.h`.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "emulator/emu_machine.h"

namespace wr::emu {

thread_local Machine machine;

uint64_t draw() {  // splitmix64
    uint64_t z = machine.seed += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

[[noreturn]] void fail(const std::string& what) {
    Machine& m = machine;
    m.error = what + " (thread " + std::to_string(m.current) + " of CTA " +
              std::to_string(m.cta.x) + ", " + std::to_string(m.cta.y) + ")";
    _longjmp(m.scheduler, 1);
}

void leave(const char* waits_at) {
    Fiber& fiber = machine.fibers[machine.current];
    fiber.waits_at = waits_at;
    if (!_setjmp(fiber.at)) _longjmp(machine.scheduler, 1);
}

namespace {

constexpr size_t STACK_BYTES = 128 << 10, SHARED_ALIGNMENT = 1024;
constexpr const char* CTA_BARRIER = "the CTA's barrier";

void fiber_main() {
    Machine& m = machine;
    m.kernel(m.params);
    if (!m.fibers[m.current].has_waited) fail("an end before wait_prerequisite_grids");
    m.fibers[m.current].is_done = true;
    m.done++;
    _longjmp(m.scheduler, 1);
}

void resume(unsigned number) {
    Machine& m = machine;
    m.current = number;
    Fiber& fiber = m.fibers[number];
    fiber.waits_at = nullptr;
    if (_setjmp(m.scheduler)) return;
    if (fiber.is_started) _longjmp(fiber.at, 1);
    fiber.is_started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
    setcontext(&fiber.start);
}

void name_deadlock() {
    Machine& m = machine;
    std::string text = "deadlock in CTA " + std::to_string(m.cta.x) + ", " +
                       std::to_string(m.cta.y) + ":";
    for (unsigned first = 0; first < m.threads;) {
        auto where = [&](unsigned t) {
            return m.fibers[t].is_done ? "the end" : m.fibers[t].waits_at;
        };
        unsigned last = first;
        while (last + 1 < m.threads && !strcmp(where(last + 1), where(first))) last++;
        text += " threads " + std::to_string(first) + "-" + std::to_string(last) + " are at " +
                where(first) + ";";
        first = last + 1;
    }
    m.error = text;
}

void run_cta(Index cta) {
    Machine& m = machine;
    m.cta = cta;
    m.done = m.at_barrier = 0;
    memset(m.shared, 0xFF, m.shared_size);
    m.writes.reset(m.shared_size, m.threads);
    m.async.reset(m.shared_size, m.threads);
    for (Warp& warp : m.warps) warp.arrived = 0;
    m.ready.resize(m.threads);
    std::iota(m.ready.begin(), m.ready.end(), 0u);
    for (unsigned t = 0; t < m.threads; t++) {
        m.fibers[t].is_started = m.fibers[t].is_done = false;
        m.fibers[t].has_waited = !m.is_dependent;
        m.fibers[t].open.clear();
        m.fibers[t].groups.clear();
    }
    while (m.error.empty()) {
        bool is_stuck = m.ready.empty();
        bool may_land = !m.async.in_air.empty() && (is_stuck || draw() % 4 == 0);
        if (may_land && land_any()) continue;
        if (is_stuck) break;
        size_t pick = draw() % m.ready.size();
        unsigned number = m.ready[pick];
        m.ready[pick] = m.ready.back();
        m.ready.pop_back();
        resume(number);
    }
    if (m.error.empty() && m.done != m.threads) name_deadlock();
    if (const char* what = left_behind(); what && m.error.empty())
        m.error = std::string("a CTA ended with ") + what;
}

}  // namespace

unsigned thread_index() { return machine.current; }
Index cta_index() { return machine.cta; }
char* shared_memory() { return machine.shared; }

void meet_warp(const char* name, WarpOperation run, const void* in, void* out) {
    Machine& m = machine;
    unsigned number = m.current / LANES, lane = m.current % LANES;
    Warp& warp = m.warps[number];
    if (warp.arrived && strcmp(warp.name, name))
        fail(std::string("a warp diverged: one lane is at ") + name + ", another at " + warp.name);
    warp.name = name;
    warp.in[lane] = in;
    warp.out[lane] = out;
    if (++warp.arrived < LANES) return leave(name);
    warp.arrived = 0;
    run(warp.in, warp.out);
    for (unsigned other = 0; other < LANES; other++)
        if (other != lane) m.ready.push_back(number * LANES + other);
}

void sync_warp() {
    auto run = [](const void* const*, void* const*) {
        unsigned warp = machine.current / LANES;
        machine.writes.sync_warp(warp);
        see_alike(warp * LANES, LANES);
    };
    meet_warp("sync_warp", run, nullptr, nullptr);
}

void sync_cta() {
    Machine& m = machine;
    if (++m.at_barrier < m.threads) return leave(CTA_BARRIER);
    m.at_barrier = 0;
    m.writes.sync_cta();
    see_alike(0, m.threads);
    for (unsigned t = 0; t < m.threads; t++)
        if (t != m.current) m.ready.push_back(t);
}

const char* launch(Kernel kernel, const void* params, Index grid, unsigned threads,
                   size_t shared, bool is_dependent) {
    Machine& m = machine;
    m.error.clear();
    if (is_dependent && !m.has_launched) return "is dependent, with no launch before it";
    m.has_launched = true;
    m.is_dependent = is_dependent;
    if (threads % LANES || !threads || threads > 1024) return "a CTA has whole warps, at most 32";
    m.kernel = kernel;
    m.params = params;
    m.threads = threads;
    m.warps.resize(threads / LANES);
    while (m.fibers.size() < threads) {
        m.fibers.emplace_back();
        m.fibers.back().stack = std::make_unique_for_overwrite<char[]>(STACK_BYTES);
    }
    m.shared_bytes.resize(shared + SHARED_ALIGNMENT);
    auto begin = reinterpret_cast<uintptr_t>(m.shared_bytes.data());
    m.shared = m.shared_bytes.data() + (SHARED_ALIGNMENT - begin % SHARED_ALIGNMENT);
    m.shared_size = shared;
    std::vector<Index> order;
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++) order.push_back({x, y});
    for (size_t n = order.size(); n > 1; n--) std::swap(order[n - 1], order[draw() % n]);
    for (Index cta : order) {
        run_cta(cta);
        if (!m.error.empty()) return m.error.c_str();
    }
    return nullptr;
}

}  // namespace wr::emu

extern "C" __attribute__((visibility("default"))) void wr_emulator_seed(uint64_t seed) {
    wr::emu::machine.seed = seed;
}
