//! Embedding.
use crate::device::cpu::*;
use candle_core::{Result, Tensor, bail};
use num_traits::Zero;
/// Rows of the table.
pub fn forward(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    dispatch!(table.dtype(), "embedding", T => {
        let (v, d) = table.dims2()?;
        let mut dims = ids.dims().to_vec();
        dims.push(d);
        read!(table: T = table);
        read!(ids: u32 = ids);
        if let Some(id) = ids.iter().find(|&&id| id as usize >= v) { bail!("embedding: id {id} is not below {v}") }
        let mut out = Vec::with_capacity(ids.len() * d);
        for &id in ids { out.extend_from_slice(&table[id as usize * d..(id as usize + 1) * d]); }
        tensor(out, &dims)
    })
}
/// dtable
pub fn backward(dy: &Tensor, ids: &Tensor, v: usize) -> Result<Tensor> {
    dispatch!(dy.dtype(), "embedding", T => {
        let (_, d) = rows_and_width("embedding", "dy", dy)?;
        read!(dy: T = dy);
        read!(ids: u32 = ids);
        let mut out = vec![<T as Element>::Acc::zero(); v * d];
        for (i, &id) in ids.iter().enumerate() {
            for (o, g) in out[id as usize * d..(id as usize + 1) * d].iter_mut().zip(&dy[i * d..]) { *o += g.up(); }
        }
        tensor(out, &[v, d])
    })
}
