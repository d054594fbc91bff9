//! What the kernels of `metal-candle-kernels` for CPUs are made of, on slices: a part of it, in a crate of its own as it knows
//! nothing of tensors, so that it is compiled beside Candle, and once for all features. It promises no interface to others.
//!
//! | Module | What it has |
//! |---|---|
//! | [`simd`] | the instruction set that is computed with |
//! | [`unwritten`] | memory that isn't cleared |
//! | [`scratch`] | working memory that a thread keeps |
//! | [`few_rows`] | what products of a few rows have in common |
//! | [`floats`] | conversions of numbers of 16 bits |
//! | [`quantized`] | matrices in fewer bits: their numbers, and products of a few rows with them |
//! | [`vectors`] | vectors in f64: orthonormal ones, eigenvectors |

// What its parts are is said in `metal-candle-kernels`, where operations are documented.
#![allow(missing_docs)]

pub mod few_rows;
pub mod floats;
pub mod quantized;
pub mod scratch;
pub mod simd;
pub mod unwritten;
pub mod vectors;
