use super::super::{Sum, Term};
use super::*;
use crate::testing::{assert_close, assert_identical, cuda, here, least_seconds, random, rounded};
use candle_core::{Device, Tensor};

struct Case {
    x: Tensor,
    weights: Vec<Tensor>,
    bias: Tensor,
}

impl Case {
    /// The second matrix has a bias.
    fn new(rows: usize, depth: usize, columns: &[usize], dtype: DType, device: &Device) -> Case {
        let there = |shape: &[usize], seed| {
            random(shape, seed).to_dtype(dtype).unwrap().to_device(device).unwrap()
        };
        let weights =
            columns.iter().zip(2..).map(|(columns, seed)| there(&[*columns, depth], seed));
        let weights = weights.collect();
        let bias = there(&[columns.get(1).copied().unwrap_or(8)], 99);
        Case { x: there(&[rows, depth], 1), weights, bias }
    }

    /// By these kernels or by those for many rows.
    fn run(&self, thin: bool) -> Vec<Tensor> {
        let cuda = Cuda::of(&self.x).unwrap();
        let (x, dtype) = (cuda.rows(&self.x).unwrap(), self.x.dtype());
        let (rows, depth) = self.x.dims2().unwrap();
        let bias = cuda.contiguous(&self.bias).unwrap();
        let (mut products, mut sums, mut memory, mut ys) = (vec![], vec![], vec![], vec![]);
        for (index, weight) in self.weights.iter().enumerate() {
            let columns = weight.dim(0).unwrap();
            let (weight, y) =
                (cuda.rows(weight).unwrap(), cuda.empty((rows, columns), dtype).unwrap());
            let bias = (index == 1).then_some(bias.pointer);
            products.push(ThinProduct { weight: weight.matrix, columns, bias, y: y.pointer });
            let terms = vec![Term { a: x.matrix, b: weight.matrix.t(), depth }];
            sums.push(Sum { to: Matrix::of(&y, columns), columns, bias, codes: None, terms });
            memory.push(weight);
            ys.push(y.tensor);
        }
        match thin {
            true => cuda.thin_products(x.matrix, [rows, depth], &products).unwrap(),
            false => cuda.sums_of_products(dtype, rows, &sums).unwrap(),
        }
        ys
    }

