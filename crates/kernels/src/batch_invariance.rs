//! Results for a row that don't depend on the other rows of a batch, how many there are, or where it stands among them
//! ("batch invariance", He et al. 2025, <https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/>).
//!
//! Operations choose their kernels, and how a sum is cut, by the number of rows, for speed; so a row's bits differ with
//! it by roundings. [`within`] makes them choose as if there were always as many:
//!
//! - linear layers ([`matmul::linear`](crate::matmul::linear), [`lora_linear`](crate::lora_linear)): Hopper has kernels
//!   for bf16 and f16 whose sums have one order for any number of rows; other GPUs and f32 get rows by groups of one size,
//!   the last filled up; the CPU uses the products for many rows, which give a row the same bits beside any number of
//!   others. An adapter's part is computed as for rows that have different ones;
//! - norms and softmax on CUDA: a row has as many threads beside few others as beside many;
//! - attention over pools ([`attention::Sequences`](crate::attention::Sequences)) gives the same bits for any number of a
//!   sequence's queries, so a prompt does in pieces of any size, as it always does on CUDA.
//!   [`attention::forward`](crate::attention::forward), as training has it, gives these, too, where a sequence begins with its
//!   row, but for what it says itself.
//!
//! What has one row's work in one place anyway is as ever: embeddings, rotations, units, [`lora_rows`](crate::lora_rows),
//! and the choice of tokens. Backward passes aren't made for it, and work with what such a forward pass gives.

use std::cell::Cell;

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
}

/// Whether operations that this thread calls are to be so.
pub fn is_on() -> bool {
    IS_ON.get()
}

/// What `work` gives, with batch invariance switched on or off for the operations that it calls on this thread.
pub fn within<R>(is_on: bool, work: impl FnOnce() -> R) -> R {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            IS_ON.set(self.0);
        }
    }
    let _before = Before(IS_ON.replace(is_on));
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_with_the_work_that_also_may_panic() {
        assert!(within(true, || is_on() && !within(false, is_on) && is_on()));
        let panicked = std::panic::catch_unwind(|| within(true, || panic!("of a test")));
        assert!(panicked.is_err() && !is_on());
    }
}
