use crate::lora_linear::{self, Lora, Projection};
use crate::matmul;
use crate::quantized::testing::{every_kind, plain};
use crate::quantized::{BLOCK, Levels, NESTED, Quantized, Scales};
use crate::testing::*;
use candle_core::{DType, Device, Tensor};

/// The numbers as the formats define them, one at a time.
fn reference(matrix: &Quantized) -> Vec<f32> {
    let codes = matrix.codes().to_vec1::<u8>().unwrap();
    let floats = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
    let bytes = |tensor: &Tensor| tensor.to_vec1::<u8>().unwrap();
    let e4m3 = |code: u8| {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let size = match exponent {
            0 => mantissa * 2f32.powi(-9),
            _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
        };
        if code < 128 { size } else { -size }
    };
    let groups = (matrix.shape().0 * matrix.shape().1).div_ceil(matrix.group());
    let of_block = |group: usize| group * matrix.group() / BLOCK;
    let scales: Vec<(f32, f32)> = match matrix.scales() {
        Scales::Plain { scales, offsets } => {
            let offsets = offsets.as_ref().map_or(vec![-0.0; groups], floats);
            floats(scales).into_iter().zip(offsets).collect()
        }
        Scales::E8m0(scales) => {
            bytes(scales).iter().map(|code| (2f32.powi(i32::from(*code) - 127), -0.0)).collect()
        }
        Scales::E4m3 { scales, overall } => {
            bytes(scales).iter().map(|code| (e4m3(*code) * overall, -0.0)).collect()
        }
        Scales::Nested { codes, table, scales, offset } => {
            let (table, scales) = (floats(table), floats(scales));
            let scale = |(group, code): (usize, &u8)| {
                (table[usize::from(*code)] * scales[group / NESTED] + offset, -0.0)
            };
            bytes(codes).iter().enumerate().map(scale).collect()
        }
        Scales::Blocks { scales, signed, large, offsets } => {
            let (scales, large) = (bytes(scales), floats(large));
            let offsets = offsets.as_ref().map(|(codes, large)| (bytes(codes), floats(large)));
            let pair = |group: usize| {
                let code = scales[group];
                let code = if *signed { f32::from(code as i8) } else { f32::from(code) };
                let offset = offsets.as_ref().map_or(-0.0, |(codes, large)| {
                    -(large[of_block(group)] * f32::from(codes[group]))
                });
                (large[of_block(group)] * code, offset)
            };
            (0..groups).map(pair).collect()
        }
    };
    let bits = matrix.levels().bits();
    let number = |element: usize| {
        let code: u8 = (0..bits)
            .map(|bit| {
                let place = element * bits + bit;
                (codes[place / 8] >> (place % 8) & 1) << bit
            })
            .sum();
        let level = match matrix.levels() {
            Levels::Integers { zero, .. } => f32::from(code) - f32::from(zero),
            Levels::Table(table) => table[usize::from(code)],
            Levels::E4m3 => e4m3(code),
        };
        let (scale, offset) = scales[element / matrix.group()];
        level * scale + offset
    };
    (0..matrix.shape().0 * matrix.shape().1).map(number).collect()
}

#[test]
fn every_kind_is_read_to_the_bit() {
    for shape in [(8, 128), (6, 640), (5, 7), (3, 100), (1, 1), (0, 64), (4, 0)] {
        for (name, matrix) in every_kind(shape) {
            let expected = Tensor::from_vec(reference(&matrix), shape, &Device::Cpu).unwrap();
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let found = matrix.dequantize(dtype).unwrap();
                let expected = expected.to_dtype(dtype).unwrap();
                assert_eq!(values(&found), values(&expected), "{name} {shape:?} {dtype:?}");
            }
            if shape.0 > 2 && shape.1 > 0 {
                let ids = Tensor::new(&[[2u32, 0, 2]], &Device::Cpu).unwrap();
                let rows = matrix.rows(&ids, DType::F32).unwrap();
                let expected = expected.index_select(&ids.flatten_all().unwrap(), 0).unwrap();
                assert_identical(&rows.squeeze(0).unwrap(), &expected);
            }
        }
    }
}

