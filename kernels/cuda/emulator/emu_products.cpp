// Products of warpgroups, and a warpgroup's own barrier. Layouts: PTX ISA 9.0, "Asynchronous
// Warpgroup Level Matrix Shared Memory Layout" and "Register Fragments for wgmma.mma_async".

#include <algorithm>
#include <bit>
#include <cstring>

#include "emulator/emu_machine.h"
#include "numbers.h"

namespace wr::emu {
namespace {

constexpr uint32_t IN_FLIGHT = 0x7FF0DEAD;  // a NaN
constexpr size_t ATOM = 1024;
constexpr int DEPTH = 16, ROWS = 64;

using GroupOperation = void (*)(Warpgroup& group, unsigned first_thread);

// All 128 threads of a warpgroup meet; the last one calls `run`.
void meet_group(const char* name, GroupOperation run, const void* in) {
    Machine& m = machine;
    unsigned number = m.current / GROUP_LANES, first = number * GROUP_LANES;
    Warpgroup& group = m.async.groups[number];
    if (first + GROUP_LANES > m.threads) fail(std::string(name) + " by less than a warpgroup");
    if (group.arrived && strcmp(group.name, name))
        fail(std::string("a warpgroup diverged: one thread is at ") + name + ", another at " +
             group.name);
    group.name = name;
    group.in[m.current - first] = in;
    if (++group.arrived < GROUP_LANES) return leave(name);
    group.arrived = 0;
    run(group, first);
    for (unsigned other = first; other < first + GROUP_LANES; other++)
        if (other != m.current) m.ready.push_back(other);
}

struct Operand {
    size_t begin, leading, stride;

    explicit Operand(uint64_t bits)
        : begin((bits & 0x3FFF) << 4),
          leading((bits >> 16 & 0x3FFF) << 4),
          stride((bits >> 32 & 0x3FFF) << 4) {
        if (bits >> 62 != 1 || (bits >> 49 & 7))
            fail("a product's operand with another swizzle than of 128 bytes, or a base offset");
    }

