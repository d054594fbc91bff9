//! The gate of a gated MLP (Shazeer 2020, <https://arxiv.org/abs/2002.05202>).
//!
//! ```text
//! out = f(gate)·up       dgate = dout·up·f'(gate)       dup = dout·f(gate)
//!
//! silu:       f(x) = x·σ(x)                f'(x) = σ(x)·(1 + x·(1 - σ(x)))
//! gelu:       f(x) = x·Φ(x)                f'(x) = Φ(x) + x·φ(x)
//! gelu tanh:  f(x) = x/2·(1 + tanh u)      u = √(2/π)·(x + 0.044715·x³)
//!             f'(x) = (1 + tanh u)/2 + x/2·(1 - tanh² u)·u'
//! ```

mod cpu;
#[cfg(test)]
mod tests;

use crate::device::cpu::{Input, buffer, collapsed_rows, dispatch};
use crate::device::{require_cpu, require_dtype, require_shape, rows_and_columns};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Device, Layout, Result, Shape, Tensor, WithDType, bail};

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
}

/// `activation(gate)·up`: `gate` and `up` of the same shape `(.., size)` and dtype, like the result.
/// The halves of a fused projection can be given as `narrow`ed views; they aren't copied.
///
/// # Errors
/// When shapes or dtypes don't fit, or a tensor isn't on the CPU.
pub fn forward(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    check(gate, up)?;
    let (gate, up) = (rows(&gate.detach())?, rows(&up.detach())?);
    gate.apply_op2_no_bwd(&up, &Glu { activation })
}

/// Like [`forward`], recorded in Candle's autograd.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    check(gate, up)?;
    rows(gate)?.apply_op2(&rows(up)?, Glu { activation })
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
    require_cpu(OPERATION, &[d_out])?;
    require_shape(OPERATION, "d_out", d_out, gate.dims())?;
    require_dtype(OPERATION, "d_out", d_out, gate.dtype())?;
    let (row_count, _) = rows_and_columns(OPERATION, "gate", gate)?;
    let (shape, count) = (gate.dims(), gate.elem_count());
    let [gate, up, d_out] = [gate, up, d_out].map(Input::collapsed_rows);
    let (gate, up, d_out) = (gate?, up?, d_out?);
    let (gate, up, d_out) = (gate.read(), up.read(), d_out.read());
    dispatch!(OPERATION, gate.dtype(), T => {
        let mut dgate = need_dgate.then(|| buffer::<T>(count));
        let mut dup = need_dup.then(|| buffer::<T>(count));
        cpu::backward(
            activation,
            row_places(gate.storage_slice::<T>()?, gate.layout)?,
            row_places(up.storage_slice()?, up.layout)?,
            row_places(d_out.storage_slice()?, d_out.layout)?,
            row_count,
            dgate.as_deref_mut(),
            dup.as_deref_mut(),
        );
        let tensor = |gradient| Tensor::from_vec(gradient, shape, &Device::Cpu);
        Ok((dgate.map(tensor).transpose()?, dup.map(tensor).transpose()?))
    })
}

fn check(gate: &Tensor, up: &Tensor) -> Result<()> {
    require_cpu(OPERATION, &[gate, up])?;
    rows_and_columns(OPERATION, "gate", gate)?;
    require_shape(OPERATION, "up", up, gate.dims())?;
    require_dtype(OPERATION, "up", up, gate.dtype())
}

/// The tensor itself when its rows lie at one distance from each other, else a contiguous copy.
fn rows(tensor: &Tensor) -> Result<Tensor> {
    match collapsed_rows(tensor.layout()) {
        Some(_) => Ok(tensor.clone()),
        None => tensor.contiguous(),
    }
}

fn row_places<'a, T>(storage: &'a [T], layout: &Layout) -> Result<cpu::Strided<'a, T>> {
    match collapsed_rows(layout) {
        Some((_, columns, stride)) => {
            Ok(cpu::Strided { storage, start: layout.start_offset(), columns, stride })
        }
        None => {
            bail!("metal-candle-kernels: {OPERATION}: expected contiguous rows, found {layout:?}")
        }
    }
}

struct Glu {
    activation: Activation,
}

impl CustomOp2 for Glu {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        dispatch!(OPERATION, gate.dtype(), T => {
            let mut out = buffer::<T>(gate_layout.shape().elem_count());
            let gate = row_places(gate.as_slice::<T>()?, gate_layout)?;
            let up = row_places(up.as_slice::<T>()?, up_layout)?;
            cpu::forward(self.activation, gate, up, &mut out);
            Ok((T::to_cpu_storage_owned(out), gate_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        backward(gate, up, self.activation, d_out, gate.track_op(), up.track_op())
    }
}
