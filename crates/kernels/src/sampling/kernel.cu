// The index of the largest logit of each row, and the choice of a token from the adjusted logits of each row.
//
// The latter is made by blocks that wait for the others of their row. They hold a logit as a key, an integer of the same
// order, so what is kept follows from comparisons of the logits themselves. A weight e^{(l - max l) / t} is a
// whole number of units: sums of those are the same in any order, so blocks can add them up by atomics and
// still always choose the same token.
//
// Top-k and top-p are both a search for a key: from the largest down, the first where the count, or the sum
// of the weights, reaches a number. It goes by the upper 11 bits of the keys, then the next 11, then the
// last 10, each time by what all blocks together have in each of the 2048 bins.
#include "common.cuh"

namespace {

constexpr int THREADS = 1024;

/// The larger of two logits, of equals the one that comes first.
__device__ __forceinline__ void keep_first_largest(float &value, int &index, float other, int place) {
    if (other > value || (other == value && place < index)) {
        value = other;
        index = place;
    }
}

/// Calls `work` with the place and the number of each of the logits that a thread has, which are read by packs where they are
/// `aligned`.
template <typename T, int BLOCK, typename Work>
__device__ __forceinline__ void for_each_logit(const T *__restrict__ logits, int count, bool aligned, const Work &work) {
    constexpr int N = Pack<T>::N;
    int done = 0;
    if (aligned) {
        const int packs = count / N;
        done = packs * N;
#pragma unroll 4
        for (int i = threadIdx.x; i < packs; i += BLOCK) {
            const Pack<T> pack = load_pack(logits + i * N);
#pragma unroll
            for (int e = 0; e < N; e++) work(i * N + e, to_float(pack.at[e]));
        }
    }
    for (int i = done + threadIdx.x; i < count; i += BLOCK) work(i, to_float(logits[i]));
}

/// Block i finds the first of the largest in row i. NaN and negative infinity are never chosen; 0 when
/// nothing else is there.
template <typename T>
__device__ __forceinline__ void greedy(const T *__restrict__ logits, int64_t stride,
                                       uint32_t *__restrict__ ids, int columns, int aligned) {
    constexpr int WARPS = THREADS / WARP;
    __shared__ float values[WARPS];
    __shared__ int places[WARPS];
    const T *row = logits + blockIdx.x * stride;
    float value = -INFINITY;
    int index = columns;
    for_each_logit<T, THREADS>(row, columns, aligned,
                               [&](int i, float logit) { keep_first_largest(value, index, logit, i); });
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(FULL, value, offset);
        const int place = __shfl_xor_sync(FULL, index, offset);
        keep_first_largest(value, index, other, place);
    }
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane == 0) {
        values[warp] = value;
        places[warp] = index;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; w++) keep_first_largest(value, index, values[w], places[w]);
        ids[blockIdx.x] = value > -INFINITY ? index : 0;
    }
}

} // namespace

FOR_EACH_DTYPE(greedy, THREADS,
               (const T *logits, int64_t stride, uint32_t *ids, int columns, int aligned),
               (logits, stride, ids, columns, aligned))

