use super::*;
use crate::testing::*;
use candle_core::Device;

fn assert_a_part_is_written(device: &Device) {
    for dtype in [DType::F32, DType::BF16] {
        for (dim, start) in [(0, 1), (1, 0), (1, 3), (2, 2)] {
            let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
            let (mut sizes, whole) = ([2, 5, 7], low(&[2, 5, 7], 1));
            sizes[dim] = if dim == 0 { 1 } else { 2 };
            let part = low(&sizes, 2);
            let expected = whole.copy().unwrap();
            expected.slice_set(&part, dim, start).unwrap();
            let found = whole.to_device(device).unwrap().copy().unwrap();
            let given = strided(&part.to_device(device).unwrap());
            write(&found, &given, dim, start).unwrap();
            assert_identical(&found.to_device(&Device::Cpu).unwrap(), &expected);
        }
    }
}

fn assert_parts_are_joined(device: &Device) {
    for dtype in [DType::F32, DType::BF16] {
        for dim in 0..3 {
            let part = |size: usize, seed| {
                let mut shape = [2, 3, 8];
                shape[dim] = size;
                let part = random(&shape, seed).to_dtype(dtype).unwrap();
                strided(&part.to_device(device).unwrap())
            };
            let parts = [part(2, 1), part(1, 2), part(5, 3)];
            let expected = Tensor::cat(&parts.each_ref().map(here), dim).unwrap();
            assert_identical(&here(&join(&parts.each_ref(), dim).unwrap()), &expected);
            let own = contiguous(&parts[0]).unwrap();
            assert!(own.is_contiguous());
            assert_identical(&here(&own), &here(&parts[0]));
        }
    }
}

#[test]
fn parts_are_joined_in_their_order() {
    assert_parts_are_joined(&Device::Cpu);
    let parts = [random(&[2, 3], 1), random(&[2, 4], 2)];
    let wrong = message(join(&parts.each_ref(), 0));
    assert!(wrong.contains("a part has shape [2, 4], expected [2, 3]"), "{wrong}");
    assert!(message(join(&[], 0)).contains("found no parts"));
}

