//! LoRA layers on Metal. An output is written once: the low-rank product is a term of the same sums as the
//! large one, and so it is for dx. A few rows have a kernel that does all of a layer. Masks are found anew
//! where an element is read or written, and never stored.

use super::{DenseProjection, Dropout, Lora, Output, Projection, SharedGradients};
use crate::backend::metal::product::{
    Adapter, FewRows, FewWeight, Finish, Mask, Matrix, Term, takes_few_rows,
};
use crate::backend::metal::{Argument, Array, Metal, by_dtype};
use crate::matmul::with_last_dimension;
use crate::quantized::Weight;
use crate::quantized::metal::Packed;
use candle_core::{DType, Result, Tensor, bail};

/// One projection, with rows that kernels can read.
struct Ready {
    weight: ReadyWeight,
    outer: usize,
    bias: Option<Array>,
    factors: Option<Factors>,
}

enum ReadyWeight {
    Dense(Array),
    /// Only for a few rows.
    Packed(Box<Packed>),
}

impl ReadyWeight {
    fn dense(&self, operation: &str) -> Result<&Array> {
        match self {
            Self::Dense(weight) => Ok(weight),
            Self::Packed(_) => bail!(
                "metal-candle-kernels: {operation} on Metal: a weight is in fewer bits, expected a dense one for many rows"
            ),
        }
    }
}

struct Factors {
    /// `(inner, rank)`
    a: Array,
    /// `(rank, outer)`
    b: Array,
    rank: usize,
    scale: f64,
    dropout: Option<Dropout>,
}

impl Ready {
    fn new(
        metal: &Metal,
        DenseProjection { weight, bias, lora }: &DenseProjection,
    ) -> Result<Self> {
        let (rows, outer) = (metal.collapsed_rows(weight)?, weight.dim(0)?);
        Self::with(metal, (ReadyWeight::Dense(rows), outer), *bias, *lora)
    }

    fn with(
        metal: &Metal,
        (weight, outer): (ReadyWeight, usize),
        bias: Option<&Tensor>,
        lora: Option<Lora>,
    ) -> Result<Self> {
        let factors = lora.map(|Lora { a, b, scale, dropout }| -> Result<Factors> {
            let rank = a.dim(1)?;
            let (a, b) = (metal.collapsed_rows(a)?, metal.collapsed_rows(b)?);
            let dropout = dropout.filter(|dropout| dropout.probability > 0.0);
            Ok(Factors { a, b, rank, scale, dropout })
        });
        Ok(Ready {
            weight,
            outer,
            bias: bias.map(|bias| metal.contiguous(bias)).transpose()?,
            factors: factors.transpose()?,
        })
    }
}

impl Factors {
    fn mask(&self) -> Option<Mask> {
        self.dropout.map(mask)
    }

    /// What the elements that are kept are multiplied by.
    fn kept(&self) -> f64 {
        self.dropout.map_or(1.0, Dropout::kept)
    }

    /// `dropout(x)·A`, `(rows, rank)` in the dtype of x.
    fn low_rank(
        &self,
        operation: &str,
        metal: &Metal,
        x: &Array,
        (rows, inner): (usize, usize),
    ) -> Result<Array> {
        let xa = metal.empty(with_last_dimension(&x.tensor, self.rank), x.dtype)?;
        let term = Term::new(Matrix::rows(x)?, Matrix::rows(&self.a)?, inner);
        let terms = [term.masked(self.mask()).times(self.kept())];
        metal.product(operation, rows, self.rank, &terms, Matrix::of(&xa, self.rank))?;
        Ok(xa)
    }
}

fn mask(dropout: Dropout) -> Mask {
    Mask { seed: dropout.seed, threshold: dropout.threshold() as u32 }
}

pub(super) fn forward(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[DenseProjection],
) -> Result<Vec<Output>> {
    let metal = Metal::of(x)?;
    let x = metal.collapsed_rows(x)?;
    let mut outputs = Vec::with_capacity(projections.len());
    for projection in projections {
        let ready = Ready::new(&metal, projection)?;
        let output = match metal.is_fused() && takes_few(&ready, rows, inner) {
            true => ready.few_rows(operation, &metal, &x, (rows, inner))?,
            false => ready.forward(operation, &metal, &x, (rows, inner))?,
        };
        outputs.push(output);
    }
    Ok(outputs)
}

