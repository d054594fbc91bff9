//! Products that have the rank of an adapter as a side: own kernels where they fit, cuBLAS elsewhere.
//!
//! The kernels read or write each large matrix once; see `kernel.cu`. What their blocks found is added
//! up by a launch for several products, when [`Skinny::finish`] says so.

use super::cuda::copy_gradients;
use crate::backend::cuda::{Array, Cuda, Matrix, Module, by_dtype, module};
use crate::matmul::cuda::write_bias;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, bail};

static MODULE: Module = module!("skinny");

const THREADS: usize = 256;

/// Columns of a tile of the large matrix, for `down` and `both`.
const COLUMNS: usize = 64;

/// A tile for `gradient`.
const GRADIENT_ROWS: usize = 128;
const GRADIENT_COLUMNS: usize = 128;

/// A tile of the result of `up`.
const UP_ROWS: usize = 128;
const UP_COLUMNS: usize = 128;

/// The rank that a tile of the kernels has, and the largest.
const TILE: usize = 16;
const MOST_RANKS: usize = 64;

/// Fewer rows are for cuBLAS.
const FEWEST_ROWS: usize = 64;

/// Sums of one launch.
const MOST: usize = 8;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Pass {
    x: u64,
    factor: u64,
    left: u64,
    down: u64,
    gradient: u64,
    x_stride: i64,
    factor_stride: i64,
    left_stride: i64,
    rows: i32,
    wide: i32,
    rank: i32,
    unused: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Up {
    left: u64,
    factor: u64,
    bias: u64,
    out: u64,
    left_stride: i64,
    factor_stride: i64,
    rows: i32,
    wide: i32,
    rank: i32,
    alpha: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sum {
    from: u64,
    to: u64,
    slot_stride: i64,
    row_stride: i64,
    column_stride: i64,
    slots: i32,
    rows: i32,
    columns: i32,
    pitch: i32,
    alpha: f32,
    single: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sums {
    at: [Sum; MOST],
}

// SAFETY: they are plain numbers, laid out as the kernels declare them.
unsafe impl DeviceRepr for Pass {}
// SAFETY: as above.
unsafe impl DeviceRepr for Up {}
// SAFETY: as above.
unsafe impl DeviceRepr for Sums {}

/// The kernel of this name for a rank and a dtype.
macro_rules! of_rank {
    ($one:literal, $two:literal, $three:literal, $four:literal, $tiles:expr, $dtype:expr) => {
        match $tiles {
            1 => by_dtype!($one, $dtype)?,
            2 => by_dtype!($two, $dtype)?,
            3 => by_dtype!($three, $dtype)?,
            _ => by_dtype!($four, $dtype)?,
        }
    };
}

/// What a pass over a large matrix makes.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Down,
    Gradient,
    Both,
}

impl Kind {
    /// Threads of a block, as the kernel has them.
    fn threads(self, tiles: usize) -> usize {
        if self == Kind::Both && tiles == 1 { 512 } else { THREADS }
    }

    /// Rows of a tile of the large matrix: a thread has one.
    fn rows(self, tiles: usize) -> usize {
        if self == Kind::Gradient { GRADIENT_ROWS } else { self.threads(tiles) }
    }
}

/// Where the terms of sums lie, and how many a sum has.
#[derive(Clone, Copy)]
struct Terms {
    pointer: u64,
    slots: usize,
}

/// The products of one operation.
pub(super) struct Skinny<'a> {
    cuda: &'a Cuda<'a>,
    dtype: DType,
    /// Whether the kernels are made for the dtype and the number of rows.
    fits: bool,
    multiprocessors: usize,
    /// Bytes of shared memory that a block may have, and that kernels were made for.
    shared: (usize, usize),
    sums: Vec<Sum>,
    /// What the sums are to be made of.
    memory: Vec<Array>,
}

impl<'a> Skinny<'a> {
    pub(super) fn new(cuda: &'a Cuda<'a>, dtype: DType, rows: usize) -> Result<Self> {
        let context = cuda.stream.context();
        let (major, _) = context.compute_capability().w()?;
        let made_for = if major >= 9 { 227 << 10 } else { 163 << 10 };
        Ok(Skinny {
            cuda,
            dtype,
            fits: dtype != DType::F32 && rows >= FEWEST_ROWS,
            multiprocessors: cuda.multiprocessors()?,
            shared: (cuda.most_shared_memory()?, made_for),
            sums: Vec::new(),
            memory: Vec::new(),
        })
    }

    /// `to = alpha·x·factorᵀ`: `x` `(rows, wide)`, `factor` `(rank, wide)`, `to` `(rows, rank)`, which is
    /// there after [`Skinny::finish`].
    pub(super) fn down(
        &mut self,
        x: Matrix,
        [rows, wide]: [usize; 2],
        (factor, rank): (Matrix, usize),
        alpha: f64,
        to: Matrix,
    ) -> Result<()> {
        if !self.takes(Kind::Down, rank, wide, &[x, factor]) {
            return self.cuda.gemm([rows, rank, wide], alpha, (x, factor.t()), 0.0, to);
        }
        let pass = Pass {
            x: x.pointer,
            factor: factor.pointer,
            x_stride: x.stride as i64,
            factor_stride: factor.stride as i64,
            ..Default::default()
        };
        let (down, _) = self.launch(Kind::Down, pass, [rows, wide, rank])?;
        self.add_down(down, [rows, rank], alpha, to)
    }

    /// Rows of `leftᵀ·x`, times `alpha` and transposed, for each `(first row, number, result)`: `x`
    /// `(rows, wide)`, `left` `(rows, rank)`, a result `(wide, number)` in f32, which is there after
    /// [`Skinny::finish`].
    pub(super) fn gradient(
        &mut self,
        x: Matrix,
        [rows, wide]: [usize; 2],
        (left, rank): (Matrix, usize),
        alpha: f64,
        parts: &[(usize, usize, &Array)],
    ) -> Result<()> {
        if !self.takes(Kind::Gradient, rank, wide, &[x, left]) {
            if let [(0, number, to)] = parts
                && *number == rank
            {
                let to = Matrix::of(to, rank);
                return self.cuda.gemm([wide, rank, rows], alpha, (x.t(), left), 0.0, to);
            }
            let all = self.cuda.empty((wide, rank), DType::F32)?;
            let to = Matrix::of(&all, rank);
            self.cuda.gemm([wide, rank, rows], alpha, (x.t(), left), 0.0, to)?;
            return copy_gradients(self.cuda, to, wide, parts);
        }
        let pass = Pass {
            x: x.pointer,
            left: left.pointer,
            x_stride: x.stride as i64,
            left_stride: left.stride as i64,
            ..Default::default()
        };
        let (_, gradient) = self.launch(Kind::Gradient, pass, [rows, wide, rank])?;
        let Some(terms) = gradient else { return Ok(()) };
        for (first, number, to) in parts {
            let distances = (1, *number);
            self.add_gradient((terms, rank), (*first, *number, wide), alpha, to, distances)?;
        }
        Ok(())
    }

    /// `down` to `to.0` and `to.1 = alpha·leftᵀ·x` `(rank, wide)` in f32, of one reading of `x`; there
    /// after [`Skinny::finish`].
    pub(super) fn both(
        &mut self,
        x: Matrix,
        [rows, wide]: [usize; 2],
        (factor, rank): (Matrix, usize),
        left: Matrix,
        alpha: f64,
        (down_to, gradient_to): (Matrix, &Array),
    ) -> Result<()> {
        if !self.takes(Kind::Both, rank, wide, &[x, factor, left]) {
            self.cuda.gemm([rows, rank, wide], alpha, (x, factor.t()), 0.0, down_to)?;
            let to = Matrix::of(gradient_to, wide);
            return self.cuda.gemm([rank, wide, rows], alpha, (left.t(), x), 0.0, to);
        }
        let pass = Pass {
            x: x.pointer,
            factor: factor.pointer,
            left: left.pointer,
            x_stride: x.stride as i64,
            factor_stride: factor.stride as i64,
            left_stride: left.stride as i64,
            ..Default::default()
        };
        let (down, gradient) = self.launch(Kind::Both, pass, [rows, wide, rank])?;
        if let Some(terms) = gradient {
            let from = (terms, rank);
            self.add_gradient(from, (0, rank, wide), alpha, gradient_to, (wide, 1))?;
        }
        self.add_down(down, [rows, rank], alpha, down_to)
    }

    /// `out = alpha·left·factor + bias`: `left` `(rows, rank)`, `factor` `(rank, wide)`, `out`
    /// `(rows, wide)`, there at once.
    pub(super) fn up(
        &self,
        left: Matrix,
        (factor, rank): (Matrix, usize),
        bias: Option<&Array>,
        alpha: f64,
        (out, [rows, wide]): (&Array, [usize; 2]),
    ) -> Result<()> {
        let tiles = rank.div_ceil(TILE);
        let row = |columns: usize| 2 * columns + 16;
        let shared = UP_ROWS * row(TILE * tiles) + (TILE * tiles + UP_ROWS) * row(UP_COLUMNS);
        let down = rows.div_ceil(UP_ROWS);
        let fits = self.takes_matrices(rank, wide, &[left, factor]);
        if !fits || shared > self.shared.0 || down > usize::from(u16::MAX) {
            let mut beta = 0.0;
            if let Some(bias) = bias {
                write_bias(self.cuda, bias, out, rows, wide)?;
                beta = 1.0;
            }
            let to = Matrix::of(out, wide);
            return self.cuda.gemm([rows, wide, rank], alpha, (left, factor), beta, to);
        }
        let up = Up {
            left: left.pointer,
            factor: factor.pointer,
            bias: bias.map_or(0, |bias| bias.pointer),
            out: out.pointer,
            left_stride: left.stride as i64,
            factor_stride: factor.stride as i64,
            rows: size(rows)?,
            wide: size(wide)?,
            rank: size(rank)?,
            alpha: alpha as f32,
        };
        let name = of_rank!("up_1", "up_2", "up_3", "up_4", tiles, self.dtype);
        let grid = (wide.div_ceil(UP_COLUMNS) as u32, down as u32, 1);
        let launch =
            MODULE.launch(self.cuda, name, grid, THREADS as u32, shared as u32)?.overlapping();
        // SAFETY: as the kernel declares it; the caller holds what the pointers point into.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&up);
            })
        }
    }

    /// Adds up what the products so far left to be.
    pub(super) fn finish(&mut self) -> Result<()> {
        add_up(self.cuda, self.multiprocessors, self.dtype, &self.sums)?;
        self.sums.clear();
        self.memory.clear();
        Ok(())
    }

    fn takes_matrices(&self, rank: usize, wide: usize, matrices: &[Matrix]) -> bool {
        self.fits
            && (8..=MOST_RANKS).contains(&rank)
            && rank.is_multiple_of(8)
            && wide > 0
            && wide.is_multiple_of(8)
            && matrices.iter().all(|matrix| matrix.dtype == self.dtype && matrix.has_aligned_rows())
    }

    fn takes(&self, kind: Kind, rank: usize, wide: usize, matrices: &[Matrix]) -> bool {
        self.takes_matrices(rank, wide, matrices)
            && self.shared_memory(kind, rank.div_ceil(TILE)) <= self.shared.0
    }

    /// Shared memory of a pass, as the kernel lays it out.
    fn shared_memory(&self, kind: Kind, tiles: usize) -> usize {
        let ranks = TILE * tiles;
        let padded = 2 * ranks + 16;
        if kind == Kind::Gradient {
            let sums = ranks * GRADIENT_COLUMNS * size_of::<f32>();
            let stage = GRADIENT_ROWS * (2 * GRADIENT_COLUMNS + padded);
            return sums + ((self.shared.1 - sums) / stage).min(4) * stage;
        }
        let rows = kind.rows(tiles);
        let kept = match kind {
            Kind::Both => {
                let left = rows * if tiles <= 3 { 2 * ranks } else { padded };
                left + 2 * ranks * COLUMNS * size_of::<f32>()
            }
            _ => 0,
        };
        let stage = (rows + ranks) * COLUMNS * 2;
        if kept + 3 * stage <= self.shared.1 { kept + 3 * stage } else { kept + 2 * stage }
    }

    /// Runs a pass; what is to be added up for `down` and for `gradient`.
    fn launch(
        &mut self,
        kind: Kind,
        mut pass: Pass,
        [rows, wide, rank]: [usize; 3],
    ) -> Result<(Option<Terms>, Option<Terms>)> {
        let tiles = rank.div_ceil(TILE);
        let ranks = tiles * TILE;
        let (x, y) = self.grid(kind, rows, wide, tiles);
        (pass.rows, pass.wide, pass.rank) = (size(rows)?, size(wide)?, size(rank)?);
        let mut take = |slots: usize, elements: usize| -> Result<Terms> {
            let memory = self.cuda.empty(slots * elements, DType::F32)?;
            let pointer = memory.pointer;
            self.memory.push(memory);
            Ok(Terms { pointer, slots })
        };
        let (mut down, mut gradient) = (None, None);
        if kind != Kind::Gradient {
            let terms = take(y, rows * ranks)?;
            pass.down = terms.pointer;
            down = Some(terms);
        }
        if kind != Kind::Down {
            let terms = take(x, ranks * wide)?;
            pass.gradient = terms.pointer;
            gradient = Some(terms);
        }
        let name = match kind {
            Kind::Down => of_rank!("down_1", "down_2", "down_3", "down_4", tiles, self.dtype),
            Kind::Gradient => {
                of_rank!("gradient_1", "gradient_2", "gradient_3", "gradient_4", tiles, self.dtype)
            }
            Kind::Both => of_rank!("both_1", "both_2", "both_3", "both_4", tiles, self.dtype),
        };
        let shared = self.shared_memory(kind, tiles) as u32;
        let grid = (x as u32, y as u32, 1);
        let threads = kind.threads(tiles) as u32;
        let launch = MODULE.launch(self.cuda, name, grid, threads, shared)?.overlapping();
        // SAFETY: as the kernel declares it; the caller holds what the pointers point into, and the terms
        // are kept until they are added up.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&pass);
            })?;
        }
        Ok((down, gradient))
    }

    /// How many blocks share the tiles of rows, and those of columns, of which there are so many: what
    /// takes the shortest.
    fn grid(&self, kind: Kind, rows: usize, wide: usize, tiles: usize) -> (usize, usize) {
        let most = self.multiprocessors;
        let row_tiles = rows.div_ceil(kind.rows(tiles));
        // In quarters of what a tile takes; a block takes about one to start and to write its result.
        if kind == Kind::Gradient {
            let column_tiles = wide.div_ceil(GRADIENT_COLUMNS);
            let time = |(x, y): &(usize, usize)| {
                let columns = column_tiles.div_ceil(*y);
                4 + columns * (4 * row_tiles.div_ceil(*x) + 1 + tiles)
            };
            let choices =
                (1..=row_tiles.clamp(1, 16)).map(|x| (x, (most / x).clamp(1, column_tiles)));
            return choices.min_by_key(time).unwrap_or((1, 1));
        }
        let column_tiles = wide.div_ceil(COLUMNS);
        let time = |y: &usize| (row_tiles * y).div_ceil(most) * (column_tiles.div_ceil(*y) + 1);
        let choices = 1..=(2 * most / row_tiles).clamp(1, column_tiles);
        (row_tiles, choices.min_by_key(time).unwrap_or(1))
    }

    fn add_down(
        &mut self,
        from: Option<Terms>,
        [rows, rank]: [usize; 2],
        alpha: f64,
        to: Matrix,
    ) -> Result<()> {
        let Some(Terms { pointer, slots }) = from else { return Ok(()) };
        let ranks = rank.next_multiple_of(TILE);
        self.sums.push(Sum {
            from: pointer,
            to: to.pointer,
            slot_stride: (rows * ranks) as i64,
            row_stride: to.stride as i64,
            column_stride: 1,
            slots: size(slots)?,
            rows: size(rows)?,
            columns: size(rank)?,
            pitch: size(ranks)?,
            alpha: alpha as f32,
            single: 0,
        });
        Ok(())
    }

    fn add_gradient(
        &mut self,
        (Terms { pointer, slots }, rank): (Terms, usize),
        (first, number, wide): (usize, usize, usize),
        alpha: f64,
        to: &Array,
        (row_stride, column_stride): (usize, usize),
    ) -> Result<()> {
        let ranks = rank.next_multiple_of(TILE);
        self.sums.push(Sum {
            from: pointer + (first * wide * size_of::<f32>()) as u64,
            to: to.pointer,
            slot_stride: (ranks * wide) as i64,
            row_stride: row_stride as i64,
            column_stride: column_stride as i64,
            slots: size(slots)?,
            rows: size(number)?,
            columns: size(wide)?,
            pitch: size(wide)?,
            alpha: alpha as f32,
            single: 1,
        });
        Ok(())
    }
}

fn add_up(cuda: &Cuda, multiprocessors: usize, dtype: DType, sums: &[Sum]) -> Result<()> {
    let name = by_dtype!("add_up", dtype)?;
    for sums in sums.chunks(MOST) {
        let mut all = Sums::default();
        all.at[..sums.len()].copy_from_slice(sums);
        let largest = sums.iter().map(|sum| sum.rows as usize * sum.columns as usize).max();
        let blocks = largest.unwrap_or(0).div_ceil(THREADS).min(8 * multiprocessors);
        let grid = (blocks as u32, sums.len() as u32, 1);
        let launch = MODULE.launch(cuda, name, grid, THREADS as u32, 0)?.overlapping();
        // SAFETY: as the kernel declares it; the caller holds what the pointers point into.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&all);
            })?;
        }
    }
    Ok(())
}

/// A size as the kernels take it, with room for the products of it with a rank.
fn size(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(fits) if size < 1 << 24 => Ok(fits),
        _ => bail!(
            "metal-candle-kernels: a layer with an adapter on CUDA has a size of {size}, expected less than 2^24"
        ),
    }
}
