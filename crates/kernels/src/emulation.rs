//! For tests on machines without Metal: the operations as a Metal device computes them, on tensors of the
//! CPU, with kernels that somebody else runs. The feature `metal-emulation` is for nothing else; with the
//! feature `metal`, whose devices are real, this module isn't there.

pub use crate::backend::metal::{Bound, Constant, Emulator, Launch, Run, emulate};

/// The text of all kernels, as a Metal device compiles it.
pub fn source() -> String {
    crate::backend::metal::source()
}
