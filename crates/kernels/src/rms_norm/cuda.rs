//! RMS norm on CUDA: a warp or a block has a row, see `kernel.cu`.

use super::OPERATION;
use crate::backend::cuda::{
    ANY_THREADS, Array, Cuda, Module, Parameter, RowPlan, a_block_a_row, any_groups, by_dtype,
    module,
};
use candle_core::{DType, Result, Tensor};

static MODULE: Module = module!("rms_norm");

/// Packs of 16 bytes that a thread keeps in the forward pass, as in `kernel.cu`.
const PACKS: usize = 4;
/// Elements that a thread keeps in the backward pass, as in `kernel.cu`.
const BACKWARD_ELEMENTS: usize = 16;

pub(super) fn forward(
    rows: usize,
    columns: usize,
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    weight_offset: f64,
) -> Result<Tensor> {
    let cuda = Cuda::of(x)?;
    let (x, weight) = (cuda.contiguous(x)?, cuda.contiguous(weight)?);
    let name = by_dtype!("rms_norm_forward", x.dtype)?;
    let parameter = Parameter::new(OPERATION, &weight)?;
    let y = cuda.empty(x.tensor.shape(), x.dtype)?;
    if rows * columns == 0 {
        return Ok(y.tensor);
    }
    let (offset, eps) = (weight_offset as f32, eps as f32);
    match RowPlan::new(rows, columns, x.dtype, PACKS, &[x.pointer, weight.pointer]) {
        Some(plan) => {
            let (rows, columns) = (rows as i64, columns as i32);
            let launch = plan.launch(&MODULE, &cuda, name, 0)?;
            // SAFETY: x and y have (rows, columns) elements and the weight (columns); every row has
            // its threads.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&x.pointer).arg(&parameter).arg(&offset).arg(&eps);
                    arguments.arg(&y.pointer).arg(&rows).arg(&columns).arg(&plan.row_threads);
                })?;
            }
        }
        None => forward_any(&cuda, rows, columns, &x, None, parameter, offset, eps, None, &y)?,
    }
    Ok(y.tensor)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn forward_residual(
    rows: usize,
    columns: usize,
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f64,
    weight_offset: f64,
) -> Result<(Tensor, Tensor)> {
    let cuda = Cuda::of(x)?;
    let (x, residual) = (cuda.contiguous(x)?, cuda.contiguous(residual)?);
    let weight = cuda.contiguous(weight)?;
    let name = by_dtype!("rms_norm_forward_residual", x.dtype)?;
    let parameter = Parameter::new(OPERATION, &weight)?;
    let sum = cuda.empty(x.tensor.shape(), x.dtype)?;
    let y = cuda.empty(x.tensor.shape(), x.dtype)?;
    if rows * columns == 0 {
        return Ok((sum.tensor, y.tensor));
    }
    let (offset, eps) = (weight_offset as f32, eps as f32);
    let addresses = [x.pointer, residual.pointer, weight.pointer];
    match RowPlan::new(rows, columns, x.dtype, PACKS, &addresses) {
        Some(plan) => {
            let (rows, columns) = (rows as i64, columns as i32);
            let launch = plan.launch(&MODULE, &cuda, name, 0)?;
            // SAFETY: as in `forward`; the residual and the sum have the size of x.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&x.pointer).arg(&residual.pointer).arg(&parameter);
                    arguments.arg(&offset).arg(&eps).arg(&sum.pointer).arg(&y.pointer);
                    arguments.arg(&rows).arg(&columns).arg(&plan.row_threads);
                })?;
            }
        }
        None => {
            let (residual, sum) = (Some(&residual), Some(&sum));
            forward_any(&cuda, rows, columns, &x, residual, parameter, offset, eps, sum, &y)?;
        }
    }
    Ok((sum.tensor, y.tensor))
}

/// For rows that aren't kept in registers.
#[allow(clippy::too_many_arguments)]
fn forward_any(
    cuda: &Cuda,
    rows: usize,
    columns: usize,
    x: &Array,
    residual: Option<&Array>,
    weight: Parameter,
    offset: f32,
    eps: f32,
    sum: Option<&Array>,
    y: &Array,
) -> Result<()> {
    let name = by_dtype!("rms_norm_forward_any", x.dtype)?;
    let launch = MODULE.launch(cuda, name, a_block_a_row(rows)?, ANY_THREADS, 0)?;
    let columns = columns as i64;
    let pointer = |array: Option<&Array>| array.map_or(0, |array| array.pointer);
    let (residual, sum) = (pointer(residual), pointer(sum));
    // SAFETY: all have (rows, columns) elements, and the weight (columns); a block has a row.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&residual).arg(&weight).arg(&offset).arg(&eps);
            arguments.arg(&sum).arg(&y.pointer).arg(&columns);
        })
    }
}

pub(super) struct Backward<'a> {
    pub rows: usize,
    pub columns: usize,
    pub x: &'a Tensor,
    pub weight: &'a Tensor,
    pub eps: f64,
    pub weight_offset: f64,
    pub dy: &'a Tensor,
    /// Another gradient of `x`, to be added.
    pub dsum: Option<&'a Tensor>,
}

