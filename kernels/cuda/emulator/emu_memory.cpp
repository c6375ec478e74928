// Memory as kernels see it: checked addresses, shared memory, asynchronous copies.

#include <cstdio>
#include <cstring>

#include "emulator/emu_machine.h"

namespace wr::emu {
namespace {

size_t offset_of(const void* address) {
    return static_cast<size_t>(static_cast<const char*>(address) - machine.shared);
}

void land(const Copy& copy) {
    if (copy.keep)
        memcpy(copy.to, copy.from, 16);
    else
        memset(copy.to, 0, 16);
}

void check_shared(const void* address, size_t bytes, const char* what) {
    Machine& m = machine;
    ptrdiff_t at = static_cast<const char*>(address) - m.shared;
    if (at < 0 || at + bytes > m.shared_size || at % bytes)
        fail(std::string(what) + " of " + std::to_string(bytes) + " bytes at offset " +
             std::to_string(at) + " of " + std::to_string(m.shared_size) + " shared bytes");
}

void check_synced(int reader, const void* address, size_t bytes) {
    Machine& m = machine;
    if (const char* name = not_yet_there(m.current, offset_of(address), bytes))
        fail("a shared load at offset " + std::to_string(offset_of(address)) +
             " of what was not waited for: " + name);
    int writer = m.writes.unsynced(reader, m.current / LANES, offset_of(address), bytes);
    if (writer >= 0)
        fail("a shared load at offset " + std::to_string(offset_of(address)) +
             " of what thread " + std::to_string(writer) + " wrote, with no barrier since");
    m.writes.read(reader, m.current / LANES, offset_of(address), bytes);
}

void note_write(const void* address, size_t bytes) {
    Machine& m = machine;
    if (m.writes.is_read(m.current, offset_of(address), bytes))
        fail("a write to shared memory at offset " + std::to_string(offset_of(address)) +
             " that others read, with no barrier since");
    claim_lines(offset_of(address), bytes);
    m.writes.write(m.current, offset_of(address), bytes);
}

void need_waited(const std::string& what) {
    if (!machine.fibers[machine.current].has_waited)
        fail(what + " before wait_prerequisite_grids");
}

std::string hex(const void* address) {
    char text[32];
    snprintf(text, sizeof text, "%p", address);
    return text;
}

}  // namespace

void check_global(const void* address, size_t bytes, const char* what) {
    const char* begin = static_cast<const char*>(address);
    if (reinterpret_cast<uintptr_t>(begin) % bytes)
        fail(std::string(what) + " of " + std::to_string(bytes) + " bytes is not aligned: " +
             hex(begin));
    bool is_granted = false;
    for (const Range& range : machine.granted) {
        if (begin < range.begin || begin + bytes > range.end) continue;
        if (range.is_written) need_waited(std::string(what) + " from a tensor that is stored to");
        is_granted = true;
    }
    if (!is_granted)
        fail(std::string(what) + " of " + std::to_string(bytes) +
             " bytes is outside every tensor: " + hex(begin));
}

void write_global(const void* address, size_t bytes) {
    need_waited("a store");
    check_global(address, bytes, "a store");
    const char* begin = static_cast<const char*>(address);
    for (Range& range : machine.granted)
        range.is_written |= begin >= range.begin && begin + bytes <= range.end;
}

void wait_prerequisite_grids() { machine.fibers[machine.current].has_waited = true; }

void read_shared(const void* address, size_t bytes) {
    check_shared(address, bytes, "a shared load");
    check_synced(static_cast<int>(machine.current), address, bytes);
}

void read_shared_row(const void* row) {
    check_shared(row, 16, "a matrix row");
    check_synced(SharedWrites::ALL, row, 16);
}

void write_shared(void* address, size_t bytes) {
    check_shared(address, bytes, "a shared store");
    note_write(address, bytes);
}

void copy_async(void* shared, const void* global, bool keep) {
    check_shared(shared, 16, "an asynchronous copy's target");
    if (keep) check_global(global, 16, "an asynchronous copy's source");
    Copy copy{shared, global, keep, (draw() & 1) != 0};
    note_write(shared, 16);
    if (copy.is_early) land(copy);
    machine.fibers[machine.current].open.push_back(copy);
}

void commit_async() {
    Fiber& fiber = machine.fibers[machine.current];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}

void wait_async(int groups_left) {
    auto& groups = machine.fibers[machine.current].groups;
    while (static_cast<int>(groups.size()) > groups_left) {
        for (const Copy& copy : groups.front()) {
            if (!copy.is_early) land(copy);
            machine.writes.write(machine.current, offset_of(copy.to), 16);
        }
        groups.erase(groups.begin());
    }
}

void grant(const void* begin, size_t bytes) {
    const char* first = static_cast<const char*>(begin);
    machine.granted.push_back({first, first + bytes});
}

void revoke() {
    machine.granted.clear();
    machine.has_launched = false;
}

}  // namespace wr::emu
