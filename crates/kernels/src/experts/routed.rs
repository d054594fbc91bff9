//! The experts of a layer on CUDA, where the device alone decides which of them a token has: nothing goes through the host, so
//! such work can be recorded. Of a few tokens each choice's row is multiplied by itself; those of more are put into the order of
//! experts, and multiplied tile by tile.

use crate::backend::{require_dtype, require_rank, require_shape, require_together};
use crate::glu::Activation;
use crate::quantized::{E2M1, Levels, Quantized, Scales, Weight};
use candle_core::{DType, Result, Tensor, bail};

pub(super) const OPERATION: &str = "experts::routed";

/// Tokens of a call at most, where rows aren't put into the order of experts.
pub(crate) const FEW_TOKENS: usize = 32;
/// And where they are.
const MANY_TOKENS: usize = 8192;
/// Experts of a layer at most, as in `kernel.cu`.
const MOST_EXPERTS: usize = 1024;
/// Bytes of a row of `x` or of a gated unit at most, which a block keeps.
const MOST_BYTES: usize = 32 << 10;
/// Neighbours of a line that a thread has at once of packed matrices for single rows, and in fragments, of which halves may have
/// a scale each.
const CODES: usize = 8;
const FRAGMENT_CODES: usize = 32;

/// An expert, whose matrices lead into its gate and value, `(width, hidden)` each, and back, `(hidden, width)`.
#[derive(Clone, Copy, Debug)]
pub struct Expert<'a> {
    /// The three matrices, those of all experts in one form each: in x's dtype, or packed alike.
    pub weights: [Weight<'a>; 3],
    /// What is added to what each gives: `(width)`, `(width)` and `(hidden)` in x's dtype.
    pub biases: [Option<&'a Tensor>; 3],
}

/// The experts of a layer, and where they lie.
#[derive(Debug)]
pub struct Layer {
    pub(super) experts: Vec<Owned>,
    /// Of x.
    pub(super) dtype: DType,
    /// How matrices are held: those into gates and values, and those back.
    pub(super) forms: [Form; 2],
    /// `[hidden, width]`
    pub(super) sizes: [usize; 2],
    /// Tokens of a call at most.
    pub(super) most: usize,
    /// What the device knows of the matrices: addresses, or descriptions of packed ones.
    pub(super) tables: [Tensor; 2],
    /// The addresses of biases, if there are any.
    pub(super) biases: Option<Tensor>,
}

/// An expert that is kept.
#[derive(Clone, Debug)]
pub(super) struct Owned {
    pub weights: [Matrix; 3],
    pub biases: [Option<Tensor>; 3],
}

#[derive(Clone, Debug)]
pub(super) enum Matrix {
    Dense(Tensor),
    Packed(Quantized),
}

/// What the numbers of some matrices are, as far as kernels differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Dense,
    Integers {
        bits: usize,
    },
    /// Integers with the scales of blocks, in fragments.
    Blocks {
        bits: usize,
    },
    Table,
    /// A table with the scales of blocks, in fragments.
    TableBlocks,
    E4m3,
    /// e2m1 with scales in e8m0, in fragments of bf16.
    Mxfp4,
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

impl Expert<'_> {
    fn kept(self) -> Owned {
        let weights = self.weights.map(|weight| match weight {
            Weight::Dense(weight) => Matrix::Dense(weight.clone()),
            Weight::Quantized(weight) => Matrix::Packed(weight.clone()),
        });
        Owned { weights, biases: self.biases.map(|bias| bias.cloned()) }
    }
}

impl Owned {
    /// Whether it has the tensors of another.
    fn is(&self, other: &Expert) -> bool {
        let same_weight = |(own, other): (&Matrix, &Weight)| match (own, other) {
            (Matrix::Dense(own), Weight::Dense(other)) => own.id() == other.id(),
            (Matrix::Packed(own), Weight::Quantized(other)) => {
                own.codes().id() == other.codes().id()
            }
            _ => false,
        };
        let same_bias = |(own, other): (&Option<Tensor>, &Option<&Tensor>)| {
            own.as_ref().map(Tensor::id) == other.map(Tensor::id)
        };
        self.weights.iter().zip(&other.weights).all(same_weight)
            && self.biases.iter().zip(&other.biases).all(same_bias)
    }
}

