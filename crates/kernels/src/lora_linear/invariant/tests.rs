use crate::batch_invariance::within;
use crate::lora_linear::{Lora, Projection, forward_again, forward_only, forward_shared};
use crate::matmul::linear;
use crate::quantized::{Arithmetic, Format, Quantized, Weight, quantize};
use crate::testing::*;
use candle_core::{DType, Device, Result, Tensor};

enum Matrix {
    Dense(Tensor),
    Quantized(Box<Quantized>),
}

impl Matrix {
    fn weight(&self) -> Weight<'_> {
        match self {
            Self::Dense(weight) => weight.into(),
            Self::Quantized(weight) => Weight::Quantized(weight),
        }
    }

    #[cfg(feature = "cuda")]
    fn to(&self, device: &Device) -> Self {
        match self {
            Self::Dense(weight) => Self::Dense(weight.to_device(device).unwrap()),
            Self::Quantized(weight) => Self::Quantized(Box::new(weight.to_device(device).unwrap())),
        }
    }
}

/// Two layers of one input, of which the second has a bias and an adapter.
struct Layers {
    weights: [Matrix; 2],
    bias: Tensor,
    a: Tensor,
    b: Tensor,
}

impl Layers {
    fn new(inner: usize, [first, second]: [usize; 2], dtype: DType) -> Layers {
        let dense = |outer: usize, seed: u64| {
            Matrix::Dense(random(&[outer, inner], seed).to_dtype(dtype).unwrap())
        };
        let adapters = if dtype == DType::F64 { dtype } else { DType::F32 };
        Layers {
            weights: [dense(first, 2), dense(second, 3)],
            bias: random(&[second], 4).to_dtype(dtype).unwrap(),
            a: random(&[inner, 5], 5).to_dtype(adapters).unwrap(),
            b: random(&[5, second], 6).to_dtype(adapters).unwrap(),
        }
    }

    fn quantized(self, format: Format, arithmetic: Arithmetic) -> Layers {
        let weights = self.weights.map(|weight| match weight {
            Matrix::Dense(weight) => {
                let weight = quantize(&weight, format).unwrap().with_arithmetic(arithmetic);
                Matrix::Quantized(Box::new(weight))
            }
            quantized => quantized,
        });
        Layers { weights, ..self }
    }

    #[cfg(feature = "cuda")]
    fn to(&self, device: &Device) -> Layers {
        let there = |tensor: &Tensor| tensor.to_device(device).unwrap();
        Layers {
            weights: [self.weights[0].to(device), self.weights[1].to(device)],
            bias: there(&self.bias),
            a: there(&self.a),
            b: there(&self.b),
        }
    }

    fn run<R>(&self, operation: impl Fn(&[Projection]) -> Result<R>) -> R {
        let lora = Lora { a: &self.a, b: &self.b, scale: 1.5, dropout: None };
        let [first, second] = &self.weights;
        let projections = [
            Projection { weight: first.weight(), bias: None, lora: None },
            Projection { weight: second.weight(), bias: Some(&self.bias), lora: Some(lora) },
        ];
        operation(&projections).unwrap()
    }

    /// The results for `x` with batch invariance.
    fn invariant(&self, x: &Tensor) -> Vec<Tensor> {
        let ys = within(true, || self.run(|projections| forward_only(x, projections)));
        ys.iter().map(here).collect()
    }

    /// That rows of `x` `(rows, inner)` have the same bits alone and beside others, which are those of other passes but
    /// for rounding.
    fn check(&self, x: &Tensor, tolerance: f64) {
        let rows = x.dim(0).unwrap();
        let whole = self.invariant(x);
        for (found, expected) in whole.iter().zip(self.run(|it| forward_only(x, it))) {
            assert_close(found, &here(&expected), tolerance);
        }
        for count in [1, 2, 4, 5, 16, 47, 48, 49, 96, 255, 256, 257] {
            for start in [0, 3, rows.saturating_sub(count)] {
                if start + count > rows {
                    continue;
                }
                // As an engine has them.
                let part = x.narrow(0, start, count).unwrap().unsqueeze(1).unwrap();
                for (part, whole) in self.invariant(&part).iter().zip(&whole) {
                    let expected = whole.narrow(0, start, count).unwrap();
                    assert_identical(&part.squeeze(1).unwrap(), &expected);
                }
            }
        }
        self.check_other_operations(x, &whole);
    }

    /// That operations that give more or less give the same.
    fn check_other_operations(&self, x: &Tensor, whole: &[Tensor]) {
        within(true, || {
            let outputs = self.run(|projections| forward_shared(x, projections));
            let again = self.run(|projections| forward_again(x, projections));
            for ((output, whole), again) in outputs.iter().zip(whole).zip(again) {
                assert_identical(&here(&output.y), whole);
                if let (Some(xa), Some(again)) = (&output.xa, &again) {
                    assert_eq!(xa.dims(), [x.dim(0).unwrap(), 5]);
                    assert_identical(&here(xa), &here(again));
                }
            }
            assert!(outputs[0].xa.is_none() && outputs[1].xa.is_some());
            let first = linear(x, self.weights[0].weight(), None).unwrap();
            assert_identical(&here(&first), &whole[0]);
            let second = self.run(|projections| forward_only(x, &projections[1..]));
            assert_identical(&here(&second[0]), &whole[1]);
        });
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    for (dtype, tolerance) in
        [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::BF16, 2e-1), (DType::F16, 2e-2)]
    {
        let layers = Layers::new(73, [40, 33], dtype);
        layers.check(&random(&[110, 73], 1).to_dtype(dtype).unwrap(), tolerance);
    }
}

