use super::*;
use crate::glu::{self, Activation};
use crate::lora_linear::{
    Dropout, Lora, Output, Projection, backward_gated, backward_shared, forward_again,
    forward_only, forward_shared,
};
use crate::matmul::{linear, linear_backward_input};
use crate::quantized::{Format, quantize};
use crate::testing::*;
use candle_core::D;

const ADAPTER_SCALE: f64 = 1.5;

/// The rounding of mod.rs in f64, by trying every code.
fn rounded_row(row: &[f64]) -> Vec<f64> {
    let largest = row.iter().fold(0f64, |most, x| most.max(x.abs()));
    if row.iter().any(|x| !x.is_finite()) {
        return vec![f64::NAN; row.len()];
    }
    let mut scale = 2f64.powi(-110);
    while largest > 448.0 * scale {
        scale *= 2.0;
    }
    let codes: Vec<f64> = (0..127).map(|code| f64::from(e4m3(code))).collect();
    let nearest = |x: &f64| {
        let x = x / scale;
        let mut best = 0;
        for code in 1..codes.len() {
            let (found, so_far) = ((codes[code] - x.abs()).abs(), (codes[best] - x.abs()).abs());
            if found < so_far || found == so_far && code % 2 == 0 {
                best = code;
            }
        }
        (codes[best] * scale).copysign(x)
    };
    row.iter().map(nearest).collect()
}

fn rounded_rows(x: &Tensor) -> Tensor {
    let columns = x.dim(D::Minus1).unwrap();
    let rows = values(x).chunks(columns).flat_map(rounded_row).collect::<Vec<_>>();
    Tensor::from_vec(rows, x.dims(), &Device::Cpu).unwrap()
}

/// Rows of different sizes.
fn uneven(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let x = random(shape, seed);
    let rows = x.elem_count() / shape[shape.len() - 1];
    let sizes: Vec<f64> = (0..rows).map(|row| (0.37 * (row % 13) as f64 - 2.0).exp2()).collect();
    let mut dims = shape.to_vec();
    dims[shape.len() - 1] = 1;
    let sizes = Tensor::from_vec(sizes, dims, &Device::Cpu).unwrap();
    x.broadcast_mul(&sizes).unwrap().to_dtype(dtype).unwrap()
}

fn matrix(outer: usize, inner: usize, seed: u64) -> Quantized {
    let numbers = uneven(&[outer, inner], seed, DType::F32);
    quantize(&numbers, Format::Fp8Rows).unwrap().with_arithmetic(Arithmetic::Fp8)
}

/// Its numbers in f64.
fn numbers(matrix: &Quantized) -> Tensor {
    matrix.dequantize(DType::F32).unwrap().to_dtype(DType::F64).unwrap()
}

/// Its rows' scales in f64, `(1, out)`.
fn scales(matrix: &Quantized) -> Tensor {
    let scales = matrix.fp8_scales().unwrap();
    scales.to_dtype(DType::F64).unwrap().unsqueeze(0).unwrap()
}

#[test]
fn rows_become_the_nearest_multiples_of_powers_of_two() {
    let mut rows: Vec<Vec<f64>> =
        values(&uneven(&[40, 50], 1, DType::F32)).chunks(50).map(<[f64]>::to_vec).collect();
    for (largest, row) in
        [448.0, 449.0, 7.0, 0.0, 1e-38, 3e38, -448.0 / 1024.0].iter().zip(&mut rows)
    {
        row.iter_mut().for_each(|x| *x *= largest);
        row[3] = f64::from(*largest as f32);
    }
    // Halfway between codes.
    rows[20][..8].copy_from_slice(&[
        448.0,
        17.0,
        19.0,
        -17.0,
        2f64.powi(-10),
        3.0 * 2f64.powi(-10),
        0.0,
        -0.0,
    ]);
    rows[21][7] = f64::NAN;
    rows[22][8] = f64::NEG_INFINITY;
    let x = Tensor::from_vec(rows.concat(), (40, 50), &Device::Cpu).unwrap();
    let x = x.to_dtype(DType::F32).unwrap();
    let expected = values(&rounded_rows(&x));
    let found = values(&round(&[(&x, None)], DType::F32).unwrap());
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let same = found == expected || found.is_nan() && expected.is_nan();
        assert!(same, "row {} column {}: {found}, expected {expected}", index / 50, index % 50);
    }
    assert!(found[21 * 50..23 * 50].iter().all(|x| x.is_nan()));
    assert!(found[..21 * 50].iter().chain(&found[23 * 50..]).all(|x| x.is_finite()));
}

