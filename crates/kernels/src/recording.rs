//! Work on a GPU that is recorded once and then runs as often as wanted, without the host going through its
//! operations again: on CUDA, a graph. It pays where kernels are so short that the host can't launch them
//! as fast as they run, as in decoding with a small model.

#[cfg(feature = "cuda")]
use crate::backend::cuda::{Recorded, can_record};
use candle_core::{Device, Result, Tensor};
#[cfg(not(feature = "cuda"))]
use std::convert::Infallible as Recorded;

const OPERATION: &str = "recording";

/// Tells that the next one of the parts of some work begins, such as a layer of a model, and that it, and all that follows,
/// reads nothing that operations have made in the part before the last. A [`Recording`] of the work then has memory for two
/// of the parts. Elsewhere it means nothing.
pub fn next_part() {
    #[cfg(feature = "cuda")]
    crate::backend::cuda::next_part();
}

/// Recorded work, and the memory that it reads and writes.
pub struct Recording {
    recorded: Recorded,
    output: Tensor,
}

impl Recording {
    /// Whether work on this device can be recorded: on a CUDA device that
    /// [`devices::cuda`](crate::devices::cuda) opened.
    pub fn is_supported(device: &Device) -> bool {
        #[cfg(feature = "cuda")]
        return can_record(device);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = device;
            false
        }
    }

    /// Runs `work` once on `inputs` `(n)` u32, so that [`Recording::output`] is its result already, and
    /// records it.
    ///
    /// `work` is called twice and has to do the same both times: operations of this crate on tensors, and
    /// views of tensors, of which nothing depends on the values of `inputs` but through the tensor that it
    /// is given. Nothing may be read back in it, and what it changes beside tensors on the device (the length
    /// of a cache, say) isn't a part of the recording. All tensors that its operations are given stay alive as
    /// long as that. Other threads leave the device alone meanwhile.
    ///
    /// # Errors
    /// Those of `work`, and when the device can't record, the work isn't the same the second time, or an
    /// operation is given what Candle's own operations have made in the work, or is one that the host has a
    /// part in, as attention over pools with heads above 256.
    pub fn new<E: From<candle_core::Error>>(
        device: &Device,
        inputs: &[u32],
        work: impl FnMut(&Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Recording, E> {
        Self::over(None, device, inputs, work)
    }

    /// Like [`Recording::new`], in the memory of another recording as far as that suffices: of the same work on
    /// more rows, say. The output of each is overwritten when the other runs.
    ///
    /// # Errors
    /// Like [`Recording::new`].
    pub fn in_memory_of<E: From<candle_core::Error>>(
        other: &Recording,
        device: &Device,
        inputs: &[u32],
        work: impl FnMut(&Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Recording, E> {
        Self::over(Some(other), device, inputs, work)
    }

    fn over<E: From<candle_core::Error>>(
        other: Option<&Recording>,
        device: &Device,
        inputs: &[u32],
        work: impl FnMut(&Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Recording, E> {
        #[cfg(feature = "cuda")]
        if can_record(device) {
            let memory = other.map(|other| &other.recorded);
            let (recorded, output) = Recorded::new(device, inputs, memory, work)?;
            return Ok(Recording { recorded, output });
        }
        let _ = (other, inputs, work);
        Err(unsupported(device).into())
    }

    /// What the work gave when it ran last; the next run overwrites it.
    pub fn output(&self) -> &Tensor {
        &self.output
    }

    /// Runs the work on other inputs, as many as before.
    ///
    /// # Errors
    /// When there are more or fewer, or the device fails.
    pub fn run(&mut self, inputs: &[u32]) -> Result<()> {
        self.run_with(inputs, None)
    }

    /// Like [`Recording::run`], where the first inputs are `first (n)` u32, which the device finds once it has made
    /// them: the host needs to know nothing of them.
    ///
    /// # Errors
    /// Like [`Recording::run`], and when `first` is no such tensor of the device.
    pub fn run_after(&mut self, first: &Tensor, inputs: &[u32]) -> Result<()> {
        self.run_with(inputs, Some(first))
    }

    fn run_with(&mut self, inputs: &[u32], first: Option<&Tensor>) -> Result<()> {
        #[cfg(feature = "cuda")]
        return self.recorded.run(inputs, first);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (inputs, first);
            match self.recorded {}
        }
    }
}

fn unsupported(device: &Device) -> candle_core::Error {
    let device = device.location();
    candle_core::Error::Msg(format!(
        "metal-candle-kernels: {OPERATION}: work on {device:?} cannot be recorded, expected a CUDA device that `devices::cuda` opened"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::*;

    #[test]
    fn a_cpu_cannot_record() {
        assert!(!Recording::is_supported(&Device::Cpu));
        let recorded = Recording::new(&Device::Cpu, &[1], |inputs| Ok(inputs.clone()));
        let wrong = message::<Recording>(recorded);
        assert!(wrong.contains("cannot be recorded, expected a CUDA device"), "{wrong}");
    }

    #[cfg(feature = "cuda")]
    mod cuda {
        use super::*;
        use crate::host::HostBuffers;
        use crate::{arithmetic, embedding, matmul, rms_norm};
        use candle_core::{D, DType};

        /// A few operations on rows of a table.
        struct Work {
            table: Tensor,
            weight: Tensor,
            norm: Tensor,
        }

        impl Work {
            fn new(device: &Device) -> Work {
                let given = |shape: &[usize], seed| {
                    random(shape, seed).to_dtype(DType::F32).unwrap().to_device(device).unwrap()
                };
                Work {
                    table: given(&[50, 24], 1),
                    weight: given(&[40, 24], 2),
                    norm: given(&[24], 3),
                }
            }

            fn run(&self, ids: &Tensor) -> Result<Tensor> {
                let x = embedding::forward(&self.table, &ids.unsqueeze(0)?)?;
                let normed = rms_norm::forward(&x, &self.norm, 1e-5, 0.0)?;
                let y = matmul::linear(&normed, &self.weight, None)?;
                arithmetic::softcap(&y, 3.0)?.narrow(D::Minus1, 3, 30)
            }
        }

        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn cuda_repeats_what_was_recorded_on_other_inputs() {
            let device = cuda();
            // The last by cuBLAS.
            for rows in [1, 8, 40] {
                let ids =
                    |seed: u32| -> Vec<u32> { (0..rows).map(|i| (i * 7 + seed) % 50).collect() };
                let work = Work::new(&device);
                let expected = |seed| {
                    let ids = Tensor::new(ids(seed), &device).unwrap();
                    here(&Work::new(&device).run(&ids).unwrap())
                };
                let mut recording = Recording::new(&device, &ids(5), |ids| work.run(ids)).unwrap();
                assert_identical(&here(recording.output()), &expected(5));
                // The recording holds what it reads, and others may take what is free.
                drop(work);
                let others: Vec<_> = (0..20).map(|_| Work::new(&device)).collect();
                for seed in [0, 17, 5, 49] {
                    recording.run(&ids(seed)).unwrap();
                    assert_identical(&here(recording.output()), &expected(seed));
                }
                drop(others);
                let wrong = message(recording.run(&[]));
                assert!(wrong.contains(&format!("0 inputs, expected {rows}")), "{wrong}");
            }
        }

        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn cuda_reads_first_inputs_that_the_device_has_made() {
            let device = cuda();
            let work = Work::new(&device);
            let mut recording = Recording::new(&device, &[7; 8], |ids| work.run(ids)).unwrap();
            let table: Vec<u32> = (0..5 * 6).map(|i| i * 11 % 50).collect();
            let made = Tensor::from_vec(table.clone(), (5, 6), &device).unwrap();
            for column in [0, 4] {
                let first = made.narrow(1, column, 1).unwrap().squeeze(1).unwrap();
                let mut ids: Vec<u32> = table.iter().skip(column).step_by(6).copied().collect();
                ids.extend([1, 2, 3]);
                let expected = work.run(&Tensor::new(&ids[..], &device).unwrap()).unwrap();
                recording.run_after(&first, &[0, 0, 0, 0, 0, 1, 2, 3]).unwrap();
                assert_identical(&here(recording.output()), &here(&expected));
                // And as before without.
                recording.run(&ids).unwrap();
                assert_identical(&here(recording.output()), &here(&expected));
            }
            let (nine, elsewhere) = ([1u32; 9], &Device::Cpu);
            for wrong in [
                &made,
                &Tensor::new(&nine, &device).unwrap(),
                &Tensor::new(&nine[..5], elsewhere).unwrap(),
            ] {
                let wrong = message(recording.run_after(wrong, &[0; 8]));
                assert!(wrong.contains("expected up to 8 U32 in a row"), "{wrong}");
            }
        }

        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn cuda_devices_are_opened_beside_recordings() {
            let device = cuda();
            let work = Work::new(&device);
            std::thread::scope(|scope| {
                let opening = scope.spawn(|| {
                    for _ in 0..20 {
                        crate::devices::cuda(0).unwrap();
                    }
                });
                // Long enough for a device to be opened in it.
                let run = |ids: &Tensor| {
                    for _ in 0..500 {
                        work.run(ids)?;
                    }
                    work.run(ids)
                };
                while !opening.is_finished() {
                    Recording::new(&device, &[1, 2], run).unwrap();
                }
            });
            let within = Recording::new(&device, &[1], |ids| {
                crate::devices::cuda(0)?;
                work.run(ids)
            });
            let wrong = message::<Recording>(within);
            assert!(wrong.contains("opening a device cannot be recorded"), "{wrong}");
        }

        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn cuda_recordings_share_memory() {
            let device = cuda();
            let work = Work::new(&device);
            let ids = |rows: u32, seed: u32| -> Vec<u32> {
                (0..rows).map(|i| (i * 7 + seed) % 50).collect()
            };
            let expected = |rows, seed| {
                here(&work.run(&Tensor::new(ids(rows, seed), &device).unwrap()).unwrap())
            };
            let mut large = Recording::new(&device, &ids(40, 1), |ids| work.run(ids)).unwrap();
            let mut others: Vec<_> = [33, 3, 50]
                .map(|rows| {
                    let inputs = ids(rows, 2);
                    let recording =
                        Recording::in_memory_of(&large, &device, &inputs, |ids| work.run(ids));
                    let recording = recording.unwrap();
                    assert_identical(&here(recording.output()), &expected(rows, 2));
                    (rows, recording)
                })
                .into();
            for seed in [3, 17, 4] {
                large.run(&ids(40, seed)).unwrap();
                assert_identical(&here(large.output()), &expected(40, seed));
                for (rows, other) in &mut others {
                    other.run(&ids(*rows, seed + 1)).unwrap();
                    assert_identical(&here(other.output()), &expected(*rows, seed + 1));
                }
            }
        }

        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn cuda_parts_have_the_memory_of_two() {
            let device = cuda();
            let given = |shape: &[usize], seed| {
                random(shape, seed).to_dtype(DType::F32).unwrap().to_device(&device).unwrap()
            };
            let (table, norm) = (given(&[50, 24], 1), given(&[24], 2));
            let weights: Vec<_> = (3..13).map(|seed| given(&[24, 24], seed)).collect();
            // As layers have it: a stream, and what a part adds to it in the next one.
            let work = |ids: &Tensor, tells: bool, more: bool| -> Result<Tensor> {
                let mut x = embedding::forward(&table, &ids.unsqueeze(0)?)?;
                let mut branch = None;
                for weight in &weights {
                    if tells {
                        next_part();
                    }
                    if let Some(branch) = branch {
                        x = arithmetic::add(&x, &branch)?;
                    }
                    let normed = rms_norm::forward(&x, &norm, 1e-5, 0.0)?;
                    let normed = match more {
                        true => arithmetic::scale(&normed, 2.0)?,
                        false => normed,
                    };
                    branch = Some(arithmetic::scale(&matmul::linear(&normed, weight, None)?, 0.5)?);
                }
                arithmetic::scale(&x, 3.0)
            };
            let ids = [3u32, 17, 4, 44, 0];
            let record =
                |tells| Recording::new(&device, &ids, |ids| work(ids, tells, false)).unwrap();
            let (mut told, untold) = (record(true), record(false));
            let bytes = |recording: &Recording| -> usize {
                let memory = recording.recorded.memory().unwrap();
                memory.iter().map(|it| it.elem_count() * it.dtype().size_in_bytes()).sum()
            };
            assert!(3 * bytes(&told) < bytes(&untold), "{} {}", bytes(&told), bytes(&untold));
            for ids in [[9u32, 1, 1, 20, 5], ids] {
                told.run(&ids).unwrap();
                let expected = work(&Tensor::new(&ids, &device).unwrap(), false, false).unwrap();
                assert_identical(&here(told.output()), &here(&expected));
            }
            // Others in its memory, of fewer rows and of more operations, and it as before.
            let longer = |ids: &Tensor| work(ids, true, true);
            let in_it = |ids: &[u32]| Recording::in_memory_of(&told, &device, ids, longer).unwrap();
            for (mut other, ids) in [(in_it(&ids), &ids[..]), (in_it(&ids[..2]), &ids[..2])] {
                other.run(ids).unwrap();
                let expected = work(&Tensor::new(ids, &device).unwrap(), false, true).unwrap();
                assert_identical(&here(other.output()), &here(&expected));
            }
            told.run(&ids).unwrap();
            let expected = work(&Tensor::new(&ids, &device).unwrap(), false, false).unwrap();
            assert_identical(&here(told.output()), &here(&expected));
        }

        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn cuda_refuses_work_that_it_cannot_repeat() {
            let device = cuda();
            let work = Work::new(&device);
            let of_candle = Recording::new(&device, &[1], |ids| {
                arithmetic::scale(&work.run(ids)?.affine(0.5, 0.0)?, 2.0)
            });
            assert!(of_candle.is_err());
            // The work runs once before it is captured.
            let mut buffers =
                [(); 2].map(|()| HostBuffers::new(&[(vec![1], DType::U32)], &device)).into_iter();
            let read_back = Recording::new(&device, &[1], |ids| {
                if let Some(buffers) = buffers.next() {
                    buffers?.copy(std::slice::from_ref(ids))?.wait()?;
                }
                work.run(ids)
            });
            let wrong = message::<Recording>(read_back);
            assert!(wrong.contains("a copy to the host cannot be recorded"), "{wrong}");
            let mut calls = 0;
            let other = Recording::new(&device, &[1, 2], |ids| {
                calls += 1;
                work.run(&ids.narrow(0, 0, calls)?)
            });
            let wrong = message::<Recording>(other);
            assert!(wrong.contains("expected the same"), "{wrong}");
            // The device works as before.
            let again = Recording::new(&device, &[1], |ids| work.run(ids)).unwrap();
            let expected = work.run(&Tensor::new(&[1u32], &device).unwrap()).unwrap();
            assert_identical(&here(again.output()), &here(&expected));
        }
    }
}
