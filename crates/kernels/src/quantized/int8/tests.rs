use super::*;
use crate::lora_linear::{
    Dropout, Lora, Projection, backward_shared, dropout, forward_again, forward_only,
    forward_shared,
};
use crate::matmul::{linear, linear_backward_input};
use crate::quantized::{Format, quantize};
use crate::testing::*;
use candle_core::{D, Device};

const ADAPTER_SCALE: f64 = 1.5;

/// Rows of different sizes.
fn uneven(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let x = random(shape, seed);
    let rows = x.elem_count() / shape[shape.len() - 1].max(1);
    let sizes: Vec<f64> = (0..rows).map(|row| (0.37 * (row % 13) as f64 - 2.0).exp2()).collect();
    let mut dims = shape.to_vec();
    dims[shape.len() - 1] = 1;
    let sizes = Tensor::from_vec(sizes, dims, &Device::Cpu).unwrap();
    x.broadcast_mul(&sizes).unwrap().to_dtype(dtype).unwrap()
}

/// A matrix whose codes are all there are, 0 as well, which no weight is rounded to.
fn matrix(outer: usize, inner: usize, seed: u64) -> Quantized {
    let codes = values(&random(&[outer * inner], seed));
    let codes: Vec<u8> = codes.iter().map(|code| ((code + 1.0) * 128.0) as u8).collect();
    let codes = Tensor::from_vec(codes, outer * inner, &Device::Cpu).unwrap();
    let scales = uneven(&[outer, 1], seed + 1, DType::F32).abs().unwrap();
    let scales = Scales::Plain { scales: scales.flatten_all().unwrap(), offsets: None };
    let levels = Levels::Integers { bits: 8, zero: ZERO };
    let matrix = Quantized::new((outer, inner), levels, inner, codes, scales).unwrap();
    matrix.with_arithmetic(Arithmetic::Int8Rows)
}

/// The integers `(outer, inner)` and the rows' scales.
fn parts(matrix: &Quantized) -> (Vec<i64>, Vec<f32>) {
    let codes = matrix.codes().to_vec1::<u8>().unwrap();
    let scales = matrix.int8_scales().unwrap().to_vec1().unwrap();
    (codes.into_iter().map(|code| i64::from(code) - 128).collect(), scales)
}

/// The rounding of mod.rs, by its definition: integers and the scale.
fn rounded_row(row: &[f32]) -> (Vec<i64>, f32) {
    let largest = row.iter().fold(0f64, |most, x| most.max(f64::from(x.abs())));
    if row.iter().any(|x| !x.is_finite()) {
        return (vec![0; row.len()], f32::NAN);
    }
    // Of numbers of f32, an f64 has the sum, difference, product or quotient so exactly that it is rounded as if once.
    let scale = (largest / 127.0) as f32;
    let inverse = if scale < f32::MIN_POSITIVE { 0.0 } else { (1.0 / f64::from(scale)) as f32 };
    let nearest = |x: &f32| {
        let multiple = (f64::from(*x) * f64::from(inverse)) as f32;
        let below = f64::from(multiple).floor();
        match f64::from(multiple) - below {
            part if part < 0.5 => below as i64,
            part if part > 0.5 => below as i64 + 1,
            _ => below as i64 + (below as i64).rem_euclid(2),
        }
    };
    (row.iter().map(nearest).collect(), scale)
}

