//! Linear layers on the CPU. Several layers that read the same input share its packing. Layers with adapters,
//! in `lora_linear/cpu/`, are made of the same parts.

use super::few_rows::{FEW_ROWS, add_combinations, dots};
#[cfg(target_arch = "x86_64")]
use crate::backend::cpu::gemm::block_floats::{self, BlockFloats};
use crate::backend::cpu::gemm::integers::{Product, Rounded, Side};
use crate::backend::cpu::gemm::{Block, Job, Kind, Lhs, Operand, Term};
use crate::backend::cpu::gemm::{add_terms, products, sum_count, sum_stride};
use crate::backend::cpu::{
    Disjoint, Element, PARALLEL_CHUNK, Real, Values, for_each_chunk, for_each_index,
};
use crate::quantized::cpu as quantized;
use metal_candle_cpu::scratch::Scratch;
use metal_candle_cpu::simd::vectorize;
use std::ops::Range;

/// A layer: `weight` `(outer, inner)`.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a, A> {
    pub weight: Values<'a, A>,
    pub outer: usize,
    pub bias: Option<&'a [A]>,
}

/// A layer with its packed input.
type Packed<'a, A> = (&'a Packs<'a, A>, Layer<'a, A>);

/// How `x` by a weight is multiplied.
pub(crate) fn kind_of<A>(x: Values<A>, weight: Values<A>) -> Kind {
    match (x, weight) {
        (Values::Bf16(_), Values::Bf16(_) | Values::Quantized(_)) => Kind::for_bf16(),
        _ => Kind::Plain,
    }
}

/// The input of some layers, packed once for each kind of product that they ask for.
pub(crate) struct Packs<'a, A> {
    rows: usize,
    depth: usize,
    values: Values<'a, A>,
    packed: Vec<(Kind, Lhs<A>)>,
    /// For layers that multiply integers.
    rounded: Option<Rounded>,
    /// For layers of codes that are multiplied by block floating point.
    #[cfg(target_arch = "x86_64")]
    block_floats: Option<BlockFloats>,
}

