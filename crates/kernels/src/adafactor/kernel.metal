// One step of Adafactor, see mod.rs for the formulas: the means of rows and of columns, the mean of the rows'
// means, sums of squares of update and parameter, and the update.
#include "common.metal.h"

/// What is the same for all elements of one step, as in mod.rs.
struct Adafactor {
    float grad_scale, beta, one_minus_beta, epsilon, clip_threshold, learning_rate, scale_epsilon,
        weight_decay;
};

/// The means of squares of `lines` rows or columns, of which threadgroup `group.x` has one: `count` elements
/// at a distance of `stride`, the first `distance` behind that of the line before.
[[kernel]] void adafactor_means(device const float *grads [[buffer(0)]],
                                device float *means [[buffer(1)]],
                                constant Adafactor &rule [[buffer(2)]],
                                constant ulong &count [[buffer(3)]],
                                constant ulong &stride [[buffer(4)]],
                                constant ulong &distance [[buffer(5)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    float sum = 0.0f;
    for (ulong i = own.x; i < count; i += threads.x) {
        const float g = grads[ulong(group.x) * distance + i * stride] * rule.grad_scale;
        sum += g * g;
    }
    sum = group_sum(sum, scratch, lane, simdgroup, simdgroups);
    if (own.x == 0) {
        const float mean = sum / float(count) + rule.epsilon;
        means[group.x] = rule.beta * means[group.x] + rule.one_minus_beta * mean;
    }
}

/// The mean of `count` numbers; one threadgroup.
[[kernel]] void adafactor_mean(device const float *means [[buffer(0)]],
                               device float *mean [[buffer(1)]],
                               constant ulong &count [[buffer(2)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    float sum = 0.0f;
    for (ulong i = own.x; i < count; i += threads.x) sum += means[i];
    sum = group_sum(sum, scratch, lane, simdgroup, simdgroups);
    if (own.x == 0) mean[0] = sum / float(count);
}

/// The update of element `i` before it is clipped.
inline float adafactor_of(float gradient, ulong i, device const float *row_means,
                          device const float *column_means, float mean, ulong columns,
                          float grad_scale) {
    const float row = row_means[i / columns], column = column_means[i % columns];
    return gradient * grad_scale / sqrt(row / mean) / sqrt(column);
}

/// Threadgroup `group.x` of `parts` leaves the sums of squares of the update and of the parameter, of its
/// share.
[[kernel]] void adafactor_measure(
    device const float *params [[buffer(0)]], device const float *grads [[buffer(1)]],
    device const float *row_means [[buffer(2)]], device const float *column_means [[buffer(3)]],
    device const float *mean [[buffer(4)]], device float *partial [[buffer(5)]],
    constant Adafactor &rule [[buffer(6)]], constant ulong &count [[buffer(7)]],
    constant ulong &columns [[buffer(8)]], constant uint &parts [[buffer(9)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    float updates = 0.0f, sizes = 0.0f;
    for (ulong i = ulong(group.x) * threads.x + own.x; i < count; i += ulong(parts) * threads.x) {
        const float u = adafactor_of(grads[i], i, row_means, column_means, mean[0], columns,
                                     rule.grad_scale);
        updates += u * u;
        sizes += params[i] * params[i];
    }
    updates = group_sum(updates, scratch, lane, simdgroup, simdgroups);
    sizes = group_sum(sizes, scratch, lane, simdgroup, simdgroups);
    if (own.x == 0) {
        partial[2 * group.x] = updates;
        partial[2 * group.x + 1] = sizes;
    }
}

/// As many threadgroups as measured. The gradients are zero afterwards.
[[kernel]] void adafactor_update(
    device float *params [[buffer(0)]], device float *grads [[buffer(1)]],
    device const float *row_means [[buffer(2)]], device const float *column_means [[buffer(3)]],
    device const float *mean [[buffer(4)]], device const float *partial [[buffer(5)]],
    constant Adafactor &rule [[buffer(6)]], constant ulong &count [[buffer(7)]],
    constant ulong &columns [[buffer(8)]], constant uint &parts [[buffer(9)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    float updates = 0.0f, sizes = 0.0f;
    for (uint part = own.x; part < parts; part += threads.x) {
        updates += partial[2 * part];
        sizes += partial[2 * part + 1];
    }
    updates = sqrt(group_sum(updates, scratch, lane, simdgroup, simdgroups) / float(count));
    sizes = sqrt(group_sum(sizes, scratch, lane, simdgroup, simdgroups) / float(count));
    float rate = rule.learning_rate;
    if (rule.scale_epsilon >= 0.0f) rate *= max(rule.scale_epsilon, sizes);
    const float decay = 1.0f - rate * rule.weight_decay;
    const float factor = rate / max(1.0f, updates / rule.clip_threshold);
    for (ulong i = ulong(group.x) * threads.x + own.x; i < count; i += ulong(parts) * threads.x) {
        const float u = adafactor_of(grads[i], i, row_means, column_means, mean[0], columns,
                                     rule.grad_scale);
        params[i] = params[i] * decay - factor * u;
        grads[i] = 0.0f;
    }
}