fn f32s(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// `x·Wᵀ + bias` `(rows, outer)`, or `x·W` `(rows, inner)` with the scales in x where it is for `columns`, by the
/// definition: in f32, or f64 where x is.
fn product(x: &Tensor, matrix: &Quantized, bias: Option<&Tensor>, columns: bool) -> Tensor {
    let (outer, inner) = matrix.shape();
    let (integers, scales) = parts(matrix);
    let (depth, width) = if columns { (outer, inner) } else { (inner, outer) };
    let bias = bias.map(f32s);
    let (mut narrow, mut wide) = (Vec::new(), Vec::new());
    let rows = f32s(x);
    for row in rows.chunks_exact(depth) {
        let row: Vec<f32> = match columns {
            true => row.iter().zip(&scales).map(|(x, scale)| x * scale).collect(),
            false => row.to_vec(),
        };
        let (row, scale) = rounded_row(&row);
        for column in 0..width {
            let place = |k: usize| if columns { k * inner + column } else { column * inner + k };
            let sum: i64 = (0..depth).map(|k| row[k] * integers[place(k)]).sum();
            let of_column = if columns { 1.0 } else { scales[column] };
            let bias = bias.as_ref().map_or(0.0, |bias| bias[column]);
            narrow.push(sum as f32 * scale * of_column + bias);
            wide.push(sum as f64 * f64::from(scale) * f64::from(of_column) + f64::from(bias));
        }
    }
    let mut dims = x.dims().to_vec();
    dims.pop();
    dims.push(width);
    match x.dtype() {
        DType::F64 => Tensor::from_vec(wide, dims, &Device::Cpu).unwrap(),
        dtype => Tensor::from_vec(narrow, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap(),
    }
}

/// Asserts the same numbers, or NaN in both.
#[track_caller]
fn assert_equal(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()), "{what}");
    for (index, (found, expected)) in values(found).iter().zip(values(expected)).enumerate() {
        let same = *found == expected || found.is_nan() && expected.is_nan();
        assert!(same, "{what}, element {index}: {found}, expected {expected}");
    }
}

#[test]
fn rows_become_the_nearest_multiples_of_a_127th() {
    let mut rows: Vec<Vec<f32>> =
        f32s(&uneven(&[40, 67], 1, DType::F32)).chunks(67).map(<[f32]>::to_vec).collect();
    for (largest, row) in [1.0, 127.0, 0.0, 1e-35, 1e-36, 1e-45, 3e38].iter().zip(&mut rows) {
        row.iter_mut().for_each(|x| *x *= largest);
    }
    // Halfway between multiples of 1.
    let halves = [127.0, 0.5, 1.5, -0.5, -1.5, 2.5, -126.5, 126.5, -127.0, 0.0, -0.0];
    rows[20].fill(0.25);
    rows[20][..halves.len()].copy_from_slice(&halves);
    rows[21][66] = f32::NAN;
    rows[22][0] = f32::NEG_INFINITY;
    for (index, row) in rows.iter().enumerate() {
        let mut integers = vec![99; row.len()];
        let scale = round_row(row, &mut integers);
        let (expected, expected_scale) = rounded_row(row);
        assert_eq!(scale.to_bits(), expected_scale.to_bits(), "row {index}");
        let integers: Vec<i64> = integers.into_iter().map(i64::from).collect();
        assert_eq!(integers, expected, "row {index}");
        assert!(integers.iter().all(|integer| integer.abs() <= 127));
        let lost = scale.is_nan() || scale < f32::MIN_POSITIVE;
        assert_eq!(integers.iter().any(|integer| integer.abs() == 127), !lost, "row {index}");
    }
}

/// Whatever instructions the machine has, and `METAL_CANDLE_SIMD` leaves it.
#[test]
fn products_are_those_of_the_definition_to_the_last_bit() {
    let mut seed = 0;
    for (outer, inner) in [(1, 1), (7, 33), (64, 128), (31, 65), (130, 257), (20, 1300), (1300, 9)]
    {
        let matrix = matrix(outer, inner, 3);
        let bias = random(&[outer], 4).to_dtype(DType::F32).unwrap();
        for rows in [1, 2, 3, 4, 5, 12, 13, 40, 70] {
            for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
                seed += 1;
                let what = format!("{rows} rows, {outer} x {inner}, {dtype:?}");
                let x = uneven(&[rows, inner], seed, dtype);
                let bias = (seed % 2 == 0).then_some(&bias);
                let y = linear(&strided(&x), &matrix, bias).unwrap();
                assert_equal(&y, &product(&x, &matrix, bias, false), &what);
                let dy = uneven(&[rows, outer], seed + 1000, dtype);
                let dx = linear_backward_input(&strided(&dy), &matrix).unwrap();
                assert_equal(&dx, &product(&dy, &matrix, None, true), &what);
            }
        }
    }
}