#[test]
fn halves_hold_rounded_rows_exactly() {
    for dtype in [DType::BF16, DType::F16] {
        let x = uneven(&[26, 70], 3, dtype);
        let wide = round(&[(&x, None)], DType::F32).unwrap();
        let same = round(&[(&x, None)], dtype).unwrap();
        assert_eq!(values(&wide), values(&same));
    }
}

#[test]
fn other_matrices_do_not_round_rows() {
    let x = random(&[4, 64], 1).to_dtype(DType::F32).unwrap();
    for format in [Format::Int8Rows, Format::Mxfp8, Format::Fp8Blocks] {
        let weight = quantize(&x, format).unwrap().with_arithmetic(Arithmetic::Fp8);
        // A row of one block is one of a scale a row.
        assert_eq!(weight.fp8_scales().is_some(), format == Format::Fp8Blocks, "{format:?}");
    }
    assert!(matrix(4, 64, 1).with_arithmetic(Arithmetic::Float).fp8_scales().is_none());
}

/// Layers of one input, on a device, and what they give.
struct Layers {
    weights: Vec<Quantized>,
    biases: Vec<Option<Tensor>>,
    adapters: Vec<Option<(Tensor, Tensor)>>,
    dropout: Option<Dropout>,
    device: Device,
}

impl Layers {
    fn new(device: &Device, inner: usize, outers: &[usize], rank: usize) -> Self {
        let mut layers = Layers {
            weights: Vec::new(),
            biases: Vec::new(),
            adapters: Vec::new(),
            dropout: None,
            device: device.clone(),
        };
        for (index, outer) in outers.iter().enumerate() {
            let seed = 10 * index as u64;
            layers.weights.push(matrix(*outer, inner, seed + 1));
            let f32 = |shape: &[usize], seed| random(shape, seed).to_dtype(DType::F32).unwrap();
            layers.biases.push((index % 2 == 0).then(|| f32(&[*outer], seed + 2)));
            let adapter = || (f32(&[inner, rank], seed + 3), f32(&[rank, *outer], seed + 4));
            layers.adapters.push((index != 1).then(adapter));
        }
        layers
    }

    fn with<R>(&self, f: impl FnOnce(&[Projection]) -> R) -> R {
        let there = |tensor: &Tensor| tensor.to_device(&self.device).unwrap();
        let weights: Vec<_> =
            self.weights.iter().map(|weight| weight.to_device(&self.device).unwrap()).collect();
        let biases: Vec<_> = self.biases.iter().map(|bias| bias.as_ref().map(there)).collect();
        let adapters: Vec<_> = self
            .adapters
            .iter()
            .map(|adapter| adapter.as_ref().map(|(a, b)| (there(a), there(b))))
            .collect();
        let projections: Vec<_> = weights
            .iter()
            .zip(&biases)
            .zip(&adapters)
            .map(|((weight, bias), adapter)| Projection {
                weight: weight.into(),
                bias: bias.as_ref(),
                lora: adapter.as_ref().map(|(a, b)| Lora {
                    a,
                    b,
                    scale: ADAPTER_SCALE,
                    dropout: self.dropout,
                }),
            })
            .collect();
        f(&projections)
    }

    /// x with what dropout leaves of it, in f64.
    fn dropped(&self, x: &Tensor) -> Tensor {
        match self.dropout {
            Some(dropout) => crate::lora_linear::dropout(x, dropout).unwrap(),
            None => x.clone(),
        }
    }

    /// `y` of each layer in f64.
    fn outputs(&self, x: &Tensor) -> Vec<Tensor> {
        let x = x.to_dtype(DType::F64).unwrap().contiguous().unwrap();
        let rounded = rounded_rows(&x);
        let layers = self.weights.iter().zip(&self.biases).zip(&self.adapters);
        let outputs = layers.map(|((weight, bias), adapter)| {
            let mut y = rounded.matmul(&numbers(weight).t().unwrap()).unwrap();
            if let Some(bias) = bias {
                y = y.broadcast_add(&bias.to_dtype(DType::F64).unwrap()).unwrap();
            }
            if let Some((a, b)) = adapter {
                let (a, b) = (a.to_dtype(DType::F64).unwrap(), b.to_dtype(DType::F64).unwrap());
                let part = self.dropped(&x).matmul(&a).unwrap().matmul(&b).unwrap();
                y = (y + (part * ADAPTER_SCALE).unwrap()).unwrap();
            }
            y
        });
        outputs.collect()
    }

