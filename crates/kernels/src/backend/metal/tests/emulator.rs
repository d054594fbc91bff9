//! The emulator of this crate's tests.

use crate::backend::metal::source::source;
use crate::backend::metal::{Constant, Emulator, Launch};
use crate::devices::MetalMatmul;
use metal_emulator::{Mode, Source};
use std::sync::{Arc, LazyLock, OnceLock};

#[path = "launch.rs"]
mod launch;

impl Emulator {
    /// All kernels as a mode compiles them.
    pub(crate) fn open(mode: Mode) -> Emulator {
        // As other tests name it, so that it is compiled once for all.
        static SOURCE: LazyLock<Source> =
            LazyLock::new(|| Source::text("metal-candle-kernels.metal", source()));
        static EMULATORS: [OnceLock<Emulator>; 3] = [const { OnceLock::new() }; 3];
        let open = || {
            let library = SOURCE.compile(mode).unwrap_or_else(|error| panic!("{error}"));
            let run = Arc::new(move |launch: &Launch| launch::run(&library, launch));
            Emulator { run, seed: 0, most_threads: 1024, matmul: MetalMatmul::Fused }
        };
        EMULATORS[mode as usize].get_or_init(open).clone()
    }
}
