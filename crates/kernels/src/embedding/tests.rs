use super::*;
use crate::testing::*;

fn ids() -> Tensor {
    Tensor::new(&[[3u32, 0, 3, 8, 3], [0, 0, 1, 8, 2]], &Device::Cpu).unwrap()
}

#[test]
fn forward_copies_rows() {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let table = random(&[9, 7], 1).to_dtype(dtype).unwrap();
        let expected = table.index_select(&ids().flatten_all().unwrap(), 0).unwrap();
        let expected = expected.reshape((2, 5, 7)).unwrap();
        assert_identical(&forward(&table, &ids()).unwrap(), &expected);
        assert_identical(&forward(&strided(&table), &strided(&ids())).unwrap(), &expected);
    }
}

#[test]
fn backward_matches_finite_differences() {
    let (table, dy) = (random(&[9, 7], 1), random(&[2, 5, 7], 2));
    let dtable = backward(&dy, &ids(), 9).unwrap();
    assert_gradient(&table, &dtable, |table| inner_product(&forward(table, &ids())?, &dy));
}

#[test]
fn other_precisions_match_f64() {
    let dy = random(&[2, 5, 7], 2);
    for (dtype, _) in PRECISIONS {
        let dtable = backward(&dy.to_dtype(dtype).unwrap(), &strided(&ids()), 9).unwrap();
        assert_eq!(dtable.dtype(), DType::F32);
        assert_close(&dtable, &backward(&rounded(&dy, dtype), &ids(), 9).unwrap(), 2e-6);
    }
}

#[test]
fn threads_do_not_change_bits() {
    let ids: Vec<u32> = (0..2000u32).map(|i| i * i % 97).collect();
    let ids = Tensor::from_vec(ids, (2, 1000), &Device::Cpu).unwrap();
    let dy = random(&[2, 1000, 33], 1).to_dtype(DType::F32).unwrap();
    let table = random(&[97, 33], 1);
    assert_independent_of_threads(|| {
        vec![backward(&dy, &ids, 97).unwrap(), forward(&table, &ids).unwrap()]
    });
}

#[test]
fn empty_and_wrong_arguments_are_handled() {
    let table = random(&[9, 7], 1);
    let none = Tensor::zeros((2, 0), DType::U32, &Device::Cpu).unwrap();
    let y = forward(&table, &none).unwrap();
    assert_eq!(y.dims(), &[2, 0, 7]);
    assert_eq!(max_abs(&backward(&y, &none, 9).unwrap()), 0.0);
    assert_eq!(forward(&random(&[9, 0], 1), &ids()).unwrap().dims(), &[2, 5, 0]);
    let wrong = message(forward(&random(&[8, 7], 1), &ids()));
    assert!(wrong.contains("token id 8 at position 3") && wrong.contains("less than 8"), "{wrong}");
    let wrong = message(backward(&random(&[2, 4, 7], 1), &ids(), 9));
    assert!(wrong.contains("dy has shape [2, 4, 7], expected [2, 5, 7]"), "{wrong}");
    let signed = ids().to_dtype(DType::I64).unwrap();
    assert!(message(forward(&table, &signed)).contains("ids is I64, expected U32"));
}
