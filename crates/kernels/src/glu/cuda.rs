//! The gated unit on CUDA: a block has a stretch of a row, see `kernel.cu`.

use super::{Activation, OPERATION};
use crate::device::cpu::collapsed_rows;
use crate::device::cuda::{Array, Cuda, Module, by_dtype, module};
use candle_core::{Result, Tensor, bail};

static MODULE: Module = module!("glu");

/// Vectors of a thread, as in `kernel.cu`.
const AHEAD: usize = 2;
const THREADS: usize = 256;

fn code(activation: Activation) -> i32 {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::Gelu => 2,
    }
}

/// A tensor whose rows lie at one distance from each other, copied only if they don't.
fn collapsed(cuda: &Cuda, tensor: &Tensor) -> Result<Array> {
    match collapsed_rows(tensor.layout()) {
        Some(_) => cuda.strided(tensor),
        None => cuda.contiguous(tensor),
    }
}

/// How the tensors are read: as rows of one length at distances of their own.
struct Plan {
    columns: usize,
    strides: [i64; 3],
    packed: bool,
    chunks: i32,
    grid: u32,
    block: u32,
}

impl Plan {
    /// For one to three inputs of one shape; results are contiguous.
    fn new(inputs: &[&Array]) -> Result<Plan> {
        let mut sizes = (0, 0);
        let mut strides = [0; 3];
        for (stride, input) in strides.iter_mut().zip(inputs) {
            let Some((rows, columns, distance)) = collapsed_rows(input.tensor.layout()) else {
                bail!("metal-candle-kernels: {OPERATION}: expected rows at one distance")
            };
            sizes = (rows, columns);
            *stride = distance;
        }
        let (mut rows, mut columns) = sizes;
        if strides[..inputs.len()].iter().all(|stride| *stride == columns) {
            // One long row.
            (rows, columns) = (1, rows * columns);
        }
        let pack = 16 / inputs[0].dtype.size_in_bytes();
        let packed = columns.is_multiple_of(pack)
            && (rows == 1
                || strides[..inputs.len()].iter().all(|stride| stride.is_multiple_of(pack)))
            && inputs.iter().all(|input| input.pointer % 16 == 0);
        let vectors = columns / if packed { pack } else { 1 };
        let block = vectors.div_ceil(AHEAD).next_multiple_of(32).min(THREADS);
        let chunks = vectors.div_ceil(AHEAD * block);
        match (i32::try_from(chunks), i32::try_from(rows * chunks)) {
            (Ok(chunks), Ok(grid)) => Ok(Plan {
                columns,
                strides: strides.map(|stride| stride as i64),
                packed,
                chunks,
                grid: grid as u32,
                block: block as u32,
            }),
            _ => bail!(
                "metal-candle-kernels: {OPERATION}: {rows} rows of {columns} elements are too many for one launch"
            ),
        }
    }
}

pub(super) fn forward(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    let cuda = Cuda::of(gate)?;
    let (gate, up) = (collapsed(&cuda, gate)?, collapsed(&cuda, up)?);
    let (packed, any) =
        (by_dtype!("glu_forward", gate.dtype)?, by_dtype!("glu_forward_any", gate.dtype)?);
    let out = cuda.empty(gate.tensor.shape(), gate.dtype)?;
    if gate.tensor.elem_count() == 0 {
        return Ok(out.tensor);
    }
    let plan = Plan::new(&[&gate, &up])?;
    let name = if plan.packed { packed } else { any };
    let launch = MODULE.launch(&cuda, name, (plan.grid, 1, 1), plan.block, 0)?;
    let (columns, activation) = (plan.columns as i64, code(activation));
    // SAFETY: the inputs have rows of that many columns at these distances, and the result as many.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&gate.pointer).arg(&up.pointer).arg(&out.pointer).arg(&columns);
            arguments.arg(&plan.strides[0]).arg(&plan.strides[1]).arg(&plan.chunks);
            arguments.arg(&activation);
        })?;
    }
    Ok(out.tensor)
}

pub(super) fn backward(
    gate: &Tensor,
    up: &Tensor,
    activation: Activation,
    d_out: &Tensor,
    need_dgate: bool,
    need_dup: bool,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let cuda = Cuda::of(gate)?;
    let (gate, up) = (collapsed(&cuda, gate)?, collapsed(&cuda, up)?);
    let d_out = collapsed(&cuda, d_out)?;
    let (packed, any) =
        (by_dtype!("glu_backward", gate.dtype)?, by_dtype!("glu_backward_any", gate.dtype)?);
    let gradient =
        |needed: bool| needed.then(|| cuda.empty(gate.tensor.shape(), gate.dtype)).transpose();
    let (dgate, dup) = (gradient(need_dgate)?, gradient(need_dup)?);
    if gate.tensor.elem_count() > 0 && (need_dgate || need_dup) {
        let plan = Plan::new(&[&gate, &up, &d_out])?;
        let name = if plan.packed { packed } else { any };
        let launch = MODULE.launch(&cuda, name, (plan.grid, 1, 1), plan.block, 0)?;
        let (columns, activation) = (plan.columns as i64, code(activation));
        let address = |array: &Option<Array>| array.as_ref().map_or(0, |array| array.pointer);
        let (of_gate, of_up) = (address(&dgate), address(&dup));
        // SAFETY: as in `forward`; gradients that aren't needed are null.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&gate.pointer).arg(&up.pointer).arg(&d_out.pointer);
                arguments.arg(&of_gate).arg(&of_up).arg(&columns);
                arguments.arg(&plan.strides[0]).arg(&plan.strides[1]).arg(&plan.strides[2]);
                arguments.arg(&plan.chunks).arg(&activation);
            })?;
        }
    }
    Ok((dgate.map(|dgate| dgate.tensor), dup.map(|dup| dup.tensor)))
}
