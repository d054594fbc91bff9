//! Products, in every mode: tiles and few rows, against f64.

use super::{THOROUGH, in_every};
use crate::backend::metal::product::{Adapter, FewRows, FewWeight, Finish, Mask, Matrix, Term};
use crate::backend::metal::{Array, Metal};
use crate::testing::*;
use candle_core::{DType, Device, Tensor};
use std::cell::RefCell;

const OPERATION: &str = "a test";

fn metal() -> Metal {
    Metal::of(&Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap()).unwrap()
}

/// A matrix inside of a wider tensor that begins a few elements in, and its numbers in f64.
struct Operand {
    array: Array,
    stride: usize,
    numbers: Tensor,
}

impl Operand {
    /// With other elements before and beside each row. Rows begin at 16 bytes, or at odd elements.
    fn new(rows: usize, columns: usize, aligned: bool, dtype: DType, seed: u64) -> Operand {
        let first = if aligned { 8 } else { 3 };
        let stride = if aligned { (columns + 8).next_multiple_of(8) } else { columns + 3 };
        let wide = random(&[rows + 1, stride], seed).to_dtype(dtype).unwrap();
        let tensor = wide.narrow(0, 1, rows).unwrap().narrow(1, first, columns).unwrap();
        let array = metal().strided(&tensor).unwrap();
        let numbers = tensor.to_dtype(DType::F64).unwrap().contiguous().unwrap();
        Operand { array, stride, numbers }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::of(&self.array, self.stride)
    }
}

/// The operand `(rows, columns)`, stored as its transposed matrix if `transposed`.
fn operand(rows: usize, columns: usize, transposed: bool, aligned: bool, dtype: DType) -> Operand {
    let seed = (rows + 3 * columns) as u64;
    match transposed {
        true => Operand::new(columns, rows, aligned, dtype, seed),
        false => Operand::new(rows, columns, aligned, dtype, seed),
    }
}

