//! The innermost products: some rows of a packed left side by one panel of a packed right side.
//!
//! Both sides are sequences of words along the inner dimension. A word is one number, or two
//! neighbouring bf16 numbers for the kinds that multiply those in pairs.

#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::backend::cpu::element::Real;
use candle_core::DType;
#[cfg(target_arch = "x86_64")]
use half::bf16;
#[cfg(target_arch = "x86_64")]
use metal_candle_cpu::simd::Level;
use metal_candle_cpu::simd::level;

#[cfg(target_arch = "x86_64")]
pub(super) use super::tiles::Configured;
/// Nothing has to be configured here.
#[cfg(not(target_arch = "x86_64"))]
pub(super) enum Configured {}

/// Columns of a panel of the right side.
pub(super) const PANEL: usize = 32;
/// Words from one row of a packed left side to the next: no power of two, so that the rows of a tile
/// don't fall into the same set of the cache, and an odd number of cache lines.
pub(super) const STRIDE: usize = 336;
/// Rows beyond the last that kernels may read of the left side and write of the sums.
pub(super) const SPARE_ROWS: usize = 32;

/// How numbers are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// In the type that sums are kept in.
    Plain,
    /// As bf16 pairs with the dot product instruction.
    #[cfg(target_arch = "x86_64")]
    Pairs,
    /// As bf16 tiles.
    #[cfg(target_arch = "x86_64")]
    Tiles,
}

impl Kind {
    /// The fastest way to multiply bf16 numbers exactly, with sums in f32.
    pub(crate) fn for_bf16() -> Kind {
        match level() {
            #[cfg(target_arch = "x86_64")]
            Level::Amx => Kind::Tiles,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 => Kind::Pairs,
            _ => Kind::Plain,
        }
    }

    /// Whether operands are bf16 numbers, two to a word.
    pub(crate) fn is_bf16(self) -> bool {
        self != Kind::Plain
    }

    /// Whether so many rows are multiplied by lines of bf16 numbers as they are stored. The sums of a row are the same for
    /// any such number of rows.
    pub(crate) fn takes_lines(self, rows: usize) -> bool {
        let most = match self {
            Kind::Plain => 0,
            #[cfg(target_arch = "x86_64")]
            Kind::Pairs => ROWS_BY_LINES,
            #[cfg(target_arch = "x86_64")]
            Kind::Tiles => ROWS_BY_TILES_OF_LINES,
        };
        (1..=most).contains(&rows)
    }

    /// Up to how many rows a row's sums are the same beside any number of others, from one on.
    pub(crate) fn rows_alike(self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self == Kind::Pairs {
            return ROWS_BY_LINES;
        }
        usize::MAX
    }

    /// Makes this thread ready to multiply, for as long as the result lives.
    pub(super) fn prepare(self) -> Option<Configured> {
        match self {
            // SAFETY: tiles are chosen on machines that have them.
            #[cfg(target_arch = "x86_64")]
            Kind::Tiles => Some(unsafe { Configured::new() }),
            _ => None,
        }
    }

    /// Words that are multiplied at a time at most: so many that a panel stays in the first cache.
    pub(super) fn block(self) -> usize {
        if self.is_bf16() { 320 } else { 256 }
    }
}

/// One product: `rows` of the left side, from `lhs` on and [`STRIDE`] words apart, by a panel
/// `(words, PANEL)`. Sums have `stride` numbers to a row and are added to, or set when `first`.
#[derive(Clone, Copy)]
pub(super) struct Panel<A> {
    pub words: usize,
    pub rows: usize,
    pub lhs: *const A,
    pub rhs: *const A,
    pub sums: *mut A,
    pub stride: usize,
    pub first: bool,
}

impl<A: Real> Panel<A> {
    /// # Safety
    /// The thread must be prepared for `kind`. The left side must have `rows + SPARE_ROWS` rows of `words`, the right side `words` times
    /// [`PANEL`] words, and the sums `rows + SPARE_ROWS` rows that no one else touches. A kind other
    /// than [`Kind::Plain`] needs f32 sums, a machine that has it, and for tiles a multiple of 16
    /// words.
    #[inline(always)]
    pub(super) unsafe fn multiply(self, kind: Kind) {
        if A::DTYPE == DType::F64 {
            // SAFETY: as promised by the caller.
            return unsafe { portable(self) };
        }
        let panel = Panel {
            words: self.words,
            rows: self.rows,
            lhs: self.lhs.cast::<f32>(),
            rhs: self.rhs.cast::<f32>(),
            sums: self.sums.cast::<f32>(),
            stride: self.stride,
            first: self.first,
        };
        // SAFETY: as promised by the caller; the level says which instructions there are.
        unsafe {
            match kind {
                Kind::Plain => plain(panel),
                #[cfg(target_arch = "x86_64")]
                Kind::Pairs => x86::pairs(panel),
                #[cfg(target_arch = "x86_64")]
                Kind::Tiles => tiles::numbers(panel),
            }
        }
    }
}

