//! Attention on Metal: which kernels a call goes to, and how its work is split; see `kernel.metal`.

use super::paged::{self, PAGED_SPLIT};
use super::{Options, Sizes};
use crate::backend::metal::{Argument, Array, Constant, Kernel, Metal, by_dtype, size};
use candle_core::{DType, Result, Tensor, bail};
use std::f64::consts::LOG2_E;

/// The longest head that there is a kernel for.
const MOST_HEAD_DIM: usize = 256;
/// Rows of a simdgroup.
pub(super) const ROWS: usize = 8;
/// Queries up to which the keys are split.
const FEW_QUERIES: usize = 8;
/// Keys that are worth a threadgroup of their own.
const SPLIT_KEYS: usize = 256;
/// Keys that a threadgroup takes at a time at most, when they are split.
const SPLIT_STEP: usize = 64;
/// Threadgroups that keep a large GPU busy.
const WANTED_GROUPS: usize = 256;
/// Parts that are combined at most.
const MOST_SPLITS: usize = 64;
/// Bytes of what ranges of keys give that there are at once.
const MOST_PART_BYTES: usize = 512 << 20;

/// The kernel `$name` for a call's heads and dtype.
macro_rules! by_head_dim {
    ($name:literal, $call:expr) => {
        match $call.padded {
            64 => by_head_dim!($name, "_64", $call.dtype),
            96 => by_head_dim!($name, "_96", $call.dtype),
            128 => by_head_dim!($name, "_128", $call.dtype),
            _ => by_head_dim!($name, "_256", $call.dtype),
        }
    };
    ($name:literal, $size:literal, $dtype:expr) => {
        match $dtype {
            DType::F32 => concat!($name, $size, "_f32"),
            DType::F16 => concat!($name, $size, "_f16"),
            _ => concat!($name, $size, "_bf16"),
        }
    };
}
pub(super) use by_head_dim;

/// The dimension of a head with the zeros that kernels add.
pub(super) fn padded(operation: &str, head_dim: usize) -> Result<usize> {
    match [64, 96, 128, MOST_HEAD_DIM].into_iter().find(|size| head_dim <= *size) {
        Some(padded) => Ok(padded),
        None => bail!(
            "metal-candle-kernels: {operation}: heads of {head_dim} elements are too long for Metal, expected {MOST_HEAD_DIM} at most; move the tensors to the CPU"
        ),
    }
}

/// `factor`, `inner` and `scale` of `AttentionSizes` in `kernel.metal`, as bits.
pub(super) fn score_numbers(options: &Options) -> [u32; 3] {
    let Options { scale, softcap, .. } = *options;
    let (factor, inner) = match softcap {
        Some(softcap) => (softcap * LOG2_E, scale / softcap),
        None => (scale * LOG2_E, 1.0),
    };
    [factor, inner, scale].map(|number| (number as f32).to_bits())
}

/// Simdgroups of a threadgroup at most, for many queries and for few, of heads padded to this.
pub(super) fn most_simdgroups(padded: usize, dtype: DType) -> (usize, usize) {
    (if padded * dtype.size_in_bytes() == 1024 { 2 } else { 4 }, if padded <= 128 { 4 } else { 2 })
}

pub(super) struct Call {
    metal: Metal,
    sizes: Sizes,
    dtype: DType,
    /// The head's dimension with the zeros that kernels add.
    padded: usize,
    options: Options,
    q: Array,
    k: Array,
    v: Array,
    first_key: Option<Array>,
    sinks: Option<Array>,
    /// `AttentionStrides` in `kernel.metal`.
    strides: [u64; 9],
}

/// Indices of function constants in `kernel.metal`.
pub(super) const HEAD_DIM: usize = 0;
pub(super) const WHOLE_QUADS: usize = 1;
pub(super) const WINDOWED: usize = 2;
pub(super) const PACKED: usize = 3;
pub(super) const CAPPED: usize = 4;
pub(super) const SPLIT: usize = 5;
pub(super) const PAGED: usize = 6;
pub(super) const ROUNDED: usize = 7;
pub(super) const SINKS: usize = 8;

/// What a call's kernels are made for.
pub(super) struct Made(pub [(usize, Constant); 9]);