namespace {

constexpr int CHOICE_THREADS = 512;
constexpr int CHOICE_WARPS = CHOICE_THREADS / WARP;
/// Bits that keys are sorted by, twice, and then by the rest.
constexpr int DIGIT = 11;
constexpr int LAST_DIGIT = 32 - 2 * DIGIT;
constexpr uint32_t LAST = (1u << LAST_DIGIT) - 1;
constexpr int BINS = 1 << DIGIT;
constexpr int BINS_OF_THREAD = BINS / CHOICE_THREADS;
/// Three levels for top-k, of which top-p has the first too, and two more for top-p.
constexpr int LEVELS = 5;
/// Keys that are sorted into bins of shared memory before those are added to everyone's: the upper third
/// of their weights, at most 2^16 each, has to have a sum of 32 bits.
constexpr int STRETCH = 32768;
constexpr uint32_t NOWHERE = 0xffffffffu;

/// 0 for what is never chosen: negative infinity and NaN.
__device__ __forceinline__ uint32_t key_of(float logit) {
    // Both zeros are the same logit.
    const uint32_t bits = __float_as_uint(logit + 0.0f);
    if (!(logit > -INFINITY)) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(uint32_t key) {
    if (key == 0) return -INFINITY;
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/// The last digit of keys whose logits have zeros there, after the other bits: negative ones are inverted.
__device__ __forceinline__ uint32_t last_of_coarse(uint32_t prefix) {
    return prefix >> (2 * DIGIT - 1) ? 0 : LAST;
}

/// As `draw_words` in `gpu.rs` puts it.
struct Draw {
    /// How often blocks of the row have come to where they wait; 0 at first.
    uint32_t arrived;
    uint32_t top_k, first_adjustment, adjustment_count;
    /// The inverse of the temperature, top-p, and the logarithm of min-p.
    double sharpness, top_p, least;
    uint64_t uniform;
};

/// Where the blocks of a row wait for each other.
struct Meeting {
    uint32_t *arrived;
    uint32_t expected;

    /// All have to call it as often. What was written before is seen by all behind it, past the first cache.
    __device__ __forceinline__ void wait() {
        __syncthreads();
        if (gridDim.x == 1) return;
        expected += gridDim.x;
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(arrived, 1u);
            while (*static_cast<volatile uint32_t *>(arrived) < expected) {}
            __threadfence();
        }
        __syncthreads();
    }
};

/// As `draw_words` in `gpu.rs` puts them.
struct Adjustment {
    uint32_t id;
    float bias, penalty, subtracted;
};

/// Always rounded as the host rounds, so no product is fused with a difference.
__device__ __forceinline__ float adjusted(float logit, const Adjustment &adjustment) {
    double score = __dadd_rn(logit, adjustment.bias);
    const double penalty = adjustment.penalty;
    score = score < 0.0 ? __dmul_rn(score, penalty) : __ddiv_rn(score, penalty);
    score = __dadd_rn(score, -static_cast<double>(adjustment.subtracted));
    return __double2float_rn(fmin(fmax(score, -3.4028234663852886e38), 3.4028234663852886e38));
}

/// What is to be drawn from.
struct Distribution {
    float largest;
    /// The inverse of the temperature, the logarithm of min-p, and the weight of the likeliest.
    double sharpness, least, unit;

    __device__ __forceinline__ double exponent(uint32_t key) const {
        return (static_cast<double>(logit_of(key)) - static_cast<double>(largest)) * sharpness;
    }
    __device__ __forceinline__ uint64_t weight(uint32_t key) const {
        return __double2ull_rn(exp(exponent(key)) * unit);
    }
    /// The weight, unless min-p leaves it out.
    __device__ __forceinline__ uint64_t likely_weight(uint32_t key) const {
        const double x = exponent(key);
        return x >= least ? __double2ull_rn(exp(x) * unit) : 0;
    }
};

/// The sum over the threads before this one, and over all in `total`. All threads have to call it.
__device__ __forceinline__ uint64_t block_scan(uint64_t value, uint64_t *parts, uint64_t &total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint64_t sum = value;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const uint64_t other = __shfl_up_sync(FULL, sum, offset);
        if (lane >= offset) sum += other;
    }
    __syncthreads();
    if (lane == WARP - 1) parts[warp] = sum;
    __syncthreads();
    uint64_t before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < CHOICE_WARPS; w++) {
        const uint64_t part = parts[w];
        if (w < warp) before += part;
        total += part;
    }
    return before + sum - value;
}

/// What no logit of 16 bits has: something in the last digit of its key.
__device__ __forceinline__ bool is_fine(uint32_t key) {
    return key != 0 && (key & LAST) != last_of_coarse(key >> LAST_DIGIT);
}

/// The largest adjusted key with the complement of its place, the largest logit's key, the first logit
/// that no distribution has, and whether an adjusted key is fine.
struct Extremes {
    uint64_t best;
    uint32_t largest, offender, fine, unused;

    __device__ __forceinline__ void take(const Extremes &other) {
        best = max(best, other.best);
        largest = max(largest, other.largest);
        offender = min(offender, other.offender);
        fine |= other.fine;
    }
};

/// A key with its place: of equals the first is the largest.
__device__ __forceinline__ uint64_t ranked(uint32_t key, int place) {
    return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(place);
}

/// Those of all threads, in each of them.
__device__ __forceinline__ Extremes block_extremes(Extremes own, Extremes *parts) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        Extremes other;
        other.best = __shfl_xor_sync(FULL, own.best, offset);
        other.largest = __shfl_xor_sync(FULL, own.largest, offset);
        other.offender = __shfl_xor_sync(FULL, own.offender, offset);
        other.fine = __shfl_xor_sync(FULL, own.fine, offset);
        own.take(other);
    }
    __syncthreads();
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = own;
    __syncthreads();
    for (int w = 0; w < CHOICE_WARPS; w++) own.take(parts[w]);
    return own;
}

