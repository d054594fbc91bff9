//! The gate of a gated MLP (Shazeer 2020, <https://arxiv.org/abs/2002.05202>).
//!
//! ```text
//! out = f(gate)·up       dgate = dout·up·f'(gate)       dup = dout·f(gate)
//!
//! silu:       f(x) = x·σ(x)                f'(x) = σ(x)·(1 + x·(1 - σ(x)))
//! gelu:       f(x) = x·Φ(x)                f'(x) = Φ(x) + x·φ(x)
//! gelu tanh:  f(x) = x/2·(1 + tanh u)      u = √(2/π)·(x + 0.044715·x³)
//!             f'(x) = (1 + tanh u)/2 + x/2·(1 - tanh² u)·u'
//!
//! clamped:    f(x) = c·σ(1.702·c)          c = min(x, 7), and min(max(up, -7), 7) + 1 in the place of up
//!             f'(x) = σ(1.702·x)·(1 + 1.702·x·(1 - σ(1.702·x))), and 0 beyond 7; dup is 0 beyond -7 and 7
//! ```

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, dispatch, unwritten};
use crate::backend::{
    on_gpu, record2, require_dtype, require_shape, require_together, rows_and_columns,
};
use candle_core::{Device, Result, Tensor};

const OPERATION: &str = "glu";

/// The function that the gate goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x·σ(x)`: Llama and most others.
    Silu,
    /// GELU by its tanh approximation: Gemma.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
    /// `x·σ(1.702·x)` up to 7, of values from -7 to 7, to which 1 is added: gpt-oss.
    Clamped,
}

/// The slope within the sigmoid of [`Activation::Clamped`], and where gates and values are cut.
pub(crate) const CLAMPED_SLOPE: f64 = 1.702;
pub(crate) const CLAMPED_LIMIT: f64 = 7.0;

#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
impl Activation {
    /// As kernels of a GPU know it.
    pub(crate) fn code(self) -> u32 {
        match self {
            Activation::Silu => 0,
            Activation::GeluTanh => 1,
            Activation::Gelu => 2,
            Activation::Clamped => 3,
        }
    }
}

/// `activation(gate)·up`, as the module has it: `gate` and `up` of the same shape `(.., size)` and dtype, like the result.
/// The halves of a fused projection can be given as `narrow`ed views; they aren't copied.
///
/// # Errors
/// When shapes or dtypes don't fit, or the tensors aren't on one device.
pub fn forward(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    check(gate, up)?;
    on_gpu!(gate, gpu => gpu::forward(gate, up, activation));
    let (shape, count) = (gate.dims(), gate.elem_count());
    let (gate, up) = (Input::collapsed_rows(gate)?, Input::collapsed_rows(up)?);
    let (gate, up) = (gate.read(), up.read());
    dispatch!(OPERATION, gate.dtype(), T => {
        let mut out = unwritten::<T>(count);
        cpu::forward(activation, gate.rows::<T>()?, up.rows()?, &mut out);
        Tensor::from_vec(out, shape, &Device::Cpu)
    })
}

/// Like [`forward`], recorded in Candle's autograd.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    let out = forward(gate, up, activation)?;
    record2(OPERATION, [gate, up], out, move |[gate, up], _, d_out| {
        let (need_dgate, need_dup) = (gate.track_op(), up.track_op());
        Ok(backward(gate, up, activation, d_out, need_dgate, need_dup)?.into())
    })
}

/// `(dgate, dup)` like `gate` and `up`, from `d_out` of their shape and dtype, in one pass. What isn't
/// needed isn't computed.
///
/// # Errors
/// Like [`forward`].
pub fn backward(
    gate: &Tensor,
    up: &Tensor,
    activation: Activation,
    d_out: &Tensor,
    need_dgate: bool,
    need_dup: bool,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    check(gate, up)?;
    require_together(OPERATION, &[gate, d_out])?;
    require_shape(OPERATION, "d_out", d_out, gate.dims())?;
    require_dtype(OPERATION, "d_out", d_out, gate.dtype())?;
    on_gpu!(gate, gpu => gpu::backward(gate, up, activation, d_out, need_dgate, need_dup));
    let (row_count, _) = rows_and_columns(OPERATION, "gate", gate)?;
    let (shape, count) = (gate.dims(), gate.elem_count());
    let [gate, up, d_out] = [gate, up, d_out].map(Input::collapsed_rows);
    let (gate, up, d_out) = (gate?, up?, d_out?);
    let (gate, up, d_out) = (gate.read(), up.read(), d_out.read());
    dispatch!(OPERATION, gate.dtype(), T => {
        let mut dgate = need_dgate.then(|| unwritten::<T>(count));
        let mut dup = need_dup.then(|| unwritten::<T>(count));
        cpu::backward(
            activation,
            gate.rows::<T>()?,
            up.rows()?,
            d_out.rows()?,
            row_count,
            dgate.as_deref_mut(),
            dup.as_deref_mut(),
        );
        let tensor = |gradient| Tensor::from_vec(gradient, shape, &Device::Cpu);
        Ok((dgate.map(tensor).transpose()?, dup.map(tensor).transpose()?))
    })
}

/// An error unless `gate` and `up` can be a unit.
pub(crate) fn check(gate: &Tensor, up: &Tensor) -> Result<()> {
    require_together(OPERATION, &[gate, up])?;
    rows_and_columns(OPERATION, "gate", gate)?;
    require_shape(OPERATION, "up", up, gate.dims())?;
    require_dtype(OPERATION, "up", up, gate.dtype())
}

/// `(rows, columns)` that inputs of one shape are read as, and the distances of their rows, which lie at
/// one each. What is contiguous is one long row.
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
fn places<const N: usize>(inputs: [&Tensor; N]) -> Result<(usize, usize, [usize; N])> {
    use crate::backend::cpu::collapsed_rows;
    use candle_core::bail;
    let mut sizes = (0, 0);
    let mut strides = [0; N];
    for (stride, input) in strides.iter_mut().zip(inputs) {
        let Some((rows, columns, distance)) = collapsed_rows(input.layout()) else {
            bail!("metal-candle-kernels: {OPERATION}: expected rows at one distance")
        };
        (sizes, *stride) = ((rows, columns), distance);
    }
    let (rows, columns) = sizes;
    match strides.iter().all(|stride| *stride == columns) {
        true => Ok((1, rows * columns, strides)),
        false => Ok((rows, columns, strides)),
    }
}