/// Rows up to which lines of bf16 numbers are multiplied as they are stored. For more, packing them once costs less than
/// reading the rows again for every few lines.
#[cfg(target_arch = "x86_64")]
const ROWS_BY_LINES: usize = 48;
/// Rows up to which tiles of lines are multiplied as they are stored: as many as two tiles have, for which lines are read once.
#[cfg(target_arch = "x86_64")]
const ROWS_BY_TILES_OF_LINES: usize = 32;

/// A product of bf16 numbers by lines as they are stored: `rows` of a left side by `columns` lines of `numbers` bf16 numbers,
/// `line` apart. Sums are as in [`Panel`].
///
/// For [`Kind::Pairs`] the left side is one of blocks, the first of which starts at `lhs`. The order of a sum follows from
/// `numbers` alone: every 16th pair is added up, and then these sums half to half. For [`Kind::Tiles`] the lines are the left
/// side of tiles, and `lhs` are squares with a word in each row and a row in each column, those of the same words next to each
/// other. The order of a sum is that of [`Panel`]s.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Lines {
    pub rows: usize,
    pub columns: usize,
    pub numbers: usize,
    pub lhs: *const f32,
    /// For pairs, words of a row in a block, a multiple of 16, and from the start of a block to that of the next one.
    pub block_words: usize,
    pub block_stride: usize,
    pub rhs: *const bf16,
    pub line: usize,
    pub sums: *mut f32,
    pub stride: usize,
    pub first: bool,
}

#[cfg(target_arch = "x86_64")]
impl Lines {
    /// # Safety
    /// The machine must have `kind`, which must take so many rows by lines. The left side must have `rows` rows, for pairs
    /// [`STRIDE`] words apart in each block, with zeros from `numbers` on up to a multiple of 32, and the right side `columns`
    /// lines, one at least. The sums must have `rows + SPARE_ROWS` rows that no one else touches, with room for whole panels.
    pub(super) unsafe fn multiply(self, kind: Kind) {
        // SAFETY: as promised by the caller.
        unsafe {
            match kind {
                Kind::Plain => unreachable!("takes no lines"),
                Kind::Pairs => x86::lines(self),
                Kind::Tiles => tiles::lines(self),
            }
        }
    }
}

/// # Safety
/// As [`Panel::multiply`].
unsafe fn plain(panel: Panel<f32>) {
    // SAFETY: as promised by the caller.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        match level() {
            Level::Baseline => portable(panel),
            Level::Avx2 => x86::avx2(panel),
            _ => x86::avx512(panel),
        }
        #[cfg(target_arch = "aarch64")]
        neon::neon(panel);
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        portable(panel);
    }
}

/// # Safety
/// As [`Panel::multiply`].
unsafe fn portable<A: Real>(panel: Panel<A>) {
    const ROWS: usize = 4;
    for row in (0..panel.rows).step_by(ROWS) {
        let mut sums = [[A::ZERO; PANEL]; ROWS];
        for word in 0..panel.words {
            // SAFETY: inside the right side, by the caller's promise.
            let right = unsafe { &*panel.rhs.add(word * PANEL).cast::<[A; PANEL]>() };
            for (offset, sums) in sums.iter_mut().enumerate() {
                // SAFETY: inside the left side with its spare rows.
                let left = unsafe { *panel.lhs.add((row + offset) * STRIDE + word) };
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum += left * *right;
                }
            }
        }
        for (offset, sums) in sums.iter().enumerate() {
            // SAFETY: inside the sums with their spare rows, which are this call's alone.
            let target =
                unsafe { &mut *panel.sums.add((row + offset) * panel.stride).cast::<[A; PANEL]>() };
            for (target, sum) in target.iter_mut().zip(sums) {
                *target = if panel.first { *sum } else { *target + *sum };
            }
        }
    }
}

