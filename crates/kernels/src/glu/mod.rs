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

use crate::device::cpu::{collapsed_rows, dispatch, storage_values, zeros};
use crate::device::{require_cpu, require_dtype, require_shape, rows_and_columns};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, WithDType, bail,
};

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

/// `(dgate, dup)` like `gate` and `up`, from `d_out` of their shape and dtype.
///
/// # Errors
/// Like [`forward`].
pub fn backward(
    gate: &Tensor,
    up: &Tensor,
    activation: Activation,
    d_out: &Tensor,
) -> Result<(Tensor, Tensor)> {
    check(gate, up)?;
    require_cpu(OPERATION, &[d_out])?;
    require_shape(OPERATION, "d_out", d_out, gate.dims())?;
    require_dtype(OPERATION, "d_out", d_out, gate.dtype())?;
    let (gate, up) = (rows(&gate.detach())?, rows(&up.detach())?);
    // Both gradients in one pass, next to each other.
    let both = gate.apply_op3_no_bwd(&up, &rows(&d_out.detach())?, &GluBackward { activation })?;
    Ok((both.get(0)?, both.get(1)?))
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

fn row_places(layout: &Layout) -> Result<cpu::Strided> {
    match collapsed_rows(layout) {
        Some((_, columns, stride)) => {
            Ok(cpu::Strided { start: layout.start_offset(), columns, stride })
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
        let (gate_rows, up_rows) = (row_places(gate_layout)?, row_places(up_layout)?);
        dispatch!(OPERATION, gate.dtype(), T => {
            let mut out = zeros::<T>(gate_layout.shape().elem_count());
            let gate = (storage_values(gate)?, gate_rows);
            cpu::forward(self.activation, gate, (storage_values(up)?, up_rows), &mut out);
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
        let (dgate, dup) = backward(gate, up, self.activation, d_out)?;
        Ok((Some(dgate), Some(dup)))
    }
}

/// `(gate, up, d_out) -> (2, ..)`: the gradients of gate and up.
struct GluBackward {
    activation: Activation,
}

impl CustomOp3 for GluBackward {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
        d_out: &CpuStorage,
        d_out_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let layouts = [row_places(gate_layout)?, row_places(up_layout)?, row_places(d_out_layout)?];
        let count = gate_layout.shape().elem_count();
        let mut shape = vec![2];
        shape.extend_from_slice(gate_layout.dims());
        dispatch!(OPERATION, gate.dtype(), T => {
            let mut out = zeros::<T>(2 * count);
            let (dgate, dup) = out.split_at_mut(count);
            let gate = (storage_values(gate)?, layouts[0]);
            let up = (storage_values(up)?, layouts[1]);
            let d_out = (storage_values(d_out)?, layouts[2]);
            cpu::backward(self.activation, gate, up, d_out, dgate, dup);
            Ok((T::to_cpu_storage_owned(out), Shape::from(shape)))
        })
    }
}
