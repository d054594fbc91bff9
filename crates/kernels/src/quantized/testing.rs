//! Matrices of every kind, made up.

use super::{BLOCK, E2M1, Levels, NESTED, NF4, Quantized, Scales};
use crate::testing::{random, values};
use candle_core::{DType, Device, Tensor};

/// ggml's table of 4 bits.
const IQ4: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0,
    89.0, 113.0,
];

/// Bytes that follow from the count and the seed alone.
fn bytes(count: usize, seed: u64) -> Tensor {
    let bytes: Vec<u8> =
        values(&random(&[count], seed)).iter().map(|number| (number * 1e6) as i64 as u8).collect();
    Tensor::from_vec(bytes, count, &Device::Cpu).unwrap()
}

/// Numbers of about `size` in `dtype`.
fn floats(count: usize, seed: u64, size: f64, dtype: DType) -> Tensor {
    random(&[count], seed).affine(size, size * 0.3).unwrap().to_dtype(dtype).unwrap()
}

/// A matrix `(outer, inner)` of these levels and groups, with plain scales.
pub fn plain(
    shape: (usize, usize),
    levels: Levels,
    group: usize,
    dtype: DType,
    offsets: bool,
) -> Quantized {
    let elements = shape.0 * shape.1;
    let groups = elements.div_ceil(group);
    let scales = Scales::Plain {
        scales: floats(groups, 2, 0.05, dtype),
        offsets: offsets.then(|| floats(groups, 3, 0.2, dtype)),
    };
    Quantized::new(shape, levels, group, codes(elements, levels), scales).unwrap()
}

/// Random codes, none of which is NaN.
fn codes(elements: usize, levels: Levels) -> Tensor {
    let count = (elements * levels.bits()).div_ceil(8);
    let codes = bytes(count, 1);
    if levels != Levels::E4m3 {
        return codes;
    }
    let codes = codes.to_vec1::<u8>().unwrap().into_iter().map(|code| code & 0xbf);
    Tensor::from_iter(codes, &Device::Cpu).unwrap()
}

/// A matrix of every kind of levels and scales whose groups fit: those of blocks of 256 need whole ones.
pub fn every_kind(shape: (usize, usize)) -> Vec<(String, Quantized)> {
    let elements = shape.0 * shape.1;
    let mut kinds = Vec::new();
    let mut add = |name: String, quantized| kinds.push((name, quantized));
    for bits in [2, 3, 4, 5, 6, 8] {
        let levels = Levels::Integers { bits, zero: 0 };
        for (group, dtype) in [(32, DType::BF16), (64, DType::F16), (128, DType::F32)] {
            add(format!("affine {bits}"), plain(shape, levels, group, dtype, true));
        }
        let levels = Levels::Integers { bits, zero: 1 << (bits - 1) };
        add(format!("symmetric {bits}"), plain(shape, levels, 32, DType::F16, false));
    }
    add("fp8".into(), plain(shape, Levels::E4m3, 128, DType::F32, false));
    let int8 = Levels::Integers { bits: 8, zero: 128 };
    add("int8 by rows".into(), plain(shape, int8, shape.1.max(1), DType::F32, false));
    let groups = |group: usize| elements.div_ceil(group);
    let nf4 = Levels::Table(&NF4);
    let nested = Scales::Nested {
        codes: bytes(groups(64), 4),
        table: floats(256, 5, 0.1, DType::F32),
        scales: floats(groups(64).div_ceil(NESTED), 6, 0.5, DType::F32),
        offset: 0.125,
    };
    let codes_of = |levels| codes(elements, levels);
    add("nf4".into(), Quantized::new(shape, nf4, 64, codes_of(nf4), nested).unwrap());
    let e2m1 = Levels::Table(&E2M1);
    let exponents = bytes(groups(32), 7).to_vec1::<u8>().unwrap();
    let exponents = exponents.into_iter().map(|code| 120 + code % 8);
    let exponents = Scales::E8m0(Tensor::from_iter(exponents, &Device::Cpu).unwrap());
    add("mxfp4".into(), Quantized::new(shape, e2m1, 32, codes_of(e2m1), exponents).unwrap());
    let scales = codes(8 * groups(16) / 8, Levels::E4m3);
    let scales = Scales::E4m3 { scales, overall: 0.01 };
    add("nvfp4".into(), Quantized::new(shape, e2m1, 16, codes_of(e2m1), scales).unwrap());
    if elements.is_multiple_of(BLOCK) {
        let large = |seed| floats(elements / BLOCK, seed, 0.001, DType::F16);
        let blocks = |group, signed, offsets: bool| Scales::Blocks {
            scales: bytes(groups(group), 8),
            signed,
            large: large(9),
            offsets: offsets.then(|| (bytes(groups(group), 10), large(11))),
        };
        for (name, bits, zero, group, signed, offsets) in [
            ("q2_k", 2, 0, 16, false, true),
            ("q3_k", 3, 4, 16, true, false),
            ("q4_k", 4, 0, 32, false, true),
            ("q5_k", 5, 0, 32, false, true),
            ("q6_k", 6, 32, 16, true, false),
        ] {
            let levels = Levels::Integers { bits, zero };
            let scales = blocks(group, signed, offsets);
            let quantized = Quantized::new(shape, levels, group, codes_of(levels), scales);
            add(name.into(), quantized.unwrap());
        }
        let (iq4, scales) = (Levels::Table(&IQ4), blocks(32, true, false));
        add("iq4_xs".into(), Quantized::new(shape, iq4, 32, codes_of(iq4), scales).unwrap());
    }
    kinds
}
