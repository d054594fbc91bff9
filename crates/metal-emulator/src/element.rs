//! What a buffer can hold.

use half::{bf16, f16};

/// A number as it lies in a buffer.
pub trait Element: Copy + Default + sealed::Sealed {
    /// Bytes of one element.
    const SIZE: usize;

    /// Writes the element behind what is there.
    fn write(self, bytes: &mut Vec<u8>);

    /// The element that begins a slice, zero if the slice is too short.
    fn read(bytes: &[u8]) -> Self;
}

/// A value of a function constant: `bool` or a number.
pub trait Constant {
    /// The bytes of the value.
    fn bytes(self) -> Vec<u8>;
}

impl<T: Element> Constant for T {
    fn bytes(self) -> Vec<u8> {
        bytes_of(&[self])
    }
}

impl Constant for bool {
    fn bytes(self) -> Vec<u8> {
        vec![self.into()]
    }
}

macro_rules! elements {
    ($($type:ty)*) => {$(
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const SIZE: usize = size_of::<$type>();

            fn write(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }

            fn read(bytes: &[u8]) -> Self {
                bytes.first_chunk().map_or_else(Self::default, |chunk| Self::from_le_bytes(*chunk))
            }
        }
    )*};
}
elements!(u8 i8 u16 i16 u32 i32 u64 i64 f16 bf16 f32);

mod sealed {
    pub trait Sealed {}
}

pub(crate) fn bytes_of<T: Element>(elements: &[T]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(elements.len() * T::SIZE);
    for element in elements {
        element.write(&mut bytes);
    }
    bytes
}

pub(crate) fn elements_of<T: Element>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(T::SIZE).map(T::read).collect()
}