/// Whether the kernels for few rows take these layers, of which some are in fewer bits.
pub(super) fn takes_packed(
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[Projection],
) -> bool {
    let takes = |projection: &Projection| match projection.lora {
        Some(lora) if lora.drops() => false,
        Some(Lora { a, .. }) => takes_few_rows(rows, inner, a.dims().last().copied().unwrap_or(0)),
        None => takes_few_rows(rows, inner, 0),
    };
    let packed = |projection: &Projection| matches!(projection.weight, Weight::Quantized(_));
    Metal::of(x).is_ok_and(|metal| metal.is_fused())
        && projections.iter().any(packed)
        && projections.iter().all(takes)
}

/// [`forward`] of layers that [`takes_packed`] said yes to.
pub(super) fn forward_packed(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[Projection],
    _: bool,
) -> Result<Vec<Output>> {
    let metal = Metal::of(x)?;
    let x = metal.collapsed_rows(x)?;
    let outputs = projections.iter().map(|Projection { weight, bias, lora }| {
        let ready = match weight {
            Weight::Dense(weight) => {
                Ready::new(&metal, &DenseProjection { weight, bias: *bias, lora: *lora })?
            }
            Weight::Quantized(weight) => {
                let packed = ReadyWeight::Packed(Box::new(Packed::new(operation, &metal, weight)?));
                Ready::with(&metal, (packed, weight.shape().0), *bias, *lora)?
            }
        };
        ready.few_rows(operation, &metal, &x, (rows, inner))
    });
    outputs.collect()
}

/// Whether the kernels for few rows take the layer: they know no dropout.
fn takes_few(Ready { factors, .. }: &Ready, rows: usize, inner: usize) -> bool {
    match factors {
        Some(Factors { dropout: Some(_), .. }) => false,
        Some(Factors { rank, .. }) => takes_few_rows(rows, inner, *rank),
        None => takes_few_rows(rows, inner, 0),
    }
}

impl Ready {
    fn few_rows(
        &self,
        operation: &str,
        metal: &Metal,
        x: &Array,
        (rows, inner): (usize, usize),
    ) -> Result<Output> {
        let Ready { weight, outer, bias, factors } = self;
        let y = metal.empty(with_last_dimension(&x.tensor, *outer), x.dtype)?;
        let arrays = factors.as_ref().map(|factors| -> Result<_> {
            let (a, b) = (metal.cast(&factors.a, DType::F32)?, metal.cast(&factors.b, DType::F32)?);
            let xa = metal.empty(with_last_dimension(&x.tensor, factors.rank), x.dtype)?;
            Ok((a, b, xa, factors))
        });
        let arrays = arrays.transpose()?;
        let adapter = arrays.as_ref().map(|(a, b, xa, Factors { rank, scale, .. })| Adapter {
            a,
            b,
            rank: *rank,
            scale: *scale,
            xa,
        });
        let layer = FewRows {
            x: Matrix::rows(x)?,
            weight: match weight {
                ReadyWeight::Dense(weight) => FewWeight::Dense(Matrix::rows(weight)?),
                ReadyWeight::Packed(weight) => FewWeight::Packed(weight),
            },
            bias: bias.as_ref(),
            adapter,
            y: Matrix::of(&y, *outer),
            factor: 1.0,
            add: false,
        };
        metal.few_rows(operation, rows, *outer, inner, &layer)?;
        Ok(Output { y: y.tensor, xa: arrays.map(|(_, _, xa, _)| xa.tensor) })
    }

    fn forward(
        &self,
        operation: &str,
        metal: &Metal,
        x: &Array,
        (rows, inner): (usize, usize),
    ) -> Result<Output> {
        let Ready { weight, outer, bias, factors } = self;
        let xa = factors.as_ref().map(|factors| -> Result<_> {
            let xa = factors.low_rank(operation, metal, x, (rows, inner))?;
            Ok((xa, factors))
        });
        let xa = xa.transpose()?;
        let mut small = Vec::new();
        if let Some((xa, Factors { b, rank, scale, .. })) = &xa {
            let term = Term::new(Matrix::of(xa, *rank), Matrix::rows(b)?, *rank);
            small.push(term.times(*scale));
        }
        let large =
            vec![Term::new(Matrix::rows(x)?, Matrix::rows(weight.dense(operation)?)?.t(), inner)];
        let y = metal.empty(with_last_dimension(&x.tensor, *outer), x.dtype)?;
        metal.layer(operation, rows, *outer, (large, small), bias.as_ref(), &y)?;
        Ok(Output { y: y.tensor, xa: xa.map(|(xa, _)| xa.tensor) })
    }
}

