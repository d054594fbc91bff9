use super::{Norm, forward_normed, forward_normed_unit};
use crate::glu::{self, Activation};
use crate::lora_linear::{Lora, Projection, forward_only};
use crate::quantized::testing::every_kind;
use crate::quantized::{Quantized, Weight};
use crate::rms_norm;
use crate::testing::*;
use candle_core::{DType, Device, Result, Tensor};

const EPS: f64 = 1e-5;
const ACTIVATIONS: [Activation; 4] =
    [Activation::Silu, Activation::GeluTanh, Activation::Gelu, Activation::Clamped];

#[derive(Clone)]
enum Matrix {
    Dense(Tensor),
    Packed(Box<Quantized>),
}

impl Matrix {
    fn dense(outer: usize, inner: usize, seed: u64) -> Matrix {
        Matrix::Dense(random(&[outer, inner], seed))
    }

    fn weight(&self) -> Weight<'_> {
        match self {
            Matrix::Dense(weight) => weight.into(),
            Matrix::Packed(weight) => Weight::Quantized(weight),
        }
    }

    fn on(&self, device: &Device, dtype: DType) -> Matrix {
        match self {
            Matrix::Dense(weight) => Matrix::Dense(there(&weight.to_dtype(dtype).unwrap(), device)),
            Matrix::Packed(weight) => Matrix::Packed(Box::new(weight.to_device(device).unwrap())),
        }
    }
}

/// Every kind of weight in fewer bits, by name.
fn packed(shape: (usize, usize)) -> Vec<(String, Matrix)> {
    let kinds = every_kind(shape).into_iter();
    kinds.map(|(name, weight)| (name, Matrix::Packed(Box::new(weight)))).collect()
}

fn nf4(shape: (usize, usize)) -> Matrix {
    packed(shape).into_iter().find(|(name, _)| name == "nf4").unwrap().1
}

/// Layers of one input, of which the first has a bias, and all may have adapters.
struct Layers {
    weights: Vec<Matrix>,
    bias: Tensor,
    loras: Vec<[Tensor; 2]>,
}

impl Layers {
    fn new(weights: impl IntoIterator<Item = Matrix>) -> Layers {
        let weights: Vec<_> = weights.into_iter().collect();
        let bias = random(&[weights[0].weight().shape().unwrap().0], 5);
        Layers { weights, bias, loras: Vec::new() }
    }

    /// Of several ranks.
    fn with_adapters(self) -> Layers {
        let factors = |(weight, rank): (&Matrix, usize)| {
            let (outer, inner) = weight.weight().shape().unwrap();
            let factors = [random(&[inner, rank], 6), random(&[rank, outer], 7)];
            factors.map(|factor| rounded(&factor, DType::F32))
        };
        let loras = self.weights.iter().zip([40, 4].into_iter().cycle()).map(factors).collect();
        Layers { loras, ..self }
    }

    fn on(&self, device: &Device, dtype: DType) -> Layers {
        let adapters = if dtype == DType::F64 { dtype } else { DType::F32 };
        let to = |tensor: &Tensor, dtype| there(&tensor.to_dtype(dtype).unwrap(), device);
        Layers {
            weights: self.weights.iter().map(|weight| weight.on(device, dtype)).collect(),
            bias: to(&self.bias, dtype),
            loras: self
                .loras
                .iter()
                .map(|factors| factors.each_ref().map(|it| to(it, adapters)))
                .collect(),
        }
    }

    fn projections(&self) -> Vec<Projection<'_>> {
        let weights = self.weights.iter().enumerate();
        let projections = weights.map(|(index, weight)| Projection {
            weight: weight.weight(),
            bias: (index == 0).then_some(&self.bias),
            lora: self.loras.get(index).map(|[a, b]| Lora { a, b, scale: 1.5, dropout: None }),
        });
        projections.collect()
    }
}

/// x and the residual, and the weight of the norm.
struct Read {
    both: [Tensor; 2],
    weight: Tensor,
}

