use super::*;
use crate::lora_linear::{self, Lora};
use crate::testing::*;
use candle_core::{DType, Var};

const SCALE: f64 = 0.7;

/// `(out, in, rank)`
const LAYERS: [[usize; 3]; 5] = [[1, 1, 1], [5, 7, 3], [33, 65, 8], [130, 71, 20], [7, 40, 2]];

/// A weight and the matrices of an adapter that changes it about as much as it is.
struct Layer {
    weight: Tensor,
    a: Tensor,
    b: Tensor,
}

impl Layer {
    fn new([outer, inner, rank]: [usize; 3]) -> Self {
        Layer {
            weight: random(&[outer, inner], 1),
            a: random(&[inner, rank], 2),
            b: random(&[rank, outer], 3),
        }
    }

    fn map(&self, change: impl Fn(&Tensor) -> Tensor) -> Self {
        Layer { weight: change(&self.weight), a: change(&self.a), b: change(&self.b) }
    }

    /// With a weight of `dtype`, and an adapter of f32 unless the weight is f64.
    fn in_dtype(&self, dtype: DType) -> Self {
        let of_adapter = if dtype == DType::F64 { dtype } else { DType::F32 };
        let to = |tensor: &Tensor, dtype| tensor.to_dtype(dtype).unwrap();
        Layer {
            weight: to(&self.weight, dtype),
            a: to(&self.a, of_adapter),
            b: to(&self.b, of_adapter),
        }
    }

    fn merged(&self) -> Tensor {
        let [weight, a, b] =
            [&self.weight, &self.a, &self.b].map(|tensor| rounded(tensor, DType::F64));
        (weight + (a.matmul(&b).unwrap().t().unwrap() * SCALE).unwrap()).unwrap()
    }

    fn norms(&self) -> Tensor {
        let squares = squared_norms(&self.weight).unwrap();
        merged_norms(&self.weight, &squares, &self.a, &self.b, SCALE).unwrap()
    }
}

/// The norms of a matrix's rows, by their definition.
fn row_norms(matrix: &Tensor) -> Tensor {
    matrix.sqr().unwrap().sum(1).unwrap().sqrt().unwrap()
}

/// Asserts `|found - expected| <= tolerance·expected` for every element.
#[track_caller]
fn assert_relative(found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.dims(), expected.dims());
    for (found, expected) in values(found).iter().zip(values(expected)) {
        let error = (found - expected).abs();
        assert!(error <= tolerance * expected, "{found} is not {expected}, off by {error:e}");
    }
}

#[test]
fn norms_are_those_of_the_merged_rows() {
    for sizes in LAYERS {
        let exact = Layer::new(sizes);
        assert_relative(&exact.norms(), &row_norms(&exact.merged()), 1e-12);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let layer = exact.in_dtype(dtype);
            let norms = layer.norms();
            assert_eq!(norms.dtype(), DType::F32);
            // What bf16 would round is a thousand times as much.
            assert_relative(&norms, &row_norms(&layer.merged()), 4e-6);
            let squares = squared_norms(&layer.weight).unwrap();
            let expected = row_norms(&rounded(&layer.weight, DType::F64)).sqr().unwrap();
            assert_relative(&squares, &expected, 1e-6);
        }
    }
}

#[test]
fn norms_follow_a_long_input() {
    let layer = Layer::new([9, 5000, 4]).in_dtype(DType::BF16);
    assert_relative(&layer.norms(), &row_norms(&layer.merged()), 1e-5);
}

