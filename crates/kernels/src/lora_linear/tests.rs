use super::*;
use crate::matmul::linear;
use crate::testing::*;
use candle_core::DType;

struct Case {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    a: Tensor,
    b: Tensor,
    dy: Tensor,
    dropout: Option<Dropout>,
}

const SCALE: f64 = 1.7;

impl Case {
    fn new(rows: usize, inner: usize, outer: usize, rank: usize) -> Case {
        Case {
            x: random(&[1, rows, inner], 1),
            weight: random(&[outer, inner], 2),
            bias: random(&[outer], 3),
            a: random(&[inner, rank], 4),
            b: random(&[rank, outer], 5),
            dy: random(&[1, rows, outer], 6),
            dropout: None,
        }
    }

    fn with_dropout(self) -> Case {
        Case { dropout: Some(Dropout { probability: 0.3, seed: 42 }), ..self }
    }

    /// The same numbers, rounded to the dtype; adapters stay f32 in half precision.
    fn to_dtype(&self, dtype: DType) -> Case {
        let adapter = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        Case {
            x: self.x.to_dtype(dtype).unwrap(),
            weight: self.weight.to_dtype(dtype).unwrap(),
            bias: self.bias.to_dtype(dtype).unwrap(),
            a: self.a.to_dtype(adapter).unwrap(),
            b: self.b.to_dtype(adapter).unwrap(),
            dy: self.dy.to_dtype(dtype).unwrap(),
            dropout: self.dropout,
        }
    }

    fn forward(&self) -> (Tensor, Tensor) {
        self.forward_with(&self.x, &self.a, &self.b).unwrap()
    }

    fn forward_with(&self, x: &Tensor, a: &Tensor, b: &Tensor) -> Result<(Tensor, Tensor)> {
        let lora = Lora { a, b, scale: SCALE, dropout: self.dropout };
        forward(x, &self.weight, Some(&self.bias), &lora)
    }

    fn backward(&self, need_dx: bool) -> Gradients {
        let lora = Lora { a: &self.a, b: &self.b, scale: SCALE, dropout: self.dropout };
        let (_, xa) = self.forward();
        backward(&self.x, &self.weight, &xa, &lora, &self.dy, need_dx).unwrap()
    }
}

#[test]
fn forward_is_the_base_plus_the_scaled_adapter() {
    for case in
        [Case::new(1, 7, 5, 2), Case::new(9, 33, 140, 3), Case::new(300, 20, 17, 1).with_dropout()]
    {
        let (y, xa) = case.forward();
        let dropped = match case.dropout {
            Some(mask) => dropout(&case.x, mask).unwrap(),
            None => case.x.clone(),
        };
        let a = case.a.t().unwrap();
        let expected_xa = linear(&dropped, &a, None).unwrap();
        assert_close(&xa, &expected_xa, 1e-13);
        let adapter = linear(&expected_xa, &case.b.t().unwrap(), None).unwrap();
        let base = linear(&case.x, &case.weight, Some(&case.bias)).unwrap();
        assert_close(&y, &(base + (adapter * SCALE).unwrap()).unwrap(), 1e-13);
    }
}

#[test]
fn backward_matches_finite_differences() {
    for case in [Case::new(5, 7, 6, 2), Case::new(1, 7, 6, 3), Case::new(5, 7, 6, 2).with_dropout()]
    {
        let gradients = case.backward(true);
        let loss = |x: &Tensor, a: &Tensor, b: &Tensor| {
            inner_product(&case.forward_with(x, a, b)?.0, &case.dy)
        };
        assert_gradient(&case.x, &gradients.dx.unwrap(), |x| loss(x, &case.a, &case.b));
        assert_gradient(&case.a, &gradients.da, |a| loss(&case.x, a, &case.b));
        assert_gradient(&case.b, &gradients.db, |b| loss(&case.x, &case.a, b));
    }
}

