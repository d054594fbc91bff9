use super::*;
use candle_core::D;

/// Nobody to wait for.
fn wait() -> Result<()> {
    Ok(())
}

fn alone() -> (Device, Communicator) {
    let device = crate::testing::cuda();
    let id = unique_id().unwrap();
    let communicator = Communicator::join(&device, id, 0, 1, wait).unwrap();
    (device, communicator)
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn cuda_a_sum_of_one_is_its_own() {
    let (device, communicator) = alone();
    assert!(communicator.mark().unwrap().is_none());
    for count in [1usize, 1000, 1 << 20] {
        let numbers = Tensor::randn(0f32, 1.0, count, &device).unwrap();
        let expected = numbers.copy().unwrap();
        communicator.begin_sum(&numbers, wait).unwrap();
        communicator.begin_sum_of_parts(&numbers, wait).unwrap();
        let mark = communicator.mark().unwrap();
        communicator.until_mark(mark.as_ref(), wait).unwrap();
        assert!(communicator.lane().unwrap().is_done().unwrap());
        let difference = (numbers - expected).unwrap().abs().unwrap().max(D::Minus1).unwrap();
        assert_eq!(difference.to_scalar::<f32>().unwrap(), 0.0);
    }
    let nothing = Tensor::zeros(0, DType::F32, &device).unwrap();
    communicator.begin_sum(&nothing, wait).unwrap();
    communicator.begin_sum_of_parts(&nothing, wait).unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn cuda_what_is_no_flat_buffer_of_the_gpu_is_refused() {
    let (device, communicator) = alone();
    let flat = Tensor::zeros(8, DType::F32, &device).unwrap();
    for wrong in [
        flat.to_dtype(DType::BF16).unwrap(),
        flat.reshape((2, 4)).unwrap(),
        flat.reshape((4, 2)).unwrap().narrow(1, 0, 1).unwrap().squeeze(1).unwrap(),
        flat.to_device(&Device::Cpu).unwrap(),
    ] {
        for error in [
            communicator.begin_sum(&wrong, wait).unwrap_err(),
            communicator.begin_sum_of_parts(&wrong, wait).unwrap_err(),
        ] {
            assert!(error.to_string().contains("expected contiguous (n) in F32"), "{error}");
        }
    }
    communicator.begin_sum(&flat, wait).unwrap();
    communicator.end(wait).unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn cuda_a_tensor_of_one_part_is_that() {
    let (device, communicator) = alone();
    communicator.end(wait).unwrap();
    for count in [1usize, 1001, 1 << 20] {
        let numbers = Tensor::randn(0f32, 1.0, count, &device).unwrap();
        let parts = [
            numbers.to_dtype(DType::BF16).unwrap(),
            Tensor::zeros(0, DType::F32, &device).unwrap(),
            numbers.to_dtype(DType::U8).unwrap(),
            numbers,
        ];
        let wholes = communicator.begin_gather(&parts, wait).unwrap();
        communicator.end(wait).unwrap();
        for (part, whole) in parts.iter().zip(wholes) {
            assert_eq!((whole.dims(), whole.dtype()), (part.dims(), part.dtype()));
            let numbers = |x: &Tensor| x.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(numbers(&whole), numbers(part));
        }
    }
    let matrix = Tensor::zeros((2, 2), DType::F32, &device).unwrap();
    let error = communicator.begin_gather(&[matrix], wait).unwrap_err().to_string();
    assert!(error.contains("expected contiguous (n)"), "{error}");
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn cuda_a_part_given_to_nobody_stays() {
    let (device, communicator) = alone();
    for count in [0usize, 1, 1000] {
        let numbers = Tensor::arange(0f32, count as f32, &device).unwrap();
        communicator.begin_spread(std::slice::from_ref(&numbers), wait).unwrap();
        communicator.end(wait).unwrap();
        let expected: Vec<f32> = (0..count).map(|index| index as f32).collect();
        assert_eq!(numbers.to_vec1::<f32>().unwrap(), expected);
    }
    let error = communicator.begin_spread(&[], wait).unwrap_err().to_string();
    assert!(error.contains("expected one for each of 1 processes"), "{error}");
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn cuda_who_gives_up_waiting_for_others_ends() {
    let device = crate::testing::cuda();
    let id = unique_id().unwrap();
    let begun = Instant::now();
    let error = Communicator::join(&device, id, 0, 2, || match begun.elapsed().as_millis() {
        0..200 => Ok(()),
        _ => Err(Error::Msg("nobody came".into())),
    })
    .unwrap_err();
    assert!(error.to_string().contains("nobody came"), "{error}");
    // The device goes on.
    let sum = Tensor::ones(8, DType::F32, &device).unwrap().sum_all().unwrap();
    assert_eq!(sum.to_scalar::<f32>().unwrap(), 8.0);
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn cuda_a_group_that_has_ended_says_so() {
    let (device, communicator) = alone();
    let flat = Tensor::zeros(1 << 20, DType::F32, &device).unwrap();
    communicator.abort();
    let error = communicator.begin_sum(&flat, wait).unwrap_err().to_string();
    assert!(error.contains("has ended"), "{error}");
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn cuda_a_sum_among_the_work_is_recorded() {
    let (device, communicator) = alone();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let weight = Tensor::ones((8, 4), dtype, &device).unwrap();
        let work = |inputs: &Tensor| -> Result<Tensor> {
            let x = crate::embedding::forward(&weight, &inputs.unsqueeze(0)?)?;
            let x = crate::arithmetic::scale(&x, 3.0)?;
            communicator.sum(&x, wait)?;
            crate::arithmetic::scale(&x, 2.0)
        };
        let mut recording = crate::recording::Recording::new(&device, &[1, 2], work).unwrap();
        recording.run(&[3, 4]).unwrap();
        let sum = recording.output().to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        assert_eq!(sum.to_vec1::<f32>().unwrap(), [6.0; 8]);
    }
    let flat = Tensor::zeros((4, 4), DType::F32, &device).unwrap();
    for wrong in [
        flat.to_dtype(DType::U8).unwrap(),
        flat.narrow(1, 0, 2).unwrap(),
        flat.to_device(&Device::Cpu).unwrap(),
    ] {
        let error = communicator.sum(&wrong, wait).unwrap_err().to_string();
        assert!(error.contains("expected contiguous in F32, BF16 or F16"), "{error}");
    }
    // It ends while a recording has a sum of it.
    let table = Tensor::ones((8, 4), DType::F32, &device).unwrap();
    let kept = crate::recording::Recording::new(&device, &[1], |inputs| {
        let x = crate::embedding::forward(&table, &inputs.unsqueeze(0)?)?;
        communicator.sum(&x, wait)?;
        Ok::<_, Error>(x)
    });
    communicator.abort();
    assert!(communicator.sum(&flat, wait).unwrap_err().to_string().contains("has ended"));
    assert!(kept.is_ok());
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL"]
fn cuda_a_connection_that_fails_is_told_from_a_wrong_call() {
    let (_, communicator) = alone();
    const INVALID_USAGE: c_int = 5;
    assert!(communicator.check("a call", INVALID_USAGE).is_err() && !communicator.take_cut());
    for code in OF_CONNECTIONS {
        let (_, communicator) = alone();
        assert!(communicator.check("a sum", code).is_err() && communicator.take_cut(), "{code}");
        assert!(!communicator.take_cut(), "{code}");
    }
}
