//! The innermost products: some rows of a packed left side by one panel of a packed right side.
//!
//! Both sides are sequences of words along the inner dimension. A word is one number, or two
//! neighbouring bf16 numbers for the kinds that multiply those in pairs.

use crate::backend::cpu::element::Real;
#[cfg(target_arch = "x86_64")]
use crate::backend::cpu::simd::Level;
use crate::backend::cpu::simd::level;
use candle_core::DType;

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

    /// Makes this thread ready to multiply, for as long as the result lives.
    pub(super) fn prepare(self) -> Prepared {
        #[cfg(target_arch = "x86_64")]
        if self == Kind::Tiles {
            // SAFETY: tiles are chosen on machines that have them.
            unsafe { x86::configure_tiles() };
        }
        Prepared { kind: self }
    }

    /// Words that are multiplied at a time at most: so many that a panel stays in the first cache.
    pub(super) fn block(self) -> usize {
        if self.is_bf16() { 320 } else { 256 }
    }
}

/// A thread that is ready to multiply: tile registers have their shapes.
pub(super) struct Prepared {
    kind: Kind,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        match self.kind {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `prepare`.
            Kind::Tiles => unsafe { x86::release_tiles() },
            _ => {}
        }
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
                Kind::Tiles => x86::tiles(panel),
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

/// Some numbers in a register.
trait Vector: Copy {
    /// f32 numbers of a register, and words.
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn splat(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    /// `sum + a·b`
    unsafe fn multiply_add(a: Self, b: Self, sum: Self) -> Self;
}

/// The panel in tiles of `M` rows and `N` vectors, whose sums stay in registers. The order of a sum is the same for
/// all tiles.
#[inline(always)]
unsafe fn by_registers<V: Vector, const M: usize, const N: usize>(panel: Panel<f32>) {
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
mod x86 {
    use super::{PANEL, Panel, STRIDE, Vector, by_registers};
    use std::arch::asm;
    use std::arch::x86_64::*;

    #[derive(Clone, Copy)]
    struct Wide(__m512);

    impl Vector for Wide {
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

    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2(panel: Panel<f32>) {
        // SAFETY: as promised by the caller.
        unsafe { by_registers::<Narrow, 6, 2>(panel) }
    }

    /// The shapes of the tile registers: 16 rows of 64 bytes each.
    #[repr(C, align(64))]
    struct TileConfig {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes_in_row: [u16; 16],
        rows: [u8; 16],
    }

    static TILES: TileConfig = TileConfig {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        bytes_in_row: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// # Safety
    /// The machine must have tiles that this process may use.
    pub(super) unsafe fn configure_tiles() {
        // SAFETY: the tile registers belong to this thread alone.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &TILES, options(nostack, readonly)) };
    }

    /// # Safety
    /// As [`configure_tiles`].
    pub(super) unsafe fn release_tiles() {
        // SAFETY: the tile registers belong to this thread alone.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }

    /// Blocks of 32 by 32 in four tiles. The instructions have no stable intrinsics.
    ///
    /// # Safety
    /// As [`Panel::multiply`](super::Panel::multiply).
    pub(super) unsafe fn tiles(panel: Panel<f32>) {
        let Panel { words, rows, lhs, rhs, sums, stride, first } = panel;
        // SAFETY: the tile registers belong to this thread alone; the caller promised the memory.
        unsafe {
            for row in (0..rows).step_by(32) {
                let (lhs, sums) = (lhs.add(row * STRIDE), sums.add(row * stride));
                let sums_below = sums.add(16 * stride);
                if first {
                    asm!(
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "tilezero tmm2",
                        "tilezero tmm3",
                        options(nostack, nomem)
                    );
                } else {
                    asm!(
                        "tileloadd tmm0, [{top} + {stride}*1]",
                        "tileloadd tmm1, [{top} + {stride}*1 + 64]",
                        "tileloadd tmm2, [{below} + {stride}*1]",
                        "tileloadd tmm3, [{below} + {stride}*1 + 64]",
                        top = in(reg) sums,
                        below = in(reg) sums_below,
                        stride = in(reg) stride * 4,
                        options(nostack, readonly)
                    );
                }
                asm!(
                    "2:",
                    "tileloadd tmm6, [{rhs} + {rhs_stride}*1]",
                    "tileloadd tmm4, [{top} + {lhs_stride}*1]",
                    "tileloadd tmm7, [{rhs} + {rhs_stride}*1 + 64]",
                    "tileloadd tmm5, [{below} + {lhs_stride}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {top}, 64",
                    "add {below}, 64",
                    "add {rhs}, 2048",
                    "dec {steps}",
                    "jnz 2b",
                    top = inout(reg) lhs => _,
                    below = inout(reg) lhs.add(16 * STRIDE) => _,
                    rhs = inout(reg) rhs => _,
                    steps = inout(reg) words / 16 => _,
                    lhs_stride = in(reg) STRIDE * 4,
                    rhs_stride = in(reg) PANEL * 4,
                    options(nostack, readonly)
                );
                asm!(
                    "tilestored [{top} + {stride}*1], tmm0",
                    "tilestored [{top} + {stride}*1 + 64], tmm1",
                    "tilestored [{below} + {stride}*1], tmm2",
                    "tilestored [{below} + {stride}*1 + 64], tmm3",
                    top = in(reg) sums,
                    below = in(reg) sums_below,
                    stride = in(reg) stride * 4,
                    options(nostack)
                );
            }
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{Panel, Vector, by_registers};
    use std::arch::aarch64::*;

    #[derive(Clone, Copy)]
    struct Neon(float32x4_t);

    impl Vector for Neon {
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