impl Form {
    /// Of matrices that are all of one, for rows of `dtype`, packed ones by fragments or for single rows.
    fn of<'a>(
        mut weights: impl Iterator<Item = Weight<'a>>,
        dtype: DType,
        in_fragments: bool,
    ) -> Option<Self> {
        let of_one = |weight: Weight| match weight {
            Weight::Dense(weight) => (weight.dtype() == dtype).then_some(Self::Dense),
            Weight::Quantized(packed) if weight.rounds_rows() || packed.multiplies_integers() => {
                None
            }
            Weight::Quantized(packed) if in_fragments => Self::of_fragments(packed, dtype),
            Weight::Quantized(packed) => Self::of_single_rows(packed),
        };
        let first = of_one(weights.next()?)?;
        weights.all(|weight| of_one(weight) == Some(first)).then_some(first)
    }

    /// Of a packed matrix whose lines a warp has for a row.
    fn of_single_rows(packed: &Quantized) -> Option<Self> {
        let (outer, inner) = packed.shape();
        let fits = inner.is_multiple_of(CODES)
            && packed.group().is_multiple_of(CODES)
            && outer * inner / CODES <= u32::MAX as usize;
        fits.then_some(match packed.levels() {
            Levels::Integers { bits, .. } => Self::Integers { bits },
            Levels::Table(_) => Self::Table,
            Levels::E4m3 => Self::E4m3,
        })
    }

    /// And of one that becomes fragments of tensor cores, for rows of 16 bits.
    fn of_fragments(packed: &Quantized, dtype: DType) -> Option<Self> {
        let ((outer, inner), group) = (packed.shape(), packed.group());
        if !inner.is_multiple_of(FRAGMENT_CODES)
            || !(group == FRAGMENT_CODES / 2 || group.is_multiple_of(FRAGMENT_CODES))
            || outer * inner / FRAGMENT_CODES > u32::MAX as usize
        {
            return None;
        }
        match (packed.levels(), packed.scales()) {
            (Levels::Integers { bits: bits @ 2..=6, .. }, Scales::Blocks { .. }) => {
                Some(Self::Blocks { bits })
            }
            (Levels::Table(_), Scales::Blocks { offsets: None, .. }) => Some(Self::TableBlocks),
            (Levels::Integers { bits, .. }, Scales::Plain { .. }) => Some(Self::Integers { bits }),
            (Levels::Table(levels), Scales::E8m0(_))
                if *levels == E2M1 && group == 32 && dtype == DType::BF16 =>
            {
                Some(Self::Mxfp4)
            }
            (
                Levels::Table(_),
                Scales::Plain { offsets: None, .. }
                | Scales::E8m0(_)
                | Scales::E4m3 { .. }
                | Scales::Nested { .. },
            ) => Some(Self::Table),
            (Levels::E4m3, Scales::Plain { offsets: None, .. } | Scales::E8m0(_)) => {
                Some(Self::E4m3)
            }
            _ => None,
        }
    }
}

/// What kernels have to know of experts.
pub(super) struct Described {
    /// How the matrices are held: those into gates and values, and those back.
    pub forms: [Form; 2],
    /// `[hidden, width]`
    pub sizes: [usize; 2],
    /// Tokens of a call at most.
    pub most: usize,
}

/// `None` where experts have sizes or numbers that kernels aren't for.
fn described(experts: &[Expert], dtype: DType) -> Result<Option<Described>> {
    let Some(Expert { weights: [first, ..], .. }) = experts.first() else { return Ok(None) };
    let (width, hidden) = first.shape()?;
    let size = dtype.size_in_bytes();
    let fits = |columns: usize| (columns * size).is_multiple_of(16) && columns * size <= MOST_BYTES;
    let is_float = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    if !(is_float && experts.len() <= MOST_EXPERTS && fits(hidden) && fits(width)) {
        return Ok(None);
    }
    let of = |layers: &'static [usize], in_fragments: bool| {
        let weights = experts.iter().flat_map(|it| layers.iter().map(|layer| it.weights[*layer]));
        Form::of(weights, dtype, in_fragments)
    };
    let forms = |in_fragments| Some([of(&[0, 1], in_fragments)?, of(&[2], in_fragments)?]);
    let is_like_x = |bias: &&Tensor| bias.dtype() == dtype;
    let have_biases = experts.iter().all(|it| it.biases.iter().flatten().all(is_like_x));
    let many = forms(true).filter(|_| dtype != DType::F32).map(|forms| (forms, MANY_TOKENS));
    let found = many.or_else(|| Some((forms(false)?, FEW_TOKENS))).filter(|_| have_biases);
    Ok(found.map(|(forms, most)| Described { forms, sizes: [hidden, width], most }))
}