/// What the blocks tell each other.
struct Exchange {
    Extremes extremes[CHOICE_THREADS];
    /// Of the logits as they are.
    uint64_t raw[CHOICE_THREADS];
    /// What is above the threshold, and how many keys are the threshold.
    uint64_t mass[CHOICE_THREADS];
    uint64_t ties[CHOICE_THREADS];
    uint64_t masses[LEVELS][BINS];
    uint32_t counts[LEVELS][BINS];
};

/// What is read back.
struct Result {
    uint32_t id;
    float logit, largest;
    uint32_t offender;
    float offending;
    uint32_t unused;
    uint64_t sum;
};

struct Bins {
    uint32_t counts[BINS];
    /// Sums of the lower, the middle and the upper part of weights, 16 bits each.
    uint32_t masses[3][BINS];
};

/// The bin in which a sum reaches its target, counted from the largest keys, with what lies above it.
struct Found {
    uint32_t bin;
    uint64_t count_above, mass_above, count, mass;
};

struct Shared {
    uint64_t parts[CHOICE_WARPS];
    Extremes extremes[CHOICE_WARPS];
    Found found;
    uint64_t before, ties_before;
    Bins bins;
};

/// Adds the keys that begin with `prefix`, above the `shift + DIGIT` lower bits, to the bins of a level.
__device__ void sort_into(Exchange *exchange, int level, const uint32_t *keys, int count, uint32_t prefix,
                          int shift, int digit, bool counting, bool weighing,
                          const Distribution &distribution, Bins &bins) {
    for (int start = 0; start < count; start += STRETCH) {
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += CHOICE_THREADS) {
            bins.counts[bin] = 0;
#pragma unroll
            for (int part = 0; part < 3; part++) bins.masses[part][bin] = 0;
        }
        __syncthreads();
        const int end = min(count, start + STRETCH);
        for (int i = start + threadIdx.x; i < end; i += CHOICE_THREADS) {
            const uint32_t key = keys[i];
            if (key == 0 || static_cast<uint64_t>(key) >> (shift + digit) != prefix) continue;
            const uint32_t bin = key >> shift & ((1u << digit) - 1);
            if (counting) atomicAdd(bins.counts + bin, 1u);
            if (!weighing) continue;
            const uint64_t weight = distribution.weight(key);
            const uint32_t low = weight & 0xffff, middle = weight >> 16 & 0xffff, high = weight >> 32;
            if (low) atomicAdd(bins.masses[0] + bin, low);
            if (middle) atomicAdd(bins.masses[1] + bin, middle);
            if (high) atomicAdd(bins.masses[2] + bin, high);
        }
        __syncthreads();
        for (int bin = threadIdx.x; bin < BINS; bin += CHOICE_THREADS) {
            const uint32_t keys_there = bins.counts[bin];
            const unsigned long long mass = bins.masses[0][bin] +
                                            (static_cast<uint64_t>(bins.masses[1][bin]) << 16) +
                                            (static_cast<uint64_t>(bins.masses[2][bin]) << 32);
            if (keys_there) atomicAdd(exchange->counts[level] + bin, keys_there);
            if (mass)
                atomicAdd(reinterpret_cast<unsigned long long *>(exchange->masses[level] + bin), mass);
        }
    }
}

/// Finds where the count or the mass of a level reaches the target, counted from the upper end. False when
/// it doesn't. The mass of all is in `mass`. Masses are looked at only where keys were weighed, and counts
/// above the bin only where the search goes by them.
__device__ bool find(const Exchange *exchange, int level, bool by_mass, bool weighed, uint64_t target,
                     Found &found, uint64_t &mass, Shared &shared) {
    uint64_t counts[BINS_OF_THREAD], masses[BINS_OF_THREAD];
    uint64_t count_here = 0, mass_here = 0;
    const int first = BINS - 1 - threadIdx.x * BINS_OF_THREAD;
#pragma unroll
    for (int j = 0; j < BINS_OF_THREAD; j++) {
        counts[j] = __ldcg(exchange->counts[level] + first - j);
        masses[j] = __ldcg(exchange->masses[level] + first - j);
        count_here += counts[j];
        mass_here += masses[j];
    }
    if (threadIdx.x == 0) shared.found.bin = NOWHERE;
    uint64_t unused, count_above = 0, mass_above = 0;
    mass = 0;
    if (!by_mass) count_above = block_scan(count_here, shared.parts, unused);
    if (weighed) mass_above = block_scan(mass_here, shared.parts, mass);
#pragma unroll
    for (int j = 0; j < BINS_OF_THREAD; j++) {
        const uint64_t above = by_mass ? mass_above : count_above;
        const uint64_t here = by_mass ? masses[j] : counts[j];
        if (above < target && target <= above + here)
            shared.found = {static_cast<uint32_t>(first - j), count_above, mass_above, counts[j],
                            masses[j]};
        count_above += counts[j];
        mass_above += masses[j];
    }
    __syncthreads();
    found = shared.found;
    // Before it is written again.
    __syncthreads();
    return found.bin != NOWHERE;
}

