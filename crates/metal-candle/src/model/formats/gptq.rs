//! GPTQ: `qweight` `(in·bits/32, out)`, whose words go down a column with the first element in the lowest bits,
//! `qzeros` `(groups, out·bits/32)` and `scales` `(groups, out)`.

use super::int4::{Groups, matrix};
use super::{Parsed, Stored, required};
use metal_candle_kernels::quantized::Quantized;

/// What `quantization_config` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// 4 or 8.
    pub(crate) bits: usize,
    /// `None` where it says -1: one group a row.
    pub(crate) group: Option<usize>,
    /// Whether zero points are stored less 1: all but `checkpoint_format` `gptq_v2`.
    pub(crate) zeros_less_one: bool,
}

/// The matrix of a layer, whose parts have the names that follow the layer's and a dot.
pub(crate) fn read<'a>(
    config: Config,
    part: impl Fn(&str) -> Option<Stored<'a>>,
) -> Parsed<Quantized> {
    let Config { bits, group, zeros_less_one } = config;
    if !matches!(bits, 4 | 8) {
        return Err(format!("{bits} bits, expected 4 or 8"));
    }
    let (per_word, mask) = (32 / bits, ((1u32 << bits) - 1) as u8);
    let weight = required(&part, "qweight")?;
    weight.require_dtype("qweight", &["I32", "U32"])?;
    let (words, outer) = weight.matrix("qweight")?;
    let inner = words * per_word;
    let groups = Groups::new(group, inner)?;
    let zeros = required(&part, "qzeros")?;
    if !outer.is_multiple_of(per_word) {
        return Err(format!("qweight has {outer} columns, expected a multiple of {per_word}"));
    }
    zeros.require("qzeros", &["I32", "U32"], &[groups.count, outer / per_word])?;
    let scales = required(&part, "scales")?;
    scales.require("scales", &["F16", "BF16", "F32"], &[groups.count, outer])?;
    if let Some(order) = part("g_idx") {
        order.require("g_idx", &["I32", "U32"], &[inner])?;
        let found = order.words().into_iter().enumerate();
        for (index, found) in found {
            let expected = index / groups.size;
            if found as usize != expected {
                return Err(format!(
                    "g_idx puts column {index} into group {found}, expected {expected}: a matrix quantised with act-order (desc_act) can't be read"
                ));
            }
        }
    }
    let (weight, zeros) = (weight.words(), zeros.words());
    let code = |row: usize, column: usize| {
        (weight[column / per_word * outer + row] >> (column % per_word * bits)) as u8 & mask
    };
    let zero = |group: usize, row: usize| {
        let word = zeros[group * (outer / per_word) + row / per_word];
        let stored = (word >> (row % per_word * bits)) as u8;
        // The largest code stands for 0.
        stored.wrapping_add(u8::from(zeros_less_one)) & mask
    };
    matrix((outer, inner), bits, groups, code, zero, &scales.floats("scales")?)
}
