//! The Metal kernels, run by an emulator on the CPU and compared with the CPU's operations in f64: as one
//! library, as a device has them, compiled for speed, for bounds and for races, with several orders of the
//! threads and with threadgroups that fill no whole simdgroup.

mod step;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use metal_candle_kernels::glu::{self, Activation};
use metal_candle_kernels::layer_norm::{self, Needs};
use metal_candle_kernels::{
    cross_entropy, dora, embedding, emulation, experts, rms_norm, rope, sampling, softmax,
};
use metal_emulator::{Buffers, Dispatch, Element, Error, Library, Source, for_every_mode};
use std::sync::OnceLock;

/// Threads of a threadgroup: less than a simdgroup, a little more, and several.
const THREADS: [u32; 3] = [5, 33, 96];
/// As in `common.metal.h`.
const AHEAD: u32 = 4;

/// A dtype of elements.
trait Number: Element + std::fmt::Debug {
    const NAME: &'static str;
    /// What rounding of the result allows.
    const TOLERANCE: f64;
    fn of(value: f64) -> Self;
    fn to(self) -> f64;
}

impl Number for f32 {
    const NAME: &'static str = "f32";
    const TOLERANCE: f64 = 2e-6;
    fn of(value: f64) -> Self {
        value as f32
    }
    fn to(self) -> f64 {
        self.into()
    }
}

impl Number for f16 {
    const NAME: &'static str = "f16";
    const TOLERANCE: f64 = 1e-3;
    fn of(value: f64) -> Self {
        f16::from_f64(value)
    }
    fn to(self) -> f64 {
        self.into()
    }
}

impl Number for bf16 {
    const NAME: &'static str = "bf16";
    const TOLERANCE: f64 = 8e-3;
    fn of(value: f64) -> Self {
        bf16::from_f64(value)
    }
    fn to(self) -> f64 {
        self.into()
    }
}

/// Calls `$check` for every dtype.
macro_rules! for_every_dtype {
    ($check:ident, $library:expr, $seed:expr) => {{
        $check::<f32>($library, $seed)?;
        $check::<f16>($library, $seed)?;
        $check::<bf16>($library, $seed)
    }};
}
use for_every_dtype;

/// All kernels, as the text that a device is given.
fn library() -> &'static Source {
    static SOURCE: OnceLock<Source> = OnceLock::new();
    SOURCE.get_or_init(|| {
        let source = Source::text("metal-candle-kernels.metal", emulation::source());
        // Compiled once, however many tests run at a time.
        for_every_mode(&source, |_, _| Ok(())).unwrap_or_else(|error| panic!("{error}"));
        source
    })
}

/// Numbers in `(-2, 2)` that follow from the seed alone.
fn random<T: Number>(count: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 51) as f64 - 2.0
    };
    (0..count).map(|_| T::of(next())).collect()
}

fn tensor<T: Number>(values: &[T], shape: &[usize]) -> Tensor {
    let values: Vec<f64> = values.iter().map(|value| value.to()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Asserts `|found - expected| <= tolerance·(1 + max |expected|)`.
#[track_caller]
fn assert_near<T: Number>(found: &Buffers, index: u32, expected: &Tensor, what: &str) {
    let found: Vec<T> = found.read(index).unwrap();
    let expected = values(expected);
    assert_eq!(found.len(), expected.len());
    let most = expected.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let error = (found.to() - expected).abs();
        assert!(
            error <= T::TOLERANCE * (1.0 + most),
            "{what} {}: element {i} is {} and should be {expected}",
            T::NAME,
            found.to()
        );
    }
}

/// Starts a run of the kernel `name` for elements of `T`.
fn start<'a, T: Number>(
    library: &'a Library,
    name: &str,
    seed: u64,
) -> Result<Dispatch<'a>, Error> {
    Ok(library.kernel(&format!("{name}_{}", T::NAME))?.dispatch().seed(seed))
}

/// Threadgroups of kernels whose threads have `AHEAD` elements of one row each.
fn stretches(count: usize, rows: usize, threads: u32) -> [u32; 3] {
    [(count as u32).div_ceil(AHEAD * threads), rows as u32, 1]
}

/// `(rows, columns, threads)` for kernels that have a threadgroup a row.
fn row_problems() -> impl Iterator<Item = (usize, usize, u32)> {
    let sizes = [(3, 37), (2, 131), (1, 1)];
    sizes.into_iter().flat_map(|(rows, columns)| THREADS.map(|threads| (rows, columns, threads)))
}