#[test]
fn other_precisions_match_f64() {
    for case in [
        Case::new(300, 70, 140, 4),
        Case::new(3, 70, 140, 4),
        Case::new(300, 70, 140, 4).with_dropout(),
    ] {
        for (dtype, tolerance) in PRECISIONS {
            let low = case.to_dtype(dtype);
            let exact = low.to_dtype(DType::F64);
            // Where bf16 is multiplied as such, f32 takes part with 16 bits of precision.
            let wide = if dtype == DType::BF16 { 1e-5 } else { 2e-6 };
            let ((y, xa), (exact_y, exact_xa)) = (low.forward(), exact.forward());
            assert_eq!((y.dtype(), xa.dtype()), (dtype, DType::F32));
            assert_close(&y, &exact_y, tolerance);
            assert_close(&xa, &exact_xa, wide);
            let (low, exact) = (low.backward(true), exact.backward(true));
            assert_eq!(low.da.dtype(), DType::F32);
            assert_close(&low.dx.unwrap(), &exact.dx.unwrap(), tolerance);
            assert_close(&low.da, &exact.da, wide);
            assert_close(&low.db, &exact.db, wide);
        }
    }
}

#[test]
fn dx_is_computed_only_when_asked_for() {
    assert!(Case::new(5, 7, 6, 2).backward(false).dx.is_none());
}

#[test]
fn dropout_drops_the_asked_share_and_keeps_the_mean() {
    let x = Tensor::ones(100_000, DType::F32, &Device::Cpu).unwrap();
    let y = dropout(&x, Dropout { probability: 0.25, seed: 7 }).unwrap();
    let y = values(&y);
    let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / y.len() as f64;
    assert!((dropped - 0.25).abs() < 0.01, "{dropped}");
    let mean = y.iter().sum::<f64>() / y.len() as f64;
    assert!((mean - 1.0).abs() < 0.01, "{mean}");
}

#[test]
fn dropout_repeats_with_its_seed_and_changes_with_another() {
    let x = random(&[1000], 1);
    let with = |seed| values(&dropout(&x, Dropout { probability: 0.5, seed }).unwrap());
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2));
    assert_eq!(values(&dropout(&x, Dropout { probability: 0.0, seed: 1 }).unwrap()), values(&x));
}

/// What the gradients go through of a case, whose x is not used: a gated unit of `gate` and `up`.
fn gated(case: &Case, gate: &Tensor, up: &Tensor) -> (GatedGradients, Tensor) {
    let activation = glu::Activation::Silu;
    let x = glu::forward(gate, up, activation).unwrap();
    let lora = Lora { a: &case.a, b: &case.b, scale: SCALE, dropout: case.dropout };
    let (_, xa) = forward(&x, &case.weight, None, &lora).unwrap();
    let found = backward_gated(gate, up, activation, &case.weight, &xa, &lora, &case.dy);
    (found.unwrap(), xa)
}

#[test]
fn a_layer_of_a_gated_unit_has_the_gradients_of_both() {
    for case in [Case::new(5, 8, 6, 3), Case::new(5, 8, 6, 3).with_dropout()] {
        let [gate, up] = [11, 12].map(|seed| random(&[1, 5, 8], seed));
        let (found, xa) = gated(&case, &gate, &up);
        let x = glu::forward(&gate, &up, glu::Activation::Silu).unwrap();
        let lora = Lora { a: &case.a, b: &case.b, scale: SCALE, dropout: case.dropout };
        let parts = backward(&x, &case.weight, &xa, &lora, &case.dy, true).unwrap();
        let d_out = parts.dx.unwrap();
        let (dgate, dup) =
            glu::backward(&gate, &up, glu::Activation::Silu, &d_out, true, true).unwrap();
        assert_identical(&found.dgate, &dgate.unwrap());
        assert_identical(&found.dup, &dup.unwrap());
        assert_identical(&found.da, &parts.da);
        assert_identical(&found.db, &parts.db);
    }
}

#[test]
fn threads_do_not_change_bits() {
    for dtype in [DType::F32, DType::BF16] {
        for case in [Case::new(300, 200, 500, 8), Case::new(300, 200, 500, 8).with_dropout()] {
            let case = case.to_dtype(dtype);
            assert_independent_of_threads(|| {
                let (y, xa) = case.forward();
                let gradients = case.backward(true);
                vec![y, xa, gradients.dx.unwrap(), gradients.da, gradients.db]
            });
        }
    }
}

#[test]
fn strides_do_not_matter() {
    let case = Case::new(5, 7, 6, 2);
    let other = Case {
        x: strided(&case.x),
        weight: strided(&case.weight),
        bias: strided(&case.bias),
        a: strided(&case.a),
        b: strided(&case.b),
        dy: strided(&case.dy),
        dropout: None,
    };
    assert_identical(&case.forward().0, &other.forward().0);
    let (case, other) = (case.backward(true), other.backward(true));
    assert_identical(&case.dx.unwrap(), &other.dx.unwrap());
    assert_identical(&case.da, &other.da);
    assert_identical(&case.db, &other.db);
}