#[test]
fn the_largest_sums_are_exact() {
    let extremes = |shape, codes: Vec<u8>| {
        let (outer, inner): (usize, usize) = shape;
        let codes = Tensor::from_vec(codes, outer * inner, &Device::Cpu).unwrap();
        let scales = Tensor::ones(outer, DType::F32, &Device::Cpu).unwrap();
        let scales = Scales::Plain { scales, offsets: None };
        let levels = Levels::Integers { bits: 8, zero: ZERO };
        let matrix = Quantized::new(shape, levels, inner, codes, scales).unwrap();
        matrix.with_arithmetic(Arithmetic::Int8Rows)
    };
    let x = Tensor::full(127f32, (6, MOST), &Device::Cpu).unwrap();
    let negative = x.neg().unwrap();
    for (code, of_one) in [(0u8, -128.0), (255, 127.0)] {
        let along = extremes((3, MOST), vec![code; 3 * MOST]);
        let across = extremes((MOST, 3), vec![code; 3 * MOST]);
        for (x, sign) in [(&x, 1.0), (&negative, -1.0)] {
            let exact = sign * 127.0 * of_one * MOST as f64;
            for rows in [1, 6] {
                let x = x.narrow(0, 0, rows).unwrap();
                let found = [linear(&x, &along, None), linear_backward_input(&x, &across)];
                for found in found {
                    assert!(
                        values(&found.unwrap()).iter().all(|sum| *sum == f64::from(exact as f32))
                    );
                }
            }
        }
    }
}

#[test]
fn rows_stay_apart_whatever_is_in_them() {
    let matrix = matrix(33, 70, 2);
    for rows in [4, 9] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (width, columns) in [(70, false), (33, true)] {
                let mut numbers = f32s(&uneven(&[rows, width], 8, dtype));
                numbers[width + 2] = f32::NAN;
                numbers[2 * width + 3] = f32::INFINITY;
                numbers[3 * width..4 * width].fill(0.0);
                let x = Tensor::from_vec(numbers, (rows, width), &Device::Cpu).unwrap();
                let x = x.to_dtype(dtype).unwrap();
                let found = match columns {
                    true => linear_backward_input(&x, &matrix).unwrap(),
                    false => linear(&x, &matrix, None).unwrap(),
                };
                assert_equal(&found, &product(&x, &matrix, None, columns), "broken rows");
                let found = values(&found);
                let rows: Vec<&[f64]> = found.chunks(found.len() / rows).collect();
                assert!(rows[0].iter().all(|y| y.is_finite()));
                assert!(rows[1].iter().chain(rows[2]).all(|y| y.is_nan()));
                assert!(rows[3].iter().all(|y| *y == 0.0));
            }
        }
    }
}

#[test]
fn a_weight_in_int8_gives_nearly_its_products() {
    let weight = uneven(&[96, 200], 1, DType::F32);
    let int8 = quantize(&weight, Format::Int8Rows).unwrap().with_arithmetic(Arithmetic::Int8Rows);
    assert!(int8.int8_scales().is_some());
    let wide = weight.to_dtype(DType::F64).unwrap();
    for rows in [2, 30] {
        let x = uneven(&[rows, 200], 2, DType::F64);
        let exact = x.matmul(&wide.t().unwrap()).unwrap();
        assert_close(&linear(&x, &int8, None).unwrap(), &exact, 0.01);
        let dy = uneven(&[rows, 96], 3, DType::F64);
        let exact = dy.matmul(&wide).unwrap();
        assert_close(&linear_backward_input(&dy, &int8).unwrap(), &exact, 0.015);
    }
}

#[test]
fn layers_with_adapters_add_what_they_do_to_other_weights() {
    for (dtype, tolerance) in PRECISIONS.into_iter().chain([(DType::F64, 1e-6)]) {
        for (rows, inner, outers, rank) in [
            (3, 33, &[20, 7, 40][..], 5),
            (37, 64, &[24], 4),
            (70, 130, &[65, 33], 16),
            (1, 16, &[8, 8], 2),
            (9, 20, &[6, 5], 0),
        ] {
            for dropped in [None, Some(Dropout { probability: 0.25, seed: 9 })] {
                assert_layers(dtype, 2.0 * tolerance, rows, inner, outers, rank, dropped);
            }
        }
    }
}

