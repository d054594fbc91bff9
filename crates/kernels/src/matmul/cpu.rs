//! Linear layers on the CPU, with and without low-rank adapters. Several layers that read the same
//! input share its packing, and in the backward pass the sum of their input gradients.
//!
//! Where bf16 is multiplied as such, the adapter's f32 matrices take part as sums of two bf16
//! numbers (`high + low`, 16 bits of precision), so that nothing of them is lost beside the
//! rounding of the result.

use super::few_rows::{FEW_ROWS, add_combinations, dots};
use crate::device::cpu::gemm::{Block, Change, Job, Kind, Lhs, Operand, Term};
use crate::device::cpu::gemm::{add_terms, products, sum_count, sum_stride};
use crate::device::cpu::scratch::Scratch;
use crate::device::cpu::simd::vectorize;
use crate::device::cpu::{
    Disjoint, Element, PARALLEL_CHUNK, Real, Sum, Values, buffer, for_each_chunk, for_each_index,
    rows_per_task,
};
use half::bf16;

/// Dropout of an adapter's input.
pub(crate) struct Dropped<'a, A> {
    /// Sets dropped elements to zero.
    pub mask: Box<Change<'a, A>>,
    /// What the elements that are kept are multiplied by.
    pub kept: A,
}

/// The low-rank path of a layer: `a` `(inner, rank)`, `b` `(rank, outer)`.
pub(crate) struct Adapter<'a, A> {
    pub a: &'a [A],
    pub b: &'a [A],
    pub rank: usize,
    pub scale: A,
    pub dropout: Option<Dropped<'a, A>>,
}

impl<A: Real> Adapter<'_, A> {
    fn kept(&self) -> A {
        self.dropout.as_ref().map_or(A::ONE, |dropout| dropout.kept)
    }

    fn mask(&self) -> Option<&Change<'_, A>> {
        self.dropout.as_ref().map(|dropout| &*dropout.mask)
    }
}

/// A layer: `weight` `(outer, inner)`.
pub(crate) struct Layer<'a, A> {
    pub weight: Values<'a, A>,
    pub outer: usize,
    pub bias: Option<&'a [A]>,
    pub adapter: Option<Adapter<'a, A>>,
}

/// How `x` by a weight is multiplied.
pub(crate) fn kind_of<A>(x: Values<A>, weight: Values<A>) -> Kind {
    match (x, weight) {
        (Values::Bf16(_), Values::Bf16(_)) => Kind::for_bf16(),
        _ => Kind::Plain,
    }
}

/// A left side, packed once for each kind that asks for it.
struct Packs<'a, A> {
    rows: usize,
    depth: usize,
    values: Values<'a, A>,
    packed: Vec<(Kind, Lhs<A>)>,
}

impl<'a, A: Real> Packs<'a, A> {
    fn new(rows: usize, depth: usize, values: Values<'a, A>) -> Self {
        Packs { rows, depth, values, packed: Vec::new() }
    }

    fn add(&mut self, kind: Kind) {
        if self.packed.iter().all(|(packed, _)| *packed != kind) {
            let operand = Operand::lines(self.values, self.depth);
            self.packed.push((kind, Lhs::pack(kind, self.rows, self.depth, operand, None)));
        }
    }

    /// The one that was added for `kind`.
    fn get(&self, kind: Kind) -> &Lhs<A> {
        let found = self.packed.iter().find(|(packed, _)| *packed == kind);
        &found.unwrap_or_else(|| unreachable!("packed for {kind:?} before")).1
    }
}

/// Splits numbers into the nearest bf16 and the nearest bf16 to what that leaves.
#[inline(always)]
fn split<A: Real>(value: A) -> (bf16, bf16) {
    let mut high = [bf16::ZERO];
    bf16::narrow(&[value.to_f32()], &mut high);
    let mut wide = [0f32];
    bf16::widen(&high, &mut wide);
    let mut low = [bf16::ZERO];
    bf16::narrow(&[value.to_f32() - wide[0]], &mut low);
    (high[0], low[0])
}

/// Which part of its numbers a bf16 copy of a matrix holds.
#[derive(Clone, Copy)]
enum Part {
    High,
    Low,
}

/// A narrow matrix `(lines, width)` as it takes part in products: itself, or bf16 copies beside each
/// other in every line, `(lines, parts · width)`.
enum Factor<'a, A> {
    Plain(&'a [A]),
    Split(Vec<bf16>),
}

