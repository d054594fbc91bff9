//! 8-bit checkpoints: `weight` in e4m3 or as integers, and what it is multiplied by: one number, one a row
//! (`weight_scale`, compressed-tensors'), or one for a block of rows and columns (`weight_scale_inv`,
//! DeepSeek's).

use super::{Parsed, Stored, assembled, bytes_tensor, f32_tensor, required};
use crate::error::tensor_message;
use metal_candle_kernels::quantized::{Levels, Quantized, Scales, spread_blocks};

const SCALES: [&str; 2] = ["weight_scale_inv", "weight_scale"];

/// The matrix of a layer, whose parts have the names that follow the layer's and a dot. `block` is the configuration's
/// `weight_block_size`, rows and columns, if it has one.
pub(crate) fn read<'a>(
    block: Option<(usize, usize)>,
    part: impl Fn(&str) -> Option<Stored<'a>>,
) -> Parsed<Quantized> {
    let weight = required(&part, "weight")?;
    weight.require_dtype("weight", &["F8_E4M3", "I8"])?;
    let (outer, inner) = weight.matrix("weight")?;
    let Some((name, stored)) = SCALES.iter().find_map(|name| Some((*name, part(name)?))) else {
        return Err(format!("{} is missing", SCALES.join(" or ")));
    };
    let scales = stored.f32s(name)?;
    let (group, scales) = match block {
        Some((rows, columns)) => {
            if rows == 0 || columns == 0 {
                return Err(format!("blocks of {rows} x {columns}, expected at least 1 x 1"));
            }
            let expected = [outer.div_ceil(rows), inner.div_ceil(columns)];
            stored.require(name, &[stored.dtype], &expected)?;
            spread_blocks((outer, inner), (rows, columns), &scales)
                .map_err(|error| tensor_message(&error))?
        }
        None => match scales[..] {
            [scale] => (inner, vec![scale; outer]),
            _ if [&[outer][..], &[outer, 1]].contains(&stored.shape) => (inner, scales),
            _ => {
                return Err(format!(
                    "{name} has shape {:?}, expected one number or {outer}",
                    stored.shape
                ));
            }
        },
    };
    let (levels, codes) = match weight.dtype {
        "I8" => (
            Levels::Integers { bits: 8, zero: 128 },
            weight.bytes.iter().map(|byte| byte ^ 0x80).collect(),
        ),
        _ => (Levels::E4m3, weight.bytes.to_vec()),
    };
    let scales = Scales::Plain { scales: f32_tensor(scales)?, offsets: None };
    assembled(Quantized::new((outer, inner), levels, group, bytes_tensor(codes)?, scales))
}
