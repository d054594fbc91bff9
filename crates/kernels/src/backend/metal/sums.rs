//! The host's side of sums over rows, and zeros.

use super::{Argument, Array, Dispatch, Metal, size};
use candle_core::{DType, Result};

/// How rows are shared out: so many groups, of so many rows.
pub(crate) struct Groups {
    pub(crate) count: usize,
    pub(crate) rows: usize,
}

impl Groups {
    /// By the number of rows alone.
    pub(crate) fn of(rows: usize) -> Groups {
        const ROWS_OF_GROUP: usize = 32;
        const GROUPS: usize = 256;
        let of_group = rows.div_ceil(GROUPS).max(ROWS_OF_GROUP);
        Groups { count: rows.div_ceil(of_group), rows: of_group }
    }
}

impl Metal {
    /// Encodes `before`, which writes `partial` `(sets, groups, columns)` f32, and then the sums over
    /// the groups, `(sets, columns)`, always added in the same order.
    pub(crate) fn run_and_sum<const BEFORE: usize>(
        &self,
        before: [Dispatch; BEFORE],
        partial: &Array,
        [sets, groups, columns]: [usize; 3],
    ) -> Result<Array> {
        const OPERATION: &str = "a sum over rows";
        let out = self.empty((sets, columns), DType::F32)?;
        let arguments = [
            Argument::Input(partial),
            Argument::Output(&out),
            Argument::U32(size(OPERATION, groups)?),
            Argument::U32(size(OPERATION, columns)?),
        ];
        let sum = self.by_thread("sum_groups", columns, sets, &arguments)?;
        let mut dispatches = Vec::from(before);
        dispatches.push(sum);
        self.run(&dispatches)?;
        Ok(out)
    }

    /// Zeros, f32.
    pub(crate) fn zeros(&self, shape: impl Into<candle_core::Shape>) -> Result<Array> {
        let out = self.empty(shape, DType::F32)?;
        self.clear(&out)?;
        Ok(out)
    }

    /// Writes zeros over contiguous f32.
    pub(crate) fn clear(&self, out: &Array) -> Result<()> {
        let count = out.tensor.elem_count();
        let arguments = [Argument::Output(out), Argument::U64(count as u64)];
        self.run(&[self.by_elements("fill_zeros", count, 1, &arguments)?])
    }
}
