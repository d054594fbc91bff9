//! Tensor parallelism: each of several devices has some heads and some of the MLP's width of every layer, so that a model
//! can be larger than the memory of one, and its weights are read by all at once (Megatron-LM, Shoeybi et al. 2019,
//! <https://arxiv.org/abs/1909.08053>). The projections into heads and width are cut by their outputs, those back into the
//! residual stream by their inputs: what each rank computes of those is added up, twice a layer. Norms, the embedding and
//! the residual stream are the same on all; the first rank alone has the head.

use super::config::{Config, ExpertsConfig, QueryKeyNorm};
use super::layer::{Kind, Source};
use super::weight::Storage;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// Adds up what ranks have computed. All of them make the same sums in the same order.
pub(crate) trait Sums: Debug + Send + Sync {
    /// The sum of what the ranks give, tensors of one shape and dtype on their devices; `x`, which is this rank's, may be
    /// overwritten. An error when another rank has ended the work, or that of the device.
    fn sum(&self, x: &Tensor) -> Result<Tensor>;

    /// Ends all sums, as this rank can't go on: hosts that wait for it get an error, and so does whoever asks until all
    /// [begin anew](Self::begin_anew). What devices do already goes on.
    fn end(&self);

    /// As [`Self::end`], also of what devices do: they go on without a sum.
    fn abort(&self);

    /// Begins anew after an end, once no host makes a sum and no recording has one in it. All ranks do so at the same
    /// time. An error when another rank can't, or that of the device.
    fn begin_anew(&self) -> Result<()>;
}

/// One of several ranks that have a part of every layer each.
#[derive(Debug, Clone)]
pub struct TensorRank {
    pub(crate) index: usize,
    pub(crate) size: usize,
    pub(crate) sums: Arc<dyn Sums>,
}

/// Which outputs or inputs of a linear layer a rank has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cut {
    /// 0 for outputs, 1 for inputs.
    dim: usize,
    ranges: Vec<Range<usize>>,
}

/// Which side of a linear layer isn't the residual stream, and may be cut.
#[derive(Clone, Copy)]
pub(super) enum Along<'a> {
    /// Its outputs, each of these neighbouring groups by itself.
    Outputs(&'a [usize]),
    /// So many inputs.
    Inputs(usize),
}

impl TensorRank {
    /// Its number, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether logits are computed here.
    pub(crate) fn has_head(&self) -> bool {
        self.index == 0
    }

    /// An error unless a model can be cut for so many.
    pub(super) fn check(&self, config: &Config) -> Result<()> {
        let size = self.size;
        if config.query_key_norm == QueryKeyNorm::FullWidth {
            return Err(Error::Unsupported(format!(
                "tensor parallelism for {} models, whose norms see the queries of all heads at once",
                config.architecture.model_type()
            )));
        }
        let has_mlp = config.layers.iter().any(|layer| !layer.has_experts);
        let mlp = ("columns of the MLP (intermediate_size)", config.intermediate_size);
        let expert = |experts: ExpertsConfig| ("columns of an expert", experts.width);
        let widths = [has_mlp.then_some(mlp), config.experts.map(expert)];
        let heads = [("attention heads", config.heads), ("key-value heads", config.kv_heads)];
        for (what, count) in heads.into_iter().chain(widths.into_iter().flatten()) {
            if !count.is_multiple_of(size) {
                let problem =
                    format!("is {size}, expected a divisor of the model's {count} {what}");
                return Err(Error::option("tensor_parallel", problem));
            }
        }
        Ok(())
    }

    /// The part of a layer that is this rank's.
    pub(super) fn cut(&self, along: Along) -> Cut {
        let part = |start: usize, width: usize| {
            let width = width / self.size;
            start + self.index * width..start + (self.index + 1) * width
        };
        match along {
            Along::Inputs(width) => Cut { dim: 1, ranges: vec![part(0, width)] },
            Along::Outputs(widths) => {
                let mut start = 0;
                let ranges = widths.iter().map(|&width| {
                    let range = part(start, width);
                    start += width;
                    range
                });
                Cut { dim: 0, ranges: ranges.collect() }
            }
        }
    }
}

impl Cut {
    fn width(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }

    /// What is left of a layer's inputs and outputs.
    pub(super) fn sizes(&self, input: usize, output: usize) -> (usize, usize) {
        match self.dim {
            0 => (input, self.width()),
            _ => (self.width(), output),
        }
    }

    /// Which of a weight's rows (0) or columns (1), one after the other.
    pub(super) fn of_weight(&self) -> (usize, &[Range<usize>]) {
        (self.dim, &self.ranges)
    }

    /// The part of a layer's weight `(out, in)` on the CPU.
    pub(super) fn weight(&self, name: &str, weight: Storage) -> Result<Storage> {
        Ok(match weight {
            Storage::Dense(tensor) => Storage::Dense(self.along(&tensor, self.dim)?),
            Storage::Quantized(quantized) => {
                let part = quantized.narrow(self.dim, &self.ranges).map_err(|error| {
                    let why = crate::error::tensor_message(&error);
                    Error::option("tensor_parallel", format!("`{name}` can't be cut: {why}"))
                })?;
                Storage::Quantized(Arc::new(part))
            }
            other => other,
        })
    }

    /// The part of a layer's bias `(out)`: where inputs are cut, the first rank has it, and others have zeros.
    pub(super) fn bias(&self, rank: &TensorRank, bias: Storage) -> Result<Storage> {
        Ok(match (self.dim, bias) {
            (0, Storage::Dense(tensor)) => Storage::Dense(self.along(&tensor, 0)?),
            (_, Storage::Dense(tensor)) if rank.index > 0 => Storage::Dense(tensor.zeros_like()?),
            (_, bias) => bias,
        })
    }

    /// The parts of a low-rank update's A `(in, rank)` and B `(rank, out)`: what the ranks compute with theirs adds up to
    /// what the whole gives, as products with the weight do.
    pub(crate) fn factors(&self, [a, b]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        Ok(match self.dim {
            0 => [a.clone(), self.along(b, 1)?],
            _ => [self.along(a, 0)?, b.clone()],
        })
    }

    fn along(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        let parts = self.ranges.iter().map(|range| tensor.narrow(dim, range.start, range.len()));
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        Ok(match &parts[..] {
            [part] => part.force_contiguous()?,
            parts => Tensor::cat(parts, dim)?.contiguous()?,
        })
    }
}

/// Weights that lie in parts with ranks.
pub(super) struct InParts;

impl Source for InParts {
    fn weight(&mut self, _: &str, shape: &[usize], _: Kind, _: &Device) -> Result<Storage> {
        Ok(Storage::InParts(shape.into()))
    }
}
