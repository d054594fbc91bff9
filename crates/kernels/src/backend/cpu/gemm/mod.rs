//! Matrix products on the CPU, with several terms added up in one pass over the result and a last
//! step that sees every part of it while it is in the cache.
//!
//! ```text
//! result (rows, columns) = Σ_terms lhs (rows, depth) · rhs (depth, columns)
//! ```
//!
//! Left sides are packed once, whole, and may be shared by products; right sides (the weights) stay
//! as they are stored and are packed a block at a time, next to their use. bf16 by bf16 is multiplied
//! as such where the machine can, for not too many rows by lines as they are stored; everything else in the type that
//! sums are kept in, but for products of integers (`integers/`) and of bf16 with packed weights (`block_floats/`). The order
//! of a sum follows from its terms and from whether there are so few rows ([`Kind::takes_lines`]).

#[cfg(target_arch = "x86_64")]
pub(crate) mod block_floats;
pub(crate) mod integers;
mod kernels;
mod pack;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;

use super::element::Real;
#[cfg(target_arch = "x86_64")]
use super::element::Values;
use super::parallel::run;
#[cfg(target_arch = "x86_64")]
use candle_core::DType;
#[cfg(target_arch = "x86_64")]
use kernels::Lines;
use kernels::{PANEL, Panel, SPARE_ROWS};
use metal_candle_cpu::scratch::Scratch;
use std::ops::Range;

pub(crate) use kernels::Kind;
#[cfg(target_arch = "x86_64")]
pub(crate) use kernels::sum_registers;
pub(crate) use pack::{Change, Lhs, Operand, Panels};

/// Rows of a task at most: their packed block stays in the second cache.
const ROWS: usize = 512;
/// Columns of a task. A left side of many blocks comes from beyond the second cache once for every
/// task, so the wider the better, as long as there are tasks for several threads.
const COLUMNS: Range<usize> = 2 * PANEL..6 * PANEL;
/// Columns of a task of few rows beside others of many, which is over soon whatever it is cut into.
const COLUMNS_OF_FEW_ROWS: usize = 8 * PANEL;
/// Tasks of a loop at least, where it is large enough.
const ENOUGH_TASKS: usize = 6;

/// One product of a sum.
#[derive(Clone, Copy)]
pub(crate) enum Term<'a, A> {
    Numbers {
        lhs: &'a Lhs<A>,
        rhs: Operand<'a, A>,
    },
    Integers(integers::Product<'a>),
    #[cfg(target_arch = "x86_64")]
    BlockFloats(block_floats::Product<'a>),
}

/// A part of a result.
pub(crate) struct Block<'a, A> {
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    /// The sums, `stride` numbers to a row.
    pub sums: &'a mut [A],
    pub stride: usize,
}

impl<A> Block<'_, A> {
    /// The sums of each row, with the row's number.
    #[inline(always)]
    pub(crate) fn rows_mut(&mut self) -> impl Iterator<Item = (usize, &mut [A])> {
        let width = self.columns.len();
        self.rows.clone().zip(self.sums.chunks_mut(self.stride).map(move |sums| &mut sums[..width]))
    }
}

/// A product to be computed, and what becomes of it.
pub(crate) struct Job<'a, A> {
    pub rows: usize,
    pub columns: usize,
    pub terms: &'a [Term<'a, A>],
    /// Called once for every part of the result, on any thread.
    pub finish: &'a (dyn Fn(Block<A>) + Sync),
}

/// Rows and columns of a task.
#[derive(Clone, Copy)]
struct Cut {
    rows: usize,
    columns: usize,
}

impl Cut {
    /// The cut of each job of a loop, from their shapes alone.
    fn of_jobs<A>(jobs: &[Job<A>]) -> Vec<Cut> {
        let most_rows = jobs.iter().map(|job| job.rows).max().unwrap_or(0);
        let tall = |job: &&Job<A>| 2 * job.rows > most_rows;
        let blocks = most_rows.div_ceil(ROWS).max(1);
        let total: usize = jobs.iter().filter(tall).map(|job| job.columns * blocks).sum();
        let columns = total.div_ceil(ENOUGH_TASKS).next_multiple_of(PANEL);
        let columns = columns.clamp(COLUMNS.start, COLUMNS.end);
        let tasks =
            |cut: Cut| -> usize { jobs.iter().filter(tall).map(|job| job.tasks(cut)).sum() };
        let mut cut = Cut { rows: most_rows.clamp(1, ROWS), columns };
        while tasks(cut) < ENOUGH_TASKS && cut.columns > PANEL {
            cut.columns -= PANEL;
        }
        while tasks(cut) < ENOUGH_TASKS && cut.rows > 2 * PANEL {
            cut.rows = cut.rows.div_ceil(2).next_multiple_of(PANEL);
        }
        let of_job =
            |job| if tall(&job) { cut } else { Cut { columns: COLUMNS_OF_FEW_ROWS, ..cut } };
        jobs.iter().map(of_job).collect()
    }
}