impl<'a, A: Real> Factor<'a, A> {
    fn new(kind: Kind, matrix: &'a [A], width: usize, scale: A, parts: &[Part]) -> Self {
        if !kind.is_bf16() {
            return Factor::Plain(matrix);
        }
        let lines = matrix.len() / width.max(1);
        let mut copies = vec![bf16::ZERO; lines * parts.len() * width];
        let line = (parts.len() * width).max(1);
        let block = rows_per_task(line);
        for_each_chunk(
            &mut copies,
            block * line,
            #[inline(always)]
            |index, copies| {
                let matrix = matrix[index * block * width..].chunks_exact(width.max(1));
                for (copies, numbers) in copies.chunks_exact_mut(line).zip(matrix) {
                    for (part, copy) in parts.iter().zip(copies.chunks_exact_mut(width)) {
                        for (copy, number) in copy.iter_mut().zip(numbers) {
                            let (high, low) = split(*number * scale);
                            *copy = match part {
                                Part::High => high,
                                Part::Low => low,
                            };
                        }
                    }
                }
            },
        );
        Factor::Split(copies)
    }

    fn values(&self) -> Values<'_, A> {
        match self {
            Factor::Plain(matrix) => Values::Native(matrix),
            Factor::Split(copies) => Values::Bf16(copies),
        }
    }
}

const BOTH: &[Part] = &[Part::High, Part::Low];
/// With [`LEFT`] beside it: `high·high + low·high + high·low`.
const RIGHT: &[Part] = &[Part::High, Part::High, Part::Low];
const LEFT: &[Part] = &[Part::High, Part::Low, Part::High];

/// A product with a narrow matrix of an adapter, `rank` wide, whose two bf16 halves are columns (or
/// rows) beside each other in one result, `2·rank` wide, or terms of a sum when that is too wide for
/// one task.
#[derive(Clone, Copy)]
struct Halves {
    rank: usize,
    /// Widths that follow one another in the result.
    beside: usize,
    terms: usize,
}

impl Halves {
    fn new(kind: Kind, rank: usize) -> Self {
        match kind.is_bf16() {
            false => Halves { rank, beside: 1, terms: 1 },
            true if 2 * rank <= 32 => Halves { rank, beside: 2, terms: 1 },
            true => Halves { rank, beside: 1, terms: 2 },
        }
    }

    fn width(self) -> usize {
        self.rank * self.beside
    }

