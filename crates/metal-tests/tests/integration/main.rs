//! Metal's kernels one by one, and a whole model on Metal: on x86-64 Linux in the emulator, and with the feature
//! `metal` on a Mac's GPU, which has tests of its kernels in `metal-candle-kernels`. Without that feature a Mac has none
//! of them.

#![cfg(any(not(target_vendor = "apple"), feature = "metal"))]

#[cfg(not(feature = "metal"))]
mod kernels;
mod model;