impl Backward<'_> {
    pub(super) fn run(
        &self,
        need_dx: bool,
        need_dweight: bool,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Self { rows, columns, .. } = *self;
        let cuda = Cuda::of(self.x)?;
        let (x, weight, dy) =
            (cuda.contiguous(self.x)?, cuda.contiguous(self.weight)?, cuda.contiguous(self.dy)?);
        let dsum = self.dsum.map(|dsum| cuda.contiguous(dsum)).transpose()?;
        by_dtype!("rms_norm_backward", x.dtype)?;
        let parameter = Parameter::new(OPERATION, &weight)?;
        let dx = need_dx.then(|| cuda.empty(x.tensor.shape(), x.dtype)).transpose()?;
        if rows * columns == 0 || !(need_dx || need_dweight) {
            let dweight = need_dweight.then(|| cuda.zeros(columns, DType::F32)).transpose()?;
            return Ok((dx.map(|dx| dx.tensor), dweight.map(|dweight| dweight.tensor)));
        }
        let problem = Problem {
            cuda: &cuda,
            rows,
            columns,
            x: &x,
            weight: parameter,
            eps: self.eps as f32,
            offset: self.weight_offset as f32,
            dy: &dy,
            dsum: dsum.as_ref().map_or(0, |dsum| dsum.pointer),
            dx: dx.as_ref().map_or(0, |dx| dx.pointer),
        };
        let packs = BACKWARD_ELEMENTS * x.dtype.size_in_bytes() / 16;
        let addresses = [x.pointer, weight.pointer, dy.pointer, problem.dsum];
        let plan = RowPlan::new(rows, columns, x.dtype, packs, &addresses);
        let tensors = if dsum.is_some() { 3 } else { 2 };
        let ahead = match &plan {
            Some(plan) if need_dweight => plan.rows_ahead(&cuda, tensors, packs)?,
            _ => None,
        };
        let dweight = match (plan, ahead) {
            (Some(plan), Some(ahead)) if need_dweight => {
                Some(problem.packed_with_weight(plan, ahead)?)
            }
            (Some(plan), _) if !need_dweight => {
                problem.packed(plan)?;
                None
            }
            _ => problem.any(need_dweight)?,
        };
        let dweight = dweight.map(|dweight| dweight.tensor.get(0)).transpose()?;
        Ok((dx.map(|dx| dx.tensor), dweight))
    }
}

/// The same, ready for the kernels.
struct Problem<'a> {
    cuda: &'a Cuda<'a>,
    rows: usize,
    columns: usize,
    x: &'a Array,
    weight: Parameter,
    eps: f32,
    offset: f32,
    dy: &'a Array,
    /// An address, or 0.
    dsum: u64,
    /// An address, or 0.
    dx: u64,
}

impl Problem<'_> {
    fn packed(&self, plan: RowPlan) -> Result<()> {
        let name = by_dtype!("rms_norm_backward", self.x.dtype)?;
        let launch = plan.launch(&MODULE, self.cuda, name, 0)?;
        let (rows, columns) = (self.rows as i64, self.columns as i32);
        // SAFETY: x, dy, dsum and dx have (rows, columns) elements, where they aren't null.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.x.pointer).arg(&self.dy.pointer).arg(&self.dsum);
                arguments.arg(&self.weight).arg(&self.offset).arg(&self.eps).arg(&self.dx);
                arguments.arg(&rows).arg(&columns).arg(&plan.row_threads);
            })
        }
    }

    /// `ahead`: bytes of shared memory for rows that are asked for in advance.
    fn packed_with_weight(&self, mut plan: RowPlan, ahead: u32) -> Result<Array> {
        let name = by_dtype!("rms_norm_backward_weight", self.x.dtype)?;
        let groups = plan.share_rows(self.rows);
        let partial = self.cuda.empty((groups, self.columns), DType::F32)?;
        let launch = plan.launch(&MODULE, self.cuda, name, ahead)?;
        let (rows, columns) = (self.rows as i64, self.columns as i32);
        // SAFETY: as in `packed`, and every warp or block has a row of the partial sums.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.x.pointer).arg(&self.dy.pointer).arg(&self.dsum);
                arguments.arg(&self.weight).arg(&self.offset).arg(&self.eps).arg(&self.dx);
                arguments.arg(&partial.pointer).arg(&rows).arg(&columns).arg(&plan.row_threads);
            })?;
        }
        self.cuda.sum_groups(&partial, 1, groups, self.columns)
    }

    /// For rows that aren't kept in registers.
    fn any(&self, need_dweight: bool) -> Result<Option<Array>> {
        let Self { cuda, rows, .. } = *self;
        let inverse = need_dweight.then(|| cuda.empty(rows, DType::F32)).transpose()?;
        let address = inverse.as_ref().map_or(0, |inverse| inverse.pointer);
        let name = by_dtype!("rms_norm_backward_any", self.x.dtype)?;
        let launch = MODULE.launch(cuda, name, a_block_a_row(rows)?, ANY_THREADS, 0)?;
        let columns = self.columns as i64;
        // SAFETY: as in `packed`, with a block a row; `inverse` has (rows) elements.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.x.pointer).arg(&self.dy.pointer).arg(&self.dsum);
                arguments.arg(&self.weight).arg(&self.offset).arg(&self.eps).arg(&self.dx);
                arguments.arg(&address).arg(&columns);
            })?;
        }
        let Some(inverse) = inverse else { return Ok(None) };
        let name = by_dtype!("rms_norm_weight_any", self.x.dtype)?;
        let (grid, groups, rows_of_group) = any_groups(rows, self.columns);
        let partial = cuda.empty((groups, self.columns), DType::F32)?;
        let launch = MODULE.launch(cuda, name, grid, ANY_THREADS, 0)?;
        let (rows, rows_of_group) = (rows as i64, rows_of_group as i64);
        // SAFETY: as above; every group of rows has a row of the partial sums.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.x.pointer).arg(&self.dy.pointer).arg(&inverse.pointer);
                arguments.arg(&partial.pointer).arg(&rows).arg(&columns).arg(&rows_of_group);
            })?;
        }
        Ok(Some(cuda.sum_groups(&partial, 1, groups, self.columns)?))
    }
}