impl<'a, A: Real> Packs<'a, A> {
    /// `x` `(rows, inner)`. Layers that multiply integers or block floating point read it as numbers, too, where
    /// `reads_numbers` says so of them: for an adapter.
    pub(crate) fn new(
        rows: usize,
        inner: usize,
        x: Values<'a, A>,
        layers: &[Layer<'_, A>],
        reads_numbers: impl Fn(usize) -> bool,
    ) -> Self {
        let mut packed: Vec<(Kind, Lhs<A>)> = Vec::new();
        let mut rounded = None;
        #[cfg(target_arch = "x86_64")]
        let mut block_floats = None;
        for (index, layer) in layers.iter().enumerate() {
            let mut by_numbers = true;
            if layer.weight.byte_rows().is_some() {
                rounded.get_or_insert_with(|| Rounded::pack(rows, inner, x, None));
                by_numbers = false;
            }
            #[cfg(target_arch = "x86_64")]
            if let Values::Bf16(halves) = x
                && block_floats::right_side(x, layer.weight, inner).is_some()
            {
                block_floats.get_or_insert_with(|| BlockFloats::pack(rows, inner, halves));
                by_numbers = false;
            }
            if !by_numbers && !reads_numbers(index) {
                continue;
            }
            let kind = kind_of(x, layer.weight);
            if packed.iter().all(|(packed, _)| *packed != kind) {
                packed.push((kind, Lhs::pack(kind, rows, inner, Operand::lines(x, inner), None)));
            }
        }
        Packs {
            rows,
            depth: inner,
            values: x,
            packed,
            rounded,
            #[cfg(target_arch = "x86_64")]
            block_floats,
        }
    }

    /// The product with a layer's weight.
    fn term<'p>(&'p self, weight: Values<'p, A>) -> Term<'p, A> {
        #[cfg(target_arch = "x86_64")]
        if let Some(lhs) = &self.block_floats
            && let Some(rhs) = block_floats::right_side(self.values, weight, self.depth)
        {
            return Term::BlockFloats(block_floats::Product { lhs, rhs });
        }
        match (weight.byte_rows(), &self.rounded) {
            (Some(rhs), Some(lhs)) => Term::Integers(Product { lhs, rhs, side: Side::Lines }),
            _ => Term::Numbers {
                lhs: self.get(kind_of(self.values, weight)),
                rhs: Operand::lines(weight, self.depth),
            },
        }
    }

    /// As a layer of this kind reads it.
    pub(crate) fn get(&self, kind: Kind) -> &Lhs<A> {
        let found = self.packed.iter().find(|(packed, _)| *packed == kind);
        &found.unwrap_or_else(|| unreachable!("packed for {kind:?} before")).1
    }
}

/// `y = x·Wᵀ + bias`: `x` `(rows, inner)`, `y` `(rows, outer)`.
pub(crate) fn forward<T: Element>(
    rows: usize,
    inner: usize,
    x: Values<T::Acc>,
    layer: Layer<T::Acc>,
    y: &mut [T],
) {
    if rows <= FEW_ROWS {
        let mut scratch = Scratch::new(rows * inner);
        let wide = widened(x, &mut scratch);
        return forward_few(
            rows,
            inner,
            (x, wide),
            &[layer],
            &mut [y],
            #[inline(always)]
            |_, _, _| {},
        );
    }
    let packs = Packs::new(rows, inner, x, &[layer], |_| false);
    forward_many(&packs, &[layer], &[None], &mut [y]);
}

/// `y = x·Wᵀ + bias`, and the product `added`, for every layer of a packed input: `ys` `(rows, outer)`.
pub(crate) fn forward_many<T: Element>(
    packs: &Packs<T::Acc>,
    layers: &[Layer<T::Acc>],
    added: &[Option<Term<T::Acc>>],
    ys: &mut [&mut [T]],
) {
    let layers: Vec<_> = layers.iter().map(|layer| (packs, *layer)).collect();
    multiply(&layers, added, ys);
}

/// [`forward_many`] of layers with packed inputs of their own.
fn multiply<T: Element>(
    layers: &[Packed<T::Acc>],
    added: &[Option<Term<T::Acc>>],
    ys: &mut [&mut [T]],
) {
    let terms: Vec<Vec<Term<T::Acc>>> = layers
        .iter()
        .zip(added)
        .map(|((packs, layer), added)| {
            [packs.term(layer.weight)].into_iter().chain(*added).collect()
        })
        .collect();
    let targets: Vec<_> = ys.iter_mut().map(|y| Disjoint::new(y)).collect();
    let finishes: Vec<_> = layers
        .iter()
        .zip(&targets)
        .map(|((_, layer), target)| {
            move |block: Block<T::Acc>| store(block, layer.outer, layer.bias, target)
        })
        .collect();
    let jobs: Vec<_> = layers
        .iter()
        .zip(terms.iter().zip(&finishes))
        .map(|((packs, layer), (terms, finish))| Job {
            rows: packs.rows,
            columns: layer.outer,
            terms,
            finish,
        })
        .collect();
    products(&jobs);
}

/// Rounds a part of a result, with the bias, to its place.
pub(crate) fn store<T: Element>(
    mut block: Block<T::Acc>,
    outer: usize,
    bias: Option<&[T::Acc]>,
    target: &Disjoint<T>,
) {
    let columns = block.columns.clone();
    vectorize(
        #[inline(always)]
        || {
            for (row, sums) in block.rows_mut() {
                if let Some(bias) = bias {
                    for (sum, bias) in sums.iter_mut().zip(&bias[columns.clone()]) {
                        *sum += *bias;
                    }
                }
                let start = row * outer + columns.start;
                // SAFETY: every block is a part of the result of its own.
                T::narrow(sums, unsafe { target.slice(start..start + sums.len()) });
            }
        },
    );
}

/// Multiplications below which threads cost more than they bring.
pub(crate) const PARALLEL_MULTIPLICATIONS: usize = 32 * 1024;
/// Outputs of one task of a pass over a weight.
pub(crate) const OUTPUTS: usize = 32;
/// Tasks of a pass across a weight, and lines of one at least.
const TASKS_ACROSS: usize = 16;
const LINES: usize = 64;

/// `y = x·Wᵀ + bias` for every layer and a few rows: `x` `(rows, inner)`, as it is stored and as it is computed with,
/// `ys` `(rows, outer)`. Before the bias, `add(index of the layer, outputs, sums)` is called with the sums
/// `(rows, outputs)` of some outputs.
pub(crate) fn forward_few<T: Element>(
    rows: usize,
    inner: usize,
    x: (Values<T::Acc>, &[T::Acc]),
    layers: &[Layer<T::Acc>],
    ys: &mut [&mut [T]],
    add: impl Fn(usize, Range<usize>, &mut [T::Acc]) + Sync,
) {
    let few = FewRows::new(rows, inner, x, layers);
    each_output(
        inner,
        layers,
        ys,
        |_| rows,
        #[inline(always)]
        |index, outputs, sums| few.dots(layers[index].weight, outputs, sums),
        add,
    );
}

/// A few rows, made ready for a pass over each of some matrices as it lies.
struct FewRows<'a, A> {
    rows: usize,
    inner: usize,
    x: &'a [A],
    quantized: quantized::Rows<'a, A>,
    packed: Option<Lhs<A>>,
}

