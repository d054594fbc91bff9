//! The hash by which a resumed run knows its data and its base: XXH3 with 64 bits
//! (<https://github.com/Cyan4973/xxHash>), which is as fast as memory. It tells what was changed from
//! what was not; it is no proof against somebody who wants two contents to have one hash.

use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// Takes bytes and gives their hash.
pub(crate) struct Hash(XxHash3_64);

impl Hash {
    pub fn new() -> Self {
        Self(XxHash3_64::new())
    }

    pub fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub fn finish(self) -> u64 {
        self.0.finish()
    }
}

#[cfg(test)]
mod tests {
    /// Those of xxHash 0.8.4.
    #[test]
    fn the_hash_is_that_of_the_reference() {
        let hash = |parts: &[&[u8]]| {
            let mut hash = super::Hash::new();
            parts.iter().for_each(|part| hash.add(part));
            hash.finish()
        };
        assert_eq!(hash(&[]), 0x2d06_8005_38d3_94c2);
        assert_eq!(hash(&[b"foo", b"bar"]), 0xd78f_da63_144c_5c84);
        let long: Vec<u8> = (0..1000u32).map(|value| (value % 251) as u8).collect();
        assert_eq!(hash(&[&long[..333], &long[333..]]), 0x33ef_703f_b2b2_0ed1);
    }
}
