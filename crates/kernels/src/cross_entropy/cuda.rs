//! The fused head and cross entropy on CUDA: the rows that count are gathered, logits are made in f32 a
//! chunk of rows at a time, and a kernel turns them into losses and gradients.

use super::{ALIGNMENT, Options, Output};
use crate::backend::cuda::{
    Array, Cuda, Matrix, Module, a_block_a_row, by_dtype, module, require_floats,
};
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("cross_entropy");

/// Threads of a block that works on logits, and of one that copies a row.
const THREADS: u32 = 512;
const COPY_THREADS: u32 = 256;

/// Bytes of logits that exist at a time.
pub(super) const MEMORY: usize = 512 << 20;

pub(super) struct Problem<'a> {
    /// `(n, d)`
    pub(super) hidden: &'a Tensor,
    /// `(v, d)`
    pub(super) weight: &'a Tensor,
    /// Row and target of every row that counts.
    pub(super) counted: &'a [(usize, u32)],
    pub(super) options: &'a Options,
    pub(super) need_dhidden: bool,
    /// Leading columns of the weight that need a gradient.
    pub(super) trained: usize,
}

impl Problem<'_> {
    /// The results, in chunks of so many rows.
    pub(super) fn run(&self, operation: &str, chunk: usize) -> Result<Output> {
        require_floats(operation, &[self.hidden, self.weight])?;
        let cuda = Cuda::of(self.hidden)?;
        let dtype = self.hidden.dtype();
        let (n, d) = self.hidden.dims2()?;
        let v = self.weight.dim(0)?;
        let count = self.counted.len();
        let loss = cuda.empty((), DType::F32)?;
        if count == 0 {
            cuda.clear(&loss)?;
            let zeros = |needed: bool, shape: (usize, usize), dtype| {
                let zeros = || Ok::<_, candle_core::Error>(cuda.zeros(shape, dtype)?.tensor);
                needed.then(zeros).transpose()
            };
            return Ok(Output {
                loss: loss.tensor,
                count,
                dhidden: zeros(self.need_dhidden, (n, d), dtype)?,
                dweight: zeros(self.trained > 0, (v, self.trained), DType::F32)?,
            });
        }
        let need_gradient = self.need_dhidden || self.trained > 0;
        let all_count = count == n;
        let indices = self.upload_indices(&cuda, n, all_count)?;
        let targets = indices.pointer;
        let rows = targets + (count * size_of::<u32>()) as u64;
        let places = rows + (count * size_of::<u32>()) as u64;

        let weight = cuda.rows_as(self.weight, dtype)?;
        let hidden_rows = cuda.rows(self.hidden)?;
        let (hidden, _gathered) = if all_count {
            (hidden_rows.matrix, None)
        } else {
            let gathered = cuda.empty((count, d), dtype)?;
            gather(&cuda, hidden_rows.matrix, rows, &gathered, (count, d))?;
            (Matrix::of(&gathered, d), Some(gathered))
        };
        let chunk = chunk.min(count);
        let stride = v.next_multiple_of(ALIGNMENT);
        let products = cuda.empty((chunk, stride), DType::F32)?;
        let gradients = match need_gradient {
            true if dtype != DType::F32 => Some(cuda.empty((chunk, stride), dtype)?),
            _ => None,
        };
        let all_products = Matrix::of(&products, stride);
        // In f32 the gradients take the place of the products.
        let all_gradients = match &gradients {
            Some(gradients) => Matrix::of(gradients, stride),
            None => all_products,
        };
        let losses = cuda.empty(count, DType::F32)?;
        let dhidden = match self.need_dhidden {
            true => Some(cuda.empty((count, d), dtype)?),
            false => None,
        };
        let dweight = match self.trained {
            0 => None,
            trained => Some(cuda.empty((v, trained), DType::F32)?),
        };
        for start in (0..count).step_by(chunk) {
            let rows = chunk.min(count - start);
            let hidden = hidden.at_row(start);
            cuda.gemm([rows, v, d], 1.0, (hidden, weight.matrix.t()), 0.0, all_products)?;
            let offset = (start * size_of::<u32>()) as u64;
            let gradient = if need_gradient { all_gradients.pointer } else { 0 };
            let places = (products.pointer, gradient, targets + offset, losses.pointer + offset);
            self.losses(&cuda, dtype, places, stride, rows)?;
            if let Some(dhidden) = &dhidden {
                let to = Matrix::of(dhidden, d).at_row(start);
                cuda.gemm([rows, d, v], 1.0, (all_gradients, weight.matrix), 0.0, to)?;
            }
            if let Some(dweight) = &dweight {
                let beta = if start == 0 { 0.0 } else { 1.0 };
                let to = Matrix::of(dweight, self.trained);
                cuda.gemm([v, self.trained, rows], 1.0, (all_gradients.t(), hidden), beta, to)?;
            }
        }
        sum(&cuda, &losses, &loss, count)?;
        let dhidden = match dhidden {
            Some(of_counted) if !all_count => {
                let dhidden = cuda.empty((n, d), dtype)?;
                scatter(&cuda, &of_counted, places, &dhidden, (n, d))?;
                Some(dhidden)
            }
            other => other,
        };
        Ok(Output {
            loss: loss.tensor,
            count,
            dhidden: dhidden.map(|dhidden| dhidden.tensor),
            dweight: dweight.map(|dweight| dweight.tensor),
        })
    }

    /// The targets, and where not all rows count the rows of those that do, and where each row is among
    /// them.
    fn upload_indices(&self, cuda: &Cuda, n: usize, all_count: bool) -> Result<Array> {
        let Ok(_) = u32::try_from(n) else {
            bail!("metal-candle-kernels: cross_entropy: hidden has {n} rows, expected below 2^32")
        };
        let mut indices: Vec<u32> = self.counted.iter().map(|(_, target)| *target).collect();
        if !all_count {
            indices.extend(self.counted.iter().map(|(row, _)| *row as u32));
            let first = indices.len();
            indices.resize(first + n, u32::MAX);
            for (place, (row, _)) in (0..).zip(self.counted) {
                indices[first + row] = place;
            }
        }
        let count = indices.len();
        cuda.upload(&indices, count)
    }

    fn losses(
        &self,
        cuda: &Cuda,
        dtype: DType,
        (products, gradients, targets, losses): (u64, u64, u64, u64),
        stride: usize,
        rows: usize,
    ) -> Result<()> {
        let name = by_dtype!("loss_rows", dtype)?;
        let launch = MODULE.launch(cuda, name, a_block_a_row(rows)?, THREADS, 0)?;
        let (stride, columns) = (stride as i64, self.weight.dim(0)? as i32);
        let scale = self.options.logit_scale as f32;
        let cap = self.options.softcap.unwrap_or(0.0) as f32;
        // SAFETY: as the kernel declares them; the caller holds what the pointers point into, and targets
        // are columns.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&products).arg(&gradients).arg(&targets).arg(&losses);
                arguments.arg(&stride).arg(&columns).arg(&scale).arg(&cap);
            })
        }
    }
}

