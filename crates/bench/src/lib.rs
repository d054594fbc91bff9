//! The work that metal-candle is timed with: what each row computes, from which inputs, how many
//! bytes and operations it takes at least ([`rows`]), the calls themselves ([`operations`],
//! [`model`]), how they are timed ([`timing`]), what the machine could do at best ([`machine`]), what
//! Apple's chips could ([`chips`]), and all of it put together ([`report`]).
//!
//! `metal-candle bench` runs it alone, `benches/peers` beside other programs that do the same work.

pub mod chips;
pub mod machine;
pub mod model;
pub mod operations;
pub mod report;
pub mod rows;
pub mod shapes;
pub mod timing;

pub use rows::{Row, Work};
pub use timing::Workload;
