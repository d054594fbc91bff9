use super::*;
use crate::testing::*;

/// Bytes that follow from the seed alone.
fn bytes(count: usize, seed: u64) -> Vec<u8> {
    values(&random(&[count], seed)).iter().map(|it| ((it + 1.0) * 128.0) as u8).collect()
}

fn byte_tensor(bytes: Vec<u8>) -> Tensor {
    let count = bytes.len();
    Tensor::from_vec(bytes, count, &Device::Cpu).unwrap()
}

/// Numbers between a half and one and a half of `size`.
fn positive(count: usize, size: f64, dtype: DType, seed: u64) -> Tensor {
    ((random(&[count], seed) * (0.5 * size)).unwrap() + size).unwrap().to_dtype(dtype).unwrap()
}

/// How a sample's scales are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain(DType, bool),
    E8m0,
    E4m3,
    Nested,
    Blocks { signed: bool, offsets: bool },
}

const KINDS: [Kind; 11] = [
    Kind::Plain(DType::F32, false),
    Kind::Plain(DType::F32, true),
    Kind::Plain(DType::F16, false),
    Kind::Plain(DType::F16, true),
    Kind::Plain(DType::BF16, true),
    Kind::E8m0,
    Kind::E4m3,
    Kind::Nested,
    Kind::Blocks { signed: true, offsets: false },
    Kind::Blocks { signed: false, offsets: true },
    Kind::Blocks { signed: true, offsets: true },
];

const LEVELS: [Levels; 13] = [
    Levels::Integers { bits: 2, zero: 0 },
    Levels::Integers { bits: 2, zero: 2 },
    Levels::Integers { bits: 3, zero: 4 },
    Levels::Integers { bits: 4, zero: 8 },
    Levels::Integers { bits: 4, zero: 0 },
    Levels::Integers { bits: 5, zero: 0 },
    Levels::Integers { bits: 6, zero: 32 },
    Levels::Integers { bits: 8, zero: 128 },
    Levels::Integers { bits: 8, zero: 3 },
    Levels::Table(&NF4),
    Levels::Table(&FP4),
    Levels::Table(&IQ4),
    Levels::E4m3,
];

/// The largest magnitude of a level, about.
fn largest(levels: Levels) -> f64 {
    match levels {
        Levels::Integers { bits, .. } => (1 << bits) as f64,
        Levels::Table(table) => table.iter().fold(0.0, |most, it| it.abs().max(most)).into(),
        Levels::E4m3 => 2.0,
    }
}

/// A matrix of made-up codes and scales, whose numbers are about 1 at most. All codes occur unless it is to be
/// `finite`.
fn sample(
    levels: Levels,
    kind: Kind,
    shape: (usize, usize),
    group: usize,
    finite: bool,
) -> Quantized {
    let elements = shape.0 * shape.1;
    let groups = elements.div_ceil(group);
    let mut codes = bytes((elements * levels.bits()).div_ceil(8), 1);
    if finite && levels == Levels::E4m3 {
        codes.iter_mut().for_each(|code| *code &= 0xbf);
    }
    let size = 1.0 / largest(levels);
    let scales = match kind {
        Kind::Plain(dtype, shifts) => Scales::Plain {
            scales: positive(groups, size, dtype, 2),
            offsets: shifts.then(|| random(&[groups], 3).to_dtype(dtype).unwrap()),
        },
        Kind::E8m0 => {
            let near = |code: u8| (127.0 + size.log2()) as u8 - 2 + code % 4;
            let any = |code: u8| code;
            let map: &dyn Fn(u8) -> u8 = if finite { &near } else { &any };
            Scales::E8m0(byte_tensor(bytes(groups, 2).into_iter().map(map).collect()))
        }
        Kind::E4m3 => {
            let mask = if finite { 0x3f } else { 0xff };
            let scales = bytes(groups, 2).into_iter().map(|code| code & mask).collect();
            Scales::E4m3 { scales: byte_tensor(scales), overall: size as f32 }
        }
        Kind::Nested => Scales::Nested {
            codes: byte_tensor(bytes(groups, 2)),
            table: random(&[256], 3).to_dtype(DType::F32).unwrap(),
            scales: positive(groups.div_ceil(NESTED), size, DType::F32, 4),
            offset: 0.3 * size as f32,
        },
        Kind::Blocks { signed, offsets } => Scales::Blocks {
            scales: byte_tensor(bytes(groups, 2)),
            signed,
            large: positive(elements / BLOCK, size / 200.0, DType::F16, 3),
            offsets: offsets.then(|| {
                let large = positive(elements / BLOCK, 1.0 / 200.0, DType::F16, 4);
                (byte_tensor(bytes(groups, 5)), large)
            }),
        },
    };
    Quantized::new(shape, levels, group, byte_tensor(codes), scales).unwrap()
}

