//! AWQ: `qweight` `(in, out/8)` and `qzeros` `(groups, out/8)`, whose words have eight neighbours of a row in the order
//! 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on, and `scales` `(groups, out)`.

use super::int4::{Groups, matrix};
use super::{Parsed, Stored, required};
use metal_candle_kernels::quantized::Quantized;

/// Where in a word the first to the eighth code lies, in codes.
const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The matrix of a layer in 4 bits, whose parts have the names that follow the layer's and a dot. `group` is the
/// configuration's `group_size`, `None` where it is -1: one group a row.
pub(crate) fn read<'a>(
    group: Option<usize>,
    part: impl Fn(&str) -> Option<Stored<'a>>,
) -> Parsed<Quantized> {
    let weight = required(&part, "qweight")?;
    weight.require_dtype("qweight", &["I32", "U32"])?;
    let (inner, words) = weight.matrix("qweight")?;
    let outer = words * 8;
    let groups = Groups::new(group, inner)?;
    let zeros = required(&part, "qzeros")?;
    zeros.require("qzeros", &["I32", "U32"], &[groups.count, words])?;
    let scales = required(&part, "scales")?;
    scales.require("scales", &["F16", "BF16", "F32"], &[groups.count, outer])?;
    let (weight, zeros) = (weight.words(), zeros.words());
    let code = |all: &[u32], line: usize, row: usize| {
        (all[line * words + row / 8] >> (PLACES[row % 8] * 4)) as u8 & 15
    };
    matrix(
        (outer, inner),
        4,
        groups,
        |row, column| code(&weight, column, row),
        |group, row| code(&zeros, group, row),
        &scales.floats("scales")?,
    )
}
