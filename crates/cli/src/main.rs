//! The `metal-candle` command.
fn main() {}