impl<A> Job<'_, A> {
    fn tasks(&self, cut: Cut) -> usize {
        self.rows.div_ceil(cut.rows) * self.columns.div_ceil(cut.columns)
    }
}

impl<A: Real> Job<'_, A> {
    fn run_task(&self, cut: Cut, task: usize) {
        let across = self.columns.div_ceil(cut.columns);
        let (row, column) = (task / across * cut.rows, task % across * cut.columns);
        let rows = row..(row + cut.rows).min(self.rows);
        let columns = column..(column + cut.columns).min(self.columns);
        let stride = sum_stride(columns.len());
        let mut sums = Scratch::new(sum_count(rows.len(), stride));
        add_terms(self.terms, rows.clone(), columns.clone(), &mut sums, stride);
        (self.finish)(Block { rows, columns, sums: &mut sums, stride });
    }
}

/// Numbers from one row of sums to the next.
pub(crate) fn sum_stride(columns: usize) -> usize {
    columns.next_multiple_of(PANEL)
}

/// Numbers that the sums of so many rows need.
pub(crate) fn sum_count(rows: usize, stride: usize) -> usize {
    (rows + SPARE_ROWS) * stride
}

/// Computes the products in one parallel loop.
pub(crate) fn products<A: Real>(jobs: &[Job<A>]) {
    let cuts = Cut::of_jobs(jobs);
    let parts = || jobs.iter().zip(&cuts);
    run(parts().map(|(job, cut)| job.tasks(*cut)).sum(), |mut task| {
        for (job, cut) in parts() {
            let tasks = job.tasks(*cut);
            if task < tasks {
                return job.run_task(*cut, task);
            }
            task -= tasks;
        }
    });
}

/// `sums = lhs·rhs` for some rows and columns, or added to them when `accumulate`, on this thread.
/// The columns begin with a panel; `sums` has [`sum_count`] numbers, and what is beyond the rows and
/// columns in it is overwritten.
pub(crate) fn multiply<A: Real>(
    lhs: &Lhs<A>,
    rows: Range<usize>,
    rhs: &Panels<A>,
    columns: Range<usize>,
    sums: &mut [A],
    stride: usize,
    accumulate: bool,
) {
    assert!(
        lhs.kind == rhs.kind && lhs.blocks == rhs.blocks && columns.start.is_multiple_of(PANEL)
    );
    assert!(rows.end <= lhs.rows && columns.end <= rhs.lines);
    assert!(sums.len() >= sum_count(rows.len(), stride) && stride >= sum_stride(columns.len()));
    let _configured = lhs.kind.prepare();
    for block in 0..lhs.blocks.count() {
        for line in columns.clone().step_by(PANEL) {
            let panel = Panel {
                words: lhs.blocks.words(block).len(),
                rows: rows.len(),
                lhs: lhs.data[lhs.place(block, rows.start)..].as_ptr(),
                rhs: rhs.data[rhs.place(block, line)..].as_ptr(),
                sums: sums[line - columns.start..].as_mut_ptr(),
                stride,
                first: block == 0 && !accumulate,
            };
            // SAFETY: both sides were packed for this kind and these blocks, the left one with its
            // spare rows; the thread is prepared and the sums have spare rows as asserted.
            unsafe { panel.multiply(lhs.kind) };
        }
    }
    if lhs.blocks.count() == 0 && !accumulate {
        sums.fill(A::ZERO);
    }
}

/// A product by lines of bf16 numbers as they are stored, but for where its sums are, if there are such lines.
#[cfg(target_arch = "x86_64")]
fn lines_of<A: Real>(
    lhs: &Lhs<A>,
    rhs: Operand<A>,
    rows: &Range<usize>,
    columns: &Range<usize>,
) -> Option<Lines> {
    let Values::Bf16(values) = rhs.values else { return None };
    if rows.is_empty() || columns.is_empty() || lhs.depth == 0 {
        return None;
    }
    let first = rhs.start + columns.start * rhs.stride;
    let right = &values[first..first + (columns.len() - 1) * rhs.stride + lhs.depth];
    let left = match &lhs.squares {
        // They are those of all rows, of which there is but one task.
        Some(squares) if *rows == (0..lhs.rows) => squares.as_ptr(),
        Some(_) => return None,
        None => {
            let last_block = lhs.place(lhs.blocks.count() - 1, rows.start);
            assert!(last_block + rows.len() * kernels::STRIDE <= lhs.data.len());
            lhs.data[lhs.place(0, rows.start)..].as_ptr()
        }
    };
    Some(Lines {
        rows: rows.len(),
        columns: columns.len(),
        numbers: lhs.depth,
        lhs: left.cast(),
        block_words: lhs.blocks.words(0).len(),
        block_stride: lhs.place(1, 0),
        rhs: right.as_ptr(),
        line: rhs.stride,
        sums: std::ptr::null_mut(),
        stride: 0,
        first: false,
    })
}

