// What the operations on rows share: which threads have which row, rows in registers, sums over a row.
//
// A row of whole packs at 16-byte addresses is kept in registers: it is read once and written once. Up
// to 512 threads have a row; pack `i` of the row belongs to thread `i % row_threads`. When a warp is
// enough for a row, every warp of a block has one of its own and no barrier is needed. All other rows,
// such as those of odd lengths, go element by element through the kernels named `.._any`, a block a row.
#pragma once

#include "async.cuh"
#include "common.cuh"
#include "tensor.cuh"

/// Threads that a row in registers has at most.
constexpr int ROW_THREADS = 512;
/// Threads of a block of the kernels for any row.
constexpr int ANY_THREADS = 256;

/// Where a thread works.
struct Place {
    /// The first row of its warp or block, and the distance to the next.
    int64_t row, step;
    /// Its index among the threads of the row.
    int index;
};

__device__ __forceinline__ Place place_in_rows(int row_threads) {
    if (row_threads == WARP) {
        const int warps = blockDim.x / WARP;
        return {int64_t(blockIdx.x) * warps + threadIdx.x / WARP, int64_t(gridDim.x) * warps,
                int(threadIdx.x % WARP)};
    }
    return {int64_t(blockIdx.x), int64_t(gridDim.x), int(threadIdx.x)};
}

/// Sums over the threads of a row, in every one of them. `scratch` may be used again after another
/// barrier that comes after this.
template <int K>
__device__ __forceinline__ void row_sums(float (&x)[K], int row_threads, float (*scratch)[WARP]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int k = 0; k < K; k++) x[k] = warp_sum(x[k]);
    if (row_threads == WARP) return;
    if (lane == 0) {
#pragma unroll
        for (int k = 0; k < K; k++) scratch[k][warp] = x[k];
    }
    __syncthreads();
    const bool used = lane < row_threads / WARP;
#pragma unroll
    for (int k = 0; k < K; k++) x[k] = warp_sum(used ? scratch[k][lane] : 0.0f);
}

/// Loads what is read once: it takes no place from what is read again, such as weights.
template <typename T> __device__ __forceinline__ Pack<T> load_once(const T *address) {
    uint4 bits;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return *reinterpret_cast<const Pack<T> *>(&bits);
}

/// The packs of a row that belong to a thread; those beyond the row stay unset.
template <int PACKS, typename T>
__device__ __forceinline__ void load_row(const T *row, int packs, int index, int row_threads,
                                         Pack<T> (&out)[PACKS]) {
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int pack = index + p * row_threads;
        if (pack < packs) out[p] = load_once(row + pack * Pack<T>::N);
    }
}

/// Rows that are on their way while one before them is worked on. A thread copies into shared memory what
/// it reads itself, so there is no barrier. `TENSORS` have rows; the memory is what `rows_ahead` of
/// `rows.rs` says.
template <typename T, int PACKS, int TENSORS> struct RowsAhead {
    static constexpr int ROWS = 2, N = Pack<T>::N;
    /// The thread's place in the memory, and the distance to that of its next pack.
    uint4 *own;
    int stride;
    int tensors;
    /// The thread's first pack of row 0 of every tensor, and elements to the next.
    const T *from[TENSORS];
    int next;
    /// Packs of the thread.
    int packs;

    __device__ __forceinline__ RowsAhead(uint4 *memory, int tensors,
                                         const T *const (&of)[TENSORS], int row_packs, int index,
                                         int row_threads)
        : own(memory + threadIdx.x), stride(blockDim.x), tensors(tensors), next(row_threads * N),
          packs((row_packs - index + row_threads - 1) / row_threads) {
#pragma unroll
        for (int tensor = 0; tensor < TENSORS; tensor++) from[tensor] = of[tensor] + index * N;
    }

    __device__ __forceinline__ uint4 *place(int slot, int tensor, int p) const {
        return own + ((slot * tensors + tensor) * PACKS + p) * stride;
    }

    /// Asks for a row at `offset` of every tensor; a row that isn't there is asked for too, for groups
    /// of copies are counted.
    __device__ __forceinline__ void request(bool there, int64_t offset, int slot) const {
        if (there) {
#pragma unroll
            for (int tensor = 0; tensor < TENSORS; tensor++) {
                if (tensor >= tensors) break;
#pragma unroll
                for (int p = 0; p < PACKS; p++) {
                    if (p < packs)
                        copy_async(shared_address(place(slot, tensor, p)),
                                   from[tensor] + offset + p * next, true);
                }
            }
        }
        copy_async_commit();
    }

    /// Waits for the row that was asked for `ROWS` requests ago.
    __device__ __forceinline__ void wait() const { copy_async_wait<ROWS - 1>(); }

    __device__ __forceinline__ void take(int slot, int tensor, Pack<T> (&out)[PACKS]) const {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const uint4 bits = *place(slot, tensor, p);
            out[p] = *reinterpret_cast<const Pack<T> *>(&bits);
        }
    }
};

