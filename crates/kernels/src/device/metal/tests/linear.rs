//! Linear layers and LoRA layers.

use super::{assert_same, contiguous, input};
use crate::matmul::*;
use candle_core::DType;

#[test]
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
