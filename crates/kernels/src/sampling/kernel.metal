// The index of the largest logit of each row, and the choice of a token from the adjusted logits of each row; a
// threadgroup has a row.
//
// For a choice logits are held as keys, integers of the same order, so what is kept follows from comparisons
// of the logits themselves. A weight e^{(l - max l) / t} is a whole number of units: sums of those are the
// same in any order, and always choose the same token.
//
// Top-k and top-p are both a search for a key: from the largest down, the first where the count, or the sum
// of the weights, reaches a number. It goes by the upper 11 bits of the keys, then the next 11, then the
// last 10, each time by what is in each of the 2048 bins.
#include "common.metal.h"

/// The first of the largest. NaN and negative infinity are never chosen; 0 when nothing else is there.
template <typename T>
[[kernel]] void sampling_greedy(device const T *logits [[buffer(0)]],
                                device uint *ids [[buffer(1)]],
                                constant uint &columns [[buffer(2)]], PLACE, SIMD_PLACE) {
    constexpr uint NOWHERE = 0xffffffffu;
    threadgroup float values[SIMDGROUPS];
    threadgroup uint places[SIMDGROUPS];
    logits += ulong(group.x) * columns;
    // A thread meets its logits in their order, so the first of equals stays.
    float value = -INFINITY;
    uint place = NOWHERE;
    for (uint i = own.x; i < columns; i += threads.x) {
        const float logit = float(logits[i]);
        if (logit > value) {
            value = logit;
            place = i;
        }
    }
    const float largest = simd_max(value);
    const uint first = simd_min(value == largest ? place : NOWHERE);
    if (lane == 0) {
        values[simdgroup] = largest;
        places[simdgroup] = first;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (own.x != 0) return;
    value = values[0];
    place = places[0];
    for (uint s = 1; s < simdgroups; s++) {
        if (values[s] > value || (values[s] == value && places[s] < place)) {
            value = values[s];
            place = places[s];
        }
    }
    ids[group.x] = place == NOWHERE ? 0 : place;
}

FOR_EACH_DTYPE(sampling_greedy)

namespace sampling {
constant constexpr uint NOWHERE = 0xffffffffu;
constant constexpr uint DIGIT = 11;
constant constexpr uint BINS = 1u << DIGIT;
constant constexpr uint DRAW_WORDS = 12;

/// A thread's place, and the memory that a threadgroup adds up in.
struct Group {
    uint own, threads, lane, simdgroup, simdgroups;
    /// One for each simdgroup.
    threadgroup ulong *parts;
};

/// 0 for what is never chosen: negative infinity and NaN.
inline uint key_of(float logit) {
    if (!(logit > -INFINITY)) return 0;
    // Both zeros are the same logit.
    const uint bits = logit == 0.0f ? 0 : as_type<uint>(logit);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float logit_of(uint key) {
    if (key == 0) return -INFINITY;
    return as_type<float>(key >> 31 ? key & 0x7fffffffu : ~key);
}

/// Id, and the bits of bias, penalty and what is subtracted.
inline float adjusted(float logit, uint4 adjustment) {
    float changed = logit + as_type<float>(adjustment.y);
    const float penalty = as_type<float>(adjustment.z);
    changed = changed < 0.0f ? changed * penalty : changed / penalty;
    changed -= as_type<float>(adjustment.w);
    return clamp(changed, -FLT_MAX, FLT_MAX);
}

/// What is to be drawn from.
struct Distribution {
    float largest, temperature, least, unit;

    ulong weight(uint key) const {
        return ulong(rint(exp((logit_of(key) - largest) / temperature) * unit));
    }
    /// The weight, unless min-p leaves it out.
    ulong likely_weight(uint key) const {
        const float x = (logit_of(key) - largest) / temperature;
        return x >= least ? ulong(rint(exp(x) * unit)) : 0;
    }
};

/// The upper half of the product.
inline ulong multiply_high(ulong a, ulong b) {
    const ulong half_of = 0xffffffff;
    const ulong low = (a & half_of) * (b & half_of);
    const ulong left = (a >> 32) * (b & half_of), right = (a & half_of) * (b >> 32);
    const ulong middle = (low >> 32) + (left & half_of) + (right & half_of);
    return (a >> 32) * (b >> 32) + (left >> 32) + (right >> 32) + (middle >> 32);
}

/// The sum over the lanes before this one, and over all in `total`, of numbers below 2^63. Lanes exchange
/// 32 bits at a time, of which a sum of 32 lanes takes 5 more than each of these parts.
inline ulong simd_scan(ulong value, thread ulong &total) {
    const ulong part = (1u << 21) - 1;
    const uint low = uint(value & part), middle = uint(value >> 21 & part), high = uint(value >> 42);
    total = ulong(simd_sum(low)) + (ulong(simd_sum(middle)) << 21) + (ulong(simd_sum(high)) << 42);
    return ulong(simd_prefix_exclusive_sum(low)) + (ulong(simd_prefix_exclusive_sum(middle)) << 21) +
           (ulong(simd_prefix_exclusive_sum(high)) << 42);
}

/// As `simd_scan`, over the threads of the threadgroup. All have to call it.
inline ulong group_scan(ulong value, Group group, thread ulong &total) {
    ulong of_simdgroup;
    ulong before = simd_scan(value, of_simdgroup);
    if (group.lane == 0) group.parts[group.simdgroup] = of_simdgroup;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    total = 0;
    for (uint s = 0; s < group.simdgroups; s++) {
        if (s < group.simdgroup) before += group.parts[s];
        total += group.parts[s];
    }
    // Before they are written again.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return before;
}

/// The largest number of any thread, in each of them.
inline uint group_largest(uint value, Group group) {
    const uint largest = simd_max(value);
    if (group.lane == 0) group.parts[group.simdgroup] = largest;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong found = 0;
    for (uint s = 0; s < group.simdgroups; s++) found = max(found, group.parts[s]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return uint(found);
}

/// How many keys are in each bin, and the halves of the sum of their weights.
struct Bins {
    threadgroup atomic_uint *counts;
    threadgroup atomic_uint *lows;
    threadgroup atomic_uint *highs;
};

/// Puts the keys into bins that begin with `prefix`, above the `shift + digit` lower bits.
inline void sort(device const uint *keys, uint count, uint prefix, uint shift, uint digit,
                 Distribution distribution, Bins bins, Group group) {
    for (uint bin = group.own; bin < BINS; bin += group.threads) {
        atomic_store_explicit(bins.counts + bin, 0u, memory_order_relaxed);
        atomic_store_explicit(bins.lows + bin, 0u, memory_order_relaxed);
        atomic_store_explicit(bins.highs + bin, 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = group.own; i < count; i += group.threads) {
        const uint key = keys[i];
        if (key == 0 || ulong(key) >> (shift + digit) != prefix) continue;
        const uint bin = key >> shift & ((1u << digit) - 1);
        atomic_fetch_add_explicit(bins.counts + bin, 1u, memory_order_relaxed);
        const ulong weight = distribution.weight(key);
        if (weight == 0) continue;
        const uint low = uint(weight);
        const uint before = atomic_fetch_add_explicit(bins.lows + bin, low, memory_order_relaxed);
        const uint high = uint(weight >> 32) + (before + low < before ? 1 : 0);
        if (high) atomic_fetch_add_explicit(bins.highs + bin, high, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

inline ulong count_in(Bins bins, uint bin) {
    return atomic_load_explicit(bins.counts + bin, memory_order_relaxed);
}

inline ulong mass_in(Bins bins, uint bin) {
    return ulong(atomic_load_explicit(bins.highs + bin, memory_order_relaxed)) << 32 |
           atomic_load_explicit(bins.lows + bin, memory_order_relaxed);
}

/// A bin, what lies above it, and what is in it.
struct Found {
    uint bin;
    ulong count_above, mass_above, mass;
};

/// Finds where the count or the mass reaches the target, counted from the upper end: in no bin when it
/// doesn't. `place` is memory for four numbers. The mass of all bins is in `total`.
inline Found find(Bins bins, bool by_mass, ulong target, thread ulong &total, threadgroup ulong *place,
                  Group group) {
    const uint stretch = (BINS + group.threads - 1) / group.threads;
    const uint first = min(BINS, group.own * stretch), last = min(BINS, first + stretch);
    ulong count = 0, mass = 0, unused;
    for (uint b = first; b < last; b++) {
        count += count_in(bins, BINS - 1 - b);
        mass += mass_in(bins, BINS - 1 - b);
    }
    if (group.own == 0) place[0] = NOWHERE;
    ulong count_above = group_scan(count, group, unused);
    ulong mass_above = group_scan(mass, group, total);
    for (uint b = first; b < last; b++) {
        const uint bin = BINS - 1 - b;
        const ulong above = by_mass ? mass_above : count_above;
        const ulong here = by_mass ? mass_in(bins, bin) : count_in(bins, bin);
        if (above < target && target <= above + here) {
            place[0] = bin;
            place[1] = count_above;
            place[2] = mass_above;
            place[3] = mass_in(bins, bin);
        }
        count_above += count_in(bins, bin);
        mass_above += mass_in(bins, bin);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Found found = {uint(place[0]), 0, 0, 0};
    if (found.bin != NOWHERE) found = {found.bin, place[1], place[2], place[3]};
    // Before this is written again, and the bins.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return found;
}

/// Keys above `key` are kept, and the first `ties` of those that are equal to it.
struct Threshold {
    uint key;
    ulong ties;
    /// The weight of what is kept, but for ties that are left out.
    ulong mass;
};

/// The key where the count or the mass reaches the target; 0 when it doesn't. `ties` is how much of the
/// target is left for keys equal to it.
inline Threshold search(device const uint *keys, uint count, bool by_mass, ulong target,
                        Distribution distribution, Bins bins, threadgroup ulong *place, Group group) {
    ulong total, unused;
    sort(keys, count, 0, 21, DIGIT, distribution, bins, group);
    Found found = find(bins, by_mass, target, total, place, group);
    if (found.bin == NOWHERE) return {0, 0, total};
    ulong mass = found.mass_above;
    target -= by_mass ? found.mass_above : found.count_above;
    uint prefix = found.bin;
    sort(keys, count, prefix, 10, DIGIT, distribution, bins, group);
    found = find(bins, by_mass, target, unused, place, group);
    mass += found.mass_above;
    target -= by_mass ? found.mass_above : found.count_above;
    prefix = prefix << DIGIT | found.bin;
    sort(keys, count, prefix, 0, 10, distribution, bins, group);
    found = find(bins, by_mass, target, unused, place, group);
    mass += found.mass_above + found.mass;
    target -= by_mass ? found.mass_above : found.count_above;
    return {prefix << 10 | found.bin, target, mass};
}

/// How many of the keys equal to the threshold are kept of `ties` that come after `before` others.
inline ulong kept_ties(Threshold threshold, ulong before, ulong ties) {
    return threshold.ties > before ? min(threshold.ties - before, ties) : 0;
}
} // namespace sampling

/// Chooses a token of each row. `words` and `result` are as `draw_words` and `Readout` in `gpu.rs` say, with
/// the numbers of a draw: the temperature, the logarithm of min-p, two that mean nothing, and top-p and the random
/// number in units of 2^-64, top-p as 0 when it is off. `unit` is the weight of the likeliest.
template <typename T>
[[kernel]] void sampling_choose(device const T *logits [[buffer(0)]],
                                device const uint *words [[buffer(1)]],
                                device uint *keys [[buffer(2)]], device uint *result [[buffer(3)]],
                                constant uint &vocabulary [[buffer(4)]],
                                constant uint &adjustments_at [[buffer(5)]],
                                constant float &unit [[buffer(6)]], PLACE, SIMD_PLACE) {
    using namespace sampling;
    threadgroup ulong parts[SIMDGROUPS];
    threadgroup ulong place[4];
    threadgroup atomic_uint counts[BINS];
    threadgroup atomic_uint lows[BINS];
    threadgroup atomic_uint highs[BINS];
    const Group company = {own.x, threads.x, lane, simdgroup, simdgroups, parts};
    const Bins bins = {counts, lows, highs};
    device const uint *draw = words + DRAW_WORDS * group.x;
    const uint top_k = draw[1], adjustment_count = draw[3];
    device const uint *adjustments = words + adjustments_at + 4 * draw[2];
    const float temperature = as_type<float>(draw[4]), least = as_type<float>(draw[5]);
    const ulong top_p = draw[8] | ulong(draw[9]) << 32, uniform = draw[10] | ulong(draw[11]) << 32;
    logits += ulong(group.x) * vocabulary;
    keys += ulong(group.x) * vocabulary;
    result += 8 * group.x;
    const mem_flags everywhere = mem_flags::mem_device | mem_flags::mem_threadgroup;

    uint key_of_largest = 0, offender = NOWHERE;
    for (uint i = own.x; i < vocabulary; i += threads.x) {
        const float logit = float(logits[i]);
        if (!(logit < INFINITY)) offender = min(offender, i);
        const uint key = key_of(logit);
        key_of_largest = max(key_of_largest, key);
        keys[i] = key;
    }
    threadgroup_barrier(everywhere);
    for (uint a = own.x; a < adjustment_count; a += threads.x) {
        device const uint *of = adjustments + 4 * a;
        const uint4 adjustment = uint4(of[0], of[1], of[2], of[3]);
        const uint key = keys[adjustment.x];
        if (key != 0) keys[adjustment.x] = key_of(adjusted(logit_of(key), adjustment));
    }
    threadgroup_barrier(everywhere);
    // A thread meets keys in their order, so the first of equals stays.
    uint best = 0, best_place = NOWHERE;
    for (uint i = own.x; i < vocabulary; i += threads.x) {
        if (keys[i] > best) {
            best = keys[i];
            best_place = i;
        }
    }
    const uint own_best = best;
    best = group_largest(best, company);
    best_place = ~group_largest(own_best == best ? ~best_place : 0, company);
    key_of_largest = group_largest(key_of_largest, company);
    offender = ~group_largest(~offender, company);
    const float largest = logit_of(key_of_largest);
    if (offender != NOWHERE || key_of_largest == 0) {
        if (own.x == 0) {
            const float offending = offender != NOWHERE ? float(logits[offender]) : 0.0f;
            result[0] = 0;
            result[2] = as_type<uint>(largest);
            result[3] = offender;
            result[4] = as_type<uint>(offending);
        }
        return;
    }
    ulong raw = 0, raw_sum;
    for (uint i = own.x; i < vocabulary; i += threads.x)
        raw += ulong(rint(exp(float(logits[i]) - largest) * unit));
    group_scan(raw, company, raw_sum);
    if (own.x == 0) {
        if (temperature == 0.0f) {
            result[0] = best_place;
            result[1] = as_type<uint>(float(logits[best_place]));
        }
        result[2] = as_type<uint>(largest);
        result[3] = NOWHERE;
        result[6] = uint(raw_sum);
        result[7] = uint(raw_sum >> 32);
    }
    if (temperature == 0.0f) return;

    const Distribution distribution = {logit_of(best), temperature, least, unit};
    Threshold threshold = {0, 0, 0};
    if (top_k > 0) {
        threshold = search(keys, vocabulary, false, top_k, distribution, bins, place, company);
        threshold.ties = ulong(0) - 1;
    }
    if (top_p > 0) {
        if (top_k == 0) {
            ulong mass = 0;
            for (uint i = own.x; i < vocabulary; i += threads.x)
                mass += keys[i] ? distribution.weight(keys[i]) : 0;
            group_scan(mass, company, threshold.mass);
        }
        // A little less, so that what reaches the share but for a rounding counts as reaching it.
        const ulong share = multiply_high(top_p, threshold.mass - (threshold.mass >> 44)) + 1;
        threshold = search(keys, vocabulary, true, share, distribution, bins, place, company);
        const ulong weight = distribution.weight(threshold.key);
        threshold.ties = (threshold.ties + weight - 1) / weight;
    }
    const ulong weight_of_tie = threshold.key ? distribution.likely_weight(threshold.key) : 0;

    // Every simdgroup has a stretch of the vocabulary, as the order of the ids counts.
    const uint lanes = simd_sum(1u);
    const uint stretch = (vocabulary + simdgroups - 1) / simdgroups;
    const uint first = min(vocabulary, simdgroup * stretch);
    const uint last = min(vocabulary, first + stretch);
    ulong mass = 0, ties = 0, unused;
    for (uint i = first + lane; i < last; i += lanes) {
        const uint key = keys[i];
        if (key > threshold.key) mass += distribution.likely_weight(key);
        ties += key == threshold.key;
    }
    simd_scan(mass, mass);
    simd_scan(ties, ties);
    ulong rank = group_scan(lane == 0 ? ties : 0, company, unused);
    // The other lanes count their first one as well.
    rank = lane == 0 ? rank : rank - ties;
    mass += kept_ties(threshold, rank, ties) * weight_of_tie;
    ulong total;
    ulong reached = group_scan(lane == 0 ? mass : 0, company, total);
    reached = lane == 0 ? reached : reached - mass;
    const ulong target = multiply_high(uniform, total);
    if (target < reached || target >= reached + mass) return;
    for (uint start = first; start < last && reached <= target; start += lanes) {
        const uint i = start + lane;
        const uint key = i < last ? keys[i] : 0;
        ulong ties_here, mass_here;
        const bool tie = i < last && key == threshold.key;
        const ulong before = rank + simd_scan(tie ? 1 : 0, ties_here);
        ulong weight = 0;
        if (key > threshold.key)
            weight = distribution.likely_weight(key);
        else if (tie && before < threshold.ties)
            weight = weight_of_tie;
        const ulong below = reached + simd_scan(weight, mass_here);
        if (below <= target && target < below + weight) {
            result[0] = i;
            result[1] = as_type<uint>(float(logits[i]));
        }
        rank += ties_here;
        reached += mass_here;
    }
}

FOR_EACH_DTYPE(sampling_choose)
