//! The order of the rows of queries and keys.
//!
//! A rope rotates pairs of a head's elements. transformers pairs `i` with `i + d/2`; llama.cpp's code for some
//! architectures pairs `2i` with `2i + 1`, so a file for them has the rows of each head in another order: its
//! row `2i + s` is our row `i + s · d/2`. Rows move as a whole, so quantised ones can too.

/// Rows of `row_bytes` bytes each, of `heads` heads, in llama.cpp's order.
pub(super) fn interleave(bytes: &[u8], row_bytes: usize, heads: usize) -> Option<Vec<u8>> {
    permute_rows(bytes, row_bytes, heads, |pair, side, half| pair + side * half)
}

/// The other way: rows in llama.cpp's order, in ours.
pub(super) fn deinterleave(bytes: &[u8], row_bytes: usize, heads: usize) -> Option<Vec<u8>> {
    // Written to place `pair + side · half`: seen from there, place `p` takes row `2 (p mod half) + p / half`.
    permute_rows(bytes, row_bytes, heads, |pair, side, half| {
        let place = 2 * pair + side;
        2 * (place % half) + place / half
    })
}

/// Row `2 · pair + side` of each head's result is row `source(pair, side, half)` of that head. `None` when the bytes
/// are no whole number of pairs of rows for each head.
fn permute_rows(
    bytes: &[u8],
    row_bytes: usize,
    heads: usize,
    source: impl Fn(usize, usize, usize) -> usize,
) -> Option<Vec<u8>> {
    let pair_bytes = heads.checked_mul(row_bytes)?.checked_mul(2)?;
    if pair_bytes == 0 || !bytes.len().is_multiple_of(pair_bytes) {
        return None;
    }
    let half = bytes.len() / pair_bytes;
    if half == 0 {
        return Some(Vec::new());
    }
    let mut permuted = Vec::with_capacity(bytes.len());
    for head in bytes.chunks_exact(2 * half * row_bytes) {
        for place in 0..2 * half {
            let row = source(place / 2, place % 2, half);
            permuted.extend_from_slice(head.get(row * row_bytes..(row + 1) * row_bytes)?);
        }
    }
    Some(permuted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_halves_become_neighbours_and_come_back() {
        // Two heads of six rows of two bytes.
        let ours: Vec<u8> = (0..24).collect();
        let theirs = interleave(&ours, 2, 2).unwrap();
        let rows: Vec<u8> = theirs.chunks(2).map(|row| row[0] / 2).collect();
        assert_eq!(rows, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
        assert_eq!(deinterleave(&theirs, 2, 2).unwrap(), ours);
        for (length, row_bytes, heads) in
            [(24, 5, 2), (24, 2, 5), (24, 0, 2), (24, 2, 0), (6, 2, 1)]
        {
            assert_eq!(interleave(&ours[..length], row_bytes, heads), None);
        }
        assert_eq!(interleave(&[], 2, 2), Some(vec![]));
    }
}