/// Layers of one input: every second has a bias, all but the second an adapter, and the last, where there are three, a
/// dense weight.
#[track_caller]
fn assert_layers(
    dtype: DType,
    tolerance: f64,
    rows: usize,
    inner: usize,
    outers: &[usize],
    rank: usize,
    dropped: Option<Dropout>,
) {
    let f32 = |shape: &[usize], seed| random(shape, seed).to_dtype(DType::F32).unwrap();
    let f64 = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
    let x = uneven(&[rows, inner], 5, dtype);
    let seeds = 10..;
    let weights: Vec<Quantized> =
        outers.iter().zip(seeds).map(|(outer, seed)| matrix(*outer, inner, seed)).collect();
    let dense: Vec<Option<Tensor>> = (0..outers.len())
        .map(|index| {
            (index == 2).then(|| f64(&f32(&[outers[index], inner], 6)).to_dtype(dtype).unwrap())
        })
        .collect();
    let biases: Vec<_> = outers.iter().map(|outer| f32(&[*outer], 20)).collect();
    let adapters: Vec<_> =
        outers.iter().map(|outer| (f32(&[inner, rank], 21), f32(&[rank, *outer], 22))).collect();
    let projections: Vec<_> = (0..outers.len())
        .map(|index| Projection {
            weight: dense[index].as_ref().map_or((&weights[index]).into(), Into::into),
            bias: (index % 2 == 0).then_some(&biases[index]),
            lora: (index != 1).then_some(Lora {
                a: &adapters[index].0,
                b: &adapters[index].1,
                scale: ADAPTER_SCALE,
                dropout: dropped,
            }),
        })
        .collect();
    let dys: Vec<_> =
        outers.iter().zip(77..).map(|(outer, seed)| uneven(&[rows, *outer], seed, dtype)).collect();
    // What comes to f64 of x and dropout.
    let drop = |x: &Tensor| dropped.map_or_else(|| x.clone(), |it| dropout(x, it).unwrap());
    let wide = drop(&f64(&x));
    let outputs = forward_shared(&strided(&x), &projections).unwrap();
    let mut dx = Tensor::zeros((rows, inner), DType::F64, &Device::Cpu).unwrap();
    for (index, (projection, output)) in projections.iter().zip(&outputs).enumerate() {
        let mut y = match &dense[index] {
            Some(weight) => f64(&x).matmul(&f64(weight).t().unwrap()).unwrap(),
            None => f64(&product(&x.to_dtype(DType::F32).unwrap(), &weights[index], None, false)),
        };
        if let Some(bias) = projection.bias {
            y = y.broadcast_add(&f64(bias)).unwrap();
        }
        dx = (dx
            + match &dense[index] {
                Some(weight) => f64(&dys[index]).matmul(&f64(weight)).unwrap(),
                None => f64(&product(
                    &dys[index].to_dtype(DType::F32).unwrap(),
                    &weights[index],
                    None,
                    true,
                )),
            })
        .unwrap();
        if let Some(lora) = projection.lora.filter(|_| rank > 0) {
            let (a, b) = (f64(lora.a), f64(lora.b));
            y = (y + (wide.matmul(&a).unwrap().matmul(&b).unwrap() * ADAPTER_SCALE).unwrap())
                .unwrap();
            let g = (f64(&dys[index]).matmul(&b.t().unwrap()).unwrap() * ADAPTER_SCALE).unwrap();
            dx = (dx + drop(&g.matmul(&a.t().unwrap()).unwrap())).unwrap();
        }
        assert_eq!(output.y.dtype(), dtype);
        assert_close(&output.y, &y, tolerance);
    }
    let only = forward_only(&x, &projections).unwrap();
    let again = forward_again(&x, &projections).unwrap();
    for ((output, only), again) in outputs.iter().zip(&only).zip(&again) {
        assert_identical(&output.y, only);
        assert_eq!(output.xa.is_some(), again.is_some());
        if let (Some(xa), Some(again)) = (&output.xa, again) {
            assert_identical(xa, again);
        }
    }
    let xas: Vec<_> = outputs.iter().map(|output| output.xa.as_ref()).collect();
    let strided_dys: Vec<_> = dys.iter().map(strided).collect();
    let dys_there: Vec<_> = strided_dys.iter().collect();
    let gradients = backward_shared(&x, &projections, &xas, &dys_there, true).unwrap();
    assert_close(&gradients.dx.unwrap(), &dx, tolerance);
    let none = backward_shared(&x, &projections, &xas, &dys_there, false).unwrap();
    assert!(none.dx.is_none());
    for (index, (found, alone)) in gradients.adapters.iter().zip(&none.adapters).enumerate() {
        assert_eq!((found.is_some(), alone.is_some()), (index != 1, index != 1));
        let (Some((da, db)), Some((da_alone, db_alone))) = (found, alone) else { continue };
        assert_identical(da, da_alone);
        assert_identical(db, db_alone);
        let (a, b) = (f64(&adapters[index].0), f64(&adapters[index].1));
        let dy = (f64(&dys[index]) * ADAPTER_SCALE).unwrap();
        if rank > 0 {
            let exact = wide.t().unwrap().matmul(&dy.matmul(&b.t().unwrap()).unwrap()).unwrap();
            assert_close(da, &exact, tolerance);
            assert_close(
                db,
                &wide.matmul(&a).unwrap().t().unwrap().matmul(&dy).unwrap(),
                tolerance,
            );
        }
    }
}