#[test]
fn an_adapter_that_takes_its_rows_away_leaves_a_norm_of_rounding() {
    for dtype in [DType::F32, DType::BF16] {
        let Layer { a, b, .. } = Layer::new([33, 65, 8]);
        let weight = (a.matmul(&b).unwrap().t().unwrap() * -SCALE).unwrap();
        let layer = Layer { weight, a, b }.in_dtype(dtype);
        let (found, before) =
            (values(&layer.norms()), values(&row_norms(&rounded(&layer.weight, DType::F64))));
        for (found, before) in found.iter().zip(before) {
            assert!(*found >= 3e-4 * before && *found <= 4e-3 * before, "{found} of {before}");
        }
    }
    // What no row ever had is no row still.
    let zeros = Layer::new([3, 4, 2]).map(|tensor| tensor.zeros_like().unwrap());
    assert_eq!(values(&zeros.in_dtype(DType::F32).norms()), [0.0; 3]);
}

#[test]
fn norms_of_what_is_no_number_are_no_numbers() {
    let mut layer = Layer::new([3, 4, 2]).in_dtype(DType::F32);
    layer.b = (&layer.b * f64::NAN).unwrap();
    assert!(values(&layer.norms()).iter().all(|norm| norm.is_nan()));
}

/// The formula in mod.rs, against a layer of the merged weight with its rows set to their lengths.
#[test]
fn a_layer_is_that_of_the_merged_weight_with_trained_lengths() {
    let layer = Layer::new([5, 7, 3]);
    let (x, m, bias) = (random(&[2, 3, 7], 4), random(&[5], 5), random(&[5], 6));
    let lora = Lora { a: &layer.a, b: &layer.b, scale: SCALE, dropout: None };
    let (y, _) = lora_linear::forward(&x, &layer.weight, None, &lora).unwrap();
    let factor = (&m / layer.norms()).unwrap();
    let found = scale_columns(&y, &factor, Some(&bias)).unwrap();
    let merged = layer.merged();
    let lengths = (&m / row_norms(&merged)).unwrap().reshape((5, 1)).unwrap();
    let weight = merged.broadcast_mul(&lengths).unwrap();
    assert_close(&found, &matmul::linear(&x, &weight, Some(&bias)).unwrap(), 1e-13);
}

#[test]
fn forward_matches_f64_in_every_dtype() {
    for shape in [&[7][..], &[2, 5, 33], &[40, 1000]] {
        let size = *shape.last().unwrap();
        let (y, factor, bias) = (random(shape, 1), random(&[size], 2), random(&[size], 3));
        let expected = |y: &Tensor, bias: &Tensor| {
            let product = y.broadcast_mul(&rounded(&factor, DType::F32)).unwrap();
            [product.broadcast_add(bias).unwrap(), product]
        };
        let exact = rounded(&factor, DType::F32);
        for (bias, expected) in [Some(&bias), None].into_iter().zip(expected(&y, &bias)) {
            assert_close(&scale_columns(&y, &exact, bias).unwrap(), &expected, 1e-14);
        }
        for (dtype, tolerance) in PRECISIONS {
            for bias_dtype in [dtype, DType::F32, DType::BF16] {
                let (y, bias) = (rounded(&y, dtype), rounded(&bias, bias_dtype));
                let low = |tensor: &Tensor, dtype| tensor.to_dtype(dtype).unwrap();
                let low_bias = low(&bias, bias_dtype);
                for (bias, expected) in [Some(&low_bias), None].into_iter().zip(expected(&y, &bias))
                {
                    let factor = low(&factor, DType::F32);
                    let z = scale_columns(&low(&y, dtype), &factor, bias).unwrap();
                    assert_eq!(z.dtype(), dtype);
                    assert_close(&z, &expected, tolerance);
                }
            }
        }
    }
}

#[test]
fn backward_matches_finite_differences() {
    for shape in [&[5, 7][..], &[2, 3, 33], &[1, 1]] {
        let size = *shape.last().unwrap();
        let (y, factor, bias) = (random(shape, 1), random(&[size], 2), random(&[size], 3));
        let dz = random(shape, 4);
        let loss = |y: &Tensor, factor: &Tensor, bias: &Tensor| {
            inner_product(&scale_columns(y, factor, Some(bias))?, &dz)
        };
        let Gradients { dy, dfactor, dbias } =
            scale_columns_backward(&y, &factor, &dz, true).unwrap();
        assert_gradient(&y, &dy, |y| loss(y, &factor, &bias));
        assert_gradient(&factor, &dfactor, |factor| loss(&y, factor, &bias));
        assert_gradient(&bias, &dbias.unwrap(), |bias| loss(&y, &factor, bias));
        assert!(scale_columns_backward(&y, &factor, &dz, false).unwrap().dbias.is_none());
    }
}