fn transpose(matrix: Matrix<'_>, transposed: bool) -> Matrix<'_> {
    if transposed { matrix.t() } else { matrix }
}

fn transpose_tensor(tensor: &Tensor, transposed: bool) -> Tensor {
    if transposed { tensor.t().unwrap() } else { tensor.clone() }
}

/// Asserts that `found` is `expected` after it was rounded to the dtype.
#[track_caller]
fn assert_product(found: &Tensor, expected: &Tensor, inner: usize) {
    let tolerance = match found.dtype() {
        DType::F32 => 1e-6,
        DType::F16 => 1e-3,
        _ => 8e-3,
    };
    // The sum's rounding grows with its length, slowly.
    assert_close(found, expected, tolerance * (1.0 + (inner as f64).sqrt() / 16.0));
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
#[ignore = "needs clang"]
fn metal_products_of_all_layouts_and_dtypes_are_right() {
    in_every(THOROUGH, || {
        let metal = metal();
        // The last ones fill whole tiles.
        let sizes = [(33, 37, 41), (64, 33, 16), (9, 5, 3), (32, 64, 64)];
        for (index, (rows, columns, inner)) in sizes.into_iter().enumerate() {
            for (sides, dtype) in
                [(0, DTYPES[0]), (1, DTYPES[1]), (2, DTYPES[2]), (3, DTYPES[index % 3])]
            {
                let [left_transposed, right_transposed] = [sides & 1 == 1, sides & 2 == 2];
                // Aligned to 16 bytes or not, and of another dtype than the left one.
                for (aligned, other) in [
                    (true, dtype),
                    (true, DTYPES[(index + sides) % 3]),
                    (false, DTYPES[(index + sides) % 3]),
                ] {
                    let left = operand(rows, inner, left_transposed, aligned, dtype);
                    let right = operand(inner, columns, right_transposed, aligned, other);
                    let out = metal.empty((rows, columns), DTYPES[sides % 3]).unwrap();
                    let terms = [Term::new(
                        transpose(left.matrix(), left_transposed),
                        transpose(right.matrix(), right_transposed),
                        inner,
                    )];
                    metal
                        .product(OPERATION, rows, columns, &terms, Matrix::of(&out, columns))
                        .unwrap();
                    let right = rounded(&right.numbers, dtype);
                    let expected = transpose_tensor(&left.numbers, left_transposed)
                        .matmul(&transpose_tensor(&right, right_transposed))
                        .unwrap();
                    assert_product(&out.tensor, &expected, inner);
                }
            }
        }
    });
}

#[test]
#[ignore = "needs clang"]
fn metal_products_in_large_tiles_are_right_and_the_same_in_every_order_of_threads() {
    // Nine tiles down are more than a panel; eight across.
    let (rows, columns, inner) = (8 * 64 + 3, 7 * 64 + 1, 19);
    let cases = [(DType::BF16, false, true), (DType::F32, true, false), (DType::F16, true, true)];
    for (dtype, left_transposed, right_transposed) in cases {
        let first = RefCell::new(None);
        in_every(THOROUGH, || {
            let metal = metal();
            let left = operand(rows, inner, left_transposed, true, dtype);
            let right = operand(inner, columns, right_transposed, false, dtype);
            let out = metal.empty((rows, columns), DType::F32).unwrap();
            let (left_matrix, right_matrix) = (
                transpose(left.matrix(), left_transposed),
                transpose(right.matrix(), right_transposed),
            );
            let terms = [Term::new(left_matrix, right_matrix, inner)];
            metal.product(OPERATION, rows, columns, &terms, Matrix::of(&out, columns)).unwrap();
            match &mut *first.borrow_mut() {
                Some(first) => assert_identical(first, &out.tensor),
                none => {
                    let expected = transpose_tensor(&left.numbers, left_transposed)
                        .matmul(&transpose_tensor(&right.numbers, right_transposed))
                        .unwrap();
                    assert_product(&out.tensor, &expected, inner);
                    *none = Some(out.tensor.clone());
                }
            }
        });
    }
}

#[test]
#[ignore = "needs clang"]
fn metal_products_of_several_terms_add_up_with_bias_and_what_is_there() {
    in_every(THOROUGH, || {
        let metal = metal();
        let (rows, columns) = (35, 34);
        for (dtype, count) in [(DType::BF16, 2), (DType::F32, 8)] {
            let inners: Vec<usize> = (0..count).map(|index| 5 + 6 * index).collect();
            let operands: Vec<_> = inners
                .iter()
                .map(|inner| {
                    let left = operand(rows, *inner, false, true, dtype);
                    (left, operand(*inner, columns, inner % 2 == 0, false, dtype))
                })
                .collect();
            let bias = operand(1, columns, false, true, DType::F16);
            let there = operand(rows, columns, false, true, dtype);
            let wide = metal.empty((rows, columns + 3), dtype).unwrap();
            let part = wide.tensor.narrow(1, 1, columns).unwrap();
            wide.tensor.slice_set(&there.array.tensor.contiguous().unwrap(), 1, 1).unwrap();
            let terms: Vec<_> = inners
                .iter()
                .zip(&operands)
                .enumerate()
                .map(|(index, (inner, (left, right)))| {
                    let term =
                        Term::new(left.matrix(), transpose(right.matrix(), inner % 2 == 0), *inner);
                    if index == 0 { term.times(0.5) } else { term }
                })
                .collect();
            let finish = Finish { bias: Some(&bias.array), add: true, mask: None };
            let inside = wide.at(dtype.size_in_bytes());
            let to = Matrix::of(&inside, columns + 3);
            metal.product_with(OPERATION, rows, columns, &terms, finish, to).unwrap();
            let mut expected = there.numbers.broadcast_add(&bias.numbers).unwrap();
            for (index, (inner, (left, right))) in inners.iter().zip(&operands).enumerate() {
                let product =
                    left.numbers.matmul(&transpose_tensor(&right.numbers, inner % 2 == 0)).unwrap();
                let factor = if index == 0 { 0.5 } else { 1.0 };
                expected = (expected + (product * factor).unwrap()).unwrap();
            }
            assert_product(&part, &expected, 500);
            // What lies beside the matrix is as it was.
            let beside = wide.tensor.narrow(1, 0, 1).unwrap();
            assert!(values(&beside).iter().all(|value| value.is_nan()));
        }
    });
}

/// What is left of `x` `(rows, columns)` when elements are dropped.
fn dropped(x: &Tensor, Mask { seed, threshold }: Mask) -> Tensor {
    let kept = values(x).into_iter().zip(1u64..).map(|(value, index)| {
        let mut z = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        if (z ^ (z >> 31)) >> 32 < threshold.into() { 0.0 } else { value }
    });
    Tensor::from_vec(kept.collect::<Vec<_>>(), x.dims(), &Device::Cpu).unwrap()
}

#[test]
#[ignore = "needs clang"]
fn metal_products_drop_elements_of_the_left_matrix_and_of_the_result() {
    in_every(THOROUGH, || {
        let metal = metal();
        let mask = Mask { seed: 0xdead_beef_1234_5678, threshold: 1 << 30 };
        let (rows, columns) = (35, 9);
        // The longer one is cut into slices.
        for (inner, transposed) in [(41, false), (1100, false), (1100, true)] {
            let left = operand(rows, inner, transposed, true, DType::F16);
            let right = operand(inner, columns, false, true, DType::F16);
            let out = metal.empty((rows, columns), DType::F32).unwrap();
            let term = || Term::new(transpose(left.matrix(), transposed), right.matrix(), inner);
            let to = Matrix::of(&out, columns);
            let terms = [term().times(1.5).masked(Some(mask))];
            metal.product(OPERATION, rows, columns, &terms, to).unwrap();
            let masked = transpose_tensor(&dropped(&left.numbers, mask), transposed);
            let expected = (masked.matmul(&right.numbers).unwrap() * 1.5).unwrap();
            assert_product(&out.tensor, &expected, inner);

            let finish = Finish { mask: Some((mask, 3.0)), add: true, bias: None };
            metal.product_with(OPERATION, rows, columns, &[term()], finish, to).unwrap();
            let left = transpose_tensor(&left.numbers, transposed);
            let product = dropped(&left.matmul(&right.numbers).unwrap(), mask);
            let expected = (expected + (product * 3.0).unwrap()).unwrap();
            assert_product(&out.tensor, &expected, inner);
        }
    });
}

#[test]
#[ignore = "needs clang"]
fn metal_products_of_few_rows_are_right() {
    in_every(THOROUGH, || {
        let metal = metal();
        let sizes = [(1, 37, 141, true), (3, 9, 64, false), (8, 35, 130, true)];
        for (index, (rows, columns, inner, aligned)) in sizes.into_iter().enumerate() {
            for (dtype, other) in [(0, 0), (1, 1), (2, 2), (0, 2), (2, 1)] {
                let (dtype, other) = (DTYPES[dtype], DTYPES[other]);
                let left = operand(rows, inner, false, aligned, dtype);
                let right = operand(inner, columns, true, aligned, other);
                let bias = operand(1, columns, false, true, DTYPES[index]);
                let out = metal.empty((rows, columns), DTYPES[(index + 1) % 3]).unwrap();
                let to = Matrix::of(&out, columns);
                let term = || Term::new(left.matrix(), right.matrix().t(), inner);
                metal.product(OPERATION, rows, columns, &[term().times(0.5)], to).unwrap();
                let product = left.numbers.matmul(&right.numbers.t().unwrap()).unwrap();
                let expected = (&product * 0.5).unwrap();
                assert_product(&out.tensor, &expected, inner);

                let finish = Finish { bias: Some(&bias.array), add: true, mask: None };
                let before = out.tensor.to_dtype(DType::F64).unwrap();
                metal.product_with(OPERATION, rows, columns, &[term()], finish, to).unwrap();
                let expected = (before + product).unwrap().broadcast_add(&bias.numbers).unwrap();
                assert_product(&out.tensor, &expected, inner);
            }
        }
    });
}

#[test]
#[ignore = "needs clang"]
fn metal_layers_of_few_rows_add_their_adapter() {
    in_every(THOROUGH, || {
        let metal = metal();
        // The last ones' A is large enough to be read once, in slices; each in one dtype is enough.
        let sizes = [
            (1, 37, 70, 3, &DTYPES[..]),
            (3, 9, 40, 40, &DTYPES[..]),
            (1, 140, 1100, 250, &DTYPES[2..]),
            (2, 140, 1100, 250, &DTYPES[..1]),
            (5, 140, 1100, 250, &DTYPES[1..2]),
        ];
        for (rows, columns, inner, rank, dtypes) in sizes {
            for dtype in dtypes {
                let x = operand(rows, inner, false, true, *dtype);
                let weight = operand(columns, inner, false, true, *dtype);
                let a = random(&[inner, rank], 3).to_dtype(DType::F32).unwrap();
                let b = random(&[rank, columns], 4).to_dtype(DType::F32).unwrap();
                let [a, b] = [a, b].map(|tensor| metal.contiguous(&tensor).unwrap());
                let xa = metal.empty((rows, rank), *dtype).unwrap();
                let y = metal.empty((rows, columns), *dtype).unwrap();
                let layer = FewRows {
                    x: x.matrix(),
                    weight: FewWeight::Dense(weight.matrix()),
                    bias: None,
                    adapter: Some(Adapter { a: &a, b: &b, rank, scale: 0.25, xa: &xa }),
                    y: Matrix::of(&y, columns),
                    factor: 1.0,
                    add: false,
                };
                metal.few_rows(OPERATION, rows, columns, inner, &layer).unwrap();
                let [a, b] = [a, b].map(|array| array.tensor.to_dtype(DType::F64).unwrap());
                let low_rank = x.numbers.matmul(&a).unwrap();
                assert_product(&xa.tensor, &low_rank, inner);
                let added = (low_rank.matmul(&b).unwrap() * 0.25).unwrap();
                let product = x.numbers.matmul(&weight.numbers.t().unwrap()).unwrap();
                assert_product(&y.tensor, &(product + added).unwrap(), inner);
            }
        }
    });
}