impl<'a, A: Real> FewRows<'a, A> {
    /// `x` `(rows, inner)`, as it is stored and as it is computed with, for these layers.
    fn new(
        rows: usize,
        inner: usize,
        (stored, x): (Values<A>, &'a [A]),
        layers: &[Layer<A>],
    ) -> Self {
        let matrices = layers.iter().filter_map(|layer| match layer.weight {
            Values::Quantized(matrix) => Some(matrix),
            _ => None,
        });
        // As more rows are multiplied, so that a row has the same bits beside any number of others.
        let takes_lines =
            |weight| matches!(weight, Values::Bf16(_)) && kind_of(stored, weight).takes_lines(rows);
        let lines = layers.iter().find(|layer| takes_lines(layer.weight));
        let quantized = quantized::Rows::new(rows, inner, (stored, x), matrices);
        let packed = lines.map(|layer| {
            let operand = Operand::lines(stored, inner);
            Lhs::pack_here(kind_of(stored, layer.weight), rows, inner, operand)
        });
        Self { rows, inner, x, quantized, packed }
    }

    /// The products with some lines of a weight: `sums` `(rows, outputs)`.
    #[inline(always)]
    fn dots(&self, weight: Values<A>, outputs: Range<usize>, sums: &mut [A]) {
        let Self { rows, inner, x, quantized, packed } = self;
        match (weight, packed) {
            (Values::Quantized(matrix), _) => quantized.dots(matrix, outputs, sums),
            (weight @ Values::Bf16(_), Some(lhs)) => {
                let (count, stride) = (outputs.len(), sum_stride(outputs.len()));
                let mut wide = Scratch::new(sum_count(*rows, stride));
                let term = Term::Numbers { lhs, rhs: Operand::lines(weight, *inner) };
                add_terms(&[term], 0..*rows, outputs, &mut wide, stride);
                for (sums, wide) in sums.chunks_exact_mut(count).zip(wide.chunks(stride)) {
                    sums.copy_from_slice(&wide[..count]);
                }
            }
            (weight, _) => dots(*rows, *inner, x, weight, *inner, outputs, sums),
        }
    }
}

/// Writes some outputs at a time of each layer, of `rows(index of the layer)` rows: their products with the weight, which
/// `dots(index, outputs, sums)` finds, what `add` adds to them, and the bias.
#[inline(always)]
fn each_output<T: Element>(
    inner: usize,
    layers: &[Layer<T::Acc>],
    ys: &mut [&mut [T]],
    rows: impl Fn(usize) -> usize + Sync,
    dots: impl Fn(usize, Range<usize>, &mut [T::Acc]) + Sync,
    add: impl Fn(usize, Range<usize>, &mut [T::Acc]) + Sync,
) {
    let targets: Vec<_> = ys.iter_mut().map(|y| Disjoint::new(y)).collect();
    let tasks = |layer: &Layer<T::Acc>| layer.outer.div_ceil(OUTPUTS);
    let outputs = layers.iter().enumerate().map(|(index, layer)| rows(index) * layer.outer);
    let parallel = inner * outputs.sum::<usize>() > PARALLEL_MULTIPLICATIONS;
    for_each_index(
        layers.iter().map(tasks).sum(),
        parallel,
        #[inline(always)]
        |mut task| {
            let mut index = 0;
            while task >= tasks(&layers[index]) {
                task -= tasks(&layers[index]);
                index += 1;
            }
            let (layer, rows) = (&layers[index], rows(index));
            let outputs = task * OUTPUTS..(task * OUTPUTS + OUTPUTS).min(layer.outer);
            let count = outputs.len();
            let mut sums = [T::Acc::ZERO; FEW_ROWS * OUTPUTS];
            let sums = &mut sums[..rows * count];
            dots(index, outputs.clone(), sums);
            add(index, outputs.clone(), sums);
            for row in 0..rows {
                let sums = &mut sums[row * count..][..count];
                if let Some(bias) = layer.bias {
                    for (sum, bias) in sums.iter_mut().zip(&bias[outputs.clone()]) {
                        *sum += *bias;
                    }
                }
                let start = row * layer.outer + outputs.start;
                // SAFETY: every task writes its own columns of each row.
                T::narrow(sums, unsafe { targets[index].slice(start..start + count) });
            }
        },
    );
}

/// Rows that some layers read, and no others.
pub(crate) struct Group<'a, A> {
    pub rows: usize,
    /// `(rows, inner)`
    pub x: Values<'a, A>,
    pub layers: Vec<Layer<'a, A>>,
}