fn softmax_rows<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for (rows, columns, threads) in row_problems() {
        let (x, dy) = (random::<T>(rows * columns, 1), random::<T>(rows * columns, 2));
        let shape = [rows, columns];
        let found = start::<T>(library, "softmax_forward", seed)?
            .buffer(0, &x)
            .output::<T>(1, x.len())
            .value(2, columns as u32)
            .threadgroups([rows as u32, 1, 1], [threads, 1, 1])?;
        let expected = softmax::forward(&tensor(&x, &shape)).unwrap();
        assert_near::<T>(&found, 1, &expected, "softmax");
        let y: Vec<T> = found.read(1)?;
        let found = start::<T>(library, "softmax_backward", seed)?
            .buffer(0, &y)
            .buffer(1, &dy)
            .output::<T>(2, x.len())
            .value(3, columns as u32)
            .threadgroups([rows as u32, 1, 1], [threads, 1, 1])?;
        let expected = softmax::backward(&tensor(&y, &shape), &tensor(&dy, &shape)).unwrap();
        assert_near::<T>(&found, 2, &expected, "softmax backward");
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn softmax_is_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(softmax_rows, library, seed))
}

#[test]
#[ignore = "needs clang"]
fn softmax_of_what_has_none_is_nan() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [odd; 40];
            if odd != f32::NEG_INFINITY {
                x[..39].fill(1.0);
            }
            let found = start::<f32>(library, "softmax_forward", seed)?
                .buffer(0, &x)
                .output::<f32>(1, 40)
                .value(2, 40u32)
                .threadgroups([1, 1, 1], [33, 1, 1])?;
            assert!(found.read::<f32>(1)?.iter().all(|y| y.is_nan()), "{odd}");
        }
        Ok(())
    })
}

/// The last step of sums over rows, of `(sets, groups, columns)`.
fn sum_groups(
    library: &Library,
    seed: u64,
    partial: &[f32],
    [sets, groups, columns]: [usize; 3],
    threads: u32,
) -> Result<Buffers, Error> {
    library
        .kernel("sum_groups")?
        .dispatch()
        .seed(seed)
        .buffer(0, partial)
        .output::<f32>(1, sets * columns)
        .value(2, groups as u32)
        .value(3, columns as u32)
        .threadgroups([(columns as u32).div_ceil(threads), sets as u32, 1], [threads, 1, 1])
}

const EPS: f32 = 1e-5;
const OFFSET: f32 = 1.0;

