//! ggml's blocks: neighbouring elements of a row with their scales, to and from codes and scales apart.

use super::{Parsed, assembled, bytes_of, bytes_tensor, elements, f16_tensor, f16s_of, on_host};
use half::f16;
use metal_candle_kernels::quantized::{E2M1, IQ4, Levels, Quantized, Scales};
use rayon::prelude::*;

/// A type of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub(crate) enum BlockKind {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

impl BlockKind {
    const ALL: [Self; 13] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::MXFP4,
    ];

    /// The names of all of them, as ggml has them.
    pub(crate) fn names() -> Vec<String> {
        Self::ALL.iter().map(|kind| format!("{kind:?}")).collect()
    }

    /// The one of this name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| format!("{kind:?}") == name)
    }

    /// Elements of a block.
    pub(crate) fn elements(self) -> usize {
        match self {
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K | Self::IQ4_XS => 256,
            _ => 32,
        }
    }

    /// Bytes of a block.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::IQ4_NL => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
            Self::IQ4_XS => 136,
            Self::MXFP4 => 17,
        }
    }

    /// Elements of a group.
    fn group(self) -> usize {
        match self {
            Self::Q2_K | Self::Q3_K | Self::Q6_K => 16,
            _ => 32,
        }
    }

    fn levels(self) -> Levels {
        match self {
            Self::Q4_0 => Levels::Integers { bits: 4, zero: 8 },
            Self::Q4_1 | Self::Q4_K => Levels::Integers { bits: 4, zero: 0 },
            Self::Q5_0 => Levels::Integers { bits: 5, zero: 16 },
            Self::Q5_1 | Self::Q5_K => Levels::Integers { bits: 5, zero: 0 },
            Self::Q6_K => Levels::Integers { bits: 6, zero: 32 },
            Self::Q8_0 => Levels::Integers { bits: 8, zero: 128 },
            Self::Q2_K => Levels::Integers { bits: 2, zero: 0 },
            Self::Q3_K => Levels::Integers { bits: 3, zero: 4 },
            Self::IQ4_NL | Self::IQ4_XS => Levels::Table(&IQ4),
            Self::MXFP4 => Levels::Table(&E2M1),
        }
    }
}

/// A matrix `(out, in)` of the blocks of a kind.
pub(crate) fn read_blocks(
    kind: BlockKind,
    shape: (usize, usize),
    bytes: &[u8],
) -> Parsed<Quantized> {
    if !shape.1.is_multiple_of(kind.elements()) {
        return Err(format!(
            "rows have {} elements, expected a multiple of {} for {kind:?}",
            shape.1,
            kind.elements()
        ));
    }
    let blocks = elements(&[shape.0, shape.1]).map(|count| count / kind.elements());
    let expected = blocks.and_then(|blocks| blocks.checked_mul(kind.bytes()));
    let (Some(blocks), true) = (blocks, expected == Some(bytes.len())) else {
        return Err(format!(
            "{kind:?} has {} bytes, expected those of {} x {} elements",
            bytes.len(),
            shape.0,
            shape.1
        ));
    };
    let levels = kind.levels();
    let size = kind.elements() * levels.bits() / 8;
    let mut codes = vec![0u8; blocks * size];
    codes.par_chunks_mut(size).zip(bytes.par_chunks(kind.bytes())).for_each(|(packed, block)| {
        let mut codes = [0u8; 256];
        let codes = &mut codes[..kind.elements()];
        unpack_block(kind, block, codes);
        pack(codes, levels.bits(), packed);
    });
    let scales = read_scales(kind, bytes)?;
    assembled(Quantized::new(shape, levels, kind.group(), bytes_tensor(codes)?, scales))
}

/// The blocks of a matrix that has the codes and scales of the kind.
pub(crate) fn write_blocks(kind: BlockKind, matrix: &Quantized) -> Parsed<Vec<u8>> {
    let matrix = on_host(matrix)?;
    let (shape, levels) = (matrix.shape(), matrix.levels());
    if levels != kind.levels()
        || matrix.group() != kind.group()
        || !shape.1.is_multiple_of(kind.elements())
    {
        return Err(format!(
            "a matrix {shape:?} of {levels:?} in groups of {}, expected {kind:?}",
            matrix.group()
        ));
    }
    let size = kind.elements() * levels.bits() / 8;
    let mut bytes = vec![0u8; shape.0 * shape.1 / kind.elements() * kind.bytes()];
    let packed = bytes_of(matrix.codes())?;
    let blocks = bytes.par_chunks_mut(kind.bytes()).zip(packed.par_chunks(size));
    blocks.for_each(|(block, packed)| {
        let mut codes = [0u8; 256];
        let codes = &mut codes[..kind.elements()];
        unpack(packed, levels.bits(), codes);
        pack_block(kind, codes, block);
    });
    write_scales(kind, matrix.scales(), &mut bytes)?;
    Ok(bytes)
}

