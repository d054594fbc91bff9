//! The weights of two models, row by row.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::quantized::{Levels, Quantized, Weight};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;

use super::limits::is_within;
use super::{Aspect, Problem, Rounding};
use crate::Result;
use crate::model::Model;
use crate::model::weight::WeightId;

/// What scales in fewer bits, and the end of a symmetric range that has one level less, add to the rounding of codes.
const SLACK: f64 = 1.25;
/// Rows shorter than this part of a matrix's usual row are held against that: they add nothing to its results, and
/// scales in f16 don't reach down to them.
const SHORTEST: f64 = 0.05;
/// Differences that are told one by one.
const TOLD: usize = 3;

/// How far a row of a matrix is off, `‖exported - source‖ / ‖source‖`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorstRow {
    /// The name of its matrix in a checkpoint.
    pub weight: String,
    /// Its number.
    pub row: usize,
    /// How far it is off.
    pub error: f64,
    /// How far its format's rounding can bring it off.
    pub limit: f64,
}

/// Whether the weights of a quantised model are those of its source but for rounding. Some makers first move scales from
/// one layer into the next, which changes both and nothing that the model says.
pub fn keeps_weights(exported: &Model) -> bool {
    let method = exported.config().raw.pointer("/quantization_config/quant_method");
    !["awq", "compressed-tensors"].contains(&method.and_then(Value::as_str).unwrap_or_default())
}

/// What a comparison of weights found.
#[derive(Debug, Clone, Serialize)]
pub struct WeightErrors {
    /// Weights that were compared.
    pub weights: usize,
    /// The row that comes the nearest to its limit, or passes it the farthest.
    pub worst: Option<WorstRow>,
    /// Weights that are missing or are off by more than their formats explain.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<Problem>,
}

/// Compares the weights of an export with those of its source, whose adapter is merged if it has one.
///
/// # Errors
/// When there is no memory for a weight.
pub fn compare_weights(
    source: &Model,
    exported: &Model,
    rounding: Rounding,
) -> Result<WeightErrors> {
    // A head that is the embedding may be written once or twice.
    let has_head = source.head.is_some() || exported.head.is_some();
    let by_name = |model: &Model| -> BTreeMap<String, WeightId> {
        let weights = model.named_weights().map(|(name, id)| (name.to_string(), id));
        let head = has_head.then(|| format!("{}.weight", Model::HEAD));
        let head = head.map(|name| (name, model.head.unwrap_or(model.embedding)));
        weights.chain(head).collect()
    };
    let (ours, mut theirs) = (by_name(source), by_name(exported));
    let mut errors = WeightErrors { weights: 0, worst: None, problems: Vec::new() };
    let mut beyond = Vec::new();
    let mut missing = Vec::new();
    for (name, id) in &ours {
        let Some(other) = theirs.remove(name) else {
            missing.push(format!("{name} is missing in the export"));
            continue;
        };
        let (expected, found) = (source.dense(*id)?, exported.dense(other)?);
        if expected.dims() != found.dims() {
            let (expected, found) = (expected.dims(), found.dims());
            beyond.push(format!("{name} has shape {found:?}, in the source {expected:?}"));
            continue;
        }
        let limit = match exported.frozen().get(other)? {
            Weight::Dense(_) => rounding.of_rows(),
            Weight::Quantized(matrix) => limit(matrix),
        };
        let width = expected.dims().last().copied().unwrap_or(1);
        let (row, error) = worst_row(&values(&expected)?, &values(&found)?, width.max(1));
        errors.weights += 1;
        let worst = WorstRow { weight: name.clone(), row, error, limit };
        if !is_within(worst.error, worst.limit) {
            let (off, most) = (100.0 * error, 100.0 * limit);
            beyond.push(format!(
                "row {row} of {name} is off by {off:.2} %, where its format explains at most {most:.2} %"
            ));
        }
        let share =
            |row: &WorstRow| if row.error.is_nan() { f64::INFINITY } else { row.error / row.limit };
        if errors.worst.as_ref().is_none_or(|before| share(before) < share(&worst)) {
            errors.worst = Some(worst);
        }
    }
    missing.extend(theirs.into_keys().map(|name| format!("{name} is in the export alone")));
    for mut messages in [missing, beyond] {
        let more = messages.len().saturating_sub(TOLD);
        messages.truncate(TOLD);
        if more > 0 {
            messages.push(format!("{more} more weights are, too"));
        }
        let problems = messages.into_iter().map(|message| Problem::new(Aspect::Weights, message));
        errors.problems.extend(problems);
    }
    Ok(errors)
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    Ok(tensor.flatten_all()?.to_vec1()?)
}

