//! Layers with [batch invariance](crate::batch_invariance). What decides about the order of a sum is how many rows there
//! are: it says which kernel multiplies, and how a product is cut.

use super::{Output, Projection, forward_only, forward_shared, fp8, on_cpu};
use crate::backend::cpu::gemm::Kind;
use crate::backend::zeros_beside;
use crate::batch_invariance::within;
use crate::copy;
use crate::matmul::with_last_dimension;
use candle_core::{DType, Result, Tensor};

/// As many as an engine's step has where it is busy. A product of so many takes an H100 about as long as reading the
/// weight.
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

/// What [`forward_shared`](super::forward_shared) gives for `x` `(.., inner)` of so many rows and projections that were
/// checked, or [`forward_only`](super::forward_only) where x·A isn't kept.
pub(super) fn forward(
    x: &Tensor,
    sizes: (usize, usize),
    projections: &[Projection],
    keeps_xa: bool,
) -> Result<Vec<Output>> {
    let groups = Groups::of(x, projections);
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    if groups.is_filled_up && !fp8::is_one_of(projections) {
        // A matrix in fewer bits is unpacked once for all groups.
        return super::with_dense(x.dtype(), projections, |projections| {
            in_groups(x, sizes, &groups, &super::of_any(projections), keeps_xa)
        });
    }
    in_groups(x, sizes, &groups, projections, keeps_xa)
}

fn in_groups(
    x: &Tensor,
    (rows, inner): (usize, usize),
    groups: &Groups,
    projections: &[Projection],
    keeps_xa: bool,
) -> Result<Vec<Output>> {
    let flat = x.reshape((rows, inner))?;
    let mut outputs = Vec::new();
    // Without rows there is a group without rows, which says what the results look like.
    for start in (0..rows.max(1)).step_by(groups.rows) {
        let group = flat.narrow(0, start, groups.rows.min(rows - start))?;
        let of_group = within(false, || of_group(&group, groups, projections, keeps_xa))?;
        if rows <= groups.rows {
            outputs = of_group;
            break;
        }
        if start == 0 {
            let whole = |part: &Tensor| zeros_beside(part, (rows, part.dim(1)?));
            let wholes = of_group.iter().map(|output| output.map(whole));
            outputs = wholes.collect::<Result<_>>()?;
        }
        for (whole, part) in outputs.iter().zip(&of_group) {
            copy::write(&whole.y, &part.y, 0, start)?;
            if let (Some(whole), Some(part)) = (&whole.xa, &part.xa) {
                copy::write(whole, part, 0, start)?;
            }
        }
    }
    let shaped = |y: &Tensor| y.reshape(with_last_dimension(x, y.dim(1)?));
    outputs.iter().map(|output| output.map(shaped)).collect()
}

/// What up to a group's rows `x` `(rows, inner)` give.
fn of_group(
    x: &Tensor,
    groups: &Groups,
    projections: &[Projection],
    keeps_xa: bool,
) -> Result<Vec<Output>> {
    if !groups.is_filled_up {
        return on_cpu(x, projections, false);
    }
    let (rows, inner) = x.dims2()?;
    let whole = match rows == groups.rows {
        true => x.clone(),
        false => zeros_beside(x, (groups.rows, inner))?,
    };
    if rows < groups.rows {
        copy::write(&whole, x, 0, 0)?;
    }
    let outputs = match keeps_xa {
        true => forward_shared(&whole, projections)?,
        false => {
            let ys = forward_only(&whole, projections)?;
            ys.into_iter().map(|y| Output { y, xa: None }).collect()
        }
    };
    outputs.iter().map(|output| output.map(|whole| whole.narrow(0, 0, rows))).collect()
}

impl Output {
    fn map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { y: f(&self.y)?, xa: self.xa.as_ref().map(f).transpose()? })
    }
}

#[cfg(test)]
mod tests;
