//! ggml's types of tensors: how many bytes so many elements take.

use std::fmt;

/// The type of a tensor in a GGUF file, by its number there.
///
/// All types of the format are known, so that every file's sizes can be checked; which of them are
/// computed with is said by who reads the blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GgmlType(u32);

/// Number, name, elements of a block, bytes of a block (`GGML_QUANT_SIZES` of the Python package `gguf`).
const TYPES: [(u32, &str, usize, usize); 35] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
];

impl GgmlType {
    /// 32-bit floats.
    pub const F32: Self = Self(0);
    /// 16-bit floats of IEEE 754.
    pub const F16: Self = Self(1);
    /// bfloat16.
    pub const BF16: Self = Self(30);

    /// The type with this number, if the format has one.
    pub fn from_number(number: u32) -> Option<Self> {
        TYPES.iter().any(|(known, ..)| *known == number).then_some(Self(number))
    }

    /// The type with this name, such as `Q4_K`.
    pub fn from_name(name: &str) -> Option<Self> {
        TYPES.iter().find(|(_, known, ..)| *known == name).map(|(number, ..)| Self(*number))
    }

    fn row(self) -> &'static (u32, &'static str, usize, usize) {
        // A value is only made of a known number; F32 stands first.
        TYPES.iter().find(|(number, ..)| *number == self.0).unwrap_or(&TYPES[0])
    }

    /// Its number in files.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Its name, such as `Q4_K`.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Elements of a block.
    pub fn block(self) -> usize {
        self.row().2
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.row().3
    }

    /// Whether each element has its own bytes.
    pub fn is_dense(self) -> bool {
        self.block() == 1
    }

    /// The bytes of a row of `width` elements; `None` where that is no whole number of blocks or too many.
    pub fn row_bytes(self, width: usize) -> Option<usize> {
        width.is_multiple_of(self.block()).then_some(())?;
        (width / self.block()).checked_mul(self.block_bytes())
    }

    /// The bytes of a tensor of `shape`, whose last dimension is a row.
    pub fn tensor_bytes(self, shape: &[usize]) -> Option<usize> {
        let (width, rows) = shape.split_last()?;
        rows.iter().try_fold(self.row_bytes(*width)?, |bytes, dim| bytes.checked_mul(*dim))
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_whole_blocks() {
        let q4_k = GgmlType::from_name("Q4_K").unwrap();
        assert_eq!(q4_k, GgmlType::from_number(12).unwrap());
        assert_eq!(q4_k.tensor_bytes(&[3, 512]), Some(3 * 2 * 144));
        assert_eq!(q4_k.tensor_bytes(&[3, 300]), None);
        assert_eq!(GgmlType::BF16.tensor_bytes(&[7]), Some(14));
        assert_eq!(GgmlType::F32.tensor_bytes(&[usize::MAX, 2]), None);
        assert_eq!(GgmlType::F32.tensor_bytes(&[]), None);
        // Numbers whose types were taken out of the format.
        for number in [4, 5, 31, 36, 43, u32::MAX] {
            assert!(GgmlType::from_number(number).is_none(), "{number}");
        }
        for (number, name, block, bytes) in TYPES {
            let found = GgmlType::from_number(number).unwrap();
            assert_eq!((found.name(), found.block(), found.block_bytes()), (name, block, bytes));
        }
    }
}