/// Keys above `key` are kept, and the first `ties` of those that are equal to it.
struct Threshold {
    uint32_t key;
    uint64_t ties;
    /// The weight of what is kept, with all ties.
    uint64_t mass;
};

/// The keys of a block, and what is known of all.
struct Keys {
    const uint32_t *at;
    int count;
    bool fine;
};

/// The key where the count or the mass reaches the target; 0 when it doesn't. `ties` is how much of the target
/// is left for keys that are equal to it. The first level is sorted already, into level 0; the others go to
/// `level` and the one behind it.
__device__ Threshold search(Meeting &meeting, Exchange *exchange, int level, const Keys &keys,
                            bool by_mass, bool weighing, uint64_t target,
                            const Distribution &distribution, Shared &shared) {
    Found found;
    uint64_t total, mass;
    if (!find(exchange, 0, by_mass, weighing, target, found, total, shared)) return {0, 0, total};
    mass = found.mass_above;
    target -= by_mass ? found.mass_above : found.count_above;
    uint32_t prefix = found.bin;
    sort_into(exchange, level, keys.at, keys.count, prefix, LAST_DIGIT, DIGIT, true, weighing,
              distribution, shared.bins);
    meeting.wait();
    find(exchange, level, by_mass, weighing, target, found, total, shared);
    mass += found.mass_above;
    target -= by_mass ? found.mass_above : found.count_above;
    prefix = prefix << DIGIT | found.bin;
    // All of the bin is kept, however its keys go on.
    if (found.count == (by_mass ? 1 : target))
        return {(prefix << LAST_DIGIT) - 1, 0, mass + found.mass};
    if (!keys.fine) return {prefix << LAST_DIGIT | last_of_coarse(prefix), target, mass + found.mass};
    sort_into(exchange, level + 1, keys.at, keys.count, prefix, 0, LAST_DIGIT, !by_mass, weighing,
              distribution, shared.bins);
    meeting.wait();
    find(exchange, level + 1, by_mass, weighing, target, found, total, shared);
    mass += found.mass_above + found.mass;
    target -= by_mass ? found.mass_above : found.count_above;
    return {prefix << LAST_DIGIT | found.bin, target, mass};
}

/// What top-k, where it isn't 0, and top-p, where it is below 1, keep.
__device__ Threshold truncate(Meeting &meeting, Exchange *exchange, const Keys &keys,
                              uint32_t top_k, double top_p, const Distribution &distribution,
                              Shared &shared) {
    const bool by_count = top_k > 0, by_mass = top_p < 1.0;
    Threshold threshold = {0, 0, 0};
    sort_into(exchange, 0, keys.at, keys.count, 0, DIGIT + LAST_DIGIT, DIGIT, by_count, by_mass,
              distribution, shared.bins);
    meeting.wait();
    if (by_count) {
        // Fewer may be there; then all remain.
        threshold =
            search(meeting, exchange, 1, keys, false, by_mass, top_k, distribution, shared);
        if (threshold.ties > 0) threshold.ties = ~0ull;
    } else {
        Found found;
        find(exchange, 0, true, true, 0, found, threshold.mass, shared);
    }
    if (by_mass) {
        const uint64_t share = __double2ull_ru(top_p * static_cast<double>(threshold.mass));
        const uint64_t target = min(threshold.mass, share);
        threshold = search(meeting, exchange, 3, keys, true, true, target, distribution, shared);
        if (threshold.ties > 0) {
            const uint64_t weight = distribution.weight(threshold.key);
            threshold.ties = (threshold.ties + weight - 1) / weight;
        }
    }
    return threshold;
}

