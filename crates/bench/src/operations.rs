//! metal-candle's side of the rows of single operations.

use crate::Workload;
use crate::rows::{
    CLIP_NORM, EPSILON, Inputs, LEARNING_RATE, LORA_SCALE, Packing, Pass, QUANTIZED_COPIES,
    WEIGHT_DECAY, Work,
};
use candle_core::{DType, Device, Tensor};
use metal_candle::{Error, Result};
use metal_candle_kernels::lora_linear::{self, Lora, Projection};
use metal_candle_kernels::quantized::{Quantized, Scales, quantize};
use metal_candle_kernels::{adamw, attention, flat, layer_norm, matmul, rms_norm, softmax};

/// As in `torch.nn.utils.clip_grad_norm_`.
pub(crate) const CLIP_EPSILON: f64 = 1e-6;

/// The settings of AdamW in every row.
pub const ADAMW: adamw::Options = adamw::Options {
    learning_rate: LEARNING_RATE,
    beta1: 0.9,
    beta2: 0.999,
    epsilon: 1e-8,
    weight_decay: WEIGHT_DECAY,
    bias_correction: true,
};

/// The work on these inputs, ready to be called.
///
/// # Errors
/// When an input is missing or has a shape that doesn't fit, and for work on a model.
pub fn prepare(work: &Work, inputs: &Inputs) -> Result<Box<dyn Workload>> {
    Ok(match *work {
        Work::LoraLinear { pass, .. } => {
            let (x, weight) = (inputs.get("x")?, inputs.get("weight")?);
            let (a, b) = (inputs.get("a")?, inputs.get("b")?);
            match pass {
                Pass::Forward => Box::new(move || {
                    let lora = Some(adapter(&a, &b));
                    let weight = (&weight).into();
                    let projection = Projection { weight, bias: None, lora };
                    Ok(lora_linear::forward_only(&x, &[projection])?)
                }),
                Pass::Backward => {
                    let dy = inputs.get("dy")?;
                    let (_, xa) = lora_linear::forward(&x, &weight, None, &adapter(&a, &b))?;
                    Box::new(move || {
                        let lora = adapter(&a, &b);
                        let found = lora_linear::backward(&x, &weight, &xa, &lora, &dy, true)?;
                        Ok(found.dx.into_iter().chain([found.da, found.db]).collect())
                    })
                }
            }
        }
        Work::Dequantize { outer, packing, .. } => {
            let mut weights = copies(&inputs.get("weight")?, outer, packing)?.into_iter().cycle();
            Box::new(move || {
                let weight = weights.next().map(|weight| weight.dequantize(DType::BF16));
                Ok(weight.transpose()?.into_iter().collect())
            })
        }
        Work::QuantizedLinear { outer, packing, .. } => {
            let (x, weight) = (inputs.get("x")?, inputs.get("weight")?);
            let mut weights = copies(&weight, outer, packing)?.into_iter().cycle();
            Box::new(move || {
                let y = weights.next().map(|weight| matmul::linear(&x, &weight, None));
                Ok(y.transpose()?.into_iter().collect())
            })
        }
        Work::Softmax { pass, .. } => {
            let x = inputs.get("x")?;
            match pass {
                Pass::Forward => Box::new(move || Ok(vec![softmax::forward(&x)?])),
                Pass::Backward => {
                    let (y, dy) = (softmax::forward(&x)?, inputs.get("dy")?);
                    Box::new(move || Ok(vec![softmax::backward(&y, &dy)?]))
                }
            }
        }
        Work::LayerNorm { pass, .. } => {
            let (x, weight, bias) = (inputs.get("x")?, inputs.get("weight")?, inputs.get("bias")?);
            match pass {
                Pass::Forward => Box::new(move || {
                    Ok(vec![layer_norm::forward(&x, &weight, Some(&bias), EPSILON)?])
                }),
                Pass::Backward => {
                    let dy = inputs.get("dy")?;
                    let needs = layer_norm::Needs { dx: true, dweight: true, dbias: true };
                    Box::new(move || {
                        let found = layer_norm::backward(&x, &weight, EPSILON, &dy, needs)?;
                        Ok([found.dx, found.dweight, found.dbias].into_iter().flatten().collect())
                    })
                }
            }
        }
        Work::RmsNorm { pass, .. } => {
            let (x, weight) = (inputs.get("x")?, inputs.get("weight")?);
            match pass {
                Pass::Forward => {
                    Box::new(move || Ok(vec![rms_norm::forward(&x, &weight, EPSILON, 0.0)?]))
                }
                Pass::Backward => {
                    let dy = inputs.get("dy")?;
                    Box::new(move || {
                        let (dx, dweight) =
                            rms_norm::backward(&x, &weight, EPSILON, 0.0, &dy, true, true)?;
                        Ok(dx.into_iter().chain(dweight).collect())
                    })
                }
            }
        }
        Work::Attention { head_dim, pass, .. } => {
            let (q, k, v) = (inputs.get("q")?, inputs.get("k")?, inputs.get("v")?);
            let scale = 1.0 / (head_dim as f64).sqrt();
            let options = attention::Options { scale, softcap: None, window: None, sinks: None };
            match pass {
                Pass::Forward => {
                    Box::new(move || Ok(vec![attention::forward(&q, &k, &v, None, &options)?.0]))
                }
                Pass::Backward => {
                    let dy = inputs.get("dy")?;
                    let (o, log_sum_exp) = attention::forward(&q, &k, &v, None, &options)?;
                    Box::new(move || {
                        let (dq, dk, dv) =
                            attention::backward(&q, &k, &v, &o, &log_sum_exp, None, &options, &dy)?;
                        Ok(vec![dq, dk, dv])
                    })
                }
            }
        }
        Work::AdamW { .. } => {
            // A copy, which Candle's `copy` isn't on Metal: the step changes it in place.
            let parameters = inputs.get("parameters")?.force_contiguous()?;
            let gradients = inputs.get("gradients")?;
            let mut state = Optimiser::new(&parameters)?;
            Box::new(move || {
                state.step(&parameters, &gradients, parameters.elem_count())?;
                Ok(vec![parameters.clone()])
            })
        }
        Work::Train { .. }
        | Work::Prefill { .. }
        | Work::Decode { .. }
        | Work::Serve { .. }
        | Work::FirstToken { .. } => {
            return Err(Error::option("row", "is work on a model, expected a single operation"));
        }
    })
}

