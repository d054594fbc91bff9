use super::*;
use crate::testing::{
    assert_close, assert_identical, cuda, here, least_seconds, random, rounded, there,
};
use candle_core::{Device, Tensor};

/// `(columns, depths, bias)` of a sum.
type Shape<'a> = (usize, &'a [usize], bool);

/// The sums on the device and as they should be, for matrices that stand `apart` elements further from row
/// to row than they are wide.
fn sums(
    device: &Device,
    dtype: DType,
    (rows, along, apart): (usize, bool, usize),
    shapes: &[Shape],
    width: Option<usize>,
) -> Vec<(Tensor, Tensor)> {
    let matrix = |rows: usize, columns: usize, seed: u64| {
        let wide = rounded(&random(&[rows, columns + apart], seed), dtype);
        let exact = wide.narrow(1, 0, columns).unwrap().to_dtype(DType::F64).unwrap();
        let wide = there(&wide.to_dtype(dtype).unwrap(), device);
        (exact, wide.narrow(1, 0, columns).unwrap())
    };
    let gpu = Cuda::on(device).unwrap();
    let (mut all, mut keep, mut expected, mut found) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut seed = 0;
    for (columns, depths, bias) in shapes {
        let mut exact = Tensor::zeros((rows, *columns), DType::F64, &Device::Cpu).unwrap();
        let mut terms = Vec::new();
        for depth in *depths {
            seed += 2;
            let (a, a_there) = matrix(rows, *depth, seed);
            let (b, b_there) = match along {
                true => {
                    let (b, there) = matrix(*columns, *depth, seed + 1);
                    (b.t().unwrap(), there)
                }
                false => matrix(*depth, *columns, seed + 1),
            };
            exact = (exact + a.matmul(&b.contiguous().unwrap()).unwrap()).unwrap();
            let (a, b) = (gpu.rows(&a_there).unwrap(), gpu.rows(&b_there).unwrap());
            let of_b = if along { b.matrix.t() } else { b.matrix };
            terms.push(Term { a: a.matrix, b: of_b, depth: *depth });
            keep.extend([a, b]);
        }
        let mut pointer = None;
        if *bias {
            let (numbers, bias) = matrix(1, *columns, 99);
            exact = exact.broadcast_add(&numbers).unwrap();
            let bias = gpu.rows(&bias).unwrap();
            pointer = Some(bias.matrix.pointer);
            keep.push(bias);
        }
        let y = gpu.empty((rows, *columns), dtype).unwrap();
        // What isn't written shows.
        let nothing = Tensor::full(f32::NAN, (rows, *columns), &Device::Cpu).unwrap();
        let nothing = there(&nothing.to_dtype(dtype).unwrap(), device);
        y.tensor.slice_set(&nothing, 0, 0).unwrap();
        let to = Matrix::of(&y, *columns);
        all.push(Sum { to, columns: *columns, bias: pointer, codes: None, terms });
        expected.push(exact);
        found.push(y.tensor);
    }
    gpu.sums_in_tiles(dtype, rows, &all, width).unwrap();
    found.iter().map(here).zip(expected).collect()
}

/// Of which these kernels are made.
#[track_caller]
fn assert_has_warpgroups(gpu: &Cuda) {
    assert!(gpu.has_warpgroups().unwrap(), "this test needs a GPU of compute capability 9.0");
}