/// Codes as a stream of bits, eight at a time.
fn pack(codes: &[u8], bits: usize, out: &mut [u8]) {
    for (codes, out) in codes.chunks(8).zip(out.chunks_mut(bits)) {
        let word = codes.iter().rev().fold(0u64, |word, code| word << bits | u64::from(*code));
        out.copy_from_slice(&word.to_le_bytes()[..out.len()]);
    }
}

/// The codes of a stream of bits.
fn unpack(stream: &[u8], bits: usize, codes: &mut [u8]) {
    let mask = ((1u32 << bits) - 1) as u8;
    for (stream, codes) in stream.chunks(bits).zip(codes.chunks_mut(8)) {
        let word = stream.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
        for (index, code) in codes.iter_mut().enumerate() {
            *code = (word >> (index * bits)) as u8 & mask;
        }
    }
}

/// Where in a block the bytes of low bits and of high bits begin.
fn places(kind: BlockKind) -> (usize, usize) {
    match kind {
        BlockKind::Q4_0 | BlockKind::IQ4_NL | BlockKind::Q8_0 => (2, 0),
        BlockKind::MXFP4 => (1, 0),
        BlockKind::Q4_1 => (4, 0),
        BlockKind::Q5_0 => (6, 2),
        BlockKind::Q5_1 => (8, 4),
        BlockKind::Q2_K => (16, 0),
        BlockKind::Q3_K => (32, 0),
        BlockKind::Q4_K => (16, 0),
        BlockKind::Q5_K => (48, 16),
        BlockKind::Q6_K => (0, 128),
        BlockKind::IQ4_XS => (8, 0),
    }
}

/// Elements whose low halves lie in low halves of bytes, and whose successors lie in the high ones.
fn half(kind: BlockKind) -> usize {
    match kind {
        BlockKind::Q4_K | BlockKind::Q5_K => 32,
        BlockKind::Q6_K => 64,
        _ => 16,
    }
}

/// Bits of an element in the bytes of low bits.
fn low_bits(kind: BlockKind) -> usize {
    match kind {
        BlockKind::Q2_K | BlockKind::Q3_K => 2,
        _ => 4,
    }
}

/// The place of the low bits of element `index` where they are two: byte and shift.
fn quarter(index: usize) -> (usize, usize) {
    (index / 128 * 32 + index % 32, index % 128 / 32 * 2)
}

/// The place of a bit or two bits above the low ones of element `index`: byte and shift.
fn high(kind: BlockKind, index: usize) -> Option<(usize, usize)> {
    match kind {
        BlockKind::Q5_0 | BlockKind::Q5_1 => Some((index / 8, index % 8)),
        BlockKind::Q3_K | BlockKind::Q5_K => Some((index % 32, index / 32)),
        BlockKind::Q6_K => Some(quarter(index)),
        _ => None,
    }
}

/// The codes of a block, a byte each.
fn unpack_block(kind: BlockKind, block: &[u8], codes: &mut [u8]) {
    let (low, above) = places(kind);
    if kind == BlockKind::Q8_0 {
        for (code, byte) in codes.iter_mut().zip(&block[low..]) {
            *code = byte ^ 0x80;
        }
        return;
    }
    let (half, mask) = (half(kind), if kind == BlockKind::Q6_K { 3 } else { 1 });
    let bits = low_bits(kind);
    if bits == 2 {
        for (index, code) in codes.iter_mut().enumerate() {
            let (byte, shift) = quarter(index);
            *code = block[low + byte] >> shift & 3;
        }
    } else {
        for (codes, bytes) in codes.chunks_mut(2 * half).zip(block[low..].chunks(half)) {
            let (first, second) = codes.split_at_mut(half);
            for ((first, second), byte) in first.iter_mut().zip(second).zip(bytes) {
                (*first, *second) = (byte & 15, byte >> 4);
            }
        }
    }
    for (index, code) in codes.iter_mut().enumerate() {
        if let Some((byte, shift)) = high(kind, index) {
            *code |= (block[above + byte] >> shift & mask) << bits;
        }
    }
}