#[test]
fn products_are_independent_of_threads() {
    let (square, wide) = (matrix(300, 300, 1), matrix(90, 700, 2));
    let x = random(&[600, 300], 3).to_dtype(DType::BF16).unwrap();
    let dy = random(&[600, 90], 4).to_dtype(DType::F32).unwrap();
    let few = random(&[3, 300], 5).to_dtype(DType::F32).unwrap();
    assert_independent_of_threads(|| {
        vec![
            linear(&x, &square, None).unwrap(),
            linear(&few, &square, None).unwrap(),
            linear_backward_input(&dy, &wide).unwrap(),
        ]
    });
}

#[test]
fn other_matrices_do_not_round_rows() {
    let x = random(&[4, 64], 1).to_dtype(DType::F32).unwrap();
    for format in [Format::Fp8Rows, Format::Q8_0, Format::Affine { bits: 8, group: 64 }] {
        let weight = quantize(&x, format).unwrap().with_arithmetic(Arithmetic::Int8Rows);
        assert!(weight.int8_scales().is_none(), "{format:?}");
        let plain = weight.clone().with_arithmetic(Arithmetic::Float);
        let x = x.narrow(0, 0, 3).unwrap();
        assert_identical(&linear(&x, &weight, None).unwrap(), &linear(&x, &plain, None).unwrap());
    }
    assert!(matrix(4, 64, 1).with_arithmetic(Arithmetic::Float).int8_scales().is_none());
    assert!(matrix(1, MOST + 1, 1).int8_scales().is_none());
    assert!(matrix(MOST + 1, 1, 1).int8_scales().is_none());
}

#[cfg(not(feature = "metal"))]
#[test]
fn gpus_refuse_them() {
    use crate::backend::metal::{Emulator, Launch, emulate};
    use crate::devices::MetalMatmul;
    let run = |_: &Launch| unreachable!("refused before");
    let emulator = Emulator {
        run: std::sync::Arc::new(run),
        seed: 0,
        most_threads: 1024,
        matmul: MetalMatmul::Fused,
    };
    let (matrix, x) = (matrix(8, 8, 1), random(&[5, 8], 2).to_dtype(DType::F32).unwrap());
    let errors = emulate(emulator, || {
        [message(linear(&x, &matrix, None)), message(linear_backward_input(&x, &matrix))]
    });
    for error in errors {
        assert!(
            error.contains("(Arithmetic::Int8Rows) on a GPU, expected them on the CPU"),
            "{error}"
        );
    }
}

#[test]
fn products_of_nothing_are_nothing() {
    let matrix = matrix(5, 8, 1);
    let none = Tensor::zeros((0, 8), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(linear(&none, &matrix, None).unwrap().dims(), [0, 5]);
    let none = none.narrow(D::Minus1, 0, 5).unwrap();
    assert_eq!(linear_backward_input(&none, &matrix).unwrap().dims(), [0, 8]);
}
