//! LoRA layers on the CPU. Several layers that read the same input share its packing, and in the backward pass
//! the sum of their input gradients. An output is one sum of the large product and the low-rank one.

mod dropout;
mod factors;
mod few_rows;

pub(super) use dropout::{apply, mask};

use crate::backend::cpu::gemm::{Block, Change, Job, Kind, Lhs, Operand, Term};
use crate::backend::cpu::gemm::{add_terms, products, sum_count, sum_stride};
use crate::backend::cpu::{
    Disjoint, Element, PARALLEL_CHUNK, Real, Sum, Values, for_each_chunk, unwritten,
};
use crate::matmul::cpu::{self as matmul, Left, Packs, forward_many, kind_of, store};
use crate::matmul::few_rows::FEW_ROWS;
use factors::{BOTH, Factor, Halves, RIGHT, add_rows_of_halves, low_rank_left, store_halves};
use metal_candle_cpu::scratch::Scratch;

/// Dropout of an adapter's input.
pub(super) struct Dropped<'a, A> {
    /// Sets dropped elements to zero.
    pub mask: Box<Change<'a, A>>,
    /// What the elements that are kept are multiplied by.
    pub kept: A,
}

/// The low-rank path of a layer: `a` `(inner, rank)`, `b` `(rank, outer)`.
pub(super) struct Adapter<'a, A> {
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

/// A layer with or without an adapter.
pub(super) struct Layer<'a, A> {
    pub frozen: matmul::Layer<'a, A>,
    pub adapter: Option<Adapter<'a, A>>,
}

/// The layers without their adapters.
fn frozen<'a, A: Real>(layers: &[Layer<'a, A>]) -> Vec<matmul::Layer<'a, A>> {
    layers.iter().map(|layer| layer.frozen).collect()
}

