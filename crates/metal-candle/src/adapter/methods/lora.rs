//! LoRA: `scale · (x·A)·B` beside a frozen `x·Wᵀ` (Hu et al., 2021, arXiv:2106.09685).

use super::dora::Magnitude;
use crate::Result;
use crate::autograd::Parameter;
use crate::random::SplitMix64;
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::lora_rows::Factors;
use metal_candle_kernels::{copy, matmul};
use std::sync::{Arc, Mutex, PoisonError};

/// The low-rank update of one linear layer.
#[derive(Debug)]
pub(crate) struct LowRank {
    /// `(in, rank)`
    pub a: Parameter,
    /// `(rank, out)`
    pub b: Parameter,
    /// What `x·A·B` is multiplied by.
    pub scale: f64,
    /// The probability of dropping an input in training.
    pub dropout: f32,
    /// Sets this layer's dropout apart from the other layers'.
    pub stream: u64,
    /// Where A and B started, if their product wasn't zero: it is taken off again, so that the layer starts as
    /// the frozen one.
    pub start: Option<Start>,
    /// Of DoRA.
    pub magnitude: Option<Magnitude>,
    /// A and B as passes over rows with different adapters read them, for activations of a dtype.
    pub laid_out: LaidOut,
}

/// What [`LowRank::factors`] gave last.
#[derive(Debug, Default)]
pub(crate) struct LaidOut(Mutex<Option<(u64, DType, Arc<Factors>)>>);

/// The A₀ `(in, rank)` and B₀ `(rank, out)` that training starts from, frozen, in f32, as they act beside A and B.
#[derive(Debug, Clone)]
pub(crate) struct Start {
    /// A₀
    pub a: Tensor,
    /// -B₀
    pub minus_b: Tensor,
}

impl LowRank {
    /// A and B as they act: with their start, `[A, A₀]` `(in, 2·rank)` and `[B; -B₀]` `(2·rank, out)`.
    pub fn effective(&self) -> Result<(Tensor, Tensor)> {
        let (a, b) = (self.a.tensor(), self.b.tensor());
        Ok(match &self.start {
            None => (a.clone(), b.clone()),
            Some(start) => (Tensor::cat(&[a, &start.a], 1)?, Tensor::cat(&[b, &start.minus_b], 0)?),
        })
    }

    /// A and B as they act, laid out for rows of activations of `dtype` that have different adapters: once for every
    /// `generation` of the parameters.
    pub fn factors(&self, generation: u64, dtype: DType) -> Result<Arc<Factors>> {
        let mut laid_out = self.laid_out.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, for_dtype, factors)) = laid_out.as_ref()
            && (*of, *for_dtype) == (generation, dtype)
        {
            return Ok(factors.clone());
        }
        let (a, b) = self.effective()?;
        let factors = Arc::new(Factors::new(&a, &b, self.scale, dtype)?);
        *laid_out = Some((generation, dtype, factors.clone()));
        Ok(factors)
    }

    /// The weight `(out, in)` with the update in it, in the weight's dtype and summed in f32. `generation` is that
    /// of the parameters.
    pub fn merged(&self, weight: &Tensor, generation: u64) -> Result<Tensor> {
        let (a, b) = self.effective()?;
        // (A · B)ᵀ = Bᵀ · Aᵀ, which `linear` reads as Bᵀ times the rows of A.
        let update = matmul::linear(&b.t()?.contiguous()?, &a, None)?.affine(self.scale, 0.0)?;
        let mut sum = (copy::cast(weight, DType::F32)? + update)?;
        if let Some(magnitude) = &self.magnitude {
            let norms = || magnitude.norms(weight, &a, &b, self.scale);
            let lengths = magnitude.lengths(generation, norms)?;
            sum = sum.broadcast_mul(&lengths.factor.unsqueeze(1)?)?;
        }
        Ok(copy::cast(&sum, weight.dtype())?)
    }
}

/// A `(in, rank)` uniform in ±1/√in, which is Kaiming's with `a = √5`, as in PEFT. `random` sets the layer
/// apart.
pub fn kaiming(input: usize, rank: usize, random: SplitMix64) -> Result<Tensor> {
    let bound = 1.0 / (input as f64).sqrt();
    fill(input, rank, random, |random| (2.0 * random.uniform() - 1.0) * bound)
}

/// A `(in, rank)` normal with a deviation of `1 / rank`, as PEFT's `gaussian`.
pub fn gaussian(input: usize, rank: usize, random: SplitMix64) -> Result<Tensor> {
    normal((input, rank), 1.0 / rank as f64, random)
}

/// A matrix of normal numbers.
pub fn normal(shape: (usize, usize), deviation: f64, random: SplitMix64) -> Result<Tensor> {
    fill(shape.0, shape.1, random, |random| random.normal() * deviation)
}

fn fill(
    input: usize,
    rank: usize,
    mut random: SplitMix64,
    draw: impl Fn(&mut SplitMix64) -> f64,
) -> Result<Tensor> {
    let values: Vec<f32> = (0..input * rank).map(|_| draw(&mut random) as f32).collect();
    Ok(Tensor::from_vec(values, (input, rank), &Device::Cpu)?)
}