#[test]
fn a_row_has_the_same_bits_over_a_matrix_in_fewer_bits() {
    let formats = [
        (Format::Nf4 { block: 64, nested: true }, Arithmetic::Float),
        (Format::Q4K, Arithmetic::Float),
        (Format::Fp8Rows, Arithmetic::Fp8),
        (Format::Int8Rows, Arithmetic::Int8Rows),
    ];
    for (format, arithmetic) in formats {
        for (dtype, tolerance) in [(DType::F32, 2e-3), (DType::BF16, 4e-1)] {
            let layers = Layers::new(256, [40, 33], DType::F32).quantized(format, arithmetic);
            let bias = layers.bias.to_dtype(dtype).unwrap();
            let layers = Layers { bias, ..layers };
            layers.check(&random(&[101, 256], 1).to_dtype(dtype).unwrap(), tolerance);
        }
    }
}

#[test]
fn threads_and_strides_do_not_matter() {
    for dtype in [DType::F32, DType::BF16] {
        let layers = Layers::new(300, [200, 120], dtype);
        let x = random(&[60, 300], 1).to_dtype(dtype).unwrap();
        assert_independent_of_threads(|| layers.invariant(&x));
        let pairs = layers.invariant(&x);
        for (a, b) in pairs.iter().zip(layers.invariant(&strided(&x))) {
            assert_identical(a, &b);
        }
    }
}

#[test]
fn no_rows_and_wrong_shapes_are_handled() {
    let layers = Layers::new(8, [4, 6], DType::F32);
    let none = Tensor::zeros((0, 1, 8), DType::F32, &Device::Cpu).unwrap();
    let dims: Vec<_> = layers.invariant(&none).iter().map(|y| y.dims().to_vec()).collect();
    assert_eq!(dims, [[0, 1, 4], [0, 1, 6]]);
    let x = random(&[3, 7], 1).to_dtype(DType::F32).unwrap();
    let projection = Projection { weight: layers.weights[0].weight(), bias: None, lora: None };
    let wrong = message(within(true, || forward_only(&x, &[projection])));
    assert!(wrong.contains("expected (out, 7)"), "{wrong}");
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_rows_have_the_same_bits_in_any_company() {
        let device = crate::testing::cuda();
        for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::BF16, 2e-1), (DType::F16, 2e-2)] {
            for (inner, outer) in [(72, [40, 33]), (1000, [44, 48])] {
                let layers = Layers::new(inner, outer, dtype).to(&device);
                let x = random(&[600, inner], 1).to_dtype(dtype).unwrap();
                let tolerance = tolerance * (inner / 72) as f64;
                layers.check(&x.to_device(&device).unwrap(), tolerance);
            }
        }
        let nf4 = Format::Nf4 { block: 64, nested: true };
        for (format, arithmetic) in [(nf4, Arithmetic::Float), (Format::Fp8Rows, Arithmetic::Fp8)] {
            let layers = Layers::new(256, [40, 48], DType::F32).quantized(format, arithmetic);
            let bias = layers.bias.to_dtype(DType::BF16).unwrap();
            let layers = Layers { bias, ..layers }.to(&device);
            let x = random(&[600, 256], 1).to_dtype(DType::BF16).unwrap();
            layers.check(&x.to_device(&device).unwrap(), 4e-1);
        }
    }

    /// Sizes of models, for which libraries cut sums in ways that depend on where a tile stands.
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_rows_have_the_same_bits_at_every_place() {
        let device = crate::testing::cuda();
        let sizes = [
            (4096, [4096, 1024]),
            (4096, [14336, 14336]),
            (14336, [4096, 4096]),
            (4096, [128_256, 8]),
            (2048, [8192, 2048]),
            (576, [1536, 192]),
            (1536, [576, 49152]),
        ];
        for (inner, outer) in sizes {
            for dtype in [DType::BF16, DType::F32] {
                let layers = Layers::new(inner, outer, dtype).to(&device);
                let one = random(&[1, inner], 7).to_dtype(dtype).unwrap();
                let one = one.to_device(&device).unwrap();
                let expected = layers.invariant(&one);
                let many = one.broadcast_as((300, inner)).unwrap().contiguous().unwrap();
                for (found, expected) in layers.invariant(&many).iter().zip(&expected) {
                    let expected = expected.broadcast_as(found.shape()).unwrap();
                    assert_identical(found, &expected.contiguous().unwrap());
                }
            }
        }
    }
}

#[cfg(not(feature = "metal"))]
mod metal {
    use super::*;
    use crate::backend::metal::{Emulator, emulate};
    use metal_emulator::Mode;

    #[test]
    #[ignore = "needs clang"]
    fn metal_rows_have_the_same_bits_in_any_company() {
        for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::BF16, 2e-1)] {
            let layers = Layers::new(73, [40, 33], dtype);
            let x = random(&[70, 73], 1).to_dtype(dtype).unwrap();
            emulate(Emulator::open(Mode::Plain), || layers.check(&x, tolerance));
        }
        let nf4 = Format::Nf4 { block: 64, nested: true };
        let layers = Layers::new(64, [20, 9], DType::F32).quantized(nf4, Arithmetic::Float);
        let x = random(&[70, 64], 1).to_dtype(DType::F32).unwrap();
        emulate(Emulator::open(Mode::Plain), || layers.check(&x, 2e-3));
    }
}
