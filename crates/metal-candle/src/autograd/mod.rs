//! The tape: reverse-mode differentiation made for a frozen base model.
//!
//! A value that no parameter feeds has no node on it, so a frozen tensor never gets a
//! gradient, neither computed nor allocated. Gradients move from a node to its inputs; where two
//! meet they are added, nothing is zero-filled first, and both a node's saved tensors and its
//! gradient are dropped as soon as the node has run. A segment can be recomputed in the backward
//! pass instead of stored ([`Tape::segment`]), and what is stored may wait in the memory of the host
//! ([`Tape::with_offload`]).

mod ops;
mod saved;
mod tape;
#[cfg(test)]
mod tests;

pub use ops::{ExpertValues, HeadValues, LoraValues, Loss, Matrix, NormValues, ProjectionValues};
pub use tape::{GradientSink, Parameter, ParameterId, Segment, TableGradient, Tape, Value};