/// With a weight of f16, whatever the elements are.
fn rms_norm_rows<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for (rows, columns, threads) in row_problems() {
        let count = rows * columns;
        let shape = [rows, columns];
        let (x, residual) = (random::<T>(count, 1), random::<T>(count, 2));
        let (dy, dsum) = (random::<T>(count, 3), random::<T>(count, 4));
        let weight = random::<f16>(columns, 5);
        let groups = [rows as u32, 1, 1];
        let of_weight = tensor(&weight, &[columns]);
        // The gradient of one element's norm is a difference of numbers that are almost the same.
        let single = if columns == 1 { 1.0f32 } else { EPS };
        let (eps, offset) = (single.into(), OFFSET.into());

        let found = start::<T>(library, "rms_norm_forward", seed)?
            .buffer(0, &x)
            .buffer(1, &weight)
            .output::<T>(2, count)
            .value(3, 1u32)
            .value(4, columns as u32)
            .value(5, single)
            .value(6, OFFSET)
            .threadgroups(groups, [threads, 1, 1])?;
        let expected = rms_norm::forward(&tensor(&x, &shape), &of_weight, eps, offset).unwrap();
        assert_near::<T>(&found, 2, &expected, "rms_norm");

        let found = start::<T>(library, "rms_norm_forward_residual", seed)?
            .buffer(0, &x)
            .buffer(1, &residual)
            .buffer(2, &weight)
            .output::<T>(3, count)
            .output::<T>(4, count)
            .value(5, 1u32)
            .value(6, columns as u32)
            .value(7, single)
            .value(8, OFFSET)
            .threadgroups(groups, [threads, 1, 1])?;
        let sum: Vec<T> = found.read(3)?;
        let expected = (tensor(&x, &shape) + tensor(&residual, &shape)).unwrap();
        assert_near::<T>(&found, 3, &expected, "sum");
        let expected = rms_norm::forward(&tensor(&sum, &shape), &of_weight, eps, offset).unwrap();
        assert_near::<T>(&found, 4, &expected, "rms_norm of a sum");

        for (has_dsum, need_dx, need_inverse) in
            [(false, true, true), (true, true, false), (false, false, true)]
        {
            let mut run = start::<T>(library, "rms_norm_backward", seed)?
                .buffer(0, &x)
                .buffer(1, &weight)
                .buffer(2, &dy)
                .buffer(3, if has_dsum { &dsum } else { &x })
                .value(6, 1u32)
                .value(7, columns as u32)
                .value(8, single)
                .value(9, OFFSET)
                .value(10, u32::from(has_dsum))
                .value(11, u32::from(need_dx))
                .value(12, u32::from(need_inverse));
            run = if need_dx { run.output::<T>(4, count) } else { run.buffer(4, &x) };
            run = if need_inverse { run.output::<f32>(5, rows) } else { run.buffer(5, &x) };
            let found = run.threadgroups(groups, [threads, 1, 1])?;
            let (x64, dy64) = (tensor(&x, &shape), tensor(&dy, &shape));
            let (dx, dweight) =
                rms_norm::backward(&x64, &of_weight, eps, offset, &dy64, true, true).unwrap();
            if need_dx {
                let mut dx = dx.unwrap();
                if has_dsum {
                    dx = (dx + tensor(&dsum, &shape)).unwrap();
                }
                assert_near::<T>(&found, 4, &dx, "rms_norm's dx");
            }
            if need_inverse {
                let inverse: Vec<f32> = found.read(5)?;
                let rows_of_group = 2;
                let sizes = [1, rows.div_ceil(rows_of_group), columns];
                let grid = [(columns as u32).div_ceil(threads), sizes[1] as u32, 1];
                let found = start::<T>(library, "rms_norm_weight", seed)?
                    .buffer(0, &x)
                    .buffer(1, &dy)
                    .buffer(2, &inverse)
                    .output::<f32>(3, sizes[1] * columns)
                    .value(4, rows as u32)
                    .value(5, columns as u32)
                    .value(6, rows_of_group as u32)
                    .threadgroups(grid, [threads, 1, 1])?;
                let found = sum_groups(library, seed, &found.read::<f32>(3)?, sizes, threads)?;
                assert_near::<f32>(&found, 1, &dweight.unwrap(), "rms_norm's dweight");
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn rms_norm_is_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(rms_norm_rows, library, seed))
}

/// With a weight of f32 and a bias of bf16, whatever the elements are.
fn layer_norm_rows<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for (rows, columns, threads) in row_problems() {
        let count = rows * columns;
        let shape = [rows, columns];
        let (x, dy) = (random::<T>(count, 1), random::<T>(count, 2));
        let (weight, bias) = (random::<f32>(columns, 3), random::<bf16>(columns, 4));
        let (of_weight, of_bias) = (tensor(&weight, &[columns]), tensor(&bias, &[columns]));
        let groups = [rows as u32, 1, 1];
        let (x64, dy64) = (tensor(&x, &shape), tensor(&dy, &shape));
        // One element has no variance: what is left is rounding, divided by the root of eps.
        let eps = if columns == 1 { 1.0f32 } else { EPS };

        for has_bias in [true, false] {
            let found = start::<T>(library, "layer_norm_forward", seed)?
                .buffer(0, &x)
                .buffer(1, &weight)
                .buffer(2, &bias)
                .output::<T>(3, count)
                .value(4, 0u32)
                .value(5, 2u32)
                .value(6, u32::from(has_bias))
                .value(7, columns as u32)
                .value(8, eps)
                .threadgroups(groups, [threads, 1, 1])?;
            let bias = has_bias.then_some(&of_bias);
            let expected = layer_norm::forward(&x64, &of_weight, bias, eps.into()).unwrap();
            assert_near::<T>(&found, 3, &expected, "layer_norm");
        }

        let needs = Needs { dx: true, dweight: true, dbias: true };
        let expected = layer_norm::backward(&x64, &of_weight, eps.into(), &dy64, needs).unwrap();
        for (need_dx, need_statistics) in [(true, true), (true, false), (false, true)] {
            let mut run = start::<T>(library, "layer_norm_backward", seed)?
                .buffer(0, &x)
                .buffer(1, &weight)
                .buffer(2, &dy)
                .value(5, 0u32)
                .value(6, columns as u32)
                .value(7, eps)
                .value(8, u32::from(need_dx))
                .value(9, u32::from(need_statistics));
            run = if need_dx { run.output::<T>(3, count) } else { run.buffer(3, &x) };
            run = if need_statistics { run.output::<f32>(4, 2 * rows) } else { run.buffer(4, &x) };
            let found = run.threadgroups(groups, [threads, 1, 1])?;
            if need_dx {
                assert_near::<T>(&found, 3, expected.dx.as_ref().unwrap(), "layer_norm's dx");
            }
            if need_statistics {
                let statistics: Vec<f32> = found.read(4)?;
                let rows_of_group = 2;
                let sizes = [2, rows.div_ceil(rows_of_group), columns];
                let grid = [(columns as u32).div_ceil(threads), sizes[1] as u32, 1];
                let found = start::<T>(library, "layer_norm_parameters", seed)?
                    .buffer(0, &x)
                    .buffer(1, &dy)
                    .buffer(2, &statistics)
                    .output::<f32>(3, 2 * sizes[1] * columns)
                    .value(4, rows as u32)
                    .value(5, columns as u32)
                    .value(6, rows_of_group as u32)
                    .value(7, sizes[1] as u32)
                    .threadgroups(grid, [threads, 1, 1])?;
                let found = sum_groups(library, seed, &found.read::<f32>(3)?, sizes, threads)?;
                let (dweight, dbias) =
                    (expected.dweight.as_ref().unwrap(), expected.dbias.as_ref().unwrap());
                let both = Tensor::cat(&[dweight, dbias], 0).unwrap();
                assert_near::<f32>(&found, 1, &both, "layer_norm's parameters");
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn layer_norm_is_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(layer_norm_rows, library, seed))
}

/// The inputs are parts of wider rows, with gates from -16 to 16.
fn glu_rows<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    let activations = [Activation::Silu, Activation::GeluTanh, Activation::Gelu];
    for (code, activation) in activations.into_iter().enumerate() {
        for ((rows, columns), threads) in [(3, 37), (2, 150), (1, 1)].into_iter().zip(THREADS) {
            let strides = [columns + 3, columns, columns + 1];
            let inputs: Vec<Vec<T>> = strides
                .iter()
                .zip(1..)
                .map(|(stride, seed)| random::<T>(rows * stride, seed))
                .collect();
            let [mut gate, up, d_out] = <[Vec<T>; 3]>::try_from(inputs).unwrap();
            for gate in &mut gate {
                *gate = T::of(8.0 * gate.to());
            }
            let part = |input: &[T], stride: usize| {
                tensor(input, &[rows, stride]).narrow(1, 0, columns).unwrap()
            };
            let (gate64, up64) = (part(&gate, strides[0]), part(&up, strides[1]));
            let grid = stretches(columns, rows, threads);
            let found = start::<T>(library, "glu_forward", seed)?
                .buffer(0, &gate)
                .buffer(1, &up)
                .output::<T>(2, rows * columns)
                .value(3, columns as u64)
                .value(4, strides[0] as u64)
                .value(5, strides[1] as u64)
                .value(6, code as u32)
                .threadgroups(grid, [threads, 1, 1])?;
            let expected = glu::forward(&gate64, &up64, activation).unwrap();
            assert_near::<T>(&found, 2, &expected, "glu");

            let d64 = part(&d_out, strides[2]);
            let (dgate, dup) = glu::backward(&gate64, &up64, activation, &d64, true, true).unwrap();
            for (need_dgate, need_dup) in [(true, true), (true, false), (false, true)] {
                let mut run = start::<T>(library, "glu_backward", seed)?
                    .buffer(0, &gate)
                    .buffer(1, &up)
                    .buffer(2, &d_out)
                    .value(5, columns as u64)
                    .value(6, strides[0] as u64)
                    .value(7, strides[1] as u64)
                    .value(8, strides[2] as u64)
                    .value(9, code as u32)
                    .value(10, u32::from(need_dgate))
                    .value(11, u32::from(need_dup));
                let count = rows * columns;
                run = if need_dgate { run.output::<T>(3, count) } else { run.buffer(3, &gate) };
                run = if need_dup { run.output::<T>(4, count) } else { run.buffer(4, &gate) };
                let found = run.threadgroups(grid, [threads, 1, 1])?;
                if need_dgate {
                    assert_near::<T>(&found, 3, dgate.as_ref().unwrap(), "glu's dgate");
                }
                if need_dup {
                    assert_near::<T>(&found, 4, dup.as_ref().unwrap(), "glu's dup");
                }
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn gated_units_are_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(glu_rows, library, seed))
}

/// `x` lies as `(batch, heads, seq, head_dim)`, and is rotated as `(batch, seq, heads, head_dim)`.
fn rope_tokens<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    let sizes = [(2, 3, 5, 10, 5), (1, 2, 3, 7, 2), (2, 1, 1, 3, 0)];
    for ((batch, seq, heads, head_dim, half), threads) in sizes.into_iter().zip(THREADS) {
        let count = batch * seq * heads * head_dim;
        let x = random::<T>(count, 1);
        // No angle at all has a buffer, too.
        let angles = (batch * seq * half).max(1);
        let (cos, sin) = (random::<f32>(angles, 2), random::<f32>(angles, 3));
        let angle = |values: &[f32]| tensor(&values[..batch * seq * half], &[batch, seq, half]);
        let x64 = tensor(&x, &[batch, heads, seq, head_dim]).transpose(1, 2).unwrap();
        let strides = [heads * seq * head_dim, head_dim, seq * head_dim, 1].map(|n| n as u64);
        let units = (heads * (head_dim - half)) as u32;
        for inverse in [false, true] {
            let found = start::<T>(library, "rope_rotate", seed)?
                .buffer(0, &x)
                .buffer(1, &cos)
                .buffer(2, &sin)
                .output::<T>(3, count)
                .buffer(4, &strides)
                .value(5, seq as u32)
                .value(6, heads as u32)
                .value(7, head_dim as u32)
                .value(8, half as u32)
                .value(9, if inverse { -1.0f32 } else { 1.0 })
                .threadgroups(
                    [units.div_ceil(threads), (batch * seq) as u32, 1],
                    [threads, 1, 1],
                )?;
            let rotate = if inverse { rope::backward } else { rope::forward };
            let expected = rotate(&x64, &angle(&cos), &angle(&sin)).unwrap();
            assert_near::<T>(&found, 3, &expected, "rope");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn rotary_embedding_is_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(rope_tokens, library, seed))
}

/// The inputs are parts of wider rows, with factors of f32 and a bias of f16.
fn dora_rows<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for ((rows, columns), threads) in [(7, 37), (4, 150), (1, 1)].into_iter().zip(THREADS) {
        let strides = [columns + 3, columns + 1];
        let (y, dz) = (random::<T>(rows * strides[0], 1), random::<T>(rows * strides[1], 2));
        let (factor, bias) = (random::<f32>(columns, 3), random::<f16>(columns, 4));
        let part = |input: &[T], stride: usize| {
            tensor(input, &[rows, stride]).narrow(1, 0, columns).unwrap()
        };
        let (y64, dz64) = (part(&y, strides[0]), part(&dz, strides[1]));
        let (factor64, bias64) = (tensor(&factor, &[columns]), tensor(&bias, &[columns]));
        for has_bias in [true, false] {
            let found = start::<T>(library, "dora_scale_columns", seed)?
                .buffer(0, &y)
                .buffer(1, &factor)
                .buffer(2, &bias)
                .output::<T>(3, rows * columns)
                .value(4, columns as u32)
                .value(5, strides[0] as u64)
                .value(6, 1u32)
                .value(7, u32::from(has_bias))
                .threadgroups(stretches(columns, rows, threads), [threads, 1, 1])?;
            let bias = has_bias.then_some(&bias64);
            let expected = dora::scale_columns(&y64, &factor64, bias).unwrap();
            assert_near::<T>(&found, 3, &expected, "dora's z");
        }

        let expected = dora::scale_columns_backward(&y64, &factor64, &dz64, true).unwrap();
        for need_dbias in [true, false] {
            let rows_of_group = 2;
            let sets = if need_dbias { 2 } else { 1 };
            let sizes = [sets, rows.div_ceil(rows_of_group), columns];
            let found = start::<T>(library, "dora_backward", seed)?
                .buffer(0, &y)
                .buffer(1, &factor)
                .buffer(2, &dz)
                .output::<T>(3, rows * columns)
                .output::<f32>(4, sets * sizes[1] * columns)
                .value(5, rows as u32)
                .value(6, columns as u32)
                .value(7, strides[0] as u64)
                .value(8, strides[1] as u64)
                .value(9, rows_of_group as u32)
                .value(10, sizes[1] as u32)
                .value(11, u32::from(need_dbias))
                .threadgroups(
                    [(columns as u32).div_ceil(threads), sizes[1] as u32, 1],
                    [threads, 1, 1],
                )?;
            assert_near::<T>(&found, 3, &expected.dy, "dora's dy");
            let found = sum_groups(library, seed, &found.read::<f32>(4)?, sizes, threads)?;
            let sums = match (need_dbias, &expected.dbias) {
                (true, Some(dbias)) => Tensor::cat(&[&expected.dfactor, dbias], 0).unwrap(),
                _ => expected.dfactor.clone(),
            };
            assert_near::<f32>(&found, 1, &sums, "dora's sums");
        }
    }
    Ok(())
}

/// `(out, in, rank)` of layers, whose weights are parts of wider rows.
fn dora_norms<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for ([outer, inner, rank], threads) in
        [[37, 70, 5], [130, 21, 1], [1, 1, 2]].into_iter().zip(THREADS)
    {
        let stride = inner + 3;
        let weight = random::<T>(outer * stride, 1);
        let weight64 = tensor(&weight, &[outer, stride]).narrow(1, 0, inner).unwrap();
        let found = start::<T>(library, "dora_squared_norms", seed)?
            .buffer(0, &weight)
            .output::<f32>(1, outer)
            .value(2, inner as u32)
            .value(3, stride as u64)
            .threadgroups([outer as u32, 1, 1], [threads, 1, 1])?;
        let base64 = dora::squared_norms(&weight64).unwrap();
        assert_near::<f32>(&found, 1, &base64, "dora's squares");

        let base: Vec<f32> = found.read(1)?;
        let (a, b) = (random::<f32>(inner * rank, 2), random::<f32>(rank * outer, 3));
        let (a64, b64) = (tensor(&a, &[inner, rank]), tensor(&b, &[rank, outer]));
        let narrow = |tensor: Tensor| -> Vec<f32> {
            values(&tensor).into_iter().map(|value| value as f32).collect()
        };
        let products = narrow(a64.t().unwrap().matmul(&weight64.t().unwrap()).unwrap());
        let gram = a64.t().unwrap().contiguous().unwrap().matmul(&a64).unwrap();
        let gram_b = narrow(gram.matmul(&b64).unwrap());
        let found = library
            .kernel("dora_merged_norms")?
            .dispatch()
            .seed(seed)
            .buffer(0, &base)
            .buffer(1, &products)
            .buffer(2, &gram_b)
            .buffer(3, &b)
            .output::<f32>(4, outer)
            .value(5, outer as u32)
            .value(6, rank as u32)
            .value(7, 0.7f32)
            .threadgroups([(outer as u32).div_ceil(threads), 1, 1], [threads, 1, 1])?;
        let expected = dora::merged_norms(&weight64, &base64, &a64, &b64, 0.7f32.into()).unwrap();
        assert_near::<f32>(&found, 4, &expected, "dora's norms");
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn dora_is_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        for_every_dtype!(dora_rows, library, seed)?;
        for_every_dtype!(dora_norms, library, seed)
    })
}