/// Adds a product by lines of bf16 numbers as they are stored, or sets it when `first`, where it is made so. Codes are brought
/// into lines first where the sums are those of panels.
#[cfg(target_arch = "x86_64")]
fn add_lines<A: Real>(
    lhs: &Lhs<A>,
    rhs: Operand<A>,
    rows: &Range<usize>,
    columns: Range<usize>,
    sums: &mut [A],
    stride: usize,
    first: bool,
) -> bool {
    // The number of all rows decides, so that a row's sums don't depend on how rows are cut into tasks.
    if A::DTYPE != DType::F32 || !rhs.along_depth || !lhs.kind.takes_lines(lhs.rows) {
        return false;
    }
    if let Values::Quantized(_) = rhs.values {
        if lhs.kind != Kind::Tiles {
            return false;
        }
        return columns.clone().step_by(PANEL).all(|start| {
            let some = start..columns.end.min(start + PANEL);
            let unpacked = pack::unpack_lines(lhs.kind, rhs, lhs.depth, some.clone());
            let lines = Operand::lines(Values::Bf16(pack::as_bf16_ref(&unpacked)), lhs.depth);
            let sums = &mut sums[start - columns.start..];
            add_lines(lhs, lines, rows, 0..some.len(), sums, stride, first)
        });
    }
    let Some(lines) = lines_of(lhs, rhs, rows, &columns) else { return false };
    assert!(sums.len() + stride > sum_count(rows.len(), stride));
    let lines = Lines { sums: sums.as_mut_ptr().cast(), stride, first, ..lines };
    // SAFETY: the left side was packed for a kind that was found on this machine, with zeros beyond its depth; `lines_of` has
    // looked at both sides, and the sums have spare rows and room for whole panels, as the caller says.
    unsafe { lines.multiply(lhs.kind) };
    true
}

/// Sets a part of the sum of the terms, on this thread. `sums` has [`sum_count`] numbers.
pub(crate) fn add_terms<A: Real>(
    terms: &[Term<A>],
    rows: Range<usize>,
    columns: Range<usize>,
    sums: &mut [A],
    stride: usize,
) {
    assert!(sums.len() >= sum_count(rows.len(), stride) && stride >= sum_stride(columns.len()));
    let mut first = true;
    for term in terms {
        let (lhs, rhs) = match term {
            Term::Numbers { lhs, rhs } => (lhs, rhs),
            Term::Integers(product) => {
                product.add(rows.clone(), columns.clone(), sums, stride, !first);
                first = false;
                continue;
            }
            #[cfg(target_arch = "x86_64")]
            Term::BlockFloats(product) => {
                product.add(rows.clone(), columns.clone(), sums, stride, !first);
                first = false;
                continue;
            }
        };
        assert!(rows.end <= lhs.rows);
        #[cfg(target_arch = "x86_64")]
        if add_lines(lhs, *rhs, &rows, columns.clone(), sums, stride, first) {
            first = false;
            continue;
        }
        for block in 0..lhs.blocks.count() {
            let words = lhs.blocks.words(block);
            let mut panels = Scratch::new(columns.len().next_multiple_of(PANEL) * words.len());
            pack::pack_panels(
                lhs.kind,
                *rhs,
                lhs.depth,
                columns.clone(),
                words.clone(),
                &mut panels,
            );
            let _configured = lhs.kind.prepare();
            let left = &lhs.data[lhs.place(block, rows.start)..];
            for (panel, right) in panels.chunks_exact(words.len() * PANEL).enumerate() {
                let panel = Panel {
                    words: words.len(),
                    rows: rows.len(),
                    lhs: left.as_ptr(),
                    rhs: right.as_ptr(),
                    sums: sums[panel * PANEL..].as_mut_ptr(),
                    stride,
                    first,
                };
                // SAFETY: the left side was packed with its spare rows, for a kind that was found on
                // this machine; the thread is prepared and the sums have spare rows as asserted.
                unsafe { panel.multiply(lhs.kind) };
            }
            first = false;
        }
    }
    if first {
        sums.fill(A::ZERO);
    }
}
