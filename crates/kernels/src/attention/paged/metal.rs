//! Paged attention on Metal: which kernels the items of a batch go to; see `../kernel.metal`.

use super::{
    FEW, MANY, PAGED_QUERIES, PAGED_SPLIT, Pool, SEGMENT, SINGLE, SPLIT, Sequences, Sizes,
};
use crate::attention::Options;
use crate::attention::metal::{
    self, Made, ROWS, by_head_dim, most_simdgroups, padded, score_numbers,
};
use crate::backend::metal::{Argument, Array, Constant, Dispatch, Metal, by_dtype, size};
use candle_core::{DType, Error, Result, Tensor, bail};

struct Call<'a> {
    operation: &'static str,
    metal: Metal,
    sizes: Sizes,
    dtype: DType,
    padded: usize,
    sequences: &'a Sequences,
    options: &'a Options,
    q: Array,
    k: Array,
    v: Array,
    /// Of codes, where pools are rounded to 8 bits.
    scales: Option<[Array; 2]>,
    sinks: Option<Array>,
    o: Array,
    numbers: Array,
    /// Parts of results and their sums, where there are any.
    parts: Option<[Array; 2]>,
    /// `AttentionStrides` in `kernel.metal`.
    strides: [u64; 9],
}

/// What the kernels of some items are given.
struct Given {
    /// `AttentionSizes` in `kernel.metal`.
    sizes: [u32; 11],
    /// `PagedBatch` there.
    batch: [u32; 7],
}

pub(super) fn forward(
    operation: &'static str,
    sizes: Sizes,
    q: &Tensor,
    pools: [Pool; 2],
    sequences: &Sequences,
    options: &Options,
) -> Result<Tensor> {
    let metal = Metal::of(q)?;
    let dtype = q.dtype();
    by_dtype!("attention", dtype)?;
    let Sizes { heads, kv_heads, head_dim } = sizes;
    let padded = padded(operation, head_dim)?;
    let o = metal.empty((sequences.tokens, heads, head_dim), dtype)?;
    if sequences.tokens * heads * head_dim == 0 {
        return Ok(o.tensor);
    }
    let [k, v] = pools.map(Pool::elements);
    let (q, k, v) = (metal.strided_rows(q)?, metal.strided(k)?, metal.strided(v)?);
    let [k_scales, v_scales] =
        pools.map(|pool| pool.scales().map(|scales| metal.strided(scales)).transpose());
    let scales = k_scales?.zip(v_scales?).map(|(k, v)| [k, v]);
    let sinks = options.sinks.as_ref().map(|sinks| metal.contiguous(sinks)).transpose()?;
    let numbers = metal.contiguous(&sequences.uploaded)?;
    // One of each range, where a sequence has several.
    let plan = &sequences.plan;
    let parts = (plan.most_keys > PAGED_SPLIT).then(|| {
        let parts = plan.parts / (PAGED_SPLIT / SEGMENT);
        Ok::<_, Error>([
            metal.empty((parts, heads, head_dim), DType::F32)?,
            metal.empty((parts, heads, 2), DType::F32)?,
        ])
    });
    let parts = parts.transpose()?;
    let of_q = [0, 1].map(|index| q.tensor.stride()[index] as u64);
    let of_pool = [(kv_heads * head_dim) as u64, head_dim as u64];
    let strides = [0, of_q[0], of_q[1], 0, of_pool[0], of_pool[1], 0, of_pool[0], of_pool[1]];
    let call = Call {
        operation,
        metal,
        sizes,
        dtype,
        padded,
        sequences,
        options,
        q,
        k,
        v,
        scales,
        sinks,
        o,
        numbers,
        parts,
        strides,
    };
    call.run()?;
    Ok(call.o.tensor)
}