/// How many of the keys equal to the threshold are kept of `ties` that come after `before` others.
__device__ __forceinline__ uint64_t kept_ties(const Threshold &threshold, uint64_t before, uint64_t ties) {
    return threshold.ties > before ? min(threshold.ties - before, ties) : 0;
}

template <typename T>
__device__ __forceinline__ void choose(const T *__restrict__ logits, int vocabulary, int chunk, Draw *draws,
                                       const Adjustment *__restrict__ adjustments, uint32_t *keys_outside,
                                       Exchange *exchange, Result *result, double unit) {
    extern __shared__ uint32_t keys_inside[];
    __shared__ Shared shared;
    const int64_t row = blockIdx.y;
    const Draw draw = draws[row];
    Meeting meeting = {&draws[row].arrived, 0};
    const double sharpness = draw.sharpness, top_p = draw.top_p;
    const uint32_t top_k = draw.top_k;
    adjustments += draw.first_adjustment;
    exchange += row;
    result += row;
    const int begin = blockIdx.x * chunk, count = max(0, min(chunk, vocabulary - begin));
    uint32_t *keys = keys_outside ? keys_outside + (row * gridDim.x + blockIdx.x) * chunk : keys_inside;
    logits += row * vocabulary + begin;
    const bool coldest = sharpness == INFINITY;
    const bool truncating = !coldest && (top_k > 0 || top_p < 1.0);
    // The largest logit is found without the keys.
    const bool keeping = !coldest || draw.adjustment_count > 0;
    if (truncating) {
        for (int i = blockIdx.x * CHOICE_THREADS + threadIdx.x; i < LEVELS * BINS;
             i += gridDim.x * CHOICE_THREADS) {
            (&exchange->masses[0][0])[i] = 0;
            (&exchange->counts[0][0])[i] = 0;
        }
    }

    Extremes extremes = {0, 0, NOWHERE, 0, 0};
    const bool aligned = reinterpret_cast<uint64_t>(logits) % sizeof(Pack<T>) == 0;
    for_each_logit<T, CHOICE_THREADS>(logits, count, aligned, [&](int i, float logit) {
        if (!(logit < INFINITY)) extremes.offender = min(extremes.offender, begin + i);
        const uint32_t key = key_of(logit);
        extremes.largest = max(extremes.largest, key);
        if (keeping)
            keys[i] = key;
        else
            extremes.best = max(extremes.best, ranked(key, begin + i));
    });
    if (keeping) {
        __syncthreads();
        for (int a = threadIdx.x; a < draw.adjustment_count; a += CHOICE_THREADS) {
            const Adjustment adjustment = adjustments[a];
            const int i = static_cast<int>(adjustment.id) - begin;
            if (i >= 0 && i < count && keys[i] != 0)
                keys[i] = key_of(adjusted(logit_of(keys[i]), adjustment));
        }
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += CHOICE_THREADS) {
            extremes.best = max(extremes.best, ranked(keys[i], begin + i));
            extremes.fine |= is_fine(keys[i]);
        }
    }
    extremes = block_extremes(extremes, shared.extremes);
    if (threadIdx.x == 0) exchange->extremes[blockIdx.x] = extremes;
    meeting.wait();

    extremes = {0, 0, NOWHERE, 0, 0};
    if (threadIdx.x < gridDim.x) {
        const Extremes *other = exchange->extremes + threadIdx.x;
        extremes = {__ldcg(&other->best), __ldcg(&other->largest), __ldcg(&other->offender),
                    __ldcg(&other->fine), 0};
    }
    extremes = block_extremes(extremes, shared.extremes);
    if (extremes.offender != NOWHERE || extremes.largest == 0) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            const float offending =
                extremes.offender != NOWHERE ? to_float(logits[extremes.offender]) : 0.0f;
            *result = {0, 0.0f, logit_of(extremes.largest), extremes.offender, offending, 0, 0};
        }
        return;
    }
    const float largest = logit_of(extremes.largest);
    uint64_t raw = 0;
    // A power of two. In f32, as double precision takes several times as long.
    const float scale = static_cast<float>(unit);
    for_each_logit<T, CHOICE_THREADS>(logits, count, aligned, [&](int, float logit) {
        raw += __float2ull_rn(expf(logit - largest) * scale);
    });
    uint64_t raw_sum;
    block_scan(raw, shared.parts, raw_sum);
    if (threadIdx.x == 0) exchange->raw[blockIdx.x] = raw_sum;
    if (coldest) {
        meeting.wait();
        if (blockIdx.x != 0) return;
        block_scan(threadIdx.x < gridDim.x ? __ldcg(exchange->raw + threadIdx.x) : 0, shared.parts,
                   raw_sum);
        if (threadIdx.x == 0) {
            const uint32_t id = ~static_cast<uint32_t>(extremes.best);
            *result = {id, to_float(logits[id]), largest, NOWHERE, 0.0f, 0, raw_sum};
        }
        return;
    }

    const Distribution distribution = {logit_of(extremes.best >> 32), sharpness, draw.least, unit};
    Threshold threshold = {0, 0, 0};
    if (truncating) {
        const Keys all = {keys, count, extremes.fine != 0};
        threshold = truncate(meeting, exchange, all, top_k, top_p, distribution, shared);
    }
    const bool counts_ties = threshold.ties > 0;
    const uint64_t weight_of_tie = counts_ties ? distribution.likely_weight(threshold.key) : 0;
    uint64_t mass = 0, ties = 0;
    for (int i = threadIdx.x; i < count; i += CHOICE_THREADS) {
        const uint32_t key = keys[i];
        if (key > threshold.key) mass += distribution.likely_weight(key);
        ties += key == threshold.key;
    }
    uint64_t mass_of_block, ties_of_block = 0;
    block_scan(mass, shared.parts, mass_of_block);
    if (counts_ties) block_scan(ties, shared.parts, ties_of_block);
    if (threadIdx.x == 0) {
        exchange->mass[blockIdx.x] = mass_of_block;
        exchange->ties[blockIdx.x] = ties_of_block;
    }
    meeting.wait();

    // Every block looks up which of them has the token.
    mass = ties = raw = 0;
    if (threadIdx.x < gridDim.x) {
        mass = __ldcg(exchange->mass + threadIdx.x);
        ties = __ldcg(exchange->ties + threadIdx.x);
        raw = __ldcg(exchange->raw + threadIdx.x);
    }
    uint64_t unused, total, ties_before = 0;
    if (counts_ties) ties_before = block_scan(ties, shared.parts, unused);
    mass += kept_ties(threshold, ties_before, ties) * weight_of_tie;
    const uint64_t before = block_scan(mass, shared.parts, total);
    const uint64_t target = __umul64hi(draw.uniform, total);
    bool own = false;
    if (threadIdx.x == blockIdx.x) {
        own = before <= target && target < before + mass;
        shared.before = before;
        shared.ties_before = ties_before;
    }
    if (!__syncthreads_or(own)) return;

    block_scan(raw, shared.parts, raw_sum);
    // Here the threads have stretches, as the order of the ids counts.
    const int stretch = (count + CHOICE_THREADS - 1) / CHOICE_THREADS;
    const int first = min(count, static_cast<int>(threadIdx.x) * stretch);
    const int last = min(count, first + stretch);
    uint64_t rank = shared.ties_before;
    ties = 0;
    if (counts_ties) {
        for (int i = first; i < last; i++) ties += keys[i] == threshold.key;
        rank += block_scan(ties, shared.parts, unused);
    }
    mass = kept_ties(threshold, rank, ties) * weight_of_tie;
    for (int i = first; i < last; i++)
        if (keys[i] > threshold.key) mass += distribution.likely_weight(keys[i]);
    uint64_t reached = shared.before + block_scan(mass, shared.parts, unused);
    if (target < reached || target >= reached + mass) return;
    for (int i = first; i < last; i++) {
        const uint32_t key = keys[i];
        if (key > threshold.key)
            reached += distribution.likely_weight(key);
        else if (key == threshold.key && rank++ < threshold.ties)
            reached += weight_of_tie;
        if (target < reached) {
            *result = {static_cast<uint32_t>(begin + i), to_float(logits[i]), largest, NOWHERE, 0.0f, 0,
                       raw_sum};
            return;
        }
    }
}

} // namespace

FOR_EACH_DTYPE(choose, CHOICE_THREADS,
               (const T *logits, int vocabulary, int chunk, Draw *draws, const Adjustment *adjustments,
                uint32_t *keys_outside, Exchange *exchange, Result *result, double unit),
               (logits, vocabulary, chunk, draws, adjustments, keys_outside, exchange, result, unit))
