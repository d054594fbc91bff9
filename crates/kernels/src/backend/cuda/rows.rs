//! The host's side of `rows.cuh`: which threads have which row, and adding up what blocks have summed.

use super::{Array, Cuda, Launch, Module, module};
use crate::batch_invariance;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, bail};

static SUMS: Module = module!("sums");

const WARP: usize = 32;
/// As in `rows.cuh`.
const ROW_THREADS: usize = 512;
/// Fewer rows than this leave multiprocessors without work.
const FEW_ROWS: usize = 132;
pub(crate) const ANY_THREADS: u32 = 256;

/// How rows in registers are spread over threads.
pub(crate) struct RowPlan {
    pub(crate) row_threads: i32,
    pub(crate) block: u32,
    /// Blocks that have one row for every warp or block.
    pub(crate) grid: u32,
    /// Rows that a block has at a time.
    rows_at_once: usize,
}

impl RowPlan {
    /// Where a row of `columns` elements of `dtype` fits in registers, at most `packs` packs of 16 bytes a
    /// thread, and every address allows to load packs.
    pub(crate) fn new(
        rows: usize,
        columns: usize,
        dtype: DType,
        packs: usize,
        addresses: &[u64],
    ) -> Option<RowPlan> {
        let pack = 16 / dtype.size_in_bytes();
        if !columns.is_multiple_of(pack) || addresses.iter().any(|address| address % 16 != 0) {
            return None;
        }
        let threads = |packs: usize| (columns / pack).div_ceil(packs).next_multiple_of(WARP);
        // A row alone on its multiprocessor is done sooner by more threads.
        let packs = match rows {
            0..FEW_ROWS if !batch_invariance::is_on() => {
                (1..packs).find(|packs| threads(*packs) <= ROW_THREADS)
            }
            _ => None,
        }
        .unwrap_or(packs);
        let row_threads = threads(packs);
        if row_threads > ROW_THREADS {
            return None;
        }
        // Few rows are spread over as many multiprocessors as there are.
        let rows_at_once = if row_threads == WARP && rows >= 2048 { 4 } else { 1 };
        Some(RowPlan {
            row_threads: row_threads as i32,
            block: (row_threads * rows_at_once) as u32,
            grid: u32::try_from(rows.div_ceil(rows_at_once)).ok()?,
            rows_at_once,
        })
    }

    /// Prepares a launch of a kernel that begins with `follow_previous`.
    pub(crate) fn launch(
        &self,
        module: &Module,
        cuda: &Cuda,
        name: &'static str,
        shared: u32,
    ) -> Result<Launch> {
        let grid = (self.grid, 1, 1);
        Ok(module.launch(cuda, name, grid, self.block, shared)?.overlapping())
    }

    /// Bytes of shared memory for the rows of `tensors` that a block has asked for in advance, `packs` packs
    /// a thread and tensor; nothing when the device has less, as those before Hopper have for long rows of
    /// f32, which then go element by element.
    pub(crate) fn rows_ahead(
        &self,
        cuda: &Cuda,
        tensors: usize,
        packs: usize,
    ) -> Result<Option<u32>> {
        /// As in `rows.cuh`.
        const ROWS: usize = 2;
        /// More than what the kernels declare.
        const FIXED: usize = 2 << 10;
        let bytes = ROWS * tensors * packs * 16 * self.block as usize;
        Ok((bytes + FIXED <= cuda.most_shared_memory()?).then_some(bytes as u32))
    }

    /// Fewer blocks, which take several rows each in turn and keep sums over them: the number of groups
    /// of threads that have such sums.
    pub(crate) fn share_rows(&mut self, rows: usize) -> usize {
        const MULTIPROCESSORS: usize = 132;
        // What those of an H200 hold at once: a thread has some hundred registers.
        const THREADS: usize = MULTIPROCESSORS * 512;
        // So that the sums stay small beside the rows, unless there are few.
        const ROWS_OF_GROUP: usize = 8;
        let few = rows.min(MULTIPROCESSORS);
        let wanted = rows.div_ceil(ROWS_OF_GROUP).max(few);
        let groups = (THREADS / self.row_threads as usize).min(wanted);
        let blocks = groups.div_ceil(self.rows_at_once).max(1);
        self.grid = blocks as u32;
        blocks * self.rows_at_once
    }
}

/// For sums over rows, a thread a column: `(grid, groups of rows, rows in a group)`.
pub(crate) fn any_groups(rows: usize, columns: usize) -> ((u32, u32, u32), usize, usize) {
    const ROWS_OF_GROUP: usize = 32;
    const GROUPS: usize = 256;
    let rows_of_group = rows.div_ceil(GROUPS).max(ROWS_OF_GROUP);
    let groups = rows.div_ceil(rows_of_group);
    let blocks = columns.div_ceil(ANY_THREADS as usize);
    ((blocks as u32, groups as u32, 1), groups, rows_of_group)
}

/// The grid of a kernel whose blocks have a row each.
pub(crate) fn a_block_a_row(rows: usize) -> Result<(u32, u32, u32)> {
    match i32::try_from(rows) {
        Ok(blocks) => Ok((blocks as u32, 1, 1)),
        Err(_) => bail!("metal-candle-kernels: {rows} rows on CUDA, expected less than 2^31"),
    }
}

/// A norm's parameter as the kernels take it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Parameter {
    address: u64,
    dtype: i32,
}

// SAFETY: it has the layout of the kernels' struct of that name.
unsafe impl DeviceRepr for Parameter {}

impl Parameter {
    pub(crate) fn new(operation: &str, array: &Array) -> Result<Parameter> {
        let dtype = match array.dtype {
            DType::F32 => 0,
            DType::BF16 => 1,
            DType::F16 => 2,
            other => bail!(
                "metal-candle-kernels: {operation} on CUDA does not support {other:?} parameters, expected F32, BF16 or F16"
            ),
        };
        Ok(Parameter { address: array.pointer, dtype })
    }

    /// No parameter.
    pub(crate) fn none() -> Parameter {
        Parameter { address: 0, dtype: 0 }
    }
}

impl Cuda<'_> {
    /// The sums `(sets, columns)` over the groups of `(sets, groups, columns)`, f32, always added in
    /// the same order; for at least one column.
    pub(crate) fn sum_groups(
        &self,
        partial: &Array,
        sets: usize,
        groups: usize,
        columns: usize,
    ) -> Result<Array> {
        let out = self.empty((sets, columns), DType::F32)?;
        let grid = (columns.div_ceil(WARP) as u32, sets as u32, 1);
        let launch = SUMS.launch(self, "sum_groups", grid, 1024, 0)?.overlapping();
        let (groups, columns) = (groups as i64, columns as i64);
        // SAFETY: the kernel reads (sets, groups, columns) and writes (sets, columns).
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&partial.pointer).arg(&groups).arg(&columns).arg(&out.pointer);
            })?;
        }
        Ok(out)
    }
}
