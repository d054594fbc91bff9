//! What can be trained of a linear layer, and where training starts from; one file a method.

pub(crate) mod dora;
pub(crate) mod eva;
pub(super) mod lora;
pub(super) mod olora;
pub(super) mod pissa;
mod singular;
pub(super) mod table;

pub(crate) use lora::LowRank;
pub(crate) use table::TableUpdate;

use super::StartFrom;
use crate::{Error, Result};
use candle_core::Tensor;
use lora::Start;
use std::borrow::Cow;

/// Subspace iterations at most where the singular vectors are to be exact.
const ITERATIONS: usize = 1000;

/// The A and B that a layer `path` with this frozen weight `(out, in)` starts from, on the CPU, where their product isn't
/// zero. The weight's device finds them.
pub(super) fn start<'w>(
    from: StartFrom,
    weight: impl FnOnce() -> Result<Cow<'w, Tensor>>,
    rank: usize,
    scale: f64,
    path: &str,
) -> Result<Option<Start>> {
    if !from.takes_from_weight() {
        return Ok(None);
    }
    let weight = &*weight()?;
    Ok(Some(match from {
        StartFrom::Kaiming | StartFrom::Gaussian | StartFrom::Eva => return Ok(None),
        StartFrom::Olora => olora::start(weight, rank)?,
        StartFrom::PissaIterations(iterations) => pissa::start(weight, rank, scale, iterations)?.0,
        StartFrom::Pissa => match pissa::start(weight, rank, scale, ITERATIONS)? {
            (start, true) => start,
            (_, false) => {
                return Err(Error::option(
                    "init_lora_weights",
                    format!(
                        "is pissa, but the singular values of `{path}` are too near each other to be told apart; \
                         pissa_niter_16 takes what some iterations find"
                    ),
                ));
            }
        },
    }))
}
