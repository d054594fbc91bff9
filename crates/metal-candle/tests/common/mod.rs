//! What several files of tests share.

use candle_core::Device;
use metal_candle::devices;
use std::sync::OnceLock;

/// The GPU if this build and the machine have one.
pub fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let open = || match devices::cuda_count() {
        0 => Device::Cpu,
        _ => devices::cuda(0).unwrap(),
    };
    DEVICE.get_or_init(open).clone()
}