fn sums_and_multiples<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for (count, threads) in [39, 401, 1].into_iter().zip(THREADS) {
        let (x, y) = (random::<T>(count, 1), random::<T>(count, 2));
        let (x64, y64) = (tensor(&x, &[count]), tensor(&y, &[count]));
        let grid = stretches(count, 1, threads);
        let found = start::<T>(library, "arithmetic_add", seed)?
            .buffer(0, &x)
            .buffer(1, &y)
            .output::<T>(2, count)
            .value(3, count as u64)
            .threadgroups(grid, [threads, 1, 1])?;
        assert_near::<T>(&found, 2, &(&x64 + &y64).unwrap(), "add");
        let expected = (&x64 * 0.75).unwrap();
        for name in ["arithmetic_scale", "arithmetic_scale_by"] {
            let run = start::<T>(library, name, seed)?
                .buffer(0, &x)
                .output::<T>(2, count)
                .value(3, count as u64);
            let run = match name {
                "arithmetic_scale" => run.value(1, 0.75f32),
                _ => run.buffer(1, &[0.75f32]),
            };
            let found = run.threadgroups(grid, [threads, 1, 1])?;
            assert_near::<T>(&found, 2, &expected, name);
        }
        let (rows, factors) = (3, [0.5f32, -2.0, 0.0]);
        let wide = random::<T>(rows * count, 3);
        let found = start::<T>(library, "arithmetic_scale_rows", seed)?
            .buffer(0, &wide)
            .buffer(1, &factors)
            .output::<T>(2, rows * count)
            .value(3, count as u32)
            .threadgroups(stretches(count, rows, threads), [threads, 1, 1])?;
        let column = tensor(&factors, &[rows, 1]);
        let expected = tensor(&wide, &[rows, count]).broadcast_mul(&column).unwrap();
        assert_near::<T>(&found, 2, &expected.flatten_all().unwrap(), "scale_rows");
        let found = start::<T>(library, "arithmetic_softcap", seed)?
            .buffer(0, &x)
            .value(1, 0.7f32)
            .output::<T>(2, count)
            .value(3, count as u64)
            .threadgroups(grid, [threads, 1, 1])?;
        let capped = ((&x64 / 0.7).unwrap().tanh().unwrap() * 0.7).unwrap();
        assert_near::<T>(&found, 2, &capped, "softcap");
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn sums_and_multiples_are_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(sums_and_multiples, library, seed))
}

