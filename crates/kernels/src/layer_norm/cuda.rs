//! Layer norm on CUDA: a warp or a block has a row, see `kernel.cu`.

use super::{Gradients, Needs, OPERATION};
use crate::backend::cuda::{
    ANY_THREADS, Array, Cuda, Module, Parameter, RowPlan, a_block_a_row, any_groups, by_dtype,
    module,
};
use candle_core::{DType, Result, Tensor};

static MODULE: Module = module!("layer_norm");

/// Packs of 16 bytes that a thread keeps in the forward pass, as in `kernel.cu`.
const PACKS: usize = 4;
/// Elements that a thread keeps in the backward pass, as in `kernel.cu`.
const BACKWARD_ELEMENTS: usize = 16;

pub(super) fn forward(
    rows: usize,
    columns: usize,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let cuda = Cuda::of(x)?;
    let (x, weight) = (cuda.contiguous(x)?, cuda.contiguous(weight)?);
    let bias = bias.map(|bias| cuda.contiguous(bias)).transpose()?;
    let name = by_dtype!("layer_norm_forward", x.dtype)?;
    let scale = Parameter::new(OPERATION, &weight)?;
    let shift = match &bias {
        Some(bias) => Parameter::new(OPERATION, bias)?,
        None => Parameter::none(),
    };
    let y = cuda.empty(x.tensor.shape(), x.dtype)?;
    if rows * columns == 0 {
        return Ok(y.tensor);
    }
    let eps = eps as f32;
    let bias_address = bias.as_ref().map_or(0, |bias| bias.pointer);
    let addresses = [x.pointer, weight.pointer, bias_address];
    match RowPlan::new(rows, columns, x.dtype, PACKS, &addresses) {
        Some(plan) => {
            let (rows, columns) = (rows as i64, columns as i32);
            let launch = plan.launch(&MODULE, &cuda, name, 0)?;
            // SAFETY: x and y have (rows, columns) elements, the parameters (columns); every row has
            // its threads.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&x.pointer).arg(&scale).arg(&shift).arg(&eps).arg(&y.pointer);
                    arguments.arg(&rows).arg(&columns).arg(&plan.row_threads);
                })?;
            }
        }
        None => {
            let name = by_dtype!("layer_norm_forward_any", x.dtype)?;
            let launch = MODULE.launch(&cuda, name, a_block_a_row(rows)?, ANY_THREADS, 0)?;
            let columns = columns as i64;
            // SAFETY: as above, with a block a row.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&x.pointer).arg(&scale).arg(&shift).arg(&eps).arg(&y.pointer);
                    arguments.arg(&columns);
                })?;
            }
        }
    }
    Ok(y.tensor)
}

pub(super) fn backward(
    rows: usize,
    columns: usize,
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    dy: &Tensor,
    needs: Needs,
) -> Result<Gradients> {
    let cuda = Cuda::of(x)?;
    let (x, weight, dy) = (cuda.contiguous(x)?, cuda.contiguous(weight)?, cuda.contiguous(dy)?);
    by_dtype!("layer_norm_backward", x.dtype)?;
    let scale = Parameter::new(OPERATION, &weight)?;
    let dx = needs.dx.then(|| cuda.empty(x.tensor.shape(), x.dtype)).transpose()?;
    let need_sums = needs.dweight || needs.dbias;
    let sums = if rows * columns == 0 {
        need_sums.then(|| cuda.zeros((2, columns), DType::F32)).transpose()?
    } else {
        let problem = Problem {
            cuda: &cuda,
            rows,
            columns,
            x: &x,
            weight: scale,
            eps: eps as f32,
            dy: &dy,
            dx: dx.as_ref().map_or(0, |dx| dx.pointer),
        };
        let packs = BACKWARD_ELEMENTS * x.dtype.size_in_bytes() / 16;
        let addresses = [x.pointer, weight.pointer, dy.pointer];
        let plan = RowPlan::new(rows, columns, x.dtype, packs, &addresses);
        let ahead = match &plan {
            Some(plan) if need_sums => plan.rows_ahead(&cuda, 2, packs)?,
            _ => None,
        };
        match (plan, ahead) {
            _ if !(needs.dx || need_sums) => None,
            (Some(plan), Some(ahead)) if need_sums => Some(problem.packed_with_sums(plan, ahead)?),
            (Some(plan), _) if !need_sums => {
                problem.packed(plan)?;
                None
            }
            _ => problem.any(need_sums)?,
        }
    };
    let parameter = |needed: bool, index| {
        sums.as_ref().filter(|_| needed).map(|sums| sums.tensor.get(index)).transpose()
    };
    Ok(Gradients {
        dx: dx.map(|dx| dx.tensor),
        dweight: parameter(needs.dweight, 0)?,
        dbias: parameter(needs.dbias, 1)?,
    })
}