    /// `dx` in f64.
    fn input_gradient(&self, dys: &[Tensor]) -> Tensor {
        let dys: Vec<_> = dys.iter().map(|dy| dy.to_dtype(DType::F64).unwrap()).collect();
        let scaled: Vec<_> = dys
            .iter()
            .zip(&self.weights)
            .map(|(dy, weight)| dy.broadcast_mul(&scales(weight)).unwrap())
            .collect();
        let rounded = rounded_rows(&Tensor::cat(&scaled, 1).unwrap());
        let levels = self.weights.iter().map(|weight| {
            let levels = weight.levels_alone().unwrap();
            numbers(&levels)
        });
        let mut dx = rounded.matmul(&Tensor::cat(&levels.collect::<Vec<_>>(), 0).unwrap()).unwrap();
        for (dy, adapter) in dys.iter().zip(&self.adapters) {
            let Some((a, b)) = adapter else { continue };
            let (a, b) = (a.to_dtype(DType::F64).unwrap(), b.to_dtype(DType::F64).unwrap());
            let g = (dy.matmul(&b.t().unwrap()).unwrap() * ADAPTER_SCALE).unwrap();
            let part = self.dropped(&g.matmul(&a.t().unwrap()).unwrap());
            dx = (dx + part).unwrap();
        }
        dx
    }

    /// The gradients of A and B in f64.
    fn adapter_gradients(&self, x: &Tensor, dys: &[Tensor]) -> Vec<Option<(Tensor, Tensor)>> {
        let x = self.dropped(&x.to_dtype(DType::F64).unwrap().contiguous().unwrap());
        let layers = self.adapters.iter().zip(dys);
        let gradients = layers.map(|(adapter, dy)| {
            let (a, b) = adapter.as_ref()?;
            let (a, b) = (a.to_dtype(DType::F64).unwrap(), b.to_dtype(DType::F64).unwrap());
            let dy = (dy.to_dtype(DType::F64).unwrap() * ADAPTER_SCALE).unwrap();
            let da = x.t().unwrap().matmul(&dy.matmul(&b.t().unwrap()).unwrap()).unwrap();
            Some((da, x.matmul(&a).unwrap().t().unwrap().matmul(&dy).unwrap()))
        });
        gradients.collect()
    }

    /// Asserts that the passes over `x` `(rows, in)` give what they should, up to `tolerance`.
    #[track_caller]
    fn assert_right(&self, x: &Tensor, tolerance: f64) {
        let dtype = x.dtype();
        let (rows, _) = x.dims2().unwrap();
        let x_there = there(x, &self.device);
        let dys: Vec<_> = self
            .weights
            .iter()
            .enumerate()
            .map(|(index, weight)| uneven(&[rows, weight.shape().0], 77 + index as u64, dtype))
            .collect();
        let dys_there: Vec<_> = dys.iter().map(|dy| there(&strided(dy), &self.device)).collect();
        self.with(|projections| {
            let outputs = forward_shared(&x_there, projections).unwrap();
            for (output, expected) in outputs.iter().zip(self.outputs(x)) {
                assert_eq!(output.y.dtype(), dtype);
                assert_close(&here(&output.y), &expected, tolerance);
            }
            let only = forward_only(&x_there, projections).unwrap();
            let again = forward_again(&x_there, projections).unwrap();
            for ((Output { y, xa }, only), again) in outputs.iter().zip(&only).zip(&again) {
                assert_identical(&here(y), &here(only));
                match (xa, again) {
                    (Some(xa), Some(again)) => assert_identical(&here(xa), &here(again)),
                    (xa, again) => assert_eq!(xa.is_none(), again.is_none()),
                }
            }
            let xas: Vec<_> = outputs.iter().map(|output| output.xa.as_ref()).collect();
            let dys_there: Vec<_> = dys_there.iter().collect();
            let gradients = backward_shared(&x_there, projections, &xas, &dys_there, true).unwrap();
            let dx = gradients.dx.unwrap();
            assert_eq!(dx.dtype(), dtype);
            assert_close(&here(&dx), &self.input_gradient(&dys), tolerance);
            let expected = self.adapter_gradients(x, &dys);
            assert_eq!(gradients.adapters.len(), expected.len());
            for (found, expected) in gradients.adapters.iter().zip(expected) {
                let ((found_a, found_b), (a, b)) = match (found, expected) {
                    (Some(found), Some(expected)) => (found, expected),
                    (found, expected) => {
                        assert_eq!(found.is_none(), expected.is_none());
                        continue;
                    }
                };
                assert_close(&here(found_a), &a, tolerance);
                assert_close(&here(found_b), &b, tolerance);
            }
            let none = backward_shared(&x_there, projections, &xas, &dys_there, false).unwrap();
            assert!(none.dx.is_none());
        });
        // Layers alone, without an adapter.
        let mut alone = Layers { adapters: vec![None], ..Layers::new(&self.device, 1, &[], 0) };
        alone.weights.push(self.weights[0].clone());
        alone.biases.push(self.biases[0].clone());
        alone.with(|projections| {
            let (weight, bias) = (projections[0].weight, projections[0].bias);
            let y = linear(&x_there, weight, bias).unwrap();
            assert_close(&here(&y), &alone.outputs(x)[0], tolerance);
            let dx = linear_backward_input(&dys_there[0], weight).unwrap();
            assert_close(&here(&dx), &alone.input_gradient(&dys[..1]), tolerance);
        });
    }
}