#[test]
fn no_rows_give_zero_gradients() {
    let case = Case::new(0, 7, 6, 2);
    assert_eq!(case.forward().0.dims(), &[1, 0, 6]);
    let gradients = case.backward(true);
    assert_eq!(max_abs(&gradients.da), 0.0);
    assert_eq!(gradients.dx.unwrap().dims(), &[1, 0, 7]);
}

#[test]
fn wrong_arguments_are_errors() {
    let case = Case::new(5, 7, 6, 2);
    let wrong = message(case.forward_with(&case.x, &case.b, &case.a));
    assert!(
        wrong.contains("A has shape [2, 6] and B [7, 2], expected (7, rank) and (rank, 6)"),
        "{wrong}"
    );
    for probability in [1.0, -0.1, f32::NAN] {
        let case =
            Case { dropout: Some(Dropout { probability, seed: 0 }), ..Case::new(5, 7, 6, 2) };
        assert!(message(case.forward_with(&case.x, &case.a, &case.b)).contains("probability"));
    }
    let lora = Lora { a: &case.a, b: &case.b, scale: SCALE, dropout: None };
    let wrong = message(backward(&case.x, &case.weight, &case.x, &lora, &case.dy, true));
    assert!(wrong.contains("xa has shape [1, 5, 7], expected [1, 5, 2]"), "{wrong}");
}

