// The passes of the head and cross entropy beside the matrix products: the loss and gradient of a row of
// logits, the rows of the gradient put back in their places, and the sum of the losses. The rows that
// count are gathered by `embedding_forward`.
#include "common.metal.h"

/// What a product of the head becomes: times the scale, then capped unless the cap is 0.
struct Logit {
    float scale, cap, inverse;

    float of(float product) const {
        const float raw = product * scale;
        return cap > 0.0f ? cap * precise::tanh(raw * inverse) : raw;
    }

    /// The derivative of the logit with respect to the product.
    float slope(float logit) const {
        if (!(cap > 0.0f)) return scale;
        const float ratio = logit * inverse;
        return scale * (1.0f - ratio * ratio);
    }
};

/// The gradient of a row with respect to the products of the head, in their place or in another.
template <typename T>
inline void cross_entropy_gradient(device const float *row, device T *to, uint columns, uint target,
                                   float log_sum_exp, float weight, Logit logit, uint first,
                                   uint threads) {
    for (uint i = first; i < columns; i += threads) {
        const float z = logit.of(row[i]);
        const float probability = exp(z - log_sum_exp);
        // Exactly p - 1 rather than p minus a rounded product.
        const float difference = i == target ? probability - 1.0f : probability;
        to[i] = static_cast<T>(difference * logit.slope(z) * weight);
    }
}

/// The loss of row `group.x`, which is row `rows[group.x]` of all, and where `where` isn't 0 its gradient times the
/// row's weight: in `gradient` for 1, and for 2 in place of the products, when `gradient` isn't touched. Rows of both
/// are `stride` elements apart and begin at 16 bytes. Entropies and hits are written where `statistics` isn't 0.
template <typename T>
[[kernel]] void cross_entropy_rows(device float *products [[buffer(0)]],
                                   device T *gradient [[buffer(1)]],
                                   device const uint *targets [[buffer(2)]],
                                   device float *losses [[buffer(3)]],
                                   constant ulong &stride [[buffer(4)]],
                                   constant uint &columns [[buffer(5)]],
                                   constant float &scale [[buffer(6)]],
                                   constant float &cap [[buffer(7)]],
                                   constant uint &where [[buffer(8)]],
                                   device const uint *rows [[buffer(9)]],
                                   device const float *weights [[buffer(10)]],
                                   device float *entropies [[buffer(11)]],
                                   device float *hits [[buffer(12)]],
                                   constant uint &statistics [[buffer(13)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const Logit logit{scale, cap, cap > 0.0f ? 1.0f / cap : 0.0f};
    device float *row = products + group.x * stride;
    const uint target = targets[group.x];
    const float target_logit = logit.of(row[target]);

    // The largest, and the sum of e to the differences from it, so far. It starts finite, so that
    // negative infinities add nothing.
    float largest = -FLT_MAX, total = 0.0f;
    const uint fours = columns / 4;
    device const float4 *vectors = reinterpret_cast<device const float4 *>(row);
    for (uint i = own.x; i < fours; i += threads.x) {
        const float4 four = vectors[i];
        const float4 z =
            float4(logit.of(four.x), logit.of(four.y), logit.of(four.z), logit.of(four.w));
        const float most = max(max(z.x, z.y), max(z.z, z.w));
        if (most > largest) {
            total *= exp(largest - most);
            largest = most;
        }
        const float4 e = exp(z - largest);
        total += (e.x + e.y) + (e.z + e.w);
    }
    for (uint i = fours * 4 + own.x; i < columns; i += threads.x) {
        const float z = logit.of(row[i]);
        if (z > largest) {
            total *= exp(largest - z);
            largest = z;
        }
        total += exp(z - largest);
    }
    const float most = group_max(largest, scratch, lane, simdgroup, simdgroups);
    const float sum =
        group_sum(total * exp(largest - most), scratch, lane, simdgroup, simdgroups);
    const float log_sum_exp = most + log(sum);
    const uint place = rows[group.x];
    const float weight = weights[group.x];
    if (own.x == 0) losses[place] = log_sum_exp - target_logit;
    if (statistics != 0) {
        float spread = 0.0f;
        for (uint i = own.x; i < columns; i += threads.x) {
            // Finite, so that a logit of negative infinity adds nothing.
            const float below = max(logit.of(row[i]) - most, -FLT_MAX);
            spread += exp(below) * below;
        }
        spread = group_sum(spread, scratch, lane, simdgroup, simdgroups);
        if (own.x == 0) {
            entropies[place] = log(sum) - spread / sum;
            hits[place] = target_logit >= most ? 1.0f : 0.0f;
        }
    }
    if (where == 1)
        cross_entropy_gradient(row, gradient + group.x * stride, columns, target, log_sum_exp, weight,
                               logit, own.x, threads.x);
    if (where != 2) return;
    // Others have read what is replaced now.
    threadgroup_barrier(mem_flags::mem_device);
    cross_entropy_gradient(row, row, columns, target, log_sum_exp, weight, logit, own.x, threads.x);
}

/// out[n] = x[places[n]], or zeros where that is nowhere; the threadgroups of `group.y` have row n.
template <typename T>
[[kernel]] void cross_entropy_scatter(device const T *x [[buffer(0)]],
                                      device const uint *places [[buffer(1)]],
                                      device T *out [[buffer(2)]],
                                      constant uint &columns [[buffer(3)]], PLACE) {
    constexpr uint NOWHERE = 0xffffffffu;
    const uint place = places[group.y];
    for (uint k = 0; k < AHEAD; k++) {
        const uint i = (group.x * AHEAD + k) * threads.x + own.x;
        if (i < columns)
            out[ulong(group.y) * columns + i] =
                place == NOWHERE ? static_cast<T>(0.0f) : x[ulong(place) * columns + i];
    }
}

/// The weighted sum of the losses of `rows`, by one threadgroup.
[[kernel]] void cross_entropy_sum(device const float *losses [[buffer(0)]],
                                  device float *out [[buffer(1)]],
                                  constant uint &count [[buffer(2)]],
                                  device const uint *rows [[buffer(3)]],
                                  device const float *weights [[buffer(4)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    float sum = 0.0f;
    for (uint i = own.x; i < count; i += threads.x) sum += weights[i] * losses[rows[i]];
    sum = group_sum(sum, scratch, lane, simdgroup, simdgroups);
    if (own.x == 0) out[0] = sum;
}

FOR_EACH_DTYPE(cross_entropy_rows)
FOR_EACH_DTYPE(cross_entropy_scatter)