/// The `xa` of [`forward`].
pub(super) fn low_rank(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[DenseProjection],
) -> Result<Vec<Option<Tensor>>> {
    let metal = Metal::of(x)?;
    let x = metal.collapsed_rows(x)?;
    let mut found = Vec::with_capacity(projections.len());
    for projection in projections {
        let ready = Ready::new(&metal, projection)?;
        found.push(match &ready.factors {
            Some(_) if metal.is_fused() && takes_few(&ready, rows, inner) => {
                ready.few_rows(operation, &metal, &x, (rows, inner))?.xa
            }
            Some(factors) => Some(factors.low_rank(operation, &metal, &x, (rows, inner))?.tensor),
            None => None,
        });
    }
    Ok(found)
}

pub(super) fn backward(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[DenseProjection],
    xas: &[Option<&Tensor>],
    dys: &[&Tensor],
    need_dx: bool,
) -> Result<SharedGradients> {
    let metal = Metal::of(x)?;
    let dx = need_dx.then(|| metal.empty(x.shape(), x.dtype())).transpose()?;
    let x = metal.collapsed_rows(x)?;
    let mut layers = Vec::with_capacity(projections.len());
    let mut adapters = Vec::with_capacity(projections.len());
    for ((projection, xa), dy) in projections.iter().zip(xas).zip(dys) {
        let ready = Ready::new(&metal, projection)?;
        let dy = metal.collapsed_rows(dy)?;
        let mut g = None;
        adapters.push(match ready.factors.as_ref().zip(*xa) {
            Some((factors, xa)) => {
                let Factors { b, rank, scale, .. } = factors;
                let (rank, outer) = (*rank, ready.outer);
                let (xa, dy) = (metal.collapsed_rows(xa)?, Matrix::rows(&dy)?);
                let db = metal.empty((rank, outer), DType::F32)?;
                let terms = [Term::new(Matrix::rows(&xa)?.t(), dy, rows).times(*scale)];
                metal.product(operation, rank, outer, &terms, Matrix::of(&db, outer))?;

                let of_xa = metal.empty((rows, rank), x.dtype)?;
                let terms = [Term::new(dy, Matrix::rows(b)?.t(), outer).times(*scale)];
                metal.product(operation, rows, rank, &terms, Matrix::of(&of_xa, rank))?;

                let da = metal.empty((inner, rank), DType::F32)?;
                let term = Term::new(Matrix::rows(&x)?.t(), Matrix::of(&of_xa, rank), rows);
                let terms = [term.masked(factors.mask()).times(factors.kept())];
                metal.product(operation, inner, rank, &terms, Matrix::of(&da, rank))?;
                g = Some(of_xa);
                Some((da.tensor, db.tensor))
            }
            None => None,
        });
        layers.push((ready, dy, g));
    }
    let Some(dx) = dx else { return Ok(SharedGradients { dx: None, adapters }) };
    let to = Matrix::of(&dx, inner);
    let (mut large, mut small, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
    for (ready, dy, g) in &layers {
        if let Some((factors, g)) = ready.factors.as_ref().zip(g.as_ref()) {
            let (g, a) = (Matrix::of(g, factors.rank), Matrix::rows(&factors.a)?.t());
            let term = Term::new(g, a, factors.rank);
            match factors.dropout {
                Some(dropout) => dropped.push((term, (mask(dropout), dropout.kept()))),
                None => small.push(term),
            }
        }
        large.push(Term::new(
            Matrix::rows(dy)?,
            Matrix::rows(ready.weight.dense(operation)?)?,
            ready.outer,
        ));
    }
    metal.layer(operation, rows, inner, (large, small), None, &dx)?;
    for (term, mask) in dropped {
        let finish = Finish { bias: None, add: true, mask: Some(mask) };
        metal.product_with(operation, rows, inner, &[term], finish, to)?;
    }
    Ok(SharedGradients { dx: Some(dx.tensor), adapters })
}

pub(super) fn dropout(x: &Tensor, dropout: Dropout) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let x = metal.contiguous(x)?;
    let name = by_dtype!("dropout", x.dtype)?;
    let out = metal.empty(x.tensor.shape(), x.dtype)?;
    let count = x.tensor.elem_count();
    let Mask { seed, threshold } = mask(dropout);
    let arguments = [
        Argument::Input(&x),
        Argument::Output(&out),
        Argument::U64(count as u64),
        Argument::U64(seed),
        Argument::U32(threshold),
        Argument::F32(dropout.kept() as f32),
    ];
    metal.run(&[metal.by_elements(name, count, 1, &arguments)?])?;
    Ok(out.tensor)
}
