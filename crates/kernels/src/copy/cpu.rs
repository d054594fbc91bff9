//! Copies on the CPU of what Candle has no operation for.

use super::NOWHERE;
use crate::backend::cpu::Input;
use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Tensor, bail};

/// Both rows of a place into their pools; see [`super::write_rows_both`].
pub(crate) fn write_rows_both(
    operation: &'static str,
    pools: [&Tensor; 2],
    rows: [&Tensor; 2],
    places: &Tensor,
) -> Result<()> {
    let room = pools[0].dim(0)? * pools[0].dim(1)?;
    let places = Input::contiguous(places)?;
    let places = places.read();
    let places = places.slice::<u32>()?;
    let beyond = |place: &&u32| **place != NOWHERE && **place as usize >= room;
    if let Some(place) = places.iter().find(beyond) {
        bail!(
            "metal-candle-kernels: {operation}: found place {place}, expected less than {room}, or NOWHERE"
        )
    }
    for (pool, rows) in pools.into_iter().zip(rows) {
        // Rows that are a part of the pool would be locked for reading and for writing.
        let rows = rows.detach().force_contiguous()?;
        pool.inplace_op2(&rows, &WriteRows { operation, places })?;
    }
    Ok(())
}

struct WriteRows<'a> {
    operation: &'static str,
    places: &'a [u32],
}

impl InplaceOp2 for WriteRows<'_> {
    fn name(&self) -> &'static str {
        self.operation
    }

    fn cpu_fwd(
        &self,
        pool: &mut CpuStorage,
        pool_layout: &Layout,
        rows: &CpuStorage,
        _: &Layout,
    ) -> Result<()> {
        match (pool, rows) {
            (CpuStorage::F32(pool), CpuStorage::F32(rows)) => self.copy(pool, pool_layout, rows),
            (CpuStorage::BF16(pool), CpuStorage::BF16(rows)) => self.copy(pool, pool_layout, rows),
            (CpuStorage::F16(pool), CpuStorage::F16(rows)) => self.copy(pool, pool_layout, rows),
            (CpuStorage::F64(pool), CpuStorage::F64(rows)) => self.copy(pool, pool_layout, rows),
            (CpuStorage::U8(pool), CpuStorage::U8(rows)) => self.copy(pool, pool_layout, rows),
            _ => bail!(
                "metal-candle-kernels: {} does not support such tensors, expected F32, BF16, F16, F64 or U8",
                self.operation
            ),
        }
    }
}

impl WriteRows<'_> {
    fn copy<T: Copy>(&self, pool: &mut [T], layout: &Layout, rows: &[T]) -> Result<()> {
        let width = rows.len() / self.places.len();
        let pool = &mut pool[layout.start_offset()..];
        for (place, row) in self.places.iter().zip(rows.chunks_exact(width)) {
            if *place != NOWHERE {
                pool[*place as usize * width..][..width].copy_from_slice(row);
            }
        }
        Ok(())
    }
}
