// Rotary position embedding, see mod.rs for the formulas.
//
// A block has a token. A thread has `VECTOR` neighbouring angles, whose cosines and sines it reads once,
// or `VECTOR` elements that pass through, and goes over the heads with them. x may have any strides but
// for its last dimension, which is contiguous; y is contiguous.
#include "rotation.cuh"
#include "vector.cuh"

constexpr int THREADS = 256;

/// `y`, contiguous, is `x` rotated. Strides are in elements, of batch, seq and heads.
struct Rotated {
    const void *x;
    void *y;
    int64_t strides[3];
    int64_t heads;
};

/// Tensors of the same tokens, as queries and keys are, which share a launch: `blockIdx.y` says which.
struct Both {
    Rotated at[2];
};

template <typename T, int VECTOR>
__device__ __forceinline__ void rotate(const Both &both, const float *cosines, const float *sines,
                                       int seq, int head_dim, int half, int lanes, float sign) {
    follow_previous();
    const Rotated &rotated = both.at[blockIdx.y];
    const int heads = int(rotated.heads);
    const int64_t head_stride = rotated.strides[2];
    const int64_t token = blockIdx.x;
    const T *const x = static_cast<const T *>(rotated.x) + token / seq * rotated.strides[0] +
                       token % seq * rotated.strides[1];
    T *const y = static_cast<T *>(rotated.y) + token * heads * head_dim;
    cosines += token * half;
    sines += token * half;
    // `lanes` threads have a head, and the block several heads at a time.
    const int lane = threadIdx.x % lanes, first_head = threadIdx.x / lanes;
    const int step = blockDim.x / lanes;
    const int turning = half / VECTOR, units = turning + (head_dim - 2 * half) / VECTOR;
    for (int unit = lane; unit < units; unit += lanes) {
        if (unit < turning) {
            const int i = unit * VECTOR;
            float c[VECTOR], s[VECTOR];
            if constexpr (VECTOR == 1) {
                c[0] = cosines[i];
                s[0] = sign * sines[i];
            } else {
#pragma unroll
                for (int start = 0; start < VECTOR; start += 4) {
                    const Vector<float, 4> c4 = load_vector<4>(cosines + i + start);
                    const Vector<float, 4> s4 = load_vector<4>(sines + i + start);
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        c[start + k] = c4.at[k];
                        s[start + k] = sign * s4.at[k];
                    }
                }
            }
#pragma unroll 2
            for (int head = first_head; head < heads; head += step) {
                const T *in = x + head * head_stride + i;
                T *out = y + int64_t(head) * head_dim + i;
                const Vector<T, VECTOR> a = load_vector<VECTOR>(in);
                const Vector<T, VECTOR> b = load_vector<VECTOR>(in + half);
                Vector<T, VECTOR> rotated_a, rotated_b;
#pragma unroll
                for (int k = 0; k < VECTOR; k++) {
                    const float2 pair = rotated_pair(to_float(a.at[k]), to_float(b.at[k]), c[k], s[k]);
                    rotated_a.at[k] = from_float<T>(pair.x);
                    rotated_b.at[k] = from_float<T>(pair.y);
                }
                store_vector(out, rotated_a);
                store_vector(out + half, rotated_b);
            }
        } else {
            const int i = 2 * half + (unit - turning) * VECTOR;
            for (int head = first_head; head < heads; head += step)
                store_vector(y + int64_t(head) * head_dim + i,
                             load_vector<VECTOR>(x + head * head_stride + i));
        }
    }
}

template <typename T>
__device__ __forceinline__ void rope(const Both &both, const float *cosines, const float *sines,
                                     int seq, int head_dim, int half, int lanes, float sign) {
    rotate<T, Pack<T>::N>(both, cosines, sines, seq, head_dim, half, lanes, sign);
}

template <typename T>
__device__ __forceinline__ void rope_any(const Both &both, const float *cosines,
                                         const float *sines, int seq, int head_dim, int half,
                                         int lanes, float sign) {
    rotate<T, 1>(both, cosines, sines, seq, head_dim, half, lanes, sign);
}

#define PARAMETERS                                                                                 \
    (const __grid_constant__ Both both, const float *cosines, const float *sines, int seq,         \
     int head_dim, int half, int lanes, float sign)
#define ARGUMENTS (both, cosines, sines, seq, head_dim, half, lanes, sign)

FOR_EACH_DTYPE(rope, THREADS, PARAMETERS, ARGUMENTS)
FOR_EACH_DTYPE(rope_any, THREADS, PARAMETERS, ARGUMENTS)