#[test]
fn products_are_those_with_the_numbers() {
    for (outer, inner) in [(96, 256), (40, 384), (7, 33), (64, 704)] {
        for (name, matrix) in every_kind((outer, inner)) {
            let dense = matrix.dequantize(DType::F32).unwrap();
            for rows in [0, 1, 2, 3, 4, 5, 40] {
                let x = strided(&random(&[rows, inner], 20)).to_dtype(DType::F32).unwrap();
                let dy = strided(&random(&[rows, outer], 21)).to_dtype(DType::F32).unwrap();
                let wide = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
                let exact = matmul::linear(&wide(&x), &wide(&dense), None).unwrap();
                let found = matmul::linear(&x, &matrix, None).unwrap();
                eprintln!("{name} {rows} {outer} {inner}");
                assert_close(&found, &exact, 2e-6);
                let exact = matmul::linear_backward_input(&wide(&dy), &wide(&dense)).unwrap();
                assert_close(&matmul::linear_backward_input(&dy, &matrix).unwrap(), &exact, 2e-6);
                // In f64 the numbers alone are of f32.
                let found = matmul::linear(&wide(&x), &matrix, None).unwrap();
                assert_close(&found, &matmul::linear(&wide(&x), &dense, None).unwrap(), 1e-13);
                let (x, dy) = (x.to_dtype(DType::BF16).unwrap(), dy.to_dtype(DType::BF16).unwrap());
                let exact = matmul::linear(&wide(&x), &wide(&dense), None).unwrap();
                assert_close(&matmul::linear(&x, &matrix, None).unwrap(), &exact, 1.6e-2);
                let exact = matmul::linear_backward_input(&wide(&dy), &wide(&dense)).unwrap();
                let found = matmul::linear_backward_input(&dy, &matrix).unwrap();
                assert_close(&found, &exact, 1.6e-2);
            }
        }
    }
}

