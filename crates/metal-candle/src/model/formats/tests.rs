//! Against what bitsandbytes, MLX, ggml and PyTorch made of the same numbers (`fixtures/recipes/quantized.py`), bit for bit.

use super::gguf_blocks::{BlockKind, read_blocks, write_blocks};
use super::{Parsed, Part, Stored, awq, bitsandbytes, fp8, gptq, mlx};
use crate::random::SplitMix64;
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use metal_candle_kernels::quantized::{
    E2M1, FP4, Format, IQ4, Levels, NF4, Quantized, Scales, dynamic_map, quantize,
};
use safetensors::SafeTensors;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::LazyLock;

struct Owned {
    dtype: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Owned {
    fn stored(&self) -> Stored<'_> {
        Stored { dtype: &self.dtype, shape: &self.shape, bytes: &self.bytes }
    }

    fn f32s(&self) -> Vec<f32> {
        self.stored().f32s("it").unwrap()
    }
}

static FIXTURE: LazyLock<BTreeMap<String, Owned>> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/quantized/parts.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let owned = tensors.iter().map(|(name, view)| {
        let dtype = format!("{:?}", view.dtype());
        let owned = Owned { dtype, shape: view.shape().to_vec(), bytes: view.data().to_vec() };
        (name.to_string(), owned)
    });
    owned.collect()
});

fn fixture(name: &str) -> &'static Owned {
    FIXTURE.get(name).unwrap_or_else(|| panic!("no {name}"))
}

/// The parts of a layer in the fixture.
fn parts(layer: &str) -> impl Fn(&str) -> Option<Stored<'static>> {
    move |name| FIXTURE.get(&format!("{layer}.{name}")).map(Owned::stored)
}

