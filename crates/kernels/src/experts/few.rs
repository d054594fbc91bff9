//! The experts of a layer for a few tokens on CUDA, where the device alone decides which of them a token has: nothing goes
//! through the host, so such work can be recorded.

use crate::backend::{require_dtype, require_rank, require_shape, require_together};
use crate::glu::Activation;
use candle_core::{DType, Result, Tensor, bail};

pub(super) const OPERATION: &str = "experts::few";

/// Tokens of a call at most.
pub const MOST_TOKENS: usize = 32;
/// Experts of a layer at most.
const MOST_EXPERTS: usize = 1024;
/// Bytes of a row of `x` or of a gated unit at most, which a block keeps.
const MOST_BYTES: usize = 32 << 10;

/// The weights of a layer's experts, and where they lie.
#[derive(Debug)]
pub struct Layer {
    /// Of each expert its projections into its gate and value `(width, hidden)`, and back `(hidden, width)`.
    pub(super) weights: Vec<[Tensor; 3]>,
    pub(super) hidden: usize,
    /// The addresses of all of them.
    pub(super) table: Tensor,
}

/// How a layer's experts are chosen, and what they compute.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How many a token has.
    pub active: usize,
    /// Whether their weights add up to 1.
    pub normalized: bool,
    /// Of their gates.
    pub activation: Activation,
}

impl Layer {
    /// Whether [`Self::new`] takes weights of these sizes.
    pub fn fits(count: usize, hidden: usize, width: usize, dtype: DType) -> bool {
        let size = dtype.size_in_bytes();
        let fits =
            |columns: usize| (columns * size).is_multiple_of(16) && columns * size <= MOST_BYTES;
        let is_float = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        is_float && (1..=MOST_EXPERTS).contains(&count) && fits(hidden) && fits(width)
    }

    /// The experts with these weights: into the gate and the value `(width, hidden)`, and back `(hidden, width)`. `None` where
    /// they aren't on a CUDA device, or have sizes that it isn't for.
    ///
    /// # Errors
    /// When shapes or dtypes differ, or the device has no memory.
    pub fn new(weights: &[[&Tensor; 3]]) -> Result<Option<Self>> {
        let Some([first, ..]) = weights.first() else { return Ok(None) };
        let ((width, hidden), dtype) = (first.dims2()?, first.dtype());
        if !first.device().is_cuda() || !Self::fits(weights.len(), hidden, width, dtype) {
            return Ok(None);
        }
        for expert in weights {
            require_together(OPERATION, expert)?;
            for (weight, shape) in
                expert.iter().zip([[width, hidden], [width, hidden], [hidden, width]])
            {
                require_shape(OPERATION, "a weight", weight, &shape)?;
                require_dtype(OPERATION, "a weight", weight, dtype)?;
            }
        }
        #[cfg(feature = "cuda")]
        return super::cuda::few::layer(weights, hidden);
        #[cfg(not(feature = "cuda"))]
        Ok(None)
    }

    /// Whether these are its weights.
    pub fn has(&self, weights: &[[&Tensor; 3]]) -> bool {
        let same =
            |(a, b): (&[Tensor; 3], &[&Tensor; 3])| a.iter().zip(b).all(|(a, b)| a.id() == b.id());
        self.weights.len() == weights.len() && self.weights.iter().zip(weights).all(same)
    }

    /// What the experts of each token add up to: `x` `(tokens, hidden)` in the dtype of the weights, `logits`
    /// `(tokens, experts)` of a float dtype, result like `x`. There are at most [`MOST_TOKENS`].
    ///
    /// # Errors
    /// When shapes or dtypes don't fit, or the device fails.
    pub fn forward(&self, x: &Tensor, logits: &Tensor, options: Options) -> Result<Tensor> {
        require_together(OPERATION, &[x, logits, &self.table])?;
        require_rank(OPERATION, "x", x, 2, "(tokens, hidden)")?;
        let tokens = x.dim(0)?;
        require_shape(OPERATION, "x", x, &[tokens, self.hidden])?;
        require_shape(OPERATION, "logits", logits, &[tokens, self.weights.len()])?;
        if let Some([weight, ..]) = self.weights.first() {
            require_dtype(OPERATION, "x", x, weight.dtype())?;
        }
        if tokens > MOST_TOKENS || options.active == 0 || options.active > self.weights.len() {
            bail!(
                "metal-candle-kernels: {OPERATION}: {} of {} experts for each of {tokens} tokens, expected at most {MOST_TOKENS} tokens, and 1 to all experts",
                options.active,
                self.weights.len()
            )
        }
        #[cfg(feature = "cuda")]
        return super::cuda::few::forward(self, x, logits, options);
        #[cfg(not(feature = "cuda"))]
        bail!("metal-candle-kernels: {OPERATION} has no CUDA kernel in this build")
    }
}