/// Some words in a register, or as many sums.
pub(super) trait Vector: Copy {
    /// What words are multiplied as, and sums.
    type Number;
    /// Words of a register.
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(from: *const Self::Number) -> Self;
    unsafe fn splat(from: *const Self::Number) -> Self;
    unsafe fn store(self, to: *mut Self::Number);
    unsafe fn add(self, other: Self) -> Self;
    /// `sum + a·b`, word by word, with `a` of the left side and `b` of the right one.
    unsafe fn multiply_add(a: Self, b: Self, sum: Self) -> Self;
}

/// The panel in tiles of `M` rows and `N` vectors, whose sums stay in registers. The order of a sum is the same for
/// all tiles.
#[inline(always)]
pub(super) unsafe fn by_registers<V: Vector, const M: usize, const N: usize>(
    panel: Panel<V::Number>,
) {
    let Panel { words, rows, lhs, rhs, sums: out, stride, first } = panel;
    // SAFETY: offsets stay inside what the caller of `Panel::multiply` promised.
    unsafe {
        for row in (0..rows).step_by(M) {
            let lhs = lhs.add(row * STRIDE);
            for column in (0..PANEL).step_by(N * V::LANES) {
                let rhs = rhs.add(column);
                let mut sums = [[V::zero(); N]; M];
                for word in 0..words {
                    let mut right = [V::zero(); N];
                    for (n, right) in right.iter_mut().enumerate() {
                        *right = V::load(rhs.add(word * PANEL + n * V::LANES));
                    }
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let left = V::splat(lhs.add(m * STRIDE + word));
                        for (sum, right) in sums.iter_mut().zip(right) {
                            *sum = V::multiply_add(left, right, *sum);
                        }
                    }
                }
                for (m, sums) in sums.iter().enumerate() {
                    for (n, sum) in sums.iter().enumerate() {
                        let target = out.add((row + m) * stride + column + n * V::LANES);
                        if first {
                            sum.store(target);
                        } else {
                            V::load(target).add(*sum).store(target);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::sum_registers;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Lines, Panel, STRIDE, Vector, by_registers};
    use half::bf16;
    use std::arch::x86_64::*;

    #[derive(Clone, Copy)]
    struct Wide(__m512);

    impl Vector for Wide {
        type Number = f32;
        const LANES: usize = 16;
        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { Wide(_mm512_setzero_ps()) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { Wide(_mm512_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            unsafe { Wide(_mm512_set1_ps(*from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Wide(_mm512_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn multiply_add(a: Self, b: Self, sum: Self) -> Self {
            unsafe { Wide(_mm512_fmadd_ps(a.0, b.0, sum.0)) }
        }
    }

    /// Words are pairs of bf16 numbers, sums f32.
    #[derive(Clone, Copy)]
    struct WidePairs(__m512);

    impl Vector for WidePairs {
        type Number = f32;
        const LANES: usize = 16;
        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { WidePairs(_mm512_setzero_ps()) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { WidePairs(_mm512_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            unsafe { WidePairs(_mm512_castsi512_ps(_mm512_set1_epi32(*from.cast::<i32>()))) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { WidePairs(_mm512_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn multiply_add(a: Self, b: Self, sum: Self) -> Self {
            unsafe {
                let (a, b) = (
                    std::mem::transmute::<__m512, __m512bh>(a.0),
                    std::mem::transmute::<__m512, __m512bh>(b.0),
                );
                WidePairs(_mm512_dpbf16_ps(sum.0, a, b))
            }
        }
    }

    #[derive(Clone, Copy)]
    struct Narrow(__m256);

    impl Vector for Narrow {
        type Number = f32;
        const LANES: usize = 8;
        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { Narrow(_mm256_setzero_ps()) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { Narrow(_mm256_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            unsafe { Narrow(_mm256_set1_ps(*from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Narrow(_mm256_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn multiply_add(a: Self, b: Self, sum: Self) -> Self {
            unsafe { Narrow(_mm256_fmadd_ps(a.0, b.0, sum.0)) }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn avx512(panel: Panel<f32>) {
        // SAFETY: as promised by the caller.
        unsafe {
            match panel.rows {
                ..=4 => by_registers::<Wide, 4, 2>(panel),
                _ => by_registers::<Wide, 12, 2>(panel),
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) unsafe fn pairs(panel: Panel<f32>) {
        // SAFETY: as promised by the caller.
        unsafe {
            match panel.rows {
                ..=4 => by_registers::<WidePairs, 4, 2>(panel),
                _ => by_registers::<WidePairs, 12, 2>(panel),
            }
        }
    }

    /// Lines whose sums are in registers at a time, and rows at most.
    const TILE: usize = 4;
    const TILE_ROWS: usize = 6;
    /// Lines that all rows pass before the next ones: a tile's rows stay in the first cache for them.
    const TURN: usize = 6 * TILE;
    /// bf16 numbers of a register, and bytes.
    const NUMBERS: usize = 32;
    const BYTES: usize = 64;
    /// How far ahead of a turn's lines others are asked for. They lie next to each other and are read as several short streams, which the
    /// processor doesn't foresee.
    const BYTES_AHEAD: usize = 16 * 1024;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) unsafe fn lines(all: Lines) {
        // SAFETY: as promised by the caller.
        unsafe {
            match all.rows.div_ceil(TILE_ROWS) {
                ..=1 => turns::<4>(all),
                2 | 3 => turns::<2>(all),
                _ => turns::<1>(all),
            }
        }
    }

    /// All tiles, each of which asks for its share of the lines ahead, `AHEAD` times a step.
    #[inline(always)]
    unsafe fn turns<const AHEAD: usize>(all: Lines) {
        let tiles = all.rows.div_ceil(TILE_ROWS);
        let pace = (TILE * BYTES).div_ceil(tiles);
        let steps = all.numbers.div_ceil(NUMBERS);
        for turn in (0..all.columns).step_by(TURN) {
            let first = all.rhs.wrapping_add(turn * all.line).wrapping_byte_add(BYTES_AHEAD);
            let columns = turn..(turn + TURN).min(all.columns);
            let share = columns.len().div_ceil(TILE) * steps * pace;
            for tile in 0..tiles {
                // As many rows as in the others, or one less.
                let (row, end) = (tile * all.rows / tiles, (tile + 1) * all.rows / tiles);
                let mut ahead = first.wrapping_byte_add(tile * share);
                for column in columns.clone().step_by(TILE) {
                    // SAFETY: as promised by the caller.
                    unsafe {
                        match end - row {
                            1 => dots::<1, AHEAD>(all, row, column, ahead, pace),
                            2 => dots::<2, AHEAD>(all, row, column, ahead, pace),
                            3 => dots::<3, AHEAD>(all, row, column, ahead, pace),
                            4 => dots::<4, AHEAD>(all, row, column, ahead, pace),
                            5 => dots::<5, AHEAD>(all, row, column, ahead, pace),
                            _ => dots::<TILE_ROWS, AHEAD>(all, row, column, ahead, pace),
                        }
                    }
                    ahead = ahead.wrapping_byte_add(steps * pace);
                }
            }
        }
    }

    /// The products of `M` rows and the lines from `column` on, of which the last stands for those beyond it. Every step
    /// asks for lines that will be read soon, `pace` bytes further.
    #[inline(always)]
    unsafe fn dots<const M: usize, const AHEAD: usize>(
        all: Lines,
        row: usize,
        column: usize,
        mut ahead: *const bf16,
        pace: usize,
    ) {
        // SAFETY: offsets stay inside what the caller of `Lines::multiply` promised; of a line's last numbers those beyond
        // it aren't read.
        unsafe {
            let line = |n: usize| all.rhs.add((column + n).min(all.columns - 1) * all.line);
            let mut lines = [line(0), line(1), line(2), line(3)];
            let mut lhs = all.lhs.add(row * STRIDE);
            let mut sums = [[_mm512_setzero_ps(); TILE]; M];
            let mut left = all.numbers;
            while left > 0 {
                let count = left.min(2 * all.block_words);
                let whole = count / NUMBERS * NUMBERS;
                for start in (0..whole).step_by(NUMBERS) {
                    for register in 0..AHEAD {
                        let place = ahead.wrapping_byte_add(register * BYTES);
                        _mm_prefetch::<_MM_HINT_T0>(place.cast());
                    }
                    ahead = ahead.wrapping_byte_add(pace);
                    let right = load(lines, start, u32::MAX);
                    add_pairs(&mut sums, lhs.add(start / 2), right);
                }
                if whole < count {
                    let right = load(lines, whole, (1 << (count - whole)) - 1);
                    add_pairs(&mut sums, lhs.add(whole / 2), right);
                }
                left -= count;
                if left > 0 {
                    lines = lines.map(|line| line.add(count));
                    lhs = lhs.add(all.block_stride);
                }
            }
            for (some, sums) in sums.chunks(4).enumerate() {
                let mut four = [[_mm512_setzero_ps(); TILE]; 4];
                four[..sums.len()].copy_from_slice(sums);
                for (m, found) in sum_registers(&four).into_iter().enumerate().take(sums.len()) {
                    let target = all.sums.add((row + 4 * some + m) * all.stride + column);
                    let before = if all.first { None } else { Some(_mm_loadu_ps(target)) };
                    let all = before.map_or(found, |before| _mm_add_ps(before, found));
                    _mm_storeu_ps(target, all);
                }
            }
        }
    }

    /// The numbers of some lines that a mask has, from `start` on.
    #[inline(always)]
    unsafe fn load(lines: [*const bf16; TILE], start: usize, mask: u32) -> [__m512; TILE] {
        // SAFETY: as promised by the caller of `dots`.
        unsafe {
            let mut right = [_mm512_setzero_ps(); TILE];
            for (right, line) in right.iter_mut().zip(lines) {
                let numbers: *const i16 = line.add(start).cast();
                *right = _mm512_castsi512_ps(match mask {
                    u32::MAX => _mm512_loadu_si512(numbers.cast()),
                    _ => _mm512_maskz_loadu_epi16(mask, numbers),
                });
            }
            right
        }
    }

    /// Adds the products of pairs of `M` rows, [`STRIDE`] words apart, and some lines.
    #[inline(always)]
    unsafe fn add_pairs<const M: usize>(
        sums: &mut [[__m512; TILE]; M],
        lhs: *const f32,
        right: [__m512; TILE],
    ) {
        for (m, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as promised by the caller of `dots`.
            unsafe {
                let left = WidePairs::load(lhs.add(m * STRIDE));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = WidePairs::multiply_add(left, WidePairs(right), WidePairs(*sum)).0;
                }
            }
        }
    }

    /// The sum of each register, those of a row together.
    ///
    /// # Safety
    /// The machine must have AVX-512.
    #[inline(always)]
    pub(crate) unsafe fn sum_registers(sums: &[[__m512; TILE]; 4]) -> [__m128; 4] {
        // SAFETY: the caller has the instructions.
        unsafe {
            let mut columns = [_mm512_setzero_ps(); TILE];
            for (n, column) in columns.iter_mut().enumerate() {
                let (top, below) =
                    (add_halves(sums[0][n], sums[1][n]), add_halves(sums[2][n], sums[3][n]));
                let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(top, below);
                let odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(top, below);
                *column = _mm512_add_ps(even, odd);
            }
            let [a, b, c, d] = columns;
            let (a, b) = (add_pairs_of_quarters(a, b), add_pairs_of_quarters(c, d));
            let even = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
            let odd = _mm512_shuffle_ps::<0b11_01_11_01>(a, b);
            let rows = _mm512_add_ps(even, odd);
            [
                _mm512_extractf32x4_ps::<0>(rows),
                _mm512_extractf32x4_ps::<1>(rows),
                _mm512_extractf32x4_ps::<2>(rows),
                _mm512_extractf32x4_ps::<3>(rows),
            ]
        }
    }

    /// The halves of `a` added up, and then those of `b`.
    #[inline(always)]
    unsafe fn add_halves(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller has the instructions.
        unsafe {
            let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
            let high = _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b);
            _mm512_add_ps(low, high)
        }
    }

    /// In every quarter, the halves of that of `a` added up, and then those of `b`'s.
    #[inline(always)]
    unsafe fn add_pairs_of_quarters(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller has the instructions.
        unsafe {
            let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            let high = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            _mm512_add_ps(low, high)
        }
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2(panel: Panel<f32>) {
        // SAFETY: as promised by the caller.
        unsafe { by_registers::<Narrow, 6, 2>(panel) }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{Panel, Vector, by_registers};
    use std::arch::aarch64::*;

    #[derive(Clone, Copy)]
    struct Neon(float32x4_t);

    impl Vector for Neon {
        type Number = f32;
        const LANES: usize = 4;
        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { Neon(vdupq_n_f32(0.0)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { Neon(vld1q_f32(from)) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            unsafe { Neon(vdupq_n_f32(*from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { vst1q_f32(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Neon(vaddq_f32(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn multiply_add(a: Self, b: Self, sum: Self) -> Self {
            unsafe { Neon(vfmaq_f32(sum.0, a.0, b.0)) }
        }
    }

    /// # Safety
    /// As [`Panel::multiply`](super::Panel::multiply).
    pub(super) unsafe fn neon(panel: Panel<f32>) {
        // SAFETY: as promised by the caller.
        unsafe { by_registers::<Neon, 12, 2>(panel) }
    }
}