/// `y = x·Wᵀ + bias + scale·(dropout(x)·a)·b` for every layer: `x` `(rows, inner)`, `ys`
/// `(rows, outer)`, `xas` `(rows, rank)` where there is an adapter, else empty. `few` says whether a few rows may be
/// multiplied by a pass over each matrix as it lies.
pub(super) fn forward<T: Element>(
    (rows, inner): (usize, usize),
    x: Values<T::Acc>,
    layers: &[Layer<T::Acc>],
    few: bool,
    ys: &mut [&mut [T]],
    xas: &mut [Vec<T::Acc>],
) {
    if few && rows <= FEW_ROWS {
        return few_rows::forward(rows, inner, x, layers, ys, xas);
    }
    let frozen = frozen(layers);
    let reads_numbers = |index: usize| {
        let adapter = layers[index].adapter.as_ref();
        adapter.is_some_and(|adapter| adapter.rank > 0 && adapter.dropout.is_none())
    };
    let packs = Packs::new(rows, inner, x, &frozen, reads_numbers);
    project(rows, inner, x, &packs, layers, xas);
    let paths: Vec<_> = layers
        .iter()
        .zip(xas.iter())
        .map(|(layer, xa)| {
            let adapter = layer.adapter.as_ref().filter(|adapter| adapter.rank > 0)?;
            let kind = kind_of(x, layer.frozen.weight);
            let left = low_rank_left(kind, rows, xa, adapter.rank, adapter.scale);
            // One line, so that the parts follow each other along the depth.
            let right = Factor::new(kind, adapter.b, adapter.b.len(), T::Acc::ONE, RIGHT);
            Some((left, right))
        })
        .collect();
    let added: Vec<_> = frozen
        .iter()
        .zip(&paths)
        .map(|(layer, path)| {
            let (lhs, right) = path.as_ref()?;
            Some(Term::Numbers { lhs, rhs: Operand::columns(right.values(), layer.outer) })
        })
        .collect();
    forward_many(&packs, &frozen, &added, ys);
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
            let kind = kind_of(x, layer.frozen.weight);
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
            (0..prepared.halves.terms).map(|term| Term::Numbers { lhs, rhs: rhs(term) }).collect()
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

/// The gradients of one adapter.
pub(super) struct AdapterGradients<A> {
    /// `(inner, rank)`
    pub da: Vec<A>,
    /// `(rank, outer)`
    pub db: Vec<A>,
}

/// Where a layer's output gradient comes from.
pub(super) struct Incoming<'a, A> {
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
pub(super) fn backward<T: Element>(
    rows: usize,
    inner: usize,
    x: Values<T::Acc>,
    layers: &[Layer<T::Acc>],
    incoming: &[Incoming<T::Acc>],
    dx: Option<&mut [T]>,
) -> Vec<Option<AdapterGradients<T::Acc>>> {
    if rows <= FEW_ROWS {
        return few_rows::backward(rows, inner, x, layers, incoming, dx);
    }
    let kinds: Vec<_> = layers
        .iter()
        .zip(incoming)
        .map(|(layer, from)| kind_of(from.dy, layer.frozen.weight))
        .collect();
    let kinds_of = || layers.iter().zip(incoming).zip(&kinds);
    // As the products with the weights read them, and with the adapters where that is another way.
    let lefts: Vec<_> = layers
        .iter()
        .zip(incoming)
        .map(|(layer, from)| {
            let frozen = layer.frozen;
            let needed = dx.is_some() || frozen.weight.byte_rows().is_none();
            needed.then(|| Left::pack(rows, frozen.outer, from.dy, frozen.weight))
        })
        .collect();
    let of_adapters: Vec<_> = kinds_of()
        .zip(&lefts)
        .map(|(((layer, from), kind), left)| {
            let operand = Operand::lines(from.dy, layer.frozen.outer);
            let needed = layer.adapter.is_some() && !matches!(left, Some(Left::Numbers(_)));
            needed.then(|| Lhs::pack(*kind, rows, layer.frozen.outer, operand, None))
        })
        .collect();
    let of_adapters: Vec<Option<&Lhs<_>>> = lefts
        .iter()
        .zip(&of_adapters)
        .map(|(left, own)| match left {
            Some(Left::Numbers(left)) => Some(left),
            _ => own.as_ref(),
        })
        .collect();
    let gs = project_gradients(rows, layers, &kinds, &of_adapters);

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
            let dropped = adapter.mask().map(|mask| {
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
            let (da, db) = (unwritten(inner * rank), unwritten(rank * layer.frozen.outer));
            Some(AdapterGradients { da, db })
        })
        .collect();

    // One loop over all products: dx, and da and db of every adapter.
    let mut dx_terms = Vec::new();
    let mut masked_terms = Vec::new();
    if need_dx {
        for ((layer, left), prepared) in layers.iter().zip(&lefts).zip(&prepared) {
            dx_terms.extend(left.as_ref().map(|left| left.term(layer.frozen.weight, inner)));
            let adapter = layer.adapter.as_ref();
            if let Some((prepared, adapter)) = prepared.as_ref().zip(adapter)
                && let Some(path) = &prepared.path
            {
                let width = match &prepared.a {
                    Factor::Plain(_) => adapter.rank,
                    Factor::Split(_) => RIGHT.len() * adapter.rank,
                };
                let term =
                    Term::Numbers { lhs: path, rhs: Operand::lines(prepared.a.values(), width) };
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
        let (halves, rank, outer) = (prepared.halves, adapter.rank, layer.frozen.outer);
        let dy = Operand::columns(from.dy, outer);
        terms
            .push(prepared.xa.iter().map(|lhs| Term::Numbers { lhs, rhs: dy }).collect::<Vec<_>>());
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
        let x = match &prepared.dropped {
            Some(dropped) => Values::Native(&dropped[..]),
            None => x,
        };
        let operand = Operand::columns(x, inner);
        terms.push(prepared.g.iter().map(|lhs| Term::Numbers { lhs, rhs: operand }).collect());
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

/// `g = scale·dy·bᵀ` `(rows, rank)` for the layers with an adapter.
fn project_gradients<A: Real>(
    rows: usize,
    layers: &[Layer<A>],
    kinds: &[Kind],
    lefts: &[Option<&Lhs<A>>],
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
        let (Some(adapter), Some(factor), Some(lhs)) =
            (&layer.adapter, &factors[index], lefts[index])
        else {
            continue;
        };
        let halves = Halves::new(kinds[index], adapter.rank);
        let rhs = |term| Operand {
            values: factor.values(),
            start: term * adapter.b.len(),
            stride: layer.frozen.outer,
            along_depth: true,
        };
        terms.push((0..halves.terms).map(|term| Term::Numbers { lhs, rhs: rhs(term) }).collect());
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