impl Read {
    fn new(rows: usize, inner: usize, dtype: DType) -> Read {
        let both = [1, 2].map(|seed| rounded(&random(&[1, rows, inner], seed), dtype));
        let weight = random(&[inner], 3).affine(0.3, 1.0).unwrap();
        Read { both, weight: rounded(&weight, dtype) }
    }

    /// As parts of wider rows, `first` elements from their beginning.
    fn apart(&self, first: usize) -> Read {
        let apart = |tensor: &Tensor| {
            let inner = tensor.dim(2).unwrap();
            let wide = tensor.pad_with_zeros(2, first, 8).unwrap();
            wide.narrow(2, first, inner).unwrap()
        };
        Read { both: self.both.each_ref().map(apart), weight: self.weight.clone() }
    }

    fn on(&self, device: &Device, dtype: DType) -> Read {
        let to = |tensor: &Tensor| there(&tensor.to_dtype(dtype).unwrap(), device);
        Read { both: self.both.each_ref().map(to), weight: to(&self.weight) }
    }

    fn norm(&self) -> Norm<'_> {
        Norm { weight: &self.weight, eps: EPS, weight_offset: 1.0 }
    }

    /// The sum, and the outputs.
    fn normed(&self, layers: &Layers) -> Result<Vec<Tensor>> {
        let [x, residual] = &self.both;
        let (sum, ys) = forward_normed(x, residual, &self.norm(), &layers.projections())?;
        Ok([sum].into_iter().chain(ys).collect())
    }

    /// The same by an operation for each.
    fn normed_by_parts(&self, layers: &Layers) -> Vec<Tensor> {
        let [x, residual] = &self.both;
        let (sum, normed) =
            rms_norm::forward_residual(x, residual, &self.weight, EPS, 1.0).unwrap();
        let ys = forward_only(&normed, &layers.projections()).unwrap();
        [sum].into_iter().chain(ys).collect()
    }

    /// The sum, and the unit of two layers.
    fn unit(&self, layers: &Layers, activation: Activation) -> Result<Vec<Tensor>> {
        let ([x, residual], projections) = (&self.both, layers.projections());
        let both = [projections[0], projections[1]];
        let (sum, unit) = forward_normed_unit(x, residual, &self.norm(), both, activation)?;
        Ok(vec![sum, unit])
    }
}

/// The sum, and the unit of the outputs that come with it.
fn with_unit(normed: &[Tensor], activation: Activation) -> Vec<Tensor> {
    vec![normed[0].clone(), glu::forward(&normed[1], &normed[2], activation).unwrap()]
}

fn assert_all_identical(found: &[Tensor], expected: &[Tensor]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_identical(found, expected);
    }
}

#[test]
fn they_give_what_their_parts_do() {
    let layers = Layers::new([Matrix::dense(24, 256, 8), nf4((24, 256))]).with_adapters();
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let (layers, read) = (layers.on(&Device::Cpu, dtype), Read::new(3, 256, dtype));
        let read = read.on(&Device::Cpu, dtype).apart(8);
        let parts = read.normed_by_parts(&layers);
        assert_all_identical(&read.normed(&layers).unwrap(), &parts);
        for activation in ACTIVATIONS {
            let found = read.unit(&layers, activation).unwrap();
            assert_all_identical(&found, &with_unit(&parts, activation));
        }
    }
}

/// What has an error that names this number, on a device.
fn errors(device: &Device) {
    let layers = |outers: [usize; 2]| {
        Layers::new(outers.map(|outer| Matrix::dense(outer, 256, 1))).on(device, DType::F32)
    };
    let read = |both: [usize; 2], weight: usize| {
        let both = both.map(|inner| random(&[1, 2, inner], 1));
        Read { both, weight: random(&[weight], 2) }.on(device, DType::F32)
    };
    for (read, found) in [
        (read([256, 128], 256), "128"),
        (read([256, 256], 255), "255"),
        (read([512, 512], 512), "512"),
    ] {
        let error = message(read.normed(&layers([24, 24])));
        assert!(error.contains(found), "{error}");
    }
    let error = message(read([256, 256], 256).unit(&layers([24, 32]), Activation::Silu));
    assert!(error.contains("24") && error.contains("32"), "{error}");
}

