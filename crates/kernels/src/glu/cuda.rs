//! The gated unit on CUDA: a block has a stretch of a row, see `kernel.cu`.

use super::{Activation, OPERATION, places};
use crate::backend::cuda::{Array, Cuda, Module, by_dtype, module};
use candle_core::{Result, Tensor, bail};

static MODULE: Module = module!("glu");

/// Vectors of a thread, as in `kernel.cu`.
const AHEAD: usize = 2;
const THREADS: usize = 256;

/// How the tensors are read: as rows of one length at distances of their own.
struct Plan<const N: usize> {
    columns: i64,
    strides: [i64; N],
    packed: bool,
    chunks: i32,
    grid: u32,
    block: u32,
}

impl<const N: usize> Plan<N> {
    /// For inputs of one shape; results are contiguous.
    fn new(inputs: [&Array; N]) -> Result<Self> {
        let (rows, columns, strides) = places(inputs.map(|input| &input.tensor))?;
        let pack = 16 / inputs[0].dtype.size_in_bytes();
        let packed = columns.is_multiple_of(pack)
            && (rows == 1 || strides.iter().all(|stride| stride.is_multiple_of(pack)))
            && inputs.iter().all(|input| input.pointer % 16 == 0);
        let vectors = columns / if packed { pack } else { 1 };
        let block = vectors.div_ceil(AHEAD).next_multiple_of(32).min(THREADS);
        let chunks = vectors.div_ceil(AHEAD * block);
        match (i32::try_from(chunks), i32::try_from(rows * chunks)) {
            (Ok(chunks), Ok(grid)) => Ok(Plan {
                columns: columns as i64,
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
    let (gate, up) = (cuda.collapsed_rows(gate)?, cuda.collapsed_rows(up)?);
    let (packed, any) =
        (by_dtype!("glu_forward", gate.dtype)?, by_dtype!("glu_forward_any", gate.dtype)?);
    let out = cuda.empty(gate.tensor.shape(), gate.dtype)?;
    if gate.tensor.elem_count() == 0 {
        return Ok(out.tensor);
    }
    let plan = Plan::new([&gate, &up])?;
    let name = if plan.packed { packed } else { any };
    let launch = MODULE.launch(&cuda, name, (plan.grid, 1, 1), plan.block, 0)?.overlapping();
    let activation = activation.code() as i32;
    // SAFETY: the inputs have rows of that many columns at these distances, and the result as many.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&gate.pointer).arg(&up.pointer).arg(&out.pointer).arg(&plan.columns);
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
    let gradient =
        |needed: bool| needed.then(|| cuda.empty(gate.shape(), gate.dtype())).transpose();
    let (dgate, dup) = (gradient(need_dgate)?, gradient(need_dup)?);
    if need_dgate || need_dup {
        let d_out = cuda.collapsed_rows(d_out)?;
        launch_backward(
            &cuda,
            (gate, up),
            activation,
            &d_out,
            [dgate.as_ref(), dup.as_ref(), None],
        )?;
    }
    Ok((dgate.map(|dgate| dgate.tensor), dup.map(|dup| dup.tensor)))
}

/// `(dgate, dup)` from `d_out`, which is contiguous, and in its place the unit itself.
pub(crate) fn backward_again(
    cuda: &Cuda,
    (gate, up): (&Tensor, &Tensor),
    activation: Activation,
    d_out: &Array,
) -> Result<(Tensor, Tensor)> {
    let dgate = cuda.empty(gate.shape(), gate.dtype())?;
    let dup = cuda.empty(gate.shape(), gate.dtype())?;
    let results = [Some(&dgate), Some(&dup), Some(d_out)];
    launch_backward(cuda, (gate, up), activation, d_out, results)?;
    Ok((dgate.tensor, dup.tensor))
}

/// Writes dgate, dup and the unit, each if there is a place for it.
fn launch_backward(
    cuda: &Cuda,
    (gate, up): (&Tensor, &Tensor),
    activation: Activation,
    d_out: &Array,
    results: [Option<&Array>; 3],
) -> Result<()> {
    let (gate, up) = (cuda.collapsed_rows(gate)?, cuda.collapsed_rows(up)?);
    let (packed, any) =
        (by_dtype!("glu_backward", gate.dtype)?, by_dtype!("glu_backward_any", gate.dtype)?);
    if gate.tensor.elem_count() == 0 {
        return Ok(());
    }
    let plan = Plan::new([&gate, &up, d_out])?;
    let name = if plan.packed { packed } else { any };
    let launch = MODULE.launch(cuda, name, (plan.grid, 1, 1), plan.block, 0)?.overlapping();
    let activation = activation.code() as i32;
    let [of_gate, of_up, out] = results.map(|array| array.map_or(0, |array| array.pointer));
    // SAFETY: as in `forward`; what isn't needed is null.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&gate.pointer).arg(&up.pointer).arg(&d_out.pointer);
            arguments.arg(&of_gate).arg(&of_up).arg(&out).arg(&plan.columns);
            arguments.arg(&plan.strides[0]).arg(&plan.strides[1]).arg(&plan.strides[2]);
            arguments.arg(&plan.chunks).arg(&activation);
        })
    }
}