/// Whether there are such scales for a matrix.
fn fits(kind: Kind, (outer, inner): (usize, usize), group: usize) -> bool {
    match kind {
        Kind::Blocks { .. } => (outer * inner).is_multiple_of(BLOCK) && BLOCK.is_multiple_of(group),
        _ => true,
    }
}

/// Asserts the same bits, but of NaN.
#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    assert_eq!(found.dtype(), expected.dtype(), "{what}");
    for (index, (found, expected)) in values(found).iter().zip(values(expected)).enumerate() {
        let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
        assert!(same, "{what}: element {index} is {found}, expected {expected}");
    }
}

/// The formula of `mod.rs` for one element after the other, with codes found bit by bit.
fn formula(matrix: &Quantized) -> Vec<f32> {
    let read = |tensor: &Tensor| -> Vec<f32> {
        values(tensor).iter().map(|value| *value as f32).collect()
    };
    let e4m3 = |code: f32| -> f32 {
        let code = code as u32;
        let (exponent, mantissa) = (code >> 3 & 15, (code & 7) as f32 / 8.0);
        let magnitude = match (exponent, code & 0x7f) {
            (_, 0x7f) => f32::NAN,
            (0, _) => mantissa * 2f32.powi(-6),
            _ => (1.0 + mantissa) * 2f32.powi(exponent as i32 - 7),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    };
    let codes: Vec<u8> = matrix.codes().to_vec1().unwrap();
    let level = |element: usize| {
        let bits = matrix.levels().bits();
        let bit = |at: usize| u32::from(codes[at / 8] >> (at % 8) & 1);
        let code: u32 = (0..bits).map(|i| bit(element * bits + i) << i).sum();
        match matrix.levels() {
            Levels::Integers { zero, .. } => code as f32 - f32::from(zero),
            Levels::Table(table) => table[code as usize],
            Levels::E4m3 => e4m3(code as f32),
        }
    };
    let elements = matrix.shape().0 * matrix.shape().1;
    let (scales, offsets): (Vec<f32>, Vec<f32>) = match matrix.scales() {
        Scales::Plain { scales, offsets } => {
            let offsets = offsets.as_ref().map(read);
            (read(scales), offsets.unwrap_or_default())
        }
        Scales::E8m0(codes) => {
            let number = |code: &f32| if *code == 255.0 { f32::NAN } else { (code - 127.0).exp2() };
            (read(codes).iter().map(number).collect(), Vec::new())
        }
        Scales::E4m3 { scales, overall } => {
            (read(scales).into_iter().map(|code| e4m3(code) * overall).collect(), Vec::new())
        }
        Scales::Nested { codes, table, scales, offset } => {
            let (table, scales) = (read(table), read(scales));
            let number = |(group, code): (usize, f32)| {
                table[code as usize] * scales[group / NESTED] + offset
            };
            (read(codes).into_iter().enumerate().map(number).collect(), Vec::new())
        }
        Scales::Blocks { scales, signed, large, offsets } => {
            let blocks = |codes: Vec<f32>, large: Vec<f32>, factor: f32| -> Vec<f32> {
                let number = |(group, code): (usize, f32)| {
                    factor * (large[group * matrix.group() / BLOCK] * code)
                };
                codes.into_iter().enumerate().map(number).collect()
            };
            let wrap = |code: f32| if *signed && code > 127.0 { code - 256.0 } else { code };
            let scales = read(scales).into_iter().map(wrap).collect();
            let offsets =
                offsets.as_ref().map(|(codes, large)| blocks(read(codes), read(large), -1.0));
            (blocks(scales, read(large), 1.0), offsets.unwrap_or_default())
        }
    };
    let number = |element: usize| {
        let group = element / matrix.group();
        level(element) * scales[group] + offsets.get(group).copied().unwrap_or(-0.0)
    };
    (0..elements).map(number).collect()
}

/// Whole eights, odd rows, and groups that go on in the next row, of every kind.
fn matrices(finite: bool) -> impl Iterator<Item = Quantized> {
    let sizes = [((6, 256), 32), ((5, 512), 16), ((3, 64), 64), ((7, 37), 5), ((4, 24), 96)];
    let all = LEVELS.into_iter().flat_map(|levels| KINDS.map(|kind| (levels, kind)));
    all.flat_map(move |(levels, kind)| sizes.map(|(shape, group)| (levels, kind, shape, group)))
        .filter(|(_, kind, shape, group)| fits(*kind, *shape, *group))
        .map(move |(levels, kind, shape, group)| sample(levels, kind, shape, group, finite))
}

fn name(matrix: &Quantized) -> String {
    let kind = match matrix.scales() {
        Scales::Plain { scales, offsets } => format!("{:?} {}", scales.dtype(), offsets.is_some()),
        Scales::E8m0(_) => "e8m0".into(),
        Scales::E4m3 { .. } => "e4m3".into(),
        Scales::Nested { .. } => "nested".into(),
        Scales::Blocks { signed, offsets, .. } => format!("blocks {signed} {}", offsets.is_some()),
    };
    format!("{:?} of {:?} in groups of {}, {kind}", matrix.levels(), matrix.shape(), matrix.group())
}

#[test]
fn numbers_follow_the_formula() {
    for matrix in matrices(false) {
        let expected = Tensor::from_vec(formula(&matrix), matrix.shape(), &Device::Cpu).unwrap();
        for (dtype, _) in PRECISIONS {
            let found = matrix.dequantize(dtype).unwrap();
            assert_same(&found, &expected.to_dtype(dtype).unwrap(), &name(&matrix));
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;
    use crate::backend::cuda::Cuda;
    use crate::matmul::cuda::Adapter;
    use crate::quantized::cuda::{Layer, few_rows, takes};

    const SCALE: f64 = 1.7;

    fn back(tensor: &Tensor) -> Tensor {
        tensor.to_device(&Device::Cpu).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_dequantises_to_the_bits_of_the_cpu() {
        let device = crate::testing::cuda();
        let large = [
            sample(LEVELS[9], Kind::Nested, (1000, 1032), 64, false),
            sample(LEVELS[3], Kind::Plain(DType::BF16, true), (333, 1000), 1000, false),
            sample(LEVELS[6], Kind::Blocks { signed: true, offsets: false }, (512, 768), 16, false),
        ];
        let all: Vec<_> = matrices(false).chain(large).collect();
        let low: Vec<_> = all.iter().map(|matrix| matrix.to_device(&device).unwrap()).collect();
        let dense = there(&random(&[3, 5], 1), &device);
        for (dtype, _) in PRECISIONS {
            for (matrix, low) in all.iter().zip(&low) {
                let found = back(&low.dequantize(dtype).unwrap());
                assert_same(&found, &matrix.dequantize(dtype).unwrap(), &name(matrix));
            }
            // Several in a launch, and a dense one among them, which stays as it is.
            let weights = || low.iter().rev().map(Weight::Quantized);
            let with_dense =
                weights().take(2).chain([Weight::Dense(&dense)]).chain(weights().skip(2));
            let mut found = Weight::all_to_dense(with_dense, dtype).unwrap();
            assert_identical(&found.remove(2), &dense);
            assert_eq!(found.len(), all.len());
            for (found, matrix) in found.iter().zip(all.iter().rev()) {
                assert_same(&back(found), &matrix.dequantize(dtype).unwrap(), &name(matrix));
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_reads_rows_and_shows_ids_outside_the_table() {
        let device = crate::testing::cuda();
        for matrix in matrices(false) {
            let (outer, inner) = matrix.shape();
            let last = outer as u32 - 1;
            let ids = Tensor::new(&[[last, 0, 1], [0, last, last]], &Device::Cpu).unwrap();
            let low = matrix.to_device(&device).unwrap();
            for (dtype, _) in PRECISIONS {
                let found = low.rows(&ids.to_device(&device).unwrap(), dtype).unwrap();
                assert_same(&back(&found), &matrix.rows(&ids, dtype).unwrap(), &name(&matrix));
                let beyond = Tensor::new(&[[last, last + 1]], &device).unwrap();
                let found = values(&back(&low.rows(&beyond, dtype).unwrap()));
                assert!(found[inner..].iter().all(|value| value.is_nan()), "{}", name(&matrix));
            }
        }
    }

    /// A layer on the CPU.
    struct Case {
        weight: Quantized,
        bias: Option<Tensor>,
        adapter: Option<(Tensor, Tensor)>,
    }

    impl Case {
        fn new(weight: Quantized, rank: Option<usize>, seed: u64) -> Case {
            let (outer, inner) = weight.shape();
            let adapter = rank.map(|rank| {
                let a = rounded(&random(&[inner, rank], seed), DType::F32);
                (a, rounded(&random(&[rank, outer], seed + 1), DType::F32))
            });
            let bias =
                seed.is_multiple_of(2).then(|| rounded(&random(&[outer], seed + 2), DType::BF16));
            Case { weight, bias, adapter }
        }

        fn exact(&self, x: &Tensor) -> (Tensor, Option<Tensor>) {
            let weight = self.weight.dequantize(DType::F32).unwrap().to_dtype(DType::F64).unwrap();
            let x = x.reshape(((), weight.dim(1).unwrap())).unwrap();
            let mut y = x.matmul(&weight.t().unwrap()).unwrap();
            if let Some(bias) = &self.bias {
                y = y.broadcast_add(bias).unwrap();
            }
            let Some((a, b)) = &self.adapter else { return (y, None) };
            let xa = x.matmul(a).unwrap();
            let low = (xa.matmul(b).unwrap() * SCALE).unwrap();
            ((y + low).unwrap(), Some(xa))
        }
    }

    fn run(device: &Device, x: &Tensor, cases: &[Case]) -> Vec<(Tensor, Option<Tensor>)> {
        let dtype = x.dtype();
        let x = x.to_device(device).unwrap();
        let cuda = Cuda::of(&x).unwrap();
        let put = |tensor: &Tensor, dtype| {
            let tensor = tensor.to_dtype(dtype).unwrap().to_device(device).unwrap();
            cuda.contiguous(&tensor).unwrap()
        };
        let mut arrays = Vec::new();
        let weights: Vec<_> =
            cases.iter().map(|case| case.weight.to_device(device).unwrap()).collect();
        let mut layers = Vec::new();
        for (case, weight) in cases.iter().zip(&weights) {
            let mut layer = Layer { weight, bias: None, adapter: None };
            if let Some(bias) = &case.bias {
                let bias = put(bias, dtype);
                layer.bias = Some(bias.pointer);
                arrays.push(bias);
            }
            if let Some((a, b)) = &case.adapter {
                let rank = a.dim(1).unwrap();
                let (a, b) = (put(a, DType::F32), put(b, DType::F32));
                layer.adapter = Some(Adapter { a: a.pointer, b: b.pointer, rank, scale: SCALE });
                arrays.extend([a, b]);
            }
            layers.push(layer);
        }
        let (inner, rows) = (x.dim(2).unwrap(), x.dim(1).unwrap());
        let ranks = layers.iter().filter_map(|layer| Some(layer.adapter.as_ref()?.rank));
        assert!(takes(rows, inner, weights.iter(), ranks));
        let outputs = few_rows(&cuda, &x, (rows, inner), &layers, true).unwrap();
        outputs.into_iter().map(|(y, xa)| (back(&y), xa.map(|xa| back(&xa)))).collect()
    }

    #[track_caller]
    fn check(device: &Device, x: &Tensor, cases: &[Case], tolerance: f64) {
        let found = run(device, x, cases);
        let wide = x.to_dtype(DType::F64).unwrap();
        for (case, (y, xa)) in cases.iter().zip(found) {
            let what =
                format!("{} for {} rows of {:?}", name(&case.weight), x.dims()[1], x.dtype());
            let (exact, exact_xa) = case.exact(&wide);
            for (found, exact) in [Some(y), xa].into_iter().zip([Some(exact), exact_xa]) {
                assert_eq!(found.is_some(), exact.is_some(), "{what}");
                let Some((found, exact)) = found.zip(exact) else { continue };
                let limit = tolerance * (1.0 + max_abs(&exact));
                let found = values(&found);
                for (index, (found, exact)) in found.iter().zip(values(&exact)).enumerate() {
                    let near = (found - exact).abs() <= limit;
                    assert!(near, "{what}: element {index} is {found}, expected {exact}");
                }
            }
        }
    }

    /// Matrices that the kernels for a few rows take, of every kind.
    fn taken(shape: (usize, usize)) -> impl Iterator<Item = Quantized> {
        let all = LEVELS.into_iter().flat_map(|levels| KINDS.map(|kind| (levels, kind)));
        let groups = [16, 32, 64, 128, shape.1];
        all.flat_map(move |(levels, kind)| groups.map(|group| (levels, kind, group)))
            .filter(move |(_, kind, group)| fits(*kind, shape, *group))
            .map(move |(levels, kind, group)| sample(levels, kind, shape, group, true))
            .filter(move |it| takes(1, shape.1, std::iter::once(it), std::iter::empty()))
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_multiplies_a_few_rows_by_every_kind() {
        let device = crate::testing::cuda();
        let mut count = 0;
        for weight in taken((40, 576)).chain(taken((36, 256))) {
            count += 1;
            let inner = weight.shape().1;
            let case = [Case::new(weight, None, count)];
            for (dtype, tolerance) in PRECISIONS {
                for rows in [1, 2, 4, 7] {
                    let x = random(&[1, rows, inner], 9).to_dtype(dtype).unwrap();
                    check(&device, &x, &case, tolerance);
                }
            }
        }
        assert!(count > 200, "{count}");
    }

    /// A block reads a row of x in pieces.
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_multiplies_long_rows() {
        let device = crate::testing::cuda();
        for inner in [8448, 14336, 17408] {
            let cases = [
                Case::new(sample(LEVELS[9], Kind::Nested, (40, inner), 64, true), Some(8), 1),
                Case::new(
                    sample(LEVELS[4], Kind::Plain(DType::BF16, true), (24, inner), 64, true),
                    None,
                    2,
                ),
            ];
            for (dtype, tolerance) in PRECISIONS {
                for rows in 1..=3 {
                    let x = random(&[1, rows, inner], 9).to_dtype(dtype).unwrap();
                    check(&device, &x, &cases[..1], tolerance);
                    check(&device, &x, &cases[1..], tolerance);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_adds_adapters_of_projections_in_several_formats() {
        let device = crate::testing::cuda();
        let q4_k = |shape| {
            sample(LEVELS[4], Kind::Blocks { signed: false, offsets: true }, shape, 32, true)
        };
        let q6_k = |shape| {
            sample(LEVELS[6], Kind::Blocks { signed: true, offsets: false }, shape, 16, true)
        };
        let nf4 = |shape| sample(LEVELS[9], Kind::Nested, shape, 64, true);
        let iq4 = |shape| sample(LEVELS[11], Kind::Plain(DType::F16, false), shape, 32, true);
        let q8_0 = |shape| sample(LEVELS[7], Kind::Plain(DType::F16, false), shape, 32, true);
        let mlx = |shape| sample(LEVELS[4], Kind::Plain(DType::BF16, true), shape, 64, true);
        for inner in [64, 1024, 4352] {
            let cases = [
                Case::new(nf4((4100, inner)), Some(8), 1),
                Case::new(nf4((100, inner)), None, 2),
                Case::new(iq4((64, inner)), Some(4), 3),
                Case::new(q4_k((512, inner)), Some(64), 4),
                Case::new(q6_k((1024, inner)), Some(5), 5),
                Case::new(q8_0((1030, inner)), Some(100), 6),
                Case::new(mlx((17, inner)), Some(0), 7),
            ];
            for (dtype, tolerance) in PRECISIONS {
                for rows in 1..=8 {
                    let x = random(&[1, rows, inner], 9).to_dtype(dtype).unwrap();
                    check(&device, &x, &cases, tolerance);
                    check(&device, &x, &cases[..1], tolerance);
                }
                let wide = random(&[1, 3, 3 * inner], 9).to_dtype(dtype).unwrap();
                let x = wide.narrow(2, 1, inner).unwrap();
                check(&device, &x, &cases[3..5], tolerance);
                let first = run(&device, &x, &cases);
                for ((y, xa), (again, xa_again)) in first.iter().zip(run(&device, &x, &cases)) {
                    assert_identical(y, &again);
                    if let Some((xa, again)) = xa.as_ref().zip(xa_again) {
                        assert_identical(xa, &again);
                    }
                }
            }
        }
    }

    /// The formats that people use most, by the names they know them by.
    fn common(shape: (usize, usize)) -> [(&'static str, Quantized); 6] {
        let blocks = |signed, offsets| Kind::Blocks { signed, offsets };
        [
            ("nf4, nested", sample(LEVELS[9], Kind::Nested, shape, 64, true)),
            ("q4_k", sample(LEVELS[4], blocks(false, true), shape, 32, true)),
            ("q5_k", sample(LEVELS[5], blocks(false, true), shape, 32, true)),
            ("q6_k", sample(LEVELS[6], blocks(true, false), shape, 16, true)),
            ("q8_0", sample(LEVELS[7], Kind::Plain(DType::F16, false), shape, 32, true)),
            ("mlx, 4 bits", sample(LEVELS[4], Kind::Plain(DType::BF16, true), shape, 64, true)),
        ]
    }

    #[test]
    #[ignore = "measures an NVIDIA GPU"]
    fn cuda_speed() {
        const COPIES: usize = 12;
        let device = crate::testing::cuda();
        let cuda = Cuda::on(&device).unwrap();
        for shape in [(28672, 8192), (28672, 4096), (14336, 4096), (4096, 14336), (4096, 4096)] {
            for (name, weight) in common(shape) {
                // More than the cache holds.
                let weights: Vec<_> =
                    (0..COPIES).map(|_| weight.to_device(&device).unwrap()).collect();
                let size = weight.size_in_bytes() as f64;
                let time = |run: &dyn Fn(&Quantized)| {
                    let seconds = least_seconds(&device, 8, || {
                        for _ in 0..8 {
                            weights.iter().for_each(run);
                        }
                    });
                    seconds / (8 * COPIES) as f64
                };
                let mut line = format!("{name:12} {shape:?}");
                let dequantised = time(&|weight| drop(weight.dequantize(DType::BF16).unwrap()));
                let written = (2 * shape.0 * shape.1) as f64 + size;
                line += &format!(
                    " dequantise {:.0} us {:.0} GB/s",
                    dequantised * 1e6,
                    written / dequantised / 1e9
                );
                for (rows, rank) in [(1, 0), (2, 0), (4, 0), (8, 0), (1, 16), (8, 16)] {
                    let x = Tensor::ones((1, rows, shape.1), DType::BF16, &device).unwrap();
                    let a = Tensor::ones((shape.1, rank.max(1)), DType::F32, &device).unwrap();
                    let b = Tensor::ones((rank.max(1), shape.0), DType::F32, &device).unwrap();
                    let (a, b) = (cuda.contiguous(&a).unwrap(), cuda.contiguous(&b).unwrap());
                    let found = time(&|weight| {
                        let adapter = Adapter { a: a.pointer, b: b.pointer, rank, scale: 1.0 };
                        let layer =
                            Layer { weight, bias: None, adapter: (rank > 0).then_some(adapter) };
                        drop(few_rows(&cuda, &x, (rows, shape.1), &[layer], false).unwrap());
                    });
                    line += &format!(
                        " | {rows} rows, rank {rank}: {:.1} us {:.0} GB/s",
                        found * 1e6,
                        size / found / 1e9
                    );
                }
                println!("{line}");
            }
        }
    }
}

/// The Metal kernels as the host starts them, in the emulator: compiled for speed, for bounds and for races, with
/// several orders and numbers of threads.
#[cfg(not(feature = "metal"))]
mod metal {
    use super::*;
    use crate::backend::metal::{Emulator, emulate};
    use crate::lora_linear::{Lora, Projection, forward_shared};
    use metal_emulator::{Mode, SEEDS};

    /// In turn, of every mode.
    fn emulators() -> Vec<Emulator> {
        let mut all = Vec::new();
        for (seed, most_threads) in SEEDS.into_iter().zip([33, 1024, 90]) {
            all.extend(Mode::ALL.map(|mode| Emulator {
                seed,
                most_threads,
                ..Emulator::open(mode)
            }));
        }
        all
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_dequantises_to_the_bits_of_the_cpu() {
        let emulators = emulators();
        for (index, matrix) in matrices(false).enumerate() {
            let emulator = &emulators[index % emulators.len()];
            let (outer, _) = matrix.shape();
            let ids = Tensor::new(&[[outer as u32 - 1, 0], [0, 1]], &Device::Cpu).unwrap();
            let beyond = Tensor::new(&[[outer as u32]], &Device::Cpu).unwrap();
            let (dtype, _) = PRECISIONS[index % PRECISIONS.len()];
            let [found, rows, unknown] = emulate(emulator.clone(), || {
                let rows = |ids| matrix.rows(ids, dtype).unwrap();
                [matrix.dequantize(dtype).unwrap(), rows(&ids), rows(&beyond)]
            });
            assert_same(&found, &matrix.dequantize(dtype).unwrap(), &name(&matrix));
            assert_same(&rows, &matrix.rows(&ids, dtype).unwrap(), &name(&matrix));
            assert!(values(&unknown).iter().all(|value| value.is_nan()), "{}", name(&matrix));
        }
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_multiplies_a_few_rows() {
        let emulators = emulators();
        for (index, matrix) in matrices(true).enumerate() {
            let emulator = &emulators[index % emulators.len()];
            let (outer, inner) = matrix.shape();
            let (dtype, tolerance) = PRECISIONS[index % PRECISIONS.len()];
            let (rows, rank) = ([1, 3, 8][index / 3 % 3], [8, 4, 3][index % 3]);
            let x = rounded(&random(&[1, rows, inner], 1), dtype);
            let (a, b) = (random(&[inner, rank], 2), random(&[rank, outer], 3));
            let (a, b) = (rounded(&a, DType::F32), rounded(&b, DType::F32));
            let (bias, dense) = (rounded(&random(&[outer], 4), dtype), random(&[5, inner], 5));
            let dense = rounded(&dense, dtype);
            let run = |dtype: DType, adapter: DType| {
                let low = |tensor: &Tensor, dtype| tensor.to_dtype(dtype).unwrap();
                let (a, b) = (low(&a, adapter), low(&b, adapter));
                let (bias, dense) = (low(&bias, dtype), low(&dense, dtype));
                let lora = Some(Lora { a: &a, b: &b, scale: 1.7, dropout: None });
                let projections = [
                    Projection { weight: (&matrix).into(), bias: Some(&bias), lora },
                    Projection { weight: (&dense).into(), bias: None, lora: None },
                    Projection { weight: (&matrix).into(), bias: None, lora: None },
                ];
                let x = strided(&low(&x, dtype));
                let outputs = forward_shared(&x, &projections).unwrap();
                let alone = crate::matmul::linear(&x, &matrix, Some(&bias)).unwrap();
                let outputs = outputs.into_iter().flat_map(|output| [Some(output.y), output.xa]);
                outputs.flatten().chain([alone]).collect::<Vec<_>>()
            };
            let exact = run(DType::F64, DType::F64);
            let found = emulate(emulator.clone(), || run(dtype, DType::F32));
            for (found, exact) in found.iter().zip(&exact) {
                assert_eq!(found.dtype(), dtype);
                let limit = tolerance * (1.0 + max_abs(exact));
                let off = max_abs(&(found.to_dtype(DType::F64).unwrap() - exact).unwrap());
                assert!(off <= limit, "{} in {dtype:?}: off by {off:e}", name(&matrix));
            }
        }
    }
}