/// A matrix of `outer` rows, which are those of `weight` again and again, quantised, some times.
fn copies(weight: &Tensor, outer: usize, packing: Packing) -> Result<Vec<Quantized>> {
    let device = weight.device();
    let weight = weight.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let (rows, inner) = weight.dims2()?;
    let part = quantize(&weight, packing.format())?;
    let again = |tensor: &Tensor| tensor.repeat(outer / rows);
    let scales = match part.scales() {
        Scales::Plain { scales, offsets } => Scales::Plain {
            scales: again(scales)?,
            offsets: offsets.as_ref().map(again).transpose()?,
        },
        Scales::E8m0(scales) => Scales::E8m0(again(scales)?),
        Scales::E4m3 { scales, overall } => {
            Scales::E4m3 { scales: again(scales)?, overall: *overall }
        }
        Scales::Nested { codes, table, scales, offset } => Scales::Nested {
            codes: again(codes)?,
            table: table.clone(),
            scales: again(scales)?,
            offset: *offset,
        },
        Scales::Blocks { scales, signed, large, offsets } => Scales::Blocks {
            scales: again(scales)?,
            signed: *signed,
            large: again(large)?,
            offsets: match offsets {
                Some((offsets, large)) => Some((again(offsets)?, again(large)?)),
                None => None,
            },
        },
    };
    let shape = (rows * (outer / rows), inner);
    let codes = again(part.codes())?;
    let whole = Quantized::new(shape, part.levels(), part.group(), codes, scales)?;
    (0..QUANTIZED_COPIES).map(|_| Ok(whole.to_device(device)?)).collect()
}

fn adapter<'a>(a: &'a Tensor, b: &'a Tensor) -> Lora<'a> {
    Lora { a, b, scale: LORA_SCALE, dropout: None }
}

/// AdamW's state, and its step with clipping.
pub(crate) struct Optimiser {
    first: Tensor,
    second: Tensor,
    steps: usize,
}

impl Optimiser {
    pub(crate) fn new(parameters: &Tensor) -> Result<Self> {
        Ok(Self { first: parameters.zeros_like()?, second: parameters.zeros_like()?, steps: 0 })
    }

    /// Clips and updates; returns the norm of the gradients before clipping.
    pub(crate) fn step(
        &mut self,
        parameters: &Tensor,
        gradients: &Tensor,
        decayed: usize,
    ) -> Result<f64> {
        let norm = flat::norm(gradients)?;
        let scale = (CLIP_NORM / (norm + CLIP_EPSILON)).min(1.0) as f32;
        self.steps += 1;
        let (m, v) = (&self.first, &self.second);
        adamw::step(parameters, gradients, m, v, self.steps, scale, decayed, &ADAMW)?;
        Ok(norm)
    }

    /// The same as training does it: the gradients are zero afterwards.
    pub(crate) fn step_and_clear(
        &mut self,
        parameters: &Tensor,
        gradients: &Tensor,
        decayed: usize,
    ) -> Result<f64> {
        self.steps += 1;
        let (m, v, clip) = (&self.first, &self.second, Some(CLIP_NORM));
        let norm =
            adamw::clipped_step(parameters, gradients, m, v, self.steps, clip, decayed, &ADAMW)?;
        Ok(norm)
    }
}
