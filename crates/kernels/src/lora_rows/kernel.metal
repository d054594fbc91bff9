// Low-rank adapters of rows that have different ones, of up to 8 adapters at once: xa = x·A, and y += s·xa·B. The
// formulas are in mod.rs. An item is up to 16 rows of one adapter, whose matrix is read once for all of them.
#include "common.metal.h"

namespace lora_rows {
constant constexpr uint ITEM_ROWS = 16;
constant constexpr uint ITEM_NUMBERS = 4;

/// As metal.rs fills it.
struct Sizes {
    /// Where the items of this dispatch are among the numbers, and the order of the rows.
    uint items, order;
    /// The first of the adapters' segments.
    uint segment;
    uint inner, outer;
    /// The distances of rows of x·A, x and y.
    uint pitch, x_stride, y_stride;
};

/// What a threadgroup works on.
struct Item {
    uint first, rows, adapter;
};

inline Item item_of(device const uint *numbers, constant Sizes &sizes, uint index) {
    device const uint *const at = numbers + sizes.items + ITEM_NUMBERS * index;
    return {at[0], at[1], at[2] - sizes.segment};
}

inline device const float *chosen(uint index, device const float *f0, device const float *f1,
                                  device const float *f2, device const float *f3,
                                  device const float *f4, device const float *f5,
                                  device const float *f6, device const float *f7) {
    switch (index) {
        case 0: return f0;
        case 1: return f1;
        case 2: return f2;
        case 3: return f3;
        case 4: return f4;
        case 5: return f5;
        case 6: return f6;
        default: return f7;
    }
}
} // namespace lora_rows

#define LORA_ROWS_FACTORS                                                                          \
    device const float *f0 [[buffer(5)]], device const float *f1 [[buffer(6)]],                    \
        device const float *f2 [[buffer(7)]], device const float *f3 [[buffer(8)]],                \
        device const float *f4 [[buffer(9)]], device const float *f5 [[buffer(10)]],               \
        device const float *f6 [[buffer(11)]], device const float *f7 [[buffer(12)]]

/// xa = x·A of an item, `(places, pitch)`. Threads share the columns of A, and so many as there are for a column its
/// rows, whose sums are added up in their order.
template <typename T>
[[kernel]] void lora_rows_down(device const T *x [[buffer(0)]], device float *xa [[buffer(1)]],
                               device const uint *numbers [[buffer(2)]],
                               constant lora_rows::Sizes &sizes [[buffer(3)]],
                               constant uint *ranks [[buffer(4)]], LORA_ROWS_FACTORS, PLACE) {
    constexpr uint ROWS = lora_rows::ITEM_ROWS, MOST_THREADS = 256;
    threadgroup float sums[MOST_THREADS];
    const lora_rows::Item item = lora_rows::item_of(numbers, sizes, group.y);
    device const float *const a = lora_rows::chosen(item.adapter, f0, f1, f2, f3, f4, f5, f6, f7);
    device const uint *const order = numbers + sizes.order + item.first;
    const uint rank = ranks[item.adapter];
    const uint width = min(rank, threads.x), parts = threads.x / width;
    const uint part = own.x / width;
    for (uint start = 0; start < rank; start += width) {
        const uint column = start + own.x % width;
        float acc[ROWS];
        for (uint row = 0; row < ROWS; row++) acc[row] = 0.0f;
        if (part < parts && column < rank) {
            for (uint k = part; k < sizes.inner; k += parts) {
                const float factor = a[ulong(k) * rank + column];
                for (uint row = 0; row < ROWS; row++)
                    if (row < item.rows)
                        acc[row] += float(x[ulong(order[row]) * sizes.x_stride + k]) * factor;
            }
        }
        for (uint row = 0; row < item.rows; row++) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            sums[own.x] = acc[row];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (part == 0 && column < rank) {
                float sum = 0.0f;
                for (uint other = 0; other < parts; other++) sum += sums[other * width + own.x];
                xa[ulong(item.first + row) * sizes.pitch + column] = sum;
            }
        }
    }
}

FOR_EACH_DTYPE(lora_rows_down)

/// y += s·xa·B of an item; a thread has a column of y.
template <typename T>
[[kernel]] void lora_rows_up(device const float *xa [[buffer(0)]], device T *y [[buffer(1)]],
                             device const uint *numbers [[buffer(2)]],
                             constant lora_rows::Sizes &sizes [[buffer(3)]],
                             constant uint *ranks [[buffer(4)]], LORA_ROWS_FACTORS,
                             constant float *scales [[buffer(13)]], PLACE) {
    constexpr uint ROWS = lora_rows::ITEM_ROWS;
    const uint column = group.x * threads.x + own.x;
    if (column >= sizes.outer) return;
    const lora_rows::Item item = lora_rows::item_of(numbers, sizes, group.y);
    device const float *const b = lora_rows::chosen(item.adapter, f0, f1, f2, f3, f4, f5, f6, f7);
    device const uint *const order = numbers + sizes.order + item.first;
    const uint rank = ranks[item.adapter];
    float acc[ROWS];
    for (uint row = 0; row < ROWS; row++) acc[row] = 0.0f;
    xa += ulong(item.first) * sizes.pitch;
    for (uint r = 0; r < rank; r++) {
        const float factor = b[ulong(r) * sizes.outer + column];
        for (uint row = 0; row < ROWS; row++)
            if (row < item.rows) acc[row] += xa[row * sizes.pitch + r] * factor;
    }
    for (uint row = 0; row < item.rows; row++) {
        device T *const at = y + ulong(order[row]) * sizes.y_stride + column;
        *at = static_cast<T>(float(*at) + scales[item.adapter] * acc[row]);
    }
}

FOR_EACH_DTYPE(lora_rows_up)