fn casts<From: Number, To: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for (count, threads) in [39, 401, 1].into_iter().zip(THREADS) {
        let x = random::<From>(count, 1);
        let name = format!("cast_{}_{}", From::NAME, To::NAME);
        let found = library
            .kernel(&name)?
            .dispatch()
            .seed(seed)
            .buffer(0, &x)
            .output::<To>(1, count)
            .value(2, count as u64)
            .threadgroups(stretches(count, 1, threads), [threads, 1, 1])?;
        let found: Vec<To> = found.read(1)?;
        assert!(x.iter().zip(found).all(|(x, y)| To::of(x.to()).to() == y.to()), "{name}");
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn casts_round_like_the_cpu_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        casts::<f32, f16>(library, seed)?;
        casts::<f32, bf16>(library, seed)?;
        casts::<f16, f32>(library, seed)?;
        casts::<f16, bf16>(library, seed)?;
        casts::<bf16, f32>(library, seed)?;
        casts::<bf16, f16>(library, seed)
    })
}

/// `x` `(2, 3, 5)` read as `(5, 2, 3)`, and written into the middle of a wider tensor.
fn copies<T: Element + PartialEq + std::fmt::Debug>(
    library: &Library,
    seed: u64,
    of: impl Fn(u8) -> T,
) -> Result<(), Error> {
    let x: Vec<T> = (0..30).map(&of).collect();
    for threads in THREADS {
        // The last dimension first.
        let (sizes, strides) = ([3u32, 2, 5], [5u64, 15, 1]);
        let found = library
            .kernel(&format!("copy_strided_{}", size_of::<T>()))?
            .dispatch()
            .seed(seed)
            .buffer(0, &x)
            .output::<T>(1, 30)
            .buffer(2, &sizes)
            .buffer(3, &strides)
            .value(4, 3u32)
            .value(5, 30u32)
            .threadgroups([30u32.div_ceil(threads), 1, 1], [threads, 1, 1])?;
        let place = |i: u8| (i / 6) + (i / 3 % 2) * 15 + (i % 3) * 5;
        let expected: Vec<T> = (0..30).map(|i| of(place(i))).collect();
        assert_eq!(found.read::<T>(1)?, expected);

        // (2, 15) into (2, 20), from column 3 on.
        let whole = vec![of(99); 40];
        let found = library
            .kernel(&format!("copy_rows_{}", size_of::<T>()))?
            .dispatch()
            .seed(seed)
            .buffer(0, &x)
            .buffer_at(1, &whole, 3)
            .value(2, 15u64)
            .value(3, 20u64)
            .threadgroups(stretches(15, 2, threads), [threads, 1, 1])?;
        let found: Vec<T> = found.read(1)?;
        // What is read back may start at the beginning of the buffer, or where the kernel found it.
        let first = found.len() - 37;
        for (i, found) in found[first..].iter().enumerate() {
            let expected = if i % 20 < 15 { of((i / 20 * 15 + i % 20) as u8) } else { of(99) };
            assert_eq!(*found, expected, "element {i}");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn copies_are_exact_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        copies::<u8>(library, seed, |i| i)?;
        copies::<f16>(library, seed, |i| f16::from_f32(i.into()))?;
        copies::<f32>(library, seed, f32::from)?;
        copies::<u64>(library, seed, u64::from)
    })
}