const DTYPES: [(&str, DType); 3] =
    [("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)];

fn input(dtype: &str) -> Tensor {
    let owned = fixture(&format!("x.{dtype}"));
    owned.stored().floats("x").unwrap().reshape(&owned.shape[..]).unwrap()
}

/// As the recipe's `generated`.
fn generated(outer: usize, inner: usize, factor: impl Fn(usize) -> f32) -> Tensor {
    let number = |index: usize| {
        let mixed = (index as u64 * 2_654_435_761) as u32 >> 8;
        (mixed as f32 - 8_388_608.0) / 8_388_608.0 * factor(index / inner)
    };
    let numbers: Vec<f32> = (0..outer * inner).map(number).collect();
    Tensor::from_vec(numbers, (outer, inner), &Device::Cpu).unwrap()
}

/// All bits of a matrix, with what they belong to.
fn bits(matrix: &Quantized) -> Vec<(String, Vec<u8>)> {
    let bytes = |tensor: &Tensor| match tensor.dtype() {
        DType::U8 => tensor.to_vec1::<u8>().unwrap(),
        _ => super::stored_floats(tensor).unwrap().1,
    };
    let scales = match matrix.scales() {
        Scales::Plain { scales, offsets } => {
            let offsets = offsets.iter().map(|offsets| ("offsets", bytes(offsets)));
            [("scales", bytes(scales))].into_iter().chain(offsets).collect()
        }
        Scales::E8m0(scales) => vec![("e8m0", bytes(scales))],
        Scales::E4m3 { scales, overall } => {
            vec![("e4m3", bytes(scales)), ("overall", overall.to_le_bytes().to_vec())]
        }
        Scales::Nested { codes, table, scales, offset } => vec![
            ("scales' offset", offset.to_le_bytes().to_vec()),
            ("scales' table", bytes(table)),
            ("scales' scales", bytes(scales)),
            ("scales' codes", bytes(codes)),
        ],
        Scales::Blocks { scales, signed, large, offsets } => {
            let mut all = vec![
                ("large", bytes(large)),
                ("scales", bytes(scales)),
                ("signed", vec![u8::from(*signed)]),
            ];
            if let Some((offsets, large)) = offsets {
                all.extend([("large offsets", bytes(large)), ("offsets", bytes(offsets))]);
            }
            all
        }
    };
    let kind = format!("{:?} {:?} {}", matrix.shape(), matrix.levels(), matrix.group());
    let scales = scales.into_iter().map(|(name, bytes)| (name.to_string(), bytes));
    scales.chain([(kind, bytes(matrix.codes()))]).collect()
}

#[track_caller]
fn assert_same(case: &str, found: &Quantized, expected: &Quantized) {
    let (found, expected) = (bits(found), bits(expected));
    assert_eq!(found.len(), expected.len(), "{case}");
    for ((name, found), (other, expected)) in found.iter().zip(&expected) {
        assert_eq!(name, other, "{case}");
        assert_eq!(found.len(), expected.len(), "{case}: {name}");
        let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
        if let Some(first) = first {
            let count = found.iter().zip(expected).filter(|(a, b)| a != b).count();
            panic!(
                "{case}: {count} bytes of {name} differ from byte {first} on: {:?}, expected {:?}",
                &found[first..(first + 8).min(found.len())],
                &expected[first..(first + 8).min(expected.len())]
            );
        }
    }
}

#[track_caller]
fn assert_numbers(case: &str, matrix: &Quantized, expected: &[f32]) {
    let found = matrix.dequantize(DType::F32).unwrap().flatten_all().unwrap();
    let found = found.to_vec1::<f32>().unwrap();
    assert_eq!(found.len(), expected.len(), "{case}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
        assert!(same, "{case}: number {index} is {found:e}, expected {expected:e}");
    }
}

/// Parts that are written are those that were read.
#[track_caller]
fn assert_written(case: &str, layer: &str, written: Vec<Part>) {
    for part in &written {
        let expected = fixture(&format!("{layer}.{}", part.name));
        assert_eq!(part.dtype, expected.dtype, "{case}: {}", part.name);
        if part.name.contains("quant_state") {
            let value = |bytes| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
            assert_eq!(value(&part.bytes), value(&expected.bytes), "{case}: {}", part.name);
        } else {
            assert_eq!(part.shape, expected.shape, "{case}: {}", part.name);
            assert!(part.bytes == expected.bytes, "{case}: {} differs", part.name);
        }
    }
    let start = format!("{layer}.");
    let all = FIXTURE.keys().filter_map(|name| name.strip_prefix(&start));
    let all: Vec<&str> =
        all.filter(|name| !matches!(*name, "numbers") && !name.ends_with(".numbers")).collect();
    let missing = all.iter().find(|name| written.iter().all(|part| part.name != **name));
    assert_eq!(missing, None, "{case}: not written");
}

#[test]
fn levels_are_the_peers() {
    let tables: [(&str, &[f32]); 5] =
        [("nf4", &NF4), ("fp4", &FP4), ("iq4", &IQ4), ("e2m1", &E2M1), ("dynamic", &dynamic_map())];
    for (name, table) in tables {
        let expected = fixture(&format!("table.{name}")).f32s();
        let bits = |table: &[f32]| table.iter().map(|level| level.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(table), bits(&expected), "{name}");
    }
    let codes = Tensor::from_vec((0..=255u8).collect(), 256, &Device::Cpu).unwrap();
    let scales = Tensor::from_vec(vec![1f32], 1, &Device::Cpu).unwrap();
    let scales = Scales::Plain { scales, offsets: None };
    let all = Quantized::new((1, 256), Levels::E4m3, 256, codes, scales).unwrap();
    assert_numbers("e4m3", &all, &fixture("table.e4m3").f32s());
}

#[test]
fn four_bits_are_bitsandbytes() {
    for (dtype, _) in DTYPES {
        for kind in ["nf4", "fp4"] {
            for nested in [false, true] {
                let layer = format!("{kind}{}.{dtype}", if nested { ".nested" } else { "" });
                let format = match kind {
                    "nf4" => Format::Nf4 { block: 64, nested },
                    _ => Format::Fp4 { block: 64, nested },
                };
                let read = bitsandbytes::read(parts(&layer)).unwrap();
                assert_same(&layer, &quantize(&input(dtype), format).unwrap(), &read);
                if dtype == "f32" {
                    assert_numbers(&layer, &read, &fixture(&format!("{layer}.numbers")).f32s());
                }
                let before = [("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16")];
                let before = before.iter().find(|(short, _)| *short == dtype).unwrap().1;
                assert_written(&layer, &layer, bitsandbytes::write(&read, before).unwrap());
            }
        }
    }
}

#[test]
fn four_bits_may_end_within_a_block_and_a_byte() {
    let format = Format::Nf4 { block: 32, nested: false };
    let read = bitsandbytes::read(parts("nf4.odd")).unwrap();
    assert_same("nf4.odd", &quantize(&generated(7, 37, |_| 1.0), format).unwrap(), &read);
    assert_numbers("nf4.odd", &read, &fixture("nf4.odd.numbers").f32s());
    assert_written("nf4.odd", "nf4.odd", bitsandbytes::write(&read, "float32").unwrap());
}

/// As the fixture has it, but with the weight that was found, which it leaves out.
#[track_caller]
fn assert_same_scales(layer: &str, found: &Quantized) {
    let bytes = super::bytes_of(found.codes()).unwrap();
    let bytes: Vec<u8> = bytes.iter().map(|byte| byte.rotate_left(4)).collect();
    let weight = Stored { dtype: "U8", shape: &[bytes.len(), 1], bytes: &bytes };
    let mut rest = BTreeMap::new();
    let start = format!("{layer}.");
    for (name, owned) in FIXTURE.iter() {
        if let Some(name) = name.strip_prefix(&start) {
            rest.insert(name, owned.stored());
        }
    }
    rest.insert("weight", weight);
    assert_same(layer, found, &bitsandbytes::read(|name| rest.get(name).copied()).unwrap());
}

#[test]
fn scales_in_8_bits_are_bitsandbytes() {
    let x = generated(64, 1024, |row| (row + 1) as f32);
    assert_same_scales("nf4.many", &quantize(&x, Format::Nf4 { block: 64, nested: true }).unwrap());
    let scales = fixture("edges").stored().floats("edges").unwrap().unsqueeze(1).unwrap();
    let x = scales.pad_with_zeros(1, 0, 31).unwrap();
    assert_same_scales(
        "nf4.edges",
        &quantize(&x, Format::Nf4 { block: 32, nested: true }).unwrap(),
    );
}

#[test]
fn affine_matrices_are_mlx() {
    for (dtype, _) in DTYPES {
        for (bits, group) in [(2, 32), (3, 64), (4, 64), (4, 32), (5, 128), (6, 64), (8, 128)] {
            let layer = format!("affine{bits}.{group}.{dtype}");
            let mode = mlx::Mode::Affine { bits, group };
            let read = mlx::read(mode, parts(&layer)).unwrap();
            let found = quantize(&input(dtype), Format::Affine { bits, group }).unwrap();
            assert_same(&layer, &found, &read);
            assert_written(&layer, &layer, mlx::write(mode, &read).unwrap());
            match dtype {
                "f32" => {
                    assert_numbers(&layer, &read, &fixture(&format!("{layer}.numbers")).f32s())
                }
                _ if (bits, group) == (4, 64) => assert_rounded_more(&layer, &read),
                _ => {}
            }
        }
    }
}

/// MLX rounds to the scales' dtype after each step.
#[track_caller]
fn assert_rounded_more(layer: &str, matrix: &Quantized) {
    let Scales::Plain { scales, offsets: Some(offsets) } = matrix.scales() else { panic!() };
    let unit = if scales.dtype() == DType::BF16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
    let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
    let (scales, offsets) = (wide(scales), wide(offsets));
    let found = matrix.dequantize(DType::F32).unwrap().flatten_all().unwrap();
    let found = found.to_vec1::<f32>().unwrap();
    let expected = fixture(&format!("{layer}.numbers")).f32s();
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let group = index / matrix.group();
        let largest = offsets[group].abs() + 15.0 * scales[group].abs();
        // f16 has units of 2^-24 at the least, and steps that end above 65504 are infinite.
        let bound = unit * largest + 2f32.powi(-24);
        let close = (found - expected).abs() <= bound || largest > 65504.0;
        assert!(close, "{layer}: number {index} is {found:e}, expected {expected:e}");
    }
}

#[test]
fn microscaling_formats_are_mlx() {
    let modes = [
        ("mxfp4", mlx::Mode::Mxfp4, Format::Mxfp4),
        ("mxfp8", mlx::Mode::Mxfp8, Format::Mxfp8),
        ("nvfp4", mlx::Mode::Nvfp4, Format::Nvfp4),
    ];
    for (name, mode, format) in modes {
        for (dtype, stored) in DTYPES {
            let layer = format!("{name}.{dtype}");
            // As the recipe, without what MLX's exponents are too few for.
            let x = input(dtype).to_dtype(DType::F32).unwrap().flatten_all().unwrap();
            let x = x.to_vec1::<f32>().unwrap().into_iter();
            let x = x.map(|x| if x.abs() < 1e-35 { 0.0 } else { x }).collect::<Vec<_>>();
            let x = Tensor::from_vec(x, (8, 256), &Device::Cpu).unwrap().to_dtype(stored).unwrap();
            let read = mlx::read(mode, parts(&layer)).unwrap();
            assert_same(&layer, &quantize(&x, format).unwrap(), &read);
            assert_written(&layer, &layer, mlx::write(mode, &read).unwrap());
            if dtype == "f32" {
                assert_numbers(&layer, &read, &fixture(&format!("{layer}.numbers")).f32s());
            }
        }
    }
}

/// Numbers too small for e8m0 become the smallest that there are.
#[test]
fn exponents_end_at_their_smallest() {
    let x = Tensor::full(1e-40f32, (1, 32), &Device::Cpu).unwrap();
    let matrix = quantize(&x, Format::Mxfp4).unwrap();
    let Scales::E8m0(scales) = matrix.scales() else { panic!() };
    assert_eq!(scales.to_vec1::<u8>().unwrap(), [0]);
    let found = matrix.dequantize(DType::F32).unwrap().to_vec2::<f32>().unwrap();
    assert!(found[0].iter().all(|found| *found <= 3e-39), "{found:?}");
}

const KINDS: [BlockKind; 13] = [
    BlockKind::Q4_0,
    BlockKind::Q4_1,
    BlockKind::Q5_0,
    BlockKind::Q5_1,
    BlockKind::Q8_0,
    BlockKind::Q2_K,
    BlockKind::Q3_K,
    BlockKind::Q4_K,
    BlockKind::Q5_K,
    BlockKind::Q6_K,
    BlockKind::IQ4_NL,
    BlockKind::IQ4_XS,
    BlockKind::MXFP4,
];

#[test]
fn blocks_are_ggmls() {
    for kind in KINDS {
        let case = format!("{kind:?}");
        let blocks = fixture(&format!("{case}.blocks"));
        let read = read_blocks(kind, (8, 256), &blocks.bytes).unwrap();
        assert_numbers(&case, &read, &fixture(&format!("{case}.numbers")).f32s());
        assert!(write_blocks(kind, &read).unwrap() == blocks.bytes, "{case}");
        let format = match kind {
            BlockKind::Q4_0 => Format::Q4_0,
            BlockKind::Q4_1 => Format::Q4_1,
            BlockKind::Q5_0 => Format::Q5_0,
            BlockKind::Q5_1 => Format::Q5_1,
            BlockKind::Q8_0 => Format::Q8_0,
            BlockKind::Q4_K => Format::Q4K,
            BlockKind::Q5_K => Format::Q5K,
            BlockKind::Q6_K => Format::Q6K,
            _ => continue,
        };
        assert_same(&case, &quantize(&input("f32"), format).unwrap(), &read);
    }
}

/// Also such as no quantiser makes.
#[test]
fn blocks_of_any_bytes_are_written_as_they_were_read() {
    let mut random = SplitMix64::new(3);
    for kind in KINDS {
        let count = 5 * 512 / kind.elements() * kind.bytes();
        let bytes: Vec<u8> = (0..count).map(|_| random.below(256) as u8).collect();
        let read = read_blocks(kind, (5, 512), &bytes).unwrap();
        assert!(write_blocks(kind, &read).unwrap() == bytes, "{kind:?}");
    }
}

#[test]
fn blocks_of_another_size_are_errors() {
    for kind in KINDS {
        let bytes = vec![0u8; 2 * kind.bytes()];
        let inner = kind.elements();
        assert!(read_blocks(kind, (2, inner), &bytes).is_ok());
        for (shape, length) in [
            ((2, inner), bytes.len() - 1),
            ((3, inner), bytes.len()),
            ((2, inner / 2), bytes.len()),
            ((usize::MAX / 2, inner), bytes.len()),
            ((usize::MAX / inner, inner), bytes.len()),
        ] {
            let error = read_blocks(kind, shape, &bytes[..length]).unwrap_err();
            assert!(error.contains("expected"), "{error}");
        }
        let other = if kind == BlockKind::Q4_0 { BlockKind::Q8_0 } else { BlockKind::Q4_0 };
        let matrix = read_blocks(kind, (2, inner), &bytes).unwrap();
        let error = write_blocks(other, &matrix).unwrap_err();
        assert!(error.contains("expected"), "{error}");
    }
}

#[test]
fn eight_bits_are_pytorchs() {
    for (layer, format) in [("fp8", Format::Fp8Rows), ("int8", Format::Int8Rows)] {
        let read = fp8::read(None, parts(layer)).unwrap();
        assert_same(layer, &quantize(&input("f32"), format).unwrap(), &read);
        assert_numbers(layer, &read, &fixture(&format!("{layer}.numbers")).f32s());
    }
}

#[test]
fn blocks_of_rows_and_columns_share_a_scale() {
    let x = generated(130, 136, |row| (row + 1) as f32);
    let read = fp8::read(Some((128, 128)), parts("fp8.blocks")).unwrap();
    assert_same("fp8.blocks", &quantize(&x, Format::Fp8Blocks).unwrap(), &read);
    // 8 divides both 128 and 136.
    assert_eq!(read.group(), 8);
    let scales = fixture("fp8.blocks.weight_scale_inv").f32s();
    let unscaled = fp8::read(None, |name| match name {
        "weight" => parts("fp8.blocks")(name),
        "weight_scale" => Some(Stored { dtype: "F32", shape: &[], bytes: &[0, 0, 128, 63] }),
        _ => None,
    });
    let codes = unscaled.unwrap().dequantize(DType::F32).unwrap().to_vec2::<f32>().unwrap();
    let expected: Vec<f32> = (0..130 * 136)
        .map(|index| (index / 136, index % 136))
        .map(|(row, column)| codes[row][column] * scales[row / 128 * 2 + column / 128])
        .collect();
    assert_numbers("fp8.blocks", &read, &expected);
}

fn gptq_config(bits: usize) -> gptq::Config {
    gptq::Config { bits, group: Some(32), zeros_less_one: true }
}

#[test]
fn gptq_and_awq_are_put_into_rows() {
    let read: [(&str, Parsed<Quantized>); 4] = [
        ("gptq4", gptq::read(gptq_config(4), parts("gptq4"))),
        ("gptq4.zeros", gptq::read(gptq_config(4), parts("gptq4.zeros"))),
        ("gptq8.zeros", gptq::read(gptq_config(8), parts("gptq8.zeros"))),
        ("awq", awq::read(Some(32), parts("awq"))),
    ];
    for (layer, matrix) in read {
        let matrix = matrix.unwrap();
        assert_eq!(matrix.shape(), (16, 64));
        assert_numbers(layer, &matrix, &fixture(&format!("{layer}.numbers")).f32s());
        // One zero point for all needs no offsets.
        let Scales::Plain { offsets, .. } = matrix.scales() else { panic!() };
        assert_eq!(offsets.is_none(), layer == "gptq4", "{layer}");
    }
}

#[test]
fn act_order_is_an_error() {
    let order: Vec<u8> = (0..64u32).flat_map(|index| (index % 2).to_le_bytes()).collect();
    let error = gptq::read(gptq_config(4), |name| match name {
        "g_idx" => Some(Stored { dtype: "I32", shape: &[64], bytes: &order }),
        name => parts("gptq4")(name),
    });
    let error = error.unwrap_err();
    assert!(error.contains("act-order"), "{error}");
}

/// A reader of a layer's parts.
type Reader = Box<dyn Fn(&dyn Fn(&str) -> Option<Stored<'static>>) -> Parsed<Quantized>>;

/// Every part of every format, missing, of another dtype, shape, or length.
#[test]
fn broken_parts_are_errors() {
    let affine = mlx::Mode::Affine { bits: 5, group: 128 };
    let readers: Vec<(&str, Reader)> = vec![
        ("nf4.f32", Box::new(|part| bitsandbytes::read(part))),
        ("fp4.nested.f32", Box::new(|part| bitsandbytes::read(part))),
        ("affine5.128.f16", Box::new(move |part| mlx::read(affine, part))),
        ("mxfp4.f32", Box::new(|part| mlx::read(mlx::Mode::Mxfp4, part))),
        ("mxfp8.f32", Box::new(|part| mlx::read(mlx::Mode::Mxfp8, part))),
        ("nvfp4.f32", Box::new(|part| mlx::read(mlx::Mode::Nvfp4, part))),
        ("fp8", Box::new(|part| fp8::read(None, part))),
        ("fp8.blocks", Box::new(|part| fp8::read(Some((128, 128)), part))),
        ("gptq4.zeros", Box::new(|part| gptq::read(gptq_config(4), part))),
        ("awq", Box::new(|part| awq::read(Some(32), part))),
    ];
    for (layer, read) in readers {
        assert!(read(&parts(layer)).is_ok(), "{layer}");
        let start = format!("{layer}.");
        let names: Vec<&str> = FIXTURE
            .keys()
            .filter_map(|name| name.strip_prefix(&start))
            .filter(|name| {
                !matches!(*name, "numbers" | "blocks.weight" | "blocks.weight_scale_inv")
            })
            .filter(|name| !name.starts_with("nested."))
            .collect();
        assert!(names.len() >= 2, "{layer}: {names:?}");
        for broken in names {
            let good = fixture(&format!("{layer}.{broken}"));
            let longer: &'static [usize] = Vec::leak([&good.shape[..], &[2]].concat());
            let huge: &'static [usize] = Vec::leak(vec![usize::MAX / 2; good.shape.len()]);
            let other = if good.dtype == "F64" { "F32" } else { "F64" };
            let stored = good.stored();
            let mut tries = vec![
                ("no bytes", Some(Stored { bytes: &[], ..stored })),
                (
                    "fewer bytes",
                    Some(Stored { bytes: &good.bytes[..good.bytes.len() - 1], ..stored }),
                ),
                ("a huge shape", Some(Stored { shape: huge, ..stored })),
            ];
            // bitsandbytes stores its bytes as any dtype, and GPTQ's order may be missing.
            if !(broken == "weight" && parts(layer)("weight.quant_map").is_some()) {
                tries.push(("another dtype", Some(Stored { dtype: other, ..stored })));
                tries.push(("a longer shape", Some(Stored { shape: longer, ..stored })));
            } else {
                tries.truncate(2);
            }
            if broken != "g_idx" && broken != "weight.nested_absmax" {
                tries.push(("nothing", None));
            }
            for (what, replaced) in tries {
                let result = read(&|name: &str| match name == broken {
                    true => replaced,
                    false => parts(layer)(name),
                });
                let error = result.err().unwrap_or_else(|| panic!("{layer}: {broken} with {what}"));
                let says = error.contains("expected") || error.contains("missing");
                assert!(says || broken.contains("quant_state"), "{layer}: {broken}: {error}");
            }
        }
    }
}

#[test]
fn what_a_state_claims_is_checked() {
    let name = "weight.quant_state.bitsandbytes__nf4";
    let whole: serde_json::Value =
        serde_json::from_slice(&fixture(&format!("nf4.nested.f32.{name}")).bytes).unwrap();
    for (key, value) in [
        ("blocksize", json!(0)),
        ("blocksize", serde_json::json!(63)),
        ("blocksize", serde_json::json!(128)),
        ("blocksize", serde_json::json!(-64)),
        ("shape", serde_json::json!([8, 512])),
        ("shape", serde_json::json!([2048])),
        ("shape", serde_json::json!([u64::MAX, 2])),
        ("quant_type", serde_json::json!("fp4")),
        ("nested_blocksize", serde_json::json!(128)),
        ("nested_offset", serde_json::json!(null)),
    ] {
        let mut state = whole.clone();
        state[key] = value.clone();
        let bytes = serde_json::to_vec(&state).unwrap();
        let shape = [bytes.len()];
        let state = Stored { dtype: "U8", shape: &shape, bytes: &bytes };
        let found = bitsandbytes::read(|part| match part == name {
            true => Some(state),
            false => parts("nf4.nested.f32")(part),
        });
        assert!(found.is_err(), "{key}: {value}");
    }
}

#[test]
fn numbers_that_are_not_finite_are_errors() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut numbers = vec![1f32; 512];
        numbers[300] = bad;
        let x = Tensor::from_vec(numbers, (2, 256), &Device::Cpu).unwrap();
        let error = quantize(&x, Format::Q4K).unwrap_err().to_string();
        assert!(error.contains("NaN"), "{error}");
    }
}