impl Made {
    pub(super) fn kernel(&self, name: &'static str) -> Kernel<'_> {
        Kernel { name, constants: &self.0 }
    }
}

/// How keys are split for few queries.
struct Splits {
    count: usize,
    start: usize,
    keys: usize,
}

const NOT_SPLIT: Splits = Splits { count: 1, start: 0, keys: 0 };

impl Call {
    pub(super) fn new(
        operation: &str,
        sizes: Sizes,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        first_key: Option<&Tensor>,
        options: &Options,
    ) -> Result<Call> {
        let metal = Metal::of(q)?;
        let dtype = q.dtype();
        by_dtype!("attention", dtype)?;
        let padded = padded(operation, sizes.head_dim)?;
        let (q, k, v) = (metal.strided_rows(q)?, metal.strided_rows(k)?, metal.strided_rows(v)?);
        let first_key = first_key.map(|first_key| metal.contiguous(first_key)).transpose()?;
        let mut strides = [0; 9];
        let of_tensors = [&q, &k, &v].into_iter().flat_map(|array| &array.tensor.stride()[..3]);
        for (place, stride) in strides.iter_mut().zip(of_tensors) {
            *place = *stride as u64;
        }
        let sinks = options.sinks.as_ref().map(|sinks| metal.contiguous(sinks)).transpose()?;
        let options = options.clone();
        Ok(Call { metal, sizes, dtype, padded, options, q, k, v, first_key, sinks, strides })
    }

    /// `others` are read or written beside `q`, `k` and `v`.
    fn made_for(&self, others: [&Array; 2], splits: &Splits) -> Result<Made> {
        let Sizes { keys, head_dim, .. } = self.sizes;
        let Options { softcap, window, .. } = self.options;
        let quads = [&self.q, &self.k, &self.v].into_iter().chain(others);
        let quads = head_dim > 0 && head_dim % 4 == 0 && { quads }
            .all(|array| array.rows_start_at_multiples_of(4));
        let Ok(head_dim) = u16::try_from(head_dim) else {
            bail!("metal-candle-kernels: attention: heads of {head_dim} elements are too long")
        };
        Ok(Made([
            (HEAD_DIM, Constant::U16(head_dim)),
            (WHOLE_QUADS, Constant::Bool(quads)),
            // A longer window is all keys.
            (WINDOWED, Constant::Bool(window.is_some_and(|window| window < keys))),
            (PACKED, Constant::Bool(self.first_key.is_some())),
            (CAPPED, Constant::Bool(softcap.is_some())),
            (SPLIT, Constant::Bool(splits.count > 1)),
            (PAGED, Constant::Bool(false)),
            (ROUNDED, Constant::Bool(false)),
            (SINKS, Constant::Bool(self.sinks.is_some())),
        ]))
    }

    /// `AttentionSizes` in `kernel.metal`.
    fn numbers(&self, splits: &Splits) -> Result<[u32; 11]> {
        const OPERATION: &str = "attention";
        let Sizes { batch, queries, keys, heads, kv_heads, .. } = self.sizes;
        size(OPERATION, batch * heads * queries)?;
        let window = self.options.window;
        let [factor, inner, scale] = score_numbers(&self.options);
        Ok([
            size(OPERATION, queries)?,
            size(OPERATION, keys)?,
            size(OPERATION, heads)?,
            size(OPERATION, kv_heads)?,
            size(OPERATION, window.unwrap_or(keys).min(keys))?,
            factor,
            inner,
            scale,
            size(OPERATION, splits.count)?,
            size(OPERATION, splits.start)?,
            size(OPERATION, splits.keys)?,
        ])
    }

    fn first_key(&self) -> Argument<'_> {
        self.first_key.as_ref().map_or(Argument::Absent, Argument::Input)
    }