/// Lines that are whole pieces, that end within one, and that are a single group of an odd size.
#[cfg(target_arch = "x86_64")]
#[test]
fn registers_of_either_size_give_the_products() {
    use crate::quantized::cpu::Inputs;
    use half::bf16;
    use metal_candle_cpu::quantized::digits::By;
    use metal_candle_cpu::quantized::lines::{Lines, Ordered, Way};
    use metal_candle_cpu::quantized::x86;
    use metal_candle_cpu::simd::{Level, has_byte_dots, has_narrow_byte_dots, level};

    // The last by pairs, where codes stand for numbers of bf16.
    let ways = [
        (8, Level::Avx2, None, false),
        (8, Level::Avx2, Some(By::Avx2), false),
        (8, Level::Avx2, Some(By::AvxVnni), false),
        (16, Level::Avx512, None, false),
        (16, Level::Avx512, Some(By::Avx512Vnni), false),
        (16, Level::Avx512Bf16, None, true),
    ];
    let there = |needed, digits| {
        let digits_are = match digits {
            None | Some(By::Avx2) => true,
            Some(By::AvxVnni) => has_narrow_byte_dots(),
            Some(By::Avx512Vnni) => has_byte_dots(),
        };
        level() >= needed && digits_are
    };
    let ways = ways.into_iter().filter(|(_, needed, digits, _)| there(*needed, *digits));
    let ways: Vec<(Way, bool)> =
        ways.map(|(lanes, _, digits, halves)| (Way { lanes, digits }, halves)).collect();
    for (outer, inner) in [(37, 256), (64, 576), (16, 112), (9, 100), (3, 4096)] {
        let mut kinds = every_kind((outer, inner));
        let four_bits = Levels::Integers { bits: 4, zero: 8 };
        let by_rows = plain((outer, inner), four_bits, inner, DType::F32, true);
        kinds.push(("int4 by rows".into(), by_rows));
        let mut multiplied = 0;
        for (name, matrix) in &kinds {
            let inputs = Inputs::new(matrix).unwrap();
            let reads = inputs.read();
            let view = reads.view().unwrap();
            let Some(lines) = Lines::of(view.elements(), inner) else { continue };
            multiplied += 1;
            let dense = values(&matrix.dequantize(DType::F32).unwrap());
            for rows in 1..=4 {
                let x = random(&[rows, inner], 7).to_dtype(DType::BF16).unwrap();
                let wide = values(&x);
                let halves = x.flatten_all().unwrap().to_vec1::<bf16>().unwrap();
                let x: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
                let part = 2..outer;
                for (way, with_halves) in ways.iter().copied() {
                    let x = (&x[..], with_halves.then_some(&halves[..]));
                    let ordered = Ordered::new(rows, inner, x, way, std::iter::once(lines));
                    let by_pairs = with_halves
                        && level() == Level::Avx512Bf16
                        && [4, 6].contains(&matrix.levels().bits())
                        && name != "nf4";
                    assert_eq!(ordered.is_by_pairs(lines), by_pairs, "{name}");
                    let bits = matrix.levels().bits();
                    let table = matches!(matrix.levels(), Levels::Table(_));
                    let integers = name != "nf4" && name != "fp8";
                    let by_digits = match way.digits {
                        None => false,
                        Some(By::Avx2) => bits == 4 && integers && !table,
                        Some(By::AvxVnni) => [4, 8].contains(&bits) && integers && name != "nvfp4",
                        Some(By::Avx512Vnni) => integers,
                    };
                    assert_eq!(ordered.is_by_digits(lines), by_digits, "{name}");
                    let mut out = vec![f32::NAN; rows * part.len()];
                    // SAFETY: the machine has the registers.
                    unsafe { x86::dots(&ordered, lines, part.clone(), &mut out) };
                    for (index, found) in out.into_iter().enumerate() {
                        let (row, line) = (index / part.len(), part.start + index % part.len());
                        let pairs = wide[row * inner..].iter().zip(&dense[line * inner..]);
                        let products = pairs.take(inner).map(|(x, number)| x * number);
                        let (exact, size) = products
                            .fold((0.0, 0.0), |(sum, size), it| (sum + it, size + f64::abs(it)));
                        let error = (f64::from(found) - exact).abs();
                        assert!(
                            error <= 4e-7 * size,
                            "{name} {outer} {inner}, {way:?}, row {row} of {rows}, line {line}: \
                             {found} for {exact}"
                        );
                    }
                }
            }
        }
        let expected = match inner {
            256 | 4096 => kinds.len(),
            // Without groups of 128; and those of 16, and the whole line.
            576 => kinds.len() - 7,
            112 => 6,
            _ => 2,
        };
        assert_eq!(multiplied, expected, "{outer} {inner}");
    }
}

