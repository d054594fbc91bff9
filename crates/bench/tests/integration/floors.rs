//! The table in docs/metal.md is the one that is computed.

use metal_candle_bench::chips;

#[test]
fn the_document_has_the_floors_that_are_computed() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metal.md");
    let document = std::fs::read_to_string(path).unwrap();
    let table = chips::floors().unwrap();
    assert!(document.contains(&table), "docs/metal.md: expected this table\n{table}");
}