#[test]
fn projections_that_share_their_input_match_one_at_a_time() {
    for rows in [3, 40] {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let to = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
            let x = to(&random(&[rows, 33], 1));
            let outputs = [50, 7, 130];
            let weights = outputs.map(|out| to(&random(&[out, 33], out as u64)));
            let bias = to(&random(&[50], 5));
            let real = |tensor: Tensor| match dtype {
                DType::F64 => tensor,
                _ => tensor.to_dtype(DType::F32).unwrap(),
            };
            let factors = outputs.map(|out| {
                (real(random(&[33, 4], 7 + out as u64)), real(random(&[4, out], 9 + out as u64)))
            });
            let dropout = Some(Dropout { probability: 0.3, seed: 4 });
            let lora = |index: usize, dropout| {
                let (a, b): &(Tensor, Tensor) = &factors[index];
                Lora { a, b, scale: 1.5, dropout }
            };
            let projections = [
                Projection {
                    weight: (&weights[0]).into(),
                    bias: Some(&bias),
                    lora: Some(lora(0, None)),
                },
                Projection { weight: (&weights[1]).into(), bias: None, lora: None },
                Projection {
                    weight: (&weights[2]).into(),
                    bias: None,
                    lora: Some(lora(2, dropout)),
                },
            ];
            let dys = outputs.map(|out| to(&random(&[rows, out], 3 + out as u64)));
            let shared = forward_shared(&x, &projections).unwrap();
            for (only, shared) in forward_only(&x, &projections).unwrap().iter().zip(&shared) {
                assert_identical(only, &shared.y);
            }
            let xas: Vec<_> = shared.iter().map(|output| output.xa.as_ref()).collect();
            let all_dys: Vec<_> = dys.iter().collect();
            let gradients = backward_shared(&x, &projections, &xas, &all_dys, true).unwrap();
            let mut total = Tensor::zeros((rows, 33), DType::F64, &Device::Cpu).unwrap();
            for (index, projection) in projections.iter().enumerate() {
                let dx = match projection.lora {
                    None => {
                        let y = crate::matmul::linear(&x, projection.weight, None).unwrap();
                        assert_identical(&shared[index].y, &y);
                        crate::matmul::linear_backward_input(&dys[index], projection.weight)
                            .unwrap()
                    }
                    Some(lora) => {
                        let (weight, bias) = (projection.weight, projection.bias);
                        let (y, xa) = forward(&x, weight, bias, &lora).unwrap();
                        assert_identical(&shared[index].y, &y);
                        let alone = backward(&x, weight, &xa, &lora, &dys[index], true).unwrap();
                        let (da, db) = gradients.adapters[index].as_ref().unwrap();
                        assert_identical(da, &alone.da);
                        assert_identical(db, &alone.db);
                        alone.dx.unwrap()
                    }
                };
                total = (total + dx.to_dtype(DType::F64).unwrap()).unwrap();
            }
            assert!(gradients.adapters[1].is_none());
            let tolerance = if dtype == DType::BF16 { 1.6e-2 } else { 2e-6 };
            assert_close(&gradients.dx.unwrap(), &total, tolerance);
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::backend::cuda::Cuda;

    /// Some projections of one input: `(out, rank)`, rank 0 for none; the first has a bias.
    struct Group {
        x: Tensor,
        weights: Vec<Tensor>,
        bias: Tensor,
        factors: Vec<Option<(Tensor, Tensor)>>,
        dys: Vec<Tensor>,
        dropouts: Vec<Option<Dropout>>,
    }

    impl Group {
        fn new(rows: usize, inner: usize, sizes: &[(usize, usize)], dropout: bool) -> Group {
            let seeds = || sizes.iter().zip(0u64..);
            let factors = seeds().map(|((out, rank), seed)| {
                let of = |shape: &[usize], seed| random(shape, seed);
                (*rank > 0).then(|| (of(&[inner, *rank], seed + 20), of(&[*rank, *out], seed + 30)))
            });
            // All but the last of several, so that some have none.
            let dropouts = seeds().map(|(_, seed)| {
                let has = dropout && (seed == 0 || seed + 1 < sizes.len() as u64);
                has.then_some(Dropout { probability: 0.3, seed: seed + 7 })
            });
            Group {
                x: random(&[1, rows, inner], 1),
                weights: seeds().map(|((out, _), seed)| random(&[*out, inner], seed + 2)).collect(),
                bias: random(&[sizes[0].0], 9),
                factors: factors.collect(),
                dys: seeds().map(|((out, _), seed)| random(&[1, rows, *out], seed + 40)).collect(),
                dropouts: dropouts.collect(),
            }
        }

        /// Activations and weights in `dtype`, adapters in `adapters`.
        fn to(&self, dtype: DType, adapters: DType, device: &Device) -> Group {
            let to = |tensor: &Tensor, dtype| {
                let tensor = tensor.to_dtype(dtype).unwrap();
                if device.is_cpu() { here(&tensor) } else { there(&tensor, device) }
            };
            let all = |tensors: &[Tensor]| tensors.iter().map(|tensor| to(tensor, dtype)).collect();
            let factors = self
                .factors
                .iter()
                .map(|factors| factors.as_ref().map(|(a, b)| (to(a, adapters), to(b, adapters))));
            Group {
                x: to(&self.x, dtype),
                weights: all(&self.weights),
                bias: to(&self.bias, dtype),
                factors: factors.collect(),
                dys: all(&self.dys),
                dropouts: self.dropouts.clone(),
            }
        }

        /// y and xa of all projections, then dx and the adapters' gradients, on the CPU.
        fn run(&self, need_dx: bool) -> [Vec<Tensor>; 2] {
            let projections: Vec<_> = (0..self.weights.len())
                .map(|index| Projection {
                    weight: (&self.weights[index]).into(),
                    bias: (index == 0).then_some(&self.bias),
                    lora: self.factors[index].as_ref().map(|(a, b)| Lora {
                        a,
                        b,
                        scale: SCALE,
                        dropout: self.dropouts[index],
                    }),
                })
                .collect();
            let outputs = forward_shared(&self.x, &projections).unwrap();
            let only = forward_only(&self.x, &projections).unwrap();
            assert_eq!(only.len(), outputs.len());
            for (only, output) in only.iter().zip(&outputs) {
                assert_identical(&here(only), &here(&output.y));
            }
            let xas: Vec<_> = outputs.iter().map(|output| output.xa.as_ref()).collect();
            let dys: Vec<_> = self.dys.iter().collect();
            let found = backward_shared(&self.x, &projections, &xas, &dys, need_dx).unwrap();
            assert_eq!(found.dx.is_some(), need_dx);
            let adapters = found.adapters.into_iter().flatten().flat_map(|(da, db)| [da, db]);
            let mut forward: Vec<_> = outputs.iter().map(|output| here(&output.y)).collect();
            forward.extend(xas.into_iter().flatten().map(here));
            [forward, found.dx.into_iter().chain(adapters).map(|tensor| here(&tensor)).collect()]
        }
    }

    fn groups() -> Vec<Group> {
        vec![
            // A few rows, where 16 bytes fit and where they don't.
            Group::new(1, 512, &[(512, 8)], false),
            Group::new(1, 1024, &[(264, 64)], false),
            Group::new(1, 70, &[(33, 3), (7, 0), (20, 8)], false),
            Group::new(2, 256, &[(100, 12), (40, 4), (24, 1), (8, 0), (50, 16)], false),
            Group::new(3, 33, &[(17, 2)], false),
            Group::new(4, 2048, &[(40, 16), (40, 16)], false),
            Group::new(7, 136, &[(50, 256), (9, 8)], false),
            Group::new(8, 640, &[(130, 24), (64, 8), (30, 40)], false),
            // More outputs than warps, fewer, and less to read of x than blocks that share it.
            Group::new(1, 264, &[(5000, 20), (300, 8)], false),
            Group::new(2, 40, &[(5, 8)], false),
            Group::new(1, 3, &[(9, 2), (3, 0)], false),
            // More ranks than B has places in registers, and as much of x·A as fits.
            Group::new(1, 264, &[(100, 72), (30, 130)], false),
            Group::new(4, 64, &[(40, 256), (40, 256)], false),
            // Enough of A that it has a launch of its own.
            Group::new(1, 8192, &[(3000, 128), (40, 100)], false),
            // More rows.
            Group::new(300, 72, &[(140, 4)], false),
            Group::new(300, 72, &[(140, 16), (64, 16), (64, 16)], false),
            Group::new(65, 70, &[(33, 3), (7, 0), (20, 8)], false),
            Group::new(40, 64, &[(48, 0), (16, 0)], false),
            // Where the products with the rank as a side have kernels of their own.
            Group::new(300, 72, &[(136, 16)], false),
            Group::new(70, 264, &[(72, 8), (40, 16), (8, 24)], false),
            Group::new(600, 648, &[(520, 64)], false),
            Group::new(515, 136, &[(1032, 40), (16, 0), (200, 8)], false),
            Group::new(300, 136, &[(144, 16), (64, 32), (40, 8)], true),
            Group::new(33, 64, &[(80, 8)], true),
            Group::new(3, 70, &[(33, 3), (7, 0), (20, 8)], true),
            Group::new(120, 136, &[(40, 8), (40, 16), (24, 5)], true),
        ]
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_matches_the_cpu_in_every_dtype() {
        let device = crate::testing::cuda();
        for group in groups() {
            for (dtype, tolerance) in PRECISIONS {
                for adapters in [DType::F32, dtype] {
                    let low = group.to(dtype, adapters, &Device::Cpu);
                    let exact = low.to(DType::F64, DType::F64, &Device::Cpu).run(true);
                    let found = low.to(dtype, adapters, &device).run(true);
                    // The adapter's factors, xa and g are rounded to the dtype of the activations.
                    let tolerance = 2.0 * tolerance;
                    for (exact, found) in exact.iter().flatten().zip(found.iter().flatten()) {
                        assert_close(found, exact, tolerance);
                    }
                    let forward = group.weights.len();
                    assert!(found[0].iter().all(|tensor| tensor.dtype() == dtype));
                    assert_eq!(found[0][..forward].len(), forward);
                    assert!(found[1][1..].iter().all(|tensor| tensor.dtype() == DType::F32));
                }
            }
        }
    }

    /// Rows whose products with eight tiles of columns are added up in one launch, where the device can.
    fn large_rows(device: &Device) -> usize {
        let gpu = Cuda::on(device).unwrap();
        let rows = (gpu.multiprocessors().unwrap() / 16).max(1) * 256 - 8;
        let columns = [2024].into_iter();
        let taken = gpu.takes_sums_of_products(DType::BF16, rows, columns, 2, false).unwrap();
        assert_eq!(taken, gpu.has_warpgroups().unwrap());
        rows
    }

    /// Layers that are large enough for sums of products in one launch.
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_matches_the_cpu_in_large_layers() {
        let device = crate::testing::cuda();
        let rows = large_rows(&device);
        for (sizes, dropout) in [
            (vec![(1016, 16), (504, 24), (504, 0)], false),
            (vec![(1016, 12), (1000, 16)], true),
            (vec![(1016, 8), (256, 3), (256, 8), (248, 8), (256, 8)], false),
            (vec![(2024, 16), (0, 8)], false),
        ] {
            let group = Group::new(rows, 2016, &sizes, dropout);
            for (dtype, tolerance) in
                PRECISIONS.into_iter().filter(|(dtype, _)| *dtype != DType::F32)
            {
                for adapters in [DType::F32, dtype] {
                    let low = group.to(dtype, adapters, &Device::Cpu);
                    let exact = low.to(DType::F32, DType::F32, &Device::Cpu).run(true);
                    let found = low.to(dtype, adapters, &device).run(true);
                    for (exact, found) in exact.iter().flatten().zip(found.iter().flatten()) {
                        assert_close(found, &exact.to_dtype(DType::F64).unwrap(), 2.0 * tolerance);
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_makes_a_gated_unit_again() {
        let device = crate::testing::cuda();
        // The gate and the value as parts of one projection, which aren't contiguous, too.
        for (rows, inner, outer, rank, fused) in [
            (300, 264, 136, 16, false),
            (70, 72, 40, 8, true),
            (33, 50, 20, 3, true),
            (2, 64, 48, 8, false),
            // As a sum of products.
            (large_rows(&device), 2016, 72, 16, false),
        ] {
            for (dtype, tolerance) in PRECISIONS {
                let low = Case::new(rows, inner, outer, rank).to_dtype(dtype);
                let exact = low.to_dtype(DType::F64);
                let wide = rounded(&random(&[1, rows, 2 * inner], 11), dtype);
                let halves = |wide: &Tensor| {
                    let half = |start| wide.narrow(2, start, inner).unwrap();
                    let halves = [half(0), half(inner)];
                    if fused { halves } else { halves.map(|half| half.contiguous().unwrap()) }
                };
                let [gate, up] = halves(&wide.to_dtype(DType::F64).unwrap());
                let (expected, _) = gated(&exact, &gate, &up);
                let to = |tensor: &Tensor| there(tensor, &device);
                let low = Case {
                    x: to(&low.x),
                    weight: to(&low.weight),
                    bias: to(&low.bias),
                    a: to(&low.a),
                    b: to(&low.b),
                    dy: to(&low.dy),
                    dropout: None,
                };
                let [gate, up] = halves(&to(&wide.to_dtype(dtype).unwrap()));
                let (found, _) = gated(&low, &gate, &up);
                for (found, expected) in [
                    (&found.dgate, &expected.dgate),
                    (&found.dup, &expected.dup),
                    (&found.da, &expected.da),
                    (&found.db, &expected.db),
                ] {
                    assert_close(&here(found), expected, 3.0 * tolerance);
                }
                let (again, _) = gated(&low, &gate, &up);
                assert_identical(&here(&again.da), &here(&found.da));
                assert_identical(&here(&again.dgate), &here(&found.dgate));
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_kernels_for_half_precision_match_f32_at_size() {
        let device = crate::testing::cuda();
        let sizes = [(1544, 16), (1032, 24), (264, 8)];
        let groups = [
            Group::new(2500, 1032, &sizes, false),
            Group::new(5000, 1032, &sizes, false),
            Group::new(2500, 1032, &sizes, true),
            // A block has many tiles of columns, of every number of ranks.
            Group::new(8200, 72, &[(2056, 16)], false),
            Group::new(5000, 72, &[(1544, 40), (1544, 32), (1032, 64)], false),
            Group::new(260, 17_032, &[(40, 16)], false),
            Group::new(900, 17_032, &[(40, 16), (24, 40)], false),
        ];
        for group in groups {
            for (dtype, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 3.2e-2)] {
                let low = group.to(dtype, DType::F32, &device);
                let exact = low.to(DType::F32, DType::F32, &device).run(true);
                let found = low.run(true);
                for (exact, found) in exact.iter().flatten().zip(found.iter().flatten()) {
                    assert_close(found, exact, tolerance);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_repeats_its_bits_and_leaves_out_dx() {
        let device = crate::testing::cuda();
        for group in groups() {
            let group = group.to(DType::BF16, DType::F32, &device);
            let ([forward, backward], [again, without]) = (group.run(true), group.run(false));
            for (a, b) in forward.iter().zip(&again).chain(backward[1..].iter().zip(&without)) {
                assert_identical(a, b);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_takes_views_and_no_rows() {
        let device = crate::testing::cuda();
        for rows in [2, 40, 70] {
            let group = Group::new(rows, 72, &[(40, 8), (30, 4)], false);
            let group = group.to(DType::BF16, DType::F32, &device);
            let all = |tensors: &[Tensor]| tensors.iter().map(strided).collect();
            let views = Group {
                x: strided(&group.x),
                weights: all(&group.weights),
                bias: strided(&group.bias),
                factors: group
                    .factors
                    .iter()
                    .map(|factors| factors.as_ref().map(|(a, b)| (strided(a), strided(b))))
                    .collect(),
                dys: all(&group.dys),
                dropouts: group.dropouts.clone(),
            };
            let (plain, views) = (group.run(true), views.run(true));
            for (a, b) in plain.iter().flatten().zip(views.iter().flatten()) {
                assert_close(a, b, 8e-3);
            }
        }
        // Four columns of A that no load may take at once.
        for rows in [1, 5] {
            let group = Group::new(rows, 72, &[(40, 8)], false).to(DType::F32, DType::F32, &device);
            let shifted = |tensor: &Tensor| {
                let flat = tensor.flatten_all().unwrap();
                let moved = Tensor::cat(&[&flat.narrow(0, 0, 1).unwrap(), &flat], 0).unwrap();
                moved.narrow(0, 1, flat.elem_count()).unwrap().reshape(tensor.dims()).unwrap()
            };
            let factors = group
                .factors
                .iter()
                .map(|factors| factors.as_ref().map(|(a, b)| (shifted(a), shifted(b))));
            let moved =
                Group { factors: factors.collect(), ..group.to(DType::F32, DType::F32, &device) };
            for (a, b) in group.run(true).iter().flatten().zip(moved.run(true).iter().flatten()) {
                assert_close(a, b, 2e-6);
            }
        }
        // The last one with sizes that sums of products are for.
        for (second, dropout) in [((30, 4), false), ((30, 4), true), ((32, 8), false)] {
            let group = Group::new(0, 72, &[(40, 8), second], dropout);
            let [forward, gradients] = group.to(DType::BF16, DType::F32, &device).run(true);
            assert_eq!(forward[0].dims(), &[1, 0, 40]);
            assert_eq!(gradients[0].dims(), &[1, 0, 72]);
            assert!(gradients.iter().all(|gradient| max_abs(gradient) == 0.0));
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_dropout_is_that_of_the_cpu() {
        let device = crate::testing::cuda();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for count in [0, 1, 1000, 70_003] {
                let x = random(&[count], 1).to_dtype(dtype).unwrap();
                for (probability, seed) in [(0.0, 1), (0.25, 7), (0.9, u64::MAX)] {
                    let mask = Dropout { probability, seed };
                    let found = dropout(&there(&x, &device), mask).unwrap();
                    assert_identical(&here(&found), &dropout(&x, mask).unwrap());
                }
            }
            let x = random(&[7, 33], 1).to_dtype(dtype).unwrap();
            let mask = Dropout { probability: 0.5, seed: 3 };
            let found = dropout(&strided(&x.to_device(&device).unwrap()), mask).unwrap();
            assert_identical(&here(&found), &dropout(&x, mask).unwrap());
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_layers_are_differentiable() {
        let device = crate::testing::cuda();
        let case = Case::new(5, 7, 6, 2).to_dtype(DType::F32);
        let run = |device: &Device| {
            let to = |tensor: &Tensor| tensor.to_device(device).unwrap();
            let variable = |tensor: &Tensor| candle_core::Var::from_tensor(&to(tensor)).unwrap();
            let [x, a, b] = [&case.x, &case.a, &case.b].map(variable);
            let lora = Lora { a: &a, b: &b, scale: SCALE, dropout: None };
            let y = differentiable(&x, &to(&case.weight), Some(&to(&case.bias)), &lora).unwrap();
            let gradients = (y * to(&case.dy)).unwrap().sum_all().unwrap().backward().unwrap();
            [&x, &a, &b].map(|variable| here(gradients.get(variable).unwrap()))
        };
        for (found, expected) in run(&device).iter().zip(run(&Device::Cpu)) {
            assert_close(found, &expected, 2e-6);
        }
    }
}
