//! A linear layer of the decoder, with or without a LoRA adapter on it.

use super::Pass;
use crate::Result;
use crate::autograd::{LoraValues, ProjectionValues, Tape, Value, Weight};
use candle_core::{DType, Tensor};
use metal_candle_kernels::glu::Activation;
use metal_candle_kernels::lora_linear::Dropout;
use metal_candle_kernels::{copy, matmul};

/// `x · weightᵀ + bias`, plus the adapter's `scale · (x · A) · B` if there is one.
#[derive(Debug)]
pub(crate) struct Linear {
    /// The layer's path in the model, such as `model.layers.0.self_attn.q_proj`.
    pub path: String,
    /// `(out, in)`
    pub weight: Weight,
    /// `(out)`
    pub bias: Option<Weight>,
    pub lora: Option<Lora>,
}

/// The adapter of one linear layer.
#[derive(Debug)]
pub(crate) struct Lora {
    /// `(in, rank)`
    pub a: Weight,
    /// `(rank, out)`
    pub b: Weight,
    pub scale: f64,
    /// The probability of dropping an input in training.
    pub dropout: f32,
    /// Sets this layer's dropout apart from the other layers'.
    pub stream: u64,
}

impl Linear {
    /// (in, out)
    pub fn features(&self) -> Result<(usize, usize)> {
        let (output, input) = self.weight.tensor().dims2()?;
        Ok((input, output))
    }

    pub fn forward(&self, tape: &Tape, x: &Value, pass: &Pass) -> Result<Value> {
        let [output] = forward_shared([self], tape, x, pass)?;
        Ok(output)
    }

    /// Like [`Self::forward`], where nothing reads the result: `stand_in` stands for it.
    pub fn forward_unread(
        &self,
        tape: &Tape,
        x: &Value,
        pass: &Pass,
        stand_in: &Tensor,
    ) -> Result<Value> {
        let [output] = project([self], tape, x, pass, Some(stand_in))?;
        Ok(output)
    }

    /// Like [`Self::forward`], of `activation(gate)·up`.
    pub fn forward_gated(
        &self,
        tape: &Tape,
        (gate, up): (&Value, &Value),
        activation: Activation,
        pass: &Pass,
    ) -> Result<Value> {
        let dtype = gate.tensor().dtype();
        with_values(&[self], tape, dtype, pass, |layers| {
            tape.gated_projection(gate, up, activation, &layers[0])
        })
    }

    /// The weight with the adapter added into it, in the weight's dtype; the sum is made in f32.
    pub fn merged_weight(&self) -> Result<Tensor> {
        let weight = self.weight.tensor();
        let Some(lora) = &self.lora else {
            return Ok(weight.clone());
        };
        // (A · B)ᵀ = Bᵀ · Aᵀ, which `linear` reads as Bᵀ times the rows of A.
        let update = matmul::linear(&lora.b.tensor().t()?.contiguous()?, lora.a.tensor(), None)?;
        let update = update.affine(lora.scale, 0.0)?;
        let sum = (copy::cast(weight, DType::F32)? + update)?;
        Ok(copy::cast(&sum, weight.dtype())?)
    }
}

/// Several layers that read the same `x`, which is read once for all.
pub(crate) fn forward_shared<const N: usize>(
    layers: [&Linear; N],
    tape: &Tape,
    x: &Value,
    pass: &Pass,
) -> Result<[Value; N]> {
    project(layers, tape, x, pass, None)
}

fn project<const N: usize>(
    layers: [&Linear; N],
    tape: &Tape,
    x: &Value,
    pass: &Pass,
    stand_in: Option<&Tensor>,
) -> Result<[Value; N]> {
    let outputs = with_values(&layers, tape, x.tensor().dtype(), pass, |layers| match stand_in {
        Some(stand_in) => tape.unread_projections(x, layers, stand_in),
        None => tape.projections(x, layers),
    })?;
    outputs.try_into().map_err(|outputs: Vec<Value>| {
        let found = outputs.len();
        candle_core::Error::msg(format!("{N} projections gave {found} outputs")).into()
    })
}

/// What `forward` makes of the layers as values of a tape, for activations of `dtype`.
fn with_values<R>(
    layers: &[&Linear],
    tape: &Tape,
    dtype: DType,
    pass: &Pass,
    forward: impl FnOnce(&[ProjectionValues<'_>]) -> Result<R>,
) -> Result<R> {
    let values = layers.iter().map(|layer| {
        let weight = weight_as(tape, &layer.weight, dtype)?;
        let bias = layer.bias.as_ref().map(|bias| weight_as(tape, bias, dtype)).transpose()?;
        let lora = layer.lora.as_ref().map(|lora| (tape.weight(&lora.a), tape.weight(&lora.b)));
        Ok((weight, bias, lora))
    });
    let values = values.collect::<Result<Vec<_>>>()?;
    let projections: Vec<_> = layers
        .iter()
        .zip(&values)
        .map(|(layer, (weight, bias, factors))| {
            let lora = layer.lora.as_ref().zip(factors.as_ref()).map(|(lora, (a, b))| {
                let seed = pass.dropout_seed.filter(|_| lora.dropout > 0.0);
                let dropout = seed.map(|seed| Dropout {
                    probability: lora.dropout,
                    seed: crate::random::SplitMix64::stream(seed, lora.stream).next_u64(),
                });
                LoraValues { a, b, scale: lora.scale, dropout }
            });
            ProjectionValues { weight, bias: bias.as_ref(), lora }
        })
        .collect();
    forward(&projections)
}

/// A weight as a value of the dtype that the activations have.
pub(crate) fn weight_as(tape: &Tape, weight: &Weight, dtype: DType) -> Result<Value> {
    tape.cast(&tape.weight(weight), dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn dropout_follows_the_seed_and_the_layer_and_is_off_outside_training() {
        let (device, zeros) = (Device::Cpu, Tensor::zeros((8, 16), DType::F32, &Device::Cpu));
        let layer = |stream| Linear {
            path: "layer".into(),
            weight: Weight::frozen(zeros.as_ref().unwrap().clone()),
            bias: None,
            lora: Some(Lora {
                a: Weight::frozen(Tensor::ones((16, 4), DType::F32, &device).unwrap()),
                b: Weight::frozen(Tensor::ones((4, 8), DType::F32, &device).unwrap()),
                scale: 1.0,
                dropout: 0.5,
                stream,
            }),
        };
        let tape = Tape::inference();
        let x = tape.constant(Tensor::ones((6, 16), DType::F32, &device).unwrap());
        let output = |layer: &Linear, dropout_seed| {
            let pass = Pass { ropes: Vec::new(), first_key: None, before: None, dropout_seed };
            layer.forward(&tape, &x, &pass).unwrap().into_tensor().to_vec2::<f32>().unwrap()
        };
        let (first, second) = (layer(0), layer(1));
        assert_eq!(output(&first, Some(3)), output(&layer(0), Some(3)));
        assert_ne!(output(&first, Some(3)), output(&first, Some(4)));
        assert_ne!(output(&first, Some(3)), output(&second, Some(3)));
        assert_eq!(output(&first, None), vec![vec![64.0; 8]; 6]);
    }
}
