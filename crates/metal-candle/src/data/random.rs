//! The random numbers that order the data: SplitMix64, the same on every platform.
//!
//! `state += 0x9e3779b97f4a7c15`, and the output is the state through a bijection of two xor-shift-multiplies
//! (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). The n-th number is a
//! function of the seed and n alone, so nothing has to be stored to go on from a place in an epoch.

/// A SplitMix64 generator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitMix64 {
    state: u64,
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

impl SplitMix64 {
    /// A generator from a seed.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// One of the independent streams of a seed, such as one per epoch.
    pub fn stream(seed: u64, stream: u64) -> Self {
        Self {
            state: mix(seed.wrapping_add(STEP)) ^ mix(stream.wrapping_mul(STEP).wrapping_add(1)),
        }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(STEP);
        mix(self.state)
    }

    /// A whole number in `0..bound`, each equally likely; 0 when the bound is 0 (Lemire's multiply with rejection).
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        let least = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            // The low half tells whether this draw belongs to the part of the range that would be hit too often.
            if product as u64 >= least {
                return (product >> 64) as u64;
            }
        }
    }

    /// Brings a list into random order, each order equally likely (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_reference_implementation() {
        // The first outputs of the public-domain splitmix64.c for the state 1234567.
        let mut random = SplitMix64::new(1_234_567);
        let numbers: Vec<u64> = (0..5).map(|_| random.next_u64()).collect();
        assert_eq!(
            numbers,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821
            ]
        );
    }

    #[test]
    fn below_is_even_and_shuffle_keeps_every_item() {
        let mut random = SplitMix64::stream(3, 1);
        let mut counts = [0_u32; 6];
        for _ in 0..60_000 {
            counts[random.below(6) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (9_600..10_400).contains(count)), "{counts:?}");
        let mut items: Vec<u32> = (0..1000).collect();
        random.shuffle(&mut items);
        assert_ne!(items, (0..1000).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
    }
}