/// The backward pass, ready for the kernels.
struct Problem<'a> {
    cuda: &'a Cuda<'a>,
    rows: usize,
    columns: usize,
    x: &'a Array,
    weight: Parameter,
    eps: f32,
    dy: &'a Array,
    /// An address, or 0.
    dx: u64,
}

impl Problem<'_> {
    fn packed(&self, plan: RowPlan) -> Result<()> {
        let name = by_dtype!("layer_norm_backward", self.x.dtype)?;
        let launch = plan.launch(&MODULE, self.cuda, name, 0)?;
        let (rows, columns) = (self.rows as i64, self.columns as i32);
        // SAFETY: x, dy and dx have (rows, columns) elements, where they aren't null.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.x.pointer).arg(&self.dy.pointer).arg(&self.weight);
                arguments.arg(&self.eps).arg(&self.dx).arg(&rows).arg(&columns);
                arguments.arg(&plan.row_threads);
            })
        }
    }

    /// The sums `(2, columns)` for the weight and the bias. `ahead`: bytes of shared memory for rows that
    /// are asked for in advance.
    fn packed_with_sums(&self, mut plan: RowPlan, ahead: u32) -> Result<Array> {
        let name = by_dtype!("layer_norm_backward_parameters", self.x.dtype)?;
        let groups = plan.share_rows(self.rows);
        let partial = self.cuda.empty((2, groups, self.columns), DType::F32)?;
        let launch = plan.launch(&MODULE, self.cuda, name, ahead)?;
        let (rows, columns, group_count) = (self.rows as i64, self.columns as i32, groups as i64);
        // SAFETY: as in `packed`, and every warp or block has a row in each half of the partial sums.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.x.pointer).arg(&self.dy.pointer).arg(&self.weight);
                arguments.arg(&self.eps).arg(&self.dx).arg(&partial.pointer).arg(&group_count);
                arguments.arg(&rows).arg(&columns).arg(&plan.row_threads);
            })?;
        }
        self.cuda.sum_groups(&partial, 2, groups, self.columns)
    }

    /// For rows that aren't kept in registers.
    fn any(&self, need_sums: bool) -> Result<Option<Array>> {
        let Self { cuda, rows, .. } = *self;
        let statistics = need_sums.then(|| cuda.empty((rows, 2), DType::F32)).transpose()?;
        let address = statistics.as_ref().map_or(0, |statistics| statistics.pointer);
        let name = by_dtype!("layer_norm_backward_any", self.x.dtype)?;
        let launch = MODULE.launch(cuda, name, a_block_a_row(rows)?, ANY_THREADS, 0)?;
        let columns = self.columns as i64;
        // SAFETY: as in `packed`, with a block a row; the statistics have (rows, 2) elements.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.x.pointer).arg(&self.dy.pointer).arg(&self.weight);
                arguments.arg(&self.eps).arg(&self.dx).arg(&address).arg(&columns);
            })?;
        }
        let Some(statistics) = statistics else { return Ok(None) };
        let name = by_dtype!("layer_norm_parameters_any", self.x.dtype)?;
        let (grid, groups, rows_of_group) = any_groups(rows, self.columns);
        let partial = cuda.empty((2, groups, self.columns), DType::F32)?;
        let launch = MODULE.launch(cuda, name, grid, ANY_THREADS, 0)?;
        let (rows, rows_of_group) = (rows as i64, rows_of_group as i64);
        // SAFETY: as above; every group of rows has a row in each half of the partial sums.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.x.pointer).arg(&self.dy.pointer).arg(&statistics.pointer);
                arguments.arg(&partial.pointer).arg(&rows).arg(&columns).arg(&rows_of_group);
            })?;
        }
        Ok(Some(cuda.sum_groups(&partial, 2, groups, self.columns)?))
    }
}
