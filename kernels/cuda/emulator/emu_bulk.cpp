// Phase barriers and the copy engine.

#include <algorithm>
#include <cstring>

#include "emulator/emu_machine.h"

namespace wr::emu {
namespace {

size_t offset_of(const void* address) {
    return static_cast<size_t>(static_cast<const char*>(address) - machine.shared);
}

Phases& find(uint64_t* barrier, const char* what) {
    Machine& m = machine;
    auto found = m.async.phases.find(offset_of(barrier));
    if (found == m.async.phases.end())
        fail(std::string(what) + " of an mbarrier at offset " +
             std::to_string(offset_of(barrier)) + " that was not made");
    unsigned warp = m.current / LANES;
    if (m.writes.unsynced(static_cast<int>(m.current), warp, offset_of(barrier), 8) >= 0)
        fail(std::string(what) + " of " + found->second.name +
             ", which another thread made with no barrier since");
    return found->second;
}

void see(Phases& phases, unsigned thread) {
    phases.seen[thread] = phases.over;
    machine.writes.hear(thread / LANES, phases.heard);
}

void end_if_complete(Phases& phases) {
    if (phases.missing || phases.bytes) return;
    phases.over++;
    phases.missing = phases.arrivals;
    phases.heard.swap(phases.told);
    phases.told.clear();
    std::vector<Phases::Waiter> still;
    for (const auto& waiter : phases.waiting)
        if (static_cast<int>(phases.over & 1) != waiter.parity) {
            see(phases, waiter.thread);
            machine.ready.push_back(waiter.thread);
        } else {
            still.push_back(waiter);
        }
    phases.waiting.swap(still);
}

// Calls body(shared offset, source or null) for each row of the box.
template <class Body>
void for_rows(const Box& box, Body body) {
    const TensorMap& map = box.map;
    size_t to = offset_of(box.to);
    for (int d = 0; d < map.box[3]; d++)
        for (int c = 0; c < map.box[2]; c++)
            for (int b = 0; b < map.box[1]; b++, to += LINE_BYTES) {
                const int64_t at[] = {box.first[0], box.first[1] + b, box.first[2] + c,
                                      box.first[3] + d};
                const char* from = map.data;
                for (int n = 0; n < MAP_DIMS && from; n++)
                    from = at[n] < 0 || at[n] >= map.sizes[n] ? nullptr
                                                              : from + at[n] * map.bytes[n];
                body(to, from);
            }
}

void land(const Box& box) {
    for_rows(box, [](size_t to, const char* from) {
        for (size_t chunk = 0; chunk < 8; chunk++) {
            char* at = machine.shared + to + (chunk ^ (to / LINE_BYTES % 8)) * 16;
            if (from)
                memcpy(at, from + chunk * 16, 16);
            else
                memset(at, 0, 16);
        }
    });
    box.phases->bytes -= box.bytes;
    end_if_complete(*box.phases);
}

bool is_in_air(size_t offset, size_t bytes) {
    for (const Box& box : machine.async.in_air) {
        size_t begin = offset_of(box.to), end = begin + static_cast<size_t>(box.bytes);
        if (offset < end && begin < offset + bytes) return true;
    }
    return false;
}

void check_target(size_t offset) {
    Machine& m = machine;
    std::string where = " at offset " + std::to_string(offset);
    if (offset % LINE_BYTES || offset + LINE_BYTES > m.shared_size)
        fail("a box copy's row" + where + " of " + std::to_string(m.shared_size) +
             " shared bytes, not at a multiple of 128");
    if (m.writes.is_read(m.current, offset, LINE_BYTES))
        fail("a box copy to shared memory" + where + " that others read, with no barrier since");
    if (is_multiplied(offset, LINE_BYTES))
        fail("a box copy to shared memory" + where + " that a product in flight reads");
    if (m.writes.unfenced(offset, LINE_BYTES) >= 0)
        fail("a box copy over what was stored" + where + " with no fence_async since");
}

}  // namespace

void init_mbarrier(uint64_t* barrier, int arrivals) {
    Machine& m = machine;
    write_shared(barrier, 8);
    Phases& made = m.async.phases[offset_of(barrier)];
    made = {};
    made.name = "the mbarrier at offset " + std::to_string(offset_of(barrier));
    made.arrivals = made.missing = arrivals;
    made.seen.assign(m.threads, 0);
}

void arrive(uint64_t* barrier, int announced_bytes) {
    Machine& m = machine;
    Phases& phases = find(barrier, "an arrival");
    m.writes.tell(m.current / LANES, phases.told);
    phases.bytes += announced_bytes;
    phases.missing--;
    end_if_complete(phases);
}

void wait_phase(uint64_t* barrier, int parity) {
    Machine& m = machine;
    Phases& phases = find(barrier, "a wait");
    if (static_cast<int>(phases.over & 1) != parity) return see(phases, m.current);
    phases.waiting.push_back({m.current, parity});
    leave(phases.name.c_str());
}

void fence_async() { machine.writes.fence(machine.current); }

void copy_box(const TensorMap& map, void* to, uint64_t* barrier, std::array<int, MAP_DIMS> first) {
    Machine& m = machine;
    Phases& phases = find(barrier, "a box copy's use");
    if (m.writes.unfenced(offset_of(barrier), 8) >= 0)
        fail("a box copy with " + phases.name + ", made with no fence_async since");
    int64_t rows = int64_t{1} * map.box[1] * map.box[2] * map.box[3];
    Box box{map, static_cast<char*>(to), &phases, first, rows * int64_t{LINE_BYTES}};
    for_rows(box, [&](size_t offset, const char* from) {
        check_target(offset);
        for (size_t chunk = 0; from && chunk < 8; chunk++)
            check_global(from + chunk * 16, 16, "a box copy's source");
        if (is_in_air(offset, LINE_BYTES))
            fail("two box copies to offset " + std::to_string(offset));
        m.async.lines[offset / LINE_BYTES] = {&phases, phases.over};
    });
    phases.copies_until = phases.over + 1;
    if (draw() & 1)
        land(box);
    else
        m.async.in_air.push_back(box);
}

bool land_any() {
    auto& boxes = machine.async.in_air;
    if (boxes.empty()) return false;
    std::swap(boxes[draw() % boxes.size()], boxes.back());
    Box box = boxes.back();
    boxes.pop_back();
    land(box);
    return true;
}

const char* not_yet_there(unsigned reader, size_t offset, size_t bytes) {
    for (size_t line = offset / LINE_BYTES; line * LINE_BYTES < offset + bytes; line++) {
        const Line& at = machine.async.lines[line];
        if (at.phases && at.phases->seen[reader] <= at.phase) return at.phases->name.c_str();
    }
    return nullptr;
}

void see_alike(unsigned first_thread, unsigned count) {
    for (auto& [offset, phases] : machine.async.phases) {
        auto first = phases.seen.begin() + first_thread;
        std::fill_n(first, count, *std::max_element(first, first + count));
    }
}

void claim_lines(size_t offset, size_t bytes) {
    if (is_in_air(offset, bytes))
        fail("a write to shared memory at offset " + std::to_string(offset) +
             " that a box copy is on its way to");
    if (is_multiplied(offset, bytes))
        fail("a write to shared memory at offset " + std::to_string(offset) +
             " that a product in flight reads");
    for (size_t line = offset / LINE_BYTES; line * LINE_BYTES < offset + bytes; line++)
        machine.async.lines[line] = {};
}

}  // namespace wr::emu
