// Rows rounded to 8 bits and written to their places in a pool, as mod.rs has it; it is read in ../../kernel.metal.
#include "common.metal.h"

/// Groups of row `group.y` of `(tokens, heads, head_dim)`, found by the strides of tokens and heads: a thread rounds
/// one. They become those of its place among `room` rows, if it is one of them.
template <typename T>
[[kernel]] void round_rows(device const T *rows [[buffer(0)]],
                           device const uint *places [[buffer(1)]],
                           device uchar *codes [[buffer(2)]], device uchar *scales [[buffer(3)]],
                           constant ulong *strides [[buffer(4)]],
                           constant uint &heads [[buffer(5)]],
                           constant uint &head_dim [[buffer(6)]], constant uint &room [[buffer(7)]],
                           PLACE) {
    const uint groups = (head_dim + ROUNDED_GROUP - 1) / ROUNDED_GROUP;
    const uint i = group.x * threads.x + own.x, place = places[group.y];
    if (i >= heads * groups || place >= room) return;
    const uint head = i / groups, first = i % groups * ROUNDED_GROUP;
    const uint count = min(ROUNDED_GROUP, head_dim - first);
    device const T *const from = rows + group.y * strides[0] + head * strides[1] + first;
    const ulong to = ulong(place) * heads + head;
    // As integers, NaN is beyond infinity, and that beyond all numbers.
    uint largest = 0;
    for (uint n = 0; n < count; n++)
        largest = max(largest, as_type<uint>(float(from[n])) & 0x7fffffffu);
    const uint scale = max(largest >> 23, LEAST_SCALE);
    // 64 / scale
    const float factor = as_type<float>((260 - scale) << 23);
    for (uint n = 0; n < count; n++) {
        const float code = clamp(rint(float(from[n]) * factor), -127.0f, 127.0f);
        // What isn't finite is told by the scale.
        codes[to * head_dim + first + n] = static_cast<uchar>(scale == 255 ? 0 : int(code));
    }
    scales[to * groups + i % groups] = static_cast<uchar>(scale);
}

FOR_EACH_DTYPE(round_rows)