/// `y = x·Wᵀ + bias` for the rows of each group and its layers: `ys` `(rows, outer)`, those of a group one after the other.
/// All groups with a few rows are one loop, and all with many.
pub(crate) fn forward_groups<T: Element>(
    inner: usize,
    groups: &[Group<T::Acc>],
    ys: Vec<&mut [T]>,
) {
    let mut ys = ys.into_iter();
    let (mut few, mut many) = (Vec::new(), Vec::new());
    for group in groups {
        let targets = ys.by_ref().take(group.layers.len());
        if group.rows <= FEW_ROWS {
            few.push((group, targets.collect::<Vec<_>>()));
        } else {
            many.push((group, targets.collect::<Vec<_>>()));
        }
    }

    let mut scratches: Vec<_> =
        few.iter().map(|(group, _)| Scratch::new(group.rows * inner)).collect();
    let rows = few.iter().zip(&mut scratches).map(|((group, _), scratch)| {
        let wide = widened(group.x, scratch);
        FewRows::new(group.rows, inner, (group.x, wide), &group.layers)
    });
    let rows: Vec<_> = rows.collect();
    let layers: Vec<Layer<T::Acc>> =
        few.iter().flat_map(|(group, _)| group.layers.iter().copied()).collect();
    let numbers = few.iter().enumerate();
    let of_layers: Vec<usize> = numbers
        .flat_map(|(number, (group, _))| std::iter::repeat_n(number, group.layers.len()))
        .collect();
    let mut targets: Vec<_> = few.into_iter().flat_map(|(_, targets)| targets).collect();
    each_output(
        inner,
        &layers,
        &mut targets,
        |index| rows[of_layers[index]].rows,
        #[inline(always)]
        |index, outputs, sums| rows[of_layers[index]].dots(layers[index].weight, outputs, sums),
        #[inline(always)]
        |_, _, _| {},
    );

    let packs: Vec<_> = many
        .iter()
        .map(|(group, _)| Packs::new(group.rows, inner, group.x, &group.layers, |_| false))
        .collect();
    let layers: Vec<Packed<T::Acc>> = many
        .iter()
        .zip(&packs)
        .flat_map(|((group, _), packs)| group.layers.iter().map(move |layer| (packs, *layer)))
        .collect();
    let mut targets: Vec<_> = many.into_iter().flat_map(|(_, targets)| targets).collect();
    multiply(&layers, &vec![None; layers.len()], &mut targets);
}