/// The reverse of [`unpack_block`] on a block whose codes are 0.
fn pack_block(kind: BlockKind, codes: &[u8], block: &mut [u8]) {
    let (low, above) = places(kind);
    if kind == BlockKind::Q8_0 {
        for (code, byte) in codes.iter().zip(&mut block[low..]) {
            *byte = code ^ 0x80;
        }
        return;
    }
    let (half, bits) = (half(kind), low_bits(kind));
    if bits == 2 {
        for (index, code) in codes.iter().enumerate() {
            let (byte, shift) = quarter(index);
            block[low + byte] |= (code & 3) << shift;
        }
    } else {
        for (codes, bytes) in codes.chunks(2 * half).zip(block[low..].chunks_mut(half)) {
            let (first, second) = codes.split_at(half);
            for ((first, second), byte) in first.iter().zip(second).zip(bytes) {
                *byte = first & 15 | second << 4;
            }
        }
    }
    for (index, code) in codes.iter().enumerate() {
        if let Some((byte, shift)) = high(kind, index) {
            block[above + byte] |= code >> bits << shift;
        }
    }
}

/// The f16 at a place of a block.
fn f16_at(block: &[u8], place: usize) -> f16 {
    f16::from_le_bytes([block[place], block[place + 1]])
}

fn read_scales(kind: BlockKind, bytes: &[u8]) -> Parsed<Scales> {
    let blocks = || bytes.chunks_exact(kind.bytes());
    let floats = |place: usize| f16_tensor(blocks().map(|block| f16_at(block, place)).collect());
    Ok(match kind {
        BlockKind::Q4_0 | BlockKind::Q5_0 | BlockKind::Q8_0 | BlockKind::IQ4_NL => {
            Scales::Plain { scales: floats(0)?, offsets: None }
        }
        BlockKind::MXFP4 => Scales::E8m0(bytes_tensor(blocks().map(|block| block[0]).collect())?),
        BlockKind::Q4_1 | BlockKind::Q5_1 => {
            Scales::Plain { scales: floats(0)?, offsets: Some(floats(2)?) }
        }
        BlockKind::Q4_K | BlockKind::Q5_K => {
            let codes = |second: usize| {
                let code = |block: &[u8], index: usize| six_bits(&block[4..16], index)[second];
                let codes = blocks().flat_map(|block| (0..8).map(move |index| code(block, index)));
                bytes_tensor(codes.collect())
            };
            Scales::Blocks {
                scales: codes(0)?,
                signed: false,
                large: floats(0)?,
                offsets: Some((codes(1)?, floats(2)?)),
            }
        }
        BlockKind::Q2_K => {
            let codes = |shift: usize| {
                let codes = blocks().flat_map(|block| &block[..16]);
                bytes_tensor(codes.map(|code| code >> shift & 15).collect())
            };
            Scales::Blocks {
                scales: codes(0)?,
                signed: false,
                large: floats(80)?,
                offsets: Some((codes(4)?, floats(82)?)),
            }
        }
        BlockKind::Q3_K | BlockKind::IQ4_XS => {
            let (place, count) = of_signed(kind);
            let code = |block: &[u8], index: usize| {
                let [(low, low_shift), (high, high_shift)] = signed_places(kind, index);
                let code = block[low] >> low_shift & 15 | (block[high] >> high_shift & 3) << 4;
                code.wrapping_sub(32)
            };
            let codes = blocks().flat_map(|block| (0..count).map(move |index| code(block, index)));
            Scales::Blocks {
                scales: bytes_tensor(codes.collect())?,
                signed: true,
                large: floats(place)?,
                offsets: None,
            }
        }
        BlockKind::Q6_K => Scales::Blocks {
            scales: bytes_tensor(blocks().flat_map(|block| &block[192..208]).copied().collect())?,
            signed: true,
            large: floats(208)?,
            offsets: None,
        },
    })
}

