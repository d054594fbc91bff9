//! The instruction set that the operations run with, chosen once, when the program runs.
//!
//! A closure given to [`vectorize`] is compiled for every level of the target and the best one that
//! the machine has is called. Arithmetic is not contracted, so the levels give the same bits; only
//! the matrix products of `gemm`, those of a few rows with a matrix in fewer bits and those with keys and values where they
//! lie, which use fused instructions, differ between machines.

use std::ffi::OsStr;
use std::sync::OnceLock;

/// The variable that names a lower level than the machine's best.
const VARIABLE: &str = "METAL_CANDLE_SIMD";

/// What the machine has beyond the target's baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// SSE2 on x86-64, NEON on AArch64.
    Baseline,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// And the dot product of bf16 pairs.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// And tiles of bf16 (AMX), which the operating system lets this process use.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// The levels by name, the lowest first.
const LEVELS: &[(&str, Level)] = &[
    ("baseline", Level::Baseline),
    #[cfg(target_arch = "x86_64")]
    ("avx2", Level::Avx2),
    #[cfg(target_arch = "x86_64")]
    ("avx512", Level::Avx512),
    #[cfg(target_arch = "x86_64")]
    ("avx512bf16", Level::Avx512Bf16),
    #[cfg(target_arch = "x86_64")]
    ("amx", Level::Amx),
];

/// The best level of this machine, or a lower one that `METAL_CANDLE_SIMD` names.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let best = detect();
        // No operation can tell of a wrong name; `check` does.
        named(std::env::var_os(VARIABLE).as_deref(), best).unwrap_or(best)
    })
}

/// That `METAL_CANDLE_SIMD` names a level of this machine, if it is set.
pub fn check() -> Result<(), String> {
    named(std::env::var_os(VARIABLE).as_deref(), detect()).map(drop)
}

/// The level that the variable's value names, of those up to the machine's best, which it is without one.
fn named(value: Option<&OsStr>, best: Level) -> Result<Level, String> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(best) };
    let levels = || LEVELS.iter().filter(|(_, level)| *level <= best);
    match levels().find(|(name, _)| value == *name) {
        Some((_, level)) => Ok(*level),
        None => {
            let names: Vec<&str> = levels().map(|(name, _)| *name).collect();
            Err(format!(
                "{VARIABLE} is {value:?}, expected what this machine computes with: {}",
                names.join(", ")
            ))
        }
    }
}

/// Whether products of bf16 numbers are faster than those of f32.
#[cfg(target_arch = "x86_64")]
pub fn prefers_bf16() -> bool {
    level() >= Level::Avx512Bf16
}

/// Whether the machine has AVX-512's dot products of bytes.
#[cfg(target_arch = "x86_64")]
pub fn has_vnni() -> bool {
    level() >= Level::Avx512 && is_x86_feature_detected!("avx512vnni")
}

/// Whether it has those and what puts codes of fewer bits into bytes (VBMI).
#[cfg(target_arch = "x86_64")]
pub fn has_byte_dots() -> bool {
    has_vnni() && is_x86_feature_detected!("avx512vbmi")
}

/// Whether the machine has dot products of bytes in registers of 256 bits, by AVX's instructions.
#[cfg(target_arch = "x86_64")]
pub fn has_narrow_byte_dots() -> bool {
    level() >= Level::Avx2 && is_x86_feature_detected!("avxvnni")
}

/// Whether the machine has tiles of bytes beside those of bf16.
#[cfg(target_arch = "x86_64")]
pub fn has_byte_tiles() -> bool {
    // Where the machine is virtual, asking takes it as long as a small product.
    static BYTES: OnceLock<bool> = OnceLock::new();
    *BYTES.get_or_init(|| {
        // CPUID leaf 7, EDX: bit 25 is AMX-INT8.
        level() >= Level::Amx && std::arch::x86_64::__cpuid_count(7, 0).edx & 1 << 25 != 0
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Baseline
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    if !(is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c"))
    {
        return Level::Baseline;
    }
    if !(is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl"))
    {
        return Level::Avx2;
    }
    if !is_x86_feature_detected!("avx512bf16") {
        return Level::Avx512;
    }
    match (tiles_allowed(), by_intel()) {
        (true, _) => Level::Amx,
        // Its dot product of bf16 pairs does half the work of a multiply-add in f32.
        (false, true) => Level::Avx512,
        (false, false) => Level::Avx512Bf16,
    }
}

#[cfg(target_arch = "x86_64")]
fn by_intel() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

/// Whether the machine has bf16 tiles and Linux grants them, which it does on request only
/// (`Documentation/arch/x86/xstate.rst`).
#[cfg(target_arch = "x86_64")]
fn tiles_allowed() -> bool {
    // CPUID leaf 7, EDX: bit 22 is AMX-BF16, bit 24 AMX-TILE.
    const TILES: u32 = 1 << 22 | 1 << 24;
    if std::arch::x86_64::__cpuid_count(7, 0).edx & TILES != TILES {
        return false;
    }
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: the call takes two numbers and changes what this process may use, nothing else.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    {
        false
    }
}

/// Calls `body`, compiled for the machine's instruction set. What it calls is compiled so as well
/// where it is inlined: mark closures and helpers `#[inline(always)]`.
#[inline(always)]
pub fn vectorize<R>(body: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn avx512<R>(body: impl FnOnce() -> R) -> R {
            body()
        }
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<R>(body: impl FnOnce() -> R) -> R {
            body()
        }
        match level() {
            Level::Baseline => body(),
            // SAFETY: the level says that the machine has these instructions.
            Level::Avx2 => unsafe { avx2(body) },
            // SAFETY: as above; the higher levels include this one.
            Level::Avx512 | Level::Avx512Bf16 | Level::Amx => unsafe { avx512(body) },
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    body()
}

/// A register of whatever kind, as pairs of bf16 numbers.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn as_pairs(register: std::arch::x86_64::__m512i) -> std::arch::x86_64::__m512bh {
    // SAFETY: both are 64 bytes of which every pattern is one.
    unsafe { std::mem::transmute(register) }
}

/// Asks for the cache line at an address, which need not be one of this process.
#[inline(always)]
pub fn prefetch<S>(address: *const S) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction reads nothing and is there on every x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// [`prefetch`] of so many bytes from an address on.
#[inline(always)]
pub fn prefetch_bytes(first: *const u8, count: usize) {
    for offset in (0..count).step_by(64) {
        prefetch(first.wrapping_add(offset));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_no_level_of_this_machine_is_told() {
        for (name, level) in LEVELS {
            assert_eq!(named(Some(name.as_ref()), *level), Ok(*level));
        }
        let (_, best) = LEVELS[LEVELS.len() - 1];
        assert_eq!(named(None, best), Ok(best));
        assert_eq!(named(Some("".as_ref()), best), Ok(best));
        assert_eq!(named(Some("baseline".as_ref()), best), Ok(Level::Baseline));
        // Of another processor, or of none.
        for wrong in ["avx3", "AVX2", "amx"] {
            let told = named(Some(wrong.as_ref()), Level::Baseline).unwrap_err();
            let expected = format!(
                "METAL_CANDLE_SIMD is \"{wrong}\", expected what this machine computes with: baseline"
            );
            assert_eq!(told, expected);
        }
    }
}