#[test]
fn layers_multiply_rounded_rows() {
    for (dtype, tolerance) in PRECISIONS.into_iter().chain([(DType::F64, 1e-6)]) {
        for (rows, inner, outers) in [(3, 33, &[20, 7, 40][..]), (37, 64, &[24]), (1, 16, &[8, 8])]
        {
            let mut layers = Layers::new(&Device::Cpu, inner, outers, 5);
            let x = uneven(&[rows, inner], 5, dtype);
            // dA and dB are sums of products that are rounded as ever.
            layers.assert_right(&strided(&x), 2.0 * tolerance);
            layers.dropout = Some(Dropout { probability: 0.25, seed: 9 });
            layers.assert_right(&x, 2.0 * tolerance);
        }
    }
}

#[test]
fn rows_that_are_not_finite_are_nan_and_zeros_are_zeros() {
    let x = random(&[4, 32], 1).to_dtype(DType::F32).unwrap();
    assert_rows_stay_apart(&Device::Cpu, 4, &matrix(8, 32, 2), &x);
}

/// Of rows 1 to 3 of `x` with a NaN, an infinity and zeros.
#[track_caller]
fn assert_rows_stay_apart(device: &Device, rows: usize, weight: &Quantized, x: &Tensor) {
    let spoil = |x: &Tensor| {
        let columns = x.dim(1).unwrap();
        let mut numbers = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        numbers[columns + 2] = f32::NAN;
        numbers[2 * columns + 3] = f32::INFINITY;
        numbers[3 * columns..4 * columns].fill(0.0);
        let x = Tensor::from_vec(numbers, x.dims(), &Device::Cpu).unwrap().to_dtype(x.dtype());
        there(&x.unwrap(), device)
    };
    let weight = weight.to_device(device).unwrap();
    let (outer, inner) = weight.shape();
    let y = linear(&spoil(x), &weight, None).unwrap();
    let dy = random(&[rows, outer], 8).to_dtype(x.dtype()).unwrap();
    let dx = linear_backward_input(&spoil(&dy), &weight).unwrap();
    for (found, columns) in [(y, outer), (dx, inner)] {
        let found = values(&here(&found));
        for (row, found) in found.chunks(columns).enumerate() {
            match row {
                1 | 2 => assert!(found.iter().all(|x| x.is_nan()), "row {row}"),
                3 => assert!(found.iter().all(|x| *x == 0.0), "row {row}"),
                _ => assert!(found.iter().all(|x| x.is_finite()), "row {row}"),
            }
        }
    }
}