#[test]
fn sizes_that_a_format_cannot_have_are_errors() {
    let x = Tensor::zeros((3, 40), DType::F32, &Device::Cpu).unwrap();
    for format in [
        Format::Nf4 { block: 0, nested: false },
        Format::Nf4 { block: 33, nested: true },
        Format::Affine { bits: 4, group: 64 },
        Format::Affine { bits: 7, group: 32 },
        Format::Affine { bits: 4, group: 40 },
        Format::Mxfp4,
        Format::Mxfp8,
        Format::Nvfp4,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
    ] {
        assert!(quantize(&x, format).unwrap_err().to_string().contains("expected"), "{format:?}");
    }
    let empty = Tensor::zeros((0, 40), DType::F32, &Device::Cpu).unwrap();
    assert!(quantize(&empty, Format::Int8Rows).is_err());
    assert!(quantize(&x.to_dtype(DType::F64).unwrap(), Format::Int8Rows).is_err());
}

/// Rounded once more, numbers are those of the same codes.
#[test]
fn numbers_are_rounded_from_f32() {
    let read = bitsandbytes::read(parts("nf4.nested.f32")).unwrap();
    let wide = read.dequantize(DType::F32).unwrap().flatten_all().unwrap();
    let wide = wide.to_vec1::<f32>().unwrap();
    let narrow = read.dequantize(DType::BF16).unwrap().flatten_all().unwrap();
    let expected: Vec<bf16> = wide.iter().map(|x| bf16::from_f32(*x)).collect();
    assert_eq!(narrow.to_vec1::<bf16>().unwrap(), expected);
    let narrow = read.dequantize(DType::F16).unwrap().flatten_all().unwrap();
    let expected: Vec<f16> = wide.iter().map(|x| f16::from_f32(*x)).collect();
    assert_eq!(narrow.to_vec1::<f16>().unwrap(), expected);
}

