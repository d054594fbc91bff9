//! What Apple's chips need at least for the rows that the project began with, by the memory bandwidth
//! that Apple publishes: for machines that nobody has measured yet.
//!
//! ```text
//! floor = bytes / bandwidth         bytes: every input read once, every result written once
//! ```
//!
//! Arithmetic doesn't count: these rows need half an operation a byte, and every one of the chips does
//! more than that.

use crate::Row;
use crate::rows::{Pass, Precision};
use metal_candle::Result;
use std::fmt::Write;

/// Bytes a second from memory, in 10⁹, and the chips that have it. Where a chip comes with two, the
/// number of its GPU's cores tells which.
pub const BANDWIDTHS: [(f64, &str); 12] = [
    (68.25, "M1"),
    (100.0, "M2, M3"),
    (120.0, "M4"),
    (150.0, "M3 Pro"),
    (200.0, "M1 Pro, M2 Pro"),
    (273.0, "M4 Pro"),
    (300.0, "M3 Max, 30 cores"),
    (400.0, "M1 Max, M2 Max, M3 Max with 40 cores"),
    (410.0, "M4 Max, 32 cores"),
    (546.0, "M4 Max, 40 cores"),
    (800.0, "M1 Ultra, M2 Ultra"),
    (819.0, "M3 Ultra"),
];

/// The rows, and how the table names them.
fn rows() -> Vec<(&'static str, Row)> {
    let lora = |hidden, rank| Row::lora(1, hidden, rank, Pass::Forward);
    let shape = [4, 16, 1024];
    vec![
        ("LoRA 512, rank 8", lora(512, 8)),
        ("1024, rank 8", lora(1024, 8)),
        ("2048, rank 8", lora(2048, 8)),
        ("1024, rank 4", lora(1024, 4)),
        ("rank 16", lora(1024, 16)),
        ("rank 32", lora(1024, 32)),
        ("rank 64", lora(1024, 64)),
        ("softmax", Row::softmax(&shape, Pass::Forward, Precision::F32)),
        ("layer norm", Row::layer_norm(&shape, Pass::Forward, Precision::F32)),
        ("RMS norm", Row::rms_norm(&shape, Pass::Forward, Precision::F32)),
    ]
}

/// The table as Markdown: a line of bytes, one of operations, and one of microseconds for each bandwidth.
///
/// # Errors
/// Like [`Work::cost`](crate::Work::cost).
pub fn floors() -> Result<String> {
    let mut costs = Vec::new();
    let mut table = String::from("| |");
    for (title, row) in rows() {
        costs.push(row.work.cost()?);
        let _ = write!(table, " {title} |");
    }
    table.push_str("\n|---|");
    table.push_str(&"---:|".repeat(costs.len()));
    let mut line = |title: &str, cells: Vec<String>| {
        let _ = write!(table, "\n| {title} | {} |", cells.join(" | "));
    };
    let thousands = |value: f64| format!("{:.0}k", value / 1e3);
    line("bytes", costs.iter().map(|cost| thousands(cost.bytes)).collect());
    line("operations", costs.iter().map(|cost| thousands(cost.operations)).collect());
    for (bandwidth, chips) in BANDWIDTHS {
        let floors = costs.iter().map(|cost| format!("{:.1}", cost.bytes / (1e3 * bandwidth)));
        line(&format!("{chips}: {bandwidth} GB/s"), floors.collect());
    }
    table.push('\n');
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_decides_every_row_on_every_chip() {
        // The M1's GPU, the smallest of them, does 2.6·10¹² operations a second.
        let rate = 2.6e12;
        for (title, row) in rows() {
            let cost = row.work.cost().unwrap();
            for (bandwidth, chips) in BANDWIDTHS {
                let (memory, arithmetic) = (cost.bytes / (1e9 * bandwidth), cost.operations / rate);
                assert!(memory > arithmetic, "{title} on {chips}");
            }
        }
    }

    #[test]
    fn the_floor_of_a_lora_row_is_that_of_its_weight_and_a_little() {
        let table = floors().unwrap();
        // (1024² + 2·1024·8 + 2·1024)·4 bytes at 68.25 GB/s.
        let line = table.lines().find(|line| line.starts_with("| M1: ")).unwrap();
        assert_eq!(line.split(" | ").nth(2).unwrap(), "62.5", "{line}");
        assert_eq!(table.lines().count(), 4 + BANDWIDTHS.len());
        let columns = table.lines().map(|line| line.matches('|').count());
        assert!(columns.into_iter().all(|count| count == rows().len() + 2), "{table}");
    }
}
