// The passes of the head and cross entropy beside the matrix products: the loss and gradient of a row of
// logits, the rows of the gradient put back in their places, and the sum of the losses. The rows that
// count are gathered by `embedding_forward`.
#include "common.metal.h"

/// Stands in a row with fewer targets than others.
constant constexpr uint NO_TARGET = 0xffffffffu;

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

/// What is known of a row.
struct LossRow {
    float log_sum_exp, weight;
    /// The sum of its targets' shares.
    float share;
    Logit logit;

    /// The gradient with respect to the product of a token, which has this share of the targets: exactly p - 1 for the
    /// only one.
    float gradient(float z, float of_target) const {
        return (share * exp(z - log_sum_exp) - of_target) * logit.slope(z) * weight;
    }
};

/// The gradient of a row with respect to the products of the head, in their place or in another.
template <typename T>
inline void cross_entropy_gradient(device const float *row, device T *to, uint columns, LossRow of,
                                   uint first, uint threads) {
    for (uint i = first; i < columns; i += threads)
        to[i] = static_cast<T>(of.gradient(of.logit.of(row[i]), 0.0f));
}

/// That of its targets, last, as other threads wrote there.
template <typename T>
inline void cross_entropy_targets(device T *to, device const uint *tokens, device const float *shares,
                                  device const float *logits, uint width, LossRow of, uint first,
                                  uint threads) {
    threadgroup_barrier(mem_flags::mem_device);
    for (uint i = first; i < width; i += threads)
        if (tokens[i] != NO_TARGET) to[tokens[i]] = static_cast<T>(of.gradient(logits[i], shares[i]));
}

/// The loss of row `group.x`, which is row `rows[group.x]` of all, and where `where` isn't 0 its gradient times the
/// row's weight: in `gradient` for 1, and for 2 in place of the products, when `gradient` isn't touched. Rows of both
/// are `stride` elements apart and begin at 16 bytes. Entropies and hits are written where `statistics` isn't 0. A row
/// has `width` targets, with their shares, whose sum is in `share_sums`, and room for their logits.
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
                                   constant uint &statistics [[buffer(13)]],
                                   device const float *shares [[buffer(14)]],
                                   device const float *share_sums [[buffer(15)]],
                                   device float *target_logits [[buffer(16)]],
                                   constant uint &width [[buffer(17)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const Logit logit{scale, cap, cap > 0.0f ? 1.0f / cap : 0.0f};
    device float *row = products + group.x * stride;
    const ulong first_target = ulong(group.x) * width;
    targets += first_target;
    shares += first_target;
    target_logits += first_target;
    const float first_logit = logit.of(row[targets[0]]);
    float of_targets = 0.0f;
    for (uint i = own.x; i < width; i += threads.x) {
        if (targets[i] == NO_TARGET) continue;
        const float z = logit.of(row[targets[i]]);
        target_logits[i] = z;
        of_targets += shares[i] * z;
    }
    of_targets = group_sum(of_targets, scratch, lane, simdgroup, simdgroups);

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
    const LossRow of{log_sum_exp, weights[group.x], share_sums[group.x], logit};
    if (own.x == 0) losses[place] = of.share * log_sum_exp - of_targets;
    if (statistics != 0) {
        float spread = 0.0f;
        // Of several logits that are the largest, the first token's counts.
        float before = 0.0f;
        for (uint i = own.x; i < columns; i += threads.x) {
            const float z = logit.of(row[i]);
            if (z >= most && i < targets[0]) before = 1.0f;
            // Finite, so that a logit of negative infinity adds nothing.
            const float below = max(z - most, -FLT_MAX);
            spread += exp(below) * below;
        }
        spread = group_sum(spread, scratch, lane, simdgroup, simdgroups);
        before = group_sum(before, scratch, lane, simdgroup, simdgroups);
        if (own.x == 0) {
            entropies[place] = log(sum) - spread / sum;
            hits[place] = first_logit >= most && before == 0.0f ? 1.0f : 0.0f;
        }
    }
    if (where == 1) {
        device T *to = gradient + group.x * stride;
        cross_entropy_gradient(row, to, columns, of, own.x, threads.x);
        cross_entropy_targets(to, targets, shares, target_logits, width, of, own.x, threads.x);
    }
    if (where != 2) return;
    // Others have read what is replaced now.
    threadgroup_barrier(mem_flags::mem_device);
    cross_entropy_gradient(row, row, columns, of, own.x, threads.x);
    cross_entropy_targets(row, targets, shares, target_logits, width, of, own.x, threads.x);
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