fn write_scales(kind: BlockKind, scales: &Scales, bytes: &mut [u8]) -> Parsed<()> {
    let mut floats = |place: usize, numbers: &candle_core::Tensor| -> Parsed<()> {
        for (block, number) in bytes.chunks_exact_mut(kind.bytes()).zip(f16s_of(numbers)?) {
            block[place..place + 2].copy_from_slice(&number.to_le_bytes());
        }
        Ok(())
    };
    match (kind, scales) {
        (
            BlockKind::Q4_0 | BlockKind::Q5_0 | BlockKind::Q8_0 | BlockKind::IQ4_NL,
            Scales::Plain { scales, offsets: None },
        ) => floats(0, scales),
        (BlockKind::Q4_1 | BlockKind::Q5_1, Scales::Plain { scales, offsets: Some(offsets) }) => {
            floats(0, scales)?;
            floats(2, offsets)
        }
        (
            BlockKind::Q2_K | BlockKind::Q4_K | BlockKind::Q5_K,
            Scales::Blocks {
                scales,
                signed: false,
                large,
                offsets: Some((offsets, large_offsets)),
            },
        ) => {
            // Where the two large numbers lie, the largest code, and how many there are.
            let (place, most, count) =
                if kind == BlockKind::Q2_K { (80, 15, 16) } else { (0, 63, 8) };
            floats(place, large)?;
            floats(place + 2, large_offsets)?;
            let (scales, offsets) = (bytes_of(scales)?, bytes_of(offsets)?);
            if let Some(code) = scales.iter().chain(&offsets).find(|code| **code > most) {
                return Err(format!(
                    "a scale's code is {code}, expected at most {most} for {kind:?}"
                ));
            }
            let codes = scales.chunks(count).zip(offsets.chunks(count));
            for (block, (scales, offsets)) in bytes.chunks_exact_mut(kind.bytes()).zip(codes) {
                for (index, (scale, offset)) in scales.iter().zip(offsets).enumerate() {
                    match kind {
                        BlockKind::Q2_K => block[index] = scale | offset << 4,
                        _ => set_six_bits(&mut block[4..16], index, [*scale, *offset]),
                    }
                }
            }
            Ok(())
        }
        (
            BlockKind::Q3_K | BlockKind::IQ4_XS,
            Scales::Blocks { scales, signed: true, large, offsets: None },
        ) => {
            let (place, count) = of_signed(kind);
            floats(place, large)?;
            let codes = signed_six_bits(kind, scales)?;
            for (block, codes) in bytes.chunks_exact_mut(kind.bytes()).zip(codes.chunks(count)) {
                for (index, code) in codes.iter().enumerate() {
                    let [(low, low_shift), (high, high_shift)] = signed_places(kind, index);
                    block[low] |= (code & 15) << low_shift;
                    block[high] |= code >> 4 << high_shift;
                }
            }
            Ok(())
        }
        (BlockKind::MXFP4, Scales::E8m0(exponents)) => {
            for (block, exponent) in bytes.chunks_exact_mut(kind.bytes()).zip(bytes_of(exponents)?)
            {
                block[0] = exponent;
            }
            Ok(())
        }
        (BlockKind::Q6_K, Scales::Blocks { scales, signed: true, large, offsets: None }) => {
            floats(208, large)?;
            let codes = bytes_of(scales)?;
            for (block, codes) in bytes.chunks_exact_mut(kind.bytes()).zip(codes.chunks(16)) {
                block[192..208].copy_from_slice(codes);
            }
            Ok(())
        }
        _ => Err(format!("a matrix of other scales, expected those of {kind:?}")),
    }
}

/// Where a block with signed scales of 6 bits has the large number, and how many of them it has.
fn of_signed(kind: BlockKind) -> (usize, usize) {
    if kind == BlockKind::Q3_K { (108, 16) } else { (0, 8) }
}

/// The bytes and shifts of the low four and the high two bits of such a scale.
fn signed_places(kind: BlockKind, index: usize) -> [(usize, usize); 2] {
    if kind == BlockKind::Q3_K {
        [(96 + index % 8, index / 8 * 4), (104 + index % 4, index / 4 * 2)]
    } else {
        [(4 + index / 2, index % 2 * 4), (2 + index / 4, index % 4 * 2)]
    }
}

/// Signed codes of scales with 32 added, as which they have 6 bits.
fn signed_six_bits(kind: BlockKind, scales: &candle_core::Tensor) -> Parsed<Vec<u8>> {
    let codes: Vec<u8> = bytes_of(scales)?.into_iter().map(|code| code.wrapping_add(32)).collect();
    match codes.iter().find(|code| **code > 63) {
        None => Ok(codes),
        Some(code) => {
            let code = i16::from(code.wrapping_sub(32) as i8);
            Err(format!("a scale's code is {code}, expected -32 to 31 for {kind:?}"))
        }
    }
}

/// The codes of scale and offset `index` of eight, 6 bits each, in twelve bytes: those from the fifth on have their
/// upper bits above those of the first.
fn six_bits(bytes: &[u8], index: usize) -> [u8; 2] {
    match index < 4 {
        true => [bytes[index] & 63, bytes[index + 4] & 63],
        false => [
            bytes[index + 4] & 15 | bytes[index - 4] >> 6 << 4,
            bytes[index + 4] >> 4 | bytes[index] >> 6 << 4,
        ],
    }
}

/// The reverse of [`six_bits`] on bytes that are 0 where it has not been called yet.
fn set_six_bits(bytes: &mut [u8], index: usize, [scale, offset]: [u8; 2]) {
    if index < 4 {
        bytes[index] |= scale;
        bytes[index + 4] |= offset;
    } else {
        bytes[index + 4] |= scale & 15 | offset << 4;
        bytes[index - 4] |= scale >> 4 << 6;
        bytes[index] |= offset >> 4 << 6;
    }
}