fn gather(
    cuda: &Cuda,
    x: Matrix,
    rows: u64,
    out: &Array,
    (count, columns): (usize, usize),
) -> Result<()> {
    let name = by_dtype!("gather_rows", x.dtype)?;
    let launch = MODULE.launch(cuda, name, (count as u32, 1, 1), COPY_THREADS, 0)?;
    let aligned = i32::from(
        x.pointer.is_multiple_of(16) && whole(x.stride, x.dtype) && whole(columns, x.dtype),
    );
    let (stride, columns) = (x.stride as i64, columns as i32);
    // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&stride).arg(&rows).arg(&out.pointer);
            arguments.arg(&columns).arg(&aligned);
        })
    }
}

fn scatter(
    cuda: &Cuda,
    x: &Array,
    places: u64,
    out: &Array,
    (count, columns): (usize, usize),
) -> Result<()> {
    let name = by_dtype!("scatter_rows", x.dtype)?;
    let launch = MODULE.launch(cuda, name, (count as u32, 1, 1), COPY_THREADS, 0)?;
    let (aligned, columns) = (i32::from(whole(columns, x.dtype)), columns as i32);
    // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&places).arg(&out.pointer).arg(&columns).arg(&aligned);
        })
    }
}

/// Whether so many elements are whole 16 bytes.
fn whole(elements: usize, dtype: DType) -> bool {
    (elements * dtype.size_in_bytes()).is_multiple_of(16)
}

fn sum(cuda: &Cuda, losses: &Array, loss: &Array, count: usize) -> Result<()> {
    let launch = MODULE.launch(cuda, "sum_losses", (1, 1, 1), THREADS, 0)?;
    let count = count as i32;
    // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&losses.pointer).arg(&loss.pointer).arg(&count);
        })
    }
}