#[test]
fn backward_in_other_precisions_matches_f64() {
    let (y, dz, factor) = (random(&[500, 33], 1), random(&[500, 33], 2), random(&[33], 3));
    for (dtype, tolerance) in PRECISIONS {
        let (y, dz, factor) =
            (rounded(&y, dtype), rounded(&dz, dtype), rounded(&factor, DType::F32));
        let exact = scale_columns_backward(&y, &factor, &dz, true).unwrap();
        let low = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
        let factor = factor.to_dtype(DType::F32).unwrap();
        let found = scale_columns_backward(&low(&y), &factor, &low(&dz), true).unwrap();
        assert_eq!(found.dy.dtype(), dtype);
        assert_close(&found.dy, &exact.dy, tolerance);
        for (found, exact) in
            [(found.dfactor, exact.dfactor), (found.dbias.unwrap(), exact.dbias.unwrap())]
        {
            assert_eq!(found.dtype(), DType::F32);
            assert_close(&found, &exact, 3e-6);
        }
    }
}

#[test]
fn threads_and_strides_do_not_change_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
        let (y, dz, bias) = (low(&[2000, 33], 1), low(&[2000, 33], 2), low(&[33], 3));
        let factor = random(&[33], 4).to_dtype(DType::F32).unwrap();
        let layer = Layer::new([130, 71, 20]).in_dtype(dtype);
        let run = |view: &dyn Fn(&Tensor) -> Tensor| {
            let (y, dz, bias, factor) = (view(&y), view(&dz), view(&bias), view(&factor));
            let layer = layer.map(view);
            let found = scale_columns_backward(&y, &factor, &dz, true).unwrap();
            let z = scale_columns(&y, &factor, Some(&bias)).unwrap();
            let squares = squared_norms(&layer.weight).unwrap();
            vec![layer.norms(), squares, z, found.dy, found.dfactor, found.dbias.unwrap()]
        };
        assert_independent_of_threads(|| run(&|tensor| tensor.clone()));
        for (a, b) in run(&|tensor| tensor.clone()).iter().zip(&run(&strided)) {
            assert_identical(a, b);
        }
        // Rows at a distance, which aren't copied.
        let parts = |tensor: &Tensor| {
            let wide = Tensor::cat(&[tensor, tensor], tensor.rank() - 1).unwrap();
            wide.narrow(tensor.rank() - 1, 0, tensor.dim(tensor.rank() - 1).unwrap()).unwrap()
        };
        for (a, b) in run(&|tensor| tensor.clone()).iter().zip(&run(&parts)) {
            assert_identical(a, b);
        }
    }
}

#[test]
fn candles_autograd_gets_the_same_gradients() {
    let variable = |shape: &[usize], seed| Var::from_tensor(&random(shape, seed)).unwrap();
    let (y, factor, bias) = (variable(&[2, 5, 7], 1), variable(&[7], 2), variable(&[7], 3));
    let dz = random(&[2, 5, 7], 4);
    let loss = |z: &Tensor| (z * &dz).unwrap().sum_all().unwrap().backward().unwrap();
    let product = y.broadcast_mul(&factor).unwrap();
    let theirs = loss(&product.broadcast_add(&bias).unwrap());
    let ours = loss(&differentiable(&y, &factor, Some(&bias)).unwrap());
    for variable in [&y, &factor, &bias] {
        assert_close(ours.get(variable).unwrap(), theirs.get(variable).unwrap(), 1e-13);
    }
    let without = loss(&differentiable(&y, &factor, None).unwrap());
    assert!(without.get(&bias).is_none());
    for variable in [&y, &factor] {
        assert_close(without.get(variable).unwrap(), theirs.get(variable).unwrap(), 1e-13);
    }
}

