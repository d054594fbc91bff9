//! Kernels that are right: the emulator gives what the CPU gives, in every mode and order.

use half::{bf16, f16};
use metal_emulator::{Element, Error, Library, Source, for_every_mode};
use std::path::Path;

fn source(file: &str) -> Source {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels");
    Source::file(folder.join(file)).include(folder.join("include"))
}

fn number(i: usize) -> f32 {
    ((i * 7919 + 13) % 201) as f32 / 50.0 - 2.0
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(number).collect()
}

fn near(got: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let allowed = tolerance * expected.abs().max(1.0);
        assert!((got - expected).abs() <= allowed, "{what}: {got} at {i}, not {expected}");
    }
}

fn row_sum<T: Element>(
    library: &Library,
    seed: u64,
    name: &str,
    of: impl Fn(f32) -> T,
    to: impl Fn(T) -> f32,
) -> Result<(), Error> {
    let rows = 3;
    for (columns, threads) in [(1, 32), (33, 64), (257, 256), (100, 40), (1000, 1024), (31, 1)] {
        let x: Vec<T> = numbers(rows * columns).into_iter().map(&of).collect();
        let buffers = library
            .kernel(name)?
            .dispatch()
            .buffer(0, &x)
            .output::<f32>(1, rows)
            .output::<f32>(2, rows)
            .value(3, columns as u32)
            .seed(seed)
            .threadgroups([rows as u32, 1, 1], [threads, 1, 1])?;
        let values: Vec<f32> = x.into_iter().map(&to).collect();
        let sums: Vec<f32> = values.chunks(columns).map(|row| row.iter().sum()).collect();
        let most: Vec<f32> = values
            .chunks(columns)
            .map(|row| row.iter().copied().fold(f32::MIN, f32::max))
            .collect();
        near(&buffers.read::<f32>(1)?, &sums, 1e-5, &format!("{name}, {columns} columns"));
        assert_eq!(buffers.read::<f32>(2)?, most);
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn reductions_are_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(&source("row_sum.metal"), |library, seed| {
        assert_eq!(library.kernels(), ["row_sum_f32", "row_sum_f16", "row_sum_bf16"]);
        row_sum(library, seed, "row_sum_f32", |x| x, |x| x)?;
        row_sum(library, seed, "row_sum_f16", f16::from_f32, f16::to_f32)?;
        row_sum(library, seed, "row_sum_bf16", bf16::from_f32, bf16::to_f32)
    })
}

fn matmul<T: Element>(
    library: &Library,
    seed: u64,
    name: &str,
    (of, to): (impl Fn(f32) -> T, impl Fn(T) -> f32),
    tolerance: f32,
) -> Result<(), Error> {
    let kernel = library.kernel(name)?;
    for (m, n, k) in [(1, 1, 1), (33, 40, 17), (32, 64, 32)] {
        let a: Vec<T> = numbers(m * k).into_iter().map(&of).collect();
        let b: Vec<T> = (0..k * n).map(|i| of(number(i + 5))).collect();
        let before: Vec<T> = (0..m * n).map(|i| of(number(i + 9))).collect();
        let groups = [n.div_ceil(32) as u32, m.div_ceil(32) as u32, 1];
        let shape = [m as u32, n as u32, k as u32, 0];
        let dispatch = |accumulate: bool, scaled: bool| {
            let kernel = kernel.clone().constant(0, accumulate);
            let kernel = if scaled { kernel.constant(1, 0.5_f32) } else { kernel };
            kernel
                .dispatch()
                .buffer(0, &a)
                .buffer(1, &b)
                .output::<T>(2, m * n)
                .buffer(3, &shape)
                .threadgroup_memory(0, 2 * 32 * 16 * T::SIZE)
                .seed(seed)
        };
        let product = |i: usize, j: usize| -> f32 {
            (0..k).map(|l| to(a[i * k + l]) * to(b[l * n + j])).sum()
        };
        let expected = |of: &dyn Fn(f32, f32) -> f32| -> Vec<f32> {
            (0..m * n).map(|at| of(product(at / n, at % n), to(before[at]))).collect()
        };
        let what = format!("{name} of {m} x {n} x {k}");
        let plain = dispatch(false, false).threadgroups(groups, [128, 1, 1])?;
        let got: Vec<f32> = plain.read::<T>(2)?.into_iter().map(&to).collect();
        near(&got, &expected(&|product, _| product), tolerance, &what);
        let added = dispatch(true, true).buffer(4, &before).threadgroups(groups, [128, 1, 1])?;
        let got: Vec<f32> = added.read::<T>(2)?.into_iter().map(&to).collect();
        near(&got, &expected(&|product, before| 0.5 * product + before), tolerance, &what);
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn products_of_simdgroup_matrices_are_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(&source("matmul.metal"), |library, seed| {
        matmul(library, seed, "matmul_f32", (|x| x, |x| x), 1e-5)?;
        matmul(library, seed, "matmul_f16", (f16::from_f32, f16::to_f32), 1e-3)?;
        matmul(library, seed, "matmul_bf16", (bf16::from_f32, bf16::to_f32), 1e-2)
    })
}

#[test]
#[ignore = "needs clang"]
fn scans_are_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(&source("scan.metal"), |library, seed| {
        for (count, threads) in [(1, 32), (100, 64), (1000, 96), (77, 50), (1025, 1024)] {
            let x: Vec<u32> = (0..count).map(|i| i * 31 % 17).collect();
            let buffers = library
                .kernel("scan")?
                .dispatch()
                .buffer(0, &x)
                .output::<u32>(1, x.len())
                .value(2, count)
                .seed(seed)
                .threadgroups([1, 1, 1], [threads, 1, 1])?;
            let mut sum = 0;
            let expected: Vec<u32> = x
                .iter()
                .map(|x| {
                    sum += x;
                    sum
                })
                .collect();
            assert_eq!(buffers.read::<u32>(1)?, expected, "{count} by {threads}");
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs clang"]
fn atomics_count_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(&source("histogram.metal"), |library, seed| {
        let x: Vec<u8> = (0..500_u32).map(|i| (i * i % 16) as u8).collect();
        let mut expected = [0; 16];
        for value in &x {
            expected[usize::from(*value)] += 1;
        }
        // 500 threads in threadgroups of 72: the last one is smaller.
        let buffers = library
            .kernel("histogram")?
            .dispatch()
            .buffer(0, &x)
            .buffer(1, &[0_u32; 16])
            .value(2, x.len() as u32)
            .seed(seed)
            .threads([x.len() as u32, 1, 1], [72, 1, 1])?;
        assert_eq!(buffers.read::<u32>(1)?, expected);
        Ok(())
    })
}

/// What `operations` in simdgroup.metal gives to a lane of a simdgroup with these values.
fn operations(values: &[i32], lane: usize, simdgroups: usize) -> Vec<i32> {
    let up_to = |end: usize| values[..end].iter().sum::<i32>();
    let mut results = vec![
        values.iter().sum(),
        values.iter().copied().max().unwrap_or_default(),
        values.iter().copied().min().unwrap_or_default(),
        values.iter().fold(1, |product: i32, v| product.wrapping_mul(v | 1)),
        values.iter().fold(0, |all, v| all | v),
        values.iter().fold(-1, |all, v| all & v),
        values.iter().fold(0, |all, v| all ^ v),
        up_to(lane + 1),
        up_to(lane),
        values[0],
        values.iter().enumerate().fold(0, |votes, (i, v)| votes | i32::from(*v > 0) << i),
        1,
        i32::from(lane == 0),
        values.len() as i32,
        (simdgroups * 32) as i32,
        1,
    ];
    if let Ok(all) = <[i32; 32]>::try_from(values) {
        results.extend([
            all[31 - lane],
            all[lane ^ 5],
            if lane + 3 < 32 { all[lane + 3] } else { all[lane] },
            if lane >= 3 { all[lane - 3] } else { all[lane] },
            all[(lane + 3) % 32],
            if lane >= 3 { all[lane - 3] } else { -all[lane + 29] },
        ]);
    }
    results.resize(22, -77);
    results
}

#[test]
#[ignore = "needs clang"]
fn operations_of_a_simdgroup_see_the_lanes_that_there_are() -> Result<(), Error> {
    for_every_mode(&source("simdgroup.metal"), |library, seed| {
        for threads in [1_usize, 31, 32, 33, 100] {
            let x: Vec<i32> = (0..threads as i32).map(|i| i * 5 % 7 - 3).collect();
            // The product overflows where there are many lanes, which isn't what is looked at here.
            let x: Vec<i32> = x.into_iter().map(|v| v.clamp(-1, 1)).collect();
            let buffers = library
                .kernel("operations")?
                .dispatch()
                .buffer(0, &x)
                .buffer(1, &vec![-77_i32; threads * 22])
                .seed(seed)
                .threadgroups([1, 1, 1], [threads as u32, 1, 1])?;
            let results = buffers.read::<i32>(1)?;
            for (i, got) in results.chunks(22).enumerate() {
                let first = i / 32 * 32;
                let values = &x[first..threads.min(first + 32)];
                let expected = operations(values, i % 32, threads.div_ceil(32));
                assert_eq!(got, expected, "thread {i} of {threads}");
            }
        }
        let matrix = numbers(64);
        let doubled = library
            .kernel("multiplies")?
            .dispatch()
            .buffer(0, &matrix)
            .seed(seed)
            .threadgroups([1, 1, 1], [32, 1, 1])?;
        let expected: Vec<f32> = (0..64).map(|i| 2.0 * matrix[i % 8 * 8 + i / 8]).collect();
        assert_eq!(doubled.read::<f32>(0)?, expected);
        Ok(())
    })
}

#[test]
#[ignore = "needs clang"]
fn the_language_means_what_it_means() -> Result<(), Error> {
    let count = 13_usize;
    let (slope, offset) = (0.75_f32, [0.5_f32, 9.0, -1.5]);
    let x = numbers(4 * count);
    let table = [0.5_f32, 1.0, 2.0, 4.0];
    let expected: Vec<f32> = (0..count)
        .map(|i| {
            let v = &x[4 * i..4 * i + 4];
            let v = [v[1] * 2.0, v[0] * 2.0, v[2] + offset[0], v[3] + offset[2]];
            let mut s = v[0] + 2.0 * v[1] + 3.0 * v[2] + v[3];
            s = s * slope + if i % 2 == 0 { 0.5 } else { 0.25 };
            s += f16::from_f32(v[0]).to_f32() * 0.5 + bf16::from_f32(v[1]).to_f32();
            s += (-s.abs()).exp() + 0.5 + s.clamp(-1.0, 1.0);
            s + table[i % 4] + table[0] + 1.0
        })
        .collect();
    let mut parameters = (count as u32).to_le_bytes().to_vec();
    for value in [slope, offset[0], offset[1], offset[2]] {
        parameters.extend(value.to_le_bytes());
    }
    for_every_mode(&source("language.metal"), |library, seed| {
        let buffers = library
            .kernel("language")?
            .dispatch()
            .buffer(0, &x)
            .output::<f32>(1, count)
            .bytes(2, &parameters)
            .seed(seed)
            .threads([5, 3, 1], [5, 3, 1])?;
        near(&buffers.read::<f32>(1)?, &expected, 1e-6, "language");
        Ok(())
    })
}
