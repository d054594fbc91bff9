//! Working memory that a thread keeps from one operation to the next, so that a training step in its
//! steady state allocates none.

use super::element::Real;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Bytes of the largest buffer that is kept; larger ones go back to the system.
const LARGEST_KEPT: usize = 64 << 20;
/// Buffers that a thread keeps at most.
const KEPT: usize = 8;

/// One cache line, which is also what vector and tile loads like to be aligned to.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

thread_local! {
    static BUFFERS: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// Numbers in working memory, aligned to 64 bytes, with whatever was left there.
pub(crate) struct Scratch<A> {
    lines: Vec<Line>,
    count: usize,
    element: PhantomData<A>,
}

impl<A: Real> Scratch<A> {
    pub(crate) fn new(count: usize) -> Self {
        let needed = (count * size_of::<A>()).div_ceil(64);
        let mut lines = BUFFERS.with_borrow_mut(|buffers| {
            let fits = buffers.iter().position(|lines| lines.len() >= needed);
            let index = fits.or_else(|| buffers.len().checked_sub(1));
            index.map_or_else(Vec::new, |index| buffers.swap_remove(index))
        });
        if lines.len() < needed {
            lines = vec![Line { _bytes: [0; 64] }; needed];
        }
        Scratch { lines, count, element: PhantomData }
    }

    pub(crate) fn zeros(count: usize) -> Self {
        let mut scratch = Self::new(count);
        scratch.fill(A::ZERO);
        scratch
    }
}

impl<A> Deref for Scratch<A> {
    type Target = [A];
    fn deref(&self) -> &[A] {
        // SAFETY: the lines hold `count` numbers, and every bit pattern is one.
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
        if lines.len() * size_of::<Line>() <= LARGEST_KEPT {
            // At the end of a thread there may be nowhere to keep it.
            let _ = BUFFERS.try_with(|buffers| {
                let mut buffers = buffers.borrow_mut();
                if buffers.len() < KEPT {
                    buffers.push(lines);
                }
            });
        }
    }
}
