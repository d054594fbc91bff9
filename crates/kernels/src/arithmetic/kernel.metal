// Sums and multiples of tensors, and caps; a thread has `AHEAD` elements.
#include "common.metal.h"

template <typename T>
[[kernel]] void arithmetic_add(device const T *x [[buffer(0)]], device const T *y [[buffer(1)]],
                    device T *out [[buffer(2)]], constant ulong &count [[buffer(3)]], PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < count) out[i] = static_cast<T>(float(x[i]) + float(y[i]));
    }
}

/// `factor` is one number that stays on the device.
template <typename T>
[[kernel]] void arithmetic_scale_by(device const T *x [[buffer(0)]], device const float *factor [[buffer(1)]],
                         device T *out [[buffer(2)]], constant ulong &count [[buffer(3)]], PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < count) out[i] = static_cast<T>(factor[0] * float(x[i]));
    }
}

template <typename T>
[[kernel]] void arithmetic_scale(device const T *x [[buffer(0)]], constant float &factor [[buffer(1)]],
                      device T *out [[buffer(2)]], constant ulong &count [[buffer(3)]], PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < count) out[i] = static_cast<T>(factor * float(x[i]));
    }
}

template <typename T>
[[kernel]] void arithmetic_softcap(device const T *x [[buffer(0)]], constant float &cap [[buffer(1)]],
                        device T *out [[buffer(2)]], constant ulong &count [[buffer(3)]], PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < count) out[i] = static_cast<T>(cap * precise::tanh(float(x[i]) / cap));
    }
}

/// The threadgroups of `group.y` have row n.
template <typename T>
[[kernel]] void arithmetic_scale_rows(device const T *x [[buffer(0)]], device const float *factors [[buffer(1)]],
                                      device T *out [[buffer(2)]], constant uint &columns [[buffer(3)]],
                                      PLACE) {
    const float factor = factors[group.y];
    for (uint k = 0; k < AHEAD; k++) {
        const uint i = (group.x * AHEAD + k) * threads.x + own.x;
        const ulong place = ulong(group.y) * columns + i;
        if (i < columns) out[place] = static_cast<T>(factor * float(x[place]));
    }
}

FOR_EACH_DTYPE(arithmetic_add)
FOR_EACH_DTYPE(arithmetic_scale)
FOR_EACH_DTYPE(arithmetic_softcap)
FOR_EACH_DTYPE(arithmetic_scale_by)
FOR_EACH_DTYPE(arithmetic_scale_rows)