impl Call<'_> {
    /// For items of a kind, of sequences with so many queries at most.
    fn given(&self, kind: usize, queries: usize) -> Result<Given> {
        let number = |number| size(self.operation, number);
        let Sizes { heads, kv_heads, .. } = self.sizes;
        let (plan, sequences) = (&self.sequences.plan, self.sequences);
        let [factor, inner, scale] = score_numbers(self.options);
        let window = self
            .options
            .window
            .map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX));
        let (heads, kv_heads, queries) = (number(heads)?, number(kv_heads)?, number(queries)?);
        Ok(Given {
            sizes: [queries, 0, heads, kv_heads, window, factor, inner, scale, 1, 0, 0],
            batch: [
                number(plan.spans)?,
                number(plan.tables)?,
                number(plan.items[kind].start)?,
                number(kind)?,
                number(sequences.width)?,
                number(sequences.block)?,
                number(sequences.blocks)?,
            ],
        })
    }

    fn made(&self, split: bool) -> Result<Made> {
        let head_dim = self.sizes.head_dim;
        let quads = head_dim.is_multiple_of(4)
            && [&self.q, &self.k, &self.v, &self.o]
                .into_iter()
                .all(|array| array.rows_start_at_multiples_of(4));
        let Ok(head_dim) = u16::try_from(head_dim) else {
            bail!(
                "metal-candle-kernels: {}: heads of {head_dim} elements are too long",
                self.operation
            )
        };
        Ok(Made([
            (metal::HEAD_DIM, Constant::U16(head_dim)),
            (metal::WHOLE_QUADS, Constant::Bool(quads)),
            (metal::WINDOWED, Constant::Bool(self.options.window.is_some())),
            (metal::PACKED, Constant::Bool(false)),
            (metal::CAPPED, Constant::Bool(self.options.softcap.is_some())),
            (metal::SPLIT, Constant::Bool(split)),
            (metal::PAGED, Constant::Bool(true)),
            (metal::ROUNDED, Constant::Bool(self.scales.is_some())),
            (metal::SINKS, Constant::Bool(self.sinks.is_some())),
        ]))
    }

    fn run(&self) -> Result<()> {
        let Sizes { heads, kv_heads, head_dim } = self.sizes;
        let group = heads / kv_heads;
        let plan = &self.sequences.plan;
        let (most_of_many, most_of_few) = most_simdgroups(self.padded, self.dtype);
        let (whole, in_parts) = (self.made(false)?, self.made(self.parts.is_some())?);
        let mut dispatches: Vec<Dispatch> = Vec::new();
        let [k_scales, v_scales] = match &self.scales {
            None => [Argument::Absent, Argument::Absent],
            Some(scales) => scales.each_ref().map(Argument::Input),
        };
        let sinks = self.sinks.as_ref().map_or(Argument::Absent, Argument::Input);

        let given_many = self.given(MANY, PAGED_QUERIES)?;
        let of_many = [
            Argument::Input(&self.q),
            Argument::Input(&self.k),
            Argument::Input(&self.v),
            Argument::Absent,
            Argument::Output(&self.o),
            Argument::Absent,
            Argument::U32s(&given_many.sizes),
            Argument::U64s(&self.strides),
            Argument::Input(&self.numbers),
            Argument::U32s(&given_many.batch),
            k_scales,
            v_scales,
            sinks,
        ];
        let items = plan.items[MANY].room;
        let groups = |simdgroups| [heads, items * PAGED_QUERIES.div_ceil(ROWS * simdgroups), 1];
        let kernel = whole.kernel(by_head_dim!("attention_forward", self));
        if items > 0 {
            dispatches.push(self.metal.by_simdgroups(kernel, most_of_many, groups, &of_many)?);
        }

        let given_few = [self.given(SINGLE, 1)?, self.given(FEW, plan.most_few)?];
        let (partial_o, partial_sums) = match &self.parts {
            None => (Argument::Absent, Argument::Absent),
            Some([values, sums]) => (Argument::Output(values), Argument::Output(sums)),
        };
        let of_few = given_few.each_ref().map(|given| {
            [
                Argument::Input(&self.q),
                Argument::Input(&self.k),
                Argument::Input(&self.v),
                Argument::Absent,
                Argument::Output(&self.o),
                Argument::Absent,
                partial_o,
                partial_sums,
                Argument::U32s(&given.sizes),
                Argument::U64s(&self.strides),
                Argument::Input(&self.numbers),
                Argument::U32s(&given.batch),
                k_scales,
                v_scales,
                sinks,
            ]
        });
        let kinds = [(SINGLE, 1), (FEW, plan.most_few)];
        for ((kind, queries), arguments) in kinds.into_iter().zip(&of_few) {
            let items = plan.items[kind].room;
            let groups = |_| [kv_heads * (queries * group).div_ceil(ROWS), items, 1];
            let kernel = in_parts.kernel(by_head_dim!("attention_few", self));
            if items > 0 {
                dispatches.push(self.metal.by_simdgroups(
                    kernel,
                    most_of_few,
                    groups,
                    arguments,
                )?);
            }
        }

        let given_split = self.given(SPLIT, 1)?;
        let Some([partial_o, partial_sums]) = &self.parts else {
            return self.metal.run(&dispatches);
        };
        let of_split = [
            Argument::Input(partial_o),
            Argument::Input(partial_sums),
            Argument::Output(&self.o),
            Argument::Absent,
            Argument::U32s(&given_split.sizes),
            Argument::Input(&self.numbers),
            Argument::U32s(&given_split.batch),
            sinks,
        ];
        let kernel = in_parts.kernel(by_dtype!("attention_combine", self.dtype)?);
        let rows = plan.items[SPLIT].room * heads;
        dispatches.push(self.metal.by_row(kernel, rows, head_dim, &of_split)?);
        self.metal.run(&dispatches)
    }
}
