//! Layers with [batch invariance](crate::batch_invariance). What decides about the order of a sum is how many rows there
//! are: it says which kernel multiplies, and how a product is cut. What an adapter adds is computed as for rows that have
//! different ones ([`lora_rows`]), so that these are no other company.

#[cfg(feature = "cuda")]
use super::{DenseProjection, cuda};
use super::{Lora, Output, Projection, check, dropout, forward_again, forward_only, fp8, on_cpu};
use crate::backend::cpu::gemm::Kind;
use crate::backend::{rows_and_columns, zeros_beside};
use crate::batch_invariance::within;
use crate::copy;
use crate::lora_rows::{self, Adapters, Factors, Rows};
use crate::matmul::with_last_dimension;
#[cfg(feature = "cuda")]
use candle_core::bail;
use candle_core::{DType, Result, Tensor};
use std::sync::Arc;

const OPERATION: &str = "lora_linear::forward";

/// For what has no kernel whose sums have one order for any number of rows, as f32 has none. As many as an engine's step
/// has where it is busy; a product of so many takes an H100 about as long as reading the weight.
const ROWS_ON_CUDA: usize = 256;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
const ROWS_ON_METAL: usize = 64;
/// Where the CPU computes with what other operations give.
const ROWS_OF_OPERATIONS: usize = 32;

/// How the rows of `x` are cut.
struct Groups {
    rows: usize,
    is_filled_up: bool,
}

impl Groups {
    fn of(x: &Tensor, projections: &[Projection]) -> Self {
        let filled_up = |rows| Self { rows, is_filled_up: true };
        if x.device().is_cuda() {
            return filled_up(ROWS_ON_CUDA);
        }
        #[cfg(any(feature = "metal", feature = "metal-emulation", test))]
        if crate::backend::metal::computes(x) {
            return filled_up(ROWS_ON_METAL);
        }
        if fp8::is_one_of(projections) {
            return filled_up(ROWS_OF_OPERATIONS);
        }
        let rows = match x.dtype() {
            DType::BF16 => Kind::for_bf16().rows_alike(),
            _ => usize::MAX,
        };
        Self { rows, is_filled_up: false }
    }
}

/// What [`forward_shared`](super::forward_shared) gives for `x` `(.., inner)`; x·A where it is kept.
pub(super) fn forward(
    x: &Tensor,
    projections: &[Projection],
    keeps_xa: bool,
) -> Result<Vec<Output>> {
    let sizes = rows_and_columns(OPERATION, "x", x)?;
    check(OPERATION, x, sizes.1, projections)?;
    let frozen: Vec<_> = projections.iter().map(|it| Projection { lora: None, ..*it }).collect();
    let ys = of_frozen(x, sizes, &frozen)?;
    let xas = match keeps_xa {
        true => forward_again(x, projections)?,
        false => vec![None; projections.len()],
    };
    for (Projection { lora, .. }, y) in projections.iter().zip(&ys) {
        if let Some(lora) = lora {
            add_update(x, sizes.0, lora, y)?;
        }
    }
    Ok(ys.into_iter().zip(xas).map(|(y, xa)| Output { y, xa }).collect())
}

/// Adds what an adapter does with `x` of so many rows to `y`, in place.
fn add_update(x: &Tensor, rows: usize, lora: &Lora, y: &Tensor) -> Result<()> {
    let dropped = lora.dropout.map(|with| dropout(x, with)).transpose()?;
    let factors = Arc::new(Factors::new(lora.a, lora.b, lora.scale, x.dtype())?);
    let adapters = Adapters::new(&[vec![Some(factors)]], x.dtype(), x.device())?;
    let rows = Rows::new(&vec![Some(0); rows], x.device())?;
    lora_rows::add_updates(dropped.as_ref().unwrap_or(x), &[(0, y)], &adapters, &rows)
}

/// The results of layers without adapters.
fn of_frozen(x: &Tensor, sizes: (usize, usize), projections: &[Projection]) -> Result<Vec<Tensor>> {
    let groups = Groups::of(x, projections);
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    if groups.is_filled_up && !fp8::is_one_of(projections) {
        // A matrix in fewer bits is unpacked once for all groups.
        return super::with_dense(x.dtype(), projections, |projections| {
            #[cfg(feature = "cuda")]
            if x.device().is_cuda() {
                return on_cuda(x, sizes, &groups, projections);
            }
            in_groups(x, sizes, &groups, &super::of_any(projections))
        });
    }
    in_groups(x, sizes, &groups, projections)
}

/// Each layer by the kernels whose sums have one order, or in groups, whatever others there are.
#[cfg(feature = "cuda")]
fn on_cuda(
    x: &Tensor,
    sizes: (usize, usize),
    groups: &Groups,
    projections: &[DenseProjection],
) -> Result<Vec<Tensor>> {
    let has_one_order = cuda::has_one_order(OPERATION, x, sizes.1, projections)?;
    let (mut ordered, mut others) = (Vec::new(), Vec::new());
    for (projection, is_ordered) in projections.iter().zip(&has_one_order) {
        if *is_ordered { &mut ordered } else { &mut others }.push(*projection);
    }
    let mut of_ordered = Vec::new().into_iter();
    if !ordered.is_empty() {
        of_ordered = cuda::in_one_order(OPERATION, x, sizes, &ordered)?.into_iter();
    }
    let mut of_others = Vec::new().into_iter();
    if !others.is_empty() {
        of_others = in_groups(x, sizes, groups, &super::of_any(&others))?.into_iter();
    }
    let next = |is_ordered: &bool| if *is_ordered { of_ordered.next() } else { of_others.next() };
    let ys = has_one_order.iter().map(next);
    match ys.collect::<Option<Vec<_>>>() {
        Some(ys) => Ok(ys),
        None => bail!("metal-candle-kernels: {OPERATION}: a projection gave no output"),
    }
}

fn in_groups(
    x: &Tensor,
    (rows, inner): (usize, usize),
    groups: &Groups,
    projections: &[Projection],
) -> Result<Vec<Tensor>> {
    let flat = x.reshape((rows, inner))?;
    let mut ys = Vec::new();
    // Without rows there is a group without rows, which says what the results look like.
    for start in (0..rows.max(1)).step_by(groups.rows) {
        let group = flat.narrow(0, start, groups.rows.min(rows - start))?;
        let of_group = within(false, || of_group(&group, groups, projections))?;
        if rows <= groups.rows {
            ys = of_group;
            break;
        }
        if start == 0 {
            let wholes = of_group.iter().map(|part| zeros_beside(x, (rows, part.dim(1)?)));
            ys = wholes.collect::<Result<_>>()?;
        }
        for (whole, part) in ys.iter().zip(&of_group) {
            copy::write(whole, part, 0, start)?;
        }
    }
    ys.iter().map(|y| y.reshape(with_last_dimension(x, y.dim(1)?))).collect()
}

/// What up to a group's rows `x` `(rows, inner)` give.
fn of_group(x: &Tensor, groups: &Groups, projections: &[Projection]) -> Result<Vec<Tensor>> {
    let sizes @ (rows, inner) = x.dims2()?;
    if !groups.is_filled_up {
        let outputs = on_cpu(OPERATION, x, sizes, projections, false)?;
        return Ok(outputs.into_iter().map(|output| output.y).collect());
    }
    if rows == groups.rows {
        return forward_only(x, projections);
    }
    let whole = zeros_beside(x, (groups.rows, inner))?;
    copy::write(&whole, x, 0, 0)?;
    forward_only(&whole, projections)?.iter().map(|y| y.narrow(0, 0, rows)).collect()
}

#[cfg(test)]
mod tests;
