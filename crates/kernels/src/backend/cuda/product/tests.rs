use super::*;
use crate::testing::{assert_close, cuda, here, random, rounded, there};
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
        let to = Matrix::of(&y, *columns);
        all.push(Sum { to, columns: *columns, bias: pointer, codes: None, terms });
        expected.push(exact);
        found.push(y.tensor);
    }
    gpu.sums_of_products(dtype, rows, &all).unwrap();
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
    let cases: [(usize, &[Shape]); 6] = [
        (1, &[(8, &[8], true)]),
        (129, &[(264, &[64, 16], false)]),
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
                    let found = sums(&device, dtype, place, shapes);
                    let again = sums(&device, dtype, place, shapes);
                    for ((found, expected), (again, _)) in found.iter().zip(&again) {
                        assert_close(found, expected, tolerance);
                        let bits = |tensor: &Tensor| {
                            tensor
                                .to_dtype(DType::F32)
                                .unwrap()
                                .flatten_all()
                                .unwrap()
                                .to_vec1::<f32>()
                                .unwrap()
                        };
                        assert_eq!(bits(found), bits(again));
                    }
                }
            }
        }
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