    fn expected(&self, index: usize) -> Tensor {
        let exact = |tensor: &Tensor| here(tensor).to_dtype(DType::F64).unwrap();
        let y = exact(&self.x).matmul(&exact(&self.weights[index]).t().unwrap()).unwrap();
        if index == 1 { y.broadcast_add(&exact(&self.bias)).unwrap() } else { y }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU of compute capability 9.0"]
fn cuda_hopper_thin_products_have_the_bits_of_those_of_many_rows() {
    let device = cuda();
    assert!(Cuda::on(&device).unwrap().has_warpgroups().unwrap(), "this test needs a Hopper GPU");
    for rows in [1, 2, 17, 63, 64, 65, 100, 128, 129, 200, 255, 256] {
        for (depth, columns) in [
            (8, &[8][..]),
            (64, &[64, 8]),
            (72, &[200, 72, 64]),
            (112, &[264, 16, 8, 520]),
            (576, &[1000, 256]),
            (4096, &[1032]),
            // More tiles than multiprocessors, few and many.
            (72, &[10_000, 8, 72]),
            (200, &[28_672, 40]),
        ] {
            for dtype in [DType::BF16, DType::F16] {
                let case = Case::new(rows, depth, columns, dtype, &device);
                let (thin, many, again) = (case.run(true), case.run(false), case.run(true));
                let tolerance = if dtype == DType::BF16 { 8e-3 } else { 1e-3 };
                for (index, thin) in thin.iter().enumerate() {
                    let expected = case.expected(index);
                    // Sums of many terms are larger.
                    let size = (depth as f64).sqrt().max(4.0) / 4.0;
                    assert_close(&here(thin), &rounded(&expected, dtype), tolerance * size);
                    assert_identical(&here(thin), &here(&many[index]));
                    assert_identical(&here(thin), &here(&again[index]));
                }
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU of compute capability 9.0"]
fn cuda_hopper_thin_products_refuse_what_they_have_no_kernel_for() {
    let device = cuda();
    let case = Case::new(3, 16, &[8], DType::BF16, &device);
    let cuda = Cuda::on(&device).unwrap();
    let x = cuda.rows(&case.x).unwrap();
    let y = cuda.empty((257, 16), DType::BF16).unwrap();
    let weight = cuda.rows(&case.weights[0]).unwrap();
    let product = |weight, columns| ThinProduct { weight, columns, bias: None, y: y.pointer };
    let run = |sizes, weight, columns| {
        cuda.thin_products(x.matrix, sizes, &[product(weight, columns)]).unwrap_err().to_string()
    };
    for (sizes, columns) in [([257, 16], 8), ([0, 16], 8), ([3, 0], 8), ([3, 16], 7)] {
        let error = run(sizes, weight.matrix, columns);
        assert!(error.contains("expected 1 to 256"), "{error}");
    }
    let both = [8, 16].map(|columns| product(weight.matrix, columns));
    let error = cuda.thin_unit(x.matrix, [3, 16], &both, Activation::Silu).unwrap_err();
    assert!(error.to_string().contains("8 and 16 columns"), "{error}");
    let other = Matrix::new(weight.matrix.pointer, DType::F32, 16);
    assert!(run([3, 16], other, 8).contains("expected BF16 or F16"));
}

/// Beside cuBLAS, over matrices that aren't in the cache.
#[test]
#[ignore = "measures an NVIDIA GPU"]
fn cuda_speed_of_thin_products() {
    let device = cuda();
    for rows in [1, 16, 64, 128, 256] {
        for (depth, columns) in [
            (4096, &[4096, 1024, 1024][..]),
            (4096, &[4096]),
            (4096, &[14336; 2]),
            (14336, &[4096]),
        ] {
            let elements = depth * columns.iter().sum::<usize>();
            let copies = (200_000_000 / (2 * elements)).max(2);
            let cases: Vec<_> = (0..copies)
                .map(|_| {
                    let ones = |shape: (usize, usize)| Tensor::ones(shape, DType::BF16, &device);
                    let weights = columns.iter().map(|columns| ones((*columns, depth)).unwrap());
                    let weights = weights.collect();
                    let bias = ones((1, columns.get(1).copied().unwrap_or(8))).unwrap();
                    Case { x: ones((rows, depth)).unwrap(), weights, bias }
                })
                .collect();
            let blas = |case: &Case| {
                let cuda = Cuda::of(&case.x).unwrap();
                let x = cuda.rows(&case.x).unwrap();
                for weight in &case.weights {
                    let columns = weight.dim(0).unwrap();
                    let weight = cuda.rows(weight).unwrap();
                    let y = cuda.empty((rows, columns), DType::BF16).unwrap();
                    let factors = (x.matrix, weight.matrix.t());
                    cuda.gemm([rows, columns, depth], 1.0, factors, 0.0, Matrix::of(&y, columns))
                        .unwrap();
                }
            };
            let time = |run: &dyn Fn(&Case)| {
                let times = (100 / copies).max(1);
                let seconds = least_seconds(&device, 4, || {
                    for _ in 0..times {
                        cases.iter().for_each(run);
                    }
                });
                seconds / (times * copies) as f64 * 1e6
            };
            let thin = time(&|case| drop(case.run(true)));
            let many = time(&|case| drop(case.run(false)));
            let blas = time(&blas);
            println!(
                "{rows} rows, {depth} deep, {columns:?}: {thin:.1} us, {:.2} TB/s; for many rows {many:.1} us; cuBLAS {blas:.1} us",
                2.0 * elements as f64 / thin / 1e6
            );
        }
    }
}