    fn sinks(&self) -> Argument<'_> {
        self.sinks.as_ref().map_or(Argument::Absent, Argument::Input)
    }

    /// Bytes of a padded row.
    fn row_bytes(&self) -> usize {
        self.padded * self.dtype.size_in_bytes()
    }

    /// How many queries of a row are taken at once, where what the ranges of keys give all of them is too much to be kept.
    fn piece(&self) -> Option<usize> {
        let Sizes { batch, queries, keys, heads, head_dim, .. } = self.sizes;
        let of_query = heads * (head_dim + 2) * 4 * keys.div_ceil(PAGED_SPLIT);
        let all = (batch * queries).saturating_mul(of_query);
        // What a single range gives is the result.
        if !self.sizes.are_bits_fixed() || keys <= PAGED_SPLIT || all <= MOST_PART_BYTES {
            return None;
        }
        let piece = (MOST_PART_BYTES / of_query).max(paged::FEW_QUERIES);
        (batch > 1 || piece < queries).then_some(piece)
    }

    /// What [`Self::forward`] gives, of up to `piece` queries of a row at a time.
    pub(super) fn forward_in_pieces(self, piece: usize) -> Result<(Tensor, Tensor)> {
        let Sizes { batch, queries, keys, .. } = self.sizes;
        let first_key = self.first_key.as_ref().map(|first_key| &first_key.tensor);
        let (mut os, mut log_sum_exps) = (Vec::new(), Vec::new());
        for row in 0..batch {
            let (mut o, mut log_sum_exp) = (Vec::new(), Vec::new());
            for start in (0..queries).step_by(piece) {
                let count = piece.min(queries - start);
                let part = |tensor: &Tensor, start, count| {
                    tensor.narrow(0, row, 1)?.narrow(1, start, count)
                };
                let of_queries = |tensor| part(tensor, start, count);
                let seen = |array: &Array| part(&array.tensor, 0, keys - queries + start + count);
                let first_key = first_key.map(of_queries).transpose()?;
                let (q, k, v) = (of_queries(&self.q.tensor)?, seen(&self.k)?, seen(&self.v)?);
                let found = super::forward(&q, &k, &v, first_key.as_ref(), &self.options)?;
                o.push(found.0);
                log_sum_exp.push(found.1);
            }
            os.push(Tensor::cat(&o, 1)?);
            log_sum_exps.push(Tensor::cat(&log_sum_exp, 2)?);
        }
        Ok((Tensor::cat(&os, 0)?, Tensor::cat(&log_sum_exps, 0)?))
    }

    pub(super) fn forward(self) -> Result<(Tensor, Tensor)> {
        if let Some(piece) = self.piece() {
            return self.forward_in_pieces(piece);
        }
        let Sizes { batch, queries, heads, .. } = self.sizes;
        let o = self.metal.empty(&self.sizes.q_shape(), self.dtype)?;
        let log_sum_exp = self.metal.empty(&self.sizes.row_shape(), DType::F32)?;
        if batch * heads * queries > 0 {
            if self.sizes.are_bits_fixed() || queries <= FEW_QUERIES {
                self.forward_few(&o, &log_sum_exp)?;
            } else {
                self.forward_tiles(&o, &log_sum_exp)?;
            }
        }
        Ok((o.tensor, log_sum_exp.tensor))
    }

    fn forward_tiles(&self, o: &Array, log_sum_exp: &Array) -> Result<()> {
        let Sizes { batch, queries, heads, .. } = self.sizes;
        let (made, numbers) = (self.made_for([o, o], &NOT_SPLIT)?, self.numbers(&NOT_SPLIT)?);
        let arguments = [
            Argument::Input(&self.q),
            Argument::Input(&self.k),
            Argument::Input(&self.v),
            self.first_key(),
            Argument::Output(o),
            Argument::Output(log_sum_exp),
            Argument::U32s(&numbers),
            Argument::U64s(&self.strides),
            Argument::Absent,
            Argument::Absent,
            Argument::Absent,
            Argument::Absent,
            self.sinks(),
        ];
        let (most, _) = most_simdgroups(self.padded, self.dtype);
        let groups = |simdgroups| [batch * heads, queries.div_ceil(ROWS * simdgroups), 1];
        let kernel = made.kernel(by_head_dim!("attention_forward", self));
        self.metal.run(&[self.metal.by_simdgroups(kernel, most, groups, &arguments)?])
    }

    /// How keys are split where each range has so many threadgroups.
    fn splits(&self, blocks: usize) -> Splits {
        let Sizes { queries, keys, .. } = self.sizes;
        if self.sizes.are_bits_fixed() {
            return Splits { count: keys.div_ceil(PAGED_SPLIT), start: 0, keys: PAGED_SPLIT };
        }
        // Keys before the first query's window are seen by none.
        let seen = self.options.window.unwrap_or(keys).saturating_add(queries - 1).min(keys);
        let count = WANTED_GROUPS.div_ceil(blocks).min(seen.div_ceil(SPLIT_KEYS)).min(MOST_SPLITS);
        let split_keys = seen.div_ceil(count).next_multiple_of(SPLIT_STEP);
        Splits { count: seen.div_ceil(split_keys), start: keys - seen, keys: split_keys }
    }

    fn forward_few(&self, o: &Array, log_sum_exp: &Array) -> Result<()> {
        let Sizes { batch, queries, heads, kv_heads, head_dim, .. } = self.sizes;
        let blocks = batch * kv_heads * (queries * (heads / kv_heads)).div_ceil(ROWS);
        let splits = self.splits(blocks);
        let count = splits.count;
        let (made, numbers) = (self.made_for([o, o], &splits)?, self.numbers(&splits)?);
        let parts = match count {
            1 => None,
            _ => {
                let rows = batch * queries * heads;
                Some((
                    self.metal.empty((rows, count, head_dim), DType::F32)?,
                    self.metal.empty((rows, count, 2), DType::F32)?,
                ))
            }
        };
        let results = match &parts {
            None => [
                Argument::Output(o),
                Argument::Output(log_sum_exp),
                Argument::Absent,
                Argument::Absent,
            ],
            Some((partial_o, sums)) => [
                Argument::Absent,
                Argument::Absent,
                Argument::Output(partial_o),
                Argument::Output(sums),
            ],
        };
        let [to_o, to_sum, to_partial_o, to_partial_sums] = results;
        let arguments = [
            Argument::Input(&self.q),
            Argument::Input(&self.k),
            Argument::Input(&self.v),
            self.first_key(),
            to_o,
            to_sum,
            to_partial_o,
            to_partial_sums,
            Argument::U32s(&numbers),
            Argument::U64s(&self.strides),
            Argument::Absent,
            Argument::Absent,
            Argument::Absent,
            Argument::Absent,
            self.sinks(),
        ];
        let (_, most) = most_simdgroups(self.padded, self.dtype);
        let kernel = made.kernel(by_head_dim!("attention_few", self));
        let few = self.metal.by_simdgroups(kernel, most, |_| [blocks, count, 1], &arguments)?;
        let Some((partial_o, partial_sums)) = &parts else {
            return self.metal.run(&[few]);
        };
        let arguments = [
            Argument::Input(partial_o),
            Argument::Input(partial_sums),
            Argument::Output(o),
            Argument::Output(log_sum_exp),
            Argument::U32s(&numbers),
            Argument::Absent,
            Argument::Absent,
            self.sinks(),
        ];
        let kernel = made.kernel(by_dtype!("attention_combine", self.dtype)?);
        let combine = self.metal.by_row(kernel, batch * queries * heads, head_dim, &arguments)?;
        self.metal.run(&[few, combine])
    }

    pub(super) fn backward(
        self,
        o: &Tensor,
        log_sum_exp: &Tensor,
        d_o: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        const OPERATION: &str = "attention::backward";
        let Sizes { batch, queries, keys, heads, kv_heads, .. } = self.sizes;
        let metal = &self.metal;
        let (o, d_o) = (metal.contiguous(o)?, metal.contiguous(d_o)?);
        let log_sum_exp = metal.contiguous(log_sum_exp)?;
        let dq = metal.empty(&self.sizes.q_shape(), self.dtype)?;
        let dk = metal.empty(&self.sizes.k_shape(), self.dtype)?;
        let dv = metal.empty(&self.sizes.k_shape(), self.dtype)?;
        let corrections = metal.empty(&self.sizes.row_shape(), DType::F32)?;
        let made = self.made_for([&o, &d_o], &NOT_SPLIT)?;
        let numbers = self.numbers(&NOT_SPLIT)?;
        let rows = batch * heads * queries;
        let arguments = [
            Argument::Input(&o),
            Argument::Input(&d_o),
            Argument::Output(&corrections),
            Argument::U32s(&numbers),
            Argument::U32(size(OPERATION, rows)?),
        ];
        let kernel = made.kernel(by_dtype!("attention_corrections", self.dtype)?);
        let by_row = |simdgroups| [rows.div_ceil(simdgroups), 1, 1];
        let corrections_pass = metal.by_simdgroups(kernel, 8, by_row, &arguments)?;

        // A gradient that a pass doesn't give is not touched by it.
        let unused = Argument::Input(&corrections);
        let arguments_for = |first, second| {
            [
                Argument::Input(&self.q),
                Argument::Input(&self.k),
                Argument::Input(&self.v),
                self.first_key(),
                Argument::Input(&d_o),
                Argument::Input(&log_sum_exp),
                Argument::Input(&corrections),
                first,
                second,
                Argument::U32s(&numbers),
                Argument::U64s(&self.strides),
            ]
        };
        let (to_dq, to_dk, to_dv) =
            (Argument::Output(&dq), Argument::Output(&dk), Argument::Output(&dv));
        let most = match self.row_bytes() {
            0..=256 => 4,
            257..=512 => 2,
            _ => 1,
        };
        let by_query = |simdgroups| [batch * heads, queries.div_ceil(ROWS * simdgroups), 1];
        let by_key = |simdgroups| [batch * kv_heads, keys.div_ceil(ROWS * simdgroups), 1];
        let of_dq = arguments_for(to_dq, unused);
        let kernel = made.kernel(by_head_dim!("attention_dq", self));
        let dq_pass = metal.by_simdgroups(kernel, most, by_query, &of_dq)?;
        if self.padded == MOST_HEAD_DIM {
            let (of_dk, of_dv) = (arguments_for(to_dk, unused), arguments_for(unused, to_dv));
            let kernel = made.kernel(by_head_dim!("attention_dk", "_256", self.dtype));
            let dk_pass = metal.by_simdgroups(kernel, most, by_key, &of_dk)?;
            let kernel = made.kernel(by_head_dim!("attention_dv", "_256", self.dtype));
            let dv_pass = metal.by_simdgroups(kernel, most, by_key, &of_dv)?;
            metal.run(&[corrections_pass, dq_pass, dk_pass, dv_pass])?;
        } else {
            let of_both = arguments_for(to_dk, to_dv);
            let kernel = made.kernel(by_head_dim!("attention_dk_dv", self));
            let keys_pass = metal.by_simdgroups(kernel, most, by_key, &of_both)?;
            metal.run(&[corrections_pass, dq_pass, keys_pass])?;
        }
        Ok((dq.tensor, dk.tensor, dv.tensor))
    }
}

