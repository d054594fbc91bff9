//! Working memory that a thread keeps from one operation to the next, so that a training step in its
//! steady state allocates none. It stays with the thread that drops it, so who takes it drops it: buffers that wander to
//! another thread are missed on the one and never used on the other.

use crate::unwritten::{Plain, spoil, unwritten};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Bytes that a thread keeps at most; what is beyond goes back to the system.
const KEPT_BYTES: usize = 256 << 20;
/// Buffers that a thread keeps at most.
const KEPT: usize = 64;

/// One cache line, which is also what vector and tile loads like to be aligned to.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

// SAFETY: they are bytes.
unsafe impl Plain for Line {}

/// What a thread keeps.
#[derive(Default)]
struct Buffers {
    by_size: Vec<Vec<Line>>,
    /// Of all of them.
    bytes: usize,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = const { RefCell::new(Buffers { by_size: Vec::new(), bytes: 0 }) };
}

impl Buffers {
    /// The smallest that is large enough.
    fn take(&mut self, lines: usize) -> Option<Vec<Line>> {
        let index = self.by_size.partition_point(|kept| kept.len() < lines);
        (index < self.by_size.len()).then(|| self.remove(index))
    }

    fn remove(&mut self, index: usize) -> Vec<Line> {
        let lines = self.by_size.remove(index);
        self.bytes -= size_of_val(&lines[..]);
        lines
    }

    fn keep(&mut self, lines: Vec<Line>) {
        self.bytes += size_of_val(&lines[..]);
        let index = self.by_size.partition_point(|kept| kept.len() < lines.len());
        self.by_size.insert(index, lines);
        while self.by_size.len() > KEPT {
            self.remove(0);
        }
        while self.bytes > KEPT_BYTES {
            self.remove(self.by_size.len() - 1);
        }
    }
}

/// Gives back what this thread keeps.
pub fn give_back() {
    BUFFERS.take();
}

/// How many buffers this thread keeps.
pub fn kept() -> usize {
    BUFFERS.with_borrow(|buffers| buffers.by_size.len())
}

/// Numbers in working memory, aligned to 64 bytes, with whatever was left there: see [`unwritten`].
pub struct Scratch<A> {
    lines: Vec<Line>,
    count: usize,
    element: PhantomData<A>,
}

impl<A: Plain> Scratch<A> {
    /// Of so many numbers.
    pub fn new(count: usize) -> Self {
        let needed = (count * size_of::<A>()).div_ceil(64);
        let kept = BUFFERS.with_borrow_mut(|buffers| buffers.take(needed));
        let lines = kept.unwrap_or_else(|| unwritten(needed));
        let mut scratch = Scratch { lines, count, element: PhantomData };
        spoil(&mut scratch);
        scratch
    }
}

impl<A: Plain + Default> Scratch<A> {
    /// With zeros.
    pub fn zeros(count: usize) -> Self {
        let mut scratch = Self::new(count);
        scratch.fill(A::default());
        scratch
    }
}

impl<A> Deref for Scratch<A> {
    type Target = [A];
    fn deref(&self) -> &[A] {
        // SAFETY: the lines hold `count` numbers, for which any bits are a value, and have values.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.count) }
    }
}

impl<A> DerefMut for Scratch<A> {
    fn deref_mut(&mut self) -> &mut [A] {
        // SAFETY: as in `deref`, and the lines are borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.count) }
    }
}

impl<A> Drop for Scratch<A> {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        // At the end of a thread there may be nowhere to keep it.
        let _ = BUFFERS.try_with(|buffers| buffers.borrow_mut().keep(lines));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_used_again() {
        let first = Scratch::<f32>::new(1000);
        let address = first.as_ptr();
        assert!(address.align_offset(64) == 0 && first.len() == 1000);
        drop(first);
        let larger = Scratch::<f64>::new(1_000_000);
        let again = Scratch::<f32>::new(900);
        assert_eq!(again.as_ptr(), address);
        drop((larger, again));
        assert_eq!(kept(), 2);
        give_back();
        assert_eq!(kept(), 0);
        assert!(Scratch::<f32>::zeros(1000).iter().all(|number| *number == 0.0));
    }
}
