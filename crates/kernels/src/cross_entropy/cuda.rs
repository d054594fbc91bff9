//! The fused head and cross entropy on CUDA: the rows that count are gathered, logits are made in f32 a
//! chunk of rows at a time, and a kernel turns them into losses and gradients.

use super::{ALIGNMENT, AllCounted, Options, Output, Statistics};
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
    pub(super) counted: &'a AllCounted,
    pub(super) options: &'a Options,
    pub(super) need_dhidden: bool,
    /// Leading columns of the weight that need a gradient.
    pub(super) trained: usize,
}

/// Where a chunk's rows lie; what isn't wanted is null.
struct Pointers {
    products: u64,
    gradients: u64,
    /// Targets, their shares and room for their logits, of the rows that count.
    of_targets: [u64; 3],
    /// These rows, their weights and the sums of their shares.
    of_counted: [u64; 3],
    /// Losses, entropies and hits of all rows.
    of_rows: [u64; 3],
}

impl Problem<'_> {
    /// The results, in chunks of so many rows.
    pub(super) fn run(&self, operation: &str, chunk: usize) -> Result<Output> {
        require_floats(operation, &[self.hidden, self.weight])?;
        let cuda = Cuda::of(self.hidden)?;
        let dtype = self.hidden.dtype();
        let (n, d) = self.hidden.dims2()?;
        let v = self.weight.dim(0)?;
        let (count, width) = (self.counted.rows.len(), self.counted.width);
        let loss = cuda.empty((), DType::F32)?;
        let losses = cuda.zeros(n, DType::F32)?;
        let statistics = match self.options.statistics {
            true => Some([cuda.zeros(n, DType::F32)?, cuda.zeros(n, DType::F32)?]),
            false => None,
        };
        if count == 0 {
            cuda.clear(&loss)?;
            let zeros = |needed: bool, shape: (usize, usize), dtype| {
                let zeros = || Ok::<_, candle_core::Error>(cuda.zeros(shape, dtype)?.tensor);
                needed.then(zeros).transpose()
            };
            return Ok(Output {
                loss: loss.tensor,
                losses: losses.tensor,
                statistics: statistics.map(Statistics::of),
                count,
                dhidden: zeros(self.need_dhidden, (n, d), dtype)?,
                dweight: zeros(self.trained > 0, (v, self.trained), DType::F32)?,
            });
        }
        let need_gradient = self.need_dhidden || self.trained > 0;
        let all_count = count == n;
        let indices = self.upload_indices(&cuda, n, all_count)?;
        let after = |pointer: u64, numbers: usize| pointer + (numbers * size_of::<u32>()) as u64;
        let targets = indices.pointer;
        let shares = after(targets, count * width);
        let of_counted = after(shares, count * width);
        let weights = after(of_counted, count);
        let sums = after(weights, count);
        let places = after(sums, count);

        let weight = cuda.rows_as(self.weight, dtype)?;
        let hidden_rows = cuda.rows(self.hidden)?;
        let (hidden, _gathered) = if all_count {
            (hidden_rows.matrix, None)
        } else {
            let gathered = cuda.empty((count, d), dtype)?;
            gather(&cuda, hidden_rows.matrix, of_counted, &gathered, (count, d))?;
            (Matrix::of(&gathered, d), Some(gathered))
        };
        let chunk = chunk.min(count);
        let stride = v.next_multiple_of(ALIGNMENT);
        let products = cuda.empty((chunk, stride), DType::F32)?;
        let target_logits = cuda.empty((chunk, width), DType::F32)?;
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
            let [entropies, hits] = match &statistics {
                Some([entropies, hits]) => [entropies.pointer, hits.pointer],
                None => [0, 0],
            };
            let pointers = Pointers {
                products: products.pointer,
                gradients: if need_gradient { all_gradients.pointer } else { 0 },
                of_targets: [
                    after(targets, start * width),
                    after(shares, start * width),
                    target_logits.pointer,
                ],
                of_counted: [of_counted, weights, sums].map(|pointer| after(pointer, start)),
                of_rows: [losses.pointer, entropies, hits],
            };
            self.losses(&cuda, dtype, &pointers, stride, rows)?;
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
        sum(&cuda, &losses, (of_counted, weights), &loss, count)?;
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
            losses: losses.tensor,
            statistics: statistics.map(Statistics::of),
            count,
            dhidden: dhidden.map(|dhidden| dhidden.tensor),
            dweight: dweight.map(|dweight| dweight.tensor),
        })
    }

    /// The targets of the rows that count and their shares, these rows, their weights and the sums of their shares, and
    /// where not all count where each row is among them.
    fn upload_indices(&self, cuda: &Cuda, n: usize, all_count: bool) -> Result<Array> {
        let Ok(_) = u32::try_from(n) else {
            bail!("metal-candle-kernels: cross_entropy: hidden has {n} rows, expected below 2^32")
        };
        let AllCounted { rows, tokens, shares, .. } = self.counted;
        let mut indices = tokens.clone();
        indices.extend(shares.iter().map(|share| share.to_bits()));
        indices.extend(rows.iter().map(|counted| counted.row as u32));
        indices.extend(rows.iter().map(|counted| counted.weight.to_bits()));
        indices.extend(rows.iter().map(|counted| counted.share.to_bits()));
        if !all_count {
            let first = indices.len();
            indices.resize(first + n, u32::MAX);
            for (place, counted) in (0..).zip(rows) {
                indices[first + counted.row] = place;
            }
        }
        let count = indices.len();
        cuda.upload(&indices, count)
    }

    fn losses(
        &self,
        cuda: &Cuda,
        dtype: DType,
        pointers: &Pointers,
        stride: usize,
        rows: usize,
    ) -> Result<()> {
        let Pointers { products, gradients, of_targets, of_counted, of_rows } = pointers;
        let name = by_dtype!("loss_rows", dtype)?;
        let launch = MODULE.launch(cuda, name, a_block_a_row(rows)?, THREADS, 0)?;
        let (stride, columns) = (stride as i64, self.weight.dim(0)? as i32);
        let width = self.counted.width as i32;
        let scale = self.options.logit_scale as f32;
        let cap = self.options.softcap.unwrap_or(0.0) as f32;
        // SAFETY: as the kernel declares them; the caller holds what the pointers point into, and targets
        // are columns.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(products).arg(gradients);
                for pointer in of_targets.iter().chain(of_counted).chain(of_rows) {
                    arguments.arg(pointer);
                }
                arguments.arg(&width).arg(&stride).arg(&columns).arg(&scale).arg(&cap);
            })
        }
    }
}

impl Statistics {
    fn of([entropies, hits]: [Array; 2]) -> Self {
        Self { entropies: entropies.tensor, hits: hits.tensor }
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

fn sum(
    cuda: &Cuda,
    losses: &Array,
    (of_counted, weights): (u64, u64),
    loss: &Array,
    count: usize,
) -> Result<()> {
    let launch = MODULE.launch(cuda, "sum_losses", (1, 1, 1), THREADS, 0)?;
    let count = count as i32;
    // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&losses.pointer).arg(&of_counted).arg(&weights);
            arguments.arg(&loss.pointer).arg(&count);
        })
    }
}