/// The numbers as they are computed with.
pub(crate) fn widened<'a, A: Real>(values: Values<'a, A>, scratch: &'a mut [A]) -> &'a [A] {
    match values {
        Values::Native(values) => values,
        _ => {
            values.read(0, scratch);
            scratch
        }
    }
}

/// `out = x·matrix` for a few rows: `x` `(rows, depth)`, `matrix` `(depth, width)`. A task reads some
/// lines of the matrix from end to end, as they lie in memory, and what they add to the result is
/// summed in their order. A matrix that multiplies integers is packed as for many rows.
pub(crate) fn combine<A: Real>(
    rows: usize,
    depth: usize,
    x: &[A],
    matrix: Values<A>,
    width: usize,
    out: &mut [A],
) {
    if matrix.byte_rows().is_some() {
        let left = Left::pack(rows, depth, Values::Native(x), matrix);
        return multiply_across(rows, &left, matrix, width, out);
    }
    let lines = depth.div_ceil(TASKS_ACROSS).max(LINES);
    let (tasks, count) = (depth.div_ceil(lines), rows * width);
    if tasks <= 1 || depth * count <= PARALLEL_MULTIPLICATIONS {
        out.fill(A::ZERO);
        add_combinations(rows, depth, depth, x, matrix, width, 0..width, out);
        return;
    }
    let mut parts = Scratch::new(tasks * count);
    for_each_chunk(
        &mut parts,
        count,
        #[inline(always)]
        |task, part| {
            let first = task * lines;
            let depth_of_part = lines.min(depth - first);
            let (x, matrix) = (&x[first..], matrix.from(first * width));
            part.fill(A::ZERO);
            add_combinations(rows, depth_of_part, depth, x, matrix, width, 0..width, part);
        },
    );
    for_each_chunk(
        out,
        PARALLEL_CHUNK,
        #[inline(always)]
        |index, out| {
            let start = index * PARALLEL_CHUNK;
            out.copy_from_slice(&parts[start..start + out.len()]);
            for part in parts.chunks_exact(count).skip(1) {
                for (out, part) in out.iter_mut().zip(&part[start..]) {
                    *out += *part;
                }
            }
        },
    );
}

/// `dx = dy·W`: `dy` `(rows, outer)`, `dx` `(rows, inner)`.
pub(crate) fn backward_input<T: Element>(
    rows: usize,
    (outer, inner): (usize, usize),
    dy: Values<T::Acc>,
    weight: Values<T::Acc>,
    dx: &mut [T],
) {
    if rows <= FEW_ROWS {
        let mut scratch = Scratch::new(rows * outer);
        let dy = widened(dy, &mut scratch);
        let mut sums = Scratch::new(rows * inner);
        combine(rows, outer, dy, weight, inner, &mut sums);
        return T::narrow(&sums, dx);
    }
    multiply_across(rows, &Left::pack(rows, outer, dy, weight), weight, inner, dx);
}

/// The left side of a product with a weight's columns, packed.
pub(crate) enum Left<A> {
    Numbers(Lhs<A>),
    Rounded(Rounded),
}

impl<A: Real> Left<A> {
    /// `dy` `(rows, outer)`, with the scales of the weight's rows in it where integers are multiplied.
    pub(crate) fn pack(rows: usize, outer: usize, dy: Values<A>, weight: Values<A>) -> Self {
        match weight.byte_rows() {
            Some(bytes) => Self::Rounded(Rounded::pack(rows, outer, dy, Some(bytes.scales))),
            None => {
                let kind = kind_of(dy, weight);
                Self::Numbers(Lhs::pack(kind, rows, outer, Operand::lines(dy, outer), None))
            }
        }
    }