/// Lets the compiler forget what it has converted from packs, so that they, and not the f32 numbers, are
/// what is kept in registers from here on.
template <int PACKS, typename T>
__device__ __forceinline__ void keep_packed(Pack<T> (&packs)[PACKS]) {
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        uint4 bits = *reinterpret_cast<uint4 *>(&packs[p]);
        asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
        packs[p] = *reinterpret_cast<Pack<T> *>(&bits);
    }
}

/// The numbers of a pack, in registers as such from here on: a row that is gone over several times is
/// converted once.
template <typename T>
__device__ __forceinline__ void unpack(const Pack<T> &pack, float (&out)[Pack<T>::N]) {
    constexpr int N = Pack<T>::N;
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const float2 pair = unpack_pair<T>(*reinterpret_cast<const uint32_t *>(pack.at + i));
            out[i] = pair.x;
            out[i + 1] = pair.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = to_float(pack.at[i]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) asm("" : "+f"(out[i]));
}

/// Parameters of a norm: f32, bf16 or f16, whatever the rows are.
struct Parameter {
    const void *address;
    int dtype;
};
constexpr int PARAMETER_F32 = 0, PARAMETER_BF16 = 1;

__device__ __forceinline__ float parameter(Parameter p, int64_t index) {
    if (p.dtype == PARAMETER_F32) return static_cast<const float *>(p.address)[index];
    if (p.dtype == PARAMETER_BF16) return to_float(static_cast<const bf16 *>(p.address)[index]);
    return to_float(static_cast<const f16 *>(p.address)[index]);
}

template <typename T, int N>
__device__ __forceinline__ void load_floats(const T *address, float (&out)[N]) {
    if constexpr (N >= Pack<T>::N) {
#pragma unroll
        for (int start = 0; start < N; start += Pack<T>::N) {
            const Pack<T> pack = load_pack(address + start);
#pragma unroll
            for (int i = 0; i < Pack<T>::N; i++) out[start + i] = to_float(pack.at[i]);
        }
    } else {
        // Four elements of two bytes.
        const uint2 bits = *reinterpret_cast<const uint2 *>(address);
        const T *elements = reinterpret_cast<const T *>(&bits);
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = to_float(elements[i]);
    }
}

/// `N` parameters from `index` on, a multiple of `N`, from memory that starts at a 16-byte address.
template <int N>
__device__ __forceinline__ void load_parameters(Parameter p, int index, float (&out)[N]) {
    if (p.dtype == PARAMETER_F32)
        load_floats(static_cast<const float *>(p.address) + index, out);
    else if (p.dtype == PARAMETER_BF16)
        load_floats(static_cast<const bf16 *>(p.address) + index, out);
    else
        load_floats(static_cast<const f16 *>(p.address) + index, out);
}