/// Rows of which neighbours differ by any factor, and the largest sums of products that codes can have.
#[test]
fn rows_of_any_size_give_the_products() {
    let (outer, inner) = (6, 256);
    let sizes = [1.0, -1.9999999, 1e30, -3e-30, 0.0, -0.0, 1e-40, 65504.0, -7e-7, 1.5e-38];
    let mixed = |index: usize| sizes[index * index % 7] * (0.5 + (index % 11) as f32 / 20.0);
    let rows = [
        (0..inner).map(mixed).collect(),
        vec![1.9999999; inner],
        vec![-1.9999999; inner],
        (0..inner).map(|index| sizes[index % sizes.len()]).collect(),
        vec![1e-44; inner],
    ];
    let largest = |levels: Levels| {
        let codes = Tensor::full(0xffu8, outer * inner * levels.bits() / 8, &Device::Cpu).unwrap();
        let scales = Tensor::full(1f32, outer * inner / 32, &Device::Cpu).unwrap();
        let scales = Scales::Plain { scales, offsets: None };
        Quantized::new((outer, inner), levels, 32, codes, scales).unwrap()
    };
    let mut kinds = every_kind((outer, inner));
    for bits in [2, 3, 4, 5, 6, 8] {
        for zero in [0, 1 << (bits - 1), 255] {
            let matrix = largest(Levels::Integers { bits, zero });
            kinds.push((format!("{bits} bits, zero {zero}"), matrix));
        }
    }
    for (name, matrix) in kinds {
        let dense = values(&matrix.dequantize(DType::F32).unwrap());
        let multiplied = |x: Vec<f32>| {
            let x = Tensor::from_vec(x, (1, inner), &Device::Cpu).unwrap();
            values(&matmul::linear(&x, &matrix, None).unwrap())
        };
        for (row, x) in rows.iter().enumerate() {
            for (line, found) in multiplied(x.clone()).into_iter().enumerate() {
                let numbers = &dense[line * inner..][..inner];
                let (mut exact, mut size) = (0.0, 0.0);
                for (x, numbers) in x.chunks(8).zip(numbers.chunks(8)) {
                    let most = |most: f64, x: &f32| most.max(f64::from(*x).abs());
                    let of_numbers: f64 = numbers.iter().map(|number| number.abs()).sum();
                    size += x.iter().fold(0.0, most) * of_numbers;
                    exact += x.iter().zip(numbers).map(|(x, it)| f64::from(*x) * it).sum::<f64>();
                }
                // Products below 2^-126 may count as zero.
                let error = (found - exact).abs();
                assert!(
                    error <= 1e-6 * size + 1e-36,
                    "{name}, row {row}, line {line}: {found} for {exact}"
                );
            }
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![1.0; inner];
            x[100] = bad;
            assert!(multiplied(x).iter().all(|found| !found.is_finite()), "{name} {bad}");
        }
    }
}

/// As products of many rows read them, from and up to anywhere.
#[cfg(target_arch = "x86_64")]
#[test]
fn numbers_are_rounded_as_each_is_alone() {
    use crate::backend::cpu::Element;
    use crate::quantized::cpu::Inputs;
    use half::bf16;

    let shape = (40, 768);
    let mut read = 0;
    for (name, matrix) in every_kind(shape) {
        let inputs = Inputs::new(&matrix).unwrap();
        let reads = inputs.read();
        let view = reads.view().unwrap();
        let all = shape.0 * shape.1;
        for range in [0..all, 64..192, 48..49, 800..805, 32..4000, 30_000..all, 7..1000, all..all] {
            let mut wide = vec![0f32; range.len()];
            view.elements().read(range.start, &mut wide);
            let (mut expected, mut found) =
                (vec![bf16::ZERO; range.len()], vec![bf16::ONE; range.len()]);
            bf16::narrow(&wide, &mut expected);
            if view.elements().read_bf16(range.start, &mut found) {
                read += 1;
                assert!(found == expected, "{name} {range:?}");
            }
        }
    }
    assert!(read > 0 || !metal_candle_cpu::simd::prefers_bf16(), "no numbers were read");
}

/// However many there are, from those on that are multiplied together.
#[test]
fn rows_have_the_same_bits_beside_any_number_of_others() {
    let (outer, inner, most) = (70, 768, 70);
    for (name, matrix) in every_kind((outer, inner)) {
        for dtype in [DType::BF16, DType::F32] {
            let x = random(&[most, inner], 11).to_dtype(dtype).unwrap();
            let all = values(&matmul::linear(&x, &matrix, None).unwrap());
            for rows in [5, 16, 17, 32, 33] {
                let some = matmul::linear(&x.narrow(0, 0, rows).unwrap(), &matrix, None).unwrap();
                assert!(values(&some) == all[..rows * outer], "{name} {dtype:?} {rows}");
            }
        }
    }
}