#[test]
fn what_does_not_fit_is_an_error() {
    errors(&Device::Cpu);
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::super::at_once;
    use super::*;
    use crate::backend::cuda::Cuda;
    use crate::batch_invariance::within;

    /// Kinds that Hopper's streaming kernels take.
    const STREAMED: [&str; 12] = [
        "affine 4",
        "symmetric 4",
        "fp8",
        "int8 by rows",
        "nf4",
        "mxfp4",
        "nvfp4",
        "q2_k",
        "q3_k",
        "q4_k",
        "q5_k",
        "q6_k",
    ];

    /// Whether layers make the norm, and the unit.
    fn are_at_once(read: &Read, layers: &Layers) -> [bool; 2] {
        let ([x, residual], projections) = (&read.both, layers.projections());
        let is = |gate| at_once([x, residual], &read.norm(), &projections, gate).unwrap().is_some();
        [is(None), is(Some(Activation::Silu))]
    }

    /// How far outputs are from those in f64 of numbers that aren't rounded between the parts.
    fn assert_near(found: &[Tensor], exact: &[Tensor], tolerance: f64, what: &str) {
        assert_eq!(found.len(), exact.len());
        for (found, exact) in found.iter().zip(exact) {
            let off = (here(found).to_dtype(DType::F64).unwrap() - exact).unwrap();
            let (off, limit) = (max_abs(&off), tolerance * (1.0 + max_abs(exact)));
            assert!(off <= limit, "{what}: off by {off:e} of {limit:e}");
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_norms_and_gates_with_layers_of_every_kind() {
        let device = crate::testing::cuda();
        let is_hopper = Cuda::on(&device).unwrap().has_warpgroups().unwrap();
        for (index, (outer, inner)) in
            [(40, 256), (17, 4352), (2125, 256), (5000, 512)].into_iter().enumerate()
        {
            for (number, (name, weight)) in packed((outer, inner)).into_iter().enumerate() {
                let mut layers = Layers::new([weight.clone(), weight]);
                if (index + number) % 2 == 1 {
                    layers = layers.with_adapters();
                }
                for (dtype, tolerance) in PRECISIONS {
                    let exact_layers = layers.on(&Device::Cpu, DType::F64);
                    let there = layers.on(&device, dtype);
                    for rows in [1, 2, 3, 5] {
                        let read = Read::new(rows, inner, dtype);
                        let exact =
                            read.on(&Device::Cpu, DType::F64).normed_by_parts(&exact_layers);
                        let read = read.on(&device, dtype).apart(16);
                        let what = format!("{name}, {rows} of {inner} in {dtype:?}");
                        // Beside rows that are too long x·A has no room.
                        let has_room = layers.loras.is_empty() || inner < 4352;
                        if STREAMED.contains(&&*name) && is_hopper && has_room {
                            let fits = dtype != DType::F32 && rows <= 4;
                            assert_eq!(are_at_once(&read, &there), [fits; 2], "{what}");
                        }
                        let found = read.normed(&there).unwrap();
                        assert_near(&found, &exact, tolerance, &what);
                        assert_identical(&found[0], &read.normed_by_parts(&there)[0]);
                        assert_all_identical(&read.normed(&there).unwrap(), &found);
                        for activation in ACTIVATIONS {
                            // What a layer gives is rounded before the unit is made of it.
                            let unit = read.unit(&there, activation).unwrap();
                            assert_all_identical(&unit, &with_unit(&found, activation));
                        }
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU of compute capability 9.0"]
    fn cuda_hopper_makes_the_unit_of_dense_layers() {
        let device = crate::testing::cuda();
        assert!(
            Cuda::on(&device).unwrap().has_warpgroups().unwrap(),
            "this test needs a Hopper GPU"
        );
        let is_made = |read: &Read, layers: &Layers| {
            let projections = layers.projections();
            let both = [projections[0], projections[1]];
            let x = &read.both[0];
            let sizes = crate::backend::rows_and_columns("test", "x", x).unwrap();
            let both = crate::lora_linear::cuda::both_dense(&both).unwrap();
            crate::lora_linear::cuda::makes_unit("test", x, sizes, &both).unwrap()
        };
        let dense = |outers: [usize; 2], inner: usize| {
            Layers::new(
                [(outers[0], 8), (outers[1], 9)]
                    .map(|(outer, seed)| Matrix::dense(outer, inner, seed)),
            )
        };
        for (rows, outer, inner) in [
            (1, 40, 512),
            (17, 8, 72),
            (64, 1000, 264),
            (65, 200, 1000),
            (33, 8704, 136),
            (100, 4264, 64),
            (128, 14336, 200),
        ] {
            let layers = dense([outer; 2], inner);
            for dtype in [DType::BF16, DType::F16] {
                let layers = layers.on(&device, dtype);
                for read in [Read::new(rows, inner, dtype), Read::new(rows, inner, dtype).apart(3)]
                {
                    let read = read.on(&device, dtype);
                    let check = || {
                        let parts = read.normed_by_parts(&layers);
                        for activation in ACTIVATIONS {
                            let found = read.unit(&layers, activation).unwrap();
                            assert_all_identical(&found, &with_unit(&parts, activation));
                        }
                    };
                    assert_eq!(is_made(&read, &layers), rows > 4, "{rows}");
                    check();
                    within(true, || {
                        assert!(is_made(&read, &layers), "{rows}");
                        check();
                    });
                }
            }
        }
        for (rows, layers, inner, dtype) in [
            (129, dense([64; 2], 64), 64, DType::BF16),
            (20, dense([64, 72], 64), 64, DType::BF16),
            (20, dense([60; 2], 64), 64, DType::BF16),
            (20, dense([64; 2], 60), 60, DType::BF16),
            (20, dense([64; 2], 64), 64, DType::F32),
            (20, dense([64; 2], 64).with_adapters(), 64, DType::F16),
        ] {
            let read = Read::new(rows, inner, dtype).on(&device, dtype);
            assert!(!is_made(&read, &layers.on(&device, dtype)), "{rows} rows of {inner}");
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_takes_parts_where_no_layer_norms() {
        let device = crate::testing::cuda();
        let kinds = |shape| packed(shape).into_iter().map(|(_, weight)| weight);
        let several = Layers::new(kinds((48, 512)));
        let narrow = Layers::new(kinds((48, 320)).take(2));
        let dense = Layers::new([Matrix::dense(48, 512, 1), nf4((48, 512))]);
        let long = Layers::new([nf4((48, 8448)), nf4((48, 8448))]);
        for dtype in [DType::BF16, DType::F16] {
            let read = |rows, inner| Read::new(rows, inner, dtype).on(&device, dtype);
            let [several, narrow, dense, long] =
                [&several, &narrow, &dense, &long].map(|layers| layers.on(&device, dtype));
            let same = |read: &Read, layers: &Layers| {
                let both =
                    Layers { weights: layers.weights[..2].to_vec(), ..layers.on(&device, dtype) };
                assert_eq!(are_at_once(read, &both), [false; 2]);
                let parts = read.normed_by_parts(layers);
                assert_all_identical(&read.normed(layers).unwrap(), &parts);
                let unit = read.unit(layers, Activation::Silu).unwrap();
                assert_all_identical(&unit, &with_unit(&parts, Activation::Silu));
            };
            // Launches for several kinds, of which the first writes the sum.
            let (found, parts) =
                (read(2, 512).normed(&several), read(2, 512).normed_by_parts(&several));
            assert_identical(&found.unwrap()[0], &parts[0]);
            same(&read(1, 320), &narrow);
            same(&read(1, 512), &dense);
            same(&read(1, 8448), &long);
            same(&read(9, 512), &several);
            same(&read(2, 512).apart(1), &several);
            within(true, || same(&read(2, 512), &several));
        }
        errors(&device);
    }
}