#[test]
#[ignore = "needs clang"]
fn zeros_are_written_everywhere_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        for (count, threads) in [39, 401, 1].into_iter().zip(THREADS) {
            let found = library
                .kernel("fill_zeros")?
                .dispatch()
                .seed(seed)
                .output::<f32>(0, count)
                .value(1, count as u64)
                .threadgroups(stretches(count, 1, threads), [threads, 1, 1])?;
            assert!(found.read::<f32>(0)?.iter().all(|zero| *zero == 0.0));
        }
        Ok(())
    })
}

fn tokens<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    let ids = [3u32, 1, 3, 0, 1, 3, 6, 3, 3, 5, 0, 3, 3, 3];
    let vocabulary = 7;
    for (columns, threads) in [6, 50, 1].into_iter().zip(THREADS) {
        let table = random::<T>(vocabulary * columns, 1);
        let id_tensor = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).unwrap();
        let found = start::<T>(library, "embedding_forward", seed)?
            .buffer(0, &table)
            .buffer(1, &ids)
            .output::<T>(2, ids.len() * columns)
            .value(3, columns as u32)
            .value(4, vocabulary as u32)
            .threadgroups(stretches(columns, ids.len(), threads), [threads, 1, 1])?;
        let table64 = tensor(&table, &[vocabulary, columns]);
        assert_near::<T>(
            &found,
            2,
            &embedding::forward(&table64, &id_tensor).unwrap(),
            "embedding",
        );

        let dy = random::<T>(ids.len() * columns, 2);
        let found = start::<T>(library, "embedding_backward", seed)?
            .buffer(0, &dy)
            .buffer(1, &ids)
            .buffer(2, &vec![0.0f32; vocabulary * columns])
            .value(3, ids.len() as u32)
            .value(4, columns as u32)
            .value(5, vocabulary as u32)
            .threadgroups(
                [(columns as u32).div_ceil(threads), ids.len() as u32, 1],
                [threads, 1, 1],
            )?;
        let dy64 = tensor(&dy, &[1, ids.len(), columns]);
        let expected = embedding::backward(&dy64, &id_tensor, vocabulary).unwrap();
        assert_near::<f32>(&found, 2, &expected, "embedding's dtable");
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn embedding_is_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(tokens, library, seed))
}

