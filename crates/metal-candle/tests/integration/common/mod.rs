//! What several files of tests share.

pub mod isolated;

use candle_core::Device;
use metal_candle::devices;
use std::sync::OnceLock;

/// Names the device of the tests that don't name one themselves: `cpu`, as without it, or `cuda`.
const VARIABLE: &str = "METAL_CANDLE_TEST_DEVICE";

/// The device of the tests that don't name one themselves.
pub fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let open = || match std::env::var(VARIABLE).as_deref() {
        Err(_) | Ok("cpu") => Device::Cpu,
        Ok("cuda") => devices::cuda(0).unwrap(),
        Ok(other) => panic!("{VARIABLE}: is {other}, expected cpu or cuda"),
    };
    DEVICE.get_or_init(open).clone()
}

/// Who asks for the tests of GPUs means these, too.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_is_the_device_of_the_models_and_the_training() {
    assert!(device().is_cuda(), "{VARIABLE}=cuda runs the models and the training on the GPU");
}