#[test]
#[ignore = "needs an NVIDIA GPU of compute capability 9.0"]
fn cuda_hopper_adds_up_products_of_odd_sizes() {
    let device = cuda();
    assert_has_warpgroups(&Cuda::on(&device).unwrap());
    let cases: [(usize, &[Shape]); 7] = [
        (1, &[(8, &[8], true)]),
        (129, &[(264, &[64, 16], false)]),
        // Ends in what the last two panels of tiles of 224 columns share.
        (260, &[(616, &[72], true)]),
        (300, &[(256, &[40], true), (8, &[200, 8], false), (520, &[56, 72, 24], false)]),
        (1000, &[(1032, &[1000, 48, 8], true)]),
        // More tiles than run at a time, in more than one group of rows.
        (2600, &[(2000, &[136], false), (600, &[136, 8], true)]),
        (70, &[(16, &[8], false), (16, &[16], true), (24, &[24], false), (512, &[320], false)]),
    ];
    for (rows, shapes) in cases {
        for dtype in [DType::BF16, DType::F16] {
            for along in [true, false] {
                for apart in [0, 8] {
                    let tolerance = if dtype == DType::BF16 { 8e-3 } else { 1e-3 };
                    let place = (rows, along, apart);
                    let found = sums(&device, dtype, place, shapes, None);
                    for (found, expected) in &found {
                        assert_close(found, expected, tolerance);
                    }
                    let widths: &[usize] = if along { &WIDTHS_ALONG } else { &WIDTHS_ACROSS };
                    for width in widths {
                        let again = sums(&device, dtype, place, shapes, Some(*width));
                        for ((found, _), (again, _)) in found.iter().zip(&again) {
                            assert_identical(found, again);
                        }
                    }
                }
            }
        }
    }
}

/// On the 66 pairs of multiprocessors of an H100 or H200.
#[test]
fn tiles_come_out_even_with_the_gpu() {
    let width = |rows: usize, columns: &[usize], widths: &[usize]| {
        Tiling::of(rows, columns.iter().copied(), widths, 66).width
    };
    // Gate and up of many rows, and of 256, which are two rounds of 66 tiles either way.
    assert_eq!(width(8192, &[14336; 2], &WIDTHS_ALONG), 256);
    assert_eq!(width(256, &[14336; 2], &WIDTHS_ALONG), 224);
    assert_eq!(width(256, &[14336; 2], &WIDTHS_ACROSS), 256);
    // 32 tiles of 256 columns would leave half of it idle, 64 of 128 don't.
    assert_eq!(width(512, &[4096], &WIDTHS_ACROSS), 128);
    assert_eq!(width(512, &[4096, 1024, 1024], &WIDTHS_ALONG), 224);
    let there = Tiling::of(1024, [4096].into_iter(), &[256], 66).there;
    assert_eq!(there, 66 * 256 * 256);
}

