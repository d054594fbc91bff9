// The gated unit, see mod.rs for the formulas.
//
// gate, up and d_out have rows at distances of their own; results are contiguous. A block has a stretch
// of one row: block `b` has chunk `b % chunks` of row `b / chunks`. `VECTOR` is the number of elements
// that are loaded at once: a pack, or 1 where packs don't fit.
#include "activation.cuh"
#include "vector.cuh"

constexpr int THREADS = 256;
/// Vectors of a thread.
constexpr int AHEAD = 2;

template <typename T, int VECTOR, int ACTIVATION>
__device__ __forceinline__ void forward_as(const T *gate, const T *up, T *out, int64_t vectors,
                                           int64_t first) {
    Vector<T, VECTOR> g[AHEAD], u[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * int(blockDim.x);
        if (vector < vectors) {
            g[k] = load_vector<VECTOR>(gate + vector * VECTOR);
            u[k] = load_vector<VECTOR>(up + vector * VECTOR);
        }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * int(blockDim.x);
        if (vector < vectors) {
            Vector<T, VECTOR> result;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const float value = activate<ACTIVATION>(to_float(g[k].at[i])).value;
                const float up = multiplier<ACTIVATION>(to_float(u[k].at[i])).value;
                result.at[i] = from_float<T>(value * up);
            }
            store_vector(out + vector * VECTOR, result);
        }
    }
}

/// Where a block works.
struct Stretch {
    int64_t row;
    /// The first vector of the thread.
    int64_t first;
};

__device__ __forceinline__ Stretch stretch(int chunks) {
    const unsigned row = blockIdx.x / unsigned(chunks), chunk = blockIdx.x % unsigned(chunks);
    return {int64_t(row), int64_t(chunk) * (AHEAD * blockDim.x) + threadIdx.x};
}

template <typename T, int VECTOR>
__device__ __forceinline__ void forward(const T *gate, const T *up, T *out, int64_t columns,
                                        int64_t gate_stride, int64_t up_stride, int chunks,
                                        int activation) {
    follow_previous();
    const Stretch s = stretch(chunks);
    gate += s.row * gate_stride;
    up += s.row * up_stride;
    out += s.row * columns;
    const int64_t vectors = columns / VECTOR;
    if (activation == SILU)
        forward_as<T, VECTOR, SILU>(gate, up, out, vectors, s.first);
    else if (activation == GELU_TANH)
        forward_as<T, VECTOR, GELU_TANH>(gate, up, out, vectors, s.first);
    else if (activation == CLAMPED)
        forward_as<T, VECTOR, CLAMPED>(gate, up, out, vectors, s.first);
    else
        forward_as<T, VECTOR, GELU>(gate, up, out, vectors, s.first);
}

/// `dgate`, `dup` or `out`, which what `forward` gives goes to and which may be `d_out`, may be null.
template <typename T, int VECTOR, int ACTIVATION>
__device__ __forceinline__ void backward_as(const T *gate, const T *up, const T *d_out, T *dgate,
                                            T *dup, T *out, int64_t vectors, int64_t first) {
    Vector<T, VECTOR> g[AHEAD], u[AHEAD], d[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * int(blockDim.x);
        if (vector < vectors) {
            g[k] = load_vector<VECTOR>(gate + vector * VECTOR);
            u[k] = load_vector<VECTOR>(up + vector * VECTOR);
            d[k] = load_vector<VECTOR>(d_out + vector * VECTOR);
        }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * int(blockDim.x);
        if (vector < vectors) {
            Vector<T, VECTOR> of_gate, of_up, again;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const Slope f = activate<ACTIVATION>(to_float(g[k].at[i]));
                const Slope by = multiplier<ACTIVATION>(to_float(u[k].at[i]));
                const float d_i = to_float(d[k].at[i]);
                of_gate.at[i] = from_float<T>(d_i * by.value * f.slope);
                of_up.at[i] = from_float<T>(d_i * f.value * by.slope);
                again.at[i] = from_float<T>(f.value * by.value);
            }
            if (dgate) store_vector(dgate + vector * VECTOR, of_gate);
            if (dup) store_vector(dup + vector * VECTOR, of_up);
            if (out) store_vector(out + vector * VECTOR, again);
        }
    }
}