/// See [`super::backward_sinks`].
pub(super) fn backward_sinks(
    sinks: &Tensor,
    o: &Tensor,
    log_sum_exp: &Tensor,
    d_o: &Tensor,
) -> Result<Tensor> {
    const OPERATION: &str = "attention::backward_sinks";
    let metal = Metal::of(o)?;
    let (batch, queries, heads, head_dim) = o.dims4()?;
    let gradients = metal.empty(heads, DType::F32)?;
    let name = by_dtype!("attention_backward_sinks", o.dtype())?;
    let [sinks, o, log_sum_exp, d_o] = [sinks, o, log_sum_exp, d_o].map(|it| metal.contiguous(it));
    let (sinks, o, log_sum_exp, d_o) = (sinks?, o?, log_sum_exp?, d_o?);
    if heads > 0 {
        let sizes = [batch * queries, queries, heads, head_dim];
        let [tokens, queries, of_token, head_dim] = sizes.map(|number| size(OPERATION, number));
        let arguments = [
            Argument::Input(&sinks),
            Argument::Input(&o),
            Argument::Input(&log_sum_exp),
            Argument::Input(&d_o),
            Argument::Output(&gradients),
            Argument::U32(tokens?),
            Argument::U32(queries?),
            Argument::U32(of_token?),
            Argument::U32(head_dim?),
        ];
        metal.run(&[metal.by_simdgroups(name, 8, |_| [heads, 1, 1], &arguments)?])?;
    }
    Ok(gradients.tensor)
}
