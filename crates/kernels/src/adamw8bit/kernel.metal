// One step of AdamW with moments of 8 bits, see mod.rs for the formulas. A threadgroup has one block of
// elements.
#include "common.metal.h"

constant constexpr uint ADAMW8BIT_BLOCK = 256, ADAMW8BIT_LEVELS = 256;

/// The code of the level that is nearest to `share`, the lower of two.
inline uchar adamw8bit_nearest(float share, constant float *levels) {
    uint low = 0, high = ADAMW8BIT_LEVELS - 1;
    while (high - low > 1) {
        const uint middle = (low + high) / 2;
        if (share > levels[middle])
            low = middle;
        else
            high = middle;
    }
    return uchar(fabs(share - levels[low]) <= fabs(levels[high] - share) ? low : high);
}

/// `levels` are those of signed codes, and then those of unsigned ones.
[[kernel]] void adamw8bit_step(
    device float *params [[buffer(0)]], device float *grads [[buffer(1)]],
    device uchar *m_codes [[buffer(2)]], device uchar *v_codes [[buffer(3)]],
    device float *m_scales [[buffer(4)]], device float *v_scales [[buffer(5)]],
    constant AdamW &constants [[buffer(6)]], constant float *levels [[buffer(7)]],
    constant ulong &count [[buffer(8)]], constant float &grad_scale [[buffer(9)]], PLACE,
    SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const AdamW rule = constants;
    const ulong first = ulong(group.x) * ADAMW8BIT_BLOCK;
    const ulong end = min(first + ADAMW8BIT_BLOCK, count);
    const float m_scale = m_scales[group.x], v_scale = v_scales[group.x];
    constant float *unsigned_levels = levels + ADAMW8BIT_LEVELS;
    // Twice the same moments: first the largest of them, then their codes.
    float m_most = 0.0f, v_most = 0.0f;
    for (uint pass = 0; pass < 2; pass++) {
        for (ulong i = first + own.x; i < end; i += threads.x) {
            float4 p = float4(params[i]);
            float4 m = float4(levels[m_codes[i]] * m_scale);
            float4 v = float4(unsigned_levels[v_codes[i]] * v_scale);
            rule.step(p, m, v, float4(grads[i] * grad_scale), float4(1.0f));
            if (pass == 0) {
                m_most = max(m_most, fabs(m.x));
                v_most = max(v_most, fabs(v.x));
            } else {
                params[i] = p.x;
                grads[i] = 0.0f;
                m_codes[i] = adamw8bit_nearest(m_most > 0.0f ? m.x / m_most : 0.0f, levels);
                v_codes[i] =
                    adamw8bit_nearest(v_most > 0.0f ? v.x / v_most : 0.0f, unsigned_levels);
            }
        }
        if (pass == 0) {
            m_most = group_max(m_most, scratch, lane, simdgroup, simdgroups);
            v_most = group_max(v_most, scratch, lane, simdgroup, simdgroups);
        }
    }
    if (own.x == 0) {
        m_scales[group.x] = m_most;
        v_scales[group.x] = v_most;
    }
}
