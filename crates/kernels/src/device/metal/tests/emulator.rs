//! The emulator of this crate's tests.

use crate::device::metal::source::source;
use crate::device::metal::{Constant, Emulator, Launch};
use crate::devices::MetalMatmul;
use metal_emulator::{Library, Mode, Source};
use std::sync::{Arc, LazyLock, OnceLock};

impl Emulator {
    /// All kernels as a mode compiles them; `None`, said once, where that can't be done.
    pub(crate) fn open(mode: Mode) -> Option<Emulator> {
        // As other tests name it, so that it is compiled once for all.
        static SOURCE: LazyLock<Source> =
            LazyLock::new(|| Source::text("metal-candle-kernels.metal", source()));
        static EMULATORS: [OnceLock<Option<Emulator>>; 3] = [const { OnceLock::new() }; 3];
        let open = || {
            metal_emulator::available().then(|| {
                let library = SOURCE.compile(mode).unwrap();
                let run = Arc::new(move |launch: &Launch| run(&library, launch));
                Emulator { run, seed: 0, most_threads: 1024, matmul: MetalMatmul::Fused }
            })
        };
        EMULATORS[mode as usize].get_or_init(open).clone()
    }
}

fn run(library: &Library, launch: &Launch) -> Vec<Vec<u8>> {
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