/// How many tokens of `dtype` a [`Layer`] of such experts takes on a CUDA device, if [`Layer::new`] takes them.
///
/// # Errors
/// When a weight isn't a matrix.
pub fn most_tokens(experts: &[Expert], dtype: DType) -> Result<Option<usize>> {
    Ok(described(experts, dtype)?.map(|it| it.most))
}

impl Layer {
    /// The experts of a layer for rows of `dtype`. `None` where they aren't on a CUDA device, or have what it isn't for: more than
    /// 1024 experts, rows of more than 32 KiB or of no whole 16 bytes, matrices in another dtype than `dtype` or that aren't all
    /// packed alike, or packed ones whose rows and groups are no multiples of 8.
    ///
    /// # Errors
    /// When shapes don't fit, or the device has no memory.
    pub fn new(experts: &[Expert], dtype: DType) -> Result<Option<Self>> {
        let Some(described) = described(experts, dtype)? else { return Ok(None) };
        let [hidden, width] = described.sizes;
        let shapes = [(width, hidden), (width, hidden), (hidden, width)];
        let mut tensors = Vec::with_capacity(6 * experts.len());
        for expert in experts {
            for ((weight, bias), shape) in expert.weights.iter().zip(expert.biases).zip(shapes) {
                if weight.shape()? != shape {
                    bail!(
                        "metal-candle-kernels: {OPERATION}: a weight has shape {:?}, expected {shape:?}",
                        weight.shape()?
                    )
                }
                if let Some(bias) = bias {
                    require_shape(OPERATION, "a bias", bias, &[shape.0])?;
                    tensors.push(bias);
                }
                tensors.push(match weight {
                    Weight::Dense(weight) => weight,
                    Weight::Quantized(packed) => packed.codes(),
                });
            }
        }
        require_together(OPERATION, &tensors)?;
        if !tensors.iter().all(|tensor| tensor.device().is_cuda()) {
            return Ok(None);
        }
        #[cfg(feature = "cuda")]
        {
            let experts = experts.iter().map(|expert| expert.kept()).collect();
            super::cuda::routed::layer(experts, dtype, described)
        }
        #[cfg(not(feature = "cuda"))]
        Ok(None)
    }

    /// Whether these are its experts, for rows of this dtype.
    pub fn has(&self, experts: &[Expert], dtype: DType) -> bool {
        self.dtype == dtype
            && self.experts.len() == experts.len()
            && self.experts.iter().zip(experts).all(|(own, other)| own.is(other))
    }

    /// Tokens of a call at most: 8192 of 16 bits, and 32 of f32, or where packed rows aren't multiples of 32 and groups of 32, or 16
    /// alone.
    pub fn most_tokens(&self) -> usize {
        self.most
    }

    /// What the experts of each token add up to: `x` `(tokens, hidden)` in the layer's dtype, `logits` `(tokens, experts)`
    /// of a float dtype, result like `x`. There are at most [`Self::most_tokens`].
    ///
    /// # Errors
    /// When shapes or dtypes don't fit, a token would have no expert or more than there are, or the device fails.
    pub fn forward(&self, x: &Tensor, logits: &Tensor, options: Options) -> Result<Tensor> {
        require_together(OPERATION, &[x, logits, &self.tables[0]])?;
        require_rank(OPERATION, "x", x, 2, "(tokens, hidden)")?;
        let tokens = x.dim(0)?;
        require_shape(OPERATION, "x", x, &[tokens, self.sizes[0]])?;
        require_shape(OPERATION, "logits", logits, &[tokens, self.experts.len()])?;
        require_dtype(OPERATION, "x", x, self.dtype)?;
        let most = self.most;
        if tokens > most || options.active == 0 || options.active > self.experts.len() {
            bail!(
                "metal-candle-kernels: {OPERATION}: {} of {} experts for each of {tokens} tokens, expected at most {most} tokens, and 1 to all experts",
                options.active,
                self.experts.len()
            )
        }
        #[cfg(feature = "cuda")]
        return super::cuda::routed::forward(self, x, logits, options);
        #[cfg(not(feature = "cuda"))]
        bail!("metal-candle-kernels: {OPERATION} has no CUDA kernel in this build")
    }
}
