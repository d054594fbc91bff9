//! Buffers that are kept for the next result of about their size.
//!
//! Candle's own pool rounds sizes up to powers of two, gives a small tensor any larger buffer that is free,
//! drops all that is free whenever a number is read back, and else nothing: a loop that reads nothing back
//! grows, one that reads every step allocates everything anew. Here a buffer is at most an eighth larger
//! than what was asked for when it was made, goes to nothing less than half its size, and is dropped when
//! two rounds of a loop had no use for it.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The buffers made so far that weren't dropped. One that nobody else holds is free: work that is encoded
/// later comes later on the device, so a buffer may be given out again while the work with it is under way.
pub(super) struct Pool<B> {
    by_size: BTreeMap<usize, Vec<Kept<B>>>,
    round: u64,
}

struct Kept<B> {
    buffer: Arc<B>,
    /// When it was given out last.
    round: u64,
}

impl<B> Kept<B> {
    fn is_free(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1
    }
}

/// The size of the buffer that so many bytes get.
pub(super) fn buffer_size(bytes: usize) -> usize {
    const SMALLEST: usize = 256;
    bytes.max(1).next_multiple_of((bytes.next_power_of_two() / 16).max(SMALLEST))
}

/// Bytes that can still be taken of those that the system recommends to take at most; the process may have taken more.
pub(super) fn room(most: usize, taken: usize) -> u64 {
    most.saturating_sub(taken) as u64
}

impl<B> Pool<B> {
    pub(super) const fn new() -> Self {
        Pool { by_size: BTreeMap::new(), round: 0 }
    }

    /// A free buffer for so many bytes, of those the smallest.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Arc<B>> {
        let (size, round) = (buffer_size(bytes), self.round);
        let fitting = self.by_size.range_mut(size..=2 * size);
        let kept = fitting.flat_map(|(_, kept)| kept).find(|kept| kept.is_free())?;
        kept.round = round;
        Some(kept.buffer.clone())
    }

    /// Keeps a new buffer, made for what `take` had nothing for.
    pub(super) fn keep(&mut self, bytes: usize, buffer: &Arc<B>) {
        let kept = Kept { buffer: buffer.clone(), round: self.round };
        self.by_size.entry(buffer_size(bytes)).or_default().push(kept);
    }

    /// Ends a round; the free buffers that were given out neither in it nor in the one before.
    pub(super) fn end_round(&mut self) -> Vec<Arc<B>> {
        let ended = self.round;
        self.round += 1;
        self.remove(|kept| kept.is_free() && kept.round + 1 < ended)
    }

    /// All that is free.
    pub(super) fn remove_free(&mut self) -> Vec<Arc<B>> {
        self.remove(Kept::is_free)
    }

    fn remove(&mut self, goes: impl Fn(&Kept<B>) -> bool) -> Vec<Arc<B>> {
        let mut gone = Vec::new();
        for kept in self.by_size.values_mut() {
            gone.extend(kept.extract_if(.., |kept| goes(kept)).map(|kept| kept.buffer));
        }
        self.by_size.retain(|_, kept| !kept.is_empty());
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(pool: &mut Pool<usize>, bytes: usize) -> Arc<usize> {
        assert!(pool.take(bytes).is_none());
        let buffer = Arc::new(buffer_size(bytes));
        pool.keep(bytes, &buffer);
        buffer
    }

    #[test]
    fn buffers_are_little_larger_than_what_they_hold() {
        for bytes in (0..100_000).chain([1 << 30, (1 << 30) + 1, 3 << 29, (1 << 31) - 1]) {
            let size = buffer_size(bytes);
            assert!(size >= bytes && size.is_multiple_of(256));
            assert!(size <= bytes + bytes / 8 + 256, "{bytes}: {size}");
            assert_eq!(buffer_size(size), size);
        }
    }

    #[test]
    fn what_is_taken_leaves_the_rest_and_never_less_than_nothing() {
        assert_eq!(room(96 << 30, 16 << 30), 80 << 30);
        assert_eq!(room(8 << 30, 8 << 30), 0);
        assert_eq!(room(8 << 30, 9 << 30), 0);
    }

    #[test]
    fn what_nobody_holds_is_given_out_again() {
        let mut pool = Pool::new();
        let large = make(&mut pool, 10_000);
        let larger = make(&mut pool, 15_000);
        drop(larger);
        // Free, but too large for 1000 bytes.
        let small = make(&mut pool, 1000);
        assert_eq!(pool.take(9_900).as_deref(), Some(&buffer_size(15_000)));
        drop(large);
        let again = pool.take(9_900);
        assert_eq!(again.as_deref(), Some(&buffer_size(10_000)));
        assert_eq!(pool.take(9_900).as_deref(), Some(&buffer_size(15_000)));
        drop(small);
        assert!(pool.take(1000).is_some());
    }

    #[test]
    fn what_two_rounds_have_no_use_for_goes() {
        let mut pool = Pool::new();
        let held = make(&mut pool, 5000);
        for bytes in [1000, 20_000] {
            drop(make(&mut pool, bytes));
        }
        for _ in 0..5 {
            assert!(pool.end_round().iter().all(|gone| **gone == buffer_size(20_000)));
            assert!(pool.take(1000).is_some());
        }
        assert!(pool.take(20_000).is_none());
        // What is held isn't free, and goes at the end of the round in which it comes free.
        drop(held);
        assert_eq!(pool.end_round(), [Arc::new(buffer_size(5000))]);
        assert_eq!(pool.remove_free(), [Arc::new(buffer_size(1000))]);
        assert!(pool.by_size.is_empty());
    }

    /// Batches of ever other lengths, as in training without packing.
    #[test]
    fn what_is_kept_stays_within_what_three_rounds_need() {
        let mut pool = Pool::new();
        let mut made: usize = 0;
        let mut needs = Vec::new();
        for round in 0..200usize {
            let length = 1000 + round * 7919 % 5000;
            let mut held = Vec::new();
            for layer in 0..8 {
                let bytes = length * (1 + layer % 3);
                held.push(pool.take(bytes).unwrap_or_else(|| {
                    made += buffer_size(bytes);
                    let buffer = Arc::new(buffer_size(bytes));
                    pool.keep(bytes, &buffer);
                    buffer
                }));
            }
            needs.push(held.iter().map(|buffer| **buffer).sum::<usize>());
            let most: usize = needs.iter().rev().take(3).sum();
            assert!(made <= most, "round {round}: {made} bytes, {most} needed");
            drop(held);
            made -= pool.end_round().iter().map(|gone| **gone).sum::<usize>();
        }
    }
}