/// `backward_gated` beside the unit's and the layer's own backward passes.
#[track_caller]
fn assert_gated_right(device: &Device, rows: usize, (inner, outer): (usize, usize), dtype: DType) {
    let layers = Layers::new(device, inner, &[outer], 8);
    let gate = there(&uneven(&[rows, inner], 21, dtype), device);
    let up = there(&uneven(&[rows, inner], 22, dtype), device);
    let dy = there(&uneven(&[rows, outer], 23, dtype), device);
    layers.with(|projections| {
        let Projection { weight, lora: Some(lora), .. } = projections[0] else { panic!() };
        let x = glu::forward(&gate, &up, Activation::Silu).unwrap();
        let mut outputs = forward_shared(&x, projections).unwrap();
        let xa = outputs.pop().unwrap().xa.unwrap();
        let found = backward_gated(&gate, &up, Activation::Silu, weight, &xa, &lora, &dy).unwrap();
        let expected = backward_shared(&x, projections, &[Some(&xa)], &[&dy], true).unwrap();
        let dx = expected.dx.unwrap();
        let (dgate, dup) = glu::backward(&gate, &up, Activation::Silu, &dx, true, true).unwrap();
        let (da, db) = expected.adapters[0].clone().unwrap();
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
        assert_close(&here(&found.dgate), &here(&dgate.unwrap()), tolerance);
        assert_close(&here(&found.dup), &here(&dup.unwrap()), tolerance);
        assert_close(&here(&found.da), &here(&da), tolerance);
        assert_close(&here(&found.db), &here(&db), tolerance);
    });
}

