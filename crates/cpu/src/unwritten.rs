//! Memory that isn't cleared, as an operation writes every element before any is read. Clearing it would be a
//! pass of its own over memory.

use half::{bf16, f16};
use std::mem::{ManuallyDrop, MaybeUninit};

/// A type of which any bits are a value.
///
/// # Safety
/// They have to be.
pub unsafe trait Plain: Copy {}

// SAFETY: numbers without forbidden bits.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}
// SAFETY: as above.
unsafe impl Plain for bf16 {}
// SAFETY: as above.
unsafe impl Plain for f16 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for i16 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}

/// `count` elements with whatever bits are there. What is read before it is written is some value; in tests, and
/// where assertions are checked, it is NaN.
pub fn unwritten<T: Plain>(count: usize) -> Vec<T> {
    let mut memory: Vec<MaybeUninit<T>> = Vec::with_capacity(count);
    // SAFETY: the capacity is there, and elements of this type need no value.
    unsafe { memory.set_len(count) };
    settle(&mut memory);
    let mut memory = ManuallyDrop::new(memory);
    // SAFETY: these are the parts of a vector that nobody else has, and its elements have values now.
    let mut memory =
        unsafe { Vec::from_raw_parts(memory.as_mut_ptr().cast(), count, memory.capacity()) };
    spoil(&mut memory);
    memory
}

/// Makes values of what the bits are. The assembly is empty, but may have written to the memory for all that the
/// compiler knows, so that these bits are as good as written ones.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn settle<T: Plain>(memory: &mut [MaybeUninit<T>]) {
    // SAFETY: it changes nothing but what the compiler takes the memory for.
    unsafe {
        std::arch::asm!("/* {0} */", in(reg) memory.as_mut_ptr(), options(nostack, preserves_flags));
    }
}

/// Where the compiler isn't known to take it so, zeros are written.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn settle<T: Plain>(memory: &mut [MaybeUninit<T>]) {
    memory.fill(MaybeUninit::zeroed());
}

/// In tests, and where assertions are checked, makes NaN of memory that is to be written, so that what isn't
/// shows in results.
#[inline(always)]
pub fn spoil<T: Plain>(memory: &mut [T]) {
    if cfg!(any(test, debug_assertions)) {
        // SAFETY: any bits are a value, and this many bytes are those of the slice.
        unsafe { std::ptr::write_bytes(memory.as_mut_ptr(), 0xff, memory.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_written_shows_in_tests() {
        for count in [0, 1, 1000] {
            let mut memory = unwritten::<f32>(count);
            assert!(memory.len() == count && memory.iter().all(|number| number.is_nan()));
            memory.fill(1.0);
            spoil(&mut memory[count / 2..]);
            assert_eq!(memory.iter().filter(|number| number.is_nan()).count(), count.div_ceil(2));
        }
        assert!(unwritten::<bf16>(5).iter().all(|number| number.is_nan()));
        assert!(unwritten::<f16>(5).iter().all(|number| number.is_nan()));
        assert!(unwritten::<f64>(5).iter().all(|number| number.is_nan()));
    }
}