    // Where element (row, depth) lies: rows along the depth, or, if `is_wide`, along the rows.
    size_t at(int row, int depth, bool is_wide) const {
        auto r = static_cast<size_t>(row), d = static_cast<size_t>(depth);
        size_t plain = is_wide ? begin + r / 64 * leading + d / 8 * stride + d % 8 * LINE_BYTES +
                                     r % 64 * 2
                               : begin + r / 8 * stride + r % 8 * LINE_BYTES + d * 2;
        return plain ^ (plain / LINE_BYTES % 8) * 16;
    }
};

void add_atoms(Product& product, const Operand& operand, int rows, bool is_wide) {
    for (int row = 0; row < rows; row += is_wide ? 64 : 8)
        for (int depth = 0; depth < DEPTH; depth += is_wide ? 8 : DEPTH)
            product.atoms.push_back(operand.at(row, depth, is_wide) / ATOM * ATOM);
}

void check_operands(const Product& product, unsigned first) {
    Machine& m = machine;
    for (size_t atom : product.atoms) {
        std::string where = " at offset " + std::to_string(atom);
        if (atom + ATOM > m.shared_size)
            fail("a product's operand" + where + " is beyond shared memory");
        for (unsigned t = first; t < first + GROUP_LANES; t++)
            if (const char* name = not_yet_there(t, atom, ATOM))
                fail("a product's operand" + where + " that thread " + std::to_string(t) +
                     " has not waited for: " + name);
        if (m.writes.unfenced(atom, ATOM) >= 0)
            fail("a product's operand" + where + " was stored with no fence_async since");
        for (unsigned w = 0; w < GROUP_WARPS; w++)
            if (m.writes.unsynced(SharedWrites::ALL, first / LANES + w, atom, ATOM) >= 0)
                fail("a product's operand" + where + " was stored with no barrier since");
    }
}

float number_at(size_t offset, bool is_bf16) {
    uint16_t bits;
    memcpy(&bits, machine.shared + offset, 2);
    return is_bf16 ? from_bf16(bits) : from_fp16(bits);
}

void compute(Warpgroup& group, Product& product) {
    static thread_local float a[ROWS][DEPTH], b[DEPTH][256];
    const ProductIn& any = product.of[0];
    product.is_done = true;
    if (!any.a) {
        Operand operand(any.a_operand);
        for (int row = 0; row < ROWS; row++)
            for (int d = 0; d < DEPTH; d++)
                a[row][d] = number_at(operand.at(row, d, false), any.is_bf16);
    }
    for (unsigned t = 0; any.a && t < GROUP_LANES; t++)
        for (unsigned i = 0; i < 8; i++) {
            unsigned row = t / LANES * 16 + t % LANES / 4 + i / 2 % 2 * 8;
            unsigned d = t % 4 * 2 + i % 2 + i / 4 * 8;
            auto bits = static_cast<uint16_t>(product.a[t][i / 2] >> (i % 2 * 16));
            a[row][d] = any.is_bf16 ? from_bf16(bits) : from_fp16(bits);
        }
    Operand operand(any.b_operand);
    for (int column = 0; column < any.columns; column++)
        for (int d = 0; d < DEPTH; d++)
            b[d][column] = number_at(operand.at(column, d, any.is_b_wide), any.is_bf16);
    unsigned each = static_cast<unsigned>(any.columns) / 2;
    float* sums = group.sums[any.c].data();
    for (unsigned t = 0; t < GROUP_LANES; t++)
        for (unsigned i = 0; i < each; i++) {
            unsigned row = t / LANES * 16 + t % LANES / 4 + i / 2 % 2 * 8;
            unsigned column = i / 4 * 8 + t % 4 * 2 + i % 2;
            float sum = any.adds ? sums[t * each + i] : 0;
            for (int d = 0; d < DEPTH; d++) sum += a[row][d] * b[d][column];
            sums[t * each + i] = sum;
        }
}

void compute_until(Warpgroup& group, size_t count) {
    for (size_t n = 0; n < count; n++)
        if (!group.flight[n].is_done) compute(group, group.flight[n]);
}

void take_on(Warpgroup& group, unsigned first) {
    Product product;
    for (unsigned t = 0; t < GROUP_LANES; t++) {
        const auto& own = *static_cast<const ProductIn*>(group.in[t]);
        product.of.push_back(own);
        std::array<uint32_t, 4> a{};
        if (own.a) memcpy(a.data(), own.a, sizeof a);
        product.a.push_back(a);
        const ProductIn& any = product.of[0];
        if (own.a_operand != any.a_operand || own.b_operand != any.b_operand ||
            own.columns != any.columns || own.adds != any.adds)
            fail("a product with other operands in some threads");
    }
    for (bool has_begun : group.has_begun)
        if (!has_begun) fail("a product without begin_products since the last wait");
    const ProductIn& any = product.of[0];
    if (!any.a) add_atoms(product, Operand(any.a_operand), ROWS, false);
    add_atoms(product, Operand(any.b_operand), any.columns, any.is_b_wide);
    check_operands(product, first);
    auto each = static_cast<size_t>(any.columns) / 2;
    auto& sums = group.sums[any.c];
    if (sums.empty()) {
        sums.resize(GROUP_LANES * each);
        for (size_t t = 0; t < GROUP_LANES; t++) {
            memcpy(&sums[t * each], product.of[t].c, each * sizeof(float));
            std::fill_n(product.of[t].c, each, std::bit_cast<float>(IN_FLIGHT));
        }
    }
    product.group = group.committed;
    group.flight.push_back(std::move(product));
    if (draw() & 1) compute_until(group, group.flight.size());
}

// Gives a warp the results that none of its products in flight adds to any more.
void give_back(Warpgroup& group, unsigned warp, size_t count) {
    for (size_t n = 0; n < count; n++) {
        const Product& product = group.flight[n];
        float* key = product.of[0].c;
        if (product.group < group.waited[warp]) continue;  // given back before
        auto each = static_cast<size_t>(product.of[0].columns) / 2;
        bool is_open = false;
        for (size_t later = n + 1; later < group.flight.size(); later++)
            is_open = is_open || group.flight[later].of[0].c == key;
        for (size_t t = warp * LANES; t < (warp + 1) * LANES; t++) {
            const ProductIn& own = product.of[t];
            if (own.a && memcmp(own.a, product.a[t].data(), sizeof product.a[t]))
                fail("a left operand in registers was changed before its product was waited for");
            if (is_open) continue;
            for (size_t i = 0; i < each; i++)
                if (std::bit_cast<uint32_t>(own.c[i]) != IN_FLIGHT)
                    fail("an accumulator was written before its product was waited for");
            memcpy(own.c, &group.sums[key][t * each], each * sizeof(float));
        }
    }
}

void forget_done(Warpgroup& group) {
    uint32_t by_all = *std::min_element(group.waited, group.waited + GROUP_WARPS);
    while (!group.flight.empty() && group.flight.front().group < by_all) {
        float* key = group.flight.front().of[0].c;
        group.flight.erase(group.flight.begin());
        bool is_open = false;
        for (const Product& other : group.flight) is_open = is_open || other.of[0].c == key;
        if (!is_open) group.sums.erase(key);
    }
}

}  // namespace

void begin_products() {
    auto run = [](const void* const*, void* const*) {
        unsigned warp = machine.current / LANES;
        machine.async.groups[warp / GROUP_WARPS].has_begun[warp % GROUP_WARPS] = true;
    };
    meet_warp("begin_products", run, nullptr, nullptr);
}

void issue(ProductIn own) { meet_group("a product", take_on, &own); }

void commit_products() {
    meet_group("commit_products", [](Warpgroup& group, unsigned) { group.committed++; }, nullptr);
}

void wait_products(int groups_left) {
    auto run = [](const void* const* in, void* const*) {
        unsigned warp = machine.current / LANES;
        Warpgroup& group = machine.async.groups[warp / GROUP_WARPS];
        int left = *static_cast<const int*>(in[0]);
        int64_t until = int64_t{group.committed} - left;
        size_t count = 0;
        while (count < group.flight.size() && group.flight[count].group < until) count++;
        compute_until(group, count);
        give_back(group, warp % GROUP_WARPS, count);
        auto& waited = group.waited[warp % GROUP_WARPS];
        waited = std::max(waited, static_cast<uint32_t>(std::max<int64_t>(until, 0)));
        group.has_begun[warp % GROUP_WARPS] = false;
        forget_done(group);
    };
    meet_warp("wait_products", run, &groups_left, nullptr);
}

void sync_warpgroup() {
    auto run = [](Warpgroup&, unsigned first) {
        Times told;
        for (unsigned warp = first / LANES; warp < first / LANES + GROUP_WARPS; warp++) {
            machine.writes.sync_warp(warp);
            machine.writes.tell(warp, told);
        }
        for (unsigned warp = first / LANES; warp < first / LANES + GROUP_WARPS; warp++)
            machine.writes.hear(warp, told);
    };
    meet_group("sync_warpgroup", run, nullptr);
}

bool is_multiplied(size_t offset, size_t bytes) {
    for (const Warpgroup& group : machine.async.groups)
        for (const Product& product : group.flight)
            for (size_t atom : product.atoms)
                if (offset < atom + ATOM && atom < offset + bytes) return true;
    return false;
}

const char* left_behind() {
    for (const auto& [offset, phases] : machine.async.phases)
        if (*std::max_element(phases.seen.begin(), phases.seen.end()) < phases.copies_until)
            return "box copies that nobody waited for";
    for (const Warpgroup& group : machine.async.groups)
        if (!group.flight.empty()) return "products that nobody waited for";
    return nullptr;
}

}  // namespace wr::emu