#[test]
fn gated_units_have_the_same_gradients() {
    assert_gated_right(&Device::Cpu, 5, (32, 16), DType::F32);
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use crate::backend::cuda::{CodesTerm, Cuda, Matrix, Sum, Term};
    use std::time::Instant;

    /// What sums of products of codes are off by, of the largest: outputs in bf16 have 8 bits, and sums of codes
    /// on Hopper about 14.
    const TOLERANCE: f64 = 1.6e-2;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_rounds_rows_as_the_cpu_does() {
        let device = cuda();
        let mut cases: Vec<Tensor> = Vec::new();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            cases.extend(
                [(3, 5), (7, 64), (2, 4096), (5, 14336), (2, 40000)]
                    .map(|(rows, columns)| uneven(&[rows, columns], 1, dtype)),
            );
        }
        for x in cases {
            for x in [x.clone(), strided(&x)] {
                let dtype = x.dtype();
                for to in [dtype, DType::F32] {
                    let expected = round(&[(&x, None)], to).unwrap();
                    let found = round(&[(&there(&x, &device), None)], to).unwrap();
                    assert_identical(&here(&found), &expected);
                }
                let columns = x.dim(1).unwrap();
                let scales = uneven(&[columns, 1], 4, DType::F32).flatten_all().unwrap();
                let parts = [(&x, Some(&scales)), (&x, None)];
                let expected = round(&parts, DType::F32).unwrap();
                let (x, scales) = (there(&x, &device), there(&scales, &device));
                let found = round(&[(&x, Some(&scales)), (&x, None)], DType::F32).unwrap();
                assert_identical(&here(&found), &expected);
            }
        }
    }

    /// Codes and scales of rows that are rounded, and codes of columns, on the host.
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_codes_of_rows_and_columns_are_those_of_numbers() {
        let device = cuda();
        let gpu = Cuda::on(&device).unwrap();
        for dtype in [DType::BF16, DType::F16] {
            for (rows, outers, inner) in
                [(5, &[24, 8][..], 48), (300, &[264, 136, 40], 528), (9, &[14336, 14336], 64)]
            {
                let xs: Vec<_> =
                    outers.iter().map(|outer| uneven(&[rows, *outer], 3, dtype)).collect();
                let weights: Vec<_> =
                    outers.iter().map(|outer| matrix(*outer, inner, *outer as u64)).collect();
                let there_weights: Vec<_> =
                    weights.iter().map(|weight| weight.to_device(&device).unwrap()).collect();
                let of_all: Vec<_> = there_weights.iter().collect();
                let of_weights: Vec<_> =
                    of_all.iter().map(|weight| cuda::codes_of(&gpu, weight).unwrap()).collect();
                let on_gpu: Vec<_> =
                    xs.iter().map(|x| gpu.rows(&there(x, &device)).unwrap()).collect();
                let parts: Vec<_> = on_gpu
                    .iter()
                    .zip(outers)
                    .zip(&of_weights)
                    .map(|((x, outer), weight)| (x.matrix, *outer, weight.scales))
                    .collect();
                let codes = cuda::round_to_codes(&gpu, rows, &parts).unwrap();
                let columns: usize = outers.iter().sum();
                assert_eq!(codes.columns, columns);
                let (tensor, scales) = (codes.tensor(0), codes.tensor(1));
                let scales: Vec<f32> = here(&scales).to_vec1().unwrap();
                let found: Vec<Vec<u8>> = here(&tensor).to_vec2().unwrap();
                let parts: Vec<_> =
                    xs.iter().zip(&weights).map(|(x, w)| (x, w.fp8_scales())).collect();
                let expected: Vec<Vec<f32>> = round(&parts, DType::F32).unwrap().to_vec2().unwrap();
                for row in 0..rows {
                    for column in 0..columns {
                        let number = e4m3(found[row][column]) * scales[row];
                        assert_eq!(number, expected[row][column], "row {row} column {column}");
                    }
                }
                let found = here(&cuda::transposed(&gpu, &of_all).unwrap().tensor(0));
                let expected: Vec<_> = weights
                    .iter()
                    .map(|weight| weight.codes().reshape(weight.shape()).unwrap())
                    .collect();
                let expected = Tensor::cat(&expected, 0).unwrap().t().unwrap();
                let found = found.narrow(1, 0, columns).unwrap();
                assert_eq!(
                    found.contiguous().unwrap().to_vec2::<u8>().unwrap(),
                    expected.contiguous().unwrap().to_vec2::<u8>().unwrap()
                );
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU of compute capability 9.0"]
    fn cuda_hopper_multiplies_codes() {
        let device = cuda();
        // Where tiles are filled, as whole ones are and with odd rest, and where they nearly aren't; and what isn't multiplied as
        // codes.
        for dtype in [DType::BF16, DType::F16] {
            for (rows, inner, outers) in [
                (2560, 272, &[1280][..]),
                (2500, 1360, &[1288]),
                (2200, 144, &[1040, 264, 520]),
                (300, 1312, &[136, 48]),
                (40, 4096, &[264]),
                (9, 256, &[64, 24]),
                (20, 40, &[24, 8]),
                (6, 256, &[64]),
                (33, 35, &[21]),
            ] {
                let mut layers = Layers::new(&device, inner, outers, 16);
                let x = uneven(&[rows, inner], 5, dtype);
                layers.assert_right(&strided(&x), TOLERANCE);
                layers.dropout = Some(Dropout { probability: 0.1, seed: 4 });
                layers.assert_right(&x, TOLERANCE);
            }
            assert_gated_right(&device, 2560, (1280, 272), dtype);
            assert_gated_right(&device, 33, (48, 16), dtype);
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU of compute capability 9.0"]
    fn cuda_rows_that_are_not_finite_are_nan_and_zeros_are_zeros() {
        let device = cuda();
        for (rows, outer, inner) in [(2560, 1280, 1280), (7, 24, 64)] {
            let x = random(&[rows, inner], 1).to_dtype(DType::BF16).unwrap();
            assert_rows_stay_apart(&device, rows, &matrix(outer, inner, 2), &x);
        }
    }

    /// Times the parts of a layer's products in the shapes of an 8B Llama, 8192 rows, beside those of bf16.
    #[test]
    #[ignore = "needs an NVIDIA GPU of compute capability 9.0; prints times"]
    fn cuda_times_products_of_codes() {
        const ROWS: usize = 8192;
        let device = cuda();
        let gpu = Cuda::on(&device).unwrap();
        let time = |name: &str, flops: f64, bytes: f64, run: &dyn Fn()| {
            run();
            device.synchronize().unwrap();
            let start = Instant::now();
            for _ in 0..20 {
                run();
            }
            device.synchronize().unwrap();
            let seconds = start.elapsed().as_secs_f64() / 20.0;
            println!(
                "{name:40} {:8.1} us {:7.0} TFLOP/s {:6.2} TB/s",
                seconds * 1e6,
                flops / seconds / 1e12,
                bytes / seconds / 1e12
            );
        };
        let shapes = [
            (4096, &[4096, 1024, 1024][..]),
            (4096, &[4096]),
            (4096, &[14336, 14336]),
            (14336, &[4096]),
        ];
        for (inner, outers) in shapes {
            let x = there(&random(&[256, inner], 1).to_dtype(DType::BF16).unwrap(), &device);
            let x = Tensor::cat(&vec![&x; ROWS / 256], 0).unwrap();
            let weights: Vec<_> = outers
                .iter()
                .map(|outer| matrix(*outer, inner, 2).to_device(&device).unwrap())
                .collect();
            let all: Vec<_> = weights.iter().collect();
            let dense: Vec<_> =
                all.iter().map(|weight| weight.dequantize(DType::BF16).unwrap()).collect();
            let columns: usize = outers.iter().sum();
            let flops = 2.0 * (ROWS * inner * columns) as f64;
            let rows = gpu.rows(&x).unwrap();
            let part = [(rows.matrix, inner, 0)];
            println!("{inner} -> {outers:?}");
            time("round x", 0.0, (3 * ROWS * inner) as f64, &|| {
                cuda::round_to_codes(&gpu, ROWS, &part).unwrap();
            });
            let dys: Vec<_> = outers
                .iter()
                .map(|outer| {
                    let dy = random(&[256, *outer], 1).to_dtype(DType::BF16).unwrap();
                    let dy = there(&dy, &device);
                    gpu.rows(&Tensor::cat(&vec![&dy; ROWS / 256], 0).unwrap()).unwrap()
                })
                .collect();
            let of_weights: Vec<_> =
                all.iter().map(|weight| cuda::codes_of(&gpu, weight).unwrap()).collect();
            let parts: Vec<_> = dys
                .iter()
                .zip(outers)
                .zip(&of_weights)
                .map(|((dy, outer), weight)| (dy.matrix, *outer, weight.scales))
                .collect();
            time("round dy", 0.0, (3 * ROWS * columns) as f64, &|| {
                cuda::round_to_codes(&gpu, ROWS, &parts).unwrap();
            });
            time("transpose", 0.0, (2 * inner * columns) as f64, &|| {
                cuda::transposed(&gpu, &all).unwrap();
            });
            let codes = cuda::round_to_codes(&gpu, ROWS, &part).unwrap();
            let ys: Vec<_> = outers
                .iter()
                .map(|outer| gpu.empty((ROWS, *outer), DType::BF16).unwrap())
                .collect();
            let sums = |of_codes: bool| -> Vec<Sum> {
                let each = ys.iter().zip(outers).zip(&of_weights).zip(&dense);
                each.map(|(((y, outer), weight), dense)| {
                    let dense = gpu.rows(dense).unwrap().matrix;
                    let (mut terms, mut term) = (Vec::new(), None);
                    if of_codes {
                        let (a, b) = (codes.matrix, weight.matrix);
                        let scales = (codes.scales, weight.scales);
                        term = Some(CodesTerm { a, b, depth: inner, scales });
                    } else {
                        terms.push(Term { a: rows.matrix, b: dense.t(), depth: inner });
                    }
                    let to = Matrix::of(y, *outer);
                    Sum { to, columns: *outer, bias: None, codes: term, terms }
                })
                .collect()
            };
            for of_codes in [false, true] {
                let name = if of_codes { "y of codes" } else { "y in bf16" };
                time(name, flops, 0.0, &|| {
                    gpu.sums_of_products(DType::BF16, ROWS, &sums(of_codes)).unwrap();
                });
            }
            let (dx, of_rows) = (
                gpu.empty((ROWS, inner), DType::BF16).unwrap(),
                cuda::round_to_codes(&gpu, ROWS, &parts).unwrap(),
            );
            let across = cuda::transposed(&gpu, &all).unwrap();
            let to = Matrix::of(&dx, inner);
            time("dx of codes", flops, 0.0, &|| {
                let (a, b) = (of_rows.matrix, across.matrix);
                let term = CodesTerm { a, b, depth: columns, scales: (of_rows.scales, 0) };
                let sum =
                    Sum { to, columns: inner, bias: None, codes: Some(term), terms: Vec::new() };
                gpu.sums_of_products(DType::BF16, ROWS, &[sum]).unwrap();
            });
            time("dx in bf16", flops, 0.0, &|| {
                let each = dys.iter().zip(outers).zip(&dense);
                let terms = each.map(|((dy, outer), dense)| Term {
                    a: dy.matrix,
                    b: gpu.rows(dense).unwrap().matrix,
                    depth: *outer,
                });
                let terms = terms.collect();
                let sum = Sum { to, columns: inner, bias: None, codes: None, terms };
                gpu.sums_of_products(DType::BF16, ROWS, &[sum]).unwrap();
            });
        }
    }
}
