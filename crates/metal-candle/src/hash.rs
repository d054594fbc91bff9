//! The hash by which a resumed run knows its data and its base: XXH3 with 64 bits
//! (<https://github.com/Cyan4973/xxHash>), which is as fast as memory. It tells what was changed from
//! what was not; it is no proof against somebody who wants two contents to have one hash.

use crate::{Error, Result};
use rayon::prelude::*;
use std::fs::File;
use std::hash::Hasher;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use twox_hash::XxHash3_64;

/// What one thread hashes at a time; part of the definition of the hash.
const PIECE: u64 = 64 << 20;

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

/// The hash of the hashes of the pieces of a file of so many bytes, which threads read side by side.
pub(crate) fn of_file(path: &Path, size: u64) -> Result<String> {
    let of_piece = |piece: u64| -> std::io::Result<u64> {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(piece * PIECE))?;
        let mut hash = Hash::new();
        let mut left = file.take(PIECE);
        let mut buffer = vec![0; 1 << 20];
        loop {
            match left.read(&mut buffer)? {
                0 => return Ok(hash.finish()),
                read => hash.add(buffer.get(..read).unwrap_or_default()),
            }
        }
    };
    let pieces: Vec<u64> = (0..size.div_ceil(PIECE))
        .into_par_iter()
        .map(of_piece)
        .collect::<std::io::Result<_>>()
        .map_err(Error::io(path))?;
    let mut hash = Hash::new();
    for piece in pieces {
        hash.add(&piece.to_le_bytes());
    }
    Ok(format!("{:016x}", hash.finish()))
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