#[test]
fn empty_and_wrong_shapes_are_handled() {
    let (empty, factor) = (random(&[0, 7], 1), random(&[7], 2));
    assert_eq!(scale_columns(&empty, &factor, None).unwrap().dims(), &[0, 7]);
    let found = scale_columns_backward(&empty, &factor, &empty, true).unwrap();
    assert_eq!(found.dy.dims(), &[0, 7]);
    assert_eq!(values(&found.dfactor), [0.0; 7]);
    assert_eq!(values(&found.dbias.unwrap()), [0.0; 7]);
    let narrow = random(&[5, 0], 1);
    assert_eq!(scale_columns(&narrow, &random(&[0], 1), None).unwrap().dims(), &[5, 0]);
    assert_eq!(values(&squared_norms(&narrow).unwrap()), [0.0; 5]);
    let none = Layer::new([5, 7, 0]);
    assert_close(&none.norms(), &row_norms(&none.weight), 1e-14);

    let y = random(&[5, 7], 1);
    let wrong = message(scale_columns(&y, &random(&[6], 1), None));
    assert!(wrong.contains("factor has shape [6], expected [7]"), "{wrong}");
    let wrong = message(scale_columns(&y, &factor.to_dtype(DType::F32).unwrap(), None));
    assert!(wrong.contains("factor is F32, expected F64"), "{wrong}");
    let wrong = message(scale_columns(&y, &factor, Some(&random(&[6], 1))));
    assert!(wrong.contains("bias has shape [6], expected [7]"), "{wrong}");
    let wrong = message(scale_columns_backward(&y, &factor, &empty, false));
    assert!(wrong.contains("dz has shape [0, 7], expected [5, 7]"), "{wrong}");
    let Layer { weight, a, b } = Layer::new([5, 7, 3]);
    let squares = squared_norms(&weight).unwrap();
    let wrong = message(merged_norms(&weight, &squares, &b, &a, SCALE));
    assert!(wrong.contains("a has shape [3, 5], expected [7, 5]"), "{wrong}");
    let wrong = message(merged_norms(&weight, &factor, &a, &b, SCALE));
    assert!(wrong.contains("base_squares has shape [7], expected [5]"), "{wrong}");
    let wrong = message(squared_norms(&factor));
    assert!(wrong.contains("expected 2 dimensions (out, in)"), "{wrong}");
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    fn back(tensor: &Tensor) -> Tensor {
        tensor.to_device(&Device::Cpu).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_norms_are_those_of_the_merged_rows() {
        let device = crate::testing::cuda();
        let put = |tensor: &Tensor| tensor.to_device(&device).unwrap();
        for sizes in LAYERS.into_iter().chain([[300, 4096, 16], [2048, 129, 33]]) {
            let exact = Layer::new(sizes);
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let layer = exact.in_dtype(dtype);
                let on_device = layer.map(put);
                let norms = on_device.norms();
                assert_eq!(norms.dtype(), DType::F32);
                assert_relative(&back(&norms), &row_norms(&layer.merged()), 1e-5);
                assert_identical(&back(&on_device.norms()), &back(&norms));
                assert_relative(
                    &back(&layer.map(|x| strided(&put(x))).norms()),
                    &back(&norms),
                    2e-6,
                );
                let squares = back(&squared_norms(&on_device.weight).unwrap());
                assert_relative(&squares, &squared_norms(&layer.weight).unwrap(), 2e-6);
            }
        }
    }

    /// Packs and single elements, several groups of rows, and more columns than a block has.
    const SHAPES: [(usize, usize); 9] = [
        (1, 1),
        (5, 8),
        (3001, 24),
        (64, 1024),
        (40, 1001),
        (33, 2056),
        (9000, 33),
        (1, 8192),
        (2, 20_011),
    ];

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_columns_are_multiplied_like_on_the_cpu() {
        let device = crate::testing::cuda();
        for (rows, columns) in SHAPES {
            for (dtype, tolerance) in PRECISIONS {
                let made = |seed| rounded(&random(&[rows, columns], seed), dtype);
                let (y, dz) = (made(1), made(2));
                let factor = rounded(&random(&[columns], 3), DType::F32);
                let put = |tensor: &Tensor, dtype| {
                    tensor.to_dtype(dtype).unwrap().to_device(&device).unwrap()
                };
                let (low_y, low_dz) = (put(&y, dtype), put(&dz, dtype));
                let low_factor = put(&factor, DType::F32);
                for bias_dtype in [Some(dtype), Some(DType::F32), None] {
                    let bias = bias_dtype.map(|dtype| rounded(&random(&[columns], 4), dtype));
                    let low_bias =
                        bias.as_ref().zip(bias_dtype).map(|(bias, dtype)| put(bias, dtype));
                    let exact = scale_columns(&y, &factor, bias.as_ref()).unwrap();
                    let z = scale_columns(&low_y, &low_factor, low_bias.as_ref()).unwrap();
                    assert_eq!(z.dtype(), dtype);
                    assert_close(&back(&z), &exact, tolerance);
                    let other = scale_columns(&strided(&low_y), &low_factor, low_bias.as_ref());
                    assert_identical(&back(&other.unwrap()), &back(&z));
                }
                let exact = scale_columns_backward(&y, &factor, &dz, true).unwrap();
                let run = |need_dbias| {
                    scale_columns_backward(&low_y, &low_factor, &low_dz, need_dbias).unwrap()
                };
                let (found, again, without) = (run(true), run(true), run(false));
                assert_eq!(found.dy.dtype(), dtype);
                assert_close(&back(&found.dy), &exact.dy, tolerance);
                assert_close(&back(&found.dfactor), &exact.dfactor, 4e-6);
                let dbias = back(found.dbias.as_ref().unwrap());
                assert_close(&dbias, exact.dbias.as_ref().unwrap(), 4e-6);
                assert_identical(&back(&again.dy), &back(&found.dy));
                assert_identical(&back(&again.dfactor), &back(&found.dfactor));
                assert_identical(&back(&again.dbias.unwrap()), &dbias);
                assert_identical(&back(&without.dfactor), &back(&found.dfactor));
                assert!(without.dbias.is_none());
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_reads_rows_at_a_distance_and_from_anywhere() {
        let device = crate::testing::cuda();
        let wide = random(&[70, 300], 1).to_dtype(DType::BF16).unwrap();
        let factor = random(&[104], 2).to_dtype(DType::F32).unwrap();
        for (of_y, of_dz) in [(8, 160), (3, 160), (8, 161)] {
            let run = |wide: &Tensor, factor: &Tensor| {
                let part = |start| wide.narrow(1, start, 104).unwrap();
                let found =
                    scale_columns_backward(&part(of_y), factor, &part(of_dz), true).unwrap();
                let z = scale_columns(&part(of_y), factor, None).unwrap();
                [z, found.dy, found.dfactor, found.dbias.unwrap()]
            };
            let expected = run(&wide, &factor);
            let found = run(&wide.to_device(&device).unwrap(), &factor.to_device(&device).unwrap());
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(&back(found), expected, 4e-6);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_handles_nothing() {
        let device = crate::testing::cuda();
        let factor = Tensor::ones(7, DType::F32, &device).unwrap();
        let empty = empty([0, 7], DType::F32, &device);
        assert_eq!(scale_columns(&empty, &factor, Some(&factor)).unwrap().dims(), &[0, 7]);
        let found = scale_columns_backward(&empty, &factor, &empty, true).unwrap();
        assert_eq!(found.dy.dims(), &[0, 7]);
        for sum in [found.dfactor, found.dbias.unwrap()] {
            assert_eq!(values(&back(&sum)), [0.0; 7]);
        }
    }
}