    /// The operand of term `term` in a matrix whose lines lie `along_depth` and hold both halves.
    fn columns<A: Real>(self, values: Values<'_, A>, term: usize) -> Operand<'_, A> {
        Operand {
            values,
            start: term * self.rank,
            stride: self.rank * self.beside.max(self.terms),
            along_depth: false,
        }
    }

    /// Adds the halves of a row up.
    #[inline(always)]
    fn sum<A: Real>(self, sums: &[A], column: usize) -> A {
        match self.beside {
            1 => sums[column],
            _ => sums[column] + sums[self.rank + column],
        }
    }
}

/// `y = x·Wᵀ + bias + scale·(dropout(x)·a)·b` for every layer: `x` `(rows, inner)`, `ys`
/// `(rows, outer)`, `xas` `(rows, rank)` where there is an adapter, else empty.
pub(crate) fn forward<T: Element>(
    rows: usize,
    inner: usize,
    x: Values<T::Acc>,
    layers: &[Layer<T::Acc>],
    ys: &mut [&mut [T]],
    xas: &mut [Vec<T::Acc>],
) {
    if rows <= FEW_ROWS {
        return forward_few(rows, inner, x, layers, ys, xas);
    }
    let mut packs = Packs::new(rows, inner, x);
    layers.iter().for_each(|layer| packs.add(kind_of(x, layer.weight)));
    project(rows, inner, x, &packs, layers, xas);
    let paths: Vec<_> = layers
        .iter()
        .zip(xas.iter())
        .map(|(layer, xa)| {
            let adapter = layer.adapter.as_ref().filter(|adapter| adapter.rank > 0)?;
            let kind = kind_of(x, layer.weight);
            let left = low_rank_left(kind, rows, xa, adapter.rank, adapter.scale);
            // One line, so that the parts follow each other along the depth.
            let right = Factor::new(kind, adapter.b, adapter.b.len(), T::Acc::ONE, RIGHT);
            Some((left, right))
        })
        .collect();
    let terms: Vec<Vec<Term<T::Acc>>> = layers
        .iter()
        .zip(&paths)
        .map(|(layer, path)| {
            let lhs = packs.get(kind_of(x, layer.weight));
            let mut terms = vec![Term { lhs, rhs: Operand::lines(layer.weight, inner) }];
            if let Some((left, right)) = path {
                terms.push(Term { lhs: left, rhs: Operand::columns(right.values(), layer.outer) });
            }
            terms
        })
        .collect();
    let targets: Vec<_> = ys.iter_mut().map(|y| Disjoint::new(y)).collect();
    let finishes: Vec<_> = layers
        .iter()
        .zip(&targets)
        .map(|(layer, target)| {
            move |block: Block<T::Acc>| store(block, layer.outer, layer.bias, target)
        })
        .collect();
    let jobs: Vec<_> = layers
        .iter()
        .zip(terms.iter().zip(&finishes))
        .map(|(layer, (terms, finish))| Job { rows, columns: layer.outer, terms, finish })
        .collect();
    products(&jobs);
}

/// The left side of the low-rank term, `(rows, rank)` times `scale`.
fn low_rank_left<A: Real>(kind: Kind, rows: usize, left: &[A], rank: usize, scale: A) -> Lhs<A> {
    let factor = Factor::new(kind, left, rank, scale, LEFT);
    let depth = if kind.is_bf16() { LEFT.len() * rank } else { rank };
    let multiply = |_: usize, row: &mut [A]| row.iter_mut().for_each(|left| *left *= scale);
    let change = (!kind.is_bf16()).then_some(&multiply as &Change<A>);
    Lhs::pack(kind, rows, depth, Operand::lines(factor.values(), depth), change)
}

/// Rounds a part of a result, with the bias, to its place.
fn store<T: Element>(
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

/// `xa = kept·mask(x)·a` for the layers with an adapter.
fn project<A: Real>(
    rows: usize,
    inner: usize,
    x: Values<A>,
    packs: &Packs<A>,
    layers: &[Layer<A>],
    xas: &mut [Vec<A>],
) {
    struct Prepared<'a, A> {
        masked: Option<Lhs<A>>,
        kind: Kind,
        halves: Halves,
        factor: Factor<'a, A>,
        kept: A,
    }
    let prepared: Vec<_> = layers
        .iter()
        .map(|layer| {
            let adapter = layer.adapter.as_ref().filter(|adapter| adapter.rank > 0)?;
            let kind = kind_of(x, layer.weight);
            let masked = adapter
                .mask()
                .map(|mask| Lhs::pack(kind, rows, inner, Operand::lines(x, inner), Some(mask)));
            Some(Prepared {
                masked,
                kind,
                halves: Halves::new(kind, adapter.rank),
                factor: Factor::new(kind, adapter.a, adapter.rank, A::ONE, BOTH),
                kept: adapter.kept(),
            })
        })
        .collect();
    let targets: Vec<_> = xas.iter_mut().map(|xa| Disjoint::new(xa)).collect();
    let prepared: Vec<_> = prepared
        .iter()
        .zip(&targets)
        .filter_map(|(prepared, target)| Some((prepared.as_ref()?, target)))
        .collect();
    let terms: Vec<Vec<Term<A>>> = prepared
        .iter()
        .map(|(prepared, _)| {
            let lhs = prepared.masked.as_ref().unwrap_or_else(|| packs.get(prepared.kind));
            let rhs = |term| prepared.halves.columns(prepared.factor.values(), term);
            (0..prepared.halves.terms).map(|term| Term { lhs, rhs: rhs(term) }).collect()
        })
        .collect();
    let finishes: Vec<_> = prepared
        .iter()
        .map(|(prepared, target)| store_halves(prepared.halves, prepared.kept, target))
        .collect();
    let jobs: Vec<_> = prepared
        .iter()
        .zip(terms.iter().zip(&finishes))
        .map(|((prepared, _), (terms, finish))| Job {
            rows,
            columns: prepared.halves.width(),
            terms,
            finish,
        })
        .collect();
    products(&jobs);
}

/// Writes a narrow result `(rows, rank)` times `factor`.
fn store_halves<'a, A: Real>(
    halves: Halves,
    factor: A,
    target: &'a Disjoint<'a, A>,
) -> impl Fn(Block<A>) + Sync + 'a {
    move |mut block| {
        let first = block.columns.start;
        let count = block.columns.len() / halves.beside;
        for (row, sums) in block.rows_mut() {
            let start = row * halves.rank + first;
            // SAFETY: every block is a part of the result of its own.
            let out = unsafe { target.slice(start..start + count) };
            for (column, out) in out.iter_mut().enumerate() {
                *out = factor * halves.sum(sums, column);
            }
        }
    }
}

