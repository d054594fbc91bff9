use super::*;
use crate::copy::NOWHERE;
use crate::testing::*;

impl RoundedPool {
    /// What the codes stand for.
    pub(in crate::attention::paged) fn numbers(&self) -> Vec<f64> {
        let bytes = |tensor| here(tensor).flatten_all().unwrap().to_vec1::<u8>().unwrap();
        let (codes, scales) = (bytes(&self.codes), bytes(&self.scales));
        let head_dim = self.codes.dim(3).unwrap();
        let groups = head_dim.div_ceil(GROUP);
        let number = |(index, code): (usize, u8)| {
            let scale = scales[index / head_dim * groups + index % head_dim / GROUP];
            match scale {
                255 => f64::NAN,
                scale => f64::from(code as i8) * f64::from(i32::from(scale.max(7)) - 133).exp2(),
            }
        };
        codes.into_iter().enumerate().map(number).collect()
    }
}

/// The formula of the module, in f64.
fn rounded(group: &[f64]) -> Vec<f64> {
    if group.iter().any(|x| !x.is_finite()) {
        return vec![f64::NAN; group.len()];
    }
    let largest = group.iter().fold(0f64, |largest, x| largest.max(x.abs()));
    let exponent = if largest == 0.0 { -120.0 } else { largest.log2().floor().max(-120.0) };
    let step = (exponent - 6.0).exp2();
    group.iter().map(|x| (x / step).round_ties_even().clamp(-127.0, 127.0) * step).collect()
}

/// Rows of all magnitudes, with zeros, ends of ranges, and what isn't finite.
fn rows(tokens: usize, heads: usize, head_dim: usize, seed: u64) -> Tensor {
    let mut all = values(&random(&[tokens, heads, head_dim], seed));
    for (index, x) in all.iter_mut().enumerate() {
        *x *= [1.0, 1e-3, 30.0, 1e-30, 1e4][index / 7 % 5];
    }
    let special = [0.0, -0.0, 1.0, 1.984375, 1.9999, 0.0078125, f64::INFINITY, f64::NAN, 1e-38];
    let count = all.len();
    for (index, x) in special.into_iter().enumerate() {
        if let Some(place) = all.get_mut((index * 41 + 5) % count) {
            *place = x;
        }
    }
    if tokens > 1 {
        all[..head_dim].fill(0.0);
    }
    Tensor::from_vec(all, (tokens, heads, head_dim), &Device::Cpu).unwrap()
}

/// Writes rows to places in no order, some nowhere, and compares with the formula; other rows stay.
fn assert_written(device: &Device, dtype: DType, [tokens, heads, head_dim]: [usize; 3]) {
    let (blocks, block) = (tokens + 2, 3);
    let shape = (blocks, block, heads, head_dim);
    let pools = [0, 1].map(|_| RoundedPool::new(shape, device).unwrap());
    let [k, v] = [1, 2].map(|seed| rows(tokens, heads, head_dim, seed).to_dtype(dtype).unwrap());
    let room = blocks * block;
    let places: Vec<u32> = (0..tokens)
        .map(|token| if token % 5 == 4 { NOWHERE } else { ((token * 5 + 1) % room) as u32 })
        .collect();
    let on_device = Tensor::new(places.as_slice(), device).unwrap();
    // A view, as of fused projections.
    let wide = Tensor::cat(&[&v, &v], 1).unwrap();
    let view = there(&wide, device).narrow(1, heads, heads).unwrap();
    let [first, second] = &pools;
    RoundedPool::write_both([first, second], [&there(&k, device), &view], &on_device).unwrap();
    for (pool, rows) in pools.iter().zip([&k, &v]) {
        let mut expected = vec![0.0; room * heads * head_dim];
        for (place, row) in places.iter().zip(values(rows).chunks(heads * head_dim)) {
            if *place != NOWHERE {
                let groups = row.chunks(head_dim).flat_map(|head| head.chunks(GROUP));
                let row: Vec<f64> = groups.flat_map(rounded).collect();
                expected[*place as usize * heads * head_dim..][..row.len()].copy_from_slice(&row);
            }
        }
        let found = pool.numbers();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found == expected || found.is_nan() && expected.is_nan(), "{found} {expected}");
        }
    }
}

const SIZES: [[usize; 3]; 6] =
    [[1, 1, 1], [7, 2, 33], [11, 3, 64], [40, 8, 128], [3, 1, 80], [300, 2, 31]];

#[test]
fn rows_are_rounded_as_the_formula_says() {
    for sizes in SIZES {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            assert_written(&Device::Cpu, dtype, sizes);
        }
    }
}

#[test]
fn rounding_loses_a_64th_of_the_scale_at_most() {
    let x = random(&[200, 2, 64], 3).to_dtype(DType::F32).unwrap();
    let pool = RoundedPool::new((200, 1, 2, 64), &Device::Cpu).unwrap();
    let places = Tensor::arange(0u32, 200, &Device::Cpu).unwrap();
    RoundedPool::write_both([&pool, &pool.clone()], [&x, &x], &places).unwrap();
    for (group, found) in values(&x).chunks(GROUP).zip(pool.numbers().chunks(GROUP)) {
        let largest = group.iter().fold(0f64, |largest, x| largest.max(x.abs()));
        for (x, found) in group.iter().zip(found) {
            assert!((x - found).abs() <= largest / 64.0, "{x} {found}");
        }
    }
}

#[test]
fn wrong_rows_and_places_are_errors() {
    let pool = || RoundedPool::new((2, 4, 2, 8), &Device::Cpu).unwrap();
    let (first, second) = (pool(), pool());
    let x = random(&[3, 2, 8], 1);
    let places = |places: &[u32]| Tensor::new(places, &Device::Cpu).unwrap();
    let write = |rows: [&Tensor; 2], places: &Tensor| {
        message(RoundedPool::write_both([&first, &second], rows, places))
    };
    let wrong = write([&x, &x], &places(&[0, 8, 1]));
    assert!(wrong.contains("found place 8, expected less than 8, or NOWHERE"), "{wrong}");
    assert_eq!(first.numbers(), vec![0.0; 2 * 4 * 2 * 8]);
    assert!(write([&x, &x], &places(&[0, 1])).contains("places has shape [2]"));
    let short = x.narrow(0, 0, 2).unwrap();
    assert!(write([&x, &short], &places(&[0, 1, 2])).contains("rows has shape [2, 2, 8]"));
    let other = x.to_dtype(DType::F32).unwrap();
    assert!(write([&x, &other], &places(&[0, 1, 2])).contains("rows is F32, expected F64"));
    let codes = x.to_dtype(DType::U8).unwrap();
    assert!(write([&codes, &codes], &places(&[0, 1, 2])).contains("found U8 rows"));
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_rows_are_rounded_as_the_formula_says() {
    let device = crate::testing::cuda();
    for sizes in SIZES {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            assert_written(&device, dtype, sizes);
        }
    }
}

#[cfg(not(feature = "metal"))]
#[test]
#[ignore = "needs clang"]
fn metal_rows_are_rounded_as_the_formula_says() {
    use crate::backend::metal::{Emulator, emulate};
    for mode in metal_emulator::Mode::ALL {
        let emulator = Emulator::open(mode);
        for sizes in SIZES {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                emulate(emulator.clone(), || assert_written(&Device::Cpu, dtype, sizes));
            }
        }
    }
}
