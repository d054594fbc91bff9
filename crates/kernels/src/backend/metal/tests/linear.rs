//! Linear layers and LoRA layers.

use super::{THOROUGH, assert_same, assert_same_in, contiguous, input};
use crate::lora_linear::{self, Dropout, Lora, Output, Projection};
use crate::matmul::*;
use crate::testing::*;
use candle_core::{DType, Device, Tensor};

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_linear_layers_agrees_with_the_kernels() {
    for (shape, outer) in [([2, 3, 37], 9), ([5, 14, 24], 41), ([1, 1, 130], 33)] {
        assert_same(|dtype, device| {
            let inner = shape[2];
            let x = input(&shape, 1, dtype, device);
            let dy = input(&[shape[0], shape[1], outer], 2, dtype, device);
            // Rounded as the activations are, where there are many rows.
            let weight = contiguous(&[outer, inner], 3, dtype, device);
            let bias = contiguous(&[outer], 4, DType::F16, device);
            vec![
                linear(&x, &weight, Some(&bias)).unwrap(),
                linear(&x, &weight.to_dtype(DType::F32).unwrap(), None).unwrap(),
                linear_backward_input(&dy, &weight).unwrap(),
                linear_backward_weight(&x, &dy).unwrap(),
                linear_backward_bias(&dy).unwrap(),
            ]
        });
    }
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_linear_layers_of_nothing_are_empty_or_zero() {
    assert_same(|dtype, device| {
        let none = input(&[0, 3], 1, dtype, device);
        let no_inputs = contiguous(&[4, 0], 2, dtype, device);
        let weight = contiguous(&[5, 3], 3, dtype, device);
        vec![
            linear(&none, &weight, None).unwrap(),
            linear(&no_inputs, &contiguous(&[2, 0], 1, dtype, device), None).unwrap(),
            linear_backward_weight(&none, &none).unwrap(),
            linear_backward_bias(&none).unwrap(),
        ]
    });
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_gradients_of_biases_are_right_in_every_mode() {
    assert_same_in(THOROUGH, |dtype, device| {
        let sizes = [(37, 5), (2, 70), (1, 1)];
        let of =
            |(rows, outer)| linear_backward_bias(&input(&[rows, outer], 1, dtype, device)).unwrap();
        sizes.map(of).to_vec()
    });
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_dropout_is_that_of_the_cpu_in_every_mode() {
    let dropout = Dropout { probability: 0.3, seed: 0x1234_5678_9abc_def0 };
    assert_same_in(THOROUGH, |dtype, device| {
        [[3, 37], [1, 1030]]
            .map(|shape| lora_linear::dropout(&input(&shape, 1, dtype, device), dropout).unwrap())
            .to_vec()
    });
}

/// A layer's tensors: a weight and a bias, and an adapter of some rank.
struct Layer {
    weight: Tensor,
    bias: Option<Tensor>,
    factors: Option<(Tensor, Tensor)>,
    dropout: Option<Dropout>,
}

impl Layer {
    fn new(
        dtype: DType,
        adapters: DType,
        [inner, outer, rank]: [usize; 3],
        dropout: Option<Dropout>,
        device: &Device,
    ) -> Layer {
        let seed = (outer + rank) as u64;
        // Rounded as the activations are, whatever it is stored as.
        let of = |shape: &[usize], add: u64, to: DType| {
            let tensor = random(shape, seed + add).to_dtype(dtype).unwrap();
            there(&tensor.to_dtype(to).unwrap(), device)
        };
        let factors =
            (rank > 0).then(|| (of(&[inner, rank], 2, adapters), of(&[rank, outer], 3, adapters)));
        let weight = of(&[outer, inner], 0, dtype);
        let bias = (outer % 2 == 0).then(|| of(&[outer], 1, DType::F32));
        Layer { weight, bias, factors, dropout }
    }

    fn projection(&self) -> Projection<'_> {
        let dropout = self.dropout;
        Projection {
            weight: (&self.weight).into(),
            bias: self.bias.as_ref(),
            lora: self.factors.as_ref().map(|(a, b)| Lora { a, b, scale: 0.75, dropout }),
        }
    }
}

/// All results of some layers of one input, forward and backward.
fn results(
    dtype: DType,
    device: &Device,
    rows: [usize; 2],
    inner: usize,
    layers: &[Layer],
) -> Vec<Tensor> {
    let input = |shape: &[usize], seed| match rows {
        [0, _] => contiguous(shape, seed, dtype, device),
        _ => input(shape, seed, dtype, device),
    };
    let x = input(&[rows[0], rows[1], inner], 1);
    let projections: Vec<_> = layers.iter().map(Layer::projection).collect();
    let outputs = lora_linear::forward_shared(&x, &projections).unwrap();
    let again = lora_linear::forward_again(&x, &projections).unwrap();
    for (output, again) in outputs.iter().zip(&again) {
        assert_eq!(output.xa.is_some(), again.is_some());
        if let (Some(xa), Some(again)) = (&output.xa, again) {
            assert_identical(&here(xa), &here(again));
        }
    }
    let dys: Vec<_> = layers
        .iter()
        .zip(7..)
        .map(|(layer, seed)| input(&[rows[0], rows[1], layer.weight.dim(0).unwrap()], seed))
        .collect();
    let xas: Vec<_> = outputs.iter().map(|output| output.xa.as_ref()).collect();
    let dys: Vec<_> = dys.iter().collect();
    let mut results = Vec::new();
    for need_dx in [true, false] {
        let gradients =
            lora_linear::backward_shared(&x, &projections, &xas, &dys, need_dx).unwrap();
        assert_eq!(gradients.dx.is_some(), need_dx);
        results.extend(gradients.dx);
        for (da, db) in gradients.adapters.into_iter().flatten() {
            results.extend([da, db]);
        }
    }
    for Output { y, xa } in outputs {
        results.push(y);
        results.extend(xa.map(|xa| here(&xa).to_dtype(dtype).unwrap()));
    }
    results
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_lora_layers_agrees_with_the_kernels() {
    let dropout = |probability, seed| Some(Dropout { probability, seed });
    assert_same(|dtype, device| {
        let inner = 37;
        let layer = |outer, rank, dropout| {
            Layer::new(dtype, DType::F32, [inner, outer, rank], dropout, device)
        };
        // Four layers with adapters are more terms of dx than fit into one launch.
        let many = [layer(40, 4, None), layer(9, 3, None), layer(21, 8, None), layer(6, 1, None)];
        let mut all = results(dtype, device, [3, 5], inner, &many);
        let dropping = [
            layer(40, 4, dropout(0.25, 7)),
            layer(9, 0, None),
            layer(10, 8, dropout(0.5, 8)),
            layer(12, 2, dropout(0.0, 9)),
        ];
        all.extend(results(dtype, device, [3, 15], inner, &dropping));
        all
    });
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_lora_layers_of_few_rows_agrees_with_the_kernels() {
    assert_same(|dtype, device| {
        let inner = 44;
        let layer = |outer, rank| Layer::new(dtype, dtype, [inner, outer, rank], None, device);
        let layers = [layer(40, 4), layer(9, 0), layer(33, 40)];
        let mut all = Vec::new();
        for rows in [[1, 1], [1, 3], [2, 4], [0, 1]] {
            all.extend(results(dtype, device, rows, inner, &layers));
        }
        // None of their outputs is needed for a gradient of x.
        all.extend(results(dtype, device, [1, 2], inner, &[]));
        all
    });
}

/// Only in the emulator, as the choice on a GPU is one for all tests of the process.
#[cfg(not(feature = "metal"))]
#[test]
#[ignore = "needs clang"]
fn metal_layers_whose_large_products_are_made_elsewhere_are_the_same() {
    use super::assert_all_close;
    use crate::backend::metal::{Emulator, emulate};
    use crate::devices::MetalMatmul;
    use metal_emulator::Mode;
    let emulator = Emulator::open(Mode::Asan);
    let dropout = Some(Dropout { probability: 0.25, seed: 7 });
    let device = &Device::Cpu;
    for matmul in [MetalMatmul::Candle, MetalMatmul::Mps] {
        for (dtype, tolerance) in PRECISIONS {
            let all = || {
                let layer = |outer, rank, dropout| {
                    Layer::new(dtype, DType::F32, [37, outer, rank], dropout, device)
                };
                let layers = [layer(40, 4, None), layer(9, 0, None), layer(21, 8, dropout)];
                let mut all = Vec::new();
                for rows in [[1, 1], [2, 6], [0, 1]] {
                    all.extend(results(dtype, device, rows, 37, &layers));
                }
                let [x, dy] = [(37, 1), (12, 2)]
                    .map(|(size, seed)| input(&[3, 7, size], seed, dtype, device));
                let [weight, bias] =
                    [&[12, 37][..], &[12]].map(|shape| contiguous(shape, 3, DType::F32, device));
                all.push(linear(&x, &weight, Some(&bias)).unwrap());
                all.push(linear_backward_input(&dy, &weight).unwrap());
                all
            };
            let expected = all();
            let found = emulate(Emulator { matmul, ..emulator.clone() }, all);
            assert_all_close(&found, &expected, tolerance);
        }
    }
}