/// Scales are read a register at a time, of which a line has a part.
#[test]
fn what_is_not_finite_stays_in_its_line() {
    let (outer, inner, bad) = (64, 256, 5);
    let mut poisoned = 0;
    for (name, matrix) in every_kind((outer, inner)) {
        let spoiled = |of_lines: &Tensor| {
            let each = of_lines.elem_count() / outer;
            let finite = of_lines.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            let spoil = |(index, number)| if index / each == bad { f32::NAN } else { number };
            let numbers = finite.into_iter().enumerate().map(spoil);
            Tensor::from_iter(numbers, &Device::Cpu).unwrap().to_dtype(of_lines.dtype()).unwrap()
        };
        let scales = match matrix.scales() {
            Scales::Plain { scales, offsets } => {
                Scales::Plain { scales: spoiled(scales), offsets: offsets.as_ref().map(spoiled) }
            }
            Scales::Blocks { scales, signed, large, offsets } => Scales::Blocks {
                scales: scales.clone(),
                signed: *signed,
                large: spoiled(large),
                offsets: offsets.as_ref().map(|(codes, large)| (codes.clone(), spoiled(large))),
            },
            _ => continue,
        };
        poisoned += 1;
        let (levels, group, codes) = (matrix.levels(), matrix.group(), matrix.codes().clone());
        let with_nan = Quantized::new((outer, inner), levels, group, codes, scales).unwrap();
        for (rows, dtype) in [(1, DType::F32), (1, DType::BF16), (3, DType::BF16)] {
            let x = random(&[rows, inner], 1).to_dtype(dtype).unwrap();
            let expected = values(&matmul::linear(&x, &matrix, None).unwrap());
            let found = values(&matmul::linear(&x, &with_nan, None).unwrap());
            for (index, (found, expected)) in found.into_iter().zip(expected).enumerate() {
                let fits = if index % outer == bad { found.is_nan() } else { found == expected };
                assert!(fits, "{name} {rows} {dtype:?}, line {}: {found}", index % outer);
            }
        }
    }
    assert_eq!(poisoned, 32);
}

#[test]
fn layers_with_adapters_are_those_with_the_numbers() {
    let (inner, rank) = (256, 8);
    for rows in [1, 3, 20] {
        let x = random(&[1, rows, inner], 1).to_dtype(DType::F32).unwrap();
        let kinds = every_kind((48, inner));
        let dense: Vec<_> =
            kinds.iter().map(|(_, matrix)| matrix.dequantize(DType::F32).unwrap()).collect();
        let a = random(&[inner, rank], 2).to_dtype(DType::F32).unwrap();
        let b = random(&[rank, 48], 3).to_dtype(DType::F32).unwrap();
        let bias = random(&[48], 4).to_dtype(DType::F32).unwrap();
        let lora = Some(Lora { a: &a, b: &b, scale: 0.5, dropout: None });
        let quantized: Vec<_> = kinds
            .iter()
            .map(|(_, matrix)| Projection { weight: matrix.into(), bias: Some(&bias), lora })
            .collect();
        let dense: Vec<_> = dense
            .iter()
            .map(|weight| Projection { weight: weight.into(), bias: Some(&bias), lora })
            .collect();
        let found = lora_linear::forward_shared(&x, &quantized).unwrap();
        let exact = lora_linear::forward_shared(&x, &dense).unwrap();
        for (found, exact) in found.iter().zip(&exact) {
            assert_close(&found.y, &exact.y, 2e-6);
        }
        let dy = random(&[1, rows, 48], 5).to_dtype(DType::F32).unwrap();
        let dys = vec![&dy; kinds.len()];
        let xas: Vec<_> = found.iter().map(|output| output.xa.as_ref()).collect();
        let found = lora_linear::backward_shared(&x, &quantized, &xas, &dys, true).unwrap();
        let exact = lora_linear::backward_shared(&x, &dense, &xas, &dys, true).unwrap();
        assert_close(&found.dx.unwrap(), &exact.dx.unwrap(), 2e-6);
        for (found, exact) in found.adapters.into_iter().zip(exact.adapters) {
            let ((da, db), (exact_da, exact_db)) = (found.unwrap(), exact.unwrap());
            assert_close(&da, &exact_da, 1e-12);
            assert_close(&db, &exact_db, 1e-12);
        }
    }
}

