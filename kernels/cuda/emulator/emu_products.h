// Asynchronous products of a warpgroup (`wgmma.cuh`), modelled.
//
// A product is computed when it is issued or as late as when its group is waited for, drawn from
// the seed; those of a warpgroup in their order. Until then its accumulators hold NaN of a certain
// kind: reading them gives wrong numbers, writing them is named, and so are a change of a left
// operand in registers, a write over its operands in shared memory, operands that are not known to
// be there, and a product without `begin_products` since the last wait.
//
// What it cannot see: registers changed between `begin_products` and the product.
#pragma once

#include <cstdint>

namespace wr::emu {

struct ProductIn {
    float* c;           // columns / 2
    int columns;
    const uint32_t* a;  // 4, or null: `a_operand`
    uint64_t a_operand, b_operand;
    bool adds, is_b_wide, is_bf16;
};

void begin_products();
void issue(ProductIn own);
void commit_products();
void wait_products(int groups_left);
void sync_warpgroup();

}  // namespace wr::emu
