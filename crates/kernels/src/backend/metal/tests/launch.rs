//! A launch by the emulator, for the tests of this crate and of those that use it.

use super::{Constant, Launch};
use metal_emulator::Library;

/// What the kernel writes into each buffer that it may write to.
pub(super) fn run(library: &Library, launch: &Launch) -> Vec<Vec<u8>> {
    let mut kernel = library.kernel(launch.kernel).unwrap();
    for (index, constant) in launch.constants {
        kernel = match *constant {
            Constant::Bool(value) => kernel.constant(*index as u32, value),
            Constant::U16(value) => kernel.constant(*index as u32, value),
        };
    }
    let mut run = kernel.dispatch().seed(launch.seed);
    for buffer in &launch.buffers {
        run = run.buffer_at::<u8>(buffer.index, &buffer.bytes, buffer.offset);
    }
    let found = run.threadgroups(launch.groups, [launch.threads, 1, 1]).unwrap();
    let written = launch.buffers.iter().filter(|buffer| buffer.written);
    written.map(|buffer| found.read::<u8>(buffer.index).unwrap()).collect()
}
