//! LoRA linear: `y = x·Wᵀ + bias + s·(drop(x)·A)·B` (Hu et al., 2021, arXiv:2106.09685).
mod cpu;
use crate::device::cpu::{check_device, dispatch, rows_and_width};
use candle_core::{Result, Tensor};
/// Inverted dropout whose mask is a function of the seed and the element's index.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The probability of dropping an element.
    pub probability: f32,
    /// Decides the mask.
    pub seed: u64,
}
/// The low-rank path.
#[derive(Clone, Copy, Debug)]
pub struct Lora<'a> {
    /// `(in, r)`
    pub a: &'a Tensor,
    /// `(r, out)`
    pub b: &'a Tensor,
    /// What the path is multiplied by.
    pub scale: f64,
    /// Dropout on its input.
    pub dropout: Option<Dropout>,
}
/// What [`backward`] gives.
#[derive(Debug)]
pub struct Gradients {
    /// Of x.
    pub dx: Option<Tensor>,
    /// Of A.
    pub da: Tensor,
    /// Of B.
    pub db: Tensor,
}
/// Returns y and `drop(x)·A`.
pub fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    lora: &Lora<'_>,
) -> Result<(Tensor, Tensor)> {
    check_device("lora_linear", &[x, weight])?;
    let base = crate::matmul::linear(x, weight, bias)?;
    let (rows, _) = rows_and_width("lora_linear", "x", x)?;
    dispatch!(x.dtype(), "lora_linear", T => cpu::forward::<T>(x, base, lora, rows))
}
/// Gives dx, dA and dB.
pub fn backward(
    x: &Tensor,
    weight: &Tensor,
    xa: &Tensor,
    lora: &Lora<'_>,
    dy: &Tensor,
    need_dx: bool,
) -> Result<Gradients> {
    let (rows, _) = rows_and_width("lora_linear", "x", x)?;
    dispatch!(x.dtype(), "lora_linear", T => cpu::backward::<T>(x, weight, xa, lora, dy, need_dx, rows))
}