/// The row that is off the farthest, and by how much.
fn worst_row(source: &[f32], exported: &[f32], width: usize) -> (usize, f64) {
    let squares: Vec<(f64, f64)> = source
        .par_chunks(width)
        .zip(exported.par_chunks(width))
        .map(|(source, exported)| {
            let square = |number: f64| number * number;
            let length: f64 = source.iter().map(|it| square(f64::from(*it))).sum();
            let both = source.iter().zip(exported);
            let off: f64 = both.map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
            (length, off)
        })
        .collect();
    let usual = squares.iter().map(|(length, _)| length).sum::<f64>() / squares.len().max(1) as f64;
    let least = SHORTEST * SHORTEST * usual;
    let error = |(length, off): &(f64, f64)| match *off {
        0.0 => 0.0,
        off => (off / length.max(least)).sqrt(),
    };
    let mut worst = (0, 0.0);
    for (row, error) in squares.iter().map(error).enumerate() {
        if error > worst.1 || error.is_nan() {
            worst = (row, error);
        }
        if error.is_nan() {
            break;
        }
    }
    worst
}

/// How far a row can be off by its format: half a step of a group's codes in each element, where all of the row's
/// length may be in the largest element of each group. Where that says nothing any more, as much as the row is long:
/// two different rows are farther apart.
fn limit(matrix: &Quantized) -> f64 {
    let of_group = (matrix.group() as f64).sqrt();
    let step = match matrix.levels() {
        Levels::Integers { bits, .. } => 0.5f64.powi(i32::try_from(bits).unwrap_or(8)) * of_group,
        Levels::Table(table) => {
            let mut levels = *table;
            levels.sort_by(f32::total_cmp);
            let gaps = levels.windows(2).map(|pair| f64::from(pair[1] - pair[0]));
            let most =
                levels.iter().fold(0.0, |most, level| f64::max(most, f64::from(level.abs())));
            gaps.fold(0.0, f64::max) / 2.0 / most * of_group
        }
        // Three bits of mantissa.
        Levels::E4m3 => 0.5f64.powi(4),
    };
    (SLACK * step).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;
    use metal_candle_kernels::quantized::{Format, quantize};

    const FORMATS: [Format; 14] = [
        Format::Nf4 { block: 64, nested: true },
        Format::Fp4 { block: 64, nested: false },
        Format::Affine { bits: 2, group: 64 },
        Format::Affine { bits: 3, group: 64 },
        Format::Affine { bits: 4, group: 64 },
        Format::Affine { bits: 8, group: 64 },
        Format::Mxfp4,
        Format::Nvfp4,
        Format::Q4_0,
        Format::Q4K,
        Format::Q6K,
        Format::Q8_0,
        Format::Fp8Rows,
        Format::Int8Rows,
    ];

    #[test]
    fn limits_hold_for_every_format_and_are_passed_by_rows_in_each_others_place() {
        let (rows, width) = (24, 512);
        // Usual weights, ones with a few large numbers, and uniform ones.
        let makers: [fn(&mut SplitMix64) -> f64; 3] = [
            |random| random.normal(),
            |random| if random.uniform() < 0.02 { 20.0 * random.normal() } else { random.normal() },
            |random| 2.0 * random.uniform() - 1.0,
        ];
        for (seed, make) in makers.into_iter().enumerate() {
            let mut random = SplitMix64::new(seed as u64);
            let numbers: Vec<f32> =
                (0..rows * width).map(|_| 0.02 * make(&mut random) as f32).collect();
            let dense = Tensor::from_vec(numbers.clone(), (rows, width), &Device::Cpu).unwrap();
            for format in FORMATS {
                let matrix = quantize(&dense, format).unwrap();
                let found = values(&matrix.dequantize(DType::F32).unwrap()).unwrap();
                let (limit, (row, error)) = (limit(&matrix), worst_row(&numbers, &found, width));
                assert!(
                    error > 0.0 && error <= limit,
                    "{format:?} {seed}: {error} of {limit} in {row}"
                );
                let mut swapped = found.clone();
                let (head, tail) = swapped.split_at_mut(7 * width);
                head[3 * width..4 * width].swap_with_slice(&mut tail[..width]);
                let (row, error) = worst_row(&numbers, &swapped, width);
                assert!(
                    error > limit && [3, 7].contains(&row),
                    "{format:?} {seed}: {error} of {limit}"
                );
                if matches!(format, Format::Q8_0 | Format::Affine { bits: 8, .. }) {
                    let scaled: Vec<f32> = found.iter().map(|it| 1.05 * it).collect();
                    assert!(worst_row(&numbers, &scaled, width).1 > limit, "{format:?}");
                }
            }
        }
    }

    #[test]
    fn rows_without_numbers_to_speak_of_are_held_against_the_others() {
        let source = [1.0, 1.0, 1e-9, 0.0, 0.0, 0.0, 1.0, -1.0];
        let (_, error) = worst_row(&source, &[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, -1.0], 2);
        assert!(error < 1e-6, "{error}");
        let (row, error) = worst_row(&source, &[1.0, 1.0, 0.0, 0.0, 0.5, 0.0, 1.0, -1.0], 2);
        assert!(row == 2 && error > 1.0, "{row} {error}");
        let (row, error) = worst_row(&source, &[1.0, 1.0, 0.0, f32::NAN, 0.0, 0.0, 5.0, 0.0], 2);
        assert!(row == 1 && error.is_nan());
        assert_eq!(worst_row(&[0.0; 4], &[0.0; 4], 2), (0, 0.0));
    }
}
