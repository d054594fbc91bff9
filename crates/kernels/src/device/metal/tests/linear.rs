//! Linear layers and LoRA layers.

use super::{assert_same, input};
use crate::matmul::*;
use crate::testing::*;
use candle_core::DType;

#[test]
fn metal_host_of_linear_layers_agrees_with_the_kernels() {
    for (shape, outer) in [([2, 3, 37], 9), ([5, 14, 24], 41), ([1, 1, 130], 33)] {
        assert_same(|dtype| {
            let inner = shape[2];
            let x = input(&shape, 1, dtype);
            let dy = input(&[shape[0], shape[1], outer], 2, dtype);
            // Rounded as the activations are, where there are many rows.
            let weight = random(&[outer, inner], 3).to_dtype(dtype).unwrap();
            let bias = random(&[outer], 4).to_dtype(DType::F16).unwrap();
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
fn metal_linear_layers_of_nothing_are_empty_or_zero() {
    assert_same(|dtype| {
        let none = input(&[0, 3], 1, dtype);
        let no_inputs = random(&[4, 0], 2).to_dtype(dtype).unwrap();
        let weight = random(&[5, 3], 3).to_dtype(dtype).unwrap();
        vec![
            linear(&none, &weight, None).unwrap(),
            linear(&no_inputs, &random(&[2, 0], 1).to_dtype(dtype).unwrap(), None).unwrap(),
            linear_backward_weight(&none, &none).unwrap(),
            linear_backward_bias(&none).unwrap(),
        ]
    });
}
