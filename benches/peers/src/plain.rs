//! Plain Candle: the operations as its users compose them from `candle_core` and `candle_nn`.
//!
//! A backward row times `Tensor::backward` on a graph that was built before, from the scalar
//! `Σ y·dy`, because Candle starts from scalars only. The fast normalisations of `candle_nn` have no
//! backward, so there the graph is that of the composed ones.

use candle_core::{D, Tensor, Var, backprop::GradStore};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, ops};
use metal_candle::{Error, Result};
use metal_candle_bench::Workload;
use metal_candle_bench::rows::{
    CLIP_NORM, EPSILON, Inputs, LEARNING_RATE, LORA_SCALE, Pass, WEIGHT_DECAY, Work,
};

/// The work on these inputs; `None` where Candle has nothing for it.
pub fn prepare(work: &Work, inputs: &Inputs) -> Result<Option<Box<dyn Workload>>> {
    Ok(Some(match work {
        Work::LoraLinear { pass: Pass::Forward, .. } => {
            let (x, weight) = (inputs.get("x")?, inputs.get("weight")?);
            let (a, b) = (inputs.get("a")?, inputs.get("b")?);
            Box::new(move || Ok(vec![lora(&x, &weight, &a, &b)?]))
        }
        Work::LoraLinear { pass: Pass::Backward, .. } => {
            let (x, a, b) =
                (variable(inputs, "x")?, variable(inputs, "a")?, variable(inputs, "b")?);
            let y = lora(x.as_tensor(), &inputs.get("weight")?, a.as_tensor(), b.as_tensor())?;
            backward(&y, inputs, vec![x, a, b])?
        }
        Work::Softmax { pass: Pass::Forward, .. } => {
            let x = inputs.get("x")?;
            Box::new(move || Ok(vec![ops::softmax_last_dim(&x)?]))
        }
        Work::Softmax { pass: Pass::Backward, .. } => {
            let x = variable(inputs, "x")?;
            let y = ops::softmax(x.as_tensor(), D::Minus1)?;
            backward(&y, inputs, vec![x])?
        }
        Work::LayerNorm { pass: Pass::Forward, .. } => {
            let (x, weight, bias) = (inputs.get("x")?, inputs.get("weight")?, inputs.get("bias")?);
            Box::new(move || Ok(vec![ops::layer_norm(&x, &weight, &bias, EPSILON as f32)?]))
        }
        Work::LayerNorm { pass: Pass::Backward, .. } => {
            let (x, weight) = (variable(inputs, "x")?, variable(inputs, "weight")?);
            let bias = variable(inputs, "bias")?;
            let (scale, shift) = (weight.as_tensor(), bias.as_tensor());
            let y = ops::layer_norm_slow(x.as_tensor(), scale, shift, EPSILON as f32)?;
            backward(&y, inputs, vec![x, weight, bias])?
        }
        Work::RmsNorm { pass: Pass::Forward, .. } => {
            let (x, weight) = (inputs.get("x")?, inputs.get("weight")?);
            Box::new(move || Ok(vec![ops::rms_norm(&x, &weight, EPSILON as f32)?]))
        }
        Work::RmsNorm { pass: Pass::Backward, .. } => {
            let (x, weight) = (variable(inputs, "x")?, variable(inputs, "weight")?);
            let y = ops::rms_norm_slow(x.as_tensor(), weight.as_tensor(), EPSILON as f32)?;
            backward(&y, inputs, vec![x, weight])?
        }
        // Its attention on CUDA is a crate of its own, and has no backward.
        Work::Attention { .. } => return Ok(None),
        Work::AdamW { .. } => {
            let parameters = variable(inputs, "parameters")?;
            let gradients = inputs.get("gradients")?;
            let options = ParamsAdamW {
                lr: LEARNING_RATE,
                weight_decay: WEIGHT_DECAY,
                ..ParamsAdamW::default()
            };
            let mut optimiser = AdamW::new(vec![parameters.clone()], options)?;
            // Only a backward pass makes a store of gradients.
            let mut store = parameters.as_tensor().sum_all()?.backward()?;
            Box::new(move || {
                let norm = gradients.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?;
                let scale = (CLIP_NORM / (f64::from(norm) + 1e-6)).min(1.0);
                store.insert(&parameters, (&gradients * scale)?);
                optimiser.step(&store)?;
                Ok(vec![parameters.as_tensor().clone()])
            })
        }
        Work::Train { .. }
        | Work::Prefill { .. }
        | Work::Decode { .. }
        | Work::Serve { .. }
        | Work::FirstToken { .. }
        | Work::Dequantize { .. }
        | Work::QuantizedLinear { .. } => return Ok(None),
    }))
}

fn lora(x: &Tensor, weight: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let low_rank = (x.matmul(a)?.matmul(b)? * LORA_SCALE)?;
    Ok((x.matmul(&weight.t()?)? + low_rank)?)
}

fn variable(inputs: &Inputs, name: &str) -> Result<Var> {
    Ok(Var::from_tensor(&inputs.get(name)?)?)
}

/// The gradients of `variables` when that of `y` is the input `dy`.
fn backward(y: &Tensor, inputs: &Inputs, variables: Vec<Var>) -> Result<Box<dyn Workload>> {
    let loss = (y * inputs.get("dy")?)?.sum_all()?;
    Ok(Box::new(move || {
        let gradients = loss.backward()?;
        variables.iter().map(|variable| gradient(&gradients, variable)).collect()
    }))
}

fn gradient(gradients: &GradStore, variable: &Var) -> Result<Tensor> {
    gradients
        .get(variable)
        .cloned()
        .ok_or_else(|| Error::option("gradient", "is missing: Candle has cut the graph"))
}
