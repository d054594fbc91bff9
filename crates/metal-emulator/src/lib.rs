//! Runs Metal compute kernels on the CPU, to test them on machines without Metal: from the unmodified
//! `.metal` file, with clang. `README.md` says what it can and can't tell.
//!
//! ```no_run
//! use metal_emulator::{Error, Source, for_every_mode};
//!
//! fn doubles(path: &str) -> Result<(), Error> {
//!     let x = [1.0_f32, 2.0, 3.0];
//!     for_every_mode(&Source::file(path), |library, seed| {
//!         let buffers = library
//!             .kernel("double_f32")?
//!             .dispatch()
//!             .buffer(0, &x)
//!             .output::<f32>(1, x.len())
//!             .value(2, x.len() as u32)
//!             .seed(seed)
//!             .threadgroups([1, 1, 1], [32, 1, 1])?;
//!         assert_eq!(buffers.read::<f32>(1)?, [2.0, 4.0, 6.0]);
//!         Ok(())
//!     })
//! }
//! ```

mod compiler;
mod dispatch;
mod element;
mod error;
mod library;
mod translate;

pub use dispatch::{Buffers, Dispatch, Kernel};
pub use element::{Constant, Element};
pub use error::{Error, Fault, Finding};
pub use library::{Library, Source};

use std::{fmt, thread};

/// What a run looks for, beside what every mode does: wrong arguments, barriers that not all threads
/// reach, and lanes that aren't there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// Nothing more. The fastest.
    Plain,
    /// Accesses outside of buffers, threadgroup memory and arrays, and what the language leaves
    /// undefined: misaligned accesses, overflows, divisions by zero.
    Asan,
    /// Accesses to the same device or threadgroup memory that no barrier orders, reads of threadgroup
    /// memory and of outputs before anything is written there, and accesses outside of both.
    Race,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Asan, Self::Race];
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Asan => "asan",
            Self::Race => "race",
        })
    }
}

/// Orders of threads that find most of what an order can find: up, down, and shuffled twice.
pub const SEEDS: [u64; 4] = [0, 1, 2, 3];

/// Compiles a file in every mode, and calls `check` for every mode and each of [`SEEDS`].
///
/// # Errors
/// The first one of the compiler or of `check`.
pub fn for_every_mode(
    source: &Source,
    mut check: impl FnMut(&Library, u64) -> Result<(), Error>,
) -> Result<(), Error> {
    let libraries = thread::scope(|scope| {
        let compiling = Mode::ALL.map(|mode| scope.spawn(move || source.compile(mode)));
        compiling.map(|thread| {
            thread.join().unwrap_or_else(|_| Err(Error::Usage("a compilation panicked".into())))
        })
    });
    for library in libraries {
        let library = library?;
        for seed in SEEDS {
            check(&library, seed)?;
        }
    }
    Ok(())
}
