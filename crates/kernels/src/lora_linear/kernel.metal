// What LoRA layers need beside products: dropout of any tensor.
#include "common.metal.h"

template <typename T>
[[kernel]] void dropout(device const T *x [[buffer(0)]], device T *out [[buffer(1)]],
                        constant ulong &count [[buffer(2)]], constant ulong &seed [[buffer(3)]],
                        constant uint &threshold [[buffer(4)]], constant float &kept [[buffer(5)]],
                        PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i >= count) return;
        out[i] = static_cast<T>(dropped(seed, i, threshold) ? 0.0f : float(x[i]) * kept);
    }
}

FOR_EACH_DTYPE(dropout)