/// Matrices of all kinds that read the same rows of bf16, some of which are multiplied by pairs.
#[test]
fn layers_of_different_kinds_are_computed_together() {
    let inner = 256;
    let kinds = every_kind((48, inner));
    let layers: Vec<_> = kinds
        .iter()
        .map(|(_, matrix)| Projection { weight: matrix.into(), bias: None, lora: None })
        .collect();
    for rows in 1..=4 {
        let x = random(&[1, rows, inner], 1).to_dtype(DType::BF16).unwrap();
        let found = lora_linear::forward_shared(&x, &layers).unwrap();
        for ((name, matrix), found) in kinds.iter().zip(found) {
            let dense = matrix.dequantize(DType::F32).unwrap().to_dtype(DType::F64).unwrap();
            let exact = matmul::linear(&x.to_dtype(DType::F64).unwrap(), &dense, None).unwrap();
            eprintln!("{name} {rows}");
            assert_close(&found.y, &exact, 1.6e-2);
        }
    }
}

#[test]
fn products_are_independent_of_threads() {
    let matrix = plain((512, 256), Levels::Integers { bits: 4, zero: 0 }, 64, DType::F16, true);
    let x = random(&[70, 256], 1).to_dtype(DType::F32).unwrap();
    let few = random(&[3, 256], 2).to_dtype(DType::F32).unwrap();
    assert_independent_of_threads(|| {
        vec![
            matrix.dequantize(DType::BF16).unwrap(),
            matmul::linear(&x, &matrix, None).unwrap(),
            matmul::linear(&few, &matrix, None).unwrap(),
        ]
    });
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let bytes = |count: usize| Tensor::zeros(count, DType::U8, &Device::Cpu).unwrap();
    let plain = |count: usize| Scales::Plain {
        scales: Tensor::zeros(count, DType::F32, &Device::Cpu).unwrap(),
        offsets: None,
    };
    let new = |bits, group, codes: usize, scales| {
        let levels = Levels::Integers { bits, zero: 0 };
        message(Quantized::new((4, 64), levels, group, bytes(codes), scales))
    };
    for (error, expected) in [
        (new(4, 32, 127, plain(8)), "codes has shape [127], expected [128]"),
        (new(4, 32, 128, plain(7)), "scales has shape [7], expected [8]"),
        (new(7, 32, 224, plain(8)), "codes have 7 bits, expected 2 to 6 or 8"),
        (new(4, 0, 128, plain(8)), "a group has no elements"),
        (new(4, 32, 128, Scales::E4m3 { scales: bytes(9), overall: 1.0 }), "[9], expected [8]"),
    ] {
        assert!(error.contains(expected), "{error}");
    }
    let error = message(plain_matrix().dequantize(DType::F64));
    assert!(error.contains("asked for F64, expected F32, BF16 or F16"), "{error}");
    let ids = Tensor::new(&[[4u32]], &Device::Cpu).unwrap();
    let error = message(plain_matrix().rows(&ids, DType::F32));
    assert!(error.contains("token id 4"), "{error}");
    let x = Tensor::zeros((2, 65), DType::F32, &Device::Cpu).unwrap();
    let error = message(matmul::linear(&x, &plain_matrix(), None));
    assert!(error.contains("weight has shape [4, 64], expected (out, 65)"), "{error}");
}

fn plain_matrix() -> Quantized {
    plain((4, 64), Levels::Integers { bits: 4, zero: 8 }, 32, DType::F16, false)
}