template <typename T, int VECTOR>
__device__ __forceinline__ void backward(const T *gate, const T *up, const T *d_out, T *dgate,
                                         T *dup, T *out, int64_t columns, int64_t gate_stride,
                                         int64_t up_stride, int64_t d_out_stride, int chunks,
                                         int activation) {
    follow_previous();
    const Stretch s = stretch(chunks);
    gate += s.row * gate_stride;
    up += s.row * up_stride;
    d_out += s.row * d_out_stride;
    if (dgate) dgate += s.row * columns;
    if (dup) dup += s.row * columns;
    if (out) out += s.row * columns;
    const int64_t vectors = columns / VECTOR;
    if (activation == SILU)
        backward_as<T, VECTOR, SILU>(gate, up, d_out, dgate, dup, out, vectors, s.first);
    else if (activation == GELU_TANH)
        backward_as<T, VECTOR, GELU_TANH>(gate, up, d_out, dgate, dup, out, vectors, s.first);
    else if (activation == CLAMPED)
        backward_as<T, VECTOR, CLAMPED>(gate, up, d_out, dgate, dup, out, vectors, s.first);
    else
        backward_as<T, VECTOR, GELU>(gate, up, d_out, dgate, dup, out, vectors, s.first);
}

template <typename T>
__device__ __forceinline__ void glu_forward(const T *gate, const T *up, T *out, int64_t columns,
                                            int64_t gate_stride, int64_t up_stride, int chunks,
                                            int activation) {
    forward<T, Pack<T>::N>(gate, up, out, columns, gate_stride, up_stride, chunks, activation);
}

template <typename T>
__device__ __forceinline__ void glu_forward_any(const T *gate, const T *up, T *out,
                                                int64_t columns, int64_t gate_stride,
                                                int64_t up_stride, int chunks, int activation) {
    forward<T, 1>(gate, up, out, columns, gate_stride, up_stride, chunks, activation);
}

template <typename T>
__device__ __forceinline__ void glu_backward(const T *gate, const T *up, const T *d_out, T *dgate,
                                             T *dup, T *out, int64_t columns, int64_t gate_stride,
                                             int64_t up_stride, int64_t d_out_stride, int chunks,
                                             int activation) {
    backward<T, Pack<T>::N>(gate, up, d_out, dgate, dup, out, columns, gate_stride, up_stride,
                            d_out_stride, chunks, activation);
}

template <typename T>
__device__ __forceinline__ void glu_backward_any(const T *gate, const T *up, const T *d_out,
                                                 T *dgate, T *dup, T *out, int64_t columns,
                                                 int64_t gate_stride, int64_t up_stride,
                                                 int64_t d_out_stride, int chunks,
                                                 int activation) {
    backward<T, 1>(gate, up, d_out, dgate, dup, out, columns, gate_stride, up_stride, d_out_stride,
                   chunks, activation);
}

#define FORWARD_PARAMETERS                                                                         \
    (const T *gate, const T *up, T *out, int64_t columns, int64_t gate_stride, int64_t up_stride,  \
     int chunks, int activation)
#define FORWARD_ARGUMENTS (gate, up, out, columns, gate_stride, up_stride, chunks, activation)
#define BACKWARD_PARAMETERS                                                                        \
    (const T *gate, const T *up, const T *d_out, T *dgate, T *dup, T *out, int64_t columns,        \
     int64_t gate_stride, int64_t up_stride, int64_t d_out_stride, int chunks, int activation)
#define BACKWARD_ARGUMENTS                                                                         \
    (gate, up, d_out, dgate, dup, out, columns, gate_stride, up_stride, d_out_stride, chunks,      \
     activation)

FOR_EACH_DTYPE(glu_forward, THREADS, FORWARD_PARAMETERS, FORWARD_ARGUMENTS)
FOR_EACH_DTYPE(glu_forward_any, THREADS, FORWARD_PARAMETERS, FORWARD_ARGUMENTS)
FOR_EACH_DTYPE(glu_backward, THREADS, BACKWARD_PARAMETERS, BACKWARD_ARGUMENTS)
FOR_EACH_DTYPE(glu_backward_any, THREADS, BACKWARD_PARAMETERS, BACKWARD_ARGUMENTS)