    /// The product with the weight `(outer, inner)` that it was packed for.
    pub(crate) fn term<'a>(&'a self, weight: Values<'a, A>, inner: usize) -> Term<'a, A> {
        match (self, weight.byte_rows()) {
            (Self::Rounded(lhs), Some(rhs)) => {
                Term::Integers(Product { lhs, rhs, side: Side::Columns })
            }
            (Self::Numbers(lhs), _) => Term::Numbers { lhs, rhs: Operand::columns(weight, inner) },
            (Self::Rounded(_), None) => unreachable!("rounded for a matrix of bytes"),
        }
    }
}

/// `out = left·weight`, `(rows, inner)`.
fn multiply_across<T: Element>(
    rows: usize,
    left: &Left<T::Acc>,
    weight: Values<T::Acc>,
    inner: usize,
    out: &mut [T],
) {
    let target = Disjoint::new(out);
    let terms = [left.term(weight, inner)];
    let finish = |block: Block<T::Acc>| store(block, inner, None, &target);
    products(&[Job { rows, columns: inner, terms: &terms, finish: &finish }]);
}

pub(crate) fn add<A: Real>(out: &mut [A], addend: &[A]) {
    vectorize(
        #[inline(always)]
        || {
            for (out, addend) in out.iter_mut().zip(addend) {
                *out += *addend;
            }
        },
    );
}

/// `out += leftᵀ·right` with `left` `(rows, a)`, the first `b` columns of `right` `(rows, width)` and `out`
/// `(a, b)`: the gradient of a weight.
pub(crate) fn add_weight_gradient<A: Real>(
    kind: Kind,
    rows: usize,
    a: usize,
    (b, width): (usize, usize),
    left: Values<A>,
    right: Values<A>,
    out: &mut [A],
) {
    let lhs = Lhs::pack(kind, a, rows, Operand::columns(left, a), None);
    let out = Disjoint::new(out);
    let terms = [Term::Numbers { lhs: &lhs, rhs: Operand::columns(right, width) }];
    let finish = |mut block: Block<A>| {
        let columns = block.columns.clone();
        for (row, sums) in block.rows_mut() {
            let start = row * b + columns.start;
            // SAFETY: every block is a part of the result of its own.
            let out = unsafe { out.slice(start..start + sums.len()) };
            add(out, sums);
        }
    };
    products(&[Job { rows: a, columns: b, terms: &terms, finish: &finish }]);
}

/// `out = rescale(row)·out + x·weight` with `x` `(rows, outer)`, `weight` `(outer, inner)` and `out`
/// `(rows, inner)`, which isn't read without `rescale`.
pub(crate) fn add_input_gradient<A: Real>(
    kind: Kind,
    rows: usize,
    (outer, inner): (usize, usize),
    x: Values<A>,
    weight: Values<A>,
    rescale: Option<&(dyn Fn(usize) -> A + Sync)>,
    out: &mut [A],
) {
    let lhs = Lhs::pack(kind, rows, outer, Operand::lines(x, outer), None);
    let out = Disjoint::new(out);
    let terms = [Term::Numbers { lhs: &lhs, rhs: Operand::columns(weight, inner) }];
    let finish = |mut block: Block<A>| {
        let columns = block.columns.clone();
        for (row, sums) in block.rows_mut() {
            let start = row * inner + columns.start;
            // SAFETY: every block is a part of the result of its own.
            let out = unsafe { out.slice(start..start + sums.len()) };
            match rescale {
                Some(rescale) => {
                    let factor = rescale(row);
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out = *out * factor + *sum);
                }
                None => out.copy_from_slice(sums),
            }
        }
    };
    products(&[Job { rows, columns: inner, terms: &terms, finish: &finish }]);
}