#[test]
fn mlx_lm_is_told_the_rope_in_its_own_keys() {
    let told = |config: serde_json::Value| {
        let serde_json::Value::Object(mut config) = config else { panic!("an object") };
        mlx::say_as_before(&mut config);
        config.remove("rope_parameters");
        serde_json::Value::Object(config)
    };
    let default =
        json!({ "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5 });
    assert_eq!(
        told(json!({ "rope_parameters": default })),
        json!({ "rope_theta": 5e5, "partial_rotary_factor": 0.5 })
    );
    let long = json!({ "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0],
        "original_max_position_embeddings": 64 });
    assert_eq!(
        told(json!({ "rope_parameters": long, "original_max_position_embeddings": 32 })),
        json!({
            "rope_theta": 1e4,
            "original_max_position_embeddings": 32,
            "rope_scaling": { "rope_type": "longrope", "type": "longrope", "long_factor": [2.0],
                "original_max_position_embeddings": 64 },
        })
    );
    let kinds = json!({
        "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 1e3 },
    });
    assert_eq!(
        told(json!({ "rope_parameters": kinds })),
        json!({
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e3,
            "rope_scaling": { "rope_type": "linear", "type": "linear", "factor": 8.0 },
        })
    );
    let old = json!({ "rope_theta": 1e4, "rope_scaling": { "type": "linear", "factor": 2.0 } });
    assert_eq!(told(old.clone()), old);
}