#[test]
fn a_part_is_written_where_it_belongs_and_nothing_else_changes() {
    assert_a_part_is_written(&Device::Cpu);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_writes_and_casts_as_the_cpu_does() {
    let device = cuda();
    assert_a_part_is_written(&device);
    assert_parts_are_joined(&device);
    assert_rows_are_written_where_they_belong(&device, &[DType::F32, DType::F16, DType::BF16]);
    assert_a_cast_rounds(&device);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_writes_no_row_beyond_the_pools() {
    let device = cuda();
    let given = |shape: &[usize], seed| {
        random(shape, seed).to_dtype(DType::BF16).unwrap().to_device(&device).unwrap()
    };
    let pools = [1, 2].map(|seed| given(&[2, 3, 2, 8], seed));
    let before = pools.clone().map(|pool| here(&pool));
    let rows = given(&[3, 2, 8], 3);
    let places = Tensor::new(&[6u32, u32::MAX, 1 << 31], &device).unwrap();
    write_rows_both([&pools[0], &pools[1]], [&rows, &rows], &places).unwrap();
    for (found, expected) in pools.iter().zip(&before) {
        assert_identical(&here(found), expected);
    }
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_writes_parts_of_more_than_two_gibibytes() {
    let device = cuda();
    let count = (1 << 29) + 5;
    let part = Tensor::ones(count, DType::F32, &device).unwrap();
    let whole = Tensor::zeros(count + 2, DType::F32, &device).unwrap();
    write(&whole, &part, 0, 1).unwrap();
    let numbers = |start| whole.narrow(0, start, 3).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!([numbers(0), numbers(count - 1)], [[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]);
}

#[test]
fn what_does_not_fit_is_named() {
    let (whole, part) = (random(&[2, 5], 1), random(&[2, 3], 2));
    let wrong = message(write(&whole, &part, 1, 3));
    assert!(wrong.contains("[2, 3] does not fit into [2, 5] at 3 of dimension 1"), "{wrong}");
    let wrong = message(write(&whole, &part, 2, 0));
    assert!(wrong.contains("dimension 2"), "{wrong}");
    let wrong = message(write(&whole, &part, 0, 0));
    assert!(wrong.contains("part has shape [2, 3], expected [2, 5]"), "{wrong}");
    let wrong = message(write(&whole.t().unwrap(), &part.t().unwrap(), 0, 0));
    assert!(wrong.contains("not contiguous"), "{wrong}");
    let wrong = message(cast(&Tensor::new(&[1u32], &Device::Cpu).unwrap(), DType::F32));
    assert!(wrong.contains("found U32 to F32, expected floats"), "{wrong}");
}

fn assert_a_cast_rounds(device: &Device) {
    let x = random(&[3, 5], 1).to_dtype(DType::F32).unwrap();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let found = cast(&strided(&x.to_device(device).unwrap()), dtype).unwrap();
        let found = found.to_device(&Device::Cpu).unwrap();
        assert_identical(&found, &x.to_dtype(dtype).unwrap());
    }
}

#[test]
fn a_cast_rounds_like_candle() {
    assert_a_cast_rounds(&Device::Cpu);
}

fn assert_rows_are_written_where_they_belong(device: &Device, dtypes: &[DType]) {
    for (dtype, head_dim) in dtypes.iter().flat_map(|dtype| [(*dtype, 8), (*dtype, 3)]) {
        let given = |shape: &[usize], seed| {
            let tensor = random(shape, seed).to_dtype(dtype).unwrap();
            tensor.to_device(device).unwrap()
        };
        let places = [14u32, 0, NOWHERE, 7, 5];
        // Pools of one layer of several; rows as a fused projection has them, and transposed ones.
        let layers = [1, 2].map(|seed| given(&[2, 4, 4, 2, head_dim], seed));
        let before = layers.clone().map(|layer| here(&layer));
        let fused = given(&[5, 6, head_dim], 3);
        let of_fused = [fused.narrow(1, 2, 2).unwrap(), fused.narrow(1, 4, 2).unwrap()];
        let others = [4, 5].map(|seed| strided(&given(&[5, 2, head_dim], seed)));
        for rows in [of_fused, others] {
            let pools = layers.clone().map(|layer| layer.get(1).unwrap());
            let given_places = Tensor::new(&places, device).unwrap();
            write_rows_both([&pools[0], &pools[1]], [&rows[0], &rows[1]], &given_places).unwrap();
            for ((found, before), rows) in layers.iter().zip(&before).zip(rows) {
                let (found, rows) = (values(&here(found)), values(&here(&rows)));
                let mut expected = values(before);
                let width = 2 * head_dim;
                for (place, row) in places.iter().zip(rows.chunks(width)) {
                    if *place != NOWHERE {
                        expected[(16 + *place as usize) * width..][..width].copy_from_slice(row);
                    }
                }
                assert_eq!(found, expected);
            }
        }
        let pools = layers.map(|layer| layer.get(0).unwrap());
        let rows = fused.narrow(0, 0, 0).unwrap().narrow(1, 0, 2).unwrap();
        let none = given_none(device);
        write_rows_both([&pools[0], &pools[1]], [&rows, &rows], &none).unwrap();
    }
}

/// No places.
fn given_none(device: &Device) -> Tensor {
    Tensor::new(&[0u32], device).unwrap().narrow(0, 0, 0).unwrap()
}

#[test]
fn rows_are_written_where_they_belong() {
    let dtypes = [DType::F64, DType::F32, DType::F16, DType::BF16];
    assert_rows_are_written_where_they_belong(&Device::Cpu, &dtypes);
}

#[test]
fn rows_of_the_pools_themselves_are_written() {
    let pool = random(&[2, 2, 1, 3], 1);
    let rows = pool.reshape((4, 1, 3)).unwrap().narrow(0, 1, 2).unwrap();
    let expected = Tensor::cat(&[&rows, &rows], 0).unwrap().reshape((2, 2, 1, 3)).unwrap();
    let expected = expected.narrow(0, 0, 1).unwrap().copy().unwrap();
    let places = Tensor::new(&[0u32, 1], &Device::Cpu).unwrap();
    let other = pool.copy().unwrap();
    write_rows_both([&pool, &other], [&rows, &rows], &places).unwrap();
    assert_identical(&pool.narrow(0, 0, 1).unwrap(), &expected);
}

#[test]
fn rows_that_do_not_fit_are_named() {
    let (pool, rows) = (random(&[3, 4, 2, 5], 1), random(&[2, 2, 5], 2));
    let before = pool.copy().unwrap();
    let run = |pool: &Tensor, rows: &Tensor, places: &[u32]| {
        let (other, places) = (pool.copy().unwrap(), Tensor::new(places, &Device::Cpu).unwrap());
        message(write_rows_both([pool, &other], [rows, rows], &places))
    };
    let wrong = run(&pool, &rows, &[1, 12]);
    assert!(wrong.contains("found place 12, expected less than 12, or NOWHERE"), "{wrong}");
    assert_identical(&pool, &before);
    assert!(run(&pool, &rows, &[1]).contains("places has shape [1], expected [2]"));
    let wrong = run(&pool, &rows.narrow(2, 0, 4).unwrap(), &[1, 2]);
    assert!(wrong.contains("a pool has shape [3, 4, 2, 5], expected [3, 4, 2, 4]"), "{wrong}");
    let wrong = run(&pool, &rows.to_dtype(DType::F32).unwrap(), &[1, 2]);
    assert!(wrong.contains("rows is F32, expected F64"), "{wrong}");
    let transposed = pool.transpose(0, 1).unwrap();
    assert!(run(&transposed, &rows, &[1, 2]).contains("a pool is not contiguous"));
}

#[cfg(not(feature = "metal"))]
mod metal {
    use super::*;
    use crate::backend::metal::{Emulator, emulate};
    use metal_emulator::{Mode, SEEDS};

    #[test]
    #[ignore = "needs clang"]
    fn metal_writes_rows_where_they_belong() {
        for mode in Mode::ALL {
            let emulator = Emulator::open(mode);
            for (seed, most_threads) in SEEDS.into_iter().zip([33, 1024, 90]) {
                let emulator = Emulator { seed, most_threads, ..emulator.clone() };
                let dtypes = [DType::F32, DType::F16, DType::BF16];
                emulate(emulator, || {
                    assert_rows_are_written_where_they_belong(&Device::Cpu, &dtypes)
                });
            }
        }
    }

    #[test]
    #[ignore = "needs clang"]
    fn metal_writes_no_row_beyond_the_pools() {
        let given = |shape: &[usize], seed| random(shape, seed).to_dtype(DType::BF16).unwrap();
        let pools = [1, 2].map(|seed| given(&[2, 3, 2, 8], seed));
        let before = pools.clone().map(|pool| pool.copy().unwrap());
        let rows = given(&[3, 2, 8], 3);
        let places = Tensor::new(&[6u32, NOWHERE, 1 << 31], &Device::Cpu).unwrap();
        emulate(Emulator::open(Mode::Asan), || {
            write_rows_both([&pools[0], &pools[1]], [&rows, &rows], &places).unwrap();
        });
        for (found, expected) in pools.iter().zip(&before) {
            assert_identical(found, expected);
        }
    }
}
