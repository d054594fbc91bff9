//! What is trained of a table of the vocabulary, the embedding or the head: a low-rank update, or the rows of some
//! tokens alone (PEFT's `trainable_token_indices`). Both are `T + scale · L·R`, with L `(vocabulary, rank)` and R
//! `(rank, hidden)`: for rows, L has a one where a token's row is, and R is what was added to them.

use super::lora;
use crate::Result;
use crate::adapter::StartFrom;
use crate::autograd::{Parameter, ParameterId, Tape, Value};
use crate::random::SplitMix64;
use candle_core::{DType, Tensor};
use metal_candle_kernels::{arithmetic, copy, matmul};

/// What is added to a table `(vocabulary, hidden)`.
#[derive(Debug)]
pub(crate) struct TableUpdate {
    factors: Factors,
    /// What L·R is multiplied by.
    pub scale: f64,
    /// The probability of dropping an input of the head in training.
    pub dropout: f32,
    /// Sets this table's dropout apart from the layers'.
    pub stream: u64,
}

#[derive(Debug)]
enum Factors {
    /// L and R are trained.
    Both {
        left: Parameter,
        right: Parameter,
    },
    /// Their transposes are, A `(hidden, rank)` and B `(rank, vocabulary)` of a linear layer.
    Transposed {
        a: Parameter,
        b: Parameter,
    },
    Rows {
        rows: Parameter,
        minus_frozen: Tensor,
        one_hot: Tensor,
    },
}

impl TableUpdate {
    /// LoRA on the embedding: A `(vocabulary, rank)` and B `(rank, hidden)`. As in PEFT it has no dropout.
    pub fn embedding(a: Parameter, b: Parameter, scale: f64) -> Self {
        Self { factors: Factors::Both { left: a, right: b }, scale, dropout: 0.0, stream: 0 }
    }

    /// LoRA on the head: A `(hidden, rank)` and B `(rank, vocabulary)`.
    pub fn head(a: Parameter, b: Parameter, scale: f64, dropout: f32, stream: u64) -> Self {
        Self { factors: Factors::Transposed { a, b }, scale, dropout, stream }
    }

    /// `rows` `(n, hidden)` in the place of the rows of `tokens` in `table`, which must have them.
    pub fn rows(rows: Parameter, table: &Tensor, tokens: &[u32]) -> Result<Self> {
        let (vocabulary, device) = (table.dim(0)?, table.device());
        let mut one_hot = vec![0f32; vocabulary * tokens.len()];
        for (column, &token) in tokens.iter().enumerate() {
            one_hot[token as usize * tokens.len() + column] = 1.0;
        }
        let one_hot = Tensor::from_vec(one_hot, (vocabulary, tokens.len()), device)?;
        let minus_frozen = frozen_rows(table, tokens)?.neg()?;
        let factors = Factors::Rows { rows, minus_frozen, one_hot };
        Ok(Self { factors, scale: 1.0, dropout: 0.0, stream: 0 })
    }

    /// What its trained parts start from where that isn't zero or the model's own, as PEFT starts them.
    pub fn start(
        &self,
        from: StartFrom,
        random: SplitMix64,
    ) -> Result<Option<(ParameterId, Tensor)>> {
        Ok(match &self.factors {
            Factors::Both { right, .. } => {
                Some((right.id(), lora::normal(right.tensor().dims2()?, 1.0, random)?))
            }
            Factors::Transposed { a, .. } => {
                let (hidden, rank) = a.tensor().dims2()?;
                let start = match from {
                    StartFrom::Gaussian => lora::gaussian(hidden, rank, random)?,
                    _ => lora::kaiming(hidden, rank, random)?,
                };
                Some((a.id(), start))
            }
            Factors::Rows { .. } => None,
        })
    }

    /// L, `(vocabulary, rank)` in f32.
    pub fn left(&self, tape: &Tape) -> Result<Value> {
        match &self.factors {
            Factors::Both { left, .. } => Ok(tape.parameter(left)),
            Factors::Transposed { b, .. } => tape.transpose(&tape.parameter(b)),
            Factors::Rows { one_hot, .. } => Ok(tape.constant(one_hot.clone())),
        }
    }

    /// R, `(rank, hidden)` in f32.
    pub fn right(&self, tape: &Tape) -> Result<Value> {
        match &self.factors {
            Factors::Both { right, .. } => Ok(tape.parameter(right)),
            Factors::Transposed { a, .. } => tape.transpose(&tape.parameter(a)),
            Factors::Rows { rows, minus_frozen, .. } => {
                tape.add(&tape.parameter(rows), &tape.constant(minus_frozen.clone()))
            }
        }
    }

    /// The table with the update in it, in its dtype and summed in f32.
    pub fn merged(&self, table: &Tensor) -> Result<Tensor> {
        let tape = Tape::inference();
        let (left, right) = (self.left(&tape)?, self.right(&tape)?);
        let update = matmul::linear(left.tensor(), &right.tensor().t()?, None)?;
        let update = arithmetic::scale(&update, self.scale)?;
        let sum = arithmetic::add(&copy::cast(table, DType::F32)?, &update)?;
        Ok(copy::cast(&sum, table.dtype())?)
    }
}

/// The rows of `tokens` in `table`, `(n, hidden)` in f32.
pub fn frozen_rows(table: &Tensor, tokens: &[u32]) -> Result<Tensor> {
    // One by one, so that a table without memory of its own needs none.
    let rows = tokens.iter().map(|token| table.narrow(0, *token as usize, 1));
    let rows = rows.collect::<candle_core::Result<Vec<_>>>()?;
    Ok(copy::cast(&Tensor::cat(&rows, 0)?, DType::F32)?)
}