/// Multiplications below which threads cost more than they bring.
const PARALLEL_MULTIPLICATIONS: usize = 32 * 1024;
/// Outputs of one task of a pass over a weight.
const OUTPUTS: usize = 32;
/// Tasks of a pass across a weight, and lines of one at least.
const TASKS_ACROSS: usize = 16;
const LINES: usize = 64;

fn forward_few<T: Element>(
    rows: usize,
    inner: usize,
    x: Values<T::Acc>,
    layers: &[Layer<T::Acc>],
    ys: &mut [&mut [T]],
    xas: &mut [Vec<T::Acc>],
) {
    let mut scratch = Scratch::new(rows * inner);
    let x = widened(x, &mut scratch);
    for (layer, xa) in layers.iter().zip(xas.iter_mut()) {
        let Some(adapter) = &layer.adapter else { continue };
        let a = Values::Native(adapter.a);
        match &adapter.dropout {
            None => combine(rows, inner, x, a, adapter.rank, xa),
            Some(dropout) => {
                let mut dropped = Scratch::new(x.len());
                dropped.copy_from_slice(x);
                (dropout.mask)(0, &mut dropped);
                combine(rows, inner, &dropped, a, adapter.rank, xa);
                xa.iter_mut().for_each(|xa| *xa *= dropout.kept);
            }
        }
    }
    let targets: Vec<_> = ys.iter_mut().map(|y| Disjoint::new(y)).collect();
    let tasks = |layer: &Layer<T::Acc>| layer.outer.div_ceil(OUTPUTS);
    let total: usize = layers.iter().map(|layer| layer.outer).sum();
    let parallel = rows * inner * total > PARALLEL_MULTIPLICATIONS;
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
            let layer = &layers[index];
            let outputs = task * OUTPUTS..(task * OUTPUTS + OUTPUTS).min(layer.outer);
            let count = outputs.len();
            let mut sums = [T::Acc::ZERO; FEW_ROWS * OUTPUTS];
            let sums = &mut sums[..rows * count];
            dots(rows, inner, x, layer.weight, inner, outputs.clone(), sums);
            if let Some(adapter) = &layer.adapter {
                let mut left = [T::Acc::ZERO; 64];
                for row in 0..rows {
                    let sums = &mut sums[row * count..][..count];
                    for first in (0..adapter.rank).step_by(left.len()) {
                        let last = (first + left.len()).min(adapter.rank);
                        let left = &mut left[..last - first];
                        let xa = &xas[index][row * adapter.rank + first..];
                        for (left, xa) in left.iter_mut().zip(xa) {
                            *left = *xa * adapter.scale;
                        }
                        let b = Values::Native(&adapter.b[first * layer.outer..]);
                        let depth = left.len();
                        add_combinations(
                            1,
                            depth,
                            depth,
                            left,
                            b,
                            layer.outer,
                            outputs.clone(),
                            sums,
                        );
                    }
                }
            }
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

/// The numbers as they are computed with.
fn widened<'a, A: Real>(values: Values<'a, A>, scratch: &'a mut [A]) -> &'a [A] {
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
/// summed in their order.
fn combine<A: Real>(
    rows: usize,
    depth: usize,
    x: &[A],
    matrix: Values<A>,
    width: usize,
    out: &mut [A],
) {
    let lines = depth.div_ceil(TASKS_ACROSS).max(LINES);
    let (tasks, count) = (depth.div_ceil(lines), rows * width);
    if tasks <= 1 || depth * count <= PARALLEL_MULTIPLICATIONS {
        out.fill(A::ZERO);
        vectorize(
            #[inline(always)]
            || add_combinations(rows, depth, depth, x, matrix, width, 0..width, out),
        );
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

/// The gradients of one adapter.
pub(crate) struct AdapterGradients<A> {
    /// `(inner, rank)`
    pub da: Vec<A>,
    /// `(rank, outer)`
    pub db: Vec<A>,
}

/// Where a layer's output gradient comes from.
pub(crate) struct Incoming<'a, A> {
    pub dy: Values<'a, A>,
    /// `(rows, rank)` as [`forward`] gave it; empty without an adapter.
    pub xa: &'a [A],
}

/// The gradients of all layers' adapters, and with `dx` their shared input's.
///
/// ```text
/// g  = scale·dy·bᵀ      dx = Σ_layers dy·W + dropout(g·aᵀ)
/// da = dropout(x)ᵀ·g    db = scale·xaᵀ·dy
/// ```
pub(crate) fn backward<T: Element>(
    rows: usize,
    inner: usize,
    x: Option<Values<T::Acc>>,
    layers: &[Layer<T::Acc>],
    incoming: &[Incoming<T::Acc>],
    dx: Option<&mut [T]>,
) -> Vec<Option<AdapterGradients<T::Acc>>> {
    if rows <= FEW_ROWS {
        return backward_few(rows, inner, x, layers, incoming, dx);
    }
    let kinds: Vec<_> =
        layers.iter().zip(incoming).map(|(layer, from)| kind_of(from.dy, layer.weight)).collect();
    let kinds_of = || layers.iter().zip(incoming).zip(&kinds);
    let lefts: Vec<_> = kinds_of()
        .map(|((layer, from), kind)| {
            let operand = Operand::lines(from.dy, layer.outer);
            Lhs::pack(*kind, rows, layer.outer, operand, None)
        })
        .collect();
    let gs = project_gradients(rows, layers, &kinds, &lefts);

    // What the products read: copies of narrow matrices, and x with its dropped elements.
    struct Prepared<'a, A> {
        halves: Halves,
        xa: Vec<Lhs<A>>,
        g: Vec<Lhs<A>>,
        path: Option<Lhs<A>>,
        a: Factor<'a, A>,
        dropped: Option<Vec<A>>,
    }
    let need_dx = dx.is_some();
    let prepared: Vec<_> = kinds_of()
        .zip(&gs)
        .map(|(((layer, from), kind), g)| {
            let adapter = layer.adapter.as_ref()?;
            let (rank, halves) = (adapter.rank, Halves::new(*kind, adapter.rank));
            let transposed = |matrix: &[Sum<T>]| -> Vec<Lhs<Sum<T>>> {
                let factor = Factor::new(*kind, matrix, rank, Sum::<T>::ONE, BOTH);
                (0..halves.terms)
                    .map(|term| {
                        let operand = halves.columns(factor.values(), term);
                        Lhs::pack(*kind, halves.width(), rows, operand, None)
                    })
                    .collect()
            };
            let path = need_dx.then(|| low_rank_left(*kind, rows, g, rank, adapter.kept()));
            let dropped = adapter.mask().zip(x).map(|(mask, x)| {
                let mut dropped = vec![Sum::<T>::ZERO; rows * inner];
                for_each_chunk(
                    &mut dropped,
                    PARALLEL_CHUNK,
                    #[inline(always)]
                    |index, chunk| {
                        x.read(index * PARALLEL_CHUNK, chunk);
                        mask(index * PARALLEL_CHUNK, chunk);
                    },
                );
                dropped
            });
            Some(Prepared {
                halves,
                xa: transposed(from.xa),
                g: transposed(g),
                path,
                a: Factor::new(*kind, adapter.a, rank, Sum::<T>::ONE, RIGHT),
                dropped,
            })
        })
        .collect();
    let mut outputs: Vec<_> = layers
        .iter()
        .map(|layer| {
            let rank = layer.adapter.as_ref()?.rank;
            let da = gradient_of_a(inner * rank, x.is_some());
            Some(AdapterGradients { da, db: buffer(rank * layer.outer) })
        })
        .collect();

    // One loop over all products: dx, and da and db of every adapter.
    let mut dx_terms = Vec::new();
    let mut masked_terms = Vec::new();
    if need_dx {
        for ((layer, left), prepared) in layers.iter().zip(&lefts).zip(&prepared) {
            dx_terms.push(Term { lhs: left, rhs: Operand::columns(layer.weight, inner) });
            let adapter = layer.adapter.as_ref();
            if let Some((prepared, adapter)) = prepared.as_ref().zip(adapter)
                && let Some(path) = &prepared.path
            {
                let width = match &prepared.a {
                    Factor::Plain(_) => adapter.rank,
                    Factor::Split(_) => RIGHT.len() * adapter.rank,
                };
                let term = Term { lhs: path, rhs: Operand::lines(prepared.a.values(), width) };
                match adapter.mask() {
                    None => dx_terms.push(term),
                    Some(mask) => masked_terms.push((term, mask)),
                }
            }
        }
    }
    let mut none = Vec::new();
    let dx_target = Disjoint::new(dx.unwrap_or(&mut none));
    let finish_dx = |block: Block<Sum<T>>| {
        let (rows, columns, stride) = (block.rows.clone(), block.columns.clone(), block.stride);
        for (term, mask) in &masked_terms {
            let mut path = Scratch::new(sum_count(rows.len(), sum_stride(columns.len())));
            let width = sum_stride(columns.len());
            add_terms(&[*term], rows.clone(), columns.clone(), &mut path, width);
            for (row, path) in rows.clone().zip(path.chunks_mut(width)) {
                let path = &mut path[..columns.len()];
                mask(row * inner + columns.start, path);
                let sums = &mut block.sums[(row - rows.start) * stride..];
                for (sum, path) in sums.iter_mut().zip(path) {
                    *sum += *path;
                }
            }
        }
        store(block, inner, None, &dx_target);
    };

    let mut terms = Vec::new();
    let mut finishes: Vec<Finish<Sum<T>>> = Vec::new();
    let mut shapes = Vec::new();
    let parts = layers.iter().zip(incoming).zip(&prepared).zip(&mut outputs);
    for (((layer, from), prepared), output) in parts {
        let (Some(prepared), Some(AdapterGradients { da, db }), Some(adapter)) =
            (prepared, output, &layer.adapter)
        else {
            continue;
        };
        let (halves, rank, outer) = (prepared.halves, adapter.rank, layer.outer);
        let dy = Operand::columns(from.dy, outer);
        terms.push(prepared.xa.iter().map(|lhs| Term { lhs, rhs: dy }).collect::<Vec<_>>());
        shapes.push((halves.width(), outer));
        let db = Disjoint::new(db);
        let scale = adapter.scale;
        finishes.push(Box::new(move |block| {
            add_rows_of_halves(block, halves, |row, columns, sums| {
                let start = row * outer + columns.start;
                // SAFETY: every block is a part of the result of its own.
                let db = unsafe { db.slice(start..start + columns.len()) };
                for (db, sum) in db.iter_mut().zip(sums) {
                    *db = scale * *sum;
                }
            })
        }));
        let Some(x) = x else { continue };
        let x = match &prepared.dropped {
            Some(dropped) => Values::Native(&dropped[..]),
            None => x,
        };
        let operand = Operand::columns(x, inner);
        terms.push(prepared.g.iter().map(|lhs| Term { lhs, rhs: operand }).collect());
        shapes.push((halves.width(), inner));
        let (da, kept) = (Disjoint::new(da), adapter.kept());
        finishes.push(Box::new(move |block| {
            add_rows_of_halves(block, halves, |row, columns, sums| {
                for (column, sum) in columns.zip(sums) {
                    let place = column * rank + row;
                    // SAFETY: every block is a part of the result of its own.
                    let da = unsafe { da.slice(place..place + 1) };
                    da[0] = kept * *sum;
                }
            })
        }));
    }
    let mut jobs: Vec<_> = terms
        .iter()
        .zip(&finishes)
        .zip(&shapes)
        .map(|((terms, finish), (rows, columns))| Job {
            rows: *rows,
            columns: *columns,
            terms,
            finish: &**finish,
        })
        .collect();
    if need_dx {
        jobs.push(Job { rows, columns: inner, terms: &dx_terms, finish: &finish_dx });
    }
    products(&jobs);
    drop(jobs);
    drop(finishes);
    outputs
}

/// What becomes of a part of a result.
type Finish<'a, A> = Box<dyn Fn(Block<A>) + Sync + 'a>;

/// Calls `take(row, columns, sums)` for the rows of a result whose halves are below each other.
fn add_rows_of_halves<A: Real>(
    mut block: Block<A>,
    halves: Halves,
    take: impl Fn(usize, std::ops::Range<usize>, &[A]),
) {
    let columns = block.columns.clone();
    let stride = block.stride;
    if halves.beside == 2 {
        // Both halves are in this block: it is at most 32 rows high.
        let (high, low) = block.sums.split_at_mut(halves.rank * stride);
        for (high, low) in high.iter_mut().zip(low) {
            *high += *low;
        }
        block.rows.end = block.rows.start + halves.rank;
    }
    for (row, sums) in block.rows_mut() {
        take(row, columns.clone(), sums);
    }
}

/// `g = scale·dy·bᵀ` `(rows, rank)` for the layers with an adapter.
fn project_gradients<A: Real>(
    rows: usize,
    layers: &[Layer<A>],
    kinds: &[Kind],
    lefts: &[Lhs<A>],
) -> Vec<Vec<A>> {
    let rank = |layer: &Layer<A>| layer.adapter.as_ref().map_or(0, |adapter| adapter.rank);
    let mut gs: Vec<_> = layers.iter().map(|layer| vec![A::ZERO; rows * rank(layer)]).collect();
    // The halves of b are lines below each other.
    let factors: Vec<_> = layers
        .iter()
        .zip(kinds)
        .map(|(layer, kind)| {
            let adapter = layer.adapter.as_ref()?;
            Some(Factor::new(*kind, adapter.b, adapter.b.len(), A::ONE, BOTH))
        })
        .collect();
    let targets: Vec<_> = gs.iter_mut().map(|g| Disjoint::new(g)).collect();
    let mut terms: Vec<Vec<Term<A>>> = Vec::new();
    let mut shapes = Vec::new();
    let mut finishes = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let (Some(adapter), Some(factor)) = (&layer.adapter, &factors[index]) else { continue };
        let halves = Halves::new(kinds[index], adapter.rank);
        let rhs = |term| Operand {
            values: factor.values(),
            start: term * adapter.b.len(),
            stride: layer.outer,
            along_depth: true,
        };
        let lhs = &lefts[index];
        terms.push((0..halves.terms).map(|term| Term { lhs, rhs: rhs(term) }).collect());
        shapes.push(halves.width());
        finishes.push(store_halves(halves, adapter.scale, &targets[index]));
    }
    let jobs: Vec<_> = terms
        .iter()
        .zip(&finishes)
        .zip(&shapes)
        .map(|((terms, finish), columns)| Job { rows, columns: *columns, terms, finish })
        .collect();
    products(&jobs);
    drop(jobs);
    drop(finishes);
    drop(targets);
    gs
}

fn backward_few<T: Element>(
    rows: usize,
    inner: usize,
    x: Option<Values<T::Acc>>,
    layers: &[Layer<T::Acc>],
    incoming: &[Incoming<T::Acc>],
    dx: Option<&mut [T]>,
) -> Vec<Option<AdapterGradients<T::Acc>>> {
    let mut scratch = Scratch::new(rows * inner);
    let x = x.map(|x| widened(x, &mut scratch));
    let mut total = dx.as_ref().map(|_| Scratch::<T::Acc>::zeros(rows * inner));
    let mut gradients = Vec::new();
    for (layer, from) in layers.iter().zip(incoming) {
        let outer = layer.outer;
        let mut scratch = Scratch::new(rows * outer);
        let dy = widened(from.dy, &mut scratch);
        let mut g = Vec::new();
        gradients.push(layer.adapter.as_ref().map(|adapter| {
            let rank = adapter.rank;
            g = vec![T::Acc::ZERO; rows * rank];
            dots_of_lines(rows, outer, dy, adapter.b, rank, &mut g);
            g.iter_mut().for_each(|g| *g *= adapter.scale);
            let mut da = gradient_of_a(inner * rank, x.is_some());
            if let Some(x) = x {
                let mut dropped = Scratch::new(x.len());
                let x = match &adapter.dropout {
                    None => x,
                    Some(dropout) => {
                        dropped.copy_from_slice(x);
                        (dropout.mask)(0, &mut dropped);
                        dropped.iter_mut().for_each(|x| *x *= dropout.kept);
                        &dropped
                    }
                };
                outer_products(rows, inner, rank, x, &g, T::Acc::ONE, &mut da);
            }
            let mut db = buffer(rank * outer);
            outer_products(rows, rank, outer, from.xa, dy, adapter.scale, &mut db);
            AdapterGradients { da, db }
        }));
        let Some(total) = &mut total else { continue };
        let mut part = Scratch::new(rows * inner);
        combine(rows, outer, dy, layer.weight, inner, &mut part);
        add(total, &part);
        if let Some(adapter) = &layer.adapter {
            dots_of_lines(rows, adapter.rank, &g, adapter.a, inner, &mut part);
            if let Some(dropout) = &adapter.dropout {
                (dropout.mask)(0, &mut part);
                part.iter_mut().for_each(|part| *part *= dropout.kept);
            }
            add(total, &part);
        }
    }
    if let Some((dx, total)) = dx.zip(total) {
        T::narrow(&total, dx);
    }
    gradients
}

/// A buffer for the gradient of A, which stays zero where there is no x.
fn gradient_of_a<A: Real>(count: usize, written: bool) -> Vec<A> {
    if written { buffer(count) } else { vec![A::ZERO; count] }
}

/// `out = x·linesᵀ` for a few rows: `x` `(rows, depth)`, `matrix` `(lines, depth)`.
fn dots_of_lines<A: Real>(
    rows: usize,
    depth: usize,
    x: &[A],
    matrix: &[A],
    lines: usize,
    out: &mut [A],
) {
    let out = Disjoint::new(out);
    let task = OUTPUTS.min(lines.div_ceil(8).max(1));
    let parallel = rows * depth * lines > PARALLEL_MULTIPLICATIONS;
    for_each_index(
        lines.div_ceil(task),
        parallel,
        #[inline(always)]
        |index| {
            let part = index * task..(index * task + task).min(lines);
            let count = part.len();
            let mut sums = [A::ZERO; FEW_ROWS * OUTPUTS];
            let sums = &mut sums[..rows * count];
            dots(rows, depth, x, Values::Native(matrix), depth, part.clone(), sums);
            for row in 0..rows {
                let start = row * lines + part.start;
                // SAFETY: every task writes its own columns of each row.
                let out = unsafe { out.slice(start..start + count) };
                out.copy_from_slice(&sums[row * count..][..count]);
            }
        },
    );
}

fn add<A: Real>(out: &mut [A], addend: &[A]) {
    vectorize(
        #[inline(always)]
        || {
            for (out, addend) in out.iter_mut().zip(addend) {
                *out += *addend;
            }
        },
    );
}

/// `out = scale·leftᵀ·right` for a few rows: `left` `(rows, a)`, `right` `(rows, b)`, `out` `(a, b)`.
fn outer_products<A: Real>(
    rows: usize,
    a: usize,
    b: usize,
    left: &[A],
    right: &[A],
    scale: A,
    out: &mut [A],
) {
    if rows == 0 {
        return out.fill(A::ZERO);
    }
    let block = rows_per_task(b);
    for_each_chunk(
        out,
        block * b,
        #[inline(always)]
        |index, out| {
            for (offset, out) in out.chunks_exact_mut(b).enumerate() {
                let left = |row: usize| left[row * a + index * block + offset] * scale;
                let first = left(0);
                for (out, right) in out.iter_mut().zip(right) {
                    *out = first * *right;
                }
                for row in 1..rows {
                    let left = left(row);
                    for (out, right) in out.iter_mut().zip(&right[row * b..][..b]) {
                        *out += left * *right;
                    }
                }
            }
        },
    );
}

/// `out += leftᵀ·right` with `left` `(rows, a)`, `right` `(rows, b)` and `out` `(a, b)`: the gradient
/// of a weight.
pub(crate) fn add_weight_gradient<A: Real>(
    kind: Kind,
    rows: usize,
    a: usize,
    b: usize,
    left: Values<A>,
    right: Values<A>,
    out: &mut [A],
) {
    let lhs = Lhs::pack(kind, a, rows, Operand::columns(left, a), None);
    let out = Disjoint::new(out);
    let terms = [Term { lhs: &lhs, rhs: Operand::columns(right, b) }];
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
    let terms = [Term { lhs: &lhs, rhs: Operand::columns(weight, inner) }];
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