/// As `cuda_speed_of_tilings` finds it.
#[test]
fn sums_are_taken_where_they_are_sooner() {
    let are_sooner = |rows: usize, columns: &[usize], terms: usize| {
        let there = Tiling::of(rows, columns.iter().copied(), &WIDTHS_ALONG, 66).there;
        there <= one_after_the_other(rows, columns.iter().copied(), terms, 66)
    };
    for (rows, columns, terms, expected) in [
        (512, &[14336; 2][..], 1, true),
        (640, &[14336; 2], 1, false),
        (800, &[14336; 2], 1, false),
        (1000, &[14336; 2], 1, true),
        (256, &[4096], 1, false),
        (800, &[4096], 1, false),
        (1000, &[4096], 1, true),
        (384, &[4096, 1024, 1024], 1, true),
        (2048, &[4096, 1024, 1024], 1, true),
        // The gradient of what three layers with adapters read.
        (512, &[4096], 4, true),
        (8192, &[4096], 4, true),
    ] {
        assert_eq!(are_sooner(rows, columns, terms), expected, "{rows} {columns:?} {terms}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU of compute capability 9.0"]
fn cuda_hopper_refuses_matrices_that_have_no_tma_descriptor() {
    let device = cuda();
    let gpu = Cuda::on(&device).unwrap();
    assert_has_warpgroups(&gpu);
    let x = there(&random(&[64, 64], 1).to_dtype(DType::BF16).unwrap(), &device);
    let array = gpu.strided(&x).unwrap();
    let whole = Matrix::of(&array, 64);
    let sum = |a| Sum {
        to: whole,
        columns: 64,
        bias: None,
        codes: None,
        terms: vec![Term { a, b: whole, depth: 32 }],
    };
    for bad in [whole.at_column(3), whole.t(), Matrix::new(array.pointer, DType::BF16, 63)] {
        let error = gpu.sums_of_products(DType::BF16, 64, &[sum(bad)]).unwrap_err().to_string();
        assert!(error.contains("begin at 16 bytes"), "{error}");
    }
    let nine: Vec<_> = (0..9).map(|_| sum(whole)).collect();
    let error = gpu.sums_of_products(DType::BF16, 64, &nine).unwrap_err().to_string();
    assert!(error.contains("9 sums"), "{error}");
}

/// Of each width of tiles, beside cuBLAS, over matrices that aren't in the cache.
#[test]
#[ignore = "measures an NVIDIA GPU"]
fn cuda_speed_of_tilings() {
    let device = cuda();
    let random = |rows: usize, columns: usize| {
        let numbers = Tensor::randn(0f32, 1.0, (rows, columns), &device).unwrap();
        numbers.to_dtype(DType::BF16).unwrap()
    };
    for rows in [256, 384, 512, 640, 800, 1000, 2048] {
        for (depth, columns) in [
            (4096, &[4096, 1024, 1024][..]),
            (4096, &[4096]),
            (4096, &[14336; 2]),
            (14336, &[4096]),
        ] {
            let elements = depth * columns.iter().sum::<usize>();
            let copies = (200_000_000 / (2 * elements)).max(2);
            let x = random(rows, depth);
            let weights: Vec<Vec<_>> = (0..copies)
                .map(|_| columns.iter().map(|columns| random(*columns, depth)).collect())
                .collect();
            let gpu = Cuda::on(&device).unwrap();
            let x = gpu.rows(&x).unwrap();
            let time = |run: &dyn Fn(&[Tensor])| {
                let times = (200 / copies).max(1);
                let seconds = least_seconds(&device, 4, || {
                    for _ in 0..times {
                        weights.iter().for_each(|weights| run(weights));
                    }
                });
                seconds / (times * copies) as f64 * 1e6
            };
            let in_tiles = |weights: &[Tensor], width: usize| {
                let weights: Vec<_> = weights.iter().map(|it| gpu.rows(it).unwrap()).collect();
                let ys = columns.iter().map(|it| gpu.empty((rows, *it), DType::BF16).unwrap());
                let ys: Vec<_> = ys.collect();
                let sums = weights.iter().zip(&ys).zip(columns).map(|((weight, y), columns)| Sum {
                    to: Matrix::of(y, *columns),
                    columns: *columns,
                    bias: None,
                    codes: None,
                    terms: vec![Term { a: x.matrix, b: weight.matrix.t(), depth }],
                });
                let sums: Vec<_> = sums.collect();
                gpu.sums_in_tiles(DType::BF16, rows, &sums, Some(width)).unwrap();
            };
            let blas = time(&|weights| {
                for (weight, columns) in weights.iter().zip(columns) {
                    let weight = gpu.rows(weight).unwrap();
                    let y = gpu.empty((rows, *columns), DType::BF16).unwrap();
                    let factors = (x.matrix, weight.matrix.t());
                    let to = Matrix::of(&y, *columns);
                    gpu.gemm([rows, *columns, depth], 1.0, factors, 0.0, to).unwrap();
                }
            });
            let times = WIDTHS_ALONG.map(|width| {
                let time = time(&|weights| in_tiles(weights, width));
                format!("{width}: {time:.1}")
            });
            let all = columns.iter().copied();
            let at_once = gpu.tiles_at_once().unwrap();
            let Tiling { width, there } = Tiling::of(rows, all.clone(), &WIDTHS_ALONG, at_once);
            let taken = match there <= one_after_the_other(rows, all, 1, at_once) {
                true => width.to_string(),
                false => "cuBLAS".into(),
            };
            println!(
                "{rows} rows, {depth} deep, {columns:?}: {} us; cuBLAS {blas:.1} us; taken {taken}",
                times.join(", ")
            );
        }
    }
}