/// The last place is none of the rows, in a token of its own.
fn sums_of_experts<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    let (places, active) = ([3u32, 0, 5, 2, 4, 1, 6, 7], 2);
    let (rows, tokens) = (6, places.len() / active);
    for (columns, threads) in [6, 150, 1].into_iter().zip(THREADS) {
        let (y, dout) = (random::<T>(rows * columns, 1), random::<T>(tokens * columns, 2));
        let weights = random::<f32>(places.len(), 3);
        let found = start::<T>(library, "experts_combine", seed)?
            .buffer(0, &y)
            .buffer(1, &weights)
            .buffer(2, &places)
            .output::<T>(3, tokens * columns)
            .value(4, rows as u32)
            .value(5, columns as u32)
            .value(6, active as u32)
            .threadgroups(stretches(columns, tokens, threads), [threads, 1, 1])?;
        // Of those with all of their places.
        let (known, choices) = (tokens - 1, rows);
        let of_places = Tensor::from_slice(&places[..choices], (known, active), &Device::Cpu);
        let of_places = of_places.unwrap();
        let (y64, weights64) =
            (tensor(&y, &[rows, columns]), tensor(&weights[..choices], &[known, active]));
        let dout64 = tensor(&dout[..known * columns], &[known, columns]);
        let expected = experts::combine(&y64, &weights64, &of_places).unwrap();
        let all: Vec<T> = found.read(3)?;
        let (sums, outside) = all.split_at(known * columns);
        let sums = tensor(sums, &[known, columns]);
        let apart = (sums - &expected).unwrap().abs().unwrap().max_all().unwrap();
        assert!(apart.to_scalar::<f64>().unwrap() < 4.0 * T::TOLERANCE, "sums of experts");
        assert!(outside.iter().all(|value| value.to().is_nan()));

        let found = start::<T>(library, "experts_backward", seed)?
            .buffer(0, &y)
            .buffer(1, &weights)
            .buffer(2, &places)
            .buffer(3, &dout)
            .output::<T>(4, rows * columns)
            .output::<f32>(5, places.len())
            .value(6, rows as u32)
            .value(7, columns as u32)
            .value(8, active as u32)
            .threadgroups([places.len() as u32, 1, 1], [threads, 1, 1])?;
        let expected = experts::combine_backward(&y64, &weights64, &of_places, &dout64).unwrap();
        assert_near::<T>(&found, 4, &expected.dy, "experts' dy");
        let found: Vec<f32> = found.read(5)?;
        for (found, expected) in found.iter().zip(values(&expected.dweights)) {
            assert!((f64::from(*found) - expected).abs() < 1e-4, "{found}, expected {expected}");
        }
        assert!(found[choices..].iter().all(|value| value.is_nan()));
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn sums_of_experts_are_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(sums_of_experts, library, seed))
}

#[test]
#[ignore = "needs clang"]
fn ids_outside_the_table_give_nan_and_have_no_gradient() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        let ids = [1u32, 2, u32::MAX];
        let found = start::<f32>(library, "embedding_forward", seed)?
            .buffer(0, &[1.0f32, 2.0, 3.0, 4.0])
            .buffer(1, &ids)
            .output::<f32>(2, 6)
            .value(3, 2u32)
            .value(4, 2u32)
            .threadgroups([1, 3, 1], [33, 1, 1])?;
        let found: Vec<f32> = found.read(2)?;
        assert_eq!(found[..2], [3.0, 4.0]);
        assert!(found[2..].iter().all(|value| value.is_nan()));
        let found = start::<f32>(library, "embedding_backward", seed)?
            .buffer(0, &[1.0f32; 6])
            .buffer(1, &ids)
            .buffer(2, &[0.0f32; 4])
            .value(3, 3u32)
            .value(4, 2u32)
            .value(5, 2u32)
            .threadgroups([1, 3, 1], [33, 1, 1])?;
        assert_eq!(found.read::<f32>(2)?, [0.0, 0.0, 1.0, 1.0]);
        Ok(())
    })
}
